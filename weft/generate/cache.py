"""Incremental decoding: one position at a time, with the keys and values of those before it kept.

    kept = read(model, batch, room)                   # the beginning of each row, all at once
    logits, kept = step(model, kept, token, place)    # what may follow a token, whose position each row has

A layer's keys and values are tensors over `batch`, heads, `memory_length` and `d_kv`, laid out by the same
rules as everything else (`heads:model`, `batch:data`, `memory_length:model`). Rows may be of different
lengths: what stands behind the position of a row is never seen, and overwritten when it comes there.

Every layer has tensors of its own, and a step runs one layer after the other without a loop, which would copy
a layer's keys out of those of all layers: that takes longer than to attend to them.

The beams of a row share its cache: `memory_beam` are those that wrote it. A beam knows by its `lineage` which
of them are its ancestors, so keys stay where they are whichever beams go on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import weft as wf
from weft import nn
from weft.core.errors import ModelError
from weft.core.tensor import Tensor
from weft.models import Batch, Config
from weft.models.transformer import AttentionMask, Dropout, LayerContext, RunLayers, Stack
from weft.nn.attention import MASK_VALUE
from weft.nn.lsh import SELF_PENALTY

from .requirements import check_decodable


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps of the positions before.

    Attributes:
      keys, values: of the positions of each row, as many as there is room for.
      memory_keys, memory_values: of the encoder's result.
    """

    keys: Tensor
    values: Tensor
    memory_keys: Tensor | None = None
    memory_values: Tensor | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """What layers keep of the positions before.

    Attributes:
      layers: of each one.
      memory_seen: which positions of the encoder's result hold something; None: all do.
      lineage: the `memory_beam` of each position of each `beam`; None: a row is one.
    """

    layers: tuple[LayerCache, ...]
    memory_seen: Tensor | None = None
    lineage: Tensor | None = None

    @property
    def places(self) -> wf.Dim:
        """The positions that there is room for."""
        return next(d for d in self.layers[0].keys.dims if d.name == "memory_length")

    def spread(self, beam: wf.Dim) -> KVCache:
        """The same for every beam; what all of them see was written by the first."""

        def spread(t: Tensor) -> Tensor:
            *front, places, d_kv = t.dims
            return wf.broadcast_to(t, [*front, beam.rename("memory_beam"), places, d_kv])

        layers = [
            dataclasses.replace(one, keys=spread(one.keys), values=spread(one.values)) for one in self.layers
        ]
        batch = self.layers[0].keys.dims[0]
        lineage = wf.zeros([batch, beam, self.places], jnp.int32)
        return dataclasses.replace(self, layers=tuple(layers), lineage=lineage)

    def follow(self, parent: Tensor) -> KVCache:
        """That of the beams that are followed.

        Args:
          parent: which they are, over `next`.
        """
        assert self.lineage is not None
        lineage = wf.take(self.lineage, parent, "beam").rename(next="beam")
        return dataclasses.replace(self, lineage=lineage)


def prefill_cache(model: Any, batch: Batch, room: int) -> KVCache:
    """The cache after the beginning of each row was read.

    Args:
      model: a decoder or an encoder-decoder.
      batch: the beginnings, at least one token each; behind a row's last token may stand anything. For an
        encoder-decoder, its inputs too.
      room: how many positions a row may have, with those of `batch`.
    """
    check_decodable(model)
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
    _, (own, others) = model.run_with(batch, layer_runner(RecordingAttention))
    own = [wf.unstack(wf.pad(t, "memory_length", 0, room - here), "layers") for t in own]
    others = [wf.unstack(t, "layers") for t in others or ()]
    seen = batch.input_segments
    seen = None if seen is None else seen.rename(length="memory_length") > 0
    return KVCache(tuple(map(LayerCache, *own, *others)), seen)


