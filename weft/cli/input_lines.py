"""Lines in: texts of files or of stdin, one to a line, with what is wrong told by file and line."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import DataError, nearest

STDIN = "-"


@dataclass(frozen=True)
class InputLines:
    """Texts, one to a line.

    Attributes:
      name: of the file.
      texts: each without the end of its line; or pairs of texts.
      count: how many; None: they are read as they come.
      sum: the SHA-256 of all of the file.
    """

    name: str
    texts: Iterable[Any]
    count: int | None
    sum: str | None


def read_lines(name: str, *, as_they_come: bool = False) -> InputLines:
    """The lines of a file; `-` is stdin.

    Args:
      name: the file, unpacked if it is compressed (`data/compression.py`).
      as_they_come: whether lines of stdin are given on before all of them are there.
    """
    if name != STDIN:
        content = _content(name)
    elif as_they_come:
        return InputLines("stdin", _decoded("stdin", sys.stdin.buffer), None, None)
    else:
        name, content = "stdin", sys.stdin.buffer.read()
    raw = content.split(b"\n")
    raw = raw[:-1] if not raw[-1] else raw  # the last line may lack its end
    texts = list(_decoded(name, raw))
    return InputLines(name, texts, len(texts), hashlib.sha256(content).hexdigest())


def read_aligned(names: Iterable[str]) -> list[InputLines]:
    """Files of which the same lines belong together."""
    found = [read_lines(name) for name in names]
    counts = [one.count or 0 for one in found]
    if len(set(counts)) > 1:
        short = min(found, key=lambda one: one.count or 0)
        raise DataError(
            f"{short.name} has no line {min(counts) + 1}",
            *(f"{one.name}: {one.count:,} lines" for one in found),
            rule="lines of the same number belong together, so all files have as many",
            hint="a text that has several lines has to be on one; an empty text is an empty line",
        )
    return found


def split_columns(lines: InputLines) -> InputLines:
    """The same file with its two columns, parted by a tab, as pairs."""

    def split() -> Iterator[tuple[str, str]]:
        for number, text in enumerate(lines.texts, 1):
            columns = text.split("\t")
            if len(columns) != 2:
                raise DataError(
                    f"{lines.name}:{number} has {len(columns)} columns",
                    rule="in one file, a line is a text, a tab, and its translation",
                    hint="give two files, SOURCES and TARGETS; or cut the other columns: cut -f 1,2",
                )
            yield columns[0], columns[1]

    found = split() if lines.count is None else list(split())
    return InputLines(lines.name, found, lines.count, lines.sum)


def _content(name: str) -> bytes:
    from ..data.compression import open_decompressed

    path = Path(name)
    if path.is_dir() or not path.exists():
        folder = path.parent
        near = nearest(path.name, [p.name for p in folder.iterdir()]) if folder.is_dir() else ""
        raise DataError(
            f"{name} is a folder" if path.is_dir() else f"there is no file {name}{near}",
            rule="texts are in a file, one to a line; - is stdin",
            hint="paths are relative to where the command is started",
        )
    try:
        with open_decompressed(name) as file:
            return file.read()
    except OSError as error:
        raise DataError(
            f"{name} can't be read",
            error.strerror or str(error),
            rule="texts are in a file that can be read",
            hint="look at its rights; download or write it again",
        ) from None


def _decoded(name: str, lines: Iterable[bytes]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            here = "" if name == "stdin" else f"{name} "
            raise DataError(
                f"{name}:{number} is not UTF-8",
                f"byte {error.start + 1} of the line is 0x{line[error.start]:02x}",
                rule="texts are in UTF-8",
                hint=f"iconv -f latin1 -t utf-8 {here}turns Latin-1 into it; or mend the line",
            ) from None
