"""Optimizers over named tensors: map gradients to new parameters, on slices, inside the program.

    optimizer = optim.AdamW(3e-4 * optim.LinearWarmup(1_000), weight_decay=0.1)
    state = optimizer.init(params)
    params, state = optimizer.update(optim.clip_by_global_norm(grads, 1.0), state, params)

An update is traced under the layout's rules for optimizer state, applied to all tensors. ZeRO follows from
that: a gradient's pending sum is reduce-scattered into the state's layout instead of all-reduced; a
replicated parameter is sliced locally, and its new value is all-gathered; a sharded parameter stays sharded;
means over split dims become all-reduces of the partial means.

The state is a dict: `step`, the number of updates so far, if the optimizer depends on it, and for each
quantity (such as `mean`) a dict by parameter name. State and computation use float32 (or wider) for any
parameter dtype; a parameter is rounded to its own dtype at the end.

Layers and experts are often stacked along a dim. Statistics of such a tensor, such as its root mean square,
are computed separately for each layer or expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

import weft as wf
from weft.core.dims import Dim, dim_name, list_dims
from weft.core.op import call_in_program
from weft.core.tensor import Tensor
from weft.core.types import PyTree, at_least_float32

from ..core.call_errors import checks_arguments
from ..core.field_types import NonNegative, Share
from ..core.fields import documented, validate
from .named_tree import (
    any_specs,
    check_patterns,
    check_state,
    error_context,
    match_grads,
    named_tensors,
    replace_tensors,
)
from .schedules import Schedule

LearningRate = NonNegative | Schedule | Callable[[Tensor], Tensor]
Dims = tuple[Dim, ...]
State = dict[str, Any]  # {"step": Tensor, quantity: {parameter name: Tensor}}
ParamState = dict[str, Tensor]  # of one parameter, by quantity


@dataclass(frozen=True)
class StepInfo:
    """The values that all parameters share in one update.

    Attributes:
      rate: the learning rate, a number or a tensor.
      count: the number of this update, from 1 on, as a tensor; None if the optimizer doesn't use it.
    """

    rate: Any
    count: Any


@documented
@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The base class of optimizers. A subclass defines its state per parameter and the update rule."""

    learning_rate: LearningRate = field(kw_only=False)
    """A number, a schedule, or a function from a step (a tensor) to a learning rate."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, multiplied by the learning rate."""
    decayed: tuple[str, ...] | None = None
    """Name patterns of the parameters with weight decay; `*` matches any characters. The default is every
    parameter with at least two dims, not counting stacked dims, that is not called `bias`."""
    stacked_dims: tuple[str, ...] = ("layers", "experts")
    """Names of the dims along which layers or experts are stacked."""

    def __post_init__(self) -> None:
        if self.decayed is not None:
            given: Any = self.decayed
            object.__setattr__(self, "decayed", (given,) if isinstance(given, str) else tuple(given))
        stacked = tuple([dim_name(dim) for dim in list_dims(self.stacked_dims)])
        object.__setattr__(self, "stacked_dims", stacked)
        validate(self, hint=f"for example {self.example_call()}")

    @checks_arguments
    def init(self, params: PyTree) -> State:
        """The initial state. If the parameters are specs, so is the state."""
        with error_context(f"{type(self).__name__}.init(params)"):
            by_name = named_tensors(params)
            check_patterns(self.decayed, by_name)
            if any_specs(by_name):
                return _build_state(self, params, lambda dims, dtype: wf.spec(dims, dtype, role="optimizer"))
            return call_in_program(_init, self, params)

    @checks_arguments
    def update(self, grads: PyTree, state: State, params: PyTree) -> tuple[PyTree, State]:
        """Compute the new parameters and the new state.

        Args:
          grads: the gradient of each parameter; it may be a pending sum.
          state: the result of `init` or of the last update.
          params: the parameters, a pytree of tensors.
        """
        with error_context(f"{type(self).__name__}.update(grads, state, params)"):
            return call_in_program(_update, self, grads, state, params)

    def has_weight_decay(self, name: str, dims: Dims) -> bool:
        """Whether weight decay applies to a parameter."""
        if self.decayed is not None:
            return any(fnmatchcase(name, pattern) for pattern in self.decayed)
        return len(self.unstacked(dims)) >= 2 and name.rpartition(".")[2] != "bias"

    def unstacked(self, dims: Dims) -> Dims:
        """A tensor's dims without the stacked dims."""
        return tuple(d for d in dims if d.name not in self.stacked_dims)

    def uses_step_count(self) -> bool:
        """Whether the update depends on the number of updates so far."""
        return callable(self.learning_rate)

    # Defined by each subclass

    def example_call(self) -> str:
        """A valid constructor call, for error messages."""
        raise NotImplementedError

    def state_dims(self, dims: Dims) -> dict[str, Dims]:
        """The quantities stored for a parameter with these dims, and their dims. They start at zero."""
        raise NotImplementedError

    def compute_update(
        self, grad: Tensor, state: ParamState, param: Tensor, info: StepInfo
    ) -> tuple[Tensor, ParamState]:
        """The change to subtract from a parameter, before weight decay, and the parameter's new state."""
        raise NotImplementedError


