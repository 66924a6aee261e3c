"""From a plan and hardware to seconds: a roofline for local work, rings for collectives.

**Local work** takes the longer of its multiplications, `flops / (peak · matmul_efficiency)`, and its memory
traffic, `bytes / bandwidth`.

**Collectives.** Devices are numbered as the mesh lists them: members of the last axis are neighbours, on the
innermost and fastest level of the network, and each axis before it lies further out. A collective takes
`sent / pace + steps · latency`:

| kind | sent by each device | steps |
|---|---|---|
| all-gather, reduce-scatter | bytes · (n-1) / n | n-1 |
| all-reduce | 2 · bytes · (n-1) / n | 2 · (n-1) |
| all-to-all | bytes · (n-1) / n, in a torus bytes · n / 4 | n-1 |
| permute | bytes | 1 |

Sums of gradients over the same axes are one, as compilers make them: their steps count once.

The pace is a device's bandwidth at that level; in a torus, that of both directions if the axis closes to a
ring. Where a group spans levels (an axis of 16 GPUs in nodes of 8), its ring leaves a node once, through the
adapters of all its members there, and the slowest level sets the pace; each level has its own steps. A mesh
axis longer than a torus's side is laid over two or three of its directions and uses their links together.
Different mesh axes are taken to have links of their own.

**Overlap.** Two numbers: `total_seconds` does one thing after the other; `overlapped_seconds` lets some
collectives hide behind the compute of their phase, see `hideable`.

**Virtual devices** (`shared_cores`): the numbers are those of one core, and d devices on c cores take d/c
times as long, for everything: the network is copies by the same cores, and nothing hides behind anything; so
multiplications and memory traffic add up as well. Threads meet once for a collective, however many they are:
the latency counts once, not for each step of a ring.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..core.layout import axes_of
from ..core.mesh import Mesh
from ..hardware.profile import Hardware, NetworkLevel
from .facts import Collective, Event, PlannedTensor, Work

if TYPE_CHECKING:
    from .plan import Plan


@dataclass(frozen=True)
class Time:
    """What one call takes, in seconds. Compute, memory and network add up to the total.

    Attributes:
      hardware: the machine.
      total_seconds: one thing after the other.
      overlapped_seconds: with what may hide behind compute hidden.
      compute_seconds: of multiplications; of work that they bound, where devices are real.
      memory_seconds: of memory traffic; of work that it bounds, where devices are real.
      network_seconds: of collectives, by axis; several axes together are `"pod+data"`.
      events: the timeline without overlap, in order; `start`, `seconds` (all its calls together), `kind`
        compute or network, `axis`, `index` into `plan.events`, `bound` and `hideable`.
      flops_share: the share of the peak that the useful multiplications reach: model FLOPs utilisation.
    """

    hardware: Hardware
    total_seconds: float
    overlapped_seconds: float
    compute_seconds: float
    memory_seconds: float
    network_seconds: dict[str, float]
    events: list[dict[str, Any]]
    flops_share: float

    @property
    def bound(self) -> str:
        """What takes longest: compute, memory or network."""
        parts = {
            "compute": self.compute_seconds,
            "memory": self.memory_seconds,
            "network": sum(self.network_seconds.values()),
        }
        return max(parts, key=parts.__getitem__)

    def to_data(self) -> dict[str, Any]:
        """The time as JSON's kinds of things."""
        return {
            "hardware": self.hardware.name,
            "total_seconds": self.total_seconds,
            "overlapped_seconds": self.overlapped_seconds,
            "compute_seconds": self.compute_seconds,
            "memory_seconds": self.memory_seconds,
            "network_seconds": self.network_seconds,
            "bound": self.bound,
            "flops_share": self.flops_share,
            "events": self.events,
        }


