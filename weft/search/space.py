"""What is searched: meshes of so many devices, and for each all legal layouts of a program's dims.

A layout is legal if no tensor, and no union of dims of an op, has two dims on one axis. So each axis takes a
set of dims of which no two ever meet, and the axes choose theirs independently: the layouts of a mesh are the
product of these sets.

Beside that, state may be stored split over axes that leave it whole (ZeRO). Of the sets of dims that an axis
can take for that, the one that leaves the least on a device is taken; what is open is whether it holds for
nothing, for optimizer state, or for parameters too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import LayoutError
from ..layout import Layout
from ..mesh import Mesh
from ..plan.facts import Stored

Sizes = tuple[int, ...]
Group = frozenset[str]  # the names of dims that are on one axis, or that meet in one op

LEVELS = ("", "optimizer", "params")  # what is stored split over axes that would leave it whole


@dataclass(frozen=True)
class Candidate:
    """A mesh and a layout.

    Attributes:
      sizes: of the mesh's axes; members of the last one are neighbours.
      groups: for each axis the dims that are on it.
      level: what is stored in further pieces, one of LEVELS.
      further: for each axis the dims that are on it where such things are stored.
      variant: which of the functions that are searched.
      axes: the names of the mesh's axes, if they are given.
    """

    sizes: Sizes
    groups: tuple[Group, ...]
    level: str = ""
    further: tuple[Group, ...] = ()
    variant: str = ""
    axes: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """How much there is to say: of equals the simplest comes first."""
        return len(self.sizes) + sum(map(len, (*self.groups, *self.further)))

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
        """The layout's rules for all tensors; a dim on several axes is split in the mesh's order of them."""
        return self._shown(self._rules(self.groups))

    @property
    def stored_rules(self) -> str:
        """Further rules for what is stored: the axes of the rules above come first, so that pieces nest."""
        base, more = self._rules(self.groups), self._rules(self.further)
        return self._shown({dim: (*base.get(dim, ()), *axes) for dim, axes in more.items()})

    @property
    def layout(self) -> Layout:
        further = {self.level: self.stored_rules} if self.level else {}
        return Layout(self.rules, **further)

    def _rules(self, groups: Iterable[Group]) -> dict[str, tuple[str, ...]]:
        pairs = list(zip(self.names, groups, strict=False))
        dims = sorted(frozenset[str]().union(*(group for _, group in pairs)))
        return {dim: tuple(name for name, group in pairs if dim in group) for dim in dims}

    def _shown(self, rules: Mapping[str, tuple[str, ...]]) -> str:
        return " ".join(f"{dim}:{'+'.join(axes)}" for dim, axes in rules.items())


def factorisations(devices: int, axes: int) -> list[Sizes]:
    """The sizes of all meshes of so many devices with at most so many axes, each of at least 2.

    >>> factorisations(8, 2)
    [(8,), (2, 4), (4, 2)]
    >>> factorisations(1, 3)
    [()]
    >>> factorisations(1_000_000_007, 2)
    [(1000000007,)]
    """

    def parts(left: int, count: int) -> Iterator[Sizes]:
        if count == 1:
            yield (left,)
            return
        small = [n for n in range(2, math.isqrt(left) + 1) if left % n == 0]
        for first in sorted({*small, *(left // n for n in small)}):
            yield from ((first, *rest) for rest in parts(left // first, count - 1))

    if devices == 1:
        return [()]
    return [sizes for count in range(1, axes + 1) for sizes in parts(devices, count) if min(sizes) > 1]


def independent(dims: Sequence[str], meetings: Iterable[Group], most: float = math.inf) -> list[Group]:
    """All sets of dims of which no two meet, the empty one first; an error if there are more than so many.

    >>> [sorted(group) for group in independent(["a", "b", "c"], [frozenset("ab"), frozenset("bc")])]
    [[], ['a'], ['b'], ['c'], ['a', 'c']]
    """
    near: dict[str, set[str]] = {dim: set() for dim in dims}
    for meeting in meetings:
        for dim in meeting & near.keys():
            near[dim] |= meeting - {dim}
    found: list[Group] = [frozenset()]
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


def further(group: Group, size: int, state: Sequence[Stored], unsplittable: Group = frozenset()) -> Group:
    """The dims that cut stored state the most on an axis of a size that has a group already; or none.

    Args:
      state: the tensors that are parameters or optimizer state.
      unsplittable: dims that are left whole.
    """
    tensors = [({name: n for name, n, _ in one.dims if n > 1}, one.bytes) for one in state]
    open_ = [dims for dims, _ in tensors if not dims.keys() & group]
    names = sorted({name for dims in open_ for name in dims} - group - unsplittable)
    barred = {name for dims, _ in tensors if dims.keys() & group for name in dims}
    choices = independent([n for n in names if n not in barred], [frozenset(dims) for dims in open_])

    def left(choice: Group) -> float:
        return sum(_left(dims, bytes, choice, size) for dims, bytes in tensors)

    best = min(choices, key=lambda choice: (left(choice), len(choice), sorted(choice)))
    return best if left(best) < 0.99 * left(frozenset()) else frozenset()


def _left(dims: Mapping[str, int], bytes: int, choice: Group, size: int) -> float:
    return bytes * math.prod(-(-n // size) / n for name, n in dims.items() if name in choice)
