"""Export and import checkpoints as safetensors files: tensors by name, with their dims in the metadata.

    export_safetensors(open_checkpoint("runs/first"), "model.safetensors")
    import_safetensors("model.safetensors", "runs/second", step=0)

Other programs can read such a file; only the metadata key `weft.dims` is Weft's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
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

from ..checkpoint.arrays import checkpoint_leaves, is_key, manifest_entries
from ..checkpoint.inspect import StoredCheckpoint
from ..checkpoint.manager import CheckpointManager
from ..checkpoint.manifest import CHECKPOINTS_FOLDER, list_step_folders
from .load import load_config, load_run
from .run_folder import CONFIG_FILE

MODEL_PREFIX, DIMS_KEY = "model.", "weft.dims"
DTYPE_CODES = {np.dtype(dtype).name: code for code, dtype in ALL_DTYPES.items()}
METADATA_HINT = "weft checkpoint export writes them; load files of Hugging Face with huggingface.load"


def export_safetensors(checkpoint: StoredCheckpoint, file: str | Path) -> int:
    """Write the tensors of a model to a file, atomically; returns their number.

    For a run this is the model that is evaluated and computed: the EMA, or DiLoCo's outer parameters."""
    path = Path(file)
    computed = _model_from_state(checkpoint)
    all_entries = checkpoint.entries if computed is None else manifest_entries(computed)
    entries = {n.removeprefix(MODEL_PREFIX): e for n, e in all_entries.items() if n.startswith(MODEL_PREFIX)}
    unsupported = [f"{name} {e}" for name, e in entries.items() if is_key(e) or e.dtype not in DTYPE_CODES]
    if not entries or unsupported:
        raise ModelError(
            f"safetensors can't store {len(unsupported)} of {len(entries)} tensors of {checkpoint.path}",
            *unsupported,
            rule=f"a model has tensors of these dtypes: {', '.join(DTYPE_CODES)}",
            hint="keep random keys in the optimizer's state, which is not exported",
        )
    # Tensors with large elements first: then each offset is a multiple of the element size.
    order = sorted(entries, key=lambda name: -np.dtype(entries[name].dtype).itemsize)
    metadata = {
        DIMS_KEY: json.dumps({name: entries[name].dims for name in order}),
        "weft.step": str(checkpoint.step),
    }
    header, start = file_header(
        {n: (DTYPE_CODES[entries[n].dtype], entries[n].shape) for n in order}, metadata
    )
    with atomic_write(path) as draft:
        create_file(draft, header, start)
        target = SafetensorsWriter(draft, header, start)
        names = {MODEL_PREFIX + name: None for name in order}
        arrays = (
            checkpoint.arrays(names) if computed is None else ((n, _to_numpy(computed[n])) for n in names)
        )
        for name, array in arrays:
            if array.size:
                target.write(name.removeprefix(MODEL_PREFIX), tuple(slice(n) for n in array.shape), array)
        target.flush()
    return len(order)


def _model_from_state(checkpoint: StoredCheckpoint) -> dict[str, Any] | None:
    """The tensors of the model to use, if it is computed from the optimizer state; None if it is stored."""
    inner = checkpoint.path.absolute().parent
    folder = inner.parent
    of_run = inner.name == CHECKPOINTS_FOLDER and (folder / CONFIG_FILE).is_file()
    if not of_run or "imported" in checkpoint.extra:
        return None
    config = load_config(folder)
    if not (config.optimizer.average or config.diloco.replicas):
        return None
    return checkpoint_leaves(load_run(folder, checkpoint.step, mesh="").model, None)


def _to_numpy(leaf: Tensor | np.ndarray | jax.Array) -> np.ndarray:
    return leaf.numpy() if isinstance(leaf, Tensor) else np.asarray(leaf)


def import_safetensors(file: str | Path, folder: str | Path, step: int) -> int:
    """Create a checkpoint, without optimizer state, from an exported file; returns the number of tensors."""
    path = Path(file)
    if step in list_step_folders(Path(folder)):
        raise ModelError(
            f"there is already a checkpoint of step {step} in {folder}",
            rule="an import replaces nothing",
            hint="use another step or another folder",
        )
    model = _read(path)
    # A large `keep`: an import removes no other checkpoint.
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
    rule = f"{DIMS_KEY} in the metadata is a JSON object with the names of each tensor's dims"
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
        if name in dims and not _are_dims_of(dims[name], array.shape)
    ]
    if missing or wrong or not arrays:
        parts = [f"the dims of {len(missing)} of {len(arrays)} tensors are missing"] if missing else []
        parts += [f"the dims of {len(wrong)} tensors don't match their shapes"] if wrong else []
        shown = [f"missing: {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}"] if missing else []
        raise ModelError(
            f"{path}: {'; '.join(parts) or 'no tensors'}", *shown, *wrong, rule=rule, hint=METADATA_HINT
        )
    return dims


def _are_dims_of(names: object, shape: tuple[int, ...]) -> bool:
    """Whether these are valid dim names for a shape; None stands for a raw array."""
    if names is None:
        return True
    if not isinstance(names, list) or len(names) != len(shape):
        return False
    try:
        dims = [Dim(name, size) for name, size in zip(names, shape, strict=True)]
    except (WeftError, TypeError):
        return False
    return len({d.name for d in dims}) == len(dims)


def _tensor(array: np.ndarray, names: list[str] | None) -> Tensor | np.ndarray:
    if names is None:
        return array
    dims = tuple(Dim(name, size) for name, size in zip(names, array.shape, strict=True))
    return Tensor(array, dims, role="param")
