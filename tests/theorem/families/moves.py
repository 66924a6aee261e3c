"""Moving elements along a dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import weft as wf

from ..program import Named, Unfit
from .rows import A, Op, Rows, along, integers, lined, one_along, sampled, swapped
from .shape import same_dims


def draw_index(d: Any) -> Any:
    n = d.value("fib", 1)
    x = d.env[n]
    where = []
    for dim in d.some(x.names):
        size = x.sizes[dim]
        if d.chance(2):
            what: Any = d.draw(integers(-size, size - 1))
        else:
            bound = sampled([None, *range(-size, size + 1)])
            what = (d.draw(bound), d.draw(bound), d.choose([None, 1, 2, 3, -1, -2]))
            if not range(size)[slice(*what)]:
                raise Unfit
        where.append((dim, what))
    return (n,), {"where": where}


def _where_pairs(where: Any) -> tuple[Any, ...]:
    pairs = [(dim, slice(*what) if isinstance(what, tuple) else what) for dim, what in where]
    return tuple(item for pair in pairs for item in pair)


def _index(x: Named, where: Any) -> Named:
    wanted = {dim: slice(*what) if isinstance(what, tuple) else what for dim, what in where}
    remaining = tuple(n for n in x.names if not isinstance(wanted.get(n), int))
    return Named(x.array[tuple(wanted.get(n, slice(None)) for n in x.names)], remaining)


def along_with_integer(**options: Any) -> Callable[..., Any]:
    """A value, a computed integer (the maximum of an integer tensor), and a dim."""

    def draw(d: Any) -> Any:
        (n,), drawn = one_along("f", **options)(d)
        return (n, d.value("i")), drawn

    return draw


def _start(ids: Named, size: int, length: int) -> Any:
    start = A.max(ids.array)
    return A.clip(A.where(start < 0, start + size, start), 0, size - length)


def _index_at(x: Named, ids: Named, dim: str) -> Named:
    axis = x.names.index(dim)
    position = _start(ids, x.sizes[dim], 1)
    return Named(A.take(x.array, position, axis=axis, mode="clip"), tuple(n for n in x.names if n != dim))


def draw_slice(d: Any) -> Any:
    n = d.value("fi", 1)
    x = d.env[n]
    dim = d.choose(x.names)
    size = d.draw(integers(1, x.sizes[dim]))
    return (n,), {
        "dim": dim,
        "start": _drawn_start(d, x.sizes[dim], size),
        "new": (d.name([m for m in x.names if m != dim]), size),
    }


def _drawn_start(d: Any, size: int, length: int) -> int:
    """A start that leaves room for the slice, counted from the front or from the end."""
    return d.draw(integers(0, size - length)) - d.choose((0, size))


def draw_slice_at(d: Any) -> Any:
    (n,), options = draw_slice(d)
    del options["start"]
    return (n, d.value("i")), options


def _sliced(x: Named, dim: str, start: Any, new: Any) -> Named:
    axis = x.names.index(dim)
    names = tuple(new[0] if n == dim else n for n in x.names)
    return Named(A.take(x.array, start + np.arange(new[1]), axis=axis, mode="clip"), names)


def draw_update(d: Any) -> Any:
    n = d.value("f", 1)
    x = d.env[n]
    dim = d.choose(x.names)

    def fits(y: Named) -> bool:
        return all(y.sizes[m] == x.sizes.get(m) or (m == dim and y.sizes[m] < x.sizes[m]) for m in y.names)

    m = d.value("f", test=fits)
    return (n, m), {"dim": dim, "start": _drawn_start(d, x.sizes[dim], d.env[m].sizes.get(dim, 1))}


def draw_update_at(d: Any) -> Any:
    found, options = draw_update(d)
    return (*found, d.value("i")), {"dim": options["dim"]}


def _update(x: Named, y: Named, dim: str, start: Any) -> Named:
    """Update with masks: the element of x at position p becomes that of y at position p - start."""
    size = y.sizes.get(dim, 1)
    if dim in y.names:
        positions = A.clip(np.arange(x.sizes[dim]) - start, 0, size - 1)
        y = Named(A.take(y.array, positions, axis=y.names.index(dim), mode="clip"), y.names)
    here = np.arange(x.sizes[dim])
    inside = Named((here >= start) & (here < start + size), (dim,))
    return Named(A.where(lined(inside, x.names), lined(y, x.names), x.array), x.names)


def _static_start(x: Named, dim: str, start: int, length: int) -> int:
    first = start + x.sizes[dim] if start < 0 else start
    assert 0 <= first <= x.sizes[dim] - length  # shrinking can produce an invalid start
    return first


def draw_concat(d: Any) -> Any:
    n = d.value("fi", 1)
    dim = d.choose(d.env[n].names)
    return same_dims(d, n, dim), {"dim": dim}


def _shift(a: Any, axis: int, by: int, wrap: bool) -> Any:
    if wrap:
        return A.roll(a, by, axis=axis)
    positions = np.arange(a.shape[axis]) - by
    inside = ((positions >= 0) & (positions < a.shape[axis])).reshape(
        [-1 if n == axis else 1 for n in range(a.ndim)]
    )
    return A.where(inside, A.take(a, np.clip(positions, 0, a.shape[axis] - 1), axis=axis), 0)


def _padded(a: Any, axis: int, before: int, after: int, value: float) -> Any:
    pads = [(before, after) if n == axis else (0, 0) for n in range(a.ndim)]
    return A.pad(a, pads, constant_values=value)


def draw_diff(d: Any) -> Any:
    (n,), options = one_along("fib")(d)
    return (n,), options | {"n": d.draw(integers(0, min(3, d.env[n].sizes[options["dim"]] - 1)))}


def draw_triangle(d: Any) -> Any:
    n = d.value("fib", 2)
    rows, columns = d.shuffled(d.env[n].names)[:2]
    return (n,), {"rows": rows, "columns": columns, "k": d.draw(integers(-3, 3))}


def _triangle(name: str) -> Callable[..., Named]:
    def oracle(x: Named, rows: str, columns: str, k: int) -> Named:
        batch = [n for n in x.names if n not in (rows, columns)]
        matrices = swapped(x, [*batch, rows, columns])
        return swapped(Named(getattr(A, name)(matrices.array, k), matrices.names), x.names)

    return oracle


DISTANCE = integers(-10, 10)

MOVES: Rows = {
    "index": Op(draw_index, lambda x, where: x[_where_pairs(where)], _index, exact=True),
    "index at": Op(along_with_integer(), lambda x, ids, dim: x[dim, wf.max(ids)], _index_at, exact=True),
    "slice": Op(
        draw_slice,
        lambda x, dim, start, new: wf.slice(x, dim, start, wf.Dim(*new)),
        lambda x, dim, start, new: _sliced(x, dim, _static_start(x, dim, start, new[1]), new),
        exact=True,
        apart=True,
    ),
    "slice at": Op(
        draw_slice_at,
        lambda x, ids, dim, new: wf.slice(x, dim, wf.max(ids), wf.Dim(*new)),
        lambda x, ids, dim, new: _sliced(x, dim, _start(ids, x.sizes[dim], new[1]), new),
        exact=True,
        apart=True,
    ),
    "update": Op(
        draw_update,
        lambda x, y, dim, start: wf.update(x, dim, start, y),
        lambda x, y, dim, start: _update(x, y, dim, _static_start(x, dim, start, y.sizes.get(dim, 1))),
        exact=True,
    ),
    "update at": Op(
        draw_update_at,
        lambda x, y, ids, dim: wf.update(x, dim, wf.max(ids), y),
        lambda x, y, ids, dim: _update(x, y, dim, _start(ids, x.sizes[dim], y.sizes.get(dim, 1))),
        exact=True,
    ),
    "concat": Op(
        draw_concat,
        lambda *xs, dim: wf.concat(xs, dim),
        lambda *xs, dim: Named(
            A.concatenate([swapped(x, xs[0].names).array for x in xs], axis=xs[0].names.index(dim)),
            xs[0].names,
        ),
        exact=True,
    ),
    "pad": Op(
        one_along(
            before=integers(0, 5),
            after=integers(0, 5),
            value=sampled([0.0, 1.5]),
        ),
        wf.pad,
        along(_padded),
        exact=True,
    ),
    "shift": Op(
        one_along("fi", by=DISTANCE, wrap=sampled([False, True])),
        wf.shift,
        along(_shift),
        exact=True,
    ),
    "roll": Op(
        one_along("fi", by=DISTANCE),
        wf.roll,
        along(lambda a, n, by: A.roll(a, by, axis=n)),
        exact=True,
    ),
    "diff": Op(draw_diff, wf.diff, along(lambda a, m, n: A.diff(a, n, axis=m)), exact=True, adds=True),
    "tril": Op(draw_triangle, wf.tril, _triangle("tril"), exact=True),
    "triu": Op(draw_triangle, wf.triu, _triangle("triu"), exact=True),
    "flip": Op(one_along("fib"), wf.flip, along(lambda a, n: A.flip(a, n)), exact=True),
}
