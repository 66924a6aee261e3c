"""All families of ops, a row each: how it is drawn, how Weft does it, and how plain JAX does it.

The oracle's side works on arrays of NumPy as well as of JAX (`A` picks the module): programs are drawn with
concrete NumPy values at hand, which compile nothing, so that what would depend on rounding (a comparison of
nearly equal numbers, a logarithm near 0) is seen and not drawn. See `theorem.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax import lax
from theorem import Body, Named, Step, Unfit, run_oracle, run_weft, weights

import weft as wf

GAP = 1e-5  # what is compared, or lies near a kink, is at least that far from it
LARGEST = 100.0
MOST_ELEMENTS = 700


@dataclass(frozen=True)
class Op:
    """One row.

    Attributes:
      draw: takes a `Drawer`, returns the operands (places in its environment) and the options.
      weft, oracle: take the operands and, by keyword, the options.
      sound: whether the oracle's concrete operands are such that rounding decides nothing.
      exact: whether exact operands give exact results.
      apart: whether the layout may put dims of operands and results on one axis, as no tensor has
        both; else all of them have to be legal together.
    """

    draw: Callable[..., Any]
    weft: Callable[..., Any]
    oracle: Callable[..., Any]
    sound: Callable[..., bool] | None = None
    exact: bool = False
    apart: bool = False

    def apply(self, operands: Sequence[Named], options: dict[str, Any]) -> list[Named]:
        """The oracle's results; concrete operands are checked."""
        if any(isinstance(x.array, jax.Array) for x in operands):
            return _listed(self.oracle(*operands, **options))
        if self.sound is not None and not self.sound(*operands, **options):
            raise Unfit
        with np.errstate(all="ignore"):
            results = _listed(self.oracle(*operands, **options))
        exact = self.exact and all(x.exact for x in operands)
        checked = []
        for x in results:
            array = np.asarray(x.array)
            if array.size > MOST_ELEMENTS or not np.all(np.abs(array.astype(float)) <= LARGEST):
                raise Unfit
            checked.append(Named(array, x.names, exact=exact or x.exact or x.kind != "f"))
        return checked


def _listed(out: Any) -> list[Named]:
    return list(out) if isinstance(out, list | tuple) else [out]


