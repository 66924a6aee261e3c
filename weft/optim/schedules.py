"""Learning-rate schedules: map the number of updates so far to a learning rate.

A schedule is a frozen dataclass, so a config can store and print it. Call it with a step, a Python number or
a tensor inside a program; the first update is step 0. Multiply schedules by each other and by numbers:

    3e-4 * LinearWarmup(1_000) * Cosine(99_000, floor=0.1, after=1_000)
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from typing import Annotated

import jax.numpy as jnp
from jax.typing import ArrayLike

import weft as wf
from weft.core.errors import ProgramError
from weft.core.field_types import Fraction, NonNegative, Range, is_finite_number
from weft.core.fields import validate
from weft.core.tensor import Tensor

from ..core.call_errors import reports_construction

# A number of steps that something takes. It may be computed, so it need not be an integer.
Duration = Annotated[float, Range(at_least=1)]


class Schedule:
    """A factor of the learning rate that depends on the step. Subclasses define `at`."""

    def __call__(self, step: ArrayLike | Tensor) -> Tensor:
        """The factor at a step; a scalar tensor for a scalar step."""
        if not isinstance(step, Tensor):
            step = wf.tensor(jnp.asarray(step), ())
        return self.at(step.astype(jnp.float32))

    def at(self, t: Tensor) -> Tensor:
        """The factor at a step, a float32 tensor."""
        raise NotImplementedError

    def __mul__(self, other: float | Schedule) -> Product:
        return Product((self, other))  # type: ignore[arg-type]

    def __rmul__(self, other: float | Schedule) -> Product:
        return Product((other, self))  # type: ignore[arg-type]


@reports_construction
@dataclass(frozen=True)
class Constant(Schedule):
    """The same value at every step.

    >>> float(Constant(0.5)(7))
    0.5
    """

    value: NonNegative

    def __post_init__(self) -> None:
        validate(self, hint="for example Constant(3e-4)")

    def at(self, t: Tensor) -> Tensor:
        return wf.full((), self.value, jnp.float32)


@reports_construction
@dataclass(frozen=True)
class LinearWarmup(Schedule):
    """Rises linearly from 0 to 1 in `steps` steps, then stays 1.

    >>> [float(LinearWarmup(4)(step)) for step in (0, 1, 4, 9)]
    [0.0, 0.25, 1.0, 1.0]
    """

    steps: Duration

    def __post_init__(self) -> None:
        validate(self, hint="for example LinearWarmup(10_000)")

    def at(self, t: Tensor) -> Tensor:
        return wf.minimum(t / float(self.steps), 1.0)


@reports_construction
@dataclass(frozen=True)
class RsqrtDecay(Schedule):
    """1 / sqrt(max(step, warmup)).

    >>> [float(RsqrtDecay(4)(step)) for step in (0, 4, 16)]
    [0.5, 0.5, 0.25]
    """

    warmup: Duration = 1

    def __post_init__(self) -> None:
        validate(self, hint="for example RsqrtDecay(10_000)")

    def at(self, t: Tensor) -> Tensor:
        return wf.rsqrt(wf.maximum(t, float(self.warmup)))


@reports_construction
@dataclass(frozen=True)
class LinearDecay(Schedule):
    """1 until the last `steps` of `total` steps, then falls linearly to 0.

    >>> [float(LinearDecay(total=10, steps=4)(step)) for step in (0, 6, 7, 10, 11)]
    [1.0, 1.0, 0.75, 0.0, 0.0]
    """

    total: Duration
    steps: Duration

    def __post_init__(self) -> None:
        validate(self, hint="for example LinearDecay(total=136_000, steps=13_600)")

    def at(self, t: Tensor) -> Tensor:
        return wf.clip((self.total - t) / float(self.steps), 0.0, 1.0)


@reports_construction
@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine wave from 1 down to `floor` in `steps` steps, starting at step `after`.

    >>> [round(float(Cosine(4, floor=0.5)(step)), 3) for step in (0, 2, 4, 9)]
    [1.0, 0.75, 0.5, 0.5]
    """

    steps: Duration
    floor: Fraction = 0.0
    after: NonNegative = 0

    def __post_init__(self) -> None:
        validate(self, hint="for example Cosine(99_000, floor=0.1, after=1_000)")

    def at(self, t: Tensor) -> Tensor:
        done = wf.clip((t - float(self.after)) / float(self.steps), 0.0, 1.0)
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + wf.cos(math.pi * done))


@reports_construction
@dataclass(frozen=True)
class Product(Schedule):
    """The product of several schedules. A number becomes a `Constant`."""

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
                    rule="a factor of a schedule is a schedule or a finite number",
                    hint="for example 0.5 * LinearWarmup(10_000) * RsqrtDecay(10_000)",
                ).located(f"a schedule * {factor!r}")
        object.__setattr__(self, "factors", tuple(factors))

    def at(self, t: Tensor) -> Tensor:
        return functools.reduce(operator.mul, [factor.at(t) for factor in self.factors])

    def __repr__(self) -> str:
        return " * ".join(map(repr, self.factors))


def paper_schedule(warmup: int = 10_000, total: int = 136_000, decay: int = 13_600) -> Product:
    """The schedule of the Mesh-TensorFlow paper: warmup · 1/sqrt(step) · linear decay over the last epoch.

    The defaults are those of its language models, trained for ten epochs. The maximum is 1/sqrt(warmup): the
    schedule is meant for Adafactor, which multiplies updates by the size of each parameter.

    >>> round(float(paper_schedule()(10_000)), 4)
    0.01
    """
    return LinearWarmup(warmup) * RsqrtDecay(warmup) * LinearDecay(total, decay)
