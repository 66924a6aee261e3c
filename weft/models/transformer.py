"""The Transformer: from tokens to logits and a loss, in one file that knows nothing of meshes.

Decoder (language models), encoder, and encoder-decoder (translation), by the numbers of a `Config`. Read it
from top to bottom: the mask (`AttentionMask`), one layer (`Block`), a stack of layers (`Stack`), the model
(`Transformer`).

Every dim has a name, and a layout splits by these names:

    batch length memory_length d_model d_ff heads kv_heads d_kv vocab experts layers

`length` are the places of a sequence, `memory_length` those that it attends to. Layers are stacked on the dim
`layers` and run by one loop, so depth costs no program text; a layout that splits `layers` makes a pipeline.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

import weft as wf
from weft import nn
from weft.core.errors import ModelError
from weft.core.tensor import Tensor

from .batch import Batch, as_batch, invalid_batch
from .config import Config, ModelDims

# What a sequence sees


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMask:
    """A sequence's places, and which of another one (or of its own) they may attend to."""

    places: Tensor
    segments: Tensor | None
    prefix: Tensor | None
    memory_places: Tensor
    memory_segments: Tensor | None
    ordered: bool = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(metadata={"static": True})

    def held(self) -> Tensor | None:
        """Which places hold something, by their segments: 0 is padding. None: all do."""
        return None if self.segments is None else self.segments > 0

    def visible(self) -> Tensor | None:
        """Truth values over `length` and `memory_length`, and `batch` where rows differ; None: all."""
        (length,), (memory,) = self.places.dims[-1:], self.memory_places.dims[-1:]
        masks = []
        if self.ordered:
            seen = nn.causal(length, memory)
            masks.append(seen if self.prefix is None else seen | nn.prefix(memory, self.prefix))
        if self.segments is not None and self.memory_segments is not None:
            masks.append(nn.segments(self.segments, self.memory_segments))
        if self.window is not None:
            masks.append(nn.window(length, memory, self.window))
        return None if not masks else _all(masks)


def _all(masks: list[Tensor]) -> Tensor:
    both = masks[0]
    for mask in masks[1:]:
        both = both & mask
    return both


# One layer


@dataclass(frozen=True)
class Dropout:
    """Dropout at named sites of one layer: each has a key of its own, whatever order they run in."""

    rate: float
    key: Any

    def __call__(self, site: str) -> Callable[[Tensor], Tensor]:
        if not self.rate or self.key is None:
            return lambda x: x
        key = jax.random.fold_in(self.key, zlib.crc32(site.encode()))
        return lambda x: wf.dropout(x, self.rate, key)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerContext:
    """What all layers of a stack share.

    Attributes:
      sight: what places see of their own sequence.
      bias: relative positions, added to the scores.
      memory, memory_sight: the encoder's result, over `memory_length`, and what places see of it.
      exact: whether every token finds room with the experts that it chose.
    """

    sight: AttentionMask
    bias: Tensor | None = None
    memory: Tensor | None = None
    memory_sight: AttentionMask | None = None
    exact: bool = dataclasses.field(default=False, metadata={"static": True})


# A branch of a layer: from x to what is added to it, and a mixture's further losses or None.
ResidualBranch = Callable[[Tensor], tuple[Tensor, nn.GroupLosses | None]]
# How a layer attends, of its own sequence ("own") or of the encoder's ("memory"): what `nn.Attention` is
# called with. Decoding has a way of its own, which remembers keys and values.
AttentionFn = Callable[..., Tensor]


def full_attention(site: str, attention: nn.Attention, x: Tensor, memory: Tensor, **how: Any) -> Tensor:
    """Attend to a memory that is there as a whole."""
    return attention(x, memory, **how)


