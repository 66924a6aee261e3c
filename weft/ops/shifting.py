"""Moving elements along a dim: concat, pad, shift, roll, flip, diff.

Along a split dim every device fetches the elements of its block of the result by permutes of those it lacks
(`halo.halo_exchange`). An extended dim keeps its name, and so its split, with a new block size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import collectives, halo
from ..core.collectives import Axes
from ..core.context import active
from ..core.dims import Dim, DimLike, dim_name, format_dims, new_dim, select_dim
from ..core.errors import DimError, ShapeError, TensorTypeError, python_number_error
from ..core.op import op
from ..core.operands import as_slice, as_slices, check_along, slice_tensor
from ..core.padding import fill_padding, global_positions
from ..core.reshard import layout_splits, reshard, reshard_together
from ..core.tensor import Tensor
from ..core.types import cast_like, common_type, constant_like, weak_type
from .elementwise import align
from .typing import Number


@op(example=lambda op, x, p: op([x, p], "a"), mixes_rows=True)
def concat(tensors: Sequence[Tensor], dim: DimLike) -> Tensor:
    """Concatenate tensors along a dim that all of them have. A split dim stays split.

    Args:
      tensors: one or more tensors with the same other dims. The result has the dim order of the first.
      dim: the dim's name, or a Dim with the total size.

    >>> import weft as wf
    >>> wf.concat([wf.zeros("a=2"), wf.ones("a=3")], "a")
    f32[a=5] [0., 0., 1., 1., 1.]
    """
    slices = as_slices(tensors, "concat")
    name = dim_name(dim)
    parts = _check_parts(slices, name)
    new = Dim(name, sum(part.size for part in parts))
    if new_dim(dim, new.size) != new:
        raise ShapeError(
            f"the sizes of {name} add up to {' + '.join(str(p.size) for p in parts)} = {new.size}, and "
            f"dim= is {dim}",
            rule="the size of a concatenated dim is the sum of the sizes",
            hint=f'concat(tensors, "{name}") infers the size',
        )
    dim_index = slices[0].dims.index(parts[0])
    arrays = []
    for array, t, part in zip(reshard_together(slices), slices, parts, strict=True):
        order = [part if n == dim_index else d for n, d in enumerate(slices[0].dims)]
        arrays.append(align(array, t.dims, order))
    common = common_type(*arrays)
    arrays = [cast_like(a, common) for a in arrays]
    dims = tuple(new if n == dim_index else d for n, d in enumerate(slices[0].dims))
    splits = active.context.splits(dims)
    axes = splits[dim_index]
    if not axes:
        return slice_tensor(lax.concatenate(arrays, dim_index), dims, splits)
    block = active.context.slice_size(new, axes)
    positions = broadcast_mask(global_positions(new, axes), dim_index, len(dims))
    result, offset = None, 0
    for array, part in zip(arrays, parts, strict=True):
        chunk = fetch_at_offset(array, dim_index, part, axes, offset, block)
        result = chunk if result is None else where_varying(positions >= offset, chunk, result)
        offset += part.size
    return slice_tensor(fill_padding(result, dims, splits, only=[new]), dims, splits)


def _check_parts(slices: list[Tensor], name: str) -> list[Dim]:
    """The concatenated dim of each tensor."""
    if not slices:
        raise ShapeError(
            "concat was given no tensors",
            rule="concat takes one or more tensors",
            hint=f'concat([x, y], "{name}")',
        )
    parts = [select_dim(t.dims, name) for t in slices]
    check_along(parts)
    others = [{d for d in t.dims if d.name != name} for t in slices]
    if any(rest != others[0] for rest in others):
        raise DimError(
            f"the tensors differ in more than {name}: "
            + ", ".join(f"[{format_dims(t.dims)}]" for t in slices),
            rule="concatenated tensors have the same dims, with the same sizes except for one dim",
            hint="wf.broadcast_to(x, dims) adds missing dims",
        )
    return parts


@op(example=lambda op, x: op(x, "a", 1, 2, value=3.0), mixes_rows=True)
def pad(x: Tensor, dim: DimLike, before: int, after: int, value: Number = 0) -> Tensor:
    """Extend a dim at both ends, by default with zeros.

    >>> import weft as wf
    >>> wf.pad(wf.ones("a=2"), "a", 1, 2, value=9)
    f32[a=5] [9., 1., 1., 9., 9.]
    """
    x = as_slice(x)
    old = select_dim(x.dims, dim)
    check_along([old])
    before, after = as_integer(before, "before"), as_integer(after, "after")
    if before < 0 or after < 0:
        raise ShapeError(
            f"the padding of dim {old} is {before} before and {after} after",
            rule="the padding is not negative",
            hint=f'to remove elements, slice: x["{old.name}", 1:-1]',
        )
    dim_index = x.dims.index(old)
    new = old.resize(before + old.size + after)
    dims = x.dims[:dim_index] + (new,) + x.dims[dim_index + 1 :]
    ctx = active.context
    splits = ctx.splits(dims)
    axes = splits[dim_index]
    array = reshard(x)
    fill = constant_like(value, array)
    if not axes:
        config = [(before, after, 0) if n == dim_index else (0, 0, 0) for n in range(len(dims))]
        array = lax.pad(array, collectives.pvary(fill, collectives.varying_axes(array)), config)
    else:
        block = ctx.slice_size(new, axes)
        starts = [k * block - before for k in range(ctx.ways(axes))]
        array = halo.halo_exchange(array, dim_index, old, axes, starts, block)
        positions = global_positions(new, axes)
        inside = (positions >= before) & (positions < before + old.size)
        array = where_varying(broadcast_mask(inside, dim_index, len(dims)), array, fill)
    return slice_tensor(fill_padding(array, dims, splits), dims, splits)


@op(example=lambda op, x: op(x, "a", -1), mixes_rows=True)
def shift(x: Tensor, dim: DimLike, by: int, wrap: bool = False) -> Tensor:
    """Shift the elements along a dim: `out[i] = x[i - by]`.

    Args:
      x: a tensor.
      dim: the dim to shift along.
      by: the distance. A negative one shifts towards the beginning.
      wrap: whether elements shifted out at one end enter at the other; otherwise zeros do.

    >>> import weft as wf
    >>> x = wf.arange(wf.Dim("a", 4))
    >>> wf.shift(x, "a", 1), wf.shift(x, "a", -1, wrap=True)
    (i32[a=4] [0, 0, 1, 2], i32[a=4] [1, 2, 3, 0])
    """
    x = as_slice(x)
    dim = select_dim(x.dims, dim)
    check_along([dim])
    dim_index, splits = x.dims.index(dim), layout_splits(x)
    axes, by = splits[dim_index], as_integer(by, "by")
    if wrap:
        array = _roll_block(reshard(x), dim_index, dim, axes, by % dim.size)
    else:
        # If by < 0, padding is shifted in. Masking it here keeps gradients out of it.
        array = fill_padding(reshard(x), x.dims, splits, only=[dim])
        by = max(-dim.size, min(dim.size, by))
        block = array.shape[dim_index]
        starts = [k * block - by for k in range(active.context.ways(axes))]
        array = halo.halo_exchange(array, dim_index, dim, axes, starts, block)
    return slice_tensor(fill_padding(array, x.dims, splits, only=[dim]), x.dims)


@op(example=lambda op, x: op(x, "a", 2), mixes_rows=True)
def roll(x: Tensor, dim: DimLike, by: int) -> Tensor:
    """Roll the elements along a dim by `by` positions, like `numpy.roll`.

    >>> import weft as wf
    >>> wf.roll(wf.arange(wf.Dim("a", 4)), "a", 1)
    i32[a=4] [3, 0, 1, 2]
    """
    return shift(x, dim, by, wrap=True)


@op(example=lambda op, x: op(x, "a"), mixes_rows=True)
def flip(x: Tensor, dim: DimLike) -> Tensor:
    """Reverse the elements along a dim.

    >>> import weft as wf
    >>> wf.flip(wf.arange(wf.Dim("a", 3)), "a")
    i32[a=3] [2, 1, 0]
    """
    x = as_slice(x)
    dim = select_dim(x.dims, dim)
    check_along([dim])
    dim_index = x.dims.index(dim)
    return slice_tensor(flip_block(reshard(x), dim_index, dim, layout_splits(x)[dim_index]), x.dims)


@op(example=lambda op, x: op(x, "a", 2), mixes_rows=True)
def diff(x: Tensor, dim: DimLike, n: int = 1) -> Tensor:
    """The differences between neighbours along a dim, which becomes shorter, like `jax.numpy.diff`.

    A pending sum stays pending. If the dim is split, every device fetches the positions that its block of the
    result needs, once for all `n` repetitions.

    Args:
      x: a tensor. The difference of booleans is whether they differ.
      dim: the dim to subtract along. Its size in the result is smaller by `n`.
      n: how often to take differences.

    >>> import weft as wf
    >>> x = wf.tensor([1, 4, 9, 16], "a=4")
    >>> wf.diff(x, "a"), wf.diff(x, "a", n=2)
    (i32[a=3] [3, 5, 7], i32[a=2] [2, 2])
    """
    x = as_slice(x)
    old, n = select_dim(x.dims, dim), as_integer(n, "n", hint="choose n before the program is traced")
    check_along([old])
    if not 0 <= n < old.size:
        raise ShapeError(
            f"n is {n}, and the dim has {old.size} elements ({old})",
            rule="every difference needs one more element than it leaves, and a dim has at least one",
            hint=f"n is 0 to {old.size - 1}",
        )
    dim_index, splits, ctx = x.dims.index(old), layout_splits(x), active.context
    axes, new = splits[dim_index], old.resize(old.size - n)
    dims = tuple(new if d == old else d for d in x.dims)
    array, pending = array_and_pending(x)
    block = ctx.slice_size(new, axes)
    starts = [k * block for k in range(ctx.ways(axes))]
    array = halo.halo_exchange(array, dim_index, old, axes, starts, block + n)
    subtract = jnp.not_equal if array.dtype == jnp.bool_ else jnp.subtract
    for size in range(block + n, block, -1):
        following = lax.slice_in_dim(array, 1, size, axis=dim_index)
        array = subtract(following, lax.slice_in_dim(array, 0, size - 1, axis=dim_index))
    return slice_tensor(fill_padding(array, dims, splits, only=[new]), dims, splits, pending)


def _roll_block(array: jax.Array, dim_index: int, dim: Dim, axes: Axes, by: int) -> jax.Array:
    """This device's block of the dim rolled by 0 ≤ by < size."""
    if by == 0:
        return array
    if not axes:
        return jnp.roll(array, by, dim_index)
    count, block = active.context.ways(axes), array.shape[dim_index]
    if dim.size == count * block:
        return _fetch_block(array, dim_index, axes, -by, lambda k, offset: (k + offset) % count)
    # With padding, the ends of the dim don't meet at a block boundary: the elements that shift and those that
    # wrap around are two ranges. The larger one moves by the same offset on all devices. The smaller one is
    # sent only to the devices that need some of it.
    shifted_starts = [k * block - by for k in range(count)]
    wrapped_starts = [start + dim.size for start in shifted_starts]
    if 2 * by <= dim.size:
        wrapped_starts = _clamp_starts(wrapped_starts, dim, block)
    else:
        shifted_starts = _clamp_starts(shifted_starts, dim, block)
    shifted = halo.halo_exchange(array, dim_index, dim.resize(dim.size - by), axes, shifted_starts, block)
    wrapped = halo.halo_exchange(array, dim_index, dim, axes, wrapped_starts, block)
    wraps = broadcast_mask(global_positions(dim, axes) < by, dim_index, array.ndim)
    return where_varying(wraps, wrapped, shifted)


