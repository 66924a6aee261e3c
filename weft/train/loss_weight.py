"""The weight of a batch: the divisor of its loss. With it, the losses of micro-batches add up to the batch's.

A loss is a sum over rows divided by a weight: the number of rows or of targets, or the sum of their weights.
It can't be inferred from the loss, so it is declared by a method of the model

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
import numpy as np

import weft as wf
from weft.core.describe import describe
from weft.core.errors import ProgramError
from weft.core.tensor import Tensor, is_tensor
from weft.core.types import PyTree, at_least_float32

from ..core.field_types import is_finite_number

WeightFunction = Callable[[Any], Any]


def resolve_weight(weight: WeightFunction | None, model: PyTree) -> WeightFunction | None:
    """The weight function: the step's if there is one, else the model's `loss_weight`, else None."""
    if weight is not None:
        return weight
    # Look in the class: a parameter called loss_weight is not a method.
    return model.loss_weight if callable(getattr(type(model), "loss_weight", None)) else None


def batch_weight(weight: WeightFunction, batch: PyTree) -> float | Tensor:
    """The weight of a batch: a number if it depends only on sizes, otherwise a scalar float tensor."""
    value = weight(batch)
    if is_finite_number(value) and value > 0:
        return float(value)
    real = isinstance(value, Tensor) and not jnp.issubdtype(value.dtype, jnp.complexfloating)
    if not real or value.dims:
        shown = describe(value) if isinstance(value, Tensor) else repr(value)
        raise ProgramError(
            f"the weight of the batch is {shown}",
            rule="a weight is the divisor of the loss: a positive number, or a real scalar tensor",
            hint='sum it: weight=lambda batch: wf.sum(batch["weights"])',
        )
    return value.astype(at_least_float32(value.dtype))


def widest_float() -> np.dtype:
    """float64 if it is enabled: a share rounded to float32 would round the gradients."""
    return jnp.result_type(float)


def weight_as_tensor(weight: float | Tensor) -> Tensor:
    """The weight as a scalar tensor."""
    return weight if isinstance(weight, Tensor) else wf.full((), weight, widest_float())


def microbatch_shares(
    weight: WeightFunction, total: float | Tensor, parts: PyTree, micro: wf.Dim
) -> tuple[Tensor, PyTree]:
    """Each micro-batch's share of the batch's weight, along `micro`, and the micro-batches to compute.

    Args:
      weight: a function from a batch to its weight.
      total: the weight of the batch.
      parts: the batch split along `micro`.
      micro: the dim of the micro-batches.
    """
    numbers: list[float] = []

    def weight_of_part(part: PyTree) -> Tensor:
        value = batch_weight(weight, part)
        numbers.extend([] if isinstance(value, Tensor) else [value])
        return weight_as_tensor(value)

    weights = wf.vmap(weight_of_part, micro)(parts)
    if numbers and not isinstance(total, Tensor):
        _check_sum(numbers[0], total, micro.size)
        return wf.full([micro], numbers[0] / total, widest_float()), parts
    total = weight_as_tensor(total)
    # The loss of a part with weight 0 may be 0 / 0. Its gradients are NaN then, even times a share of 0, so
    # such a part computes the rows of the part with the largest weight instead.
    has_weight, heaviest = weights > 0, wf.argmax(weights, micro)

    def with_weight(t: PyTree) -> PyTree:
        return wf.where(has_weight, t, wf.take(t, heaviest, micro)) if is_tensor(t) and micro in t.dims else t

    parts = jax.tree.map(with_weight, parts, is_leaf=is_tensor)
    return weights / wf.where(total == 0, 1.0, total), parts


def _check_sum(part: float, total: float, count: int) -> None:
    if not math.isclose(part * count, total, rel_tol=1e-6):
        raise ProgramError(
            f"the weight of the batch is {total:g}, and that of each of its {count} parts is {part:g}",
            rule="a weight is the divisor of the loss; the weights of the parts add up to the batch's",
            hint="weight=train.count_rows for a mean over equal rows, "
            "weight=lambda batch: wf.ones(()) for a plain sum",
        )


def unknown_weight_error(model: PyTree, micro: int) -> ProgramError:
    """The error for micro-batches of a loss with an unknown weight."""
    return ProgramError(
        f"micro={micro} needs the weight of each micro-batch, and {type(model).__name__} has no "
        "loss_weight(batch)",
        rule="micro-batches are combined by weight, the divisor of the loss of each; "
        "it can't be inferred from the loss",
        hint='train_step(..., weight=lambda batch: wf.sum(batch["weights"])), or another divisor; '
        "weight=train.count_rows for a mean over equal rows",
    )
