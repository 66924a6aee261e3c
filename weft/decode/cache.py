"""Incremental decoding: one place at a time, with the keys and values of those before it kept.

    kept = read(model, batch, room)                   # the beginning of each row, all at once
    logits, kept = step(model, kept, token, place)    # what may follow a token, which has a place in each row

A layer's keys and values are tensors over `layers`, `batch`, heads, `memory_length` and `d_kv`, laid out by
the same rules as everything else (`heads:model`, `batch:data`, `memory_length:model`). Rows may be of
different lengths: what stands behind the place of a row is never seen, and overwritten when it comes there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import weft as wf
from weft import nn
from weft.errors import ModelError
from weft.models import Batch
from weft.models.transformer import Around, Drop, Layers, Sight, Stack
from weft.nn.attention import HIDDEN
from weft.nn.lsh import ITSELF
from weft.tensor import Tensor


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """What layers keep of the places before.

    Attributes:
      keys, values: of the places of each row, as many as there is room for.
      memory_keys, memory_values: of the encoder's result.
      memory_seen: which places of the encoder's result hold something; None: all do.
    """

    keys: Tensor
    values: Tensor
    memory_keys: Tensor | None = None
    memory_values: Tensor | None = None
    memory_seen: Tensor | None = None

    @property
    def places(self) -> wf.Dim:
        """The places that there is room for."""
        return next(d for d in self.keys.dims if d.name == "memory_length")


def read(model: Any, batch: Batch, room: int) -> Kept:
    """The cache after the beginning of each row was read.

    Args:
      model: a decoder or an encoder-decoder.
      batch: the beginnings, at least one token each; behind a row's last token may stand anything. For an
        encoder-decoder, its inputs too.
      room: how many places a row may have, with those of `batch`.
    """
    if model.decoder is None:
        raise ModelError(
            f"a model of kind {model.config.kind!r} is decoded",
            rule="it is a decoder that says one token after the other",
            hint='kind="decoder" or "encoder_decoder"',
        ).located("decode")
    here = batch.tokens.dims[-1].size
    longest = model.config.longest if model.decoder.positions is not None else room
    if not here <= room <= longest:
        raise ModelError(
            f"there is room for {room} places, the rows begin with {here}"
            + (f", and the model has learned {longest}" if room > longest else ""),
            rule="all that a row begins with and all that is said needs a place that the model knows",
            hint=f"a room from {here} to {longest}" if here <= longest else "shorter beginnings",
        ).located("decode")
    _, (own, others) = model.read(batch, layers_by(lambda kept: Listening()))
    kept = Kept(*(wf.pad(t, "memory_length", 0, room - here) for t in own))
    if others is None:
        return kept
    seen = batch.input_segments
    return dataclasses.replace(
        kept,
        memory_keys=others[0],
        memory_values=others[1],
        memory_seen=None if seen is None else seen.rename(length="memory_length") > 0,
    )


def whole(model: Any, batch: Batch) -> Tensor:
    """The logits of all places at once, as decoding has them: with exact attention, and room for all tokens.

    Args:
      model: a decoder or an encoder-decoder.
      batch: what it reads.
    """
    return model.project(model.read(batch, layers_by(lambda kept: Listening()))[0])


def step(model: Any, kept: Kept, token: Tensor, place: Tensor) -> tuple[Tensor, Kept]:
    """The logits of the next token, and the cache with this one's keys.

    Args:
      model: a decoder or an encoder-decoder.
      kept: the cache.
      token: the last token of each row, over `batch`, and `beam` if it has several.
      place: its number in each row, from 0 on, over `batch`.
    """
    one = wf.Dim("length", 1)
    here = wf.broadcast_to(place, [*place.dims, one])
    around = Around(
        Sight(here, None, None, wf.arange(kept.places), None, False, None),
        memory=kept.memory_keys,
        memory_sight=Sight(here, None, None, here.rename(length="memory_length"), None, False, None),
        exact=True,
    )
    x = model.embedding(wf.broadcast_to(token, [*token.dims, one]))
    c = model.config
    window = c.window if c.attention == "local" else None

    def recall(of_layer: Kept) -> _Recalling:
        return _Recalling(dataclasses.replace(of_layer, memory_seen=kept.memory_seen), place, window)

    layers = layers_by(recall, dataclasses.replace(kept, memory_seen=None))
    x, ((keys, values), _) = model.decoder(x, around, None, layers)
    put = wf.vmap(lambda old, place, new: wf.update(old, "memory_length", place, new), "batch")
    put = wf.vmap(put, "layers")  # which stays in front, where the loop over layers wants it
    kept = dataclasses.replace(kept, keys=put(kept.keys, place, keys), values=put(kept.values, place, values))
    return model.project(wf.sum(x, one)), kept


def layers_by(attend: Callable[[Any], Any], kept: Any = None) -> Layers:
    """How layers are run: with a way to attend that notes what is to be kept."""

    def run(stack: Stack, x: Tensor, around: Around, key: Any) -> tuple[Tensor, Any]:
        c = stack.config

        def layer(streams: tuple[Tensor, ...], given: Any) -> tuple[tuple[Tensor, ...], Any]:
            block, kept = given
            by = attend(kept)
            for branch in nn.cast(block, c.compute).branches(around, Drop(0.0, None), by):
                streams = (*streams[1:], streams[0] + branch(streams[-1])[0])
            return streams, (by.own, by.others)

        streams = (x, x) if c.residual == "reversible" else (x,)
        streams, noted = wf.scan(layer, streams, (stack.blocks, kept), stack.layers, unroll=c.unroll)
        return (streams[0] if len(streams) == 1 else (streams[0] + streams[1]) / 2), noted

    return run


class Listening:
    """Attends to what is there as a whole, and notes its keys and values."""

    def __init__(self) -> None:
        self.own: Any = None
        self.others: Any = None

    def __call__(
        self,
        site: str,
        attention: Any,
        x: Tensor,
        memory: Tensor,
        *,
        visible: Tensor | None,
        bias: Tensor | None = None,
        rotate: Any = None,
        drop: Any = None,
    ) -> Tensor:
        q, k, v = attention.project(x, memory, rotate)
        if site == "memory":
            self.others = k, v
        else:
            self.own = k, v
            if isinstance(attention, nn.LSHAttention):
                places = next(d for d in q.dims if d.name == "length")
                itself = wf.arange(places) == wf.arange(places.rename("memory_length"))
                bias = wf.where(itself, -ITSELF, 0.0)
        return _blend(attention, q, [(k, v, visible, bias)])


class _Recalling:
    """Attends to the keys that are kept and to a new one, and notes the latter."""

    def __init__(self, kept: Kept, place: Tensor, window: int | None):
        self.kept, self.place, self.window = kept, place, window
        self.own: Any = None
        self.others: Any = None

    def __call__(
        self,
        site: str,
        attention: Any,
        x: Tensor,
        memory: Tensor,
        *,
        bias: Tensor | None = None,
        rotate: Any = None,
        **_: Any,  # what is visible is known by the place, and nothing is dropped
    ) -> Tensor:
        kept = self.kept
        if site == "memory":
            q = attention.query(x, out=attention.order(x, attention.heads))
            return _blend(attention, q, [(kept.memory_keys, kept.memory_values, kept.memory_seen, None)])
        q, k, v = attention.project(x, memory, rotate)
        self.own = k["memory_length", 0], v["memory_length", 0]
        places = wf.arange(kept.places)
        seen = places < self.place
        if self.window is not None:
            seen = seen & (places > self.place - self.window)
        of_itself = None if bias is None else wf.take(bias, self.place, "memory_length")
        if isinstance(attention, nn.LSHAttention):
            of_itself = wf.full((), -ITSELF)
        return _blend(attention, q, [(kept.keys, kept.values, seen, bias), (*self.own, None, of_itself)])


def _blend(attention: Any, q: Tensor, parts: list[Any]) -> Tensor:
    """The values of several parts, weighted together by how well their keys fit, mapped back.

    A part has keys, values, which of them are seen (None: all), and what is added to the scores. Keys without
    `memory_length` are of one place. No part is moved to the others: where one is split, what travels is
    the greatest score, the sum and the result.
    """
    if getattr(attention, "scaled", False):
        q = q * attention.d_kv.size**-0.5
    rest = [d for d in q.dims if d != attention.d_kv]
    scored = []
    for k, v, seen, bias in parts:
        memory = [d for d in k.dims if d.name == "memory_length"]
        scores = wf.einsum(q, k, out=[*rest, *memory]).astype(jnp.float32)
        scores = scores if bias is None else scores + bias.astype(jnp.float32)
        scored.append((scores if seen is None else wf.where(seen, scores, HIDDEN), v, memory))
    tops = [wf.max(scores, memory) if memory else scores for scores, _, memory in scored]
    top = functools.reduce(wf.maximum, tops)
    shares, mixed = [], []
    for scores, v, memory in scored:
        weights = wf.exp(scores - top)
        shares.append(wf.sum(weights, memory) if memory else weights)
        mixed.append(wf.einsum(weights.astype(v.dtype), v, out=q.dims))
    result = functools.reduce(wf.add, mixed) / functools.reduce(wf.add, shares)
    return attention.out(result.astype(q.dtype))
