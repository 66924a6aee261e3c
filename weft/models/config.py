"""The configuration of a Transformer: its hyperparameters, and the dims that they define."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import weft as wf
from weft import nn
from weft.autodiff.remat import REMAT_POLICIES
from weft.core.errors import ModelError
from weft.core.field_types import NonNegative, NonNegativeInt, OneOf, Positive, PositiveInt, Share
from weft.core.fields import Offender, documented, validate
from weft.pipelines.schedules import SCHEDULES


@documented
@dataclass(frozen=True)
class Config:
    """The hyperparameters of a Transformer."""

    kind: Literal["decoder", "encoder", "encoder_decoder"] = "decoder"
    """The stacks: a decoder for texts, an encoder, or both for pairs of texts."""
    vocab: PositiveInt = 32_768
    """The size of the vocabulary."""
    d_model: PositiveInt = 512
    """The size of the hidden states."""
    d_ff: PositiveInt = 2048
    """The hidden size of the feed-forward block."""
    heads: PositiveInt = 8
    """The number of query heads."""
    d_kv: PositiveInt = 64
    """The size of each head."""
    layers: PositiveInt = 6
    """The number of layers in each stack."""
    decoder_layers: PositiveInt | None = None
    """The number of layers of the decoder, if it differs from the encoder's."""
    kv_heads: PositiveInt | None = None
    """The number of key heads, if smaller than `heads`: 1 is multi-query, more is grouped."""
    longest: PositiveInt = 512
    """The maximum sequence length; the number of learned positions."""
    positions: Literal["learned", "sinusoid", "relative", "rotary", "none"] = "learned"
    """How positions are encoded; "relative" has T5's buckets."""
    rotary_base: Positive = 10_000.0
    """The longest rotary wavelength is 2π times this."""
    rotary_stretch: tuple[float, float, float, float] | None = None
    """Llama 3's frequency scaling: factor, low, high, length; see `nn.rotary`."""
    norm: Annotated[str, OneOf(nn.NORMS)] = "rms"
    """The normalization: by the root mean square, or LayerNorm."""
    epsilon: NonNegative = 1e-6
    """Added to the variance inside the norm's square root."""
    activation: Annotated[str, OneOf(nn.ACTIVATIONS)] = "relu"
    """The activation of the feed-forward block, a name of `nn.ACTIVATIONS`."""
    bias: bool = False
    """Whether linear layers have biases."""
    scaled: bool = True
    """Whether attention scores are divided by sqrt(d_kv)."""
    tied: bool = False
    """Whether the embedding table is also the output layer."""
    scale_logits: bool = False
    """Whether the final hidden states are multiplied by d_model^-½ (T5 v1.0)."""
    attention: Literal["full", "local", "lsh"] = "full"
    """To all positions ("full"), to those within `window` ("local"), or the Reformer's ("lsh", decoder
    only)."""
    window: PositiveInt = 128
    """The window of local attention."""
    lsh_chunk: PositiveInt = 64
    """The positions per chunk of LSH attention."""
    lsh_rounds: PositiveInt = 2
    """The number of hashes of LSH attention."""
    block: Literal["serial", "parallel"] = "serial"
    """Attention before feed-forward ("serial"), or both side by side, with one all-reduce for both
    ("parallel"; attention to an encoder comes before them)."""
    residual: Literal["plain", "reversible"] = "plain"
    """With "reversible", the backward pass recomputes activations layer by layer."""
    remat: Annotated[str, OneOf(REMAT_POLICIES)] | None = None
    """What the backward pass does not recompute, a policy of `wf.remat`; None: everything is saved."""
    pipeline: Annotated[str, OneOf(SCHEDULES)] = "gpipe"
    """If `layers` is split, the schedule of `wf.pipeline`: "gpipe" or "1f1b" (less memory, about 1.4 times
    the work)."""
    pipeline_micro: PositiveInt | None = None
    """The number of micro-batches; None: the largest that fits, up to four per stage."""
    unroll: PositiveInt = 1
    """How many (plain) layers each loop step runs: more make a larger program that compiles more slowly, and
    on a CPU runs faster."""
    feed_chunks: PositiveInt = 1
    """In how many chunks of the sequence the feed-forward block is computed, to save memory."""
    loss_chunks: PositiveInt = 1
    """In how many chunks the output layer and the loss are computed."""
    experts: NonNegativeInt = 0
    """The number of experts; 0: a dense feed-forward block."""
    expert_top: PositiveInt = 1
    """How many experts process a token."""
    capacity: Positive = 1.25
    """The capacity factor of the experts."""
    balance: NonNegative = 0.01
    """The factor of the load-balancing loss of the router."""
    router_z: NonNegative = 0.001
    """The factor of the z-loss of the router, which keeps its logits small."""
    dropout: Share = 0.0
    """The dropout rate, applied if a key is given."""
    smoothing: Share = 0.0
    """Label smoothing: the share of a target that is spread over the vocabulary."""
    z_loss: NonNegative = 0.0
    """The factor of the z-loss, which keeps the normalizer of the logits small."""
    compute: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """The dtype of activations and products; parameters, norms, softmax and loss are float32."""

    def __post_init__(self) -> None:
        hint = "help(weft.models.Config) describes each field"
        validate(self, ModelError, hint, more=self._contradictions())

    def _contradictions(self) -> Iterator[Offender]:
        if self.positions == "rotary" and self.d_kv % 2:
            rule = "even with rotary positions, which rotate pairs of features"
            yield Offender(("d_kv",), self.d_kv, rule, fix=self.d_kv + 1)
        if self.heads % (self.kv_heads or self.heads):
            rule = (
                f"a divisor of heads, {self.heads}: each key head is shared by the same number of query heads"
            )
            yield Offender(("kv_heads",), self.kv_heads, rule, fix=math.gcd(self.heads, self.kv_heads or 1))

    def dims(self) -> ModelDims:
        """The dims of the parameters."""
        return ModelDims(self)

    def replace(self, **changes: Any) -> Config:
        """The same with some fields changed."""
        return dataclasses.replace(self, **changes)


class ModelDims:
    """The dims of a model's parameters."""

    def __init__(self, c: Config):
        self.vocab, self.d_model = wf.Dim("vocab", c.vocab), wf.Dim("d_model", c.d_model)
        self.d_ff, self.d_kv = wf.Dim("d_ff", c.d_ff), wf.Dim("d_kv", c.d_kv)
        shared = c.kv_heads or c.heads
        self.heads = wf.Dim("heads", c.heads if shared == c.heads else c.heads // shared)
        self.kv_heads = wf.Dim("kv_heads", shared) if shared != c.heads else None
