"""From slices of a parameter to slices of its stored tensors.

A parameter has more dims than its stored tensors have dimensions: `(kv_heads heads d_kv) d_model` is a
matrix. A device's slice of the parameter therefore corresponds to one or several rectangles of each matrix;
`slices_of` lists them, for reading and for writing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

import weft as wf

from .family import Row

Spans = dict[str, slice]


@dataclass(frozen=True)
class StoredSlice:
    """A rectangle of a stored tensor, and the part of a parameter's slice that it holds.

    Attributes:
      name: the stored tensor's name.
      stored: its indices in the stored tensor.
      ours: its indices in the slice.
      sizes: its sizes by our dims, in the stored order.
      order: the position of each of our dims in that order.
    """

    name: str
    stored: tuple[slice, ...]
    ours: tuple[slice, ...]
    sizes: tuple[int, ...]
    order: tuple[int, ...]

    def to_ours(self, array: np.ndarray) -> np.ndarray:
        """The stored array in the order of our dims."""
        return array.reshape(self.sizes).transpose(self.order).reshape([_size(s) for s in self.ours])

    def to_stored(self, array: np.ndarray) -> np.ndarray:
        """The inverse: our array in the stored order."""
        ordered = array.reshape([self.sizes[n] for n in self.order])
        return ordered.transpose(np.argsort(self.order)).reshape([_size(s) for s in self.stored])


def stored_shapes(row: Row, dims: tuple[wf.Dim, ...]) -> dict[str, tuple[int, ...]]:
    """The names of a parameter's stored tensors, one per layer, with their shapes."""
    sizes = {d.name: d.size for d in dims}
    shape = tuple(math.prod(n for _, n in _factors(group, sizes)) for group in row.groups)
    return {row.theirs.format(layer=n): shape for n in range(sizes.get("layers", 1))}


def slices_of(row: Row, dims: tuple[wf.Dim, ...], where: tuple[slice, ...]) -> Iterator[StoredSlice]:
    """The stored slices that make up a slice of a parameter."""
    if not all(map(_size, where)):
        return
    sizes = {d.name: d.size for d in dims}
    wanted = {d.name: s for d, s in zip(dims, where, strict=True)}
    stored = [name for group in row.groups for name, _ in _factors(group, sizes) if name in sizes]
    layers = wanted.get("layers", slice(0, 1))
    for layer in range(layers.start, layers.stop):
        runs = [_runs(_factors(group, sizes), wanted, row.part) for group in row.groups]
        for one in itertools.product(*runs):
            spans = {"layers": slice(layer, layer + 1)}
            for _, named in one:
                spans |= named
            yield StoredSlice(
                row.theirs.format(layer=layer),
                tuple(span for span, _ in one),
                tuple(_minus(spans[d.name], wanted[d.name].start) for d in dims),
                tuple(_size(spans[name]) for name in stored),
                tuple(stored.index(d.name) for d in dims if d.name in stored),
            )


def _factors(group: list[str], sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """The dims that make up one stored dimension; a number counts as a dim: that of the parts."""
    known = [name for name in group if name in sizes or name.isdigit()]
    return [(name, sizes.get(name) or int(name)) for name in known]


def _runs(factors: list[tuple[str, int]], wanted: Spans, part: int) -> list[tuple[slice, Spans]]:
    """The contiguous runs of one stored dimension that are wanted, and the part of our dims that each covers.

    Runs are contiguous within the last dim that is only partly wanted and all faster ones. Each index of the
    slower dims therefore needs a run of its own.
    """
    spans = [wanted.get(name, slice(part, part + 1)) for name, _ in factors]
    partial = [n for n, (_, size) in enumerate(factors) if _size(spans[n]) < size]
    last = partial[-1] if partial else 0
    inner = math.prod(size for _, size in factors[last + 1 :])
    runs = []
    for index in itertools.product(*(range(s.start, s.stop) for s in spans[:last])):
        start = 0
        for n, (_, size) in zip((*index, 0), factors[: last + 1], strict=True):
            start = start * size + n
        own = [slice(n, n + 1) for n in index] + spans[last:]
        span = slice((start + spans[last].start) * inner, (start + spans[last].stop) * inner)
        runs.append((span, {name: s for (name, _), s in zip(factors, own, strict=True)}))
    return runs


def _size(span: slice) -> int:
    return span.stop - span.start


def _minus(span: slice, start: int) -> slice:
    return slice(span.start - start, span.stop - start)
