"""Convolution by name. A split spatial dim needs a halo exchange only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from ..core import collectives, halo
from ..core.context import active
from ..core.dims import (
    Dim,
    DimLike,
    DimsLike,
    check_distinct,
    format_dims,
    list_dims,
    select_dim,
    select_dims,
    union_dims,
)
from ..core.errors import DimError
from ..core.op import op
from ..core.operands import as_slice, slice_tensor
from ..core.padding import fill_padding
from ..core.reshard import reshard_together
from ..core.tensor import Tensor
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


@dataclass(frozen=True)
class _Roles:
    """The roles of the non-spatial dims of a convolution."""

    batch: tuple[Dim, ...]  # in the input only
    groups: tuple[Dim, ...]  # in the input, the kernel and the result
    contracted: tuple[Dim, ...]  # in the input and the kernel, not in the result
    features: tuple[Dim, ...]  # in the kernel only


@accept_dim_keys
@op(example=lambda op, x, kernel: op(x, kernel, window={"a": "w"}, out="a f"), mixes_rows=True)
def conv(
    x: Tensor,
    kernel: Tensor,
    window: ByDim[Dim] | ByDim[str] | ByDim[DimLike],
    out: DimsLike | None = None,
    stride: PerDim[int] = 1,
    padding: PerDim[Padding] = "SAME",
    dilation: PerDim[int] = 1,
    transpose: bool = False,
) -> Tensor:
    """The convolution (cross-correlation, as in `jax.lax`) of a tensor with a kernel, by name.

    Dims that x and the kernel share are contracted, unless they are in `out`: then they are feature groups.
    Dims of x alone are batch dims; dims of the kernel alone are output features.

    Args:
      x: the input, with 1 to 3 spatial dims.
      kernel: has one window dim for each spatial dim.
      window: maps spatial dims to window dims, `{"h": "kh", "w": "kw"}`. In the result h and w are resized.
      out: the dims of the result, in order. Defaults to the dims of x that are not contracted, then the
        kernel's features.
      stride: an integer, or one for each spatial dim, `{"h": 2, "w": 1}`.
      padding: "SAME", "VALID", or the number of zeros at both ends, `(1, 1)`; or one of these for each
        spatial dim, `{"h": (1, 1), "w": "SAME"}`, where omitted dims are not padded.
      dilation: the distance between neighbouring kernel elements; given like `stride`.
      transpose: compute `jax.lax.conv_transpose` with `transpose_kernel=False`: x is dilated by the stride.
        The output size is size · stride for SAME, and for VALID the size that a VALID convolution would
        reduce to x's. An explicit padding applies to the dilated x.

    >>> import weft as wf
    >>> x, kernel = wf.ones("batch=1 h=4 c=2"), wf.ones("kh=3 c=2 o=1")
    >>> wf.conv(x, kernel, {"h": "kh"}).numpy("batch", "o", "h").tolist()
    [[[4.0, 6.0, 6.0, 4.0]]]
    """
    x, kernel = as_slice(x), as_slice(kernel)
    spatial, taps, rest = _match_window(x, kernel, window)
    slides = sliding_windows(spatial, [d.size for d in taps], stride, padding, dilation, transpose)
    outs = {slide.dim: slide.out for slide in slides}
    all_dims = union_dims([x.dims, rest])
    result_dims = _result_dims(x.dims, rest, outs, out)
    roles = _roles(x.dims, rest, outs, result_dims)

    splits = dict(zip(all_dims, active.context.splits(all_dims), strict=True))
    x_splits = tuple(splits[d] for d in x.dims)
    kernel_splits = tuple(() if d in taps else splits[d] for d in kernel.dims)
    image, filters = reshard_together([x, kernel], [x_splits, kernel_splits])
    # The padding of x is zero, but its cotangent would not be: the window overlaps it.
    image = fill_padding(image, x.dims, x_splits, only=spatial)

    pads, discarded = [], {}
    for slide in slides:
        axes, pad = splits[slide.dim], (slide.low, slide.high)
        if axes:
            image, pad, discarded[slide] = fetch_receptive_field(image, x.dims.index(slide.dim), slide, axes)
        pads.append(pad)
    array, dims = _convolve(image, x.dims, filters, kernel.dims, slides, taps, roles, pads)
    for slide, table in discarded.items():
        if table:  # drop the leading results that this device computed in excess
            start = halo.lookup_by_device(table, collectives.axis_index(splits[slide.dim]))
            block = active.context.slice_size(slide.out, splits[slide.dim])
            array = lax.dynamic_slice_in_dim(array, start, block, dims.index(slide.dim))
    array = array.transpose([[outs.get(d, d) for d in dims].index(d) for d in result_dims])
    array = fill_padding(array, result_dims, active.context.splits(result_dims))
    pending = {axis for d in roles.contracted for axis in splits[d]}
    return slice_tensor(array, result_dims, pending=pending)


def _match_window(
    x: Tensor, kernel: Tensor, window: ByDim[Dim] | ByDim[str] | ByDim[DimLike]
) -> tuple[tuple[Dim, ...], tuple[Dim, ...], tuple[Dim, ...]]:
    """The spatial dims, the kernel's dims for them, and the kernel's other dims."""
    check_window(window, '{"h": "kh", "w": "kw"}')
    if len(window) > 3:
        raise DimError(
            f"the window slides along {len(window)} dims: {', '.join(map(str, window))}",
            rule="a convolution has 1 to 3 spatial dims",
            hint="make one of them a batch dim, or contract windows(x, dim, window_dim) by einsum",
        )
    spatial = tuple([select_dim(x.dims, dim) for dim in window])
    taps = tuple([select_dim(kernel.dims, dim) for dim in window.values()])
    check_distinct(taps)
    rest = tuple(d for d in kernel.dims if d not in taps)
    both = {d.name for d in spatial} & {d.name for d in rest}
    if both:
        raise DimError(
            f"the window slides along {', '.join(sorted(both))}, and the kernel has that dim too",
            f"kernel: [{format_dims(kernel.dims)}]",
            rule="spatial dims belong to x; the kernel has a separate dim for each window",
            hint='give the kernel\'s dim another name: window={"h": "kh"}',
        )
    return spatial, taps, rest


def _result_dims(
    x_dims: tuple[Dim, ...], rest: tuple[Dim, ...], outs: Mapping[Dim, Dim], out: DimsLike | None
) -> tuple[Dim, ...]:
    if out is None:
        from_x = tuple(outs.get(d, d) for d in x_dims if d not in rest)
        return from_x + tuple(d for d in rest if d not in x_dims)
    known = tuple(outs.get(d, d) for d in union_dims([x_dims, rest]))
    # A spatial dim may be given with the size that it has in x; the result's size is computed.
    return select_dims(known, [outs.get(d, d) if isinstance(d, Dim) else d for d in list_dims(out)])


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
    image: jax.Array,
    x_dims: tuple[Dim, ...],
    filters: jax.Array,
    kernel_dims: tuple[Dim, ...],
    slides: Sequence[SlidingWindow],
    taps: tuple[Dim, ...],
    roles: _Roles,
    pads: Sequence[tuple[int, int]],
) -> tuple[jax.Array, list[Dim]]:
    """The local convolution, with dims merged into the batch, spatial and feature dimensions of `lax`."""
    sizes = dict(zip(x_dims, image.shape, strict=True))
    kernel_sizes = dict(zip(kernel_dims, filters.shape, strict=True))
    spatial = tuple(slide.dim for slide in slides)
    single = [(d,) for d in spatial]
    lhs = _merge_dims(image, x_dims, [roles.batch, *single, roles.groups + roles.contracted])
    windows = [(d,) for d in taps]
    rhs = _merge_dims(filters, kernel_dims, [*windows, roles.contracted, roles.groups + roles.features])
    dtype = jnp.result_type(lhs, rhs)
    # XLA (in jax 0.10.2) can mistake a dilated dim without padding for a batch dim, and aborts. Such a dim is
    # padded by one element, and its last result is dropped.
    extra = [int(slide.input_dilation > 1 and pad == (0, 0)) for slide, pad in zip(slides, pads, strict=True)]
    letters = "HWD"[: len(slides)]
    array = lax.conv_general_dilated(
        lhs.astype(dtype),
        rhs.astype(dtype),
        window_strides=[slide.stride for slide in slides],
        padding=[(low, high + more) for (low, high), more in zip(pads, extra, strict=True)],
        lhs_dilation=[slide.input_dilation for slide in slides],
        rhs_dilation=[slide.dilation for slide in slides],
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        feature_group_count=math.prod(sizes[d] for d in roles.groups),
    )
    for n, more in enumerate(extra, 1):
        if more:
            array = lax.slice_in_dim(array, 0, -1, axis=n)
    last = roles.groups + roles.features
    shape = [sizes[d] for d in roles.batch] + list(array.shape[1:-1])
    shape += [kernel_sizes[d] for d in last]
    return array.reshape(shape), [*roles.batch, *spatial, *last]


def _merge_dims(array: jax.Array, dims: tuple[Dim, ...], groups: Sequence[tuple[Dim, ...]]) -> jax.Array:
    """Reshape the array to one dimension for each group of dims."""
    sizes = dict(zip(dims, array.shape, strict=True))
    array = array.transpose([dims.index(d) for group in groups for d in group])
    return array.reshape([math.prod(sizes[d] for d in group) for group in groups])
