"""Convolution: over a split spatial dim only the borders travel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..core import collectives, context, halo
from ..core.dims import Dim, format_dims, select_dims, union_dims
from ..core.errors import DimError
from ..core.op import op
from ..core.operands import as_slice, slice_tensor
from ..core.padding import fill_padding
from ..core.reshard import reshard_together
from ..core.tensor import Tensor
from .sliding_window import (
    SlidingWindow,
    accept_dim_keys,
    check_window,
    fetch_receptive_field,
    sliding_windows,
)


@dataclass(frozen=True)
class _Roles:
    """What the dims of a convolution are for, apart from those that the window slides along."""

    batch: tuple[Dim, ...]  # only the input has them
    groups: tuple[Dim, ...]  # both and the result have them
    contracted: tuple[Dim, ...]  # both have them, and the result has not
    features: tuple[Dim, ...]  # only the kernel has them


@accept_dim_keys
@op
def conv(
    x: Tensor,
    kernel: Tensor,
    window: Mapping[Any, Any],
    out: Any = None,
    stride: Any = 1,
    padding: Any = "SAME",
    dilation: Any = 1,
    transpose: bool = False,
) -> Tensor:
    """The convolution (cross-correlation, as in `jax.lax`) of a tensor with a kernel, by name.

    Dims that both have are contracted, unless they are in `out`: then they are feature groups. Dims
    that only x has are batch dims, dims that only the kernel has are output features.

    Args:
      x: has the spatial dims, 1 to 3 of them.
      kernel: has a dim for each of them.
      window: which: `{"h": "kh", "w": "kw"}`. In the result h and w have new sizes.
      out: the dims of the result, in order; by default those of x that are not contracted, then the
        kernel's features.
      stride: a number, or one for each spatial dim, `{"h": 2, "w": 1}`.
      padding: "SAME", "VALID", or the zeros before and behind, `(1, 1)`; or one of these for each
        spatial dim, `{"h": (1, 1), "w": "SAME"}`, where a dim that is left out has none.
      dilation: how far the places of the kernel lie apart; as stride.
      transpose: as `jax.lax.conv_transpose` with `transpose_kernel=False`: x is spread by the
        stride, with zeros between its places. SAME gives size · stride places, VALID what a VALID
        convolution would take to x's size, and a padding in numbers is that of the spread x.

    >>> import weft as wf
    >>> x, kernel = wf.ones("batch=1 h=4 c=2"), wf.ones("kh=3 c=2 o=1")
    >>> wf.conv(x, kernel, {"h": "kh"}).numpy("batch", "o", "h").tolist()
    [[[4.0, 6.0, 6.0, 4.0]]]
    """
    x, kernel = as_slice(x), as_slice(kernel)
    spatial, taps, rest = _matched(x, kernel, window)
    slides = sliding_windows(spatial, [d.size for d in taps], stride, padding, dilation, transpose)
    outs = {slide.dim: slide.out for slide in slides}
    every = union_dims([x.dims, rest])
    result_dims = _result_dims(x.dims, rest, outs, out)
    roles = _roles(x.dims, rest, outs, result_dims)

    splits = dict(zip(every, context.require().splits(every), strict=True))
    x_splits = tuple(splits[d] for d in x.dims)
    kernel_splits = tuple(() if d in taps else splits[d] for d in kernel.dims)
    image, filters = reshard_together([x, kernel], [x_splits, kernel_splits])
    # What the window sees of x's own padding is zero, but its cotangent would not be.
    image = fill_padding(image, x.dims, x_splits, only=spatial)

    pads, early = [], {}
    for slide in slides:
        axes, pad = splits[slide.dim], (slide.low, slide.high)
        if axes:
            image, pad, early[slide] = fetch_receptive_field(image, x.dims.index(slide.dim), slide, axes)
        pads.append(pad)
    array, dims = _convolve(image, x.dims, filters, kernel.dims, slides, taps, roles, pads)
    for slide, table in early.items():
        if table:
            start = halo.lookup_by_device(table, collectives.axis_index(splits[slide.dim]))
            block = context.require().slice_size(slide.out, splits[slide.dim])
            array = lax.dynamic_slice_in_dim(array, start, block, dims.index(slide.dim))
    array = array.transpose([[outs.get(d, d) for d in dims].index(d) for d in result_dims])
    array = fill_padding(array, result_dims, context.require().splits(result_dims))
    pending = {axis for d in roles.contracted for axis in splits[d]}
    return slice_tensor(array, result_dims, pending=pending)


def _matched(
    x: Tensor, kernel: Tensor, window: Any
) -> tuple[tuple[Dim, ...], tuple[Dim, ...], tuple[Dim, ...]]:
    """The spatial dims, the kernel's dims for them, and the kernel's other dims."""
    check_window(window, '{"h": "kh", "w": "kw"}')
    if len(window) > 3:
        raise DimError(
            f"the window slides along {len(window)} dims: {', '.join(window)}",
            rule="a convolution has 1 to 3 spatial dims",
            hint="make one of them a batch dim, or contract windows(x, dim, window_dim) by einsum",
        )
    spatial, taps = select_dims(x.dims, list(window)), select_dims(kernel.dims, list(window.values()))
    rest = tuple(d for d in kernel.dims if d not in taps)
    both = {d.name for d in spatial} & {d.name for d in rest}
    if both:
        raise DimError(
            f"the window slides along {', '.join(sorted(both))}, and the kernel has that dim too",
            f"kernel: [{format_dims(kernel.dims)}]",
            rule="a spatial dim is x's; the kernel has one of its own for the places of the window",
            hint='name the kernel\'s dim otherwise: window={"h": "kh"}',
        )
    return spatial, taps, rest


def _result_dims(
    x_dims: tuple[Dim, ...], rest: tuple[Dim, ...], outs: Mapping[Dim, Dim], out: Any
) -> tuple[Dim, ...]:
    if out is None:
        kept = tuple(outs.get(d, d) for d in x_dims if d not in rest)
        return kept + tuple(d for d in rest if d not in x_dims)
    known = tuple(outs.get(d, d) for d in union_dims([x_dims, rest]))
    items: Any = (out,) if isinstance(out, Dim | str) else out
    # A spatial dim may be given as the Dim that x has: its size here is computed.
    return select_dims(known, [outs.get(d, d) for d in items])


def _roles(
    x_dims: tuple[Dim, ...],
    rest: tuple[Dim, ...],
    outs: Mapping[Dim, Dim],
    result_dims: tuple[Dim, ...],
) -> _Roles:
    shared = tuple(d for d in x_dims if d in rest)
    batch = tuple(d for d in x_dims if d not in rest and d not in outs)
    features = tuple(d for d in rest if d not in x_dims)
    lost = [d for d in (*batch, *outs.values(), *features) if d not in result_dims]
    if lost:
        raise DimError(
            f"{', '.join(d.name for d in lost)} is not in out=[{format_dims(result_dims)}]",
            rule="a convolution contracts only dims that x and the kernel both have",
            hint=f'add it to out, or sum it first: wf.sum(x, "{lost[0].name}")',
        )
    groups = tuple(d for d in shared if d in result_dims)
    return _Roles(batch, groups, tuple(d for d in shared if d not in groups), features)


def _convolve(
    image: Any,
    x_dims: tuple[Dim, ...],
    filters: Any,
    kernel_dims: tuple[Dim, ...],
    slides: Sequence[SlidingWindow],
    taps: tuple[Dim, ...],
    roles: _Roles,
    pads: Sequence[tuple[int, int]],
) -> tuple[Any, list[Dim]]:
    """The local convolution, its dims merged into those of `lax`: batch, space and features."""
    sizes = dict(zip(x_dims, image.shape, strict=True))
    kernel_sizes = dict(zip(kernel_dims, filters.shape, strict=True))
    spatial = tuple(slide.dim for slide in slides)
    single = [(d,) for d in spatial]
    lhs = _merged(image, x_dims, [roles.batch, *single, roles.groups + roles.contracted])
    windows = [(d,) for d in taps]
    rhs = _merged(filters, kernel_dims, [*windows, roles.contracted, roles.groups + roles.features])
    dtype = jnp.result_type(lhs, rhs)
    # XLA (in jax 0.10.2) can take a spread dim without padding for a batch dim, and then aborts:
    # such a dim gets one place more, and its last result is cut off.
    spare = [int(slide.spread > 1 and pad == (0, 0)) for slide, pad in zip(slides, pads, strict=True)]
    letters = "HWD"[: len(slides)]
    array = lax.conv_general_dilated(
        lhs.astype(dtype),
        rhs.astype(dtype),
        window_strides=[slide.stride for slide in slides],
        padding=[(low, high + more) for (low, high), more in zip(pads, spare, strict=True)],
        lhs_dilation=[slide.spread for slide in slides],
        rhs_dilation=[slide.dilation for slide in slides],
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        feature_group_count=math.prod(sizes[d] for d in roles.groups),
    )
    for place, more in enumerate(spare, 1):
        if more:
            array = lax.slice_in_dim(array, 0, -1, axis=place)
    last = roles.groups + roles.features
    shape = [sizes[d] for d in roles.batch] + list(array.shape[1:-1])
    shape += [kernel_sizes[d] for d in last]
    return array.reshape(shape), [*roles.batch, *spatial, *last]


def _merged(array: Any, dims: tuple[Dim, ...], groups: Sequence[tuple[Dim, ...]]) -> Any:
    """The array with one dimension for each group of dims."""
    sizes = dict(zip(dims, array.shape, strict=True))
    array = array.transpose([dims.index(d) for group in groups for d in group])
    return array.reshape([math.prod(sizes[d] for d in group) for group in groups])
