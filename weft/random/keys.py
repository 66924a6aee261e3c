"""Keys: what random draws are made from, `jax.random.key(seed)`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..core.errors import TensorTypeError


def check_key(key: Any) -> None:
    """An error unless this is one key."""
    if not is_prng_key(key):
        shape = f"an array of shape {tuple(key.shape)}" if hasattr(key, "shape") else repr(key)
        raise TensorTypeError(
            f"{shape} is not a key",
            rule="draws take one key of JAX's, and the same key gives the same numbers",
            hint="key = jax.random.key(0); several: first, second = jax.random.split(key)",
        )


def is_prng_key(key: Any) -> bool:
    """Whether this is one key of JAX's, of the new kind or the old."""
    if not isinstance(key, jax.Array):
        return False
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key.shape == ()
    return key.dtype == jnp.uint32 and key.shape == (2,)