class _Arrays:
    """NumPy for NumPy's arrays, else `jax.numpy`."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            traced = any(isinstance(a, jax.Array) for a in jax.tree.leaves((args, kwargs)))
            return getattr(jnp if traced else np, name)(*args, **kwargs)

        return call


A = _Arrays()


# Names on the oracle's side


def lined(x: Named, names: Sequence[str]) -> Any:
    """The array with its dimensions in the order of `names`, size 1 where it has none."""
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
    """An oracle for an op along one dim that keeps all dims: `fn(array, axis, **options)`."""
    return lambda x, dim, **options: Named(fn(x.array, x.names.index(dim), **options), x.names)


def over(fn: Callable[..., Any]) -> Callable[..., Named]:
    """An oracle for a reduction: `fn(array, axis=…)`."""

    def reduce(x: Named, dims: Any) -> Named:
        gone = x.names if dims is None else dims
        kept = tuple(n for n in x.names if n not in gone)
        return Named(fn(x.array, axis=tuple(x.names.index(n) for n in gone)), kept)

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
    """Not near any of the points, nor any of them shifted by multiples of a period; or exact."""

    def sound(x: Named, **_: Any) -> bool:
        rest = x.array[..., None] - np.array(points)
        if period:
            rest = rest - period * np.round(rest / period)
        return x.exact or bool(np.all(np.abs(rest) > GAP))

    return sound


def differ(x: Named, y: Named, **_: Any) -> bool:
    return (x.exact and y.exact) or bool(np.all(np.abs(broadcast(np.subtract, x, y).array) > GAP))


def distinct(x: Named, dims: Any = None, dim: Any = None, **_: Any) -> bool:
    """No two elements along the dims that are nearly equal."""
    gone = [dim] if dim is not None else list(x.names if dims is None else dims)
    kept = [n for n in x.names if n not in gone]
    rows = swapped(x, [*kept, *gone]).array.reshape(*[x.sizes[n] for n in kept], -1)
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
    """Values that agree."""

    def draw(d: Any) -> Any:
        found: list[int] = []
        for _ in range(count):
            given = [d.env[n] for n in found]
            found.append(d.value(kinds, test=lambda x: agree(*given, x, most=most)))
        return tuple(found), {}

    return draw


SIGNED = sampled([0.5, -0.75, 1.25, 2.0, -1.0])

OPS: dict[str, Op] = {}
FAMILIES: dict[str, list[str]] = {}


def family(name: str, rows: dict[str, Op]) -> None:
    FAMILIES[name] = list(rows)
    OPS.update(rows)


# Element-wise


def sigmoid(a: Any) -> Any:
    return 1 / (1 + np.exp(-a))


def gelu(a: Any) -> Any:
    return a / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))


positive = within(0.05, 100)

UNARY: dict[str, tuple[Any, Any, Callable[..., bool]]] = {
    # name: (NumPy's, JAX's, where it is smooth)
    "abs": (np.abs, jnp.abs, apart_from(0)),
    "arcsin": (np.arcsin, jnp.arcsin, within(-0.9, 0.9)),
    "arcsinh": (np.arcsinh, jnp.arcsinh, anywhere),
    "arctan": (np.arctan, jnp.arctan, anywhere),
    "arctanh": (np.arctanh, jnp.arctanh, within(-0.9, 0.9)),
    "cbrt": (np.cbrt, jnp.cbrt, positive),
    "ceil": (np.ceil, jnp.ceil, apart_from(0, period=1)),
    "cos": (np.cos, jnp.cos, anywhere),
    "cosh": (np.cosh, jnp.cosh, within(-3, 3)),
    "elu": (lambda a: np.where(a > 0, a, np.expm1(a)), jax.nn.elu, apart_from(0)),
    "erf": (scipy.special.erf, jax.scipy.special.erf, anywhere),
    "erfc": (scipy.special.erfc, jax.scipy.special.erfc, anywhere),
    "erfinv": (scipy.special.erfinv, jax.scipy.special.erfinv, within(-0.9, 0.9)),
    "exp": (np.exp, jnp.exp, within(-4, 4)),
    "exp2": (np.exp2, jnp.exp2, within(-4, 4)),
    "expm1": (np.expm1, jnp.expm1, within(-4, 4)),
    "floor": (np.floor, jnp.floor, apart_from(0, period=1)),
    "gelu": (gelu, jax.nn.gelu, anywhere),
    "leaky_relu": (lambda a: np.where(a > 0, a, a / 100), jax.nn.leaky_relu, apart_from(0)),
    "lgamma": (scipy.special.gammaln, jax.scipy.special.gammaln, within(0.2, 9)),
    "log": (np.log, jnp.log, positive),
    "log10": (np.log10, jnp.log10, positive),
    "log1p": (np.log1p, jnp.log1p, within(-0.9, 100)),
    "log2": (np.log2, jnp.log2, positive),
    "log_sigmoid": (lambda a: -np.log1p(np.exp(-a)), jax.nn.log_sigmoid, anywhere),
    "negative": (np.negative, jnp.negative, anywhere),
    "reciprocal": (np.reciprocal, jnp.reciprocal, positive),
    "relu": (lambda a: np.maximum(a, 0), jax.nn.relu, apart_from(0)),
    "relu6": (lambda a: np.clip(a, 0, 6), jax.nn.relu6, apart_from(0, 6)),
    "round": (np.round, jnp.round, apart_from(0.5, period=1)),
    "rsqrt": (lambda a: 1 / np.sqrt(a), lax.rsqrt, positive),
    "selu": (
        lambda a: 1.0507009873554805 * np.where(a > 0, a, 1.6732632423543772 * np.expm1(a)),
        jax.nn.selu,
        apart_from(0),
    ),
    "sigmoid": (sigmoid, jax.nn.sigmoid, anywhere),
    "sign": (np.sign, jnp.sign, apart_from(0)),
    "silu": (lambda a: a * sigmoid(a), jax.nn.silu, anywhere),
    "sin": (np.sin, jnp.sin, anywhere),
    "sinh": (np.sinh, jnp.sinh, within(-3, 3)),
    "softplus": (lambda a: np.log1p(np.exp(a)), jax.nn.softplus, within(-20, 20)),
    "softsign": (lambda a: a / (1 + np.abs(a)), jax.nn.soft_sign, apart_from(0)),
    "sqrt": (np.sqrt, jnp.sqrt, positive),
    "square": (np.square, jnp.square, within(-10, 10)),
    "tan": (np.tan, jnp.tan, within(-1, 1)),
    "tanh": (np.tanh, jnp.tanh, anywhere),
}
EXACT_UNARY = ("abs", "ceil", "floor", "negative", "relu", "round", "sign", "square")

BINARY: dict[str, tuple[Callable[..., bool], bool]] = {
    # name: (where it is smooth, exact)
    "add": (lambda x, y: True, True),
    "arctan2": (lambda x, y: apart_from(0)(y) and not y.exact, False),
    "divide": (lambda x, y: bool(np.all(np.abs(y.array) > 0.05)), False),
    "floor_divide": (
        lambda x, y: positive(y) and apart_from(0, period=1)(broadcast(np.divide, x, y)),
        False,
    ),
    "hypot": (lambda x, y: positive(x) and positive(y), False),
    "logaddexp": (lambda x, y: True, False),
    "maximum": (differ, True),
    "minimum": (differ, True),
    "multiply": (lambda x, y: True, True),
    "power": (lambda x, y: positive(x) and within(-2, 2)(y), False),
    "remainder": (
        lambda x, y: positive(y) and apart_from(0, period=1)(broadcast(np.divide, x, y)),
        False,
    ),
    "subtract": (lambda x, y: True, True),
}


def _binary(name: str, kinds: str, sound: Any, exact: bool = False) -> Op:
    fn = getattr(A, name)
    return Op(
        several(2, kinds), getattr(wf, name), lambda x, y: broadcast(fn, x, y), sound, exact=exact
    )


NUMBERS: dict[str, tuple[Any, Callable[..., bool]]] = {
    # an operator with a number on one side; the same for tensors and arrays
    "x + number": (lambda x, number: x + number, anywhere),
    "number - x": (lambda x, number: number - x, anywhere),
    "x * number": (lambda x, number: x * number, anywhere),
    "x / number": (lambda x, number: x / number, anywhere),
    "number / x": (lambda x, number: number / x, positive),
    "x ** number": (lambda x, number: x**number, positive),
    "x ** 2": (lambda x, number: x**2, within(-10, 10)),
    "1.5 ** x": (lambda x, number: 1.5**x, within(-4, 4)),
}


def _where(x: Named, y: Named, z: Named, than: float) -> Named:
    return _chosen_by(broadcast(A.greater, x, Named(np.asarray(than), ())), y, z)


def _chosen_by(condition: Named, y: Named, z: Named) -> Named:
    return broadcast(lambda b, c, a: A.where(a, b, c), y, z, condition)


def _fit(x: Named, dims: Any) -> Named:
    """The mean over dims that are not wanted, repeated along those that are missing."""
    gone = tuple(n for n, size in x.sizes.items() if (n, size) not in dims)
    x = over(A.mean)(x, gone) if gone else x
    names, shape = [n for n, _ in dims], [size for _, size in dims]
    return Named(A.broadcast_to(lined(x, names), shape), tuple(names))


def _fit_weft(x: wf.Tensor, dims: Any) -> wf.Tensor:
    gone = [d for d in x.dims if (d.name, d.size) not in dims]
    return wf.broadcast_to(wf.mean(x, gone) if gone else x, as_dims(dims))


def _number_op(fn: Any, sound: Any) -> Op:
    return Op(one(number=SIGNED), fn, lambda x, number: Named(fn(x.array, number), x.names), sound)


def _clipped(x: Named, low: Any, high: Any) -> Named:
    return Named(A.clip(x.array, low, high), x.names)


def _unary(name: str) -> Op:
    numpy, ours, sound = UNARY[name]

    def oracle(x: Named) -> Named:
        return Named((ours if isinstance(x.array, jax.Array) else numpy)(x.array), x.names)

    return Op(one(), getattr(wf, name), oracle, sound, exact=name in EXACT_UNARY)


family("elementwise", {name: _unary(name) for name in UNARY})
family(
    "binary",
    {name: _binary(name, "f", *row) for name, row in BINARY.items()}
    | {name: _number_op(*row) for name, row in NUMBERS.items()}
    | {
        "where": Op(
            lambda d: (several(3)(d)[0], {"than": d.draw(SIGNED)}),
            lambda x, y, z, than: wf.where(x > than, y, z),
            _where,
            lambda x, y, z, than: apart_from(than)(x),
        ),
        "where number": Op(
            one(than=SIGNED),
            lambda x, than: wf.where(x > than, x, 0.5),
            lambda x, than: Named(A.where(x.array > than, x.array, 0.5), x.names),
            lambda x, than: apart_from(than)(x),
        ),
        "clip": Op(
            one(low=sampled([None, -0.5, 0.25]), high=sampled([None, 0.25, 1.0])),
            lambda x, low, high: wf.clip(x, low, high),
            _clipped,
            lambda x, low, high: (
                (low, high) != (None, None)
                and apart_from(*[n for n in (low, high) if n is not None])(x)
                and not x.exact
            ),
        ),
        "stop_gradient": Op(
            one(),
            wf.stop_gradient,
            lambda x: Named(
                lax.stop_gradient(x.array) if isinstance(x.array, jax.Array) else x.array, x.names
            ),
            exact=True,
        ),
    },
)
family(
    "discrete",
    {
        name: _binary(name, "f", differ)
        for name in ("equal", "greater", "greater_equal", "less_equal")
    }
    | {name: _binary(name, "fi", differ) for name in ("less", "not_equal")}
    | {name: _binary(name, "b", None) for name in ("logical_and", "logical_or", "logical_xor")}
    | {
        "logical_not": Op(one("b"), wf.logical_not, lambda x: Named(~x.array, x.names)),
        "isfinite": Op(one("f"), wf.isfinite, lambda x: Named(A.isfinite(x.array), x.names)),
        "to float": Op(
            one("bi"),
            lambda x: x.astype(jnp.float64),
            lambda x: Named(x.array.astype(np.float64), x.names),
            exact=True,
        ),
        "to whole": Op(
            one("f"),
            lambda x: x.astype(jnp.int32),
            lambda x: Named(x.array.astype(np.int32), x.names),
            apart_from(0, period=1),
        ),
        "add whole": Op(several(2, "i"), wf.add, lambda x, y: broadcast(A.add, x, y)),
        "where truth": Op(
            lambda d: (_truth_operands(d), {}),
            wf.where,
            _chosen_by,
        ),
    },
)


def _truth_operands(d: Any) -> tuple[int, ...]:
    condition = d.value("b")
    y = d.value("f", test=lambda y: agree(d.env[condition], y))
    z = d.value("f", test=lambda z: agree(d.env[condition], d.env[y], z))
    return condition, y, z


# Contractions and reductions


def draw_einsum(d: Any) -> Any:
    found, _ = several(d.draw(integers(1, 3)), most=4)(d)
    names = union(*[d.env[n] for n in found])
    out = d.some(names, least=0)
    return found, {"out": out[: 3 if len(out) > 3 else len(out)]}


def draw_square(d: Any) -> Any:
    (n,), options = one_along()(d)
    return (n,), options | {"new": d.name(d.env[n].names)}


family(
    "contract",
    {
        "einsum": Op(
            draw_einsum,
            lambda *xs, out: wf.einsum(*xs, out=out),
            lambda *xs, out: einsum(*xs, out=out),
            exact=True,
        ),
        "einsum reduce": Op(
            draw_einsum,
            lambda *xs, out: wf.einsum(
                *xs,
                reduce=[
                    n for n in dict.fromkeys(d.name for x in xs for d in x.dims) if n not in out
                ],
            ),
            lambda *xs, out: einsum(*xs, out=[n for n in union(*xs) if n in out]),
            exact=True,
        ),
        # both operands are the same tensor, one dim renamed
        "x @ x": Op(
            draw_square,
            lambda x, dim, new: wf.einsum(x, x.rename(**{dim: new}), out=[dim, new]),
            lambda x, dim, new: einsum(x, renamed(x, {dim: new}), out=(dim, new)),
            exact=True,
        ),
    },
)


def _reduction(name: str, sound: Any = None, kinds: str = "f", exact: bool = False) -> Op:
    return Op(one_over(kinds), getattr(wf, name), over(getattr(A, name)), sound, exact=exact)


def _logsumexp(a: Any, axis: Any) -> Any:
    return A.log(A.sum(A.exp(a), axis=axis))


family(
    "reduce",
    {
        "sum": _reduction("sum", exact=True),
        "mean": _reduction("mean"),
        "max": _reduction("max", distinct, exact=True),
        "min": _reduction("min", distinct, exact=True),
        "prod": _reduction("prod"),
        "var": _reduction("var"),
        "std": _reduction("std", spread),
        "any": _reduction("any", kinds="bi"),
        "all": _reduction("all", kinds="bi"),
        "sum whole": _reduction("sum", kinds="bi"),
        "max whole": _reduction("max", kinds="bi"),
        "logsumexp": Op(one_over(), wf.logsumexp, over(_logsumexp)),
        "softmax": Op(
            one_along(),
            wf.softmax,
            along(lambda a, n: A.exp(a) / A.sum(A.exp(a), axis=n, keepdims=True)),
        ),
        "log_softmax": Op(
            one_along(),
            wf.log_softmax,
            along(lambda a, n: a - A.log(A.sum(A.exp(a), axis=n, keepdims=True))),
        ),
    },
)


# Order


def _place(fn: str) -> Callable[..., Named]:
    return lambda x, dim: Named(
        getattr(A, fn)(x.array, axis=x.names.index(dim)), tuple(n for n in x.names if n != dim)
    )


def _running(a: Any, axis: int, exclusive: bool, reverse: bool) -> Any:
    back = A.flip(a, axis) if reverse else a
    total = A.cumsum(back, axis=axis)
    total = total - back if exclusive else total
    return A.flip(total, axis) if reverse else total


def _ranked(a: Any, axis: int, descending: bool = True) -> Any:
    return A.argsort(-a if descending else a, axis=axis, stable=True)


def _sorted(a: Any, axis: int, descending: bool) -> Any:
    return A.take_along_axis(a, _ranked(a, axis, descending), axis=axis)


def draw_top_k(d: Any) -> Any:
    n = d.value("f", 1)
    x = d.env[n]
    dim = d.choose(x.names)
    size = d.draw(integers(1, x.sizes[dim]))
    return (n,), {"dim": dim, "k_dim": (d.name([m for m in x.names if m != dim]), size)}


def _top_k(x: Named, dim: str, k_dim: Any) -> list[Named]:
    axis = x.names.index(dim)
    places = A.take(_ranked(x.array, axis), np.arange(k_dim[1]), axis=axis)
    names = tuple(k_dim[0] if n == dim else n for n in x.names)
    return [Named(A.take_along_axis(x.array, places, axis=axis), names), Named(places, names)]


family(
    "order",
    {
        "argmax": Op(one_along("fi"), wf.argmax, _place("argmax"), distinct),
        "argmin": Op(one_along("fi"), wf.argmin, _place("argmin"), distinct),
        "cumsum": Op(
            one_along(exclusive=sampled([False, True]), reverse=sampled([False, True])),
            wf.cumsum,
            along(_running),
            exact=True,
        ),
        "cumprod": Op(one_along(), wf.cumprod, along(lambda a, n: A.cumprod(a, axis=n))),
        "sort": Op(
            one_along(descending=sampled([False, True])),
            wf.sort,
            along(_sorted),
            distinct,
            exact=True,
        ),
        "argsort": Op(
            one_along(descending=sampled([False, True])), wf.argsort, along(_ranked), distinct
        ),
        "top_k": Op(
            draw_top_k,
            lambda x, dim, k_dim: wf.top_k(x, dim, wf.Dim(*k_dim)),
            _top_k,
            distinct,
            exact=True,
            apart=True,
        ),
    },
)


# Shape


def draw_rename(d: Any) -> Any:
    n = d.value("fib", 1)
    names = list(d.env[n].names)
    new = dict(zip(names, names, strict=True))
    for old in d.some(names):
        new[old] = d.name([m for k, m in new.items() if k != old])
    if len(names) > 1 and d.chance(4):  # two dims that change places
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
    return _reshape(
        x, [(n, x.sizes[n]) for n in before] + [(into, size)] + [(n, x.sizes[n]) for n in after]
    )


def draw_broadcast(d: Any) -> Any:
    n = d.value("fib", 0, most=2)
    x = d.env[n]
    new = d.name(x.names)
    dims = [*dims_of(x), (new, d.size(new))]
    return (n,), {"dims": d.shuffled(dims)}


def alike(d: Any, n: int, dim: str | None = None, most: int = 3) -> tuple[int, ...]:
    """Values with the dims of another, `dim` in any size; the other among them."""

    def fits(y: Named) -> bool:
        x = d.env[n]
        return set(x.names) == set(y.names) and all(
            y.sizes[m] == x.sizes[m] for m in x.names if m != dim
        )

    count = d.draw(integers(0, most - 1))
    return (n, *[d.value(d.env[n].kind, test=fits) for _ in range(count)])


def draw_stack(d: Any) -> Any:
    found = alike(d, d.value("fi", 0, most=2))
    return found, {"dim": d.name(d.env[found[0]].names)}


def _stack(*xs: Named, dim: str) -> Named:
    return Named(A.stack([swapped(x, xs[0].names).array for x in xs]), (dim, *xs[0].names))


def _unstack(x: Named, dim: str) -> list[Named]:
    names = tuple(n for n in x.names if n != dim)
    return [
        Named(A.take(x.array, n, axis=x.names.index(dim)), names) for n in (0, x.sizes[dim] - 1)
    ]


def _broadcast_to(x: Named, dims: Any) -> Named:
    return Named(
        A.broadcast_to(lined(x, [n for n, _ in dims]), [size for _, size in dims]),
        tuple(n for n, _ in dims),
    )


family(
    "shape",
    {
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
            _fit_weft,
            _fit,
            apart=True,
        ),
        "stack": Op(draw_stack, lambda *xs, dim: wf.stack(xs, dim), _stack, exact=True),
        "unstack": Op(  # the first and the last
            one_along("fi"),
            lambda x, dim: [wf.unstack(x, dim)[n] for n in (0, -1)],
            _unstack,
            exact=True,
        ),
    },
)


# Moves


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
    kept = tuple(n for n in x.names if not isinstance(wanted.get(n), int))
    return Named(x.array[tuple(wanted.get(n, slice(None)) for n in x.names)], kept)


def along_with_whole(**options: Any) -> Callable[..., Any]:
    """A value, a whole number that is computed (the maximum of an integer tensor), and a dim."""

    def draw(d: Any) -> Any:
        (n,), drawn = one_along("f", **options)(d)
        return (n, d.value("i")), drawn

    return draw


def _start(ids: Named, size: int, length: int) -> Any:
    start = A.max(ids.array)
    return A.clip(A.where(start < 0, start + size, start), 0, size - length)


def _index_at(x: Named, ids: Named, dim: str) -> Named:
    axis = x.names.index(dim)
    place = _start(ids, x.sizes[dim], 1)
    return Named(
        A.take(x.array, place, axis=axis, mode="clip"), tuple(n for n in x.names if n != dim)
    )


def draw_slice(d: Any) -> Any:
    n = d.value("fi", 1)
    x = d.env[n]
    dim = d.choose(x.names)
    size = d.draw(integers(1, x.sizes[dim]))
    start = d.draw(integers(-x.sizes[dim], x.sizes[dim]))
    return (n,), {
        "dim": dim,
        "start": start,
        "new": (d.name([m for m in x.names if m != dim]), size),
    }


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
        return all(
            y.sizes[m] == x.sizes.get(m) or (m == dim and y.sizes[m] < x.sizes[m]) for m in y.names
        )

    start = d.draw(integers(-x.sizes[dim], x.sizes[dim]))
    return (n, d.value("f", test=fits)), {"dim": dim, "start": start}


def draw_update_at(d: Any) -> Any:
    found, options = draw_update(d)
    return (*found, d.value("i")), {"dim": options["dim"]}


def _update(x: Named, y: Named, dim: str, start: Any) -> Named:
    """By masks: what lies at place p of x comes from place p - start of y."""
    size = y.sizes.get(dim, 1)
    if dim in y.names:
        places = A.clip(np.arange(x.sizes[dim]) - start, 0, size - 1)
        y = Named(A.take(y.array, places, axis=y.names.index(dim), mode="clip"), y.names)
    here = np.arange(x.sizes[dim])
    inside = Named((here >= start) & (here < start + size), (dim,))
    return Named(A.where(lined(inside, x.names), lined(y, x.names), x.array), x.names)


def _static_start(x: Named, dim: str, start: int, length: int) -> int:
    size = x.sizes[dim]
    return max(0, min(size - length, start + size if start < 0 else start))


def draw_concat(d: Any) -> Any:
    n = d.value("fi", 1)
    dim = d.choose(d.env[n].names)
    return alike(d, n, dim), {"dim": dim}


def _shift(a: Any, axis: int, by: int, wrap: bool) -> Any:
    if wrap:
        return A.roll(a, by, axis=axis)
    places = np.arange(a.shape[axis]) - by
    inside = ((places >= 0) & (places < a.shape[axis])).reshape(
        [-1 if n == axis else 1 for n in range(a.ndim)]
    )
    return A.where(inside, A.take(a, np.clip(places, 0, a.shape[axis] - 1), axis=axis), 0)


def _padded(a: Any, axis: int, before: int, after: int, value: float) -> Any:
    pads = [(before, after) if n == axis else (0, 0) for n in range(a.ndim)]
    return A.pad(a, pads, constant_values=value)


DISTANCE = integers(-10, 10)

family(
    "moves",
    {
        "index": Op(draw_index, lambda x, where: x[_where_pairs(where)], _index, exact=True),
        "index at": Op(
            along_with_whole(), lambda x, ids, dim: x[dim, wf.max(ids)], _index_at, exact=True
        ),
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
            lambda x, y, dim, start: _update(
                x, y, dim, _static_start(x, dim, start, y.sizes.get(dim, 1))
            ),
            exact=True,
        ),
        "update at": Op(
            draw_update_at,
            lambda x, y, ids, dim: wf.update(x, dim, wf.max(ids), y),
            lambda x, y, ids, dim: _update(
                x, y, dim, _start(ids, x.sizes[dim], y.sizes.get(dim, 1))
            ),
            exact=True,
        ),
        "concat": Op(
            draw_concat,
            lambda *xs, dim: wf.concat(xs, dim),
            lambda *xs, dim: Named(
                A.concatenate(
                    [swapped(x, xs[0].names).array for x in xs], axis=xs[0].names.index(dim)
                ),
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
        "flip": Op(one_along("fib"), wf.flip, along(lambda a, n: A.flip(a, n)), exact=True),
    },
)


# Look-up


def draw_take(d: Any) -> Any:
    table = d.value("f", 1)
    x = d.env[table]
    dim = d.choose(x.names)
    ids = d.value("i", test=lambda y: dim not in y.names and agree(x, y, most=4))
    inside = np.all((d.env[ids].array >= 0) & (d.env[ids].array < x.sizes[dim]))
    return (table, ids), {"dim": dim, "fill": None if inside and d.chance(2) else 0.75}


def _chosen(ids: Named, dim: str, size: int) -> Named:
    """1 where an index is, else 0."""
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
    ones = Named(
        np.ones([x.sizes[n] for n in x.names if n != dim]), tuple(n for n in x.names if n != dim)
    )
    added = einsum(ones, updates, _chosen(ids, dim, x.sizes[dim]), out=x.names)
    return Named(x.array + added.array, x.names)


def draw_one_hot(d: Any) -> Any:
    n = d.value("i", most=2)
    name = d.name(d.env[n].names)
    return (n,), {"dim": (name, d.size(name))}


family(
    "lookup",
    {
        "take": Op(draw_take, wf.take, _take, exact=True),
        "one_hot": Op(
            draw_one_hot,
            lambda ids, dim: wf.one_hot(ids, wf.Dim(*dim), jnp.float64),
            lambda ids, dim: _chosen(ids, *dim),
            exact=True,
        ),
        "scatter_add": Op(draw_scatter, wf.scatter_add, _scatter, exact=True),
    },
)


# Neighbours


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
    """The windows along a dim, by a table of places."""
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
    places = np.arange(count)[:, None] * stride + np.arange(size) * dilation
    names = [m for n in x.names for m in ((n, new) if n == dim else (n,))]
    return Named(A.take(padded, places, axis=axis), tuple(names))


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
            x = slid(
                x, dim, f"{dim}.window", size, size if stride is None else stride, padding, 1, fill
            )
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
    kept = [n for n in x_names if n not in shared or n in groups]
    return kept + [n for n in kernel_names if n not in x_names and n not in window.values()]


def _conv_weft(
    x: wf.Tensor, y: wf.Tensor, names: Any, window: Any, groups: Any, **options: Any
) -> wf.Tensor:
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
    """by - 1 zeros between the places of a dim."""
    axis = x.names.index(dim)
    places = np.arange((x.sizes[dim] - 1) * by + 1)
    rows = (places[:, None] == by * np.arange(x.sizes[dim])).astype(np.float64)
    return Named(A.moveaxis(A.tensordot(x.array, rows, axes=([axis], [1])), -1, axis), x.names)


family(
    "neighbours",
    {
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
        "conv": Op(draw_conv, _conv_weft, _conv, exact=True, apart=True),
    },
)


# Random tensors; those that jax.random has no equal of are drawn by Weft on one device


def draw_random(d: Any) -> Any:
    return (), {"dims": d.dims(d.draw(integers(1, 3))), "seed": d.draw(integers(0, 99))}


@functools.cache
def flat_draw(fn: Callable[..., Any], seed: int, **options: Any) -> np.ndarray:
    """A draw along one long dim. An element depends on its place among all in row-major order, and so this
    is the beginning of every draw by that key: one compilation serves all shapes."""
    with jax.ensure_compile_time_eval():
        if fn.__module__.startswith("jax"):
            return np.asarray(fn(jax.random.key(seed), (MOST_ELEMENTS,)))
        return fn(jax.random.key(seed), wf.Dim("n", MOST_ELEMENTS), **options).numpy()


def drawn(fn: Callable[..., Any], shape: Sequence[int], seed: int, **options: Any) -> np.ndarray:
    return flat_draw(fn, seed, **options)[: math.prod(shape)].reshape(shape)


def _random(
    ours: Callable[..., Any], theirs: Callable[..., Any] | None = None, **options: Any
) -> Op:
    """A draw by a seed and dims; where `jax.random` has none that is equal, ours on one device."""

    def oracle(dims: Any, seed: int) -> Named:
        shape = [size for _, size in dims]
        array = drawn(theirs, shape, seed) if theirs else drawn(ours, shape, seed, **options)
        return Named(array, tuple(n for n, _ in dims))

    def weft(dims: Any, seed: int) -> wf.Tensor:
        return ours(jax.random.key(seed), as_dims(dims), **options)

    return Op(draw_random, weft, oracle)


def draw_drop(d: Any) -> Any:
    return (d.value("f", 1),), {"rate": d.choose([0.1, 0.5]), "seed": d.draw(integers(0, 99))}


def _dropped(x: Named, rate: float, seed: int) -> Named:
    kept = drawn(wf.random.bernoulli, x.array.shape, seed, p=1.0 - rate)
    return Named(A.where(kept, x.array / (1.0 - rate), 0), x.names)


def _categorical(x: Named, dim: str, seed: int) -> Named:
    noise = drawn(wf.random.gumbel, x.array.shape, seed)
    return _place("argmax")(Named(x.array + noise, x.names), dim)


family(
    "random",
    {
        "normal": _random(wf.random.normal, jax.random.normal, dtype=jnp.float64),
        "uniform": _random(wf.random.uniform, jax.random.uniform, dtype=jnp.float64),
        "truncated_normal": _random(wf.random.truncated_normal, dtype=jnp.float64),
        "bernoulli": _random(wf.random.bernoulli, p=0.3),
        "randint": _random(wf.random.randint, low=0, high=4),
        "dropout": Op(
            draw_drop,
            lambda x, rate, seed: wf.dropout(x, rate, jax.random.key(seed)),
            _dropped,
        ),
        "categorical": Op(
            one_along(seed=integers(0, 99)),
            lambda x, dim, seed: wf.random.categorical(jax.random.key(seed), x, dim),
            _categorical,
        ),
    },
)


# Control flow and calculus, around bodies that are programs themselves


def without(x: Named, dim: str, place: int = 0) -> Named:
    """A tensor at one place of a dim, if it has it."""
    if dim not in x.names:
        return x
    axis = x.names.index(dim)
    return Named(A.take(x.array, place, axis=axis), tuple(n for n in x.names if n != dim), x.exact)


def stacked(rows: Sequence[Named], dim: str) -> Named:
    return Named(A.stack([r.array for r in rows]), (dim, *rows[0].names))


def draw_carry(d: Any, avoid: Sequence[str] = ()) -> tuple[int, tuple[int, ...]]:
    """A carry, and values that the loop's body finds outside."""
    fits = lambda x: not set(avoid) & set(x.names)
    carry = d.value("f", most=2, test=fits)
    extra = tuple(d.value("f", test=fits) for _ in range(d.draw(integers(0, 1))))
    return carry, extra


