"""Halo exchange: each device fetches a range of positions of a split dim, and only missing data is sent.

Shifts, slices, pads, windows and convolutions need, on every device, a range of the input's positions. Most
of it is the device's own block; the borders belong to its neighbours. `halo_exchange` fetches exactly that
range, with permutes of the missing chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import collectives
from .collectives import Axes
from .context import active
from .dims import Dim
from .types import preserves_type

MAX_PERMUTES = 8  # for more chunks, one all-gather sends fewer messages


@preserves_type
def halo_exchange(
    array: jax.Array, position: int, dim: Dim, axes: Axes, starts: Sequence[int], length: int
) -> jax.Array:
    """The positions `[starts[k], starts[k] + length)` of a dim on device k, with zeros outside the dim.

    Args:
      array: a slice, split over `axes` at `position` into equal blocks (padding zero).
      position: the array's position of the dim.
      dim: the dim, with its true size.
      axes: the axes that split it.
      starts: for each device along `axes` the first position to fetch; may be negative.
      length: the number of positions that each device fetches.
    """
    block = array.shape[position]
    count = active.context.ways(axes)
    assert len(starts) == count
    if not axes:
        return _padded_range(array, position, starts[0], length)
    if all(start == k * block + starts[0] for k, start in enumerate(starts)):
        return _uniform_exchange(array, position, axes, starts[0], length, count)
    return _table_exchange(array, position, dim, axes, list(starts), length, count)


def _padded_range(array: jax.Array, position: int, start: int, length: int) -> jax.Array:
    """A range of an unsplit position, with zeros outside."""
    pads = [(0, 0, 0)] * array.ndim
    pads[position] = (-start, start + length - array.shape[position], 0)
    return lax.pad(array, jnp.zeros((), array.dtype), pads)


def _neighbour_pairs(offset: int, count: int) -> list[tuple[int, int]]:
    """Device k receives from device k + offset."""
    return [(k + offset, k) for k in range(count) if 0 <= k + offset < count]


def _uniform_exchange(
    array: jax.Array, position: int, axes: Axes, start: int, length: int, count: int
) -> jax.Array:
    """Every device fetches the same range relative to its own block: concatenate the chunks."""
    block = array.shape[position]
    chunks = []
    for offset in range(start // block, (start + length - 1) // block + 1):
        low, high = max(start, offset * block), min(start + length, (offset + 1) * block)
        chunk = lax.slice_in_dim(array, low - offset * block, high - offset * block, axis=position)
        if abs(offset) >= count:  # no device has these positions: they are outside the dim
            chunk = jnp.zeros_like(chunk)
        elif offset:
            chunk = collectives.permute(chunk, axes, _neighbour_pairs(offset, count))
        chunks.append(chunk)
    return lax.concatenate(chunks, position) if len(chunks) > 1 else chunks[0]


def _table_exchange(
    array: jax.Array, position: int, dim: Dim, axes: Axes, starts: list[int], length: int, count: int
) -> jax.Array:
    """Devices fetch ranges that are aligned differently with their blocks.

    All devices run the same program with static shapes, so for each offset between sender and receiver every
    device sends a chunk of the largest size needed. Where it starts, and where it is written, is read from
    tables by device index.
    """
    block = array.shape[position]
    # Grouped by offset: one permute serves all pairs of devices that are the same number of blocks apart.
    exchanges = []
    for offset in range(1 - count, count):
        overlaps = {}
        for k, start in enumerate(starts):
            low = max(start, (k + offset) * block, 0)
            high = min(start + length, (k + offset + 1) * block, dim.size)
            if 0 <= k + offset < count and low < high:
                overlaps[k] = (low, high)
        if overlaps:
            exchanges.append((offset, overlaps, max(high - low for low, high in overlaps.values())))
    device = collectives.axis_index(axes)
    if len(exchanges) > MAX_PERMUTES:
        gathered = collectives.all_gather(array, axes, position, stays_varying=axes)
        before, after = max(0, -min(starts)), max(0, max(starts) + length - gathered.shape[position])
        gathered = _padded_range(gathered, position, -before, before + gathered.shape[position] + after)
        return lax.dynamic_slice_in_dim(gathered, lookup_by_device(starts, device) + before, length, position)
    # Chunks may be larger than needed, so they are written into a result with a margin on both sides, which
    # is cut off in the end. A device that needs nothing writes into the right margin.
    margin = max((size for *_, size in exchanges), default=0)
    shape = list(array.shape)
    shape[position] = length + 2 * margin
    result = collectives.pvary(jnp.zeros(shape, array.dtype), collectives.varying_axes(array))
    for offset, overlaps, size in exchanges:
        sources, targets = [0] * count, [length + margin] * count
        for k, (low, _) in overlaps.items():
            # All senders send `size` positions. A start too close to the block's end would silently be
            # clamped by dynamic_slice, on the sender only.
            first = min(low - (k + offset) * block, block - size)
            sources[k + offset] = first
            targets[k] = margin + first + (k + offset) * block - starts[k]
        chunk = lax.dynamic_slice_in_dim(array, lookup_by_device(sources, device), size, position)
        if offset:
            pairs = [(k + offset, k) for k in overlaps]
            chunk = collectives.permute(chunk, axes, pairs)
        result = lax.dynamic_update_slice_in_dim(result, chunk, lookup_by_device(targets, device), position)
    return lax.slice_in_dim(result, margin, margin + length, axis=position)


def lookup_by_device(table: Sequence[int], device: jax.Array | int) -> jax.Array:
    """A device's own entry in a table with one entry per device."""
    if not active.context.vmap.depth:
        return jnp.asarray(np.asarray(table, np.int32))[device]
    # JAX can't batch a `cond` whose branch indexes a constant array (0.10.2), so select without indexing.
    found = jnp.int32(table[0])
    for n, entry in enumerate(table[1:], 1):
        found = jnp.where(device == n, jnp.int32(entry), found)
    return found
