"""Lookup by index along a dim.

If the dim is split, every device looks up the indices within its own block, and has zeros for the others: the
result is a pending sum. Neither the table nor its gradient is communicated along the dim's axes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ..core import collectives
from ..core.call_errors import checks_arguments
from ..core.collectives import Axes
from ..core.context import active
from ..core.describe import describe, format_call
from ..core.dims import Dim, DimLike, as_dim, check_distinct, format_dims, select_dim, union_dims
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
from .typing import ArrayFn, Number, Operand


@checks_arguments
def take(table: Tensor, ids: Operand, dim: DimLike, fill: Number | None = None) -> Tensor:
    """The elements of a table at the given indices along a dim.

    Dims that the table and `ids` share are aligned. The other dims of `ids` replace `dim` in the result.

    Args:
      table: the tensor to look up in.
      ids: an integer tensor or an integer. Negative indices are out of range.
      dim: the dim of the table to index.
      fill: the result for indices of a tensor that are out of range. Defaults to NaN, or for an integer table
        to the lowest integer (unsigned: the highest). An integer out of range is an error.

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


@op(example=lambda op, x, ids: op(x, ids, "a"), mixes_rows=True, split_invariant=True, numbers="dynamic")
def _take(table: Tensor, ids: Operand, dim: DimLike, fill: Number | None) -> Tensor:
    table, ids = as_slice(table), _as_ids(ids)
    chosen = _index_dim(table, ids, dim)
    if table.dtype == jnp.bool_:  # booleans can't be a pending sum
        return astype(_look_up(astype(table, jnp.int32), ids, chosen, fill), jnp.bool_)
    return _look_up(table, ids, chosen, fill)


def _look_up(table: Tensor, ids: Tensor, chosen: Dim, fill: Number | None) -> Tensor:
    all_dims = union_dims([table.dims, ids.dims])
    splits = dict(zip(all_dims, active.context.splits(all_dims), strict=True))
    shared, added, rest = _partition_dims(table, ids, chosen)
    array, index = reshard_together([table, ids])
    array = align(array, table.dims, (*shared, chosen, *rest))
    index = align(_signed(index), ids.dims, (*shared, *added))
    local = _local_index(index, chosen, splits[chosen])
    if index.size == 1:
        result = _vmap_leading(shared, _gather_one)(array, local)
    else:
        result = _gather(array, local, len(shared))
    fill_value = constant_like(_default_fill(result.dtype) if fill is None else fill, result)
    outside = _out_of_range(index, chosen)
    if splits[chosen]:  # only one device adds the fill value, so that the sum contains it once
        outside &= collectives.axis_index(splits[chosen]) == 0
    result = jnp.where(outside.reshape(outside.shape + (1,) * len(rest)), fill_value, result)
    n = table.dims.index(chosen)
    dims = (*table.dims[:n], *added, *table.dims[n + 1 :])
    result = align(result, (*shared, *added, *rest), dims)
    result = fill_padding(result, dims, tuple(splits[d] for d in dims))
    return slice_tensor(result, dims, pending=splits[chosen])


