"""Gradients of a batch, micro-batch by micro-batch: what a step holds is that of one of them."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import weft as wf
from weft.tensor import Tensor, is_tensor

from .rows import counted, dealt
from .state_layout import as_stored, called, wide_type


def value_and_grad(model: Any, batch: Any, key: Any, micro: int) -> tuple[Tensor, Any]:
    """The loss of a batch and its gradients, computed in so many parts, in one loop.

    Each part counts by its share of the batch's weights, so the result is that of the whole batch. (A mixture
    of experts balances its load part by part.) Each has a dropout key of its own.

    Where parameters are stored whole, gradients stay pending sums in the loop, and are added up over the
    devices once, after it. Where they are stored split, they are gathered, and their gradients scattered, in
    each part: else all of both would have to be held.
    """
    if micro == 1:
        return wf.value_and_grad(lambda model: model.loss(batch, key))(model)
    return called(_accumulated, model, batch, key, wf.Dim("micro", micro))


def _accumulated(model: Any, batch: Any, key: Any, micro: wf.Dim) -> tuple[Tensor, Any]:
    rows = dealt(batch, micro)
    scanned, shared = eqx.partition(rows, lambda t: is_tensor(t) and micro in t.dims, is_leaf=is_tensor)
    keys = None if key is None else jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(micro.size))

    def part(total: Any, given: Any) -> tuple[Any, None]:
        rows, share, key = given
        one = eqx.combine(rows, shared, is_leaf=is_tensor)
        # The loss is weighted, not its gradients: a product with a tensor would resolve a pending sum.
        found = wf.value_and_grad(lambda model: model.loss(one, key) * share)(model)
        return jax.tree.map(lambda t, new: t + new.astype(t.dtype), total, found, is_leaf=is_tensor), None

    def zeros(p: Tensor) -> Tensor:
        return as_stored(wf.zeros(p.dims, wide_type(p.dtype)), p.role)

    start = wf.zeros((), jnp.float32), jax.tree.map(zeros, model, is_leaf=is_tensor)
    return wf.scan(part, start, (scanned, _shares(rows, micro), keys), micro)[0]


def _shares(rows: Any, micro: wf.Dim) -> Tensor:
    """How much of a batch each part is. A loss divides by its weights, or by 1 if these are less."""
    if getattr(rows, "weights", None) is None:
        return wf.full([micro], 1.0 / micro.size, jnp.float32)
    weights = counted(rows, (micro,))
    assert weights is not None
    return wf.maximum(weights, 1.0) / wf.maximum(wf.sum(weights), 1.0)
