"""The rows of a batch: count them, and distribute them to micro-batches or replicas.

A batch is any pytree. Its rows are the dim `batch` of its tensors; all rows share the tensors without that
dim, and scalars.
"""

from __future__ import annotations

import jax
from jax.tree_util import KeyPath

import weft as wf
from weft.core.describe import describe
from weft.core.errors import ShapeError, TensorTypeError
from weft.core.tensor import Tensor, is_tensor
from weft.core.types import PyTree

BATCH_DIM = "batch"  # the dim of a batch's rows


def count_rows(batch: PyTree) -> int:
    """The number of rows of a batch: the `weight=` of a loss that is a mean over equal rows.

    >>> count_rows({"x": wf.ones("batch=8 d=4"), "scale": wf.ones("d=4")})
    8
    """
    found = [d for t in jax.tree.leaves(batch, is_leaf=is_tensor) if (d := _batch_dim(t)) is not None]
    if not found:
        raise _no_rows_error("counted")
    return found[0].size


def distribute_rows(batch: PyTree, to: wf.Dim) -> PyTree:
    """Distribute the rows of a batch round-robin: row n goes to index n modulo the size of the new dim `to`.

    Each device distributes the rows that it has, so nothing is sent if every part divides evenly. (Contiguous
    parts would need an all-to-all: each device would own all rows of some parts.) All parts share the tensors
    without the dim `batch`, and scalars. Tensors that already have the new dim don't change.
    """
    name = to.name.lstrip("_")
    shown = f"{name}={to.size}"

    def distribute(path: KeyPath, t: PyTree) -> PyTree:
        rows = _batch_dim(t)
        if rows is None or to in t.dims:
            _check_not_raw_array(path, t)
            return t
        if rows.size % to.size:
            raise ShapeError(
                f"the rows of {describe(t)} can't be split over {shown}: "
                f"{rows.size} = {rows.size // to.size} · {to.size} + {rows.size % to.size}",
                rule=f"a batch is split evenly, so {name} must divide the number of its rows",
                hint=f"a batch of {max(rows.size // to.size, 1) * to.size} rows, or another {name}",
            )
        return wf.split(t, rows, [rows.resize(rows.size // to.size), to])

    parts = jax.tree_util.tree_map_with_path(distribute, batch, is_leaf=is_tensor)
    if not any(is_tensor(t) and to in t.dims for t in jax.tree.leaves(parts, is_leaf=is_tensor)):
        raise _no_rows_error(f"split over {shown}")
    return parts


def _batch_dim(t: PyTree) -> wf.Dim | None:
    return next((d for d in t.dims if d.name == BATCH_DIM), None) if isinstance(t, Tensor) else None


def _check_not_raw_array(path: KeyPath, leaf: PyTree) -> None:
    """Raise an error for a raw array: it is unknown whether its first dimension is the rows."""
    shape = () if isinstance(leaf, Tensor) else tuple(getattr(leaf, "shape", ()))
    if shape:
        raise TensorTypeError(
            f"batch{jax.tree_util.keystr(path)} is a raw array of shape {shape}",
            rule=f"the rows of a batch are the dim {BATCH_DIM} of its tensors; a raw array has no named dims",
            hint=f"wf.tensor(array, dims), with {BATCH_DIM} among the dims if it has a value for each row",
        )


def _no_rows_error(purpose: str) -> ShapeError:
    return ShapeError(
        f"no tensor of the batch has a dim {BATCH_DIM} to be {purpose}",
        rule=f"the rows of a batch are the dim {BATCH_DIM} of its tensors",
        hint=f"call it {BATCH_DIM}: wf.tensor(array, [wf.Dim('{BATCH_DIM}', rows), length])",
    )
