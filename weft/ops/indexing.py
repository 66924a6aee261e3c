"""Parts of a tensor: indexing, slices and updates, whose start may be a tensor.

One place of a split dim is its owner's, masked elsewhere: a pending sum. A range is fetched by permutes of
what each device lacks; one that starts at a tensor's value is given by all who have some of it.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import collectives, context, halo
from ..core.collectives import Axes
from ..core.describe import format_call
from ..core.dims import Dim, check_distinct, format_dims, select_dim, select_dims, union_dims
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


@dataclass(frozen=True)
class HashableSlice:
    """A Python slice that can be part of a signature: before Python 3.12 slices can't be hashed."""

    start: int | None
    stop: int | None
    step: int | None

    def places(self, dim: Dim) -> range:
        """The places of a dim that are meant, as NumPy counts them."""
        if self.step == 0:
            raise ShapeError(
                f"the slice of dim {dim} has step 0",
                rule="a slice goes forwards or backwards, by at least one place",
                hint=f'for every second place: x["{dim.name}", ::2]',
            )
        found = range(dim.size)[builtins.slice(self.start, self.stop, self.step)]
        if not found:
            bounds = ":".join("" if n is None else str(n) for n in (self.start, self.stop, self.step))
            raise ShapeError(
                f"the slice {bounds.removesuffix(':')} of dim {dim} is empty",
                rule="a dim has at least one place",
                hint=f"the places are 0 to {dim.size - 1}",
            )
        return found


def index(x: Tensor, where: Any) -> Tensor:
    """Places of dims: what `x["batch", 0]` and `x["batch", 2:8, "length", -1]` mean.

    Args:
      x: a tensor.
      where: pairs of a dim and what is wanted of it. A whole number drops the dim, and out of range
        is an error. A slice keeps the dim, resized; bounds and steps are as in NumPy. An integer
        tensor without dims drops the dim too; its value is known only when the program runs, so it
        is clamped to the dim, as in JAX (negative ones are first counted from the end).

    >>> import weft as wf
    >>> x = wf.arange(wf.Dim("a", 6))
    >>> x["a", -1], x["a", 4:0:-2]
    (i32[] 5, i32[a=2] [4, 2])
    """
    try:
        pairs = _pairs(where)
        if context.current() is None and isinstance(x, Tensor):
            pairs = tuple((dim, _as_operand(x, dim, what)) for dim, what in pairs)
        return _index(x, pairs)
    except WeftError as error:
        raise error.located(format_call("index", (x, where), {})) from None


def _pairs(where: Any) -> tuple[tuple[Any, Any], ...]:
    """`("batch", 0, "length", 2:8)` as hashable pairs."""
    items = where if isinstance(where, tuple) else (where,)
    if not items or len(items) % 2 or not all(isinstance(d, str | Dim) for d in items[::2]):
        raise TensorTypeError(
            f"a tensor was indexed by {where!r}",
            rule="an index is a dim and what is wanted of it, or several such pairs",
            hint='for example x["batch", 0], or x["batch", 2:8, "length", -1]',
        )
    return tuple((dim, _hashable(what)) for dim, what in zip(items[::2], items[1::2], strict=True))


def _hashable(what: Any) -> Any:
    if isinstance(what, np.integer):
        return int(what)
    if not isinstance(what, builtins.slice):
        return what
    bounds = (what.start, what.stop, what.step)
    try:
        return HashableSlice(*[None if n is None else operator.index(n) for n in bounds])
    except TypeError:
        wrong = next(n for n in bounds if n is not None and not isinstance(n, int | np.integer))
        raise python_number_error(
            TensorTypeError,
            "a bound of the slice",
            wrong,
            rule="a bound is an integer: the size of a dim is known when the program is traced",
            hint="wf.slice(x, dim, start, size) takes a start that is a tensor",
        ) from None


def _as_operand(x: Tensor, dim: Any, what: Any) -> Any:
    """A single place as an array: an eager op is compiled once for all places, not for each."""
    if not isinstance(what, int) or isinstance(what, bool):
        return what
    return np.asarray(_checked_place(what, select_dim(x.dims, dim)), np.int32)


