"""Metrics of a run: read from the devices, checked for NaN, printed, and written to the run folder."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from types import TracebackType

import weft as wf
from weft import nn
from weft.core.errors import CheckpointError, TrainingError
from weft.core.types import PyTree
from weft.distributed import processes
from weft.hardware.profile import Hardware
from weft.plan.pipelines import describe_pipelines
from weft.plan.units import human_bytes, human_count, human_seconds

from ..checkpoint.manager import CheckpointManager
from ..checkpoint.manifest import list_step_folders
from . import config_io, data_setup
from .evaluate import EvalResult
from .progress import ProgressReporter
from .run_folder import PLAN_FILE, RunFolderWriter
from .setup import Run
from .trainer import Metrics


@dataclass
class TrainState:
    """The state of a run that changes with each step.

    Attributes:
      step: the number of steps done.
      position: the number of examples used.
      model, opt_state: the model as it is trained, and the optimizer's state.
      skipped: the number of steps and evaluations that were not finite.
    """

    step: int
    position: int
    model: PyTree
    opt_state: PyTree
    skipped: int = 0


class MetricsLogger:
    """Reads the metrics of each step one step late, so that the devices never wait; logs and checks them."""

    def __init__(
        self,
        run: Run,
        train_state: TrainState,
        progress: ProgressReporter,
        first: bool,
        checkpoints: CheckpointManager,
    ):
        self.run, self.train_state, self.progress, self.checkpoints = run, train_state, progress, checkpoints
        self.loss = math.nan
        self._folder = RunFolderWriter(run.config.folder, train_state.step) if first else None
        self._pending: tuple[int, Metrics] | None = None
        self._first = True
        self._last_time = time.monotonic()

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is not None:
            self._folder.__exit__(kind, error, trace)

    def open(self, plans: dict[str, wf.Plan], hardware: Hardware) -> None:
        """Print and write the settings and the plan of the run."""
        text = "\n".join(f"{frequency}:\n{plan.explain(hardware)}" for frequency, plan in plans.items())
        if self._folder is not None:
            self._folder.describe(config_io.config_to_toml(self.run.config), text)
            data_setup.copy_tokenizer(self.run.tokenizer, self.run.config.folder)
        for line in _summary(self.run, plans, hardware, self.train_state):
            self.progress.print(line)

    def step(self, metrics: Metrics) -> None:
        """Record the metrics of a dispatched step, and read those of the step before.

        The first step is awaited: it compiles, so the second may be finished before the first is read, and
        would be timed from the wrong start."""
        pending, self._pending = self._pending, (self.train_state.step, metrics)
        self._read(pending)
        if self._first:
            self._first = False
            self.flush()
            self._last_time = time.monotonic()

    def flush(self) -> None:
        """Read the metrics of the last step too, and sync all metrics to disk."""
        pending, self._pending = self._pending, None
        self._read(pending)
        if self._folder is not None:
            self._folder.sync()

    def _read(self, pending: tuple[int, Metrics] | None) -> None:
        if pending is None:
            return
        step, metrics = pending
        with processes.watchdog(f"step {step}"):
            numbers = {name: value.item() for name, value in metrics.items()}
        now = time.monotonic()
        numbers["seconds"], self._last_time = now - self._last_time, now
        finite = bool(numbers.pop("finite", True)) and all(map(math.isfinite, numbers.values()))
        if not finite:
            self._handle_nonfinite(f"step {step}", numbers)
        numbers["rate"] = self.run.learning_rate(step - 1)
        self.loss = numbers["loss"]
        self.progress.step(step, numbers)
        if self._folder is not None:
            self._folder.write(step, {name: x for name, x in numbers.items() if math.isfinite(x)})

    def _handle_nonfinite(self, source: str, numbers: dict[str, float]) -> None:
        """Count a step or an evaluation that is not finite, and raise an error if it can't be skipped."""
        c = self.run.config
        self.train_state.skipped += 1
        wrong = ", ".join(f"{name} {x}" for name, x in numbers.items() if not math.isfinite(x))
        if c.on_nan == "skip" and self.train_state.skipped <= c.nan_limit:
            self.progress.print(
                f"skipped {source}: {wrong} ({self.train_state.skipped} of at most {c.nan_limit})"
            )
            return
        with contextlib.suppress(CheckpointError):  # a failed save is not why the run stops
            self.checkpoints.wait()  # the newest may still be being written
        saved = list(list_step_folders(self.run.checkpoints))
        good = f"step {saved[-1]} in {self.run.checkpoints}" if saved else "none yet"
        limit = (
            [f"{self.train_state.skipped} steps were skipped; the limit is {c.nan_limit}"]
            if c.on_nan == "skip"
            else []
        )
        raise TrainingError(
            f"{source} gave {wrong}",
            *limit,
            f"the last good checkpoint: {good}",
            f"the plan of a step: {c.folder / PLAN_FILE}",
            rule="losses and gradients must be finite; nothing was saved afterwards",
            hint="a lower --optimizer.rate, a longer --optimizer.warmup, --optimizer.clip; or --on-nan skip",
        )

    def log_evaluation(self, result: EvalResult) -> EvalResult:
        """Print and write an evaluation; a loss that is not finite is handled like that of a step."""
        step = self.train_state.step
        if math.isfinite(result.loss):
            self._write_evaluation(step, result)
        else:
            self._handle_nonfinite(f"the evaluation after step {step}", {"loss": result.loss})
        self._last_time = time.monotonic()  # the evaluation is not part of the next step's time
        return result

    def _write_evaluation(self, step: int, result: EvalResult) -> None:
        self.progress.print(
            f"step {step:>6}  held out: loss {result.loss:.4f}, perplexity {result.perplexity:.2f}, "
            f"accuracy {result.accuracy:.1%}"
        )
        if self._folder is not None:
            self._folder.write(step, {"valid_loss": result.loss, "valid_accuracy": result.accuracy})
            self._folder.draw()


def _summary(run: Run, plans: dict[str, wf.Plan], hardware: Hardware, train_state: TrainState) -> list[str]:
    """A few lines about the run: model, mesh, layout and planned costs."""
    c = run.config
    start = f"resumes after step {train_state.step}" if train_state.step else "a new run"
    return [
        f"{c.preset}: {human_count(nn.count(run.model))} parameters; {c.steps} steps of {c.data.rows} rows "
        f"of {c.data.length}; {start} in {c.folder}",
        f'mesh "{run.mesh}", layout "{run.layout}"',
        *(line for plan in plans.values() for line in describe_pipelines(plan)),
        *(f"{frequency}, on each device: {_cost(plan, hardware)}" for frequency, plan in plans.items()),
    ]


def _cost(plan: wf.Plan, hardware: Hardware) -> str:
    predicted = plan.time(hardware)
    sent = [f"{human_bytes(size)} over {axes}" for axes, size in plan.comm_bytes.items()]
    return (
        f"{human_count(plan.flops, 'FLOP')}, {'sends ' + ', '.join(sent) if sent else 'sends nothing'}, "
        f"at most {human_bytes(plan.memory.peak)} of memory; on {hardware.label} about "
        f"{human_seconds(predicted.overlapped_seconds)}, bound by {predicted.bound}"
    )
