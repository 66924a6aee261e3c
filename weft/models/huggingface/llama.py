"""Llama 1 to 3: query heads are grouped by key head, as ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import Config
from .family import LM_HEAD, LM_HEAD_ROW, Family, Row, attention, linear, norm, unsupported

_LLAMA_ROWS = (
    Row("embedding.weight", "embed_tokens.weight", "vocab d_model"),
    *norm("decoder.blocks.attention_norm", "layers.{layer}.input_layernorm"),
    *attention("decoder.blocks.attention", "layers.{layer}.self_attn", "q_proj k_proj v_proj o_proj"),
    *norm("decoder.blocks.feed_norm", "layers.{layer}.post_attention_layernorm"),
    *linear("decoder.blocks.feed.gate", "layers.{layer}.mlp.gate_proj", "d_model", "d_ff"),
    *linear("decoder.blocks.feed.wide", "layers.{layer}.mlp.up_proj", "d_model", "d_ff"),
    *linear("decoder.blocks.feed.narrow", "layers.{layer}.mlp.down_proj", "d_ff", "d_model"),
    *norm("decoder.norm", "norm"),
    LM_HEAD_ROW,
)

# The parameters of the frequency scaling, in the order of `Config.rotary_stretch`.
_STRETCH = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _llama_read(settings: Mapping[str, Any]) -> dict[str, Any]:
    heads, bias = settings["num_attention_heads"], settings.get("attention_bias", False)
    if settings.get("mlp_bias", False) != bias:
        raise unsupported("llama", "mlp_bias", settings.get("mlp_bias", False), bias)
    # Newer files have all of these in rope_parameters.
    rotary = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind, stretch = rotary.get("rope_type", rotary.get("type", "default")), None
    if kind == "llama3" and all(key in rotary for key in _STRETCH):
        stretch = tuple(rotary[key] for key in _STRETCH)
    elif kind != "default":
        raise unsupported("llama", "rope_scaling", rotary, "default", "llama3")
    return {
        "kv_heads": settings.get("num_key_value_heads") or heads,
        "d_kv": settings.get("head_dim") or settings["hidden_size"] // heads,
        "rotary_base": rotary.get("rope_theta", settings.get("rope_theta", 10_000.0)),
        "rotary_stretch": stretch,
    }


def _llama_write(c: Config) -> dict[str, Any]:
    stretch = c.rotary_stretch
    return {
        "num_key_value_heads": c.kv_heads or c.heads,
        "head_dim": c.d_kv,
        "mlp_bias": c.bias,
        "rope_theta": c.rotary_base,
        "rope_scaling": stretch and {"rope_type": "llama3", **dict(zip(_STRETCH, stretch, strict=True))},
    }


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    fixed={"kind": "decoder", "positions": "rotary", "norm": "rms", "scaled": True},
    sizes={
        "vocab": "vocab_size",
        "d_model": "hidden_size",
        "d_ff": "intermediate_size",
        "heads": "num_attention_heads",
        "layers": "num_hidden_layers",
    },
    options={
        "longest": ("max_position_embeddings", 2048),
        "epsilon": ("rms_norm_eps", 1e-6),
        "tied": ("tie_word_embeddings", False),
        "bias": ("attention_bias", False),
    },
    activation=(
        "hidden_act",
        "silu",
        {"silu": "swiglu", "gelu_pytorch_tanh": "gated_gelu", "gelu_new": "gated_gelu"},
    ),
    required={},
    read=_llama_read,
    write=_llama_write,
    rows=lambda c: _LLAMA_ROWS,
    aliases={"embed_tokens.weight": (LM_HEAD,)},
    ignored=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)
