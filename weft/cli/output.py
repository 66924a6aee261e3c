"""Output files: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .loading import UserError


def check_folder(path: Path) -> None:
    """An error if there is no folder to write the file into; asked before any work is done."""
    if path.is_dir():
        raise UserError(f"{path} is a folder, not a file to write")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} to write {path.name} into")


def write(path: Path, text: str) -> None:
    """Write a file beside its place and move it there when it is whole."""
    check_folder(path)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(draft, 0o666 & ~mask)  # as an ordinary new file; mkstemp's own are private
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
