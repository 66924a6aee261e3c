"""Retracing: trace with a guess, and trace again with a better one if it was wrong.

Some decisions depend on code that has not been traced yet: whether a carry may stay pending is known only
after the loop body. Tracing is cheap, so Weft guesses. Code that finds a guess wrong raises `Retrace`; the
code that guessed has called `trace_with_guess`, which revises the guess and traces again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from .context import active

Guess = TypeVar("Guess")
Result = TypeVar("Result")
Kind = Literal["carries", "unvarying", "placement", "captures"]


class Retrace(Exception):
    """A guess was wrong.

    Attributes:
      kind: the guess:
        "carries": which carries of a loop are pending sums; the value has the right axes by leaf number;
        "unvarying": that a tensor may be made varying before a loop;
        "placement": the placement of an eager op without placed operands; the value is the right one;
        "captures": which tensors a program captures; the value lists those that are not inputs yet.
      value: what the trace has found.
      scope: what the guess was about: a loop's frame, a program, or None for the innermost guess.
    """

    def __init__(self, kind: Kind, value: Any = None, scope: object = None):
        super().__init__(kind)
        self.kind, self.value, self.scope = kind, value, scope


def trace_with_guess(
    trace: Callable[[Guess], Result], guess: Guess, revise: Callable[[Guess, Retrace], Guess | None]
) -> Result:
    """`trace(guess)`, called again with a revised guess each time that it raises `Retrace`.

    Args:
      trace: traces with a guess.
      guess: the first guess.
      revise: takes a guess and the Retrace it led to; returns a better guess, or None if the Retrace is about
        another guess. It must not return a guess that was tried before, or tracing would never end.
    """
    while True:
        frames = active.context.frames if active.context is not None else []
        hits = [(frame, set(frame.memo_hits)) for frame in frames]
        try:
            return trace(guess)
        except Retrace as found:
            revised = revise(guess, found)
            if revised is None:
                raise
            guess = revised
        # `grad` takes memo hits for uses of its arguments, and those of a discarded trace are none.
        for frame, before in hits:
            frame.memo_hits = before
