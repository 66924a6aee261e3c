"""Moving elements along a dim: concat, pad, shift, roll, flip.

Over a split dim every device fetches the places that its block of the result needs, by permutes of what it
lacks (`blocks.fetch`). A dim that is extended keeps its name, and with it its split, in new blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..core import collectives, context, halo
from ..core.collectives import Axes
from ..core.dims import Dim, format_dims, select_dim
from ..core.errors import DimError, ShapeError, TensorTypeError, python_number_error
from ..core.op import op
from ..core.operands import as_slice, as_slices, check_along, slice_tensor
from ..core.padding import fill_padding, global_positions
from ..core.reshard import layout_splits, reshard, reshard_together
from ..core.tensor import Tensor
from ..core.types import cast_like, common_type, constant_like
from .elementwise import align

# Putting together and extending


@op
def concat(tensors: Sequence[Tensor], dim: Any) -> Tensor:
    """Tensors one after the other along a dim that they all have; a split dim stays split.

    Args:
      tensors: one or more, alike in their other dims, whose order is that of the first.
      dim: the dim's name, or a Dim with the total size.

    >>> import weft as wf
    >>> wf.concat([wf.zeros("a=2"), wf.ones("a=3")], "a")
    f32[a=5] [0., 0., 1., 1., 1.]
    """
    slices = as_slices(tensors, "concat")
    name = dim.name if isinstance(dim, Dim) else dim
    parts = _check_parts(slices, name)
    new = Dim(name, sum(part.size for part in parts))
    if isinstance(dim, Dim) and dim != new:
        raise ShapeError(
            f"the tensors have {' + '.join(str(p.size) for p in parts)} = {new.size} places of "
            f"{name} together, and {dim} was asked",
            rule="the size of a concatenated dim is the sum of the sizes",
            hint=f'concat(tensors, "{name}") takes it from the tensors',
        )
    position = slices[0].dims.index(parts[0])
    arrays = []
    for array, t, part in zip(reshard_together(slices), slices, parts, strict=True):
        order = [part if n == position else d for n, d in enumerate(slices[0].dims)]
        arrays.append(align(array, t.dims, order))
    common = common_type(*arrays)
    arrays = [cast_like(a, common) for a in arrays]
    dims = tuple(new if n == position else d for n, d in enumerate(slices[0].dims))
    splits = context.require().splits(dims)
    axes = splits[position]
    if not axes:
        return slice_tensor(lax.concatenate(arrays, position), dims, splits)
    block = context.require().slice_size(new, axes)
    places = broadcast_mask(global_positions(new, axes), position, len(dims))
    result, offset = None, 0
    for array, part in zip(arrays, parts, strict=True):
        piece = fetch_at_offset(array, position, part, axes, offset, block)
        result = piece if result is None else where_varying(places >= offset, piece, result)
        offset += part.size
    return slice_tensor(fill_padding(result, dims, splits, only=[new]), dims, splits)


def _check_parts(slices: list[Tensor], name: str) -> list[Dim]:
    """The dim of each tensor that is to be concatenated."""
    if not slices:
        raise ShapeError(
            "concat was given no tensors",
            rule="concat puts one or more tensors together",
            hint=f'concat([x, y], "{name}")',
        )
    parts = [select_dim(t.dims, name) for t in slices]
    check_along(parts)
    others = [{d for d in t.dims if d.name != name} for t in slices]
    if any(rest != others[0] for rest in others):
        raise DimError(
            f"the tensors differ in more than {name}: "
            + ", ".join(f"[{format_dims(t.dims)}]" for t in slices),
            rule="concatenated tensors have the same dims, and the same sizes but for one",
            hint="wf.broadcast_to(x, dims) adds missing dims",
        )
    return parts


@op
def pad(x: Tensor, dim: Any, before: int, after: int, value: Any = 0) -> Tensor:
    """A dim extended at both ends, by default with zeros.

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
            f"dim {old} was to be padded by {before} before and {after} after",
            rule="pad adds places",
            hint=f'to take some away, slice: x["{old.name}", 1:-1]',
        )
    position = x.dims.index(old)
    new = old.resize(before + old.size + after)
    dims = x.dims[:position] + (new,) + x.dims[position + 1 :]
    program = context.require()
    splits = program.splits(dims)
    axes = splits[position]
    array = reshard(x)
    if not axes:
        filling = constant_like(value, array)
        edges = [(before, after, 0) if p == position else (0, 0, 0) for p in range(len(dims))]
        array = lax.pad(array, collectives.pvary(filling, collectives.varying_axes(array)), edges)
    else:
        block = program.slice_size(new, axes)
        starts = [k * block - before for k in range(program.ways(axes))]
        array = halo.halo_exchange(array, position, old, axes, starts, block)
        places = global_positions(new, axes)
        inside = (places >= before) & (places < before + old.size)
        filling = constant_like(value, array)
        array = where_varying(broadcast_mask(inside, position, len(dims)), array, filling)
    return slice_tensor(fill_padding(array, dims, splits), dims, splits)


