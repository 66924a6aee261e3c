"""Models of real sizes and their machines, for the vendors' compilers: the rows of docs/compiled.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import weft as wf
from benchmarks import handwritten, lm
from weft import nn, optim, train
from weft.core.layout import LayoutLike
from weft.generate.batching import MAX_END_TOKENS, RowSettings
from weft.generate.cache import decode_step, prefill_cache, unstack_layers
from weft.generate.decode_loop import prefill
from weft.generate.sampling import SamplingParams
from weft.models import Batch, Config, Transformer, preset
from weft.models.presets import batch_specs

Made = tuple[wf.Program, tuple[Any, ...]]

SPLIT = "batch:data d_ff:model heads:model vocab:model"
GROUPED = "batch:data d_ff:model kv_heads:model vocab:model"


@dataclass(frozen=True)
class Case:
    """A program of a real size and the machine that it is compiled for.

    Attributes:
      name: its row in the tables.
      kind: what is split, or what runs.
      target: the machine.
      mesh, layout: of the program.
      make: the program and its arguments, for a mesh and a layout.
    """

    name: str
    kind: str
    target: str
    mesh: str
    layout: LayoutLike
    make: Callable[[str, LayoutLike], Made]

    def program(self) -> Made:
        """The program and its arguments."""
        return self.make(self.mesh, self.layout)


def step(config: Config, batch: int, length: int, optimizer: Any, mesh: str, layout: LayoutLike) -> Made:
    """The train step of a Transformer, which donates the parameters and the optimizer's state."""
    model = nn.specs(Transformer(config))
    key = jax.eval_shape(lambda: jax.random.key(0))
    args = model, optimizer.init(model), batch_specs(config, batch, length), key
    return wf.spmd(train.train_step(optimizer), mesh, layout, donate=(0, 1)), args


def trained(config: Config, batch: int, length: int, optimizer: Any = None) -> Callable[..., Made]:
    return partial(step, config, batch, length, optimizer or optim.AdamW(1e-3))


def paper(name: str) -> Callable[..., Made]:
    """A train step of the Mesh-TensorFlow paper: Adafactor, and dropout."""
    chosen = preset(name)
    return trained(chosen.config, chosen.batch, chosen.length, optim.Adafactor(0.01))


def in_bfloat16(tree: Any) -> Any:
    """Specs of the same dims in bfloat16."""
    return jax.tree.map(lambda t: wf.spec(t.dims, jnp.bfloat16), tree, is_leaf=wf.is_tensor)


def of_ops(mesh: str, layout: LayoutLike) -> Made:
    """The train step of `benchmarks/lm.py`, which has no library layers, in bfloat16 throughout."""
    size = handwritten.Size(
        batch=16, length=2048, vocab=32_768, d_model=2048, d_ff=8192, heads=16, d_kv=128, layers=8
    )
    params, tokens, targets = lm.specs(size)
    return lm.step(size, mesh, layout), (in_bfloat16(params), tokens, targets)


def prefilled(config: Config, rows: int, prompt: int, new: int, mesh: str, layout: LayoutLike) -> Made:
    """The prefill of a batch of prompts, with room for `new` tokens."""
    batch = wf.Dim("batch", rows)

    def integers(*dims: wf.Dim) -> wf.Tensor:
        return wf.spec([batch, *dims], jnp.int32)

    floats = wf.spec([batch])
    settings = RowSettings(
        prompt_length=integers(),
        limit=integers(),
        ends=integers(wf.Dim("ends", MAX_END_TOKENS)),
        sampling=SamplingParams(temperature=floats, top_k=integers(), top_p=floats, penalty=floats),
        uniforms=wf.spec([batch, wf.Dim("generated", new)]),
    )
    prompts = Batch(integers(wf.Dim("length", prompt)))
    args = (served(config),), prompts, settings, prompt + new
    return wf.spmd(prefill, mesh, layout, static=("max_length",)), args


