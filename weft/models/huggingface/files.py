"""Folders of safetensors files: tensors are read and written slice by slice.

A file consists of the length of a header, the header (JSON: each tensor's dtype, shape and offsets) and the
bytes of the tensors. It contains no code. A folder has one file, `model.safetensors`, or several and an index
that maps tensors to files. The safetensors library reads them, by memory mapping. It can't write them slice
by slice: it needs all tensors in memory at once, so writing is done here.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import ml_dtypes
import numpy as np

from weft.core.errors import ModelError
from weft.core.extras import from_extra
from weft.distributed import processes
from weft.distributed.shared_folder import check_shared_folder

MODEL, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}

# The dtypes that are read and written; all are converted to float32.
DTYPES: dict[str, Any] = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16, "F64": np.float64}
SAVE_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# All dtypes that a file may contain.
ALL_DTYPES: dict[str, Any] = DTYPES | {
    "BOOL": np.bool_,
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
}


class TensorEntry(NamedTuple):
    """A tensor's entry in a file's header."""

    file: str
    shape: tuple[int, ...]
    dtype: str


# Reading


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file; raise an error if it is incomplete."""
    with from_extra("huggingface"):
        from safetensors import SafetensorError, safe_open
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is not a complete safetensors file",
            f"{path.stat().st_size:,} bytes; safetensors reports: {error}",
            rule="a file consists of its header and exactly the bytes that the header lists",
            hint="it is truncated or damaged: copy or download it again",
        ) from None


class SafetensorsCheckpoint:
    """A folder's config.json and tensors; a context manager that closes the files.

    Attributes:
      folder: its path.
      settings: the contents of config.json.
      entries: each tensor's file, shape and dtype.
    """

    def __init__(self, folder: str | Path, *, needs_tensors: bool = True):
        self.folder = Path(folder)
        _check_folder(self.folder)
        if needs_tensors:
            _check_tensors(self.folder)
        self.settings = read_json(self.folder / CONFIG)
        self._open = ExitStack()
        try:
            present = [name for name in _files(self.folder) if (self.folder / name).is_file()]
            self._files = {name: self._open_file(name) for name in present}
            self.entries = dict(self._entries())
        except BaseException:
            self._open.close()
            raise

    def read(self, name: str, where: tuple[slice, ...]) -> np.ndarray:
        """Read a slice of a tensor, and nothing else."""
        return self._files[self.entries[name].file].get_slice(name)[where]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def _open_file(self, name: str) -> Any:
        return self._open.enter_context(open_safetensors(self.folder / name))

    def _entries(self) -> Iterator[tuple[str, TensorEntry]]:
        for file, handle in self._files.items():
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                stored = handle.get_slice(name)
                yield name, TensorEntry(file, tuple(stored.get_shape()), stored.get_dtype())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{path} is not JSON",
            str(error),
            hint="it is truncated or damaged: copy or download it again",
        ) from None
    if not isinstance(found, dict):
        raise ModelError(
            f"{path} contains a {type(found).__name__}",
            rule="it contains an object: names and their values",
            hint="use the file that came with the tensors",
        )
    return found


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelError(
            f"there is no folder {folder}",
            rule="a checkpoint is a folder with config.json and model.safetensors",
            hint=f"download it first: hf download {_hub_name(folder)} --local-dir {folder}",
        )
    present = sorted(p.name for p in folder.iterdir())
    if CONFIG not in present:
        raise ModelError(
            f"{folder} has no config.json",
            f"it has: {', '.join(present) or 'nothing'}",
            rule="config.json describes the tensors",
            hint="pass the folder that contains config.json and model.safetensors",
        )


def _check_tensors(folder: Path) -> None:
    """Raise an error if files of tensors are missing."""
    present = sorted(p.name for p in folder.iterdir())
    if MODEL in present or INDEX in present:
        files = _files(folder)
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise ModelError(
                f"{folder} lacks {len(missing)} of {len(files)} files of tensors: {', '.join(missing)}",
                rule=f"all files that {INDEX} lists are needed",
                hint="copy or download the missing ones",
            )
        return
    pickles = [name for name in present if Path(name).suffix in PICKLE_SUFFIXES]
    if pickles:
        raise ModelError(
            f"{folder} has its tensors only in {', '.join(pickles)}",
            rule="such files are pickles: loading one executes the code in it, so they are not loaded",
            hint="if you trust it, convert the checkpoint with PyTorch's transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)",
        )
    raise ModelError(
        f"{folder} has neither {MODEL} nor {INDEX}",
        f"it has: {', '.join(present)}",
        rule="tensors are read from safetensors files",
        hint="pass the folder that contains config.json and model.safetensors",
    )