def estimate_time(plan: Plan, hardware: Any) -> Time:
    """The predicted time of a plan on a machine.

    Args:
      hardware: a profile's name, a TOML file's path, or `HardwareCommand`.
    """
    hardware = Hardware.of(hardware)
    sharing = plan.mesh.size / hardware.shared_cores if hardware.shared_cores else 1.0
    dtype = main_dtype(plan)
    events: list[dict[str, Any]] = []
    sums: dict[str, float] = defaultdict(float)  # by what bounds it
    network: dict[str, float] = defaultdict(float)
    hidden: dict[str, float] = defaultdict(float)  # by phase
    shade: dict[str, float] = defaultdict(float)
    now = 0.0
    merged: set[tuple[str, ...]] = set()  # axes over which gradients were summed already
    for index, event in enumerate(plan.events):
        parts = _seconds(event, plan.mesh, hardware, dtype)
        if isinstance(event, Collective) and is_gradient_sum(event):
            if event.axes in merged:
                parts["network"] -= collective_seconds(
                    replace(event, bytes=0, wire_bytes=0), plan.mesh, hardware
                )
            merged.add(event.axes)
        bound = max(parts, key=parts.__getitem__)
        times = event.count * sharing
        seconds = sum(parts.values()) * times
        axis, hides = "", False
        if isinstance(event, Collective):
            axis = event.over
            network[axis] += seconds
            hides = not hardware.shared_cores and can_overlap(event, plan)
            hidden[event.phase] += seconds if hides else 0.0
        else:
            sums["compute"] += parts["compute"] * times
            sums["memory"] += parts["memory"] * times
            shade[event.phase] += seconds
        kind = "network" if bound == "network" else "compute"
        row = {"start": now, "seconds": seconds, "kind": kind, "axis": axis, "index": index}
        events.append(row | {"bound": bound, "hideable": hides})
        now += seconds
    overlapped = now - sum(min(seconds, shade[phase]) for phase, seconds in hidden.items())
    unique = sum(w.unique_flops * w.count / hardware.peak(w.dtype or dtype) for w in plan.work)
    useful = unique / plan.mesh.size * sharing
    return Time(
        hardware,
        now,
        overlapped,
        sums["compute"],
        sums["memory"],
        dict(network),
        events,
        useful / overlapped if overlapped else 0.0,
    )


def _seconds(event: Event, mesh: Mesh, hardware: Hardware, dtype: str) -> dict[str, float]:
    """One run of an event on real devices, by what takes it."""
    if isinstance(event, Collective):
        return {"network": collective_seconds(event, mesh, hardware)}
    compute, memory = work_seconds(event, hardware, dtype)
    if hardware.shared_cores:
        return {"compute": compute, "memory": memory}
    return {"compute": compute, "memory": 0.0} if compute > memory else {"compute": 0.0, "memory": memory}


def work_seconds(work: Work, hardware: Hardware, dtype: str) -> tuple[float, float]:
    """The seconds of its multiplications and of its memory traffic; a real device does both at once."""
    peak = hardware.peak(getattr(work, "dtype", "") or dtype)
    return work.flops / (peak * hardware.matmul_efficiency), work.bytes / hardware.memory_bandwidth


# The network


@dataclass(frozen=True)
class RingSegment:
    """The part of a group's ring on one level of the network.

    Attributes:
      inside: members of the group in one unit of the level inside this one.
      members: members of the group that this level joins.
      ways: into how many such units they fall.
      directions: over how many directions of a torus it is laid.
      length: how many units one direction has.
    """

    level: NetworkLevel
    inside: int
    members: int
    ways: int
    directions: int
    length: float

    @property
    def lane(self) -> float:
        """Bytes/s that a device sends along one direction."""
        return self.level.bandwidth * self.level.links(self.ways, self.directions)

    @property
    def pace(self) -> float:
        """Bytes/s of the ring: all members inside a unit leave it together."""
        return self.lane * self.directions * self.inside

    @property
    def steps(self) -> float:
        return self.directions * (self.length - 1)


