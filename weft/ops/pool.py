"""Pooling and windows. A split dim needs a halo exchange only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import collectives
from ..core.context import active
from ..core.dims import Dim, DimLike, as_dim, check_distinct, select_dim
from ..core.errors import ShapeError
from ..core.op import op
from ..core.operands import as_slice, slice_tensor
from ..core.padding import fill_padding, global_positions
from ..core.reshard import layout_splits, reshard
from ..core.tensor import Tensor
from ..core.types import constant_like
from .reduce import extreme_value, require_ordered
from .sliding_window import (
    ByDim,
    Padding,
    PerDim,
    SlidingWindow,
    accept_dim_keys,
    check_window,
    fetch_receptive_field,
    sliding_windows,
)
from .typing import ArrayFn, Number


@accept_dim_keys
@op(example=lambda op, x: op(x, {"a": 3}, stride=1), mixes_rows=True)
def max_pool(
    x: Tensor,
    window: ByDim[int],
    stride: PerDim[int] | None = None,
    padding: PerDim[Padding] = "VALID",
) -> Tensor:
    """The maximum over a window that slides along one or more dims.

    Args:
      x: any tensor.
      window: the window's size along each dim, `{"h": 2, "w": 2}`.
      stride: an integer, or one for each of these dims. Defaults to the window: no overlap.
      padding: "SAME", "VALID", or the padding before and after, as in `conv`. Padding is never the maximum.

    >>> import weft as wf
    >>> wf.max_pool(wf.arange(wf.Dim("h", 6)), {"h": 2})
    i32[h=3] [1, 3, 5]
    """
    x = require_ordered(x, "max_pool")
    slides = _pool_windows(x, window, stride, padding)
    lowest = extreme_value(x.dtype, -1)

    def mask_outside(array: jax.Array, dim_index: int, slide: SlidingWindow, first: jax.Array) -> jax.Array:
        index = lax.iota(jnp.int32, array.shape[dim_index]) + first
        inside = (index >= 0) & (index < slide.dim.size)
        inside = inside.reshape([-1 if n == dim_index else 1 for n in range(array.ndim)])
        axes = collectives.varying_axes(array)
        low = collectives.pvary(constant_like(lowest, array), axes)
        return jnp.where(collectives.pvary(inside, axes), array, low)

    array = _pooled(x.dims, reshard(x), slides, lowest, lax.max, mask_outside)
    dims = _pool_dims(x, slides)
    return slice_tensor(fill_padding(array, dims, active.context.splits(dims)), dims)


@accept_dim_keys
@op(example=lambda op, x: op(x, {"a": 2}), mixes_rows=True)
def avg_pool(
    x: Tensor,
    window: ByDim[int],
    stride: PerDim[int] | None = None,
    padding: PerDim[Padding] = "VALID",
) -> Tensor:
    """The mean over a window that slides along one or more dims. Padding does not count.

    Args:
      x: any tensor.
      window: the window's size along each dim, `{"h": 2, "w": 2}`.
      stride: an integer, or one for each of these dims. Defaults to the window: no overlap.
      padding: "SAME", "VALID", or the padding before and after, as in `conv`.

    >>> import weft as wf
    >>> wf.avg_pool(wf.arange(wf.Dim("h", 4), float), {"h": 3}, stride=1, padding="SAME")
    f32[h=4] [0.5, 1. , 2. , 2.5]
    """
    x = as_slice(x)
    slides = _pool_windows(x, window, stride, padding)
    array = fill_padding(reshard(x), x.dims, layout_splits(x), only=[slide.dim for slide in slides])
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        array = array.astype(jax.dtypes.canonicalize_dtype(float))
    total = _pooled(x.dims, array, slides, 0, lax.add, lambda array, *_: array)
    dims = _pool_dims(x, slides)
    splits = active.context.splits(dims)
    for slide in slides:
        dim_index = dims.index(slide.out)
        first = global_positions(slide.out, splits[dim_index]) * slide.stride - slide.low
        inside = jnp.minimum(first + slide.window, slide.dim.size) - jnp.maximum(first, 0)
        count = jnp.maximum(inside, 1).astype(total.dtype)  # the mean of a window of padding is 0
        count = count.reshape([-1 if n == dim_index else 1 for n in range(len(dims))])
        total = total / collectives.pvary(count, collectives.varying_axes(total))
    return slice_tensor(fill_padding(total, dims, splits), dims)


def _pool_windows(
    x: Tensor, window: ByDim[int], stride: PerDim[int] | None, padding: PerDim[Padding]
) -> list[SlidingWindow]:
    check_window(window, '{"h": 2, "w": 2}')
    dims = [select_dim(x.dims, dim) for dim in window]
    slides = sliding_windows(dims, list(window.values()), window if stride is None else stride, padding)
    negative = [slide for slide in slides if slide.low < 0 or slide.high < 0]
    if negative:
        raise ShapeError(
            f"the padding along {negative[0].dim.name} is {negative[0].low} and {negative[0].high}",
            rule="the padding of a pool is not negative",
            hint=f'slice the dim first: x["{negative[0].dim.name}", 1:]',
        )
    return slides


def _pool_dims(x: Tensor, slides: Sequence[SlidingWindow]) -> tuple[Dim, ...]:
    outs = {slide.dim: slide.out for slide in slides}
    return tuple(outs.get(d, d) for d in x.dims)


def _pooled(
    dims: tuple[Dim, ...],
    array: jax.Array,
    slides: Sequence[SlidingWindow],
    init: Number,
    combine: ArrayFn,
    mask_outside: Callable[[jax.Array, int, SlidingWindow, jax.Array], jax.Array],
) -> jax.Array:
    """`lax.reduce_window` of slices. `mask_outside` fills the part of a halo that is outside the dim."""
    ctx = active.context
    splits = ctx.splits(dims)
    sizes, strides, pads = [1] * len(dims), [1] * len(dims), [(0, 0)] * len(dims)
    for slide in slides:
        n = dims.index(slide.dim)
        axes = splits[n]
        sizes[n], strides[n], pads[n] = slide.window, slide.stride, (slide.low, slide.high)
        if axes:
            array, pads[n], _ = fetch_receptive_field(array, n, slide, axes)
            if slide.low or slide.high:  # else only results in the padding see elements outside the dim
                step = ctx.slice_size(slide.out, axes) * slide.stride
                array = mask_outside(array, n, slide, collectives.axis_index(axes) * step - slide.low)
    # The TPU compiler takes the gradient of a max only with at least two dims outside of the window.
    missing = max(0, 2 - (len(dims) - len(slides)))
    array = array.reshape(array.shape + (1,) * missing)
    sizes, strides, pads = sizes + [1] * missing, strides + [1] * missing, pads + [(0, 0)] * missing
    # JAX recognizes a max or a sum, which have gradients, by a concrete initial value: pass a NumPy array.
    pooled = lax.reduce_window(array, np.array(init, array.dtype), combine, sizes, strides, pads)
    return pooled.reshape(pooled.shape[: len(dims)])


@accept_dim_keys
@op(example=lambda op, x: op(x, "a", Dim("w", 2)), mixes_rows=True)
def windows(
    x: Tensor,
    dim: DimLike,
    window_dim: DimLike,
    stride: int = 1,
    padding: Padding = "VALID",
    dilation: int = 1,
) -> Tensor:
    """Extract windows along a dim: `out[i, j] = x[i * stride + j * dilation - before]`, zero outside.

    Args:
      x: any tensor.
      dim: the dim to slide along. In the result it indexes the windows.
      window_dim: a new dim for the elements of a window, inserted after `dim`.
      stride: the distance between the starts of neighbouring windows.
      padding: "SAME", "VALID", or the number of zeros, `(before, after)`.
      dilation: the distance between neighbouring elements of a window.

    >>> import weft as wf
    >>> wf.windows(wf.arange("t=4"), "t", "k=2")
    i32[t=3, k=2]
    [[0, 1],
     [1, 2],
     [2, 3]]
    """
    x = as_slice(x)
    old = select_dim(x.dims, dim)
    new = as_dim(window_dim)
    (slide,) = sliding_windows([old], [new.size], stride, padding, dilation)
    n = x.dims.index(old)
    dims = (*x.dims[:n], slide.out, new, *x.dims[n + 1 :])
    check_distinct(dims)
    ctx = active.context
    # Every device creates complete windows. If the layout splits window_dim, its consumer slices it.
    splits = tuple(() if d == new else axes for d, axes in zip(dims, ctx.splits(dims), strict=True))
    array = fill_padding(reshard(x), x.dims, layout_splits(x), only=[old])
    field, _, _ = fetch_receptive_field(array, n, slide, splits[n])
    firsts = np.arange(ctx.slice_size(slide.out, splits[n])) * slide.stride
    index = firsts[:, None] + np.arange(new.size) * slide.dilation
    array = jnp.take(field, index, axis=n, mode="clip")
    return slice_tensor(fill_padding(array, dims, splits, only=[slide.out]), dims, splits)
