"""The training loop: trains a model from settings, and resumes an interrupted run.

    outcome = train(recipe("lm").replace(steps=500))

`train_prepared` is the loop: `restore_or_init` gives the state to start from, then the steps follow. The
numbers of step n depend only on the settings, the seed and n, so a resumed run has the same curve, bit for
bit, as one that was never interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import math
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from weft import nn
from weft.core.errors import ModelError, ProgramError, WeftError
from weft.core.types import PyTree
from weft.distributed import processes
from weft.hardware.profile import Hardware

from ..checkpoint.manager import CheckpointManager
from ..checkpoint.manifest import (
    DamagedCheckpoint,
    check_files,
    list_unfinished_folders,
    read_manifest,
    recover_step_folders,
)
from ..core.errors import CheckpointWarning
from ..distributed import rendezvous
from . import config_io
from .config import TrainConfig
from .evaluate import EvalResult, evaluate
from .metrics import MetricsLogger, TrainState
from .progress import PlannedSpeed, ProgressReporter
from .run_folder import CONFIG_FILE
from .setup import Run, prepare_run

PREFETCH_BATCHES = 2  # batches built while a step runs


def restore_or_init(run: Run, checkpoints: CheckpointManager) -> TrainState:
    """The state of the newest checkpoint, of an imported model, or of newly initialized parameters."""
    seed = run.config.seed
    # Process 0 decides, so that all processes start from the same state.
    kind = processes.run_on_first(
        processes.unique_key("finding the newest checkpoint"), lambda: _newest_kind(run.checkpoints)
    )
    like = nn.specs(run.model)
    if kind == "imported":
        step, model, _, _ = checkpoints.restore(like, None, run.mesh, run.layout)
        _check_imported(step, run.checkpoints)
        return TrainState(0, 0, *run.trainer.init(model))
    if kind:
        try:
            step, model, state, extra = checkpoints.restore(*run.trainer.init(like), run.mesh, run.layout)
        except ModelError as error:
            path = run.config.folder / CONFIG_FILE
            error.hint = (
                f"the settings of the run in that folder are in {path}; a new run needs another --folder"
            )
            raise
        if extra["seed"] != seed:
            warnings.warn(f"the run started with seed {extra['seed']} and resumes with {seed}", stacklevel=2)
        if step < run.config.steps and (changed := _changed_settings(run.config)):
            warnings.warn(f"the run resumes with changed settings: {', '.join(changed)}", stacklevel=2)
        return TrainState(step, extra["position"], model, state, extra["skipped"])
    for path in list_unfinished_folders(run.checkpoints).values():
        warnings.warn(
            f"checkpoint {path} was never finished, and there is no earlier one: the run starts from scratch",
            CheckpointWarning,
            stacklevel=2,
        )
    with processes.watchdog("initializing the parameters"):
        model = nn.init(run.model, jax.random.key(seed), run.mesh, run.layout)
        return TrainState(0, 0, *run.trainer.init(model))


def _newest_kind(checkpoints: Path) -> str:
    """The newest intact checkpoint: "imported", only a model; "saved", all of a run; "", there is none."""
    folders = list(recover_step_folders(checkpoints).values())
    if not folders:
        return ""
    found = []
    for path in reversed(folders):
        with contextlib.suppress(DamagedCheckpoint):  # `restore` reports it
            manifest = read_manifest(path)
            found.append(("imported" if "imported" in manifest["extra"] else "saved", path, manifest))
    if len({kind for kind, *_ in found}) > 1:  # otherwise skip this: `restore` verifies all files anyway
        found = [candidate for candidate in found if _is_intact(*candidate[1:])]
    return found[0][0] if found else "saved"


def _is_intact(path: Path, manifest: dict[str, Any]) -> bool:
    try:
        check_files(path, manifest)
    except DamagedCheckpoint:
        return False
    return True


def _changed_settings(config: TrainConfig) -> list[str]:
    """The settings that affect results and differ from those of the run in the folder: old → new."""
    try:
        before = config_io.config_from_toml(config.folder / CONFIG_FILE)
    except (WeftError, OSError):  # the file is only needed for this warning
        return []
    pairs = [(name, getattr(before, name), getattr(config, name)) for name in ("data", "optimizer", "model")]
    return [
        f"--{name}.{field.name.replace('_', '-')} {_format(was)} → {_format(now)}"
        for name, old, new in pairs
        for field in dataclasses.fields(old)
        if (was := getattr(old, field.name)) != (now := getattr(new, field.name))
    ]


def _format(value: object) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def _check_imported(step: int, checkpoints: Path) -> None:
    """Raise an error if the run's own checkpoints, from step 1 on, would be older than the imported one."""
    if step:
        raise ModelError(
            f"the newest checkpoint in {checkpoints} is a model imported as step {step}",
            rule="a run can start from a model imported as step 0; it has no optimizer state to resume with",
            hint="weft checkpoint import FILE RUN/checkpoints --step 0; then weft train … --folder RUN",
        )


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run.

    Attributes:
      run: the prepared run.
      model: the trained model, with the EMA of its parameters if there is one.
      step: the number of steps done, including those before a resume.
      loss: the loss of the last step.
      score: the last evaluation, if there was one.
      stopped: the signal that stopped it before its last step, or an empty string.
      seconds: the duration of the steps, without those before a resume.
      trained: the number of steps done now; 0 if the run was already finished.
    """

    run: Run
    model: PyTree
    step: int
    loss: float
    score: EvalResult | None
    stopped: str
    seconds: float
    trained: int


def train(config: TrainConfig, *, quiet: bool = False) -> TrainResult:
    """Train a model, from the newest checkpoint in the run folder if there is one.

    Args:
      config: all settings.
      quiet: whether to print nothing.
    """
    return train_prepared(prepare_run(config), quiet=quiet)


def train_prepared(run: Run, *, quiet: bool = False) -> TrainResult:
    """Train a prepared run."""
    c, first = run.config, jax.process_index() == 0
    hardware = Hardware.of(c.layout.hardware)
    plans = run.plans()
    plan = plans["a step"]
    predicted = plan.time(hardware)
    c.folder.mkdir(parents=True, exist_ok=True)  # only now: invalid settings leave no folder behind
    # Stop encloses the manager: signals are caught until the last checkpoint is on disk.
    with (
        _lock_folder(c.folder),
        rendezvous.Stop(c.hosts.grace) as stop,
        CheckpointManager(run.checkpoints, c.save.keep) as checkpoints,
    ):
        train_state = restore_or_init(run, checkpoints)
        began, from_step, score = time.monotonic(), train_state.step, None
        planned = PlannedSpeed(predicted.overlapped_seconds, plan.unique_flops, _peak(hardware, run))
        with (
            ProgressReporter(
                c.steps, train_state.step, planned, c.log_every, quiet=quiet or not first
            ) as progress,
            MetricsLogger(run, train_state, progress, first, checkpoints) as metrics_log,
            contextlib.closing(run.train.batches(train_state.position, ahead=PREFETCH_BATCHES)) as batches,
        ):
            if train_state.step < c.steps:
                metrics_log.open(plans, hardware)
            else:  # don't overwrite the settings and the plan of the finished run
                done = f"the run is already at step {train_state.step}"
                progress.print(f"{done}, and --steps is {c.steps}: nothing to train")
            while train_state.step < c.steps:
                batch, train_state.position = next(batches)
                key, train_state.step = run.key(train_state.step), train_state.step + 1
                with processes.watchdog(f"step {train_state.step}"):
                    metrics, train_state.model, train_state.opt_state = run.trainer.run_step(
                        train_state.step, train_state.model, train_state.opt_state, batch, key
                    )
                metrics_log.step(metrics)
                checkpoints.check()
                # The last step does not read `requested`. It is the last one of every process, so their
                # counts of reads still agree.
                last = train_state.step == c.steps or stop.requested
                due = train_state.step == c.steps or _due(train_state.step, c.evaluate.every)
                if run.valid is not None and due:  # not after a signal: there may be little time
                    metrics_log.flush()
                    score = metrics_log.log_evaluation(_evaluate(run, train_state))
                if last or _due(train_state.step, c.save.every):
                    metrics_log.flush()  # read the metrics first: only finite parameters may be saved
                    extra = {"position": train_state.position, "seed": c.seed, "skipped": train_state.skipped}
                    checkpoints.save(train_state.step, train_state.model, train_state.opt_state, extra)
                if last:
                    break
            metrics_log.flush()
        seconds = time.monotonic() - began
    trained = train_state.step - from_step
    loss = metrics_log.loss if trained else math.nan
    stopped = stop.reason if train_state.step < c.steps else ""
    model = run.trainer.eval_model(train_state.model, train_state.opt_state)
    return TrainResult(run, model, train_state.step, loss, score, stopped, seconds, trained)


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Raise an error if another run writes into the folder: they would remove each other's saves."""
    handle = os.open(folder, os.O_RDONLY)  # locks the folder itself: no lock file remains after a kill
    try:
        processes.run_on_first(processes.unique_key("locking the run folder"), lambda: _lock(handle, folder))
        yield
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> str:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ProgramError(
            f"another process is training in {folder}",
            rule="one run writes into a folder at a time",
            hint="wait for it, stop it, or use another --folder",
        ) from None
    except OSError:  # a file system without locks, such as some network file systems
        return "not locked"
    return "locked"


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _peak(hardware: Hardware, run: Run) -> float:
    """The peak FLOP/s of all devices together; virtual devices share their cores."""
    dtype = {"bfloat16": "bf16", "float16": "f16"}.get(run.config.model.compute, "f32")
    return hardware.peak(dtype) * (hardware.shared_cores or run.mesh.size)


def _evaluate(run: Run, train_state: TrainState) -> EvalResult:
    assert run.valid is not None
    limit = run.config.evaluate.batches
    rows = (batch for batch, _ in itertools.islice(run.valid.batches(), limit))
    return evaluate(run.eval_program, run.trainer.eval_model(train_state.model, train_state.opt_state), rows)
