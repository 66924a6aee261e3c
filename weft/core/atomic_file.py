"""Atomic file writes: a file is complete or absent, even after a crash."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary file in the same folder; rename it to `path` when the block succeeds.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with atomic_write(folder / "a.txt") as draft:
    ...     _ = draft.write_text("all of it")
    >>> [p.name for p in folder.iterdir()]
    ['a.txt']
    """
    draft = path.parent / f".{path.name}.{os.urandom(4).hex()}.part"
    # Not tempfile's: its files are private, and this one must have the permissions of any new file.
    draft.touch(exist_ok=False)
    try:
        yield draft
        with draft.open("rb+") as written:
            os.fsync(written.fileno())  # else the new name may reach the disk before the contents
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as draft:
        draft.write_text(text, encoding="utf-8")
