"""Indexing, slicing and updating, at positions that may be tensors.

One element of a split dim is masked on all devices but its owner: a pending sum. A static range is fetched by
permutes of the elements that each device lacks. For a range with a traced start, every device contributes the
elements that it has, again as a pending sum.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import collectives, halo
from ..core.collectives import Axes
from ..core.context import active
from ..core.describe import format_call
from ..core.dims import (
    Dim,
    DimLike,
    as_dim,
    check_distinct,
    format_dims,
    select_dim,
    select_dims,
    union_dims,
)
from ..core.errors import DimError, ShapeError, TensorTypeError, WeftError, python_number_error
from ..core.layout import Splits
from ..core.op import op
from ..core.operands import as_slice, check_along, slice_tensor
from ..core.padding import block_start, fill_padding, global_positions
from ..core.reshard import layout_splits, reshard, reshard_together
from ..core.tensor import Tensor
from ..core.types import cast_like, constant_like
from .elementwise import align
from .shifting import (
    array_and_pending,
    as_integer,
    broadcast_mask,
    fetch_at_offset,
    flip_block,
    resolve_to_layout,
    where_varying,
)
from .typing import Operand


@dataclass(frozen=True)
class HashableSlice:
    """A Python slice that can be part of a signature. Before Python 3.12 slices are not hashable."""

    start: int | None
    stop: int | None
    step: int | None

    def positions(self, dim: Dim) -> range:
        """The positions of a dim that are selected, as in NumPy."""
        if self.step == 0:
            raise ShapeError(
                f"the slice of dim {dim} has step 0",
                rule="the step of a slice is a nonzero integer",
                hint=f'for every second element: x["{dim.name}", ::2]',
            )
        selected = range(dim.size)[builtins.slice(self.start, self.stop, self.step)]
        if not selected:
            bounds = ":".join("" if n is None else str(n) for n in (self.start, self.stop, self.step))
            raise ShapeError(
                f"the slice {bounds.removesuffix(':')} of dim {dim} is empty",
                rule="a dim has at least one element",
                hint=f"the positions are 0 to {dim.size - 1}",
            )
        return selected


Position = int | np.ndarray | jax.Array | Tensor
Selection = Position | HashableSlice  # the index of one dim
Pairs = tuple[tuple[DimLike, Selection], ...]


def index(x: Tensor, where: tuple[Any, ...]) -> Tensor:
    """Index dims by name: `x["batch", 0]` or `x["batch", 2:8, "length", -1]`.

    Args:
      x: a tensor.
      where: alternating dims and indices. An integer drops the dim; it is an error if it is out of range. A
        slice keeps the dim, resized; bounds and steps are as in NumPy. An integer tensor without dims also
        drops the dim. Its value is known only when the program runs, so it is clamped to the dim, as in JAX
        (a negative value counts from the end).

    >>> import weft as wf
    >>> x = wf.arange(wf.Dim("a", 6))
    >>> x["a", -1], x["a", 4:0:-2]
    (i32[] 5, i32[a=2] [4, 2])
    """
    try:
        pairs = _pairs(where)
        if active.context is None and isinstance(x, Tensor):
            pairs = tuple((dim, _as_operand(x, dim, selection)) for dim, selection in pairs)
        return _index(x, pairs)
    except WeftError as error:
        raise error.located(format_call("index", (x, where), {})) from None


def _pairs(where: tuple[Any, ...]) -> Pairs:
    """Convert `("batch", 0, "length", 2:8)` to hashable pairs."""
    items = where if isinstance(where, tuple) else (where,)
    if not items or len(items) % 2 or not all(isinstance(d, str | Dim) for d in items[::2]):
        raise TensorTypeError(
            f"a tensor was indexed by {format_call('', (where,), {})[1:-1]}",
            rule="an index consists of pairs of a dim and an integer, slice or integer tensor",
            hint='for example x["batch", 0], or x["batch", 2:8, "length", -1]',
        )
    return tuple((dim, _hashable(selection)) for dim, selection in zip(items[::2], items[1::2], strict=True))


def _hashable(selection: Selection | np.integer | builtins.slice) -> Selection:
    if isinstance(selection, np.integer):
        return int(selection)
    if not isinstance(selection, builtins.slice):
        return selection
    bounds = (selection.start, selection.stop, selection.step)
    try:
        return HashableSlice(*[None if n is None else operator.index(n) for n in bounds])
    except TypeError:
        invalid = next(n for n in bounds if n is not None and not isinstance(n, int | np.integer))
        raise python_number_error(
            TensorTypeError,
            "a bound of the slice",
            invalid,
            rule="a bound is an integer, because the size of a dim must be known during tracing",
            hint="wf.slice(x, dim, start, size) takes a start that is a tensor",
        ) from None


def _as_operand(x: Tensor, dim: DimLike, selection: Selection) -> Selection:
    """Convert an integer to an array, so that an eager op is compiled once and not for each integer."""
    if not isinstance(selection, int) or isinstance(selection, bool):
        return selection
    return np.asarray(_check_position(selection, select_dim(x.dims, dim)), np.int32)


def _index_lowering(x: Tensor, where: Pairs) -> Tensor:
    x = as_slice(x)
    check_along(select_dims(x.dims, [dim for dim, _ in where]))
    ranges = [(dim, selection) for dim, selection in where if isinstance(selection, HashableSlice)]
    single = [(dim, selection) for dim, selection in where if not isinstance(selection, HashableSlice)]
    # Single elements first: they leave a pending sum, and slicing it first makes the all-reduce smaller.
    for dim, position in single:
        x = _at(x, select_dim(x.dims, dim), position)
    if not single:
        x = resolve_to_layout(x)
    for dim, selection in ranges:
        old = select_dim(x.dims, dim)
        x = _strided(x, old, selection.positions(old))
    return x


_index_lowering.__name__ = "index"  # the name in errors and plans
_index = op(example=lambda op, x: op(x, ("a", 2)), mixes_rows=True)(_index_lowering)


def _at(x: Tensor, dim: Dim, position: Position) -> Tensor:
    """One element of a dim: its owner's value, as a pending sum over the axes that split the dim."""
    start = _clamp(_check_position(position, dim), dim, 1)
    dim_index = x.dims.index(dim)
    axes = layout_splits(x)[dim_index]
    array, pending = array_and_pending(x)
    block = array.shape[dim_index]
    # Every device reads the element at the same local offset; all but the owner's are masked.
    element = lax.dynamic_index_in_dim(array, start % block, dim_index, keepdims=False)
    remaining = x.dims[:dim_index] + x.dims[dim_index + 1 :]
    if axes:
        is_owner = collectives.axis_index(axes) == start // block
        element = where_varying(is_owner, element, constant_like(0, element))
    return _sum_of_parts(element, remaining, active.context.splits(remaining), axes, pending)