class Block(nn.Module):
    """Attention, attention to the encoder if there is one, feed-forward: each of x normed, added to x."""

    attention_norm: Any
    attention: nn.Attention | nn.LSHAttention
    memory_norm: Any
    memory_attention: nn.Attention | None
    feed_norm: Any
    feed: Any
    config: Config = eqx.field(static=True)

    def __init__(self, c: Config, with_memory: bool, ordered: bool = False):
        d = c.dims()

        def norm() -> Any:
            return nn.NORMS[c.norm](d.d_model, c.epsilon)

        self.config = c
        self.attention_norm, self.attention = norm(), ATTENTIONS[c.attention if ordered else "full"](c, d)
        self.memory_norm = norm() if with_memory else None
        self.memory_attention = _full(c, d) if with_memory else None
        self.feed_norm = norm() if c.block == "serial" else None
        self.feed = FEED_FORWARDS[c.experts > 0](c, d)

    def branches(
        self, around: LayerContext, drop: Dropout, attend_by: AttentionFn = full_attention
    ) -> list[ResidualBranch]:
        """What is added to x, one after the other."""

        def attend(h: Tensor) -> Tensor:
            sight, rotate = around.sight, None
            if isinstance(self.attention, nn.LSHAttention) and attend_by is full_attention:
                return _hashed(self.attention, h, sight, drop)
            if self.config.positions == "rotary":
                rotate = functools.partial(self._rotate, places=sight.places)
            how = {"visible": sight.visible(), "bias": around.bias, "rotate": rotate, "drop": drop("weights")}
            return attend_by("own", self.attention, h, _memory(h), **how)

        def look_up(x: Tensor) -> Tensor:
            memory, sight = around.memory, around.memory_sight
            assert self.memory_attention is not None and memory is not None and sight is not None
            how = {"visible": sight.visible(), "drop": drop("memory weights")}
            return attend_by("memory", self.memory_attention, self.memory_norm(x), memory, **how)

        def feed(h: Tensor) -> tuple[Tensor, nn.GroupLosses | None]:
            c = self.config
            if not c.experts:
                return _in_chunks(lambda h: self.feed(h, drop("wide")), h, c.feed_chunks), None
            return self.feed.by_group(h, drop("wide"), around.exact, around.sight.held())

        def both(x: Tensor) -> tuple[Tensor, nn.GroupLosses | None]:
            h = self.attention_norm(x)
            fed, extra = feed(h)
            return attend(h) + fed, extra

        memory: dict[str, ResidualBranch] = {}
        if self.memory_attention is not None:
            memory = {"memory": lambda x: (look_up(x), None)}
        if self.config.block == "parallel":
            sites = memory | {"both": both}
        else:
            sites = {"attention": lambda x: (attend(self.attention_norm(x)), None)} | memory
            sites |= {"feed": lambda x: feed(self.feed_norm(x))}
        return [functools.partial(_dropped, f, drop(site)) for site, f in sites.items()]

    def _rotate(self, x: Tensor, places: Tensor) -> Tensor:
        if "memory_length" in {d.name for d in x.dims}:
            places = _memory(places)
        c = self.config
        return nn.rotary(x, places, self.attention.d_kv, c.rotary_base, c.rotary_stretch)


def _full(c: Config, d: ModelDims) -> nn.Attention:
    return nn.Attention(d.d_model, d.heads, d.d_kv, d.kv_heads, bias=c.bias, scaled=c.scaled)


def _lsh(c: Config, d: ModelDims) -> nn.LSHAttention:
    asked = [f'positions="{c.positions}"'] if c.positions in ("rotary", "relative") else []
    asked += [f"kv_heads={c.kv_heads}"] if c.kv_heads not in (None, c.heads) else []
    if asked:
        raise wf.ProgramError(
            f'attention="lsh" does not go with {" and ".join(asked)}',
            rule="LSH attention has as many key heads as query heads, and no positions inside",
            hint='positions="learned", "sinusoid" or "none", and kv_heads=None',
        ).located()
    return nn.LSHAttention(d.d_model, d.heads, d.d_kv, chunk=c.lsh_chunk, rounds=c.lsh_rounds, bias=c.bias)


def _hashed(attention: nn.LSHAttention, h: Tensor, sight: AttentionMask, drop: Dropout) -> Tensor:
    if sight.prefix is not None:
        raise wf.ProgramError(
            'attention="lsh" was given a prefix',
            rule="LSH attention sees earlier places alone",
            hint='leave Batch.prefix out, or use attention="full"',
        ).located()
    key, places = _fold(drop.key, "hash"), wf.arange(sight.places.dims[-1])
    return attention(h, places, sight.segments, key=key, drop=drop("weights"))


ATTENTIONS: dict[str, Callable[[Config, ModelDims], Any]] = {"full": _full, "local": _full, "lsh": _lsh}


def _dense(c: Config, d: ModelDims) -> nn.FeedForward:
    return nn.FeedForward(d.d_model, d.d_ff, c.activation, bias=c.bias)


