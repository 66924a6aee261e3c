"""The trainer: one model, or DiLoCo replicas that synchronize every few steps, behind one interface."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax

import weft as wf
from weft.core.layout import ROLES, Layout, Placement
from weft.core.tensor import Tensor
from weft.core.types import PyTree

from ..optim.ema import with_ema_params
from .config import TrainConfig
from .diloco import DiLoCo
from .optimizer_setup import build_optimizer
from .step import TrainStep, train_step

Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class Trainer:
    """Trains one model, step by step."""

    step: TrainStep
    placement: Placement

    @functools.cached_property
    def program(self) -> wf.Program:
        """The staged step."""
        return self._stage(self.step)

    def _stage(self, fn: Callable[..., PyTree]) -> wf.Program:
        """A program that replaces the model and the state."""
        return wf.spmd(fn, self.placement.mesh, self.placement.layout, donate=(0, 1))

    @property
    def eval_layout(self) -> Layout:
        """The layout of the result of `eval_model`."""
        return self.placement.layout

    def init(self, model: PyTree) -> tuple[PyTree, PyTree]:
        """The model as it is trained, and the initial optimizer state. Specs give specs."""
        return model, self.step.init(model)

    def run_step(
        self, number: int, model: PyTree, state: PyTree, batch: PyTree, key: jax.Array | None
    ) -> tuple[Metrics, PyTree, PyTree]:
        """Run a step, numbered from 1 on: its metrics, and the new model and state."""
        return self.program(model, state, batch, key)

    def eval_model(self, model: PyTree, state: PyTree) -> PyTree:
        """The model to evaluate or to use: with the EMA of its parameters, if there is one."""
        return model if self.step.average is None else with_ema_params(model, state["average"])

    def plans(self, model: PyTree, batch: PyTree, key: jax.Array | None) -> dict[str, wf.Plan]:
        """The plans of all programs, by how often they run; the step comes first."""
        return {"a step": self.program.plan(*self.init(model), batch, key)}


@dataclass(frozen=True)
class DiLoCoTrainer(Trainer):
    """Trains replicas of a model, along the dim `replicas`, that synchronize every few steps."""

    diloco: DiLoCo

    @functools.cached_property
    def program(self) -> wf.Program:
        return self._stage(self.diloco.step)

    @functools.cached_property
    def outer_program(self) -> wf.Program:
        """The staged outer step."""
        return self._stage(self.diloco.outer)

    @property
    def eval_layout(self) -> Layout:
        rules = [self.placement.layout.rules_for(role) for role in ROLES]
        value, param, state = ({d: axes for d, axes in one.items() if d != "replicas"} for one in rules)
        return Layout(value, params=param, optimizer=state)

    def init(self, model: PyTree) -> tuple[PyTree, PyTree]:
        return self.diloco.init(model)

    def run_step(
        self, number: int, model: PyTree, state: PyTree, batch: PyTree, key: jax.Array | None
    ) -> tuple[Metrics, PyTree, PyTree]:
        metrics, model, state = self.program(model, state, batch, key)
        if self.diloco.due(number):
            model, state = self.outer_program(model, state)
        return self.diloco.reduce_metrics(metrics), model, state

    def eval_model(self, model: PyTree, state: PyTree) -> PyTree:
        return self.diloco.merged(model, state)

    def plans(self, model: PyTree, batch: PyTree, key: jax.Array | None) -> dict[str, wf.Plan]:
        given = self.init(model)
        outer = f"every {self.diloco.every} steps"
        return {"a step": self.program.plan(*given, batch, key), outer: self.outer_program.plan(*given)}


def build_trainer(config: TrainConfig, placement: Placement) -> Trainer:
    """The trainer that the settings describe."""
    o, d = config.optimizer, config.diloco
    step = train_step(
        build_optimizer(config),
        clip=o.clip or None,
        micro=o.micro,
        average=o.average or None,
        skip_nonfinite=config.on_nan == "skip",
        norm=True,  # a gradient can be NaN while the loss is finite, and such a step must not be saved
    )
    if not d.replicas:
        return Trainer(step, placement)
    diloco = DiLoCo(step, d.replicas, d.every, outer_rate=d.rate, outer_momentum=d.momentum)
    return DiLoCoTrainer(step, placement, diloco)
