"""Reductions: local work, then a collective over the axes of the reduced dims that are split.

Sums stay pending. Maxima and minima fill padding with their identity element. Quantiles gather the dims.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..core import collectives
from ..core.collectives import Axes
from ..core.context import active
from ..core.describe import describe
from ..core.dims import Dim, DimsLike, check_distinct, select_dims
from ..core.errors import TensorTypeError, nearest
from ..core.op import op
from ..core.operands import as_slice, check_along, slice_tensor
from ..core.padding import fill_padding, valid_mask
from ..core.reshard import layout_splits, reshard, reshard_together
from ..core.tensor import Tensor
from ..core.types import cast_like
from . import scaled_product
from .elementwise import elementwise, isclose, stays_pending
from .typing import Operand


def _reduced_dims(x: Tensor, dims: DimsLike | None) -> tuple[Dim, ...]:
    """The dims to reduce; all of them by default."""
    reduced = x.dims if dims is None else select_dims(x.dims, dims)
    check_along(reduced)
    return reduced


def _split_axes(x: Tensor, reduced: tuple[Dim, ...]) -> tuple[str, ...]:
    splits = zip(x.dims, layout_splits(x), strict=True)
    return tuple(sorted(axis for dim, axes in splits if dim in reduced for axis in axes))


def _indices(x: Tensor, reduced: tuple[Dim, ...]) -> tuple[int, ...]:
    return tuple(x.dims.index(d) for d in reduced)


def _remaining(x: Tensor, reduced: tuple[Dim, ...]) -> tuple[Dim, ...]:
    return tuple(d for d in x.dims if d not in reduced)


def _linear_sum(x: Tensor, dims: DimsLike | None, scale: float | None) -> Tensor:
    """The sum over dims, times a scale; a pending sum if a reduced dim is split."""
    x = as_slice(x)
    reduced = _reduced_dims(x, dims)
    if (
        x.pending
        and x.splits == layout_splits(x)
        and stays_pending(x, jax.eval_shape(jnp.sum, x._data).dtype)
    ):
        array, pending = x._read(), set(x.pending)  # sums commute, so this one can stay pending
    else:
        array, pending = reshard(x), set()
    # Padding is zero, but the cotangent of a sum is a broadcast, which is not zero there. Mask it here.
    array = fill_padding(array, x.dims, layout_splits(x), only=reduced)
    # Like jax.numpy, compute a mean in at least 32 bits: a sum of many elements overflows 16 bits.
    wide = jnp.promote_types(array.dtype, jnp.float32) if scale is not None else None
    result = jnp.sum(array, axis=_indices(x, reduced), dtype=wide)
    if scale is not None:
        result = (result * jnp.asarray(scale, wide)).astype(array.dtype)
    return slice_tensor(result, _remaining(x, reduced), pending=pending | set(_split_axes(x, reduced)))


@op(example=lambda op, x: op(x, "a"), mixes_rows=True, split_invariant=True)
def sum(x: Tensor, dims: DimsLike | None = None) -> Tensor:
    """The sum over dims, by default all of them.

    >>> import weft as wf
    >>> x = wf.ones("a=2 b=3 c=2")
    >>> wf.sum(x, "b c"), x.sum()
    (f32[a=2] [6., 6.], f32[] 12.)
    """
    return _linear_sum(x, dims, None)


def as_inexact(x: Tensor) -> Tensor:
    """Integers and booleans as floats of the default dtype, as in `jax.numpy`."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return elementwise(lambda a: a.astype(jax.dtypes.canonicalize_dtype(float)), [x])


@op(example=lambda op, x: op(x, "a"), mixes_rows=True, split_invariant=True)
def mean(x: Tensor, dims: DimsLike | None = None) -> Tensor:
    """The mean over dims, by default all of them.

    >>> import weft as wf
    >>> wf.mean(wf.tensor([[1, 3], [4, 8]], "a=2 b=2"), "b")
    f32[a=2] [2., 6.]
    """
    x = as_inexact(as_slice(x))
    reduced = _reduced_dims(x, dims)
    return _linear_sum(x, reduced, 1.0 / math.prod(d.size for d in reduced))


