"""examples/notebooks run in a real kernel, and their cells display HTML."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"


def layouts(html, text):
    assert "f32[batch=10, d_in=6]" in html[0]
    assert "model 1" in html[2] and "device 7" in html[2]
    assert "split over" in html[3]
    assert all(f"batch {rows}" in html[4] for rows in ("0:3", "3:6", "6:9", "9:10"))
    assert "batch 0:2" in html[5] and "padding" in html[5]
    assert "first call" in html[7]
    assert "a tensor has no attribute T" in text and re.search(r"  at In\[\d+\]:2$", text, re.MULTILINE)


def plan_and_search(html, text):
    plan, both, result, best = html
    assert "<td>gradient[d_model,d_ff]</td>" in plan and "<td>all-reduce</td>" in plan and "In[" in plan
    assert "<td>model</td>" in both
    assert result.count("<tr>") > 2 and "legal candidates" in result
    assert "peak memory" in best
    assert len(re.findall(r"ms, bound by", text)) == 2


def training(html, text):
    rules, points, weight, plan, predicted = html
    assert "stored parameters" in rules
    assert "batch 192:256" in points and "<small>param</small>" in weight
    assert "<td>all-gather</td>" in plan or "<td>reduce-scatter</td>" in plan
    first, last = map(float, re.search(r"loss ([\d.]+) → ([\d.]+)", text).groups())
    assert first > 1.9 and last < 0.5
    assert int(re.search(r"(\d+)% of new points", text)[1]) > 85
    assert "i32[batch=256/data·4]" in predicted


CHECKS = {"layouts.ipynb": layouts, "plan_and_search.ipynb": plan_and_search, "training.ipynb": training}


def read(name):
    return nbformat.read(NOTEBOOKS / name, as_version=4)


def test_all_notebooks_are_checked():
    assert {path.name for path in NOTEBOOKS.glob("*.ipynb")} == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_notebooks_are_stored_without_outputs(name):
    notebook = read(name)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)


@pytest.mark.parametrize("name", CHECKS)
def test_notebooks_display_html(name):
    done = NotebookClient(read(name), timeout=240, kernel_name="python3").execute()
    outputs = [output for cell in done.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    results = [output.data for output in outputs if output.output_type == "execute_result"]
    assert all(data["text/plain"] for data in results)  # for consoles, and for notebooks without HTML
    html = [data["text/html"] for data in results]
    assert all(one.startswith('<div class="weft">') for one in html)
    CHECKS[name](html, "".join(output.text for output in outputs if output.output_type == "stream"))
