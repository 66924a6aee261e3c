"""Hugging Face checkpoints: from a folder to a `Transformer` and back.

    model = huggingface.load("gpt2", "data=2 model=4", "batch:data d_ff:model heads:model vocab:model")
    huggingface.save(model, "gpt2-tuned")

Every device's slice is read and written separately: a host holds one tensor at a time, and of that only the
slices of its devices.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

import weft as wf
from weft import nn
from weft.core.errors import ModelError, WeftError, nearest
from weft.core.layers import path_name
from weft.core.tensor import Tensor, check_has_values
from weft.core.types import PyTree
from weft.nn.module import check_initialized, is_parameter

from ..config import Config
from ..transformer import Transformer
from .family import LM_HEAD, Family, Row
from .files import (
    DTYPES,
    SAVE_DTYPES,
    SafetensorsCheckpoint,
    SafetensorsWriter,
    tensors_equal,
    write_checkpoint,
)
from .gpt2 import GPT2
from .llama import LLAMA
from .stored_slices import slices_of, stored_shapes
from .t5 import T5

FAMILIES = {family.name: family for family in (T5, GPT2, LLAMA)}

# Config fields that checkpoints don't store: how a model is trained and computed. `load` accepts them.
TRAINING_FIELDS = (
    "remat unroll pipeline pipeline_micro feed_chunks loss_chunks dropout smoothing z_loss compute"
).split()
# Config fields that have no effect unless another field enables them.
CONDITIONAL_FIELDS = (
    "longest rotary_base window expert_top capacity balance router_z lsh_chunk lsh_rounds".split()
)


def load(
    folder: str | Path,
    mesh: wf.Mesh | str | None = None,
    layout: wf.Layout | str | None = None,
    **changes: object,
) -> Transformer:
    """Load the model in a folder, with parameters in float32.

    Args:
      folder: contains config.json, and model.safetensors or several such files with an index.
      mesh: where to place the parameters; by default they are unplaced, on one device.
      layout: how they are stored (its `params=` rules included).
      changes: `Config` fields that are not part of a checkpoint: `compute="bfloat16"`, `dropout=0.1`.
    """
    with _error_context(f"huggingface.load({str(folder)!r})"):
        _check_changes(changes)
        wf.Layout.of(layout).check(wf.Mesh.of(mesh))
        with SafetensorsCheckpoint(folder) as checkpoint:
            family, config, names = _interpret(checkpoint)
            model = Transformer(config.replace(**changes))
            rows = _rows(family, model)
            _check_tensors(checkpoint, family, model, rows, names)
            return _read(checkpoint, model, rows, names, mesh, layout)


def save(model: Transformer, folder: str | Path, dtype: str = "float32") -> None:
    """Write a model as config.json and model.safetensors, atomically: both appear complete or not at all.

    The tokenizer and its special tokens are not part of a model: copy those files separately.

    Args:
      model: one that a Hugging Face family can represent; its parameters may be placed.
      folder: created if it does not exist. An existing checkpoint is replaced.
      dtype: the dtype of the stored tensors: "float32", "bfloat16" or "float16".
    """
    with _error_context(f"huggingface.save(model, {str(folder)!r})"):
        _check_dtype(dtype)
        family = _family_of(model.config)
        rows, parameters = _rows(family, model), nn.parameters(model)
        _check_values(parameters)
        shapes = {
            family.stored(name): shape
            for ours, row in rows.items()
            for name, shape in stored_shapes(row, parameters[ours].dims).items()
        }
        settings = family.settings(model.config) | {"dtype": dtype, "torch_dtype": dtype}
        with write_checkpoint(Path(folder), settings, shapes, dtype) as target:
            for ours, row in rows.items():
                _write(parameters[ours], row, family, target)


def config_of(folder: str | Path) -> Config:
    """The `Config` of the model in a folder, without loading its parameters.

    Args:
      folder: contains config.json. Tensor files are optional; if present, they decide whether the output
        layer is tied.
    """
    with (
        _error_context(f"huggingface.config_of({str(folder)!r})"),
        SafetensorsCheckpoint(folder, needs_tensors=False) as checkpoint,
    ):
        return _interpret(checkpoint)[1]


@contextmanager
def _error_context(call: str) -> Iterator[None]:
    """Add the failing call and the user's line to errors."""
    try:
        yield
    except WeftError as error:
        error.located(call)
        raise


def _read(
    checkpoint: SafetensorsCheckpoint,
    model: Transformer,
    rows: dict[str, Row],
    names: dict[str, str],
    mesh: wf.Mesh | str | None,
    layout: wf.Layout | str | None,
) -> Transformer:
    """The model with its parameters read, each device's slice separately."""
    if mesh is None:
        mesh, layout = wf.Mesh(), wf.Layout()
    layout = wf.Layout() if layout is None else layout

    def tensor(path: tuple[PyTree, ...], parameter: PyTree) -> PyTree:
        if not is_parameter(parameter):
            return parameter
        row, dims = rows[path_name(path)], parameter.dims

        def read_slice(where: tuple[slice, ...]) -> np.ndarray:
            values = np.empty([s.stop - s.start for s in where], np.float32)
            for part in slices_of(row, dims, where):
                values[part.ours] = part.to_ours(checkpoint.read(names[part.name], part.stored))
            return values

        return wf.from_callback(read_slice, dims, mesh, layout, np.float32, role="param")

    return jax.tree_util.tree_map_with_path(tensor, model, is_leaf=is_parameter)


