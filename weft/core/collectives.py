"""Collectives: the only file that calls `jax.lax`'s.

Each takes an array and the mesh axes, and nothing of names. JAX's types say over which axes an array
*varies* (holds different values on different devices). They catch a sum that was forgotten, not one
that was made twice: `psum` of a value that does not vary multiplies it, so that is asserted here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import linear_call
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .types import constant_like, preserves_type

Axes = tuple[str, ...]


def varying_axes(array: Any) -> frozenset[str]:
    """The axes over which an array varies."""
    return jax.typeof(array).mat.varying


def _check(array: Any, axes: Axes) -> None:
    missing = set(axes) - varying_axes(array)
    assert not missing, f"a collective over {missing}, over which {jax.typeof(array)} doesn't vary"


@preserves_type
def pvary(array: Any, axes: Iterable[str]) -> Any:
    """The same values, typed as varying; its transpose is the sum over the axes."""
    missing = tuple(sorted(set(axes) - varying_axes(array)))
    return lax.pcast(array, missing, to="varying") if missing else array


def axis_index(axes: Axes) -> Any:
    """This device's place along the axes, counted with the last axis fastest."""
    return lax.axis_index(axes if len(axes) > 1 else axes[0]) if axes else 0


@preserves_type
def all_reduce(array: Any, axes: Axes) -> Any:
    """The sum over the axes."""
    _check(array, axes)
    return lax.psum(array, axes)


@preserves_type
def all_reduce_max(array: Any, axes: Axes) -> Any:
    """The maximum over the axes; it has no derivative."""
    _check(array, axes)
    return lax.pmax(lax.stop_gradient(array), axes)


@preserves_type
def all_reduce_min(array: Any, axes: Axes) -> Any:
    """The minimum over the axes; it has no derivative."""
    _check(array, axes)
    return lax.pmin(lax.stop_gradient(array), axes)


@preserves_type
def all_gather(array: Any, axes: Axes, position: int, *, stays_varying: Iterable[str] = ()) -> Any:
    """The pieces of one position put together.

    The result still varies over the axes in `stays_varying`: there the transpose is a
    reduce-scatter; over the others it is a local slice.
    """
    _check(array, axes)
    stays = set(stays_varying)
    rest = list(axes)
    while rest:  # the last axis is the fastest, so the pieces come together from there
        run = [rest.pop()]
        while rest and (rest[-1] in stays) == (run[0] in stays):
            run.insert(0, rest.pop())
        to = "varying" if run[0] in stays else "invarying"
        array = lax.all_gather(array, tuple(run), axis=position, tiled=True, to=to)
    return array


@preserves_type
def reduce_scatter(array: Any, axes: Axes, position: int) -> Any:
    """The sum over the axes, of which each device keeps its piece of one position."""
    _check(array, axes)
    return lax.psum_scatter(array, axes, scatter_dimension=position, tiled=True)


@preserves_type
def all_to_all(array: Any, axes: Axes, split: int, join: int) -> Any:
    """One position is cut and its pieces sent out; those received are joined at another."""
    _check(array, axes)
    # XLA refuses pieces in different memory orders, which it chooses itself when it sees that one of them is
    # padding and nothing else; the barriers, one of them for the transpose, keep it from looking.
    array = lax.optimization_barrier(array)
    array = lax.all_to_all(array, axes, split_axis=split, concat_axis=join, tiled=True)
    return lax.optimization_barrier(array)


@preserves_type
def permute(array: Any, axes: Axes, pairs: Sequence[tuple[int, int]]) -> Any:
    """Send arrays from device to device along the axes; who receives nothing has zeros."""
    _check(array, axes)
    # Unlike the other collectives, ppermute counts devices in the mesh's order of the axes.
    order = [a for a in jax.sharding.get_abstract_mesh().axis_names if a in axes]
    sizes = [lax.axis_size(a) for a in axes]
    places = np.arange(math.prod(sizes)).reshape(sizes).transpose([axes.index(a) for a in order])
    number = np.argsort(places.ravel()).tolist()  # of a device in our order: in the mesh's
    return lax.ppermute(array, tuple(order), [(number[a], number[b]) for a, b in pairs])


