"""Every public name is on a page of docs/reference, and every line `::: name` there is a public name."""

import inspect
import re
import types
from functools import cache
from pathlib import Path

import pytest

import weft as wf
from weft import checkpoint, data, distributed, generate, models, nn, optim, random, search, serve, train
from weft.models import huggingface
from weft.ops import elementwise

pytestmark = pytest.mark.nodevice

PAGES = sorted((Path(__file__).parents[2] / "docs" / "reference").glob("*.md"))
TABLES = {*elementwise.UNARY, *elementwise.BINARY, *elementwise.ALIASES}
MODULES = (wf, nn, optim, checkpoint, distributed, train, generate, data, models, huggingface, serve, random)


def public(module):
    """The names of a module: those that it defines, and those that a package exports from its files."""
    for name in dir(module):
        value = getattr(module, name)
        home = getattr(value, "__module__", "weft")  # a table of names has none
        if name.startswith("_") or isinstance(value, types.ModuleType) or not home.startswith("weft"):
            continue
        if module is not random or home == random.__name__:
            yield name, value


@cache
def lines():
    """The names after `:::` on all pages."""
    return [name for page in PAGES for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]


def found(name):
    """The object that `file.name` refers to."""
    module, _, last = name.rpartition(".")
    return getattr(__import__(module, fromlist=[last]), last)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_every_name_is_on_a_page(module):
    there = {id(found(name)) for name in lines()}
    missing = [n for n, x in public(module) if id(x) not in there and n not in TABLES]
    assert not missing, f"{module.__name__}: {missing} are on no page of docs/reference"


def test_names_of_the_search_are_there():
    package = inspect.getmodule(search).__package__
    assert {"Candidate", "RankedLayout", "SearchResult"} <= {
        n.split(".")[-1] for n in lines() if n.startswith(package)
    }


def test_every_name_is_there_once():
    assert len(lines()) == len(set(lines()))


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_every_name_has_a_description(module):
    silent = [n for n, x in public(module) if callable(x) and not (inspect.getdoc(x) or "").strip()]
    assert not silent, f"{module.__name__}: {silent} have no docstring"


def test_the_tables_name_every_elementwise_function():
    page = (PAGES[0].parent / "elementwise.md").read_text()
    tables = re.findall(r"^\|[^|]*\|(.*)\|$", page, re.M)
    named = [name for row in tables for name in re.findall(r"`(\w+)`", row)]
    aliases = re.search(r"^Other names for the same: (.*)$", page, re.M)[1]
    assert sorted(named) == sorted(TABLES - {*elementwise.ALIASES})
    assert dict(re.findall(r"`(\w+)` is `(\w+)`", aliases)) == elementwise.ALIASES
