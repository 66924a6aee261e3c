"""Ops as methods of tensors: the same functions, with the same signatures for type checkers and editors."""

import inspect
from pathlib import Path

import jax
import mypy.api
import numpy as np
import pytest

import weft as wf
from weft.core import methods

LINE_LENGTH = 110
NAMES = methods.METHODS.split()
X = wf.tensor(np.arange(1.0, 7.0, dtype=np.float32).reshape(2, 3), "a=2 b=3")
# The arguments of each method; none for those that are not here.
ARGUMENTS = {
    **{name: ["b"] for name in "softmax log_softmax argmax argmin sort argsort cumsum cumprod".split()},
    "top_k": ["b", "k=2"],
    "take": [wf.tensor([2, 0], "n=2"), "b"],
    "transpose": ["b a"],
    "reshape": ["c=6"],
    "broadcast_to": ["n=2 a b"],
    "merge": ["a b", "c"],
    "flatten": ["a b", "c"],
    "split": ["b", "c=1 d=3"],
    "unflatten": ["b", "c=1 d=3"],
    "astype": ["int32"],
    "clip": [2, 4],
}


@pytest.mark.parametrize("name", NAMES)
def test_a_method_is_the_op(name):
    bound, args = getattr(X, name), ARGUMENTS.get(name, [])
    assert bound.__func__ is getattr(wf, name) and bound.__self__ is X
    assert bound.__doc__ == getattr(wf, name).__doc__
    jax.tree.map(np.testing.assert_array_equal, bound(*args), getattr(wf, name)(X, *args))


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "prod", "any", "all", "var", "std", "argmax"])
@pytest.mark.parametrize("options", [{}, {"axis": 1}])
def test_numpys_functions_do_not_call_the_methods(name, options):
    """`np.sum(x)` calls the method `sum` of other arrays, with `axis=` and `out=`."""
    fn = getattr(np, name)
    np.testing.assert_array_equal(fn(X, **options), fn(X.numpy(), **options))
    np.testing.assert_array_equal(np.stack([X, X]), np.stack([X.numpy()] * 2))


def test_a_program_has_methods():
    program = wf.spmd(lambda x: x.softmax("b").sum("a b"), "data=2 model=2", "a:data b:model")
    np.testing.assert_allclose(program(X).item(), 2.0, rtol=1e-6)
    assert [c.kind for c in program.collectives(X)] == [
        c.kind
        for c in wf.spmd(
            lambda x: wf.sum(wf.softmax(x, "b")), "data=2 model=2", "a:data b:model"
        ).collectives(X)
    ]


def stub():
    """The text of the stub: for each op its signature without the tensor, and its first line of documentation."""
    yield '"""The methods of tensors that are ops, for type checkers and editors; see `methods.py`."""'
    yield "# ruff: noqa: E501\n"
    yield "from jax.typing import DTypeLike\n"
    yield "from ..ops.typing import Number, Operand"
    yield "from .dims import DimLike, DimsLike"
    yield "from .tensor import Tensor\n"
    yield "METHODS: str\n"
    yield "class Methods:"
    for name in NAMES:
        op = getattr(wf, name)
        signature = inspect.signature(op)
        _, *rest = signature.parameters.values()
        given, result = ["self", *parameters(rest)], f"-> {signature.return_annotation}:"
        line = f"    def {name}({', '.join(given)}) {result}"
        if len(line) > LINE_LENGTH:
            line = "\n".join([f"    def {name}(", *(f"        {one}," for one in given), f"    ) {result}"])
        yield f'{line}\n        """{inspect.getdoc(op).splitlines()[0]}"""\n'


def parameters(found):
    """Parameters as text, with a star before those that are given by keyword only."""
    is_last_positional = True
    for one in found:
        if one.kind is one.KEYWORD_ONLY and is_last_positional:
            is_last_positional = False
            yield "*"
        star = "**" if one.kind is one.VAR_KEYWORD else ""
        default = "" if one.default is one.empty else f" = {one.default!r}"
        yield f"{star}{one.name}: {one.annotation}{default}"


@pytest.mark.nodevice
def test_the_stub_has_the_signatures_of_the_ops(golden_file):
    golden_file(Path(methods.__file__).with_suffix(".pyi"), "\n".join(stub()))


@pytest.mark.nodevice
def test_a_type_checker_knows_the_methods(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import weft as wf\n"
        'x = wf.tensor([1.0], "a=1")\n'
        'reveal_type(x.sum("a"))\n'
        'reveal_type(x.top_k("a", "k=1")[0])\n'
        "x.sum(3)\n"
        "x.summ()\n"
    )
    shown, _, _ = mypy.api.run([str(program), "--no-pretty"])
    assert [line.partition(".py:")[2].partition("  [")[0] for line in shown.splitlines()[:4]] == [
        '3: note: Revealed type is "weft.core.tensor.Tensor"',
        '4: note: Revealed type is "weft.core.tensor.Tensor"',
        '5: error: Argument 1 to "sum" of "Methods" has incompatible type "int"; expected "Dim | str | Iterable[Dim | str] | None"',
        '6: error: "Tensor" has no attribute "summ"',
    ]
