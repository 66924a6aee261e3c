"""Resharding: from the placement a slice has to the one an op needs, with the fewest bytes.

The placement of a slice is: the axes that split each dim, the axes over which a sum is pending, and the
further axes over which its array varies. Three verbs change it:

- `reshard(t, splits, axes)`: the array split as requested, nothing pending, varying over `axes` too;
- `reshard_together(tensors)`: several arrays split as requested, all varying over the same axes;
- `materialize(t)`: the tensor as its layout stores it.

Every variant is computed once per tensor (`Context.variant`). There are five moves:

    newly split                          local slice, no traffic
    pending, then split on that axis     reduce-scatter
    split moves to another dim           all-to-all
    still pending                        all-reduce
    no longer split                      all-gather
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import lax

from . import collectives
from .collectives import Axes
from .context import active
from .dims import Dim
from .layout import Splits, axes_of
from .retrace import Retrace
from .tensor import Tensor, check_usable
from .types import cast_like, constant_like


def materialize(t: Tensor, role: str | None = None) -> Tensor:
    """The tensor as its layout stores it: split by the rules of its role, nothing pending."""
    check_usable(t)
    ctx = active.context
    role = t.role if role is None else role
    splits = ctx.splits(t.dims, role)
    array = reshard(t, splits)
    extra = collectives.varying_axes(array) - axes_of(splits)
    # JAX has no cast from varying to unvarying, so the loop that made it varying must be traced again.
    if extra - ctx.vmap.axes:
        raise Retrace("unvarying")
    if array is t._data and role == t.role:
        return t
    return Tensor(array, t.dims, role=role, placement=ctx.placement, splits=splits)


def layout_splits(t: Tensor) -> Splits:
    """The splits that ops work on: those of the layout's rules for values."""
    return active.context.splits(t.dims)


def reshard(t: Tensor, splits: Splits | None = None, axes: Iterable[str] = ()) -> Any:
    """The tensor's array, split as requested, nothing pending, varying over `axes` too.

    Args:
      t: a slice.
      splits: the axes that split each dim; by default those of the layout.
      axes: the axes over which the op's other operands vary.
    """
    ctx = active.context
    splits = layout_splits(t) if splits is None else splits
    array, axes = t._data, frozenset(axes)
    if t.splits != splits or t.pending:
        assert t.splits is not None
        if t.pending:
            check_may_resolve(t)
        gathered = axes_of(t.splits) - axes_of(splits)
        # Of `axes`, only those that are gathered select another collective, so only they are in the key.
        key = ("reshard", t.splits, t.pending, splits, axes & gathered)
        memo = ctx.variant(array, key, collective=True)
        if memo.value is None:
            with memo.tracing():
                memo.store(_resharded(t, splits, axes))
        array = memo.value
    missing = axes - collectives.varying_axes(array)
    is_own = array is t._data
    if not missing:
        # `read` records for `grad` and `scan` that the tensor's own array is used.
        return t._read() if is_own else array
    ctx.note_varying(array, missing)
    memo = ctx.variant(array, ("vary", missing), collective=False)
    if memo.value is None:
        with memo.tracing():
            if is_own and t._cast_of is not None:
                # Make the parameter varying before the cast: its gradient is then summed in its own dtype,
                # not in the narrower one.
                memo.store(cast_like(reshard(t._cast_of, splits, axes), t._data))
            else:
                memo.store(collectives.pvary(t._read() if is_own else array, missing))
    return memo.value


def check_may_resolve(t: Tensor) -> None:
    """Retrace an enclosing loop if this is one of its carries.

    A pending carry would be resolved in every step, so it must not be pending.
    """
    for frame in active.context.frames:
        leaf = frame.carries.get(id(t._data))
        if leaf is not None:
            raise Retrace("carries", {leaf: frozenset[str]()}, frame)


def _resharded(t: Tensor, splits: Splits, axes: frozenset[str]) -> Any:
    # The plan attributes a resolved sum to the op that left it pending.
    with jax.named_scope(t.origin.scope) if t.origin else contextlib.nullcontext():
        return reshard_array(t._read(), t.dims, t.splits, t.pending, splits, axes)


def reshard_together(tensors: Sequence[Tensor], splits: Sequence[Splits] | None = None) -> list[Any]:
    """The tensors' arrays, split as requested (by default as the layout says), varying over the same axes.

    JAX would insert the missing casts to varying itself, one for each use. Done here they are memoized: `h`
    feeding q, k and v is cast once, and its backward pass has one all-reduce instead of three.
    """
    wanted = [layout_splits(t) for t in tensors] if splits is None else splits
    axes: set[str] = set()
    for t, new in zip(tensors, wanted, strict=True):
        axes |= axes_of(new)
        # Axes that the reshard removes don't count, unless the array varies over them for another reason.
        axes |= collectives.varying_axes(t._data) - (axes_of(t.splits or ()) | t.pending)
    return [reshard(t, new, axes) for t, new in zip(tensors, wanted, strict=True)]


def reshard_array(
    array: jax.Array,
    dims: Sequence[Dim],
    old: Splits | None,
    pending: frozenset[str],
    new: Splits,
    axes: frozenset[str] = frozenset(),
) -> jax.Array:
    """Take an array split as `old`, with a pending sum, to one split as `new` with nothing pending.

    Args:
      array: this device's slice.
      dims: its dims.
      old: the axes that split each dim now.
      pending: the axes of the pending sum.
      new: the axes that split each dim afterwards.
      axes: over these a gathered array stays varying, because its consumer varies there. The transpose is
        then a reduce-scatter.
    """
    assert old is not None
    work = _Reshard(array, dims, old, pending, new)
    stay_varying = {axis for one in new for axis in one} | axes
    while work.pending or work.misplaced():
        # The smaller the array, the less the later moves send. So a slice comes first, which is free, then a
        # reduce-scatter, which shrinks the array, then the moves that keep its size, and last a gather.
        work.slice() or work.scatter() or work.move() or work.sum() or work.gather(stay_varying)
    return work.array