@op(example=lambda op, j: op(j, Dim("n", 5)))
def one_hot(ids: Operand, dim: DimLike, dtype: DTypeLike = jnp.float32) -> Tensor:
    """One-hot vectors along a new last dim. An index out of range gives zeros.

    Args:
      ids: an integer tensor.
      dim: the new dim.
      dtype: the dtype of the result.

    >>> import weft as wf
    >>> wf.one_hot(wf.tensor([2, 0], "batch=2"), "vocab=3").numpy().tolist()
    [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    index = _as_ids(ids)
    dims = (*index.dims, as_dim(dim))
    check_distinct(dims)
    canonical_dtype(dtype)
    ctx = active.context
    splits = ctx.splits(dims)
    axes = axes_of(splits)
    array = _signed(reshard(index, axes=axes))[..., None]
    result = (array == global_positions(dims[-1], splits[-1])).astype(dtype)
    return slice_tensor(fill_padding(result, dims, splits), dims)


@op(example=lambda op, x, ids: op(x, ids, 1.5, "a"), mixes_rows=True, numbers="dynamic")
def scatter_add(x: Tensor, ids: Operand, updates: Operand, dim: DimLike) -> Tensor:
    """Add updates to `x` at the given indices along a dim. Updates at indices out of range are dropped.

    Dims that `ids` and `x` share are aligned. Over the other dims of `ids` the updates are summed.

    Args:
      x: the tensor to add to.
      ids: an integer tensor. Negative indices are out of range.
      updates: a tensor with dims of `ids` and of `x` (without `dim`), or a number.
      dim: the dim of `x` to index.

    >>> import weft as wf
    >>> wf.scatter_add(wf.zeros("word=3"), wf.tensor([0, 2, 2], "length=3"), 1, "word")
    f32[word=3] [1., 0., 2.]
    """
    x, ids, updates = as_slice(x), _as_ids(ids), as_slice(updates)
    if x.dtype == jnp.bool_:
        raise TensorTypeError(
            f"scatter_add was given {describe(x)}",
            rule="booleans can't be added",
            hint="count them and compare: wf.scatter_add(x.astype(jnp.int32), ids, 1, dim) > 0",
        )
    check_value_dtype(x, updates)
    chosen = _index_dim(x, ids, dim)
    all_dims = union_dims([x.dims, ids.dims, updates.dims])
    splits = dict(zip(all_dims, active.context.splits(all_dims), strict=True))
    shared, summed, rest = _partition_dims(x, ids, chosen)
    lost = [d for d in updates.dims if d not in (*shared, *summed, *rest)]
    if lost:
        raise DimError(
            f"dims {format_dims(lost)} of the updates [{format_dims(updates.dims)}] are not in the result",
            rule="updates have only dims of the indices and of the tensor, without the indexed dim",
            hint=f'sum them first: wf.sum(updates, "{lost[0].name}")',
        )
    added = _scattered(x, ids, updates, chosen, splits)
    return add(x, added)


def _scattered(x: Tensor, ids: Tensor, updates: Tensor, chosen: Dim, splits: dict[Dim, Axes]) -> Tensor:
    """The updates scattered into zeros, pending over the axes of the summed dims."""
    shared, summed, rest = _partition_dims(x, ids, chosen)
    axes = axes_of(tuple(splits.values()))
    mapped = collectives.varying_axes(ids._data) | collectives.varying_axes(updates._data)
    axes |= mapped & active.context.vmap.axes
    index, array = reshard(ids, axes=axes), reshard(updates, axes=axes)
    index = _local_index(_signed(index), chosen, splits[chosen])
    # The padding of the indices is zero, which is a valid index: move it out of range.
    ids_splits = tuple(splits[d] for d in ids.dims)
    sizes = {d: active.context.slice_size(d, one) for d, one in splits.items()}
    index = fill_padding(index, ids.dims, ids_splits, sizes[chosen])
    index = align(index, ids.dims, (*shared, *summed))
    order = (*shared, *summed, *rest)
    array = cast_like(align(array, updates.dims, order), x._data)
    array = jnp.broadcast_to(array, [sizes[d] for d in order])
    zeros = jnp.zeros([sizes[d] for d in (*shared, chosen, *rest)], x.dtype)
    zeros = collectives.pvary(zeros, collectives.varying_axes(array))
    scatter = _scatter_one if index.size == 1 else _scatter
    result = _vmap_leading(shared, scatter)(zeros, index, array)
    result = cast_like(align(result, (*shared, chosen, *rest), x.dims), x._data)
    result = fill_padding(result, x.dims, tuple(splits[d] for d in x.dims))
    return slice_tensor(result, x.dims, pending={a for d in summed for a in splits[d]})


def _as_ids(ids: Operand) -> Tensor:
    t = as_slice(ids)
    if not jnp.issubdtype(t.dtype, jnp.integer):
        raise TensorTypeError(
            f"the indices are {describe(t)}",
            rule="indices are integers",
            hint="convert them: ids.astype(jnp.int32)",
        )
    return t


def _index_dim(table: Tensor, ids: Tensor, dim: DimLike) -> Dim:
    chosen = select_dim(table.dims, dim)
    check_along([chosen])
    if any(d.name == chosen.name for d in ids.dims):
        raise DimError(
            f"the indices [{format_dims(ids.dims)}] have the dim {chosen.name} that they index",
            rule="shared dims are aligned, so only the table may have the indexed dim",
            hint=f'rename the indices\' dim: ids.rename({chosen.name}="{chosen.name}2")',
        )
    return chosen


def _partition_dims(table: Tensor, ids: Tensor, chosen: Dim) -> tuple[list[Dim], list[Dim], list[Dim]]:
    """The shared dims, the dims of the indices only, and the dims of the table only."""
    shared = [d for d in table.dims if d in ids.dims]
    alone = [d for d in ids.dims if d not in table.dims]
    return shared, alone, [d for d in table.dims if d not in shared and d != chosen]


def _signed(index: jax.Array) -> jax.Array:
    """Cast indices to a signed dtype. Unsigned ones that are too large become negative: out of range."""
    return index.astype(jnp.int64 if index.dtype.itemsize == 8 else jnp.int32)


def _out_of_range(index: jax.Array, dim: Dim) -> jax.Array:
    return (index < 0) | (index >= dim.size)


def _local_index(index: jax.Array, dim: Dim, axes: Axes) -> jax.Array:
    """Indices relative to this device's block. Those of other blocks and of padding are out of its range."""
    block = active.context.slice_size(dim, axes)
    local = index - block_start(axes, block) if axes else index
    return jnp.where(index >= dim.size, block, local) if is_uneven(dim, axes) else local