def all_logits(model: Any, batch: Batch) -> Tensor:
    """The logits of all positions at once, as decoding has them: exact attention, and room for all tokens.

    Args:
      model: a decoder or an encoder-decoder.
      batch: what it reads.
    """
    check_decodable(model)
    return model.compute_logits(model.run_with(batch, layer_runner(RecordingAttention))[0])


def unstack_layers(model: Any) -> Any:
    """The model with its decoder's layers one by one, in the dtype that they compute in.

    What takes many steps takes it apart first, so that not every step copies parameters out of those of all
    layers. (One that is apart is given back as it is.)
    """
    check_decodable(model)
    stack = model.decoder
    if isinstance(stack.blocks, tuple):
        return model
    blocks = nn.cast(stack.blocks, model.config.compute)
    each = [
        jax.tree.map(lambda t, n=n: t["layers", n], blocks, is_leaf=wf.is_tensor)
        for n in range(stack.layers.size)
    ]
    return eqx.tree_at(lambda m: m.decoder.blocks, model, tuple(each))


def decode_step(model: Any, kept: KVCache, token: Tensor, place: Tensor) -> tuple[Tensor, KVCache]:
    """The logits of the next token, and the cache with this one's keys.

    Args:
      model: a decoder or an encoder-decoder.
      kept: the cache.
      token: the last token of each row, over `batch`, and `beam` if it has several.
      place: its position in each row, from 0 on, over `batch`.
    """
    one = wf.Dim("length", 1)
    here = wf.broadcast_to(place, [*place.dims, one])
    around = LayerContext(
        AttentionMask(here, None, None, wf.arange(kept.places), None, False, None),
        memory=kept.layers[0].memory_keys,
        memory_mask=AttentionMask(here, None, None, here.rename(length="memory_length"), None, False, None),
        dropless=True,
    )
    x = model.embedding(wf.broadcast_to(token, [*token.dims, one]))
    c = model.config
    places = wf.arange(kept.places)
    seen = places <= place
    if c.attention == "local":
        seen = seen & (places > place - c.window)
    if kept.lineage is not None:
        _, beam = token.dims
        lineage = _put(kept.lineage, place, wf.arange(beam))
        kept = dataclasses.replace(kept, lineage=lineage)
        seen = seen & (lineage == wf.arange(beam.rename("memory_beam")))
    now = [_Recalling(of_layer, place, seen, kept.memory_seen) for of_layer in kept.layers]

    def layers(stack: Stack, x: Tensor, around: LayerContext, key: Any) -> tuple[Tensor, None]:
        streams = _streams(c, x)
        for block, by in zip(stack.blocks, now, strict=True):
            streams = _layer(c, block, around, streams, by)
        return _joined(streams), None

    x, _ = unstack_layers(model).decoder(x, around, None, layers)
    kept = dataclasses.replace(kept, layers=tuple(by.kept for by in now))
    return model.compute_logits(wf.sum(x, one)), kept


def _put(old: Tensor, place: Tensor, new: Tensor) -> Tensor:
    """What is kept, with something new at the position of each row."""
    return wf.vmap(lambda old, place, new: wf.update(old, "memory_length", place, new), "batch")(
        old, place, new
    )


def _written(new: Tensor) -> Tensor:
    """A new key or value under the names of those that are kept."""
    return new.rename(**{d.name: "memory_beam" for d in new.dims if d.name == "beam"})


def layer_runner(attend: Callable[[], Any]) -> RunLayers:
    """How layers are run over all positions at once: with a way to attend that notes what is to be kept."""

    def run(stack: Stack, x: Tensor, around: LayerContext, key: Any) -> tuple[Tensor, Any]:
        c = stack.config

        def layer(streams: tuple[Tensor, ...], block: Any) -> tuple[tuple[Tensor, ...], Any]:
            by = attend()
            return _layer(c, block, around, streams, by), (by.own, by.others)

        streams, noted = wf.scan(layer, _streams(c, x), stack.blocks, stack.layers, unroll=c.unroll)
        return _joined(streams), noted

    return run