def carried(
    d: Any, given: Sequence[Named], carry: int, avoid: Sequence[str] = ()
) -> tuple[Body, int]:
    """A body that returns a new carry, made of the given value `carry`, and what else it computed."""
    body, env = d.body(given, avoid=avoid)
    fitted = Step("fit", (body.result,), {"dims": dims_of(given[carry])})
    how = d.choose(
        [
            [Step("add", (carry, len(env)))],
            [Step("multiply", (carry, len(env))), Step("tanh", (len(env) + 1,))],
        ]
    )
    steps = (*body.steps, fitted, *how)
    return Body(steps, len(env) + len(how)), body.result


def draw_scan(d: Any) -> Any:
    x = d.value("f", 1)
    dim = d.choose(d.env[x].names)
    carry, extra = draw_carry(d, [dim])
    given = [d.env[carry], without(d.env[x], dim), *[d.env[n] for n in extra]]
    body, kept = carried(d, given, 0, [dim])
    options = {"dim": dim, "body": body, "keep": kept if d.chance(2) else None}
    return (x, carry, *extra), options | {"reverse": d.draw(sampled([False, True]))}


def _scan_weft(
    x: wf.Tensor,
    carry: wf.Tensor,
    *extra: wf.Tensor,
    dim: str,
    body: Body,
    keep: Any,
    reverse: bool,
) -> list[wf.Tensor]:
    def step(carry: wf.Tensor, row: wf.Tensor) -> Any:
        env = run_weft(body.steps, [carry, row, *extra])
        return env[body.result], None if keep is None else env[keep]

    last, kept = wf.scan(step, carry, x, dim, reverse=reverse)
    return [last] if keep is None else [last, kept]


