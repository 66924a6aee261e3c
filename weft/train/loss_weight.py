"""The weight of a batch: what its loss divides by, so that the losses of parts add up to that of the batch.

A loss is a sum over rows divided by a weight: the number of rows or of targets, or the sum of their weights.
The loss alone does not tell which, so the weight is declared: by a method of the model

    def loss_weight(self, batch):
        return wf.sum(batch["weights"])

or by `train_step(..., weight=lambda batch: wf.sum(batch["weights"]))`, which takes precedence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import weft as wf
from weft.core.describe import describe
from weft.core.errors import ProgramError
from weft.core.tensor import Tensor, is_tensor

from ..core.fields import is_finite_number
from ..optim.update_layout import at_least_float32

WeightFunction = Callable[[Any], Any]


def resolve_weight(given: WeightFunction | None, model: Any) -> WeightFunction | None:
    """The function from a batch to its weight: the one given to the step, else the model's own, else None."""
    if given is not None:
        return given
    # Asked of the class: a parameter that is called loss_weight is no method.
    return model.loss_weight if callable(getattr(type(model), "loss_weight", None)) else None


def batch_weight(weight: WeightFunction, batch: Any) -> float | Tensor:
    """The weight of a batch: a number if it depends on sizes alone, or else a float tensor without dims."""
    found = weight(batch)
    if is_finite_number(found) and found > 0:
        return float(found)
    real = isinstance(found, Tensor) and not jnp.issubdtype(found.dtype, jnp.complexfloating)
    if not real or found.dims:
        shown = describe(found) if isinstance(found, Tensor) else repr(found)
        raise ProgramError(
            f"the weight of the batch is {shown}",
            rule="a weight is the number that the loss divides by: positive, or a real tensor without dims",
            hint='add it up: weight=lambda batch: wf.sum(batch["weights"])',
        )
    return found.astype(at_least_float32(found.dtype))


def widest_float() -> Any:
    """float64 where that is enabled: a share that is rounded to float32 would round the gradients."""
    return jnp.result_type(float)


def weight_as_tensor(weight: float | Tensor) -> Tensor:
    return weight if isinstance(weight, Tensor) else wf.full((), weight, widest_float())


def microbatch_shares(
    weight: WeightFunction, total: float | Tensor, parts: Any, micro: wf.Dim
) -> tuple[Tensor, Any]:
    """What each part counts in the loss of the batch, along `micro`, and the parts to compute.

    Args:
      weight: from a batch to its weight.
      total: the weight of the batch.
      parts: the batch dealt out along `micro`.
      micro: the dim of the parts.
    """
    numbers: list[float] = []

    def one(part: Any) -> Tensor:
        found = batch_weight(weight, part)
        numbers.extend([] if isinstance(found, Tensor) else [found])
        return weight_as_tensor(found)

    weights = wf.vmap(one, micro)(parts)
    if numbers and not isinstance(total, Tensor):
        _check_sum(numbers[0], total, micro.size)
        return wf.full([micro], numbers[0] / total, widest_float()), parts
    total = weight_as_tensor(total)
    # The loss of a part without weight may be 0 / 0, and then its gradients are NaN, even times a share of 0.
    # Such a part computes the rows of the one with the largest weight instead.
    heavy, best = weights > 0, wf.argmax(weights, micro)

    def sound(t: Any) -> Any:
        return wf.where(heavy, t, wf.take(t, best, micro)) if is_tensor(t) and micro in t.dims else t

    parts = jax.tree.map(sound, parts, is_leaf=is_tensor)
    return weights / wf.where(total == 0, 1.0, total), parts


def _check_sum(part: float, total: float, count: int) -> None:
    if not math.isclose(part * count, total, rel_tol=1e-6):
        raise ProgramError(
            f"the weight of the batch is {total:g}, and that of each of its {count} parts is {part:g}",
            rule="a weight is the number that the loss divides by; those of the parts add up to the batch's",
            hint="weight=train.count_rows for a mean over equal rows, "
            "weight=lambda batch: wf.ones(()) for a sum that is not divided",
        )


def unknown_weight_error(model: Any, micro: int) -> ProgramError:
    """The error for micro-batches of a loss with an unknown weight."""
    return ProgramError(
        f"micro={micro} needs the weight of each micro-batch, and {type(model).__name__} has no "
        "loss_weight(batch)",
        rule="micro-batches are combined by weight, the number that the loss of each divides by; "
        "it can't be inferred from the loss",
        hint='train_step(..., weight=lambda batch: wf.sum(batch["weights"])), or whatever the loss '
        "divides by; weight=train.count_rows for a mean over equal rows",
    )
