"""Products that cannot overflow in intermediate results: mantissa and exponent are separate arrays.

A device first multiplies its own elements. That partial product may be infinite or zero where the total is
neither: 1e30 · 1e30 on one device and 1e-30 · 1e-30 on another. If another device has a zero, 0 · ∞ is NaN.
The result would then depend on the layout. Here a floating-point product is a pair (m, e) that represents
m · 2^e, with |m| in [½, 1) after each step. The pair is recombined once, at the end, and only that step can
overflow.

Exponents are constants for autodiff: a pair is the product of its elements and fixed powers of two, so JAX
can differentiate it to any order.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..core.collectives import pvary, varying_axes

ScaledPair = tuple[jax.Array, jax.Array]  # mantissa and exponent
CHUNK = 64  # a product of 64 factors of at least ½ is far from underflow in 32 bits


def needs_scaling(dtype: DTypeLike) -> bool:
    """Whether products of this dtype are computed as pairs. Integers wrap around in any order."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def to_scaled(array: jax.Array) -> ScaledPair:
    """Convert an array to mantissas and exponents, in at least 32 bits."""
    wide = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    return _normalize(wide, jnp.zeros(array.shape, jnp.int32))


def from_scaled(pair: ScaledPair, dtype: DTypeLike) -> jax.Array:
    """Convert mantissas and exponents back to an array."""
    return _ldexp(*pair).astype(dtype)


def multiply_scaled(a: ScaledPair, b: ScaledPair) -> ScaledPair:
    """The product of two pairs."""
    return _normalize(a[0] * b[0], a[1] + b[1])


def prod_scaled(pair: ScaledPair, dim_indices: tuple[int, ...]) -> ScaledPair:
    """The product over dimensions, normalized after each chunk."""
    m, e = pair
    last = tuple(range(m.ndim - len(dim_indices), m.ndim))
    count = math.prod(m.shape[i] for i in dim_indices)
    m, e = (jnp.moveaxis(a, dim_indices, last) for a in (m, e))
    m, e = (a.reshape(*a.shape[: a.ndim - len(dim_indices)], count) for a in (m, e))
    while count > 1:
        size = min(CHUNK, count)
        padding = [(0, 0)] * (m.ndim - 1) + [(0, -count % size)]
        count = -(-count // size)
        m = jnp.pad(m, padding, constant_values=1).reshape(*m.shape[:-1], count, size)
        e = jnp.pad(e, padding).reshape(*e.shape[:-1], count, size)
        m, e = _normalize(jnp.prod(m, axis=-1), jnp.sum(e, axis=-1))
    return m.squeeze(-1), e.squeeze(-1)


def cumprod_scaled(pair: ScaledPair, dim_index: int, reverse: bool) -> ScaledPair:
    """The cumulative product along a dimension."""
    return lax.associative_scan(multiply_scaled, pair, axis=dim_index, reverse=reverse)


def _normalize(m: jax.Array, e: jax.Array) -> ScaledPair:
    shift = lax.stop_gradient(jnp.frexp(lax.stop_gradient(m))[1])
    shift = pvary(shift, varying_axes(m))  # in JAX 0.12 the type of the exponent does not vary
    return _ldexp(m, -shift), e + shift


def _ldexp(m: jax.Array, e: jax.Array) -> jax.Array:
    """m · 2^e in two steps, because 2^e may overflow where the product does not, and 0 · ∞ is NaN."""
    limit = 2 * (jnp.finfo(m.dtype).maxexp - 2)  # beyond it the result is infinite or zero in any case
    e = jnp.clip(lax.stop_gradient(e), -limit, limit)
    one = jnp.ones((), m.dtype)
    half = e // 2
    return m * jnp.ldexp(one, half) * jnp.ldexp(one, e - half)
