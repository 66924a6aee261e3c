"""Types: jax.numpy decides the type of an op's result; everything around the op keeps it.

A type is a dtype and whether it is *weak*. Python's numbers have weak types, and so has an array made of
nothing else: `where(mask, 0.0, -1e9)` is a weak float32, which gives way to bfloat16 in
`x + where(mask, 0.0, -1e9)`. In JAX a result is weak only if all operands are: one zero of a strong type,
added as padding, makes it strong.

Padding, halos, relayouts and collectives depend on the layout, and types must not. So these functions are
declared with `preserves_type`: their result has the type of their first argument. An op with different code
for a split dim gives both results one type by `cast_like`, or fills with `constant_like` of the array's type.

>>> import jax.numpy as jnp
>>> weak = jnp.arange(3) * 0.5
>>> weak_type(weak), weak_type(weak + jnp.zeros((), jnp.float32)), weak_type(weak + constant(0, weak))
(True, False, True)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

PyTree = Any  # a tree of containers that JAX knows, with tensors or arrays as leaves

Function = TypeVar("Function", bound=Callable[..., Any])


def weak_type(array: Any) -> bool:
    """Whether an array, or what stands for one, has a weak type."""
    return bool(getattr(array, "weak_type", False))


def cast_like(array: Any, like: Any) -> Any:
    """The array with the dtype and the weak type of another."""
    if array.dtype == like.dtype and weak_type(array) == weak_type(like):
        return array
    # lax.convert_element_type makes every type strong; its primitive does not.
    return lax.convert_element_type_p.bind(
        jnp.asarray(array), new_dtype=like.dtype, weak_type=weak_type(like), sharding=None
    )


def constant_like(value: Any, like: Any) -> Any:
    """A number as an array of the dtype and the weak type of another."""
    return cast_like(jnp.asarray(value, like.dtype), like)


def common_type(*arrays: Any) -> Any:
    """The type of arrays that are put together, for `typed`."""
    scalars = [jax.ShapeDtypeStruct((), a.dtype, weak_type=weak_type(a)) for a in arrays]
    return jax.eval_shape(lambda *each: jnp.stack(each), *scalars)


def preserves_type(fn: Function) -> Function:
    """Give what a function returns the type of its first argument."""

    @functools.wraps(fn)
    def call(array: Any, *args: Any, **kwargs: Any) -> Any:
        return cast_like(fn(array, *args, **kwargs), array)

    return call  # type: ignore[return-value]
