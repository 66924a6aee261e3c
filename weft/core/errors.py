"""Errors: a fact with its arithmetic, the rule, a hint, and the user's own line.

Inner code raises the bare fact; the public entry point (an op, a program) adds the failing call and its line.

    LayoutError: batch and heads of [batch=64, heads=8] are both on axis model
      rules: batch:model heads:model     mesh: data=4 model=2
      a mesh axis splits at most one dim of a tensor; it cannot index slices of two dims at once
      in add(f32[batch=64], f32[heads=8])
      at attention.py:31

    hint: map batch to data ("batch:data"), or remove one of the two rules
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from .fields import Offender

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class WeftError(Exception):
    """A mistake in the user's program. The message states the fact, the rule and a possible fix.

    Attributes:
      fact, details, rule, hint: the parts of the message.
      call: the failing call, as text.
      where: `file:line` of the user's line.
      offenders: the fields of a config that the error is about; `core/fields.py` writes the message.
    """

    offenders: tuple[Offender, ...] = ()

    def __init__(self, fact: str, *details: str, rule: str = "", hint: str = ""):
        super().__init__(fact)
        self.fact, self.details, self.rule, self.hint = fact, details, rule, hint
        self.call = ""
        self.where = ""
        self._frame: int | None = None  # an id: the user's frame itself would keep its arrays alive

    def __str__(self) -> str:
        lines = [self.fact]
        lines += ["  " + line for detail in self.details for line in detail.split("\n")]
        lines += ["  " + self.rule] if self.rule else []
        lines += ["  in " + self.call] if self.call else []
        lines += ["  at " + self.where] if self.where else []
        lines += ["", "hint: " + self.hint] if self.hint else []
        return "\n".join(lines)

    def located_in(self, traceback: TracebackType | None, call: str) -> Self:
        """This error, located at the user's innermost line in the traceback of the error it replaces."""
        while traceback is not None:
            if is_user_frame(traceback.tb_frame):
                self._frame = id(traceback.tb_frame)
                self.where = format_location(traceback.tb_frame, traceback.tb_lineno)
            traceback = traceback.tb_next
        self.call = call
        return self

    def located(self, call: str = "") -> Self:
        """This error with the user's line and the public call on that line.

        Every public function on the way out calls this. The outermost one below the user's line wins:
        `wf.softmax` is more useful in a message than the `max` that it calls. Functions beyond the user's
        frame do not overwrite it.
        """
        frame = user_frame()
        if self._frame is None:
            self._frame, self.where = id(frame), format_location(frame)
        if self._frame == id(frame):
            self.call = call or self.call
        return self


class DimError(WeftError, ValueError):
    """A dim that is misspelt, missing, repeated or of the wrong size.

    Attributes:
      two_sizes: the name of a dim that occurs with two sizes, if that caused the error.
    """

    two_sizes: str | None = None


class MeshError(WeftError, ValueError):
    """A mesh that can't be parsed, or that needs more devices than there are."""


class LayoutError(WeftError, ValueError):
    """A layout that is invalid for a mesh or a tensor, or two layouts that conflict.

    Attributes:
      unsplittable: names of the dims that an op needs unsplit, if that caused the error.
    """

    unsplittable: frozenset[str] = frozenset()


class ShapeError(WeftError, ValueError):
    """Sizes, indices or windows that do not fit."""


class TensorTypeError(WeftError, TypeError):
    """An argument of the wrong kind or dtype."""


class TensorAttributeError(TensorTypeError, AttributeError):
    """An attribute of arrays that tensors don't have."""


class ProgramError(WeftError, ValueError):
    """Something a staged program can't do."""


class HardwareError(WeftError, ValueError):
    """A hardware profile that is unknown or can't be parsed."""


class CompileError(WeftError, RuntimeError):
    """A vendor's compiler can't compile a program, or does not finish."""


class ModelError(WeftError, ValueError):
    """A model that is unknown, or a checkpoint that doesn't fit it."""


class DataError(WeftError, ValueError):
    """Files, lines or settings that can't be turned into examples or batches."""