def _vmap_leading(shared: list[Dim], fn: ArrayFn) -> ArrayFn:
    """Vectorize `fn` over the leading shared dims."""
    for _ in shared:
        fn = jax.vmap(fn)
    return fn


def _gather(table: jax.Array, index: jax.Array, shared: int) -> jax.Array:
    """The rows of a table at some indices, zeros for those out of range; the first dims are shared.

    It is `table.at[index].get(mode="fill")` under a vmap for each shared dim, which JAX takes long to trace.
    """
    batch = tuple(range(shared))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(index.ndim, index.ndim + table.ndim - shared - 1)),
        collapsed_slice_dims=(shared,),
        start_index_map=(shared,),
        operand_batching_dims=batch,
        start_indices_batching_dims=batch,
    )
    sizes = (*[1] * (shared + 1), *table.shape[shared + 1 :])
    positions = lax.expand_dims(index, [index.ndim])
    return lax.gather(table, positions, numbers, sizes, mode="fill", fill_value=0)


def _scatter(x: jax.Array, index: jax.Array, updates: jax.Array) -> jax.Array:
    return x.at[index].add(updates, mode="drop", wrap_negative_indices=False)


# XLA turns a gather or scatter of one element into a slice, and merges slices of slices. An index outside the
# inner slice then reads elements beyond it, which is wrong. So clip a single index into range, and mask the
# result.


def _gather_one(table: jax.Array, index: jax.Array) -> jax.Array:
    inside, index = _clip_index(table, index)
    row = table.at[index].get(mode="promise_in_bounds")
    return jnp.where(inside.reshape(inside.shape + (1,) * (table.ndim - 1)), row, constant_like(0, row))


def _scatter_one(x: jax.Array, index: jax.Array, update: jax.Array) -> jax.Array:
    inside, index = _clip_index(x, index)
    update = jnp.where(inside.reshape(inside.shape + (1,) * (x.ndim - 1)), update, jnp.zeros((), x.dtype))
    return x.at[index].add(update, mode="promise_in_bounds")


def _clip_index(table: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    return (index >= 0) & (index < table.shape[0]), jnp.clip(index, 0, table.shape[0] - 1)


def _default_fill(dtype: DTypeLike) -> float:
    """A value that can't be mistaken for an element, as in `jax.numpy.take(mode="fill")`."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    info = jnp.iinfo(dtype)
    return info.max if info.min == 0 else info.min


def _check_range(table: Tensor, index: int, dim: DimLike) -> None:
    """Raise an error if an integer is out of range. The indices of a tensor are unknown during tracing."""
    chosen = select_dim(table.dims, dim)
    if not 0 <= index < chosen.size:
        raise ShapeError(
            f"index {index} is out of range for {chosen}",
            rule=f"indices along {chosen.name} are 0 to {chosen.size - 1}",
            hint="correct the index, or pass the result for it: take(…, fill=0)",
        )
