"""Weft, and JAX by hand, as workers of `make bench-peers` (see worker.py).

A case is `weft`, `jit`, `shard_map` or `single`, and a number of devices: `weft-8`, `shard_map-2`, `single-1`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import weft as wf
from benchmarks import handwritten, lm
from benchmarks.peers.worker import Step, serve

# The mesh of each number of devices, as (data, model). Two devices split the rows, as FSDP does.
MESHES = {8: (4, 2), 2: (2, 1), 1: (1, 1)}


def start(work: dict[str, np.ndarray], case: str) -> tuple[Step, Callable[[], int]]:
    name, devices = case.split("-")
    data, model = MESHES[int(devices)]
    jax.config.update("jax_platforms", "cpu")
    wf.cpu_devices(int(devices))
    rows = work.pop("tokens"), work.pop("targets")
    assert float(work.pop("learning_rate")) == np.float32(handwritten.LEARNING_RATE)
    if name == "weft":
        return weft(work, rows, f"data={data} model={model}")
    mesh = handwritten.make_mesh(data, model)
    if name == "single":
        return by_hand(handwritten.single_step(), jax.device_put(work), *jax.device_put(rows))
    steps = {"jit": handwritten.jit_step, "shard_map": handwritten.shard_map_step}
    return by_hand(steps[name](mesh), *handwritten.place(mesh, work, *rows))


def weft(params: Any, rows: Any, mesh: str) -> tuple[Step, Callable[[], int]]:
    program = lm.step(mesh=mesh)
    params, rows = (
        jax.tree.map(lambda t: wf.place(t, program.mesh, program.layout), x, is_leaf=wf.is_tensor)
        for x in (lm.named(params), lm.rows(*rows))
    )

    def step() -> float:
        nonlocal params
        loss, params = program(params, *rows)
        jax.block_until_ready([t.storage for t in params.values()])
        return float(loss)

    return step, lambda: instructions(program.lower(*lm.specs()).compile().as_text())


def by_hand(step: Callable[..., Any], *args: Any) -> tuple[Step, Callable[[], int]]:
    run, shapes = handwritten.repeat(step, *args), jax.tree.map(jax.typeof, args)
    return lambda: float(run()), lambda: instructions(step.lower(*shapes).compile().as_text())


def instructions(hlo: str) -> int:
    """How many instructions a compiled program has."""
    return sum(" = " in line for line in hlo.splitlines())


if __name__ == "__main__":
    serve(start)
