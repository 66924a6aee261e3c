"""From a collective and hardware to seconds: rings on the levels of a network.

A collective takes `sent / rate + steps · latency`:

| kind | sent by each device | steps |
|---|---|---|
| all-gather, reduce-scatter | bytes · (n-1) / n | n-1 |
| all-reduce | 2 · bytes · (n-1) / n | 2 · (n-1) |
| all-to-all | bytes · (n-1) / n, in a torus bytes · n / 4 | n-1 |
| permute | bytes | 1 |

The rate is a device's bandwidth at that level; in a torus, that of both directions if the axis closes to a
ring. If a group spans levels (an axis of 16 GPUs in nodes of 8), its ring leaves a node once, through the
adapters of all its members there. The slowest level sets the rate, and each level has its own steps. A mesh
axis that is laid over two or three directions of a torus uses their links together.

**Hardware with a shape** (`tpu-v5e:16x16`): the axes of the mesh are laid over the directions of its network
in the way in which the program's collectives take the least time (`hardware/topology.py`). Members of a group
that are not neighbors share their links with the groups between them.

**Without a shape**, devices are numbered in mesh order: devices along the last axis are neighbors, on the
innermost and fastest level of the network, and each axis before it lies further out. A mesh axis longer than
the side of a torus is laid over two or three of its directions. Different mesh axes are assumed to have
separate links.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..core.errors import MeshError
from ..core.labels import OpLabel
from ..core.mesh import Mesh
from ..hardware.profile import Hardware, NetworkLevel
from ..hardware.topology import (
    Assignment,
    Part,
    assign_axes,
    device_count,
    directions_of,
    possible_assignments,
)
from .events import wire_bytes
from .facts import Collective

NO_OP = OpLabel.unlabeled("")


@dataclass(frozen=True)
class RingSegment:
    """The part of a group's ring on one level of the network.

    Attributes:
      level: the level.
      inside: members of the group in one unit of the next inner level.
      members: members of the group that this level connects.
      direction_rate: bytes/s that a device sends along one direction.
      rate: bytes/s of the ring: all members in a unit share the traffic that leaves it.
      length: the number of units along one direction.
      steps: the number of links from the first to the last unit.
    """

    level: NetworkLevel
    inside: int
    members: int
    direction_rate: float
    rate: float
    length: float
    steps: float


def ring_segments(
    axes: tuple[str, ...], mesh: Mesh, hardware: Hardware, assignment: Assignment | None = None
) -> list[RingSegment]:
    """The levels that a group over these axes spans, innermost first."""
    if assignment is not None:
        return _assigned_segments(axes, assignment)
    segments = []
    unit, inside = 1, 1
    for index, level in enumerate(hardware.network):
        outermost = index == len(hardware.network) - 1
        span = mesh.size if outermost or level.devices is None else level.devices
        members = _members(axes, mesh, span)
        if members > inside:
            ways = -(-members // inside)
            directions, length = level.length(ways, unit)
            rate = level.bandwidth * level.links(ways, directions)
            total = rate * directions * inside
            steps = directions * (length - 1)
            segments.append(RingSegment(level, inside, members, rate, total, length, steps))
        unit, inside = span, max(members, inside)
    return segments


def _members(axes: tuple[str, ...], mesh: Mesh, span: int) -> int:
    """The number of members of a group among `span` neighboring devices."""
    count, stride = 1, 1
    for name, size in reversed(mesh.axes):
        if name in axes:
            count *= min(size, max(1, span // stride))
        stride *= size
    return count


def _assigned_segments(axes: tuple[str, ...], assignment: Assignment) -> list[RingSegment]:
    """The levels that a group spans where the axes of its mesh have been assigned to directions."""
    segments = []
    inside = 1
    for level in dict.fromkeys(direction.level for direction in assignment.directions):
        parts = [p for p in assignment.of(axes) if assignment.directions[p.direction].level == level]
        if not parts:
            continue
        # In a torus, the groups between neighboring members use the same links.
        sharing = [part.stride if level.torus else 1 for part in parts]
        rate = level.bandwidth * _links(parts, sharing, assignment)
        steps = sum((part.size - 1) * hops for part, hops in zip(parts, sharing, strict=True))
        length = max(part.size for part in parts)
        members = inside * math.prod(part.size for part in parts)
        segments.append(RingSegment(level, inside, members, rate / len(parts), rate * inside, length, steps))
        inside = members
    return segments


def _links(parts: list[Part], sharing: list[int], assignment: Assignment) -> float:
    """The links that a device uses at once, in units of one link in one direction.

    A ring uses both directions of its links, and a line one of them. A block of several directions has a
    ring through all of its members. Only a group of entire directions uses the links of all of them at once:
    libtpu compiles collectives of other groups to a single ring ("1DRing").
    """
    directions = [assignment.directions[part.direction] for part in parts]
    if not directions[0].level.torus:
        return 1.0
    # A part that reaches around the direction closes to a ring, too.
    rings = [d.closes and p.size * p.stride == d.size for p, d in zip(parts, directions, strict=True)]
    if len(parts) == 1:
        return (2 if rings[0] else 1) / sharing[0]
    if all(ring and part.stride == 1 for ring, part in zip(rings, parts, strict=True)):
        return 2.0 * len(parts)
    return 2 / max(sharing)


def assign_mesh(collectives: Iterable[Collective], mesh: Mesh, hardware: Hardware) -> Assignment | None:
    """Where the axes of a mesh lie on a machine, so that these collectives take the least time.

    None if the hardware has no shape.
    """
    if not hardware.shape:
        return None
    if mesh.size != device_count(hardware):
        raise MeshError(
            f'mesh "{mesh}" has {mesh.size} devices, and {hardware.label} has {device_count(hardware)}',
            rule="the mesh has one position for each device of the slice",
            hint=f"choose another mesh; or leave out the shape: {hardware.name}",
        )
    runs: Counter[Collective] = Counter()
    for c in collectives:
        key = replace(c, op=NO_OP, phase="", source="", count=1, varies=())
        runs[key] += c.count

    def cost(assignment: Assignment) -> float:
        return sum(n * collective_seconds(c, mesh, hardware, assignment) for c, n in runs.items())

    return assign_axes(hardware, mesh.axes, cost)


def collective_seconds(
    c: Collective, mesh: Mesh, hardware: Hardware, assignment: Assignment | None = None
) -> float:
    """The seconds of one run of a collective.

    On hardware with a shape and without an assignment: those of the best assignment for this collective,
    which no assignment of all axes can undercut.
    """
    if hardware.shape and assignment is None:
        possible = possible_assignments(directions_of(hardware), mesh.axes)
        return min((_seconds(c, mesh, hardware, one) for one in possible), default=0.0)
    return _seconds(c, mesh, hardware, assignment)


def compiled_kind(kind: str, members: int, hardware: Hardware) -> str:
    """The kind to which a collective is compiled.

    libtpu 0.0.42.1 compiles a reduce-scatter over all devices of a TPU slice to an all-reduce and a slice, on
    v2 to v6e. In a 3-D torus whose sides are at least 4, it compiles an all-gather to an all-reduce of the
    pieces with zeros around them.
    """
    if not hardware.shape or not any(level.torus for level in hardware.network):
        return kind
    is_entire = members == device_count(hardware)
    is_cube = len(hardware.shape) == 3 and min(hardware.shape) >= 4
    becomes_sum = kind == "reduce-scatter" or (kind == "all-gather" and is_cube)
    return "all-reduce" if is_entire and becomes_sum else kind


def _seconds(c: Collective, mesh: Mesh, hardware: Hardware, assignment: Assignment | None) -> float:
    kind, ways = compiled_kind(c.kind, mesh.ways(c.axes), hardware), mesh.ways(c.axes)
    if kind != c.kind:
        c = replace(c, kind=kind, wire_bytes=wire_bytes(kind, c.bytes, ways))
    rings = ring_segments(c.axes, mesh, hardware, assignment)
    if not rings:
        return 0.0
    # A permute is one step: all pairs send at the same time, and the slowest link decides.
    if c.kind == "permute":
        return max(c.bytes / r.level.bandwidth + r.level.latency for r in rings)
    latency = sum(r.steps * r.level.latency for r in rings)
    if hardware.shared_cores:  # threads synchronize once, however many they are
        latency = max(r.level.latency for r in rings)
        return max(_copy_seconds(c, r, mesh) for r in rings) + latency
    if c.kind == "all-to-all":
        return max(_all_to_all_seconds(c.bytes, r, mesh.ways(c.axes)) for r in rings) + latency
    rounds = 2 if c.kind == "all-reduce" else 1
    return c.wire_bytes / min(r.rate for r in rings) + rounds * latency


def _copy_seconds(c: Collective, ring: RingSegment, mesh: Mesh) -> float:
    """The seconds of the copies of a collective between threads."""
    if c.kind == "all-to-all":
        return _all_to_all_seconds(c.bytes, ring, mesh.ways(c.axes))
    return c.wire_bytes / ring.rate


def _all_to_all_seconds(size: int, ring: RingSegment, ways: int) -> float:
    """The seconds of an all-to-all on one level.

    Through a switch each byte is sent once. In a torus it travels a quarter of a ring on average (a half of
    a line, which uses one link): the links carry bytes · length / 4 for each device.
    """
    if ring.level.torus:
        return size * ring.members / ways * ring.length / 4 / ring.direction_rate
    return size * (ring.members - ring.inside) / ways / ring.direction_rate
