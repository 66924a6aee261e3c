"""Collectives: the only module that calls `jax.lax`'s collectives.

Each function takes an array and mesh axes, and knows nothing of dims. JAX's types record the axes over which
an array *varies* (has different values on different devices). They catch a missing sum, but not a duplicate
one: `psum` of a value that does not vary multiplies it by the number of devices, so that is asserted here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .jax_compat import Primitive, ad, batching, linear_call, mlir, varying_axes_of, without_varying
from .types import constant_like, preserves_type

Axes = tuple[str, ...]


def varying_axes(array: jax.Array) -> frozenset[str]:
    """The axes over which an array varies."""
    return varying_axes_of(jax.typeof(array))


def _check_varies(array: jax.Array, axes: Axes) -> None:
    missing = set(axes) - varying_axes(array)
    assert not missing, f"a collective over {missing}, over which {jax.typeof(array)} doesn't vary"


def pvary(array: jax.Array, axes: Iterable[str]) -> Any:
    """The same values, typed as varying over the axes. The transpose is the sum over the axes."""
    # pcast raises an error for an axis over which the array already varies. Sorted, because sets of strings
    # are ordered differently in each process, and all processes must compile the same program.
    missing = tuple(sorted(set(axes) - varying_axes(array)))
    return lax.pcast(array, missing, to="varying") if missing else array


def axis_index(axes: Axes) -> Any:
    """This device's index along the axes, the last axis fastest."""
    return lax.axis_index(axes if len(axes) > 1 else axes[0]) if axes else 0


def all_reduce(array: jax.Array, axes: Axes) -> Any:
    """The sum over the axes."""
    _check_varies(array, axes)
    return lax.psum(array, axes)


# JAX has no derivative for pmax and pmin; ops with a gradient at the maximum define their own rule.


def all_reduce_max(array: jax.Array, axes: Axes) -> Any:
    """The maximum over the axes. It has no derivative."""
    _check_varies(array, axes)
    return lax.pmax(lax.stop_gradient(array), axes)


def all_reduce_min(array: jax.Array, axes: Axes) -> Any:
    """The minimum over the axes. It has no derivative."""
    _check_varies(array, axes)
    return lax.pmin(lax.stop_gradient(array), axes)


def all_gather(array: jax.Array, axes: Axes, position: int, *, stays_varying: Iterable[str] = ()) -> Any:
    """Concatenate the slices along one position.

    The result still varies over the axes in `stays_varying`: there the transpose is a reduce-scatter. Over
    the others it is a local slice.
    """
    _check_varies(array, axes)
    stays = set(stays_varying)
    rest = list(axes)
    # lax.all_gather has one result type for all its axes, so axes are gathered in runs of equal type. The
    # last axis is the fastest, so the runs are taken from the end.
    while rest:
        run = [rest.pop()]
        while rest and (rest[-1] in stays) == (run[0] in stays):
            run.insert(0, rest.pop())
        to = "varying" if run[0] in stays else "invarying"
        array = lax.all_gather(array, tuple(run), axis=position, tiled=True, to=to)
    return array


def reduce_scatter(array: jax.Array, axes: Axes, position: int) -> Any:
    """The sum over the axes, split along one position: each device keeps its slice."""
    _check_varies(array, axes)
    return lax.psum_scatter(array, axes, scatter_dimension=position, tiled=True)


@preserves_type  # the only collective of jax.lax that makes weak types strong (0.10.2)
def all_to_all(array: jax.Array, axes: Axes, split: int, join: int) -> Any:
    """Split one position over the axes, and concatenate the received slices along another."""
    _check_varies(array, axes)
    # XLA rejects slices in different memory layouts. It chooses different ones when it can see that one of
    # the slices is all padding. The barriers hide that; the second one is for the transpose.
    array = lax.optimization_barrier(array)
    array = lax.all_to_all(array, axes, split_axis=split, concat_axis=join, tiled=True)
    return lax.optimization_barrier(array)


def permute(array: jax.Array, axes: Axes, pairs: Sequence[tuple[int, int]]) -> Any:
    """Send arrays from device to device along the axes; a device that receives nothing gets zeros."""
    _check_varies(array, axes)
    # Unlike the other collectives, ppermute numbers devices in the mesh's order of the axes.
    order = [a for a in jax.sharding.get_abstract_mesh().axis_names if a in axes]
    sizes = [lax.axis_size(a) for a in axes]
    devices = np.arange(math.prod(sizes)).reshape(sizes).transpose([axes.index(a) for a in order])
    number = np.argsort(devices.ravel()).tolist()  # inverted: `pairs` have our numbers, not the mesh's
    return lax.ppermute(array, tuple(order), [(number[a], number[b]) for a, b in pairs])


