"""Random tensors that do not depend on the layout.

The bits of an element are a function of the key and of its index in the global tensor (`random/threefry.py`).
So a draw is bit-identical on every mesh and under every layout, without communication. `bits`, `uniform` and
`normal` equal those of `jax.random`. Keys are JAX's: `jax.random.key(seed)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ..core.context import Context, active
from ..core.dims import Dim, DimLike, DimsLike, as_dims
from ..core.errors import ShapeError, TensorTypeError, python_number_error
from ..core.op import op
from ..core.operands import as_slice, slice_tensor
from ..core.padding import block_start, fill_padding
from ..core.placement import canonical_dtype
from ..core.signature import NUMBER_TYPES
from ..core.tensor import Tensor
from ..ops.elementwise import elementwise
from ..ops.sorting import argmax
from ..ops.typing import ArrayFn, Operand
from . import keys, threefry
from .threefry import Shape, Starts

BIT_WIDTHS = (8, 16, 32, 64)


def _draw(block_draw: ArrayFn, key: jax.Array, dims: DimsLike, *options: DTypeLike | ArrayLike) -> Tensor:
    """A random tensor of which every device draws its own block.

    Args:
      block_draw: a function `(key, shape, starts, sizes, *options)` as in `random/threefry.py`.
      key: a JAX key.
      dims: the dims of the tensor.
      options: further arguments of `block_draw`.
    """
    dims = as_dims(dims)
    keys.check_key(key)
    ctx = active.context
    splits = ctx.splits(dims)
    sizes = ctx.slice_shape(dims, splits)
    starts = tuple(block_start(axes, n) for axes, n in zip(splits, sizes, strict=True))
    block = _block_of_batch(ctx, dims, starts, sizes)
    array = block_draw(key, *block, *options).reshape(sizes)
    return slice_tensor(fill_padding(array, dims, splits), dims)


def _block_of_batch(
    ctx: Context, dims: Sequence[Dim], starts: Starts, sizes: Shape
) -> tuple[Shape, Starts, Shape]:
    """The shape of the global draw, and the starts and sizes of a block.

    In a pipeline, row b of micro-batch m of M is row b·M + m of the batch, which is element [b, m] if the
    batch is reshaped to (…, b, M, …).
    """
    blocks: list[tuple[int, ArrayLike, int]] = []
    for dim, start, size in zip(dims, starts, sizes, strict=True):
        blocks.append((dim.size, start, size))
        if dim in ctx.pipeline.partial_dims:
            parts, number = ctx.pipeline.partial_dims[dim]
            blocks.append((parts.size, number, 1))
    return tuple(zip(*blocks, strict=True)) if blocks else ((), (), ())  # type: ignore[return-value]


@op(example=lambda op, key: op(key, "a=6 b=3"))
def bits(key: jax.Array, dims: DimsLike, bit_width: int = 32) -> Tensor:
    """Random bits as unsigned integers, equal to `jax.random.bits`."""
    if str(bit_width) not in map(str, BIT_WIDTHS):
        raise TensorTypeError(
            f"bits of width {bit_width!r}",
            rule=f"an unsigned integer has {', '.join(map(str, BIT_WIDTHS[:-1]))} or {BIT_WIDTHS[-1]} bits",
            hint="wf.random.bits(key, dims, 32)",
        )
    return _draw(threefry.block_bits, key, dims, bit_width)


@op(example=lambda op, key: op(key, "a=6 b=3", -1.0, 2.0))
def uniform(
    key: jax.Array, dims: DimsLike, low: float = 0.0, high: float = 1.0, dtype: DTypeLike = jnp.float32
) -> Tensor:
    """Uniform random numbers in [low, high), equal to `jax.random.uniform`.

    >>> import jax, weft as wf
    >>> x = wf.random.uniform(jax.random.key(0), "a=3")
    >>> bool((x.array == jax.random.uniform(jax.random.key(0), (3,))).all())
    True
    """
    return _draw(threefry.block_uniform, key, dims, dtype, low, high)


@op(example=lambda op, key: op(key, "a=6 b=3"))
def normal(key: jax.Array, dims: DimsLike, dtype: DTypeLike = jnp.float32) -> Tensor:
    """Standard normal random numbers, equal to `jax.random.normal`."""
    return _draw(threefry.block_normal, key, dims, dtype)


@op(example=lambda op, key: op(key, "a=6 b=3"))
def truncated_normal(
    key: jax.Array, dims: DimsLike, low: float = -2.0, high: float = 2.0, dtype: DTypeLike = jnp.float32
) -> Tensor:
    """Standard normal random numbers in (low, high)."""
    canonical_dtype(dtype)
    sqrt2 = jnp.asarray(2.0, dtype) ** 0.5
    bounds = jnp.asarray(low, dtype), jnp.asarray(high, dtype)

    def block_draw(key: jax.Array, shape: Shape, starts: Starts, sizes: Shape) -> jax.Array:
        erf_bounds = (jax.lax.erf(bound / sqrt2) for bound in bounds)
        drawn = threefry.block_uniform(key, shape, starts, sizes, dtype, *erf_bounds)
        drawn = sqrt2 * jax.lax.erf_inv(drawn.reshape(-1))
        inside = jnp.nextafter(*bounds), jnp.nextafter(*bounds[::-1])  # rounding may reach a bound
        return jax.lax.optimization_barrier(jnp.clip(drawn, *inside)).reshape(sizes)

    return _draw(block_draw, key, dims)


@op(example=lambda op, key: op(key, "a=6 b=3"))
def gumbel(key: jax.Array, dims: DimsLike, dtype: DTypeLike = jnp.float32) -> Tensor:
    """Gumbel random numbers: `-log(-log(uniform))`."""
    canonical_dtype(dtype)
    tiny = jnp.finfo(dtype).tiny  # log(0) is infinite

    def block_draw(key: jax.Array, shape: Shape, starts: Starts, sizes: Shape) -> jax.Array:
        drawn = threefry.block_uniform(key, shape, starts, sizes, dtype, tiny, 1.0).reshape(-1)
        return jax.lax.optimization_barrier(-jnp.log(-jnp.log(drawn))).reshape(sizes)

    return _draw(block_draw, key, dims)


@op(example=lambda op, key: op(key, "a=6 b=3", 0.3), numbers="dynamic")
def bernoulli(key: jax.Array, dims: DimsLike, p: Operand = 0.5) -> Tensor:
    """Random booleans that are true with probability p, a number or a tensor."""
    drawn = _draw(threefry.block_uniform, key, dims, jnp.float32)
    return elementwise(jnp.less, [drawn, p], keeps_zero=False)


@op(example=lambda op, key: op(key, "a=6 b=3", -3, 9))
def randint(key: jax.Array, dims: DimsLike, low: int, high: int, dtype: DTypeLike = jnp.int32) -> Tensor:
    """Random integers in [low, high), uniform to within 2⁻³².

    For spans up to 2¹⁶ they equal those of `jax.random.randint`, which is biased for larger spans. In 64-bit
    dtypes they differ, because JAX draws other bits.
    """
    dtype, span = canonical_dtype(dtype), int(high) - int(low)
    if not 0 < span < 2**32:
        raise ShapeError(
            f"[{low}, {high}) has {span} integers" if span > 0 else f"[{low}, {high}) is empty",
            rule="randint draws from [low, high), which has between 1 and 2³² - 1 integers",
            hint="check the bounds",
        )
    limits = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else None
    if limits and not limits.min <= int(low) < int(high) <= limits.max + 1:
        raise ShapeError(
            f"[{low}, {high}) is not within the range of {dtype}",
            rule=f"the range of this dtype is {limits.min} to {limits.max}",
            hint="draw in a wider dtype",
        )
    keys.check_key(key)
    size, (first, second) = jnp.uint32(span), jax.random.split(key)

    def block_draw(_: jax.Array, shape: Shape, starts: Starts, sizes: Shape) -> jax.Array:
        # 64 random bits modulo the span, in two words of 32 bits.
        high_word, low_word = (threefry.block_bits(k, shape, starts, sizes) % size for k in (first, second))
        number = _add_modular(_multiply_modular(high_word, 2**32 % span, span), low_word, size)
        return number.astype(dtype) + jnp.asarray(low, dtype)

    return _draw(block_draw, key, dims)


def _multiply_modular(number: jax.Array, factor: int, span: int) -> jax.Array:
    """number · factor modulo span, in 32 bits."""
    size = jnp.uint32(span)
    if span <= 2**16:
        return number * jnp.uint32(factor) % size
    total, power = jnp.zeros_like(number), number
    while factor:  # by repeated doubling, because the product does not fit into 32 bits
        total = _add_modular(total, power, size) if factor & 1 else total
        power = _add_modular(power, power, size)
        factor >>= 1
    return total


def _add_modular(a: jax.Array, b: jax.Array, size: jax.Array) -> jax.Array:
    total = a + b  # a total below a summand has wrapped around
    return jnp.where((total < a) | (total >= size), total - size, total)


@op(example=lambda op, key, x: op(key, x, "a"), mixes_rows=True)
def categorical(key: jax.Array, logits: Tensor, dim: DimLike) -> Tensor:
    """Sample an index along a dim with the probabilities `softmax(logits)`."""
    logits = as_slice(logits)
    noise = gumbel(key, logits.dims, jnp.float32)
    return argmax(elementwise(jnp.add, [logits, noise]), dim)


@op(example=lambda op, x, key: op(x, 0.5, key), split_invariant=True)
def dropout(x: Tensor, rate: float, key: jax.Array) -> Tensor:
    """Set random elements of `x` to zero, and scale the others by 1 / (1 - rate).

    Args:
      x: a tensor.
      rate: the probability that an element is dropped.
      key: a JAX key. It selects the same elements under every layout.

    >>> import jax, weft as wf
    >>> wf.dropout(wf.ones("a=6"), 0.5, jax.random.key(0))
    f32[a=6] [0., 0., 2., 2., 0., 2.]
    """
    x = as_slice(x)
    if isinstance(rate, bool) or not isinstance(rate, NUMBER_TYPES):
        rule = "the rate is a number; the arguments are a tensor, a rate and a key, in this order"
        hint = "dropout(x, 0.1, key)"
        if keys.is_prng_key(rate):
            raise TensorTypeError("the rate of dropout is a key", rule=rule, hint=hint)
        raise python_number_error(TensorTypeError, "the rate of dropout", rate, rule=rule, hint=hint)
    if not 0 <= rate < 1:
        raise ShapeError(
            f"the rate of dropout is {rate}",
            rule="the rate is a probability, at least 0 and less than 1",
            hint="dropout(x, 0.1, key)",
        )
    if rate == 0:
        return elementwise(lambda a: a, [x])
    mask = bernoulli(key, x.dims, 1.0 - rate)
    return elementwise(lambda a, m: jnp.where(m, a / (1.0 - rate), 0), [x, mask])
