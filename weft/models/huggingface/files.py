"""Folders of safetensors files: tensors read slice by slice, and written slice by slice.

A file is the length of a header, the header (JSON: each tensor's type, shape and place) and the tensors'
bytes. Nothing in it is code. A folder holds one file, `model.safetensors`, or several and an index that says
which tensor is where. Reading goes through the safetensors library, which maps files into memory; writing is
done here, since the library wants all tensors at once.
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
from safetensors import SafetensorError, safe_open

from weft.core.errors import ModelError
from weft.distributed import processes
from weft.distributed.shared_folder import check_shared_folder

MODEL, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}

# The types that are read and written; all become float32 here.
DTYPES: dict[str, Any] = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16, "F64": np.float64}
SAVE_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# All that a file may hold.
ALL_DTYPES: dict[str, Any] = DTYPES | {
    "BOOL": np.bool_,
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
}


class TensorEntry(NamedTuple):
    """What a file's header says of a tensor."""

    file: str
    shape: tuple[int, ...]
    dtype: str


# Reading


def open_safetensors(path: Path) -> Any:
    """A safetensors file, to be read and closed; an error if it is not whole."""
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is not a whole safetensors file",
            f"{path.stat().st_size:,} bytes; safetensors says: {error}",
            rule="a file is its header and exactly the bytes that the header lists",
            hint="it was cut short or damaged: copy or download it again",
        ) from None