def _streams(c: Config, x: Tensor) -> tuple[Tensor, ...]:
    return (x, x) if c.residual == "reversible" else (x,)


def _layer(
    c: Config, block: Any, around: LayerContext, streams: tuple[Tensor, ...], by: Any
) -> tuple[Tensor, ...]:
    for branch in nn.cast(block, c.compute).branches(around, Dropout(0.0, None), by):
        streams = (*streams[1:], streams[0] + branch(streams[-1])[0])
    return streams


def _joined(streams: tuple[Tensor, ...]) -> Tensor:
    return streams[0] if len(streams) == 1 else (streams[0] + streams[1]) / 2


class RecordingAttention:
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
        mask: Tensor | None,
        bias: Tensor | None = None,
        rotate: Any = None,
        dropout: Any = None,
    ) -> Tensor:
        q, k, v = attention.project(x, memory, rotate)
        if site == "memory":
            self.others = k, v
        else:
            self.own = k, v
            if isinstance(attention, nn.LSHAttention):
                places = next(d for d in q.dims if d.name == "length")
                itself = wf.arange(places) == wf.arange(places.rename("memory_length"))
                bias = wf.where(itself, -SELF_PENALTY, 0.0)
        return _mix(attention, q, k, v, mask, bias)


class _Recalling:
    """Attends to the keys that are kept, among them the new one."""

    def __init__(self, kept: LayerCache, place: Tensor, seen: Tensor, memory_seen: Tensor | None):
        self.kept, self.place, self.seen, self.memory_seen = kept, place, seen, memory_seen

    def __call__(
        self,
        site: str,
        attention: Any,
        x: Tensor,
        memory: Tensor,
        *,
        bias: Tensor | None = None,
        rotate: Any = None,
        **_: Any,  # what is visible is known by the position, and nothing is dropped
    ) -> Tensor:
        kept = self.kept
        if site == "memory":
            q = attention.query(x, out=attention.dim_order(x, attention.heads))
            return _mix(attention, q, kept.memory_keys, kept.memory_values, self.memory_seen, None)
        q, *new = attention.project(x, memory, rotate)
        k, v = (_written(t["memory_length", 0]) for t in new)
        keys, values = _put(kept.keys, self.place, k), _put(kept.values, self.place, v)
        self.kept = dataclasses.replace(kept, keys=keys, values=values)
        if isinstance(attention, nn.LSHAttention):
            (places,) = (d for d in keys.dims if d.name == "memory_length")
            bias = wf.where(wf.arange(places) == self.place, -SELF_PENALTY, 0.0)
        return _mix(attention, q, keys, values, self.seen, bias)


def _mix(attention: Any, q: Tensor, k: Any, v: Any, seen: Tensor | None, bias: Tensor | None) -> Tensor:
    """The values weighted by how well their keys fit, mapped back.

    Keys are many and queries few: the former are neither transposed, as results have their dims in front, nor
    moved. Where their positions are split, what travels is the greatest score, the sum and the result.
    """
    if getattr(attention, "scaled", False):
        q = q * attention.d_kv.size**-0.5
    both = [d for d in k.dims if d in q.dims and d != attention.d_kv]
    rest, memory = ([d for d in a.dims if d not in b.dims] for a, b in ((q, k), (k, q)))
    scores = wf.einsum(k, q, out=[*both, *memory, *rest]).astype(jnp.float32)
    scores = wf.transpose(scores, [*both, *rest, *memory])
    scores = scores if bias is None else scores + bias.astype(jnp.float32)
    scores = scores if seen is None else wf.where(seen, scores, MASK_VALUE)
    weights = wf.exp(scores - wf.max(scores, memory))
    mixed = wf.einsum(weights.astype(v.dtype), v, out=[*both, *rest, attention.d_kv])
    return attention.out((mixed / wf.sum(weights, memory)).astype(q.dtype))
