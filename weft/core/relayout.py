"""Relayouts: from one form of a slice to another, with the fewest bytes.

newly split                          local slice, no traffic
pending, then split on that axis     reduce-scatter
split elsewhere                      all-to-all
still pending                        all-reduce
no longer split                      all-gather
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from . import collectives, context
from .collectives import Axes
from .dims import Dim
from .layout import Splits
from .types import preserves_type


@preserves_type
def reshard_array(
    array: Any,
    dims: Sequence[Dim],
    old: Splits | None,
    pending: frozenset[str],
    new: Splits,
    axes: frozenset[str] = frozenset(),
) -> Any:
    """An array split as `old`, with a pending sum, as an array split as `new` without one.

    Args:
      axes: where a consumer varies, a gathered array stays varying, so that the transpose is a
        reduce-scatter.
    """
    assert old is not None
    work = _Relayout(array, dims, old, pending, new)
    stays = {axis for one in new for axis in one} | axes
    while work.pending or work.wrong():
        # First what is free, then what makes the rest smaller; a gather comes last.
        work.slice() or work.scatter() or work.move() or work.sum() or work.gather(stays)
    return work.array


class _Relayout:
    """A relayout under way. Its steps say whether there was something for them to do.

    A dim's axes are added and taken away at the end, and only where blocks nest: 6 over x+y has
    blocks of 2, which do not lie within the blocks of 3 that it has over x. From one to the other
    such a dim goes by way of the whole one.
    """

    def __init__(self, array: Any, dims: Sequence[Dim], old: Splits, pending: frozenset[str], new: Splits):
        self.array, self.dims, self.new = array, dims, new
        self.now, self.pending = list(old), set(pending)
        self.program = context.require()

    def wrong(self) -> list[int]:
        """The positions that are not yet split as they are to be."""
        return [p for p in range(len(self.dims)) if self.now[p] != self.new[p]]

    def slice(self) -> bool:
        """Splits a dim on axes that nothing is on."""
        busy = {axis for one in self.now for axis in one} | self.pending
        for position, added in self._growing():
            if not busy & set(added):
                self._make_room(position, added)
                self.now[position] += added
                block = self._block(position, self.now[position])
                self.array = collectives.local_slice(
                    self.array, added, position, block, plain=self.program.vmaps > 0
                )
                return True
        return False

    def scatter(self) -> bool:
        """Splits a dim on axes over which a sum is pending."""
        for position, added in self._growing():
            if self.pending >= set(added):
                self._make_room(position, added)
                self.now[position] += added
                self.array = collectives.reduce_scatter(self.array, added, position)
                self.pending -= set(added)
                return True
        return False

    def move(self) -> bool:
        """Takes the last axes of one dim to another."""
        for source in self.wrong():
            for keep in self._keeping(source):
                moved = self.now[source][len(keep) :]
                for target, added in self._growing():
                    if moved == added:
                        self._make_room(target, added)
                        self.array = collectives.all_to_all(self.array, added, target, source)
                        self.now[target] += added
                        self._keep(source, keep)
                        return True
        return False

    def sum(self) -> bool:
        """Makes the sum that is pending; over its axes the result no longer varies."""
        if not self.pending:
            return False
        summed = collectives.all_reduce(self.array, tuple(sorted(self.pending)))
        self.array = checkpoint_name(summed, "sum")  # for the remat policy "sums"
        self.pending.clear()
        return True

    def gather(self, stays: set[str]) -> bool:
        """Takes axes from the dim that is split least; the result still varies over those in `stays`."""
        source = min(
            (p for p in self.wrong() if self._keeping(p)),
            key=lambda p: self.program.ways(self.now[p]),
        )
        keep = self._keeping(source)[0]
        gone = self.now[source][len(keep) :]
        self.array = collectives.all_gather(self.array, gone, source, stays_varying=stays)
        self._keep(source, keep)
        return True

    def _growing(self) -> list[tuple[int, Axes]]:
        """The axes that can be added to dims on the way to the new form, for each dim the most first."""
        growing = []
        for p in self.wrong():
            have, want = self.now[p], self.new[p]
            for n in range(len(want), len(have), -1):
                if self._nests(p, have, want[:n]) and self._nests(p, want[:n], want):
                    growing.append((p, want[len(have) : n]))
        return growing

    def _keeping(self, position: int) -> list[Axes]:
        """What can be left of a dim's axes when those that have to go are taken, the least first."""
        have, want = self.now[position], self.new[position]
        fits = [n for n in range(len(have) + 1) if self._nests(position, have[:n], have)]
        stays = max(n for n in fits if self._nests(position, have[:n], want))
        return [have[:n] for n in fits if stays <= n < len(have)]

    def _nests(self, position: int, outer: Axes, inner: Axes) -> bool:
        """Whether `inner` continues `outer`, and its blocks lie within those of `outer`."""
        rest = self.program.ways(inner[len(outer) :])
        within = self._block(position, outer) == rest * self._block(position, inner)
        return inner[: len(outer)] == outer and (within or not outer)

    def _block(self, position: int, axes: Axes) -> int:
        return self.program.slice_size(self.dims[position], axes)

    def _make_room(self, position: int, added: Axes) -> None:
        """Pads a whole dim to a multiple of the pieces that it is to be cut into."""
        block = self._block(position, self.now[position] + added)
        self.array = _resize(self.array, position, self.program.ways(added) * block)

    def _keep(self, position: int, axes: Axes) -> None:
        """Leaves a dim these axes, and cuts the padding off that the others needed."""
        self.now[position] = axes
        self.array = _resize(self.array, position, self._block(position, axes))


def _resize(array: Any, position: int, size: int) -> Any:
    """Zeros added, or padding cut off, at the end of one position."""
    have = array.shape[position]
    if have < size:
        pads = [(0, 0, 0)] * array.ndim
        pads[position] = (0, size - have, 0)
        return lax.pad(array, jnp.zeros((), array.dtype), pads)
    return array if have == size else lax.slice_in_dim(array, 0, size, axis=position)