class SafetensorsCheckpoint:
    """A folder's config.json and tensors; a context that closes the files.

    Attributes:
      folder: where it is.
      settings: what config.json says.
      entries: each tensor's file, shape and type.
    """

    def __init__(self, folder: Any, *, needs_tensors: bool = True):
        self.folder = Path(folder)
        _check_folder(self.folder)
        if needs_tensors:
            _check_tensors(self.folder)
        self.settings = read_json(self.folder / CONFIG)
        self._open = ExitStack()
        try:
            there = [name for name in _files(self.folder) if (self.folder / name).is_file()]
            self._files = {name: self._opened(name) for name in there}
            self.entries = dict(self._entries())
        except BaseException:
            self._open.close()
            raise

    def read(self, name: str, where: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor; nothing else is read."""
        return self._files[self.entries[name].file].get_slice(name)[where]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def _opened(self, name: str) -> Any:
        return self._open.enter_context(open_safetensors(self.folder / name))

    def _entries(self) -> Iterator[tuple[str, TensorEntry]]:
        for file, opened in self._files.items():
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                one = opened.get_slice(name)
                yield name, TensorEntry(file, tuple(one.get_shape()), one.get_dtype())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{path} is not JSON",
            str(error),
            hint="it was cut short or damaged: copy or download it again",
        ) from None
    if not isinstance(found, dict):
        raise ModelError(
            f"{path} holds a {type(found).__name__}",
            rule="it holds an object: names and their values",
            hint="take the file that came with the tensors",
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
            rule="config.json says what the tensors are",
            hint="give the folder that holds config.json and model.safetensors",
        )


def _check_tensors(folder: Path) -> None:
    """An error if not all files of tensors are there."""
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
            f"{folder} has its tensors in {', '.join(pickles)} alone",
            rule="such files are pickles: reading one runs the code that is in it, so none is read",
            hint="write the checkpoint anew with PyTorch's transformers, where you trust it: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)",
        )
    raise ModelError(
        f"{folder} has neither {MODEL} nor {INDEX}",
        f"it has: {', '.join(present)}",
        rule="tensors are read from safetensors files",
        hint="give the folder that holds config.json and model.safetensors",
    )


def _files(folder: Path) -> list[str]:
    """The files of a folder's tensors, there or not."""
    if (folder / MODEL).exists() or not (folder / INDEX).exists():
        return [MODEL]
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelError(
            f"{folder / INDEX} has no weight_map",
            rule="it says which file each tensor is in",
            hint="take the file that came with the tensors",
        )
    return sorted(set(names.values()))


# Writing


class SafetensorsWriter:
    """A file to be filled, tensor by tensor and part by part."""

    def __init__(self, path: Path, header: Mapping[str, Any], start: int):
        self._bytes = np.memmap(path, np.uint8, "r+")
        self._header, self._start = header, start

    def write(self, name: str, where: tuple[slice, ...], values: np.ndarray) -> None:
        """Put a part of a tensor where it belongs."""
        one = self._header[name]
        dtype = ALL_DTYPES[one["dtype"]]
        begin, end = (self._start + n for n in one["data_offsets"])
        whole = self._bytes[begin:end].view(dtype).reshape(one["shape"])
        whole[where] = values.astype(dtype)

    def flush(self) -> None:
        """Have all that was written on the disk."""
        self._bytes.flush()


@contextmanager
def write_checkpoint(
    folder: Path, settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], dtype: str
) -> Iterator[SafetensorsWriter]:
    """A checkpoint under temporary names, which get their true ones when all is written and no error came.

    With several hosts each writes its own parts of one file, on a disk that all see; the first host does the
    rest.
    """
    code = SAVE_DTYPES[dtype]
    header, start = file_header({name: (code, shape) for name, shape in shapes.items()})
    partial, first = folder / ".partial", jax.process_index() == 0
    if folder.exists() and not folder.is_dir():
        raise ModelError(
            f"{folder} is a file",
            rule="a checkpoint is a folder with config.json and model.safetensors",
            hint="name another folder; it is made if need be",
        )
    try:
        check_shared_folder(folder)
        if first:
            partial.mkdir(parents=True, exist_ok=True)
            (partial / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
            create_file(partial / MODEL, header, start)
        _meet("created")
        target = SafetensorsWriter(partial / MODEL, header, start)
        yield target
        target.flush()
        _meet("written")
        if first:
            _keep(partial, folder)
    finally:
        if first:
            _remove(partial)
    _meet("named")


def file_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], int]:
    """The header for tensors of these types and shapes, and where the bytes begin: a multiple of 8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    place = 0
    for name, (code, shape) in tensors.items():
        end = place + math.prod(shape) * np.dtype(ALL_DTYPES[code]).itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [place, end]}
        place = end
    length = len(json.dumps(header).encode())
    return header, 8 + length + -length % 8


def create_file(path: Path, header: Mapping[str, Any], start: int) -> None:
    """A file with its header, and zeros for a `SafetensorsWriter` to fill."""
    with path.open("wb") as file:
        text = json.dumps(header).encode()
        file.write(struct.pack("<Q", start - 8) + text.ljust(start - 8))
        file.truncate(start + _end(header))


def _end(header: Mapping[str, Any]) -> int:
    return max((one["data_offsets"][1] for n, one in header.items() if n != "__metadata__"), default=0)


def _keep(partial: Path, folder: Path) -> None:
    """Give the files their true names, once they are on the disk."""
    for name in (MODEL, CONFIG):
        with (partial / name).open("rb+") as file:
            os.fsync(file.fileno())
    # A folder without config.json is no checkpoint: at no time is there an old one with new tensors.
    (folder / CONFIG).unlink(missing_ok=True)
    os.replace(partial / MODEL, folder / MODEL)
    os.replace(partial / CONFIG, folder / CONFIG)


def _hub_name(folder: Path) -> str:
    """What a folder that is not there may be called on the hub: name, or owner/name."""
    return str(folder) if len(folder.parts) == 2 and not folder.is_absolute() else folder.name


def _remove(partial: Path) -> None:
    """Leave nothing behind, and no folder that was made for it."""
    for name in (MODEL, CONFIG):
        (partial / name).unlink(missing_ok=True)
    if partial.exists():
        partial.rmdir()
        if not any(partial.parent.iterdir()):
            partial.parent.rmdir()


def _meet(what: str) -> None:
    """Wait for the other hosts."""
    processes.barrier(processes.unique_key(f"files are {what}"))


def tensors_equal(checkpoint: SafetensorsCheckpoint, one: str, other: str, rows: int = 1024) -> bool:
    """Whether two tensors of a checkpoint are equal, compared some rows at a time."""
    if one == other:
        return True
    shape = checkpoint.entries[one].shape
    if checkpoint.entries[other].shape != shape or not shape:
        return False
    parts: Iterable[tuple[slice, ...]] = (
        (slice(n, min(n + rows, shape[0])),) for n in range(0, shape[0], rows)
    )
    return all(np.array_equal(checkpoint.read(one, w), checkpoint.read(other, w)) for w in parts)
