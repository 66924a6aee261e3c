"""Incremental decoding: one place at a time, with the keys and values of those before it kept.

    memory = remember(model, batch)                        # the encoder's result, as each layer reads it
    logits, kept = step(model, kept, token, place, batch)  # the next token's, given the last one

A layer's keys and values are tensors over `batch`, heads, `memory_length` and `d_kv`, stacked on `layers`;
they are laid out by the same rules as everything else (`heads:model`, `batch:data`, `memory_length:model`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import weft as wf
from weft import nn
from weft.errors import ModelError
from weft.models import Batch
from weft.models.transformer import Around, Drop, Sight, Stack
from weft.tensor import Tensor


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """What layers keep: keys and values of the places that were said, and those of the encoder's result."""

    keys: Tensor
    values: Tensor
    memory_keys: Tensor | None = None
    memory_values: Tensor | None = None


def empty(model: Any, batch: Batch, length: int) -> Kept:
    """The cache before the first token.

    Args:
      model: a decoder or an encoder-decoder.
      batch: its rows, with the inputs of an encoder-decoder.
      length: how many places there will be.
    """
    stack, c = model.decoder, model.config
    if c.residual == "reversible" or c.attention == "lsh":
        raise ModelError(
            f"a model with residual={c.residual!r} and attention={c.attention!r} is decoded step by step",
            rule="a cache is for plain residual layers with full or local attention",
            hint='load it with residual="plain" and attention="full"',
        ).located("decode")
    rows, dim = batch.tokens.dims[0], wf.Dim("memory_length", length)
    attention = stack.blocks.attention
    heads = attention.key.outputs[:-1]
    dims = [stack.layers, rows, *heads, dim, attention.d_kv]
    made = [wf.zeros(dims, c.compute) for _ in range(2)]
    if model.encoder is None:
        return Kept(*made)
    result = model.encode(batch).rename(length="memory_length")

    def look(carry: None, block: Any) -> tuple[None, tuple[Tensor, Tensor]]:
        return None, nn.cast(block, c.compute).memory_attention.keys_values(result.astype(c.compute))

    _, both = wf.scan(look, None, stack.blocks, stack.layers)
    return Kept(*made, *both)


def step(model: Any, kept: Kept, token: Tensor, place: Tensor, batch: Batch) -> tuple[Tensor, Kept]:
    """The logits of the next token, and the cache with this one's keys.

    Args:
      model: a decoder or an encoder-decoder.
      kept: the cache.
      token: the last token of each row, over `batch` and a `length` of 1; 0 at first.
      place: its number, from 0 on; a tensor without dims.
      batch: the rows' inputs, of an encoder-decoder.
    """
    length = token.dims[-1]
    here = wf.zeros([length], jnp.int32) + place
    memory = next(d for d in kept.keys.dims if d.name == "memory_length")
    sight = Sight(here, None, None, wf.arange(memory), None, False, None)
    around = Around(sight)
    if model.encoder is not None:
        said = wf.ones([token.dims[0], length], jnp.int32)
        seen = batch.input_segments
        other = None if seen is None else seen.rename(length="memory_length")
        places = here if other is None else wf.arange(other.dims[-1])
        segments = None if other is None else said
        # The keys of the encoder's result are kept: it is not read itself.
        around = Around(
            sight, memory=token, memory_sight=Sight(here, segments, None, places, other, False, None)
        )

    def layers(stack: Stack, x: Tensor, around: Around, key: Any) -> tuple[Tensor, Kept]:
        c = stack.config

        def layer(x: Tensor, given: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            block, kept = given
            recall = _Recall(kept, place, c.window if c.attention == "local" else None)
            for branch in nn.cast(block, c.compute).branches(around, Drop(0.0, None), recall):
                x = x + branch(x)[0]
            return x, (recall.kept.keys, recall.kept.values)

        x, (keys, values) = wf.scan(layer, x, (stack.blocks, kept), stack.layers)
        return x, dataclasses.replace(kept, keys=keys, values=values)

    x, kept = model.decoder(model.embedding(token), around, None, layers)
    return model.project(x), kept


class _Recall:
    """How one layer attends: its new keys and values join those that are kept."""

    def __init__(self, kept: Kept, place: Tensor, window: int | None):
        self.kept, self.place, self.window = kept, place, window

    def __call__(
        self,
        site: str,
        attention: nn.Attention,
        x: Tensor,
        memory: Tensor,
        *,
        visible: Tensor | None,
        bias: Tensor | None = None,
        rotate: Any = None,
        drop: Any = None,
    ) -> Tensor:
        if site == "memory":
            assert self.kept.memory_keys is not None and self.kept.memory_values is not None
            q = attention.query(x, out=attention.order(x, attention.heads))
            return attention.mix(q, self.kept.memory_keys, self.kept.memory_values, visible)
        q, k, v = attention.project(x, memory, rotate)
        pairs = ((self.kept.keys, k), (self.kept.values, v))
        keys, values = (wf.update(old, "memory_length", self.place, new) for old, new in pairs)
        self.kept = dataclasses.replace(self.kept, keys=keys, values=values)
        places = wf.arange(next(d for d in keys.dims if d.name == "memory_length"))
        seen = places <= self.place
        if self.window is not None:
            seen = seen & (places > self.place - self.window)
        return attention.mix(q, keys, values, seen, bias=bias)
