"""DiLoCo: replicas that train by themselves and meet now and then (Douillard and others, 2023).

    diloco = train.DiLoCo(optim.AdamW(4e-4), replicas=4, every=500)
    model, state = diloco.init(model)
    step = wf.spmd(diloco.step, mesh, layout, donate=(0, 1))  # with replicas:pod nothing is sent between pods
    outer = wf.spmd(diloco.outer, mesh, layout, donate=(0, 1))
    for number, batch in enumerate(batches, 1):
        metrics, model, state = step(model, state, batch, key)
        if diloco.due(number):
            model, state = outer(model, state)

Every parameter has one more dim, `replicas`, and so has what the inner optimizer keeps of it. Each replica
takes steps of its own on rows of its own. Every so many steps their mean is compared with the *outer*
parameters, where they started from: the difference is the gradient of one step of Nesterov momentum, and its
result is where all of them start again. They keep their inner state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

import weft as wf
from weft.core import context
from weft.core.errors import ProgramError
from weft.core.tensor import Tensor, is_tensor
from weft.ops.optax import OptaxOptimizer as OverOptax

from ..core.fields import check_fields
from ..optim.ema import init_ema, with_ema_params
from ..optim.named_tree import any_specs, error_context, named_tensors, replace_tensors
from ..optim.optimizers import Momentum
from ..optim.update_layout import (
    call_in_program,
    to_optimizer_layout,
    to_stored_layout,
    under_optimizer_layout,
    update_scope,
    with_program_layout,
)
from .microbatch import deal_rows
from .step import TrainStep

# How one number is made of the replicas'.
METRIC_REDUCTIONS = {"loss": wf.mean, "grad_norm": wf.mean, "tokens": wf.sum, "finite": wf.all}


@dataclass(frozen=True)
class DiLoCo:
    """Inner steps by replicas, outer steps by all of them.

    Attributes:
      inner: the optimizer of the inner steps, or a `train_step` with what else they should do.
      replicas: how many.
      every: how many inner steps there are before each outer one.
      outer_rate, outer_momentum: of the outer steps.
    """

    inner: Any
    replicas: int
    every: int
    outer_rate: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        rules = {
            "replicas": "count",
            "every": "count",
            "outer_rate": "not negative",
            "outer_momentum": "share",
        }
        check_fields(self, rules, "DiLoCo(AdamW(4e-4), replicas=4, every=500)")
        if not isinstance(self.inner, TrainStep):
            object.__setattr__(self, "inner", TrainStep(self.inner))
        if isinstance(self.inner.optimizer, OverOptax):
            raise ProgramError(
                "the inner optimizer of DiLoCo is an optax transformation",
                rule="replicas update slices inside the program; optax runs after it, on whole arrays",
                hint="one of the package's own, for example optim.AdamW(4e-4)",
            ).located("DiLoCo")

    @property
    def dim(self) -> wf.Dim:
        """The dim that tells replicas apart."""
        return wf.Dim("replicas", self.replicas)

    def init(self, model: Any) -> tuple[Any, dict[str, Any]]:
        """The model with all replicas, and the state to begin with. Those of specs are specs."""
        with error_context("DiLoCo.init(model)"):
            inner, outer = self.inner.init(model), init_ema(model)
            state = {"inner": inner, "outer": outer, "momentum": self._momentum().init(outer)}
            if any_specs(named_tensors(model)):
                add = lambda t: wf.spec((self.dim, *t.dims), t.dtype, role=t.role)  # noqa: E731
                model, state["inner"] = jax.tree.map(add, (model, inner), is_leaf=is_tensor)
            else:
                model, state["inner"] = call_in_program(_spread, self, (model, inner))
            return model, state

    def step(self, model: Any, state: Any, batch: Any, key: Any) -> tuple[dict[str, Tensor], Any, Any]:
        """An inner step of every replica, as `train_step`; the metrics have the dim `replicas`.

        The rows of the batch are dealt out to the replicas in turn, and each has a dropout key of its own.
        """
        with error_context("DiLoCo.step(model, state, batch, key)"):
            return call_in_program(_step, self, model, state, batch, key)

    def outer(self, model: Any, state: Any) -> tuple[Any, Any]:
        """An outer step: one sum over the replicas of each parameter."""
        with error_context("DiLoCo.outer(model, state)"):
            return call_in_program(_outer, self, model, state)

    def due(self, steps: int) -> bool:
        """Whether an outer step follows, after so many inner ones."""
        return steps % self.every == 0

    def reported(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """The metrics of a step without the dim: the mean of the losses and norms, and all tokens."""
        return {name: METRIC_REDUCTIONS[name](t, self.dim) for name, t in metrics.items()}

    def merged(self, model: Any, state: Any) -> Any:
        """A model without the dim: the outer parameters, to evaluate or to save."""
        return with_ema_params(model, state["outer"])

    def _momentum(self) -> Momentum:
        return Momentum(self.outer_rate, momentum=self.outer_momentum, nesterov=True)


def _spread(diloco: DiLoCo, tree: Any) -> Any:
    def one(t: Any) -> Any:
        return (
            to_stored_layout(wf.broadcast_to(t, (diloco.dim, *t.dims)), t.role)
            if isinstance(t, Tensor)
            else t
        )

    with update_scope("replicas"):
        return jax.tree.map(one, tree, is_leaf=is_tensor)


def _step(diloco: DiLoCo, model: Any, state: Any, batch: Any, key: Any) -> tuple[Any, Any, Any]:
    def one(model: Any, state: Any, rows: Any, number: Tensor) -> Any:
        own = None if key is None else jax.random.fold_in(key, number.array)
        return diloco.inner(model, state, rows, own)

    rows, numbers = deal_rows(batch, diloco.dim), wf.arange(diloco.dim)
    metrics, model, inner = wf.vmap(one, diloco.dim)(model, state["inner"], rows, numbers)
    return metrics, model, state | {"inner": inner}


def _outer(diloco: DiLoCo, model: Any, state: Any) -> tuple[Any, Any]:
    program = context.require()
    for name in program.layout.dim_names:  # a rule for rows is for the inner steps, and no mistake here
        program.seen_dims.setdefault(name, wf.Dim(name, 1))
    start, apart, met = state["outer"], {}, {}
    for name, p in named_tensors(model).items():
        with update_scope(name):
            p, before = to_optimizer_layout(p), to_optimizer_layout(start[name])
        with under_optimizer_layout(name):
            apart[name] = before - wf.mean(p.astype(before.dtype), diloco.dim)
        apart[name] = with_program_layout(apart[name], "optimizer")
    outer, momentum = diloco._momentum().update(apart, state["momentum"], start)
    for name, p in named_tensors(model).items():
        with update_scope(name):
            new = to_optimizer_layout(outer[name])
        with under_optimizer_layout(name):
            new = wf.broadcast_to(new.astype(p.dtype), p.dims)
        with update_scope(name):
            met[name] = to_stored_layout(new, p.role)
    return replace_tensors(model, met), state | {"outer": outer, "momentum": momentum}
