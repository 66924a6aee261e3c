"""Output: files that are written atomically, and tables on stdout."""

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
    """Raise an error, before any work is done, if a file can't be written."""
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder, not a file to write", hint="give the name of a file in it")
    if os.path.exists(path.parent) and not os.path.isdir(path.parent):
        raise UsageError(
            f"can't write {path}: {path.parent} is a file",
            rule="a file is written into a folder",
            hint="choose another path",
        )
    if not os.path.isdir(path.parent):
        raise UsageError(
            f"no folder {path.parent} to write {path.name} into",
            hint="create it first, or choose another path",
        )
    try:
        probe_writable(path.parent)
    except OSError as error:
        raise _write_error(path, error) from None


def probe_writable(folder: Path) -> None:
    """Raise OSError if no file can be created in a folder."""
    # Create one: permission bits are not enough, least of all for root.
    with tempfile.TemporaryFile(dir=folder):
        pass


@contextlib.contextmanager
def report_write_errors(path: Path) -> Iterator[None]:
    """Report an OSError as a failure to write `path`, not the temporary file next to it."""
    try:
        yield
    except WeftError:
        raise
    except OSError as error:
        raise CommandFailure(f"error: {_write_error(path, error)}") from error


def _write_error(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"can't write {path}",
        str(error.strerror or error),
        rule="a file is written to a temporary file in the same folder, then renamed",
        hint=f"check the permissions of {path.parent} and the free disk space, or choose another path",
    )


def write_output(path: Path, text: str) -> None:
    """Write a file atomically."""
    check_output_path(path)
    with report_write_errors(path):
        write_text(path, text)


def terminal_width() -> int | None:
    """The terminal's width if stdout is a terminal; None for a file or a pipe, whose text must not vary."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_table(rows: Sequence[Sequence[str]], *, header: bool = True) -> None:
    """Print rows as aligned columns.

    A column whose header starts with `>` is right-aligned; without a header, all columns but the first are.
    """
    first = rows[0]
    right = [cell.startswith(">") if header else n > 0 for n, cell in enumerate(first)]
    rows = [[cell.lstrip(">") for cell in first], *rows[1:]] if header else rows
    widths = [max(len(row[n]) for row in rows) for n in range(len(first))]
    for row in rows:
        cells = [
            cell.rjust(width) if align_right else cell.ljust(width)
            for cell, width, align_right in zip(row, widths, right, strict=True)
        ]
        print("  ".join(cells).rstrip())