class _Reshard:
    """The state of a reshard. Each move returns whether it applied.

    Axes are appended to and removed from the end of a dim's axes, and only if blocks nest. Size 6 over x+y
    (2 × 2 devices) has blocks of 2, which do not lie within the blocks of 3 that it has over x alone. Such a
    dim is gathered and then sliced.
    """

    def __init__(
        self, array: jax.Array, dims: Sequence[Dim], old: Splits, pending: frozenset[str], new: Splits
    ):
        self.array, self.dims, self.new = array, dims, new
        self.now, self.pending = list(old), set(pending)
        self.ctx = active.context

    def misplaced(self) -> list[int]:
        """The positions that are not split as requested yet."""
        return [p for p in range(len(self.dims)) if self.now[p] != self.new[p]]

    def slice(self) -> bool:
        """Split a dim over axes that nothing else uses."""
        busy = {axis for one in self.now for axis in one} | self.pending
        for position, added in self._addable():
            if not busy & set(added):
                self._pad_for(position, added)
                self.now[position] += added
                block = self._block(position, self.now[position])
                self.array = collectives.local_slice(
                    self.array, added, position, block, plain=self.ctx.vmap.depth > 0
                )
                return True
        return False

    def scatter(self) -> bool:
        """Split a dim over axes of the pending sum."""
        for position, added in self._addable():
            if self.pending >= set(added):
                self._pad_for(position, added)
                self.now[position] += added
                self.array = collectives.reduce_scatter(self.array, added, position)
                self.pending -= set(added)
                return True
        return False

    def move(self) -> bool:
        """Move the last axes of one dim to another."""
        for source in self.misplaced():
            for rest in self._remainders(source):
                moved = self.now[source][len(rest) :]
                for target, added in self._addable():
                    if moved == added:
                        self._pad_for(target, added)
                        self.array = collectives.all_to_all(self.array, added, target, source)
                        self.now[target] += added
                        self._shrink_to(source, rest)
                        return True
        return False

    def sum(self) -> bool:
        """Resolve the pending sum. The result no longer varies over its axes."""
        if not self.pending:
            return False
        self.array = collectives.all_reduce(self.array, tuple(sorted(self.pending)))
        self.pending.clear()
        return True

    def gather(self, stay_varying: set[str]) -> bool:
        """Remove axes from the dim with the fewest slices: it is the cheapest to gather.

        The result still varies over the axes in `stay_varying`.
        """
        source = min(
            (p for p in self.misplaced() if self._remainders(p)),
            key=lambda p: self.ctx.ways(self.now[p]),
        )
        rest = self._remainders(source)[0]
        removed = self.now[source][len(rest) :]
        self.array = collectives.all_gather(self.array, removed, source, stays_varying=stay_varying)
        self._shrink_to(source, rest)
        return True

    def _addable(self) -> list[tuple[int, Axes]]:
        """For each misplaced dim, the axes that can be added on the way to the new splits, most first."""
        addable = []
        for p in self.misplaced():
            have, want = self.now[p], self.new[p]
            for n in range(len(want), len(have), -1):
                # The second test keeps a later move possible: blocks that do not nest could only be gathered.
                if self._nests(p, have, want[:n]) and self._nests(p, want[:n], want):
                    addable.append((p, want[len(have) : n]))
        return addable

    def _remainders(self, position: int) -> list[Axes]:
        """The axes that a dim may have left after losing those that must go, fewest first."""
        have, want = self.now[position], self.new[position]
        nested = [n for n in range(len(have) + 1) if self._nests(position, have[:n], have)]
        # The longest prefix that the new splits share stays: gathering further would send bytes twice.
        stays = max(n for n in nested if self._nests(position, have[:n], want))
        return [have[:n] for n in nested if stays <= n < len(have)]

    def _nests(self, position: int, outer: Axes, inner: Axes) -> bool:
        """Whether `inner` starts with `outer`, and its blocks lie within those of `outer`."""
        rest = self.ctx.ways(inner[len(outer) :])
        within = self._block(position, outer) == rest * self._block(position, inner)
        # An unsplit dim can be padded to any multiple, so everything nests in it.
        return inner[: len(outer)] == outer and (within or not outer)

    def _block(self, position: int, axes: Axes) -> int:
        return self.ctx.slice_size(self.dims[position], axes)

    def _pad_for(self, position: int, added: Axes) -> None:
        """Pad a dim to a multiple of the slices that it is about to be split into."""
        block = self._block(position, self.now[position] + added)
        self.array = _resize(self.array, position, self.ctx.ways(added) * block)

    def _shrink_to(self, position: int, axes: Axes) -> None:
        """Record a dim's remaining axes, and drop the padding that the removed ones needed."""
        self.now[position] = axes
        self.array = _resize(self.array, position, self._block(position, axes))


def _resize(array: jax.Array, position: int, size: int) -> jax.Array:
    """Append zeros to one position, or drop padding from its end."""
    have = array.shape[position]
    if have < size:
        pads = [(0, 0, 0)] * array.ndim
        pads[position] = (0, size - have, 0)
        return lax.pad(array, constant_like(0, array), pads)
    return array if have == size else lax.slice_in_dim(array, 0, size, axis=position)