def ring_segments(axes: tuple[str, ...], mesh: Mesh, hardware: Hardware) -> list[RingSegment]:
    """The levels that a group over these axes spans, from the innermost outwards."""
    found = []
    unit, inside = 1, 1
    for place, level in enumerate(hardware.network):
        outermost = place == len(hardware.network) - 1
        span = mesh.size if outermost or level.devices is None else level.devices
        members = _members(axes, mesh, span)
        if members > inside:
            ways = -(-members // inside)
            found.append(RingSegment(level, inside, members, ways, *level.length(ways, unit)))
        unit, inside = span, max(members, inside)
    return found


def _members(axes: tuple[str, ...], mesh: Mesh, span: int) -> int:
    """How many members of a group lie among that many neighbouring devices."""
    count, stride = 1, 1
    for name, size in reversed(mesh.axes):
        if name in axes:
            count *= min(size, max(1, span // stride))
        stride *= size
    return count


def collective_seconds(c: Collective, mesh: Mesh, hardware: Hardware) -> float:
    """One run of a collective."""
    rings = ring_segments(c.axes, mesh, hardware)
    if not rings:
        return 0.0
    if c.kind == "permute":
        return max(c.bytes / r.level.bandwidth + r.level.latency for r in rings)
    latency = sum(r.steps * r.level.latency for r in rings)
    if hardware.shared_cores:  # threads meet once, however many they are
        latency = max(r.level.latency for r in rings)
        return max(_shared(c, r, mesh) for r in rings) + latency
    if c.kind == "all-to-all":
        return max(_exchange(c.bytes, r, mesh.ways(c.axes)) for r in rings) + latency
    rounds = 2 if c.kind == "all-reduce" else 1
    return c.wire_bytes / min(r.pace for r in rings) + rounds * latency


def _shared(c: Collective, ring: RingSegment, mesh: Mesh) -> float:
    """The bytes of a collective between threads: copies."""
    if c.kind == "all-to-all":
        return _exchange(c.bytes, ring, mesh.ways(c.axes))
    return c.wire_bytes / ring.pace


def _exchange(size: int, ring: RingSegment, ways: int) -> float:
    """Every member's bytes to every other one, on one level.

    Through a switch each byte goes once. In a torus it goes a quarter of a ring on average (a half of a line,
    which has one link at work): the links carry bytes · length / 4 for each device.
    """
    if ring.level.torus:
        return size * ring.members / ways * ring.length / 4 / ring.lane
    return size * (ring.members - ring.inside) / ways / ring.lane


# Overlap


def can_overlap(c: Collective, plan: Plan) -> bool:
    """Whether a collective may run beside the compute of its phase.

    Two kinds may, because no op close by waits for them:

    - sums of gradients (all-reduce or reduce-scatter) in the backward pass, which only the update needs;
    - gathers of parameters that are stored split (ZeRO-3), which can be fetched ahead, and the
      reduce-scatters that give back their gradients. They are told by their op, which has the dim that
      is stored split, and by their size: over all calls they carry whole copies of the tensor, in its
      dtype or in half of it.

    In each phase, at most the phase's compute hides them. Sums of activations never hide: the next op
    waits for them. It is a bound, not a promise: the first gather and the last gradient have nothing to
    hide behind, and a compiler may not find the overlap.
    """
    if is_gradient_sum(c) or (c.phase == "backward" and c.kind == "reduce-scatter" and _of_gradient(c)):
        return True
    if c.phase == "update":  # the next step waits for what was updated
        return False
    gathers = c.kind == "all-gather" or (c.kind == "reduce-scatter" and c.phase == "backward")
    return gathers and any(_carries(c, s, plan.mesh) for s in plan.stored if s.role == "param")


def _of_gradient(c: Collective) -> bool:
    return c.op.startswith("gradient[")


def is_gradient_sum(c: Collective) -> bool:
    """Whether it is an all-reduce of a gradient; compilers make those over the same axes one."""
    return c.phase == "backward" and c.kind == "all-reduce" and _of_gradient(c)


def _carries(c: Collective, s: PlannedTensor, mesh: Mesh) -> bool:
    split = axes_of(axes for _, _, axes in s.dims)
    whole = s.bytes * mesh.ways(c.axes)
    pieces = {name for name, _, axes in s.dims if set(axes) & set(c.axes)}
    meant = c.op.startswith("scan[") or pieces & set(re.findall(r"[\w.']+", c.op))
    return bool(meant) and set(c.axes) <= split and whole > 0 and 2 * c.bytes * c.count % whole == 0


def main_dtype(plan: Plan) -> str:
    """The floating-point type that most of what is stored has; work that has none of its own is of it."""
    sizes: dict[str, int] = defaultdict(int)
    for s in plan.stored:
        if "f" in s.dtype and s.kind == "input":
            sizes[s.dtype] += s.bytes
    return max(sizes, key=sizes.__getitem__) if sizes else "f32"
