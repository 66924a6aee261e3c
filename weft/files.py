"""Files that are whole or not there at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A draft beside a file's place, to be written; it moves there when the block ends well.

    >>> folder = Path(tempfile.mkdtemp())
    >>> with whole(folder / "a.txt") as draft:
    ...     _ = draft.write_text("all of it")
    >>> [p.name for p in folder.iterdir()]
    ['a.txt']
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    draft = Path(name)
    try:
        yield draft
        with draft.open("rb+") as written:
            os.fsync(written.fileno())  # else the name may be on the disk before what it stands for
        mask = os.umask(0)
        os.umask(mask)
        draft.chmod(0o666 & ~mask)  # as an ordinary new file; mkstemp's own are private
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
