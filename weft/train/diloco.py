"""DiLoCo: replicas that train independently and synchronize every few steps (Douillard et al., 2023).

    diloco = train.DiLoCo(optim.AdamW(4e-4), replicas=4, every=500)
    model, state = diloco.init(model)
    step = wf.spmd(diloco.step, mesh, layout, donate=(0, 1))  # with replicas:pod, no traffic between pods
    outer = wf.spmd(diloco.outer, mesh, layout, donate=(0, 1))
    for number, batch in enumerate(batches, 1):
        metrics, model, state = step(model, state, batch, key)
        if diloco.due(number):
            model, state = outer(model, state)

Every parameter, and its inner optimizer state, has an additional dim `replicas`. Each replica takes inner
steps on its own rows. After every `every` steps an outer step compares the mean of the replicas with the
*outer* parameters, from which they started: the difference is the gradient of one step of Nesterov momentum,
and all replicas restart from its result. They keep their inner state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

import weft as wf
from weft.core.errors import ProgramError
from weft.core.op import call_in_program
from weft.core.role_layout import allow_unused_rules
from weft.core.tensor import Tensor, is_tensor
from weft.core.types import PyTree
from weft.ops.optax import OptaxOptimizer

from ..core.field_types import NonNegative, PositiveInt, Share
from ..core.fields import documented, validate
from ..optim.ema import init_ema, with_ema_params
from ..optim.named_tree import any_specs, error_context, named_tensors, replace_tensors
from ..optim.optimizers import Momentum
from .microbatch import distribute_rows
from .step import TrainStep

# How the metrics of the replicas are combined.
METRIC_REDUCTIONS = {"loss": wf.mean, "grad_norm": wf.mean, "tokens": wf.sum, "finite": wf.all}


@documented
@dataclass(frozen=True)
class DiLoCo:
    """Inner steps of each replica, and outer steps of all replicas together."""

    inner: Any
    """The optimizer of the inner steps, or a `train_step` with further options."""
    replicas: PositiveInt
    """The number of replicas."""
    every: PositiveInt
    """The number of inner steps before each outer step."""
    outer_rate: NonNegative = 0.7
    """The learning rate of the outer steps."""
    outer_momentum: Share = 0.9
    """The Nesterov momentum of the outer steps."""

    def __post_init__(self) -> None:
        validate(self, hint="for example DiLoCo(AdamW(4e-4), replicas=4, every=500)")
        if not isinstance(self.inner, TrainStep):
            object.__setattr__(self, "inner", TrainStep(self.inner))
        if isinstance(self.inner.optimizer, OptaxOptimizer):
            raise ProgramError(
                "the inner optimizer of DiLoCo is an optax transformation",
                rule="replicas update slices inside the program; optax runs after it, on global arrays",
                hint="use an optimizer of weft.optim, for example optim.AdamW(4e-4)",
            ).located("DiLoCo")

    @property
    def dim(self) -> wf.Dim:
        """The dim of the replicas."""
        return wf.Dim("replicas", self.replicas)

    def init(self, model: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """The model with all replicas, and the initial state. Specs give specs."""
        with error_context("DiLoCo.init(model)"):
            inner, outer = self.inner.init(model), init_ema(model)
            state = {"inner": inner, "outer": outer, "momentum": self._momentum().init(outer)}
            if any_specs(named_tensors(model)):
                add = lambda t: wf.spec((self.dim, *t.dims), t.dtype, role=t.role)  # noqa: E731
                model, state["inner"] = jax.tree.map(add, (model, inner), is_leaf=is_tensor)
            else:
                model, state["inner"] = call_in_program(_replicate, self, (model, inner))
            return model, state

    def step(
        self, model: PyTree, state: PyTree, batch: PyTree, key: jax.Array | None
    ) -> tuple[dict[str, Tensor], PyTree, PyTree]:
        """An inner step of every replica, like `train_step`; the metrics have the dim `replicas`.

        The rows of the batch are distributed to the replicas round-robin, and each has its own dropout key.
        """
        with error_context("DiLoCo.step(model, state, batch, key)"):
            return call_in_program(_step, self, model, state, batch, key)

    def outer(self, model: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """An outer step: one all-reduce of each parameter over the replicas."""
        with error_context("DiLoCo.outer(model, state)"):
            return call_in_program(_outer, self, model, state)

    def due(self, steps: int) -> bool:
        """Whether an outer step follows after this number of inner steps."""
        return steps % self.every == 0

    def reduce_metrics(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """The metrics of a step without the dim: the mean of losses and norms, and the sum of tokens."""
        return {name: METRIC_REDUCTIONS[name](t, self.dim) for name, t in metrics.items()}

    def merged(self, model: PyTree, state: PyTree) -> PyTree:
        """A model without the dim: the outer parameters, to evaluate or to save."""
        return with_ema_params(model, state["outer"])

    def _momentum(self) -> Momentum:
        return Momentum(self.outer_rate, momentum=self.outer_momentum, nesterov=True)


def _replicate(diloco: DiLoCo, tree: PyTree) -> PyTree:
    def add_dim(t: PyTree) -> PyTree:
        return wf.store(wf.broadcast_to(t, (diloco.dim, *t.dims)), t.role) if isinstance(t, Tensor) else t

    with wf.under_layout("value", "replicas"):
        return jax.tree.map(add_dim, tree, is_leaf=is_tensor)


def _step(
    diloco: DiLoCo, model: PyTree, state: PyTree, batch: PyTree, key: jax.Array | None
) -> tuple[dict[str, Tensor], PyTree, PyTree]:
    def inner_step(model: PyTree, state: PyTree, rows: PyTree, index: Tensor) -> PyTree:
        own_key = None if key is None else jax.random.fold_in(key, index.array)
        return diloco.inner(model, state, rows, own_key)

    rows, indices = distribute_rows(batch, diloco.dim), wf.arange(diloco.dim)
    metrics, model, inner = wf.vmap(inner_step, diloco.dim)(model, state["inner"], rows, indices)
    return metrics, model, state | {"inner": inner}


def _outer(diloco: DiLoCo, model: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
    allow_unused_rules()  # it has no rows, and shares its layout with the inner steps
    outer_params, outer_grads, new_params = state["outer"], {}, {}
    for name, p in named_tensors(model).items():
        with wf.under_layout("optimizer", name):
            old, new = wf.store(outer_params[name], "optimizer"), wf.store(p, "optimizer")
            difference = old - wf.mean(new.astype(old.dtype), diloco.dim)
            outer_grads[name] = wf.store(difference, "optimizer")
    outer, momentum = diloco._momentum().update(outer_grads, state["momentum"], outer_params)
    for name, p in named_tensors(model).items():
        with wf.under_layout("optimizer", name):
            new = wf.store(outer[name], "optimizer").astype(p.dtype)
            new_params[name] = wf.store(wf.broadcast_to(new, p.dims), p.role)
    return replace_tensors(model, new_params), state | {"outer": outer, "momentum": momentum}
