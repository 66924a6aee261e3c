"""Look-up by index along a dim.

Where the dim is split, every device looks up the indices that fall into its own block and has zero
for the others: the result is a pending sum. The table stays where it is, and so does its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import collectives, context
from ..core.collectives import Axes
from ..core.describe import describe, format_call
from ..core.dims import Dim, as_dim, check_distinct, format_dims, select_dim, union_dims
from ..core.errors import DimError, ShapeError, TensorTypeError, WeftError
from ..core.layout import axes_of
from ..core.op import op
from ..core.operands import as_slice, check_along, slice_tensor
from ..core.padding import block_start, fill_padding, global_positions, is_uneven
from ..core.placement import canonical_dtype
from ..core.reshard import reshard, reshard_together
from ..core.tensor import Tensor
from ..core.types import cast_like, constant_like
from .elementwise import add, align, astype
from .indexing import check_value_dtype


def take(table: Tensor, ids: Any, dim: Any, fill: Any = None) -> Tensor:
    """The elements of a table at given indices along a dim.

    Dims that both have are aligned. The others of `ids` stand in the result where `dim` stood.

    Args:
      table: the tensor to look up in.
      ids: integers, a tensor or one number; negative ones are out of range.
      dim: the dim of the table that they index.
      fill: the result for an index in a tensor that is out of range; by default NaN, for an integer
        table the lowest (unsigned: the greatest) integer. The same inside programs and outside. A Python
        number out of range is an error.

    >>> import weft as wf
    >>> table = wf.tensor([[1.0, 2.0], [3.0, 4.0]], "vocab=2 d_model=2")
    >>> wf.take(table, wf.tensor([1, 0, 1], "length=3"), "vocab").numpy().tolist()
    [[3.0, 4.0], [1.0, 2.0], [3.0, 4.0]]
    """
    try:
        if fill is None and isinstance(ids, int | np.integer) and isinstance(table, Tensor):
            _check_range(table, int(ids), dim)
        return _take(table, ids, dim, fill)
    except WeftError as error:
        raise error.located(format_call("take", (table, ids, dim), {})) from None


@op(numbers="dynamic")
def _take(table: Tensor, ids: Any, dim: Any, fill: Any) -> Tensor:
    table, ids = as_slice(table), _as_ids(ids)
    chosen = _index_dim(table, ids, dim)
    if table.dtype == jnp.bool_:  # a pending sum can't be of truth values
        return astype(_look_up(astype(table, jnp.int32), ids, chosen, fill), jnp.bool_)
    return _look_up(table, ids, chosen, fill)


def _look_up(table: Tensor, ids: Tensor, chosen: Dim, fill: Any) -> Tensor:
    every = union_dims([table.dims, ids.dims])
    splits = dict(zip(every, context.require().splits(every), strict=True))
    shared, added, rest = _groups(table, ids, chosen)
    array, index = reshard_together([table, ids])
    array = align(array, table.dims, (*shared, chosen, *rest))
    index = align(_wide(index), ids.dims, (*shared, *added))
    rows = _row if index.size == 1 else _rows
    result = _for_each(shared, rows)(array, _local_places(index, chosen, splits[chosen]))
    filling = constant_like(_default_fill(result.dtype) if fill is None else fill, result)
    outside = _outside(index, chosen)
    if splits[chosen]:  # one device alone adds the filling, so that the sum has it once
        outside &= collectives.axis_index(splits[chosen]) == 0
    result = jnp.where(outside.reshape(outside.shape + (1,) * len(rest)), filling, result)
    place = table.dims.index(chosen)
    dims = (*table.dims[:place], *added, *table.dims[place + 1 :])
    result = align(result, (*shared, *added, *rest), dims)
    result = fill_padding(result, dims, tuple(splits[d] for d in dims))
    return slice_tensor(result, dims, pending=splits[chosen])


@op
def one_hot(ids: Any, dim: Dim, dtype: Any = jnp.float32) -> Tensor:
    """1 where the index along a new last dim is `ids`, else 0; out of range all is 0.

    Args:
      ids: whole numbers.
      dim: the new dim.
      dtype: the type of the elements.

    >>> import weft as wf
    >>> wf.one_hot(wf.tensor([2, 0], "batch=2"), wf.Dim("vocab", 3)).numpy().tolist()
    [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    ids = _as_ids(ids)
    dims = (*ids.dims, as_dim(dim))
    check_distinct(dims)
    canonical_dtype(dtype)
    program = context.require()
    splits = program.splits(dims)
    axes = axes_of(splits)
    index = _wide(reshard(ids, axes=axes))[..., None]
    result = (index == global_positions(dims[-1], splits[-1])).astype(dtype)
    return slice_tensor(fill_padding(result, dims, splits), dims)


@op(numbers="dynamic")
def scatter_add(x: Tensor, ids: Any, updates: Any, dim: Any) -> Tensor:
    """`x` with updates added at given indices along a dim; those out of range are dropped.

    Dims that `ids` and `x` both have are aligned; over the others of `ids` updates are added up.

    Args:
      x: what is added to.
      ids: whole numbers; negative ones are out of range.
      updates: a tensor with dims of `ids` and of `x` (without `dim`), or a number.
      dim: the dim of `x` that is indexed.

    >>> import weft as wf
    >>> wf.scatter_add(wf.zeros("word=3"), wf.tensor([0, 2, 2], "length=3"), 1, "word")
    f32[word=3] [1., 0., 2.]
    """
    x, ids, updates = as_slice(x), _as_ids(ids), as_slice(updates)
    if x.dtype == jnp.bool_:
        raise TensorTypeError(
            f"updates are to be added to {describe(x)}",
            rule="truth values are not added up",
            hint="count them and compare: wf.scatter_add(x.astype(jnp.int32), ids, 1, dim) > 0",
        )
    check_value_dtype(x, updates)
    chosen = _index_dim(x, ids, dim)
    every = union_dims([x.dims, ids.dims, updates.dims])
    splits = dict(zip(every, context.require().splits(every), strict=True))
    shared, summed, rest = _groups(x, ids, chosen)
    lost = [d for d in updates.dims if d not in (*shared, *summed, *rest)]
    if lost:
        raise DimError(
            f"dims {format_dims(lost)} of the updates [{format_dims(updates.dims)}] have no place in the "
            "result",
            rule="updates have dims of the indices and of the tensor, without the one indexed",
            hint=f'sum them first: wf.sum(updates, "{lost[0].name}")',
        )
    added = _scattered(x, ids, updates, chosen, splits)
    return add(x, added)


def _scattered(x: Tensor, ids: Tensor, updates: Tensor, chosen: Dim, splits: dict[Dim, Axes]) -> Tensor:
    """The updates at their places among zeros, pending over the axes of dims that are added up."""
    shared, summed, rest = _groups(x, ids, chosen)
    axes = axes_of(splits.values())
    mapped = collectives.varying_axes(ids._data) | collectives.varying_axes(updates._data)
    axes |= mapped & context.require().vmapped_axes
    index, array = reshard(ids, axes=axes), reshard(updates, axes=axes)
    place = _local_places(_wide(index), chosen, splits[chosen])
    # The padding of the indices is zero, which is an index like any other.
    ids_splits = tuple(splits[d] for d in ids.dims)
    sizes = {d: context.require().slice_size(d, one) for d, one in splits.items()}
    place = fill_padding(place, ids.dims, ids_splits, sizes[chosen])
    place = align(place, ids.dims, (*shared, *summed))
    order = (*shared, *summed, *rest)
    array = cast_like(align(array, updates.dims, order), x._data)
    array = jnp.broadcast_to(array, [sizes[d] for d in order])
    zeros = jnp.zeros([sizes[d] for d in (*shared, chosen, *rest)], x.dtype)
    zeros = collectives.pvary(zeros, collectives.varying_axes(array))
    result = _for_each(shared, _add_row if place.size == 1 else _add_rows)(zeros, place, array)
    result = cast_like(align(result, (*shared, chosen, *rest), x.dims), x._data)
    result = fill_padding(result, x.dims, tuple(splits[d] for d in x.dims))
    return slice_tensor(result, x.dims, pending={a for d in summed for a in splits[d]})


# What they share


def _as_ids(ids: Any) -> Tensor:
    ids = as_slice(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TensorTypeError(
            f"the indices are {describe(ids)}",
            rule="indices are whole numbers",
            hint="convert them: ids.astype(jnp.int32)",
        )
    return ids


def _index_dim(table: Tensor, ids: Tensor, dim: Any) -> Dim:
    chosen = select_dim(table.dims, dim)
    check_along([chosen])
    if any(d.name == chosen.name for d in ids.dims):
        raise DimError(
            f"the indices [{format_dims(ids.dims)}] have the dim {chosen.name} that they index",
            rule="dims that both have are aligned, so the dim that is indexed is the table's alone",
            hint=f'rename the indices\' dim: ids.rename({chosen.name}="{chosen.name}2")',
        )
    return chosen


def _groups(table: Tensor, ids: Tensor, chosen: Dim) -> tuple[list[Dim], list[Dim], list[Dim]]:
    """The dims that both have, those of the indices alone, and those of the table alone."""
    shared = [d for d in table.dims if d in ids.dims]
    alone = [d for d in ids.dims if d not in table.dims]
    return shared, alone, [d for d in table.dims if d not in shared and d != chosen]


def _wide(index: Any) -> Any:
    """Indices in a signed type that holds every size: unsigned ones too large become negative."""
    return index.astype(jnp.int64 if index.dtype.itemsize == 8 else jnp.int32)


def _outside(index: Any, dim: Dim) -> Any:
    return (index < 0) | (index >= dim.size)


def _local_places(index: Any, dim: Dim, axes: Axes) -> Any:
    """Where each index lies in this device's block; if it doesn't, a place outside, padding included."""
    block = context.require().slice_size(dim, axes)
    place = index - block_start(axes, block) if axes else index
    return jnp.where(index >= dim.size, block, place) if is_uneven(dim, axes) else place


def _for_each(shared: list[Dim], fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` for each element of the leading shared dims."""
    for _ in shared:
        fn = jax.vmap(fn)
    return fn


def _rows(table: Any, places: Any) -> Any:
    return table.at[places].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _add_rows(x: Any, places: Any, updates: Any) -> Any:
    return x.at[places].add(updates, mode="drop", wrap_negative_indices=False)


# XLA makes slices of looking one place up, and of adding at one; it merges slices of slices, and takes a
# place outside the inner one from beyond it. So one place is always inside, and what is not wanted is masked.


def _row(table: Any, place: Any) -> Any:
    inside, place = _inside(table, place)
    row = table.at[place].get(mode="promise_in_bounds")
    return jnp.where(inside.reshape(inside.shape + (1,) * (table.ndim - 1)), row, constant_like(0, row))


def _add_row(x: Any, place: Any, update: Any) -> Any:
    inside, place = _inside(x, place)
    update = jnp.where(inside.reshape(inside.shape + (1,) * (x.ndim - 1)), update, jnp.zeros((), x.dtype))
    return x.at[place].add(update, mode="promise_in_bounds")


def _inside(table: Any, place: Any) -> tuple[Any, Any]:
    return (place >= 0) & (place < table.shape[0]), jnp.clip(place, 0, table.shape[0] - 1)


def _default_fill(dtype: Any) -> Any:
    """What can't be mistaken for an element, as `jax.numpy.take(mode="fill")` has it."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    info = jnp.iinfo(dtype)
    return info.max if info.min == 0 else info.min


def _check_range(table: Tensor, index: int, dim: Any) -> None:
    """An error if a number is out of range. Those of a tensor are data, unknown while a program is traced."""
    chosen = select_dim(table.dims, dim)
    if not 0 <= index < chosen.size:
        raise ShapeError(
            f"index {index} is out of range for {chosen}",
            rule=f"indices along {chosen.name} are 0 to {chosen.size - 1}",
            hint="fix the index, or give the result for it: take(…, fill=0)",
        )
