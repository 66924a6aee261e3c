"""The theorem: layouts never change results. Programs drawn at random, as data, run in three ways.

A `Case` is a program (inputs, steps, what its loss is made of), a mesh and a layout. It is run

- by Weft on its mesh, with its layout,
- by Weft on one device,
- by plain JAX on arrays without names or devices (the *oracle*: `families.py` has a line for each op),

and the three must agree: loss, outputs, and the gradients of the loss. A case prints as a program, and
its text is the case: `check(Case(...))` in `test_regressions.py` runs it again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import weft as wf
from weft.placing import with_role

TOLERANCE = 1e-9  # in float64, of the largest element


# Programs as data


@dataclass(frozen=True)
class Input:
    """A tensor that the program is given: its values are drawn by `seed`."""

    dims: str
    kind: str = "real"  # real, positive, grid (multiples of 1/4, so with ties), index, truth
    role: str = "value"
    captured: bool = False  # met inside the program instead of handed over; it has no gradient
    seed: int = 0

    def values(self) -> np.ndarray:
        random = np.random.default_rng(self.seed)
        shape = tuple(d.size for d in wf.dims(self.dims))
        if self.kind == "index":
            return random.integers(0, 5, shape).astype(np.int32)
        if self.kind == "truth":
            return random.integers(0, 2, shape).astype(bool)
        if self.kind == "grid":
            return random.integers(-6, 7, shape) / 4
        if self.kind == "positive":
            return random.uniform(0.3, 2.0, shape)
        return random.uniform(0.1, 1.6, shape) * random.choice([-1, 1], shape)

    @property
    def has_gradient(self) -> bool:
        return self.kind in ("real", "positive", "grid") and not self.captured


@dataclass(frozen=True)
class Step:
    """One op: its name in `families.OPS`, the values it takes, and its options."""

    op: str
    operands: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = [f"v{n}" for n in self.operands]
        given += [
            f"{k}={v}" if isinstance(v, Body) else f"{k}={v!r}" for k, v in self.options.items()
        ]
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

    def __str__(self) -> str:
        lines = [f'mesh "{self.mesh}"   {self.weft_layout()!r}']
        lines += [f"  v{n}: {given}" for n, given in enumerate(self.inputs)]
        lines += [f"  … = {step}" for step in self.steps]
        lines += [f"  returns {self.results}, plain {self.plain}"]
        return "\n".join(lines) + "\n" + repr(self)

    def weft_layout(self) -> wf.Layout:
        return wf.Layout(self.layout, params=self.params, optimizer=self.optimizer)


# The oracle's tensors


@dataclass(frozen=True)
class Named:
    """An array of NumPy or JAX in its true size, and the names of its dimensions.

    Attributes:
      exact: whether its values come out the same however they are computed (multiples of a power of
        two): only then may it be compared with itself, have ties, or lie on the kink of a function.
    """

    array: Any
    names: tuple[str, ...]
    exact: bool = False

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
    from families import OPS

    env = list(values)
    for step in steps:
        env += OPS[step.op].apply([env[n] for n in step.operands], step.options)
    return env


def run_weft(steps: Sequence[Step], values: Sequence[wf.Tensor]) -> list[wf.Tensor]:
    """All values of a program, as tensors."""
    from families import OPS

    env = list(values)
    for step in steps:
        out = OPS[step.op].weft(*[env[n] for n in step.operands], **step.options)
        env += out if isinstance(out, list | tuple) else [out]
    return env


def expected(case: Case) -> tuple[Any, list[Named], list[Any]]:
    """The loss, the results and the gradients, by plain JAX."""
    arrays = [given.values() for given in case.inputs]
    chosen = [n for n, given in enumerate(case.inputs) if given.has_gradient]
    names: list[Any] = []

    def loss(some: list[Any]) -> tuple[Any, Any]:
        given = dict(zip(chosen, some, strict=True))
        values = [
            Named(given.get(n, jnp.asarray(a)), tuple(d.name for d in wf.dims(i.dims)))
            for n, (i, a) in enumerate(zip(case.inputs, arrays, strict=True))
        ]
        env = run_oracle(case.steps, values)
        results = [env[n] for n in case.results]
        total = jnp.zeros(())
        for n, x in zip(case.results, results, strict=True):
            if x.kind == "f":
                total += jnp.sum(x.array if n in case.plain else x.array * weights(x.array.shape))
        names[:] = [x.names for x in results]
        return total, [x.array for x in results]

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (total, results), grads = run([jnp.asarray(arrays[n]) for n in chosen])
    return total, [Named(a, n) for a, n in zip(results, names, strict=True)], grads


def computed(case: Case, mesh: Any, layout: Any) -> tuple[Any, list[wf.Tensor], list[wf.Tensor]]:
    """The loss, the results and the gradients, by Weft."""
    tensors = [with_role(wf.tensor(i.values(), i.dims), i.role) for i in case.inputs]
    chosen = [n for n, given in enumerate(case.inputs) if given.has_gradient]
    handed = [n for n, i in enumerate(case.inputs) if not i.captured and n not in chosen]

    def program(differentiated: list[wf.Tensor], others: list[wf.Tensor]) -> Any:
        def loss(some: list[wf.Tensor]) -> tuple[wf.Tensor, list[wf.Tensor]]:
            given = dict(zip(chosen, some, strict=True)) | dict(zip(handed, others, strict=True))
            env = run_weft(case.steps, [given.get(n, t) for n, t in enumerate(tensors)])
            results = [env[n] for n in case.results]
            total = wf.zeros("", jnp.float64)
            for n, x in zip(case.results, results, strict=True):
                if jnp.issubdtype(x.dtype, jnp.floating):
                    if n not in case.plain:
                        x = x * wf.tensor(weights([d.size for d in x.dims]), x.dims)
                    total = total + wf.sum(x)
            return total, results

        (total, results), grads = wf.value_and_grad(loss, has_aux=True)(differentiated)
        return total, results, grads

    staged = wf.spmd(program, mesh, layout)
    return staged([tensors[n] for n in chosen], [tensors[n] for n in handed])


# Comparing


def check(case: Case) -> None:
    """An AssertionError unless the three runs agree."""
    with jax.enable_x64(True):
        want = expected(case)
        _compare(case, "on one device", computed(case, wf.Mesh(), wf.Layout()), want)
        _compare(case, "on its mesh", computed(case, wf.Mesh(case.mesh), case.weft_layout()), want)


def _compare(case: Case, where: str, got: Any, want: Any) -> None:
    total, results, grads = got
    close = functools.partial(_close, case, where)
    for n, x, y in zip(case.results, results, want[1], strict=True):
        assert tuple(d.name for d in x.dims) == y.names, (
            f"dims of v{n} {where}: {x.dims}, {y.names}"
        )
        close(f"v{n}", x, y.array)
    close("the loss", total, want[0])
    chosen = [n for n, given in enumerate(case.inputs) if given.has_gradient]
    for n, x, y in zip(chosen, grads, want[2], strict=True):
        close(f"the gradient of v{n}", x, y)


def _close(case: Case, where: str, what: str, got: wf.Tensor, want: Any) -> None:
    have, want = got.numpy(), np.asarray(want)
    assert have.shape == want.shape, f"{what} {where} is {have.shape} instead of {want.shape}"
    if np.issubdtype(want.dtype, np.floating):
        assert np.issubdtype(have.dtype, np.floating), f"{what} {where} is {have.dtype}"
        scale = max(1.0, float(np.max(np.abs(want), initial=0.0)))
        wrong = ~(np.abs(have - want) <= TOLERANCE * scale)
    else:
        wrong = have != want
    assert not wrong.any(), f"{what} {where} is\n{have}\ninstead of\n{want}"
    # What is stored behind the true size is zero, always.
    storage = np.asarray(got.storage).copy()
    storage[tuple(slice(d.size) for d in got.dims)] = 0
    assert not storage.any(), f"{what} {where} has padding that is not zero"