def flip_block(array: jax.Array, dim_index: int, dim: Dim, axes: Axes) -> jax.Array:
    """This device's block of the reversed dim: the mirrored block, reversed."""
    if axes:
        count, block = active.context.ways(axes), array.shape[dim_index]
        padding = count * block - dim.size
        array = _fetch_block(array, dim_index, axes, -padding, lambda k, offset: count - 1 - k + offset)
    return lax.rev(array, (dim_index,))


def _fetch_block(
    array: jax.Array, dim_index: int, axes: Axes, start: int, source: Callable[[int, int], int]
) -> jax.Array:
    """Fetch a block that begins `start` elements after another device's block, by at most two permutes.

    Args:
      start: the offset from the beginning of the block of device `source(k, 0)`.
      source: maps device k and an offset in blocks to the device that has that block. The result is zero if
        there is no such device.
    """
    count, block = active.context.ways(axes), array.shape[dim_index]
    chunks = []
    for offset in range(start // block, (start + block - 1) // block + 1):
        low, high = max(start - offset * block, 0), min(start + block - offset * block, block)
        chunk = lax.slice_in_dim(array, low, high, axis=dim_index)
        pairs = [(source(k, offset), k) for k in range(count)]
        if any(sender != k for sender, k in pairs):
            pairs = [(sender, k) for sender, k in pairs if 0 <= sender < count]
            chunk = collectives.permute(chunk, axes, pairs)
        chunks.append(chunk)
    return lax.concatenate(chunks, dim_index) if len(chunks) > 1 else chunks[0]


# Shared with indexing.py


def resolve_to_layout(x: Tensor) -> Tensor:
    """The tensor split by the layout, with nothing pending."""
    return slice_tensor(reshard(x), x.dims)


def array_and_pending(x: Tensor) -> tuple[jax.Array, frozenset[str]]:
    """The array split by the layout, and the axes of its sum if that can stay pending."""
    if x.pending and x.splits == layout_splits(x):
        return x._read(), x.pending
    return reshard(x), frozenset()


def fetch_at_offset(
    array: jax.Array, dim_index: int, dim: Dim, axes: Axes, offset: int, block: int
) -> jax.Array:
    """Fetch this device's block (of size `block`) of a longer dim in which `dim` starts at `offset`."""
    starts = [k * block - offset for k in range(active.context.ways(axes))]
    return halo.halo_exchange(array, dim_index, dim, axes, _clamp_starts(starts, dim, block), block)


def _clamp_starts(starts: Sequence[int], dim: Dim, length: int) -> list[int]:
    """Move ranges that are outside the dim next to its ends, so that no data is sent for them."""
    return [max(-length, min(dim.size, start)) for start in starts]


def broadcast_mask(mask: jax.Array, dim_index: int, ndim: int) -> jax.Array:
    """Reshape a one-dimensional mask so that it broadcasts along one dimension of an array."""
    return mask.reshape([-1 if n == dim_index else 1 for n in range(ndim)])


def where_varying(mask: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """`jnp.where`, with all arguments made varying over the same axes."""
    axes = frozenset().union(*map(collectives.varying_axes, (mask, x, y)))
    mask, x, y = (collectives.pvary(a, axes) for a in (mask, x, y))
    found = jnp.where(mask, x, y)
    # Of weak booleans, `jnp.where` makes strong ones; of weak numbers it does not.
    return cast_like(found, x) if weak_type(x) and weak_type(y) else found


def as_integer(
    number: int | np.integer,
    what: str,
    hint: str = "to shift by the value of a tensor, use wf.slice and wf.update",
) -> int:
    """Convert to an int, or raise an error that names the argument."""
    try:
        return operator.index(number)
    except TypeError:
        raise python_number_error(
            TensorTypeError,
            what,
            number,
            rule=f"{what} is an integer, known when the program is traced",
            hint=hint,
        ) from None
