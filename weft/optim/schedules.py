"""Schedules: from the number of updates done to a learning rate.

A schedule is a frozen dataclass, so a config can hold and print it. It is called with a step: a Python number
or, inside a program, a tensor. The first update is step 0. Schedules are multiplied with each other and with
numbers:

    3e-4 * LinearWarmup(1_000) * Cosine(99_000, floor=0.1, after=1_000)
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

import weft as wf
from weft.core.errors import ProgramError
from weft.core.tensor import Tensor

from ..core.fields import check_fields, is_finite_number


class Schedule:
    """A factor of the learning rate that depends on the step. Each kind defines `at`."""

    def __call__(self, step: Any) -> Tensor:
        """The factor at a step, as a tensor without dims."""
        if not isinstance(step, Tensor):
            step = wf.tensor(jnp.asarray(step), ())
        return self.at(step.astype(jnp.float32))

    def at(self, t: Tensor) -> Tensor:
        """The factor at a step that is a float32 tensor."""
        raise NotImplementedError

    def __mul__(self, other: Any) -> Product:
        return Product((self, other))

    def __rmul__(self, other: Any) -> Product:
        return Product((other, self))


@dataclass(frozen=True)
class Constant(Schedule):
    """The same at every step.

    >>> float(Constant(0.5)(7))
    0.5
    """

    value: float

    def __post_init__(self) -> None:
        check_fields(self, {"value": "not negative"}, "Constant(3e-4)")

    def at(self, t: Tensor) -> Tensor:
        return wf.full((), self.value, jnp.float32)


@dataclass(frozen=True)
class LinearWarmup(Schedule):
    """From 0 to 1 in so many steps, then 1.

    >>> [float(LinearWarmup(4)(step)) for step in (0, 1, 4, 9)]
    [0.0, 0.25, 1.0, 1.0]
    """

    steps: int

    def __post_init__(self) -> None:
        check_fields(self, {"steps": "at least one"}, "LinearWarmup(10_000)")

    def at(self, t: Tensor) -> Tensor:
        return wf.minimum(t / float(self.steps), 1.0)


@dataclass(frozen=True)
class RsqrtDecay(Schedule):
    """1 / sqrt(step), held at its value at `warmup` before that.

    >>> [float(RsqrtDecay(4)(step)) for step in (0, 4, 16)]
    [0.5, 0.5, 0.25]
    """

    warmup: int = 1

    def __post_init__(self) -> None:
        check_fields(self, {"warmup": "at least one"}, "RsqrtDecay(10_000)")

    def at(self, t: Tensor) -> Tensor:
        return wf.rsqrt(wf.maximum(t, float(self.warmup)))


@dataclass(frozen=True)
class LinearDecay(Schedule):
    """1 until the last `steps` of `total` steps, in which it falls to 0.

    >>> [float(LinearDecay(total=10, steps=4)(step)) for step in (0, 6, 7, 10, 11)]
    [1.0, 1.0, 0.75, 0.0, 0.0]
    """

    total: int
    steps: int

    def __post_init__(self) -> None:
        check_fields(
            self,
            {"total": "at least one", "steps": "at least one"},
            "LinearDecay(total=136_000, steps=13_600)",
        )

    def at(self, t: Tensor) -> Tensor:
        return wf.clip((self.total - t) / float(self.steps), 0.0, 1.0)


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine wave from 1 down to `floor` in so many steps, begun after some others.

    >>> [round(float(Cosine(4, floor=0.5)(step)), 3) for step in (0, 2, 4, 9)]
    [1.0, 0.75, 0.5, 0.5]
    """

    steps: int
    floor: float = 0.0
    after: int = 0

    def __post_init__(self) -> None:
        rules = {"steps": "at least one", "floor": "part", "after": "not negative"}
        check_fields(self, rules, "Cosine(99_000, floor=0.1, after=1_000)")

    def at(self, t: Tensor) -> Tensor:
        done = wf.clip((t - float(self.after)) / float(self.steps), 0.0, 1.0)
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + wf.cos(math.pi * done))


@dataclass(frozen=True)
class Product(Schedule):
    """Several schedules multiplied; numbers are constants."""

    factors: tuple[Schedule, ...]

    def __post_init__(self) -> None:
        factors: list[Schedule] = []
        for factor in self.factors:
            if is_finite_number(factor):
                factors.append(Constant(factor))  # type: ignore[arg-type]
            elif isinstance(factor, Schedule):
                factors += factor.factors if isinstance(factor, Product) else [factor]
            else:
                raise ProgramError(
                    f"a schedule is multiplied by {factor!r}",
                    rule="the factors of a schedule are schedules and numbers",
                    hint="for example 0.5 * LinearWarmup(10_000) * RsqrtDecay(10_000)",
                ).located(f"a schedule * {factor!r}")
        object.__setattr__(self, "factors", tuple(factors))

    def at(self, t: Tensor) -> Tensor:
        return functools.reduce(operator.mul, [factor.at(t) for factor in self.factors])

    def __repr__(self) -> str:
        return " * ".join(map(repr, self.factors))


def paper_schedule(warmup: int = 10_000, total: int = 136_000, decay: int = 13_600) -> Product:
    """The schedule of the Mesh-TensorFlow paper: warm-up · 1/sqrt(step) · linear decay over the last epoch.

    By default that of its language models, ten epochs long. Its greatest value is 1/sqrt(warmup); it is meant
    for Adafactor, which multiplies by the size of each parameter.

    >>> round(float(paper_schedule()(10_000)), 4)
    0.01
    """
    return LinearWarmup(warmup) * RsqrtDecay(warmup) * LinearDecay(total, decay)
