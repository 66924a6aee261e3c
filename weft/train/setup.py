"""Prepare a run from its settings: data, tokenizer, mesh, layout and trainer."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np

import weft as wf
from weft import data, nn
from weft.core import devices
from weft.core.errors import LayoutError, ModelError
from weft.core.layout import Layout, Placement
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
from .config import TrainConfig
from .evaluate import eval_step
from .optimizer_setup import build_schedule
from .trainer import Trainer, build_trainer

RATES_PER_CHUNK = 1 << 12  # steps whose learning rates are computed together


@dataclass(frozen=True)
class Run:
    """The parts of a run, before its first step."""

    config: TrainConfig
    mesh: Mesh
    layout: Layout
    tokenizer: data.Tokenizer
    train: data.BatchStream
    valid: data.BatchStream | None
    model: Transformer  # declared, without values
    trainer: Trainer
    eval_program: wf.Program
    learning_rate: Callable[[int], float] = field(repr=False)  # by step, from 0 on

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.config.folder / CHECKPOINTS_FOLDER

    def key(self, step: int) -> jax.Array:
        """The dropout key of a step."""
        return jax.random.fold_in(jax.random.key(self.config.seed), step)

    def plans(self) -> dict[str, wf.Plan]:
        """The plans of all programs of the run, by how often they run."""
        batch = jax.tree.map(without_values, self.train.step(0).batch, is_leaf=wf.is_tensor)
        return self.trainer.plans(nn.specs(self.model), batch, self.key(0))


def prepare_run(config: TrainConfig) -> Run:
    """Check the settings, join the other processes, open the data, and build tokenizer, mesh and trainer."""
    config.check()
    h = config.hosts
    rendezvous.join(h.coordinator, h.processes, h.process, wait=h.wait)
    check_shared_folder(config.folder)
    mesh = mesh_with_devices(config.layout.mesh)
    if config.layout.rules != AUTO:
        _check_rows(config, Placement(mesh, _layout(config)))
        _check_dims(config, mesh)
    texts = data_setup.load_examples(config.data, held_out=False)
    held_out = data_setup.load_examples(config.data, held_out=True)
    assert texts is not None
    _check_kind(config, data_setup.is_pairs(texts))
    tokenizer = data_setup.build_tokenizer(config.data, texts, config.folder)
    if config.model.vocab == preset(config.preset).config.vocab:
        config = config.replace(model=config.model.replace(vocab=tokenizer.vocab))
    data_setup.check_vocab(tokenizer, config.model.vocab)
    if config.layout.rules == AUTO:
        example = data_setup.build_batches(config.data, texts, tokenizer, seed=config.seed).step(0).batch
        config = config.replace(layout=search_layout(config, example))
        mesh = mesh_with_devices(config.layout.mesh)
    layout = _layout(config)
    placement = Placement(mesh, layout)
    build = functools.partial(data_setup.build_batches, config.data, mesh=mesh, layout=layout)
    train = build(texts, tokenizer, seed=config.seed)
    valid = None
    if held_out is not None:
        valid = build(held_out, tokenizer, shuffle=False, epochs=1)

    model, trainer = Transformer(config.model), build_trainer(config, placement)
    eval_program = wf.spmd(eval_step, mesh, trainer.eval_layout)
    rates = _learning_rates(config)
    return Run(config, mesh, layout, tokenizer, train, valid, model, trainer, eval_program, rates)


def _learning_rates(config: TrainConfig) -> Callable[[int], float]:
    """The learning rate by step, computed in chunks: a call per step is slow, all at once too large."""
    schedule, dim = build_schedule(config), wf.Dim("steps", RATES_PER_CHUNK)

    @functools.lru_cache(maxsize=2)
    def chunk(number: int) -> np.ndarray:
        rates = schedule(wf.arange(dim) + number * RATES_PER_CHUNK).numpy()
        return np.broadcast_to(rates, RATES_PER_CHUNK)  # a constant schedule has no dim

    return lambda step: float(chunk(step // RATES_PER_CHUNK)[step % RATES_PER_CHUNK])


def _layout(config: TrainConfig) -> Layout:
    c = config.layout
    return Layout(c.rules, params=c.params or None, optimizer=c.optimizer or None)


def mesh_with_devices(axes: str) -> Mesh:
    """The mesh. If JAX has only a CPU and is not in use yet, it gets as many virtual devices as needed."""
    mesh = Mesh(axes) if "-1" not in axes else None
    if mesh is not None and not jax.distributed.is_initialized():
        with contextlib.suppress(RuntimeError):  # JAX is in use; and never fewer than configured
            if jax.config.jax_num_cpu_devices < mesh.size <= devices.MAX_CPU_DEVICES:  # type: ignore[attr-defined]
                jax.config.update("jax_num_cpu_devices", mesh.size)
    if devices.is_cpu_only():
        devices.retain_freed_memory()
    mesh = mesh or Mesh(axes)
    mesh.require_devices()
    return mesh


def _check_rows(config: TrainConfig, placement: Placement) -> None:
    rows = wf.Dim("batch", config.data.rows)
    ways = placement.mesh.ways(placement.splits((rows,))[0])
    if rows.size < ways:
        raise LayoutError(
            f"a batch of {rows.size} rows is split {ways} ways",
            f'mesh: "{placement.mesh}"; rules: "{config.layout.rules}"',
            rule="each device that the batch is split over needs at least one row",
            hint=f"--data.rows {ways} or more, or a smaller mesh",
        )


def _check_dims(config: TrainConfig, mesh: Mesh) -> None:
    """Report a misspelled rule now, before reading data and training a tokenizer."""
    c = config.layout
    layout = CheckedLayout(c.rules, params=c.params or None, optimizer=c.optimizer or None)
    if not layout.suspects:  # tracing takes seconds
        return
    trainer = build_trainer(config, Placement(mesh, layout))
    rows = batch_specs(config.model, config.data.rows, config.data.length)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", wf.LayoutWarning)  # the program of the run warns itself
        model, state = trainer.init(nn.specs(Transformer(config.model)))
        trainer.program.jaxpr(model, state, rows, jax.random.key(config.seed))


def _check_kind(config: TrainConfig, pairs: bool) -> None:
    needs_pairs = config.model.kind == "encoder_decoder"
    if needs_pairs != pairs or config.model.kind == "encoder":
        kind = "pairs of texts" if pairs else "single texts"
        raise ModelError(
            f"the model is of kind {config.model.kind.replace('_', '-')}, and the data are {kind}",
            rule="an encoder-decoder trains on pairs, a decoder on single texts",
            hint="weft train translate for pairs, weft train lm for texts; or another --preset",
        )
