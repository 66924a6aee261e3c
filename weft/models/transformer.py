"""The Transformer: from tokens to logits and a loss, in one file that knows nothing of meshes.

Decoder (language models), encoder, and encoder-decoder (translation). Read it from top to bottom: the numbers
(`Config`), one layer (`Block`), a stack of them (`Stack`), the model (`Transformer`).

Every dim has a name, and a layout splits by these names:

    batch length memory_length d_model d_ff heads kv_heads d_kv vocab experts layers

`length` are the places of a sequence, `memory_length` those that it attends to. Layers are stacked on the dim
`layers` and run by one `wf.scan`, so depth costs no program text.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import weft as wf
from weft import nn
from weft.autodiff import POLICIES
from weft.errors import ModelError, nearest
from weft.tensor import Tensor

# The numbers


@dataclass(frozen=True)
class Config:
    """What a Transformer is.

    Attributes:
      kind: "decoder", "encoder" or "encoder_decoder".
      vocab, d_model, d_ff, heads, d_kv, layers: the sizes; `layers` are those of each stack.
      decoder_layers: the decoder's, if it has others than the encoder.
      kv_heads: key heads, if they are fewer than the query heads: 1 is multi-query, more is grouped.
      longest: the longest sequence; the number of learned positions.
      positions: "learned", "sinusoid", "relative" (T5's buckets), "rotary" or "none".
      rotary_base: the longest rotary wave is 2π times this.
      rotary_stretch: Llama 3's longer waves: factor, low, high, length; see `nn.rotary`.
      norm, epsilon: "rms" or "layer", and what is added under its root.
      activation: of the feed-forward block, a name of `nn.ACTIVATIONS`.
      bias: whether linear maps have one.
      scaled: whether attention scores are divided by sqrt(d_kv).
      tied: whether the embedding is the last layer too.
      scale_logits: whether the last layer's input is multiplied by d_model^-½ (T5 v1.0).
      attention: "full", "local" (a window of `window` places) or "lsh" (the Reformer's, decoder only).
      lsh_chunk, lsh_rounds: of LSH attention, the places in a chunk and the number of hashes.
      block: "serial", or "parallel": attention and feed-forward side by side, with one sum for both.
      residual: "plain" or "reversible": the backward pass computes activations anew, layer by layer.
      remat: what the backward pass does not compute anew, a policy of `wf.remat`; None: all is kept.
      feed_chunks, loss_chunks: in how many pieces of the sequence the feed-forward block and the loss are
        done, to hold less at once.
      experts: how many feed-forward blocks a mixture has; 0: no mixture.
      expert_top, capacity: how many experts see a token, and each one's room, in even shares.
      balance, router_z: the factors of the mixture's own losses.
      dropout: the rate, where a key is given.
      smoothing, z_loss: of the cross-entropy.
      compute: the type of activations and products; parameters, norms, softmax and loss are float32.
    """

    kind: str = "decoder"
    vocab: int = 32_768
    d_model: int = 512
    d_ff: int = 2048
    heads: int = 8
    d_kv: int = 64
    layers: int = 6
    decoder_layers: int | None = None
    kv_heads: int | None = None
    longest: int = 512
    positions: str = "learned"
    rotary_base: float = 10_000.0
    rotary_stretch: tuple[float, float, float, float] | None = None
    norm: str = "rms"
    epsilon: float = 1e-6
    activation: str = "relu"
    bias: bool = False
    scaled: bool = True
    tied: bool = False
    scale_logits: bool = False
    attention: str = "full"
    window: int = 128
    lsh_chunk: int = 64
    lsh_rounds: int = 2
    block: str = "serial"
    residual: str = "plain"
    remat: str | None = None
    feed_chunks: int = 1
    loss_chunks: int = 1
    experts: int = 0
    expert_top: int = 1
    capacity: float = 1.25
    balance: float = 0.01
    router_z: float = 0.001
    dropout: float = 0.0
    smoothing: float = 0.0
    z_loss: float = 0.0
    compute: str = "float32"

    def __post_init__(self) -> None:
        for name, known in _KNOWN.items():
            value = getattr(self, name)
            if value not in known:
                raise ModelError(
                    f"{name}={value!r}{nearest(str(value), [str(k) for k in known])}",
                    rule=f"{name} is one of {', '.join(map(repr, known))}",
                    hint="help(weft.models.Config) says what each is",
                ).located("Config")
        sizes = {n: getattr(self, n) for n in _POSITIVE if getattr(self, n) is not None}
        small = [f"{n}={size}" for n, size in sizes.items() if not size >= 1]
        if small:
            raise ModelError(
                ", ".join(small),
                rule="sizes are whole numbers from 1 on",
                hint="help(weft.models.Config) says what each is",
            ).located("Config")
        if self.positions == "rotary" and self.d_kv % 2:
            raise ModelError(
                f'd_kv={self.d_kv} with positions="rotary"',
                rule="rotary positions turn pairs of features, so d_kv is even",
                hint=f"d_kv={self.d_kv + 1}, or other positions",
            ).located("Config")

    def dims(self) -> Dims:
        return Dims(self)

    def replace(self, **changes: Any) -> Config:
        """The same with some numbers changed."""
        return dataclasses.replace(self, **changes)

    @property
    def parameter_count(self) -> int:
        return nn.count(Transformer(self))


_KNOWN: dict[str, tuple[Any, ...]] = {
    "kind": ("decoder", "encoder", "encoder_decoder"),
    "positions": ("learned", "sinusoid", "relative", "rotary", "none"),
    "norm": tuple(nn.NORMS),
    "activation": tuple(nn.ACTIVATIONS),
    "attention": ("full", "local", "lsh"),
    "block": ("serial", "parallel"),
    "residual": ("plain", "reversible"),
    "remat": (None, *POLICIES),
    "compute": ("float32", "bfloat16", "float16", "float64"),
}
_POSITIVE = tuple(
    "vocab d_model d_ff heads kv_heads d_kv layers decoder_layers longest window".split()
    + ["feed_chunks", "loss_chunks"]
)


class Dims:
    """The dims of a model: those that its parameters have."""

    def __init__(self, c: Config):
        self.vocab, self.d_model = wf.Dim("vocab", c.vocab), wf.Dim("d_model", c.d_model)
        self.d_ff, self.d_kv = wf.Dim("d_ff", c.d_ff), wf.Dim("d_kv", c.d_kv)
        shared = c.kv_heads or c.heads
        if c.heads % shared:
            raise ModelError(
                f"{c.heads} heads can't share {shared} key heads",
                rule="every key head is shared by as many query heads",
                hint=f"kv_heads is a divisor of {c.heads}",
            )
        self.heads = wf.Dim("heads", c.heads if shared == c.heads else c.heads // shared)
        self.kv_heads = wf.Dim("kv_heads", shared) if shared != c.heads else None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows of tokens, each over `batch` and `length`.

    Attributes:
      tokens: what the model reads: the decoder's, or those of a model with one stack.
      targets: what it should say at each place.
      weights: how much each place counts in the loss; None: all alike.
      places: the number of each place in its example; None: from 0 on.
      segments: which example of a packed row each place is of; None: one example in a row.
      prefix: by row, how many places at its beginning all may see (a prefix LM).
      inputs, input_places, input_segments: the encoder's, of an encoder-decoder.
    """

    tokens: Tensor
    targets: Tensor | None = None
    weights: Tensor | None = None
    places: Tensor | None = None
    segments: Tensor | None = None
    prefix: Tensor | None = None
    inputs: Tensor | None = None
    input_places: Tensor | None = None
    input_segments: Tensor | None = None

    def checked(self, config: Config) -> Batch:
        """The batch with all rows' dims in one order, or an error that names the field that is wrong."""
        two, given = config.kind == "encoder_decoder", dict[str, Tensor]()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                if not isinstance(value, Tensor):
                    raise _bad_batch(f"{field.name} is a {type(value).__name__}, not a tensor")
                given[field.name] = value
        if two and "inputs" not in given:
            raise _bad_batch("the encoder-decoder has no inputs to read")
        for first, names in (("tokens", _OWN), ("inputs", _INPUTS)):
            for name in (n for n in names if n in given):
                dims, expected = given[name].dims, given[first].dims
                if "length" not in {d.name for d in expected}:
                    raise _bad_batch(f"{first}{list(expected)} has no dim length")
                places = name.endswith("places") and {d.name for d in dims} == {"length"}
                if name != "prefix" and not places and set(dims) != set(expected):
                    raise _bad_batch(f"{name}{list(dims)} has other dims than {first}{list(expected)}")
                rest = [d for d in expected if d.name != "length"]
                order = [d for d in (*rest, *(d for d in expected if d.name == "length")) if d in dims]
                given[name] = wf.transpose(given[name], order) if tuple(order) != dims else given[name]
        return Batch(**given)


_OWN = ("tokens", "targets", "weights", "places", "segments", "prefix")
_INPUTS = ("inputs", "input_places", "input_segments")


def _bad_batch(fact: str) -> ModelError:
    return ModelError(
        fact,
        rule="the rows of a Batch are tensors over batch and length, those of one sequence over the same",
        hint="Batch(tokens, targets, inputs=...), each wf.tensor(array, [batch, length])",
    ).located("Batch")


def shifted(targets: Tensor, segments: Tensor | None = None) -> Tensor:
    """What a decoder reads to say the targets: each one's predecessor, and 0 at the start of an example."""
    tokens = wf.shift(targets, "length", 1)
    if segments is None:
        return tokens
    return wf.where(segments == wf.shift(segments, "length", 1), tokens, 0)


# What a sequence sees


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sight:
    """A sequence's places, and which of another one (or of its own) they may attend to."""

    places: Tensor
    segments: Tensor | None
    prefix: Tensor | None
    memory_places: Tensor
    memory_segments: Tensor | None
    ordered: bool = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(metadata={"static": True})

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
class Drop:
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
class Around:
    """What all layers of a stack share.

    Attributes:
      sight: what places see of their own sequence.
      bias: relative positions, added to the scores.
      memory, memory_sight: the encoder's result, over `memory_length`, and what places see of it.
      weights: 0 for places that hold nothing; None: all do.
    """

    sight: Sight
    bias: Tensor | None = None
    memory: Tensor | None = None
    memory_sight: Sight | None = None
    weights: Tensor | None = None


# A branch of a layer: from x to what is added to it, and a further loss or None.
Branch = Callable[[Tensor], tuple[Tensor, Tensor | None]]


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
        self.feed = FEEDS[c.experts > 0](c, d)

    def branches(self, around: Around, drop: Drop) -> list[Branch]:
        """What is added to x, one after the other."""

        def attend(h: Tensor) -> Tensor:
            sight, rotate = around.sight, None
            if isinstance(self.attention, nn.LSHAttention):
                return _hashed(self.attention, h, sight, drop)
            if self.config.positions == "rotary":
                rotate = functools.partial(self._rotate, places=sight.places)
            visible, weights = sight.visible(), drop("weights")
            return self.attention(h, _memory(h), visible, bias=around.bias, rotate=rotate, drop=weights)

        def look_up(x: Tensor) -> Tensor:
            memory, sight = around.memory, around.memory_sight
            assert self.memory_attention is not None and memory is not None and sight is not None
            h, weights = self.memory_norm(x), drop("memory weights")
            return self.memory_attention(h, memory, sight.visible(), drop=weights)

        def feed(h: Tensor) -> tuple[Tensor, Tensor | None]:
            c = self.config
            if not c.experts:
                return _in_chunks(lambda h: self.feed(h, drop("wide")), h, c.feed_chunks), None
            y, losses = self.feed(h, drop("wide"), weights=around.weights)
            return y, c.balance * losses.balance + c.router_z * losses.z

        def both(x: Tensor) -> tuple[Tensor, Tensor | None]:
            h = self.attention_norm(x)
            fed, extra = feed(h)
            return attend(h) + fed, extra

        if self.config.block == "parallel":
            sites: dict[str, Branch] = {"both": both}
        else:
            sites = {"attention": lambda x: (attend(self.attention_norm(x)), None)}
            sites |= {"memory": lambda x: (look_up(x), None)} if self.memory_attention is not None else {}
            sites |= {"feed": lambda x: feed(self.feed_norm(x))}
        return [functools.partial(_dropped, f, drop(site)) for site, f in sites.items()]

    def _rotate(self, x: Tensor, places: Tensor) -> Tensor:
        if "memory_length" in {d.name for d in x.dims}:
            places = _memory(places)
        c = self.config
        return nn.rotary(x, places, self.attention.d_kv, c.rotary_base, c.rotary_stretch)


def _full(c: Config, d: Dims) -> nn.Attention:
    return nn.Attention(d.d_model, d.heads, d.d_kv, d.kv_heads, bias=c.bias, scaled=c.scaled)


def _lsh(c: Config, d: Dims) -> nn.LSHAttention:
    asked = [f'positions="{c.positions}"'] if c.positions in ("rotary", "relative") else []
    asked += [f"kv_heads={c.kv_heads}"] if c.kv_heads not in (None, c.heads) else []
    if asked:
        raise wf.ProgramError(
            f'attention="lsh" does not go with {" and ".join(asked)}',
            rule="LSH attention has as many key heads as query heads, and no positions inside",
            hint='positions="learned", "sinusoid" or "none", and kv_heads=None',
        ).located()
    return nn.LSHAttention(d.d_model, d.heads, d.d_kv, chunk=c.lsh_chunk, rounds=c.lsh_rounds, bias=c.bias)


def _hashed(attention: nn.LSHAttention, h: Tensor, sight: Sight, drop: Drop) -> Tensor:
    if sight.prefix is not None:
        raise wf.ProgramError(
            'attention="lsh" was given a prefix',
            rule="LSH attention sees earlier places alone",
            hint='leave Batch.prefix out, or use attention="full"',
        ).located()
    key, places = _fold(drop.key, "hash"), wf.arange(sight.places.dims[-1])
    return attention(h, places, sight.segments, key=key, drop=drop("weights"))


ATTENTIONS: dict[str, Callable[[Config, Dims], Any]] = {"full": _full, "local": _full, "lsh": _lsh}


def _dense(c: Config, d: Dims) -> nn.FeedForward:
    return nn.FeedForward(d.d_model, d.d_ff, c.activation, bias=c.bias)


def _experts(c: Config, d: Dims) -> nn.MixtureOfExperts:
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


FEEDS: dict[bool, Callable[[Config, Dims], Any]] = {False: _dense, True: _experts}


def _dropped(f: Branch, drop: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor | None]:
    y, extra = f(x)
    return drop(y), extra


# A stack of layers


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
        self.relative = nn.RelativePositions(d.heads, both_ways=not ordered) if relative else None
        self.blocks = nn.stack(Block(c, with_memory, ordered), self.layers)
        self.norm = nn.NORMS[c.norm](d.d_model, c.epsilon)

    def __call__(self, x: Tensor, around: Around, key: Any) -> tuple[Tensor, Tensor | None]:
        """The result, and the layers' further losses added up, or None."""
        c, places = self.config, around.sight.places
        if self.positions is not None:
            x = x + self.positions(places)
        if c.positions == "sinusoid":
            x = x + nn.sinusoid(places, self.norm.dim)
        if self.relative is not None:
            bias = self.relative(places, around.sight.memory_places)
            around = dataclasses.replace(around, bias=bias)
        x = Drop(c.dropout, key)("embedding")(x).astype(c.compute)
        x, extra = RESIDUALS[c.residual](self, x, around, key)
        return Drop(c.dropout, key)("last")(self.norm(x)), extra

    def keys(self, key: Any) -> Any:
        """A key for each layer, or None for each if there is none."""
        return None if key is None else jax.random.split(key, self.layers.size)


def _plain(stack: Stack, x: Tensor, around: Around, key: Any) -> tuple[Tensor, Tensor | None]:
    """x + each branch of x, layer by layer."""
    c = stack.config

    def layer(x: Tensor, given: Any) -> tuple[Tensor, Tensor | None]:
        block, key = given
        total = None
        for branch in nn.cast(block, c.compute).branches(around, Drop(c.dropout, key)):
            y, extra = branch(x)
            x = x + y
            total = extra if total is None else total if extra is None else total + extra
        return x, total

    body = layer if c.remat is None else wf.remat(layer, c.remat)
    x, extras = wf.scan(body, x, (stack.blocks, stack.keys(key)), stack.layers)
    return x, None if extras is None else wf.sum(extras)


def _reversible(stack: Stack, x: Tensor, around: Around, key: Any) -> tuple[Tensor, None]:
    """Two streams, of which the backward pass has the earlier ones from the later ones."""
    c = stack.config

    def branches(given: Any, around: Around) -> list[Callable[[Tensor], Tensor]]:
        block, key = given
        made = nn.cast(block, c.compute).branches(around, Drop(c.dropout, key))
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
        return self._encode(_as_batch(batch).checked(self.config), key)[0]

    def features(self, batch: Batch, key: Any = None) -> Tensor:
        """What the last layer makes logits of, over `length` and `d_model`."""
        return self._features(_as_batch(batch).checked(self.config), key)[0]

    def _encode(self, batch: Batch, key: Any) -> tuple[Tensor, Tensor | None]:
        assert self.encoder is not None
        if self.decoder is None:
            return self._run(self.encoder, batch.tokens, batch.places, batch.segments, key, batch.weights)
        assert batch.inputs is not None
        return self._run(self.encoder, batch.inputs, batch.input_places, batch.input_segments, key)

    def _features(self, batch: Batch, key: Any) -> tuple[Tensor, Tensor | None]:
        if self.decoder is None:
            return self._encode(batch, _fold(key, "encoder"))
        more: dict[str, Any] = {"prefix": batch.prefix}
        encoded = None
        if self.encoder is not None:
            result, encoded = self._encode(batch, _fold(key, "encoder"))
            assert batch.inputs is not None
            places, seen = _places(batch.inputs, batch.input_places), _memory(batch.input_segments)
            own = _places(batch.tokens, batch.places)
            more["memory"] = _memory(result)
            more["memory_sight"] = Sight(own, batch.segments, None, _memory(places), seen, False, None)
        x, extra = self._run(
            self.decoder,
            batch.tokens,
            batch.places,
            batch.segments,
            _fold(key, "decoder"),
            batch.weights,
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
        weights: Tensor | None = None,
        prefix: Tensor | None = None,
        **memory: Any,
    ) -> tuple[Tensor, Tensor | None]:
        longest, size = self.config.longest, tokens.dims[-1].size
        if places is None and stack.positions is not None and size > longest:
            raise ModelError(
                f"a sequence of {size} places, and the model has learned {longest}",
                rule="learned positions end at Config.longest",
                hint=f"longest={size}, or positions that don't end: sinusoid, relative, rotary",
            ).located()
        places = _places(tokens, places)
        window = self.config.window if self.config.attention == "local" else None
        sight = Sight(places, segments, prefix, _memory(places), _memory(segments), stack.ordered, window)
        return stack(self.embedding(tokens), Around(sight, weights=weights, **memory), key)

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
        c, batch = self.config, _as_batch(batch).checked(self.config)
        if batch.targets is None:
            raise _bad_batch("a loss is asked of a batch without targets")
        features, extra = self._features(batch, key)

        def of(features: Tensor, targets: Tensor) -> Tensor:
            vocab = self.embedding.vocab
            return nn.cross_entropy(
                self.project(features), targets, vocab, smoothing=c.smoothing, z_loss=c.z_loss
            )

        if c.loss_chunks == 1:
            losses = of(features, batch.targets)
        else:
            losses = nn.chunked(of, (features, batch.targets), "length", c.loss_chunks)
        if batch.weights is None:
            loss = wf.mean(losses)
        else:
            loss = wf.sum(losses * batch.weights) / wf.maximum(wf.sum(batch.weights), 1.0)
        return loss if extra is None else loss + extra


def _as_batch(batch: Any) -> Batch:
    if isinstance(batch, Batch):
        return batch
    raise _bad_batch(f"a {type(batch).__name__} was given in place of a Batch")


def _memory(t: Any) -> Any:
    """The same places, as those that are attended to."""
    return None if t is None else t.rename(length="memory_length")


def _places(tokens: Tensor, places: Tensor | None) -> Tensor:
    return places if places is not None else wf.arange(tokens.dims[-1])


def _fold(key: Any, name: str) -> Any:
    return None if key is None else jax.random.fold_in(key, zlib.crc32(name.encode()))