def _check_position(position: Position, dim: Dim) -> int | jax.Array:
    if not isinstance(position, int) or isinstance(position, bool):
        return _scalar(position, f"the index of dim {dim.name}")
    if not -dim.size <= position < dim.size:
        raise ShapeError(
            f"index {position} of dim {dim} is out of range",
            rule=f"the indices of {dim} are 0 to {dim.size - 1}, or -{dim.size} to -1 from the end",
            hint=f'x["{dim.name}", -1] is the last element',
        )
    return position


def _strided(x: Tensor, dim: Dim, positions: range) -> Tensor:
    """The elements of a dim at an arithmetic progression. A pending sum stays pending."""
    backwards = positions.step < 0
    positions = positions[::-1] if backwards else positions
    dim_index = x.dims.index(dim)
    splits = layout_splits(x)
    array, pending = array_and_pending(x)
    new = dim.resize(len(positions))
    array = _range(array, dim_index, dim, splits[dim_index], positions)
    dims = x.dims[:dim_index] + (new,) + x.dims[dim_index + 1 :]
    array = fill_padding(array, dims, splits, only=[new])
    if backwards:
        array = flip_block(array, dim_index, new, splits[dim_index])
    return slice_tensor(array, dims, splits, pending)


def _range(array: jax.Array, dim_index: int, dim: Dim, axes: Axes, positions: range) -> jax.Array:
    """This device's block of an ascending progression: fetch the range that covers it, then stride."""
    ctx = active.context
    if positions == range(dim.size):
        return array
    block = ctx.slice_size(dim.resize(len(positions)), axes)
    starts = [positions.start + k * block * positions.step for k in range(ctx.ways(axes))]
    length = (block - 1) * positions.step + 1
    # Resizing the dim to the last position that is needed keeps later elements out of the exchange.
    array = halo.halo_exchange(array, dim_index, dim.resize(positions[-1] + 1), axes, starts, length)
    return lax.slice_in_dim(array, 0, length, positions.step, dim_index)