class VerificationError(WeftError, AssertionError):
    """Two layouts gave different results."""


class CheckpointError(WeftError, OSError):
    """A checkpoint can't be written or read."""


class TrainingError(WeftError, RuntimeError):
    """A run can't continue."""


class RunFolderError(WeftError, OSError):
    """Metrics can't be written to the run folder."""


class DistributedError(WeftError, RuntimeError):
    """Processes can't find each other, or can't work together."""


class PeerTimeoutError(DistributedError):
    """Another process did not arrive within the timeout."""


class MissingExtraError(WeftError, ImportError):
    """A package that is not installed, because it belongs to an extra such as `weft[train]`."""


class LayoutWarning(UserWarning):
    """A rule without effect."""


class DataWarning(UserWarning):
    """Input lines that were skipped."""


class CheckpointWarning(UserWarning):
    """A damaged or unfinished checkpoint is skipped."""


def user_frame() -> FrameType | None:
    """The innermost frame of user code: not Weft's, not a library's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_frame(frame):
        frame = frame.f_back
    return frame


def is_user_frame(frame: FrameType) -> bool:
    """Whether a frame runs user code: not Weft's, not a library's."""
    name = frame.f_code.co_filename
    # A dataclass's generated __init__ has no file; its module identifies it.
    generated = name == "<string>" and frame.f_globals.get("__name__", "").startswith("weft.")
    return not generated and not is_library(name)


def is_library(file: str) -> bool:
    """Whether a source file belongs to Weft, to Python or to an installed package."""
    installed = f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}lib{os.sep}python" in file
    return installed or file.startswith((PACKAGE, "<frozen"))


def is_library_module(name: str) -> bool:
    """Whether a module belongs to Weft, to Python or to an installed package."""
    file = getattr(sys.modules.get(name), "__file__", None)
    # Modules without a file are builtin, except __main__ in an interactive session.
    return name != "__main__" and is_library(file or "<frozen")


def format_location(frame: FrameType | None, line: int | None = None) -> str:
    """`file:line` of a frame, relative to the working directory; by default the frame's current line."""
    if frame is None:
        return ""
    return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno if line is None else line}"


def short_path(name: str) -> str:
    """A source file relative to the working directory if it is inside; a cell of a notebook as `In[3]`."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    cell = shell.compile.format_code_name(name) if shell is not None else None
    if cell is not None:
        return cell[1]
    short = os.path.relpath(name) if os.path.isabs(name) else name
    return name if short.startswith("..") else short


Kind = TypeVar("Kind", bound=WeftError)


def is_tracer(value: object) -> bool:
    """Whether a value is a JAX tracer."""
    from .jax_compat import Tracer  # imported here because commands that don't need JAX import this file

    return isinstance(value, Tracer)


def python_number_error(kind: type[Kind], what: str, value: object, *, rule: str, hint: str) -> Kind:
    """The error for a value that must be a Python number; numbers passed to a program become tracers."""
    if not is_tracer(value):
        return kind(f"{what} is {value!r}", rule=rule, hint=hint)
    shape = getattr(value, "shape", ())
    if shape:
        return kind(f"{what} is an array of shape {shape}", rule=rule, hint=hint)
    return kind(
        f"{what} is not known while the program is traced",
        rule=f"numbers passed to a program are inputs, which have no value yet; {rule}",
        hint='declare the argument static: wf.spmd(fn, mesh, layout, static=("n",))',
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)`, or an empty string if no known name is close."""
    close = difflib.get_close_matches(name, list(known), 5, 0.5)
    likely = difflib.get_close_matches(name, close, 1, 0.6)
    # A similarity of 0.5 can be chance, unless one name contains the other or letters are swapped.
    likely += [one for one in close if name in one or sorted(name) == sorted(one)]
    return f" (did you mean {likely[0]}?)" if likely else ""


def caret(text: str, position: int) -> str:
    """The text with a caret under one character."""
    return f"{text}\n{' ' * position}^"