def _scan(
    x: Named, carry: Named, *extra: Named, dim: str, body: Body, keep: Any, reverse: bool
) -> list[Named]:
    rows: dict[int, Named] = {}
    places = range(x.sizes[dim])
    for n in reversed(places) if reverse else places:
        env = run_oracle(body.steps, [carry, without(x, dim, n), *extra])
        carry = env[body.result]
        if keep is not None:
            rows[n] = env[keep]
    return [carry] if keep is None else [carry, stacked([rows[n] for n in places], dim)]


def draw_loop(d: Any) -> Any:
    carry, extra = draw_carry(d)
    counter = Named(np.asarray(0, np.int32), (), exact=True)
    body, _ = carried(d, [d.env[carry], counter, *[d.env[n] for n in extra]], 0)
    return (carry, *extra), {"body": body, "trips": d.draw(integers(0, 3))}


def _for_weft(carry: wf.Tensor, *extra: wf.Tensor, body: Body, trips: int) -> wf.Tensor:
    return wf.fori_loop(
        0, trips, lambda n, c: run_weft(body.steps, [c, n, *extra])[body.result], carry
    )


def _while_weft(carry: wf.Tensor, *extra: wf.Tensor, body: Body, trips: int) -> wf.Tensor:
    carry, extra = wf.stop_gradient(carry), tuple(map(wf.stop_gradient, extra))

    def go(state: Any) -> wf.Tensor:
        return wf.logical_and(state["n"] < trips, wf.sum(state["carry"]) < 1e6)

    def step(state: Any) -> Any:
        env = run_weft(body.steps, [state["carry"], state["n"], *extra])
        return {"n": state["n"] + 1, "carry": env[body.result]}

    return wf.while_loop(go, step, {"n": wf.zeros("", jnp.int32), "carry": carry})["carry"]


