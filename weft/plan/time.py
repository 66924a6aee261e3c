"""From a plan and hardware to seconds: a roofline for local work, rings for collectives.

**Local work** takes the longer of its compute time, `flops / (peak · matmul_efficiency)`, and its memory
time, `bytes / bandwidth`.

**Collectives.** Devices are numbered in mesh order: devices along the last axis are neighbors, on the
innermost and fastest level of the network, and each axis before it lies further out. A collective takes
`sent / rate + steps · latency`:

| kind | sent by each device | steps |
|---|---|---|
| all-gather, reduce-scatter | bytes · (n-1) / n | n-1 |
| all-reduce | 2 · bytes · (n-1) / n | 2 · (n-1) |
| all-to-all | bytes · (n-1) / n, in a torus bytes · n / 4 | n-1 |
| permute | bytes | 1 |

Compilers merge the sums of gradients over the same axes: their latency counts once.

The rate is a device's bandwidth at that level; in a torus, that of both directions if the axis closes to a
ring. If a group spans levels (an axis of 16 GPUs in nodes of 8), its ring leaves a node once, through the
adapters of all its members there. The slowest level sets the rate, and each level has its own steps. A mesh
axis longer than the side of a torus is laid over two or three of its directions and uses their links
together. Different mesh axes are assumed to have separate links.

**Overlap.** `total_seconds` is without overlap; in `overlapped_seconds` some collectives overlap with the
compute of their phase, see `can_overlap`.

**Virtual devices** (`shared_cores`): the numbers are those of one core, and d devices on c cores take d/c
times as long, for everything. The same cores copy the data of collectives, so nothing overlaps, and compute
and memory time add up as well. Threads synchronize once per collective, however many they are: the latency
counts once, not for each step of a ring.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..core.labels import GRADIENT
from ..core.layout import axes_of
from ..core.mesh import Mesh
from ..hardware.profile import Hardware, HardwareLike, NetworkLevel
from .facts import Collective, Event, PlannedTensor, Work

if TYPE_CHECKING:
    from .plan import Plan


@dataclass(frozen=True)
class Time:
    """The predicted seconds of one call. Compute, memory and network add up to the total.

    Attributes:
      hardware: the machine.
      total_seconds: the time without overlap.
      overlapped_seconds: the time with overlap.
      compute_seconds: the time of FLOPs; on real devices only of work that they bound.
      memory_seconds: the time of memory traffic; on real devices only of work that it bounds.
      network_seconds: the time of collectives, by axis; several axes together are `"pod+data"`.
      events: the timeline without overlap, in order; `start`, `seconds` (of all its calls), `kind`
        compute or network, `axis`, `index` into `plan.events`, `bound` and `hideable`.
      flops_share: the share of the peak that unique FLOPs reach: model FLOPs utilization.
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
        """The time as JSON-compatible data."""
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


def estimate_time(plan: Plan, hardware: HardwareLike) -> Time:
    """The predicted time of a plan on a machine.

    Args:
      plan: the plan.
      hardware: the name of a profile, the path of a TOML file, or `Hardware`.
    """
    hardware = Hardware.of(hardware)
    sharing = plan.mesh.size / hardware.shared_cores if hardware.shared_cores else 1.0
    dtype = main_dtype(plan)
    events: list[dict[str, Any]] = []
    local: dict[str, float] = defaultdict(float)
    network: dict[str, float] = defaultdict(float)
    # By phase, because a collective overlaps with the local work of its own phase only: a sum of gradients
    # can't overlap with the forward pass, which precedes it.
    overlapping: dict[str, float] = defaultdict(float)
    available: dict[str, float] = defaultdict(float)
    now = 0.0
    # Compilers merge the gradient sums over the same axes, so only the first one pays the latency.
    merged: set[tuple[str, ...]] = set()
    for index, event in enumerate(plan.events):
        parts = _seconds(event, plan.mesh, hardware, dtype)
        if isinstance(event, Collective) and is_gradient_sum(event):
            if event.axes in merged:
                empty = replace(event, bytes=0, wire_bytes=0)
                parts["network"] -= collective_seconds(empty, plan.mesh, hardware)
            merged.add(event.axes)
        bound = max(parts, key=parts.__getitem__)
        scale = event.count * sharing
        seconds = sum(parts.values()) * scale
        axis, overlaps = "", False
        if isinstance(event, Collective):
            axis = event.over
            network[axis] += seconds
            overlaps = not hardware.shared_cores and can_overlap(event, plan)
            overlapping[event.phase] += seconds if overlaps else 0.0
        else:
            local["compute"] += parts["compute"] * scale
            local["memory"] += parts["memory"] * scale
            available[event.phase] += seconds
        kind = "network" if bound == "network" else "compute"
        row = {"start": now, "seconds": seconds, "kind": kind, "axis": axis, "index": index}
        events.append(row | {"bound": bound, "hideable": overlaps})
        now += seconds
    overlapped = now - sum(min(seconds, available[phase]) for phase, seconds in overlapping.items())
    unique = sum(w.unique_flops * w.count / hardware.peak(w.dtype or dtype) for w in plan.work)
    useful = unique / plan.mesh.size * sharing
    return Time(
        hardware,
        now,
        overlapped,
        local["compute"],
        local["memory"],
        dict(network),
        events,
        useful / overlapped if overlapped else 0.0,
    )


