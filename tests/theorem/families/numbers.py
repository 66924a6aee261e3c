"""Python numbers mixed with tensors, and operands of several types, for typed programs."""

from __future__ import annotations

from typing import Any

import numpy as np

import weft as wf

from ..program import Named
from .moves import DISTANCE, draw_update
from .reduce import draw_einsum
from .rows import (
    A,
    Op,
    Rows,
    agree,
    along,
    as_dims,
    broadcast,
    einsum,
    integers,
    one,
    one_along,
    one_over,
    over,
    sampled,
    swapped,
)

NUMBERS = sampled([1, 2, 3, 0.5, 2.0, 1.0])
PAIRS = sampled([(0.0, -2.0), (1, 2), (0, 0.5), (2.0, 1)])
BOUNDS = sampled([(0, 2), (-1, 1.5), (None, 1), (0.5, None), (0, 1.0)])


def _by_number(fn: Any, kinds: str = "fib") -> Op:
    """An operator with a number on one side; the same for tensors and arrays."""
    return Op(
        one(kinds, number=NUMBERS), fn, lambda x, number: Named(fn(x.array, number), x.names), exact=True
    )


def draw_dims(**options: Any) -> Any:
    return lambda d: (
        (),
        {"dims": d.dims(d.draw(integers(1, 2))), **{k: d.draw(s) for k, s in options.items()}},
    )


def draw_mixed(d: Any) -> Any:
    """Values of any kind whose dims are the same, except for the size of one."""
    n = d.value("fib", 1)
    x, dim = d.env[n], d.choose(d.env[n].names)

    def fits(y: Named) -> bool:
        return set(x.names) == set(y.names) and all(y.sizes[m] == x.sizes[m] for m in x.names if m != dim)

    return (n, *[d.value("fib", test=fits) for _ in range(d.draw(integers(1, 2)))]), {"dim": dim}


def _concat(*xs: Named, dim: str) -> Named:
    arrays = [swapped(x, xs[0].names).array for x in xs]
    return Named(A.concatenate(arrays, axis=xs[0].names.index(dim)), xs[0].names)


def draw_pair(kinds: str) -> Any:
    """Two values of these kinds that can be operands of one op."""

    def draw(d: Any) -> Any:
        n = d.value(kinds)
        return (n, d.value(kinds, test=lambda y: agree(d.env[n], y))), {}

    return draw


def draw_update_number(d: Any) -> Any:
    (n, _), options = draw_update(d)
    x, dim = d.env[n], options["dim"]
    return (n,), {"dim": dim, "start": d.draw(integers(0, x.sizes[dim] - 1)), "number": d.choose([1, 0.5, 2])}


def _updated(x: Named, dim: str, start: int, number: Any) -> Named:
    here = (np.arange(x.sizes[dim]) == start).reshape([-1 if n == dim else 1 for n in x.names])
    return Named(A.where(here, number, x.array), x.names)


def draw_take(d: Any) -> Any:
    n = d.value("fib", 1)
    x = d.env[n]
    dim = d.choose(x.names)
    ids = d.value(
        "i", test=lambda y: dim not in y.names and agree(x, y, most=4) and y.array.min(initial=0) >= 0
    )
    return (n, ids), {"dim": dim, "fill": d.choose([0, 1])}


def _taken(x: Named, ids: Named, dim: str, fill: Any) -> Named:
    chosen = Named(ids.array[..., None] == np.arange(x.sizes[dim]), (*ids.names, dim))
    out = [m for n in x.names for m in ([k for k in ids.names if k not in x.names] if n == dim else [n])]
    found = einsum(Named(x.array * 1.0, x.names), Named(chosen.array * 1.0, chosen.names), out=out)
    outside = Named((ids.array < 0) | (ids.array >= x.sizes[dim]), ids.names)
    return Named(
        broadcast(lambda a, b: A.where(b, fill, a), found, outside).array.astype(x.array.dtype), tuple(out)
    )


