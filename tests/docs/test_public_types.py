"""Types of the public names, as users' type checkers see them: no call of a public function is `Any`.

mypy reads `weft/__init__.pyi`, and from there the package's sources.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import weft as wf

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """mypy's report on the examples and on `REVEALED`, with the type of every expression that is Any."""
    path = tmp_path_factory.mktemp("types") / "revealed.py"
    path.write_text(PREAMBLE + "".join(f"reveal_type({call})\n" for call in REVEALED))
    flags = "--disallow-any-expr --follow-imports=silent --show-column-numbers --show-error-end --no-pretty"
    command = [sys.executable, "-m", "mypy", *flags.split(), *map(str, EXAMPLES), str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280).stdout


def public_calls(path):
    """The calls of `wf.name(…)` and `wf.module.name(…)` in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and re.fullmatch(r"wf\.[\w.]+", ast.unparse(node.func)):
            yield node


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_no_public_call_in_an_example_is_any(path, report):
    pattern = rf'^{path.relative_to(ROOT)}:(\d+):(\d+):(\d+):(\d+): error: Expression has type "Any"'
    found = {tuple(map(int, span)) for span in re.findall(pattern, report, re.MULTILINE)}
    assert found, report  # the functions of the examples have no annotations
    calls = {(c.lineno, c.col_offset + 1, c.end_lineno, c.end_col_offset): c for c in public_calls(path)}
    assert [ast.unparse(calls[span]) for span in found & calls.keys()] == []


# Calls whose types follow from the user's functions.
REVEALED = {
    "x + 1": "Tensor",
    "1 - x": "Tensor",
    "x == 1": "Tensor",
    "x['a', 0]": "Tensor",
    "abs(x)": "Tensor",
    "wf.relu(x)": "Tensor",
    "wf.top_k(x, 'a', wf.Dim('k', 2))": "tuple[Tensor, Tensor]",
    "wf.unstack(x, 'a')": "list[Tensor]",
    "wf.place((x, {'w': x}), None, None)": "tuple[Tensor, dict[str, Tensor]]",
    "wf.grad(loss)(x, 1)": "Tensor",
    "wf.value_and_grad(loss)(x, 1)": "tuple[Tensor, Tensor]",
    "wf.spmd(loss, 'data=2', 'a:data')(x, 1)": "Tensor",
    "wf.spmd(wf.grad(loss))(x, 1)": "Tensor",
    "wf.spmd(mesh='data=2')(loss)(x, 1)": "Tensor",
    "wf.remat(loss)(x, 1)": "Tensor",
    "wf.vmap(loss, 'a')(x, 1)": "Tensor",
    "wf.scan(lambda c, row: (c + row, c), x, x, 'b')": "tuple[Tensor, Tensor]",
    "wf.fori_loop(0, 3, lambda n, c: c + n, x)": "Tensor",
    "wf.while_loop(lambda c: wf.any(c < 3), lambda c: c + 1, x)": "Tensor",
    "wf.cond(wf.any(x > 0), lambda: x, lambda: -x)": "Tensor",
    "wf.switch(1, [lambda: x, lambda: -x])": "Tensor",
    "wf.map(lambda row: (row, wf.sum(row)), x, 'a')": "tuple[Tensor, Tensor]",
    "wf.associative_scan(lambda a, b: a + b, x, 'a')": "Tensor",
    "wf.eval_shape(loss, x, 1)": "Tensor",
    "wf.jvp(wf.sin, (x,), (x,))": "tuple[Tensor, Tensor]",
    "wf.custom_vjp(loss)(x, 1)": "Tensor",
    "wf.local(lambda a: a, x, out=x.dims)": "Tensor",
    "wf.conv(x, x, {'a': 'k'}, out=[])": "Tensor",
    "wf.spmd(loss).plan(x, 1)": "Plan",
    "wf.search(loss, (x, 1), devices=2, hardware='h100')": "SearchResult",
}
PREAMBLE = """import weft as wf

def loss(x: wf.Tensor, n: int) -> wf.Tensor:
    return wf.sum(x) * n

def read(dims: wf.DimsLike, dim: wf.DimLike, mesh: wf.MeshLike, layout: wf.LayoutLike) -> None:
    wf.place(wf.sum(wf.ones(dims), dim), mesh, layout)

read("a=2", "a", "data=2", "a:data")
read([wf.Dim("a", 2)], wf.Dim("a", 2), {"data": 2}, None)
x = wf.ones("a=2 b=3")
"""


def test_types_follow_from_the_function_of_the_user(report):
    types = re.findall(r'Revealed type is "(.*)"', report)
    shown = [re.sub(r"\b[a-z_]+\w*\.", "", one) for one in types]
    assert dict(zip(REVEALED, shown, strict=True)) == REVEALED


def test_the_package_declares_its_types():
    assert (Path(wf.__file__).parent / "py.typed").exists()
    settings = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^weft = \[.*"__init__.pyi".*"py.typed"', settings, re.MULTILINE)
