"""From text files to examples: find the files, index their lines, and skip malformed ones.

A source is a frozen description of files; `open` scans them once and returns a sequence of examples. Only the
offsets of the lines are kept in memory: an example is read from its file on demand. Compressed files
(`compression.py`) are decompressed into temporary files, which can be indexed the same way.

    ParallelText("train.*.en", "train.*.fr")  line n of one file and line n of the other
    Tsv("train.tsv.gz")                       two columns of a file
    PlainText("lines/*.txt")                  one text per line; blank lines are skipped
    Documents("books/*.txt")                  one text per file
    Jsonl("train.jsonl", text="story")        one or two fields of the JSON object on each line

A malformed line is skipped, counted and reported with its file and line number. Too many raise an error.
"""

from __future__ import annotations

import glob
import json
import mmap
import os
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np

from weft.core.errors import DataError, DataWarning, WeftError, nearest

from . import compression

MAX_SHOWN = 5  # malformed lines listed in a message; all are counted
CHUNK_BYTES = 1 << 24  # searched for line ends at a time

FilePatterns = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class Pair(NamedTuple):
    """A source text and its target text, such as a sentence and its translation."""

    source: str
    target: str


Example = str | tuple[str, str]  # a text, or a pair of texts


class MalformedLine(NamedTuple):
    """A line that is not an example, and the reason."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class FileLines(Sequence[bytes]):
    """The lines of a file, without line ends, read from the file on demand."""

    unit = "lines"

    def __init__(self, path: str):
        self.path, self._bytes = path, _memory_map(path)
        ends = [
            _line_ends(self._bytes[at : at + CHUNK_BYTES], at)
            for at in range(0, len(self._bytes), CHUNK_BYTES)
        ]
        self._ends = np.concatenate([*ends, np.zeros(0, np.int64)])
        if len(self._bytes) and self._bytes[-1:] != b"\n":  # the last line may lack its line end
            self._ends = np.append(self._ends, len(self._bytes))

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, number: int) -> bytes: ...
    @overload
    def __getitem__(self, number: slice) -> list[bytes]: ...
    def __getitem__(self, number: int | slice) -> bytes | list[bytes]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = int(self._ends[number - 1]) + 1 if number else 0
        line = self._bytes[start : int(self._ends[number])]
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
        return line.removesuffix(b"\r")


class FileDocument(FileLines):
    """A file as a single line. The file is reopened for each read: a corpus may have more files than a
    process may keep open."""

    unit = "files"

    def __init__(self, path: str):
        self.path, self._ends = path, np.zeros(1, np.int64)
        with compression.open_decompressed(path):  # raise now, not when the example is read
            pass

    @overload
    def __getitem__(self, number: int) -> bytes: ...
    @overload
    def __getitem__(self, number: slice) -> list[bytes]: ...
    def __getitem__(self, number: int | slice) -> bytes | list[bytes]:
        if isinstance(number, slice):
            return super().__getitem__(number)
        if number:
            raise IndexError(number)
        with compression.open_decompressed(self.path) as file:
            return file.read().removeprefix(b"\xef\xbb\xbf")


def _memory_map(path: str) -> bytes | mmap.mmap:
    """The bytes of a file, read on demand."""
    with compression.open_decompressed(path) as file:
        empty = os.fstat(file.fileno()).st_size == 0  # mmap rejects an empty file
        return b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _line_ends(chunk: bytes, offset: int) -> np.ndarray:
    return np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + offset


def find_files(files: FilePatterns) -> tuple[str, ...]:
    """The files that paths and glob patterns match; the matches of one pattern are sorted by name.

    Args:
      files: a path, a pattern such as `"train.*.gz"`, or several of them.
    """
    patterns = [files] if isinstance(files, str | os.PathLike) else list(files)
    found: list[str] = []
    missing: list[str] = []
    for name in [os.fspath(one) for one in patterns]:
        matches = [name] if os.path.isfile(name) else sorted(filter(os.path.isfile, glob.glob(name)))
        found += matches
        missing += [] if matches else [name]
    if missing or not found:
        raise DataError(
            "no files given" if not missing else f"no such file: {', '.join(missing)}",
            *[f"{name}: {_nearby(name)}" for name in missing],
            rule="every path and every pattern must match at least one file",
            hint="paths are relative to the current directory",
        )
    return tuple(found)


def _nearby(name: str) -> str:
    if os.path.isdir(name):
        return f"it is a folder; its files are {os.path.join(name, '*')}"
    folder, last = os.path.split(name)
    if not os.path.isdir(folder or "."):
        return f"there is no folder {folder}" if not glob.has_magic(folder) else "no folder matches"
    there = sorted(os.listdir(folder or "."))
    return f"the folder has {len(there)} other files{nearest(last, there)}"


# Parsing a line into a text or a pair


class LineError(Exception):
    """Why a line is not an example."""


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


LineParser = Callable[[Sequence[bytes]], Example | None]  # None for a blank line


class Examples(Sequence[Any]):
    """The examples of opened files.

    Attributes:
      malformed: the lines that were skipped.
    """

    def __init__(self, columns: Sequence[Sequence[FileLines]], parse: LineParser, threshold: float):
        """Args:
        columns: lists of files; the n-th files of all lists have the same number of lines.
        parse: from corresponding lines, one of each list, to an example; None if they are blank.
        threshold: the fraction of the lines that may be malformed.
        """
        self._columns, self._parse = columns, parse
        self.malformed: list[MalformedLine] = []
        good = array("q")  # alternating file and line, 8 bytes each: there may be many millions
        lines = 0
        for number, parts in enumerate(zip(*columns, strict=True)):
            lines += len(parts[0])
            for at in range(len(parts[0])):
                try:
                    example = parse([part[at] for part in parts])
                except LineError as error:
                    self.malformed.append(MalformedLine(parts[0].path, at + 1, str(error)))
                else:
                    good.extend((number, at) if example is not None else ())
        self._locations = np.asarray(good, np.int64).reshape(-1, 2)
        self._check_malformed(lines, threshold)

    def _check_malformed(self, lines: int, threshold: float) -> None:
        bad = len(self.malformed)
        shown = [str(line) for line in self.malformed[:MAX_SHOWN]]
        shown += [f"and {bad - MAX_SHOWN} more"] if bad > MAX_SHOWN else []
        unit, most = self._columns[0][0].unit, int(threshold * lines)
        fact = f"{bad} of {lines} {unit} are malformed"
        if bad > threshold * lines:
            raise DataError(
                fact,
                *shown,
                rule=f"at most {100 * threshold:.3g}% of the {unit} may be malformed ({most} here)",
                hint=f"fix the {unit}, or raise malformed=; malformed {unit} are skipped",
            )
        if not len(self._locations):
            names = [part.path for column in self._columns for part in column]
            raise DataError(
                "no examples",
                f"{lines} {unit}: {', '.join(names[:MAX_SHOWN])}{', …' if len(names) > MAX_SHOWN else ''}",
                rule=f"a source needs at least one non-blank {unit[:-1]}",
                hint="check the files; are the downloads complete?",
            )
        if bad:
            warnings.warn("\n  ".join([f"{fact} and were skipped", *shown]), DataWarning, stacklevel=5)

    def __len__(self) -> int:
        return len(self._locations)

    @overload
    def __getitem__(self, number: int) -> Any: ...
    @overload
    def __getitem__(self, number: slice) -> list[Any]: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        file, line = map(int, self._locations[number])
        return self._parse([column[file][line] for column in self._columns])


def _open(
    source: Source, columns: Callable[[], Sequence[Sequence[FileLines]]], parse: LineParser
) -> Examples:
    try:
        return Examples(columns(), parse, source.malformed)
    except WeftError as error:
        raise error.located(repr(source)) from None


def _lines(files: FilePatterns) -> list[FileLines]:
    return [FileLines(path) for path in find_files(files)]


# The kinds of source


@dataclass(frozen=True)
class ParallelText:
    """Two files, or two equally long lists of files, whose lines correspond.

    Attributes:
      source, target: paths or patterns.
      malformed: the fraction of the lines that may be malformed.
    """

    source: FilePatterns
    target: FilePatterns
    malformed: float = 0.01

    def open(self) -> Examples:
        return _open(self, self._columns, lambda lines: _pair(*map(_text, lines)))

    def _columns(self) -> list[list[FileLines]]:
        sources, targets = find_files(self.source), find_files(self.target)
        if len(sources) != len(targets):
            raise DataError(
                f"{len(sources)} source files, but {len(targets)} target files",
                f"source: {', '.join(sources[:MAX_SHOWN])}",
                f"target: {', '.join(targets[:MAX_SHOWN])}",
                rule="each source file has one target file, in the same order",
                hint="matches are sorted by name: use corresponding names, or pass two lists",
            )
        columns = [[FileLines(path) for path in paths] for paths in (sources, targets)]
        unequal = [_unequal(*both) for both in zip(*columns, strict=True) if len(both[0]) != len(both[1])]
        if unequal:
            raise DataError(
                "source and target files have different numbers of lines",
                *unequal,
                rule="line n of the target is the translation of line n of the source",
                hint="a line was lost or split in two, at that line or before it",
            )
        return columns


def _unequal(source: FileLines, target: FileLines) -> str:
    longer, first = (source, len(target)) if len(source) > len(target) else (target, len(source))
    text = longer[first].decode(errors="replace")
    return (
        f"{source.path} has {len(source)}, {target.path} has {len(target)}\n"
        f"the first line without a counterpart is {longer.path}:{first + 1}: {text[:60]!r}"
    )


@dataclass(frozen=True)
class Tsv:
    """Files with one pair per line, in tab-separated columns.

    Attributes:
      files: paths or patterns.
      source, target: the column numbers, from 0.
      malformed: the fraction of the lines that may be malformed.
    """

    files: FilePatterns
    source: int = 0
    target: int = 1
    malformed: float = 0.01

    def open(self) -> Examples:
        return _open(self, lambda: [_lines(self.files)], self._parse)

    def _parse(self, lines: Sequence[bytes]) -> Pair | None:
        text = _text(lines[0])
        columns = text.split("\t")
        needed = max(self.source, self.target) + 1
        if text.strip() and len(columns) < needed:
            raise LineError(f"expected at least {needed} columns, found {len(columns)}")
        return _pair(columns[self.source], columns[self.target]) if text.strip() else None


@dataclass(frozen=True)
class PlainText:
    """Files with one text per line, for language models.

    Attributes:
      files: paths or patterns.
      malformed: the fraction of the lines that may be malformed.
    """

    files: FilePatterns
    malformed: float = 0.01

    def open(self) -> Examples:
        return _open(self, lambda: [_lines(self.files)], lambda lines: _text(lines[0]).strip() or None)


@dataclass(frozen=True)
class Documents:
    """Files with one text each, for language models.

    Attributes:
      files: paths or patterns.
      malformed: the fraction of the files that may be malformed.
    """

    files: FilePatterns
    malformed: float = 0.01

    def open(self) -> Examples:
        return _open(self, self._columns, lambda lines: _text(lines[0]) if lines[0].strip() else None)

    def _columns(self) -> list[list[FileDocument]]:
        return [[FileDocument(path) for path in find_files(self.files)]]


@dataclass(frozen=True)
class Jsonl:
    """Files with one JSON object per line.

    Attributes:
      files: paths or patterns.
      text: the field with the text. Instead, `source` and `target` name the two fields of a pair.
      malformed: the fraction of the lines that may be malformed.
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
                rule="a pair needs both fields; a single text needs neither",
                hint='Jsonl(files, source="en", target="fr"), or Jsonl(files, text="text")',
            ).located(repr(self))
        return _open(self, lambda: [_lines(self.files)], self._parse)

    def _parse(self, lines: Sequence[bytes]) -> Example | None:
        line = _text(lines[0])
        if not line.strip():
            return None
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise LineError(f"not JSON: {error}") from None
        if not isinstance(record, dict):
            raise LineError(f"not a JSON object but a {type(record).__name__}")
        if self.source is not None and self.target is not None:
            return _pair(_field(record, self.source), _field(record, self.target))
        text = _field(record, self.text)
        if not text.strip():
            raise LineError(f"{self.text!r} is blank")
        return text


Source = ParallelText | Tsv | PlainText | Documents | Jsonl


def _field(record: dict[str, Any], name: str) -> str:
    if name not in record:
        raise LineError(f"no field {name!r}{nearest(name, record)}")
    if not isinstance(record[name], str):
        raise LineError(f"{name!r} is not a string but a {type(record[name]).__name__}")
    try:
        record[name].encode()
    except UnicodeEncodeError as error:  # JSON can escape a lone surrogate, "\\ud83d"
        raise LineError(f"{name!r} contains a lone surrogate, {record[name][error.start]!a}") from None
    return record[name]


def iter_texts(examples: Iterable[Example]) -> Iterator[str]:
    """Iterate over all texts of examples, both texts of each pair, for example to train a tokenizer."""
    for example in examples:
        if isinstance(example, str):
            yield example
        else:
            yield from example
