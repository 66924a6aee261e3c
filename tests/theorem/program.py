"""Programs as data, and functions that run them: with Weft, and with the oracle on arrays with named dims."""

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
    """An input tensor of a program; `seed` determines its values."""

    dims: str
    kind: str = "real"  # real, positive, grid (multiples of 1/4, so with ties), small, index, boolean
    role: str = "value"
    captured: bool = False  # captured by the program instead of passed as an argument; it has no gradient
    seed: int = 0
    dtype: str = ""  # in typed programs: bfloat16, …, or weak; otherwise float64, int32 or bool

    def array(self) -> Any:
        """The values in the input's dtype."""
        values = jnp.asarray(self.values())
        if self.dtype == "weak":
            return cast_like(values, jax.typeof(0 if self.kind == "index" else 0.0))
        return values.astype(self.dtype) if self.dtype else values

    def values(self) -> np.ndarray:
        random = np.random.default_rng(self.seed)
        shape = tuple(d.size for d in wf.dims(self.dims))
        if self.kind == "index":
            return random.integers(0, 5, shape).astype(np.int32)
        if self.kind == "boolean":
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
    """One op: its name in `families.OPS`, the numbers of its operands, and its options."""

    op: str
    operands: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = [f"v{n}" for n in self.operands]
        given += [f"{k}={v}" if isinstance(v, Body) else f"{k}={v!r}" for k, v in self.options.items()]
        return f"{self.op}({', '.join(given)})"


@dataclass(frozen=True)
class Body:
    """The function of a loop, branch or transformation; its arguments are the values 0, 1, …"""

    steps: tuple[Step, ...]
    result: int

    def __str__(self) -> str:
        return f"{{{'; '.join(map(str, self.steps))} → v{self.result}}}"


@dataclass(frozen=True)
class Case:
    """A program with the mesh and the layout that it runs on."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]  # the numbers of the values that are returned and enter the loss
    plain: tuple[int, ...] = ()  # the results that the loss sums without weights
    mesh: str = ""
    layout: str = ""
    params: str | None = None
    optimizer: str | None = None
    alone: bool = True  # whether it also runs on one device
    eager: bool = False  # whether it also runs eagerly, op by op

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
        """Whether the inputs have narrow or weak types; then types are compared too."""
        return any(given.dtype for given in self.inputs)

    def weft_layout(self) -> wf.Layout:
        return wf.Layout(self.layout, params=self.params, optimizer=self.optimizer)


# The oracle's tensors


@dataclass(frozen=True)
class Named:
    """A NumPy or JAX array without padding, and the names of its dims.

    Attributes:
      exact: whether the values are free of rounding (multiples of a power of two). Only then may two of them be
        compared, be equal, or lie on the kink of a function.
      narrow: whether 16 bits (8, for integers) also represent the values without rounding, in any order of additions.
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
        """b for booleans, i for integers, f for floats."""
        return {"b": "b", "i": "i", "u": "i", "f": "f"}[np.dtype(self.array.dtype).kind]


class Unfit(Exception):
    """An op cannot be applied, or its result would depend on rounding."""


def weights(shape: Sequence[int]) -> np.ndarray:
    """Fixed weights for a loss, all different."""
    return np.cos(1.0 + np.arange(int(np.prod(shape)))).reshape(shape)


# Running


def run_oracle(steps: Sequence[Step], values: Sequence[Named]) -> list[Named]:
    """All values of a program. If they are concrete, each step is checked to be independent of rounding."""
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
    """All values of a program as tensors. `placed` puts the results of creation ops on a mesh, for eager runs."""
    from .families import OPS

    env = list(values)
    for step in steps:
        out = OPS[step.op].weft(*[env[n] for n in step.operands], **step.options)
        env += map(placed, out if isinstance(out, list | tuple) else [out])
    return env
