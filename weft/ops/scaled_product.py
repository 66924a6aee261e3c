"""Products whose partial results never overflow: a mantissa and a power of two, kept apart.

A device multiplies its own elements first, and their product may be infinite, or zero, where that of all
elements is neither: 1e30 · 1e30 on one device and 1e-30 · 1e-30 on another, or a zero on the other (0 · ∞ is
NaN). A result would then depend on the layout. Here a floating-point product is a pair (m, e) that stands for
m · 2^e, with |m| in [½, 1) after each step. Only the result is put together, and only that can overflow.

The exponents are constants to autodiff: a pair is a product of its elements with fixed powers of two, so JAX
differentiates it to any order.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

ScaledPair = tuple[Any, Any]
CHUNK = 64  # factors of at least ½ whose product is far from underflow in 32 bits


def needs_scaling(dtype: Any) -> bool:
    """Whether products of this type are kept as pairs; integers wrap around in any order."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def to_scaled(array: Any) -> ScaledPair:
    """An array as pairs, in at least 32 bits."""
    wide = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    return _normal(wide, jnp.zeros(array.shape, jnp.int32))


def from_scaled(pair: ScaledPair, dtype: Any) -> Any:
    """The array that pairs stand for."""
    return _times_power(*pair).astype(dtype)


def multiply_scaled(a: ScaledPair, b: ScaledPair) -> ScaledPair:
    """The product of two pairs."""
    return _normal(a[0] * b[0], a[1] + b[1])


def prod_scaled(pair: ScaledPair, places: tuple[int, ...]) -> ScaledPair:
    """The product over dimensions, in chunks that are normalized one after the other."""
    m, e = pair
    ends = tuple(range(m.ndim - len(places), m.ndim))
    count = math.prod(m.shape[p] for p in places)
    m, e = (jnp.moveaxis(a, places, ends) for a in (m, e))
    m, e = (a.reshape(*a.shape[: a.ndim - len(places)], count) for a in (m, e))
    while count > 1:
        size = min(CHUNK, count)
        extra = [(0, 0)] * (m.ndim - 1) + [(0, -count % size)]
        count = -(-count // size)
        m = jnp.pad(m, extra, constant_values=1).reshape(*m.shape[:-1], count, size)
        e = jnp.pad(e, extra).reshape(*e.shape[:-1], count, size)
        m, e = _normal(jnp.prod(m, axis=-1), jnp.sum(e, axis=-1))
    return m.squeeze(-1), e.squeeze(-1)


def cumprod_scaled(pair: ScaledPair, place: int, reverse: bool) -> ScaledPair:
    """The running product along a dimension."""
    return lax.associative_scan(multiply_scaled, pair, axis=place, reverse=reverse)


def _normal(m: Any, e: Any) -> ScaledPair:
    shift = lax.stop_gradient(jnp.frexp(lax.stop_gradient(m))[1])
    return _times_power(m, -shift), e + shift


def _times_power(m: Any, e: Any) -> Any:
    """m · 2^e, in two steps: 2^e alone may overflow where the product does not, and 0 · ∞ is NaN."""
    most = 2 * (jnp.finfo(m.dtype).maxexp - 2)  # beyond it the result is infinite, or zero, all the same
    e = jnp.clip(lax.stop_gradient(e), -most, most)
    one = jnp.ones((), m.dtype)
    half = e // 2
    return m * jnp.ldexp(one, half) * jnp.ldexp(one, e - half)
