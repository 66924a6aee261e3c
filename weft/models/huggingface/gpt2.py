"""GPT-2: its linear layers are stored with inputs first, and queries, keys and values in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import Config
from .family import LM_HEAD, LM_HEAD_ROW, Family, Row, norm


def _fused(ours: str, theirs: str) -> tuple[Row, ...]:
    """Queries, keys and values side by side; inputs come first."""
    return tuple(
        row
        for part, name in enumerate(("query", "key", "value"))
        for row in (
            Row(f"{ours}.{name}.weight", f"{theirs}.weight", "d_model (3 heads d_kv)", part),
            Row(f"{ours}.{name}.bias", f"{theirs}.bias", "(3 heads d_kv)", part),
        )
    )


def _transposed(ours: str, theirs: str, inputs: str, outputs: str) -> tuple[Row, ...]:
    """A linear layer with its inputs first."""
    weight = Row(f"{ours}.weight", f"{theirs}.weight", f"{inputs} {outputs}")
    return weight, Row(f"{ours}.bias", f"{theirs}.bias", outputs)


_GPT2_ROWS = (
    Row("embedding.weight", "wte.weight", "vocab d_model"),
    Row("decoder.positions.weight", "wpe.weight", "positions d_model"),
    *norm("decoder.blocks.attention_norm", "h.{layer}.ln_1"),
    *_fused("decoder.blocks.attention", "h.{layer}.attn.c_attn"),
    *_transposed("decoder.blocks.attention.out", "h.{layer}.attn.c_proj", "(heads d_kv)", "d_model"),
    *norm("decoder.blocks.feed_norm", "h.{layer}.ln_2"),
    *_transposed("decoder.blocks.feed.wide", "h.{layer}.mlp.c_fc", "d_model", "d_ff"),
    *_transposed("decoder.blocks.feed.narrow", "h.{layer}.mlp.c_proj", "d_ff", "d_model"),
    *norm("decoder.norm", "ln_f"),
    LM_HEAD_ROW,
)


def _gpt2_read(settings: Mapping[str, Any]) -> dict[str, Any]:
    d_model = settings["n_embd"]
    return {"d_kv": d_model // settings["n_head"], "d_ff": settings.get("n_inner") or 4 * d_model}


def _gpt2_write(c: Config) -> dict[str, Any]:
    return {"n_inner": c.d_ff, "embd_pdrop": c.dropout, "attn_pdrop": c.dropout}


GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    fixed={"kind": "decoder", "positions": "learned", "norm": "layer", "bias": True},
    sizes={
        "vocab": "vocab_size",
        "d_model": "n_embd",
        "heads": "n_head",
        "layers": "n_layer",
        "longest": "n_positions",
    },
    options={
        "epsilon": ("layer_norm_epsilon", 1e-5),
        "dropout": ("resid_pdrop", 0.1),
        "tied": ("tie_word_embeddings", True),
        "scaled": ("scale_attn_weights", True),
    },
    activation=(
        "activation_function",
        "gelu_new",
        {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"},
    ),
    required={"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    read=_gpt2_read,
    write=_gpt2_write,
    rows=lambda c: _GPT2_ROWS,
    aliases={"wte.weight": (LM_HEAD,)},
    ignored=r"h\.\d+\.attn\.(masked_)?bias",  # early checkpoints store the causal mask
)
