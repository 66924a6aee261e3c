"""How a run learns: one model, or replicas that meet every so many steps. The loop treats both alike."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import weft as wf
from weft.core.layout import ROLES, Layout
from weft.core.mesh import Mesh

from ..optim.ema import with_ema_params
from .config import TrainConfig, build_optimizer
from .diloco import DiLoCo
from .step import TrainStep, train_step


@dataclass(frozen=True)
class Trainer:
    """One model, by one step after the other."""

    step: TrainStep
    mesh: Mesh
    layout: Layout

    @functools.cached_property
    def program(self) -> wf.Program:
        """The step, staged."""
        return wf.spmd(self.step, self.mesh, self.layout, donate=(0, 1))

    @property
    def whole_layout(self) -> Layout:
        """The layout for the whole model."""
        return self.layout

    def init(self, model: Any) -> tuple[Any, Any]:
        """The model as it is trained, and the state to begin with. Those of specs are specs."""
        return model, self.step.init(model)

    def learn(self, number: int, model: Any, state: Any, batch: Any, key: Any) -> tuple[Any, Any, Any]:
        """Step number n, from 1 on: its metrics, and the model and state after it."""
        return self.program(model, state, batch, key)

    def whole(self, model: Any, state: Any) -> Any:
        """The model to evaluate or to use: the average, if there is one."""
        return model if self.step.average is None else with_ema_params(model, state["average"])

    def plans(self, model: Any, batch: Any, key: Any) -> dict[str, wf.Plan]:
        """What is done, and what it costs, by how often; the step comes first."""
        return {"a step": self.program.plan(*self.init(model), batch, key)}


@dataclass(frozen=True)
class DiLoCoTrainer(Trainer):
    """Replicas of a model, along the dim `replicas`, that meet every so many steps."""

    diloco: DiLoCo

    @functools.cached_property
    def program(self) -> wf.Program:
        return wf.spmd(self.diloco.step, self.mesh, self.layout, donate=(0, 1))

    @functools.cached_property
    def meeting(self) -> wf.Program:
        """The outer step, staged."""
        return wf.spmd(self.diloco.outer, self.mesh, self.layout, donate=(0, 1))

    @property
    def whole_layout(self) -> Layout:
        rules = [self.layout.rules_for(role) for role in ROLES]
        value, param, state = ({d: axes for d, axes in one.items() if d != "replicas"} for one in rules)
        return Layout(value, params=param, optimizer=state)

    def init(self, model: Any) -> tuple[Any, Any]:
        return self.diloco.init(model)

    def learn(self, number: int, model: Any, state: Any, batch: Any, key: Any) -> tuple[Any, Any, Any]:
        metrics, model, state = self.program(model, state, batch, key)
        if self.diloco.due(number):
            model, state = self.meeting(model, state)
        return self.diloco.reported(metrics), model, state

    def whole(self, model: Any, state: Any) -> Any:
        return self.diloco.merged(model, state)

    def plans(self, model: Any, batch: Any, key: Any) -> dict[str, wf.Plan]:
        given = self.init(model)
        outer = f"every {self.diloco.every} steps"
        return {"a step": self.program.plan(*given, batch, key), outer: self.meeting.plan(*given)}


def build_trainer(config: TrainConfig, mesh: Mesh, layout: Layout) -> Trainer:
    """What the settings say."""
    o, d = config.optimizer, config.diloco
    step = train_step(
        build_optimizer(config),
        clip=o.clip or None,
        micro=o.micro,
        average=o.average or None,
        skip_nonfinite=config.on_nan == "skip",
        norm=True,  # a gradient may be NaN where the loss is not, and its step is not to be saved
    )
    if not d.replicas:
        return Trainer(step, mesh, layout)
    diloco = DiLoCo(step, d.replicas, d.every, outer_rate=d.rate, outer_momentum=d.momentum)
    return DiLoCoTrainer(step, mesh, layout, diloco)
