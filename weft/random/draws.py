"""Random tensors that do not depend on the layout.

Every element is drawn by its index in the global tensor (`random/threefry.py`), so a draw is the same bits
on every mesh and under every layout, without communication. `bits`, `uniform` and `normal` equal
`jax.random`'s. Keys are JAX's: `jax.random.key(seed)`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..core import context
from ..core.dims import as_dims
from ..core.errors import ShapeError, TensorTypeError, python_number_error
from ..core.op import op
from ..core.operands import as_slice, slice_tensor
from ..core.padding import block_start, fill_padding
from ..core.placement import canonical_dtype
from ..core.signature import NUMBER_TYPES
from ..core.tensor import Tensor
from ..ops.elementwise import elementwise
from ..ops.sorting import argmax
from . import keys, threefry

BIT_WIDTHS = (8, 16, 32, 64)


def _draw(draw: Any, key: Any, dims: Any, *options: Any) -> Tensor:
    """A tensor of which every device draws its own block."""
    dims = as_dims(dims)
    keys.check_key(key)
    program = context.require()
    splits = program.splits(dims)
    sizes = program.slice_shape(dims, splits)
    starts = tuple(block_start(axes, n) for axes, n in zip(splits, sizes, strict=True))
    whole, begins, pieces = _undealt(program, dims, starts, sizes)
    array = draw(key, whole, begins, pieces, *options).reshape(sizes)
    return slice_tensor(fill_padding(array, dims, splits), dims)


def _undealt(program: Any, dims: Any, starts: Any, sizes: Any) -> tuple[Any, Any, Any]:
    """The shape of the whole draw, and where a block of it begins and what its size is.

    Row b of part m of a dim that is dealt to M parts is row b·M + m of the whole, which is place [b, m] of
    the same elements in shape (…, b, M, …).
    """
    found = []
    for dim, start, size in zip(dims, starts, sizes, strict=True):
        found.append((dim.size, start, size))
        if dim in program.partial_dims:
            parts, number = program.partial_dims[dim]
            found.append((parts.size, number, 1))
    return tuple(zip(*found, strict=True)) if found else ((), (), ())  # type: ignore[return-value]


@op
def bits(key: Any, dims: Any, bit_width: int = 32) -> Tensor:
    """Random bits as unsigned integers, equal to `jax.random.bits`."""
    if str(bit_width) not in map(str, BIT_WIDTHS):
        raise TensorTypeError(
            f"bits of width {bit_width!r}",
            rule=f"an unsigned integer has {', '.join(map(str, BIT_WIDTHS[:-1]))} or {BIT_WIDTHS[-1]} bits",
            hint="wf.random.bits(key, dims, 32)",
        )
    return _draw(threefry.block_bits, key, dims, bit_width)


@op
def uniform(key: Any, dims: Any, low: float = 0.0, high: float = 1.0, dtype: Any = jnp.float32) -> Tensor:
    """Uniform numbers in [low, high), equal to `jax.random.uniform`.

    >>> import jax, weft as wf
    >>> x = wf.random.uniform(jax.random.key(0), "a=3")
    >>> bool((x.array == jax.random.uniform(jax.random.key(0), (3,))).all())
    True
    """
    return _draw(threefry.block_uniform, key, dims, dtype, low, high)


@op
def normal(key: Any, dims: Any, dtype: Any = jnp.float32) -> Tensor:
    """Standard normal numbers, equal to `jax.random.normal`."""
    return _draw(threefry.block_normal, key, dims, dtype)


@op
def truncated_normal(
    key: Any, dims: Any, low: float = -2.0, high: float = 2.0, dtype: Any = jnp.float32
) -> Tensor:
    """Standard normal numbers between two bounds."""
    canonical_dtype(dtype)
    root = jnp.asarray(2.0, dtype) ** 0.5
    bounds = jnp.asarray(low, dtype), jnp.asarray(high, dtype)

    def draw(key: Any, shape: Any, starts: Any, sizes: Any) -> Any:
        edges = (jax.lax.erf(bound / root) for bound in bounds)
        drawn = threefry.block_uniform(key, shape, starts, sizes, dtype, *edges)
        drawn = root * jax.lax.erf_inv(drawn)
        inside = jnp.nextafter(*bounds), jnp.nextafter(*bounds[::-1])
        return jax.lax.optimization_barrier(jnp.clip(drawn, *inside))

    return _draw(draw, key, dims)


@op
def gumbel(key: Any, dims: Any, dtype: Any = jnp.float32) -> Tensor:
    """Gumbel numbers: `-log(-log(uniform))`."""
    canonical_dtype(dtype)
    tiny = jnp.finfo(dtype).tiny

    def draw(key: Any, shape: Any, starts: Any, sizes: Any) -> Any:
        drawn = threefry.block_uniform(key, shape, starts, sizes, dtype, tiny, 1.0)
        return jax.lax.optimization_barrier(-jnp.log(-jnp.log(drawn)))

    return _draw(draw, key, dims)


@op(numbers="dynamic")
def bernoulli(key: Any, dims: Any, p: Any = 0.5) -> Tensor:
    """True with probability p, a number or a tensor."""
    drawn = _draw(threefry.block_uniform, key, dims, jnp.float32)
    return elementwise(jnp.less, [drawn, p], keeps_zero=False)


@op
def randint(key: Any, dims: Any, low: int, high: int, dtype: Any = jnp.int32) -> Tensor:
    """Whole numbers in [low, high), each as likely as any other to within 2⁻³².

    For spans up to 2¹⁶ they equal `jax.random.randint`'s, which is biased beyond that; but not in types of
    64 bits, for which JAX draws other bits.
    """
    dtype, span = canonical_dtype(dtype), int(high) - int(low)
    if not 0 < span < 2**32:
        raise ShapeError(
            f"there is no whole number in [{low}, {high}), or 2³² of them or more",
            rule="randint draws from low up to, not including, high",
            hint="check the bounds",
        )
    held = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else None
    if held and not held.min <= int(low) < int(high) <= held.max + 1:
        raise ShapeError(
            f"[{low}, {high}) is not within the range of {dtype}",
            rule=f"the numbers of this type are {held.min} to {held.max}",
            hint="draw in a wider type",
        )
    keys.check_key(key)
    size, (first, second) = jnp.uint32(span), jax.random.split(key)

    def draw(_: Any, *where: Any) -> Any:
        # 64 random bits modulo the span, in two words of 32.
        upper, lower = (threefry.block_bits(k, *where) % size for k in (first, second))
        number = _add_modular(_times_modular(upper, 2**32 % span, span), lower, size)
        return number.astype(dtype) + jnp.asarray(low, dtype)

    return _draw(draw, key, dims)


def _times_modular(number: Any, factor: int, span: int) -> Any:
    """number · factor modulo span, in 32 bits."""
    size = jnp.uint32(span)
    if span <= 2**16:
        return number * jnp.uint32(factor) % size
    total, power = jnp.zeros_like(number), number
    while factor:  # by doubling, as the product would not fit
        total = _add_modular(total, power, size) if factor & 1 else total
        power = _add_modular(power, power, size)
        factor >>= 1
    return total


def _add_modular(a: Any, b: Any, size: Any) -> Any:
    total = a + b
    return jnp.where((total < a) | (total >= size), total - size, total)


@op
def categorical(key: Any, logits: Tensor, dim: Any) -> Tensor:
    """A place of a dim, drawn with the probabilities `softmax(logits)`."""
    logits = as_slice(logits)
    noise = gumbel(key, logits.dims, jnp.float32)
    return argmax(elementwise(jnp.add, [logits, noise]), dim)


@op
def dropout(x: Tensor, rate: float, key: Any) -> Tensor:
    """x with a share of its elements set to zero and the others scaled up to make good for it.

    Args:
      rate: the probability that an element is dropped.
      key: which elements; the same ones under every layout.

    >>> import jax, weft as wf
    >>> wf.dropout(wf.ones("a=6"), 0.5, jax.random.key(0))
    f32[a=6] [0., 0., 2., 2., 0., 2.]
    """
    x = as_slice(x)
    if isinstance(rate, bool) or not isinstance(rate, NUMBER_TYPES):
        rule = "a rate is a number; the arguments are a tensor, a rate and a key, in this order"
        hint = "dropout(x, 0.1, key)"
        if keys.is_prng_key(rate):
            raise TensorTypeError("the rate of dropout is a key", rule=rule, hint=hint)
        raise python_number_error(TensorTypeError, "the rate of dropout", rate, rule=rule, hint=hint)
    if not 0 <= rate < 1:
        raise ShapeError(
            f"the rate of dropout is {rate}",
            rule="a rate is a probability of at least 0 and less than 1",
            hint="dropout(x, 0.1, key)",
        )
    if rate == 0:
        return elementwise(lambda a: a, [x])
    kept = bernoulli(key, x.dims, 1.0 - rate)
    return elementwise(lambda a, k: jnp.where(k, a / (1.0 - rate), 0), [x, kept])
