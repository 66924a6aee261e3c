"""Meshes on physical networks: which links each axis of a mesh uses.

A machine of a known shape, such as `tpu-v5e:16x16` or `h100:16x8`, has directions: the sides of a torus, the
switch in a host, the network between hosts. Each axis of a mesh is laid over one direction, over several, or
over a part of one. `assign_axes` finds the assignment in which a program's collectives take the least time;
the order of the devices and the network model of plans follow from it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .profile import Hardware, NetworkLevel

SIDES = "xyz"
MeshAxes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Direction:
    """A direction of a machine's network.

    Attributes:
      name: `x`, or the name of the level.
      size: the number of devices, or groups of devices, along it.
      level: its links.
    """

    name: str
    size: int
    level: NetworkLevel

    @property
    def closes(self) -> bool:
        """Whether it is a torus direction that closes to a ring."""
        return bool(self.level.torus) and self.size > 2 and self.size % self.level.wrap == 0


@dataclass(frozen=True)
class Part:
    """The part of a direction that an axis of a mesh is laid over.

    Attributes:
      direction: the number of the direction.
      size: the members along it.
      stride: the distance of neighboring members.
    """

    direction: int
    size: int
    stride: int


@dataclass(frozen=True)
class Assignment:
    """Where the axes of a mesh lie on a machine.

    Attributes:
      directions: the directions of the machine, those between neighboring devices first.
      axes: the axes of the mesh.
      parts: the parts of directions that each axis is laid over.
    """

    directions: tuple[Direction, ...]
    axes: MeshAxes
    parts: tuple[tuple[Part, ...], ...]

    def of(self, names: Sequence[str]) -> list[Part]:
        """The parts that some axes are laid over together, one for each direction."""
        found: dict[int, list[Part]] = {}
        for (name, _), parts in zip(self.axes, self.parts, strict=True):
            for part in parts if name in names else ():
                found.setdefault(part.direction, []).append(part)
        return [
            Part(n, math.prod(p.size for p in parts), min(p.stride for p in parts))
            for n, parts in sorted(found.items())
        ]

    @property
    def order(self) -> list[int]:
        """The number of the device at each position of the mesh, in row-major order.

        Devices are numbered along the first direction, then along the next one.
        """
        strides = np.cumprod([1, *(d.size for d in self.directions)])[:-1]
        numbers = np.zeros([1], int)
        for (_, size), parts in zip(self.axes, self.parts, strict=True):
            along = np.zeros([1], int)
            for part in parts:
                steps = np.arange(part.size) * part.stride * strides[part.direction]
                along = (along[:, None] + steps).ravel()
            assert along.size == size
            numbers = (numbers[:, None] + along).ravel()
        return numbers.tolist()

    def describe(self) -> list[str]:
        """A line for each axis: `data: y (a ring of 16) and 2 of x, 8 apart`."""
        return [
            f"{name}: {' and '.join(map(self._describe, parts)) or 'one device'}"
            for (name, _), parts in zip(self.axes, self.parts, strict=True)
        ]

    def _describe(self, part: Part) -> str:
        direction = self.directions[part.direction]
        if part.size == direction.size:
            shape = "ring" if direction.closes else "line" if direction.level.torus else "group"
            return f"{direction.name} (a {shape} of {part.size})"
        apart = f", {part.stride} apart" if part.stride > 1 else ""
        return f"{part.size} of {direction.name}{apart}"


def directions_of(hardware: Hardware) -> tuple[Direction, ...]:
    """The directions of a machine with a shape.

    The shape has the sides of a torus, or the sizes of the levels, the outermost first. Levels inside of the
    torus have their own size.
    """
    torus = next((n for n, level in enumerate(hardware.network) if level.torus), None)
    if torus is None:
        levels = hardware.network[: len(hardware.shape)]
        sizes = tuple(reversed(hardware.shape))
        return tuple(Direction(level.name, n, level) for level, n in zip(levels, sizes, strict=True))
    inner, unit = [], 1
    for level in hardware.network[:torus]:
        size = (level.devices or 1) // unit
        inner.append(Direction(level.name, size, level))
        unit *= size
    level = hardware.network[torus]
    return (*inner, *(Direction(SIDES[n], size, level) for n, size in enumerate(hardware.shape)))


def device_count(hardware: Hardware) -> int:
    """The number of devices of a machine with a shape."""
    return math.prod(direction.size for direction in directions_of(hardware))


def assign_axes(hardware: Hardware, axes: MeshAxes, cost: Callable[[Assignment], float]) -> Assignment:
    """The assignment of a mesh's axes with the lowest cost."""
    return min(possible_assignments(directions_of(hardware), axes), key=cost)