@documented
@dataclass(frozen=True, kw_only=True)
class Momentum(Optimizer):
    """Gradient descent with momentum. Without momentum its only state is the step, if a schedule needs it.

    >>> w = wf.parameter(wf.ones("a=2"))
    >>> Momentum(0.5).update(wf.ones("a=2"), {}, w)
    (f32[a=2] [0.5, 0.5], {})
    """

    momentum: Share = 0.0
    """The decay of the accumulated gradients."""
    nesterov: bool = False
    """Whether to use Nesterov momentum."""

    def example_call(self) -> str:
        return "Momentum(0.1, momentum=0.9)"

    def state_dims(self, dims: Dims) -> dict[str, Dims]:
        return {"momentum": dims} if self.momentum else {}

    def compute_update(
        self, grad: Tensor, state: ParamState, param: Tensor, info: StepInfo
    ) -> tuple[Tensor, ParamState]:
        if not self.momentum:
            return grad * info.rate, {}
        momentum = state["momentum"] * self.momentum + grad
        direction = momentum * self.momentum + grad if self.nesterov else momentum
        return direction * info.rate, {"momentum": momentum}


@documented
@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with bias correction and decoupled weight decay (Loshchilov and Hutter, 2019)."""

    beta1: Share = 0.9
    """The decay of the first moment."""
    beta2: Share = 0.999
    """The decay of the second moment."""
    epsilon: NonNegative = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: NonNegative = 0.01

    def example_call(self) -> str:
        return "AdamW(3e-4, beta1=0.9, beta2=0.95, weight_decay=0.1)"

    def uses_step_count(self) -> bool:
        return True

    def state_dims(self, dims: Dims) -> dict[str, Dims]:
        return {"mean": dims, "variance": dims}

    def compute_update(
        self, grad: Tensor, state: ParamState, param: Tensor, info: StepInfo
    ) -> tuple[Tensor, ParamState]:
        mean = moving_average(state["mean"], grad, self.beta1)
        variance = moving_average(state["variance"], wf.square(grad), self.beta2)
        # Bias correction: both moments start at zero, so their weights sum to 1 - beta^t, not to 1.
        mean_weight, variance_weight = 1.0 - self.beta1**info.count, 1.0 - self.beta2**info.count
        step = (mean / mean_weight) / (wf.sqrt(variance / variance_weight) + self.epsilon)
        return step * info.rate, {"mean": mean, "variance": variance}


@documented
@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """Lion: the sign of an interpolated momentum (Chen et al., 2023)."""

    beta1: Share = 0.9
    """The weight of the momentum in the interpolation whose sign is the update."""
    beta2: Share = 0.99
    """The decay of the momentum."""

    def example_call(self) -> str:
        return "Lion(1e-4, beta1=0.9, beta2=0.99)"

    def state_dims(self, dims: Dims) -> dict[str, Dims]:
        return {"mean": dims}

    def compute_update(
        self, grad: Tensor, state: ParamState, param: Tensor, info: StepInfo
    ) -> tuple[Tensor, ParamState]:
        step = wf.sign(moving_average(state["mean"], grad, self.beta1))
        return step * info.rate, {"mean": moving_average(state["mean"], grad, self.beta2)}


def moving_average(old: Tensor, new: Tensor, decay: float | Tensor) -> Tensor:
    """`decay * old + (1 - decay) * new`."""
    return old * decay + new * (1.0 - decay)


# Inside the program


def _init(optimizer: Optimizer, params: PyTree) -> State:
    def zeros(dims: Dims, dtype: DTypeLike) -> Tensor:
        with wf.under_layout("optimizer", "init"):
            return wf.store(wf.zeros(dims, dtype), "optimizer")

    return _build_state(optimizer, params, zeros)


def _build_state(optimizer: Optimizer, params: PyTree, create: Callable[[Dims, DTypeLike], Tensor]) -> State:
    state: State = {"step": create((), jnp.int32)} if optimizer.uses_step_count() else {}
    for name, p in named_tensors(params).items():
        for quantity, dims in optimizer.state_dims(p.dims).items():
            state.setdefault(quantity, {})[name] = create(dims, at_least_float32(p.dtype))
    return state


def _update(optimizer: Optimizer, grads: PyTree, state: State, params: PyTree) -> tuple[PyTree, State]:
    by_name = named_tensors(params)
    grads_by_name = match_grads(named_tensors(grads), by_name)
    check_state(state, _build_state(optimizer, params, lambda dims, dtype: wf.spec(dims, dtype)))

    new_params: dict[str, Tensor] = {}
    new_state: State = {}
    info = StepInfo(optimizer.learning_rate, None)
    if optimizer.uses_step_count():
        with wf.under_layout("optimizer", "step"):
            step = wf.store(state["step"], "optimizer")
            rate = optimizer.learning_rate(step) if callable(optimizer.learning_rate) else info.rate
            info = StepInfo(rate, (step + 1).astype(jnp.float32))
            new_state["step"] = wf.store(step + 1, "optimizer")
    for name, p in by_name.items():
        with wf.under_layout("optimizer", ",".join(d.name for d in p.dims)):
            # Before the cast: a pending sum would stay pending, and be sent in the wider type.
            grad, param = wf.store(grads_by_name[name], "optimizer"), wf.store(p, "optimizer")
            old = {key: wf.store(state[key][name], "optimizer") for key in optimizer.state_dims(p.dims)}
            grad, wide = (t.astype(at_least_float32(t.dtype)) for t in (grad, param))
            change, new = optimizer.compute_update(grad, old, wide, info)
            if optimizer.weight_decay and optimizer.has_weight_decay(name, p.dims):
                change = change + wide * (info.rate * optimizer.weight_decay)
            new_params[name] = wf.store((wide - change).astype(p.dtype), p.role)
            for key, t in new.items():
                new_state.setdefault(key, {})[name] = wf.store(t, "optimizer")
    return replace_tensors(params, new_params), new_state
