"""Sorting, ranking and running sums along a dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import weft as wf

from ..program import Named
from .rows import GAP, A, Op, Rows, agree, along, distinct, integers, lined, one_along, sampled


def position_of(fn: str) -> Callable[..., Named]:
    return lambda x, dim: Named(
        getattr(A, fn)(x.array, axis=x.names.index(dim)), tuple(n for n in x.names if n != dim)
    )


def _running(a: Any, axis: int, exclusive: bool, reverse: bool) -> Any:
    """Products with a triangular matrix of ones: subtracting each element from its sum would lose precision."""
    size = a.shape[axis]
    ones = np.tri(size, k=-1 if exclusive else 0, dtype=a.dtype)  # [i, j]: whether j counts in the sum at i
    return A.moveaxis(A.tensordot(a, ones if reverse else ones.T, axes=(axis, 0)), -1, axis)


def _ranked(a: Any, axis: int, descending: bool = True) -> Any:
    return A.argsort(-a if descending else a, axis=axis, stable=True)


def _sorted(a: Any, axis: int, descending: bool) -> Any:
    """Descending order is reversed ascending order, as in jnp, which decides how ties share gradients."""
    up = A.take_along_axis(a, _ranked(a, axis, descending=False), axis=axis)
    return A.flip(up, axis) if descending else up


def draw_top_k(d: Any) -> Any:
    n = d.value("f", 1)
    x = d.env[n]
    dim = d.choose(x.names)
    size = d.draw(integers(1, x.sizes[dim]))
    return (n,), {"dim": dim, "k_dim": (d.name([m for m in x.names if m != dim]), size)}


def _top_k(x: Named, dim: str, k_dim: Any) -> list[Named]:
    axis = x.names.index(dim)
    positions = A.take(_ranked(x.array, axis), np.arange(k_dim[1]), axis=axis)
    names = tuple(k_dim[0] if n == dim else n for n in x.names)
    return [Named(A.take_along_axis(x.array, positions, axis=axis), names), Named(positions, names)]


def draw_search(d: Any) -> Any:
    (n,), options = one_along("fi", side=sampled(["left", "right"]))(d)
    x, dim = d.env[n], options["dim"]
    return (n, d.value("fi", test=lambda y: dim not in y.names and agree(x, y, most=4))), options


def _search(x: Named, y: Named, dim: str, side: str) -> Named:
    """Count the elements that precede each value."""
    names = (*y.names, *[n for n in x.names if n not in y.names and n != dim], dim)
    precedes = A.less if side == "left" else A.less_equal
    return Named(A.sum(precedes(lined(x, names), lined(y, names)), axis=-1), names[:-1])


def _far_apart(x: Named, y: Named, dim: str, side: str) -> bool:
    names = tuple(dict.fromkeys((*x.names, *y.names)))
    apart = np.abs(lined(x, names).astype(float) - lined(y, names)) > GAP
    return (x.exact and y.exact) or bool(np.all(apart))


ORDER: Rows = {
    "argmax": Op(one_along("fi"), wf.argmax, position_of("argmax"), distinct),
    "argmin": Op(one_along("fi"), wf.argmin, position_of("argmin"), distinct),
    "cumsum": Op(
        one_along(exclusive=sampled([False, True]), reverse=sampled([False, True])),
        wf.cumsum,
        along(_running),
        exact=True,
        adds=True,
    ),
    "searchsorted": Op(
        draw_search,
        lambda x, y, dim, side: wf.searchsorted(wf.sort(x, dim), y, dim, side),
        _search,
        _far_apart,
    ),
    "cumprod": Op(one_along(), wf.cumprod, along(lambda a, n: A.cumprod(a, axis=n))),
    "sort": Op(
        one_along(descending=sampled([False, True])),
        wf.sort,
        along(_sorted),
        distinct,
        exact=True,
    ),
    "argsort": Op(one_along(descending=sampled([False, True])), wf.argsort, along(_ranked), distinct),
    "top_k": Op(
        draw_top_k,
        lambda x, dim, k_dim: wf.top_k(x, dim, wf.Dim(*k_dim)),
        _top_k,
        distinct,
        exact=True,
        apart=True,
        count=2,
    ),
    "approx_max_k": Op(
        draw_top_k,
        lambda x, dim, k_dim: wf.approx_max_k(x, dim, wf.Dim(*k_dim)),
        _top_k,
        distinct,
        exact=True,
        apart=True,
        count=2,
    ),
}