@op(example=lambda op, x: op(x, "a"), mixes_rows=True, split_invariant=True)
def var(x: Tensor, dims: DimsLike | None = None) -> Tensor:
    """The (population) variance over dims, by default all of them.

    >>> import weft as wf
    >>> wf.var(wf.tensor([[1, 3], [4, 8]], "a=2 b=2"), "b")
    f32[a=2] [1., 4.]
    """
    x = as_slice(x)
    reduced = _reduced_dims(x, dims)
    centered = x - mean(x, reduced)
    if jnp.issubdtype(centered.dtype, jnp.complexfloating):
        return mean(elementwise(lambda a: (a * jnp.conj(a)).real, [centered]), reduced)
    return mean(centered * centered, reduced)


@op(example=lambda op, x: op(x, "a"), mixes_rows=True)
def std(x: Tensor, dims: DimsLike | None = None) -> Tensor:
    """The (population) standard deviation over dims, by default all of them.

    >>> import weft as wf
    >>> wf.std(wf.tensor([[1, 3], [4, 8]], "a=2 b=2"), "b")
    f32[a=2] [1., 2.]
    """
    return elementwise(jnp.sqrt, [var(x, dims)], undefined_at_zero=True)


def extreme_value(dtype: DTypeLike, sign: int) -> bool | int | float:
    """The lowest (sign -1) or highest (sign +1) value of a dtype: the identity of max or min."""
    if dtype == jnp.bool_:
        return sign > 0
    if jnp.issubdtype(dtype, jnp.inexact):
        return sign * jnp.inf
    info = jnp.iinfo(dtype)
    return info.max if sign > 0 else info.min


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _extremum(
    array: jax.Array, mask: jax.Array | None, dim_indices: tuple[int, ...], axes: Axes, sign: int
) -> jax.Array:
    """max (sign +1) or min (sign -1) over split dimensions; `mask` is false in the padding."""
    local = (jnp.max if sign > 0 else jnp.min)(array, axis=dim_indices)
    reduce = collectives.all_reduce_max if sign > 0 else collectives.all_reduce_min
    best = reduce(local, axes)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return best
    # The collective may ignore NaNs, which jnp propagates.
    return jnp.where(collectives.all_reduce_max(jnp.isnan(local), axes), jnp.nan, best)


@_extremum.defjvp
def _extremum_jvp(
    dim_indices: tuple[int, ...],
    axes: Axes,
    sign: int,
    primals: tuple[jax.Array, jax.Array | None],
    tangents: tuple[jax.Array, jax.Array | None],
) -> tuple[jax.Array, jax.Array]:
    (array, mask), (tangent, _) = primals, tangents
    best = _extremum(array, mask, dim_indices, axes, sign)
    # Like jnp, ties share the gradient evenly, across all devices. Padding is filled with ±∞, so it ties with
    # an infinite extremum unless it is masked.
    ties = array == jnp.expand_dims(best, dim_indices)
    ties = (ties if mask is None else ties & _pvary_like(mask, ties)).astype(array.dtype)
    count = collectives.all_reduce(jnp.sum(ties, axis=dim_indices), axes)
    total = collectives.all_reduce(jnp.sum(ties * tangent, axis=dim_indices), axes)
    return best, total / count


def require_ordered(x: Operand, name: str) -> Tensor:
    """The slice of a tensor; an error if its dtype is complex."""
    t = as_slice(x)
    if jnp.issubdtype(t.dtype, jnp.complexfloating):
        raise TensorTypeError(
            f"{name} was given {describe(t)}",
            rule="complex numbers are not ordered",
            hint="take the absolute value first: wf.abs(x)",
        )
    return t


