"""Hugging Face checkpoints: from a folder to a `Transformer` and back.

    model = huggingface.load("gpt2", "data=2 model=4", "batch:data d_ff:model heads:model vocab:model")
    huggingface.save(model, "gpt2-tuned")

Every device's slice is read on its own and written on its own: no host ever holds more of a tensor than its
devices do, and one of them at a time.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

import weft as wf
from weft import nn
from weft.core.errors import ModelError, WeftError, nearest
from weft.core.tensor import Tensor, check_has_values
from weft.nn.module import check_initialized, is_parameter, path_name

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

# What a checkpoint has no say in: how a model is trained and computed. `load` takes these, `save` drops them.
TRAINING_FIELDS = (
    "remat unroll pipeline pipeline_micro feed_chunks loss_chunks dropout smoothing z_loss compute"
).split()
# What says nothing unless another number asks for it.
CONDITIONAL_FIELDS = (
    "longest rotary_base window expert_top capacity balance router_z lsh_chunk lsh_rounds".split()
)


def load(folder: Any, mesh: Any = None, layout: Any = None, **changes: Any) -> Transformer:
    """The model in a folder, its parameters in float32.

    Args:
      folder: holds config.json, and model.safetensors or several such files with an index.
      mesh: where the parameters are to be; by default nowhere, one device.
      layout: how they are stored (its `params=` rules included).
      changes: numbers of the `Config` that are no part of a checkpoint: `compute="bfloat16"`, `dropout=0.1`.
    """
    with _asked(f"huggingface.load({str(folder)!r})"):
        _check_changes(changes)
        wf.Layout.of(layout).check(wf.Mesh.of(mesh))
        with SafetensorsCheckpoint(folder) as checkpoint:
            family, config, names = _understood(checkpoint)
            model = Transformer(config.replace(**changes))
            rows = _rows(family, model)
            _check_tensors(checkpoint, family, model, rows, names)
            return _read(checkpoint, model, rows, names, mesh, layout)


def save(model: Transformer, folder: Any, dtype: str = "float32") -> None:
    """Write a model as config.json and model.safetensors; they appear when both are whole, or not at all.

    A tokenizer, and the numbers of its tokens, are no part of a model: copy such files from where they are.

    Args:
      model: of a family that Hugging Face has; its parameters may be placed.
      folder: where to; it is made if need be. A checkpoint that is there already is replaced.
      dtype: of the numbers in the file: "float32", "bfloat16" or "float16".
    """
    with _asked(f"huggingface.save(model, {str(folder)!r})"):
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


def config_of(folder: Any) -> Config:
    """What the model in a folder is, without its parameters.

    Args:
      folder: holds config.json. Tensors need not be there; if they are, they decide whether the last layer
        is tied.
    """
    with (
        _asked(f"huggingface.config_of({str(folder)!r})"),
        SafetensorsCheckpoint(folder, needs_tensors=False) as checkpoint,
    ):
        return _understood(checkpoint)[1]


@contextmanager
def _asked(what: str) -> Iterator[None]:
    """Let errors say what was asked, and on which line."""
    try:
        yield
    except WeftError as error:
        error.located(what)
        raise


def _read(
    checkpoint: SafetensorsCheckpoint,
    model: Transformer,
    rows: dict[str, Row],
    names: dict[str, str],
    mesh: Any,
    layout: Any,
) -> Transformer:
    """The model with its parameters read, each device's slice by itself."""
    if mesh is None:
        mesh, layout = wf.Mesh(), wf.Layout()
    layout = wf.Layout() if layout is None else layout

    def tensor(path: Any, parameter: Any) -> Any:
        if not is_parameter(parameter):
            return parameter
        row, dims = rows[path_name(path)], parameter.dims

        def part(where: tuple[slice, ...]) -> np.ndarray:
            values = np.empty([s.stop - s.start for s in where], np.float32)
            for piece in slices_of(row, dims, where):
                values[piece.ours] = piece.to_ours(checkpoint.read(names[piece.name], piece.stored))
            return values

        return wf.from_callback(part, dims, mesh, layout, np.float32, role="param")

    return jax.tree_util.tree_map_with_path(tensor, model, is_leaf=is_parameter)


def _write(parameter: Tensor, row: Row, family: Family, target: SafetensorsWriter) -> None:
    """Write this host's slices, each once and without its padding."""
    for shard in parameter.storage.addressable_shards:
        if shard.replica_id:
            continue
        values = np.asarray(shard.data)
        starts = [s.start or 0 for s in shard.index]
        true = zip(starts, values.shape, parameter.dims, strict=True)
        where = tuple(slice(min(a, d.size), min(a + n, d.size)) for a, n, d in true)
        for piece in slices_of(row, parameter.dims, where):
            target.write(family.stored(piece.name), piece.stored, piece.to_stored(values[piece.ours]))


