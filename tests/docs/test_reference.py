"""Every public name is on a page of docs/reference, and every line `::: name` there is a public name."""

import inspect
import re
import types
from functools import cache
from pathlib import Path

import pytest
from every_op import EVERY_OP

import weft as wf
from weft import (
    checkpoint,
    data,
    distributed,
    fft,
    generate,
    linalg,
    models,
    nn,
    optim,
    random,
    search,
    serve,
    train,
)
from weft.models import huggingface
from weft.ops import elementwise

pytestmark = pytest.mark.nodevice

PAGES = sorted((Path(__file__).parents[2] / "docs" / "reference").glob("*.md"))
TABLES = {
    name for table in (elementwise.UNARY, elementwise.BINARY) for rows in table.values() for name in rows
} | {*elementwise.ALIASES}
MODULES = (
    wf,
    nn,
    optim,
    checkpoint,
    distributed,
    train,
    generate,
    data,
    models,
    huggingface,
    serve,
    random,
    linalg,
    fft,
)


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


def with_every_op(page):
    """The page with a line for each op whose family it lists: those that are missing follow the others."""
    for module in {info.module for info in EVERY_OP.values()}:
        listed = re.findall(rf"^::: {re.escape(module)}\.(\w+)$", page, re.M)
        family = {name for name, info in EVERY_OP.items() if info.module == module} - TABLES
        for name in sorted(family - {*listed}) if listed else ():
            last = f"::: {module}.{listed[-1]}\n"
            page = page.replace(last, f"{last}\n::: {module}.{name}\n")
    return page


def with_every_row(page):
    """The page with the tables of element-wise functions."""
    for heading, table in {"Of one tensor": elementwise.UNARY, "Of two": elementwise.BINARY}.items():
        rows = [f"| {kind} | {' '.join(f'`{name}`' for name in rows)} |" for kind, rows in table.items()]
        before, _, rest = page.partition(f"## {heading}\n")
        start, end = rest.index("|---|---|\n"), re.search(r"\|\n\n", rest).end()
        rest = rest[:start] + "\n".join(["|---|---|", *rows, "", ""]) + rest[end:]
        page = f"{before}## {heading}\n{rest}"
    aliases = ", ".join(f"`{alias}` is `{name}`" for alias, name in elementwise.ALIASES.items())
    return re.sub(r"(?<=^Other names for the same: ).*(?=\.$)", aliases, page, flags=re.M)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_lists_every_op_of_its_families(path, golden_file):
    """The first test: with --update-golden it writes the pages that the others read."""
    text = with_every_op(path.read_text())
    golden_file(path, with_every_row(text) if path.stem == "elementwise" else text)


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