def _index_lowering(x: Tensor, where: tuple[tuple[Any, Any], ...]) -> Tensor:
    x = as_slice(x)
    check_along(select_dims(x.dims, [dim for dim, _ in where]))
    ranges = [(dim, what) for dim, what in where if isinstance(what, HashableSlice)]
    single = [(dim, what) for dim, what in where if not isinstance(what, HashableSlice)]
    # Single places first: they leave a pending sum, which is then cut before it is added up.
    for dim, what in single:
        x = _at(x, select_dim(x.dims, dim), what)
    if not single:
        x = resolve_to_layout(x)
    for dim, what in ranges:
        old = select_dim(x.dims, dim)
        x = _strided(x, old, what.places(old))
    return x


_index_lowering.__name__ = "index"  # what errors and plans show
_index = op(_index_lowering)


def _at(x: Tensor, dim: Dim, place: Any) -> Tensor:
    """One place of a dim: its owner's value, as a pending sum over the axes that split the dim."""
    place = _clamped(_checked_place(place, dim), dim, 1)
    position = x.dims.index(dim)
    axes = layout_splits(x)[position]
    array, pending = array_and_pending(x)
    block = array.shape[position]
    piece = lax.dynamic_index_in_dim(array, place % block, position, keepdims=False)
    kept = x.dims[:position] + x.dims[position + 1 :]
    if axes:
        mine = collectives.axis_index(axes) == place // block
        piece = where_varying(mine, piece, constant_like(0, piece))
    return _given_by_all(piece, kept, context.require().splits(kept), axes, pending)


def _checked_place(place: Any, dim: Dim) -> Any:
    if not isinstance(place, int) or isinstance(place, bool):
        return _scalar(place, f"the place of dim {dim.name}")
    if not -dim.size <= place < dim.size:
        raise ShapeError(
            f"place {place} of dim {dim} is out of range",
            rule=f"the places of {dim} are 0 to {dim.size - 1}, or -{dim.size} to -1 from the end",
            hint=f'x["{dim.name}", -1] is the last one',
        )
    return place


def _strided(x: Tensor, dim: Dim, places: range) -> Tensor:
    """The places of a dim in an arithmetic progression; a pending sum stays pending."""
    backwards = places.step < 0
    places = places[::-1] if backwards else places
    position = x.dims.index(dim)
    splits = layout_splits(x)
    array, pending = array_and_pending(x)
    new = dim.resize(len(places))
    array = _range(array, position, dim, splits[position], places)
    dims = x.dims[:position] + (new,) + x.dims[position + 1 :]
    array = fill_padding(array, dims, splits, only=[new])
    if backwards:
        array = flip_block(array, position, new, splits[position])
    return slice_tensor(array, dims, splits, pending)


def _range(array: Any, position: int, dim: Dim, axes: Axes, places: range) -> Any:
    """This device's block of some rising places: the range that covers them, without the rest."""
    program = context.require()
    if places == range(dim.size):
        return array
    block = program.slice_size(dim.resize(len(places)), axes)
    starts = [places.start + k * block * places.step for k in range(program.ways(axes))]
    # Beyond the last place nothing is wanted, so nothing should travel.
    length = (block - 1) * places.step + 1
    array = halo.halo_exchange(array, position, dim.resize(places[-1] + 1), axes, starts, length)
    return lax.slice_in_dim(array, 0, length, places.step, position)


