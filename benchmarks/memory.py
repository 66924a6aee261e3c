"""The memory that plans predict beside the memory that XLA assigns; writes docs/memory.md.

python -m benchmarks.memory

Nothing is run: each case is planned, compiled for 8 virtual CPU devices, and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import weft as wf
from benchmarks import lm
from benchmarks.handwritten import EPSILON, LEARNING_RATE, MASKED, STACKED, STANDARD, Size

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"

Made = tuple[wf.Program, tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """A program and its abstract arguments; `slow` ones are left to `make soak`."""

    name: str
    make: Callable[[], Made]
    slow: bool = False


@dataclass(frozen=True)
class Found:
    """Bytes on one device: predicted, and XLA's."""

    name: str
    predicted: int
    compiled: int

    @property
    def error(self) -> float:
        return self.predicted / self.compiled - 1


def compare(case: Case) -> Found:
    """Plan and compile a case."""
    program, args = case.make()
    return Found(case.name, program.plan(*args).memory.peak, compiled_bytes(program.compile(*args)))


def compiled_bytes(compiled: Any) -> int:
    """Arguments, results and temporaries of a compiled program, memory that two of them share once."""
    m = compiled.memory_analysis()
    together = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes
    return together - m.alias_size_in_bytes


# Models


def two_layers(mesh: str, layout: str) -> Made:
    """`examples/two_layers.py` with eight times the batch: the loss and all gradients."""
    batch, io, hidden = wf.dims("batch=512 io=256 hidden=1024")

    def loss(w: Any, v: Any, x: Any) -> Any:
        h = wf.relu(wf.einsum(x, w, out=[batch, hidden]))
        return wf.sum(wf.square(wf.einsum(h, v, out=[batch, io]) - 1.0)) / batch.size

    program = wf.spmd(wf.value_and_grad(loss, argnums=(0, 1, 2)), mesh, layout)
    return program, (wf.spec([io, hidden]), wf.spec([hidden, io]), wf.spec([batch, io]))


def remat_loss(size: Size, policy: str) -> Any:
    """The loss of `lm.py`; the backward pass computes each block again."""
    d = lm.Dims(size)

    def norm(x: Any, scale: Any) -> Any:
        return x * wf.rsqrt(wf.mean(wf.square(x), d.d_model) + EPSILON) * scale

    def block(x: Any, layer: Any) -> Any:
        h = norm(x, layer["attention_scale"])
        q = wf.einsum(h, layer["wq"], out=[d.batch, d.heads, d.length, d.d_kv]) * size.d_kv**-0.5
        keys = h.rename(length="memory")
        k = wf.einsum(keys, layer["wk"], out=[d.batch, d.heads, d.memory, d.d_kv])
        v = wf.einsum(keys, layer["wv"], out=[d.batch, d.heads, d.memory, d.d_kv])
        scores = wf.einsum(q, k, out=[d.batch, d.heads, d.length, d.memory])
        causal = wf.arange(d.length) >= wf.arange(d.memory)
        weights = wf.softmax(wf.where(causal, scores, MASKED), d.memory)
        mixed = wf.einsum(weights, v, out=[d.batch, d.heads, d.length, d.d_kv])
        x = x + wf.einsum(mixed, layer["wo"], out=[d.batch, d.length, d.d_model])
        hidden = wf.relu(
            wf.einsum(norm(x, layer["feed_scale"]), layer["w1"], out=[d.batch, d.length, d.d_ff])
        )
        return x + wf.einsum(hidden, layer["w2"], out=[d.batch, d.length, d.d_model]), None

    def loss(params: Any, tokens: Any, targets: Any) -> Any:
        x = wf.take(params["embedding"], tokens, d.vocab) + params["positions"]
        stacked = {name: params[name] for name in STACKED}
        x, _ = wf.scan(wf.remat(block, policy), x, stacked, d.layers)
        h = norm(x, params["final_scale"])
        logits = wf.einsum(h, params["projection"], out=[d.batch, d.length, d.vocab])
        return wf.mean(wf.logsumexp(logits, d.vocab) - wf.take(logits, targets, d.vocab))

    return loss