# Shifting


@op
def shift(x: Tensor, dim: Any, by: int, wrap: bool = False) -> Tensor:
    """Every element `by` places further along a dim: `out[i] = x[i - by]`.

    Args:
      x: a tensor.
      dim: which dim.
      by: how far; negative is towards the beginning.
      wrap: whether what leaves at one end comes in at the other; else zeros come in.

    >>> import weft as wf
    >>> x = wf.arange(wf.Dim("a", 4))
    >>> wf.shift(x, "a", 1), wf.shift(x, "a", -1, wrap=True)
    (i32[a=4] [0, 0, 1, 2], i32[a=4] [1, 2, 3, 0])
    """
    x = as_slice(x)
    dim = select_dim(x.dims, dim)
    check_along([dim])
    position, splits = x.dims.index(dim), layout_splits(x)
    axes, by = splits[position], as_integer(by, "by")
    if wrap:
        array = _rolled(reshard(x), position, dim, axes, by % dim.size)
    else:
        # Padding may come in where by < 0: masked here, it gets no gradient.
        array = fill_padding(reshard(x), x.dims, splits, only=[dim])
        by = max(-dim.size, min(dim.size, by))
        block = array.shape[position]
        starts = [k * block - by for k in range(context.require().ways(axes))]
        array = halo.halo_exchange(array, position, dim, axes, starts, block)
    return slice_tensor(fill_padding(array, x.dims, splits, only=[dim]), x.dims)


@op
def roll(x: Tensor, dim: Any, by: int) -> Tensor:
    """Every element `by` places further along a dim, wrapping round, as `numpy.roll`.

    >>> import weft as wf
    >>> wf.roll(wf.arange(wf.Dim("a", 4)), "a", 1)
    i32[a=4] [3, 0, 1, 2]
    """
    return shift(x, dim, by, wrap=True)


@op
def flip(x: Tensor, dim: Any) -> Tensor:
    """A dim in reverse order.

    >>> import weft as wf
    >>> wf.flip(wf.arange(wf.Dim("a", 3)), "a")
    i32[a=3] [2, 1, 0]
    """
    x = as_slice(x)
    dim = select_dim(x.dims, dim)
    check_along([dim])
    position = x.dims.index(dim)
    return slice_tensor(flip_block(reshard(x), position, dim, layout_splits(x)[position]), x.dims)


