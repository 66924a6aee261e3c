"""The rows of the table of ops, and the building blocks of oracles, soundness checks and draws."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import weft as wf

from ..program import Named, Unfit

GAP = 1e-5  # the least distance between compared numbers, and from a kink
LARGEST = 100.0
MOST_ELEMENTS = 700


@dataclass(frozen=True)
class Op:
    """One row of the table.

    Attributes:
      draw: takes a `Drawer`, returns the operands (indices into its environment) and the options.
      weft, oracle: take the operands and, by keyword, the options.
      sound: whether the result for these concrete operands is independent of rounding decisions.
      exact: whether exact operands give exact results.
      adds: whether elements are summed, so that a result is narrow only if the sum of absolute values is.
      apart: whether a dim of an operand and a dim of a result may share a mesh axis, because no tensor has both;
        otherwise all dims of the op need different axes.
      groups: takes the operands, the results and, by keyword, the options. Returns further groups of dims that need
        different axes, because a tensor inside the op has them.
      count: the number of results.
    """

    draw: Callable[..., Any]
    weft: Callable[..., Any]
    oracle: Callable[..., Any]
    sound: Callable[..., bool] | None = None
    exact: bool = False
    adds: bool = False
    apart: bool = False
    groups: Callable[..., Iterable[Collection[str]]] | None = None
    count: int = 1

    def apply(self, operands: Sequence[Named], options: dict[str, Any]) -> list[Named]:
        """The oracle's results. Concrete operands are checked to be sound."""
        if any(isinstance(x.array, jax.Array) for x in operands):
            return _listed(self.oracle(*operands, **options))
        if self.sound is not None and not self.sound(*operands, **options):
            raise Unfit
        with np.errstate(all="ignore"):
            results = _listed(self.oracle(*operands, **options))
        exact = self.exact and all(x.exact for x in operands)
        is_exact = self.exact or all(x.kind != "f" for x in results)
        narrow = is_exact and all(x.narrow for x in operands) and self._stays_narrow(operands, options)
        checked = []
        for x in results:
            array = np.asarray(x.array)
            if array.size > MOST_ELEMENTS or not np.all(np.abs(array.astype(float)) <= LARGEST):
                raise Unfit
            fits = (narrow or x.narrow) and is_narrow(array)
            checked.append(Named(array, x.names, exact=exact or x.exact or x.kind != "f", narrow=fits))
        return checked

    def _stays_narrow(self, operands: Sequence[Named], options: dict[str, Any]) -> bool:
        """Whether 16 bits represent all partial sums exactly, in any order of additions."""
        if not self.adds:
            return True
        sizes = [Named(np.abs(x.array) if x.kind != "b" else x.array, x.names) for x in operands]
        return all(is_narrow(np.asarray(x.array)) for x in _listed(self.oracle(*sizes, **options)))


Rows = dict[str, "Op"]


def is_narrow(array: np.ndarray) -> bool:
    """Whether bfloat16 (8 bits for integers) represents these numbers exactly."""
    if array.dtype.kind == "f":
        return bool(np.all(np.abs(array) <= 32) and np.all(array * 4 == np.round(array * 4)))
    return array.dtype.kind == "b" or bool(np.all((array >= 0) & (array <= 32)))


def _listed(out: Any) -> list[Named]:
    return list(out) if isinstance(out, list | tuple) else [out]


