"""How a window slides along a dim, and which places of it each device needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from ..core import context, halo
from ..core.collectives import Axes
from ..core.describe import format_call
from ..core.dims import Dim
from ..core.errors import DimError, ShapeError, TensorTypeError, WeftError, nearest, python_number_error
from ..core.operands import check_along


@dataclass(frozen=True)
class SlidingWindow:
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


def sliding_windows(
    dims: Sequence[Dim],
    windows: Sequence[Any],
    stride: Any,
    padding: Any,
    dilation: Any = 1,
    transpose: bool = False,
) -> list[SlidingWindow]:
    """The slides along several dims; stride, padding and dilation for all of them or by dim."""
    check_along(dims)
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


def _slide(dim: Dim, window: Any, stride: Any, padding: Any, dilation: Any, transpose: bool) -> SlidingWindow:
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
        return SlidingWindow(dim, window, 1, dilation, stride, low, high)
    return SlidingWindow(dim, window, stride, dilation, 1, low, high)


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
    raise python_number_error(
        ShapeError,
        f"the {what} along {dim.name}",
        value,
        rule=f"a {what} is an integer, at least 1",
        hint=f'for example {what}={{"{dim.name}": 2}}',
    )


def _pair(dim: Dim, padding: Any) -> tuple[int, int]:
    if isinstance(padding, tuple | list) and [type(n) for n in padding] == [int, int]:
        return padding[0], padding[1]
    unknown = [n for n in padding if context.is_traced(n)] if isinstance(padding, tuple | list) else []
    raise python_number_error(
        ShapeError,
        f"the padding along {dim.name}",
        unknown[0] if unknown else padding,
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


def fetch_receptive_field(
    array: Any, position: int, slide: SlidingWindow, axes: Axes
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
    near = halo.halo_exchange(array, position, slide.dim, axes, starts, length)
    behind = reach - ahead - ((length - 1) * slide.spread + 1)
    return near, (ahead, behind), early if extra else None


def accept_dim_keys(public: Callable[..., Any]) -> Callable[..., Any]:
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
            error.located(format_call(public.__name__, args, kwargs))
            raise

    return call


def check_window(window: Any, example: str) -> None:
    if not isinstance(window, Mapping) or not window:
        raise TensorTypeError(
            f"the window is {window!r}",
            rule="a window says by name which dims it slides along",
            hint=f"for example window={example}",
        )
