"""T5 v1.0 and v1.1 (with gated activations)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft import nn

from ..config import Config
from .family import LM_HEAD, LM_HEAD_ROW, Family, Row, attention, linear, norm


def _t5_stack(stack: str, feed: int) -> tuple[Row, ...]:
    """A stack's rows; `feed` is the index of the feed-forward block inside a layer."""
    ours, theirs = f"{stack}.blocks", f"{stack}.block.{{layer}}.layer"
    first = f"{stack}.block.0.layer.0.SelfAttention"  # all layers use the first one's relative positions
    return (
        Row(f"{stack}.relative.weight", f"{first}.relative_attention_bias.weight", "buckets heads"),
        *norm(f"{ours}.attention_norm", f"{theirs}.0.layer_norm"),
        *attention(f"{ours}.attention", f"{theirs}.0.SelfAttention", "q k v o"),
        *norm(f"{ours}.memory_norm", f"{theirs}.1.layer_norm"),
        *attention(f"{ours}.memory_attention", f"{theirs}.1.EncDecAttention", "q k v o"),
        *norm(f"{ours}.feed_norm", f"{theirs}.{feed}.layer_norm"),
        *linear(f"{ours}.feed.narrow", f"{theirs}.{feed}.DenseReluDense.wo", "d_ff", "d_model"),
        *norm(f"{stack}.norm", f"{stack}.final_layer_norm"),
    )


def _t5_rows(c: Config) -> tuple[Row, ...]:
    names = {"gate": "wi_0", "wide": "wi_1"} if nn.ACTIVATIONS[c.activation][1] else {"wide": "wi"}
    feeds = {"encoder": 1, "decoder": 2}
    wide = [
        linear(
            f"{stack}.blocks.feed.{ours}",
            f"{stack}.block.{{layer}}.layer.{feed}.DenseReluDense.{theirs}",
            "d_model",
            "d_ff",
        )
        for stack, feed in feeds.items()
        for ours, theirs in names.items()
    ]
    stacks = [_t5_stack(stack, feed) for stack, feed in feeds.items()]
    return (
        Row("embedding.weight", "shared.weight", "vocab d_model"),
        *(row for rows in stacks + wide for row in rows),
        LM_HEAD_ROW,
    )


def _t5_read(settings: Mapping[str, Any]) -> dict[str, Any]:
    # v1.0 scales the logits. Files without the key: v1.0 is the version with tied embeddings.
    tied = settings.get("tie_word_embeddings", True)
    return {"scale_logits": settings.get("scale_decoder_outputs", tied)}


def _t5_write(c: Config) -> dict[str, Any]:
    depth = c.decoder_layers or c.layers
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    return {"scale_decoder_outputs": c.scale_logits, "num_decoder_layers": depth, **tokens}


T5 = Family(
    name="t5",
    architecture="T5ForConditionalGeneration",
    prefix="",
    fixed={"kind": "encoder_decoder", "positions": "relative", "norm": "rms", "bias": False, "scaled": False},
    sizes={
        "vocab": "vocab_size",
        "d_model": "d_model",
        "d_ff": "d_ff",
        "heads": "num_heads",
        "d_kv": "d_kv",
        "layers": "num_layers",
    },
    options={
        "decoder_layers": ("num_decoder_layers", None),
        "epsilon": ("layer_norm_epsilon", 1e-6),
        "dropout": ("dropout_rate", 0.1),
        "tied": ("tie_word_embeddings", True),
    },
    activation=(
        "feed_forward_proj",
        "relu",
        {
            "relu": "relu",
            "gated-gelu": "gated_gelu",
            "gated-silu": "swiglu",
            "gelu": "gelu",
            "gelu_new": "gelu_tanh",
        },
    ),
    required={
        "is_encoder_decoder": True,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "decoder_start_token_id": 0,
    },
    read=_t5_read,
    write=_t5_write,
    rows=_t5_rows,
    aliases={"shared.weight": ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", LM_HEAD)},
    # The embedding under other names, and a bias that early checkpoints store although nothing uses it.
    ignored=r"(en|de)coder\.embed_tokens\.weight|decoder\.block\.0\.layer\.1\..*relative_attention_bias\.weight",
)
