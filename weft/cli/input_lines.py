"""Input lines: texts from files or stdin, one per line; errors name the file and line."""

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
    """Texts, one per line.

    Attributes:
      name: the name of the file.
      texts: the lines without line ends; or pairs of texts.
      count: the number of lines; None if they are streamed.
      sum: the SHA-256 of the file.
    """

    name: str
    texts: Iterable[Any]
    count: int | None
    sum: str | None


def read_lines(name: str, *, streamed: bool = False) -> InputLines:
    """Read the lines of a file; `-` is stdin.

    Args:
      name: the file; it is decompressed if necessary (`data/compression.py`).
      streamed: whether to yield lines of stdin as they arrive.
    """
    if name != STDIN:
        content = _read_file(name)
    elif streamed:
        return InputLines("stdin", _decode("stdin", sys.stdin.buffer), None, None)
    else:
        name, content = "stdin", sys.stdin.buffer.read()
    raw = content.split(b"\n")
    raw = raw[:-1] if not raw[-1] else raw  # the last line may lack its line end
    texts = list(_decode(name, raw))
    return InputLines(name, texts, len(texts), hashlib.sha256(content).hexdigest())


def read_aligned(names: Iterable[str]) -> list[InputLines]:
    """Read files whose lines correspond."""
    found = [read_lines(name) for name in names]
    counts = [one.count or 0 for one in found]
    if len(set(counts)) > 1:
        short = min(found, key=lambda one: one.count or 0)
        raise DataError(
            f"{short.name} has no line {min(counts) + 1}",
            *(f"{one.name}: {one.count:,} lines" for one in found),
            rule="line n of each file belongs together, so all files must have the same number of lines",
            hint="each text must be on a single line; an empty text is an empty line",
        )
    return found


def split_columns(lines: InputLines) -> InputLines:
    """Split each line at its tab into a pair of texts."""

    def split() -> Iterator[tuple[str, str]]:
        for number, text in enumerate(lines.texts, 1):
            columns = text.split("\t")
            if len(columns) != 2:
                raise DataError(
                    f"{lines.name}:{number} has {len(columns)} columns",
                    rule="in a single file, each line has two columns: a text, a tab, and its translation",
                    hint="give two files, SOURCES and TARGETS, or remove the other columns: cut -f 1,2",
                )
            yield columns[0], columns[1]

    pairs = split() if lines.count is None else list(split())
    return InputLines(lines.name, pairs, lines.count, lines.sum)


def _read_file(name: str) -> bytes:
    from ..data.compression import open_decompressed

    path = Path(name)
    if path.is_dir() or not path.exists():
        folder = path.parent
        near = nearest(path.name, [p.name for p in folder.iterdir()]) if folder.is_dir() else ""
        raise DataError(
            f"{name} is a folder" if path.is_dir() else f"no such file: {name}{near}",
            rule="the input is a file with one text per line; - is stdin",
            hint="paths are relative to the current directory",
        )
    try:
        with open_decompressed(name) as file:
            return file.read()
    except OSError as error:
        raise DataError(
            f"can't read {name}",
            error.strerror or str(error),
            rule="the input file must be readable",
            hint="check its permissions, or download it again",
        ) from None


def _decode(name: str, lines: Iterable[bytes]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            file = "" if name == "stdin" else f" {name}"
            raise DataError(
                f"{name}:{number} is not UTF-8",
                f"byte {error.start + 1} of the line is 0x{line[error.start]:02x}",
                rule="texts must be UTF-8",
                hint=f"convert Latin-1 with iconv -f latin1 -t utf-8{file}, or fix the line",
            ) from None
