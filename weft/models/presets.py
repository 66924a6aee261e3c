"""Presets: published models by name, such as `lm-4.9b`, with their `Config` and training batch.

The sizes are those of the Mesh-TensorFlow paper's language and translation models (arXiv 1811.02084), T5
(1910.10683, and the v1.1 checkpoints), GPT-2, Llama. The `tiny` ones train on two cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

import weft as wf
from weft import nn
from weft.core.errors import ModelError, nearest

from .batch import Batch
from .config import Config
from .transformer import Transformer


@dataclass(frozen=True)
class Preset:
    """A named model.

    Attributes:
      name: the argument of `preset`.
      about: a one-line description.
      config: its hyperparameters.
      batch, length: the batch size and the sequence length of a training step.

    >>> preset("lm-4.9b").parameter_count
    4899222528
    """

    name: str
    about: str
    config: Config
    batch: int
    length: int

    @property
    def parameter_count(self) -> int:
        """The total size of its parameters, positions and norms included."""
        return nn.count(self.model())

    def model(self) -> Transformer:
        """The model, with declared parameters."""
        return Transformer(self.config)

    def batch_specs(self, batch: int | None = None, length: int | None = None) -> Batch:
        """A batch of specs, for planning."""
        rows, positions = self.batch if batch is None else batch, self.length if length is None else length
        return batch_specs(self.config, rows, positions)


def count_by_kind(config: Config) -> dict[str, int]:
    """The parameter counts of a model by kind. The paper's formulas leave out positions and norms."""
    sums = {"weights": 0, "embedding and last layer": 0, "positions": 0, "norms": 0}
    for name, parameter in nn.parameters(Transformer(config)).items():
        parts = set(name.split("."))
        if parts & {"embedding", "last"}:
            kind = "embedding and last layer"
        elif parts & {"positions", "relative"}:
            kind = "positions"
        else:
            kind = "norms" if any(part.endswith("norm") for part in parts) else "weights"
        sums[kind] += parameter.size
    return sums


def batch_specs(config: Config, batch: int, length: int) -> Batch:
    """A batch of specs, of that batch size and sequence length."""
    row = wf.spec([wf.Dim("batch", batch), wf.Dim("length", length)], jnp.int32)
    return Batch(row, row, inputs=row if config.kind == "encoder_decoder" else None)


def presets() -> list[str]:
    """The names of the presets."""
    return list(_PRESETS)


def preset(name: str) -> Preset:
    """The preset of that name."""
    if name in _PRESETS:
        return _PRESETS[name]
    raise ModelError(
        f"there is no preset {name!r}{nearest(str(name), _PRESETS)}",
        f"known: {', '.join(_PRESETS)}",
        rule="a preset is a known model with its published sizes",
        hint="weft models lists them with their sizes",
    )


# The tables


def _paper_lm(name: str, d_ff: int, heads: int) -> Preset:
    config = Config(
        d_model=1024,
        d_ff=d_ff,
        heads=heads,
        d_kv=256,
        longest=256,
        dropout=0.1,
        compute="bfloat16",
    )
    return Preset(f"lm-{name}", "the paper's language model", config, batch=256, length=256)


def _paper_translation(name: str, d_ff: int, heads: int) -> Preset:
    config = Config(
        kind="encoder_decoder",
        d_model=1024,
        d_ff=d_ff,
        heads=heads,
        d_kv=128,
        longest=256,
        dropout=0.1,
        smoothing=0.1,
        compute="bfloat16",
    )
    return Preset(f"tr-{name}", "the paper's translation model", config, batch=128, length=256)


def _t5(name: str, d_model: int, d_ff: int, heads: int, d_kv: int, layers: int) -> Preset:
    """v1.1 has gated activations and no tied embedding."""
    newer = name.startswith("v1.1")
    config = Config(
        kind="encoder_decoder",
        vocab=32_128,
        d_model=d_model,
        d_ff=d_ff,
        heads=heads,
        d_kv=d_kv,
        layers=layers,
        positions="relative",
        activation="gated_gelu" if newer else "relu",
        scaled=False,
        tied=not newer,
        scale_logits=not newer,
        dropout=0.0 if newer else 0.1,
        z_loss=1e-4,
        compute="bfloat16",
    )
    return Preset(f"t5-{name}", "T5 " + ("v1.1" if newer else "v1.0"), config, batch=128, length=512)


