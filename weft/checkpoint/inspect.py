"""Inspect checkpoints: list them, verify them, read their contents and compare two of them.

    for checkpoint in list_checkpoints("runs/first"):
        print(checkpoint.step, checkpoint.damage or "complete")
    open_checkpoint("runs/first").entries["model.embedding"]     # float32[vocab=32000, d_model=512]

This needs no model and changes nothing, so a run may write into the folder at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.core.errors import nearest

from ..core.errors import CheckpointError
from .arrays import ManifestEntry, entries_from_manifest, is_key, read_arrays
from .manifest import (
    ARRAYS_FOLDER,
    MANIFEST_FILE,
    DamagedCheckpoint,
    check_files,
    list_step_folders,
    list_unfinished_folders,
    read_manifest,
)

UNFINISHED = "unfinished"
KEY_BYTES = {"key<fry>": 8}  # keys of JAX's other implementations have 16
CHUNK_ELEMENTS = 2**22  # elements converted to float64 at a time


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint in a folder: its size, when it was finished, and its damage, if any."""

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

    def arrays(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """Read arrays by name, one at a time; by default all."""
        selected = self.entries if names is None else {name: self.entries[name] for name in names}
        return read_arrays(self.path.absolute() / ARRAYS_FOLDER, selected)


def list_checkpoints(folder: str | Path) -> list[CheckpointInfo]:
    """All checkpoints by step, with every file verified; those that a run removes meanwhile are skipped."""
    folder = _check_folder(folder)
    unfinished = f"{UNFINISHED}: it is being written, or a crash left it"
    found = [
        *(info for step, path in list_step_folders(folder).items() for info in _info_if_present(step, path)),
        *(
            info
            for step, path in list_unfinished_folders(folder).items()
            for info in _info_if_present(step, path, unfinished)
        ),
    ]
    return sorted(found, key=lambda info: (info.step, info.damage or ""))


def _info_if_present(step: int, path: Path, damage: str | None = None) -> Iterator[CheckpointInfo]:
    """Yields nothing if the folder disappeared while it was read: a removed checkpoint is not damaged."""
    try:
        info = _info(step, path, damage)
    except FileNotFoundError:
        if path.exists():
            raise
        return
    if info.damage is None or path.exists():
        yield info


def _info(step: int, path: Path, damage: str | None = None) -> CheckpointInfo:
    sizes = [_file_bytes(p) for p in path.rglob("*") if p.is_file()]
    seconds, tensors = path.stat().st_mtime, None
    try:
        if damage is None:
            manifest = read_manifest(path)
            seconds, tensors = (path / MANIFEST_FILE).stat().st_mtime, len(manifest["tensors"])
            check_files(path, manifest)
    except DamagedCheckpoint as error:
        damage = str(error)
    return CheckpointInfo(step, path, sum(sizes), seconds, tensors, damage)


def _file_bytes(file: Path) -> int:
    """The size of a file; 0 if it has just disappeared, because Orbax renames files while it writes."""
    with suppress(FileNotFoundError):
        return file.stat().st_size
    return 0


def open_checkpoint(folder: str | Path, step: int | None = None, *, verify: bool = True) -> StoredCheckpoint:
    """Open the newest checkpoint of a folder, or the one of a given step.

    Args:
      folder: the checkpoint folder of a run.
      step: the step to open; by default the last one.
      verify: whether to verify the checksum of every file; otherwise only the manifest's.
    """
    folder = _check_folder(folder)
    folders = list_step_folders(folder)
    available = ", ".join(map(str, folders)) or "none"
    number = max(folders, default=None) if step is None else step
    if number is None or number not in folders:
        suggestion = nearest(str(step), map(str, folders)) if step is not None else ""
        raise CheckpointError(
            f"there is no checkpoint{'' if step is None else f' of step {step}'} in {folder}{suggestion}",
            f"available steps: {available}",
            rule="a checkpoint is a folder step_NUMBER with a manifest",
            hint="weft checkpoint list lists the checkpoints",
        )
    path = folders[number]
    try:
        manifest = read_manifest(path)
        if verify:
            check_files(path, manifest)
    except DamagedCheckpoint as damage:
        raise CheckpointError(
            f"the checkpoint {path} is damaged",
            str(damage),
            rule="a checkpoint is read only if all files match their SHA-256 checksums",
            hint=f"copy the files from a backup, or use another step; available steps: {available}",
        ) from None
    return StoredCheckpoint(
        path, manifest["step"], entries_from_manifest(manifest["tensors"]), manifest["extra"]
    )


def _check_folder(path: str | Path) -> Path:
    folder = Path(path)
    if folder.is_dir():
        return folder
    parent = folder.absolute().parent
    others = [p.name for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []
    fact = f"there is no folder {folder}{nearest(folder.name, others)}"
    raise CheckpointError(
        f"{folder} is a file" if folder.exists() else fact,
        rule="the checkpoints of a run are in one folder",
        hint="give the folder of a run, or its subfolder that contains the step_NUMBER folders",
    )


def entry_bytes(entry: ManifestEntry) -> int:
    """The size of a tensor in bytes; for a key the size of its bits."""
    itemsize = KEY_BYTES.get(entry.dtype, 16) if is_key(entry) else np.dtype(entry.dtype).itemsize
    return math.prod(entry.shape) * itemsize


# Values


@dataclass(frozen=True)
class ValueSummary:
    """The mean, standard deviation, minimum and maximum of the values without NaN; the number of NaNs."""

    mean: float
    std: float
    min: float
    max: float
    nan: int


def summarize_values(array: np.ndarray) -> ValueSummary:
    """Summarize the values of an array, chunk by chunk."""
    flat = array.reshape(-1)
    count, total, nan = 0, 0.0, 0
    low, high = math.inf, -math.inf
    for chunk in _chunks(flat):
        numbers = chunk[~np.isnan(chunk)]
        nan += chunk.size - numbers.size
        if numbers.size:
            count, total = count + numbers.size, total + float(numbers.sum())
            low, high = min(low, float(numbers.min())), max(high, float(numbers.max()))
    if not count:
        return ValueSummary(math.nan, math.nan, math.nan, math.nan, nan)
    mean = total / count
    if not math.isfinite(mean):
        return ValueSummary(mean, math.nan, low, high, nan)
    # A second pass: E[x²] - E[x]² would cancel where the mean is large.
    squares = sum(float(np.nansum((chunk - mean) ** 2)) for chunk in _chunks(flat))
    return ValueSummary(mean, math.sqrt(squares / count), low, high, nan)


def _chunks(flat: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, flat.size, CHUNK_ELEMENTS):
        yield flat[start : start + CHUNK_ELEMENTS].astype(np.float64)


# Differences


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs between two checkpoints.

    Attributes:
      name: the name of the tensor.
      types: its dtype and dims in the first and in the second checkpoint; None where it is missing.
      unequal: the number of elements that differ; 0 if the types differ.
      largest: the largest absolute difference; 0 if the types differ.
    """

    name: str
    types: tuple[str | None, str | None]
    unequal: int = 0
    largest: float = 0.0


def diff_checkpoints(one: StoredCheckpoint, other: StoredCheckpoint) -> list[TensorDifference]:
    """All tensors that differ, in the order of the first checkpoint. NaN equals NaN here."""
    names = [*one.entries, *(name for name in other.entries if name not in one.entries)]
    same = {name: None for name in names if one.entries.get(name) == other.entries.get(name)}
    found = {}
    for (name, left), (_, right) in zip(one.arrays(same), other.arrays(same), strict=True):
        unequal, largest = _compare(left, right)
        if unequal:
            kind = str(one.entries[name])
            found[name] = TensorDifference(name, (kind, kind), unequal, largest)
    for name in names:
        if name not in same:
            left_right = (one.entries.get(name), other.entries.get(name))
            found[name] = TensorDifference(name, tuple(str(e) if e else None for e in left_right))  # type: ignore[arg-type]
    return [found[name] for name in names if name in found]


def _compare(left: np.ndarray, right: np.ndarray) -> tuple[int, float]:
    """The number of elements that differ and the largest difference, infinite if only one of two is NaN."""
    unequal, largest = 0, 0.0
    a, b = left.reshape(-1), right.reshape(-1)
    for start in range(0, a.size, CHUNK_ELEMENTS):
        x, y = a[start : start + CHUNK_ELEMENTS], b[start : start + CHUNK_ELEMENTS]
        differs = (x != y) & ~((x != x) & (y != y))  # NaN != NaN
        if differs.any():
            unequal += int(differs.sum())
            with np.errstate(invalid="ignore", over="ignore"):
                by = np.abs(x[differs].astype(np.float64) - y[differs].astype(np.float64))
            largest = max(largest, float(np.where(np.isnan(by), np.inf, by).max()))
    return unequal, largest
