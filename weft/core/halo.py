"""Blocks: every device fetches a range of a split dim, and only what it lacks travels.

A shift, a slice, a pad, a window, a convolution: each needs, on every device, some range of the input's
places that is mostly the device's own block, with a border of its neighbours'. `fetch` brings exactly that,
by permutes of the missing pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import collectives, context
from .collectives import Axes
from .dims import Dim
from .types import preserves_type

MAX_PERMUTES = 8  # beyond, one all-gather is fewer messages


@preserves_type
def halo_exchange(array: Any, position: int, dim: Dim, axes: Axes, starts: Sequence[int], length: int) -> Any:
    """The places `[starts[k], starts[k] + length)` of a dim on device k; zeros outside the dim.

    Args:
      array: slices, split over `axes` at `position` into equal blocks (padding zero).
      dim: the dim at that position, with its true size.
      starts: for each device along `axes` the first place wanted; may be negative.
      length: how many places each device wants.
    """
    block = array.shape[position]
    count = context.require().ways(axes)
    assert len(starts) == count
    if not axes:
        return _static_range(array, position, starts[0], length)
    if all(start == k * block + starts[0] for k, start in enumerate(starts)):
        return _same_everywhere(array, position, axes, starts[0], length, count)
    return _tabled(array, position, dim, axes, list(starts), length, count)


def _static_range(array: Any, position: int, start: int, length: int) -> Any:
    """A range of an unsplit position, zeros outside."""
    pads = [(0, 0, 0)] * array.ndim
    pads[position] = (-start, start + length - array.shape[position], 0)
    return lax.pad(array, jnp.zeros((), array.dtype), pads)


def _pairs(offset: int, count: int) -> list[tuple[int, int]]:
    """Device k receives from device k + offset."""
    return [(k + offset, k) for k in range(count) if 0 <= k + offset < count]


def _same_everywhere(array: Any, position: int, axes: Axes, start: int, length: int, count: int) -> Any:
    """Every device wants the same range relative to its own block: pieces side by side."""
    block = array.shape[position]
    pieces = []
    for offset in range(start // block, (start + length - 1) // block + 1):
        low, high = max(start, offset * block), min(start + length, (offset + 1) * block)
        piece = lax.slice_in_dim(array, low - offset * block, high - offset * block, axis=position)
        if abs(offset) >= count:
            piece = jnp.zeros_like(piece)
        elif offset:
            piece = collectives.permute(piece, axes, _pairs(offset, count))
        pieces.append(piece)
    return lax.concatenate(pieces, position) if len(pieces) > 1 else pieces[0]


def _tabled(
    array: Any, position: int, dim: Dim, axes: Axes, starts: list[int], length: int, count: int
) -> Any:
    """Devices want ranges that lie differently in their blocks: pieces by tables of places."""
    block = array.shape[position]
    plan = []  # for each offset: who sends to whom, from which place, to which place, how much
    for offset in range(1 - count, count):
        overlaps = {}
        for k, start in enumerate(starts):
            low = max(start, (k + offset) * block, 0)
            high = min(start + length, (k + offset + 1) * block, dim.size)
            if 0 <= k + offset < count and low < high:
                overlaps[k] = (low, high)
        if overlaps:
            plan.append((offset, overlaps, max(high - low for low, high in overlaps.values())))
    here = collectives.axis_index(axes)
    if len(plan) > MAX_PERMUTES:
        whole = collectives.all_gather(array, axes, position, stays_varying=axes)
        before, after = max(0, -min(starts)), max(0, max(starts) + length - whole.shape[position])
        whole = _static_range(whole, position, -before, before + whole.shape[position] + after)
        return lax.dynamic_slice_in_dim(whole, lookup_by_device(starts, here) + before, length, position)
    margin = max((size for *_, size in plan), default=0)
    shape = list(array.shape)
    shape[position] = length + 2 * margin
    result = collectives.pvary(jnp.zeros(shape, array.dtype), collectives.varying_axes(array))
    for offset, overlaps, size in plan:
        sends, lands = [0] * count, [length + margin] * count  # by default into the margin
        for k, (low, _) in overlaps.items():
            first = min(low - (k + offset) * block, block - size)
            sends[k + offset] = first
            lands[k] = margin + first + (k + offset) * block - starts[k]
        piece = lax.dynamic_slice_in_dim(array, lookup_by_device(sends, here), size, position)
        if offset:
            pairs = [(k + offset, k) for k in overlaps]
            piece = collectives.permute(piece, axes, pairs)
        result = lax.dynamic_update_slice_in_dim(result, piece, lookup_by_device(lands, here), position)
    return lax.slice_in_dim(result, margin, margin + length, axis=position)


def lookup_by_device(table: Sequence[int], here: Any) -> Any:
    """A device's own number in a table of all."""
    if not context.require().vmap_depth:
        return jnp.asarray(np.asarray(table, np.int32))[here]
    # JAX can't batch a `cond` of which a branch has an array of its own to look up in (0.10.2).
    found = jnp.int32(table[0])
    for place, number in enumerate(table[1:], 1):
        found = jnp.where(here == place, jnp.int32(number), found)
    return found
