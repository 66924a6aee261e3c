"""Order along a dim: the greatest, the k greatest, all of them sorted, and running totals.

Over a split dim only candidates travel (one from each device for argmax, k for top_k), or only
block totals (for cumsum). The blocks of a dim lie on the devices in order, and padding comes last
of all. So "the lowest index first", which JAX keeps at ties, puts padding behind every true element
that equals what it was filled with.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core import collectives, context
from ..core.collectives import Axes
from ..core.dims import Dim, as_dim, check_distinct, select_dim
from ..core.errors import ShapeError
from ..core.op import op
from ..core.operands import as_slice, check_along, slice_tensor
from ..core.padding import block_start, fill_padding
from ..core.reshard import layout_splits, reshard
from ..core.tensor import Tensor
from . import scaled_product
from .reduce import extreme_value, require_ordered


def _along(x: Tensor, dim: Any) -> tuple[Dim, int, Axes]:
    """The dim that is meant, its place, and the axes that the layout splits it over."""
    chosen = select_dim(x.dims, dim)
    check_along([chosen])
    place = x.dims.index(chosen)
    return chosen, place, layout_splits(x)[place]


def _replaced(splits: Any, place: int, *new: Any) -> Any:
    return (*splits[:place], *new, *splits[place + 1 :])


# The greatest


def _extreme_place(x: Tensor, dim: Any, sign: int) -> Tensor:
    x = require_ordered(x, "argmax" if sign > 0 else "argmin")
    chosen, place, axes = _along(x, dim)
    find = jnp.argmax if sign > 0 else jnp.argmin
    filling = extreme_value(x.dtype, -sign)
    array = fill_padding(lax.stop_gradient(reshard(x)), x.dims, layout_splits(x), filling, only=[chosen])
    best = find(array, axis=place, keepdims=True).astype(jnp.int32)
    if axes:
        values = jnp.take_along_axis(array, best, axis=place)
        best = best + jnp.int32(block_start(axes, array.shape[place]))
        values = collectives.all_gather(values, axes, place)
        best = collectives.all_gather(best, axes, place)
        best = jnp.take_along_axis(best, find(values, axis=place, keepdims=True), axis=place)
    # Along a row of padding all are equal, and 0 is the first: padding is still zero.
    return slice_tensor(best.squeeze(place), _replaced(x.dims, place))


@op
def argmax(x: Tensor, dim: Any) -> Tensor:
    """The index of the greatest element along a dim: of several the first, and NaN is greatest.

    >>> import weft as wf
    >>> wf.argmax(wf.tensor([3, 7, 7], "a=3"), "a")
    i32[] 1
    """
    return _extreme_place(x, dim, +1)


@op
def argmin(x: Tensor, dim: Any) -> Tensor:
    """The index of the least element along a dim: of several the first, and NaN is least.

    >>> import weft as wf
    >>> wf.argmin(wf.tensor([7, 3, 3], "a=3"), "a")
    i32[] 1
    """
    return _extreme_place(x, dim, -1)


@op
def top_k(x: Tensor, dim: Any, k_dim: Dim) -> tuple[Tensor, Tensor]:
    """The greatest elements along a dim, in falling order, and their indices, as `jax.lax.top_k`.

    Args:
      x: a tensor.
      dim: the dim to choose from.
      k_dim: takes its place in the results; its size is the number of elements.

    >>> import weft as wf
    >>> wf.top_k(wf.tensor([3, 9, 5, 9], "a=4"), "a", wf.Dim("best", 3))
    (i32[best=3] [9, 9, 5], i32[best=3] [1, 3, 2])
    """
    x = require_ordered(x, "top_k")
    chosen, place, axes = _along(x, dim)
    new = as_dim(k_dim)
    if new.size > chosen.size:
        raise ShapeError(
            f"{new.size} elements ({new}) are wanted of {chosen.size} ({chosen})",
            rule="top_k chooses at most as many elements as there are",
            hint=f"make the new dim no larger: {new.name}={chosen.size}",
        )
    dims, splits = _replaced(x.dims, place, new), _replaced(layout_splits(x), place, ())
    check_distinct(dims)
    context.require().splits(dims)
    array = fill_padding(reshard(x), x.dims, layout_splits(x), _below_all(x.dtype), only=[chosen])
    block = array.shape[place]
    values, indices = lax.top_k(array, min(new.size, block), axis=place)
    indices = indices.astype(jnp.int32)  # JAX gives them the weak type of the values
    if axes:
        indices = indices + jnp.int32(block_start(axes, block))
        values = collectives.all_gather(values, axes, place)
        indices = collectives.all_gather(indices, axes, place)
        values, best = lax.top_k(values, new.size, axis=place)
        indices = jnp.take_along_axis(indices, best, axis=place)
    indices = fill_padding(indices, dims, splits)
    return slice_tensor(values, dims, splits), slice_tensor(indices, dims, splits)


def _below_all(dtype: Any) -> Any:
    """The least value in the total order of `lax.top_k`, where a negative NaN lies below -∞."""
    return -math.nan if jnp.issubdtype(dtype, jnp.inexact) else extreme_value(dtype, -1)


# All of them


@op
def sort(x: Tensor, dim: Any, descending: bool = False) -> Tensor:
    """The elements in rising (or falling) order along a dim; a split dim is gathered.

    >>> import weft as wf
    >>> wf.sort(wf.tensor([3, 9, 5], "a=3"), "a", descending=True)
    i32[a=3] [9, 5, 3]
    """
    x = as_slice(x)
    _, place, _ = _along(x, dim)
    splits = _replaced(layout_splits(x), place, ())
    array = jnp.sort(reshard(x, splits), axis=place, stable=True, descending=descending)
    return slice_tensor(array, x.dims, splits)


@op
def argsort(x: Tensor, dim: Any, descending: bool = False) -> Tensor:
    """The indices that sort a dim, equal elements in their order; a split dim is gathered.

    >>> import weft as wf
    >>> wf.argsort(wf.tensor([3, 9, 5], "a=3"), "a")
    i32[a=3] [0, 2, 1]
    """
    x = as_slice(x)
    _, place, _ = _along(x, dim)
    splits = _replaced(layout_splits(x), place, ())
    array = lax.stop_gradient(reshard(x, splits))
    order = jnp.argsort(array, axis=place, stable=True, descending=descending).astype(jnp.int32)
    return slice_tensor(fill_padding(order, x.dims, splits), x.dims, splits)


# Running totals


@dataclass(frozen=True)
class _Running:
    """What `cumsum` and `cumprod` differ in. What is combined is an array, or a tree of them.

    Attributes:
      neutral: the value that changes nothing.
      enter, leave: from an array to what is combined, and back to an array of a type.
      scan: the running combination along a dimension.
      fold: that of all places along a dimension, which stays with size 1.
      combine: that of two.
    """

    neutral: int
    enter: Callable[[Any], Any]
    leave: Callable[[Any, Any], Any]
    scan: Callable[[Any, int, bool], Any]
    fold: Callable[[Any, int], Any]
    combine: Callable[[Any, Any], Any]


def _plain(neutral: int, scan: Any, fold: Any, combine: Any) -> _Running:
    return _Running(
        neutral,
        lambda array: array,
        lambda array, dtype: array,
        lambda array, place, reverse: scan(array, axis=place, reverse=reverse),
        lambda array, place: fold(array, axis=place, dtype=array.dtype, keepdims=True),
        combine,
    )


_SUM = _plain(0, lax.cumsum, jnp.sum, jnp.add)
_PRODUCT = _plain(1, lax.cumprod, jnp.prod, jnp.multiply)
_SCALED_PRODUCT = _Running(
    1,
    scaled_product.to_scaled,
    scaled_product.from_scaled,
    scaled_product.cumprod_scaled,
    lambda pair, place: tuple(
        jnp.expand_dims(one, place) for one in scaled_product.prod_scaled(pair, (place,))
    ),
    scaled_product.multiply_scaled,
)


def _running(x: Tensor, dim: Any, exclusive: bool, reverse: bool, kind: _Running) -> Tensor:
    chosen, place, axes = _along(x, dim)
    array = fill_padding(reshard(x), x.dims, layout_splits(x), kind.neutral, only=[chosen])
    # As jnp.cumsum's, the type of the result is strong.
    array = array.astype(jnp.int32 if array.dtype == jnp.bool_ else array.dtype)
    block, neutral = array.shape[place], kind.enter(jnp.asarray(kind.neutral, array.dtype))
    # XLA takes the running sum of one element with zeros around it to be that element everywhere. Barriers
    # hide such a padding, in the backward pass too.
    values = kind.enter(lax.optimization_barrier(array))
    result = lax.optimization_barrier(kind.scan(values, place, reverse))
    last = 0 if reverse else block - 1
    total = jax.tree.map(lambda a: lax.slice_in_dim(a, last, last + 1, axis=place), result)
    if exclusive:
        pads = [(0, 0, 0)] * array.ndim
        pads[place] = (-1, 1, 0) if reverse else (1, -1, 0)
        result = jax.tree.map(lambda a, n: lax.pad(a, n, pads), result, neutral)
    if axes:
        gather = functools.partial(collectives.all_gather, axes=axes, position=place, stays_varying=axes)
        totals = jax.tree.map(gather, total)
        device = lax.iota(jnp.int32, jax.tree.leaves(totals)[0].shape[place])
        here = collectives.axis_index(axes)
        before = device > here if reverse else device < here
        before = before.reshape([-1 if p == place else 1 for p in range(array.ndim)])
        totals = jax.tree.map(lambda a, n: jnp.where(before, a, n), totals, neutral)
        result = kind.combine(result, kind.fold(totals, place))
    result = kind.leave(result, array.dtype)
    return slice_tensor(fill_padding(result, x.dims, layout_splits(x)), x.dims)


@op
def cumsum(x: Tensor, dim: Any, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """The running sum along a dim; of a split dim only the sums of whole blocks travel.

    Args:
      x: a tensor.
      dim: the dim to run along.
      exclusive: leave each element out of its own sum, so that the first is 0.
      reverse: run from the end.

    >>> import weft as wf
    >>> wf.cumsum(wf.tensor([1, 2, 3], "a=3"), "a", exclusive=True)
    i32[a=3] [0, 1, 3]
    """
    return _running(as_slice(x), dim, exclusive, reverse, _SUM)


@op
def cumprod(x: Tensor, dim: Any, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """The running product along a dim; arguments as for `cumsum`.

    >>> import weft as wf
    >>> wf.cumprod(wf.tensor([1, 2, 4], "a=3"), "a")
    i32[a=3] [1, 2, 8]
    """
    x = as_slice(x)
    kind = _SCALED_PRODUCT if scaled_product.needs_scaling(x.dtype) else _PRODUCT
    return _running(x, dim, exclusive, reverse, kind)
