"""Progress of a run on stderr: a live line on a terminal (rich), otherwise a log line every few steps."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from datetime import timedelta

from weft.core.extras import from_extra

SPEED_WINDOW = 50  # steps over which the speed is averaged
BAR_WIDTH, MIN_BAR_WIDTH = 24, 6  # columns
ETA_WIDTH = 9  # columns of the remaining time, 123:45:59


@dataclass(frozen=True)
class PlannedSpeed:
    """The speed of a step according to the plan.

    Attributes:
      seconds: the predicted time of a step.
      flops: the FLOPs of a step, on all devices together.
      peak: the peak FLOP/s of all devices together.
    """

    seconds: float
    flops: float
    peak: float


class ProgressReporter:
    """Reports steps as they finish. Leaving its context removes the live line."""

    def __init__(self, steps: int, done: int, planned: PlannedSpeed, every: int, quiet: bool = False):
        self.steps, self.planned, self.every, self.quiet = steps, planned, every, quiet
        # Seconds and tokens of the last steps, without the first, whose time includes compilation.
        self._recent: deque[tuple[float, float]] = deque(maxlen=SPEED_WINDOW)
        self._first = True
        self._console, self._bar, self._task = None, None, None
        if quiet:
            return
        with from_extra("train"):
            from rich.console import Console

        self._console = Console(file=sys.stderr)
        if self._console.is_terminal:
            with from_extra("train"):
                from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
                from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=BAR_WIDTH),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=steps, completed=done)

    def __enter__(self) -> ProgressReporter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def print(self, text: str) -> None:
        """Print a line, above the live line if there is one."""
        if self._console is not None:
            (self._bar.console if self._bar is not None else self._console).print(
                text, markup=False, highlight=False, soft_wrap=True
            )

    def step(self, step: int, numbers: dict[str, float]) -> None:
        """Report a finished step."""
        if not self._first:
            self._recent.append((numbers["seconds"], numbers["tokens"]))
        self._first = False
        if self._bar is not None and self._task is not None:
            description = self._fit_width(step, self._parts(numbers))
            self._bar.update(self._task, completed=step, description=description)
        elif step % self.every == 0 or step == self.steps:
            self.print(f"step {step:>6}/{self.steps}  {self.line(numbers)}{self._eta(step)}")

    def line(self, numbers: dict[str, float]) -> str:
        """The metrics of a step, and the speed of the last steps if it is known, as text."""
        return "  ".join(self._parts(numbers))

    def _fit_width(self, step: int, parts: list[str]) -> str:
        """The parts that fit on the terminal, next to the step, the bar and the remaining time. (Rich would
        shorten all columns equally, the step and the time first.)
        """
        assert self._bar is not None and self._console is not None
        room = (
            self._console.width - len(f"step {step}/{self.steps}") - ETA_WIDTH - 3
        )  # spaces between columns
        bar = min(BAR_WIDTH, max(MIN_BAR_WIDTH, room - len(parts[0])))
        self._bar.columns[1].bar_width = bar  # type: ignore[union-attr]
        shown = parts[0]
        for part in parts[1:]:
            if len(f"{shown}  {part}") > room - bar:
                break
            shown = f"{shown}  {part}"
        return shown

    def _parts(self, numbers: dict[str, float]) -> list[str]:
        """The parts of `line`, the most important first."""
        parts = [f"loss {numbers['loss']:.4f}", f"rate {numbers['rate']:.2e}"]
        if self._recent:
            seconds = self._seconds()
            tokens = sum(t for _, t in self._recent) / len(self._recent)
            parts += [
                f"{tokens / seconds:,.0f} tokens/s",
                f"{100 * self.planned.flops / seconds / self.planned.peak:.0f} % of peak",
                f"{1e3 * seconds:.0f} ms/step (planned {1e3 * self.planned.seconds:.0f})",
            ]
        return parts

    def _seconds(self) -> float:
        return sum(s for s, _ in self._recent) / len(self._recent)

    def _eta(self, step: int) -> str:
        if not self._recent:
            return ""
        return f"  left {timedelta(seconds=round((self.steps - step) * self._seconds()))}"
