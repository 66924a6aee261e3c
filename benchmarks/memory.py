"""The memory that plans predict beside the memory that XLA assigns; writes docs/memory.md.

python -m benchmarks.memory

Nothing is run: each case is planned, compiled for 8 virtual CPU devices, and compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import weft as wf
from benchmarks import lm
from benchmarks.handwritten import LEARNING_RATE, STANDARD, Size
from weft import models, nn, optim
from weft.models.presets import batch_specs

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


def language_model(
    mesh: str, layout: Any, size: Size, *, policy: str = "", micro: int = 1, donate: bool = True
) -> Made:
    """The train step of `lm.py`, with remat, in micro-batches, or leaving the old parameters alone."""
    part = replace(size, batch=size.batch // micro)
    loss = lm.loss_of(part, policy or None)
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


def transformer(mesh: str, layout: Any, **changes: Any) -> Made:
    """The train step of `weft.models`, where scores are the largest tensors."""
    config = models.Config(vocab=512, d_model=64, d_ff=256, heads=4, d_kv=16, layers=3, longest=256)
    model, optimizer = nn.specs(models.Transformer(config.replace(**changes))), optim.Momentum(0.1)
    rows = batch_specs(config, 8, 256)

    def step(model: Any, state: Any, batch: Any) -> Any:
        value, grads = wf.value_and_grad(lambda model: model.loss(batch))(model)
        return value, *optimizer.update(grads, state, model)

    return wf.spmd(step, mesh, layout, donate=(0, 1)), (model, optimizer.init(model), rows)


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


def feed_forward(mesh: str, layout: Any) -> Made:
    """Four residual layers with dropout, trained by AdamW; parameters and state are donated."""
    batch, d, h = wf.dims("batch=512 d=256 h=768")
    opt = wf.optimizer(optax.adamw(0.01))

    def loss(params: Any, x: Any, key: Any) -> Any:
        for n, (w, v) in enumerate(params):
            y = wf.gelu(wf.einsum(x, w, out=[batch, h]))
            x = x + wf.einsum(wf.dropout(y, 0.1, jax.random.fold_in(key, n)), v, out=[batch, d])
        return wf.mean(wf.square(x))

    def step(params: Any, state: Any, x: Any, key: Any) -> Any:
        value, grads = wf.value_and_grad(loss)(params, x, key)
        return value, opt.apply(grads, state, params)

    params = [(wf.parameter(wf.zeros([d, h])), wf.parameter(wf.zeros([h, d]))) for _ in range(4)]
    args = params, opt.init(params), wf.spec([batch, d]), jax.random.key(0)
    return wf.spmd(step, mesh, layout, donate=(0, 1)), args


# Cases

SMALL = Size(layers=4, d_model=64, d_ff=256, heads=4, d_kv=16, vocab=512, length=64, batch=16)
DEEP = Size(layers=8, d_model=128, d_ff=1024, heads=8, d_kv=32, vocab=512, length=64, batch=16)
LONG = Size(layers=3, d_model=64, d_ff=256, heads=4, d_kv=16, vocab=512, length=256, batch=8)
UNEVEN = Size(layers=3, d_model=60, d_ff=200, heads=5, d_kv=12, vocab=333, length=50, batch=13)
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
    yield Case("conv net, one device", partial(conv_net, "", ""))
    yield Case("conv net, height split", partial(conv_net, "x=8", "h:x"))
    yield Case("conv net, batch and height split", partial(conv_net, "data=2 x=4", "rows:data h:x"))
    yield Case("AdamW, one device", partial(feed_forward, "", ""))
    yield Case("AdamW, data", partial(feed_forward, "data=8", "batch:data"))
    both = wf.Layout("batch:data h:model", params="d:data", optimizer="d:data")
    yield Case("AdamW, ZeRO-3 and model", partial(feed_forward, "data=4 model=2", both))

    def handwritten(
        title: str, size: Size, names: Iterable[str], quick: str = "", **options: Any
    ) -> Iterable[Case]:
        for name in names:
            make = partial(language_model, *LAYOUTS[name], size, **options)
            yield Case(f"{title}, {name}", make, slow=name not in quick.split("; "))

    some = ("one device", "data", "both", "sequence", "ZeRO-3 and model")
    yield from handwritten("small LM", SMALL, LAYOUTS, "one device; data; sequence; ZeRO-3 and model")
    yield from handwritten("small LM, remat", SMALL, some, "data; both", policy="nothing")
    yield from handwritten("small LM, remat keeps sums", SMALL, ["both"], policy="sums")
    yield from handwritten("small LM, remat keeps dots", SMALL, ["both"], policy="dots")
    yield from handwritten("small LM, not donated", SMALL, ["one device", "both"], "both", donate=False)
    twice = replace(SMALL, batch=32)
    yield from handwritten("small LM, 2 micro-batches", twice, ["data", "both"], "data", micro=2)
    yield from handwritten(
        "small LM, 4 micro-batches, remat", twice, ["model", "both"], micro=4, policy="nothing"
    )
    yield from handwritten("uneven LM", UNEVEN, ["both"])
    yield from handwritten("long LM", LONG, some)
    yield from handwritten("standard LM", STANDARD, LAYOUTS)
    yield from handwritten("deep LM", DEEP, LAYOUTS)
    yield from handwritten("deep LM, remat", DEEP, some, policy="nothing")
    yield from handwritten("deep LM, 2 micro-batches", DEEP, some, micro=2)
    yield from handwritten("wide LM", WIDE, LAYOUTS)
    for name in ("one device", "data", "model", "both", "sequence", "ZeRO-3"):
        for policy in (None, "nothing"):
            title = f"weft.models' LM{', remat' if policy else ''}, {name}"
            make = partial(transformer, *LAYOUTS[name], remat=policy)
            yield Case(title, make, slow=(name, policy) != ("both", "nothing"))


CASES = tuple(_cases())

HEADER = """# How exact memory plans are