@op
def slice(x: Tensor, dim: Any, start: Any, size: Any) -> Tensor:
    """`size` places of a dim from `start` on.

    Args:
      x: a tensor.
      dim: which dim.
      start: a whole number or an integer tensor without dims; negative ones are counted from the
        end. If the places don't lie within the dim, a number is an error. A tensor's value is known
        only when the program runs: it is moved back until they do, as in `jax.lax.dynamic_slice`.
      size: how many places; a Dim also gives the new name.

    >>> import weft as wf
    >>> x = wf.arange(wf.Dim("a", 6))
    >>> wf.slice(x, "a", x["a", 2], 3), wf.slice(x, "a", -2, wf.Dim("b", 2))
    (i32[a=3] [2, 3, 4], i32[b=2] [4, 5])
    """
    x = resolve_to_layout(as_slice(x))
    old = select_dim(x.dims, dim)
    check_along([old])
    new = size if isinstance(size, Dim) else old.resize(as_integer(size, "size"))
    start = _start(start, old, new)
    position = x.dims.index(old)
    dims = x.dims[:position] + (new,) + x.dims[position + 1 :]
    check_distinct(dims)
    context.require().splits(dims)
    if isinstance(start, int):
        cut = _strided(x, old, range(start, start + new.size))
        return slice_tensor(cut._array, dims, cut.splits)  # a new name's split is held back
    splits = layout_splits(x)
    array, axes = reshard(x), splits[position]
    if axes:
        array = _own_part(array, position, axes, start, new.size)
    else:
        array = lax.dynamic_slice_in_dim(array, start, new.size, position)
    whole = splits[:position] + ((),) + splits[position + 1 :]
    return _given_by_all(array, dims, whole, axes)


def _own_part(array: Any, position: int, axes: Axes, start: Any, length: int) -> Any:
    """The places `[start, start + length)` of the whole; zeros where this device lacks them."""
    block = array.shape[position]
    array = _widened(array, position, length)
    first = jnp.clip(start - block_start(axes, block) + length, 0, block + length)
    return lax.dynamic_slice_in_dim(array, first, length, position)


@op
def update(x: Tensor, dim: Any, start: Any, value: Any) -> Tensor:
    """`x` with the places of a dim from `start` on replaced by `value`.

    Each device updates its own part. A value whose dim is split travels by permutes if `start` is a
    number, and is gathered if it is a tensor.

    Args:
      x: a tensor.
      dim: which dim.
      start: as in `slice`.
      value: has the dim in its own size (or not at all: then it is one place) and the other dims of
        `x`; those that it lacks are broadcast. It takes the dtype of `x`.

    >>> import weft as wf
    >>> wf.update(wf.zeros("a=5"), "a", 1, wf.ones("a=2"))
    f32[a=5] [0., 1., 1., 0., 0.]
    """
    x, value = as_slice(x), as_slice(value)
    old = select_dim(x.dims, dim)
    check_along([old])
    new = next((d for d in value.dims if d.name == old.name), old.resize(1))
    _check_value(x, value, old)
    start = _start(start, old, new)
    position = x.dims.index(old)
    axes = layout_splits(x)[position]
    by_permutes = bool(axes) and isinstance(start, int) and new in value.dims
    if axes and not by_permutes and new in value.dims and new.size == 1:
        value = _at(value, new, 0)  # an all-reduce of one place: less than a gather
    wanted = x.dims[:position] + (new,) + x.dims[position + 1 :]
    whole = tuple(
        () if d == new and not by_permutes else one
        for d, one in zip(value.dims, layout_splits(value), strict=True)
    )
    array, piece = reshard_together([x, value], [layout_splits(x), whole])
    piece = cast_like(align(piece, value.dims, wanted), array)
    piece = piece.reshape((1,) * (array.ndim - piece.ndim) + piece.shape)
    if not axes:
        shape = [piece.shape[p] if p == position else n for p, n in enumerate(array.shape)]
        piece = jnp.broadcast_to(piece, shape)
        array = cast_like(lax.dynamic_update_slice_in_dim(array, piece, start, position), array)
    else:
        if by_permutes:
            piece = fetch_at_offset(piece, position, new, axes, start, array.shape[position])
        elif new.size > 1:
            piece = _window(piece, position, axes, start, array.shape[position])
        places = global_positions(old, axes)
        inside = (places >= start) & (places < start + new.size)
        array = where_varying(broadcast_mask(inside, position, array.ndim), piece, array)
    broadcast = [d for d in x.dims if d not in value.dims and d != old]
    return slice_tensor(fill_padding(array, x.dims, layout_splits(x), only=broadcast), x.dims)