def _write(parameter: Tensor, row: Row, family: Family, target: SafetensorsWriter) -> None:
    """Write this host's slices, each once and without padding."""
    for shard in parameter.storage.addressable_shards:
        if shard.replica_id:
            continue
        values = np.asarray(shard.data)
        starts = [s.start or 0 for s in shard.index]
        true = zip(starts, values.shape, parameter.dims, strict=True)
        where = tuple(slice(min(a, d.size), min(a + n, d.size)) for a, n, d in true)
        for part in slices_of(row, parameter.dims, where):
            target.write(family.stored(part.name), part.stored, part.to_stored(values[part.ours]))


# Interpreting a checkpoint


def _interpret(checkpoint: SafetensorsCheckpoint) -> tuple[Family, Config, dict[str, str]]:
    """A checkpoint's family and config, and the names in the file by the family's tensor names."""
    kind = checkpoint.settings.get("model_type")
    if kind not in FAMILIES:
        raise ModelError(
            f"{checkpoint.folder} contains a model of type {kind!r}{nearest(str(kind), FAMILIES)}",
            rule=f"supported types: {', '.join(FAMILIES)}",
            hint="choose a checkpoint of one of these; a new family is a table in weft/models/huggingface",
        )
    family = FAMILIES[kind]
    config = family.config(checkpoint.settings)
    names: dict[str, str] = {}
    for name in sorted(checkpoint.entries):
        names.setdefault(name.removeprefix(family.prefix), name)
    for name, others in family.aliases.items():
        other = next((o for o in others if o in names and (config.tied or o != LM_HEAD)), None)
        if name not in names and other is not None:
            names[name] = names[other]
    # As transformers does: an output layer that is stored and differs from the embedding is not tied to it.
    embedding = next(iter(family.aliases))
    if config.tied and LM_HEAD in names and embedding in names:
        config = config.replace(tied=tensors_equal(checkpoint, names[LM_HEAD], names[embedding]))
    return family, config, names


def _rows(family: Family, model: Transformer) -> dict[str, Row]:
    """The row of each parameter of the model, by name."""
    rows = {row.ours: row for row in family.rows(model.config)}
    parameters = nn.parameters(model)
    missing = [name for name in parameters if name not in rows]
    assert not missing, f"{family.name} has no rows for {missing}"
    return {name: rows[name] for name in parameters}


def _family_of(config: Config) -> Family:
    """The family that can represent a config."""
    wrong = []
    for family in FAMILIES.values():
        stored = family.config(family.settings(config))
        differ = [f"{k}={v!r}" for k, v in _architecture(config).items() if v != _architecture(stored)[k]]
        if not differ:
            return family
        wrong.append(f"{family.name} models can't have {', '.join(differ)}")
    raise ModelError(
        f"no family of {', '.join(FAMILIES)} can represent this model",
        *wrong,
        rule="a saved model computes the same function in PyTorch's transformers",
        hint="start from a preset such as t5-small, gpt2 or llama-3-8b",
    )


def _architecture(config: Config) -> dict[str, Any]:
    """The fields that define the function of a model, with defaults filled in."""
    depth, shared = config.decoder_layers or config.layers, config.kv_heads or config.heads
    full = dataclasses.asdict(config.replace(decoder_layers=depth, kv_heads=shared))
    return {k: v for k, v in full.items() if k not in TRAINING_FIELDS + CONDITIONAL_FIELDS}


def _check_tensors(
    checkpoint: SafetensorsCheckpoint,
    family: Family,
    model: Transformer,
    rows: dict[str, Row],
    names: dict[str, str],
) -> None:
    """Raise an error that lists all tensors that are missing, unexpected, or of a wrong shape or dtype."""
    parameters = nn.parameters(model)
    expected = {
        n: s for ours, row in rows.items() for n, s in stored_shapes(row, parameters[ours].dims).items()
    }
    found = {n: checkpoint.entries[name] for n, name in names.items()}
    wrong = [f"missing      {family.stored(n)} {list(s)}" for n, s in expected.items() if n not in found]
    for name, shape in expected.items():
        entry = found.get(name)
        if entry is not None and entry.shape != shape:
            wrong.append(f"wrong shape  {names[name]} {list(entry.shape)} instead of {list(shape)}")
        if entry is not None and entry.dtype not in DTYPES:
            wrong.append(f"wrong dtype  {names[name]} {entry.dtype} instead of {', '.join(DTYPES)}")
    known = {names[n] for n in expected if n in names}
    harmless = re.compile(family.ignored)
    for name in sorted(set(checkpoint.entries) - known):
        short = name.removeprefix(family.prefix)
        tied = short == LM_HEAD and model.config.tied
        if not tied and not harmless.fullmatch(short):
            wrong.append(f"unexpected   {name} {list(checkpoint.entries[name].shape)}")
    if wrong:
        raise ModelError(
            f"the tensors in {checkpoint.folder} do not match its config.json",
            *wrong,
            rule=f"a {family.name} model has exactly the tensors that its config.json describes",
            hint="the files may belong to different models; nothing was loaded",
        )


def _check_changes(changes: Mapping[str, object]) -> None:
    wrong = sorted(set(changes) - set(TRAINING_FIELDS))
    if wrong:
        raise ModelError(
            f"{', '.join(name + nearest(name, TRAINING_FIELDS) for name in wrong)} can't be changed",
            rule="a checkpoint defines its model; only how it is trained and computed can be changed",
            hint=f"fields that can be changed: {', '.join(TRAINING_FIELDS)}",
        )


def _check_dtype(dtype: str) -> None:
    if dtype not in SAVE_DTYPES:
        raise ModelError(
            f"{dtype!r} is not a dtype to save in{nearest(str(dtype), SAVE_DTYPES)}",
            rule=f"tensors are saved as {', '.join(SAVE_DTYPES)}",
            hint='leave it out for float32; dtype="bfloat16" takes half the space',
        )


def _check_values(parameters: dict[str, Tensor]) -> None:
    check_initialized(parameters, rule="a saved model has values")
    check_has_values(*parameters.values())
