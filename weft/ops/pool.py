"""Pooling and windows: over a split dim only the borders travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import collectives, context
from ..core.dims import Dim, as_dim, check_distinct, pick, pick_one
from ..core.errors import ShapeError
from ..core.forms import as_slice, home, in_form, slice_tensor
from ..core.op import op
from ..core.padding import fill_padding, positions
from ..core.tensor import Tensor
from ..core.types import constant
from .reduce import extreme, ordered
from .sliding_window import Slide, check_window, names_for_keys, slides_of, within_reach


@names_for_keys
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
    x = ordered(x, "max_pool")
    slides = _pool_slides(x, window, stride, padding)
    lowest = extreme(x.dtype, -1)

    def outside(array: Any, position: int, slide: Slide, first: Any) -> Any:
        places = lax.iota(jnp.int32, array.shape[position]) + first
        inside = (places >= 0) & (places < slide.dim.size)
        inside = inside.reshape([-1 if p == position else 1 for p in range(array.ndim)])
        axes = collectives.varying(array)
        low = collectives.vary(constant(lowest, array), axes)
        return jnp.where(collectives.vary(inside, axes), array, low)

    array = _pooled(x.dims, in_form(x), slides, lowest, lax.max, outside)
    dims = _pool_dims(x, slides)
    return slice_tensor(fill_padding(array, dims, context.require().splits(dims)), dims)


@names_for_keys
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
    array = fill_padding(in_form(x), x.dims, home(x), only=[slide.dim for slide in slides])
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        array = array.astype(jax.dtypes.canonicalize_dtype(float))
    total = _pooled(x.dims, array, slides, 0, lax.add, lambda array, *_: array)
    dims = _pool_dims(x, slides)
    splits = context.require().splits(dims)
    for slide in slides:
        place = dims.index(slide.out)
        first = positions(slide.out, splits[place]) * slide.stride - slide.low
        inside = jnp.minimum(first + slide.window, slide.dim.size) - jnp.maximum(first, 0)
        count = jnp.maximum(inside, 1).astype(total.dtype)  # a window over padding only has mean 0
        count = count.reshape([-1 if p == place else 1 for p in range(len(dims))])
        total = total / collectives.vary(count, collectives.varying(total))
    return slice_tensor(fill_padding(total, dims, splits), dims)


def _pool_slides(x: Tensor, window: Any, stride: Any, padding: Any) -> list[Slide]:
    check_window(window, '{"h": 2, "w": 2}')
    dims = pick(x.dims, list(window))
    slides = slides_of(dims, list(window.values()), window if stride is None else stride, padding)
    wrong = [slide for slide in slides if slide.low < 0 or slide.high < 0]
    if wrong:
        raise ShapeError(
            f"the padding along {wrong[0].dim.name} is {wrong[0].low} and {wrong[0].high}",
            rule="a pool's padding is not negative",
            hint=f'cut places off first: x["{wrong[0].dim.name}", 1:]',
        )
    return slides


def _pool_dims(x: Tensor, slides: Sequence[Slide]) -> tuple[Dim, ...]:
    outs = {slide.dim: slide.out for slide in slides}
    return tuple(outs.get(d, d) for d in x.dims)


def _pooled(
    dims: tuple[Dim, ...],
    array: Any,
    slides: Sequence[Slide],
    start: Any,
    combine: Callable[..., Any],
    outside: Callable[[Any, int, Slide, Any], Any],
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
            array, pads[place], _ = within_reach(array, place, slide, axes)
            if slide.low or slide.high:  # else only results that are padding look outside
                step = program.slice_size(slide.out, axes) * slide.stride
                array = outside(array, place, slide, collectives.index(axes) * step - slide.low)
    # JAX knows the maximum and the sum, and their gradients, by a start value that is not traced.
    return lax.reduce_window(array, np.array(start, array.dtype), combine, sizes, strides, pads)


# Windows


@names_for_keys
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
    old = pick_one(x.dims, dim)
    new = as_dim(window_dim)
    (slide,) = slides_of([old], [new.size], stride, padding, dilation)
    place = x.dims.index(old)
    dims = (*x.dims[:place], slide.out, new, *x.dims[place + 1 :])
    check_distinct(dims)
    program = context.require()
    # Every device makes whole windows; if their dim is split, it is cut where it is used.
    splits = tuple(() if d == new else axes for d, axes in zip(dims, program.splits(dims), strict=True))
    array = fill_padding(in_form(x), x.dims, home(x), only=[old])
    near, _, _ = within_reach(array, place, slide, splits[place])
    firsts = np.arange(program.slice_size(slide.out, splits[place])) * slide.stride
    places = firsts[:, None] + np.arange(new.size) * slide.dilation
    array = jnp.take(near, places, axis=place, mode="clip")
    return slice_tensor(fill_padding(array, dims, splits, only=[slide.out]), dims, splits)