@functools.lru_cache(maxsize=256)
def possible_assignments(directions: tuple[Direction, ...], axes: MeshAxes) -> tuple[Assignment, ...]:
    """The assignments of the axes of a mesh to the directions of a machine with as many devices.

    Those with the fewest parts come first. In a torus an axis may take a part of each direction: a block of
    2 x 2 chips is a ring, and a line of 4 is not. Between switches an axis leaves a host only if it is too
    long: collectives inside of a host have faster algorithms.
    """
    sizes = tuple(direction.size for direction in directions)
    lengths = [size for _, size in axes]
    has_torus = any(direction.level.torus for direction in directions)
    factorizations = _factorizations(sizes, lengths) if has_torus else _nestings(sizes, lengths)
    found = []
    for factors in dict.fromkeys(factorizations):
        # The axes that share a direction, in every order: the first ones have the nearest neighbors.
        sharing = [[a for a in range(len(axes)) if factors[a][d] > 1] for d in range(len(directions))]
        for orders in itertools.product(*map(itertools.permutations, sharing)):
            parts: list[list[Part]] = [[] for _ in axes]
            for d, order in enumerate(orders):
                stride = 1
                for a in order:
                    parts[a].append(Part(d, factors[a][d], stride))
                    stride *= factors[a][d]
            found.append(Assignment(directions, axes, tuple(map(tuple, parts))))
    return tuple(sorted(found, key=lambda one: sum(map(len, one.parts))))


def _nestings(sizes: tuple[int, ...], axes: list[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The factors of axes that fill the directions one after the other, for each order of the axes."""
    for order in itertools.permutations(range(len(axes))):
        left = list(sizes)
        factors: dict[int, tuple[int, ...]] = {}
        for axis in order:
            length, row = axes[axis], []
            for d, size in enumerate(left):
                row.append(math.gcd(length, size))
                length //= row[-1]
                left[d] //= row[-1]
            if length > 1:
                break
            factors[axis] = tuple(row)
        else:
            yield tuple(factors[axis] for axis in range(len(axes)))


def _factorizations(sizes: tuple[int, ...], axes: list[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The ways to write each axis as a product of a factor per direction, so that all directions are full."""
    if not axes:
        if all(size == 1 for size in sizes):
            yield ()
        return
    first, *rest = axes
    for factors in _factors(first, sizes):
        left = tuple(size // factor for size, factor in zip(sizes, factors, strict=True))
        for others in _factorizations(left, rest):
            yield (factors, *others)


def _factors(number: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The ways to write a number as a product of divisors of these sizes."""
    if not sizes:
        if number == 1:
            yield ()
        return
    for factor in range(1, math.gcd(number, sizes[0]) + 1):
        if number % factor == 0 and sizes[0] % factor == 0:
            for rest in _factors(number // factor, sizes[1:]):
                yield (factor, *rest)


def arrange(devices: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """Devices in the order of a mesh's positions.

    Args:
      devices: those of a TPU slice, which have coordinates, or of GPUs, by host.
      order: `Assignment.order`.
    """

    def position(device: Any) -> tuple[int, ...]:
        # JAX's GPUs have coordinates too, which are all zeros.
        if not hasattr(device, "core_on_chip"):
            return (device.id,)
        return (*reversed(device.coords), device.core_on_chip)

    numbered = sorted(devices, key=position)
    return [numbered[n] for n in order]
