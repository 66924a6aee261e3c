"""Refinement: a reshape between two splits, as resharding a tensor of finer dims.

    [a=4, b=4] with b over x=2  ->  [c=2, d=8] with c over x=2

In row-major order the block number along a split dim is a digit of an element's index: blocks of b have 2
elements, blocks of c have 8. The weights 16, 8, 4, 2 and 1 divide one another, so the same elements form a
tensor [2, 2, 2, 2], in which x splits the third dim before and the first dim after. Resharding it takes one
all-to-all. Slices of either tensor are slices of the finer one, reshaped locally.

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
    """Dims whose products are the dims before and after a reshape, and both splits. None if there are none.

    Args:
      groups: runs of dims before and after, of equal product.
      before: the axes of each dim before.
      after: the axes of each dim after.
      ways: returns the number of devices along axes.
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
        sides = [_digits(left, before, ways), _digits(right, after, ways)]
        if None in sides:
            return None
        weights = {1, math.prod(d.size for d in left)}
        weights.update(weight for side in sides for digit in side or () for weight in digit[:2])
        steps = list(itertools.pairwise(sorted(weights, reverse=True)))
        if any(high % low for high, low in steps):
            return None
        for digits, splits in zip(sides, (old, new), strict=True):
            factor_axes = _factor_axes(digits or [], steps, ways)
            if factor_axes is None:
                return None
            splits.extend(factor_axes)
        sizes.extend(high // low for high, low in steps)
    dims = tuple(Dim(f"_factor{n}", size) for n, size in enumerate(sizes))
    return dims, tuple(old), tuple(new)


def _digits(
    dims: Sequence[Dim], splits: Mapping[Dim, Axes], ways: Callable[[Axes], int]
) -> list[tuple[int, int, Axes]] | None:
    """For each split dim of a run: its weight times its size, the weight of its blocks, and its axes.

    None if blocks are padded: block numbers are not digits then.
    """
    digits, stride = [], 1
    for dim in reversed(dims):
        if splits[dim]:
            if dim.size % ways(splits[dim]):
                return None
            digits.append((stride * dim.size, stride * dim.size // ways(splits[dim]), splits[dim]))
        stride *= dim.size
    return digits


def _factor_axes(
    digits: Sequence[tuple[int, int, Axes]], steps: Sequence[tuple[int, int]], ways: Callable[[Axes], int]
) -> list[Axes] | None:
    """The axes of each factor. None if the axes of a dim can't be divided among the factors of its digit."""
    factor_axes: dict[tuple[int, int], Axes] = dict.fromkeys(steps, ())
    for top, bottom, axes in digits:
        for high, low in steps:
            if top >= high and low >= bottom:
                count = next((n for n in range(len(axes) + 1) if ways(axes[:n]) == high // low), None)
                if count is None:
                    return None
                factor_axes[high, low], axes = axes[:count], axes[count:]
        if axes:  # axes of size 1, which layout search traces with
            return None
    return list(factor_axes.values())
