"""Sorting, searching and cumulative ops along a dim: argmax, top_k, sort, searchsorted, cumsum.

Along a split dim the devices exchange candidates only (one per device for argmax, k for top_k), the totals of
their blocks (for cumsum), or counts (for searchsorted). A full sort gathers the dim. Blocks are on the
devices in order, and padding comes last. JAX breaks ties in favor of the lowest index, so padding loses to
every element that equals its fill value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..core import collectives
from ..core.collectives import Axes
from ..core.context import active
from ..core.dims import Dim, DimLike, as_dim, check_distinct, format_dims, select_dim, union_dims
from ..core.errors import DimError, ShapeError, TensorTypeError
from ..core.op import op
from ..core.operands import as_slice, check_along, slice_tensor
from ..core.padding import block_start, fill_padding, is_uneven
from ..core.reshard import layout_splits, reshard, reshard_together
from ..core.tensor import Tensor
from ..core.types import PyTree
from . import scaled_product
from .elementwise import align
from .reduce import extreme_value, require_float, require_ordered
from .typing import ArrayFn, Operand

T = TypeVar("T")


def _resolve_dim(x: Tensor, dim: DimLike) -> tuple[Dim, int, Axes]:
    """A dim of the tensor, its index, and the axes that the layout splits it over."""
    chosen = select_dim(x.dims, dim)
    check_along([chosen])
    dim_index = x.dims.index(chosen)
    return chosen, dim_index, layout_splits(x)[dim_index]


def _replace(items: tuple[T, ...], n: int, *new: T) -> tuple[T, ...]:
    return (*items[:n], *new, *items[n + 1 :])


def _arg_extreme(x: Tensor, dim: DimLike, sign: int) -> Tensor:
    x = require_ordered(x, "argmax" if sign > 0 else "argmin")
    chosen, dim_index, axes = _resolve_dim(x, dim)
    find = jnp.argmax if sign > 0 else jnp.argmin
    fill = extreme_value(x.dtype, -sign)
    array = fill_padding(lax.stop_gradient(reshard(x)), x.dims, layout_splits(x), fill, only=[chosen])
    best = find(array, axis=dim_index, keepdims=True).astype(jnp.int32)
    if axes:
        # Candidates are gathered in the order of the blocks, so the first one still wins ties.
        values = jnp.take_along_axis(array, best, axis=dim_index)
        best = best + jnp.int32(block_start(axes, array.shape[dim_index]))
        values = collectives.all_gather(values, axes, dim_index)
        best = collectives.all_gather(best, axes, dim_index)
        best = jnp.take_along_axis(best, find(values, axis=dim_index, keepdims=True), axis=dim_index)
    # In rows of padding all elements are equal, and the first index is 0: padding is still zero.
    return slice_tensor(best.squeeze(dim_index), _replace(x.dims, dim_index))


@op(example=lambda op, x: op(x, "a"), mixes_rows=True)
def argmax(x: Tensor, dim: DimLike) -> Tensor:
    """The index of the maximum along a dim. The first one wins ties; NaN counts as the maximum.

    >>> import weft as wf
    >>> wf.argmax(wf.tensor([3, 7, 7], "a=3"), "a")
    i32[] 1
    """
    return _arg_extreme(x, dim, +1)


@op(example=lambda op, x: op(x, "a"), mixes_rows=True)
def argmin(x: Tensor, dim: DimLike) -> Tensor:
    """The index of the minimum along a dim. The first one wins ties; NaN counts as the minimum.

    >>> import weft as wf
    >>> wf.argmin(wf.tensor([7, 3, 3], "a=3"), "a")
    i32[] 1
    """
    return _arg_extreme(x, dim, -1)


@op(example=lambda op, x: op(x, "a", Dim("k", 2)), mixes_rows=True)
def top_k(x: Tensor, dim: DimLike, k_dim: DimLike) -> tuple[Tensor, Tensor]:
    """The k largest elements along a dim, in descending order, and their indices, like `jax.lax.top_k`.

    The first of equal elements comes first. Zeros are equal, unlike in JAX, where -0 comes after 0: whether a
    sum is 0 or -0 can depend on the layout.

    Args:
      x: a tensor.
      dim: the dim to select from.
      k_dim: replaces `dim` in the results; its size is k.

    >>> import weft as wf
    >>> wf.top_k(wf.tensor([3, 9, 5, 9], "a=4"), "a", "best=3")
    (i32[best=3] [9, 9, 5], i32[best=3] [1, 3, 2])
    """
    x = require_ordered(x, "top_k")
    return _largest(x, dim, k_dim, lax.top_k)


@op(example=lambda op, x: op(x, "a", Dim("k", 2)), mixes_rows=True)
def approx_max_k(
    x: Tensor, dim: DimLike, k_dim: DimLike, recall_target: float = 0.95
) -> tuple[Tensor, Tensor]:
    """The k largest elements along a dim and their indices, approximately, like `jax.lax.approx_max_k`.

    On TPUs it is faster than `top_k`, and may miss some of the largest elements. Which ones can depend on
    the layout: if the dim is split, each device searches its own block. On other devices it is `top_k`, and
    so the result is exact, and the same under every layout.

    Args:
      x: a floating-point tensor.
      dim: the dim to select from.
      k_dim: replaces `dim` in the results; its size is k.
      recall_target: the expected share of the k largest elements that are found, above 0 and at most 1.

    >>> import weft as wf
    >>> wf.approx_max_k(wf.tensor([3.0, 9.0, 5.0, 8.0], "a=4"), "a", wf.Dim("best", 2))
    (f32[best=2] [9., 8.], i32[best=2] [1, 3])
    """
    x = require_float(x, "approx_max_k")
    if not 0 < recall_target <= 1:
        raise TensorTypeError(
            f"recall_target is {recall_target}",
            rule="the recall is a share of the k largest elements, above 0 and at most 1",
            hint="wf.top_k finds all of them",
        )
    size = select_dim(x.dims, dim).size

    def select(array: jax.Array, k: int, axis: int) -> tuple[jax.Array, jax.Array]:
        def approximate(array: jax.Array) -> jax.Array:
            # The primitive compares by `>`, which does not order NaNs; `lax.top_k` does, by their sign.
            array = jnp.where(jnp.isnan(array), jnp.copysign(jnp.inf, array).astype(array.dtype), array)
            # The number of elements to compare follows from the size of the dim, not from that of the block.
            return lax.approx_max_k(array, k, axis, recall_target, reduction_input_size_override=size)[1]

        def exact(array: jax.Array) -> jax.Array:
            # JAX's own fallback sorts, and breaks ties arbitrarily.
            return lax.top_k(array, k, axis=axis)[1].astype(jnp.int32)

        found = lax.platform_dependent(lax.stop_gradient(array), tpu=approximate, default=exact)
        return jnp.take_along_axis(array, found, axis), found

    return _largest(x, dim, k_dim, select)


def _largest(
    x: Tensor, dim: DimLike, k_dim: DimLike, select: Callable[..., tuple[jax.Array, jax.Array]]
) -> tuple[Tensor, Tensor]:
    """The k largest elements along a dim; `select(array, k, axis=…)` returns those of one block."""
    chosen, dim_index, axes = _resolve_dim(x, dim)
    new = as_dim(k_dim)
    if new.size > chosen.size:
        raise ShapeError(
            f"k is {new.size} ({new}), and the dim has {chosen.size} elements ({chosen})",
            rule="k is at most the size of the dim",
            hint=f"use a smaller dim: {new.name}={chosen.size}",
        )
    dims, splits = _replace(x.dims, dim_index, new), _replace(layout_splits(x), dim_index, ())
    check_distinct(dims)
    active.context.splits(dims)
    array = _with_positive_zeros(reshard(x))
    array = fill_padding(array, x.dims, layout_splits(x), _lowest(x.dtype), only=[chosen])
    block = array.shape[dim_index]
    # The k largest elements of the dim are among the k largest of the blocks.
    values, indices = select(array, min(new.size, block), axis=dim_index)
    indices = indices.astype(jnp.int32)  # JAX makes them weakly typed if the values are
    if axes:
        indices = indices + jnp.int32(block_start(axes, block))
        values = collectives.all_gather(values, axes, dim_index)
        indices = collectives.all_gather(indices, axes, dim_index)
        values, best = lax.top_k(values, new.size, axis=dim_index)
        indices = jnp.take_along_axis(indices, best, axis=dim_index)
    indices = fill_padding(indices, dims, splits)
    return slice_tensor(values, dims, splits), slice_tensor(indices, dims, splits)


def _with_positive_zeros(array: jax.Array) -> jax.Array:
    """The array without negative zeros, which `lax.top_k` orders before zero.

    Whether a sum is 0 or -0 depends on the order of its terms, and so on the layout.
    """
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    # A difference, so that the derivative at 0 is 1.
    return array - lax.stop_gradient(jnp.where(array == 0, array, 0))


def _lowest(dtype: DTypeLike) -> float | int | bool:
    """The lowest value in the total order of `lax.top_k`, in which a negative NaN is below -∞."""
    return -math.nan if jnp.issubdtype(dtype, jnp.inexact) else extreme_value(dtype, -1)


@op(example=lambda op, x: op(x, "a"), mixes_rows=True)
def sort(x: Tensor, dim: DimLike, descending: bool = False) -> Tensor:
    """Sort the elements along a dim. A split dim is gathered.

    >>> import weft as wf
    >>> wf.sort(wf.tensor([3, 9, 5], "a=3"), "a", descending=True)
    i32[a=3] [9, 5, 3]
    """
    x = as_slice(x)
    _, dim_index, _ = _resolve_dim(x, dim)
    splits = _replace(layout_splits(x), dim_index, ())
    array = jnp.sort(reshard(x, splits), axis=dim_index, stable=True, descending=descending)
    return slice_tensor(array, x.dims, splits)


@op(example=lambda op, x: op(x, "a"), mixes_rows=True)
def argsort(x: Tensor, dim: DimLike, descending: bool = False) -> Tensor:
    """The indices that sort a dim; the sort is stable. A split dim is gathered.

    >>> import weft as wf
    >>> wf.argsort(wf.tensor([3, 9, 5], "a=3"), "a")
    i32[a=3] [0, 2, 1]
    """
    x = as_slice(x)
    _, dim_index, _ = _resolve_dim(x, dim)
    splits = _replace(layout_splits(x), dim_index, ())
    array = lax.stop_gradient(reshard(x, splits))
    order = jnp.argsort(array, axis=dim_index, stable=True, descending=descending).astype(jnp.int32)
    return slice_tensor(fill_padding(order, x.dims, splits), x.dims, splits)


@op(
    example=lambda op, x, ids: op(sort(x, "a"), ids * 0.7, "a"),
    mixes_rows=True,
    numbers="dynamic",
)
def searchsorted(sorted: Tensor, values: Operand, dim: DimLike, side: str = "left") -> Tensor:
    """The positions at which values would be inserted into a sorted dim, like `jax.numpy.searchsorted`.

    Dims that both tensors have are aligned. The others of `sorted`, without `dim`, follow those of the
    values in the result. If the dim is split, every device searches its own block, and the counts are a
    pending sum.

    Args:
      sorted: a tensor in ascending order along `dim`. In any other order, the result is undefined.
      values: the tensor or number to search for.
      dim: the dim of `sorted` to search along.
      side: "left" is the position before all equal elements, and "right" the one after them.

    >>> import weft as wf
    >>> wf.searchsorted(wf.tensor([1, 3, 3, 7], "a=4"), wf.tensor([3, 0, 9], "b=3"), "a")
    i32[b=3] [1, 0, 4]
    """
    table, values = require_ordered(sorted, "searchsorted"), require_ordered(values, "searchsorted")
    if side not in ("left", "right"):
        raise TensorTypeError(
            f"side is {side!r}",
            rule="the position is the one to the left, or to the right, of equal elements",
            hint='side="left" or side="right"',
        )
    chosen = select_dim(table.dims, dim)
    check_along([chosen])
    others = [d for d in table.dims if d != chosen]
    if any(d.name == chosen.name for d in values.dims):
        raise DimError(
            f"the values [{format_dims(values.dims)}] have the dim {chosen.name} that is searched",
            rule="shared dims are aligned, so only the sorted tensor may have the searched dim",
            hint=f'rename the values\' dim: values.rename({chosen.name}="{chosen.name}2")',
        )
    all_dims = union_dims([values.dims, table.dims])
    splits = dict(zip(all_dims, active.context.splits(all_dims), strict=True))
    array, wanted = map(lax.stop_gradient, reshard_together([table, values]))
    # The block must be sorted up to its end.
    highest = math.nan if jnp.issubdtype(array.dtype, jnp.inexact) else extreme_value(array.dtype, +1)
    table_splits = tuple(splits[d] for d in table.dims)
    array = fill_padding(array, table.dims, table_splits, highest, only=[chosen])
    shared, alone = ([d for d in others if (d in values.dims) == both] for both in (True, False))
    added = [d for d in values.dims if d not in shared]
    # A loop over bisections would need a carry that varies over the axes; JAX's does not.
    search = functools.partial(jnp.searchsorted, side=side, method="scan_unrolled")
    for _ in alone:
        search = jax.vmap(search, (0, None))
    for _ in shared:
        search = jax.vmap(search)
    found = search(
        align(array, table.dims, (*shared, *alone, chosen)), align(wanted, values.dims, (*shared, *added))
    ).astype(jnp.int32)
    if is_uneven(chosen, splits[chosen]):
        block = array.shape[table.dims.index(chosen)]
        found = jnp.minimum(found, jnp.maximum(chosen.size - block_start(splits[chosen], block), 0))
    dims = (*values.dims, *alone)
    found = align(found, (*shared, *alone, *added), dims)
    found = fill_padding(found, dims, tuple(splits[d] for d in dims))
    return slice_tensor(found, dims, pending=splits[chosen])


@dataclass(frozen=True)
class _Cumulative:
    """The differences between `cumsum` and `cumprod`. A value is an array or a pytree of arrays.

    Attributes:
      identity: the identity element of the operation.
      to_value: converts an array to a value.
      from_value: converts a value to an array of a dtype.
      scan: the cumulative operation along a dimension.
      reduce: the operation over a dimension, which keeps size 1.
      combine: the operation on two values.
    """

    identity: int
    to_value: Callable[[jax.Array], PyTree]
    from_value: Callable[[PyTree, DTypeLike], jax.Array]
    scan: Callable[[PyTree, int, bool], PyTree]
    reduce: Callable[[PyTree, int], PyTree]
    combine: Callable[[PyTree, PyTree], PyTree]


def _on_arrays(identity: int, scan: ArrayFn, reduce: ArrayFn, combine: ArrayFn) -> _Cumulative:
    return _Cumulative(
        identity,
        lambda array: array,
        lambda array, dtype: array,
        lambda array, dim_index, reverse: scan(array, axis=dim_index, reverse=reverse),
        lambda array, dim_index: reduce(array, axis=dim_index, dtype=array.dtype, keepdims=True),
        combine,
    )


_SUM = _on_arrays(0, lax.cumsum, jnp.sum, jnp.add)
_PRODUCT = _on_arrays(1, lax.cumprod, jnp.prod, jnp.multiply)
_SCALED_PRODUCT = _Cumulative(
    1,
    scaled_product.to_scaled,
    scaled_product.from_scaled,
    scaled_product.cumprod_scaled,
    lambda pair, dim_index: tuple(
        jnp.expand_dims(one, dim_index) for one in scaled_product.prod_scaled(pair, (dim_index,))
    ),
    scaled_product.multiply_scaled,
)


def gather_totals(scanned: PyTree, dim_index: int, axes: Axes, reverse: bool) -> tuple[PyTree, jax.Array]:
    """The totals of all blocks along a split dim, and which of them precede this device's block.

    Args:
      scanned: arrays that each device has scanned along its block, so that its last position has the total.
      dim_index: the position of the dim.
      axes: the axes that split the dim.
      reverse: whether the scan starts from the end.
    """

    def gather(array: jax.Array) -> jax.Array:
        last = 0 if reverse else array.shape[dim_index] - 1
        total = lax.slice_in_dim(array, last, last + 1, axis=dim_index)
        return collectives.all_gather(total, axes, dim_index, stays_varying=axes)

    device, this_device = lax.iota(jnp.int32, active.context.ways(axes)), collectives.axis_index(axes)
    return jax.tree.map(gather, scanned), device > this_device if reverse else device < this_device


def _cumulative(x: Tensor, dim: DimLike, exclusive: bool, reverse: bool, kind: _Cumulative) -> Tensor:
    chosen, dim_index, axes = _resolve_dim(x, dim)
    array = fill_padding(reshard(x), x.dims, layout_splits(x), kind.identity, only=[chosen])
    # Like jnp.cumsum, the result is strongly typed.
    array = array.astype(jnp.int32 if array.dtype == jnp.bool_ else array.dtype)
    identity = kind.to_value(jnp.asarray(kind.identity, array.dtype))
    # XLA miscompiles the cumulative sum of one zero-padded element: it broadcasts the element. Barriers hide
    # the padding from XLA, in the backward pass too.
    values = kind.to_value(lax.optimization_barrier(array))
    result = lax.optimization_barrier(kind.scan(values, dim_index, reverse))
    inclusive = result
    if exclusive:
        config = [(0, 0, 0)] * array.ndim
        config[dim_index] = (-1, 1, 0) if reverse else (1, -1, 0)
        result = jax.tree.map(lambda a, n: lax.pad(a, n, config), result, identity)
    if axes:
        totals, precedes = gather_totals(inclusive, dim_index, axes, reverse)
        precedes = precedes.reshape([-1 if n == dim_index else 1 for n in range(array.ndim)])
        totals = jax.tree.map(lambda a, n: jnp.where(precedes, a, n), totals, identity)
        result = kind.combine(result, kind.reduce(totals, dim_index))
    result = kind.from_value(result, array.dtype)
    return slice_tensor(fill_padding(result, x.dims, layout_splits(x)), x.dims)


@op(example=lambda op, x: op(x, "a", exclusive=True), mixes_rows=True)
def cumsum(x: Tensor, dim: DimLike, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """The cumulative sum along a dim. If the dim is split, devices exchange the sums of their blocks only.

    Args:
      x: a tensor.
      dim: the dim to sum along.
      exclusive: exclude each element from its own sum, so that the first result is 0.
      reverse: start from the end.

    >>> import weft as wf
    >>> wf.cumsum(wf.tensor([1, 2, 3], "a=3"), "a", exclusive=True)
    i32[a=3] [0, 1, 3]
    """
    return _cumulative(as_slice(x), dim, exclusive, reverse, _SUM)


@op(example=lambda op, x: op(x, "a"), mixes_rows=True)
def cumprod(x: Tensor, dim: DimLike, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """The cumulative product along a dim; arguments as for `cumsum`.

    >>> import weft as wf
    >>> wf.cumprod(wf.tensor([1, 2, 4], "a=3"), "a")
    i32[a=3] [1, 2, 8]
    """
    x = as_slice(x)
    kind = _SCALED_PRODUCT if scaled_product.needs_scaling(x.dtype) else _PRODUCT
    return _cumulative(x, dim, exclusive, reverse, kind)