def _max_or_min(x: Tensor, dims: DimsLike | None, sign: int) -> Tensor:
    x = require_ordered(x, "max" if sign > 0 else "min")
    reduced = _reduced_dims(x, dims)
    array = fill_padding(reshard(x), x.dims, layout_splits(x), extreme_value(x.dtype, -sign), only=reduced)
    axes, dim_indices = _split_axes(x, reduced), _indices(x, reduced)
    if axes:
        result = _extremum(array, valid_mask(x.dims, layout_splits(x), reduced), dim_indices, axes, sign)
    else:
        result = (jnp.max if sign > 0 else jnp.min)(array, axis=dim_indices)
    remaining = _remaining(x, reduced)
    return slice_tensor(fill_padding(result, remaining, active.context.splits(remaining)), remaining)


@op(example=lambda op, x: op(x, "a"), mixes_rows=True, split_invariant=True)
def max(x: Tensor, dims: DimsLike | None = None) -> Tensor:
    """The maximum over dims. Ties share the gradient, as in `jax.numpy`.

    >>> import weft as wf
    >>> wf.max(wf.tensor([[1, 5], [4, 2]], "a=2 b=2"), "b")
    i32[a=2] [5, 4]
    """
    return _max_or_min(x, dims, +1)


@op(example=lambda op, x: op(x, "a"), mixes_rows=True, split_invariant=True)
def min(x: Tensor, dims: DimsLike | None = None) -> Tensor:
    """The minimum over dims. Ties share the gradient, as in `jax.numpy`."""
    return _max_or_min(x, dims, -1)


def _any_or_all(x: Tensor, dims: DimsLike | None, sign: int) -> Tensor:
    x = as_slice(x)
    if x.dtype != jnp.bool_:
        x = elementwise(lambda a: a != 0, [x])
    return _max_or_min(x, dims, sign)


@op(example=lambda op, c: op(c, "a"), mixes_rows=True)
def any(x: Tensor, dims: DimsLike | None = None) -> Tensor:
    """Whether any element along the dims is true."""
    return _any_or_all(x, dims, +1)


@op(example=lambda op, c: op(c, "a"), mixes_rows=True)
def all(x: Tensor, dims: DimsLike | None = None) -> Tensor:
    """Whether all elements along the dims are true."""
    return _any_or_all(x, dims, -1)


@op(example="x y", mixes_rows=True, numbers="dynamic")
def allclose(
    x: Operand, y: Operand, rtol: Operand = 1e-5, atol: Operand = 1e-8, equal_nan: bool = False
) -> Tensor:
    """Whether all elements are close, as a boolean without dims; arguments as for `isclose`.

    >>> import weft as wf
    >>> wf.allclose(wf.tensor([1.0, 2.0], "a=2"), wf.tensor([1.0, 2.000001], "a=2"))
    bool[] True
    """
    return all(isclose(x, y, rtol, atol, equal_nan))


@op(example=lambda op, x: op(x, "a"), mixes_rows=True, split_invariant=True)
def prod(x: Tensor, dims: DimsLike | None = None) -> Tensor:
    """The product over dims. Devices gather each other's partial products.

    >>> import weft as wf
    >>> wf.prod(wf.tensor([[1, 5], [4, 2]], "a=2 b=2"), "b")
    i32[a=2] [5, 8]
    """
    x = as_slice(x)
    reduced = _reduced_dims(x, dims)
    array = fill_padding(reshard(x), x.dims, layout_splits(x), 1, only=reduced)
    axes, dim_indices = _split_axes(x, reduced), _indices(x, reduced)
    # JAX has no all-reduce that multiplies: gather the partial products, one from each device.
    if scaled_product.needs_scaling(array.dtype):
        pair = scaled_product.prod_scaled(scaled_product.to_scaled(array), dim_indices)
        if axes:
            m, e = (collectives.all_gather(one[None], axes, 0) for one in pair)
            pair = scaled_product.prod_scaled((m, e), (0,))
        result = cast_like(scaled_product.from_scaled(pair, array.dtype), array)
    else:
        result = jnp.prod(array, axis=dim_indices)
        if axes:
            result = jnp.prod(collectives.all_gather(result[None], axes, 0), axis=0)
    remaining = _remaining(x, reduced)
    return slice_tensor(fill_padding(result, remaining, active.context.splits(remaining)), remaining)


METHODS = ("linear", "lower", "higher", "midpoint", "nearest", "inverted_cdf")


