"""Lookup by index."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import weft as wf

from ..program import Named
from .rows import A, Op, Rows, agree, einsum, lined


def draw_take(d: Any) -> Any:
    table = d.value("f", 1)
    x = d.env[table]
    dim = d.choose(x.names)
    ids = d.value("i", test=lambda y: dim not in y.names and agree(x, y, most=4))
    # In the body of a loop the indices differ from those of the draw.
    inside = not d.depth and np.all((d.env[ids].array >= 0) & (d.env[ids].array < x.sizes[dim]))
    return (table, ids), {"dim": dim, "fill": None if inside and d.chance(2) else 0.75}


def _chosen(ids: Named, dim: str, size: int) -> Named:
    """1 at the position of an index, 0 elsewhere."""
    return Named((ids.array[..., None] == np.arange(size)).astype(np.float64), (*ids.names, dim))


def _take(x: Named, ids: Named, dim: str, fill: Any) -> Named:
    new = [n for n in ids.names if n not in x.names]
    out = [m for n in x.names for m in (new if n == dim else [n])]
    found = einsum(x, _chosen(ids, dim, x.sizes[dim]), out=out)
    if fill is None:
        return found
    outside = Named((ids.array < 0) | (ids.array >= x.sizes[dim]), ids.names)
    return Named(A.where(lined(outside, out), fill, found.array), tuple(out))


def draw_scatter(d: Any) -> Any:
    n = d.value("f", 1)
    x = d.env[n]
    dim = d.choose(x.names)
    ids = d.value("i", test=lambda y: dim not in y.names and agree(x, y, most=4))
    allowed = {k: s for y in (x, d.env[ids]) for k, s in y.sizes.items() if k != dim}
    updates = d.value("f", test=lambda y: all(allowed.get(k) == s for k, s in y.sizes.items()))
    return (n, ids, updates), {"dim": dim}


def _scatter(x: Named, ids: Named, updates: Named, dim: str) -> Named:
    ones = Named(np.ones([x.sizes[n] for n in x.names if n != dim]), tuple(n for n in x.names if n != dim))
    added = einsum(ones, updates, _chosen(ids, dim, x.sizes[dim]), out=x.names)
    return Named(x.array + added.array, x.names)


def draw_one_hot(d: Any) -> Any:
    n = d.value("i", most=2)
    name = d.name(d.env[n].names)
    return (n,), {"dim": (name, d.size(name))}


LOOKUP: Rows = {
    "take": Op(draw_take, wf.take, _take, exact=True),
    "one_hot": Op(
        draw_one_hot,
        lambda ids, dim: wf.one_hot(ids, wf.Dim(*dim), jnp.float64),
        lambda ids, dim: _chosen(ids, *dim),
        exact=True,
    ),
    "scatter_add": Op(draw_scatter, wf.scatter_add, _scatter, exact=True, adds=True),
}