@preserves_type
def local_slice(array: jax.Array, axes: Axes, position: int, block: int, *, plain: bool = False) -> Any:
    """This device's block of one position. It sends nothing, and its transpose is an all-gather.

    JAX's own transpose of slicing an unvarying value pads the slice with zeros and all-reduces it. `plain`
    selects that; it is needed under vmap, where `linear_call` has no batching rule.
    """

    def block_of(x: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, axis_index(axes) * block, block, position)

    # The cotangent of an array that varies over the axes varies too, but an all-gather returns one
    # that does not. Integers have no cotangent.
    is_varying = set(axes) & varying_axes(array)
    if plain or is_varying or not jnp.issubdtype(array.dtype, jnp.inexact):
        return block_of(pvary(array, axes))
    return linear_call(
        lambda _, x: block_of(pvary(x, axes)),
        lambda _, x: all_gather(x, axes, position),
        (),
        array,
    )


@preserves_type
def to_stage(array: jax.Array, axes: Axes, stage: int, *, plain: bool = False) -> Any:
    """A replicated value, for use on the devices of one stage only. It sends nothing.

    Its transpose broadcasts that stage's cotangent to the others. `plain` sums the cotangents instead; it is
    needed under vmap, where `linear_call` has no batching rule.
    """
    if plain:
        varied = pvary(array, axes)
        return jnp.where(axis_index(axes) == stage, varied, lax.stop_gradient(varied))
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return pvary(array, axes)
    return linear_call(lambda _, x: pvary(x, axes), lambda _, x: _broadcast(x, axes, stage), (), array)


@preserves_type
def from_stage(array: jax.Array, axes: Axes, stage: int, *, plain: bool = False) -> Any:
    """Broadcast one stage's value to all, chunk by chunk along its first position.

    Its transpose sends nothing.
    """

    def masked(_: object, x: jax.Array) -> jax.Array:
        return jnp.where(axis_index(axes) == stage, pvary(x, axes), constant_like(0, x))

    if plain:
        return all_reduce(masked(None, array), axes)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return _broadcast(array, axes, stage)
    return linear_call(lambda _, x: _broadcast(x, axes, stage), masked, (), array)


def _broadcast(array: jax.Array, axes: Axes, stage: int) -> Any:
    """Broadcast from one device around a ring: at each tick a device forwards the chunk it has received.

    Each link carries the array once. An all-reduce of a masked value would carry it almost twice.
    """
    count = math.prod(lax.axis_size(a) for a in axes)
    if count == 1:
        return assume_replicated(array, axes)
    chunks = array.shape[0]
    distance = (axis_index(axes) - stage) % count
    # The ring is open: its last device would send the stage's own array back to it.
    ring = [((stage + n) % count, (stage + n + 1) % count) for n in range(count - 1)]

    def tick(carry: tuple[jax.Array, jax.Array], now: jax.Array) -> tuple[tuple[Any, Any], None]:
        chunk, found = carry
        own = lax.dynamic_index_in_dim(array, jnp.minimum(now, chunks - 1), keepdims=False)
        chunk = permute(jnp.where(distance == 0, own, chunk), axes, ring)
        number = now - distance + 1
        is_new = (distance > 0) & (number >= 0) & (number < chunks)
        number = jnp.clip(number, 0, chunks - 1)
        before = lax.dynamic_index_in_dim(found, number, keepdims=False)
        found = lax.dynamic_update_index_in_dim(found, jnp.where(is_new, chunk, before), number, 0)
        return (chunk, found), None

    # Chunk m arrives at distance d in tick m + d - 1. The last chunk at the farthest device is the last tick.
    (_, found), _ = lax.scan(tick, (array[0], array), jnp.arange(chunks + count - 2))
    return assume_replicated(found, axes)


# After the broadcast all devices have the same values, but these came through ppermute, whose result varies.
# JAX has no cast from varying to unvarying, hence a primitive.
_assume_replicated = Primitive("assume_replicated")
_assume_replicated.def_impl(lambda x, **_: x)
_assume_replicated.def_abstract_eval(lambda x, axes: without_varying(x, frozenset(axes)))
mlir.register_lowering(_assume_replicated, lambda _, x, **__: [x])
batching.primitive_batchers[_assume_replicated] = lambda xs, dims, axes: (
    _assume_replicated.bind(*xs, axes=axes),
    dims[0],
)


def _assume_replicated_jvp(primals: Sequence[jax.Array], _: object, axes: Axes) -> tuple[Any, Any]:
    """The tangent of integers is zero. Floats occur only inside `linear_call`, which needs no rule."""
    assert not jnp.issubdtype(primals[0].dtype, jnp.inexact)
    same = _assume_replicated.bind(*primals, axes=axes)
    return same, ad.Zero(jax.typeof(same).to_tangent_aval())


ad.primitive_jvps[_assume_replicated] = _assume_replicated_jvp


@preserves_type
def assume_replicated(array: jax.Array, axes: Axes) -> Any:
    """The same values, typed as replicated along the axes. The caller guarantees that they are.

    It has no derivative for floats.
    """
    _check_varies(array, axes)
    return _assume_replicated.bind(array, axes=axes)