def _files(folder: Path) -> list[str]:
    """The files that should contain a folder's tensors."""
    if (folder / MODEL).exists() or not (folder / INDEX).exists():
        return [MODEL]
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelError(
            f"{folder / INDEX} has no weight_map",
            rule="weight_map gives the file of each tensor",
            hint="use the file that came with the tensors",
        )
    return sorted(set(names.values()))


# Writing


class SafetensorsWriter:
    """A preallocated file, written tensor by tensor and slice by slice."""

    def __init__(self, path: Path, header: Mapping[str, Any], start: int):
        self._bytes = np.memmap(path, np.uint8, "r+")
        self._header, self._start = header, start

    def write(self, name: str, where: tuple[slice, ...], values: np.ndarray) -> None:
        """Write a slice of a tensor."""
        entry = self._header[name]
        dtype = ALL_DTYPES[entry["dtype"]]
        begin, end = (self._start + n for n in entry["data_offsets"])
        tensor = self._bytes[begin:end].view(dtype).reshape(entry["shape"])
        tensor[where] = values.astype(dtype)

    def flush(self) -> None:
        """Flush all writes to disk."""
        self._bytes.flush()


@contextmanager
def write_checkpoint(
    folder: Path, settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], dtype: str
) -> Iterator[SafetensorsWriter]:
    """Write a checkpoint under temporary names, and rename the files when all is written without errors.

    With several hosts, each writes its own slices of one file, on a shared disk; the first host does the
    rest.
    """
    code = SAVE_DTYPES[dtype]
    header, start = file_header({name: (code, shape) for name, shape in shapes.items()})
    partial, first = folder / ".partial", jax.process_index() == 0
    if folder.exists() and not folder.is_dir():
        raise ModelError(
            f"{folder} is a file",
            rule="a checkpoint is a folder with config.json and model.safetensors",
            hint="choose another folder; it is created if it does not exist",
        )
    try:
        check_shared_folder(folder)
        if first:
            partial.mkdir(parents=True, exist_ok=True)
            (partial / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
            create_file(partial / MODEL, header, start)
        _barrier("created")
        target = SafetensorsWriter(partial / MODEL, header, start)
        yield target
        target.flush()
        _barrier("written")
        if first:
            _publish(partial, folder)
    finally:
        if first:
            _remove(partial)
    _barrier("named")


def file_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], int]:
    """The header for tensors of these dtypes and shapes, and the offset of their bytes: a multiple of 8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, (code, shape) in tensors.items():
        end = offset + math.prod(shape) * np.dtype(ALL_DTYPES[code]).itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    length = len(json.dumps(header).encode())
    return header, 8 + length + -length % 8


def create_file(path: Path, header: Mapping[str, Any], start: int) -> None:
    """Create a file with its header, and zeros for a `SafetensorsWriter` to overwrite."""
    with path.open("wb") as file:
        text = json.dumps(header).encode()
        file.write(struct.pack("<Q", start - 8) + text.ljust(start - 8))
        file.truncate(start + _end(header))


def _end(header: Mapping[str, Any]) -> int:
    return max((entry["data_offsets"][1] for n, entry in header.items() if n != "__metadata__"), default=0)


def _publish(partial: Path, folder: Path) -> None:
    """Give the files their final names, once they are on disk."""
    for name in (MODEL, CONFIG):
        with (partial / name).open("rb+") as file:
            os.fsync(file.fileno())
    # A folder without config.json is not a checkpoint: at no time is an old config.json next to new tensors.
    (folder / CONFIG).unlink(missing_ok=True)
    os.replace(partial / MODEL, folder / MODEL)
    os.replace(partial / CONFIG, folder / CONFIG)


def _hub_name(folder: Path) -> str:
    """The likely name on the hub of a folder that does not exist: name, or owner/name."""
    return str(folder) if len(folder.parts) == 2 and not folder.is_absolute() else folder.name


def _remove(partial: Path) -> None:
    """Remove the temporary files, and the folder if it was created for them."""
    for name in (MODEL, CONFIG):
        (partial / name).unlink(missing_ok=True)
    if partial.exists():
        partial.rmdir()
        if not any(partial.parent.iterdir()):
            partial.parent.rmdir()


def _barrier(event: str) -> None:
    """Wait for the other hosts."""
    processes.barrier(processes.unique_key(f"files are {event}"))


def tensors_equal(checkpoint: SafetensorsCheckpoint, one: str, other: str, rows: int = 1024) -> bool:
    """Whether two tensors of a checkpoint are equal, compared a few rows at a time."""
    if one == other:
        return True
    shape = checkpoint.entries[one].shape
    if checkpoint.entries[other].shape != shape or not shape:
        return False
    parts: Iterable[tuple[slice, ...]] = (
        (slice(n, min(n + rows, shape[0])),) for n in range(0, shape[0], rows)
    )
    return all(np.array_equal(checkpoint.read(one, w), checkpoint.read(other, w)) for w in parts)
