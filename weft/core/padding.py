"""Padding: sizes need not divide, and what fills a slice up is always zero.

A dim of size n over k devices has blocks of ⌈n/k⌉ places; the last ones may be padding. It is zero in values
and in cotangents, so that sums and products need no mask. What is not zero at zero is masked here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from . import collectives, context
from .collectives import Axes
from .dims import Dim
from .layout import Splits
from .types import preserves_type


def block_start(axes: Axes, block: int) -> Any:
    """Where this device's block begins in the whole dim."""
    return collectives.axis_index(axes) * block if axes else 0


def global_positions(dim: Dim, axes: Axes) -> Any:
    """The places of this device's block in the whole dim, as int32."""
    program = context.require()
    block = program.slice_size(dim, axes)
    return lax.iota(jnp.int32, block) + jnp.int32(block_start(axes, block))


def is_uneven(dim: Dim, axes: Axes) -> bool:
    """Whether some device's block of this dim has padding."""
    return bool(axes) and dim.size % context.require().ways(axes) != 0


def valid_mask(dims: Sequence[Dim], splits: Splits, only: Iterable[Dim] | None = None) -> Any:
    """True where a slice holds an element and False where it is padding; None if nowhere."""
    mask = None
    for position, (dim, axes) in enumerate(zip(dims, splits, strict=True)):
        if is_uneven(dim, axes) and (only is None or dim in only):
            here = global_positions(dim, axes) < dim.size
            here = here.reshape([-1 if p == position else 1 for p in range(len(dims))])
            mask = here if mask is None else mask & here
    return mask


@preserves_type
def fill_padding(
    array: Any,
    dims: Sequence[Dim],
    splits: Splits,
    value: Any = 0,
    only: Iterable[Dim] | None = None,
) -> Any:
    """The slice with its padding set to a value, by default back to zero."""
    mask = valid_mask(dims, splits, only)
    if mask is None:
        return array
    axes = collectives.varying_axes(array) | collectives.varying_axes(mask)
    array = collectives.pvary(array, axes)
    filling = jnp.asarray(value, array.dtype)
    return jnp.where(collectives.pvary(mask, axes), array, collectives.pvary(filling, axes))


@preserves_type
def safe_padding(array: Any, dims: Sequence[Dim], splits: Splits, dim: Dim) -> Any:
    """The slice with padding along a dim that a function may be given, one that is infinite at zero.

    It is a copy of the first place of the block, or ones where that is padding too. Its gradient is dropped.
    """
    mask = valid_mask(dims, splits, only=[dim])
    if mask is None:
        return array
    place = dims.index(dim)
    mask = collectives.pvary(mask, collectives.varying_axes(array))
    true, copied = (lax.slice_in_dim(a, 0, 1, axis=place) for a in (mask, lax.stop_gradient(array)))
    return jnp.where(mask, array, jnp.where(true, copied, jnp.ones((), array.dtype)))
