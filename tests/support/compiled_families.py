"""Programs of every family, to compile for TPUs and GPUs. Input: the name of a case. Output: a program and its arguments.

All arguments are abstract, and the meshes have 8 devices, or 1. The models are as small as the presets for two cores:
each program compiles in seconds. They are large enough that the compilers keep their matmuls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from every_op import EVERY_OP
from op_examples import OPERANDS

import weft as wf
from weft import nn, optim, train
from weft.cli.preset_targets import load_plan_target
from weft.generate import Beams, RowSettings, SamplingParams, beam_search, decode, prefill
from weft.generate.config import MAX_END_TOKENS
from weft.generate.score import score
from weft.models import Batch, Config, Transformer, preset
from weft.models.presets import batch_specs
from weft.serve.programs import decode_rows, insert_rows, move_row

Made = tuple[wf.Program, tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """A program to compile.

    Attributes:
      name: its family, and what it is in this family.
      make: returns the program and its arguments.
      quick: whether it is compiled for TPUs by `make test-compilers-quick`.
      gpu: whether it is compiled for GPUs.
    """

    name: str
    make: Callable[[], Made]
    quick: bool = False
    gpu: bool = False


KEY = jax.eval_shape(lambda: jax.random.key(0))
BOTH, DATA, STAGES = "data=4 model=2", "data=8", "pipe=2 data=2 model=2"
SPLIT = "batch:data heads:model d_ff:model vocab:model"
STORED = "heads:model d_ff:model vocab:model"
GROUPED = "batch:data kv_heads:model d_ff:model vocab:model"
TINY = preset("tiny-lm").config


# Ops

# The ops of each program, by their families (`OpInfo.family`) or by name. The layout splits both dims of their
# operands unevenly, 6 over 4 and 3 over 2. "callback" and "debug" call Python, which no other platform can.
OPS = {
    "elementwise": "elementwise einsum",
    "reductions": "reduce",
    "shapes": "shape shifting indexing creation",
    "lookup and sorting": "lookup sorting",
    "convolution and pooling": "conv pool",
    "loops": "scan associative_scan control map",
    "transformations": "vmap local grad jacobian remat pipeline",
    "draws": "draws",
    "factorizations": "linalg",
    "Fourier transforms to real numbers": "irfft fftfreq rfftfreq",
    "Fourier transforms": "fft ifft rfft",
}
GRADIENTS = {
    "elementwise": "elementwise einsum",
    "reductions": "reduce",
    "shapes": "shape shifting indexing",
    "lookup and sorting": "lookup sorting",
    "convolution and pooling": "conv avg_pool windows",
    "max_pool": "max_pool",
    "loops": "scan associative_scan fori_loop cond switch map",
    "transformations": "vmap local grad jacobian remat pipeline",
    "factorizations": "linalg",
    "Fourier transforms to real numbers": "irfft",
}
PYTHON = ("callback", "debug")
OPS_QUICK = ("reductions", "shapes", "lookup and sorting", "convolution and pooling", "loops")
OPS_QUICK += ("transformations", "Fourier transforms", "max_pool")
OPS_GPU = ("elementwise", "reductions", "shapes", "lookup and sorting", "convolution and pooling", "loops")
OPS_GPU += ("transformations", "draws", "factorizations", "Fourier transforms", "max_pool")


def ops(names: str, gradients: bool = False) -> Made:
    """The examples of ops, or the gradients of the sum of their squared results."""
    wanted = set(names.split())
    infos = [info for name, info in EVERY_OP.items() if wanted & {name, info.family} and name not in PYTHON]
    used = {name for info in infos for name in info.operands}
    given = {n: KEY if n == "key" else wf.spec(t.dims, t.dtype) for n, t in OPERANDS.items() if n in used}

    def examples(given: dict[str, Any]) -> list[wf.Tensor]:
        results = [info.run_example(given) for info in infos]
        return [t for t in jax.tree.leaves(results, is_leaf=wf.is_tensor) if wf.is_tensor(t)]

    def total(floats: dict[str, Any], others: dict[str, Any]) -> wf.Tensor:
        results = [t for t in examples(floats | others) if jnp.issubdtype(t.dtype, jnp.floating)]
        return sum((wf.sum(wf.square(t)) for t in results), wf.zeros(""))

    layout = " ".join(rule for rule in ("a:x", "b:y") if any(rule[0] in _names(t) for t in given.values()))
    if not given:  # ops that create tensors
        layout = "a:x b:y"
    if not gradients:
        return wf.spmd(examples, "x=4 y=2", layout), (given,)
    floats = {n: t for n, t in given.items() if n != "key" and jnp.issubdtype(t.dtype, jnp.floating)}
    others = {n: t for n, t in given.items() if n not in floats}
    return wf.spmd(wf.grad(total), "x=4 y=2", layout), (floats, others)


def _names(operand: Any) -> set[str]:
    return {d.name for d in operand.dims} if wf.is_tensor(operand) else {"a", "b"}


def _ops() -> Iterator[Case]:
    for kind, table in {"ops": OPS, "gradients of ops": GRADIENTS}.items():
        for name, names in table.items():
            make = partial(ops, names, gradients=table is GRADIENTS)
            yield Case(f"{kind}: {name}", make, name in OPS_QUICK, name in OPS_GPU)


# Train steps


def training(
    config: Config,
    mesh: str,
    layout: Any,
    optimizer: Any = None,
    *,
    batch: int = 16,
    length: int = 64,
    **options: Any,
) -> Made:
    """The train step of a Transformer. Parameters and optimizer state are donated."""
    model = nn.specs(Transformer(config))
    step = train.train_step(optimizer or optim.AdamW(0.01), **options)
    args = model, step.init(model), batch_specs(config, batch, length), KEY
    return wf.spmd(step, mesh, layout, donate=(0, 1)), args


def plan_target(name: str, optimizer: str) -> Made:
    """The train step that `weft plan` and `weft compile` use, on one device."""
    program, args = load_plan_target(name, optimizer, None, None)
    assert isinstance(program, wf.Program)
    return program, args


def _training() -> Iterator[Case]:
    def case(name: str, *args: Any, quick: bool = False, gpu: bool = False, **options: Any) -> Case:
        return Case(f"train: {name}", partial(training, *args, **options), quick, gpu)

    def changed(name: str, *, quick: bool = False, gpu: bool = False, **changes: Any) -> Case:
        return case(name, TINY.replace(**changes), BOTH, SPLIT, quick=quick, gpu=gpu)

    def split(name: str, mesh: str, layout: Any, *, quick: bool = False, gpu: bool = False) -> Iterator[Case]:
        """In float32 and in bfloat16: the TPU compiler gathers operands of matmuls in bfloat16."""
        yield case(name, TINY, mesh, layout, gpu=gpu)
        yield case(f"{name}, bfloat16", TINY.replace(compute="bfloat16"), mesh, layout, quick=quick)

    # Presets
    yield Case("train: one device", partial(plan_target, "tiny-lm", "adamw"), quick=True, gpu=True)
    yield case("tiny-lm", TINY, BOTH, SPLIT, quick=True, gpu=True)
    yield case("tiny-tr", preset("tiny-tr").config, BOTH, SPLIT, quick=True, gpu=True)
    yield case("tiny-llama", preset("tiny-llama").config, BOTH, GROUPED, quick=True, gpu=True)
    yield case("tiny-encoder", preset("tiny-encoder").config, BOTH, SPLIT, quick=True)
    yield case("tiny-reversible", preset("tiny-reversible").config, BOTH, SPLIT, quick=True, gpu=True)
    experts = preset("tiny-moe").config
    narrow = experts.replace(compute="bfloat16")
    one, own = (BOTH, "batch:data experts:data d_ff:model"), ("data=2 expert=4", "batch:data experts:expert")
    both = "data=2 expert=4", "batch:data+expert experts:expert groups:data"
    yield case("tiny-moe, experts on data", experts, *one, gpu=True)
    yield case("tiny-moe, experts on data, bfloat16", narrow, *one, quick=True)
    yield case("tiny-moe, experts on their own axis", experts, *own, quick=True)
    yield case("tiny-moe, batch on both axes", experts, *both, gpu=True)
    yield case("tiny-moe, batch on both axes, bfloat16", narrow, *both)
    # Optimizers
    for name, optimizer in {
        "Adafactor": optim.Adafactor(0.01),
        "Lion": optim.Lion(0.01),
        "Momentum": optim.Momentum(0.01, momentum=0.9),
        "SGD": optim.Momentum(0.01),
        "optax's adam": optax.adam(0.01),
    }.items():
        quick = name in ("Adafactor", "optax's adam")
        yield case(name, TINY, BOTH, SPLIT, optimizer, quick=quick, gpu=quick)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.lion(0.01))
    yield case("optax's clip and lion", TINY, BOTH, SPLIT, clipped, gpu=True)
    # Layouts
    yield case("data", TINY, DATA, "batch:data", quick=True)
    yield case("ZeRO-1", TINY, DATA, wf.Layout("batch:data", optimizer="d_model:data"), quick=True)
    stored = wf.Layout(SPLIT, optimizer="d_model:data")
    yield case("ZeRO-1 and model", TINY, BOTH, stored, quick=True, gpu=True)
    yield from split("ZeRO-3", DATA, wf.Layout("batch:data", params="d_model:data"))
    yield from split("ZeRO-3 and model", BOTH, wf.Layout(SPLIT, params="d_model:data"), quick=True, gpu=True)
    yield from split("sequence", "data=2 seq=4", "batch:data length:seq", quick=True, gpu=True)
    yield from split("d_model", BOTH, "batch:data d_model:model", quick=True, gpu=True)
    uneven = TINY.replace(layers=3, d_model=60, d_ff=200, heads=5, d_kv=12, vocab=333)
    yield case("uneven sizes", uneven, BOTH, SPLIT, batch=13, length=50, quick=True, gpu=True)
    # Settings of the model and of the step
    for policy in ("nothing", "dots", "sums", "dots+sums"):
        yield changed(f"remat {policy}", remat=policy, quick=policy == "nothing", gpu=policy == "dots")
    yield case("micro-batches", TINY, BOTH, SPLIT, micro=2)
    everything = dict(micro=2, clip=1.0, average=0.999, skip_nonfinite=True)
    dropout = TINY.replace(dropout=0.1)
    yield case("micro, clip, average, skip", dropout, BOTH, SPLIT, quick=True, gpu=True, **everything)
    yield changed("bfloat16", compute="bfloat16", quick=True, gpu=True)
    yield changed("float16", compute="float16", gpu=True)
    yield changed("dropout, z-loss, smoothing", dropout=0.1, z_loss=1e-4, smoothing=0.1)
    yield changed("LSH attention", attention="lsh", lsh_chunk=16, quick=True, gpu=True)
    yield changed("local attention", attention="local", window=16)
    yield changed("chunks", feed_chunks=2, loss_chunks=2)
    yield changed("parallel block, unrolled", block="parallel", unroll=2)
    yield changed("relative positions, tied", positions="relative", tied=True)
    norm = dict(norm="layer", bias=True, positions="sinusoid", activation="gelu")
    yield changed("layer norm, biases, sinusoids", **norm)


# Pipelines


def _pipelines() -> Iterator[Case]:
    rules = f"layers:pipe {SPLIT}"
    for schedule in ("gpipe", "1f1b"):
        config = TINY.replace(layers=4, pipeline=schedule, pipeline_micro=4)
        settings = {
            "": (config, STAGES, rules),
            ", uneven layers": (config.replace(layers=3), STAGES, rules),
            ", ZeRO-3": (config, STAGES, wf.Layout(rules, params="d_model:data")),
            ", experts": (config.replace(experts=4), "pipe=2 data=4", "layers:pipe batch:data experts:data"),
            ", translation": (config.replace(kind="encoder_decoder"), STAGES, rules),
        }
        for name, args in settings.items():
            make = partial(training, *args)
            yield Case(f"pipeline: {schedule}{name}", make, quick=not name, gpu=not name)


# Generation

ROWS, PROMPT, GENERATED, INPUTS = 8, 16, 16, 16


def requests(config: Config, rows: int) -> tuple[Batch, RowSettings]:
    """The prompts and the settings of a batch of requests."""
    batch = wf.Dim("batch", rows)

    def integers(*dims: wf.Dim) -> wf.Tensor:
        return wf.spec([batch, *dims], jnp.int32)

    tokens, inputs = integers(wf.Dim("length", PROMPT)), integers(wf.Dim("length", INPUTS))
    read = dict(inputs=inputs, input_segments=inputs) if config.kind == "encoder_decoder" else {}
    floats = wf.spec([batch])
    settings = RowSettings(
        prompt_length=integers(),
        limit=integers(),
        ends=integers(wf.Dim("ends", MAX_END_TOKENS)),
        sampling=SamplingParams(temperature=floats, top_k=integers(), top_p=floats, penalty=floats),
        uniforms=wf.spec([batch, wf.Dim("generated", GENERATED)]),
    )
    return Batch(tokens, **read), settings


def generation(stage: str, config: Config, mesh: str, layout: str, models: int = 1) -> Made:
    """One of the programs that generate texts."""
    ensemble = (nn.specs(Transformer(config)),) * models
    length = PROMPT + GENERATED

    def state(rows: int) -> Any:
        return wf.eval_shape(lambda *args: prefill(*args, length), ensemble, *requests(config, rows))

    def staged(fn: Callable[..., Any], *args: Any, **options: Any) -> Made:
        return wf.spmd(fn, mesh, layout, **options), (ensemble, *args)

    match stage:
        case "prefill":
            return staged(prefill, *requests(config, ROWS), length, static=("max_length",))
        case "decode":
            return staged(decode, state(ROWS), GENERATED, donate=("state",))
        case "beam search":
            return staged(beam_search, state(ROWS), Beams(4), static=("beams",))
        case "score":
            prompts, _ = requests(config, ROWS)
            return staged(score, Batch(prompts.tokens, prompts.tokens, inputs=prompts.inputs))
        case "insert":
            slots = wf.spec("batch=2", jnp.int32)
            return staged(insert_rows, state(ROWS), state(2), slots, donate=("state",))
        case "decode some rows":
            static = ("count", "steps")
            return staged(decode_rows, state(ROWS), 4, GENERATED, static=static, donate=("state",))
        case "move":
            return staged(move_row, state(ROWS), wf.spec("ends=2", jnp.int32), donate=("state",))
        case _:
            raise AssertionError(stage)


def _generation() -> Iterator[Case]:
    def case(
        stage: str, name: str, *args: Any, quick: bool = False, gpu: bool = False, **options: Any
    ) -> Case:
        return Case(f"generation: {stage}, {name}", partial(generation, stage, *args, **options), quick, gpu)

    for name, layout in {"tiny-lm": SPLIT, "tiny-tr": SPLIT, "tiny-llama": GROUPED}.items():
        for stage in ("prefill", "decode", "beam search", "score"):
            is_tr = name == "tiny-tr"
            yield case(
                stage, name, preset(name).config, BOTH, layout, quick=is_tr, gpu=is_tr and stage != "score"
            )
    yield case("decode", "split cache", TINY, BOTH, "batch:data memory_length:model")
    yield case("decode", "two models", TINY, BOTH, SPLIT, models=2)
    yield case("decode", "reversible", TINY.replace(residual="reversible"), BOTH, SPLIT)
    for stage in ("insert", "decode some rows", "move"):
        yield case(stage, "tiny-lm", TINY, "model=8", "d_ff:model vocab:model", quick=stage == "insert")


# Convolutions


def conv_net(mesh: str, layout: str) -> Made:
    """Three convolutions, the last one strided: the loss and the gradients of the kernels."""
    rows, h, w, c, k, m, n = wf.dims("rows=8 h=32 w=32 c=16 k=32 m=3 n=3")
    window = {"h": "m", "w": "n"}

    def loss(first: Any, second: Any, third: Any, x: Any) -> wf.Tensor:
        y = wf.relu(wf.conv(x, first, window=window))
        y = wf.relu(wf.conv(y, second, window=window))
        return wf.mean(wf.square(wf.conv(y, third, window=window, stride=2)))

    kernels = wf.spec([m, n, c, k]), wf.spec([m, n, k, c]), wf.spec([m, n, c, k])
    program = wf.spmd(wf.value_and_grad(loss, argnums=(0, 1, 2)), mesh, layout)
    return program, (*kernels, wf.spec([rows, h, w, c]))


def u_net(mesh: str, layout: str) -> Made:
    """The gradients of the 3-D U-Net of `examples/unet3d.py`."""
    from examples import unet3d  # it fixes the number of virtual devices

    volume = [unet3d.batch, *unet3d.space]
    args = nn.specs(unet3d.NET), wf.spec([*volume, unet3d.channels[0]]), wf.spec(volume)
    return wf.spmd(wf.grad(unet3d.loss), mesh, layout), args


# DiLoCo, initialization, and the paper's layouts


def diloco(part: str, layout: Any) -> Made:
    """An inner or an outer step of DiLoCo, with two replicas."""
    method = train.DiLoCo(optim.AdamW(0.01), replicas=2, every=4)
    model, state = method.init(nn.specs(Transformer(TINY)))
    program = wf.spmd(getattr(method, part), "pod=2 data=2 model=2", layout, donate=(0, 1))
    return program, (model, state) if part == "outer" else (model, state, batch_specs(TINY, 16, 64), KEY)


def initialization(name: str, mesh: str, layout: Any) -> Made:
    """The parameters of a preset."""

    def init(key: jax.Array) -> Transformer:
        return nn.init(Transformer(preset(name).config), key)

    return wf.spmd(init, mesh, layout), (KEY,)


PAPER = {
    "A": ("all=8", ""),
    "B": ("all=8", "batch:all"),
    "C": ("all=8", "hidden:all"),
    "D": ("rows=4 cols=2", "batch:rows hidden:cols"),
    "E": ("rows=2 cols=2 planes=2", "batch:rows hidden:cols io:planes"),
}


def two_layers(mesh: str, layout: str) -> Made:
    """The two layers of the paper: the loss and all gradients."""
    batch, io, hidden = wf.dims("batch=512 io=256 hidden=1024")

    def loss(w: Any, v: Any, x: Any) -> wf.Tensor:
        h = wf.relu(wf.einsum(x, w, out=[batch, hidden]))
        return wf.sum(wf.square(wf.einsum(h, v, out=[batch, io]) - 1.0)) / batch.size

    program = wf.spmd(wf.value_and_grad(loss, argnums=(0, 1, 2)), mesh, layout)
    return program, (wf.spec([io, hidden]), wf.spec([hidden, io]), wf.spec([batch, io]))


def _others() -> Iterator[Case]:
    for letter, place in PAPER.items():
        yield Case(
            f"two layers: layout {letter}", partial(two_layers, *place), quick=letter in "DE", gpu=True
        )
    yield Case("convolutions: height split", partial(conv_net, "x=8", "h:x"), quick=True, gpu=True)
    both = partial(conv_net, "data=2 x=4", "rows:data h:x")
    yield Case("convolutions: batch and height split", both)
    space = partial(u_net, "deep=4 high=2", "depth:deep height:high")
    yield Case("convolutions: 3-D U-Net", space, quick=True, gpu=True)
    rules = f"replicas:pod {SPLIT}"
    for part in ("step", "outer"):
        yield Case(f"DiLoCo: {part}", partial(diloco, part, rules), quick=True, gpu=True)
        stored = wf.Layout(rules, optimizer="d_model:data")
        yield Case(f"DiLoCo: {part}, ZeRO-1", partial(diloco, part, stored))
    yield Case("nn.init: tiny-tr", partial(initialization, "tiny-tr", BOTH, STORED), quick=True, gpu=True)
    stored = wf.Layout(STORED, params="d_model:data")
    yield Case("nn.init: tiny-moe, ZeRO-3", partial(initialization, "tiny-moe", BOTH, stored))


CASES = {case.name: case for group in (_ops, _training, _pipelines, _generation, _others) for case in group()}
