"""Attention over named dims: multi-head, multi-query and grouped; self and cross.

Queries are over `length`, keys and values over `memory_length`. In self-attention these are the same
positions under two names, so a layout that splits `length` gathers keys and values and nothing else.

With fewer key heads than query heads there are two head dims: `kv_heads`, and `heads`, the query heads per
key head. Either can be split, `kv_heads:model` or `heads:model`, or both over two axes.
"""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp

import weft as wf
from weft.core.describe import describe
from weft.core.dims import DimLike, as_dim
from weft.core.errors import DimError
from weft.core.tensor import Tensor

from .linear import Linear, check_features
from .module import Module, Normal, fan_in

# The score of a masked position. Finite: the softmax of a fully masked row of -inf would be NaN.
MASK_VALUE = -1e9

# Rotary positions, as a function of queries or keys.
Rotation = Callable[[Tensor], Tensor]


class Attention(Module):
    """Multi-head attention with input and output projections.

    Args:
      d_model: the dim of the hidden states.
      heads: the dim of the query heads; with `kv_heads`, of those that share one key head.
      d_kv: the dim of each head's features.
      kv_heads: the dim of the key heads, if there are fewer.
      bias: whether the projections have biases.
      scaled: whether scores are divided by `sqrt(d_kv)`. T5's are not: its queries are initialized smaller.
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
        d_model: DimLike,
        heads: DimLike,
        d_kv: DimLike,
        kv_heads: DimLike | None = None,
        *,
        bias: bool = False,
        scaled: bool = True,
    ):
        d_model, heads, d_kv = as_dim(d_model), as_dim(heads), as_dim(d_kv)
        self.kv_heads = () if kv_heads is None else (as_dim(kv_heads),)
        self.heads, self.d_kv, self.scaled = (*self.kv_heads, heads), d_kv, scaled
        shared = (heads,) if kv_heads is None else self.kv_heads
        small = None if scaled else Normal((d_model.size * d_kv.size) ** -0.5)
        self.query = Linear([d_model], [*self.heads, d_kv], bias=bias, initializer=small)
        self.key = Linear([d_model], [*shared, d_kv], bias=bias)
        self.value = Linear([d_model], [*shared, d_kv], bias=bias)
        self.out = Linear([*self.heads, d_kv], [d_model], bias=bias, initializer=fan_in([*self.heads, d_kv]))

    def __call__(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        rotate: Rotation | None = None,
        dropout: Callable[[Tensor], Tensor] = lambda weights: weights,
    ) -> Tensor:
        """The attention of x to the memory.

        Args:
          x: hidden states over `length`.
          memory: hidden states to attend to, over `memory_length`.
          mask: a boolean tensor over dims of the scores, True where attention is allowed, see `masks`; None:
            everywhere.
          bias: the attention bias, added to the scores (relative positions).
          rotate: applied to queries and keys (rotary positions).
          dropout: applied to the attention weights.
        """
        q, k, v = self.project(x, memory, rotate)
        return self.attend(q, k, v, mask, bias=bias, dropout=dropout)

    def project(
        self, x: Tensor, memory: Tensor, rotate: Rotation | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, with heads before positions."""
        q = self.query(x, out=self.dim_order(x, self.heads))
        k, v = self.keys_values(memory, rotate)
        return (q if rotate is None else rotate(q)), k, v

    def keys_values(self, memory: Tensor, rotate: Rotation | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of the memory."""
        order = self.dim_order(memory, self.key.outputs[:-1])
        k = self.key(memory, out=order)
        return (k if rotate is None else rotate(k)), self.value(memory, out=order)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        dropout: Callable[[Tensor], Tensor] = lambda weights: weights,
    ) -> Tensor:
        """`softmax(q · k + bias) · v` over the memory, then the output projection. Softmax is in float32."""
        memory = next((d for d in k.dims if d not in q.dims), None)
        if memory is None:
            raise DimError(
                f"all dims of the keys {describe(k)} are dims of the queries {describe(q)}",
                rule="key positions have a dim of their own, so that each query can attend to all of them",
                hint='attention(x, x.rename(length="memory_length"))',
            ).located("Attention")
        if self.scaled:
            q = q * self.d_kv.size**-0.5
        scores = wf.einsum(q, k, out=[*(d for d in q.dims if d != self.d_kv), memory]).astype(jnp.float32)
        if bias is not None:
            scores = scores + bias.astype(jnp.float32)
        if mask is not None:
            scores = wf.where(mask, scores, MASK_VALUE)
        weights = dropout(wf.softmax(scores, memory).astype(v.dtype))
        mixed = wf.einsum(weights, v, out=q.dims)
        return self.out(mixed)

    def dim_order(self, x: Tensor, heads: tuple[wf.Dim, ...]) -> list[wf.Dim]:
        """Heads before positions: then the products over `d_kv` and over positions need no transposes."""
        check_features(x, self.query.inputs, "Attention")
        batch = [d for d in x.dims if d not in self.query.inputs]
        return [*batch[:-1], *heads, *batch[-1:], self.d_kv]