def _rolled(array: Any, position: int, dim: Dim, axes: Axes, by: int) -> Any:
    """A block of the dim rolled by 0 ≤ by < size."""
    if by == 0:
        return array
    if not axes:
        return jnp.roll(array, by, position)
    count, block = context.require().ways(axes), array.shape[position]
    if dim.size == count * block:
        return _from_others(array, position, axes, -by, lambda k, offset: (k + offset) % count)
    # With padding the ends don't meet at a block's edge: what moves on and what comes round are two
    # ranges. The larger moves alike on all devices; of the smaller only what is wanted travels.
    onward = [k * block - by for k in range(count)]
    round_the_end = [start + dim.size for start in onward]
    if 2 * by <= dim.size:
        round_the_end = _within(round_the_end, dim, block)
    else:
        onward = _within(onward, dim, block)
    moved = halo.halo_exchange(array, position, dim.resize(dim.size - by), axes, onward, block)
    wrapped = halo.halo_exchange(array, position, dim, axes, round_the_end, block)
    return where_varying(
        broadcast_mask(global_positions(dim, axes) < by, position, array.ndim), wrapped, moved
    )


def flip_block(array: Any, position: int, dim: Dim, axes: Axes) -> Any:
    """A block of the dim in reverse order: the mirror image's block, reversed."""
    if axes:
        count, block = context.require().ways(axes), array.shape[position]
        padding = count * block - dim.size
        array = _from_others(array, position, axes, -padding, lambda k, offset: count - 1 - k + offset)
    return lax.rev(array, (position,))


def _from_others(array: Any, position: int, axes: Axes, start: int, source: Callable[[int, int], int]) -> Any:
    """A block that begins `start` places from another device's: at most two permutes.

    Args:
      start: where it begins, counted from the beginning of the block of device `source(k, 0)`.
      source: for device k and a number of blocks onward, the device that has that block; zeros if
        there is none.
    """
    count, block = context.require().ways(axes), array.shape[position]
    pieces = []
    for offset in range(start // block, (start + block - 1) // block + 1):
        low, high = max(start - offset * block, 0), min(start + block - offset * block, block)
        piece = lax.slice_in_dim(array, low, high, axis=position)
        pairs = [(source(k, offset), k) for k in range(count)]
        if any(sender != k for sender, k in pairs):
            pairs = [(sender, k) for sender, k in pairs if 0 <= sender < count]
            piece = collectives.permute(piece, axes, pairs)
        pieces.append(piece)
    return lax.concatenate(pieces, position) if len(pieces) > 1 else pieces[0]


# Shared by several


def resolve_to_layout(x: Tensor) -> Tensor:
    return slice_tensor(reshard(x), x.dims)


def array_and_pending(x: Tensor) -> tuple[Any, frozenset[str]]:
    """The array in its home form, and the axes of its sum if that is still pending."""
    if x.pending and x.splits == layout_splits(x):
        return x._array, x.pending
    return reshard(x), frozenset()


def fetch_at_offset(array: Any, position: int, dim: Dim, axes: Axes, offset: int, block: int) -> Any:
    """A tensor's places where they lie when it begins at `offset` of a dim cut into such blocks."""
    starts = [k * block - offset for k in range(context.require().ways(axes))]
    return halo.halo_exchange(array, position, dim, axes, _within(starts, dim, block), block)


def _within(starts: Sequence[int], dim: Dim, length: int) -> list[int]:
    """Starts of ranges that want nothing of the dim moved to its edge, so that nothing is sent."""
    return [max(-length, min(dim.size, start)) for start in starts]


def broadcast_mask(mask: Any, position: int, ndim: int) -> Any:
    """A row of truth values along one dimension of an array."""
    return mask.reshape([-1 if p == position else 1 for p in range(ndim)])


def where_varying(mask: Any, yes: Any, no: Any) -> Any:
    """`where`, with everything varying over the same axes."""
    axes = frozenset().union(*map(collectives.varying_axes, (mask, yes, no)))
    return jnp.where(*[collectives.pvary(a, axes) for a in (mask, yes, no)])


def as_integer(number: Any, what: str) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise python_number_error(
            TensorTypeError,
            what,
            number,
            rule=f"{what} is an integer, known when the program is traced",
            hint="to move by a tensor's value, use wf.slice and wf.update",
        ) from None