`plan.memory.peak` is computed from the program alone, without devices or a compiler. This page compares it
with the memory that XLA's CPU compiler assigns to one device (`memory_analysis()`: arguments, results and
temporaries, shared memory counted once), for programs of several kinds, sizes and layouts. The page is
generated by `python -m benchmarks.memory`; `tests/plan/test_plan_memory.py` checks that each error is below
15 % and their median below 8 %.

"""


def page(found: list[Found]) -> str:
    """The error table as a page."""
    errors = [abs(f.error) for f in found]
    lines = [
        f"{len(found)} cases; median error {statistics.median(errors):.1%}, largest {max(errors):.1%}.\n",
        "| program and layout | predicted, MB | XLA, MB | error |",
        "|---|---:|---:|---:|",
        *(f"| {f.name} | {f.predicted / 1e6:.2f} | {f.compiled / 1e6:.2f} | {f.error:+.1%} |" for f in found),
    ]
    return HEADER + "\n".join(lines) + "\n" + RULES


RULES = """
## How it is predicted

The prediction applies XLA's steps to the program (`jaxpr.py`, `fusion.py` and `buffers.py` in `weft/plan`).
No number in it is fitted.

- **Fusion.** Element-wise chains are fused into their consumers if they are cheap to recompute for each
  consumer, and need no memory. Matrix products, convolutions, collectives and loops read buffers. A cheap
  result of one operand (a softmax's division, which XLA turns into a multiplication) has a buffer for them,
  and its other consumers recompute it: the operand stays alive. (Not on one device, where a library
  computes the entire softmax.)
- **Order of dims.** Products with several contracted or free dims, convolutions, and collectives along a
  dim that is not the first read copies with their dims in the required order.
- **Loops.** Scanned arrays are sliced, results are written into arrays of zeros. A carry is updated in
  place, or copied if an operation that does not precede the new value reads the old one.
- **Merged sums.** All-reduces over the same axes that do not depend on each other become one: all gradients
  and all their sums are alive at the same time.
- **Scatters.** A scatter into zeros that is added to another array becomes a scatter into that array,
  unless there is only one device.
- **Schedule.** XLA's CPU scheduler is breadth first: zeros, slices and updates run as soon as they can.
- **Sharing.** An element-wise result reuses the memory of an operand whose last use it is, unless something
  is scattered into it later. Results have their own memory throughout, which earlier values may use; a
  donated parameter's new value reuses its memory.

All of this was checked on CPU only. On TPU and GPU, XLA orders and fuses differently, and the prediction
has not been compared.
"""


def main() -> None:
    found = []
    for case in CASES:
        found.append(compare(case))
        print(f"{found[-1].error:+7.1%}  {case.name}", flush=True)
    PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    wf.cpu_devices(8)
    main()
