"""Checks of random keys, which are JAX's: `jax.random.key(seed)`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..core.describe import format_argument
from ..core.errors import TensorTypeError


def check_key(key: object) -> None:
    """Raise an error unless the argument is a single key."""
    if not is_prng_key(key):
        shape = f"an array of shape {tuple(key.shape)}" if hasattr(key, "shape") else format_argument(key)
        raise TensorTypeError(
            f"{shape} is not a key",
            rule="random functions take a single JAX key; the same key gives the same numbers",
            hint="key = jax.random.key(0); for several keys: first, second = jax.random.split(key)",
        )


def is_prng_key(key: object) -> bool:
    """Whether the argument is a single JAX key: typed, or raw (`uint32[2]`)."""
    if not isinstance(key, jax.Array):
        return False
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key.shape == ()
    return key.dtype == jnp.uint32 and key.shape == (2,)
