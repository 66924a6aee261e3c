"""Every Python block of README.md and docs/*.md runs, top to bottom, one namespace per page.

A block with a title, ```python title="train.py", is also written to that file. The lines of bash blocks that
call `weft` run there; a comment gives the expected exit code if it is not 0. A text block right after
plans or searches has their output or some lines of it; so does a later block whose first line they printed.
"""

import contextlib
import io
import re
import shlex
import sys
import types
import warnings
from pathlib import Path

import pytest

from weft.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<info>.*?) *$")
PRINTED = ("weft plan ", "weft search ")  # the same on every machine
NOT_RUN = {"text", "bash", "toml", "json", "diff"}  # the only other kinds of block, so that none slips by


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


def commands(lines):
    """The lines of a bash block; those that end in a backslash go on in the next."""
    return re.sub(r" *\\\n *", " ", "\n".join(lines)).splitlines()


def run_command(line, folder):
    """Call `weft` in this process, and return its output if it is checked; `> file` redirects it."""
    command, _, comment = line.partition("  #")
    command, _, target = command.partition(" > ")
    expected = int(comment.split("exit ")[1][0]) if "exit " in comment else 0
    out, log = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(log):
        code = main(shlex.split(command)[1:])
    assert code == expected, f"{line}\n{log.getvalue()}"
    silent = any(word in line for word in ("--html", "--check", "weft train"))
    assert bool(out.getvalue()) == (code == 0) or silent, line
    if target:
        (folder / target.strip()).write_text(out.getvalue())
    return out.getvalue() if command.startswith(PRINTED) else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))  # no profiles of this machine's user
    monkeypatch.setattr(sys, "path", list(sys.path))  # to which it adds
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # which the command line replaces
    module = types.ModuleType("page_under_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look themselves up
    printed, known = "", {""}
    for line, info, body in fenced_blocks(page.read_text(encoding="utf-8")):
        if info == "text" and (printed or body[0].strip() in known) and not body[0].startswith("weft "):
            missing = [shown for shown in body if shown.strip() not in known]
            assert not missing, f"{page.name}:{line}: nothing prints these lines any more: {missing}"
        called = [command for command in commands(body) if info == "bash" and command.startswith("weft ")]
        printed = "".join([run_command(command, tmp_path) for command in called])
        known |= {shown.strip() for shown in printed.splitlines()}
        if info in NOT_RUN:
            continue
        title = re.fullmatch(r'python(?: title="([\w.]+)")?', info)
        assert title, f"{page.name}:{line}: a block is ```python or one of {NOT_RUN}"
        if title[1]:
            (tmp_path / title[1]).write_text("\n".join(body) + "\n")
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


def test_long_commands_may_be_broken():
    assert commands(["weft plan a \\", "  --json", "weft models"]) == ["weft plan a --json", "weft models"]
