"""From settings to what is run: data found, tokenizer loaded or trained, mesh checked, the step staged."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

import weft as wf
from weft import data, nn
from weft.core import devices
from weft.core.errors import LayoutError, ModelError
from weft.core.layout import Layout
from weft.core.mesh import Mesh
from weft.core.placement import without_values
from weft.distributed.shared_folder import check_shared_folder
from weft.models import Transformer, preset
from weft.models.checked_layout import CheckedLayout
from weft.models.presets import batch_specs

from ..checkpoint.manifest import CHECKPOINTS_FOLDER
from ..distributed import rendezvous
from . import data_setup
from .auto_layout import AUTO, search_layout
from .config import TrainConfig, build_schedule
from .evaluate import eval_step
from .trainer import Trainer, build_trainer

RATES_PER_CHUNK = 1 << 12  # steps whose learning rates are worked out together


@dataclass(frozen=True)
class Run:
    """All that a run is made of, before its first step."""

    config: TrainConfig
    mesh: Mesh
    layout: Layout
    tokenizer: data.Tokenizer
    train: data.BatchStream
    valid: data.BatchStream | None
    model: Transformer  # declared
    learner: Trainer
    scoring: wf.Program
    rate: Callable[[int], float] = field(repr=False)  # by step, from 0 on

    @property
    def checkpoints(self) -> Path:
        return self.config.folder / CHECKPOINTS_FOLDER

    def key(self, step: int) -> Any:
        """The key of a step's dropout."""
        return jax.random.fold_in(jax.random.key(self.config.seed), step)

    def plans(self) -> dict[str, wf.Plan]:
        """What a step will do and cost, and whatever else is done every so many steps."""
        batch = jax.tree.map(without_values, self.train.step(0).batch, is_leaf=wf.is_tensor)
        return self.learner.plans(nn.specs(self.model), batch, self.key(0))


def prepare_run(config: TrainConfig) -> Run:
    """From settings to what is run: data found, tokenizer loaded or trained, mesh checked, step staged."""
    config.check()
    h = config.hosts
    rendezvous.join(h.coordinator, h.processes, h.process, wait=h.wait)
    check_shared_folder(config.folder)
    mesh = mesh_with_devices(config.layout.mesh)
    if config.layout.rules != AUTO:
        _check_rows(config, mesh, _layout(config, mesh))
        _check_dims(config, mesh)
    texts = data_setup.load_examples(config.data, held_out=False)
    held_out = data_setup.load_examples(config.data, held_out=True)
    assert texts is not None
    _check_kind(config, data_setup.is_pairs(texts))
    words = data_setup.build_tokenizer(config.data, texts, config.folder)
    if config.model.vocab == preset(config.preset).config.vocab:
        config = config.replace(model=config.model.replace(vocab=words.vocab))
    data_setup.check_vocab(words, config.model.vocab)
    if config.layout.rules == AUTO:
        example = data_setup.build_batches(config.data, texts, words, seed=config.seed).step(0).batch
        config = config.replace(layout=search_layout(config, example))
        mesh = mesh_with_devices(config.layout.mesh)
    layout = _layout(config, mesh)
    where = {"mesh": mesh, "layout": layout}
    train = data_setup.build_batches(config.data, texts, words, seed=config.seed, **where)
    valid = None
    if held_out is not None:
        valid = data_setup.build_batches(config.data, held_out, words, shuffle=False, epochs=1, **where)

    model, how = Transformer(config.model), build_trainer(config, mesh, layout)
    scoring = wf.spmd(eval_step, mesh, how.whole_layout)
    return Run(config, mesh, layout, words, train, valid, model, how, scoring, _rate(config))


def _rate(config: TrainConfig) -> Callable[[int], float]:
    """The learning rate by step, worked out for some steps at a time: there may be very many."""
    rate, some = build_schedule(config), wf.Dim("steps", RATES_PER_CHUNK)

    @functools.lru_cache(maxsize=2)
    def part(number: int) -> np.ndarray:
        found = rate(wf.arange(some) + number * RATES_PER_CHUNK).numpy()
        return np.broadcast_to(found, RATES_PER_CHUNK)  # a constant one has no dim

    return lambda step: float(part(step // RATES_PER_CHUNK)[step % RATES_PER_CHUNK])


def _layout(config: TrainConfig, mesh: Mesh) -> Layout:
    place = config.layout
    layout = Layout(place.rules, params=place.params or None, optimizer=place.optimizer or None)
    layout.check(mesh)
    return layout


def mesh_with_devices(axes: str) -> Mesh:
    """The mesh. Where JAX has only a CPU, and is not in use yet, that gets as many virtual devices."""
    mesh = Mesh(axes) if "-1" not in axes else None
    if mesh is not None and not jax.distributed.is_initialized():
        with contextlib.suppress(RuntimeError):  # never fewer: somebody may have asked for more
            if jax.config.jax_num_cpu_devices < mesh.size <= devices.MAX_CPU_DEVICES:  # type: ignore[attr-defined]
                jax.config.update("jax_num_cpu_devices", mesh.size)
    if devices.is_cpu_only():
        devices.retain_freed_memory()
    mesh = mesh or Mesh(axes)
    mesh.require_devices()
    return mesh


def _check_rows(config: TrainConfig, mesh: Mesh, layout: Layout) -> None:
    rows = wf.Dim("batch", config.data.rows)
    ways = mesh.ways(layout.splits((rows,), mesh, "value")[0])
    if rows.size < ways:
        raise LayoutError(
            f"a batch of {rows.size} rows is split {ways} ways",
            f'mesh: "{mesh}"; rules: "{config.layout.rules}"',
            rule="each device that the batch is split over has at least one row",
            hint=f"--data.rows {ways} or more, or a smaller mesh",
        )


def _check_dims(config: TrainConfig, mesh: Mesh) -> None:
    """An error for a misspelt rule now, before data are read and a tokenizer is trained."""
    place = config.layout
    layout = CheckedLayout(place.rules, params=place.params or None, optimizer=place.optimizer or None)
    if not layout.suspects:  # a trace takes seconds
        return
    how = build_trainer(config, mesh, layout)
    rows = batch_specs(config.model, config.data.rows, config.data.length)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", wf.LayoutWarning)  # the run's own program warns
        how.program.jaxpr(*how.init(nn.specs(Transformer(config.model))), rows, jax.random.key(config.seed))


def _check_kind(config: TrainConfig, pairs: bool) -> None:
    two = config.model.kind == "encoder_decoder"
    if two != pairs or config.model.kind == "encoder":
        has = "pairs of texts" if pairs else "single texts"
        raise ModelError(
            f"the model is of kind {config.model.kind.replace('_', '-')}, and the data are {has}",
            rule="an encoder-decoder learns from pairs, a decoder from single texts",
            hint="weft train translate for pairs, weft train lm for texts; or another --preset",
        )
