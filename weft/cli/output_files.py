"""Output files: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..core.atomic_file import write_text
from ..core.errors import WeftError
from .targets import CommandFailure, UsageError


def check_output_path(path: Path) -> None:
    """An error if there is no folder to write the file into; asked before any work is done."""
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder, not a file to write", hint="name a file in it")
    if os.path.exists(path.parent) and not os.path.isdir(path.parent):
        raise UsageError(
            f"{path} is to be written, and {path.parent} is a file",
            rule="a file is written into a folder",
            hint="write to another place",
        )
    if not os.path.isdir(path.parent):
        raise UsageError(
            f"there is no folder {path.parent} to write {path.name} into",
            hint="make it first, or write to another place",
        )
    try:
        probe_writable(path.parent)
    except OSError as error:
        raise _unwritten(path, error) from None


def probe_writable(folder: Path) -> None:
    """OSError if no file can be made in a folder. It is tried: rights alone do not say it, to root least."""
    with tempfile.TemporaryFile(dir=folder):
        pass


@contextlib.contextmanager
def report_write_errors(path: Path) -> Iterator[None]:
    """What the system says against writing a file is told of that file, not of the draft beside it."""
    try:
        yield
    except WeftError:
        raise
    except OSError as error:
        raise CommandFailure(f"error: {_unwritten(path, error)}") from error


def _unwritten(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{path} can't be written",
        f"the system says: {error.strerror or error}",
        rule="a file is written beside its place, and moved there when it is whole",
        hint=f"look at the rights of {path.parent} and the space that is left, or write to another place",
    )


def write_output(path: Path, text: str) -> None:
    """Write a file, all of it or nothing."""
    check_output_path(path)
    with report_write_errors(path):
        write_text(path, text)


def terminal_width() -> int | None:
    """The width of the terminal that stdout is; None for a file or a pipe, whose text is always the same."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_table(rows: Sequence[Sequence[str]], *, header: bool = True) -> None:
    """Print rows as columns: those whose header begins with `>` to the right; with no header, all but one."""
    first = rows[0]
    right = [cell.startswith(">") if header else n > 0 for n, cell in enumerate(first)]
    rows = [[cell.lstrip(">") for cell in first], *rows[1:]] if header else rows
    widths = [max(len(row[n]) for row in rows) for n in range(len(first))]
    for row in rows:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        print("  ".join(cells).rstrip())
