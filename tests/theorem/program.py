"""Programs as data, and how they run: by Weft, and by the oracle, on arrays with names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import weft as wf
from weft.core.types import cast_like


@dataclass(frozen=True)
class Input:
    """A tensor that the program is given: its values are drawn by `seed`."""

    dims: str
    kind: str = "real"  # real, positive, grid (multiples of 1/4, so with ties), small, index, truth
    role: str = "value"
    captured: bool = False  # met inside the program instead of handed over; it has no gradient
    seed: int = 0
    dtype: str = ""  # that of typed programs: bfloat16, …, or weak; else float64, int32 or bool

    def array(self) -> Any:
        """The values in their type."""
        values = jnp.asarray(self.values())
        if self.dtype == "weak":
            return cast_like(values, jax.typeof(0 if self.kind == "index" else 0.0))
        return values.astype(self.dtype) if self.dtype else values

    def values(self) -> np.ndarray:
        random = np.random.default_rng(self.seed)
        shape = tuple(d.size for d in wf.dims(self.dims))
        if self.kind == "index":
            return random.integers(0, 5, shape).astype(np.int32)
        if self.kind == "truth":
            return random.integers(0, 2, shape).astype(bool)
        if self.kind == "small":
            return random.integers(-2, 3, shape).astype(float)
        if self.kind == "grid":
            return random.integers(-6, 7, shape) / 4
        if self.kind == "positive":
            return random.uniform(0.3, 2.0, shape)
        return random.uniform(0.1, 1.6, shape) * random.choice([-1, 1], shape)

    @property
    def has_gradient(self) -> bool:
        return self.kind in ("real", "positive", "grid", "small") and not self.captured


@dataclass(frozen=True)
class Step:
    """One op: its name in `families.OPS`, the values it takes, and its options."""

    op: str
    operands: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = [f"v{n}" for n in self.operands]
        given += [f"{k}={v}" if isinstance(v, Body) else f"{k}={v!r}" for k, v in self.options.items()]
        return f"{self.op}({', '.join(given)})"


@dataclass(frozen=True)
class Body:
    """The function of a loop, branch or transformation: values 0, 1, … are what it is given."""

    steps: tuple[Step, ...]
    result: int

    def __str__(self) -> str:
        return f"{{{'; '.join(map(str, self.steps))} → v{self.result}}}"


@dataclass(frozen=True)
class Case:
    """A program, and where it runs."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]  # the values that are returned, and make up the loss
    plain: tuple[int, ...] = ()  # those of them that the loss adds up as they are, without weights
    mesh: str = ""
    layout: str = ""
    params: str | None = None
    optimizer: str | None = None
    alone: bool = True  # whether it is run on one device as well
    eager: bool = False  # and op by op

    def __str__(self) -> str:
        lines = [
            f'mesh "{self.mesh}"   {self.weft_layout()!r}{"   also alone" * self.alone}{"   also eagerly" * self.eager}'
        ]
        lines += [f"  v{n}: {given}" for n, given in enumerate(self.inputs)]
        lines += [f"  … = {step}" for step in self.steps]
        lines += [f"  returns {self.results}, plain {self.plain}"]
        return "\n".join(lines) + "\n" + repr(self)

    @property
    def is_typed(self) -> bool:
        """Whether it is a program of narrow and weak types, in which types are compared too."""
        return any(given.dtype for given in self.inputs)

    def weft_layout(self) -> wf.Layout:
        return wf.Layout(self.layout, params=self.params, optimizer=self.optimizer)


# The oracle's tensors


@dataclass(frozen=True)
class Named:
    """An array of NumPy or JAX in its true size, and the names of its dimensions.

    Attributes:
      exact: whether its values come out the same however they are computed (multiples of a power of
        two): only then may it be compared with itself, have ties, or lie on the kink of a function.
      narrow: whether they come out the same in 16 bits too, however sums are ordered (and in types of 8
        bits, if they are integers).
    """

    array: Any
    names: tuple[str, ...]
    exact: bool = False
    narrow: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.names, self.array.shape, strict=True))

    @property
    def kind(self) -> str:
        """b for truth values, i for whole numbers, f for floating-point ones."""
        return {"b": "b", "i": "i", "u": "i", "f": "f"}[np.dtype(self.array.dtype).kind]


class Unfit(Exception):
    """An op can't be applied, or its result would depend on rounding."""


def weights(shape: Sequence[int]) -> np.ndarray:
    """Fixed weights for a loss: no two alike."""
    return np.cos(1.0 + np.arange(int(np.prod(shape)))).reshape(shape)


# Running


def run_oracle(steps: Sequence[Step], values: Sequence[Named]) -> list[Named]:
    """All values of a program; with concrete ones, each step is checked to be sound."""
    from .families import OPS

    env = list(values)
    for step in steps:
        env += OPS[step.op].apply([env[n] for n in step.operands], step.options)
    return env


def run_weft(
    steps: Sequence[Step],
    values: Sequence[wf.Tensor],
    placed: Callable[[wf.Tensor], wf.Tensor] = lambda t: t,
) -> list[wf.Tensor]:
    """All values of a program, as tensors; `placed` puts new ones on a mesh where that is not implied."""
    from .families import OPS

    env = list(values)
    for step in steps:
        out = OPS[step.op].weft(*[env[n] for n in step.operands], **step.options)
        env += map(placed, out if isinstance(out, list | tuple) else [out])
    return env
