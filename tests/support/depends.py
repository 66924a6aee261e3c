"""Which of the project's files a test's outcome depends on: those that it imports, and that those import."""

import ast
import functools
import hashlib
import re
from pathlib import Path

import jax

import weft

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
CONFTEST = TESTS / "conftest.py"
# `import weft as wf` is all it takes to use these.
ATTRIBUTE = re.compile(r"\bwf\.(checkpoint|data|generate|models|nn|optim|random|train)\b")


def file_of(name, importer=ROOT / "__init__.py"):
    """The file of a module by its full name, or None if it is not the project's.

    A test module can import another one in its own folder, which pytest adds to the path.
    """
    for folder in (ROOT, TESTS, TESTS / "support", importer.parent):
        path = folder.joinpath(*name.split("."))
        for candidate in (path / "__init__.py", path.with_suffix(".py")):
            if candidate.exists():
                return candidate
    return None


def names_in(path):
    """The full names of all that a file imports, wherever in it."""
    text = path.read_text(encoding="utf-8")
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
    yield from (f"weft.{name}" for name in ATTRIBUTE.findall(text))


@functools.cache
def imported(path):
    """The files that a file imports, with the packages that they are in."""
    found = (
        {file_of(f"weft.{name}") for name in weft.NAMES} if path == ROOT / "weft" / "__init__.py" else set()
    )
    if TESTS in path.parents and "subprocess" in names_in(path):  # which may run any command
        found |= {*(ROOT / "weft").glob("**/*.py")}
    for name in names_in(path):
        parts = name.split(".")
        found |= {file_of(".".join(parts[:n]), path) for n in range(1, len(parts) + 1)}
    return found - {None}


def depends(path):
    """All files that decide what a test file does, itself among them."""
    found, new = set(), {path, CONFTEST}
    while new:
        found |= new
        new = set().union(*(imported(p) for p in new)) - found
    return sorted(found)


@functools.cache
def code_of(path):
    """What a file does: its text without comments, docstrings and line breaks."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() if ast.get_docstring(node) is not None:
                del node.body[0]
    return ast.dump(tree)


@functools.cache
def digest(path):
    """A hash of the files that a test file depends on, of their names and their code, and of JAX's version."""
    result = hashlib.sha256(jax.__version__.encode())
    for file in depends(path):
        result.update(f"{file.relative_to(ROOT)}\0{code_of(file)}".encode())
    return result.hexdigest()[:16]
