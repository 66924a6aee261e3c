"""Index-based threefry: one block of a `jax.random` draw, without the rest.

`jax.random` (threefry, `jax_threefry_partitionable=True`, the default) gives element n of a draw the bits
`threefry(key, n)`, where n is the element's row-major index as a 64-bit integer. A device that knows the
start of its block in the global shape can therefore draw its own elements without communication, and every
layout gives the same numbers. In a draw of shape (3, 4) the block with starts (1, 2) and sizes (2, 2) has the
elements

    n = [[1*4+2, 1*4+3],  =  [[ 6,  7],
         [2*4+2, 2*4+3]]      [10, 11]]

Starts may be traced (they come from `lax.axis_index`); shapes and sizes are static. Elements of a block
outside the global shape are padding: they have arbitrary values, which the caller masks. 64-bit integers are
pairs (high, low) of uint32, because JAX has no uint64 without `jax_enable_x64`.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..core.collectives import pvary, varying_axes
from ..core.errors import TensorTypeError
from ..core.jax_compat import threefry2x32_p
from ..core.placement import canonical_dtype

Shape = tuple[int, ...]
Starts = tuple[ArrayLike, ...]
Words = tuple[jax.Array, jax.Array]


def block_bits(key: jax.Array, shape: Shape, starts: Starts, sizes: Shape, bit_width: int = 32) -> jax.Array:
    """The block at `starts` of `jax.random.bits(key, shape, uint{bit_width})`, bit for bit.

    >>> key = jax.random.key(0)
    >>> block_bits(key, (3, 4), (1, 2), (2, 2)) == jax.random.bits(key, (3, 4), "uint32")[1:3, 2:4]
    Array([[ True,  True],
           [ True,  True]], dtype=bool)
    """
    return _flat_bits(key, shape, starts, sizes, bit_width).reshape(sizes)


def _flat_bits(key: jax.Array, shape: Shape, starts: Starts, sizes: Shape, bit_width: int) -> jax.Array:
    """The bits of a block as an array of one dimension.

    Floats are computed from them in that form: XLA's CPU backend may round arrays of few and of many columns
    differently (JAX 0.12, 3 to 5 columns).
    """
    assert len(shape) == len(starts) == len(sizes), (shape, starts, sizes)
    dtype = _available(f"uint{bit_width}", jnp.unsignedinteger)
    index = _block_index(tuple(_words(start) for start in starts), tuple(shape), tuple(sizes))
    # Flatten first: XLA takes ten times as long to compile threefry's loop for five-dimensional arrays.
    high, low = threefry2x32_p.bind(*_key_words(key), *(word.reshape(-1) for word in index))
    # The result type of the primitive loses the mesh axes that its operands vary over (jax 0.10.2). Restore
    # them, or shard_map treats the blocks of different devices as replicas of one value.
    axes = frozenset[str]().union(*(varying_axes(x) for x in (key, *index)))
    high, low = (pvary(word, axes) for word in (high, low))
    if dtype.itemsize == 8:
        return high.astype(dtype) << jnp.asarray(32, dtype) | low.astype(dtype)
    return (high ^ low).astype(dtype)


def block_uniform(
    key: jax.Array,
    shape: Shape,
    starts: Starts,
    sizes: Shape,
    dtype: DTypeLike = float,
    low: ArrayLike = 0.0,
    high: ArrayLike = 1.0,
) -> jax.Array:
    """The block at `starts` of `jax.random.uniform(key, shape, dtype, low, high)`, bit for bit."""
    dtype = _available(dtype, jnp.floating)
    bits = _flat_bits(key, shape, starts, sizes, _bits_drawn(dtype))
    return _uniform(bits, low, high, dtype).reshape(sizes)


def block_normal(
    key: jax.Array, shape: Shape, starts: Starts, sizes: Shape, dtype: DTypeLike = float
) -> jax.Array:
    """The block at `starts` of `jax.random.normal(key, shape, dtype)`, bit for bit."""
    dtype = _available(dtype, jnp.floating)
    bits = _flat_bits(key, shape, starts, sizes, _bits_drawn(dtype))
    return _normal(bits, dtype).reshape(sizes)


# From bits to floats: the operations of jax/_src/random/core.py in the same order. Each function is one jit,
# as in JAX: op by op, products and sums are not fused and may round differently. Each ends in a barrier:
# without it XLA fuses the consumer (`normal * 0.02`) into the draw, differently for each layout.


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def _uniform(bits: jax.Array, low: ArrayLike, high: ArrayLike, dtype: np.dtype) -> jax.Array:
    return lax.optimization_barrier(_scaled(bits, low, high, dtype))


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def _normal(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    zero, one = np.array(0, dtype), np.array(1, dtype)
    above_minus_one = np.nextafter(-one, zero, dtype=dtype)  # erf_inv(-1) is infinite
    uniform = _scaled(bits, above_minus_one, one, dtype)
    return lax.optimization_barrier(np.array(np.sqrt(2), dtype) * lax.erf_inv(uniform))


def _scaled(bits: jax.Array, low: ArrayLike, high: ArrayLike, dtype: np.dtype) -> jax.Array:
    low, high = lax.convert_element_type(low, dtype), lax.convert_element_type(high, dtype)
    # A random mantissa under the exponent of 1 is uniform in [1, 2).
    unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
    unused = _bits_drawn(dtype) - jnp.finfo(dtype).nmant
    mantissa = bits.astype(unsigned) >> jnp.asarray(unused, unsigned)
    exponent = jnp.asarray(np.array(1, dtype).view(unsigned))
    unit = lax.bitcast_convert_type(mantissa | exponent, dtype) - jnp.array(1, dtype)
    return jnp.maximum(low, unit * (high - low) + low)


def _bits_drawn(dtype: np.dtype) -> int:
    # bfloat16 has 7 bits of mantissa, and JAX draws only 8 bits for it
    return 8 if jnp.finfo(dtype).nmant < 8 else 8 * dtype.itemsize


# The 64-bit index of each element of the block.


@functools.partial(jax.jit, static_argnames=("shape", "sizes"), inline=True)
def _block_index(starts: tuple[Words, ...], shape: Shape, sizes: Shape) -> Words:
    high = low = jnp.uint32(0)
    for dim, start in enumerate(starts):
        column = [size if other == dim else 1 for other, size in enumerate(sizes)]
        within = lax.broadcasted_iota(jnp.uint32, column, dim)
        position = _add(start, (jnp.zeros_like(within), within))
        high, low = _add((high, low), _multiply(position, _words(math.prod(shape[dim + 1 :]))))
    return jnp.broadcast_to(high, sizes), jnp.broadcast_to(low, sizes)


def _words(number: ArrayLike) -> Words:
    if isinstance(number, int | np.integer):  # may exceed 32 bits, the most that an array has without x64
        return jnp.uint32(int(number) >> 32 & 0xFFFFFFFF), jnp.uint32(int(number) & 0xFFFFFFFF)
    number = jnp.asarray(number)
    wide, low = number.dtype.itemsize == 8, number.astype(jnp.uint32)
    return (number >> 32).astype(jnp.uint32) if wide else jnp.zeros_like(low), low


def _add(a: Words, b: Words) -> Words:
    low = a[1] + b[1]
    carry = (low < b[1]).astype(jnp.uint32)  # a sum below a summand has wrapped around
    return a[0] + b[0] + carry, low


def _multiply(a: Words, b: Words) -> Words:
    # The high word of low · low, computed in 16-bit halves so that no partial sum exceeds 32 bits.
    # (lax.mulhi does not compile inside shard_map in jax 0.10.2.)
    (a1, a0), (b1, b0) = ((word >> 16, word & 0xFFFF) for word in (a[1], b[1]))
    middle = a1 * b0 + ((a0 * b0) >> 16)
    carried = a1 * b1 + (middle >> 16) + (((middle & 0xFFFF) + a0 * b1) >> 16)
    return carried + a[0] * b[1] + a[1] * b[0], a[1] * b[1]


def _key_words(key: jax.Array) -> Words:
    name, data = jax.random.key_impl(key), jax.random.key_data(key)
    if name != "threefry2x32":
        raise TensorTypeError(
            f"the key has the implementation {name}",
            rule="only threefry draws are layout-invariant: the bits are a function of the element's index",
            hint='create the key with jax.random.key(seed, impl="threefry2x32")',
        )
    if data.shape != (2,):
        raise TensorTypeError(
            f"a random function takes a single key, got keys[{data.shape[:-1]}]",
            rule="all elements of a draw come from one key",
            hint="use vmap",
        )
    return jnp.asarray(data[0]), jnp.asarray(data[1])


def _available(dtype: DTypeLike, kind: type) -> np.dtype:
    canonical_dtype(dtype)
    if not jnp.issubdtype(dtype, kind):
        raise TensorTypeError(
            f"the dtype of the draw is {jnp.dtype(dtype)}, and must be {kind.__name__}",
            rule="the dtype of a draw is one for which the distribution is defined",
            hint="convert the result: x.astype(...)",
        )
    return jnp.zeros((), dtype).dtype  # without x64, JAX warns and turns 64 bits into 32