# What a checkpoint is


def _understood(checkpoint: SafetensorsCheckpoint) -> tuple[Family, Config, dict[str, str]]:
    """A checkpoint's family, its numbers, and by tensor name of the family the name in the file."""
    kind = checkpoint.settings.get("model_type")
    if kind not in FAMILIES:
        raise ModelError(
            f"{checkpoint.folder} holds a model of type {kind!r}{nearest(str(kind), FAMILIES)}",
            rule=f"known types: {', '.join(FAMILIES)}",
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
    # As transformers does: a last layer that is stored and differs from the embedding is not tied to it.
    embedding = next(iter(family.aliases))
    if config.tied and LM_HEAD in names and embedding in names:
        config = config.replace(tied=tensors_equal(checkpoint, names[LM_HEAD], names[embedding]))
    return family, config, names


def _rows(family: Family, model: Transformer) -> dict[str, Row]:
    """By parameter of the model, its row."""
    rows = {row.ours: row for row in family.rows(model.config)}
    parameters = nn.parameters(model)
    missing = [name for name in parameters if name not in rows]
    assert not missing, f"{family.name} has no rows for {missing}"
    return {name: rows[name] for name in parameters}


def _family_of(config: Config) -> Family:
    """The family that can say all that a config says."""
    wrong = []
    for family in FAMILIES.values():
        said = family.config(family.settings(config))
        differ = [f"{k}={v!r}" for k, v in _essence(config).items() if v != _essence(said)[k]]
        if not differ:
            return family
        wrong.append(f"{family.name} models don't have {', '.join(differ)}")
    raise ModelError(
        f"this model is none of {', '.join(FAMILIES)}",
        *wrong,
        rule="a saved model computes the same in PyTorch's transformers",
        hint="start from a preset such as t5-small, gpt2 or llama-3-8b",
    )


def _essence(config: Config) -> dict[str, Any]:
    """What makes a model what it is, with defaults filled in."""
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
    """An error that lists all that is missing, of another shape or type, or not expected."""
    parameters = nn.parameters(model)
    expected = {
        n: s for ours, row in rows.items() for n, s in stored_shapes(row, parameters[ours].dims).items()
    }
    found = {n: checkpoint.entries[name] for n, name in names.items()}
    wrong = [f"missing      {family.stored(n)} {list(s)}" for n, s in expected.items() if n not in found]
    for name, shape in expected.items():
        one = found.get(name)
        if one is not None and one.shape != shape:
            wrong.append(f"other shape  {names[name]} {list(one.shape)} instead of {list(shape)}")
        if one is not None and one.dtype not in DTYPES:
            wrong.append(f"other type   {names[name]} {one.dtype} instead of {', '.join(DTYPES)}")
    known = {names[n] for n in expected if n in names}
    harmless = re.compile(family.ignored)
    for name in sorted(set(checkpoint.entries) - known):
        short = name.removeprefix(family.prefix)
        tied = short == LM_HEAD and model.config.tied
        if not tied and not harmless.fullmatch(short):
            wrong.append(f"unexpected   {name} {list(checkpoint.entries[name].shape)}")
    if wrong:
        raise ModelError(
            f"the tensors in {checkpoint.folder} are not those of its config.json",
            *wrong,
            rule=f"a {family.name} model has exactly the tensors that its config.json describes",
            hint="the two files may be of different models; nothing was loaded",
        )


def _check_changes(changes: dict[str, Any]) -> None:
    wrong = sorted(set(changes) - set(TRAINING_FIELDS))
    if wrong:
        raise ModelError(
            f"{', '.join(name + nearest(name, TRAINING_FIELDS) for name in wrong)} can't be changed",
            rule="a checkpoint says what its model is; how it is trained and computed is open",
            hint=f"open are {', '.join(TRAINING_FIELDS)}",
        )


def _check_dtype(dtype: str) -> None:
    if dtype not in SAVE_DTYPES:
        raise ModelError(
            f"{dtype!r} is no type to save in{nearest(str(dtype), SAVE_DTYPES)}",
            rule=f"a checkpoint's numbers are {', '.join(SAVE_DTYPES)}",
            hint='leave it out for float32; dtype="bfloat16" takes half the room',
        )


def _check_values(parameters: dict[str, Tensor]) -> None:
    check_initialized(parameters, rule="files hold values")
    check_has_values(*parameters.values())