def _check_value(x: Tensor, value: Tensor, dim: Dim) -> None:
    others = [d for d in value.dims if d.name != dim.name]
    extra = [d for d in union_dims([x.dims, others]) if d not in x.dims]
    if extra:
        raise DimError(
            f"the value has dims {format_dims(extra)}, which [{format_dims(x.dims)}] has not",
            rule="a value has no dims but those of the tensor that it is put into",
            hint="rename them, or reduce them first",
        )
    check_value_dtype(x, value)


def check_value_dtype(x: Tensor, value: Tensor) -> None:
    """An error if a value is of a kind that the tensor's type has no room for."""
    kinds = [jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating]
    have, want = (
        next((n for n, kind in enumerate(kinds) if jnp.issubdtype(t.dtype, kind)), -1) for t in (value, x)
    )
    if have > want:
        raise TensorTypeError(
            f"a value of type {value.dtype} was put into a tensor of type {x.dtype}",
            rule="a value takes the dtype of the tensor, and must not lose its meaning by that",
            hint=f"convert one of them: value.astype(jnp.{x.dtype})",
        )


def _window(piece: Any, position: int, axes: Axes, start: Any, block: int) -> Any:
    """What lies over this device's block when a whole value begins at `start`; zeros elsewhere."""
    size = piece.shape[position]
    piece = _widened(piece, position, block)
    first = jnp.clip(block_start(axes, block) - start + block, 0, size + block)
    return lax.dynamic_slice_in_dim(piece, first, block, position)


def _given_by_all(
    array: Any,
    dims: Sequence[Dim],
    splits: Splits,
    axes: Axes,
    pending: frozenset[str] = frozenset(),
) -> Tensor:
    """A tensor of which each device along the axes gave its part, and zeros for the rest."""
    if axes and array.dtype == jnp.bool_:  # the sum of truth values is not a truth value
        return slice_tensor(collectives.all_reduce_max(array, axes), dims, splits)
    return slice_tensor(array, dims, splits, pending | set(axes))


def _widened(array: Any, position: int, by: int) -> Any:
    """Zeros at both ends of a position."""
    edges = [(by, by, 0) if p == position else (0, 0, 0) for p in range(array.ndim)]
    return lax.pad(array, constant_like(0, array), edges)


def _start(start: Any, old: Dim, new: Dim) -> Any:
    """Where a slice or an update begins: a number that was checked, or a clamped value."""
    if new.size > old.size:
        raise ShapeError(
            f"{new.size} places don't fit into dim {old}",
            rule="a slice or an update lies within its dim",
            hint=f"take at most {old.size}, or extend the dim with wf.pad",
        )
    if not isinstance(start, int | np.integer) or isinstance(start, bool):
        return _clamped(_scalar(start, "start"), old, new.size)
    first, last = int(start), old.size - new.size
    first += old.size if first < 0 else 0
    if not 0 <= first <= last:
        raise ShapeError(
            f"{new.size} places from {start} on don't lie within dim {old}",
            f"they would be {first} to {first + new.size - 1}, and its places are 0 to {old.size - 1}",
            rule="a slice or an update lies within its dim; a negative start counts from the end",
            hint=f"start at {last}, or at {-new.size} from the end, for the last {new.size}; a start "
            "that is a tensor is moved back as far as it takes",
        )
    return first


def _scalar(x: Any, what: str) -> Any:
    """The value of an integer tensor without dims, the same on all devices."""
    good = isinstance(x, Tensor) or (hasattr(x, "dtype") and getattr(x, "shape", None) == ())
    t = as_slice(x) if good else None
    if t is None or t.dims or not jnp.issubdtype(t.dtype, jnp.integer):
        raise python_number_error(
            TensorTypeError,
            what,
            x if t is None else t,
            rule=f"{what} is an integer, or an integer tensor without dims",
            hint="for many places at once use wf.take(x, ids, dim)",
        )
    return reshard(t).astype(jnp.int32)


def _clamped(start: Any, dim: Dim, length: int) -> Any:
    """As `lax.dynamic_slice`: negative starts count from the end; then all is made to fit."""
    last = dim.size - length
    if isinstance(start, int):
        return max(0, min(last, start + dim.size if start < 0 else start))
    return jnp.clip(jnp.where(start < 0, start + dim.size, start), 0, last)
