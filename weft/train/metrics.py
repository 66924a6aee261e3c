"""The numbers of a run's steps: read, judged, shown and written down."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from typing import Any

import weft as wf
from weft import nn
from weft.core.errors import WeftError
from weft.distributed import processes
from weft.hardware.profile import Hardware
from weft.plan.pipelines import describe_pipelines
from weft.plan.units import human_bytes, human_count, human_seconds

from ..checkpoint.manager import CheckpointManager
from ..checkpoint.manifest import CheckpointError, list_step_folders
from . import config_io, data_setup
from .evaluate import EvalResult
from .progress import ProgressReporter
from .run_folder import PLAN_FILE, RunFolderWriter
from .setup import Run


class TrainingError(WeftError, RuntimeError):
    """A run that could not go on."""


@dataclass
class TrainState:
    """How far a run is: the steps done, the examples used, and what it has learned."""

    step: int
    position: int
    model: Any
    state: Any
    skipped: int = 0


class MetricsLogger:
    """The numbers of steps: read one step late, so that devices need not wait; written, shown, and judged."""

    def __init__(
        self,
        run: Run,
        standing: TrainState,
        shown: ProgressReporter,
        first: bool,
        checkpoints: CheckpointManager,
    ):
        self.run, self.standing, self.shown, self.checkpoints = run, standing, shown, checkpoints
        self.loss = math.nan
        self._journal = RunFolderWriter(run.config.folder, standing.step) if first else None
        self._waiting: tuple[int, Any] | None = None
        self._first = True
        self._time = time.monotonic()

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._journal is not None:
            self._journal.__exit__(*error)

    def open(self, plans: dict[str, wf.Plan], hardware: Hardware) -> None:
        """Say and write down what is run."""
        text = "\n".join(f"{often}:\n{plan.explain(hardware)}" for often, plan in plans.items())
        if self._journal is not None:
            self._journal.describe(config_io.config_to_toml(self.run.config), text)
            data_setup.copy_tokenizer(self.run.tokenizer, self.run.config.folder)
        for line in _summary(self.run, plans, hardware, self.standing):
            self.shown.say(line)

    def step(self, metrics: Any) -> None:
        """A step was begun: read the numbers of the one before.

        Those of the first are waited for, so that the second is timed from its beginning: it may be done by
        the time that the first, which is compiled, is read."""
        waiting, self._waiting = self._waiting, (self.standing.step, metrics)
        self._read(waiting)
        if self._first:
            self._first = False
            self.flush()
            self._time = time.monotonic()

    def flush(self) -> None:
        """Read the numbers of the last step as well, and see that all are on the disk."""
        waiting, self._waiting = self._waiting, None
        self._read(waiting)
        if self._journal is not None:
            self._journal.sync()

    def _read(self, waiting: tuple[int, Any] | None) -> None:
        if waiting is None:
            return
        step, metrics = waiting
        with processes.watchdog(f"step {step}"):
            numbers = {name: value.item() for name, value in metrics.items()}
        now = time.monotonic()
        numbers["seconds"], self._time = now - self._time, now
        finite = bool(numbers.pop("finite", True)) and all(map(math.isfinite, numbers.values()))
        if not finite:
            self._not_finite(f"step {step}", numbers)
        numbers["rate"] = self.run.rate(step - 1)
        self.loss = numbers["loss"]
        self.shown.step(step, numbers)
        if self._journal is not None:
            self._journal.write(step, {name: x for name, x in numbers.items() if math.isfinite(x)})

    def _not_finite(self, what: str, numbers: dict[str, float]) -> None:
        c = self.run.config
        self.standing.skipped += 1
        wrong = ", ".join(f"{name} {x}" for name, x in numbers.items() if not math.isfinite(x))
        if c.on_nan == "skip" and self.standing.skipped <= c.nan_limit:
            self.shown.say(f"{what} is left out: {wrong} ({self.standing.skipped} of at most {c.nan_limit})")
            return
        with contextlib.suppress(CheckpointError):  # that one failed too is not why the run stops
            self.checkpoints.wait()  # one may be on its way
        saved = list(list_step_folders(self.run.checkpoints))
        good = f"that of step {saved[-1]} in {self.run.checkpoints}" if saved else "there is none yet"
        many = (
            [f"{self.standing.skipped} steps were left out; the limit is {c.nan_limit}"]
            if c.on_nan == "skip"
            else []
        )
        raise TrainingError(
            f"{what} gave {wrong}",
            *many,
            f"the last good checkpoint: {good}",
            f"what a step does is in {c.folder / PLAN_FILE}",
            rule="a loss and gradients are finite numbers; nothing was saved after they were not",
            hint="a lower --optimizer.rate, a longer --optimizer.warmup, --optimizer.clip; or --on-nan skip",
        )

    def evaluated(self, score: EvalResult) -> EvalResult:
        """Write down and show an evaluation; one that is not finite is judged as a step is."""
        step = self.standing.step
        if math.isfinite(score.loss):
            self._write_down(step, score)
        else:
            self._not_finite(f"the evaluation after step {step}", {"loss": score.loss})
        self._time = time.monotonic()  # what it took is not the next step's
        return score

    def _write_down(self, step: int, score: EvalResult) -> None:
        self.shown.say(
            f"step {step:>6}  held out: loss {score.loss:.4f}, perplexity {score.perplexity:.2f}, "
            f"accuracy {score.accuracy:.1%}"
        )
        if self._journal is not None:
            self._journal.write(step, {"valid_loss": score.loss, "valid_accuracy": score.accuracy})
            self._journal.draw()


def _summary(run: Run, plans: dict[str, wf.Plan], hardware: Hardware, standing: TrainState) -> list[str]:
    """What will happen, in a few lines."""
    c = run.config
    begins = f"goes on after step {standing.step}" if standing.step else "a new run"
    return [
        f"{c.preset}: {human_count(nn.count(run.model))} parameters; {c.steps} steps of {c.data.rows} rows "
        f"of {c.data.length}; {begins} in {c.folder}",
        f'mesh "{run.mesh}", layout "{run.layout}"',
        *(line for plan in plans.values() for line in describe_pipelines(plan)),
        *(f"{often}, on each device: {_cost(plan, hardware)}" for often, plan in plans.items()),
    ]


def _cost(plan: wf.Plan, hardware: Hardware) -> str:
    predicted = plan.time(hardware)
    sent = [f"{human_bytes(size)} over {axes}" for axes, size in plan.comm_bytes.items()]
    return (
        f"{human_count(plan.flops, 'FLOP')}, {'sends ' + ', '.join(sent) if sent else 'sends nothing'}, "
        f"at most {human_bytes(plan.memory.peak)} of memory; on {hardware.name} about "
        f"{human_seconds(predicted.overlapped_seconds)}, bound by {predicted.bound}"
    )
