"""Turns a key and the place of a block into that block of `jax.random`'s draw, and nothing else of it.

`jax.random` (threefry, `jax_threefry_partitionable=True`, the default) gives element n of a draw the bits
`threefry(key, n)`, where n is the element's index in row-major order as a 64-bit number. A device that knows
where its block lies in the true shape can therefore compute its own elements, without communication, and every
layout gives the same numbers. In a draw of shape (3, 4) the block of starts (1, 2) and sizes (2, 2) holds

    n = [[1*4+2, 1*4+3],     = [[ 6,  7],
         [2*4+2, 2*4+3]]        [10, 11]]

Starts may be traced (they come from `lax.axis_index`); shapes and sizes are static. Elements of a block that lie
outside the true shape are padding: they hold some number, which the caller masks.

All 64-bit numbers are pairs (high, low) of uint32, because without `jax_enable_x64` JAX has no uint64.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p
from jax.typing import ArrayLike, DTypeLike

Words = tuple[jax.Array, jax.Array]


def block_bits(
    key: jax.Array, shape: tuple[int, ...], starts: tuple[ArrayLike, ...], sizes: tuple[int, ...], bit_width: int = 32
) -> jax.Array:
    """The block at `starts` of `jax.random.bits(key, shape, uint{bit_width})`, bit for bit.

    >>> key = jax.random.key(0)
    >>> block_bits(key, (3, 4), (1, 2), (2, 2)) == jax.random.bits(key, (3, 4), "uint32")[1:3, 2:4]
    Array([[ True,  True],
           [ True,  True]], dtype=bool)
    """
    if bit_width not in (8, 16, 32, 64):
        raise ValueError(f"bits of width {bit_width}: only 8, 16, 32 and 64 exist")
    dtype = _available(f"uint{bit_width}")
    first, second = _key_words(key)
    high, low = threefry2x32_p.bind(first, second, *_block_index(shape, starts, sizes))
    # The primitive's result type forgets the mesh axes that its operands vary over (jax 0.10.2): say them again,
    # or shard_map would take the blocks of different devices for copies of one value.
    axes = frozenset[str]().union(*(_varying(x) for x in (key, *starts))) - _varying(low)
    if axes:
        high, low = (lax.pcast(word, tuple(axes), to="varying") for word in (high, low))
    if dtype.itemsize == 8:
        return high.astype(dtype) << jnp.asarray(32, dtype) | low.astype(dtype)
    return (high ^ low).astype(dtype)


def block_uniform(
    key: jax.Array,
    shape: tuple[int, ...],
    starts: tuple[ArrayLike, ...],
    sizes: tuple[int, ...],
    dtype: DTypeLike = float,
    low: ArrayLike = 0.0,
    high: ArrayLike = 1.0,
) -> jax.Array:
    """The block at `starts` of `jax.random.uniform(key, shape, dtype, low, high)`; `low` and `high` are scalars."""
    dtype = _available_float(dtype)
    bits = block_bits(key, shape, starts, sizes, _bits_drawn(dtype))
    return _uniform(bits, low, high, dtype)


def block_normal(
    key: jax.Array,
    shape: tuple[int, ...],
    starts: tuple[ArrayLike, ...],
    sizes: tuple[int, ...],
    dtype: DTypeLike = float,
) -> jax.Array:
    """The block at `starts` of `jax.random.normal(key, shape, dtype)`, bit for bit."""
    dtype = _available_float(dtype)
    bits = block_bits(key, shape, starts, sizes, _bits_drawn(dtype))
    return _normal(bits, dtype)


# From bits to floats: the same operations in the same order as jax/_src/random/core.py. Each is one jit, because
# jax.random's are: run one by one, its products and sums would not be fused and could round otherwise. Each ends
# with a barrier: without it XLA moves what follows (`normal * 0.02`) into the draw, and how depends on the layout.


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def _uniform(bits: jax.Array, low: ArrayLike, high: ArrayLike, dtype: np.dtype) -> jax.Array:
    return lax.optimization_barrier(_scaled(bits, low, high, dtype))


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def _normal(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    one = np.array(1, dtype)
    # Neither end may be -1 or 1, where erf_inv is infinite; `high` is never drawn.
    uniform = _scaled(bits, np.nextafter(-one, np.array(0, dtype), dtype=dtype), one, dtype)
    return lax.optimization_barrier(np.array(np.sqrt(2), dtype) * lax.erf_inv(uniform))


def _scaled(bits: jax.Array, low: ArrayLike, high: ArrayLike, dtype: np.dtype) -> jax.Array:
    low, high = lax.convert_element_type(low, dtype), lax.convert_element_type(high, dtype)
    # Random mantissa under the exponent of 1 is uniform in [1, 2).
    info, unsigned = jnp.finfo(dtype), np.dtype(f"uint{8 * dtype.itemsize}")
    mantissa = bits.astype(unsigned) >> jnp.asarray(_bits_drawn(dtype) - info.nmant, unsigned)
    one_to_two = lax.bitcast_convert_type(mantissa | jnp.asarray(np.array(1, dtype).view(unsigned)), dtype)
    unit = one_to_two - jnp.array(1, dtype)
    return jnp.maximum(low, unit * (high - low) + low)


def _bits_drawn(dtype: np.dtype) -> int:
    """bfloat16 has 7 bits of mantissa, and JAX draws 8 bits for it."""
    return 8 if jnp.finfo(dtype).nmant < 8 else 8 * dtype.itemsize


# The index of each element, as the 64-bit counter.


def _block_index(shape: tuple[int, ...], starts: tuple[ArrayLike, ...], sizes: tuple[int, ...]) -> Words:
    assert len(shape) == len(starts) == len(sizes), (shape, starts, sizes)
    index = _words(0)
    for dim, (start, size) in enumerate(zip(starts, sizes)):
        column = [size if other == dim else 1 for other in range(len(shape))]
        within = lax.broadcasted_iota(jnp.uint32, column, dim)
        position = _add(_words(start), (jnp.zeros_like(within), within))
        index = _add(index, _multiply(position, _words(math.prod(shape[dim + 1 :]))))
    high, low = index
    return jnp.broadcast_to(high, sizes), jnp.broadcast_to(low, sizes)


def _words(number: ArrayLike) -> Words:
    if isinstance(number, (int, np.integer)):  # may exceed what an array can hold without x64
        return jnp.uint32(int(number) >> 32 & 0xFFFFFFFF), jnp.uint32(int(number) & 0xFFFFFFFF)
    number = jnp.asarray(number)
    low = number.astype(jnp.uint32)
    high = (number >> 32).astype(jnp.uint32) if number.dtype.itemsize == 8 else jnp.zeros_like(low)
    return high, low


def _add(a: Words, b: Words) -> Words:
    low = a[1] + b[1]
    carry = (low < b[1]).astype(jnp.uint32)  # the sum wrapped around exactly if it is less than a summand
    return a[0] + b[0] + carry, low


def _multiply(a: Words, b: Words) -> Words:
    return lax.mulhi(a[1], b[1]) + a[0] * b[1] + a[1] * b[0], a[1] * b[1]


# What may be asked for.


def _key_words(key: jax.Array) -> Words:
    name = jax.random.key_impl(key)
    if name != "threefry2x32":
        raise ValueError(
            f"a draw with a key of {name}\n"
            "  only threefry keys give layout-invariant draws: their numbers depend on each element's index alone\n"
            'hint: make the key with jax.random.key(seed, impl="threefry2x32")'
        )
    data = jnp.asarray(jax.random.key_data(key))
    if data.shape != (2,):
        raise ValueError(f"a draw takes one key, not an array of keys of shape {data.shape[:-1]}\nhint: use vmap")
    return data[0], data[1]


def _available(dtype: DTypeLike) -> np.dtype:
    """The dtype that JAX gives for `dtype`: without x64, 64 bits become 32, and JAX warns."""
    return jnp.zeros((), dtype).dtype


def _available_float(dtype: DTypeLike) -> np.dtype:
    dtype = _available(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"a draw of {dtype}: only floating-point numbers can be drawn uniform or normal")
    return dtype


def _varying(x: ArrayLike) -> frozenset[str]:
    """The mesh axes over which x differs from device to device, in shard_map's types."""
    return jax.typeof(x).manual_axis_type.varying
