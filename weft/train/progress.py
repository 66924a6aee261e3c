"""What a person sees of a run: what will happen, how far it is, how fast, and for how long yet.

On a terminal a live line (rich); otherwise a plain line every so many steps. All on stderr: stdout is for
results.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

SPEED_WINDOW = 50  # steps whose speed is shown
BAR_WIDTH, MIN_BAR_WIDTH = 24, 6  # columns
ETA_WIDTH = 9  # columns of the time that is left, 123:45:59


@dataclass(frozen=True)
class PlannedSpeed:
    """How a step should go, by the plan.

    Attributes:
      seconds: a step's predicted time.
      flops: what the model's products need in a step, on all devices together.
      peak: FLOP/s of all devices together.
    """

    seconds: float
    flops: float
    peak: float


class ProgressReporter:
    """Shows steps as they come. As a context it cleans up after itself."""

    def __init__(self, steps: int, done: int, pace: PlannedSpeed, every: int, quiet: bool = False):
        self.steps, self.pace, self.every, self.quiet = steps, pace, every, quiet
        # Seconds and tokens of steps, without the first: it is compiled, and its time is not that of others.
        self._recent: deque[tuple[float, float]] = deque(maxlen=SPEED_WINDOW)
        self._first = True
        self._console, self._bar, self._task = None, None, None
        if quiet:
            return
        from rich.console import Console

        self._console = Console(file=sys.stderr)
        if self._console.is_terminal:
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

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self._console is not None:
            (self._bar.console if self._bar is not None else self._console).print(
                text, markup=False, highlight=False, soft_wrap=True
            )

    def step(self, step: int, numbers: dict[str, float]) -> None:
        """A step is done."""
        if not self._first:
            self._recent.append((numbers["seconds"], numbers["tokens"]))
        self._first = False
        if self._bar is not None and self._task is not None:
            description = self._fitted(step, self._parts(numbers))
            self._bar.update(self._task, completed=step, description=description)
        elif step % self.every == 0 or step == self.steps:
            self.say(f"step {step:>6}/{self.steps}  {self.line(numbers)}{self._left(step)}")

    def line(self, numbers: dict[str, float]) -> str:
        """The numbers of a step, and the speed of the last ones if it is known, in words."""
        return "  ".join(self._parts(numbers))

    def _fitted(self, step: int, parts: list[str]) -> str:
        """Those of the parts that the terminal has room for beside the step, the bar and the time left. (Rich
        would shorten all columns alike, the step and the time first.)
        """
        assert self._bar is not None and self._console is not None
        room = (
            self._console.width - len(f"step {step}/{self.steps}") - ETA_WIDTH - 3
        )  # a space between columns
        bar = min(BAR_WIDTH, max(MIN_BAR_WIDTH, room - len(parts[0])))
        self._bar.columns[1].bar_width = bar  # type: ignore[union-attr]
        shown = parts[0]
        for part in parts[1:]:
            if len(f"{shown}  {part}") > room - bar:
                break
            shown = f"{shown}  {part}"
        return shown

    def _parts(self, numbers: dict[str, float]) -> list[str]:
        """The same, the most important first."""
        parts = [f"loss {numbers['loss']:.4f}", f"rate {numbers['rate']:.2e}"]
        if self._recent:
            seconds = self._seconds()
            tokens = sum(t for _, t in self._recent) / len(self._recent)
            parts += [
                f"{tokens / seconds:,.0f} tokens/s",
                f"{100 * self.pace.flops / seconds / self.pace.peak:.0f} % of peak",
                f"{1e3 * seconds:.0f} ms/step (planned {1e3 * self.pace.seconds:.0f})",
            ]
        return parts

    def _seconds(self) -> float:
        return sum(s for s, _ in self._recent) / len(self._recent)

    def _left(self, step: int) -> str:
        if not self._recent:
            return ""
        return f"  left {timedelta(seconds=round((self.steps - step) * self._seconds()))}"
