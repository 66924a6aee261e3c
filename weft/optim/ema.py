"""An average of the parameters over a run: each step's, those of long ago ever less."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import weft as wf
from weft.core.deferred import Deferred, ResultSpec, defer
from weft.core.errors import ProgramError
from weft.core.operands import linear_result
from weft.core.tensor import Tensor

from .named_tree import any_specs, error_context, named_tensors, replace_tensors
from .optimizers import moving_average
from .update_layout import (
    at_least_float32,
    call_in_program,
    to_optimizer_layout,
    to_stored_layout,
    under_optimizer_layout,
    update_scope,
)


def init_ema(params: Any) -> dict[str, Tensor]:
    """The average to begin with: the parameters, in float32 (or wider), stored as optimizer state."""
    with error_context("init_average(params)"):
        by_name = named_tensors(params)
        if any_specs(by_name):
            return {
                n: wf.spec(p.dims, at_least_float32(p.dtype), role="optimizer") for n, p in by_name.items()
            }
        return call_in_program(_init, params)


def update_ema(average: dict[str, Tensor], params: Any, keep: float) -> dict[str, Tensor]:
    """The average after one more step: so much of it, and the rest of the parameters.

    >>> params = {"w": wf.parameter(wf.ones("a=2"))}
    >>> average = init_average(params)
    >>> update_average(average, {"w": wf.parameter(wf.full("a=2", 3.0))}, 0.5)
    {'w': f32[a=2] [2., 2.]}
    """
    with error_context("update_average(average, params, keep)"):
        if set(named_tensors(params)) != set(average):
            raise ProgramError(
                f"the average of {len(average)} parameters is not one of these {len(named_tensors(params))}",
                rule="an average is what init_average, or the last update, gave for these parameters",
                hint="average = init_average(params)",
            )
        return call_in_program(_update, average, params, keep)


def with_ema_params(model: Any, average: dict[str, Tensor]) -> Any:
    """The model with averages for parameters, to evaluate or to save.

    >>> model = {"w": wf.parameter(wf.ones("a=2"))}
    >>> averaged(model, {"w": wf.full("a=2", 0.5)})
    {'w': f32[a=2] [0.5, 0.5]}
    """
    with error_context("averaged(model, average)"):
        return call_in_program(_averaged, model, average)


def _init(params: Any) -> dict[str, Tensor]:
    with update_scope("average"):
        return {
            n: _copy(to_stored_layout(p.astype(at_least_float32(p.dtype)), "optimizer"))
            for n, p in named_tensors(params).items()
        }


def _copy(t: Tensor) -> Tensor:
    """An array of its own, so that both can be donated."""
    made = linear_result(t, jnp.copy(t._array), t.dims, t.splits)
    made.role = t.role
    return made


def _update(average: dict[str, Tensor], params: Any, keep: float) -> dict[str, Tensor]:
    new = {}
    for name, p in named_tensors(params).items():
        old = average[name]
        if isinstance(p._data, Deferred):
            arrays = lambda old, p: moving_average(old, p.astype(old.dtype), keep)  # noqa: E731
            new[name] = defer(arrays, (old, p), ResultSpec(old.dims, "optimizer"))
            continue
        with update_scope("average"):
            old, p = to_optimizer_layout(old), to_optimizer_layout(p)
        with under_optimizer_layout("average"):
            made = moving_average(old, p.astype(old.dtype), keep)
        new[name] = to_stored_layout(made, "optimizer")
    return new


def _averaged(model: Any, average: dict[str, Tensor]) -> Any:
    means = {
        n: _copy(to_stored_layout(average[n].astype(p.dtype), p.role))
        for n, p in named_tensors(model).items()
    }
    return replace_tensors(model, means)