class _Arrays:
    """NumPy for NumPy arrays, otherwise `jax.numpy`."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            traced = any(isinstance(a, jax.Array) for a in jax.tree.leaves((args, kwargs)))
            return getattr(jnp if traced else np, name)(*args, **kwargs)

        return call


A = _Arrays()


# Oracles on named arrays


def lined(x: Named, names: Sequence[str]) -> Any:
    """The array with its dims in the order of `names`; missing dims have size 1."""
    array = A.transpose(x.array, [x.names.index(n) for n in names if n in x.names])
    return array.reshape([x.sizes.get(n, 1) for n in names])


def union(*tensors: Named) -> tuple[str, ...]:
    return tuple(dict.fromkeys(n for x in tensors for n in x.names))


def agree(*tensors: Named, most: int = 3) -> bool:
    """Whether tensors can be operands of one op, and the union of their dims is not too large."""
    sizes: dict[str, int] = {}
    for x in tensors:
        for name, size in x.sizes.items():
            if sizes.setdefault(name, size) != size:
                return False
    return len(sizes) <= most and math.prod(sizes.values()) <= MOST_ELEMENTS


def broadcast(fn: Callable[..., Any], *tensors: Named) -> Named:
    names = union(*tensors)
    return Named(fn(*[lined(x, names) for x in tensors]), names)


def along(fn: Callable[..., Any]) -> Callable[..., Named]:
    """An oracle for an op along one dim whose result has the same dims: `fn(array, axis, **options)`."""
    return lambda x, dim, **options: Named(fn(x.array, x.names.index(dim), **options), x.names)


def along_several(fn: Callable[..., Any]) -> Callable[..., Named]:
    """The same for an op along one or more dims: `fn(array, axes)`."""
    return lambda x, dims: Named(fn(x.array, tuple(x.names.index(n) for n in dims)), x.names)


def over(fn: Callable[..., Any]) -> Callable[..., Named]:
    """An oracle for a reduction: `fn(array, axis=…)`."""

    def reduce(x: Named, dims: Any) -> Named:
        reduced = x.names if dims is None else dims
        remaining = tuple(n for n in x.names if n not in reduced)
        return Named(fn(x.array, axis=tuple(x.names.index(n) for n in reduced)), remaining)

    return reduce


def swapped(x: Named, names: Sequence[str]) -> Named:
    return Named(A.transpose(x.array, [x.names.index(n) for n in names]), tuple(names))


def renamed(x: Named, names: dict[str, str]) -> Named:
    return Named(x.array, tuple(names.get(n, n) for n in x.names))


def einsum(*tensors: Named, out: Sequence[str]) -> Named:
    letters = dict(zip(union(*tensors), string.ascii_letters, strict=False))
    terms = ",".join("".join(letters[n] for n in x.names) for x in tensors)
    formula = f"{terms}->{''.join(letters[n] for n in out)}"
    return Named(A.einsum(formula, *[x.array for x in tensors]), tuple(out))


def dims_of(x: Named) -> tuple[tuple[str, int], ...]:
    return tuple(x.sizes.items())


def as_dims(dims: Sequence[tuple[str, int]]) -> tuple[wf.Dim, ...]:
    return tuple(wf.Dim(*d) for d in dims)


# Where functions are smooth


def anywhere(x: Named, **_: Any) -> bool:
    return True


def within(low: float, high: float) -> Callable[..., bool]:
    return lambda x, **_: bool(np.all((x.array > low) & (x.array < high)))


def apart_from(*points: float, period: float = 0) -> Callable[..., bool]:
    """Whether values are exact, or far from all points and from the points shifted by multiples of a period."""

    def sound(x: Named, **_: Any) -> bool:
        rest = x.array[..., None] - np.array(points)
        if period:
            rest = rest - period * np.round(rest / period)
        return x.exact or bool(np.all(np.abs(rest) > GAP))

    return sound


def differ(x: Named, y: Named, **_: Any) -> bool:
    return (x.exact and y.exact) or bool(np.all(np.abs(broadcast(np.subtract, x, y).array) > GAP))


def distinct(x: Named, dims: Any = None, dim: Any = None, **_: Any) -> bool:
    """Whether no two elements along the dims are nearly equal, or all are exact."""
    reduced = [dim] if dim is not None else list(x.names if dims is None else dims)
    remaining = [n for n in x.names if n not in reduced]
    rows = swapped(x, [*remaining, *reduced]).array.reshape(*[x.sizes[n] for n in remaining], -1)
    return x.exact or bool(np.all(np.diff(np.sort(rows.astype(float))) > GAP))


def spread(x: Named, dims: Any = None, **_: Any) -> bool:
    return bool(np.all(over(np.var)(x, dims).array > 0.01))


# How ops are drawn


def sampled(items: Sequence[Any]) -> Callable[..., Any]:
    return lambda d: d.choose(items)


def integers(low: int, high: int) -> Callable[..., Any]:
    return lambda d: d.random.randint(low, high)


def one(kinds: str = "f", least: int = 0, **options: Any) -> Callable[..., Any]:
    """Any value, and options from strategies."""
    return lambda d: ((d.value(kinds, least),), {k: d.draw(s) for k, s in options.items()})


def one_along(kinds: str = "f", **options: Any) -> Callable[..., Any]:
    """A value, one of its dims, and options from strategies."""

    def draw(d: Any) -> Any:
        n = d.value(kinds, 1)
        drawn = {k: d.draw(s) for k, s in options.items()}
        return (n,), {"dim": d.choose(d.env[n].names), **drawn}

    return draw


def one_over(kinds: str = "f") -> Callable[..., Any]:
    """A value and some of its dims, or None for all."""

    def draw(d: Any) -> Any:
        n = d.value(kinds, 1)
        return (n,), {"dims": None if d.chance(4) else d.some(d.env[n].names)}

    return draw


def several(count: int, kinds: str = "f", most: int = 3) -> Callable[..., Any]:
    """Values that can be operands of one op."""

    def draw(d: Any) -> Any:
        found: list[int] = []
        for _ in range(count):
            given = [d.env[n] for n in found]
            found.append(d.value(kinds, test=lambda x: agree(*given, x, most=most)))
        return tuple(found), {}

    return draw


SIGNED = sampled([0.5, -0.75, 1.25, 2.0, -1.0])
