"""What is searched: meshes of so many devices, and for each all legal layouts of a program's dims.

A layout is legal if no tensor, and no union of dims of an op, has two dims on one axis. So each axis takes a
set of dims of which no two ever meet, and the axes choose theirs independently: the layouts of a mesh are the
product of these sets. A dim that several axes take is split in the mesh's order of them. Another order costs
the same, unless the dim takes the place of another one (a rename, a reshape): there it is tried too.

Beside that, state may be stored split over axes that leave it whole (ZeRO). Of the sets of dims that an axis
can take for that, the one that leaves the least on a device is taken; what is open, for each axis, is whether
it holds for nothing, for optimizer state, or for parameters too.
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
DimGroup = frozenset[str]  # the names of dims that are on one axis, or that meet in one op
StorageLevels = tuple[str, ...]
AxisOrder = tuple[tuple[str, tuple[int, ...]], ...]  # dims with their axes, as positions in the mesh

STORAGE_LEVELS = ("", "optimizer", "params")  # what is stored split over an axis that would leave it whole


@dataclass(frozen=True)
class Candidate:
    """A mesh and a layout.

    Attributes:
      sizes: of the mesh's axes; members of the last one are neighbours.
      groups: for each axis the dims that are on it.
      levels: for each axis what is stored in further pieces, one of LEVELS.
      further: for each axis the dims that are on it where such things are stored.
      order: the dims whose axes are not in the mesh's order, and their axes.
      variant: which of the functions that are searched.
      axes: the names of the mesh's axes, if they are given.
    """

    sizes: MeshShape
    groups: tuple[DimGroup, ...]
    levels: StorageLevels = ()
    further: tuple[DimGroup, ...] = ()
    order: AxisOrder = ()
    variant: str = ""
    axes: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """How much there is to say: of equals the simplest comes first."""
        kinds = len({*self.levels} - {""})
        return len(self.sizes) + sum(map(len, (*self.groups, *self.further))) + len(self.order) + kinds

    @property
    def names(self) -> tuple[str, ...]:
        """Names for the axes, after what is on them unless they are given."""
        if self.axes:
            return self.axes
        names: list[str] = []
        for group in self.groups:
            wanted = ["data"] if "batch" in group else ["pipe"] if "layers" in group else ["model"]
            free = (n for n in (*wanted, "second", "third") if n not in names)
            names.append(next(free))
        return tuple(names)

    @property
    def mesh(self) -> Mesh:
        return Mesh(list(zip(self.names, self.sizes, strict=True)))

    @property
    def rules(self) -> str:
        """The layout's rules for all tensors."""
        return self._shown(self._rules)

    @property
    def params(self) -> str:
        """Further rules for stored parameters."""
        return self._stored("params")

    @property
    def optimizer(self) -> str:
        """Further rules for optimizer state, if they are others than those for parameters."""
        return self._stored("optimizer", "params") if "optimizer" in self.levels else ""

    @property
    def stored(self) -> dict[str, str]:
        """The further rules that there are, by what they are for."""
        return {name: rules for name in STORAGE_LEVELS[1:] if (rules := getattr(self, name))}

    @property
    def layout(self) -> Layout:
        return Layout(self.rules, **self.stored)

    @property
    def _rules(self) -> dict[str, tuple[str, ...]]:
        order = dict(self.order)
        return {
            dim: tuple(self.names[n] for n in order.get(dim, axes))
            for dim, axes in axes_by_dim(self.groups).items()
        }

    def _stored(self, *levels: str) -> str:
        """The rules of what is stored: the axes of the rules for all come first, so that pieces nest."""
        more = axes_by_dim(
            [g if n in levels else frozenset() for g, n in zip(self.further, self.levels, strict=True)]
        )
        base = self._rules
        return self._shown({d: (*base.get(d, ()), *(self.names[n] for n in more[d])) for d in more})

    def _shown(self, rules: Mapping[str, tuple[str, ...]]) -> str:
        return " ".join(f"{dim}:{'+'.join(axes)}" for dim, axes in rules.items())


def axes_by_dim(groups: Sequence[DimGroup]) -> dict[str, tuple[int, ...]]:
    """The dims of some axes' groups, and for each of them the positions of its axes.

    >>> placed([frozenset("ab"), frozenset("a")])
    {'a': (0, 1), 'b': (0,)}
    """
    dims = sorted(frozenset[str]().union(*groups))
    return {dim: tuple(n for n, group in enumerate(groups) if dim in group) for dim in dims}


