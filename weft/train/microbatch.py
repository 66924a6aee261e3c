"""The rows of a batch: counted, and dealt out to micro-batches or to replicas.

A batch is any pytree. Its rows are the dim `batch` of its tensors; tensors without that dim, and scalars,
belong to all rows.
"""

from __future__ import annotations

from typing import Any

import jax

import weft as wf
from weft.core.describe import describe
from weft.core.errors import ShapeError, TensorTypeError
from weft.core.tensor import Tensor, is_tensor

BATCH_DIM = "batch"  # the dim of a batch's rows


def count_rows(batch: Any) -> int:
    """The number of rows of a batch: the `weight=` of a loss that is a mean over equal rows.

    >>> count_rows({"x": wf.ones("batch=8 d=4"), "scale": wf.ones("d=4")})
    8
    """
    found = [d for t in jax.tree.leaves(batch, is_leaf=is_tensor) if (d := _rows_of(t)) is not None]
    if not found:
        raise _without_rows("counted")
    return found[0].size


def deal_rows(batch: Any, to: wf.Dim) -> Any:
    """The batch with its rows dealt out like cards: row n goes to index n modulo the size of a new dim.

    Each device deals the rows that it has, and nothing is sent, if every part is split evenly. Tensors
    without the dim `batch`, and scalars, are shared by all parts. Tensors that already have the new dim stay
    as they are.
    """
    name = to.name.lstrip("_")
    shown = f"{name}={to.size}"

    def one(path: Any, t: Any) -> Any:
        rows = _rows_of(t)
        if rows is None or to in t.dims:
            _check_shared(path, t)
            return t
        if rows.size % to.size:
            raise ShapeError(
                f"the rows of {describe(t)} can't be dealt to {shown}: "
                f"{rows.size} = {rows.size // to.size} · {to.size} + {rows.size % to.size}",
                rule=f"a batch is dealt out evenly, so {name} divides the number of its rows",
                hint=f"a batch of {max(rows.size // to.size, 1) * to.size} rows, or another {name}",
            )
        return wf.split(t, rows, [rows.resize(rows.size // to.size), to])

    made = jax.tree_util.tree_map_with_path(one, batch, is_leaf=is_tensor)
    if not any(is_tensor(t) and to in t.dims for t in jax.tree.leaves(made, is_leaf=is_tensor)):
        raise _without_rows(f"dealt to {shown}")
    return made


def _rows_of(t: Any) -> wf.Dim | None:
    return next((d for d in t.dims if d.name == BATCH_DIM), None) if isinstance(t, Tensor) else None


def _check_shared(path: Any, leaf: Any) -> None:
    """An error for a raw array: nothing tells whether its first dimension is the rows."""
    shape = () if isinstance(leaf, Tensor) else tuple(getattr(leaf, "shape", ()))
    if shape:
        raise TensorTypeError(
            f"batch{jax.tree_util.keystr(path)} is a raw array of shape {shape}",
            rule=f"the rows of a batch are the dim {BATCH_DIM} of its tensors; "
            "a raw array does not name its dims",
            hint=f"wf.tensor(array, dims), with {BATCH_DIM} among the dims if it has a value for each row",
        )


def _without_rows(what: str) -> ShapeError:
    return ShapeError(
        f"no tensor of the batch has a dim {BATCH_DIM} to be {what}",
        rule=f"the rows of a batch are the dim {BATCH_DIM} of its tensors",
        hint=f"call it {BATCH_DIM}: wf.tensor(array, [wf.Dim('{BATCH_DIM}', rows), length])",
    )
