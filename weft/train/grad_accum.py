"""Gradients of a batch, micro-batch by micro-batch: what a step holds is that of one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import weft as wf
from weft.core.tensor import Tensor, is_tensor

from ..optim.update_layout import at_least_float32, call_in_program, to_stored_layout
from .loss_weight import (
    WeightFunction,
    batch_weight,
    microbatch_shares,
    resolve_weight,
    unknown_weight_error,
    weight_as_tensor,
    widest_float,
)
from .microbatch import deal_rows


def accumulate_gradients(
    model: Any, batch: Any, key: Any, micro: int, weight: WeightFunction | None = None
) -> tuple[Tensor, Any, Tensor | None]:
    """The loss of a batch, its gradients, and its weight if that is known; computed in `micro` parts.

    Each part counts by its share of the batch's weight, so the result is that of the whole batch. (A mixture
    of experts balances its load part by part.) Each has a dropout key of its own.

    Where parameters are stored whole, gradients stay pending sums in the loop, and are added up over the
    devices once, after it. Where they are stored split, they are gathered, and their gradients scattered, in
    each part: else all of both would have to be held.
    """
    known = resolve_weight(weight, model)
    if micro == 1:
        loss, grads = wf.value_and_grad(lambda model: model.loss(batch, key))(model)
        return loss, grads, None if known is None else _reported(batch_weight(known, batch))
    if known is None:
        raise unknown_weight_error(model, micro)
    return call_in_program(_Accumulated(_new_dim(batch, micro), weight), model, batch, key)


def _new_dim(batch: Any, micro: int) -> wf.Dim:
    """The dim of the parts, with a name that no rule speaks of and no tensor of the batch has."""
    used = {d.name for t in jax.tree.leaves(batch, is_leaf=is_tensor) if is_tensor(t) for d in t.dims}
    name = "_micro"
    while name in used:
        name = f"_{name}"
    return wf.Dim(name, micro)


def _reported(weight: float | Tensor) -> Tensor:
    return weight_as_tensor(weight).astype(jnp.float32)


@dataclass(frozen=True)
class _Accumulated:
    """A function that is equal to another with the same settings, so that an eager step compiles it once."""

    micro: wf.Dim
    weight: WeightFunction | None

    @property
    def __name__(self) -> str:
        return "accumulated"

    def __call__(self, model: Any, batch: Any, key: Any) -> tuple[Tensor, Any, Tensor]:
        micro, weight = self.micro, resolve_weight(self.weight, model)
        assert weight is not None
        parts = self._parts(batch)
        total = batch_weight(weight, batch)
        share, parts = microbatch_shares(weight, total, parts, micro)
        scanned, shared = eqx.partition(parts, lambda t: is_tensor(t) and micro in t.dims, is_leaf=is_tensor)
        keys = None if key is None else jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(micro.size))

        types: list[Any] = []  # of the loss

        def weighted(model: Any, rows: Any, share: Tensor, key: Any) -> Tensor:
            loss = model.loss(eqx.combine(rows, shared, is_leaf=is_tensor), key)
            if not isinstance(loss, Tensor):
                return loss  # wf.value_and_grad says what a loss is
            types.append(loss.dtype)
            return loss * share.astype(at_least_float32(loss.dtype))

        def part(sums: Any, given: Any) -> tuple[Any, None]:
            # The loss is weighted, not its gradients: a product with a tensor would resolve a pending sum.
            found = wf.value_and_grad(weighted)(model, *given)
            return jax.tree.map(lambda t, new: t + new.astype(t.dtype), sums, found, is_leaf=is_tensor), None

        def zeros(p: Tensor) -> Tensor:
            return to_stored_layout(wf.zeros(p.dims, at_least_float32(p.dtype)), p.role)

        start = wf.zeros((), widest_float()), jax.tree.map(zeros, model, is_leaf=is_tensor)
        loss, grads = wf.scan(part, start, (scanned, share, keys), micro)[0]
        return loss.astype(types[0]), grads, _reported(total)

    def _parts(self, batch: Any) -> Any:
        """The batch dealt out, with the dim of the parts in front: no loop over them has to move it."""

        def front(t: Any) -> Any:
            if not isinstance(t, Tensor) or self.micro not in t.dims:
                return t
            return wf.transpose(t, [self.micro, *(d for d in t.dims if d != self.micro)])

        return jax.tree.map(front, deal_rows(batch, self.micro), is_leaf=is_tensor)
