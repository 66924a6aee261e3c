"""Weft, and JAX by hand, as workers of `make bench-peers` (see worker.py).

A case is `weft`, `jit`, `shard_map` or `single`, and the sizes of the axes data and model: `weft-4x2`.
The case `matmul-1x1` multiplies matrices instead, as fast as XLA can here: what the others are measured by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import weft as wf
from benchmarks import handwritten, lm
from benchmarks.peers.worker import Step, serve

SIDE = 2048
MATMUL_FLOPS = 4 * 2 * SIDE**3  # of a step of the case `matmul-1x1`


def start(work: dict[str, np.ndarray], case: str) -> tuple[Step, Callable[[], int]]:
    name, sizes = case.split("-")
    data, model = map(int, sizes.split("x"))
    # What wf.cpu_devices does besides is Weft's.
    (wf.cpu_devices if name == "weft" else set_devices)(data * model)
    rows = work.pop("tokens"), work.pop("targets")
    assert float(work.pop("learning_rate")) == np.float32(handwritten.LEARNING_RATE)
    if name == "weft":
        mesh, layout = ("", "") if data * model == 1 else (f"data={data} model={model}", lm.LAYOUT)
        program = lm.step(mesh=mesh, layout=layout)
        run = lm.case(program, given=(work, *rows))
        return lambda: float(run()), lambda: instructions(program.lower(*lm.specs()).compile().as_text())
    if name == "matmul":
        return matmuls()
    mesh = handwritten.make_mesh(data, model)
    if name == "single":
        return by_hand(handwritten.single_step(), jax.device_put(work), *jax.device_put(rows))
    steps = {"jit": handwritten.jit_step, "shard_map": handwritten.shard_map_step}
    return by_hand(steps[name](mesh), *handwritten.place(mesh, work, *rows))


def set_devices(count: int) -> None:
    jax.config.update("jax_num_cpu_devices", count)


def matmuls() -> tuple[Step, Callable[[], int]]:
    a = jax.device_put(np.ones((SIDE, SIDE), np.float32))
    product = jax.jit(lambda a: a @ a)

    def step() -> float:
        for _ in range(MATMUL_FLOPS // (2 * SIDE**3)):
            jax.block_until_ready(product(a))
        return 0.0

    return step, lambda: 1


def by_hand(step: Callable[..., Any], *args: Any) -> tuple[Step, Callable[[], int]]:
    run, shapes = handwritten.repeat(step, *args), jax.tree.map(jax.typeof, args)
    return lambda: float(run()), lambda: instructions(step.lower(*shapes).compile().as_text())


def instructions(hlo: str) -> int:
    """How many instructions a compiled program has."""
    return sum(" = " in line for line in hlo.splitlines())


if __name__ == "__main__":
    serve(start)