@op(example=lambda op, x: op(x, 0.3, "a"), mixes_rows=True)
def quantile(x: Tensor, q: Operand, dims: DimsLike | None = None, method: str = "linear") -> Tensor:
    """Quantiles over dims, by default all of them, like `jax.numpy.quantile`. Split dims are gathered.

    Args:
      x: a tensor. If an element is NaN, the result is.
      q: the share of the elements below the quantile, from 0 to 1: a number, or a tensor with at most one
        dim. That dim comes first in the result.
      dims: the dims to reduce.
      method: the result between two elements: "linear" interpolates, and the others are "lower", "higher",
        "midpoint", "nearest" and "inverted_cdf".

    >>> import weft as wf
    >>> x = wf.tensor([[1.0, 2.0, 4.0], [3.0, 5.0, 7.0]], "a=2 b=3")
    >>> wf.quantile(x, 0.25, "b")
    f32[a=2] [1.5, 4. ]
    """
    x = require_ordered(x, "quantile")
    if method not in METHODS:
        raise TensorTypeError(
            f"there is no method {method!r}{nearest(str(method), METHODS)}",
            rule="the method is one that jax.numpy.quantile has",
            hint=f"use one of {', '.join(METHODS)}",
        )
    reduced = _reduced_dims(x, dims)
    remaining = _remaining(x, reduced)
    shares = as_slice(_checked_shares(q))
    result_dims = (*shares.dims, *remaining)
    check_distinct(result_dims)
    splits = active.context.splits(result_dims)
    by_dim = dict(zip(result_dims, splits, strict=True))
    gathered = tuple(() if d in reduced else by_dim[d] for d in x.dims)
    array, share = reshard_together([x, shares], [gathered, splits[: len(shares.dims)]])
    result = jnp.quantile(array, share, axis=_indices(x, reduced), method=method)
    return slice_tensor(fill_padding(result, result_dims, splits), result_dims, splits)


def _checked_shares(q: Operand) -> Operand:
    """The quantiles to compute: a float, or a tensor of floats with at most one dim."""
    if isinstance(q, int | float | np.integer | np.floating):
        if not 0 <= q <= 1:
            raise TensorTypeError(
                f"q is {q}",
                rule="a quantile is a share of the elements, from 0 to 1",
                hint="divide percentages by 100",
            )
        return float(q)
    shares = as_slice(q)
    if len(shares.dims) > 1 or not jnp.issubdtype(shares.dtype, jnp.floating):
        raise TensorTypeError(
            f"q is {describe(shares)}",
            rule="q is a number from 0 to 1, or a floating-point tensor with at most one dim",
            hint="merge several dims: wf.merge(q, dims, new)",
        )
    return shares


@op(example=lambda op, x: op(x, "a"), mixes_rows=True)
def median(x: Tensor, dims: DimsLike | None = None) -> Tensor:
    """The median over dims, by default all of them. Split dims are gathered.

    The median of an even number of elements is the mean of the two in the middle.

    >>> import weft as wf
    >>> wf.median(wf.tensor([[1, 9, 2], [4, 3, 8]], "a=2 b=3"), "b")
    f32[a=2] [2., 4.]
    """
    return quantile(x, 0.5, dims, "midpoint")


def require_float(x: Tensor, name: str) -> Tensor:
    x = require_ordered(x, name)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TensorTypeError(
            f"{name} was given {describe(x)}",
            rule=f"{name} takes floating-point tensors",
            hint="convert it first: x.astype(jnp.float32)",
        )
    return x


def _array_and_max(
    x: Tensor, reduced: tuple[Dim, ...]
) -> tuple[jax.Array, jax.Array, tuple[str, ...], tuple[int, ...]]:
    """x with padding at -∞, its maximum (constant for autodiff), and the reduced axes and dimensions."""
    array = fill_padding(reshard(x), x.dims, layout_splits(x), -jnp.inf, only=reduced)
    axes, dim_indices = _split_axes(x, reduced), _indices(x, reduced)
    # The shift cancels in the result, so it needs no gradient. An infinite one would give ∞ - ∞ = NaN.
    top = jnp.max(jax.lax.stop_gradient(array), axis=dim_indices, keepdims=True)
    if axes:
        top = collectives.all_reduce_max(top, axes)
    return array, jnp.where(jnp.isfinite(top), top, 0), axes, dim_indices


