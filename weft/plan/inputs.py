"""Inputs that are laid out otherwise than a program wants them: they are moved before each call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ..core.describe import describe
from ..core.dims import Dim
from ..core.layout import Splits
from ..core.mesh import Mesh
from ..core.shapes import stored_splits
from ..core.tensor import Tensor
from .facts import ReshardedInput


def find_resharded_inputs(inputs: Iterable[tuple[str, Tensor]], program: Any) -> Iterator[ReshardedInput]:
    """Those of a program's inputs, with their names, of which devices don't hold what they need."""
    for name, t in inputs:
        if t.mesh != program.mesh:
            continue
        have, want = stored_splits(t), program.layout.splits(t.dims, program.mesh, t.role)
        elements = max_received_elements(t.dims, have, want, program.mesh) if have != want else 0
        if elements:
            wanted = Tensor(t._data, t.dims, role=t.role, mesh=program.mesh, layout=program.layout)
            yield ReshardedInput(name, describe(t), describe(wanted), elements * t.dtype.itemsize)


def max_received_elements(dims: tuple[Dim, ...], have: Splits, want: Splits, mesh: Mesh) -> int:
    """The most elements of its new slice that a device does not hold yet."""
    places = dict(zip(mesh.names, np.indices([n for _, n in mesh.axes]), strict=True))
    wanted, held = np.ones((), int), np.ones((), int)
    for dim, before, after in zip(dims, have, want, strict=True):
        (start, stop), (first, last) = (_block(dim, axes, mesh, places) for axes in (after, before))
        wanted = wanted * (stop - start)
        held = held * np.maximum(np.minimum(stop, last) - np.maximum(start, first), 0)
    return int(np.max(wanted - held))


def _block(dim: Dim, axes: tuple[str, ...], mesh: Mesh, places: dict[str, Any]) -> tuple[Any, Any]:
    """Where each device's piece of a dim begins and ends, without padding."""
    number = np.zeros((), int)
    for axis in axes:
        number = number * mesh.ways((axis,)) + places[axis]
    size = -(-dim.size // mesh.ways(axes))
    return np.minimum(number * size, dim.size), np.minimum((number + 1) * size, dim.size)