def _for(carry: Named, *extra: Named, body: Body, trips: int) -> Named:
    for n in range(trips):
        counter = Named(np.asarray(n, np.int32), (), exact=True)
        carry = run_oracle(body.steps, [carry, counter, *extra])[body.result]
    return carry


def _while(carry: Named, *extra: Named, body: Body, trips: int) -> Named:
    if isinstance(carry.array, jax.Array):
        carry, *extra = [
            dataclasses.replace(x, array=lax.stop_gradient(x.array)) for x in (carry, *extra)
        ]
    return _for(carry, *extra, body=body, trips=trips)


def draw_operands(d: Any, most: int = 2, **filters: Any) -> tuple[int, ...]:
    return tuple(d.value("f", **filters) for _ in range(d.draw(integers(1, most))))


def draw_cond(d: Any) -> Any:
    decides, found = d.value("f"), draw_operands(d)
    given = [d.env[n] for n in found]
    yes, env = d.body(given)
    no, other = d.body(given)
    fitted = Step("fit", (no.result,), {"dims": dims_of(env[yes.result])})
    no = Body((*no.steps, fitted), len(other))
    handed = d.draw(integers(0, len(found)))
    return (decides, *found), {"than": d.draw(SIGNED), "yes": yes, "no": no, "handed": handed}


