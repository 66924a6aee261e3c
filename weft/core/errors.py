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
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class WeftError(Exception):
    """A mistake in the user's program; every one says what, why and what to do."""

    def __init__(self, fact: str, *details: str, rule: str = "", hint: str = ""):
        super().__init__(fact)
        self.fact, self.details, self.rule, self.hint = fact, details, rule, hint
        self.asked = ""
        self.where = ""
        self._frame: int | None = None  # the user's frame that the line is of

    def __str__(self) -> str:
        lines = [self.fact]
        lines += ["  " + line for detail in self.details for line in detail.split("\n")]
        lines += ["  " + self.rule] if self.rule else []
        lines += ["  in " + self.asked] if self.asked else []
        lines += ["  at " + self.where] if self.where else []
        lines += ["", "hint: " + self.hint] if self.hint else []
        return "\n".join(lines)

    def located_in(self, traceback: TracebackType | None, asked: str) -> Self:
        """The same error with the user's innermost line of another error, which it replaces."""
        while traceback is not None:
            if is_user_frame(traceback.tb_frame):
                self._frame = id(traceback.tb_frame)
                self.where = format_location(traceback.tb_frame, traceback.tb_lineno)
            traceback = traceback.tb_next
        self.asked = asked
        return self

    def located(self, asked: str = "") -> Self:
        """The same error with the user's line and what was asked there: the outermost of our functions
        below that line. What is further out, beyond the user's own code, does not change it."""
        frame = user_frame()
        if self._frame is None:
            self._frame, self.where = id(frame), format_location(frame)
        if self._frame == id(frame):
            self.asked = asked or self.asked
        return self


class DimError(WeftError, ValueError):
    """A dim that is misspelt, missing, repeated or of another size."""


class MeshError(WeftError, ValueError):
    """A mesh that can't be read or can't be had."""


class LayoutError(WeftError, ValueError):
    """A layout that is illegal for a mesh or a tensor, or two that clash.

    Attributes:
      unsplittable: the names of dims that an op can't have split, where that is what is wrong.
    """

    unsplittable: frozenset[str] = frozenset()


class ShapeError(WeftError, ValueError):
    """Sizes, indices or windows that do not fit."""


class TensorTypeError(WeftError, TypeError):
    """An argument of the wrong kind or dtype."""


class ProgramError(WeftError, ValueError):
    """Something a staged program can't do."""


class HardwareError(WeftError, ValueError):
    """A hardware profile that is unknown or can't be read."""


class ModelError(WeftError, ValueError):
    """A model that is unknown, or a checkpoint that doesn't fit it."""


class DataError(WeftError, ValueError):
    """Files, lines or settings that no examples or batches can be made of."""


class LayoutWarning(UserWarning):
    """A rule without effect."""


class DataWarning(UserWarning):
    """Lines that were left out."""


def user_frame() -> FrameType | None:
    """The innermost frame that is the user's: not ours, not a library's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_frame(frame):
        frame = frame.f_back
    return frame


def is_user_frame(frame: FrameType) -> bool:
    """Whether a frame is the user's: not ours, not a library's."""
    name = frame.f_code.co_filename
    # A dataclass's __init__ has no file: it is told by its module.
    made = name == "<string>" and frame.f_globals.get("__name__", "").startswith("weft.")
    return not made and not is_library(name)


def is_library(file: str) -> bool:
    """Whether a source file belongs to Weft, to Python or to an installed package."""
    installed = f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}lib{os.sep}python" in file
    return installed or file.startswith((PACKAGE, "<frozen"))


def is_library_module(name: str) -> bool:
    """Whether a module belongs to Weft, to Python or to an installed package."""
    file = getattr(sys.modules.get(name), "__file__", None)
    # Modules without a file are builtin, except the one of an interactive session.
    return name != "__main__" and is_library(file or "<frozen")


def format_location(frame: FrameType | None, line: int | None = None) -> str:
    """`file:line` of a frame, relative to where we are; by default the line that it is at."""
    if frame is None:
        return ""
    name = frame.f_code.co_filename
    short = os.path.relpath(name) if os.path.isabs(name) else name
    return f"{name if short.startswith('..') else short}:{frame.f_lineno if line is None else line}"


Kind = TypeVar("Kind", bound=WeftError)


def is_tracer(value: Any) -> bool:
    """Whether a value is one of JAX's tracers."""
    from jax.core import Tracer  # not above: commands that need no JAX import this file

    return isinstance(value, Tracer)


def python_number_error(kind: type[Kind], what: str, value: Any, *, rule: str, hint: str) -> Kind:
    """The error for something that has to be a Python number; numbers passed to a program are not."""
    if not is_tracer(value):
        return kind(f"{what} is {value!r}", rule=rule, hint=hint)
    if value.shape:
        return kind(f"{what} is an array of shape {value.shape}", rule=rule, hint=hint)
    return kind(
        f"{what} is not known while the program is traced",
        rule=f"numbers passed to a program are inputs, which have no value yet; {rule}",
        hint='declare the argument static: wf.spmd(fn, mesh, layout, static=("n",))',
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)`, or nothing if no known name is close."""
    close = difflib.get_close_matches(name, list(known), 5, 0.5)
    likely = difflib.get_close_matches(name, close, 1, 0.6)
    # Half of the letters in common can be chance, unless it is a part of the name, or letters are swapped.
    likely += [one for one in close if name in one or sorted(name) == sorted(one)]
    return f" (did you mean {likely[0]}?)" if likely else ""


def caret(text: str, position: int) -> str:
    """The text with a caret under one character."""
    return f"{text}\n{' ' * position}^"
