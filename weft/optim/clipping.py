"""Clipping: all gradients together held to a norm, wherever their slices are."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import weft as wf
from weft.core.errors import ProgramError
from weft.core.tensor import Tensor

from ..core.fields import is_finite_number
from .named_tree import error_context, named_tensors, replace_tensors
from .update_layout import (
    at_least_float32,
    call_in_program,
    to_optimizer_layout,
    to_stored_layout,
    under_optimizer_layout,
    update_scope,
    with_program_layout,
)


def global_norm(grads: Any) -> Tensor:
    """The root of the sum of the squares of all elements of all tensors, as float32.

    >>> float(global_norm([wf.full("a=2", 2.0), wf.full("b=1", 1.0)]))
    3.0
    """
    with error_context("global_norm(grads)"):
        return call_in_program(_global_norm, grads)


def clip_by_global_norm(grads: Any, limit: float, norm: Tensor | None = None) -> Any:
    """Gradients scaled so that their global norm is at most the limit.

    Args:
      grads: a tree with tensors in it.
      limit: the largest norm.
      norm: their `global_norm`, if it is known already.

    NaN stays NaN: if one gradient has it, so has the norm, and so have all gradients then.

    >>> clip_by_global_norm([wf.full("a=4", 3.0)], 1.0)
    [f32[a=4] [0.5, 0.5, 0.5, 0.5]]
    """
    if not is_finite_number(limit) or limit <= 0:
        raise ProgramError(
            f"the limit of the global norm is {limit!r}",
            rule="a norm is limited to a number above 0",
            hint="for example clip_by_global_norm(grads, 1.0)",
        ).located(f"clip_by_global_norm(grads, {limit!r})")
    with error_context(f"clip_by_global_norm(grads, {limit!r})"):
        return call_in_program(_clip, grads, wf.full((), limit, jnp.float32), norm)


def _global_norm(grads: Any) -> Tensor:
    return _norm_of(_forms_of(grads))


def _clip(grads: Any, limit: Tensor, norm: Tensor | None) -> Any:
    forms = _forms_of(grads)
    norm = _norm_of(forms) if norm is None else norm
    with under_optimizer_layout("global norm"):
        scale = wf.minimum(limit / norm, 1.0)
        clipped = {n: (t.astype(at_least_float32(t.dtype)) * scale).astype(t.dtype) for n, t in forms.items()}
    # In the state's layout, where an update will want them; whoever wants them otherwise gathers them.
    return replace_tensors(
        grads, {n: with_program_layout(clipped[n], t.role) for n, t in named_tensors(grads).items()}
    )


def _forms_of(grads: Any) -> dict[str, Tensor]:
    with update_scope("global norm"):
        return {name: to_optimizer_layout(t) for name, t in named_tensors(grads).items()}


def _norm_of(forms: dict[str, Tensor]) -> Tensor:
    with under_optimizer_layout("global norm"):
        # Those that are pending over the same axes are added up first: one collective for all of them.
        totals: dict[frozenset[str], Tensor] = {}
        for t in forms.values():
            one = wf.sum(wf.square(t.astype(jnp.float32)))
            totals[one.pending] = totals[one.pending] + one if one.pending in totals else one
        norm = wf.sqrt(sum(totals.values(), start=0.0))
    return to_stored_layout(norm, "value")
