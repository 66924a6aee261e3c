"""Gradient clipping: scale all gradients so that their global norm, over all slices, stays below a limit."""

from __future__ import annotations

import jax.numpy as jnp

import weft as wf
from weft.core.errors import ProgramError
from weft.core.op import call_in_program
from weft.core.tensor import Tensor
from weft.core.types import PyTree, at_least_float32

from ..core.call_errors import checks_arguments
from ..core.describe import format_argument
from ..core.field_types import is_finite_number
from .named_tree import error_context, named_tensors, replace_tensors


@checks_arguments
def global_norm(grads: PyTree) -> Tensor:
    """The square root of the sum of squares over all elements of all tensors, in float32.

    >>> float(global_norm([wf.full("a=2", 2.0), wf.full("b=1", 1.0)]))
    3.0
    """
    with error_context("global_norm(grads)"):
        return call_in_program(_global_norm, grads)


@checks_arguments
def clip_by_global_norm(grads: PyTree, limit: float, norm: Tensor | None = None) -> PyTree:
    """Scale gradients so that their global norm is at most `limit`.

    Args:
      grads: a pytree of tensors.
      limit: the maximum norm.
      norm: the gradients' `global_norm`, if it is already known.

    NaN propagates: one NaN makes the norm NaN, and with it every gradient.

    >>> clip_by_global_norm([wf.full("a=4", 3.0)], 1.0)
    [f32[a=4] [0.5, 0.5, 0.5, 0.5]]
    """
    if not is_finite_number(limit) or limit <= 0:
        raise ProgramError(
            f"the limit of the global norm is {format_argument(limit)}",
            rule="the limit is a number above 0",
            hint="for example clip_by_global_norm(grads, 1.0)",
        ).located(f"clip_by_global_norm(grads, {format_argument(limit)})")
    with error_context(f"clip_by_global_norm(grads, {limit!r})"):
        return call_in_program(_clip, grads, wf.full((), limit, jnp.float32), norm)


def _global_norm(grads: PyTree) -> Tensor:
    with wf.under_layout("optimizer", "global norm"):
        return wf.store(_norm(_stored(grads)), "value")


def _clip(grads: PyTree, limit: Tensor, norm: Tensor | None) -> PyTree:
    with wf.under_layout("optimizer", "global norm"):
        slices = _stored(grads)
        scale = wf.minimum(limit / (_norm(slices) if norm is None else norm), 1.0)
        # The slices stay where the update needs them; any other consumer gathers them.
        clipped = {
            n: wf.store((t.astype(at_least_float32(t.dtype)) * scale).astype(t.dtype), "optimizer")
            for n, t in slices.items()
        }
    return replace_tensors(grads, clipped)


def _stored(grads: PyTree) -> dict[str, Tensor]:
    return {name: wf.store(t, "optimizer") for name, t in named_tensors(grads).items()}


def _norm(slices: dict[str, Tensor]) -> Tensor:
    # Sums that are pending over the same axes are added first, so that one all-reduce resolves them all.
    totals: dict[frozenset[str], Tensor] = {}
    for t in slices.values():
        squares = wf.sum(wf.square(t.astype(jnp.float32)))
        axes = squares.pending
        totals[axes] = totals[axes] + squares if axes in totals else squares
    return wf.sqrt(sum(totals.values(), start=0.0))
