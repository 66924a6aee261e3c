"""Sliding windows: output sizes, padding, and the halo that each device needs.

Input: a dim with window, stride, padding and dilation. Output: a `SlidingWindow` in the terms of `jax.lax`,
and the receptive field of a device's block of the result, fetched by halo exchange.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar, cast

import jax
import numpy as np
from jax import lax

from ..core import context, halo
from ..core.collectives import Axes
from ..core.context import active
from ..core.describe import format_call
from ..core.dims import Dim, DimLike, dim_name
from ..core.errors import DimError, ShapeError, TensorTypeError, WeftError, nearest, python_number_error
from ..core.operands import check_along
from ..core.tensor import Tensor
from ..core.types import Function, PyTree

T = TypeVar("T")
# Mappings are invariant in their keys, so each kind of key is named.
ByDim: TypeAlias = Mapping[str, T] | Mapping[Dim, T] | Mapping[DimLike, T]
PerDim: TypeAlias = T | ByDim[T]  # one value for all dims, or one for each
Padding = str | Sequence[int]  # "SAME", "VALID", or (before, after)


@dataclass(frozen=True)
class SlidingWindow:
    """A window that slides along one dim, in the terms of `jax.lax`.

    Args:
      dim: the input's dim.
      window: the number of elements in the window.
      stride: the step of the window from one output to the next.
      dilation: the distance between neighbouring elements of the window.
      input_dilation: the distance between neighbouring elements of the input, with zeros between them.
      low: the padding before the input (negative: the number of elements removed).
      high: the padding after the input.
    """

    dim: Dim
    window: int
    stride: int
    dilation: int
    input_dilation: int
    low: int
    high: int

    @property
    def extent(self) -> int:
        """The number of input positions that the window covers, including the gaps of its dilation."""
        return (self.window - 1) * self.dilation + 1

    @property
    def out(self) -> Dim:
        """The result's dim, with one element for each position of the window."""
        padded = (self.dim.size - 1) * self.input_dilation + 1 + self.low + self.high
        if padded < self.extent:
            raise ShapeError(
                f"a window of extent {self.extent} along {self.dim.name} does not fit into {padded} elements",
                f"window {self.window}, dilation {self.dilation}: (window - 1) · dilation + 1 = "
                f"{self.extent}     {self.dim}, padding {self.low} and {self.high}",
                rule="the window must fit into the padded dim at least once",
                hint='use a smaller window or dilation, or padding="SAME"',
            )
        return self.dim.resize((padded - self.extent) // self.stride + 1)


def sliding_windows(
    dims: Sequence[Dim],
    windows: Sequence[int],
    stride: PerDim[int],
    padding: PerDim[Padding],
    dilation: PerDim[int] = 1,
    transpose: bool = False,
) -> list[SlidingWindow]:
    """Sliding windows along several dims, with stride, padding and dilation for all dims or for each dim."""
    check_along(dims)
    no_padding: Padding = "VALID"
    return [
        _sliding_window(*options, transpose)
        for options in zip(
            dims,
            windows,
            _by_dim(dims, stride, 1, "stride"),
            _by_dim(dims, padding, no_padding, "padding"),
            _by_dim(dims, dilation, 1, "dilation"),
            strict=True,
        )
    ]


def _sliding_window(
    dim: Dim, window: int, stride: int, padding: Padding, dilation: int, transpose: bool
) -> SlidingWindow:
    window, stride = _positive(dim, window, "window"), _positive(dim, stride, "stride")
    dilation = _positive(dim, dilation, "dilation")
    extent = (window - 1) * dilation + 1
    mode = padding.upper() if isinstance(padding, str) else ""
    if mode in ("SAME", "VALID"):
        pads = _transposed_pads if transpose else _pads
        low, high = pads(dim.size, extent, stride, mode)
    else:
        low, high = _explicit_pads(dim, padding)
    if transpose:
        return SlidingWindow(dim, window, 1, dilation, stride, low, high)
    return SlidingWindow(dim, window, stride, dilation, 1, low, high)


def _by_dim(dims: Sequence[Dim], value: PerDim[T], default: T, option: str) -> list[T]:
    """The value of an option for each dim: one value for all dims, or a mapping with a default."""
    if not isinstance(value, Mapping):
        return [value] * len(dims)
    by_name = cast(Mapping[str, T], value)  # `accept_dim_keys` has replaced Dims by their names
    names = [d.name for d in dims]
    unknown = [name for name in by_name if name not in names]
    if unknown:
        raise DimError(
            f"{option} is given for {', '.join(f'{n}{nearest(n, names)}' for n in map(str, unknown))}",
            rule="options are given for the dims that the window slides along",
            hint=f"these are {', '.join(names)}",
        )
    return [by_name.get(name, default) for name in names]


def _positive(dim: Dim, value: int, option: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise python_number_error(
        ShapeError,
        f"the {option} along {dim.name}",
        value,
        rule=f"a {option} is an integer, at least 1",
        hint=f'for example {option}={{"{dim.name}": 2}}',
    )


def _explicit_pads(dim: Dim, padding: Padding) -> tuple[int, int]:
    if isinstance(padding, tuple | list) and [type(n) for n in padding] == [int, int]:
        return padding[0], padding[1]
    traced = [n for n in padding if context.is_traced(n)] if isinstance(padding, tuple | list) else []
    raise python_number_error(
        ShapeError,
        f"the padding along {dim.name}",
        traced[0] if traced else padding,
        rule='a padding is "SAME", "VALID", or two integers: the padding before and after',
        hint=f'for example padding=(1, 1), or padding={{"{dim.name}": (1, 1)}}',
    )


def _pads(size: int, extent: int, stride: int, mode: str) -> tuple[int, int]:
    ((low, high),) = lax.padtype_to_pads([size], [extent], [stride], mode)
    return low, high


def _transposed_pads(size: int, extent: int, stride: int, mode: str) -> tuple[int, int]:
    """The padding rule of `jax.lax.conv_transpose`.

    The output size is size · stride for SAME. For VALID it is the size that a VALID convolution would reduce
    to the input's.
    """
    if mode == "VALID":
        return extent - 1, extent - 1 + max(stride - extent, 0)
    total = extent + stride - 2
    low = extent - 1 if stride > extent - 1 else -(-total // 2)
    return low, total - low


def fetch_receptive_field(
    array: jax.Array, dim_index: int, slide: SlidingWindow, axes: Axes
) -> tuple[jax.Array, tuple[int, int], list[int] | None]:
    """Fetch the receptive field of this device's block of the result.

    Returns:
      The input elements; the padding to add before and after them once they are dilated; and, for each
      device, the number of leading results to discard (None: no device has any).
    """
    ctx = active.context
    block = ctx.slice_size(slide.out, axes)
    firsts = [k * block * slide.stride - slide.low for k in range(ctx.ways(axes))]
    # Position m of the dilated input holds an element if input_dilation divides m, and a zero otherwise. If
    # the devices' first positions leave different remainders, every device starts at the element before its
    # first position: all run the same program, and some compute results that have to be discarded.
    remainders = [first % slide.input_dilation for first in firsts]
    if len(set(remainders)) == 1:
        before, discarded = -firsts[0] % slide.input_dilation, 0
        starts = [(first + before) // slide.input_dilation for first in firsts]
    else:
        before, discarded = 0, max(remainders)
        starts = [first // slide.input_dilation for first in firsts]
    extent = (block - 1) * slide.stride + discarded + slide.extent
    length = max(1, -(-(extent - before) // slide.input_dilation))
    field = halo.halo_exchange(array, dim_index, slide.dim, axes, starts, length)
    after = extent - before - ((length - 1) * slide.input_dilation + 1)
    return field, (before, after), remainders if discarded else None


def accept_dim_keys(op: Function) -> Function:
    """Accept dicts keyed by Dims as well as by names. JAX sorts the keys of dicts, and Dims have no order."""

    def with_names(value: PyTree) -> PyTree:
        if isinstance(value, Mapping):
            return {dim_name(dim): with_names(v) for dim, v in value.items()}
        if isinstance(value, tuple | list):
            return tuple(map(with_names, value))
        return int(value) if isinstance(value, np.integer) else value

    @functools.wraps(op)
    def call(*args: PyTree, **kwargs: PyTree) -> Tensor:
        try:
            return op(*map(with_names, args), **{k: with_names(v) for k, v in kwargs.items()})
        except WeftError as error:
            error.located(format_call(getattr(op, "__name__", ""), args, kwargs))
            raise

    return cast(Function, call)


def check_window(window: ByDim[int] | ByDim[Dim] | ByDim[str] | ByDim[DimLike], example: str) -> None:
    if not isinstance(window, Mapping) or not window:
        raise TensorTypeError(
            f"the window is {window!r}",
            rule="a window is a mapping whose keys are the dims that it slides along",
            hint=f"for example window={example}",
        )
