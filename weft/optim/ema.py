"""An average of the parameters over a run: each step's, those of long ago ever less."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import weft as wf
from weft.core.deferred import Promise, Result, later
from weft.core.errors import ProgramError
from weft.core.forms import relabelled
from weft.core.tensor import Tensor

from .named_tree import are_specs, asking, named, with_tensors
from .optimizers import blend
from .update_layout import as_state, as_stored, called, in_state_layout, naming, wide_type


def init_average(params: Any) -> dict[str, Tensor]:
    """The average to begin with: the parameters, in float32 (or wider), stored as optimizer state."""
    with asking("init_average(params)"):
        by_name = named(params)
        if are_specs(by_name):
            return {n: wf.spec(p.dims, wide_type(p.dtype), role="optimizer") for n, p in by_name.items()}
        return called(_init, params)


def update_average(average: dict[str, Tensor], params: Any, keep: float) -> dict[str, Tensor]:
    """The average after one more step: so much of it, and the rest of the parameters.

    >>> params = {"w": wf.parameter(wf.ones("a=2"))}
    >>> average = init_average(params)
    >>> update_average(average, {"w": wf.parameter(wf.full("a=2", 3.0))}, 0.5)
    {'w': f32[a=2] [2., 2.]}
    """
    with asking("update_average(average, params, keep)"):
        if set(named(params)) != set(average):
            raise ProgramError(
                f"the average of {len(average)} parameters is not one of these {len(named(params))}",
                rule="an average is what init_average, or the last update, gave for these parameters",
                hint="average = init_average(params)",
            )
        return called(_update, average, params, keep)


def averaged(model: Any, average: dict[str, Tensor]) -> Any:
    """The model with averages for parameters, to evaluate or to save.

    >>> model = {"w": wf.parameter(wf.ones("a=2"))}
    >>> averaged(model, {"w": wf.full("a=2", 0.5)})
    {'w': f32[a=2] [0.5, 0.5]}
    """
    with asking("averaged(model, average)"):
        return called(_averaged, model, average)


def _init(params: Any) -> dict[str, Tensor]:
    with naming("average"):
        return {
            n: _copy(as_stored(p.astype(wide_type(p.dtype)), "optimizer")) for n, p in named(params).items()
        }


def _copy(t: Tensor) -> Tensor:
    """An array of its own, so that both can be donated."""
    made = relabelled(t, jnp.copy(t._array), t.dims, t.splits)
    made.role = t.role
    return made


def _update(average: dict[str, Tensor], params: Any, keep: float) -> dict[str, Tensor]:
    new = {}
    for name, p in named(params).items():
        old = average[name]
        if isinstance(p._held, Promise):
            arrays = lambda old, p: blend(old, p.astype(old.dtype), keep)  # noqa: E731
            new[name] = later(arrays, (old, p), Result(old.dims, "optimizer"))
            continue
        with naming("average"):
            old, p = as_state(old), as_state(p)
        with in_state_layout("average"):
            made = blend(old, p.astype(old.dtype), keep)
        new[name] = as_stored(made, "optimizer")
    return new


def _averaged(model: Any, average: dict[str, Tensor]) -> Any:
    means = {n: _copy(as_stored(average[n].astype(p.dtype), p.role)) for n, p in named(model).items()}
    return with_tensors(model, means)
