"""The groups of devices of a collective, from the three forms in which HLO writes them.

    {{0,2},{1,3}}                                a list
    [2,2]<=[2,2]T(1,0)                           0 to 3 in 2 x 2, transposed, in rows of 2
    mesh['axis_0'=2,'axis_1'=2] {'axis_0'}       axes of a mesh, as XLA's partitioner writes them

All three are the same. Devices are numbered by their position in the program's mesh, in row-major order.
"""

from __future__ import annotations

import itertools
import math
import re

import numpy as np

Groups = list[tuple[int, ...]]

_LISTS = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# A mesh may list its devices, or describe them: device_ids=([4,2]T(1,0)).
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((?:\[([\d,]+)\]T\(([\d,]+)\)|([\d,]+))\))? \{([^}]*)\}"
)
_AXIS = re.compile(r"'([^']*)'=(\d+)")
# Of an axis, or of a part of one: 'a':(2)4 are the 4 positions between the first 2 and the rest.
_GROUPED = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")


def parse_groups(attributes: str, devices: int) -> Groups:
    """The groups of a collective, one of all devices if it lists none; of a permute, the pairs of source and
    target."""
    if iota := _IOTA.search(attributes):
        shape, base, order = map(_numbers, iota.groups())
        return _rows(_arranged(base, order).reshape(shape))
    if mesh := _MESH.search(attributes):
        return _mesh_groups(*mesh.groups())
    listed = _LISTS.search(attributes)
    groups = re.findall(r"\{([\d,]+)\}", listed[1]) if listed else []
    if not groups and "source_target_pairs" not in attributes:
        return [tuple(range(devices))]
    return [tuple(_numbers(group)) for group in groups]


def _mesh_groups(mesh: str, base: str | None, order: str | None, listed: str | None, grouped: str) -> Groups:
    sizes = {name: int(size) for name, size in _AXIS.findall(mesh)}
    # What each group runs over: an axis, the positions before the part of it, and those up to its end.
    parts = [
        (name, int(before or 1), int(before or 1) * int(size or sizes[name]))
        for name, before, size in _GROUPED.findall(grouped)
    ]
    shape: list[int] = []
    within: list[tuple[int, int]] = []  # the number of the part, and of the dim in `shape`
    for name, size in sizes.items():
        own = [(n, before, end) for n, (of, before, end) in enumerate(parts) if of == name]
        ends = sorted({1, size}.union(*((before, end) for _, before, end in own)))
        for start, stop in itertools.pairwise(ends):
            within += [(n, len(shape)) for n, before, end in own if before <= start and stop <= end]
            shape.append(stop // start)
    dims = [dim for _, dim in sorted(within)]
    others = [dim for dim in range(len(shape)) if dim not in dims]
    numbers = _numbers(base) or [math.prod(shape)]
    ids = np.array(_numbers(listed)) if listed else _arranged(numbers, _numbers(order))
    rows = ids.reshape(shape).transpose(others + dims)
    return _rows(rows.reshape(-1, math.prod(shape[dim] for dim in dims)))


def _arranged(shape: list[int], order: list[int]) -> np.ndarray:
    """The numbers from 0 in an array of this shape, with its dims in this order."""
    return np.arange(math.prod(shape)).reshape(shape).transpose(order or None)


def _numbers(text: str | None) -> list[int]:
    return [int(n) for n in (text or "").split(",") if n]


def _rows(array: np.ndarray) -> Groups:
    return [tuple(row) for row in array.tolist()]
