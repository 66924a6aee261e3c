"""Pooling and windows: over a split dim only the borders travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import collectives, context
from ..core.dims import Dim, as_dim, check_distinct, select_dim, select_dims
from ..core.errors import ShapeError
from ..core.op import op
from ..core.operands import as_slice, slice_tensor
from ..core.padding import fill_padding, global_positions
from ..core.reshard import layout_splits, reshard
from ..core.tensor import Tensor
from ..core.types import constant_like
from .reduce import extreme_value, require_ordered
from .sliding_window import (
    SlidingWindow,
    accept_dim_keys,
    check_window,
    fetch_receptive_field,
    sliding_windows,
)


@accept_dim_keys
@op
def max_pool(x: Tensor, window: Mapping[Any, int], stride: Any = None, padding: Any = "VALID") -> Tensor:
    """The maximum under a window that slides along some dims.

    Args:
      x: any tensor.
      window: how many places of which dims, `{"h": 2, "w": 2}`.
      stride: a number, or one for each of these dims; by default the window, so that none overlap.
      padding: "SAME", "VALID", or the places before and behind, as in `conv`; they never are the
        maximum.

    >>> import weft as wf
    >>> wf.max_pool(wf.arange(wf.Dim("h", 6)), {"h": 2})
    i32[h=3] [1, 3, 5]
    """
    x = require_ordered(x, "max_pool")
    slides = _pool_slides(x, window, stride, padding)
    lowest = extreme_value(x.dtype, -1)

    def outside(array: Any, position: int, slide: SlidingWindow, first: Any) -> Any:
        places = lax.iota(jnp.int32, array.shape[position]) + first
        inside = (places >= 0) & (places < slide.dim.size)
        inside = inside.reshape([-1 if p == position else 1 for p in range(array.ndim)])
        axes = collectives.varying_axes(array)
        low = collectives.pvary(constant_like(lowest, array), axes)
        return jnp.where(collectives.pvary(inside, axes), array, low)

    array = _pooled(x.dims, reshard(x), slides, lowest, lax.max, outside)
    dims = _pool_dims(x, slides)
    return slice_tensor(fill_padding(array, dims, context.require().splits(dims)), dims)


@accept_dim_keys
@op
def avg_pool(x: Tensor, window: Mapping[Any, int], stride: Any = None, padding: Any = "VALID") -> Tensor:
    """The mean under a window that slides along some dims, of elements only, not of padding.

    Args:
      x: any tensor.
      window: how many places of which dims, `{"h": 2, "w": 2}`.
      stride: a number, or one for each of these dims; by default the window, so that none overlap.
      padding: "SAME", "VALID", or the places before and behind, as in `conv`.

    >>> import weft as wf
    >>> wf.avg_pool(wf.arange(wf.Dim("h", 4), float), {"h": 3}, stride=1, padding="SAME")
    f32[h=4] [0.5, 1. , 2. , 2.5]
    """
    x = as_slice(x)
    slides = _pool_slides(x, window, stride, padding)
    array = fill_padding(reshard(x), x.dims, layout_splits(x), only=[slide.dim for slide in slides])
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        array = array.astype(jax.dtypes.canonicalize_dtype(float))
    total = _pooled(x.dims, array, slides, 0, lax.add, lambda array, *_: array)
    dims = _pool_dims(x, slides)
    splits = context.require().splits(dims)
    for slide in slides:
        place = dims.index(slide.out)
        first = global_positions(slide.out, splits[place]) * slide.stride - slide.low
        inside = jnp.minimum(first + slide.window, slide.dim.size) - jnp.maximum(first, 0)
        count = jnp.maximum(inside, 1).astype(total.dtype)  # a window over padding only has mean 0
        count = count.reshape([-1 if p == place else 1 for p in range(len(dims))])
        total = total / collectives.pvary(count, collectives.varying_axes(total))
    return slice_tensor(fill_padding(total, dims, splits), dims)


def _pool_slides(x: Tensor, window: Any, stride: Any, padding: Any) -> list[SlidingWindow]:
    check_window(window, '{"h": 2, "w": 2}')
    dims = select_dims(x.dims, list(window))
    slides = sliding_windows(dims, list(window.values()), window if stride is None else stride, padding)
    wrong = [slide for slide in slides if slide.low < 0 or slide.high < 0]
    if wrong:
        raise ShapeError(
            f"the padding along {wrong[0].dim.name} is {wrong[0].low} and {wrong[0].high}",
            rule="a pool's padding is not negative",
            hint=f'cut places off first: x["{wrong[0].dim.name}", 1:]',
        )
    return slides


def _pool_dims(x: Tensor, slides: Sequence[SlidingWindow]) -> tuple[Dim, ...]:
    outs = {slide.dim: slide.out for slide in slides}
    return tuple(outs.get(d, d) for d in x.dims)


def _pooled(
    dims: tuple[Dim, ...],
    array: Any,
    slides: Sequence[SlidingWindow],
    start: Any,
    combine: Callable[..., Any],
    outside: Callable[[Any, int, SlidingWindow, Any], Any],
) -> Any:
    """`lax.reduce_window` of slices; `outside` fills what was fetched from outside the dim."""
    program = context.require()
    splits = program.splits(dims)
    sizes, strides, pads = [1] * len(dims), [1] * len(dims), [(0, 0)] * len(dims)
    for slide in slides:
        place = dims.index(slide.dim)
        axes = splits[place]
        sizes[place], strides[place] = slide.window, slide.stride
        pads[place] = (slide.low, slide.high)
        if axes:
            array, pads[place], _ = fetch_receptive_field(array, place, slide, axes)
            if slide.low or slide.high:  # else only results that are padding look outside
                step = program.slice_size(slide.out, axes) * slide.stride
                array = outside(array, place, slide, collectives.axis_index(axes) * step - slide.low)
    # JAX knows the maximum and the sum, and their gradients, by a start value that is not traced.
    return lax.reduce_window(array, np.array(start, array.dtype), combine, sizes, strides, pads)


# Windows


@accept_dim_keys
@op
def windows(
    x: Tensor,
    dim: Any,
    window_dim: Any,
    stride: int = 1,
    padding: Any = "VALID",
    dilation: int = 1,
) -> Tensor:
    """The windows along a dim: `out[i, j] = x[i * stride + j * dilation - before]`, zero outside.

    Args:
      x: any tensor.
      dim: where the windows slide; in the result it counts them.
      window_dim: a new Dim for the places of one window, put behind `dim`.
      stride: how far one window begins from the next.
      padding: "SAME", "VALID", or the zeros before and behind, `(before, behind)`.
      dilation: how far the places of a window lie apart.

    >>> import weft as wf
    >>> wf.windows(wf.arange(wf.Dim("t", 4)), "t", wf.Dim("k", 2))
    i32[t=3, k=2]
    [[0, 1],
     [1, 2],
     [2, 3]]
    """
    x = as_slice(x)
    old = select_dim(x.dims, dim)
    new = as_dim(window_dim)
    (slide,) = sliding_windows([old], [new.size], stride, padding, dilation)
    place = x.dims.index(old)
    dims = (*x.dims[:place], slide.out, new, *x.dims[place + 1 :])
    check_distinct(dims)
    program = context.require()
    # Every device makes whole windows; if their dim is split, it is cut where it is used.
    splits = tuple(() if d == new else axes for d, axes in zip(dims, program.splits(dims), strict=True))
    array = fill_padding(reshard(x), x.dims, layout_splits(x), only=[old])
    near, _, _ = fetch_receptive_field(array, place, slide, splits[place])
    firsts = np.arange(program.slice_size(slide.out, splits[place])) * slide.stride
    places = firsts[:, None] + np.arange(new.size) * slide.dilation
    array = jnp.take(near, places, axis=place, mode="clip")
    return slice_tensor(fill_padding(array, dims, splits, only=[slide.out]), dims, splits)
