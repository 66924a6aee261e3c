"""What is searched: meshes of so many devices, and for each all legal layouts of a program's dims.

A layout is legal if no tensor, and no union of dims of an op, has two dims on one axis. So each axis takes a
set of dims of which no two ever meet, and the axes choose theirs independently: the layouts of a mesh are the
product of these sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..layout import Layout
from ..mesh import Mesh

Sizes = tuple[int, ...]
Group = frozenset[str]  # the names of dims that are on one axis, or that meet in one op


@dataclass(frozen=True)
class Candidate:
    """A mesh and a layout.

    Attributes:
      sizes: of the mesh's axes; members of the last one are neighbours.
      groups: for each axis the dims that are on it.
      variant: which of the functions that are searched.
    """

    sizes: Sizes
    groups: tuple[Group, ...]
    variant: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names for the axes, after what is on them."""
        names: list[str] = []
        for group in self.groups:
            wanted = ["data"] if "batch" in group else ["model"]
            free = (n for n in (*wanted, "second", "third") if n not in names)
            names.append(next(free))
        return tuple(names)

    @property
    def mesh(self) -> Mesh:
        return Mesh(list(zip(self.names, self.sizes, strict=True)))

    @property
    def layout(self) -> Layout:
        """A dim on several axes is split in the mesh's order of them."""
        names = self.names
        rules = {
            dim: "+".join(name for name, group in zip(names, self.groups, strict=True) if dim in group)
            for dim in sorted(frozenset().union(*self.groups))
        }
        return Layout(rules)


def factorisations(devices: int, axes: int) -> list[Sizes]:
    """The sizes of all meshes of so many devices with at most so many axes, each of at least 2.

    >>> factorisations(8, 2)
    [(8,), (2, 4), (4, 2)]
    >>> factorisations(1, 3)
    [()]
    """

    def parts(left: int, count: int) -> Iterator[Sizes]:
        if count == 1:
            yield (left,)
            return
        for first in range(2, left // 2 + 1):
            if left % first == 0:
                yield from ((first, *rest) for rest in parts(left // first, count - 1))

    if devices == 1:
        return [()]
    return [sizes for count in range(1, axes + 1) for sizes in parts(devices, count) if min(sizes) > 1]


def independent(dims: Sequence[str], meetings: Iterable[Group]) -> list[Group]:
    """All sets of dims of which no two meet, the empty one first.

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
    return sorted(found, key=lambda group: (len(group), sorted(group)))
