"""Padding: sizes need not divide the mesh; the rest of the last slices is filled with zeros.

A dim of size n over k devices has blocks of ⌈n/k⌉ positions, and the last ones may be padding. Padding is
zero in values and in cotangents, so sums and products need no mask. An op that does not map zero to zero
masks its result with `fill_padding`; unmasked, `sqrt(x @ w)` gives NaN gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from . import collectives
from .collectives import Axes
from .context import active
from .dims import Dim
from .layout import Splits
from .types import preserves_type


def block_start(axes: Axes, block: int) -> jax.Array | int:
    """The global position at which this device's block starts."""
    return collectives.axis_index(axes) * block if axes else 0


def global_positions(dim: Dim, axes: Axes) -> jax.Array:
    """The global positions of this device's block, as int32."""
    ctx = active.context
    block = ctx.slice_size(dim, axes)
    return lax.iota(jnp.int32, block) + jnp.int32(block_start(axes, block))


def is_uneven(dim: Dim, axes: Axes) -> bool:
    """Whether some device's block of this dim has padding."""
    return bool(axes) and dim.size % active.context.ways(axes) != 0


def valid_mask(dims: Sequence[Dim], splits: Splits, only: Iterable[Dim] | None = None) -> jax.Array | None:
    """True where a slice has an element and False where it has padding; None if there is no padding.

    Args:
      dims: the slice's dims.
      splits: the axes that split them.
      only: consider the padding of these dims only.
    """
    mask = None
    for position, (dim, axes) in enumerate(zip(dims, splits, strict=True)):
        if is_uneven(dim, axes) and (only is None or dim in only):
            valid = global_positions(dim, axes) < dim.size
            # Broadcastable: no mask of the full shape is materialized.
            valid = valid.reshape([-1 if p == position else 1 for p in range(len(dims))])
            mask = valid if mask is None else mask & valid
    return mask


@preserves_type
def fill_padding(
    array: Any,
    dims: Sequence[Dim],
    splits: Splits,
    value: ArrayLike = 0,
    only: Iterable[Dim] | None = None,
) -> jax.Array:
    """The slice with its padding set to a value, by default zero."""
    mask = valid_mask(dims, splits, only)
    if mask is None:
        return array
    # Explicit casts, so that `where` inserts none: all operands vary over the same axes.
    axes = collectives.varying_axes(array) | collectives.varying_axes(mask)
    array = collectives.pvary(array, axes)
    filling = jnp.asarray(value, array.dtype)
    return jnp.where(collectives.pvary(mask, axes), array, collectives.pvary(filling, axes))


@preserves_type
def safe_padding(array: jax.Array, dims: Sequence[Dim], splits: Splits, dim: Dim) -> jax.Array:
    """The slice with padding along a dim that is safe for a function that is infinite at zero.

    Padding becomes a copy of the block's first position, or ones if that is padding too. Its gradient is
    dropped.
    """
    mask = valid_mask(dims, splits, only=[dim])
    if mask is None:
        return array
    position = dims.index(dim)
    mask = collectives.pvary(mask, collectives.varying_axes(array))
    has_element, first = (lax.slice_in_dim(a, 0, 1, axis=position) for a in (mask, lax.stop_gradient(array)))
    return jnp.where(mask, array, jnp.where(has_element, first, jnp.ones((), array.dtype)))
