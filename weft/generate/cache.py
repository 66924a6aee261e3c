"""Incremental decoding with a KV cache: one position at a time.

    cache = prefill_cache(model, batch, max_length)                # all prompts at once
    logits, cache = decode_step(model, cache, token, position)     # one token of each row

A layer's keys and values are tensors over `batch`, heads, `memory_length` and `d_kv`, sharded by the same
rules as everything else (`heads:model`, `batch:data`, `memory_length:model`). Rows may have different
lengths: entries beyond a row's position are masked, and overwritten when the row gets there.

Every layer has its own tensors, and a step runs the layers one by one instead of in a scan. A scan would copy
each layer's keys out of one stacked tensor, which takes longer than the attention itself.

The beams of a row share one cache. Its entries are also over `memory_beam`, the beam that wrote them. The
`lineage` of a beam records which entries its ancestors wrote, so that selecting beams moves no keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import equinox as eqx
import jax
import jax.numpy as jnp

import weft as wf
from weft import nn
from weft.core.errors import ModelError
from weft.core.tensor import Tensor
from weft.models import Batch, Config, Transformer
from weft.models.transformer import AttentionFn, AttentionMask, Block, Dropout, LayerContext, RunLayers, Stack
from weft.nn.attention import MASK_VALUE
from weft.nn.lsh import SELF_PENALTY

from .requirements import check_decodable

# What an `AttentionFn` is called with for rotary positions and dropout.
Transform = Callable[[Tensor], Tensor]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """The cached keys and values of one layer.

    Attributes:
      keys, values: self-attention, for all positions of each row.
      memory_keys, memory_values: cross-attention to the encoder's output.
    """

    keys: Tensor
    values: Tensor
    memory_keys: Tensor | None = None
    memory_values: Tensor | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """The cached keys and values of all layers.

    Attributes:
      layers: the cache of each layer.
      memory_mask: True at positions of the encoder's output that are not padding; None: at all.
      lineage: for each `beam` and position, the `memory_beam` that wrote it; None: there are no beams.
    """

    layers: tuple[LayerCache, ...]
    memory_mask: Tensor | None = None
    lineage: Tensor | None = None

    @property
    def positions(self) -> wf.Dim:
        """The dim of the cached positions; its size is the capacity."""
        return next(d for d in self.layers[0].keys.dims if d.name == "memory_length")

    def expand_to_beams(self, beam: wf.Dim) -> KVCache:
        """The cache for all beams of a row; the entries so far count as written by the first beam."""

        def expand(t: Tensor) -> Tensor:
            *leading, positions, d_kv = t.dims
            return wf.broadcast_to(t, [*leading, beam.rename("memory_beam"), positions, d_kv])

        layers = [
            dataclasses.replace(layer, keys=expand(layer.keys), values=expand(layer.values))
            for layer in self.layers
        ]
        batch = self.layers[0].keys.dims[0]
        lineage = wf.zeros([batch, beam, self.positions], jnp.int32)
        return dataclasses.replace(self, layers=tuple(layers), lineage=lineage)

    def select_beams(self, parent: Tensor) -> KVCache:
        """The cache of the next beams; only the lineage changes.

        Args:
          parent: the beam that each of them continues, over `next`.
        """
        assert self.lineage is not None
        lineage = wf.take(self.lineage, parent, "beam").rename(next="beam")
        return dataclasses.replace(self, lineage=lineage)


def prefill_cache(model: Transformer, batch: Batch, max_length: int) -> KVCache:
    """Run the model over the prompts and return its cache.

    Args:
      model: a decoder or an encoder-decoder.
      batch: the prompts, at least one token each; tokens after the end of a row are ignored. For an
        encoder-decoder, also its inputs.
      max_length: the capacity of a row, including its prompt.
    """
    check_decodable(model)
    if model.decoder is None:
        raise ModelError(
            f"a model of kind {model.config.kind!r} has no decoder",
            rule="only decoders generate autoregressively",
            hint='kind="decoder" or "encoder_decoder"',
        ).located("decode")
    length = batch.tokens.dims[-1].size
    longest = model.config.longest if model.decoder.positions is not None else max_length
    if not length <= max_length <= longest:
        raise ModelError(
            f"max_length is {max_length}, and the prompts have {length} positions"
            + (f"; the model has {longest} learned positions" if max_length > longest else ""),
            rule="the prompt and the generated tokens fit into max_length and into the model's positions",
            hint=f"a max_length from {length} to {longest}" if length <= longest else "shorter prompts",
        ).located("decode")
    _, (own, others) = model.read(batch, layer_runner(RecordingAttention))
    own = [wf.unstack(wf.pad(t, "memory_length", 0, max_length - length), "layers") for t in own]
    others = [wf.unstack(t, "layers") for t in others or ()]
    segments = batch.input_segments
    mask = None if segments is None else segments.rename(length="memory_length") > 0
    return KVCache(tuple(map(LayerCache, *own, *others)), mask)


def all_logits(model: Transformer, batch: Batch) -> Tensor:
    """The logits of all positions at once, equal to those of decoding: exact attention, no dropped tokens.

    Args:
      model: a decoder or an encoder-decoder.
      batch: the tokens, and the inputs of an encoder.
    """
    check_decodable(model)
    return model.project(model.read(batch, layer_runner(RecordingAttention))[0])


def unstack_layers(model: Transformer) -> Transformer:
    """The model with its decoder's layers as a tuple, in the compute dtype.

    Call this once before a loop of steps: otherwise every step copies each layer's parameters out of the
    stacked ones. A model whose layers are unstacked already is returned as it is.
    """
    check_decodable(model)
    stack = model.decoder
    assert stack is not None
    if isinstance(stack.blocks, tuple):
        return model
    # Cast once here: inside the loop every step would cast the parameters again.
    blocks = nn.cast(stack.blocks, model.config.compute)
    layers = [
        jax.tree.map(lambda t, n=n: t["layers", n], blocks, is_leaf=wf.is_tensor)
        for n in range(stack.layers.size)
    ]
    return eqx.tree_at(lambda m: m.decoder.blocks, model, tuple(layers))


def decode_step(
    model: Transformer, cache: KVCache, token: Tensor, position: Tensor
) -> tuple[Tensor, KVCache]:
    """The logits of the next token, and the cache with the keys and values of this one.

    Args:
      model: a decoder or an encoder-decoder.
      cache: the cache so far.
      token: the last token of each row, over `batch`, and over `beam` in a beam search.
      position: its position in the row, over `batch`.
    """
    one = wf.Dim("length", 1)
    here = wf.broadcast_to(position, [*position.dims, one])
    around = LayerContext(
        AttentionMask(here, None, None, wf.arange(cache.positions), None, False, None),
        # Only marks that there is an encoder: cross-attention reads its keys and values from the cache.
        memory=cache.layers[0].memory_keys,
        memory_sight=AttentionMask(here, None, None, here.rename(length="memory_length"), None, False, None),
        exact=True,
    )
    x = model.embedding(wf.broadcast_to(token, [*token.dims, one]))
    c = model.config
    positions = wf.arange(cache.positions)
    mask = positions <= position
    if c.attention == "local":
        mask = mask & (positions > position - c.window)
    if cache.lineage is not None:
        _, beam = token.dims
        lineage = _write(cache.lineage, position, wf.arange(beam))
        cache = dataclasses.replace(cache, lineage=lineage)
        # A beam attends to an entry if its lineage names the beam that wrote it.
        mask = mask & (lineage == wf.arange(beam.rename("memory_beam")))
    attentions = [_CachedAttention(layer, position, mask, cache.memory_mask) for layer in cache.layers]

    def layers(stack: Stack, x: Tensor, around: LayerContext, key: jax.Array | None) -> tuple[Tensor, None]:
        streams = _streams(c, x)
        blocks = cast(tuple[Block, ...], stack.blocks)  # `unstack_layers` made them a tuple
        for block, attention in zip(blocks, attentions, strict=True):
            streams = _layer(c, block, around, streams, attention)
        return _merge_streams(streams), None

    decoder = unstack_layers(model).decoder
    assert decoder is not None
    x, _ = decoder(x, around, None, layers)
    cache = dataclasses.replace(cache, layers=tuple(attention.cache for attention in attentions))
    return model.project(wf.sum(x, one)), cache


def _write(old: Tensor, position: Tensor, new: Tensor) -> Tensor:
    """Write an entry at the position of each row."""
    return wf.vmap(lambda old, position, new: wf.update(old, "memory_length", position, new), "batch")(
        old, position, new
    )


def _as_entry(new: Tensor) -> Tensor:
    """A new key or value with the dim names of the cache."""
    return new.rename(**{d.name: "memory_beam" for d in new.dims if d.name == "beam"})


class _Recorder(Protocol):
    """An `AttentionFn` that records a result for each attention site."""

    own: Any
    others: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


def layer_runner(attend: Callable[[], _Recorder]) -> RunLayers:
    """Run the layers over all positions at once, and return the records of their attention.

    Args:
      attend: makes the attention function of one layer.
    """

    def run(stack: Stack, x: Tensor, around: LayerContext, key: jax.Array | None) -> tuple[Tensor, Any]:
        c = stack.config

        def layer(streams: tuple[Tensor, ...], block: Block) -> tuple[tuple[Tensor, ...], Any]:
            recorder = attend()
            return _layer(c, block, around, streams, recorder), (recorder.own, recorder.others)

        streams, records = wf.scan(layer, _streams(c, x), stack.blocks, stack.layers, unroll=c.unroll)
        return _merge_streams(streams), records

    return run


def _streams(c: Config, x: Tensor) -> tuple[Tensor, ...]:
    """A reversible model has two residual streams, the others one."""
    return (x, x) if c.residual == "reversible" else (x,)


def _layer(
    c: Config, block: Block, around: LayerContext, streams: tuple[Tensor, ...], attend: AttentionFn
) -> tuple[Tensor, ...]:
    for branch in nn.cast(block, c.compute).branches(around, Dropout(0.0, None), attend):
        streams = (*streams[1:], streams[0] + branch(streams[-1])[0])
    return streams


def _merge_streams(streams: tuple[Tensor, ...]) -> Tensor:
    return streams[0] if len(streams) == 1 else (streams[0] + streams[1]) / 2


class RecordingAttention:
    """Attention over all positions at once that records the keys and values."""

    def __init__(self) -> None:
        self.own: Any = None
        self.others: Any = None

    def __call__(
        self,
        site: str,
        attention: nn.Attention | nn.LSHAttention,
        x: Tensor,
        memory: Tensor,
        *,
        visible: Tensor | None,
        bias: Tensor | None = None,
        rotate: Transform | None = None,
        drop: Transform | None = None,
    ) -> Tensor:
        q, k, v = attention.project(x, memory, rotate)
        if site == "memory":
            self.others = k, v
        else:
            self.own = k, v
            if isinstance(attention, nn.LSHAttention):
                # LSH attention lets a token attend to itself only if it has nothing else to attend to.
                length = next(d for d in q.dims if d.name == "length")
                is_self = wf.arange(length) == wf.arange(length.rename("memory_length"))
                bias = wf.where(is_self, -SELF_PENALTY, 0.0)
        return _attend(attention, q, k, v, visible, bias)


class _CachedAttention:
    """Attention of one new position to the cache, which it first adds its own key and value to."""

    def __init__(self, cache: LayerCache, position: Tensor, mask: Tensor, memory_mask: Tensor | None):
        self.cache, self.position, self.mask, self.memory_mask = cache, position, mask, memory_mask

    def __call__(
        self,
        site: str,
        attention: nn.Attention | nn.LSHAttention,
        x: Tensor,
        memory: Tensor,
        *,
        bias: Tensor | None = None,
        rotate: Transform | None = None,
        **_: Any,  # the mask follows from the position, and there is no dropout
    ) -> Tensor:
        cache = self.cache
        if site == "memory":
            assert cache.memory_keys is not None and cache.memory_values is not None
            full = cast(nn.Attention, attention)  # cross-attention never hashes
            q = full.query(x, out=full.order(x, full.heads))
            return _attend(full, q, cache.memory_keys, cache.memory_values, self.memory_mask, None)
        q, *new = attention.project(x, memory, rotate)
        k, v = (_as_entry(t["memory_length", 0]) for t in new)
        keys, values = _write(cache.keys, self.position, k), _write(cache.values, self.position, v)
        self.cache = dataclasses.replace(cache, keys=keys, values=values)
        if isinstance(attention, nn.LSHAttention):
            (positions,) = (d for d in keys.dims if d.name == "memory_length")
            bias = wf.where(wf.arange(positions) == self.position, -SELF_PENALTY, 0.0)
        return _attend(attention, q, keys, values, self.mask, bias)


def _attend(
    attention: nn.Attention | nn.LSHAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Dot-product attention for few queries and many keys, with the output projection.

    The keys come first in the einsum, so that its result has their dims in front and the keys are not
    transposed. Where `memory_length` is split, only the maximum score, the sum of the weights and the result
    are communicated.
    """
    if getattr(attention, "scaled", False):
        q = q * attention.d_kv.size**-0.5
    both = [d for d in k.dims if d in q.dims and d != attention.d_kv]
    rest, memory = ([d for d in a.dims if d not in b.dims] for a, b in ((q, k), (k, q)))
    scores = wf.einsum(k, q, out=[*both, *memory, *rest]).astype(jnp.float32)
    scores = wf.transpose(scores, [*both, *rest, *memory])
    scores = scores if bias is None else scores + bias.astype(jnp.float32)
    scores = scores if mask is None else wf.where(mask, scores, MASK_VALUE)
    # Dividing after the sum over positions normalizes the small result instead of all weights.
    weights = wf.exp(scores - wf.max(scores, memory))
    mixed = wf.einsum(weights.astype(v.dtype), v, out=[*both, *rest, attention.d_kv])
    return attention.out((mixed / wf.sum(weights, memory)).astype(q.dtype))