def language_model(
    mesh: str, layout: Any, size: Size, *, policy: str = "", micro: int = 1, donate: bool = True
) -> Made:
    """The train step of `lm.py`, with remat, in micro-batches, or leaving the old parameters alone."""
    part = replace(size, batch=size.batch // micro)
    loss = remat_loss(part, policy) if policy else lm.loss_of(part)
    d, steps = lm.Dims(part), wf.Dim("micro", micro)

    def whole(params: Any, tokens: Any, targets: Any) -> Any:
        return wf.value_and_grad(loss)(params, tokens, targets)

    def in_parts(params: Any, tokens: Any, targets: Any) -> Any:
        def add(total: Any, rows: Any) -> Any:
            value, grads = wf.value_and_grad(loss)(params, *rows)
            return jax.tree.map(lambda a, g: a + g, total, grads, is_leaf=wf.is_tensor), value

        zeros = jax.tree.map(lambda p: p * 0.0, params, is_leaf=wf.is_tensor)
        grads, values = wf.scan(add, zeros, (tokens, targets), steps)
        return wf.mean(values), grads

    def step(params: Any, tokens: Any, targets: Any) -> Any:
        value, grads = (whole if micro == 1 else in_parts)(params, tokens, targets)
        new = {name: wf.parameter(p - LEARNING_RATE * grads[name]) for name, p in params.items()}
        return value, new

    rows = wf.spec([*([steps] if micro > 1 else []), d.batch, d.length], jnp.int32)
    params = {name: wf.parameter(p) for name, p in lm.specs(part)[0].items()}
    return wf.spmd(step, mesh, layout, donate=(0,) if donate else ()), (params, rows, rows)


def conv_net(mesh: str, layout: str) -> Made:
    """Three convolutions, the last one strided: the loss and the gradients of the kernels."""
    rows, h, w, c, k, m, n = wf.dims("rows=4 h=64 w=64 c=8 k=16 m=3 n=3")
    window = {"h": "m", "w": "n"}

    def loss(first: Any, second: Any, third: Any, x: Any) -> Any:
        y = wf.relu(wf.conv(x, first, window=window))
        y = wf.relu(wf.conv(y, second, window=window))
        y = wf.conv(y, third, window=window, stride=2)
        return wf.mean(wf.square(y))

    kernels = wf.spec([m, n, c, k]), wf.spec([m, n, k, c]), wf.spec([m, n, c, k])
    program = wf.spmd(wf.value_and_grad(loss, argnums=(0, 1, 2)), mesh, layout)
    return program, (*kernels, wf.spec([rows, h, w, c]))


# Cases

SMALL = Size(layers=4, d_model=64, d_ff=256, heads=4, d_kv=16, vocab=512, length=64, batch=16)
DEEP = Size(layers=8, d_model=128, d_ff=1024, heads=8, d_kv=32, vocab=512, length=64, batch=16)
WIDE = Size(layers=2, d_model=256, d_ff=1024, heads=8, d_kv=32, vocab=16384, length=32, batch=16)

PAPER = {
    "A": ("all=8", ""),
    "B": ("all=8", "batch:all"),
    "C": ("all=8", "hidden:all"),
    "D": ("rows=4 cols=2", "batch:rows hidden:cols"),
    "E": ("rows=2 cols=2 planes=2", "batch:rows hidden:cols io:planes"),
}
LAYOUTS: dict[str, tuple[str, Any]] = {
    "one device": ("", ""),
    "data": ("data=8", "batch:data"),
    "model": ("model=4", "d_ff:model heads:model vocab:model"),
    "both": ("data=4 model=2", lm.LAYOUT),
    "sequence": ("data=2 seq=4", "batch:data length:seq"),
    "ZeRO-3": ("data=8", wf.Layout("batch:data", params="d_model:data")),
    "ZeRO-3 and model": ("data=4 model=2", wf.Layout(lm.LAYOUT, params="d_model:data")),
}


def _cases() -> Iterable[Case]:
    for letter, paper in PAPER.items():
        yield Case(f"two layers, layout {letter}", partial(two_layers, *paper))
    sizes = {"small": SMALL, "standard": STANDARD, "deep": DEEP, "wide": WIDE}
    for title, size in sizes.items():
        for name, layout in LAYOUTS.items():
            yield Case(f"{title} LM, {name}", partial(language_model, *layout, size), title != "small")
    for name in ("one device", "data", "both", "sequence", "ZeRO-3"):
        make = partial(language_model, *LAYOUTS[name], SMALL)
        yield Case(f"small LM, {name}, remat", partial(make, policy="nothing"))
    make = partial(language_model, *LAYOUTS["both"], SMALL)
    yield Case("small LM, both, remat keeps sums", partial(make, policy="sums"))
    yield Case("small LM, both, remat keeps dots", partial(make, policy="dots"))
    for name in ("one device", "both"):
        make = partial(language_model, *LAYOUTS[name], SMALL)
        yield Case(f"small LM, {name}, not donated", partial(make, donate=False))
    for name in ("one device", "data", "both", "ZeRO-3 and model"):
        make = partial(language_model, *LAYOUTS[name], DEEP)
        yield Case(f"deep LM, {name}, remat", partial(make, policy="nothing"), True)
        yield Case(f"deep LM, {name}, 2 micro-batches", partial(make, micro=2), True)
    for name in ("data", "both"):
        make = partial(language_model, *LAYOUTS[name], replace(SMALL, batch=32), micro=2)
        yield Case(f"small LM, {name}, 2 micro-batches", make)
        yield Case(f"small LM, {name}, 2 micro-batches, remat", partial(make, policy="nothing"))
    yield Case("conv net, one device", partial(conv_net, "", ""))
    yield Case("conv net, height split", partial(conv_net, "x=8", "h:x"))
    yield Case("conv net, batch and height split", partial(conv_net, "data=2 x=4", "rows:data h:x"))


CASES = tuple(_cases())
