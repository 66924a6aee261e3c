"""Output files: whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..files import whole
from .loading import UserError


def check_folder(path: Path) -> None:
    """An error if there is no folder to write the file into; asked before any work is done."""
    if path.is_dir():
        raise UserError(f"{path} is a folder, not a file to write", hint="name a file in it")
    if not path.parent.is_dir():
        raise UserError(
            f"there is no folder {path.parent} to write {path.name} into",
            hint="make it first, or write to another place",
        )


def write(path: Path, text: str) -> None:
    """Write a file beside its place and move it there when it is whole."""
    check_folder(path)
    with whole(path) as draft:
        draft.write_text(text, encoding="utf-8")


def table(rows: Sequence[Sequence[str]], *, header: bool = True) -> None:
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
