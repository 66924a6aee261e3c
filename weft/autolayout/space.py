"""The search space: the meshes of a number of devices, and all legal layouts of a program's dims on each.

A layout is legal if no tensor, and no op's union of dims, has two dims on one axis. Two dims that occur
together in this sense *conflict*. Each mesh axis can take any set of dims without a conflict (an independent
set of the conflict graph), and the axes choose independently: the layouts of a mesh are the product of these
sets. A dim on several axes is split in mesh order. Another order costs the same, unless the dim is renamed or
reshaped to another dim; then all orders are candidates.

State can also be stored split over axes that would replicate it (ZeRO). The extra dims of an axis are the
set that minimizes the bytes per device. The search decides for each axis whether they apply to nothing, to
optimizer state, or to optimizer state and parameters.

The types: a `MeshShape` has the sizes of the axes; a `DimGroup` the names of dims that share an axis, or that
occur in one op; `StorageLevels` have one of STORAGE_LEVELS for each axis; an `AxisOrder` has dims with the
positions of their axes in the mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..core.errors import LayoutError
from ..core.layout import Layout
from ..core.mesh import Mesh
from ..plan.facts import PlannedTensor

MeshShape = tuple[int, ...]
DimGroup = frozenset[str]
StorageLevels = tuple[str, ...]
AxisOrder = tuple[tuple[str, tuple[int, ...]], ...]

# What an axis stores split along its extra dims. Each level includes the one before it: an update reads a
# parameter together with its optimizer state, which would otherwise have to be gathered.
STORAGE_LEVELS = ("", "optimizer", "params")


class TrainVariant(str):
    """The name of a train step with other settings, `remat dots, micro 2`.

    Attributes:
      flags: the flags of `weft train` for these settings.
    """

    flags: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> TrainVariant:
        """The variant with these settings, by flag; those that are None are left as they are."""
        given = {flag: value for flag, value in settings.items() if value is not None}
        name = cls(", ".join(f"{flag.rpartition('.')[2]} {value}" for flag, value in given.items()))
        name.flags = tuple(f"{flag} {value}" for flag, value in given.items())
        return name


@dataclass(frozen=True)
class Candidate:
    """A mesh and a layout.

    Attributes:
      sizes: sizes of the mesh axes; devices along the last one are neighbors.
      groups: the dims split over each axis.
      levels: the state that each axis stores split along extra dims, one of STORAGE_LEVELS.
      storage_groups: these extra dims of each axis.
      order: dims whose axes are not in mesh order, with their axes.
      variant: the name of the searched function; a `TrainVariant` if flags of `weft train` select it.
      axes: the names of the mesh axes, if the user named them.
    """

    sizes: MeshShape
    groups: tuple[DimGroup, ...]
    levels: StorageLevels = ()
    storage_groups: tuple[DimGroup, ...] = ()
    order: AxisOrder = ()
    variant: str = ""
    axes: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """The complexity of the rules; among equally good candidates the simplest ranks first."""
        kinds = len({*self.levels} - {""})
        return len(self.sizes) + sum(map(len, (*self.groups, *self.storage_groups))) + len(self.order) + kinds

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes: the user's, or chosen by the dims on them."""
        if self.axes:
            return self.axes
        names: list[str] = []
        for group in self.groups:
            preferred = ["data"] if "batch" in group else ["pipe"] if "layers" in group else ["model"]
            free = (n for n in (*preferred, "second", "third") if n not in names)
            names.append(next(free))
        return tuple(names)

    @property
    def mesh(self) -> Mesh:
        return Mesh(list(zip(self.names, self.sizes, strict=True)))

    @property
    def rules(self) -> str:
        """The layout's rules for all tensors."""
        return self._format(self._rules)

    @property
    def params(self) -> str:
        """The extra rules for stored parameters."""
        return self._storage_rules_of("params")

    @property
    def optimizer(self) -> str:
        """The extra rules for optimizer state, if they differ from those for parameters."""
        return self._storage_rules_of("optimizer", "params") if "optimizer" in self.levels else ""

    @property
    def storage_rules(self) -> dict[str, str]:
        """The non-empty extra rules, by role."""
        return {name: rules for name in STORAGE_LEVELS[1:] if (rules := getattr(self, name))}

    @property
    def layout(self) -> Layout:
        return Layout(self.rules, **self.storage_rules)

    @property
    def _rules(self) -> dict[str, tuple[str, ...]]:
        order = dict(self.order)
        return {
            dim: tuple(self.names[n] for n in order.get(dim, axes))
            for dim, axes in axes_by_dim(self.groups).items()
        }

    def _storage_rules_of(self, *levels: str) -> str:
        """The rules for state on axes of these levels."""
        extra = axes_by_dim(
            [g if n in levels else frozenset() for g, n in zip(self.storage_groups, self.levels, strict=True)]
        )
        base = self._rules
        # The axes of the layout's own rule come first: a stored slice is then part of the slice in use, and
        # one all-gather over the extra axes restores that slice.
        return self._format({d: (*base.get(d, ()), *(self.names[n] for n in extra[d])) for d in extra})

    def _format(self, rules: Mapping[str, tuple[str, ...]]) -> str:
        return " ".join(f"{dim}:{'+'.join(axes)}" for dim, axes in rules.items())


def axes_by_dim(groups: Sequence[DimGroup]) -> dict[str, tuple[int, ...]]:
    """The positions of each dim's axes, given the groups of all axes.

    >>> axes_by_dim([frozenset("ab"), frozenset("a")])
    {'a': (0, 1), 'b': (0,)}
    """
    dims = sorted(frozenset[str]().union(*groups))
    return {dim: tuple(n for n, group in enumerate(groups) if dim in group) for dim in dims}


