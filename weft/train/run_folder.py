"""The files of a run folder, apart from its checkpoints.

    config.toml      all settings
    plan.txt         the plan of a step: its work and costs
    versions.json    the versions of Python, Weft and the libraries that affect results
    metrics.jsonl    one object per step: step, loss, rate, norm, tokens, seconds; and evaluations
    tensorboard/     the same metrics
    loss.png         the loss curves (with the extra plots)

A run that resumes after a crash drops the metrics after its checkpoint, so that each step occurs once.
"""

from __future__ import annotations

import json
import os
import platform
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

from weft.core.atomic_file import atomic_write, write_text
from weft.core.errors import MissingExtraError, RunFolderError
from weft.core.extras import from_extra

from .plain_json import plain_json

CONFIG_FILE, PLAN_FILE, METRICS_FILE, PLOT_FILE = "config.toml", "plan.txt", "metrics.jsonl", "loss.png"
LIBRARIES = ("jax", "jaxlib", "numpy", "equinox", "optax", "orbax-checkpoint", "grain", "sentencepiece")


class RunFolderWriter:
    """Writes the files of a run folder. Leaving its context closes them."""

    def __init__(self, folder: Path, step: int):
        """Args:
        folder: the run folder.
        step: the number of steps already done; metrics of later steps are removed.
        """
        self.folder = folder
        self._curves = {name: SampledCurve() for name in CURVE_LABELS}
        with _explain_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(folder / METRICS_FILE) as draft, draft.open("w", encoding="utf-8") as file:
                for row in _read_rows(folder / METRICS_FILE, step):
                    file.write(plain_json(row) + "\n")
                    self._add(row)
            self._file = (folder / METRICS_FILE).open("a", encoding="utf-8")
            self._tensorboard = TensorBoardWriter(folder / "tensorboard", step)

    def __enter__(self) -> RunFolderWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An exception that is already propagating says more than the errors that it causes here.
        with _explain_errors(self.folder) if error is None else suppress(OSError):
            try:
                self.sync()
                self.draw()
            finally:
                with suppress(OSError):  # the error is already reported
                    self._tensorboard.close()
                with suppress(OSError):
                    self._file.close()

    def describe(self, config: str, plan: str) -> None:
        """Write the settings, the plan and the versions."""
        versions = {"python": platform.python_version(), "weft": version("weft")}
        versions |= {name: version(name) for name in LIBRARIES}
        with _explain_errors(self.folder):
            write_text(self.folder / CONFIG_FILE, config)
            write_text(self.folder / PLAN_FILE, plan)
            write_text(self.folder / "versions.json", json.dumps(versions, indent=1) + "\n")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Append the metrics of a step. The line is flushed, so it survives a kill of this process."""
        row = {"step": step, **numbers}
        with _explain_errors(self.folder):
            self._file.write(plain_json(row) + "\n")
            self._file.flush()
            self._tensorboard.write(step, numbers)
        self._add(row)

    def sync(self) -> None:
        """Sync the metrics to disk: a checkpoint must not be newer than the metrics of its steps."""
        with _explain_errors(self.folder):
            os.fsync(self._file.fileno())

    def draw(self) -> None:
        """Plot the loss curves. A run goes on without the package that plots."""
        curves = {name: curve.points for name, curve in self._curves.items()}
        if any(curves.values()):
            try:
                with _explain_errors(self.folder):
                    plot_curves(curves, self.folder / PLOT_FILE)
            except MissingExtraError as error:
                warnings.warn(f"{PLOT_FILE} is not drawn: {error.fact} ({error.hint})", stacklevel=2)

    def _add(self, row: Mapping[str, Any]) -> None:
        for name in CURVE_LABELS.keys() & row:
            self._curves[name].add(row["step"], float(row[name]))


class TensorBoardWriter:
    """Writes a TensorBoard event file synchronously.

    tensorboardX's SummaryWriter writes from a thread. A kill of the process loses up to two minutes of
    events; on a full disk the thread dies, and the next write waits forever.
    """

    def __init__(self, folder: Path, step: int):
        with from_extra("train"):
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog

        folder.mkdir(exist_ok=True)
        # File names contain the second of their creation, and two starts may share it.
        self._file = EventsWriter(str(folder / "events"), f".{os.getpid()}.{step}")
        # Makes TensorBoard ignore later steps in older files.
        start = SessionLog(status=SessionLog.START)
        self._file.write_event(Event(wall_time=time.time(), step=step + 1, session_log=start))
        self._file.flush()

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        with from_extra("train"):
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.summary import scalar

        for name, value in numbers.items():
            self._file.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


CURVE_LABELS = {"loss": "training", "valid_loss": "held out"}
MAX_POINTS = 2000  # per curve: the plot is 840 pixels wide


class SampledCurve:
    """Evenly sampled points of a curve: enough for a plot, in constant memory."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self._seen, self._every = 0, 1

    def add(self, step: int, value: float) -> None:
        """Add a point if it is sampled; beyond MAX_POINTS, drop every second point and halve the rate."""
        if self._seen % self._every == 0:
            self.points.append((step, value))
        self._seen += 1
        if len(self.points) > MAX_POINTS:
            del self.points[1::2]
            self._every *= 2


def plot_curves(curves: Mapping[str, list[tuple[int, float]]], path: Path) -> None:
    """Plot curves by step to a PNG file."""
    with from_extra("plots"):
        from matplotlib.figure import Figure  # not pyplot: that has global state and may need a display

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        if points:
            marker = "." if len(points) < 30 else None
            axes.plot(
                *zip(*points, strict=True), label=CURVE_LABELS.get(name, name), linewidth=1.2, marker=marker
            )
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    with atomic_write(path) as draft:
        figure.savefig(draft, format="png", dpi=120)


def _read_rows(path: Path, until: int) -> Iterator[dict[str, Any]]:
    """The metrics of steps up to one. Incomplete lines, which a crash leaves, are skipped."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] <= until:
                    yield row


@contextmanager
def _explain_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError into a message that says how to continue."""
    try:
        yield
    except RunFolderError:
        raise
    except OSError as error:
        raise RunFolderError(
            f"the metrics of the run could not be written to {folder}",
            f"system error: {error.strerror or error}",
            rule="the metrics of each step are written, so that curves have no gaps; otherwise the run stops",
            hint="free some space, check quotas and permissions; run the command again to resume",
        ) from error
