"""Two stages on two devices beside one device and two halves of a batch: planned, and by the clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import weft as wf
from benchmarks.measure import alternate
from weft import nn, optim, train
from weft.hardware.measure import measure_cpu
from weft.models import Batch, Config, Transformer
from weft.plan.units import human_bytes

ROWS, LENGTH = 16, 128
SIZES = dict(vocab=2048, d_model=256, d_ff=1024, heads=8, d_kv=32, layers=8, longest=LENGTH)
PIPE = "layers:pipe vocab:pipe"
CASES = {  # mesh, layout, schedule, micro-batches
    "one device": ("", "", "gpipe", None),
    "one device, remat": ("", "", "gpipe", None),
    "data=2": ("data=2", "batch:data", "gpipe", None),
    "pipe=2, gpipe, 4 micro-batches": ("pipe=2", PIPE, "gpipe", 4),
    "pipe=2, gpipe, 8": ("pipe=2", PIPE, "gpipe", 8),
    "pipe=2, 1f1b, 8": ("pipe=2", PIPE, "1f1b", 8),
}
APART = 1.05  # plans closer than this say nothing of which is faster
STEP = train.train_step(optim.Momentum(0.01))


def program(name: str) -> tuple[Any, Any]:
    """A case's train step, and its model without values."""
    mesh, layout, schedule, micro = CASES[name]
    remat = "nothing" if "remat" in name else None
    config = Config(**SIZES, pipeline=schedule, pipeline_micro=micro, remat=remat)  # type: ignore[arg-type]
    return wf.spmd(STEP, mesh, layout, donate=(0, 1)), Transformer(config)


def case(name: str) -> Callable[[], Any]:
    """Each call is the next train step."""
    step, described = program(name)
    model = nn.init(described, jax.random.key(0), step.mesh, step.layout)
    state = STEP.init(model)
    draw = np.random.default_rng(0)
    dims = [wf.Dim("batch", ROWS), wf.Dim("length", LENGTH)]
    rows = Batch(*(wf.tensor(draw.integers(0, SIZES["vocab"], (ROWS, LENGTH)), dims) for _ in range(2)))

    def run() -> Any:
        nonlocal model, state
        metrics, model, state = step(model, state, rows, None)
        return metrics["loss"].storage

    return run


def section(rounds: int) -> str:
    """The text of the section."""
    hardware = measure_cpu(2)
    plans = {}
    for name in CASES:
        step, described = program(name)
        model, tokens = nn.specs(described), wf.spec(f"batch={ROWS} length={LENGTH}", jnp.int32)
        plans[name] = step.plan(model, STEP.init(model), Batch(tokens, tokens), None)
    planned = {name: plan.time(hardware).overlapped_seconds for name, plan in plans.items()}
    timings = alternate({name: case(name) for name in CASES}, rounds=rounds, warmup=1)
    measured = {name: timings[name].seconds.median for name in CASES}
    lines = [
        "| case | planned ms | measured ms | quartiles | tokens a second | bubble | planned memory |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, plan in plans.items():
        spread, bubble = timings[name].seconds, [f"{s.bubble:.0%}" for s in plan.pipelines]
        lines.append(
            f"| {name} | {1e3 * planned[name]:.0f} | {1e3 * measured[name]:.0f} "
            f"| {1e3 * spread.low:.0f}–{1e3 * spread.high:.0f} | {ROWS * LENGTH / measured[name]:,.0f} "
            f"| {''.join(bubble)} | {human_bytes(plan.memory.peak)} |"
        )
    pairs = [sorted(pair, key=planned.__getitem__) for pair in itertools.combinations(CASES, 2)]
    apart = [(a, b) for a, b in pairs if planned[b] > APART * planned[a]]
    right = sum(measured[a] < measured[b] for a, b in apart)
    close = [f"{a} and {b}" for a, b in pairs if (a, b) not in apart]
    return f"""## Two stages

A train step of 8 layers (d_model 256, d_ff 1024, vocabulary 2048, {ROWS} rows of {LENGTH}) on the CPU's two
cores: as one device, as two that share the batch, and as two stages; {rounds} rounds, alternating. The
profile was measured in the same run.

{chr(10).join(lines)}

Of {len(pairs)} pairs, {len(apart)} are planned at least {APART - 1:.0%} apart; of these {right} are measured
in the same order. Closer, as good as equal by plan: {", ".join(close) or "none"}."""
