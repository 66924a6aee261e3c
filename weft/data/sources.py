"""From text files to examples: which files there are, where each line begins, and which lines are no good.

A source is a frozen description of files; `open` reads them once, and gives a sequence of examples. Only the
places of the lines are kept in memory: an example is read from its file when it is asked for. Compressed
files (`compression.py`) are unpacked into temporary files, which have places too.

    Parallel("train.*.en", "train.*.fr")      a line of one file and the same line of the other
    Tsv("train.tsv.gz")                       two columns of a file
    PlainText("lines/*.txt")                  a line each; blank lines are left out
    Documents("books/*.txt")                  a file each
    Jsonl("train.jsonl", text="story")        a field, or two, of an object in each line

A malformed line is left out, counted and reported with its file and number. Above a threshold all is refused.
"""

from __future__ import annotations

import glob
import json
import mmap
import os
import warnings
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np

from weft.core.errors import DataError, DataWarning, nearest

from . import compression

MAX_SHOWN = 5  # so many malformed lines are shown; all are counted
CHUNK_BYTES = 1 << 24  # bytes searched for line ends at once

FilePatterns = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class Pair(NamedTuple):
    """A text and what it should become."""

    source: str
    target: str


class MalformedLine(NamedTuple):
    """A line that is no example, and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class FileLines(Sequence[bytes]):
    """The lines of a file, without their ends, read where they are."""

    unit = "lines"

    def __init__(self, path: str):
        self.path, self._bytes = path, _mapped(path)
        ends = [
            _line_ends(self._bytes[at : at + CHUNK_BYTES], at)
            for at in range(0, len(self._bytes), CHUNK_BYTES)
        ]
        self._ends = np.concatenate([*ends, np.zeros(0, np.int64)])
        if len(self._bytes) and self._bytes[-1:] != b"\n":  # the last line may lack its end
            self._ends = np.append(self._ends, len(self._bytes))

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, number: int) -> bytes: ...
    @overload
    def __getitem__(self, number: slice) -> list[bytes]: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = int(self._ends[number - 1]) + 1 if number else 0
        line = self._bytes[start : int(self._ends[number])]
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
        return line.removesuffix(b"\r")


class FileDocument(FileLines):
    """A file as one line that is all of it. None stays open: there may be more than a process may open."""

    unit = "files"

    def __init__(self, path: str):
        self.path, self._ends = path, np.zeros(1, np.int64)
        with compression.open_decompressed(path):  # an error now, not when it is asked for
            pass

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return super().__getitem__(number)
        if number:
            raise IndexError(number)
        with compression.open_decompressed(self.path) as file:
            return file.read().removeprefix(b"\xef\xbb\xbf")


def _mapped(path: str) -> Any:
    """The bytes of a file, read where they are asked for."""
    with compression.open_decompressed(path) as file:
        empty = os.fstat(file.fileno()).st_size == 0
        return b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _line_ends(chunk: bytes, at: int) -> np.ndarray:
    return np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + at


def find_files(files: FilePatterns) -> tuple[str, ...]:
    """The files that names and patterns stand for, those of one pattern in alphabetical order.

    Args:
      files: a path, a pattern such as `"train.*.gz"`, or several of them.
    """
    asked = [files] if isinstance(files, str | os.PathLike) else list(files)
    found: list[str] = []
    missing: list[str] = []
    for name in [os.fspath(one) for one in asked]:
        matches = [name] if os.path.isfile(name) else sorted(filter(os.path.isfile, glob.glob(name)))
        found += matches
        missing += [] if matches else [name]
    if missing or not found:
        raise DataError(
            "no files were named" if not missing else f"no file {', '.join(missing)}",
            *[f"{name}: {_near(name)}" for name in missing],
            rule="every path and every pattern stands for at least one file",
            hint="paths are relative to where the program is started",
        )
    return tuple(found)


def _near(name: str) -> str:
    if os.path.isdir(name):
        return f"it is a folder; its files are {os.path.join(name, '*')}"
    folder, last = os.path.split(name)
    if not os.path.isdir(folder or "."):
        return f"there is no folder {folder}" if not glob.has_magic(folder) else "no folder matches"
    there = sorted(os.listdir(folder or "."))
    return f"the folder has {len(there)} other files{nearest(last, there)}"


# What a line holds: a text, a pair, or a fault


class LineError(Exception):
    """Why a line is no example."""


def _text(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise LineError(f"not UTF-8: byte {error.start} is 0x{line[error.start]:02x}") from None


def _pair(source: str, target: str) -> Pair | None:
    blank = [name for name, text in (("source", source), ("target", target)) if not text.strip()]
    if len(blank) == 1:
        raise LineError(f"the {blank[0]} is blank")
    return None if blank else Pair(source, target)


LineParser = Callable[[Sequence[bytes]], Any]


class Examples(Sequence[Any]):
    """The examples of opened files, by number.

    Attributes:
      malformed: the lines that were left out.
    """

    def __init__(self, columns: list[list[FileLines]], read: LineParser, threshold: float):
        """Args:
        columns: lists of files; the files at one place of each have as many lines.
        read: from the lines at one place to an example; None: nothing is there.
        threshold: the part of the lines that may be malformed.
        """
        self._columns, self._read = columns, read
        self.malformed: list[MalformedLine] = []
        good = array("q")  # file and line, in turn: eight bytes each, as there may be many millions
        lines = 0
        for number, parts in enumerate(zip(*columns, strict=True)):
            lines += len(parts[0])
            for at in range(len(parts[0])):
                try:
                    found = read([part[at] for part in parts])
                except LineError as fault:
                    self.malformed.append(MalformedLine(parts[0].path, at + 1, str(fault)))
                else:
                    good.extend((number, at) if found is not None else ())
        self._places = np.asarray(good, np.int64).reshape(-1, 2)
        self._judge(lines, threshold)

    def _judge(self, lines: int, threshold: float) -> None:
        bad = len(self.malformed)
        shown = [str(line) for line in self.malformed[:MAX_SHOWN]]
        shown += [f"and {bad - MAX_SHOWN} more"] if bad > MAX_SHOWN else []
        unit, most = self._columns[0][0].unit, int(threshold * lines)
        fact = f"{bad} of {lines} {unit} are malformed"
        if bad > threshold * lines:
            raise DataError(
                fact,
                *shown,
                rule=f"at most {threshold:.3g} of the {unit} may be malformed ({most} here)",
                hint=f"mend the {unit}, or raise malformed=; malformed {unit} are left out",
            )
        if not len(self._places):
            names = [part.path for column in self._columns for part in column]
            raise DataError(
                "there are no examples",
                f"{lines} {unit}: {', '.join(names[:MAX_SHOWN])}{', …' if len(names) > MAX_SHOWN else ''}",
                rule=f"there is something to read: {unit} that are not blank",
                hint="check the files; were they downloaded whole?",
            )
        if bad:
            warnings.warn("\n  ".join([f"{fact}, and left out", *shown]), DataWarning, stacklevel=5)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, number: int) -> Any: ...
    @overload
    def __getitem__(self, number: slice) -> list[Any]: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        file, line = map(int, self._places[number])
        return self._read([column[file][line] for column in self._columns])


def _opened(source: Any, columns: Callable[[], list[list[FileLines]]], read: LineParser) -> Examples:
    try:
        return Examples(columns(), read, source.malformed)
    except DataError as error:
        raise error.located(repr(source)) from None


def _lines(files: FilePatterns) -> list[FileLines]:
    return [FileLines(path) for path in find_files(files)]


# The kinds of source


@dataclass(frozen=True)
class ParallelText:
    """Two files, or two equally long lists of files, whose lines belong together.

    Attributes:
      source, target: paths or patterns.
      malformed: the part of the lines that may be malformed.
    """

    source: FilePatterns
    target: FilePatterns
    malformed: float = 0.01

    def open(self) -> Examples:
        return _opened(self, self._columns, lambda lines: _pair(*map(_text, lines)))

    def _columns(self) -> list[list[FileLines]]:
        sources, targets = find_files(self.source), find_files(self.target)
        if len(sources) != len(targets):
            raise DataError(
                f"{len(sources)} source files, but {len(targets)} target files",
                f"source: {', '.join(sources[:MAX_SHOWN])}",
                f"target: {', '.join(targets[:MAX_SHOWN])}",
                rule="each source file has one target file, in the same order",
                hint="patterns are sorted by name: name the files alike, or give two lists",
            )
        columns = [[FileLines(path) for path in paths] for paths in (sources, targets)]
        unequal = [_unequal(*both) for both in zip(*columns, strict=True) if len(both[0]) != len(both[1])]
        if unequal:
            raise DataError(
                "source and target files have unequal numbers of lines",
                *unequal,
                rule="line n of the target is the translation of line n of the source",
                hint="a line was lost or broken in two, at that line or before it",
            )
        return columns


def _unequal(source: FileLines, target: FileLines) -> str:
    longer, first = (source, len(target)) if len(source) > len(target) else (target, len(source))
    text = longer[first].decode(errors="replace")
    return (
        f"{source.path} has {len(source)}, {target.path} has {len(target)}\n"
        f"the first without a partner is {longer.path}:{first + 1}: {text[:60]!r}"
    )


@dataclass(frozen=True)
class Tsv:
    """Files with a pair in each line, in columns with tabs between.

    Attributes:
      files: paths or patterns.
      source, target: the numbers of the columns, from 0.
      malformed: the part of the lines that may be malformed.
    """

    files: FilePatterns
    source: int = 0
    target: int = 1
    malformed: float = 0.01

    def open(self) -> Examples:
        return _opened(self, lambda: [_lines(self.files)], self._read)

    def _read(self, lines: Sequence[bytes]) -> Pair | None:
        text = _text(lines[0])
        columns = text.split("\t")
        needed = max(self.source, self.target) + 1
        if text.strip() and len(columns) < needed:
            raise LineError(f"{len(columns)} columns, and {needed} are needed")
        return _pair(columns[self.source], columns[self.target]) if text.strip() else None


@dataclass(frozen=True)
class PlainText:
    """Files with one text in each line, for language models.

    Attributes:
      files: paths or patterns.
      malformed: the part of the lines that may be malformed.
    """

    files: FilePatterns
    malformed: float = 0.01

    def open(self) -> Examples:
        return _opened(self, lambda: [_lines(self.files)], lambda lines: _text(lines[0]).strip() or None)


@dataclass(frozen=True)
class Documents:
    """Files that are one text each, for language models.

    Attributes:
      files: paths or patterns.
      malformed: the part of the files that may be malformed.
    """

    files: FilePatterns
    malformed: float = 0.01

    def open(self) -> Examples:
        return _opened(self, self._columns, lambda lines: _text(lines[0]) if lines[0].strip() else None)

    def _columns(self) -> list[list[FileLines]]:
        return [[FileDocument(path) for path in find_files(self.files)]]


@dataclass(frozen=True)
class Jsonl:
    """Files with a JSON object in each line.

    Attributes:
      files: paths or patterns.
      text: the field with the text; if `source` and `target` are given, these are the fields of a pair.
      malformed: the part of the lines that may be malformed.
    """

    files: FilePatterns
    text: str = "text"
    source: str | None = None
    target: str | None = None
    malformed: float = 0.01

    def open(self) -> Examples:
        if (self.source is None) != (self.target is None):
            raise DataError(
                f"source={self.source!r}, but target={self.target!r}",
                rule="a pair has both; a single text has neither",
                hint='Jsonl(files, source="en", target="fr"), or Jsonl(files, text="text")',
            ).located(repr(self))
        return _opened(self, lambda: [_lines(self.files)], self._read)

    def _read(self, lines: Sequence[bytes]) -> Pair | str | None:
        line = _text(lines[0])
        if not line.strip():
            return None
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise LineError(f"not JSON: {error}") from None
        if not isinstance(found, dict):
            raise LineError(f"not an object, but a {type(found).__name__}")
        if self.source is not None and self.target is not None:
            return _pair(_field(found, self.source), _field(found, self.target))
        text = _field(found, self.text)
        if not text.strip():
            raise LineError(f"{self.text!r} is blank")
        return text


def _field(found: dict[str, Any], name: str) -> str:
    if name not in found:
        raise LineError(f"no field {name!r}{nearest(name, found)}")
    if not isinstance(found[name], str):
        raise LineError(f"{name!r} is not a text, but a {type(found[name]).__name__}")
    try:
        found[name].encode()
    except UnicodeEncodeError as error:  # JSON can write half of a character, "\\ud83d"
        raise LineError(f"{name!r} has half a character, {found[name][error.start]!a}") from None
    return found[name]


def iter_texts(examples: Iterable[Any]) -> Iterable[str]:
    """All texts of examples, both of each pair: what a tokenizer is trained on."""
    for example in examples:
        if isinstance(example, str):
            yield example
        else:
            yield from example
