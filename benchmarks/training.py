"""The training loop beside the bare step, saving beside not saving, and input beside what a step needs.

The model is nanoGPT's for a CPU: 4 layers of 128 features, 12 rows of 64 characters, on one device.
"""

from __future__ import annotations

import dataclasses
import json
import random
import string
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.measure import Spread
from weft import nn
from weft.train import loop
from weft.train.config import DataConfig, EvaluateConfig, OptimizerConfig, SaveConfig, TrainConfig, recipe
from weft.train.setup import Run

PEERS = Path(__file__).parents[1] / ".venv-peers" / "bin" / "python"
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
        unroll=4,
    )
    return base.replace(
        steps=STEPS,
        model=model,
        data=DataConfig(kind="text", train=(str(text),), rows=12, length=64),
        optimizer=OptimizerConfig(beta2=0.99, weight_decay=0.1),
        evaluate=EvaluateConfig(every=0),
    )


def bare(run: Run) -> float:
    """Seconds of a step on one batch, over and over."""
    model, state = run.trainer.init(nn.init(run.model, jax.random.key(0), run.mesh, run.layout))
    batch, key = run.train.step(0).batch, run.key(0)
    begun = 0.0
    for n in range(STEPS):
        if n == 5:
            begun = time.perf_counter()
        metrics, model, state = run.trainer.program(model, state, batch, key)
        metrics["loss"].item()
    return (time.perf_counter() - begun) / (STEPS - 5)


def whole(run: Run, every: int) -> float:
    """Seconds of a step of the whole loop, with a save every few steps."""
    with tempfile.TemporaryDirectory() as folder:
        c = run.config.replace(folder=Path(folder), save=SaveConfig(every=every))
        loop.train_prepared(dataclasses.replace(run, config=c), quiet=True)
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
    with tempfile.TemporaryDirectory() as folder:
        run = loop.prepare_run(config(Path(folder)))
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
    return "\n".join(lines) + f"\n\n{rounds} rounds, alternating."


class PyTorch:
    """The same model in PyTorch, in a process of its own."""

    def __init__(self, vocab: int):
        script = Path(__file__).parent / "peers" / "nanogpt.py"
        asked = [PEERS, script, "--steps", str(vocab)]
        self.process = subprocess.Popen(asked, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def steps(self, count: int) -> float:
        """Seconds of a number of steps."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(count, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def __enter__(self) -> PyTorch:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.communicate()


def against_pytorch(rounds: int, count: int = 20) -> str:
    """Steps on one batch, each awaited, beside the same model in PyTorch, alternating."""
    if not PEERS.exists():
        return "PyTorch is not there to compare with: `make test-peers` installs it."
    with tempfile.TemporaryDirectory() as folder:
        run = loop.prepare_run(config(Path(folder)))
        batch, key = run.train.step(0).batch, run.key(0)  # read while its files are there
    model, state = run.trainer.init(nn.init(run.model, jax.random.key(0), run.mesh, run.layout))

    def steps(count: int) -> float:
        nonlocal model, state
        begun = time.perf_counter()
        for _ in range(count):
            metrics, model, state = run.trainer.program(model, state, batch, key)
            metrics["loss"].item()
        return time.perf_counter() - begun

    with PyTorch(run.tokenizer.vocab) as other:
        cases = {"PyTorch": other.steps, "Weft": steps}
        found: dict[str, list[float]] = {name: [] for name in cases}
        for turn in range(rounds + 1):
            for name in sorted(cases, reverse=bool(turn % 2)):
                seconds = cases[name](count) / count
                if turn:
                    found[name].append(seconds)
    faster = Spread.of([t / w for t, w in zip(found["PyTorch"], found["Weft"], strict=True)])
    ms = {name: 1e3 * Spread.of(samples).median for name, samples in found.items()}
    return (
        f"The same model, batch and optimizer in PyTorch (`peers/nanogpt.py`, on as many cores), {rounds} "
        f"rounds of {count} steps: {ms['PyTorch']:.1f} ms a step, Weft's bare step {ms['Weft']:.1f} ms; Weft "
        f"is {faster.median:.2f} times as fast (quartiles {faster.low:.2f}–{faster.high:.2f})."
    )
