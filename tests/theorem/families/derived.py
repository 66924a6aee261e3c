"""Rows derived from the ops' examples (`weft/core/registry.py`), for ops that have no row of their own.

The oracle is Weft on one device. So these rows check that layouts do not change results and gradients; a row of its own
also compares an op with plain JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from every_op import EVERY_OP
from op_examples import OPERANDS

import weft as wf
from weft.core.registry import OpInfo

from ..program import Named, Unfit, weights
from .rows import GAP, Op, Rows
from .shape import fit_weft

# A callback has no derivative, debug() prints, and pipelines have random tests of their own.
NOT_DERIVED = {"callback", "debug", "pipeline"}

TENSORS = {name: t for name, t in OPERANDS.items() if wf.is_tensor(t)}
# Functions that bring values of a program into the range of an operand.
RANGES: dict[str, Callable[[wf.Tensor], wf.Tensor]] = {
    "p": lambda x: x * x + 0.2,
    "u": lambda x: wf.tanh(x) * 0.9,
    "g": lambda x: x * x + 1.1,
    **{name: lambda x: x % 5 for name, t in TENSORS.items() if t.dtype == np.int32},
}


def kinds_of(op: str) -> list[str]:
    """The kinds of the tensors that an op's example takes."""
    return [TENSORS[name].dtype.kind for name in EVERY_OP[op].operands if name in TENSORS]


def _dims_of(operand: str) -> list[tuple[str, int]]:
    return [(d.name, d.size) for d in TENSORS[operand].dims]


def _tensor(x: Named) -> wf.Tensor:
    return wf.tensor(x.array, [wf.Dim(*d) for d in x.sizes.items()])


def _on_one_device(weft: Callable[..., list[wf.Tensor]], *xs: Named) -> list[Named]:
    names = lambda t: tuple(d.name for d in t.dims)
    if any(isinstance(x.array, jax.Array) for x in xs):
        return [Named(t.array, names(t)) for t in weft(*map(_tensor, xs))]
    with (
        jax.ensure_compile_time_eval()
    ):  # the values are concrete, also while JAX traces other parts of an oracle
        return [Named(t.numpy(), names(t)) for t in weft(*map(_tensor, xs))]


def _is_smooth(weft: Callable[..., list[wf.Tensor]], *xs: Named) -> bool:
    """Whether the results are smooth functions of all floats: far from jumps, kinks and ties."""

    def moved(by: float) -> list[Any]:
        steps = [by * GAP * (1 + weights(x.array.shape) / 2) for x in xs]
        given = [
            Named(x.array + step, x.names) if x.kind == "f" else x for x, step in zip(xs, steps, strict=True)
        ]
        return [x.array.astype(float) for x in _on_one_device(weft, *given)]

    nearby = zip(moved(-1), moved(0), moved(1), strict=True)
    return all(bool(np.all(np.abs(a - 2 * b + c) <= GAP / 100)) for a, b, c in nearby)


def derived(info: OpInfo) -> Op:
    """The row of an op, from its example."""
    operands = [name for name in info.operands if name in TENSORS]
    names = {n for operand in operands for n, _ in _dims_of(operand)}

    def draw(d: Any) -> Any:
        if names & {*d.avoid}:
            raise Unfit
        return tuple(d.value(kind) for kind in kinds_of(info.name)), {}

    def weft(*xs: wf.Tensor) -> list[wf.Tensor]:
        fitted = {name: fit_weft(x, _dims_of(name)) for name, x in zip(operands, xs, strict=True)}
        given = {name: RANGES[name](x) if name in RANGES else x for name, x in fitted.items()}
        return jax.tree.leaves(info.run_example(OPERANDS | given), is_leaf=wf.is_tensor)

    def groups(given: Iterable[Named], results: Iterable[Named]) -> list[set[str]]:
        return [names.union(*[x.names for x in results])]

    count = len(jax.eval_shape(weft, *[TENSORS[operand] for operand in operands]))
    oracle, sound = functools.partial(_on_one_device, weft), functools.partial(_is_smooth, weft)
    return Op(draw, weft, oracle, sound, apart=True, groups=groups, count=count)


def derived_rows(known: Iterable[str]) -> Rows:
    """Rows for all ops of tensors that are not known. The first word of a known name is an op."""
    known = {name.split()[0] for name in known}
    return {
        name: derived(info)
        for name, info in EVERY_OP.items()
        if name not in known | NOT_DERIVED and {*info.operands} & TENSORS.keys()
    }
