"""Checkpoints looked at from outside: what is there, whether it is whole, what is in it and how two differ.

    for one in listed("runs/first"):
        print(one.step, one.damage or "whole")
    stored("runs/first").entries["model.embedding"]     # float32[vocab=32000, d_model=512]

No model is needed, and nothing is changed: a run may be writing into the folder meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.core.errors import nearest

from .arrays import ManifestEntry, entries_from_manifest, is_key, read_arrays
from .manifest import (
    ARRAYS_FOLDER,
    MANIFEST_FILE,
    CheckpointError,
    DamagedCheckpoint,
    check_files,
    list_step_folders,
    list_unfinished_folders,
    read_manifest,
)

UNFINISHED = "unfinished"
KEY_BYTES = {"key<fry>": 8}  # JAX's other kinds have 16
CHUNK_ELEMENTS = 2**22  # elements that are looked at together, in float64


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint in a folder: its size, when it was finished, and what is wrong with it, if anything is."""

    step: int
    path: Path
    bytes: int
    seconds: float  # since 1970
    tensors: int | None
    damage: str | None


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint that can be read."""

    path: Path
    step: int
    entries: dict[str, ManifestEntry]
    extra: dict[str, Any]

    def arrays(self, names: Mapping[str, Any] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """Arrays by name, read one after the other; by default all."""
        chosen = self.entries if names is None else {name: self.entries[name] for name in names}
        return read_arrays(self.path.absolute() / ARRAYS_FOLDER, chosen)


def list_checkpoints(folder: Any) -> list[CheckpointInfo]:
    """All that there is, by step, checked to the last byte. What a run removes meanwhile is left out."""
    folder = _folder(folder)
    half = f"{UNFINISHED}: it is being written, or a crash left it"
    found = [
        *(one for step, path in list_step_folders(folder).items() for one in _still_there(step, path)),
        *(
            one
            for step, path in list_unfinished_folders(folder).items()
            for one in _still_there(step, path, half)
        ),
    ]
    return sorted(found, key=lambda one: (one.step, one.damage or ""))


def _still_there(step: int, path: Path, damage: str | None = None) -> Iterator[CheckpointInfo]:
    """A checkpoint; nothing if its folder went while it was looked at, which is no damage."""
    try:
        found = _listed(step, path, damage)
    except FileNotFoundError:
        if path.exists():
            raise
        return
    if found.damage is None or path.exists():
        yield found


def _listed(step: int, path: Path, damage: str | None = None) -> CheckpointInfo:
    sizes = [_file_bytes(p) for p in path.rglob("*") if p.is_file()]
    when, tensors = path.stat().st_mtime, None
    try:
        if damage is None:
            manifest = read_manifest(path)
            when, tensors = (path / MANIFEST_FILE).stat().st_mtime, len(manifest["tensors"])
            check_files(path, manifest)
    except DamagedCheckpoint as found:
        damage = str(found)
    return CheckpointInfo(step, path, sum(sizes), when, tensors, damage)


def _file_bytes(file: Path) -> int:
    """Of a file; 0 if it went just now, as those do that Orbax renames while it writes."""
    with suppress(FileNotFoundError):
        return file.stat().st_size
    return 0


def open_checkpoint(folder: Any, step: int | None = None, *, checked: bool = True) -> StoredCheckpoint:
    """The newest checkpoint of a folder, or that of a step.

    Args:
      folder: where the checkpoints of a run are.
      step: of which step; by default the last one.
      checked: whether to compare every file with its sum; else only the manifest is.
    """
    folder = _folder(folder)
    there = list_step_folders(folder)
    shown = ", ".join(map(str, there)) or "none"
    number = max(there, default=None) if step is None else step
    if number is None or number not in there:
        close = nearest(str(step), map(str, there)) if step is not None else ""
        raise CheckpointError(
            f"there is no checkpoint{'' if step is None else f' of step {step}'} in {folder}{close}",
            f"steps that are there: {shown}",
            rule="a checkpoint is a folder step_NUMBER, with its manifest",
            hint="weft checkpoint list says what is there",
        )
    path = there[number]
    try:
        manifest = read_manifest(path)
        if checked:
            check_files(path, manifest)
    except DamagedCheckpoint as damage:
        raise CheckpointError(
            f"the checkpoint {path} is damaged",
            str(damage),
            rule="only what is as it was written, by its SHA-256, is read",
            hint=f"copy the files from a backup, or take another step; steps that are there: {shown}",
        ) from None
    return StoredCheckpoint(
        path, manifest["step"], entries_from_manifest(manifest["tensors"]), manifest["extra"]
    )


def _folder(given: Any) -> Path:
    folder = Path(given)
    if folder.is_dir():
        return folder
    parent = folder.absolute().parent
    others = [p.name for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []
    fact = f"there is no folder {folder}{nearest(folder.name, others)}"
    raise CheckpointError(
        f"{folder} is a file" if folder.exists() else fact,
        rule="the checkpoints of a run are in one folder",
        hint="give the folder of a run, or the folder in it that has those called step_NUMBER",
    )


def entry_bytes(entry: ManifestEntry) -> int:
    """A tensor's bytes; of a key those of its bits."""
    one = KEY_BYTES.get(entry.dtype, 16) if is_key(entry) else np.dtype(entry.dtype).itemsize
    return math.prod(entry.shape) * one


