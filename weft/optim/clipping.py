"""Clipping: all gradients together held to a norm, wherever their slices are."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import weft as wf
from weft.core.errors import ProgramError
from weft.core.tensor import Tensor

from ..core.fields import is_number
from .named_tree import asking, named, with_tensors
from .update_layout import as_state, as_stored, called, in_program_layout, in_state_layout, naming, wide_type


def global_norm(grads: Any) -> Tensor:
    """The root of the sum of the squares of all elements of all tensors, as float32.

    >>> float(global_norm([wf.full("a=2", 2.0), wf.full("b=1", 1.0)]))
    3.0
    """
    with asking("global_norm(grads)"):
        return called(_global_norm, grads)


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
    if not is_number(limit) or limit <= 0:
        raise ProgramError(
            f"the limit of the global norm is {limit!r}",
            rule="a norm is limited to a number above 0",
            hint="for example clip_by_global_norm(grads, 1.0)",
        ).located(f"clip_by_global_norm(grads, {limit!r})")
    with asking(f"clip_by_global_norm(grads, {limit!r})"):
        return called(_clip, grads, wf.full((), limit, jnp.float32), norm)


def _global_norm(grads: Any) -> Tensor:
    return _norm_of(_forms_of(grads))


def _clip(grads: Any, limit: Tensor, norm: Tensor | None) -> Any:
    forms = _forms_of(grads)
    norm = _norm_of(forms) if norm is None else norm
    with in_state_layout("global norm"):
        scale = wf.minimum(limit / norm, 1.0)
        clipped = {n: (t.astype(wide_type(t.dtype)) * scale).astype(t.dtype) for n, t in forms.items()}
    # In the state's layout, where an update will want them; whoever wants them otherwise gathers them.
    return with_tensors(grads, {n: in_program_layout(clipped[n], t.role) for n, t in named(grads).items()})


def _forms_of(grads: Any) -> dict[str, Tensor]:
    with naming("global norm"):
        return {name: as_state(t) for name, t in named(grads).items()}


def _norm_of(forms: dict[str, Tensor]) -> Tensor:
    with in_state_layout("global norm"):
        # Those that are pending over the same axes are added up first: one collective for all of them.
        totals: dict[frozenset[str], Tensor] = {}
        for t in forms.values():
            one = wf.sum(wf.square(t.astype(jnp.float32)))
            totals[one.pending] = totals[one.pending] + one if one.pending in totals else one
        norm = wf.sqrt(sum(totals.values(), start=0.0))
    return as_stored(norm, "value")
