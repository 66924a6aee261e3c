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
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

METRICS, PICTURE = "metrics.jsonl", "loss.png"
LIBRARIES = ("jax", "jaxlib", "numpy", "equinox", "optax", "orbax-checkpoint", "grain", "sentencepiece")


class Journal:
    """The records of one run, in its folder. As a context it closes its files."""

    def __init__(self, folder: Path, step: int):
        """Args:
        folder: of the run.
        step: how many steps are done already; what was written of later ones goes.
        """
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._rows = _rows(folder / METRICS, step)
        replace(folder / METRICS, "".join(json.dumps(row) + "\n" for row in self._rows))
        self._file = (folder / METRICS).open("a", encoding="utf-8")
        from tensorboardX import SummaryWriter

        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: Any) -> None:
        self.draw()
        self._file.close()
        self._board.close()

    def describe(self, config: str, plan: str) -> None:
        """Write down what is run."""
        replace(self.folder / "config.toml", config)
        replace(self.folder / "plan.txt", plan)
        versions = {"python": platform.python_version(), "weft": version("weft")}
        versions |= {name: version(name) for name in LIBRARIES}
        replace(self.folder / "versions.json", json.dumps(versions, indent=1) + "\n")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers of a step: one line, at once on its way to the disk."""
        row = {"step": step, **numbers}
        self._rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)

    def draw(self) -> None:
        """Draw the curves of the loss."""
        curves = {name: [(r["step"], r[name]) for r in self._rows if name in r] for name in CURVES}
        if any(curves.values()):
            picture(curves, self.folder / PICTURE)


CURVES = {"loss": "training", "valid_loss": "held out"}


def picture(curves: Mapping[str, list[tuple[int, float]]], path: Path) -> None:
    """Curves by step, drawn into a PNG file."""
    from matplotlib.figure import Figure  # not pyplot: nothing global, no screen

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        if points:
            marker = "." if len(points) < 30 else None
            axes.plot(*zip(*points, strict=True), label=CURVES.get(name, name), linewidth=1.2, marker=marker)
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    part = path.with_name(f".{path.name}.part")
    figure.savefig(part, format="png", dpi=120)
    os.replace(part, path)


def replace(path: Path, text: str) -> None:
    """Write a file beside its place and move it there when it is whole."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def _rows(path: Path, until: int) -> list[dict[str, Any]]:
    """What was written of steps up to one; a last line that a crash cut off is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return [row for row in rows if row["step"] <= until]