# Values


@dataclass(frozen=True)
class ValueSummary:
    """Of the values that are numbers: their mean, standard deviation and ends; and how many are none."""

    mean: float
    std: float
    min: float
    max: float
    nan: int


def summarize_values(array: np.ndarray) -> ValueSummary:
    """What the values are like."""
    flat = array.reshape(-1)
    count, total, nan = 0, 0.0, 0
    low, high = math.inf, -math.inf
    for part in _parts(flat):
        good = part[~np.isnan(part)]
        nan += part.size - good.size
        if good.size:
            count, total = count + good.size, total + float(good.sum())
            low, high = min(low, float(good.min())), max(high, float(good.max()))
    if not count:
        return ValueSummary(math.nan, math.nan, math.nan, math.nan, nan)
    mean = total / count
    if not math.isfinite(mean):
        return ValueSummary(mean, math.nan, low, high, nan)
    squares = sum(float(np.nansum((part - mean) ** 2)) for part in _parts(flat))
    return ValueSummary(mean, math.sqrt(squares / count), low, high, nan)


def _parts(flat: np.ndarray) -> Iterator[np.ndarray]:
    for begin in range(0, flat.size, CHUNK_ELEMENTS):
        yield flat[begin : begin + CHUNK_ELEMENTS].astype(np.float64)


# Differences


@dataclass(frozen=True)
class TensorDifference:
    """How a tensor of one checkpoint differs from that of another.

    Attributes:
      name: the tensor's.
      how: what it is in the first, and in the second; None where it is not.
      unequal: how many elements differ, and `largest` by how much; both 0 if it is another kind of tensor.
    """

    name: str
    how: tuple[str | None, str | None]
    unequal: int = 0
    largest: float = 0.0


def diff_checkpoints(one: StoredCheckpoint, other: StoredCheckpoint) -> list[TensorDifference]:
    """All tensors that are not equal, in the order of the first. Here NaN equals NaN."""
    names = [*one.entries, *(name for name in other.entries if name not in one.entries)]
    same = {name: None for name in names if one.entries.get(name) == other.entries.get(name)}
    found = {}
    for (name, left), (_, right) in zip(one.arrays(same), other.arrays(same), strict=True):
        unequal, largest = _compared(left, right)
        if unequal:
            shown = str(one.entries[name])
            found[name] = TensorDifference(name, (shown, shown), unequal, largest)
    for name in names:
        if name not in same:
            left_right = (one.entries.get(name), other.entries.get(name))
            found[name] = TensorDifference(name, tuple(str(e) if e else None for e in left_right))  # type: ignore[arg-type]
    return [found[name] for name in names if name in found]


def _compared(left: np.ndarray, right: np.ndarray) -> tuple[int, float]:
    """How many elements differ, and by how much at most: infinitely, where just one is NaN."""
    unequal, largest = 0, 0.0
    a, b = left.reshape(-1), right.reshape(-1)
    for begin in range(0, a.size, CHUNK_ELEMENTS):
        x, y = a[begin : begin + CHUNK_ELEMENTS], b[begin : begin + CHUNK_ELEMENTS]
        differs = (x != y) & ~((x != x) & (y != y))  # NaN is no number's equal, not even its own
        if differs.any():
            unequal += int(differs.sum())
            with np.errstate(invalid="ignore", over="ignore"):
                by = np.abs(x[differs].astype(np.float64) - y[differs].astype(np.float64))
            largest = max(largest, float(np.where(np.isnan(by), np.inf, by).max()))
    return unequal, largest
