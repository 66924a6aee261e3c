"""Renaming and reshaping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import weft as wf

from ..program import Named
from .rows import A, Op, Rows, as_dims, dims_of, integers, lined, one_along, over, renamed, swapped


def _fit(x: Named, dims: Any) -> Named:
    """The mean over dims that are not among the wanted ones, broadcast along missing ones."""
    gone = tuple(n for n, size in x.sizes.items() if (n, size) not in dims)
    x = over(A.mean)(x, gone) if gone else x
    names, shape = [n for n, _ in dims], [size for _, size in dims]
    return Named(A.broadcast_to(lined(x, names), shape), tuple(names))


def fit_weft(x: wf.Tensor, dims: Any) -> wf.Tensor:
    """The same for tensors; the maximum of integers, and whether any of booleans is true."""
    gone = [d for d in x.dims if (d.name, d.size) not in dims]
    reduce = {"i": wf.max, "u": wf.max, "b": wf.any}.get(x.dtype.kind, wf.mean)
    return wf.broadcast_to(reduce(x, gone) if gone else x, as_dims(dims))


def draw_rename(d: Any) -> Any:
    n = d.value("fib", 1)
    names = list(d.env[n].names)
    new = dict(zip(names, names, strict=True))
    for old in d.some(names):
        new[old] = d.name([m for k, m in new.items() if k != old])
    if len(names) > 1 and d.chance(4):  # swap the names of two dims
        first, second = names[:2]
        new = dict(zip(names, names, strict=True)) | {first: second, second: first}
    return (n,), {"names": new}


def draw_dims(d: Any, total: int, count: int, avoid: Sequence[str] = ()) -> list[tuple[str, int]]:
    """Dims of a given total size."""
    dims: list[tuple[str, int]] = []
    for left in range(count, 0, -1):
        name = d.name([*avoid, *[m for m, _ in dims]])
        factors = [n for n in range(1, total + 1) if total % n == 0 and n <= 60]
        size = total if left == 1 else d.choose(factors)
        dims.append((name, size))
        total //= size
    return dims


def draw_reshape(d: Any) -> Any:
    n = d.value("fib", 1)
    count = d.draw(integers(1, 3))
    return (n,), {"dims": draw_dims(d, d.env[n].array.size, count)}


def draw_split(d: Any) -> Any:
    n = d.value("fi", 1)
    x = d.env[n]
    dim = d.choose(x.names)
    avoid = [m for m in x.names if m != dim]
    return (n,), {"dim": dim, "into": draw_dims(d, x.sizes[dim], 2, avoid)}


def _split(x: Named, dim: str, into: Any) -> Named:
    dims = [d for n, size in x.sizes.items() for d in (into if n == dim else [(n, size)])]
    return _reshape(x, dims)


def _reshape(x: Named, dims: Any) -> Named:
    return Named(x.array.reshape([size for _, size in dims]), tuple(n for n, _ in dims))


def draw_merge(d: Any) -> Any:
    n = d.value("fi", 2)
    parts = d.some(d.env[n].names, least=2)
    return (n,), {"dims": parts, "into": d.name([m for m in d.env[n].names if m not in parts])}


def _merge(x: Named, dims: Any, into: str) -> Named:
    first = x.names.index(dims[0])
    before = [n for n in x.names[:first] if n not in dims]
    after = [n for n in x.names if n not in before and n not in dims]
    size = math.prod(x.sizes[n] for n in dims)
    x = swapped(x, [*before, *dims, *after])
    return _reshape(x, [(n, x.sizes[n]) for n in before] + [(into, size)] + [(n, x.sizes[n]) for n in after])


def draw_broadcast(d: Any) -> Any:
    n = d.value("fib", 0, most=2)
    x = d.env[n]
    new = d.name(x.names)
    dims = [*dims_of(x), (new, d.size(new))]
    return (n,), {"dims": d.shuffled(dims)}


def same_dims(d: Any, n: int, dim: str | None = None, most: int = 3) -> tuple[int, ...]:
    """Value n and others with the same dims, `dim` in any size."""

    def fits(y: Named) -> bool:
        x = d.env[n]
        return set(x.names) == set(y.names) and all(y.sizes[m] == x.sizes[m] for m in x.names if m != dim)

    count = d.draw(integers(0, most - 1))
    return (n, *[d.value(d.env[n].kind, test=fits) for _ in range(count)])


def draw_stack(d: Any) -> Any:
    found = same_dims(d, d.value("fi", 0, most=2))
    return found, {"dim": d.name(d.env[found[0]].names)}


def _stack(*xs: Named, dim: str) -> Named:
    return Named(A.stack([swapped(x, xs[0].names).array for x in xs]), (dim, *xs[0].names))


def _unstack(x: Named, dim: str) -> list[Named]:
    names = tuple(n for n in x.names if n != dim)
    return [Named(A.take(x.array, n, axis=x.names.index(dim)), names) for n in (0, x.sizes[dim] - 1)]


def _broadcast_to(x: Named, dims: Any) -> Named:
    return Named(
        A.broadcast_to(lined(x, [n for n, _ in dims]), [size for _, size in dims]),
        tuple(n for n, _ in dims),
    )


SHAPE: Rows = {
    "rename": Op(
        draw_rename,
        lambda x, names: x.rename(**names),
        renamed,
        exact=True,
        apart=True,
    ),
    "reshape": Op(
        draw_reshape,
        lambda x, dims: wf.reshape(x, as_dims(dims)),
        _reshape,
        exact=True,
        apart=True,
    ),
    "split": Op(
        draw_split,
        lambda x, dim, into: wf.split(x, dim, as_dims(into)),
        _split,
        exact=True,
        apart=True,
    ),
    "merge": Op(draw_merge, wf.merge, _merge, exact=True, apart=True),
    "transpose": Op(
        lambda d: (lambda n: ((n,), {"dims": d.shuffled(d.env[n].names)}))(d.value("fi", 1)),
        wf.transpose,
        lambda x, dims: swapped(x, dims),
        exact=True,
    ),
    "broadcast_to": Op(
        draw_broadcast,
        lambda x, dims: wf.broadcast_to(x, as_dims(dims)),
        _broadcast_to,
        exact=True,
    ),
    "fit": Op(
        lambda d: (lambda n: ((n,), {"dims": d.dims(2)}))(d.value("f")),
        fit_weft,
        _fit,
        apart=True,
    ),
    "stack": Op(draw_stack, lambda *xs, dim: wf.stack(xs, dim), _stack, exact=True),
    "unstack": Op(  # the first and the last
        one_along("fi"),
        lambda x, dim: [wf.unstack(x, dim)[n] for n in (0, -1)],
        _unstack,
        exact=True,
        count=2,
    ),
}