@op(example=lambda op, x, start: op(x, "a", start, 2), mixes_rows=True)
def slice(x: Tensor, dim: DimLike, start: int | Tensor, size: int | DimLike) -> Tensor:
    """`size` elements of a dim, beginning at `start`.

    Args:
      x: a tensor.
      dim: the dim to slice.
      start: an integer or an integer tensor without dims. A negative start counts from the end. If the slice
        is not within the dim, an integer is an error. The value of a tensor is known only when the program
        runs, so it is clamped, as in `jax.lax.dynamic_slice`.
      size: the number of elements. A dim, `"b=2"`, also gives the new name.

    >>> import weft as wf
    >>> x = wf.arange(wf.Dim("a", 6))
    >>> wf.slice(x, "a", x["a", 2], 3), wf.slice(x, "a", -2, "b=2")
    (i32[a=3] [2, 3, 4], i32[b=2] [4, 5])
    """
    x = resolve_to_layout(as_slice(x))
    old = select_dim(x.dims, dim)
    check_along([old])
    new = as_dim(size) if isinstance(size, Dim | str) else old.resize(as_integer(size, "size"))
    first = _start(start, old, new)
    dim_index = x.dims.index(old)
    dims = x.dims[:dim_index] + (new,) + x.dims[dim_index + 1 :]
    check_distinct(dims)
    active.context.splits(dims)
    if isinstance(first, int):
        sliced = _strided(x, old, range(first, first + new.size))
        return slice_tensor(sliced._read(), dims, sliced.splits)  # if renamed, the consumer reshards it
    splits = layout_splits(x)
    array, axes = reshard(x), splits[dim_index]
    # The blocks that a device needs are unknown during tracing, so permutes are not an option. Each device
    # contributes what it has to a pending sum: a reduce-scatter, if the consumer splits the dim.
    if axes:
        array = _own_part(array, dim_index, axes, first, new.size)
    else:
        array = lax.dynamic_slice_in_dim(array, first, new.size, dim_index)
    unsplit = splits[:dim_index] + ((),) + splits[dim_index + 1 :]
    return _sum_of_parts(array, dims, unsplit, axes)


def _own_part(array: jax.Array, dim_index: int, axes: Axes, start: jax.Array, length: int) -> jax.Array:
    """The global positions `[start, start + length)`, with zeros where this device lacks them."""
    block = array.shape[dim_index]
    # With zeros on both sides every start is in range, and a range that misses this block reads zeros only.
    array = _pad_both(array, dim_index, length)
    first = jnp.clip(start - block_start(axes, block) + length, 0, block + length)
    return lax.dynamic_slice_in_dim(array, first, length, dim_index)


@op(example=lambda op, x, ids: op(x, "a", 1, ids.rename(m="a") * 0.5), mixes_rows=True)
def update(x: Tensor, dim: DimLike, start: int | Tensor, value: Operand) -> Tensor:
    """Replace the elements of a dim from `start` on by `value`.

    Each device updates its own slice. If the dim of the value is split, it is exchanged by permutes for an
    integer `start`, and gathered for a tensor.

    Args:
      x: a tensor.
      dim: the dim to update along.
      start: as in `slice`.
      value: has the dim with its own size (or lacks it: one element), and other dims of `x`; it is broadcast
        along those it lacks. It is cast to the dtype of `x`.

    >>> import weft as wf
    >>> wf.update(wf.zeros("a=5"), "a", 1, wf.ones("a=2"))
    f32[a=5] [0., 1., 1., 0., 0.]
    """
    x, value = as_slice(x), as_slice(value)
    old = select_dim(x.dims, dim)
    check_along([old])
    new = next((d for d in value.dims if d.name == old.name), old.resize(1))
    _check_value(x, value, old)
    first = _start(start, old, new)
    dim_index = x.dims.index(old)
    axes = layout_splits(x)[dim_index]
    by_permutes = bool(axes) and isinstance(first, int) and new in value.dims
    if axes and not by_permutes and new in value.dims and new.size == 1:
        value = _at(value, new, 0)  # an all-reduce of one element: fewer bytes than a gather
    order = x.dims[:dim_index] + (new,) + x.dims[dim_index + 1 :]
    value_splits = tuple(
        () if d == new and not by_permutes else one
        for d, one in zip(value.dims, layout_splits(value), strict=True)
    )
    array, update = reshard_together([x, value], [layout_splits(x), value_splits])
    update = cast_like(align(update, value.dims, order), array)
    update = update.reshape((1,) * (array.ndim - update.ndim) + update.shape)
    if not axes:
        shape = [update.shape[i] if i == dim_index else n for i, n in enumerate(array.shape)]
        update = jnp.broadcast_to(update, shape)
        array = cast_like(lax.dynamic_update_slice_in_dim(array, update, first, dim_index), array)
    else:
        if by_permutes:
            assert isinstance(first, int)
            update = fetch_at_offset(update, dim_index, new, axes, first, array.shape[dim_index])
        elif new.size > 1:
            update = _overlap(update, dim_index, axes, first, array.shape[dim_index])
        positions = global_positions(old, axes)
        inside = (positions >= first) & (positions < first + new.size)
        array = where_varying(broadcast_mask(inside, dim_index, array.ndim), update, array)
    # A value that is broadcast along a dim has also been written into its padding.
    broadcast = [d for d in x.dims if d not in value.dims and d != old]
    return slice_tensor(fill_padding(array, x.dims, layout_splits(x), only=broadcast), x.dims)


