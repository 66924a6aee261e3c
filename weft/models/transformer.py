"""The Transformer: from tokens to logits and a loss, in one file that never mentions a mesh.

Decoder (language models), encoder, and encoder-decoder (translation), as a `Config` describes. Read it from
top to bottom: positions and masks (`AttentionMask`), one layer (`Block`), a stack of layers (`Stack`), the
model (`Transformer`).

Every dim has a name, and a layout splits by these names:

    batch length memory_length d_model d_ff heads kv_heads d_kv vocab experts layers

`length` is the dim of a sequence's positions, `memory_length` that of the positions it attends to. Layers are
stacked along the dim `layers` and run by one loop, so the program does not grow with depth; a layout that
splits `layers` makes a pipeline.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

import weft as wf
from weft import nn
from weft.core.errors import ModelError, TensorTypeError
from weft.core.tensor import Tensor

from .batch import Batch, as_batch, invalid_batch
from .config import Config, ModelDims

# Positions and masks


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMask:
    """The positions of a sequence, and which positions of a memory (or of itself) they may attend to.

    Attributes:
      positions, segments: position ids and segment ids of the queries.
      prefix: by row, how many of the first positions all queries may attend to.
      memory_positions, memory_segments: position ids and segment ids of the keys.
      causal: whether a position attends only to itself and earlier ones.
      window: attention only to positions fewer than this away; None: no limit.
    """

    positions: Tensor
    segments: Tensor | None
    prefix: Tensor | None
    memory_positions: Tensor
    memory_segments: Tensor | None
    causal: bool = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(metadata={"static": True})

    def not_padding(self) -> Tensor | None:
        """Which positions hold a token: segment 0 is padding. None: all of them."""
        return None if self.segments is None else self.segments > 0

    def materialize(self) -> Tensor | None:
        """The boolean mask over `length` and `memory_length`, and `batch` if rows differ; None: no mask."""
        (length,), (memory,) = self.positions.dims[-1:], self.memory_positions.dims[-1:]
        masks = []
        if self.causal:
            causal = nn.causal(length, memory)
            masks.append(causal if self.prefix is None else causal | nn.prefix(memory, self.prefix))
        if self.segments is not None and self.memory_segments is not None:
            masks.append(nn.segments(self.segments, self.memory_segments))
        if self.window is not None:
            masks.append(nn.window(length, memory, self.window))
        return functools.reduce(operator.and_, masks) if masks else None


# One layer


@dataclass(frozen=True)
class Dropout:
    """Dropout at named sites of one layer. A site's key depends on its name, not on the order of calls."""

    rate: float
    key: jax.Array | None

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
      mask: the mask of self-attention.
      bias: the attention bias (relative positions), added to the scores.
      memory, memory_mask: the encoder's output, over `memory_length`, and the mask of attention to it.
      dropless: whether experts take every token, regardless of their capacity.
    """

    mask: AttentionMask
    bias: Tensor | None = None
    memory: Tensor | None = None
    memory_mask: AttentionMask | None = None
    dropless: bool = dataclasses.field(default=False, metadata={"static": True})


# A branch of a layer: from x to the update that is added to it, and the auxiliary losses of experts or None.
ResidualBranch = Callable[[Tensor], tuple[Tensor, nn.GroupLosses | None]]
# How a layer attends, to its own sequence (site "own") or to the encoder's output (site "memory"). It takes
# the arguments of `nn.Attention`. Decoding replaces it by one that caches keys and values.
AttentionFn = Callable[..., Tensor]


def full_attention(site: str, attention: nn.Attention, x: Tensor, memory: Tensor, **options: Any) -> Tensor:
    """Attend to all positions of the memory at once."""
    return attention(x, memory, **options)


class Block(nn.Module):
    """A pre-norm residual layer: self-attention, attention to the encoder if there is one, feed-forward."""

    attention_norm: Any
    attention: nn.Attention | nn.LSHAttention
    memory_norm: Any
    memory_attention: nn.Attention | None
    feed_norm: Any
    feed: Any
    config: Config = eqx.field(static=True)

    def __init__(self, c: Config, with_memory: bool, causal: bool = False):
        d = c.dims()

        def norm() -> Any:
            return nn.NORMS[c.norm](d.d_model, c.epsilon)

        self.config = c
        self.attention_norm, self.attention = norm(), ATTENTIONS[c.attention if causal else "full"](c, d)
        self.memory_norm = norm() if with_memory else None
        self.memory_attention = _full(c, d) if with_memory else None
        self.feed_norm = norm() if c.block == "serial" else None
        self.feed = FEED_FORWARDS[c.experts > 0](c, d)

    def branches(
        self, context: LayerContext, dropout: Dropout, attention_fn: AttentionFn = full_attention
    ) -> list[ResidualBranch]:
        """The residual branches, in the order in which they are added to x."""

        def attend(h: Tensor) -> Tensor:
            mask, rotate = context.mask, None
            if isinstance(self.attention, nn.LSHAttention) and attention_fn is full_attention:
                return _lsh_attention(self.attention, h, mask, dropout)
            if self.config.positions == "rotary":
                rotate = functools.partial(self._rotate, positions=mask.positions)
            options = {"bias": context.bias, "rotate": rotate, "dropout": dropout("weights")}
            return attention_fn("own", self.attention, h, _as_memory(h), mask=mask.materialize(), **options)

        def attend_to_memory(x: Tensor) -> Tensor:
            memory, mask = context.memory, context.memory_mask
            assert self.memory_attention is not None and memory is not None and mask is not None
            options = {"mask": mask.materialize(), "dropout": dropout("memory weights")}
            return attention_fn("memory", self.memory_attention, self.memory_norm(x), memory, **options)

        def feed_forward(h: Tensor) -> tuple[Tensor, nn.GroupLosses | None]:
            c = self.config
            if not c.experts:
                return _in_chunks(lambda h: self.feed(h, dropout("wide")), h, c.feed_chunks), None
            return self.feed.by_group(h, dropout("wide"), context.dropless, context.mask.not_padding())

        def parallel(x: Tensor) -> tuple[Tensor, nn.GroupLosses | None]:
            # One norm for both, and one sum: the all-reduces that end the two branches are merged into one.
            h = self.attention_norm(x)
            fed, losses = feed_forward(h)
            return attend(h) + fed, losses

        # The names select dropout keys: changing one changes the random draws of existing runs.
        memory: dict[str, ResidualBranch] = {}
        if self.memory_attention is not None:
            memory = {"memory": lambda x: (attend_to_memory(x), None)}
        if self.config.block == "parallel":
            sites = memory | {"both": parallel}
        else:
            sites = {"attention": lambda x: (attend(self.attention_norm(x)), None)} | memory
            sites |= {"feed": lambda x: feed_forward(self.feed_norm(x))}
        return [functools.partial(self.branch, f, dropout(site)) for site, f in sites.items()]

    def branch(
        self, f: ResidualBranch, dropout: Callable[[Tensor], Tensor], x: Tensor
    ) -> tuple[Tensor, nn.GroupLosses | None]:
        """One residual branch with dropout."""
        y, losses = f(x)
        return dropout(y), losses

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        if "memory_length" in {d.name for d in x.dims}:
            positions = _as_memory(positions)
        c = self.config
        return nn.rotary(x, positions, self.attention.d_kv, c.rotary_base, c.rotary_stretch)


def _full(c: Config, d: ModelDims) -> nn.Attention:
    return nn.Attention(d.d_model, d.heads, d.d_kv, d.kv_heads, bias=c.bias, scaled=c.scaled)


def _lsh(c: Config, d: ModelDims) -> nn.LSHAttention:
    conflicts = [f'positions="{c.positions}"'] if c.positions in ("rotary", "relative") else []
    conflicts += [f"kv_heads={c.kv_heads}"] if c.kv_heads not in (None, c.heads) else []
    if conflicts:
        raise wf.ProgramError(
            f'attention="lsh" cannot be combined with {" and ".join(conflicts)}',
            rule="LSH attention has as many key heads as query heads, and no positions inside attention",
            hint='positions="learned", "sinusoid" or "none", and kv_heads=None',
        ).located()
    return nn.LSHAttention(d.d_model, d.heads, d.d_kv, chunk=c.lsh_chunk, rounds=c.lsh_rounds, bias=c.bias)


def _lsh_attention(attention: nn.LSHAttention, h: Tensor, mask: AttentionMask, dropout: Dropout) -> Tensor:
    if mask.prefix is not None:
        raise wf.ProgramError(
            'attention="lsh" was given a prefix',
            rule="LSH attention is causal: it has no prefix mask",
            hint='leave out Batch.prefix, or use attention="full"',
        ).located()
    key, positions = _fold_in(dropout.key, "hash"), wf.arange(mask.positions.dims[-1])
    return attention(h, positions, mask.segments, key=key, dropout=dropout("weights"))


AttentionLayer = nn.Attention | nn.LSHAttention
ATTENTIONS: dict[str, Callable[[Config, ModelDims], AttentionLayer]] = {
    "full": _full,
    "local": _full,
    "lsh": _lsh,
}


def _dense(c: Config, d: ModelDims) -> nn.FeedForward:
    return nn.FeedForward(d.d_model, d.d_ff, c.activation, bias=c.bias)


def _experts(c: Config, d: ModelDims) -> nn.MixtureOfExperts:
    conflicts = ['residual="reversible"'] if c.residual == "reversible" else []
    conflicts += [f"feed_chunks={c.feed_chunks}"] if c.feed_chunks > 1 else []
    if conflicts:
        raise wf.ProgramError(
            f"experts={c.experts} cannot be combined with {' and '.join(conflicts)}",
            rule="a mixture has losses of its own, and its capacity counts the tokens of a full row",
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


# A stack of layers


# How the layers of a stack are run: from x, the shared context and a dropout key to the output and further
# results.
RunLayers = Callable[["Stack", Tensor, LayerContext, jax.Array | None], tuple[Tensor, Any]]


class Stack(nn.Module):
    """Position encodings, the layers one after the other, and a final norm."""

    positions: nn.LearnedPositions | None
    relative: nn.RelativePositions | None
    blocks: Block
    norm: Any
    layers: wf.Dim = eqx.field(static=True)
    causal: bool = eqx.field(static=True)
    config: Config = eqx.field(static=True)

    def __init__(self, c: Config, layers: int, *, causal: bool, with_memory: bool = False):
        d = c.dims()
        self.config, self.layers, self.causal = c, wf.Dim("layers", layers), causal
        learned, relative = c.positions == "learned", c.positions == "relative"
        self.positions = nn.LearnedPositions(c.longest, d.d_model) if learned else None
        heads = [d.heads] if d.kv_heads is None else [d.kv_heads, d.heads]
        self.relative = nn.RelativePositions(heads, bidirectional=not causal) if relative else None
        self.blocks = nn.stack(Block(c, with_memory, causal), self.layers)
        self.norm = nn.NORMS[c.norm](d.d_model, c.epsilon)

    def __call__(
        self, x: Tensor, context: LayerContext, key: jax.Array | None, run_layers: RunLayers | None = None
    ) -> tuple[Tensor, Any]:
        """The hidden states, and a further result of the layers: the sum of auxiliary losses, or None.

        Args:
          x: the embedded tokens.
          context: what the layers share.
          key: for dropout; None: no dropout.
          run_layers: how the layers are run; by default as `Config.residual` selects.
        """
        c, positions = self.config, context.mask.positions
        if self.positions is not None:
            x = x + self.positions(positions)
        if c.positions == "sinusoid":
            x = x + nn.sinusoid(positions, self.norm.dim)
        if self.relative is not None:
            bias = self.relative(positions, context.mask.memory_positions)
            context = dataclasses.replace(context, bias=bias)
        x = Dropout(c.dropout, key)("embedding")(x).astype(c.compute)
        x, extra = (run_layers or RESIDUALS[c.residual])(self, x, context, key)
        return Dropout(c.dropout, key)("last")(self.norm(x)), extra

    def keys(self, key: jax.Array | None) -> jax.Array | None:
        """A dropout key for each layer; None if there is no key."""
        return None if key is None else jax.random.split(key, self.layers.size)


class LayerCarry(NamedTuple):
    """What flows through the layers: x, the auxiliary losses so far, and the encoder's output.

    The encoder's output is part of it, not of the shared context: in a pipeline each micro-batch needs its
    own.
    """

    x: Tensor
    losses: nn.GroupLosses | None
    memory: Tensor | None


def _plain(
    stack: Stack, x: Tensor, context: LayerContext, key: jax.Array | None
) -> tuple[Tensor, Tensor | None]:
    """x + each branch of x, layer by layer."""
    c = stack.config

    def layer(carry: LayerCarry, given: tuple[Block, jax.Array | None], context: LayerContext) -> LayerCarry:
        (x, losses, memory), (block, key) = carry, given
        context = dataclasses.replace(context, memory=memory)
        for branch in nn.cast(block, c.compute).branches(context, Dropout(c.dropout, key)):
            y, more = branch(x)
            x = x + y
            if losses is not None and more is not None:
                losses = nn.GroupLosses(*(a + b for a, b in zip(losses, more, strict=True)))
        return LayerCarry(x, losses, memory)

    losses = None
    if c.experts:
        rows = wf.zeros([d for d in x.dims if d.name == "batch"], jnp.promote_types(x.dtype, jnp.float32))
        losses = nn.GroupLosses(rows, rows)
    out = wf.pipeline(
        layer,
        LayerCarry(x, losses, context.memory),
        (stack.blocks, stack.keys(key)),
        stack.layers,
        micro=c.pipeline_micro,
        shared=(dataclasses.replace(context, memory=None),),
        schedule=c.pipeline,
        remat=c.remat,
        unroll=c.unroll,
    )
    if out.losses is None:
        return out.x, None
    tokens = next(d.size for d in x.dims if d.name == "length")
    means = out.losses.mean(tokens, context.mask.not_padding())
    return out.x, c.balance * means.balance + c.router_z * means.z


def _reversible(stack: Stack, x: Tensor, context: LayerContext, key: jax.Array | None) -> tuple[Tensor, None]:
    """Two streams; the backward pass recovers the earlier ones from the later ones."""
    c = stack.config

    def branches(
        given: tuple[Block, jax.Array | None], context: LayerContext
    ) -> list[Callable[[Tensor], Tensor]]:
        block, key = given
        made = nn.cast(block, c.compute).branches(context, Dropout(c.dropout, key))
        return [lambda x, branch=branch: branch(x)[0] for branch in made]  # type: ignore[misc]

    # Both streams start as x, and the output is their mean, so that it has the width of x. (The Reformer
    # concatenates them.)
    a, b = nn.reversible(branches, x, x, (stack.blocks, stack.keys(key)), stack.layers, context)
    return (a + b) / 2, None


RESIDUALS: dict[str, RunLayers] = {"plain": _plain, "reversible": _reversible}


def _in_chunks(f: Callable[[Tensor], Tensor], x: Tensor, chunks: int) -> Tensor:
    """f(x), computed in chunks of the sequence: only one chunk's activations are in memory at a time."""
    return f(x) if chunks == 1 else nn.chunked(f, x, "length", chunks)


