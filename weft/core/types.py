"""Types: jax.numpy decides the type of an op's result; the machinery around the op preserves it.

A type is a dtype and a flag that says whether it is *weak*. Python numbers have weak types, and so do arrays
computed from them alone: `where(mask, 0.0, -1e9)` is a weak float32, which gives way to bfloat16 in
`x + where(mask, 0.0, -1e9)`. In JAX a result is weak only if all operands are: adding a single strong zero
as padding makes it strong.

Padding, halos, reshards and collectives depend on the layout, and types must not. These functions are
therefore decorated with `preserves_type`: the result has the type of the first argument. An op with
different code for a split dim gives both results the same type with `cast_like`, or fills with a
`constant_like` the array.

>>> import jax.numpy as jnp
>>> weak = jnp.arange(3) * 0.5
>>> weak_type(weak), weak_type(weak + jnp.zeros((), jnp.float32)), weak_type(weak + constant_like(0, weak))
(True, False, True)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

PyTree = Any  # a JAX pytree; Python's type system cannot express nested containers of unknown depth

Function = TypeVar("Function", bound=Callable[..., Any])
# A function that Weft transforms keeps its parameters and its result for type checkers; `Tree` and `Out` are
# pytrees that come out with the structure that they went in with.
Params = ParamSpec("Params")
Result = TypeVar("Result")
Tree = TypeVar("Tree")
Out = TypeVar("Out")


class Typed(Protocol):
    """Anything with a dtype: an array, a tracer, a Tensor or a `jax.ShapeDtypeStruct`."""

    @property
    def dtype(self) -> Any: ...


def weak_type(array: object) -> bool:
    """Whether an array, or a placeholder for one, has a weak type."""
    return bool(getattr(array, "weak_type", False))


def cast_like(array: Any, like: Typed) -> Any:
    """Cast an array to the dtype and the weak type of another."""
    if array.dtype == like.dtype and weak_type(array) == weak_type(like):
        return array
    # lax.convert_element_type makes every type strong; its primitive does not.
    return lax.convert_element_type_p.bind(
        jnp.asarray(array), new_dtype=like.dtype, weak_type=weak_type(like), sharding=None
    )


def constant_like(value: ArrayLike, like: Typed) -> Any:
    """A number as an array with the dtype and the weak type of another array."""
    return cast_like(jnp.asarray(value, like.dtype), like)


def common_type(*arrays: Typed) -> jax.ShapeDtypeStruct:
    """The type that the arrays have after promotion to each other, for `cast_like`."""
    scalars = [jax.ShapeDtypeStruct((), a.dtype, weak_type=weak_type(a)) for a in arrays]
    # jnp.result_type drops the weak type, so let JAX promote through an op.
    return jax.eval_shape(lambda *each: jnp.stack(each), *scalars)


def preserves_type(fn: Function) -> Function:
    """Decorate a function so that its result has the type of its first argument."""

    @functools.wraps(fn)
    def call(array: Typed, *args: object, **kwargs: object) -> jax.Array:
        return cast_like(fn(array, *args, **kwargs), array)

    return cast(Function, call)


def at_least_float32(dtype: DTypeLike) -> np.dtype:
    """The dtype to compute and accumulate in: float32, or the given dtype if it is wider."""
    return jnp.promote_types(dtype, jnp.float32)
