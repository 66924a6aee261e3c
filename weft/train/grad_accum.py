"""Gradient accumulation: compute the gradients of a batch one micro-batch at a time, to save memory."""

from __future__ import annotations

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import weft as wf
from weft.core.op import call_in_program
from weft.core.tensor import Tensor, is_tensor
from weft.core.types import PyTree, at_least_float32

from .loss_weight import (
    WeightFunction,
    batch_weight,
    microbatch_shares,
    resolve_weight,
    unknown_weight_error,
    weight_as_tensor,
    widest_float,
)
from .microbatch import distribute_rows


def accumulate_gradients(
    model: PyTree,
    batch: PyTree,
    key: jax.Array | None,
    micro: int,
    weight: WeightFunction | None = None,
) -> tuple[Tensor, PyTree, Tensor | None]:
    """The loss of a batch, its gradients, and its weight if it is known, computed in `micro` micro-batches.

    Each micro-batch counts by its share of the batch's weight, so the result equals that of the full batch.
    (A mixture of experts balances its load per micro-batch.) Each has its own dropout key.

    For replicated parameters, gradients stay pending sums inside the loop, and one all-reduce after it
    resolves them. Sharded parameters are gathered, and their gradients reduce-scattered, in each micro-batch:
    otherwise every device would hold all of both.
    """
    known = resolve_weight(weight, model)
    if micro == 1:
        loss, grads = wf.value_and_grad(lambda model: model.loss(batch, key))(model)
        return loss, grads, None if known is None else _reported_weight(batch_weight(known, batch))
    if known is None:
        raise unknown_weight_error(model, micro)
    return call_in_program(_Accumulate(_new_dim(batch, micro), weight), model, batch, key)


def _new_dim(batch: PyTree, micro: int) -> wf.Dim:
    """The dim of the micro-batches, with a name that no layout rule and no tensor of the batch uses."""
    used = {d.name for t in jax.tree.leaves(batch, is_leaf=is_tensor) if is_tensor(t) for d in t.dims}
    name = "_micro"
    while name in used:
        name = f"_{name}"
    return wf.Dim(name, micro)


def _reported_weight(weight: float | Tensor) -> Tensor:
    return weight_as_tensor(weight).astype(jnp.float32)


@dataclass(frozen=True)
class _Accumulate:
    """The function that accumulates gradients.

    A dataclass, because instances with the same settings are equal: an eager step then compiles only once.
    """

    micro: wf.Dim
    weight: WeightFunction | None

    @property
    def __name__(self) -> str:
        return "accumulated"

    def __call__(self, model: PyTree, batch: PyTree, key: jax.Array | None) -> tuple[Tensor, PyTree, Tensor]:
        micro, weight = self.micro, resolve_weight(self.weight, model)
        assert weight is not None
        parts = self._split_batch(batch)
        total = batch_weight(weight, batch)
        share, parts = microbatch_shares(weight, total, parts, micro)
        scanned, shared = eqx.partition(parts, lambda t: is_tensor(t) and micro in t.dims, is_leaf=is_tensor)
        keys = None if key is None else jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(micro.size))

        loss_dtypes: list[np.dtype] = []

        def weighted_loss(model: PyTree, rows: PyTree, share: Tensor, key: jax.Array | None) -> Tensor:
            loss = model.loss(eqx.combine(rows, shared, is_leaf=is_tensor), key)
            if not isinstance(loss, Tensor):
                return loss  # wf.value_and_grad raises the error
            loss_dtypes.append(loss.dtype)
            return loss * share.astype(at_least_float32(loss.dtype))

        def accumulate(sums: PyTree, xs: PyTree) -> tuple[PyTree, None]:
            # Weight the loss, not its gradients: a product with a tensor would resolve a pending sum.
            new = wf.value_and_grad(weighted_loss)(model, *xs)
            return jax.tree.map(lambda t, n: t + n.astype(t.dtype), sums, new, is_leaf=is_tensor), None

        def zeros(p: Tensor) -> Tensor:
            return wf.store(wf.zeros(p.dims, at_least_float32(p.dtype)), p.role)

        start = wf.zeros((), widest_float()), jax.tree.map(zeros, model, is_leaf=is_tensor)
        loss, grads = wf.scan(accumulate, start, (scanned, share, keys), micro)[0]
        return loss.astype(loss_dtypes[0]), grads, _reported_weight(total)

    def _split_batch(self, batch: PyTree) -> PyTree:
        """The batch as micro-batches, with their dim first, so that the scan needs no transpose."""

        def to_front(t: PyTree) -> PyTree:
            if not isinstance(t, Tensor) or self.micro not in t.dims:
                return t
            return wf.transpose(t, [self.micro, *(d for d in t.dims if d != self.micro)])

        return jax.tree.map(to_front, distribute_rows(batch, self.micro), is_leaf=is_tensor)