def _cond_weft(
    decides: wf.Tensor, *xs: wf.Tensor, than: float, yes: Body, no: Body, handed: int
) -> wf.Tensor:
    def branch(body: Body) -> Callable[..., Any]:
        return lambda *some: run_weft(body.steps, [*some, *xs[handed:]])[body.result]

    return wf.cond(wf.mean(decides) > than, branch(yes), branch(no), *xs[:handed])


def _cond(decides: Named, *xs: Named, than: float, yes: Body, no: Body, handed: int) -> Named:
    first, second = (run_oracle(b.steps, xs)[b.result] for b in (yes, no))
    return Named(A.where(A.mean(decides.array) > than, first.array, second.array), first.names)


def draw_vmap(d: Any) -> Any:
    x = d.value("f", 1)
    dim = d.choose(d.env[x].names)
    size = d.env[x].sizes[dim]
    more = d.draw(integers(0, 1))
    fits = lambda y: y.sizes.get(dim, size) == size
    found = (x, *[d.value("f", test=fits) for _ in range(more)])
    body, _ = d.body([without(d.env[n], dim) for n in found], avoid=[dim], mapped=[dim])
    return found, {"dim": dim, "body": body, "captured": d.draw(sampled([False, True]))}


def _vmap_weft(*xs: wf.Tensor, dim: str, body: Body, captured: bool) -> wf.Tensor:
    outside = [n for n, x in enumerate(xs) if captured and dim not in [d.name for d in x.dims]]

    def row(*some: wf.Tensor) -> wf.Tensor:
        rest = iter(some)
        return run_weft(body.steps, [x if n in outside else next(rest) for n, x in enumerate(xs)])[
            body.result
        ]

    return wf.vmap(row, dim)(*[x for n, x in enumerate(xs) if n not in outside])


