"""The house: imports go one way, and every file is one idea."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "weft"

# Each room may use itself and the rooms before it.
ROOMS = [
    {"errors", "files", "dims", "mesh", "layout"},
    {
        "context",
        "collectives",
        "counter",
        "keys",
        "padding",
        "relayout",
        "tensor",
        "placing",
        "forms",
        "blocks",
    },
    {"later", "signature", "staging", "spmd", "eager"},
    {"ops", "random", "autodiff", "escape", "optimizer"},
    {"plan"},
    {"search"},
    {"language"},
    {"nn"},
    {"models"},
    {"data"},
    {"train", "decode"},
    {"serve"},
    {"cli"},
]
# Looked up when they are called, not at import: an operator's op, a program's list of collectives.
LATE = {("tensor", "ops"), ("spmd", "plan")}


def room(name):
    return next(n for n, names in enumerate(ROOMS) if name in names)


def imported(path):
    """The top-level modules of the package that a file imports."""
    here = path.relative_to(PACKAGE).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = list(here[: len(here) - node.level])
            full = base + (node.module.split(".") if node.module else [])
            if full:
                yield full[0]
            else:
                yield from (alias.name for alias in node.names)


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    mine = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for other in imported(path):
        if (mine, other) not in LATE:
            assert room(other) <= room(mine), f"{mine} imports {other}"


def test_only_collectives_calls_jax_lax_collectives():
    names = {
        "psum",
        "pmax",
        "pmin",
        "all_gather",
        "psum_scatter",
        "all_to_all",
        "ppermute",
        "pcast",
    }
    for path in FILES:
        if path.stem in ("collectives", "counter"):
            continue
        used = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("lax")
        }
        assert not used & names, f"{path.name} calls {used & names}"
