"""Contractions and reductions."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import weft as wf

from ..program import Named
from .rows import (
    A,
    Op,
    Rows,
    along_several,
    differ,
    distinct,
    einsum,
    integers,
    lined,
    one_along,
    one_over,
    over,
    renamed,
    several,
    spread,
    union,
)


def draw_einsum(d: Any, kinds: str = "f") -> Any:
    found, _ = several(d.draw(integers(1, 3)), kinds, most=4)(d)
    names = union(*[d.env[n] for n in found])
    out = d.some(names, least=0)
    return found, {"out": out[: 3 if len(out) > 3 else len(out)]}


def draw_square(d: Any) -> Any:
    (n,), options = one_along()(d)
    return (n,), options | {"new": d.name(d.env[n].names)}


CONTRACT: Rows = {
    "einsum": Op(
        draw_einsum,
        lambda *xs, out: wf.einsum(*xs, out=out),
        lambda *xs, out: einsum(*xs, out=out),
        exact=True,
        adds=True,
    ),
    "einsum reduce": Op(
        draw_einsum,
        lambda *xs, out: wf.einsum(
            *xs,
            reduce=[n for n in dict.fromkeys(d.name for x in xs for d in x.dims) if n not in out],
        ),
        lambda *xs, out: einsum(*xs, out=[n for n in union(*xs) if n in out]),
        exact=True,
        adds=True,
    ),
    # both operands are the same tensor, one dim renamed
    "x @ x": Op(
        draw_square,
        lambda x, dim, new: wf.einsum(x, x.rename(**{dim: new}), out=[dim, new]),
        lambda x, dim, new: einsum(x, renamed(x, {dim: new}), out=(dim, new)),
        exact=True,
        adds=True,
    ),
}


def _reduction(name: str, sound: Any = None, kinds: str = "f", exact: bool = False, adds: bool = False) -> Op:
    return Op(one_over(kinds), getattr(wf, name), over(getattr(A, name)), sound, exact=exact, adds=adds)


def _quantile(a: Any, axis: Any, q: float, method: str) -> Any:
    return A.quantile(a, q, axis=axis, method=method)


def draw_quantile(d: Any) -> Any:
    (n,), options = one_over()(d)
    return (n,), options | {
        "q": d.choose([0.0, 0.25, 0.6, 1.0]),
        "method": d.choose(["linear", "lower", "midpoint"]),
    }


def draw_quantiles(d: Any) -> Any:
    (n,), options = one_over()(d)
    x = d.env[n]
    remaining = [] if options["dims"] is None else [m for m in x.names if m not in options["dims"]]
    return (n,), options | {"new": (d.name(remaining), 3), "stop": d.choose([0.4, 0.95])}


def _spaced_quantiles(x: Named, dims: Any, new: Any, stop: float) -> Named:
    reduced = x.names if dims is None else dims
    axis = tuple(x.names.index(n) for n in reduced)
    found = A.quantile(x.array, np.linspace(0.05, stop, new[1]), axis=axis)
    return Named(found, (new[0], *[n for n in x.names if n not in reduced]))


def _logsumexp(a: Any, axis: Any) -> Any:
    return A.log(A.sum(A.exp(a), axis=axis))


def draw_softmax(d: Any) -> Any:
    n = d.value("f", 1)
    return (n,), {"dims": d.some(d.env[n].names)}


REDUCE: Rows = {
    "sum": _reduction("sum", exact=True, adds=True),
    "mean": _reduction("mean"),
    "max": _reduction("max", distinct, exact=True),
    "min": _reduction("min", distinct, exact=True),
    "prod": _reduction("prod"),
    "var": _reduction("var"),
    "std": _reduction("std", spread),
    "any": _reduction("any", kinds="bi"),
    "all": _reduction("all", kinds="bi"),
    "sum whole": _reduction("sum", kinds="bi", adds=True),
    "max whole": _reduction("max", kinds="bi"),
    "median": _reduction("median", distinct),
    "quantile": Op(
        draw_quantile,
        lambda x, dims, q, method: wf.quantile(x, q, dims, method),
        lambda x, dims, q, method: over(functools.partial(_quantile, q=q, method=method))(x, dims),
        distinct,
    ),
    "quantile several": Op(
        draw_quantiles,
        lambda x, dims, new, stop: wf.quantile(x, wf.linspace(0.05, stop, wf.Dim(*new)), dims),
        _spaced_quantiles,
        distinct,
        apart=True,
    ),
    "allclose": Op(
        several(2),
        wf.allclose,
        lambda x, y: Named(A.asarray(A.allclose(lined(x, union(x, y)), lined(y, union(x, y)))), ()),
        differ,
    ),
    "logsumexp": Op(one_over(), wf.logsumexp, over(_logsumexp)),
    "softmax": Op(
        draw_softmax,
        wf.softmax,
        along_several(lambda a, axes: A.exp(a) / A.sum(A.exp(a), axis=axes, keepdims=True)),
    ),
    "log_softmax": Op(
        draw_softmax,
        wf.log_softmax,
        along_several(lambda a, axes: a - A.log(A.sum(A.exp(a), axis=axes, keepdims=True))),
    ),
}