def _vmap(*xs: Named, dim: str, body: Body, captured: bool) -> Named:
    rows = [
        run_oracle(body.steps, [without(x, dim, n) for x in xs])[body.result]
        for n in range(xs[0].sizes[dim])
    ]
    return stacked(rows, dim)


def draw_body(**options: Any) -> Callable[..., Any]:
    """Some values, a function of them, and options from strategies."""

    def draw(d: Any) -> Any:
        found = draw_operands(d)
        body, _ = d.body([d.env[n] for n in found])
        drawn = {k: d.draw(s) for k, s in options.items()}
        return found, {"body": body, **drawn}

    return draw


def _remat_weft(*xs: wf.Tensor, body: Body, policy: Any, handed: int) -> wf.Tensor:
    fn = lambda *some: run_weft(body.steps, [*some, *xs[handed:]])[body.result]
    return wf.remat(fn, policy)(*xs[:handed])


def _inline(*xs: Named, body: Body, **_: Any) -> Named:
    return run_oracle(body.steps, xs)[body.result]


def _by_jax(fn: Callable[..., Any], xs: Sequence[Named]) -> list[Named]:
    """What only JAX can compute, also of NumPy's arrays."""
    if any(isinstance(x.array, jax.Array) for x in xs):
        return fn(*xs)
    names: list[Any] = []

    def arrays(*arrays: Any) -> list[Any]:
        out = fn(*[Named(a, x.names) for a, x in zip(arrays, xs, strict=True)])
        names[:] = [x.names for x in out]
        return [x.array for x in out]

    with jax.ensure_compile_time_eval():
        out = jax.jit(arrays)(*[x.array for x in xs])
    return [Named(np.asarray(a), n) for a, n in zip(out, names, strict=True)]


