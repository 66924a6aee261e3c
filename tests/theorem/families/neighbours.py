"""Windows, pools and convolutions. The oracles gather windows with a table of positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

import weft as wf

from ..program import Named, Unfit
from .moves import _padded
from .rows import A, Op, Rows, distinct, einsum, integers, renamed, sampled


def slid(
    x: Named,
    dim: str,
    new: str,
    size: int,
    stride: int,
    pads: Any,
    dilation: int,
    fill: float = 0.0,
) -> Named:
    """The windows along a dim, gathered with a table of positions."""
    axis = x.names.index(dim)
    low, high = (
        lax.padtype_to_pads([x.sizes[dim]], [(size - 1) * dilation + 1], [stride], pads)[0]
        if isinstance(pads, str)
        else pads
    )
    padded = _padded(x.array, axis, low, high, fill)
    count = (padded.shape[axis] - (size - 1) * dilation - 1) // stride + 1
    if count < 1:
        raise Unfit
    positions = np.arange(count)[:, None] * stride + np.arange(size) * dilation
    names = [m for n in x.names for m in ((n, new) if n == dim else (n,))]
    return Named(A.take(padded, positions, axis=axis), tuple(names))


PADDING = sampled(["SAME", "VALID", (1, 1), (0, 2), (3, 0)])
STRIDE = sampled([1, 1, 2, 3])


def draw_windows(d: Any) -> Any:
    n = d.value("f", 1)
    x = d.env[n]
    dim, new = d.choose(x.names), (d.name(x.names), d.draw(integers(1, 4)))
    options = {
        "stride": d.draw(STRIDE),
        "padding": d.draw(PADDING),
        "dilation": d.choose([1, 1, 2]),
    }
    return (n,), {"dim": dim, "new": new, **options}


def _windows(x: Named, dim: str, new: Any, stride: int, padding: Any, dilation: int) -> Named:
    return slid(x, dim, *new, stride, padding, dilation)


def draw_pool(d: Any) -> Any:
    n = d.value("f", 1)
    x = d.env[n]
    window = {dim: d.draw(integers(1, 3)) for dim in d.some(x.names)[:2]}
    stride = None if d.chance(2) else d.draw(STRIDE)
    return (n,), {"window": window, "stride": stride, "padding": d.choose(["SAME", "VALID"])}


def _pool(reduce: str, fill: float) -> Callable[..., Named]:
    def pool(x: Named, window: Any, stride: Any, padding: Any) -> Named:
        names = x.names
        for dim, size in window.items():
            x = slid(x, dim, f"{dim}.window", size, size if stride is None else stride, padding, 1, fill)
        axes = tuple(x.names.index(f"{dim}.window") for dim in window)
        return Named(getattr(A, reduce)(x.array, axis=axes), names)

    return pool


def draw_conv(d: Any) -> Any:
    image, filters = d.value("f", 1), d.value("f", 1)
    x, y = d.env[image], d.env[filters]
    count = min(d.choose([1, 1, 2]), len(x.names), len(y.names))
    spatial, taps = d.some(x.names, least=count)[:count], d.some(y.names, least=count)[:count]
    if len(spatial) != len(taps):
        raise Unfit
    names = {}
    for name in y.names:
        if name in taps:
            names[name] = "kl"[taps.index(name)]
        elif name in spatial or y.sizes[name] != x.sizes.get(name, y.sizes[name]):
            names[name] = d.name([*x.names, *y.names, *names.values()])
        else:
            names[name] = name
    shared = [n for n in x.names if n in y.names and names[n] == n]
    transpose = d.chance(4)
    options = {
        "names": names,
        "window": dict(zip(spatial, "kl", strict=False)),
        "groups": d.some(shared, least=0) if shared else [],
        "stride": d.draw(STRIDE),
        "padding": d.choose([(1, 1), (0, 2), (2, 1)]) if transpose else d.draw(PADDING),
        "dilation": d.choose([1, 1, 2]),
        "transpose": transpose,
    }
    return (image, filters), options


def _conv_out(x_names: Any, kernel_names: Any, window: Any, groups: Any) -> list[str]:
    shared = [n for n in kernel_names if n in x_names]
    remaining = [n for n in x_names if n not in shared or n in groups]
    return remaining + [n for n in kernel_names if n not in x_names and n not in window.values()]


def _conv_weft(x: wf.Tensor, y: wf.Tensor, names: Any, window: Any, groups: Any, **options: Any) -> wf.Tensor:
    kernel = y.rename(**names)
    out = _conv_out([d.name for d in x.dims], [d.name for d in kernel.dims], window, groups)
    return wf.conv(x, kernel, window, out=out, **options)


def _conv(
    x: Named,
    y: Named,
    names: Any,
    window: Any,
    groups: Any,
    stride: int,
    padding: Any,
    dilation: int,
    transpose: bool,
) -> Named:
    kernel = renamed(y, names)
    out = _conv_out(x.names, kernel.names, window, groups)
    for dim, tap in window.items():
        if transpose:
            x = _spread(x, dim, stride)
        x = slid(x, dim, tap, kernel.sizes[tap], 1 if transpose else stride, padding, dilation)
    return einsum(x, kernel, out=out)


def _spread(x: Named, dim: str, by: int) -> Named:
    """The tensor with `by - 1` zeros between adjacent positions of a dim."""
    axis = x.names.index(dim)
    positions = np.arange((x.sizes[dim] - 1) * by + 1)
    rows = (positions[:, None] == by * np.arange(x.sizes[dim])).astype(np.float64)
    return Named(A.moveaxis(A.tensordot(x.array, rows, axes=([axis], [1])), -1, axis), x.names)


def _conv_groups(
    given: Sequence[Named], results: Sequence[Named], names: Any, window: Any, **_: Any
) -> list[list[str]]:
    kernel = [names[n] for n in given[1].names]
    rest = [n for n in kernel if n not in window.values()]
    return [kernel, [*given[0].names, *rest]]


NEIGHBOURS: Rows = {
    "windows": Op(
        draw_windows,
        lambda x, dim, new, **options: wf.windows(x, dim, wf.Dim(*new), **options),
        _windows,
        exact=True,
    ),
    "max_pool": Op(
        draw_pool,
        wf.max_pool,
        _pool("max", -np.inf),
        lambda x, **_: distinct(x) and not x.exact,
    ),
    "avg_pool": Op(draw_pool, wf.avg_pool, _pool("nanmean", np.nan)),
    "conv": Op(draw_conv, _conv_weft, _conv, exact=True, adds=True, apart=True, groups=_conv_groups),
}
