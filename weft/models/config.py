"""The configuration of a Transformer: its hyperparameters, and the dims that they define."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import weft as wf
from weft import nn
from weft.autodiff.remat import REMAT_POLICIES
from weft.core.errors import ModelError, nearest
from weft.pipelines.schedules import SCHEDULES


@dataclass(frozen=True)
class Config:
    """The hyperparameters of a Transformer.

    Attributes:
      kind: "decoder", "encoder" or "encoder_decoder".
      vocab: the size of the vocabulary.
      d_model: the size of the hidden states.
      d_ff: the hidden size of the feed-forward block.
      heads: the number of query heads.
      d_kv: the size of each head.
      layers: the number of layers in each stack.
      decoder_layers: that of the decoder, if it differs from the encoder's.
      kv_heads: the number of key heads, if smaller than `heads`: 1 is multi-query, more is grouped.
      longest: the maximum sequence length; the number of learned positions.
      positions: "learned", "sinusoid", "relative" (T5's buckets), "rotary" or "none".
      rotary_base: the longest rotary wavelength is 2π times this.
      rotary_stretch: Llama 3's frequency scaling: factor, low, high, length; see `nn.rotary`.
      norm: "rms" or "layer".
      epsilon: added to the variance inside the norm's square root.
      activation: that of the feed-forward block, a name of `nn.ACTIVATIONS`.
      bias: whether linear layers have biases.
      scaled: whether attention scores are divided by sqrt(d_kv).
      tied: whether the embedding table is also the output layer.
      scale_logits: whether the final hidden states are multiplied by d_model^-½ (T5 v1.0).
      attention: "full", "local" (within `window` positions) or "lsh" (the Reformer's, decoder only).
      window: the window of local attention.
      lsh_chunk: the positions per chunk of LSH attention.
      lsh_rounds: the number of hashes of LSH attention.
      block: "serial", or "parallel": attention and feed-forward side by side, with one all-reduce for both
        (and attention to an encoder before them).
      residual: "plain" or "reversible": the backward pass recomputes activations layer by layer.
      remat: what the backward pass does not recompute, a policy of `wf.remat`; None: everything is saved.
      pipeline: if `layers` is split, the schedule of `wf.pipeline`: "gpipe" or "1f1b" (less memory, about 1.4
        times the work).
      pipeline_micro: the number of micro-batches; None: the largest that fits, up to four per stage.
      unroll: how many (plain) layers each loop step runs: more make a larger program that compiles more
        slowly, and on a CPU runs faster.
      feed_chunks: in how many chunks of the sequence the feed-forward block is computed, to save memory.
      loss_chunks: in how many chunks the output layer and the loss are computed.
      experts: the number of experts; 0: a dense feed-forward block.
      expert_top: how many experts process a token.
      capacity: the capacity factor of the experts.
      balance: the factor of the load-balancing loss of the router.
      router_z: the factor of the z-loss of the router, which keeps its logits small.
      dropout: the dropout rate, applied if a key is given.
      smoothing: label smoothing: the share of a target that is spread over the vocabulary.
      z_loss: the factor of the z-loss, which keeps the normalizer of the logits small.
      compute: the dtype of activations and products; parameters, norms, softmax and loss are float32.
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
    pipeline: str = "gpipe"
    pipeline_micro: int | None = None
    unroll: int = 1
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
                    hint="help(weft.models.Config) describes each field",
                ).located("Config")
        sizes = {n: getattr(self, n) for n in _POSITIVE if getattr(self, n) is not None}
        small = [f"{n}={size}" for n, size in sizes.items() if not size >= 1]
        if small:
            raise ModelError(
                ", ".join(small),
                rule="sizes are integers of at least 1",
                hint="help(weft.models.Config) describes each field",
            ).located("Config")
        outside = {n: rule for n, (is_inside, rule) in _RANGES.items() if not is_inside(getattr(self, n))}
        if outside:
            raise ModelError(
                ", ".join(f"{n}={getattr(self, n)}" for n in outside),
                rule="; ".join(f"{n} is {rule}" for n, rule in outside.items()),
                hint="help(weft.models.Config) describes each field",
            ).located("Config")
        if self.positions == "rotary" and self.d_kv % 2:
            raise ModelError(
                f'd_kv={self.d_kv} with positions="rotary"',
                rule="rotary positions rotate pairs of features, so d_kv is even",
                hint=f"d_kv={self.d_kv + 1}, or other positions",
            ).located("Config")

    def dims(self) -> ModelDims:
        """The dims of the parameters."""
        return ModelDims(self)

    def replace(self, **changes: Any) -> Config:
        """The same with some fields changed."""
        return dataclasses.replace(self, **changes)


_KNOWN: dict[str, tuple[Any, ...]] = {
    "kind": ("decoder", "encoder", "encoder_decoder"),
    "positions": ("learned", "sinusoid", "relative", "rotary", "none"),
    "norm": tuple(nn.NORMS),
    "activation": tuple(nn.ACTIVATIONS),
    "attention": ("full", "local", "lsh"),
    "block": ("serial", "parallel"),
    "residual": ("plain", "reversible"),
    "remat": (None, *REMAT_POLICIES),
    "pipeline": tuple(SCHEDULES),
    "compute": ("float32", "bfloat16", "float16", "float64"),
}
_POSITIVE = tuple(
    "vocab d_model d_ff heads kv_heads d_kv layers decoder_layers longest window".split()
    + ["lsh_chunk", "lsh_rounds", "pipeline_micro", "unroll", "feed_chunks", "loss_chunks", "expert_top"]
)

# The ranges of the other numbers. NaN is in none of them.
_COUNT = (lambda x: 0 <= x < math.inf, "an integer of at least 0")
_FACTOR = (lambda x: 0 <= x < math.inf, "finite, and at least 0")
_ABOVE = (lambda x: 0 < x < math.inf, "finite, and above 0")
_SHARE = (lambda x: 0 <= x < 1, "at least 0 and less than 1")
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "experts": _COUNT,
    "capacity": _ABOVE,
    "balance": _FACTOR,
    "router_z": _FACTOR,
    "rotary_base": _ABOVE,
    "epsilon": _FACTOR,
    "dropout": _SHARE,
    "smoothing": _SHARE,
    "z_loss": _FACTOR,
}


class ModelDims:
    """The dims of a model's parameters."""

    def __init__(self, c: Config):
        self.vocab, self.d_model = wf.Dim("vocab", c.vocab), wf.Dim("d_model", c.d_model)
        self.d_ff, self.d_kv = wf.Dim("d_ff", c.d_ff), wf.Dim("d_kv", c.d_kv)
        shared = c.kv_heads or c.heads
        if c.heads % shared:
            raise ModelError(
                f"{c.heads} query heads can't share {shared} key heads",
                rule="every key head is shared by the same number of query heads",
                hint=f"choose kv_heads as a divisor of {c.heads}",
            )
        self.heads = wf.Dim("heads", c.heads if shared == c.heads else c.heads // shared)
        self.kv_heads = wf.Dim("kv_heads", shared) if shared != c.heads else None