def _sound_inside(*xs: Named, body: Body, **_: Any) -> bool:
    run_oracle(body.steps, xs)
    return True


def _jvp_weft(*xs: wf.Tensor, body: Body) -> list[wf.Tensor]:
    fn = lambda x: run_weft(body.steps, [x, *xs[1:]])[body.result]
    return list(wf.jvp(fn, (xs[0],), (wf.cos(xs[0]),)))


def _jvp(*xs: Named, body: Body) -> list[Named]:
    def both(*xs: Named) -> list[Named]:
        names: list[Any] = []

        def fn(array: Any) -> Any:
            out = run_oracle(body.steps, [dataclasses.replace(xs[0], array=array), *xs[1:]])[
                body.result
            ]
            names[:] = [out.names]
            return out.array

        return [Named(a, names[0]) for a in jax.jvp(fn, (xs[0].array,), (jnp.cos(xs[0].array),))]

    return _by_jax(both, xs)


def _vjp_weft(*xs: wf.Tensor, body: Body) -> wf.Tensor:
    fn = lambda x: run_weft(body.steps, [x, *xs[1:]])[body.result]
    out, pull = wf.vjp(fn, xs[0])
    return pull(wf.cos(out))[0]


def _vjp(*xs: Named, body: Body) -> list[Named]:
    def pulled(*xs: Named) -> list[Named]:
        def fn(array: Any) -> Any:
            return run_oracle(body.steps, [dataclasses.replace(xs[0], array=array), *xs[1:]])[
                body.result
            ].array

        out, pull = jax.vjp(fn, xs[0].array)
        return [Named(pull(jnp.cos(out))[0], xs[0].names)]

    return _by_jax(pulled, xs)


def _grad_weft(*xs: wf.Tensor, body: Body) -> list[wf.Tensor]:
    def loss(xs: Any) -> wf.Tensor:
        out = run_weft(body.steps, xs)[body.result]
        return wf.sum(out * wf.tensor(weights([d.size for d in out.dims]), out.dims))

    return wf.grad(loss)(list(xs))


def _grad(*xs: Named, body: Body) -> list[Named]:
    def grads(*xs: Named) -> list[Named]:
        def loss(arrays: Any) -> Any:
            values = [dataclasses.replace(x, array=a) for x, a in zip(xs, arrays, strict=True)]
            out = run_oracle(body.steps, values)[body.result].array
            return jnp.sum(out * weights(out.shape))

        return [
            Named(g, x.names)
            for g, x in zip(jax.grad(loss)([x.array for x in xs]), xs, strict=True)
        ]

    return _by_jax(grads, xs)


def _own_rule_weft(x: wf.Tensor, y: wf.Tensor) -> wf.Tensor:
    """x · y with a derivative of our own making."""
    rule = wf.custom_vjp(lambda x, y: x * wf.tanh(y))

    def backward(kept: Any, g: wf.Tensor) -> Any:
        x, y = kept
        to = lambda t, like: wf.sum(t, [d for d in t.dims if d not in like.dims])
        return to(g * wf.cos(y), x), to(g * x * 0.5, y)

    rule.defvjp(lambda x, y: (x * wf.tanh(y), (x, y)), backward)
    return rule(x, y)


def _own_rule(x: Named, y: Named) -> Named:
    names = union(x, y)
    if not isinstance(x.array, jax.Array) and not isinstance(y.array, jax.Array):
        return broadcast(lambda a, b: a * np.tanh(b), x, y)
    rule = jax.custom_vjp(lambda a, b: a * jnp.tanh(b))

    def backward(kept: Any, g: Any) -> Any:
        a, b = kept
        to = lambda t, like: jnp.sum(
            t, axis=[n for n in range(t.ndim) if like.shape[n] < t.shape[n]], keepdims=True
        )
        return to(g * jnp.cos(b), a), to(g * a * 0.5, b)

    rule.defvjp(lambda a, b: (a * jnp.tanh(b), (a, b)), backward)
    return Named(rule(jnp.asarray(lined(x, names)), jnp.asarray(lined(y, names))), names)


def draw_local(d: Any) -> Any:
    """A raw function along one dim, which may then not be split."""
    (n,), options = one_along()(d)
    d.keep_whole(options["dim"])
    return (n,), options


def _local_weft(x: wf.Tensor, dim: str) -> wf.Tensor:
    axis = [d.name for d in x.dims].index(dim)
    others = [d for d in x.dims if d.name != dim]
    return wf.local(lambda a: jnp.cumsum(a, axis=axis) + 1.0, x, out=x.dims, splittable=others)


family(
    "control",
    {
        "scan": Op(draw_scan, _scan_weft, _scan, apart=True),
        "fori_loop": Op(draw_loop, _for_weft, _for, apart=True),
        "while_loop": Op(draw_loop, _while_weft, _while, apart=True),
        "cond": Op(
            draw_cond,
            _cond_weft,
            _cond,
            lambda x, *_, than, **__: abs(np.mean(x.array) - than) > GAP,
            apart=True,
        ),
        "vmap": Op(draw_vmap, _vmap_weft, _vmap, apart=True),
    },
)
family(
    "calculus",
    {
        "remat": Op(
            draw_body(
                policy=sampled([None, "sums", "dots", "everything"]),
                handed=integers(0, 2),
            ),
            _remat_weft,
            _inline,
            apart=True,
        ),
        "jvp": Op(draw_body(), _jvp_weft, _jvp, _sound_inside, apart=True),
        "vjp": Op(draw_body(), _vjp_weft, _vjp, _sound_inside, apart=True),
        "grad": Op(draw_body(), _grad_weft, _grad, _sound_inside, apart=True),
        "custom_vjp": Op(several(2), _own_rule_weft, _own_rule),
        "local": Op(
            one(),
            lambda x: wf.local(lambda a: jnp.sin(a) + 1.0, x, out=x.dims, splittable=x.dims),
            lambda x: Named(A.sin(x.array) + 1.0, x.names),
        ),
        "local along": Op(draw_local, _local_weft, along(lambda a, n: A.cumsum(a, axis=n) + 1.0)),
    },
)