def axis_orders(groups: Sequence[DimGroup], families: Iterable[DimGroup]) -> list[AxisOrder]:
    """The orders of the dims' axes that can differ in cost, mesh order first.

    If a dim is renamed to another one, the axes that both list first cause no communication. The order
    therefore matters only for a dim on several axes that shares one of them with its family.

    Args:
      groups: the dims on each axis.
      families: sets of dims that are renamed or reshaped to one another.

    >>> axis_orders([frozenset("ab"), frozenset("a")], [frozenset("ab")])
    [(), (('a', (1, 0)),)]
    >>> axis_orders([frozenset("ab"), frozenset("a")], [])
    [()]
    """
    axes = axes_by_dim(groups)
    reorderable = [
        dim
        for family in families
        for dim in sorted(family & axes.keys())
        if len(axes[dim]) > 1 and any({*axes[dim]} & {*axes.get(other, ())} for other in family - {dim})
    ]
    choices = itertools.product(*(itertools.permutations(axes[dim]) for dim in reorderable))
    return [
        tuple((dim, order) for dim, order in zip(reorderable, choice, strict=True) if order != axes[dim])
        for choice in choices
    ]


def mesh_shapes(devices: int, axes: int) -> list[MeshShape]:
    """The shapes of all meshes of `devices` devices with at most `axes` axes, each of size 2 or more.

    >>> mesh_shapes(8, 2)
    [(8,), (2, 4), (4, 2)]
    >>> mesh_shapes(1, 3)
    [()]
    >>> mesh_shapes(1_000_000_007, 2)
    [(1000000007,)]
    """

    def factorizations(product: int, count: int) -> Iterator[MeshShape]:
        if count == 1:
            yield (product,)
            return
        # Divisors come in pairs, one of them at most the square root: a large prime must stay fast.
        small = [n for n in range(2, math.isqrt(product) + 1) if product % n == 0]
        for first in sorted({*small, *(product // n for n in small)}):
            yield from ((first, *rest) for rest in factorizations(product // first, count - 1))

    if devices == 1:
        return [()]
    shapes = (shape for count in range(1, axes + 1) for shape in factorizations(devices, count))
    return [shape for shape in shapes if min(shape) > 1]


def independent_groups(
    dims: Sequence[str], conflicts: Iterable[DimGroup], limit: float = math.inf
) -> list[DimGroup]:
    """All independent sets of dims, the empty one first.

    Args:
      dims: the dims to choose from.
      conflicts: sets of dims; no two dims of a set may share an axis.
      limit: more sets than this raise an error.

    >>> [sorted(group) for group in independent_groups(["a", "b", "c"], [frozenset("ab"), frozenset("bc")])]
    [[], ['a'], ['b'], ['c'], ['a', 'c']]
    """
    neighbors: dict[str, set[str]] = {dim: set() for dim in dims}
    for conflict in conflicts:
        for dim in conflict & neighbors.keys():
            neighbors[dim] |= conflict - {dim}
    groups: list[DimGroup] = [frozenset()]
    for dim in dims:
        groups += [group | {dim} for group in groups if not group & neighbors[dim]]
        if len(groups) > limit:
            raise LayoutError(
                f"too many layouts: an axis can take any of more than {limit:,} sets of dims",
                f"dims: {', '.join(dims)}",
                rule="the bounds of all layouts of a mesh are held in memory at once",
                hint="search fewer dims (dims=, --dims), or meshes of fewer axes (axes=1, --axes 1)",
            )
    return sorted(groups, key=lambda group: (len(group), sorted(group)))


def extra_storage_dims(
    group: DimGroup, size: int, state: Sequence[PlannedTensor], unsplittable: DimGroup = frozenset()
) -> DimGroup:
    """The dims that shrink stored state most on an axis that already splits a group of dims; may be empty.

    Args:
      group: the dims split over the axis.
      size: the size of the axis.
      state: the parameters and the optimizer state.
      unsplittable: dims that must not be split.
    """
    tensors = [({name: n for name, n, _ in tensor.dims if n > 1}, tensor.bytes) for tensor in state]
    # A tensor with a dim in the group is split over the axis already. None of its other dims may go there
    # too: a rule applies to all tensors, and an axis splits at most one dim of each.
    replicated = [dims for dims, _ in tensors if not dims.keys() & group]
    names = sorted({name for dims in replicated for name in dims} - group - unsplittable)
    excluded = {name for dims, _ in tensors if dims.keys() & group for name in dims}
    choices = independent_groups(
        [name for name in names if name not in excluded], [frozenset(dims) for dims in replicated]
    )

    def stored_bytes(choice: DimGroup) -> float:
        return sum(_bytes_per_device(dims, bytes, choice, size) for dims, bytes in tensors)

    best = min(choices, key=lambda choice: (stored_bytes(choice), len(choice), sorted(choice)))
    # A saving below 1% is not worth its gathers, and each level that is tried multiplies the candidates.
    return best if stored_bytes(best) < 0.99 * stored_bytes(frozenset()) else frozenset()


def _bytes_per_device(dims: Mapping[str, int], bytes: int, choice: DimGroup, size: int) -> float:
    """The bytes of a tensor after an axis splits the chosen dims; slices are padded to equal sizes."""
    return bytes * math.prod(-(-n // size) / n for name, n in dims.items() if name in choice)