def _gpt2(name: str, d_model: int, heads: int, layers: int) -> Preset:
    config = Config(
        vocab=50_257,
        d_model=d_model,
        d_ff=4 * d_model,
        heads=heads,
        d_kv=64,
        layers=layers,
        longest=1024,
        norm="layer",
        epsilon=1e-5,
        activation="gelu_tanh",
        bias=True,
        tied=True,
        dropout=0.1,
        compute="bfloat16",
    )
    return Preset(name, "GPT-2", config, batch=512, length=1024)


def _llama(
    name: str, vocab: int, d_model: int, d_ff: int, heads: int, kv_heads: int, layers: int, base: float
) -> Preset:
    config = Config(
        vocab=vocab,
        d_model=d_model,
        d_ff=d_ff,
        heads=heads,
        kv_heads=kv_heads,
        d_kv=128,
        layers=layers,
        longest=4096,
        positions="rotary",
        rotary_base=base,
        epsilon=1e-5,
        activation="swiglu",
        compute="bfloat16",
    )
    return Preset(name, "Llama", config, batch=1024, length=4096)


_TINY = Config(vocab=512, d_model=64, d_ff=256, heads=4, d_kv=16, layers=2, longest=128)


def _tiny(name: str, about: str, **changes: object) -> Preset:
    return Preset(name, about + ", for two cores", _TINY.replace(**changes), batch=16, length=64)


_PRESETS = {
    one.name: one
    for one in (
        _paper_lm("0.14b", 4_096, 4),
        _paper_lm("0.22b", 8_192, 8),
        _paper_lm("0.37b", 16_384, 16),
        _paper_lm("0.67b", 32_768, 32),
        _paper_lm("1.28b", 65_536, 64),
        _paper_lm("2.48b", 131_072, 128),
        _paper_lm("4.9b", 262_144, 256),
        _paper_translation("0.15b", 2_048, 4),
        _paper_translation("0.24b", 4_096, 8),
        _paper_translation("0.42b", 8_192, 16),
        _paper_translation("0.77b", 16_384, 32),
        _paper_translation("1.48b", 32_768, 64),
        _paper_translation("2.89b", 65_536, 128),
        _t5("small", 512, 2_048, 8, 64, 6),
        _t5("base", 768, 3_072, 12, 64, 12),
        _t5("large", 1_024, 4_096, 16, 64, 24),
        _t5("3b", 1_024, 16_384, 32, 128, 24),
        _t5("11b", 1_024, 65_536, 128, 128, 24),
        _t5("v1.1-small", 512, 1_024, 6, 64, 8),
        _t5("v1.1-base", 768, 2_048, 12, 64, 12),
        _t5("v1.1-large", 1_024, 2_816, 16, 64, 24),
        _t5("v1.1-3b", 2_048, 5_120, 32, 64, 24),
        _t5("v1.1-11b", 4_096, 10_240, 64, 64, 24),
        _gpt2("gpt2", 768, 12, 12),
        _gpt2("gpt2-medium", 1_024, 16, 24),
        _gpt2("gpt2-large", 1_280, 20, 36),
        _gpt2("gpt2-xl", 1_600, 25, 48),
        _llama("llama-2-7b", 32_000, 4_096, 11_008, 32, 32, 32, 1e4),
        _llama("llama-2-70b", 32_000, 8_192, 28_672, 64, 8, 80, 1e4),
        _llama("llama-3-8b", 128_256, 4_096, 14_336, 32, 8, 32, 5e5),
        _llama("llama-3-70b", 128_256, 8_192, 28_672, 64, 8, 80, 5e5),
        _tiny("tiny-lm", "a language model"),
        _tiny("tiny-tr", "a translation model", kind="encoder_decoder"),
        _tiny("tiny-moe", "a language model with experts", experts=4, expert_top=2),
        _tiny("tiny-reversible", "a language model with reversible layers", residual="reversible"),
        _tiny("tiny-llama", "a Llama-style decoder", positions="rotary", activation="swiglu", kv_heads=2),
        _tiny("tiny-encoder", "an encoder", kind="encoder"),
    )
}
