"""The rows of a batch: dealt out, to micro-batches or to replicas, and counted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import weft as wf
from weft.errors import ShapeError
from weft.tensor import Tensor, describe, is_tensor

ROWS = "batch"  # the dim of a batch's rows


def dealt(batch: Any, to: wf.Dim) -> Any:
    """The batch with its rows dealt out like cards: row n goes to place n modulo the size of a new dim.

    So every device deals what it has, and nothing is sent, where each place's rows are split evenly. Tensors
    without the dim `batch` are for all places alike and stay as they are; so do those that were dealt before.
    """

    def one(t: Any) -> Any:
        if not isinstance(t, Tensor) or to in t.dims:
            return t
        rows = next((d for d in t.dims if d.name == ROWS), None)
        if rows is None:
            return t
        if rows.size % to.size:
            raise ShapeError(
                f"the rows of {describe(t)} can't be dealt to {to}: "
                f"{rows.size} = {rows.size // to.size} · {to.size} + {rows.size % to.size}",
                rule=f"a batch is dealt out evenly, so {to.name} divides the number of its rows",
                hint=f"a batch of {max(rows.size // to.size, 1) * to.size} rows, or another {to.name}",
            )
        return wf.split(t, rows, [rows.resize(rows.size // to.size), to])

    made = jax.tree.map(one, batch, is_leaf=is_tensor)
    if not any(is_tensor(t) and to in t.dims for t in jax.tree.leaves(made, is_leaf=is_tensor)):
        raise ShapeError(
            f"no tensor of the batch has a dim {ROWS} to be dealt to {to}",
            rule=f"the rows of a batch are the dim {ROWS} of its tensors",
            hint=f"call it {ROWS}: wf.tensor(array, [wf.Dim('{ROWS}', rows), length])",
        )
    return made


def counted(batch: Any, but: tuple[wf.Dim, ...] = ()) -> Tensor | None:
    """How many targets a batch has, by their weights if there are any; None if it has none.

    Args:
      batch: with `targets` and `weights` or without, as `models.Batch`.
      but: dims that are not counted together.
    """
    weights, targets = (getattr(batch, name, None) for name in ("weights", "targets"))
    if weights is not None:
        return wf.sum(weights.astype(jnp.float32), [d for d in weights.dims if d not in but])
    if targets is None:
        return None
    each = targets.size // max(1, *(d.size for d in but)) if but else targets.size
    return wf.full(but, float(each), jnp.float32)
