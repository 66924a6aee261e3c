"""The training loop beside the bare step, saving beside not saving, and input beside what a step needs.

The model is nanoGPT's for a CPU: 4 layers of 128 features, 12 rows of 64 characters, on one device.
"""

from __future__ import annotations

import dataclasses
import json
import random
import string
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.measure import Spread
from weft import nn
from weft.train import loop
from weft.train.config import Data, Evaluate, Optimize, Save, TrainConfig, recipe
from weft.train.heap import keep_freed_memory
from weft.train.run import Run

STEPS = 230  # two saves, and not the last one, which ends a run
TEXT = 400_000  # letters


def config(folder: Path) -> TrainConfig:
    """nanoGPT's recipe, on made-up text: what it says does not change how long a step takes."""
    draw = random.Random(0)
    text = folder / "text.txt"
    text.write_text("".join(draw.choices(string.ascii_letters + " \n", k=TEXT)))
    base = recipe("lm")
    model = base.model.replace(
        layers=4,
        heads=4,
        d_kv=32,
        d_model=128,
        d_ff=512,
        longest=64,
        norm="layer",
        activation="gelu_tanh",
        tied=True,
    )
    return base.replace(
        steps=STEPS,
        model=model,
        data=Data(kind="text", train=(str(text),), rows=12, length=64),
        optimizer=Optimize(beta2=0.99, weight_decay=0.1),
        evaluate=Evaluate(every=0),
    )


def bare(run: Run) -> float:
    """Seconds of a step on one batch, over and over."""
    model, state = run.learner.init(nn.init(run.model, jax.random.key(0), run.mesh, run.layout))
    batch, key = run.train.step(0).batch, run.key(0)
    begun = 0.0
    for n in range(STEPS):
        if n == 5:
            begun = time.perf_counter()
        metrics, model, state = run.learner.program(model, state, batch, key)
        metrics["loss"].item()
    return (time.perf_counter() - begun) / (STEPS - 5)


def whole(run: Run, every: int) -> float:
    """Seconds of a step of the whole loop, with a save every so many steps."""
    with tempfile.TemporaryDirectory() as folder:
        c = run.config.replace(folder=Path(folder), save=Save(every=every))
        loop.follow(dataclasses.replace(run, config=c), quiet=True)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    seconds = [row["seconds"] for row in map(json.loads, lines) if "seconds" in row]
    return sum(seconds[5:]) / len(seconds[5:])


def feeding(run: Run) -> float:
    """Seconds to make a batch, placed."""
    begun, batches = time.perf_counter(), run.train.batches(0)
    for _ in range(STEPS):
        next(batches)
    batches.close()
    return (time.perf_counter() - begun) / STEPS


def table(rounds: int) -> str:
    """The comparison, alternating."""
    keep_freed_memory()  # as the loop does
    with tempfile.TemporaryDirectory() as folder:
        run = loop.prepare(config(Path(folder)))
        cases: dict[str, Any] = {
            "bare step": lambda: bare(run),
            "whole loop": lambda: whole(run, 10**6),
            "whole loop, a save every 100 steps": lambda: whole(run, 100),
            "a batch alone": lambda: feeding(run),
        }
        cases["bare step"]()
        found: dict[str, list[float]] = {name: [] for name in cases}
        names = list(cases)
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                found[name].append(cases[name]())
    base = found["bare step"]
    lines = ["| per step | median ms | of the bare step's (quartiles) |", "|---|---:|---:|"]
    for name, samples in found.items():
        ratio = Spread.of([s / b for s, b in zip(samples, base, strict=True)])
        ms = 1e3 * Spread.of(samples).median
        lines.append(f"| {name} | {ms:.2f} | {ratio.median:.3f} ({ratio.low:.3f}–{ratio.high:.3f}) |")
    return "\n".join(lines)
