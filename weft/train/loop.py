"""The training loop: from settings to a trained model, and on from wherever it was stopped.

    outcome = train(recipe("lm").replace(steps=500))

`train` reads from top to bottom: what is run (`prepare`), where it begins (`begin`), the steps. The numbers
of step n depend on the settings, the seed and n alone, so a run that goes on from a checkpoint has the same
curve, bit for bit, as one that was never stopped.
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
from weft.distributed import processes
from weft.hardware.profile import Hardware

from ..checkpoint.manager import CheckpointManager
from ..checkpoint.manifest import (
    CheckpointWarning,
    DamagedCheckpoint,
    check_files,
    list_unfinished_folders,
    read_manifest,
    recover_step_folders,
)
from ..distributed import rendezvous
from . import config_io
from .config import TrainConfig
from .evaluate import EvalResult, evaluate
from .metrics import MetricsLogger, TrainState
from .progress import PlannedSpeed, ProgressReporter
from .run_folder import CONFIG_FILE
from .setup import Run, prepare_run

PREFETCH_BATCHES = 2  # batches that are made while a step runs


def restore_or_init(run: Run, checkpoints: CheckpointManager) -> TrainState:
    """The newest checkpoint, a model that was imported, or parameters drawn anew."""
    seed = run.config.seed
    # Of several processes the first looks: all begin at the same place.
    there = processes.run_on_first(processes.unique_key("begun"), lambda: _newest(run.checkpoints))
    like = nn.specs(run.model)
    if there == "imported":
        step, model, _, _ = checkpoints.restore(like, None, run.mesh, run.layout)
        _check_imported(step, run.checkpoints)
        return TrainState(0, 0, *run.learner.init(model))
    if there:
        try:
            found = checkpoints.restore(*run.learner.init(like), run.mesh, run.layout)
        except ModelError as error:
            was = run.config.folder / CONFIG_FILE
            error.hint = f"the settings of the run that is there are in {was}; a new run has another --folder"
            raise
        step, model, state, extra = found
        if extra["seed"] != seed:
            warnings.warn(f"the run began with seed {extra['seed']}, and goes on with {seed}", stacklevel=2)
        if step < run.config.steps and (changed := _changed(run.config)):
            warnings.warn(f"the run goes on with other settings: {', '.join(changed)}", stacklevel=2)
        return TrainState(step, extra["position"], model, state, extra["skipped"])
    for path in list_unfinished_folders(run.checkpoints).values():
        warnings.warn(
            f"checkpoint {path} was never finished, and there is none before it: the run begins anew",
            CheckpointWarning,
            stacklevel=2,
        )
    with processes.watchdog("the parameters to begin with"):
        model = nn.init(run.model, jax.random.key(seed), run.mesh, run.layout)
        return TrainState(0, 0, *run.learner.init(model))


def _newest(checkpoints: Path) -> str:
    """What the newest whole checkpoint is: "imported", a model alone; "saved", all of a run; "": none."""
    folders = list(recover_step_folders(checkpoints).values())
    if not folders:
        return ""
    found = []
    for path in reversed(folders):
        with contextlib.suppress(DamagedCheckpoint):  # restoring says more of it
            manifest = read_manifest(path)
            found.append(("imported" if "imported" in manifest["extra"] else "saved", path, manifest))
    if len({kind for kind, *_ in found}) > 1:  # else restoring alone looks at all files
        found = [one for one in found if _is_whole(*one[1:])]
    return found[0][0] if found else "saved"


def _is_whole(path: Path, manifest: dict[str, Any]) -> bool:
    try:
        check_files(path, manifest)
    except DamagedCheckpoint:
        return False
    return True


def _changed(config: TrainConfig) -> list[str]:
    """The settings that the run in the folder had otherwise, of those that results depend on: old → new."""
    try:
        before = config_io.config_from_toml(config.folder / CONFIG_FILE)
    except (WeftError, OSError):  # it is only missed for the warning
        return []
    pairs = [(name, getattr(before, name), getattr(config, name)) for name in ("data", "optimizer", "model")]
    return [
        f"--{name}.{one.name.replace('_', '-')} {_shown(was)} → {_shown(now)}"
        for name, old, new in pairs
        for one in dataclasses.fields(old)
        if (was := getattr(old, one.name)) != (now := getattr(new, one.name))
    ]


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def _check_imported(step: int, checkpoints: Path) -> None:
    """An error if the run's own checkpoints, from step 1 on, would not be newer than the imported one."""
    if step:
        raise ModelError(
            f"the newest checkpoint in {checkpoints} is a model that was imported as step {step}",
            rule="a run can begin with an imported model, as step 0; it has no optimizer state to go on with",
            hint="weft checkpoint import FILE RUN/checkpoints --step 0; then weft train … --folder RUN",
        )


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
      run: what was run.
      model: as it is now; the running mean, if there is one.
      step: how many steps are done, all runs before this one included.
      loss: of the last step.
      score: of the last evaluation, if there was one.
      stopped: the signal that ended it before its last step, or nothing.
      seconds: of this run's steps.
      trained: how many steps this run did; none, if those before it had done them all.
    """

    run: Run
    model: Any
    step: int
    loss: float
    score: EvalResult | None
    stopped: str
    seconds: float
    trained: int


def train(config: TrainConfig, *, quiet: bool = False) -> TrainResult:
    """Train, from the newest checkpoint in the folder if there is one.

    Args:
      config: all settings.
      quiet: whether nothing is shown.
    """
    return train_prepared(prepare_run(config), quiet=quiet)


def train_prepared(run: Run, *, quiet: bool = False) -> TrainResult:
    """Train what is prepared."""
    c, first = run.config, jax.process_index() == 0
    hardware = Hardware.of(c.layout.hardware)
    plans = run.plans()
    plan = plans["a step"]
    predicted = plan.time(hardware)
    c.folder.mkdir(parents=True, exist_ok=True)  # not before: a mistake leaves nothing behind
    # Signals are caught until the last checkpoint is on the disk.
    with (
        _alone(c.folder),
        rendezvous.Stop(c.hosts.grace) as stop,
        CheckpointManager(run.checkpoints, c.save.keep) as checkpoints,
    ):
        standing = restore_or_init(run, checkpoints)
        began, from_step, score = time.monotonic(), standing.step, None
        pace = PlannedSpeed(predicted.overlapped_seconds, plan.unique_flops, _peak(hardware, run))
        with (
            ProgressReporter(c.steps, standing.step, pace, c.log_every, quiet=quiet or not first) as shown,
            MetricsLogger(run, standing, shown, first, checkpoints) as record,
            contextlib.closing(run.train.batches(standing.position, ahead=PREFETCH_BATCHES)) as batches,
        ):
            if standing.step < c.steps:
                record.open(plans, hardware)
            else:  # what is written down stays that of the run that was
                done = f"the run is at step {standing.step} already"
                shown.say(f"{done}, and --steps is {c.steps}: nothing is trained")
            while standing.step < c.steps:
                batch, standing.position = next(batches)
                key, standing.step = run.key(standing.step), standing.step + 1
                with processes.watchdog(f"step {standing.step}"):
                    metrics, standing.model, standing.state = run.learner.learn(
                        standing.step, standing.model, standing.state, batch, key
                    )
                record.step(metrics)
                checkpoints.check()
                last = standing.step == c.steps or stop.requested
                due = standing.step == c.steps or _due(standing.step, c.evaluate.every)
                if run.valid is not None and due:  # not at a signal: there may be little time
                    record.flush()
                    score = record.evaluated(_score(run, standing))
                if last or _due(standing.step, c.save.every):
                    record.flush()  # nothing is saved of which it is not known that it is finite
                    extra = {"position": standing.position, "seed": c.seed, "skipped": standing.skipped}
                    checkpoints.save(standing.step, standing.model, standing.state, extra)
                if last:
                    break
            record.flush()
        seconds = time.monotonic() - began
    trained = standing.step - from_step
    loss = record.loss if trained else math.nan
    stopped = stop.reason if standing.step < c.steps else ""
    model = run.learner.whole(standing.model, standing.state)
    return TrainResult(run, model, standing.step, loss, score, stopped, seconds, trained)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """An error if another run writes into the folder: each would remove what the other has half-written."""
    handle = os.open(folder, os.O_RDONLY)  # the folder itself is locked: nothing to clean up after a kill
    try:
        processes.run_on_first(processes.unique_key("alone"), lambda: _lock(handle, folder))
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
            hint="wait for it, end it, or give another --folder",
        ) from None
    except OSError:  # a file system without locks, as some networks have
        return "not locked"
    return "locked"


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _peak(hardware: Hardware, run: Run) -> float:
    """FLOP/s of all devices together; virtual ones share their cores."""
    dtype = {"bfloat16": "bf16", "float16": "f16"}.get(run.config.model.compute, "f32")
    return hardware.peak(dtype) * (hardware.shared_cores or run.mesh.size)


def _score(run: Run, standing: TrainState) -> EvalResult:
    assert run.valid is not None
    limit = run.config.evaluate.batches
    rows = (batch for batch, _ in itertools.islice(run.valid.batches(), limit))
    return evaluate(run.scoring, run.learner.whole(standing.model, standing.state), rows)
