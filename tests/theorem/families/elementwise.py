"""Element-wise functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax import lax

import weft as wf

from ..program import Named
from .rows import (
    SIGNED,
    A,
    Op,
    Rows,
    agree,
    anywhere,
    apart_from,
    broadcast,
    differ,
    one,
    sampled,
    several,
    within,
)


def sigmoid(a: Any) -> Any:
    return 1 / (1 + np.exp(-a))


def gelu(a: Any) -> Any:
    return a / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))


positive = within(0.05, 100)

UNARY_FUNCTIONS: dict[str, tuple[Any, Any, Callable[..., bool]]] = {
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

BINARY_FUNCTIONS: dict[str, tuple[Callable[..., bool], bool]] = {
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
    return Op(several(2, kinds), getattr(wf, name), lambda x, y: broadcast(fn, x, y), sound, exact=exact)


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


def _number_op(fn: Any, sound: Any) -> Op:
    return Op(one(number=SIGNED), fn, lambda x, number: Named(fn(x.array, number), x.names), sound)


def _clipped(x: Named, low: Any, high: Any) -> Named:
    return Named(A.clip(x.array, low, high), x.names)


def _unary(name: str) -> Op:
    numpy, ours, sound = UNARY_FUNCTIONS[name]

    def oracle(x: Named) -> Named:
        return Named((ours if isinstance(x.array, jax.Array) else numpy)(x.array), x.names)

    return Op(one(), getattr(wf, name), oracle, sound, exact=name in EXACT_UNARY)


ELEMENTWISE: Rows = {name: _unary(name) for name in UNARY_FUNCTIONS}
BINARY: Rows = (
    {name: _binary(name, "f", *row) for name, row in BINARY_FUNCTIONS.items()}
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
    }
)
DISCRETE: Rows = (
    {name: _binary(name, "f", differ) for name in ("equal", "greater", "greater_equal", "less_equal")}
    | {name: _binary(name, "fi", differ) for name in ("less", "not_equal")}
    | {name: _binary(name, "b", None) for name in ("logical_and", "logical_or", "logical_xor")}
    | {
        "logical_not": Op(one("b"), wf.logical_not, lambda x: Named(~x.array, x.names)),
        "isfinite": Op(one("f"), wf.isfinite, lambda x: Named(A.isfinite(x.array), x.names)),
        "astype float": Op(
            one("bi"),
            lambda x: x.astype(jnp.float64),
            lambda x: Named(x.array.astype(np.float64), x.names),
            exact=True,
        ),
        "astype integer": Op(
            one("f"),
            lambda x: x.astype(jnp.int32),
            lambda x: Named(x.array.astype(np.int32), x.names),
            apart_from(0, period=1),
        ),
        "add whole": Op(several(2, "i"), wf.add, lambda x, y: broadcast(A.add, x, y)),
        "where boolean": Op(
            lambda d: (_boolean_operands(d), {}),
            wf.where,
            _chosen_by,
        ),
    }
)


def _of_complex(fn: str) -> Op:
    """A real function of a product of complex numbers, built from two tensors."""

    def weft(x: Any, y: Any) -> Any:
        z = x + 1j * y
        return getattr(wf, fn)(z * z)

    def oracle(x: Named, y: Named) -> Named:
        return broadcast(lambda a, b: getattr(A, fn)((a + 1j * b) * (a + 1j * b)), x, y)

    return Op(several(2), weft, oracle)


def _conjugate(x: Any, y: Any) -> Any:
    """The real part of (x + i·y) · (y + i·x)*."""
    return wf.real((x + 1j * y) * wf.conj(y + 1j * x))


COMPLEX: Rows = {
    "real": _of_complex("real"),
    "imag": _of_complex("imag"),
    "conj": Op(several(2), _conjugate, lambda x, y: broadcast(lambda a, b: 2 * a * b, x, y)),
    "abs of complex": Op(
        several(2),
        lambda x, y: wf.abs(x + 1j * y),
        lambda x, y: broadcast(lambda a, b: A.sqrt(a * a + b * b), x, y),
        lambda x, y: bool(np.all(np.abs(y.array) > 0.05)),
    ),
    "einsum of complex": Op(
        several(2),
        lambda x, y: wf.imag(wf.einsum(x + 1j * x, y - 2j * y, out=[])),
        lambda x, y: Named(A.sum(broadcast(lambda a, b: -a * b, x, y).array), ()),
    ),
    "isclose": Op(several(2, "fi"), wf.isclose, lambda x, y: broadcast(A.isclose, x, y), differ),
}


def _boolean_operands(d: Any) -> tuple[int, ...]:
    condition = d.value("b")
    y = d.value("f", test=lambda y: agree(d.env[condition], y))
    z = d.value("f", test=lambda z: agree(d.env[condition], d.env[y], z))
    return condition, y, z
