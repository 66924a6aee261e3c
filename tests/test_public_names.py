"""The public names: one lazy table, and a stub with the same names for type checkers."""

import importlib
import inspect
import types
from pathlib import Path

import pytest

import weft
from weft.ops import elementwise

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


def stub():
    """The text of the stub. Functions that a loop defines are declared, as type checkers can't import them."""
    tables = [rows for table in (elementwise.UNARY, elementwise.BINARY) for rows in table.values()]
    defined = {*elementwise.ALIASES}.union(*tables)
    yield '"""The public names, for type checkers and editors; at run time they come from `NAMES` in `__init__.py`."""'
    yield "\nfrom typing import Any\n"
    yield from (f"from . import {name} as {name}" for name in sorted(weft.MODULES.split()))
    imported = sorted((module, name) for name, module in LISTED.items() if name not in defined)
    yield from (f"from .{module} import {name} as {name}" for module, name in imported)
    yield "\nNAMES: dict[str, str]\nMODULES: str\nELSEWHERE: dict[str, str]\n__version__: str\n"
    for name in sorted(defined):
        parameters = inspect.signature(getattr(weft, name)).parameters.values()
        given = ", ".join(f"{str(p).partition(':')[0]}: Any" for p in parameters)
        yield f"def {name}({given}) -> Tensor: ..."


def test_the_stub_has_the_same_names(golden_file):
    golden_file(PACKAGE / "__init__.pyi", "\n".join(stub()))


def test_names_of_other_libraries_are_explained():
    with pytest.raises(AttributeError, match=r"here it is einsum"):
        weft.matmul
    with pytest.raises(AttributeError, match=r"einsum"):
        weft.einsun
