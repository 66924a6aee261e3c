"""The package uses the field's terms: the glossary in weft/core/README.md, types that say something, reasons."""

import ast
import collections
import io
import re
import tokenize
from pathlib import Path

import pytest

pytestmark = pytest.mark.nodevice

PACKAGE = Path(__file__).parents[1] / "weft"
FILES = sorted(PACKAGE.rglob("*.py"))

# Not in any name that the package defines; the glossary has the term to use.
WORDS = """
ask asks asked asking say says said saying tell tells told telling speak speaks speaker speaking talk talks anew
settle settled settles overcast whole promise promised learner standing relabelled alike dealt
""".split()
# Not in docstrings, comments and messages.
PHRASES = [
    r"\bwhole numbers?\b",
    r"\btruth values?\b",
    r"\banew\b",
    r"\bso many\b",
    r"\botherwise than\b",
    r"\b(is|are|was) to be\b",
    r"\bnobody\b",
    r"\b(is|are|was|were|been) (said|told|asked)\b",
    r"\bwhat (is|was) (asked|wanted|said)\b",
    r"\bspeakers?\b",
]


def parts(name):
    """`RequestSession` and `request_session` have the parts request and session."""
    return re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower())


def defined(tree):
    """The names that a file defines: classes, functions, parameters, variables and fields."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.arg():
                yield node.arg
            case ast.Name(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
                yield node.id if isinstance(node, ast.Name) else node.attr


def texts(source):
    """The docstrings, messages and comments of a file."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.start[0], token.string


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_terms(path):
    source = path.read_text()
    wrong = {name for name in defined(ast.parse(source)) if {*parts(name)} & {*WORDS}}
    wrong |= {part for part in parts(path.stem) if part in WORDS}
    found = [
        f"{line}: {match[0]}"
        for line, text in texts(source)
        for phrase in PHRASES
        for match in re.finditer(phrase, re.sub(r"\s+", " ", text), re.IGNORECASE)
    ]
    assert not wrong and not found, f"use the glossary's terms: {sorted(wrong)} {found}"


def test_every_public_class_has_a_name_of_its_own():
    names = collections.Counter(
        node.name
        for path in FILES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_parameters_have_types():
    """Fewer than 15 of 100 parameters are `Any`; `PyTree` is the one permitted alias of it."""
    aliases = [
        f"{path.name}: {ast.unparse(node)}"
        for path in FILES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(node).endswith("= Any")
    ]
    assert aliases == ["types.py: PyTree = Any"]
    annotations = [
        ast.unparse(arg.annotation) if arg.annotation else ""
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for arg in ast.walk(node.args)
        if isinstance(arg, ast.arg) and arg.arg not in ("self", "cls")
    ]
    assert annotations.count("Any") < 0.15 * len(annotations), annotations.count("Any") / len(annotations)


@pytest.mark.parametrize("folder", ["core", "autodiff", "plan", "autolayout"])
def test_hard_code_gives_reasons(folder):
    """At least 5 comments for 100 lines of code."""
    comments = code = 0
    for path in (PACKAGE / folder).rglob("*.py"):
        source = path.read_text()
        documented = {
            line
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node) is not None
            for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
        }
        lines = set()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                comments += 1
            elif token.string.strip():
                lines |= {*range(token.start[0], token.end[0] + 1)}
        code += len(lines - documented)
    assert comments >= 0.05 * code, f"{comments} comments, {code} lines of code"
