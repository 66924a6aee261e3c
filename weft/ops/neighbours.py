"""Neighbours: convolution, pooling and windows over dims that may be split.

A window slides along a dim, and a place of the result needs a few neighbouring places of the
input. Where the dim is split, each device fetches what its own block of the result needs: mostly
its own block of the input, and a border of its neighbours' (`blocks.fetch`). The rest is local.
With a window of 3, stride 1 and SAME padding, 8 places over 2 devices:

    device 0   ·[0 1 2 3]4      4 travels from device 1; · is outside the dim
    device 1   3[4 5 6 7]·      3 travels from device 0
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import blocks, collectives, context
from ..collectives import Axes
from ..dims import Dim, as_dims, check_distinct, pick, pick_one, show, union
from ..errors import DimError, ShapeError, TensorTypeError, WeftError, nearest
from ..forms import as_slice, fill_padding, home, in_form, positions, slice_tensor, together
from ..spmd import asked, op
from ..tensor import Tensor
from .reduce import extreme

# How a window slides along a dim


@dataclass(frozen=True)
class Slide:
    """A window that slides along one dim, in JAX's terms.

    Args:
      dim: the input's dim.
      window: how many places the window takes.
      stride: how far it moves from one place of the result to the next.
      dilation: how far its places lie apart.
      spread: how far the input's places are put apart, with zeros between them.
      low: how many places are added before the input (cut off, if negative).
      high: how many are added behind it.
    """

    dim: Dim
    window: int
    stride: int
    dilation: int
    spread: int
    low: int
    high: int

    @property
    def reach(self) -> int:
        """How many places lie under the window, the gaps of its dilation included."""
        return (self.window - 1) * self.dilation + 1

    @property
    def out(self) -> Dim:
        """The result's dim: one place for each position of the window."""
        padded = (self.dim.size - 1) * self.spread + 1 + self.low + self.high
        if padded < self.reach:
            raise ShapeError(
                f"a window over {self.reach} places of {self.dim.name} does not fit into {padded}",
                f"window {self.window}, dilation {self.dilation}: (window - 1) · dilation + 1 = "
                f"{self.reach}     {self.dim}, padding {self.low} and {self.high}",
                rule="the window has to fit into the dim and its padding at least once",
                hint='use a smaller window or dilation, or padding="SAME"',
            )
        return self.dim.resize((padded - self.reach) // self.stride + 1)


def _slides(
    dims: Sequence[Dim],
    windows: Sequence[Any],
    stride: Any,
    padding: Any,
    dilation: Any = 1,
    transpose: bool = False,
) -> list[Slide]:
    """The slides along several dims; stride, padding and dilation for all of them or by dim."""
    return [
        _slide(*each, transpose)
        for each in zip(
            dims,
            windows,
            _by_dim(dims, stride, 1, "stride"),
            _by_dim(dims, padding, "VALID", "padding"),
            _by_dim(dims, dilation, 1, "dilation"),
            strict=True,
        )
    ]


def _slide(
    dim: Dim, window: Any, stride: Any, padding: Any, dilation: Any, transpose: bool
) -> Slide:
    window, stride = _count(dim, window, "window"), _count(dim, stride, "stride")
    dilation = _count(dim, dilation, "dilation")
    reach = (window - 1) * dilation + 1
    word = padding.upper() if isinstance(padding, str) else ""
    if word in ("SAME", "VALID"):
        rule = _transposed_pads if transpose else _pads
        low, high = rule(dim.size, reach, stride, word)
    else:
        low, high = _pair(dim, padding)
    if transpose:
        return Slide(dim, window, 1, dilation, stride, low, high)
    return Slide(dim, window, stride, dilation, 1, low, high)


def _by_dim(dims: Sequence[Dim], given: Any, default: Any, what: str) -> list[Any]:
    """An option for each dim: the same for all, or by name and by default for the rest."""
    if not isinstance(given, Mapping):
        return [given] * len(dims)
    names = [d.name for d in dims]
    wrong = [name for name in given if name not in names]
    if wrong:
        raise DimError(
            f"{what} is given for {', '.join(f'{n}{nearest(n, names)}' for n in map(str, wrong))}",
            rule="an option speaks of the dims that the window slides along",
            hint=f"these are {', '.join(names)}",
        )
    return [given.get(name, default) for name in names]


def _count(dim: Dim, value: Any, what: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ShapeError(
        f"the {what} along {dim.name} is {value!r}",
        rule=f"a {what} is a whole number, at least 1",
        hint=f'for example {what}={{"{dim.name}": 2}}',
    )


def _pair(dim: Dim, padding: Any) -> tuple[int, int]:
    if isinstance(padding, tuple | list) and [type(n) for n in padding] == [int, int]:
        return padding[0], padding[1]
    raise ShapeError(
        f"the padding along {dim.name} is {padding!r}",
        rule='a padding is "SAME", "VALID", or how many places to add before and behind',
        hint=f'for example padding=(1, 1), or padding={{"{dim.name}": (1, 1)}}',
    )


def _pads(size: int, reach: int, stride: int, word: str) -> tuple[int, int]:
    ((low, high),) = lax.padtype_to_pads([size], [reach], [stride], word)
    return low, high


def _transposed_pads(size: int, reach: int, stride: int, word: str) -> tuple[int, int]:
    """The rule of `jax.lax.conv_transpose`: the result is size · stride places (SAME), or what a
    VALID convolution would take to the input's size."""
    if word == "VALID":
        return reach - 1, reach - 1 + max(stride - reach, 0)
    total = reach + stride - 2
    low = reach - 1 if stride > reach - 1 else -(-total // 2)
    return low, total - low


def _near(
    array: Any, position: int, slide: Slide, axes: Axes
) -> tuple[Any, tuple[int, int], list[int] | None]:
    """The input that this device's block of the result needs.

    Returns:
      The input's places, the padding to put around them once they are spread, and, for each device,
      how many places the local result begins too early (None: nowhere).
    """
    program = context.require()
    block = program.slice_size(slide.out, axes)
    firsts = [k * block * slide.stride - slide.low for k in range(program.ways(axes))]
    # A place m of the spread input holds an element if spread divides m. Where the devices' first
    # places differ in that, all begin at the last element before: the same work for all, and
    # some of their results come too early.
    early = [first % slide.spread for first in firsts]
    if len(set(early)) == 1:
        ahead, extra = -firsts[0] % slide.spread, 0
        starts = [(first + ahead) // slide.spread for first in firsts]
    else:
        ahead, extra = 0, max(early)
        starts = [first // slide.spread for first in firsts]
    reach = (block - 1) * slide.stride + extra + slide.reach
    length = max(1, -(-(reach - ahead) // slide.spread))
    near = blocks.fetch(array, position, slide.dim, axes, starts, length)
    behind = reach - ahead - ((length - 1) * slide.spread + 1)
    return near, (ahead, behind), early if extra else None


# Arguments


def _names_for_keys(public: Callable[..., Any]) -> Callable[..., Any]:
    """Let dicts be keyed by Dims as well as by names: JAX sorts keys, and Dims have no order."""

    def plain(given: Any) -> Any:
        if isinstance(given, Mapping):
            return {k.name if isinstance(k, Dim) else k: plain(v) for k, v in given.items()}
        if isinstance(given, tuple | list):
            return tuple(map(plain, given))
        return int(given) if isinstance(given, np.integer) else given

    @functools.wraps(public)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return public(*map(plain, args), **{k: plain(v) for k, v in kwargs.items()})
        except WeftError as error:
            error.located(asked(public.__name__, args, kwargs))
            raise

    return call


def _check_window(window: Any, example: str) -> None:
    if not isinstance(window, Mapping) or not window:
        raise TensorTypeError(
            f"the window is {window!r}",
            rule="a window says by name which dims it slides along",
            hint=f"for example window={example}",
        )


# Convolution


@dataclass(frozen=True)
class _Roles:
    """What the dims of a convolution are for, apart from those that the window slides along."""

    batch: tuple[Dim, ...]  # only the input has them
    groups: tuple[Dim, ...]  # both and the result have them
    contracted: tuple[Dim, ...]  # both have them, and the result has not
    features: tuple[Dim, ...]  # only the kernel has them


@_names_for_keys
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
    slides = _slides(spatial, [d.size for d in taps], stride, padding, dilation, transpose)
    outs = {slide.dim: slide.out for slide in slides}
    every = union([x.dims, rest])
    result_dims = _result_dims(x.dims, rest, outs, out)
    roles = _roles(x.dims, rest, outs, result_dims)

    splits = dict(zip(every, context.require().splits(every), strict=True))
    x_splits = tuple(splits[d] for d in x.dims)
    kernel_splits = tuple(() if d in taps else splits[d] for d in kernel.dims)
    image, filters = together([x, kernel], [x_splits, kernel_splits])
    # What the window sees of x's own padding is zero, but its cotangent would not be.
    image = fill_padding(image, x.dims, x_splits, only=spatial)

    pads, early = [], {}
    for slide in slides:
        axes, pad = splits[slide.dim], (slide.low, slide.high)
        if axes:
            image, pad, early[slide] = _near(image, x.dims.index(slide.dim), slide, axes)
        pads.append(pad)
    array, dims = _convolve(image, x.dims, filters, kernel.dims, slides, taps, roles, pads)
    for slide, table in early.items():
        if table:
            start = jnp.asarray(table, jnp.int32)[collectives.index(splits[slide.dim])]
            block = context.require().slice_size(slide.out, splits[slide.dim])
            array = lax.dynamic_slice_in_dim(array, start, block, dims.index(slide.dim))
    array = array.transpose([[outs.get(d, d) for d in dims].index(d) for d in result_dims])
    array = fill_padding(
        array, result_dims, context.require().splits(result_dims), only=outs.values()
    )
    pending = {axis for d in roles.contracted for axis in splits[d]}
    return slice_tensor(array, result_dims, pending=pending)


def _matched(
    x: Tensor, kernel: Tensor, window: Any
) -> tuple[tuple[Dim, ...], tuple[Dim, ...], tuple[Dim, ...]]:
    """The spatial dims, the kernel's dims for them, and the kernel's other dims."""
    _check_window(window, '{"h": "kh", "w": "kw"}')
    if len(window) > 3:
        raise DimError(
            f"the window slides along {len(window)} dims: {', '.join(window)}",
            rule="a convolution has 1 to 3 spatial dims",
            hint="make one of them a batch dim, or contract windows(x, dim, window_dim) by einsum",
        )
    spatial, taps = pick(x.dims, list(window)), pick(kernel.dims, list(window.values()))
    rest = tuple(d for d in kernel.dims if d not in taps)
    both = {d.name for d in spatial} & {d.name for d in rest}
    if both:
        raise DimError(
            f"the window slides along {', '.join(sorted(both))}, and the kernel has that dim too",
            f"kernel: [{show(kernel.dims)}]",
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
    known = tuple(outs.get(d, d) for d in union([x_dims, rest]))
    items: Any = (out,) if isinstance(out, Dim | str) else out
    # A spatial dim may be given as the Dim that x has: its size here is computed.
    return pick(known, [outs.get(d, d) for d in items])


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
            f"{', '.join(d.name for d in lost)} is not in out=[{show(result_dims)}]",
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
    slides: Sequence[Slide],
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
    spare = [
        int(slide.spread > 1 and pad == (0, 0)) for slide, pad in zip(slides, pads, strict=True)
    ]
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


# Pooling


@_names_for_keys
@op
def max_pool(
    x: Tensor, window: Mapping[Any, int], stride: Any = None, padding: Any = "VALID"
) -> Tensor:
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
    x = as_slice(x)
    slides = _pool_slides(x, window, stride, padding)
    lowest = extreme(x.dtype, -1)

    def outside(array: Any, position: int, slide: Slide, first: Any) -> Any:
        places = lax.iota(jnp.int32, array.shape[position]) + first
        inside = (places >= 0) & (places < slide.dim.size)
        inside = inside.reshape([-1 if p == position else 1 for p in range(array.ndim)])
        axes = collectives.varying(array)
        low = collectives.vary(jnp.asarray(lowest, array.dtype), axes)
        return jnp.where(collectives.vary(inside, axes), array, low)

    array = _pooled(x.dims, in_form(x), slides, lowest, lax.max, outside)
    dims = _pool_dims(x, slides)
    return slice_tensor(fill_padding(array, dims, context.require().splits(dims)), dims)


@_names_for_keys
@op
def avg_pool(
    x: Tensor, window: Mapping[Any, int], stride: Any = None, padding: Any = "VALID"
) -> Tensor:
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
    _check_window(window, '{"h": 2, "w": 2}')
    dims = pick(x.dims, list(window))
    slides = _slides(dims, list(window.values()), window if stride is None else stride, padding)
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
            array, pads[place], _ = _near(array, place, slide, axes)
            if slide.low or slide.high:  # else only results that are padding look outside
                step = program.slice_size(slide.out, axes) * slide.stride
                array = outside(array, place, slide, collectives.index(axes) * step - slide.low)
    # JAX knows the maximum and the sum, and their gradients, by a start value that is not traced.
    return lax.reduce_window(array, np.array(start, array.dtype), combine, sizes, strides, pads)


# Windows


@_names_for_keys
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
    (new,) = as_dims(window_dim)
    (slide,) = _slides([old], [new.size], stride, padding, dilation)
    place = x.dims.index(old)
    dims = (*x.dims[:place], slide.out, new, *x.dims[place + 1 :])
    check_distinct(dims)
    program = context.require()
    # Every device makes whole windows; if their dim is split, it is cut where it is used.
    splits = tuple(
        () if d == new else axes for d, axes in zip(dims, program.splits(dims), strict=True)
    )
    array = fill_padding(in_form(x), x.dims, home(x), only=[old])
    near, _, _ = _near(array, place, slide, splits[place])
    firsts = np.arange(program.slice_size(slide.out, splits[place])) * slide.stride
    places = firsts[:, None] + np.arange(new.size) * slide.dilation
    array = jnp.take(near, places, axis=place, mode="clip")
    return slice_tensor(fill_padding(array, dims, splits, only=[slide.out]), dims, splits)
