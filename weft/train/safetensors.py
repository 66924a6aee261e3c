"""Checkpoints and safetensors files: a model's tensors by name, with their dims in the file's metadata.

    export(stored("runs/first"), "model.safetensors")
    imported("model.safetensors", "runs/second", step=0)

Other programs read such a file as they read any; only the dims are ours, under `weft.dims`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from weft.core.atomic_file import atomic_write
from weft.core.dims import Dim
from weft.core.errors import ModelError, WeftError, nearest
from weft.core.tensor import Tensor
from weft.models.huggingface.files import (
    ALL_DTYPES,
    SafetensorsWriter,
    create_file,
    file_header,
    open_safetensors,
)

from ..checkpoint.arrays import checkpoint_leaves, is_key
from ..checkpoint.arrays import manifest_entries as entries_of
from ..checkpoint.inspect import StoredCheckpoint
from ..checkpoint.manager import CheckpointManager
from ..checkpoint.manifest import CHECKPOINTS_FOLDER, list_step_folders
from .load import load_config, load_run
from .run_folder import CONFIG_FILE

MODEL_PREFIX, DIMS_KEY = "model.", "weft.dims"
DTYPE_CODES = {np.dtype(dtype).name: code for code, dtype in ALL_DTYPES.items()}
METADATA_HINT = (
    "a file that weft checkpoint export wrote has them; those of Hugging Face go through huggingface.load"
)


def export_safetensors(checkpoint: StoredCheckpoint, file: Any) -> int:
    """Write a model's tensors to a file, which appears when it is whole; how many there are.

    Of a run it is the model that is evaluated and used: the running mean, or what replicas agreed on."""
    path = Path(file)
    used = _made_of_state(checkpoint)
    found = checkpoint.entries if used is None else entries_of(used)
    entries = {n.removeprefix(MODEL_PREFIX): e for n, e in found.items() if n.startswith(MODEL_PREFIX)}
    odd = [f"{name} {e}" for name, e in entries.items() if is_key(e) or e.dtype not in DTYPE_CODES]
    if not entries or odd:
        raise ModelError(
            f"{len(odd)} of {len(entries)} tensors of {checkpoint.path} can't be in a safetensors file",
            *odd,
            rule=f"a model has tensors, of these types: {', '.join(DTYPE_CODES)}",
            hint="keep keys and such in the optimizer's state, which is not exported",
        )
    # Large elements first: then each begins at a multiple of its size.
    order = sorted(entries, key=lambda name: -np.dtype(entries[name].dtype).itemsize)
    said = {
        DIMS_KEY: json.dumps({name: entries[name].dims for name in order}),
        "weft.step": str(checkpoint.step),
    }
    header, start = file_header({n: (DTYPE_CODES[entries[n].dtype], entries[n].shape) for n in order}, said)
    with atomic_write(path) as draft:
        create_file(draft, header, start)
        target = SafetensorsWriter(draft, header, start)
        names = {MODEL_PREFIX + name: None for name in order}
        arrays = checkpoint.arrays(names) if used is None else ((n, _on_host(used[n])) for n in names)
        for name, array in arrays:
            if array.size:
                target.write(name.removeprefix(MODEL_PREFIX), tuple(slice(n) for n in array.shape), array)
        target.flush()
    return len(order)


def _made_of_state(checkpoint: StoredCheckpoint) -> dict[str, Any] | None:
    """The tensors of a run's model where it is not the one that is stored, but made of that and the state."""
    inner = checkpoint.path.absolute().parent
    folder = inner.parent
    of_run = inner.name == CHECKPOINTS_FOLDER and (folder / CONFIG_FILE).is_file()
    if not of_run or "imported" in checkpoint.extra:
        return None
    config = load_config(folder)
    if not (config.optimizer.average or config.diloco.replicas):
        return None
    return checkpoint_leaves(load_run(folder, checkpoint.step, mesh="").model, None)


def _on_host(leaf: Any) -> np.ndarray:
    return leaf.numpy() if isinstance(leaf, Tensor) else np.asarray(leaf)


def import_safetensors(file: Any, folder: Any, step: int) -> int:
    """Make a checkpoint of a file that `export` wrote, without optimizer state; how many tensors it has."""
    path = Path(file)
    if step in list_step_folders(Path(folder)):
        raise ModelError(
            f"there is a checkpoint of step {step} in {folder} already",
            rule="an import replaces nothing",
            hint="take another step or another folder",
        )
    model = _read(path)
    # keep: nothing that is there goes.
    CheckpointManager(folder, keep=10**9).save(step, model, {}, {"imported": path.name}, wait=True)
    return len(model)


def _read(path: Path) -> dict[str, Any]:
    """The tensors of a file by name."""
    if not path.is_file():
        others = [p.name for p in path.parent.glob("*.safetensors")] if path.parent.is_dir() else []
        raise ModelError(
            f"there is no file {path}{nearest(path.name, others)}",
            rule="a model is imported from one safetensors file",
            hint="weft checkpoint export writes one",
        )
    with open_safetensors(path) as file:
        metadata, arrays = file.metadata() or {}, {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    dims = _dims(path, metadata, arrays)
    return {name: _tensor(array, dims[name]) for name, array in arrays.items()}


def _dims(path: Path, metadata: dict[str, str], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    rule = f"the metadata's {DIMS_KEY} holds a JSON object with the names of each tensor's dims"
    try:
        dims = json.loads(metadata.get(DIMS_KEY, "{}"))
    except ValueError as error:
        raise ModelError(
            f"{DIMS_KEY} in {path} is not JSON", str(error), rule=rule, hint=METADATA_HINT
        ) from None
    dims = dims if isinstance(dims, dict) else {}
    missing = [name for name in arrays if name not in dims]
    wrong = [
        f"{name}: {dims[name]!r} for the shape {array.shape}"
        for name, array in arrays.items()
        if name in dims and not _fit(dims[name], array.shape)
    ]
    if missing or wrong or not arrays:
        parts = [f"the dims of {len(missing)} of {len(arrays)} tensors are missing"] if missing else []
        parts += [f"the dims of {len(wrong)} tensors don't fit"] if wrong else []
        shown = [f"missing: {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}"] if missing else []
        raise ModelError(
            f"{path}: {'; '.join(parts) or 'no tensors'}", *shown, *wrong, rule=rule, hint=METADATA_HINT
        )
    return dims


def _fit(names: Any, shape: tuple[int, ...]) -> bool:
    """Whether these are names of dims for a shape; None is a raw array."""
    if names is None:
        return True
    if not isinstance(names, list) or len(names) != len(shape):
        return False
    try:
        dims = [Dim(name, size) for name, size in zip(names, shape, strict=True)]
    except (WeftError, TypeError):
        return False
    return len({d.name for d in dims}) == len(dims)


def _tensor(array: np.ndarray, names: list[str] | None) -> Any:
    if names is None:
        return array
    dims = tuple(Dim(name, size) for name, size in zip(names, array.shape, strict=True))
    return Tensor(array, dims, role="param")
