"""Reductions: local work, then a collective over the axes of split reduced dims.

Sums stay pending. Maxima and minima fill padding with the value that never wins.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from ..core import collectives, context
from ..core.describe import describe
from ..core.dims import Dim, select_dims
from ..core.errors import TensorTypeError
from ..core.op import op
from ..core.operands import as_slice, check_along, slice_tensor
from ..core.padding import fill_padding, valid_mask
from ..core.reshard import layout_splits, reshard
from ..core.tensor import Tensor
from ..core.types import cast_like
from . import scaled_product
from .elementwise import elementwise, stays_pending


def _reduced(x: Tensor, dims: Any) -> tuple[Dim, ...]:
    """The dims to reduce: all of them if none is named."""
    gone = x.dims if dims is None else select_dims(x.dims, dims)
    check_along(gone)
    return gone


def _split_axes(x: Tensor, gone: tuple[Dim, ...]) -> tuple[str, ...]:
    splits = zip(x.dims, layout_splits(x), strict=True)
    return tuple(sorted(axis for dim, axes in splits if dim in gone for axis in axes))


def _places(x: Tensor, gone: tuple[Dim, ...]) -> tuple[int, ...]:
    return tuple(x.dims.index(d) for d in gone)


def _kept(x: Tensor, gone: tuple[Dim, ...]) -> tuple[Dim, ...]:
    return tuple(d for d in x.dims if d not in gone)


def _linear_sum(x: Tensor, dims: Any, scale: float | None) -> Tensor:
    x = as_slice(x)
    gone = _reduced(x, dims)
    if (
        x.pending
        and x.splits == layout_splits(x)
        and stays_pending(x, jax.eval_shape(jnp.sum, x._data).dtype)
    ):
        array, pending = x._array, set(x.pending)  # a further sum keeps it pending
    else:
        array, pending = reshard(x), set()
    array = fill_padding(array, x.dims, layout_splits(x), only=gone)
    # As jax.numpy's, a mean is made in at least 32 bits: a sum of many numbers overflows 16.
    wide = jnp.promote_types(array.dtype, jnp.float32) if scale is not None else None
    result = jnp.sum(array, axis=_places(x, gone), dtype=wide)
    if scale is not None:
        result = (result * jnp.asarray(scale, wide)).astype(array.dtype)
    return slice_tensor(result, _kept(x, gone), pending=pending | set(_split_axes(x, gone)))


@op
def sum(x: Tensor, dims: Any = None) -> Tensor:
    """The sum over dims, by default over all of them.

    >>> import weft as wf
    >>> wf.sum(wf.ones("a=2 b=3"), "b")
    f32[a=2] [3., 3.]
    """
    return _linear_sum(x, dims, None)


@op
def mean(x: Tensor, dims: Any = None) -> Tensor:
    """The mean over dims, by default over all of them.

    >>> import weft as wf
    >>> wf.mean(wf.tensor([[1, 3], [4, 8]], "a=2 b=2"), "b")
    f32[a=2] [2., 6.]
    """
    x = as_slice(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        x = elementwise(lambda a: a.astype(jax.dtypes.canonicalize_dtype(float)), [x])
    count = math.prod(d.size for d in _reduced(x, dims))
    return _linear_sum(x, dims, 1.0 / count)


@op
def var(x: Tensor, dims: Any = None) -> Tensor:
    """The (population) variance over dims, by default over all of them.

    >>> import weft as wf
    >>> wf.var(wf.tensor([[1, 3], [4, 8]], "a=2 b=2"), "b")
    f32[a=2] [1., 4.]
    """
    centred = x - mean(x, dims)
    if jnp.issubdtype(centred.dtype, jnp.complexfloating):
        return mean(elementwise(lambda a: (a * jnp.conj(a)).real, [centred]), dims)
    return mean(centred * centred, dims)


@op
def std(x: Tensor, dims: Any = None) -> Tensor:
    """The (population) standard deviation over dims, by default over all of them.

    >>> import weft as wf
    >>> wf.std(wf.tensor([[1, 3], [4, 8]], "a=2 b=2"), "b")
    f32[a=2] [1., 2.]
    """
    return elementwise(jnp.sqrt, [var(x, dims)], undefined_at_zero=True)


def extreme_value(dtype: Any, sign: int) -> Any:
    """The value of a dtype that never is the maximum (sign -1) or the minimum (sign +1)."""
    if dtype == jnp.bool_:
        return sign > 0
    if jnp.issubdtype(dtype, jnp.inexact):
        return sign * jnp.inf
    info = jnp.iinfo(dtype)
    return info.max if sign > 0 else info.min


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _extremum(array: Any, true: Any, places: Any, axes: Any, sign: int) -> Any:
    local = (jnp.max if sign > 0 else jnp.min)(array, axis=places)
    reduce = collectives.all_reduce_max if sign > 0 else collectives.all_reduce_min
    best = reduce(local, axes)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return best
    # The collective may pass over NaN, which jnp does not.
    return jnp.where(collectives.all_reduce_max(jnp.isnan(local), axes), jnp.nan, best)


@_extremum.defjvp
def _extremum_jvp(places: Any, axes: Any, sign: int, primals: Any, tangents: Any) -> Any:
    (array, true), (tangent, _) = primals, tangents
    best = _extremum(array, true, places, axes, sign)
    # As jnp: ties share the gradient evenly, over all devices. Infinite ones are as padding is filled.
    ties = array == jnp.expand_dims(best, places)
    ties = (ties if true is None else ties & _varying_as(true, ties)).astype(array.dtype)
    count = collectives.all_reduce(jnp.sum(ties, axis=places), axes)
    total = collectives.all_reduce(jnp.sum(ties * tangent, axis=places), axes)
    return best, total / count


def require_ordered(x: Any, name: str) -> Tensor:
    """A tensor's slice; an error if its elements have no order."""
    x = as_slice(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TensorTypeError(
            f"{name} was given {describe(x)}",
            rule="complex numbers are neither greater nor less than each other",
            hint="take the absolute value first: wf.abs(x)",
        )
    return x


def _extreme(x: Tensor, dims: Any, sign: int) -> Tensor:
    x = require_ordered(x, "max" if sign > 0 else "min")
    gone = _reduced(x, dims)
    array = fill_padding(reshard(x), x.dims, layout_splits(x), extreme_value(x.dtype, -sign), only=gone)
    axes, places = _split_axes(x, gone), _places(x, gone)
    if axes:
        result = _extremum(array, valid_mask(x.dims, layout_splits(x), gone), places, axes, sign)
    else:
        result = (jnp.max if sign > 0 else jnp.min)(array, axis=places)
    kept = _kept(x, gone)
    return slice_tensor(fill_padding(result, kept, context.require().splits(kept)), kept)


@op
def max(x: Tensor, dims: Any = None) -> Tensor:
    """The maximum over dims; at ties the gradient is shared, as in `jax.numpy`.

    >>> import weft as wf
    >>> wf.max(wf.tensor([[1, 5], [4, 2]], "a=2 b=2"), "b")
    i32[a=2] [5, 4]
    """
    return _extreme(x, dims, +1)


@op
def min(x: Tensor, dims: Any = None) -> Tensor:
    """The minimum over dims; at ties the gradient is shared, as in `jax.numpy`."""
    return _extreme(x, dims, -1)


def _truth(x: Tensor, dims: Any, sign: int) -> Tensor:
    x = as_slice(x)
    if x.dtype != jnp.bool_:
        x = elementwise(lambda a: a != 0, [x])
    return _extreme(x, dims, sign)


@op
def any(x: Tensor, dims: Any = None) -> Tensor:
    """Whether any element over dims is true."""
    return _truth(x, dims, +1)


@op
def all(x: Tensor, dims: Any = None) -> Tensor:
    """Whether all elements over dims are true."""
    return _truth(x, dims, -1)


@op
def prod(x: Tensor, dims: Any = None) -> Tensor:
    """The product over dims; devices exchange their partial products.

    >>> import weft as wf
    >>> wf.prod(wf.tensor([[1, 5], [4, 2]], "a=2 b=2"), "b")
    i32[a=2] [5, 8]
    """
    x = as_slice(x)
    gone = _reduced(x, dims)
    array = fill_padding(reshard(x), x.dims, layout_splits(x), 1, only=gone)
    axes, places = _split_axes(x, gone), _places(x, gone)
    if scaled_product.needs_scaling(array.dtype):
        pair = scaled_product.prod_scaled(scaled_product.to_scaled(array), places)
        if axes:
            m, e = (collectives.all_gather(one[None], axes, 0) for one in pair)
            pair = scaled_product.prod_scaled((m, e), (0,))
        result = cast_like(scaled_product.from_scaled(pair, array.dtype), array)
    else:
        result = jnp.prod(array, axis=places)
        if axes:
            result = jnp.prod(collectives.all_gather(result[None], axes, 0), axis=0)
    kept = _kept(x, gone)
    return slice_tensor(fill_padding(result, kept, context.require().splits(kept)), kept)


def _require_float(x: Tensor, name: str) -> Tensor:
    x = require_ordered(x, name)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TensorTypeError(
            f"{name} was given {describe(x)}",
            rule=f"{name} is defined for floating-point tensors",
            hint="convert it first: x.astype(jnp.float32)",
        )
    return x


def _shifted(x: Tensor, gone: tuple[Dim, ...]) -> tuple[Any, Any, tuple[str, ...], tuple[int, ...]]:
    """x with padding at -∞, its (constant) maximum, the axes and the places that are reduced."""
    array = fill_padding(reshard(x), x.dims, layout_splits(x), -jnp.inf, only=gone)
    axes, places = _split_axes(x, gone), _places(x, gone)
    top = jnp.max(jax.lax.stop_gradient(array), axis=places, keepdims=True)
    if axes:
        top = collectives.all_reduce_max(top, axes)
    return array, jnp.where(jnp.isfinite(top), top, 0), axes, places


def _total(array: Any, places: Any, axes: Any) -> Any:
    total = jnp.sum(array, axis=places, keepdims=True)
    return collectives.all_reduce(total, axes) if axes else total


def _varying_as(small: Any, array: Any) -> Any:
    return collectives.pvary(small, collectives.varying_axes(array))


@op
def logsumexp(x: Tensor, dims: Any = None) -> Tensor:
    """`log(sum(exp(x)))` over dims, without overflow.

    >>> import weft as wf
    >>> wf.logsumexp(wf.tensor([1000.0, 0.0], "a=2"), "a")
    f32[] 1000.
    """
    x = _require_float(x, "logsumexp")
    gone = _reduced(x, dims)
    array, top, axes, places = _shifted(x, gone)
    total = _total(jnp.exp(array - _varying_as(top, array)), places, axes)
    result = jnp.squeeze(jnp.log(total) + top, places)
    kept = _kept(x, gone)
    return slice_tensor(fill_padding(result, kept, context.require().splits(kept)), kept)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _softmax(array: Any, places: Any, axes: Any) -> Any:
    top = jnp.max(array, axis=places, keepdims=True)
    if axes:
        top = collectives.all_reduce_max(top, axes)
    weights = jnp.exp(array - _varying_as(top, array))
    return weights / _varying_as(_total(weights, places, axes), weights)


@_softmax.defjvp
def _softmax_jvp(places: Any, axes: Any, primals: Any, tangents: Any) -> Any:
    # Of the result alone: nothing else has to be kept for the backward pass.
    (array,), (tangent,) = primals, tangents
    result = _softmax(array, places, axes)
    pull = _varying_as(_total(result * tangent, places, axes), result)
    return result, result * (tangent - pull)


@op
def softmax(x: Tensor, dim: Any) -> Tensor:
    """`exp(x) / sum(exp(x))` over a dim.

    >>> import weft as wf
    >>> wf.softmax(wf.log(wf.tensor([1.0, 3.0], "a=2")), "a")
    f32[a=2] [0.25, 0.75]
    """
    x = _require_float(x, "softmax")
    gone = _reduced(x, [dim])
    array = fill_padding(reshard(x), x.dims, layout_splits(x), -jnp.inf, only=gone)
    result = _softmax(array, _places(x, gone), _split_axes(x, gone))
    return slice_tensor(fill_padding(result, x.dims, layout_splits(x)), x.dims)


@op
def log_softmax(x: Tensor, dim: Any) -> Tensor:
    """`x - logsumexp(x)` over a dim.

    >>> import weft as wf
    >>> wf.log_softmax(wf.zeros("a=2"), "a")
    f32[a=2] [-0.6931, -0.6931]
    """
    x = _require_float(x, "log_softmax")
    gone = _reduced(x, [dim])
    array, top, axes, places = _shifted(x, gone)
    shifted = array - _varying_as(top, array)
    total = _total(jnp.exp(shifted), places, axes)
    result = shifted - _varying_as(jnp.log(total), shifted)
    return slice_tensor(fill_padding(result, x.dims, layout_splits(x)), x.dims)
