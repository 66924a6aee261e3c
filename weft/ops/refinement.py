"""Refinement: a reshape between two splits as a relayout of one finer tensor.

    [a=4, b=4] with b over x=2  ->  [c=2, d=8] with c over x=2

In row-major order the pieces of a split dim are a digit of an element's index: those of b have 2 elements,
those of c have 8. The weights 16, 8, 4, 2 and 1 divide one another, so the same elements are a tensor
[2, 2, 2, 2] in which x splits the third dim before and the first one after. That is an ordinary relayout, by
one all-to-all, and slices of either tensor are slices of the finer one, reshaped locally.

Input: runs of dims of equal size before and after, with their splits. Output: finer dims, with both splits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from ..core.collectives import Axes
from ..core.dims import Dim
from ..core.layout import Splits

DimGroup = tuple[list[Dim], list[Dim]]


def refine_dims(
    groups: Sequence[DimGroup],
    before: Mapping[Dim, Axes],
    after: Mapping[Dim, Axes],
    ways: Callable[[Axes], int],
) -> tuple[tuple[Dim, ...], Splits, Splits] | None:
    """Dims of which those before and after a reshape are made, and their splits; None if there are none.

    Args:
      groups: runs of dims before and after, of equal product.
      before, after: the axes of each dim.
      ways: the number of pieces that axes make.
    """
    sizes: list[int] = []
    old: list[Axes] = []
    new: list[Axes] = []
    for left, right in groups:
        if len(left) == len(right) == 1:  # the same dim, which may be split unevenly
            sizes.append(left[0].size)
            old.append(before[left[0]])
            new.append(after[right[0]])
            continue
        pieces = [_digits(left, before, ways), _digits(right, after, ways)]
        if None in pieces:
            return None
        weights = {1, math.prod(d.size for d in left)}
        weights.update(weight for one in pieces for digit in one or () for weight in digit[:2])
        steps = list(itertools.pairwise(sorted(weights, reverse=True)))
        if any(high % low for high, low in steps):
            return None
        for digits, splits in zip(pieces, (old, new), strict=True):
            placed = _placed(digits or [], steps, ways)
            if placed is None:
                return None
            splits.extend(placed)
        sizes.extend(high // low for high, low in steps)
    dims = tuple(Dim(f"_factor{n}", size) for n, size in enumerate(sizes))
    return dims, tuple(old), tuple(new)


def _digits(
    dims: Sequence[Dim], splits: Mapping[Dim, Axes], ways: Callable[[Axes], int]
) -> list[tuple[int, int, Axes]] | None:
    """For each split dim of a run the elements of all its places, those of a block, and its axes.

    None if blocks are padded: they are no digits.
    """
    found, stride = [], 1
    for dim in reversed(dims):
        if splits[dim]:
            if dim.size % ways(splits[dim]):
                return None
            found.append((stride * dim.size, stride * dim.size // ways(splits[dim]), splits[dim]))
        stride *= dim.size
    return found


def _placed(
    digits: Sequence[tuple[int, int, Axes]], steps: Sequence[tuple[int, int]], ways: Callable[[Axes], int]
) -> list[Axes] | None:
    """The axes of each factor; None if a dim's axes can't be dealt out to the factors of its digit."""
    placed: dict[tuple[int, int], Axes] = dict.fromkeys(steps, ())
    for top, bottom, axes in digits:
        for high, low in steps:
            if top >= high and low >= bottom:
                count = next((n for n in range(len(axes) + 1) if ways(axes[:n]) == high // low), None)
                if count is None:
                    return None
                placed[high, low], axes = axes[:count], axes[count:]
        if axes:  # axes of one device, as a search traces with
            return None
    return list(placed.values())