def _check_value(x: Tensor, value: Tensor, dim: Dim) -> None:
    others = [d for d in value.dims if d.name != dim.name]
    extra = [d for d in union_dims([x.dims, others]) if d not in x.dims]
    if extra:
        raise DimError(
            f"the value has dims {format_dims(extra)}, which are not in [{format_dims(x.dims)}]",
            rule="the value of an update has no dims that the tensor lacks",
            hint="rename them, or reduce them first",
        )
    check_value_dtype(x, value)


def check_value_dtype(x: Tensor, value: Tensor) -> None:
    """Raise an error if the dtype of a tensor can't represent the kind of a value: a float in integers, …"""
    kinds = [jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating]
    have, want = (
        next((n for n, kind in enumerate(kinds) if jnp.issubdtype(t.dtype, kind)), -1) for t in (value, x)
    )
    if have > want:
        raise TensorTypeError(
            f"a value of dtype {value.dtype} was written into a tensor of dtype {x.dtype}",
            rule="a value is cast to the dtype of the tensor, and the cast must not drop information",
            hint=f"convert one of them: value.astype(jnp.{x.dtype})",
        )


def _overlap(value: jax.Array, dim_index: int, axes: Axes, start: int | jax.Array, block: int) -> jax.Array:
    """The part of an unsplit value, which begins at `start`, over this device's block; zeros elsewhere."""
    size = value.shape[dim_index]
    value = _pad_both(value, dim_index, block)
    first = jnp.clip(block_start(axes, block) - start + block, 0, size + block)
    return lax.dynamic_slice_in_dim(value, first, block, dim_index)


def _sum_of_parts(
    array: jax.Array,
    dims: Sequence[Dim],
    splits: Splits,
    axes: Axes,
    pending: frozenset[str] = frozenset(),
) -> Tensor:
    """A tensor whose elements are each nonzero on at most one device along `axes`: a pending sum."""
    if axes and array.dtype == jnp.bool_:  # the sum of booleans is not a boolean
        return slice_tensor(collectives.all_reduce_max(array, axes), dims, splits)
    return slice_tensor(array, dims, splits, pending | set(axes))


def _pad_both(array: jax.Array, dim_index: int, count: int) -> jax.Array:
    """Add zeros at both ends of a dimension."""
    config = [(count, count, 0) if i == dim_index else (0, 0, 0) for i in range(array.ndim)]
    return lax.pad(array, constant_like(0, array), config)


def _start(start: int | np.integer | Tensor, old: Dim, new: Dim) -> int | jax.Array:
    """The start of a slice or an update: a checked integer, or a clamped array."""
    if new.size > old.size:
        raise ShapeError(
            f"{new.size} elements don't fit into dim {old}",
            rule="a slice or an update must be within its dim",
            hint=f"take at most {old.size}, or extend the dim with wf.pad",
        )
    if not isinstance(start, int | np.integer) or isinstance(start, bool):
        return _clamp(_scalar(start, "start"), old, new.size)
    first, last = int(start), old.size - new.size
    first += old.size if first < 0 else 0
    if not 0 <= first <= last:
        raise ShapeError(
            f"{new.size} elements from {start} on are not within dim {old}",
            f"they would be {first} to {first + new.size - 1}, and its positions are 0 to {old.size - 1}",
            rule="a slice or an update must be within its dim; a negative start counts from the end",
            hint=f"start at {last}, or at {-new.size} from the end, for the last {new.size}; a start "
            "that is a tensor is clamped",
        )
    return first


def _scalar(x: Position | np.integer, what: str) -> jax.Array:
    """The value of an integer tensor without dims, replicated."""
    is_scalar = isinstance(x, Tensor) or (hasattr(x, "dtype") and getattr(x, "shape", None) == ())
    t = as_slice(x) if is_scalar else None
    if t is None or t.dims or not jnp.issubdtype(t.dtype, jnp.integer):
        raise python_number_error(
            TensorTypeError,
            what,
            x if t is None else t,
            rule=f"{what} is an integer, or an integer tensor without dims",
            hint="to select many elements at once, use wf.take(x, ids, dim)",
        )
    return reshard(t).astype(jnp.int32)


def _clamp(start: int | jax.Array, dim: Dim, length: int) -> int | jax.Array:
    """Clamp a start, like `lax.dynamic_slice`; a negative one counts from the end."""
    last = dim.size - length
    if isinstance(start, int):
        return max(0, min(last, start + dim.size if start < 0 else start))
    return jnp.clip(jnp.where(start < 0, start + dim.size, start), 0, last)
