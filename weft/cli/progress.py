"""Progress of line processing on stderr: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from typing import Any

from ..core.extras import from_extra

REPORT_INTERVAL = 15.0  # seconds between reports


class LineProgress:
    """A context manager that reports progress, and the elapsed time at the end.

    Args:
      count: the number of lines, if known.
      done: the number of lines already done.
      bar: whether a bar may be drawn; not if results go to the same terminal.
    """

    def __init__(self, count: int | None, done: int = 0, *, bar: bool = True):
        self.count, self.done, self._done_before = count, done, done
        self._start = self._last = time.monotonic()
        self._bar: Any = None
        with from_extra("train"):
            from rich.console import Console

        console = Console(file=sys.stderr)
        if console.is_terminal and bar:
            with from_extra("train"):
                from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
                from rich.progress import Progress as Bar

            self._bar = Bar(
                MofNCompleteColumn(), BarColumn(bar_width=24), TimeRemainingColumn(), console=console
            )
            self._task = self._bar.add_task("", total=count, completed=done)

    def __enter__(self) -> LineProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if kind is None:
            new, seconds = self.done - self._done_before, time.monotonic() - self._start
            print(f"{new:,} lines in {seconds:.1f} s", file=sys.stderr)

    def step(self) -> None:
        """Count one more line as done."""
        self.done += 1
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
        elif now - self._last >= REPORT_INTERVAL:
            self._last = now
            speed = (self.done - self._done_before) / (now - self._start)
            of, left = "", ""
            if self.count is not None:
                of, left = f" of {self.count:,}", f", {(self.count - self.done) / speed:.0f} s left"
            print(f"{self.done:,}{of} lines, {speed:.1f} per second{left}", file=sys.stderr)
