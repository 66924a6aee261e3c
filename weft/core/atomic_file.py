"""Files that are whole or not there at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A draft beside a file's place, to be written; it moves there when the block ends well.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with whole(folder / "a.txt") as draft:
    ...     _ = draft.write_text("all of it")
    >>> [p.name for p in folder.iterdir()]
    ['a.txt']
    """
    draft = path.parent / f".{path.name}.{os.urandom(4).hex()}.part"
    draft.touch(exist_ok=False)  # with the rights of any new file; those of tempfile's are private
    try:
        yield draft
        with draft.open("rb+") as written:
            os.fsync(written.fileno())  # else the name may be on the disk before what it stands for
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file, all of it or nothing."""
    with atomic_write(path) as draft:
        draft.write_text(text, encoding="utf-8")