def decoded(config: Config, rows: int, longest: int, mesh: str, layout: LayoutLike) -> Made:
    """One decode step of a batch, with a KV cache of `longest` positions."""
    batch = wf.Dim("batch", rows)
    tokens, model = wf.spec([batch], jnp.int32), served(config)
    prompts = Batch(wf.spec([batch, wf.Dim("length", longest)], jnp.int32))
    cache = wf.eval_shape(lambda model, prompts: prefill_cache(model, prompts, longest), model, prompts)
    args = wf.eval_shape(unstack_layers, model), cache, tokens, tokens
    return wf.spmd(decode_step, mesh, layout, donate=("cache",)), args


def served(config: Config) -> Transformer:
    """A model whose weights are stored in bfloat16."""
    return in_bfloat16(nn.specs(Transformer(config)))


# Sizes between the published models
GPT = Config(
    d_model=2048, d_ff=8192, heads=16, d_kv=128, layers=16, longest=2048, activation="swiglu",
    positions="rotary", compute="bfloat16",
)  # fmt: skip
SMALL = GPT.replace(layers=8)
EXPERTS = Config(
    d_model=1024, d_ff=4096, heads=16, d_kv=64, layers=12, longest=1024, experts=16, expert_top=2,
    compute="bfloat16",
)  # fmt: skip
ENCODER = Config(
    kind="encoder", d_model=1024, d_ff=4096, heads=16, d_kv=64, layers=24, vocab=30_522, norm="layer",
    bias=True, activation="gelu", tied=True, compute="bfloat16",
)  # fmt: skip


def published(name: str, **changes: Any) -> Config:
    return preset(name).config.replace(**changes)


LLAMA_7B = published("llama-2-7b", remat="nothing")
LLAMA_8B = published("llama-3-8b", remat="sums")
GPT2_XL = published("gpt2-xl", remat="dots+sums")
T5_3B = published("t5-3b")
ADAFACTOR = optim.Adafactor(0.01)
FSDP = wf.Layout("batch:data", params="d_model:data")
ZERO_1 = wf.Layout("batch:data", optimizer="d_model:data")
EXPERTS_SPLIT = "batch:data experts:data"

