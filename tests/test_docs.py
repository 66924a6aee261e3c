"""Every Python block of README.md and docs/*.md runs, top to bottom, one namespace per page."""

import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<info>.*?) *$")
NOT_RUN = {"text", "bash", "toml", "json"}  # the only other kinds of block, so that none slips by


def fenced_blocks(text):
    """Yield (line number of the fence, info string, lines with the fence's indent removed)."""
    opening = None
    for number, line in enumerate(text.splitlines(), start=1):
        match = FENCE.match(line)
        if opening is None:
            if match:
                opening, start, body = match, number, []
        elif match and not match["info"] and match["fence"].startswith(opening["fence"]):
            yield start, opening["info"], body
            opening = None
        else:
            body.append(line.removeprefix(opening["indent"]))
    assert opening is None, f"the block opened in line {start} is never closed"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page, monkeypatch):
    module = types.ModuleType("page_under_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look themselves up
    for line, info, body in fenced_blocks(page.read_text(encoding="utf-8")):
        if info in NOT_RUN:
            continue
        assert info == "python", f"{page.name}:{line}: a block is ```python or one of {NOT_RUN}"
        # Leading empty lines make tracebacks, and Weft's own errors, name the page's line.
        source = "\n" * line + "\n".join(body) + "\n"
        exec(compile(source, str(page), "exec"), module.__dict__)


def test_pages_exist():
    assert (ROOT / "docs" / "index.md") in PAGES


def test_blocks_are_found():
    text = "a\n```python\nx = 1\n```\n- b\n\n    ```text\n    y\n      z\n    ```\n````text\n```\n````\n"
    assert list(fenced_blocks(text)) == [
        (2, "python", ["x = 1"]),
        (7, "text", ["y", "  z"]),
        (11, "text", ["```"]),
    ]
