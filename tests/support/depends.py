"""The project's files that a test's outcome depends on: those that it imports, directly or indirectly."""

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
# Submodules that `import weft as wf` makes available without a separate import.
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
    """The full names of all imports in a file, also of those inside functions."""
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
    """The files that a file imports, and those of the packages that contain them."""
    found = (
        {file_of(f"weft.{name}") for name in weft.NAMES} if path == ROOT / "weft" / "__init__.py" else set()
    )
    if TESTS in path.parents and "subprocess" in names_in(path):  # it may run any command of the package
        found |= {*(ROOT / "weft").glob("**/*.py")}
    for name in names_in(path):
        parts = name.split(".")
        found |= {file_of(".".join(parts[:n]), path) for n in range(1, len(parts) + 1)}
    return found - {None}


def depends(path):
    """All files that a test file depends on, including itself."""
    found, new = set(), {path, CONFTEST}
    while new:
        found |= new
        new = set().union(*(imported(p) for p in new)) - found
    return sorted(found)


@functools.cache
def code_of(path):
    """The code of a file without comments, docstrings and formatting."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() if ast.get_docstring(node) is not None:
                del node.body[0]
    return ast.dump(tree)


@functools.cache
def digest(path):
    """A hash of the names and the code of all files that a test file depends on, and of JAX's version."""
    result = hashlib.sha256(jax.__version__.encode())
    for file in depends(path):
        result.update(f"{file.relative_to(ROOT)}\0{code_of(file)}".encode())
    return result.hexdigest()[:16]