def _experts(c: Config, d: ModelDims) -> nn.MixtureOfExperts:
    asked = ['residual="reversible"'] if c.residual == "reversible" else []
    asked += [f"feed_chunks={c.feed_chunks}"] if c.feed_chunks > 1 else []
    if asked:
        raise wf.ProgramError(
            f"experts={c.experts} does not go with {' and '.join(asked)}",
            rule="a mixture has losses of its own, and counts the tokens of a whole row",
            hint='residual="plain" (with remat= it needs little memory too), and feed_chunks=1',
        ).located()
    experts = wf.Dim("experts", c.experts)
    return nn.MixtureOfExperts(
        d.d_model,
        d.d_ff,
        experts,
        top=c.expert_top,
        capacity=c.capacity,
        activation=c.activation,
        bias=c.bias,
    )


FEED_FORWARDS: dict[bool, Callable[[Config, ModelDims], Any]] = {False: _dense, True: _experts}


def _dropped(
    f: ResidualBranch, drop: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[Tensor, nn.GroupLosses | None]:
    y, extra = f(x)
    return drop(y), extra


# A stack of layers


# How the layers of a stack are run: from x, what they share and a key to the result and what else they give.
RunLayers = Callable[["Stack", Tensor, LayerContext, Any], tuple[Tensor, Any]]


class Stack(nn.Module):
    """Positions, layers one after the other, a last norm."""

    positions: nn.LearnedPositions | None
    relative: nn.RelativePositions | None
    blocks: Block
    norm: Any
    layers: wf.Dim = eqx.field(static=True)
    ordered: bool = eqx.field(static=True)
    config: Config = eqx.field(static=True)

    def __init__(self, c: Config, layers: int, *, ordered: bool, with_memory: bool = False):
        d = c.dims()
        self.config, self.layers, self.ordered = c, wf.Dim("layers", layers), ordered
        learned, relative = c.positions == "learned", c.positions == "relative"
        self.positions = nn.LearnedPositions(c.longest, d.d_model) if learned else None
        heads = [d.heads] if d.kv_heads is None else [d.kv_heads, d.heads]
        self.relative = nn.RelativePositions(heads, both_ways=not ordered) if relative else None
        self.blocks = nn.stack(Block(c, with_memory, ordered), self.layers)
        self.norm = nn.NORMS[c.norm](d.d_model, c.epsilon)

    def __call__(
        self, x: Tensor, around: LayerContext, key: Any, layers: RunLayers | None = None
    ) -> tuple[Tensor, Any]:
        """The result, and what the layers give beside it: their further losses added up, or None.

        Args:
          x: the embedded tokens.
          around: what layers share.
          key: for dropout; None: without.
          layers: how the layers are run; by default as `Config.residual` says.
        """
        c, places = self.config, around.sight.places
        if self.positions is not None:
            x = x + self.positions(places)
        if c.positions == "sinusoid":
            x = x + nn.sinusoid(places, self.norm.dim)
        if self.relative is not None:
            bias = self.relative(places, around.sight.memory_places)
            around = dataclasses.replace(around, bias=bias)
        x = Dropout(c.dropout, key)("embedding")(x).astype(c.compute)
        x, extra = (layers or RESIDUALS[c.residual])(self, x, around, key)
        return Dropout(c.dropout, key)("last")(self.norm(x)), extra

    def keys(self, key: Any) -> Any:
        """A key for each layer, or None for each if there is none."""
        return None if key is None else jax.random.split(key, self.layers.size)


class LayerCarry(NamedTuple):
    """What runs through the layers: x, a mixture's losses so far, and the encoder's result."""

    x: Tensor
    losses: nn.GroupLosses | None
    memory: Tensor | None


def _plain(stack: Stack, x: Tensor, around: LayerContext, key: Any) -> tuple[Tensor, Tensor | None]:
    """x + each branch of x, layer by layer."""
    c = stack.config

    def layer(stream: LayerCarry, given: Any, around: LayerContext) -> LayerCarry:
        (x, losses, memory), (block, key) = stream, given
        around = dataclasses.replace(around, memory=memory)
        for branch in nn.cast(block, c.compute).branches(around, Dropout(c.dropout, key)):
            y, more = branch(x)
            x = x + y
            if losses is not None and more is not None:
                losses = nn.GroupLosses(*(a + b for a, b in zip(losses, more, strict=True)))
        return LayerCarry(x, losses, memory)

    losses = None
    if c.experts:
        rows = wf.zeros([d for d in x.dims if d.name == "batch"], jnp.promote_types(x.dtype, jnp.float32))
        losses = nn.GroupLosses(rows, rows)
    stream = wf.pipeline(
        layer,
        LayerCarry(x, losses, around.memory),
        (stack.blocks, stack.keys(key)),
        stack.layers,
        micro=c.pipeline_micro,
        shared=(dataclasses.replace(around, memory=None),),
        schedule=c.pipeline,
        remat=c.remat,
        unroll=c.unroll,
    )
    if stream.losses is None:
        return stream.x, None
    tokens = next(d.size for d in x.dims if d.name == "length")
    means = stream.losses.mean(tokens, around.sight.held())
    return stream.x, c.balance * means.balance + c.router_z * means.z


def _reversible(stack: Stack, x: Tensor, around: LayerContext, key: Any) -> tuple[Tensor, None]:
    """Two streams, of which the backward pass has the earlier ones from the later ones."""
    c = stack.config

    def branches(given: Any, around: LayerContext) -> list[Callable[[Tensor], Tensor]]:
        block, key = given
        made = nn.cast(block, c.compute).branches(around, Dropout(c.dropout, key))
        return [lambda x, branch=branch: branch(x)[0] for branch in made]  # type: ignore[misc]

    # Both streams start as x, and their mean is the result, so that it has the width of x. (The Reformer
    # concatenates them.)
    a, b = nn.reversible(branches, x, x, (stack.blocks, stack.keys(key)), stack.layers, around)
    return (a + b) / 2, None


RESIDUALS = {"plain": _plain, "reversible": _reversible}


def _in_chunks(f: Callable[[Tensor], Tensor], x: Tensor, chunks: int) -> Tensor:
    """f of x, piece by piece of its length, so that what is between is held for one piece at a time."""
    return f(x) if chunks == 1 else nn.chunked(f, x, "length", chunks)


# The model


class Transformer(nn.Module):
    """A Transformer, by its `Config`.

    model = nn.init(Transformer(Config(vocab=8192)), jax.random.key(0))
    logits = model.logits(Batch(tokens))
    loss = model.loss(Batch(tokens, targets), key)
    """

    embedding: nn.Embedding
    encoder: Stack | None
    decoder: Stack | None
    last: nn.Linear | None
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config):
        d = config.dims()
        self.config = config
        # As the last layer too, rows of unit variance would make logits of the size of sqrt(d_model).
        small = nn.fan_in([d.d_model]) if config.tied and not config.scale_logits else None
        self.embedding = nn.Embedding(d.vocab, d.d_model, small)
        two = config.kind == "encoder_decoder"
        depth = config.decoder_layers or config.layers
        self.encoder = Stack(config, config.layers, ordered=False) if config.kind != "decoder" else None
        self.decoder = (
            Stack(config, depth, ordered=True, with_memory=two) if config.kind != "encoder" else None
        )
        self.last = None if config.tied else nn.Linear([d.d_model], [d.vocab])

    def encode(self, batch: Batch, key: Any = None) -> Tensor:
        """The encoder's result."""
        return self._encode(as_batch(batch, self.config), key)[0]

    def features(self, batch: Batch, key: Any = None, memory: Tensor | None = None) -> Tensor:
        """What the last layer makes logits of, over `length` and `d_model`.

        Args:
          batch: what is read.
          key: for dropout; None: without.
          memory: what `encode` gave for the same batch and key, to spare the encoder.
        """
        return self._features(as_batch(batch, self.config), key, memory)[0]

    def read(self, batch: Batch, layers: RunLayers) -> tuple[Tensor, Any]:
        """The features, with layers that are run in another way, and what these give beside them.

        For decoding: no token is turned away by the experts.

        Args:
          batch: what is read.
          layers: how the decoder's layers are run.
        """
        batch = as_batch(batch, self.config)
        memory = None if self.encoder is None else self._encode(batch, None, exact=True)[0]
        return self._features(batch, None, memory, layers=layers, exact=True)

    def _encode(self, batch: Batch, key: Any, exact: bool = False) -> tuple[Tensor, Tensor | None]:
        assert self.encoder is not None
        own = batch.tokens, batch.places, batch.segments
        if self.decoder is not None:
            assert batch.inputs is not None
            own = batch.inputs, batch.input_places, batch.input_segments
        return self._run(self.encoder, *own, _fold(key, "encoder"), exact=exact)

    def _features(
        self, batch: Batch, key: Any, memory: Tensor | None = None, **how: Any
    ) -> tuple[Tensor, Any]:
        if self.decoder is None:
            return self._encode(batch, key)
        more: dict[str, Any] = {"prefix": batch.prefix, **how}
        encoded = None
        if self.encoder is not None:
            if memory is None:
                memory, encoded = self._encode(batch, key)
            assert batch.inputs is not None
            places, seen = _places(batch.inputs, batch.input_places), _memory(batch.input_segments)
            own, segments = _places(batch.tokens, batch.places), batch.segments
            if segments is None and seen is not None:
                segments = wf.ones(batch.tokens.dims, seen.dtype)
            more["memory"] = _memory(memory)
            more["memory_sight"] = AttentionMask(own, segments, None, _memory(places), seen, False, None)
        x, extra = self._run(
            self.decoder,
            batch.tokens,
            batch.places,
            batch.segments,
            _fold(key, "decoder"),
            **more,
        )
        return x, extra if encoded is None or extra is None else extra + encoded

    def _run(
        self,
        stack: Stack,
        tokens: Tensor,
        places: Tensor | None,
        segments: Tensor | None,
        key: Any,
        prefix: Tensor | None = None,
        layers: RunLayers | None = None,
        **around: Any,
    ) -> tuple[Tensor, Any]:
        longest, size = self.config.longest, tokens.dims[-1].size
        if places is None and stack.positions is not None and size > longest:
            raise ModelError(
                f"a sequence of {size} places, and the model has learned {longest}",
                rule="learned positions end at Config.longest",
                hint=f"longest={size}, or positions that don't end: sinusoid, relative, rotary",
            ).located()
        places = _places(tokens, places)
        window = self.config.window if self.config.attention == "local" else None
        sight = AttentionMask(
            places, segments, prefix, _memory(places), _memory(segments), stack.ordered, window
        )
        return stack(self.embedding(tokens), LayerContext(sight, **around), key, layers)

    def project(self, features: Tensor) -> Tensor:
        """The logits of features, in float32."""
        compute = self.config.compute
        if self.config.scale_logits:
            features = features * self.config.d_model**-0.5
        if self.last is None:
            return nn.cast(self.embedding, compute).logits(features).astype(jnp.float32)
        return nn.cast(self.last, compute)(features).astype(jnp.float32)

    def logits(self, batch: Batch, key: Any = None) -> Tensor:
        """The unnormalised log-probabilities of each token at each place."""
        return self.project(self.features(batch, key))

    def loss(self, batch: Batch, key: Any = None) -> Tensor:
        """The mean cross-entropy of the targets, with a mixture its own losses; with a key, under dropout."""
        c, batch = self.config, as_batch(batch, self.config)
        targets = _targets(batch)
        features, extra = self._features(batch, key)

        def of(features: Tensor, targets: Tensor) -> Tensor:
            vocab = self.embedding.vocab
            return nn.cross_entropy(
                self.project(features), targets, vocab, smoothing=c.smoothing, z_loss=c.z_loss
            )

        if c.loss_chunks == 1:
            losses = of(features, targets)
        else:
            losses = nn.chunked(of, (features, targets), "length", c.loss_chunks)
        if batch.weights is None:
            loss = wf.mean(losses)
        else:
            total = self.loss_weight(batch)
            loss = wf.sum(losses * batch.weights) / wf.where(total > 0, total, 1.0)
        return loss if extra is None else loss + extra

    def loss_weight(self, batch: Batch) -> Tensor | int:
        """What `loss` divides by: the number of targets, or the sum of their weights. (By 1 if that is 0.)"""
        targets = _targets(batch)
        if batch.weights is None:
            return targets.size
        weights = batch.weights.astype(jnp.promote_types(batch.weights.dtype, jnp.float32))
        return wf.sum(weights)


def _targets(batch: Any) -> Tensor:
    if not isinstance(batch, Batch) or batch.targets is None:
        raise invalid_batch("a loss needs targets, and this is a batch without targets")
    return batch.targets


def _memory(t: Any) -> Any:
    """The same places, as those that are attended to."""
    return None if t is None else t.rename(length="memory_length")


def _places(tokens: Tensor, places: Tensor | None) -> Tensor:
    return places if places is not None else wf.arange(tokens.dims[-1])


def _fold(key: Any, name: str) -> Any:
    return None if key is None else jax.random.fold_in(key, zlib.crc32(name.encode()))
