"""Errors: a fact, the arithmetic behind it, the rule, a way out, and the user's own line.

Inner code raises the bare fact; the public entry (an op, a program) adds what was asked and where.

    LayoutError: batch and heads of [batch=64, heads=8] are both on axis model
      rules: batch:model heads:model     mesh: data=4 model=2
      a tensor can have at most one dim on an axis
      in add(f32[batch=64], f32[heads=8])
      at attention.py:31

    hint: put batch on another axis, or drop one of the two rules
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable

PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class WeftError(Exception):
    """A mistake in the user's program; every one says what, why and what to do."""

    def __init__(self, fact: str, *details: str, rule: str = "", hint: str = ""):
        super().__init__(fact)
        self.fact, self.details, self.rule, self.hint = fact, details, rule, hint
        self.asked = ""
        self.where = ""

    def __str__(self) -> str:
        lines = [self.fact]
        lines += ["  " + line for detail in self.details for line in detail.split("\n")]
        lines += ["  " + self.rule] if self.rule else []
        lines += ["  in " + self.asked] if self.asked else []
        lines += ["  at " + self.where] if self.where else []
        lines += ["", "hint: " + self.hint] if self.hint else []
        return "\n".join(lines)

    def located(self, asked: str = "") -> WeftError:
        """The same error with what was asked and the user's line, unless it has them already."""
        self.asked = self.asked or asked
        self.where = self.where or user_line()
        return self


class DimError(WeftError, ValueError):
    """A dim that is misspelt, missing, repeated or of another size."""


class MeshError(WeftError, ValueError):
    """A mesh that can't be read or can't be had."""


class LayoutError(WeftError, ValueError):
    """A layout that is illegal for a mesh or a tensor, or two that clash."""


class ShapeError(WeftError, ValueError):
    """Sizes, indices or windows that do not fit."""


class TensorTypeError(WeftError, TypeError):
    """An argument of the wrong kind or dtype."""


class ProgramError(WeftError, ValueError):
    """Something a staged program can't do."""


class LayoutWarning(UserWarning):
    """A rule without effect."""


def user_line() -> str:
    """`file:line` of the innermost frame that is the user's: not ours, not a library's."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        ours = name.startswith(PACKAGE)
        library = f"{os.sep}site-packages{os.sep}" in name or f"{os.sep}lib{os.sep}python" in name
        if not ours and not library and not name.startswith("<frozen"):
            short = os.path.relpath(name) if os.path.isabs(name) else name
            return f"{name if short.startswith('..') else short}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)`, or nothing if no known name is close."""
    close = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def caret(text: str, position: int) -> str:
    """The text with a caret under one character."""
    return f"{text}\n{' ' * position}^"
