"""Averages of parameters: an exponential moving average (EMA) over a run, and the mean of several models.

ema = init_ema(params)
ema = update_ema(ema, params, 0.999)          # after each update of the parameters
model = with_ema_params(model, ema)           # to evaluate or to save
model = average_models(several_models)
"""

from __future__ import annotations

from collections.abc import Iterable

import weft as wf
from weft.core.deferred import ResultSpec, defer, is_deferred
from weft.core.errors import ProgramError
from weft.core.op import call_in_program
from weft.core.tensor import Tensor
from weft.core.types import PyTree, at_least_float32

from ..core.call_errors import checks_arguments
from .named_tree import any_specs, error_context, named_tensors, replace_tensors
from .optimizers import moving_average

Ema = dict[str, Tensor]  # by the name of the parameter


@checks_arguments
def init_ema(params: PyTree) -> Ema:
    """The initial EMA: the parameters in float32 (or wider), stored as optimizer state."""
    with error_context("init_ema(params)"):
        by_name = named_tensors(params)
        if any_specs(by_name):
            return {
                n: wf.spec(p.dims, at_least_float32(p.dtype), role="optimizer") for n, p in by_name.items()
            }
        return call_in_program(_init, params)


@checks_arguments
def update_ema(ema: Ema, params: PyTree, decay: float) -> Ema:
    """The EMA after one more step: `decay * ema + (1 - decay) * params`.

    >>> params = {"w": wf.parameter(wf.ones("a=2"))}
    >>> ema = init_ema(params)
    >>> update_ema(ema, {"w": wf.parameter(wf.full("a=2", 3.0))}, 0.5)
    {'w': f32[a=2] [2., 2.]}
    """
    with error_context("update_ema(ema, params, decay)"):
        if set(named_tensors(params)) != set(ema):
            raise ProgramError(
                f"the EMA of {len(ema)} parameters does not match these {len(named_tensors(params))}",
                rule="an EMA is the result of init_ema or of the last update_ema for the same parameters",
                hint="ema = init_ema(params)",
            )
        return call_in_program(_update, ema, params, decay)


def with_ema_params(model: PyTree, ema: Ema) -> PyTree:
    """The model with its parameters replaced by their EMA, to evaluate or to save.

    >>> model = {"w": wf.parameter(wf.ones("a=2"))}
    >>> with_ema_params(model, {"w": wf.full("a=2", 0.5)})
    {'w': f32[a=2] [0.5, 0.5]}
    """
    with error_context("with_ema_params(model, ema)"):
        return call_in_program(_replace_params, model, ema)


def average_models(models: Iterable[PyTree]) -> PyTree:
    """A model whose parameters are the means of the models' parameters, computed in float32 (or wider).

    The models are read one at a time: with an iterator at most two of them are in memory.

    Args:
      models: at least one; all with the same parameters and the same layout.

    >>> average_models({"w": wf.parameter(wf.full("a=2", x))} for x in (1.0, 2.0, 6.0))
    {'w': f32[a=2] [3., 3.]}
    """
    mean = last = None
    for count, model in enumerate(models, 1):
        # The running mean: m_n = m_{n-1} * (n - 1) / n + x_n / n.
        mean = init_ema(model) if mean is None else update_ema(mean, model, (count - 1) / count)
        last = model
    if mean is None:
        raise ProgramError(
            "average_models was given no models",
            rule="a mean needs at least one model",
            hint="an iterator can be read only once: create a new one",
        ).located("average_models(models)")
    return with_ema_params(last, mean)


def _init(params: PyTree) -> Ema:
    with wf.under_layout("optimizer", "average"):
        return {
            n: wf.store(_copy(wf.store(p, "optimizer")).astype(at_least_float32(p.dtype)), "optimizer")
            for n, p in named_tensors(params).items()
        }


def _copy(t: Tensor) -> Tensor:
    """A new array: JAX returns an unchanged input as it is, and donating the parameters would delete both."""
    return t * 1


def _update(ema: Ema, params: PyTree, decay: float) -> Ema:
    updated = {}
    for name, p in named_tensors(params).items():
        old = ema[name]
        if is_deferred(p):  # optax computes it after the SPMD part, so the EMA follows there
            arrays = lambda old, p: moving_average(old, p.astype(old.dtype), decay)  # noqa: E731
            updated[name] = defer(arrays, (old, p), ResultSpec(old.dims, "optimizer"))
            continue
        with wf.under_layout("optimizer", "average"):
            old, new = wf.store(old, "optimizer"), wf.store(p, "optimizer")
            updated[name] = wf.store(moving_average(old, new.astype(old.dtype), decay), "optimizer")
    return updated


def _replace_params(model: PyTree, ema: Ema) -> PyTree:
    with wf.under_layout("optimizer", "average"):
        params = {n: wf.store(_copy(ema[n]).astype(p.dtype), p.role) for n, p in named_tensors(model).items()}
    return replace_tensors(model, params)
