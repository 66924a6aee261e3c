"""The entry point of `weft`: sets up Ctrl-C, then loads the command line and runs it.

Ctrl-C ends the process with one line on stderr and exit code 130, whatever it is doing. Python's default is
to raise KeyboardInterrupt at the next instruction. In the middle of an import that is a traceback, or an
ImportError from an extension that was initialized halfway. So this file imports next to nothing before its
own handler is installed: only Python's startup and `weft/__init__.py`, which is small, run earlier.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

TYPE_CHECKING = False  # type checkers treat it as True; importing typing takes milliseconds
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType
    from typing import NoReturn


INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Without arguments, use those of the process and install the
    handler of Ctrl-C."""
    if arguments is not None:
        try:
            return _command(arguments)
        except KeyboardInterrupt:
            return INTERRUPTED
    interrupts = InterruptHandler()
    # A process that was started with SIGINT ignored (a shell's background job) keeps ignoring it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupts)
    sys.unraisablehook = _unraisable
    try:
        code = _command(sys.argv[1:])
    except KeyboardInterrupt:
        _end()
    except BaseException:
        if interrupts.raised:  # a library turned the KeyboardInterrupt into another exception
            _end()
        raise
    if interrupts.raised:  # something caught the KeyboardInterrupt and carried on
        _end()
    return code


def _command(arguments: Sequence[str]) -> int:
    from .dispatch import dispatch

    return dispatch(arguments)


class InterruptHandler:
    """A handler for SIGINT.

    While a command runs it raises KeyboardInterrupt, so that the command can clean up. It ends the process
    immediately where that would be unsafe: in an import, outside the command (nothing catches it there), and
    at the second Ctrl-C.

    Attributes:
      raised: whether KeyboardInterrupt was raised.
    """

    def __init__(self) -> None:
        self.raised = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.raised or not _can_raise(frame):
            _end()
        self.raised = True
        raise KeyboardInterrupt


def _can_raise(frame: FrameType | None) -> bool:
    """Whether the innermost frames are a command's, and no import is under way in it."""
    while frame is not None and frame.f_code is not _command.__code__:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return False
        frame = frame.f_back
    return frame is not None


def _unraisable(error: sys.UnraisableHookArgs) -> None:
    """Python prints and drops exceptions raised during garbage collection, in which JAX runs a callback."""
    if issubclass(error.exc_type, KeyboardInterrupt):
        _end()
    sys.__unraisablehook__(error)


def _end() -> NoReturn:
    """End the process without Python's own exit, which may free what devices are still using."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, missing, or interrupted in the middle of a write
            stream.flush()
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