# The model


class Transformer(nn.Module):
    """A Transformer, as its `Config` describes it.

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
        if not isinstance(config, Config):
            raise TensorTypeError(
                f"a Transformer was given a {type(config).__name__}",
                rule="a Transformer is described by a Config",
                hint="Transformer(Config(vocab=8192)), or Transformer(preset(name).config)",
            )
        d = config.dims()
        self.config = config
        # A tied table is the output layer too: vectors of unit variance would give logits of size
        # sqrt(d_model).
        small = nn.fan_in([d.d_model]) if config.tied and not config.scale_logits else None
        self.embedding = nn.Embedding(d.vocab, d.d_model, small)
        has_both = config.kind == "encoder_decoder"
        depth = config.decoder_layers or config.layers
        self.encoder = Stack(config, config.layers, causal=False) if config.kind != "decoder" else None
        self.decoder = (
            Stack(config, depth, causal=True, with_memory=has_both) if config.kind != "encoder" else None
        )
        self.last = None if config.tied else nn.Linear([d.d_model], [d.vocab])

    def encode(self, batch: Batch, key: jax.Array | None = None) -> Tensor:
        """The encoder's output."""
        return self._encode(as_batch(batch, self.config), key)[0]

    def hidden_states(
        self, batch: Batch, key: jax.Array | None = None, memory: Tensor | None = None
    ) -> Tensor:
        """The final hidden states, over `length` and `d_model`.

        Args:
          batch: the input.
          key: for dropout; None: no dropout.
          memory: the output of `encode` for the same batch and key, to avoid running the encoder again.
        """
        return self._hidden_states(as_batch(batch, self.config), key, memory)[0]

    def run_with(self, batch: Batch, run_layers: RunLayers) -> tuple[Tensor, Any]:
        """The final hidden states with another way to run the decoder's layers, and its further results.

        For decoding: no dropout, and experts take every token.

        Args:
          batch: the input.
          run_layers: how the decoder's layers are run.
        """
        batch = as_batch(batch, self.config)
        memory = None if self.encoder is None else self._encode(batch, None, dropless=True)[0]
        return self._hidden_states(batch, None, memory, run_layers, dropless=True)

    def _encode(
        self, batch: Batch, key: jax.Array | None, dropless: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        assert self.encoder is not None
        own = batch.tokens, batch.places, batch.segments
        if self.decoder is not None:
            assert batch.inputs is not None
            own = batch.inputs, batch.input_places, batch.input_segments
        return self._run(self.encoder, *own, _fold_in(key, "encoder"), dropless=dropless)

    def _hidden_states(
        self,
        batch: Batch,
        key: jax.Array | None,
        memory: Tensor | None = None,
        run_layers: RunLayers | None = None,
        dropless: bool = False,
    ) -> tuple[Tensor, Any]:
        if self.decoder is None:
            return self._encode(batch, key)
        shared: dict[str, Any] = {}
        encoder_losses = None
        if self.encoder is not None:
            if memory is None:
                memory, encoder_losses = self._encode(batch, key)
            shared = {"memory": _as_memory(memory), "memory_mask": _memory_mask(batch)}
        x, extra = self._run(
            self.decoder,
            batch.tokens,
            batch.places,
            batch.segments,
            _fold_in(key, "decoder"),
            batch.prefix,
            run_layers,
            dropless=dropless,
            **shared,
        )
        return x, extra if encoder_losses is None or extra is None else extra + encoder_losses

    def _run(
        self,
        stack: Stack,
        tokens: Tensor,
        positions: Tensor | None,
        segments: Tensor | None,
        key: jax.Array | None,
        prefix: Tensor | None = None,
        run_layers: RunLayers | None = None,
        **shared: Any,
    ) -> tuple[Tensor, Any]:
        longest, size = self.config.longest, tokens.dims[-1].size
        if positions is None and stack.positions is not None and size > longest:
            raise ModelError(
                f"a sequence of {size} positions, but the model has {longest} learned positions",
                rule="learned positions end at Config.longest",
                hint=f"longest={size}, or positions without a limit: sinusoid, relative, rotary",
            ).located()
        positions = _positions(tokens, positions)
        window = self.config.window if self.config.attention == "local" else None
        own = positions, segments, prefix, _as_memory(positions), _as_memory(segments)
        mask = AttentionMask(*own, stack.causal, window)
        return stack(self.embedding(tokens), LayerContext(mask, **shared), key, run_layers)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """The logits of hidden states, in float32."""
        compute = self.config.compute
        if self.config.scale_logits:
            hidden_states = hidden_states * self.config.d_model**-0.5
        if self.last is None:
            return nn.cast(self.embedding, compute).logits(hidden_states).astype(jnp.float32)
        return nn.cast(self.last, compute)(hidden_states).astype(jnp.float32)

    def logits(self, batch: Batch, key: jax.Array | None = None) -> Tensor:
        """The unnormalized log-probabilities of each token at each position."""
        return self.compute_logits(self.hidden_states(batch, key))

    def loss(self, batch: Batch, key: jax.Array | None = None) -> Tensor:
        """The mean cross-entropy of the targets, plus the losses of experts; with a key, under dropout."""
        c, batch = self.config, as_batch(batch, self.config)
        targets = _targets(batch)
        hidden_states, extra = self._hidden_states(batch, key)

        def token_losses(hidden_states: Tensor, targets: Tensor) -> Tensor:
            logits, vocab = self.compute_logits(hidden_states), self.embedding.vocab
            return nn.cross_entropy(logits, targets, vocab, smoothing=c.smoothing, z_loss=c.z_loss)

        if c.loss_chunks == 1:
            losses = token_losses(hidden_states, targets)
        else:
            losses = nn.chunked(token_losses, (hidden_states, targets), "length", c.loss_chunks)
        if batch.weights is None:
            loss = wf.mean(losses)
        else:
            total = self.loss_weight(batch)
            loss = wf.sum(losses * batch.weights) / wf.where(total > 0, total, 1.0)
        return loss if extra is None else loss + extra

    def loss_weight(self, batch: Batch) -> Tensor | int:
        """The divisor of `loss`: the number of targets, or the sum of their weights (1 if that is 0)."""
        targets = _targets(batch)
        if batch.weights is None:
            return targets.size
        weights = batch.weights.astype(jnp.promote_types(batch.weights.dtype, jnp.float32))
        return wf.sum(weights)


def _targets(batch: Batch) -> Tensor:
    if not isinstance(batch, Batch) or batch.targets is None:
        raise invalid_batch("the loss needs targets, and this batch has none")
    return batch.targets


def _memory_mask(batch: Batch) -> AttentionMask:
    """The mask of the decoder's attention to the encoder's output."""
    assert batch.inputs is not None
    memory_positions = _as_memory(_positions(batch.inputs, batch.input_places))
    segments, memory_segments = batch.segments, _as_memory(batch.input_segments)
    if segments is None and memory_segments is not None:
        segments = wf.ones(batch.tokens.dims, memory_segments.dtype)
    positions = _positions(batch.tokens, batch.places)
    return AttentionMask(positions, segments, None, memory_positions, memory_segments, False, None)


def _as_memory(t: Tensor | None) -> Any:
    """The same positions, as those that are attended to."""
    return None if t is None else t.rename(length="memory_length")


def _positions(tokens: Tensor, positions: Tensor | None) -> Tensor:
    return positions if positions is not None else wf.arange(tokens.dims[-1])


def _fold_in(key: jax.Array | None, name: str) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, zlib.crc32(name.encode()))
