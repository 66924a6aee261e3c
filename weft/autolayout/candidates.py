"""The candidates of one function: their bounds, and the plans made so far."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..core.errors import WeftError
from ..core.mesh import Mesh
from ..core.types import PyTree
from ..hardware.profile import Hardware
from ..plan.plan import Plan
from .bound import LowerBound
from .cost_atoms import trace_cost_atoms
from .space import (
    STORAGE_LEVELS,
    Candidate,
    DimGroup,
    MeshShape,
    StorageLevels,
    axis_orders,
    independent_groups,
    mesh_shapes,
)
from .universal_trace import program_on

MAX_CANDIDATES = 1 << 24  # per mesh: one array holds the bounds of them all


class CandidateSpace:
    """The candidates of one function.

    A mesh with k axes has an array of candidates, indexed by one position in `groups` per axis.

    Args:
      name: the name of the variant.
      fn, args: as of `search`.
      devices, axes: the number of devices, and the largest number of mesh axes.
      hardware: the machine.
      mesh: the only mesh to try, if given.
      dims: the only dims to split, if given.
      required_dim: if given, only candidates that split this dim count.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        devices: int,
        axes: int,
        hardware: Hardware,
        mesh: Mesh | None = None,
        dims: Sequence[str] | None = None,
        required_dim: str = "",
    ):
        self.name, self.fn, self.args, self.required_dim = name, fn, args, required_dim
        self.atoms = trace_cost_atoms(fn, args)
        self.dims = self.atoms.searched if dims is None else [d for d in self.atoms.dims if d in dims]
        count = axes if mesh is None else len(mesh.axes)
        # The limit is on candidates, of which a mesh has groups ** axes, so its root is the limit on groups.
        limit = int(MAX_CANDIDATES ** (1 / max(count, 1)))
        self.groups = independent_groups(self.dims, self.atoms.conflicts, limit)
        self.bound = LowerBound(self.atoms, hardware, devices, self.groups)
        self.meshes = mesh_shapes(devices, axes)
        self.axes: tuple[str, ...] = ()
        if mesh is not None:
            named = [(axis, size) for axis, size in mesh.axes if size > 1]
            self.meshes = [tuple(size for _, size in named)]
            self.axes = tuple(axis for axis, _ in named)
        self.plans: dict[Candidate, Plan | WeftError] = {}

    @property
    def left_out(self) -> set[str]:
        """The dims that are not searched."""
        return {*self.atoms.dims, *self.atoms.unsplittable} - {*self.dims}

    def planned(self, candidate: Candidate) -> Plan | WeftError:
        """The plan of a candidate, or the error that lowering it raises."""
        if candidate not in self.plans:
            try:
                plan = program_on(self.fn, candidate.mesh, candidate.layout).plan(*self.args)
                self.plans[candidate] = plan
            except WeftError as error:
                self.plans[candidate] = error
        return self.plans[candidate]

    def levels(self, sizes: MeshShape, stored: bool) -> Iterator[StorageLevels]:
        """The combinations of storage levels for the axes of a mesh."""
        # Without tensors of its role, a level would repeat the candidates of the level below it.
        roles = {tensor.role for tensor in self.bound.state} if stored else set()
        levels = [level for level in STORAGE_LEVELS if not level or level.rstrip("s") in roles]
        return itertools.product(levels, repeat=len(sizes))

    def is_distinct(self, sizes: MeshShape, levels: StorageLevels) -> np.ndarray:
        """Which candidates of a mesh are not duplicates of others with fewer axes or a lower level."""
        shape = [len(self.groups)] * len(sizes)
        positions = np.indices(shape)
        distinct = np.ones(shape, bool)
        # Two neighboring axes with the same dims are one axis of their product, which another mesh has.
        for n in range(1, len(sizes)) if not self.axes else ():
            if levels[n - 1] == levels[n]:
                fuses = self._fuses(sizes[n - 1], sizes[n], levels[n])
                distinct &= (positions[n - 1] != positions[n]) | ~fuses[positions[n]]
        if self.required_dim:
            splits = np.array([self.required_dim in group for group in self.groups])
            distinct &= np.any([splits[position] for position in positions], axis=0) if sizes else False
        # A level without extra dims stores nothing differently: it would repeat a candidate of a lower level.
        for size, level, position in zip(sizes, levels, positions, strict=True):
            if level:
                distinct &= np.array([bool(self.bound.storage_dims(g, size)) for g in self.groups])[position]
        return distinct

    def _fuses(self, first: int, second: int, level: str) -> np.ndarray:
        """For which groups two neighboring axes are equivalent to one axis of their product.

        Not for groups whose extra storage dims depend on the size of the axis.
        """
        if not level:
            return np.ones(len(self.groups), bool)
        extra = self.bound.storage_dims
        return np.array(
            [extra(g, first) == extra(g, second) == extra(g, first * second) for g in self.groups]
        )

    def order_counts(self, sizes: MeshShape) -> np.ndarray:
        """The number of axis orders of each candidate of a mesh: `len(axis_orders(...))` for all at once."""
        # Arrays over all candidates: a call of `axis_orders` for each of up to 2**24 would take minutes.
        positions = np.indices([len(self.groups)] * len(sizes))
        counts = np.ones(positions.shape[1:], int)
        factorials = np.array([math.factorial(n) for n in range(len(sizes) + 1)])
        for family in self.atoms.families if len(sizes) > 1 else ():
            axes_of = {dim: np.array([dim in group for group in self.groups])[positions] for dim in family}
            for dim, axes in axes_of.items():
                shares_axis = np.any(
                    [axes & others for other, others in axes_of.items() if other != dim], axis=(0, 1)
                )
                counts *= np.where(shares_axis, factorials[axes.sum(axis=0)], 1)
        return counts

    def candidates(
        self, sizes: MeshShape, levels: StorageLevels, position: tuple[int, ...]
    ) -> Iterator[Candidate]:
        """The candidates at a position: one for each axis order that can differ in cost."""
        groups = tuple(self.groups[n] for n in position)
        axes = zip(groups, sizes, levels, strict=True)
        extra = tuple(self.bound.storage_dims(g, size) if level else DimGroup() for g, size, level in axes)
        for order in axis_orders(groups, self.atoms.families):
            yield Candidate(sizes, groups, levels, extra, order, self.name, self.axes)
