"""examples/*.py run, and show what they say they show."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def two_layers(text):
    assert "All five agree." in text


def transformer(text):
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)$", text, re.MULTILINE)]
    assert len(losses) == 20
    assert losses[0] > 4 and losses[-1] < 1
    assert re.search(r"each step: [\d,]+ FLOPs, [\d,]+ bytes at most, bytes sent: [\d,]+ over ", text)


CHECKS = {"two_layers.py": two_layers, "transformer.py": transformer}


def test_all_examples_are_checked():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_examples_run(name, capsys):
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    CHECKS[name](capsys.readouterr().out)
