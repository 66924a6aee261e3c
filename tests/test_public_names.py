"""The public names: one lazy table, and a stub with the same names for type checkers."""

import ast
import importlib
import types
from pathlib import Path

import pytest

import weft

pytestmark = pytest.mark.nodevice

PACKAGE = Path(weft.__file__).parent
LISTED = {name: module for module, names in weft.NAMES.items() for name in names.split()}


def test_every_name_is_listed_once():
    names = [name for names in weft.NAMES.values() for name in names.split()]
    assert len(names) == len(set(names))
    assert not {*names} & {*weft.MODULES.split(), *weft.ELSEWHERE}


@pytest.mark.parametrize("module", weft.NAMES)
def test_a_module_has_the_names_that_the_table_lists(module):
    loaded = importlib.import_module(f"weft.{module}")
    for name in weft.NAMES[module].split():
        assert getattr(weft, name) is getattr(loaded, name)


def test_no_name_is_hidden_by_a_module():
    """`import weft.dims` would replace the function `weft.dims` by the module."""
    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()} - {"random"}
    assert not modules & {*LISTED}
    assert type(weft) is types.ModuleType


def test_the_stub_has_the_same_names():
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    imported = {
        alias.asname: ("." * node.level + (node.module or "")).lstrip(".")
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    defined = {node.name: "ops.elementwise" for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert imported | defined == LISTED | dict.fromkeys(weft.MODULES.split(), "")


def test_names_of_other_libraries_are_explained():
    with pytest.raises(AttributeError, match=r"here it is einsum"):
        weft.matmul
    with pytest.raises(AttributeError, match=r"einsum"):
        weft.einsun
