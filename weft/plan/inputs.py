"""The inputs of a planned call: the check that they are a tuple, and those that must be resharded first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from ..core.describe import describe
from ..core.dims import Dim
from ..core.errors import ProgramError
from ..core.layout import Placement, Splits
from ..core.mesh import Mesh
from ..core.shapes import stored_splits
from ..core.tensor import Tensor
from ..core.types import PyTree
from .facts import ReshardedInput


def check_args_is_tuple(args: PyTree, call: str, hint: str) -> None:
    """Raise an error unless the arguments are a tuple or a list.

    A single tensor or a dict is iterable too, and would silently be unpacked into its parts.
    """
    if isinstance(args, tuple | list):
        return
    what = f"one tensor, {describe(args)}" if isinstance(args, Tensor) else f"of type {type(args).__name__}"
    raise ProgramError(
        f"args is {what}",
        rule="args is a tuple of the function's arguments",
        hint=hint,
    ).located(call)


def find_resharded_inputs(
    inputs: Iterable[tuple[str, Tensor]], placement: Placement
) -> Iterator[ReshardedInput]:
    """The inputs, given with their names, that are on the same mesh with another layout."""
    for name, t in inputs:
        if t.mesh != placement.mesh:
            continue
        have, want = stored_splits(t), placement.splits(t.dims, t.role)
        elements = max_received_elements(t.dims, have, want, placement.mesh) if have != want else 0
        if elements:
            wanted = Tensor(t._data, t.dims, role=t.role, placement=placement)
            yield ReshardedInput(name, describe(t), describe(wanted), elements * t.dtype.itemsize)


def max_received_elements(dims: tuple[Dim, ...], have: Splits, want: Splits, mesh: Mesh) -> int:
    """The largest number of elements of its new slice that a device does not have yet."""
    # Slices are boxes, so the overlap of the old and the new one is a product over dims. Arrays over the
    # mesh do this for all devices at once.
    coordinates = dict(zip(mesh.names, np.indices([n for _, n in mesh.axes]), strict=True))
    wanted, present = np.ones((), int), np.ones((), int)
    for dim, before, after in zip(dims, have, want, strict=True):
        (start, stop), (first, last) = (_interval(dim, axes, mesh, coordinates) for axes in (after, before))
        wanted = wanted * (stop - start)
        present = present * np.maximum(np.minimum(stop, last) - np.maximum(start, first), 0)
    return int(np.max(wanted - present))


def _interval(
    dim: Dim, axes: tuple[str, ...], mesh: Mesh, coordinates: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """The start and end of each device's block of a dim, without padding."""
    index = np.zeros((), int)
    for axis in axes:
        index = index * mesh.ways((axis,)) + coordinates[axis]
    size = -(-dim.size // mesh.ways(axes))
    return np.minimum(index * size, dim.size), np.minimum((index + 1) * size, dim.size)