@preserves_type
def local_slice(array: Any, axes: Axes, position: int, block: int, *, plain: bool = False) -> Any:
    """This device's block of one position: no traffic, and an all-gather as its transpose.

    JAX's own transpose of a slice of an unvarying value is an all-reduce of zeros around the piece;
    `plain` leaves it at that, for under vmap, where `linear_call` has no rule.
    """

    def piece(array: Any) -> Any:
        start = axis_index(axes) * block
        return lax.dynamic_slice_in_dim(array, start, block, position)

    gathered = set(axes) & varying_axes(array)
    if plain or gathered or not jnp.issubdtype(array.dtype, jnp.inexact):
        return piece(pvary(array, axes))
    return linear_call(
        lambda _, x: piece(pvary(x, axes)),
        lambda _, x: all_gather(x, axes, position),
        (),
        array,
    )


# From one device to all


@preserves_type
def to_stage(array: Any, axes: Axes, place: int, *, plain: bool = False) -> Any:
    """What is the same on all devices, for use by the one at this place alone: no traffic.

    Its transpose passes what that device has on to the others; `plain` is for under vmap, where there is no
    rule for that, and sums instead.
    """
    if plain:
        varied = pvary(array, axes)
        return jnp.where(axis_index(axes) == place, varied, lax.stop_gradient(varied))
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return pvary(array, axes)
    return linear_call(lambda _, x: pvary(x, axes), lambda _, x: _passed_on(x, axes, place), (), array)


@preserves_type
def from_stage(array: Any, axes: Axes, place: int, *, plain: bool = False) -> Any:
    """What the device at this place has, along its first position piece by piece, passed on to all.

    Its transpose is no traffic.
    """

    def here(_: Any, x: Any) -> Any:
        own = axis_index(axes) == place
        return jnp.where(own, pvary(x, axes), constant_like(0, x))

    if plain:
        return all_reduce(here(None, array), axes)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return _passed_on(array, axes, place)
    return linear_call(lambda _, x: _passed_on(x, axes, place), here, (), array)


def _passed_on(array: Any, axes: Axes, place: int) -> Any:
    """In a ring: at every tick each device hands on the piece that it has just been given."""
    count = math.prod(lax.axis_size(a) for a in axes)
    if count == 1:
        return assume_replicated(array, axes)
    pieces = array.shape[0]
    away = (axis_index(axes) - place) % count
    ring = [((place + n) % count, (place + n + 1) % count) for n in range(count - 1)]

    def tick(carry: tuple[Any, Any], now: Any) -> tuple[tuple[Any, Any], None]:
        held, found = carry
        own = lax.dynamic_index_in_dim(array, jnp.minimum(now, pieces - 1), keepdims=False)
        held = permute(jnp.where(away == 0, own, held), axes, ring)
        number = now - away + 1
        new = (away > 0) & (number >= 0) & (number < pieces)
        number = jnp.clip(number, 0, pieces - 1)
        before = lax.dynamic_index_in_dim(found, number, keepdims=False)
        return (held, lax.dynamic_update_index_in_dim(found, jnp.where(new, held, before), number, 0)), None

    (_, found), _ = lax.scan(tick, (array[0], array), jnp.arange(pieces + count - 2))
    return assume_replicated(found, axes)


# JAX has no way to say that what devices came by one from another is the same on all of them.
_alike = Primitive("alike")
_alike.def_impl(lambda x, **_: x)
_alike.def_abstract_eval(
    lambda x, axes: x.update(manual_axis_type=x.mat.update(varying=x.mat.varying - {*axes}))
)
mlir.register_lowering(_alike, lambda _, x, **__: [x])
batching.primitive_batchers[_alike] = lambda xs, dims, axes: (_alike.bind(*xs, axes=axes), dims[0])


def _alike_jvp(primals: Any, _: Any, axes: Axes) -> tuple[Any, Any]:
    """Whole numbers have a derivative of nothing; floats are met inside `linear_call` alone."""
    assert not jnp.issubdtype(primals[0].dtype, jnp.inexact)
    same = _alike.bind(*primals, axes=axes)
    return same, ad.Zero(jax.typeof(same).to_tangent_aval())


ad.primitive_jvps[_alike] = _alike_jvp


@preserves_type
def assume_replicated(array: Any, axes: Axes) -> Any:
    """The same values, typed as the same along the axes, which has to be true; floats have no derivative."""
    _check(array, axes)
    return _alike.bind(array, axes=axes)
