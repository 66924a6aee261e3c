"""From a plan and hardware to seconds: a roofline for local work, rings for collectives.

**Local work** takes the longer of its compute time, `flops / (peak · matmul_efficiency)`, and its memory
time, `bytes / bandwidth`.

**Collectives** take the time of their network, see `plan/network.py`. Compilers merge the sums of gradients
over the same axes: their latency counts once.

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
from ..hardware.profile import Hardware, HardwareLike
from ..hardware.topology import Assignment
from .facts import Collective, Event, PlannedTensor, Work
from .network import assign_mesh, collective_seconds

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
      assignment: where the axes of the mesh lie, if the hardware has a shape.
    """

    hardware: Hardware
    total_seconds: float
    overlapped_seconds: float
    compute_seconds: float
    memory_seconds: float
    network_seconds: dict[str, float]
    events: list[dict[str, Any]]
    flops_share: float
    assignment: Assignment | None = None

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
            "hardware": self.hardware.label,
            "total_seconds": self.total_seconds,
            "overlapped_seconds": self.overlapped_seconds,
            "compute_seconds": self.compute_seconds,
            "memory_seconds": self.memory_seconds,
            "network_seconds": self.network_seconds,
            "bound": self.bound,
            "flops_share": self.flops_share,
            "assignment": self.assignment.describe() if self.assignment is not None else None,
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
    assignment = assign_mesh(plan.collectives, plan.mesh, hardware)
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
        parts = _seconds(event, plan.mesh, hardware, dtype, assignment)
        if isinstance(event, Collective) and is_gradient_sum(event):
            if event.axes in merged:
                empty = replace(event, bytes=0, wire_bytes=0)
                parts["network"] -= collective_seconds(empty, plan.mesh, hardware, assignment)
            merged.add(event.axes)
        bound = max(parts, key=parts.__getitem__)
        scale = event.count * sharing
        seconds = sum(parts.values()) * scale
        axis, overlaps = "", False
        if isinstance(event, Collective):
            axis = event.over
            network[axis] += seconds
            overlaps = not hardware.shared_cores and can_overlap(event, plan, hardware)
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
        assignment,
    )


def _seconds(
    event: Event, mesh: Mesh, hardware: Hardware, dtype: str, assignment: Assignment | None
) -> dict[str, float]:
    """The seconds of one run of an event, by resource."""
    if isinstance(event, Collective):
        return {"network": collective_seconds(event, mesh, hardware, assignment)}
    compute, memory = work_seconds(event, hardware, dtype)
    if hardware.shared_cores:
        return {"compute": compute, "memory": memory}
    # Roofline: the shorter of the two overlaps with the longer one.
    return {"compute": compute, "memory": 0.0} if compute > memory else {"compute": 0.0, "memory": memory}


def work_seconds(work: Work, hardware: Hardware, dtype: str) -> tuple[float, float]:
    """The seconds of its FLOPs and of its memory traffic."""
    peak = hardware.peak(getattr(work, "dtype", "") or dtype)
    return work.flops / (peak * hardware.matmul_efficiency), work.bytes / hardware.memory_bandwidth


def can_overlap(c: Collective, plan: Plan, hardware: Hardware) -> bool:
    """Whether a collective can overlap with the compute of its phase.

    The compiler of the machine must do it (`Hardware.overlapped`). Two kinds can, because no nearby op waits
    for them:

    - sums of gradients (all-reduce or reduce-scatter) in the backward pass, which only the update needs;
    - gathers of parameters that are stored split (ZeRO-3), which can be prefetched, and the
      reduce-scatters of their gradients. They are recognized by their op, whose label has the dim that
      is stored split, and by their size: over all calls they transfer full copies of the tensor, in its
      dtype or in half of its width.

    At most the compute time of the phase overlaps. Sums of activations never overlap: the next op waits for
    them. This is an upper bound: the first gather and the last gradient have no compute to overlap with, and
    a compiler may miss the overlap.
    """
    if c.kind not in hardware.overlapped:
        return False
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
