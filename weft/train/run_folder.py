"""What is written down of a run: curves as JSON lines, for TensorBoard and as a picture; and what was run.

    config.toml      the settings, all of them
    plan.txt         what a step does and costs, by the plan
    versions.json    of Python, Weft and the libraries that numbers depend on
    metrics.jsonl    one object for each step: step, loss, rate, norm, tokens, seconds; and evaluations
    tensorboard/     the same curves
    loss.png         the same curves

A run that goes on after a crash drops what was written after its checkpoint, so that the curves have each
step once.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

from weft.core.atomic_file import atomic_write, write_text
from weft.core.errors import WeftError

from .plain_json import plain_json

CONFIG_FILE, PLAN_FILE, METRICS_FILE, PLOT_FILE = "config.toml", "plan.txt", "metrics.jsonl", "loss.png"
LIBRARIES = ("jax", "jaxlib", "numpy", "equinox", "optax", "orbax-checkpoint", "grain", "sentencepiece")


class RunFolderError(WeftError, OSError):
    """Numbers that can't be written down."""


class RunFolderWriter:
    """The records of one run, in its folder. As a context it closes its files."""

    def __init__(self, folder: Path, step: int):
        """Args:
        folder: of the run.
        step: how many steps are done already; what was written of later ones goes.
        """
        self.folder = folder
        self._curves = {name: SampledCurve() for name in CURVE_LABELS}
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(folder / METRICS_FILE) as draft, draft.open("w", encoding="utf-8") as kept:
                for row in _rows(folder / METRICS_FILE, step):
                    kept.write(plain_json(row) + "\n")
                    self._add(row)
            self._file = (folder / METRICS_FILE).open("a", encoding="utf-8")
            self._board = TensorBoardWriter(folder / "tensorboard", step)

    def __enter__(self) -> RunFolderWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An error that is on its way says more than those that it leads to here.
        with _writing(self.folder) if error is None else suppress(OSError):
            try:
                self.sync()
                self.draw()
            finally:
                with suppress(OSError):  # what was not written is told already
                    self._board.close()
                with suppress(OSError):
                    self._file.close()

    def describe(self, config: str, plan: str) -> None:
        """Write down what is run."""
        versions = {"python": platform.python_version(), "weft": version("weft")}
        versions |= {name: version(name) for name in LIBRARIES}
        with _writing(self.folder):
            write_text(self.folder / CONFIG_FILE, config)
            write_text(self.folder / PLAN_FILE, plan)
            write_text(self.folder / "versions.json", json.dumps(versions, indent=1) + "\n")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers of a step: one line, at once with the system, which keeps it if this process is killed."""
        row = {"step": step, **numbers}
        with _writing(self.folder):
            self._file.write(plain_json(row) + "\n")
            self._file.flush()
            self._board.write(step, numbers)
        self._add(row)

    def sync(self) -> None:
        """Wait until the lines are on the disk: a checkpoint must not outlive those of its steps."""
        with _writing(self.folder):
            os.fsync(self._file.fileno())

    def draw(self) -> None:
        """Draw the curves of the loss."""
        curves = {name: curve.points for name, curve in self._curves.items()}
        if any(curves.values()):
            with _writing(self.folder):
                plot_curves(curves, self.folder / PLOT_FILE)

    def _add(self, row: Mapping[str, Any]) -> None:
        for name in CURVE_LABELS.keys() & row:
            self._curves[name].add(row["step"], float(row[name]))


class TensorBoardWriter:
    """A file of TensorBoard's, written line by line.

    tensorboardX's own SummaryWriter hands all to a thread. What that has not written yet, of two minutes
    perhaps, is lost when the process is killed; on a full disk it dies, and whoever writes waits forever.
    """

    def __init__(self, folder: Path, step: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        folder.mkdir(exist_ok=True)
        # A file's name has the second in which it was made; two starts may be in one.
        self._file = EventsWriter(str(folder / "events"), f".{os.getpid()}.{step}")
        # What other files have of later steps does not count.
        begun = SessionLog(status=SessionLog.START)
        self._file.write_event(Event(wall_time=time.time(), step=step + 1, session_log=begun))
        self._file.flush()

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers of a step."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        for name, value in numbers.items():
            self._file.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


CURVE_LABELS = {"loss": "training", "valid_loss": "held out"}
MAX_POINTS = 2000  # points of a curve: the picture is 840 wide


class SampledCurve:
    """Some of a curve's points, evenly chosen: what a picture needs, however long a run is."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self._seen, self._every = 0, 1

    def add(self, step: int, value: float) -> None:
        """Add a point, if it is one of those to keep; when they are too many, every second one goes."""
        if self._seen % self._every == 0:
            self.points.append((step, value))
        self._seen += 1
        if len(self.points) > MAX_POINTS:
            del self.points[1::2]
            self._every *= 2


def plot_curves(curves: Mapping[str, list[tuple[int, float]]], path: Path) -> None:
    """Curves by step, drawn into a PNG file."""
    from matplotlib.figure import Figure  # not pyplot: nothing global, no screen

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


def _rows(path: Path, until: int) -> Iterator[dict[str, Any]]:
    """What was written of steps up to one; a line that is not whole, as a crash leaves them, is left out."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] <= until:
                    yield row


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Say what it means when something can't be written."""
    try:
        yield
    except RunFolderError:
        raise
    except OSError as error:
        raise RunFolderError(
            f"the run's numbers could not be written to {folder}",
            f"system error: {error.strerror or error}",
            rule="each step is written down, so that curves have no gaps; a run that can't do so stops",
            hint="free space, look at quotas and rights; the same command goes on from the last checkpoint",
        ) from error
