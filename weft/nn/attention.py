"""Attention over named dims: multi-head, multi-query and grouped; self and cross.

Queries are over `length`, keys and values over `memory_length`: the same places under another name where a
sequence attends to itself, so a layout that splits `length` gathers keys and values and nothing else.

With fewer key heads than query heads there are two head dims: `kv_heads`, and `heads`, the queries that share
each of them. Either can be split, `kv_heads:model` or `heads:model`, or both over two axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp

import weft as wf
from weft.core.describe import describe
from weft.core.errors import DimError
from weft.core.tensor import Tensor

from .linear import Linear, check_features
from .module import Module, Normal, fan_in

# What a score becomes that must not be seen; finite, so that a row that sees nothing has no NaN.
MASK_VALUE = -1e9


class Attention(Module):
    """Multi-head attention with maps in and out.

    Args:
      d_model: the dim of the places' features.
      heads: the dim of the query heads; with `kv_heads`, of those that share one key head.
      d_kv: the dim inside a head.
      kv_heads: the dim of the key heads, if they are fewer.
      bias: whether the maps have one.
      scaled: whether scores are divided by `sqrt(d_kv)`. T5 is not: its queries start smaller instead.
    """

    query: Linear
    key: Linear
    value: Linear
    out: Linear
    heads: tuple[wf.Dim, ...] = eqx.field(static=True)
    kv_heads: tuple[wf.Dim, ...] = eqx.field(static=True)
    d_kv: wf.Dim = eqx.field(static=True)
    scaled: bool = eqx.field(static=True)

    def __init__(
        self,
        d_model: wf.Dim,
        heads: wf.Dim,
        d_kv: wf.Dim,
        kv_heads: wf.Dim | None = None,
        *,
        bias: bool = False,
        scaled: bool = True,
    ):
        self.kv_heads = () if kv_heads is None else (kv_heads,)
        self.heads, self.d_kv, self.scaled = (*self.kv_heads, heads), d_kv, scaled
        shared = (heads,) if kv_heads is None else self.kv_heads
        small = None if scaled else Normal((d_model.size * d_kv.size) ** -0.5)
        self.query = Linear([d_model], [*self.heads, d_kv], bias=bias, draw=small)
        self.key = Linear([d_model], [*shared, d_kv], bias=bias)
        self.value = Linear([d_model], [*shared, d_kv], bias=bias)
        self.out = Linear([*self.heads, d_kv], [d_model], bias=bias, draw=fan_in([*self.heads, d_kv]))

    def __call__(
        self,
        x: Tensor,
        memory: Tensor,
        visible: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        rotate: Callable[[Tensor], Tensor] | None = None,
        drop: Callable[[Tensor], Tensor] = lambda weights: weights,
    ) -> Tensor:
        """What each place of x takes from the memory.

        Args:
          x: over `length`.
          memory: what it attends to, over `memory_length`.
          visible: truth values over dims of scores, see `masks`; None: all is seen.
          bias: added to the scores (relative positions).
          rotate: applied to queries and keys (rotary positions).
          drop: applied to the weights, as dropout.
        """
        q, k, v = self.project(x, memory, rotate)
        return self.mix(q, k, v, visible, bias=bias, drop=drop)

    def project(self, x: Tensor, memory: Tensor, rotate: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, heads before places."""
        q = self.query(x, out=self.order(x, self.heads))
        k, v = self.keys_values(memory, rotate)
        return (q if rotate is None else rotate(q)), k, v

    def keys_values(self, memory: Tensor, rotate: Any = None) -> tuple[Tensor, Tensor]:
        """Keys and values of the memory."""
        order = self.order(memory, self.key.outputs[:-1])
        k = self.key(memory, out=order)
        return (k if rotate is None else rotate(k)), self.value(memory, out=order)

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        drop: Callable[[Tensor], Tensor] = lambda weights: weights,
    ) -> Tensor:
        """The values weighted by how well their keys fit the queries, mapped back. Softmax is in float32."""
        memory = next((d for d in k.dims if d not in q.dims), None)
        if memory is None:
            raise DimError(
                f"all dims of the keys {describe(k)} are dims of the queries {describe(q)}",
                rule="what is looked at has a dim of its own, so that each place can look at all others",
                hint='attention(x, x.rename(length="memory_length"))',
            ).located("Attention")
        if self.scaled:
            q = q * self.d_kv.size**-0.5
        scores = wf.einsum(q, k, out=[*(d for d in q.dims if d != self.d_kv), memory]).astype(jnp.float32)
        if bias is not None:
            scores = scores + bias.astype(jnp.float32)
        if visible is not None:
            scores = wf.where(visible, scores, MASK_VALUE)
        weights = drop(wf.softmax(scores, memory).astype(v.dtype))
        mixed = wf.einsum(weights, v, out=q.dims)
        return self.out(mixed)

    def order(self, x: Tensor, heads: tuple[wf.Dim, ...]) -> list[wf.Dim]:
        """Heads in front of the places: then the products over `d_kv` and over places need no transposes."""
        check_features(x, self.query.inputs, "Attention")
        batch = [d for d in x.dims if d not in self.query.inputs]
        return [*batch[:-1], *heads, *batch[-1:], self.d_kv]