def _seconds(event: Event, mesh: Mesh, hardware: Hardware, dtype: str) -> dict[str, float]:
    """The seconds of one run of an event, by resource."""
    if isinstance(event, Collective):
        return {"network": collective_seconds(event, mesh, hardware)}
    compute, memory = work_seconds(event, hardware, dtype)
    if hardware.shared_cores:
        return {"compute": compute, "memory": memory}
    # Roofline: the shorter of the two overlaps with the longer one.
    return {"compute": compute, "memory": 0.0} if compute > memory else {"compute": 0.0, "memory": memory}


def work_seconds(work: Work, hardware: Hardware, dtype: str) -> tuple[float, float]:
    """The seconds of its FLOPs and of its memory traffic."""
    peak = hardware.peak(getattr(work, "dtype", "") or dtype)
    return work.flops / (peak * hardware.matmul_efficiency), work.bytes / hardware.memory_bandwidth


@dataclass(frozen=True)
class RingSegment:
    """The part of a group's ring on one level of the network.

    Attributes:
      level: the level.
      inside: members of the group in one unit of the next inner level.
      members: members of the group that this level connects.
      ways: the number of such units that contain members.
      directions: the number of torus directions that the ring uses.
      length: the number of units along one direction.
    """

    level: NetworkLevel
    inside: int
    members: int
    ways: int
    directions: int
    length: float

    @property
    def direction_rate(self) -> float:
        """Bytes/s that a device sends along one direction."""
        return self.level.bandwidth * self.level.links(self.ways, self.directions)

    @property
    def rate(self) -> float:
        """Bytes/s of the ring: all members in a unit share the traffic that leaves it."""
        return self.direction_rate * self.directions * self.inside

    @property
    def steps(self) -> float:
        return self.directions * (self.length - 1)


def ring_segments(axes: tuple[str, ...], mesh: Mesh, hardware: Hardware) -> list[RingSegment]:
    """The levels that a group over these axes spans, innermost first."""
    segments = []
    unit, inside = 1, 1
    for index, level in enumerate(hardware.network):
        outermost = index == len(hardware.network) - 1
        span = mesh.size if outermost or level.devices is None else level.devices
        members = _members(axes, mesh, span)
        if members > inside:
            ways = -(-members // inside)
            segments.append(RingSegment(level, inside, members, ways, *level.length(ways, unit)))
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


def collective_seconds(c: Collective, mesh: Mesh, hardware: Hardware) -> float:
    """The seconds of one run of a collective."""
    rings = ring_segments(c.axes, mesh, hardware)
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


def can_overlap(c: Collective, plan: Plan) -> bool:
    """Whether a collective can overlap with the compute of its phase.

    Two kinds can, because no nearby op waits for them:

    - sums of gradients (all-reduce or reduce-scatter) in the backward pass, which only the update needs;
    - gathers of parameters that are stored split (ZeRO-3), which can be prefetched, and the
      reduce-scatters of their gradients. They are recognized by their op, whose label has the dim that
      is stored split, and by their size: over all calls they transfer full copies of the tensor, in its
      dtype or in half of its width.

    At most the compute time of the phase overlaps. Sums of activations never overlap: the next op waits for
    them. This is an upper bound: the first gather and the last gradient have no compute to overlap with, and
    a compiler may miss the overlap.
    """
    if is_gradient_sum(c) or (c.phase == "backward" and c.kind == "reduce-scatter" and _is_gradient_op(c)):
        return True
    if c.phase == "update":  # the next step waits for the updated parameters
        return False
    gathers = c.kind == "all-gather" or (c.kind == "reduce-scatter" and c.phase == "backward")
    return gathers and any(_transfers(c, t, plan.mesh) for t in plan.stored if t.role == "param")


def _is_gradient_op(c: Collective) -> bool:
    return c.op.name == GRADIENT


def is_gradient_sum(c: Collective) -> bool:
    """Whether it is an all-reduce of a gradient; compilers merge those over the same axes."""
    return c.phase == "backward" and c.kind == "all-reduce" and _is_gradient_op(c)


def _transfers(c: Collective, t: PlannedTensor, mesh: Mesh) -> bool:
    """Whether a collective gathers a stored tensor, or scatters its gradient."""
    split = axes_of(tuple(axes for _, _, axes in t.dims))
    gathered = t.bytes * mesh.ways(c.axes)
    split_dims = {name for name, _, axes in t.dims if set(axes) & set(c.axes)}
    # A scan gathers the layers that it runs over; its label does not list the dims of each stored tensor.
    matches = c.op.name == "scan" or split_dims & c.op.dims
    # The factor 2 admits gathers after a cast to half of the width.
    is_full = gathered > 0 and 2 * c.bytes * c.count % gathered == 0
    return bool(matches) and set(c.axes) <= split and is_full


def main_dtype(plan: Plan) -> str:
    """The floating-point dtype of most of the inputs, for work without a dtype."""
    sizes: dict[str, int] = defaultdict(int)
    for s in plan.stored:
        if "f" in s.dtype and s.kind == "input":
            sizes[s.dtype] += s.bytes
    return max(sizes, key=sizes.__getitem__) if sizes else "f32"
