"""Order along a dim: the greatest, the k greatest, all of them sorted, and running totals.

Over a split dim only candidates travel (one from each device for argmax, k for top_k), or only
block totals (for cumsum). The blocks of a dim lie on the devices in order, and padding comes last
of all. So "the lowest index first", which JAX keeps at ties, puts padding behind every true element
that equals what it was filled with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from .. import collectives, context
from ..collectives import Axes
from ..dims import Dim, as_dim, check_distinct, pick_one
from ..eager import op
from ..errors import ShapeError
from ..forms import as_slice, check_along, home, in_form, slice_tensor
from ..padding import fill_padding, start_of
from ..tensor import Tensor
from .reduce import extreme, ordered


def _along(x: Tensor, dim: Any) -> tuple[Dim, int, Axes]:
    """The dim that is meant, its place, and the axes that the layout splits it over."""
    chosen = pick_one(x.dims, dim)
    check_along([chosen])
    place = x.dims.index(chosen)
    return chosen, place, home(x)[place]


def _replaced(splits: Any, place: int, *new: Any) -> Any:
    return (*splits[:place], *new, *splits[place + 1 :])


# The greatest


def _extreme_place(x: Tensor, dim: Any, sign: int) -> Tensor:
    x = ordered(x, "argmax" if sign > 0 else "argmin")
    chosen, place, axes = _along(x, dim)
    find = jnp.argmax if sign > 0 else jnp.argmin
    filling = extreme(x.dtype, -sign)
    array = fill_padding(lax.stop_gradient(in_form(x)), x.dims, home(x), filling, only=[chosen])
    best = find(array, axis=place, keepdims=True).astype(jnp.int32)
    if axes:
        values = jnp.take_along_axis(array, best, axis=place)
        best = best + jnp.int32(start_of(axes, array.shape[place]))
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
    x = ordered(x, "top_k")
    chosen, place, axes = _along(x, dim)
    new = as_dim(k_dim)
    if new.size > chosen.size:
        raise ShapeError(
            f"{new.size} elements ({new}) are wanted of {chosen.size} ({chosen})",
            rule="top_k chooses at most as many elements as there are",
            hint=f"make the new dim no larger: {new.name}={chosen.size}",
        )
    dims, splits = _replaced(x.dims, place, new), _replaced(home(x), place, ())
    check_distinct(dims)
    context.require().splits(dims)
    array = fill_padding(in_form(x), x.dims, home(x), _below_all(x.dtype), only=[chosen])
    block = array.shape[place]
    values, indices = lax.top_k(array, min(new.size, block), axis=place)
    indices = indices.astype(jnp.int32)  # JAX gives them the weak type of the values
    if axes:
        indices = indices + jnp.int32(start_of(axes, block))
        values = collectives.all_gather(values, axes, place)
        indices = collectives.all_gather(indices, axes, place)
        values, best = lax.top_k(values, new.size, axis=place)
        indices = jnp.take_along_axis(indices, best, axis=place)
    indices = fill_padding(indices, dims, splits)
    return slice_tensor(values, dims, splits), slice_tensor(indices, dims, splits)


def _below_all(dtype: Any) -> Any:
    """The least value in the total order of `lax.top_k`, where a negative NaN lies below -∞."""
    return -math.nan if jnp.issubdtype(dtype, jnp.inexact) else extreme(dtype, -1)


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
    splits = _replaced(home(x), place, ())
    array = jnp.sort(in_form(x, splits), axis=place, stable=True, descending=descending)
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
    splits = _replaced(home(x), place, ())
    array = lax.stop_gradient(in_form(x, splits))
    order = jnp.argsort(array, axis=place, stable=True, descending=descending).astype(jnp.int32)
    return slice_tensor(fill_padding(order, x.dims, splits), x.dims, splits)


# Running totals


def _running(
    x: Tensor,
    dim: Any,
    exclusive: bool,
    reverse: bool,
    neutral: int,
    scan: Callable[..., Any],
    total_of: Callable[..., Any],
    combine: Callable[..., Any],
) -> Tensor:
    x = as_slice(x)
    chosen, place, axes = _along(x, dim)
    array = fill_padding(in_form(x), x.dims, home(x), neutral, only=[chosen])
    # As jnp.cumsum's, the type of the result is strong.
    array = array.astype(jnp.int32 if array.dtype == jnp.bool_ else array.dtype)
    block = array.shape[place]
    # XLA takes the running sum of one element with zeros around it to be that element everywhere. Barriers
    # hide such a padding, in the backward pass too.
    result = lax.optimization_barrier(scan(lax.optimization_barrier(array), axis=place, reverse=reverse))
    last = 0 if reverse else block - 1
    total = lax.slice_in_dim(result, last, last + 1, axis=place)
    if exclusive:
        pads = [(0, 0, 0)] * array.ndim
        pads[place] = (-1, 1, 0) if reverse else (1, -1, 0)
        result = lax.pad(result, jnp.asarray(neutral, result.dtype), pads)
    if axes:
        totals = collectives.all_gather(total, axes, place, stays_varying=axes)
        device = lax.iota(jnp.int32, totals.shape[place])
        here = collectives.index(axes)
        before = device > here if reverse else device < here
        before = before.reshape([-1 if p == place else 1 for p in range(array.ndim)])
        totals = jnp.where(before, totals, jnp.asarray(neutral, totals.dtype))
        result = combine(result, total_of(totals, axis=place, dtype=totals.dtype, keepdims=True))
    return slice_tensor(fill_padding(result, x.dims, home(x)), x.dims)


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
    return _running(x, dim, exclusive, reverse, 0, lax.cumsum, jnp.sum, jnp.add)


@op
def cumprod(x: Tensor, dim: Any, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """The running product along a dim; arguments as for `cumsum`.

    >>> import weft as wf
    >>> wf.cumprod(wf.tensor([1, 2, 4], "a=3"), "a")
    i32[a=3] [1, 2, 8]
    """
    return _running(x, dim, exclusive, reverse, 1, lax.cumprod, jnp.prod, jnp.multiply)