def _total(array: jax.Array, dim_indices: tuple[int, ...], axes: Axes) -> jax.Array:
    total = jnp.sum(array, axis=dim_indices, keepdims=True)
    return collectives.all_reduce(total, axes) if axes else total


def _pvary_like(array: jax.Array, other: jax.Array) -> jax.Array:
    return collectives.pvary(array, collectives.varying_axes(other))


@op(example=lambda op, x: op(x, "a"), mixes_rows=True, split_invariant=True)
def logsumexp(x: Tensor, dims: DimsLike | None = None) -> Tensor:
    """`log(sum(exp(x)))` over dims, without overflow.

    >>> import weft as wf
    >>> wf.logsumexp(wf.tensor([1000.0, 0.0], "a=2"), "a")
    f32[] 1000.
    """
    x = require_float(x, "logsumexp")
    reduced = _reduced_dims(x, dims)
    array, top, axes, dim_indices = _array_and_max(x, reduced)
    total = _total(jnp.exp(array - _pvary_like(top, array)), dim_indices, axes)
    result = jnp.squeeze(jnp.log(total) + top, dim_indices)
    remaining = _remaining(x, reduced)
    return slice_tensor(fill_padding(result, remaining, active.context.splits(remaining)), remaining)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _softmax(array: jax.Array, dim_indices: tuple[int, ...], axes: Axes) -> jax.Array:
    top = jnp.max(array, axis=dim_indices, keepdims=True)
    if axes:
        top = collectives.all_reduce_max(top, axes)
    weights = jnp.exp(array - _pvary_like(top, array))
    return weights / _pvary_like(_total(weights, dim_indices, axes), weights)


@_softmax.defjvp
def _softmax_jvp(
    dim_indices: tuple[int, ...], axes: Axes, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # d softmax = s · (dx - Σ s · dx): the backward pass needs the result only, so nothing else is saved.
    (array,), (tangent,) = primals, tangents
    result = _softmax(array, dim_indices, axes)
    mean_tangent = _pvary_like(_total(result * tangent, dim_indices, axes), result)
    return result, result * (tangent - mean_tangent)


@op(example=lambda op, x: op(x, "a"), mixes_rows=True, split_invariant=True)
def softmax(x: Tensor, dims: DimsLike) -> Tensor:
    """`exp(x) / sum(exp(x))` along a dim, or along several together.

    >>> import weft as wf
    >>> wf.softmax(wf.log(wf.tensor([1.0, 3.0], "a=2")), "a")
    f32[a=2] [0.25, 0.75]
    """
    x = require_float(x, "softmax")
    reduced = _reduced_dims(x, dims)
    array = fill_padding(reshard(x), x.dims, layout_splits(x), -jnp.inf, only=reduced)
    result = _softmax(array, _indices(x, reduced), _split_axes(x, reduced))
    return slice_tensor(fill_padding(result, x.dims, layout_splits(x)), x.dims)


@op(example=lambda op, x: op(x, "a"), mixes_rows=True, split_invariant=True)
def log_softmax(x: Tensor, dims: DimsLike) -> Tensor:
    """`x - logsumexp(x)` along a dim, or along several together.

    >>> import weft as wf
    >>> wf.log_softmax(wf.zeros("a=2"), "a")
    f32[a=2] [-0.6931, -0.6931]
    """
    x = require_float(x, "log_softmax")
    reduced = _reduced_dims(x, dims)
    array, top, axes, dim_indices = _array_and_max(x, reduced)
    shifted = array - _pvary_like(top, array)
    total = _total(jnp.exp(shifted), dim_indices, axes)
    result = shifted - _pvary_like(jnp.log(total), shifted)
    return slice_tensor(fill_padding(result, x.dims, layout_splits(x)), x.dims)
