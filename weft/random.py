"""Random tensors that do not depend on the layout.

Every element is drawn by its place in the whole tensor (`counter.py`), so a draw is the same, bit for bit,
on every mesh and under every layout, without traffic. `bits`, `uniform` and `normal` equal `jax.random`'s.
Keys are JAX's: `jax.random.key(seed)`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from . import context, counter
from .dims import as_dims
from .errors import ShapeError, TensorTypeError
from .forms import as_slice, fill_padding, slice_tensor, start_of
from .ops.elementwise import elementwise
from .ops.order import argmax
from .spmd import op
from .tensor import Tensor


def _draw(draw: Any, key: Any, dims: Any) -> Tensor:
    """A tensor of which every device draws its own block."""
    dims = as_dims(dims)
    _check_key(key)
    program = context.require()
    splits = program.splits(dims)
    shape = tuple(d.size for d in dims)
    sizes = tuple(program.slice_size(d, axes) for d, axes in zip(dims, splits, strict=True))
    starts = tuple(start_of(axes, n) for axes, n in zip(splits, sizes, strict=True))
    try:
        array = draw(key, shape, starts, sizes)
    except ValueError as error:
        said, _, hint = str(error).partition("hint:")
        fact, _, rule = said.strip().partition("\n")
        raise TensorTypeError(fact, rule=rule.strip(), hint=hint.strip()) from None
    return slice_tensor(fill_padding(array, dims, splits), dims)


def _check_key(key: Any) -> None:
    if not _is_key(key):
        shape = f"an array of shape {tuple(key.shape)}" if hasattr(key, "shape") else repr(key)
        raise TensorTypeError(
            f"{shape} is not a key",
            rule="draws take one key of JAX's, and the same key gives the same numbers",
            hint="key = jax.random.key(0); several: first, second = jax.random.split(key)",
        )


def _is_key(key: Any) -> bool:
    if not isinstance(key, jax.Array):
        return False
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key.shape == ()
    return key.dtype == jnp.uint32 and key.shape == (2,)


@op
def bits(key: Any, dims: Any, bit_width: int = 32) -> Tensor:
    """Random bits as unsigned integers, equal to `jax.random.bits`."""
    return _draw(lambda *where: counter.block_bits(*where, bit_width), key, dims)


@op
def uniform(
    key: Any, dims: Any, low: float = 0.0, high: float = 1.0, dtype: Any = jnp.float32
) -> Tensor:
    """Uniform numbers in [low, high), equal to `jax.random.uniform`.

    >>> import jax, weft as wf
    >>> x = wf.random.uniform(jax.random.key(0), "a=3")
    >>> bool((x.array == jax.random.uniform(jax.random.key(0), (3,))).all())
    True
    """
    return _draw(lambda *where: counter.block_uniform(*where, dtype, low, high), key, dims)


@op
def normal(key: Any, dims: Any, dtype: Any = jnp.float32) -> Tensor:
    """Standard normal numbers, equal to `jax.random.normal`."""
    return _draw(lambda *where: counter.block_normal(*where, dtype), key, dims)


@op
def truncated_normal(
    key: Any, dims: Any, low: float = -2.0, high: float = 2.0, dtype: Any = jnp.float32
) -> Tensor:
    """Standard normal numbers between two bounds."""
    root = jnp.asarray(2.0, dtype) ** 0.5
    low, high = jnp.asarray(low, dtype), jnp.asarray(high, dtype)

    def draw(*where: Any) -> Any:
        edges = jax.lax.erf(low / root), jax.lax.erf(high / root)
        drawn = root * jax.lax.erf_inv(counter.block_uniform(*where, dtype, *edges))
        inside = jnp.nextafter(low, high), jnp.nextafter(high, low)
        return jax.lax.optimization_barrier(jnp.clip(drawn, *inside))

    return _draw(draw, key, dims)


@op
def gumbel(key: Any, dims: Any, dtype: Any = jnp.float32) -> Tensor:
    """Gumbel numbers: `-log(-log(uniform))`."""
    tiny = jnp.finfo(dtype).tiny

    def draw(*where: Any) -> Any:
        drawn = counter.block_uniform(*where, dtype, tiny, 1.0)
        return jax.lax.optimization_barrier(-jnp.log(-jnp.log(drawn)))

    return _draw(draw, key, dims)


@op(numbers="dynamic")
def bernoulli(key: Any, dims: Any, p: Any = 0.5) -> Tensor:
    """True with probability p, a number or a tensor."""
    drawn = _draw(lambda *where: counter.block_uniform(*where, jnp.float32), key, dims)
    return elementwise(jnp.less, [drawn, p], False, False)


@op
def randint(key: Any, dims: Any, low: int, high: int, dtype: Any = jnp.int32) -> Tensor:
    """Whole numbers in [low, high), each as likely as the others to within 2⁻³²."""
    span = int(high) - int(low)
    if not 0 < span <= 2**32:
        raise ShapeError(
            f"there is no whole number in [{low}, {high}), or more than 2³² of them",
            rule="randint draws from low up to, not including, high",
            hint="check the bounds",
        )
    _check_key(key)
    first, second = jax.random.split(key)

    def draw(_: Any, *where: Any) -> Any:
        # 64 random bits modulo the span, in two words: 2³² mod span carries the upper one.
        if span == 2**32:
            return counter.block_bits(second, *where).astype(dtype) + jnp.asarray(low, dtype)
        size = jnp.uint32(span)
        upper = counter.block_bits(first, *where) % size
        lower = counter.block_bits(second, *where) % size
        number = _modular(upper, 2**32 % span, span) + lower.astype(jnp.uint32)
        number = jnp.where((number < lower) | (number >= size), number - size, number)
        return number.astype(dtype) + jnp.asarray(low, dtype)

    return _draw(draw, key, dims)


def _modular(number: Any, factor: int, span: int) -> Any:
    """number · factor modulo span, in 32 bits: by doubling, as the product would overflow."""
    size, total, power = jnp.uint32(span), jnp.zeros_like(number), number
    while factor:
        if factor & 1:
            total = _add_modular(total, power, size)
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
    return argmax(elementwise(jnp.add, [logits, noise], True, False), dim)


@op
def dropout(x: Tensor, rate: float, key: Any) -> Tensor:
    """x with a share of its elements set to zero and the others scaled up to make good for it.

    Args:
      rate: the probability that an element is dropped.
      key: which elements; the same ones under every layout.
    """
    x = as_slice(x)
    if not 0 <= rate < 1:
        raise ShapeError(
            f"the rate of dropout is {rate}",
            rule="a rate is a probability of at least 0 and less than 1",
            hint="dropout(x, 0.1, key)",
        )
    if rate == 0:
        return x
    kept = bernoulli(key, x.dims, 1.0 - rate)
    return elementwise(lambda a, k: jnp.where(k, a / (1.0 - rate), 0), [x, kept], True, False)