def axis_orders(groups: Sequence[DimGroup], families: Iterable[DimGroup]) -> list[AxisOrder]:
    """The orders of dims' axes that may cost differently, the mesh's first.

    Where a dim takes the place of another one, nothing is sent for the axes that both have first. So the
    order matters to a dim with several axes if one of its family has some of them.

    Args:
      families: sets of dims that take the place of one another.

    >>> orders([frozenset("ab"), frozenset("a")], [frozenset("ab")])
    [(), (('a', (1, 0)),)]
    >>> orders([frozenset("ab"), frozenset("a")], [])
    [()]
    """
    axes = axes_by_dim(groups)
    free = [
        dim
        for family in families
        for dim in sorted(family & axes.keys())
        if len(axes[dim]) > 1 and any({*axes[dim]} & {*axes.get(kin, ())} for kin in family - {dim})
    ]
    ways = itertools.product(*(itertools.permutations(axes[dim]) for dim in free))
    return [tuple((d, way) for d, way in zip(free, some, strict=True) if way != axes[d]) for some in ways]


def mesh_shapes(devices: int, axes: int) -> list[MeshShape]:
    """The sizes of all meshes of so many devices with at most so many axes, each of at least 2.

    >>> factorisations(8, 2)
    [(8,), (2, 4), (4, 2)]
    >>> factorisations(1, 3)
    [()]
    >>> factorisations(1_000_000_007, 2)
    [(1000000007,)]
    """

    def parts(left: int, count: int) -> Iterator[MeshShape]:
        if count == 1:
            yield (left,)
            return
        small = [n for n in range(2, math.isqrt(left) + 1) if left % n == 0]
        for first in sorted({*small, *(left // n for n in small)}):
            yield from ((first, *rest) for rest in parts(left // first, count - 1))

    if devices == 1:
        return [()]
    return [sizes for count in range(1, axes + 1) for sizes in parts(devices, count) if min(sizes) > 1]


def independent_groups(
    dims: Sequence[str], meetings: Iterable[DimGroup], most: float = math.inf
) -> list[DimGroup]:
    """All sets of dims of which no two meet, the empty one first; an error if there are more than so many.

    >>> [sorted(group) for group in independent(["a", "b", "c"], [frozenset("ab"), frozenset("bc")])]
    [[], ['a'], ['b'], ['c'], ['a', 'c']]
    """
    near: dict[str, set[str]] = {dim: set() for dim in dims}
    for meeting in meetings:
        for dim in meeting & near.keys():
            near[dim] |= meeting - {dim}
    found: list[DimGroup] = [frozenset()]
    for dim in dims:
        found += [group | {dim} for group in found if not group & near[dim]]
        if len(found) > most:
            raise LayoutError(
                f"too many layouts: an axis can have any of more than {most:,} sets of dims",
                f"dims: {', '.join(dims)}",
                rule="the bounds of all layouts of a mesh are held at once",
                hint="search fewer dims (dims=, --dims), or meshes of fewer axes (axes=1, --axes 1)",
            )
    return sorted(found, key=lambda group: (len(group), sorted(group)))


def extra_storage_dims(
    group: DimGroup, size: int, state: Sequence[PlannedTensor], unsplittable: DimGroup = frozenset()
) -> DimGroup:
    """The dims that cut stored state the most on an axis of a size that has a group already; or none.

    Args:
      state: the tensors that are parameters or optimizer state.
      unsplittable: dims that are left whole.
    """
    tensors = [({name: n for name, n, _ in one.dims if n > 1}, one.bytes) for one in state]
    open_ = [dims for dims, _ in tensors if not dims.keys() & group]
    names = sorted({name for dims in open_ for name in dims} - group - unsplittable)
    barred = {name for dims, _ in tensors if dims.keys() & group for name in dims}
    choices = independent_groups([n for n in names if n not in barred], [frozenset(dims) for dims in open_])

    def left(choice: DimGroup) -> float:
        return sum(_left(dims, bytes, choice, size) for dims, bytes in tensors)

    best = min(choices, key=lambda choice: (left(choice), len(choice), sorted(choice)))
    return best if left(best) < 0.99 * left(frozenset()) else frozenset()


def _left(dims: Mapping[str, int], bytes: int, choice: DimGroup, size: int) -> float:
    return bytes * math.prod(-(-n // size) / n for name, n in dims.items() if name in choice)
