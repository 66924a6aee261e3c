"""Optimizers over named tensors: from gradients to new parameters, on slices, inside the program.

    optimizer = optim.AdamW(3e-4 * optim.LinearWarmup(1_000), weight_decay=0.1)
    state = optimizer.init(params)
    params, state = optimizer.update(optim.clip_by_global_norm(grads, 1.0), state, params)

An update is traced under the layout's rules for optimizer state, as if these were its rules for all tensors.
Everything about ZeRO follows: a gradient's pending sum is scattered into the state's layout instead of being
added up everywhere; a parameter that is stored whole is cut without traffic, and gathered when it is new; one
that is stored split stays as it is; means over split dims become all-reduces of what is left of them.

State is a dict: `step`, the number of updates done, where something depends on it, and for each quantity that
is kept a dict by the parameters' names. It is float32 (or wider) whatever the parameters are, and so are the
computations; a parameter is rounded to its own type at the end.

Layers, and experts, are often stacked on a dim. Such a tensor stands for several: what an optimizer measures
of a tensor, it measures of each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import jax.numpy as jnp

import weft as wf
from weft.core.dims import Dim
from weft.core.tensor import Tensor

from ..core.fields import check_fields
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
from .update_layout import (
    at_least_float32,
    call_in_program,
    to_optimizer_layout,
    to_stored_layout,
    under_optimizer_layout,
    update_scope,
)

LearningRate = float | Schedule | Callable[[Tensor], Any]
Dims = tuple[Dim, ...]
ParamState = dict[str, Tensor]  # what is kept of one parameter, by quantity


@dataclass(frozen=True)
class StepInfo:
    """What is alike for all parameters in one update: the rate, and the update's number from 1 on."""

    rate: Any
    count: Any


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What optimizers have in common; each kind says what it keeps of a parameter and how that changes.

    Attributes:
      learning_rate: a number, a schedule, or a function from a step (a tensor) to a rate.
      weight_decay: the share of a parameter that is taken away, times the learning rate.
      decayed: names of the parameters that decay, with `*` for any letters; by default those with two dims
        or more, stacking dims not counted, that are not called `bias`.
      stacking: names of the dims on which tensors are stacked that stand for themselves.
    """

    learning_rate: LearningRate = field(kw_only=False)
    weight_decay: float = 0.0
    decayed: tuple[str, ...] | None = None
    stacking: tuple[str, ...] = ("layers", "experts")

    def __post_init__(self) -> None:
        for name in ("decayed", "stacking"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))
        rate = {} if callable(self.learning_rate) else {"learning_rate": "not negative"}
        check_fields(self, rate | {"weight_decay": "not negative"} | self.rules(), self.example())

    def init(self, params: Any) -> dict[str, Any]:
        """The state to begin with. That of specs are specs."""
        with error_context(f"{type(self).__name__}.init(params)"):
            by_name = named_tensors(params)
            check_patterns(self.decayed, by_name)
            if any_specs(by_name):
                return _laid_by_name(self, params, lambda dims, dtype: wf.spec(dims, dtype, role="optimizer"))
            return call_in_program(_init, self, params)

    def update(self, grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        """The new parameters and the new state.

        Args:
          grads: for each parameter its gradient; pending sums are welcome.
          state: what `init` or the last update gave.
          params: the parameters, a tree with tensors in it.
        """
        with error_context(f"{type(self).__name__}.update(grads, state, params)"):
            return call_in_program(_update, self, grads, state, params)

    def decays(self, name: str, dims: Dims) -> bool:
        """Whether a parameter decays."""
        if self.decayed is not None:
            return any(fnmatchcase(name, pattern) for pattern in self.decayed)
        return len(self.own(dims)) >= 2 and name.rpartition(".")[2] != "bias"

    def own(self, dims: Dims) -> Dims:
        """A tensor's dims apart from those on which several are stacked."""
        return tuple(d for d in dims if d.name not in self.stacking)

    def counts(self) -> bool:
        """Whether the number of updates matters."""
        return callable(self.learning_rate)

    # What each kind says

    def rules(self) -> dict[str, str]:
        """The rules for its settings, names of `settings.FIELD_RULES`."""
        raise NotImplementedError

    def example(self) -> str:
        """Settings that are right, for messages."""
        raise NotImplementedError

    def keeps(self, dims: Dims) -> dict[str, Dims]:
        """What it keeps of a parameter with these dims: quantities and their dims; zero at first."""
        raise NotImplementedError

    def change(
        self, grad: Tensor, kept: ParamState, param: Tensor, now: StepInfo
    ) -> tuple[Tensor, ParamState]:
        """What is to be taken from a parameter, apart from weight decay; and what is kept of it now."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Momentum(Optimizer):
    """Gradient descent. Without momentum it keeps nothing (but, for a schedule, the step).

    Attributes:
      momentum: the share of the last change that goes into the next.
      nesterov: whether the next change is looked ahead to.

    >>> w = wf.parameter(wf.ones("a=2"))
    >>> Momentum(0.5).update(wf.ones("a=2"), {}, w)
    (f32[a=2] [0.5, 0.5], {})
    """

    momentum: float = 0.0
    nesterov: bool = False

    def rules(self) -> dict[str, str]:
        return {"momentum": "share"}

    def example(self) -> str:
        return "Momentum(0.1, momentum=0.9)"

    def keeps(self, dims: Dims) -> dict[str, Dims]:
        return {"momentum": dims} if self.momentum else {}

    def change(
        self, grad: Tensor, kept: ParamState, param: Tensor, now: StepInfo
    ) -> tuple[Tensor, ParamState]:
        if not self.momentum:
            return grad * now.rate, {}
        moved = kept["momentum"] * self.momentum + grad
        ahead = moved * self.momentum + grad if self.nesterov else moved
        return ahead * now.rate, {"momentum": moved}


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with bias correction and decoupled weight decay (Loshchilov and Hutter, 2019).

    Attributes:
      beta1, beta2: how much of the mean and of the mean square of past gradients stays.
      epsilon: added to the root of the mean square.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01

    def rules(self) -> dict[str, str]:
        return {"beta1": "share", "beta2": "share", "epsilon": "not negative"}

    def example(self) -> str:
        return "AdamW(3e-4, beta1=0.9, beta2=0.95, weight_decay=0.1)"

    def counts(self) -> bool:
        return True

    def keeps(self, dims: Dims) -> dict[str, Dims]:
        return {"mean": dims, "variance": dims}

    def change(
        self, grad: Tensor, kept: ParamState, param: Tensor, now: StepInfo
    ) -> tuple[Tensor, ParamState]:
        mean = moving_average(kept["mean"], grad, self.beta1)
        variance = moving_average(kept["variance"], wf.square(grad), self.beta2)
        # Both began at zero: so much of their weight is there by now.
        there, there_square = 1.0 - self.beta1**now.count, 1.0 - self.beta2**now.count
        step = (mean / there) / (wf.sqrt(variance / there_square) + self.epsilon)
        return step * now.rate, {"mean": mean, "variance": variance}


@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """The sign of a mean of gradients (Chen and others, 2023).

    Attributes:
      beta1: how much of past gradients is in the mean of which the sign is taken.
      beta2: how much of them stays.
    """

    beta1: float = 0.9
    beta2: float = 0.99

    def rules(self) -> dict[str, str]:
        return {"beta1": "share", "beta2": "share"}

    def example(self) -> str:
        return "Lion(1e-4, beta1=0.9, beta2=0.99)"

    def keeps(self, dims: Dims) -> dict[str, Dims]:
        return {"mean": dims}

    def change(
        self, grad: Tensor, kept: ParamState, param: Tensor, now: StepInfo
    ) -> tuple[Tensor, ParamState]:
        step = wf.sign(moving_average(kept["mean"], grad, self.beta1))
        return step * now.rate, {"mean": moving_average(kept["mean"], grad, self.beta2)}


def moving_average(old: Tensor, new: Tensor, keep: Any) -> Tensor:
    """So much of the old, and the rest of the new."""
    return old * keep + new * (1.0 - keep)


# Inside the program


def _init(optimizer: Optimizer, params: Any) -> dict[str, Any]:
    def zeros(dims: Dims, dtype: Any) -> Tensor:
        with under_optimizer_layout("init"):
            made = wf.zeros(dims, dtype)
        return to_stored_layout(made, "optimizer")

    return _laid_by_name(optimizer, params, zeros)


def _laid_by_name(optimizer: Optimizer, params: Any, make: Callable[[Dims, Any], Tensor]) -> dict[str, Any]:
    state: dict[str, Any] = {"step": make((), jnp.int32)} if optimizer.counts() else {}
    for name, p in named_tensors(params).items():
        for quantity, dims in optimizer.keeps(p.dims).items():
            state.setdefault(quantity, {})[name] = make(dims, at_least_float32(p.dtype))
    return state


def _update(
    optimizer: Optimizer, grads: Any, state: dict[str, Any], params: Any
) -> tuple[Any, dict[str, Any]]:
    by_name = named_tensors(params)
    given = match_grads(named_tensors(grads), by_name)
    expected = _laid_by_name(optimizer, params, lambda dims, dtype: wf.spec(dims, dtype))
    check_state(state, expected)

    new_params: dict[str, Tensor] = {}
    new_state: dict[str, Any] = {}
    now = StepInfo(optimizer.learning_rate, None)
    if optimizer.counts():
        step = to_optimizer_layout(state["step"])
        with under_optimizer_layout("step"):
            rate = optimizer.learning_rate(step) if callable(optimizer.learning_rate) else now.rate
            after = step + 1
            now = StepInfo(rate, after.astype(jnp.float32))
        new_state["step"] = to_stored_layout(after, "optimizer")
    for name, p in by_name.items():
        label = ",".join(d.name for d in p.dims)
        with update_scope(label):
            grad, param = to_optimizer_layout(given[name]), to_optimizer_layout(p)
            kept = {key: to_optimizer_layout(state[key][name]) for key in optimizer.keeps(p.dims)}
        with under_optimizer_layout(label):
            grad, wide = (t.astype(at_least_float32(t.dtype)) for t in (grad, param))
            change, new = optimizer.change(grad, kept, wide, now)
            if optimizer.weight_decay and optimizer.decays(name, p.dims):
                change = change + wide * (now.rate * optimizer.weight_decay)
            updated = (wide - change).astype(p.dtype)
        with update_scope(label):
            new_params[name] = to_stored_layout(updated, p.role)
            for key, t in new.items():
                new_state.setdefault(key, {})[name] = to_stored_layout(t, "optimizer")
    return replace_tensors(params, new_params), new_state