MIXED: Rows = {
    "any + number": _by_number(lambda x, number: x + number),
    "any * number": _by_number(lambda x, number: number * x),
    "number - any": _by_number(lambda x, number: number - x, "fi"),
    "any > number": _by_number(lambda x, number: x > number),
    "maximum of number": Op(
        one("fib", number=NUMBERS),
        lambda x, number: wf.maximum(x, number),
        lambda x, number: Named(A.maximum(x.array, number), x.names),
        exact=True,
    ),
    "any / 2": Op(one("fib"), lambda x: x / 2, lambda x: Named(x.array / 2, x.names), exact=True),
    "any // 2": Op(one("fi"), lambda x: x // 2, lambda x: Named(x.array // 2, x.names), lambda x: x.exact, exact=True),
    "where numbers": Op(
        one("b", pair=PAIRS),
        lambda x, pair: wf.where(x, *pair),
        lambda x, pair: Named(A.where(x.array, *pair), x.names),
        exact=True,
    ),
    "any + where numbers": Op(
        draw_pair("fib"),
        lambda x, y: x + wf.where(y > 0, 0.0, -2.0),
        lambda x, y: broadcast(lambda a, b: a + A.where(b > 0, 0.0, -2.0), x, y),
        lambda x, y: y.exact,
        exact=True,
    ),
    "any + any": Op(draw_pair("fi"), wf.add, lambda x, y: broadcast(A.add, x, y), exact=True),
    "any * any": Op(draw_pair("fib"), wf.multiply, lambda x, y: broadcast(A.multiply, x, y), exact=True),
    "clip to numbers": Op(
        one("fi", bounds=BOUNDS),
        lambda x, bounds: wf.clip(x, *bounds),
        lambda x, bounds: Named(A.clip(x.array, *bounds), x.names),
        lambda x, bounds: x.exact,
        exact=True,
    ),
    "full": Op(
        draw_dims(number=NUMBERS),
        lambda dims, number: wf.full(as_dims(dims), number),
        lambda dims, number: Named(np.full([size for _, size in dims], number), tuple(n for n, _ in dims)),
        exact=True,
    ),
    "arange * number": Op(
        lambda d: ((), {"dims": d.dims(1), "number": d.draw(NUMBERS)}),
        lambda dims, number: wf.arange(*as_dims(dims)) * number,
        lambda dims, number: Named(np.arange(dims[0][1], dtype=np.int32) * number, (dims[0][0],)),
        exact=True,
    ),
    "eye": Op(
        lambda d: ((), {"dims": d.dims(2)}),
        lambda dims: wf.eye(*as_dims(dims)),
        lambda dims: Named(np.eye(*[size for _, size in dims]), tuple(n for n, _ in dims)),
        exact=True,
    ),
    "linspace of numbers": Op(
        lambda d: ((), {"dims": d.dims(1), "stop": d.choose([1, 2.5, -3]), "endpoint": d.choose([True, False])}),
        lambda dims, stop, endpoint: wf.linspace(0, stop, *as_dims(dims), endpoint),
        lambda dims, stop, endpoint: Named(np.linspace(0, stop, dims[0][1], endpoint), (dims[0][0],)),
    ),
    **{
        name: Op(
            lambda d: ((), {"dims": d.dims(1), "spacing": d.choose([1, 0.25, -2])}),
            lambda dims, spacing, name=name: getattr(wf.fft, name)(*as_dims(dims), spacing),
            lambda dims, spacing, name=name: Named(getattr(np.fft, name)(dims[0][1], spacing), (dims[0][0],)),
        )
        for name in ("fftfreq", "rfftfreq")
    },
    "cumsum of any": Op(
        one_along("ib"), wf.cumsum, along(lambda a, n: A.cumsum(a, axis=n)), exact=True, adds=True
    ),
    "mean of any": Op(one_over("fib"), wf.mean, over(A.mean)),
    "concat of any": Op(draw_mixed, lambda *xs, dim: wf.concat(xs, dim), _concat, exact=True),
    "pad any": Op(
        one_along("fi", before=integers(0, 3), after=integers(0, 3), value=sampled([0, 1])),
        wf.pad,
        along(lambda a, n, before, after, value: A.pad(
            a, [(before, after) if m == n else (0, 0) for m in range(a.ndim)], constant_values=value)),
        exact=True,
    ),
    "roll of any": Op(
        one_along("fib", by=DISTANCE), wf.roll, along(lambda a, n, by: A.roll(a, by, axis=n)), exact=True
    ),
    "update by number": Op(
        draw_update_number,
        lambda x, dim, start, number: wf.update(x, dim, start, number),
        _updated,
        exact=True,
    ),
    "take of any": Op(draw_take, lambda x, ids, dim, fill: wf.take(x, ids, dim, fill), _taken, exact=True),
    "einsum of any": Op(
        lambda d: draw_einsum(d, "fi"),
        lambda *xs, out: wf.einsum(*xs, out=out),
        lambda *xs, out: einsum(*xs, out=out),
        exact=True,
        adds=True,
    ),
    "to narrow": Op(
        one("fi", dtype=sampled(["bfloat16", "float16", "float32"])),
        lambda x, dtype: x.astype(dtype),
        lambda x, dtype: Named(A.asarray(x.array, float), x.names),
        exact=True,
    ),
}  # fmt: skip