CASES = (
    # The Mesh-TensorFlow paper's runs
    Case("lm-0.14b", "DP", "tpu-v2:4x4", "data=32", "batch:data", paper("lm-0.14b")),
    Case("lm-4.9b", "TP", "tpu-v2:16x16", "data=16 model=32", SPLIT, paper("lm-4.9b")),
    Case("tr-2.89b", "TP, encoder-decoder", "tpu-v2:8x8", "data=16 model=8", SPLIT, paper("tr-2.89b")),
    # TPU v4
    Case("gpt2-xl", "ZeRO-1", "tpu-v4:4x4x4", "data=64", ZERO_1, trained(GPT2_XL, 128, 1024)),
    Case(
        "t5-3b",
        "TP, encoder-decoder",
        "tpu-v4:4x4x4",
        "data=8 model=8",
        SPLIT,
        trained(T5_3B, 64, 512, ADAFACTOR),
    ),
    Case("encoder", "DP", "tpu-v4:2x2x4", "data=16", "batch:data", trained(ENCODER, 256, 512)),
    # TPU v5e
    Case("gpt2", "DP", "tpu-v5e:4x4", "data=16", "batch:data", trained(published("gpt2"), 64, 1024)),
    Case("ops only", "TP", "tpu-v5e:4x4", "data=4 model=4", SPLIT, of_ops),
    Case("experts", "MoE", "tpu-v5e:4x4", "data=16", EXPERTS_SPLIT, trained(EXPERTS, 64, 1024)),
    Case(
        "t5-v1.1-large",
        "FSDP, encoder-decoder",
        "tpu-v5e:4x4",
        "data=16",
        FSDP,
        trained(published("t5-v1.1-large"), 32, 512),
    ),
    Case(
        "llama-3-8b",
        "FSDP + TP",
        "tpu-v5e:16x16",
        "data=32 model=8",
        wf.Layout(GROUPED, params="d_model:data"),
        trained(LLAMA_8B, 64, 4096),
    ),
    Case(
        "llama-2-7b",
        "prefill",
        "tpu-v5e:2x4",
        "model=8",
        "d_ff:model heads:model vocab:model",
        partial(prefilled, LLAMA_7B, 8, 1024, 128),
    ),
    Case(
        "llama-2-7b",
        "decode step",
        "tpu-v5e:2x4",
        "model=8",
        "d_ff:model heads:model vocab:model",
        partial(decoded, LLAMA_7B, 32, 1152),
    ),
    # TPU v5p
    Case(
        "gpt",
        "TP",
        "tpu-v5p:2x2x4",
        "data=4 model=4",
        SPLIT,
        trained(GPT.replace(remat="dots+sums"), 32, 2048),
    ),
    Case("llama-2-7b", "FSDP", "tpu-v5p:4x4x4", "data=64", FSDP, trained(LLAMA_7B, 64, 4096)),
    Case(
        "gpt",
        "gpipe",
        "tpu-v5p:4x4x4",
        "pipe=4 data=16",
        "layers:pipe batch:data",
        trained(GPT.replace(remat="dots+sums", pipeline_micro=4), 256, 2048),
    ),
    # TPU v6e
    Case(
        "gpt",
        "FSDP",
        "tpu-v6e:4x4",
        "data=16",
        FSDP,
        trained(GPT.replace(remat="nothing"), 64, 2048),
    ),
    Case(
        "gpt",
        "1f1b",
        "tpu-v6e:4x4",
        "pipe=4 data=4",
        "layers:pipe batch:data",
        trained(GPT.replace(pipeline="1f1b", pipeline_micro=8), 64, 2048),
    ),
    Case(
        "llama-3-8b",
        "FSDP + TP",
        "tpu-v6e:8x8",
        "data=16 model=4",
        wf.Layout(GROUPED, params="d_model:data"),
        trained(LLAMA_8B, 64, 4096),
    ),
    # H100
    Case(
        "gpt, 8 layers",
        "TP",
        "h100:1x8",
        "data=2 model=4",
        SPLIT,
        trained(SMALL.replace(remat="dots"), 16, 2048),
    ),
    Case(
        "gpt, 8 layers", "FSDP", "h100:1x8", "data=8", FSDP, trained(SMALL.replace(remat="nothing"), 16, 2048)
    ),
    Case(
        "gpt, 8 layers",
        "gpipe",
        "h100:1x8",
        "pipe=4 data=2",
        "layers:pipe batch:data",
        trained(SMALL, 16, 2048),
    ),
    Case(
        "gpt, 8 experts",
        "MoE",
        "h100:1x8",
        "data=8",
        EXPERTS_SPLIT,
        trained(SMALL.replace(experts=8, expert_top=2, activation="relu"), 16, 1024),
    ),
    Case("llama-2-7b", "FSDP", "h100:2x8", "data=16", FSDP, trained(LLAMA_7B, 16, 4096)),
    Case(
        "llama-2-7b",
        "decode step",
        "h100:1x8",
        "model=8",
        "d_ff:model heads:model vocab:model",
        partial(decoded, LLAMA_7B, 32, 1152),
    ),
    # B200
    Case("gpt", "TP", "b200:1x8", "data=2 model=4", SPLIT, trained(GPT.replace(remat="dots+sums"), 32, 2048)),
    Case("llama-3-8b", "FSDP", "b200:1x8", "data=8", FSDP, trained(LLAMA_8B, 16, 4096)),
    Case(
        "t5-large",
        "DP, encoder-decoder",
        "b200:1x8",
        "data=8",
        "batch:data",
        trained(published("t5-large"), 64, 512),
    ),
)
