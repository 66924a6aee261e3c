"""The plan: what one call of a program does on each device, known before it runs.

    plan = program.plan(*args)          # tensors, or wf.spec(dims, dtype)
    print(plan.explain())

It is derived from the traced program and needs no devices.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
from jax.typing import DTypeLike

from ..core.describe import short_dtype
from ..core.dims import Dim
from ..core.errors import MeshError, ProgramError, TensorTypeError
from ..core.field_types import PositiveInt
from ..core.fields import argument_types, check_values
from ..core.layout import Placement, axes_of
from ..core.mesh import Mesh
from ..core.traced import Traced
from ..hardware.profile import Hardware, HardwareLike
from .events import TracedEvent, find_unbounded_loops, find_unknown_primitives, trace_events
from .facts import (
    VERSION,
    Advice,
    Collective,
    Event,
    Memory,
    PipelinePlan,
    PlannedTensor,
    ReshardedInput,
    UnboundedLoop,
    UnknownPrimitive,
    Work,
    to_jsonable,
)
from .inputs import find_resharded_inputs
from .jaxpr import read_jaxpr
from .kernel_work import kernel_events
from .memory.buffers import BufferAssignment, assign_buffers, summarize_memory
from .memory.platforms import PLATFORMS
from .pipelines import plan_pipelines
from .units import human_bytes, human_count

if TYPE_CHECKING:
    from ..compilers.compiled import Compiled
    from .time import Time


@dataclass(frozen=True, repr=False)
class Plan:
    """What one call of a program does.

    Attributes:
      name: the name of the function.
      mesh, layout: the mesh and the layout.
      events: work and collectives in program order.
      stored: the inputs and outputs.
      memory: bytes on one device.
      pipelines: stacks of layers that run as pipelines.
      moved: inputs that are resharded before each call; no other number includes them.
      loops: loops with an unknown number of iterations; one is counted.
      unknown: primitives without a row in the table of primitives; their cost is a guess.

    >>> import weft as wf
    >>> program = wf.spmd(lambda x: wf.sum(x, "d"), "data=4 model=2", "batch:data d:model")
    >>> plan = program.plan(wf.spec("batch=8 d=6"))
    >>> [(c.kind, c.axes, c.bytes) for c in plan.collectives]
    [('all-reduce', ('model',), 8)]
    """

    name: str
    mesh: Mesh
    layout: str
    events: tuple[Event, ...]
    stored: tuple[PlannedTensor, ...]
    memory: Memory
    pipelines: tuple[PipelinePlan, ...] = ()
    moved: tuple[ReshardedInput, ...] = ()
    loops: tuple[UnboundedLoop, ...] = ()
    unknown: tuple[UnknownPrimitive, ...] = ()
    _plan_on: Callable[[Hardware], Plan] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        sent, peak = human_bytes(sum(self.comm_bytes.values())), human_bytes(self.memory.peak)
        return (
            f'<plan of {self.name} on mesh "{self.mesh}" with {self.layout}; on each device '
            f"{human_count(self.flops)} FLOPs, {sent} in collectives, a peak of {peak}>"
        )

    def _repr_html_(self) -> str:
        from .html import plan_summary

        return plan_summary(self)

    # Totals are cached: reports, advice and the search read them many times, and large plans have thousands
    # of events.

    @functools.cached_property
    def work(self) -> tuple[Work, ...]:
        """The local work."""
        return tuple(e for e in self.events if isinstance(e, Work))

    @functools.cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives."""
        return tuple(e for e in self.events if isinstance(e, Collective))

    @functools.cached_property
    def flops(self) -> int:
        """FLOPs of matmuls, convolutions, factorizations and Fourier transforms on one device."""
        return sum(w.flops * w.count for w in self.work)

    @functools.cached_property
    def unique_flops(self) -> int:
        """FLOPs over all devices; duplicated work counts once."""
        return sum(w.unique_flops * w.count for w in self.work)

    @property
    def duplication(self) -> float:
        """How many devices do the same work on average; 1 is the best."""
        return self.flops * self.mesh.size / self.unique_flops if self.unique_flops else 1.0

    @functools.cached_property
    def comm_bytes(self) -> dict[str, int]:
        """Bytes of collectives on one device by axis; several axes together are `"pod+data"`."""
        total: Counter[str] = Counter()
        for c in self.collectives:
            total[c.over] += c.bytes * c.count
        return dict(total)

    @functools.cached_property
    def waste(self) -> float:
        """The share of the stored elements that are padding."""
        total = sum(s.bytes for s in self.stored)
        return sum(s.bytes * s.waste for s in self.stored) / total if total else 0.0

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs per byte of memory traffic."""
        traffic = sum(w.bytes * w.count for w in self.work)
        return self.flops / traffic if traffic else 0.0

    @functools.cached_property
    def advice(self) -> tuple[Advice, ...]:
        """Warnings, and suggestions for a better layout."""
        from .advice import generate_advice

        return tuple(generate_advice(self))

    def on(self, hardware: HardwareLike) -> Plan:
        """The plan of the same call as the compiler of a machine compiles it.

        Compilers for GPUs and TPUs fuse more work into a kernel, keep arrays on the chip, and schedule for
        less memory than XLA's CPU compiler, which this plan follows. The collectives are the same.

        Args:
          hardware: the name of a profile, a TOML file, or `Hardware`.
        """
        machine = Hardware.of(hardware)
        return self if self._plan_on is None else self._plan_on(machine)

    def __getstate__(self) -> dict[str, Any]:
        # A traced program can't be pickled or copied.
        return {**self.__dict__, "_plan_on": _without_program}

    def time(self, hardware: HardwareLike) -> Time:
        """The predicted time on a machine: the name of a profile, a TOML file, or `Hardware`."""
        from .time import estimate_time

        try:
            return estimate_time(self, hardware)
        except MeshError as error:  # of hardware with a shape
            raise error.located(f"time({hardware!r})") from None

    def explain(self, hardware: HardwareLike | None = None, width: PositiveInt | None = None) -> str:
        """The plan as text.

        Args:
          hardware: adds the predicted time on this machine.
          width: the line width; 118 by default.
        """
        from .text import explain

        hint = "leave it out for lines of 118 characters"
        check_values(argument_types(Plan.explain), {"width": width}, ProgramError, hint, "explain")
        return explain(self, hardware, width)

    def diff(self, other: Plan | Compiled) -> str:
        """The differences from another plan, or from what a compiler made of the program, as text."""
        from ..compilers.compiled import Compiled  # compilers/ imports this module
        from ..compilers.diff import diff_compiled
        from .diff import diff

        if isinstance(other, Compiled):
            return diff_compiled(self, other)
        if not isinstance(other, Plan):
            raise TensorTypeError(
                f"{other!r} is not a plan",
                rule="diff compares a plan with another plan, or with a compiled program",
                hint="plan.diff(wf.spmd(fn, mesh, other_layout).plan(*args))",
            ).located("diff(other)")
        return diff(self, other)

    def to_data(self) -> dict[str, Any]:
        """The plan as JSON-compatible data."""
        return {
            "version": VERSION,
            "name": self.name,
            "mesh": [list(axis) for axis in self.mesh.axes],
            "layout": self.layout,
            "flops": self.flops,
            "unique_flops": self.unique_flops,
            "duplication": self.duplication,
            "comm_bytes": self.comm_bytes,
            "waste": self.waste,
            "intensity": self.intensity,
            "memory": to_jsonable(self.memory),
            "pipelines": to_jsonable(self.pipelines),
            "moved": to_jsonable(self.moved),
            "loops": to_jsonable(self.loops),
            "unknown": to_jsonable(self.unknown),
            "stored": to_jsonable(self.stored),
            # Work and collectives share most field names, so a reader of the JSON needs the class.
            "events": [{"type": type(e).__name__.lower(), **to_jsonable(e)} for e in self.events],
            "advice": to_jsonable(self.advice),
        }

    def to_json(self) -> str:
        """The plan as JSON; `version` is the version of the format."""
        return json.dumps(self.to_data(), indent=1)

    def to_html(self, hardware: HardwareLike | None = None) -> str:
        """The plan as one self-contained page."""
        from .html import plan_page

        return plan_page(self, hardware)


@dataclass(frozen=True)
class TracedPlan:
    """A plan, with the events and buffers it is derived from; the layout search needs both."""

    plan: Plan
    events: list[TracedEvent]
    assignment: BufferAssignment


def derive_plan(traced: Traced) -> TracedPlan:
    """The plan of a traced program."""
    mesh = traced.placement.mesh
    inputs = [
        _planned_tensor(name, "input", t.dims, t.role, t.dtype, traced.placement) for name, t in traced.inputs
    ]
    outputs = [
        _planned_tensor(out.name, "output", out.dims, out.role, out.dtype, traced.placement)
        for out in traced.outputs
    ]
    graph = read_jaxpr(traced.jaxpr.jaxpr, mesh)
    traced_events = trace_events(graph)
    loops, unknown = find_unbounded_loops(graph), find_unknown_primitives(graph)
    # Last, because it rewrites the graph.
    assignment = assign_buffers(graph, traced.jaxpr.jaxpr, traced.donated)
    events = [traced_event.event for traced_event in traced_events]
    # With one stage the layers run in sequence on every device: there is no pipeline to report.
    pipelines = [one for one in traced.observations.pipelines if one.stages > 1]
    plan = Plan(
        name=traced.name,
        mesh=mesh,
        layout=repr(traced.placement.layout),
        events=tuple(events),
        stored=tuple(inputs + outputs),
        memory=summarize_memory(assignment, inputs),
        pipelines=tuple(plan_pipelines(pipelines, traced_events)),
        moved=tuple(find_resharded_inputs(traced.inputs, traced.placement)),
        loops=tuple(loops),
        unknown=tuple(unknown),
    )
    plan = replace(plan, _plan_on=functools.partial(_plan_on, traced, plan, inputs))
    return TracedPlan(plan, traced_events, assignment)


def _without_program(hardware: Hardware) -> Plan:
    """For plans that were pickled or copied."""
    raise ProgramError(
        "this plan was pickled or copied, without its program",
        rule="a plan for another machine is derived from the program",
        hint="call on() before: program.plan(*args).on(hardware)",
    ).located(f"on({hardware.label!r})")


def _plan_on(traced: Traced, plan: Plan, inputs: list[PlannedTensor], hardware: Hardware) -> Plan:
    """The plan of a traced program as the compiler of a machine compiles it."""
    if hardware.platform == "cpu":
        return derive_plan(traced).plan
    graph = read_jaxpr(traced.jaxpr.jaxpr, plan.mesh)
    events = trace_events(graph)
    assignment = assign_buffers(graph, traced.jaxpr.jaxpr, traced.donated, PLATFORMS[hardware.platform])
    kernels = kernel_events(graph, assignment, hardware, events)
    return replace(
        plan,
        events=tuple(one.event for one in kernels),
        memory=summarize_memory(assignment, inputs),
        _plan_on=functools.partial(_plan_on, traced, plan, inputs),
    )


def _planned_tensor(
    name: str, kind: str, dims: tuple[Dim, ...], role: str, dtype: DTypeLike, placement: Placement
) -> PlannedTensor:
    splits = placement.splits(dims, role)
    shape = placement.array_shape(dims, role)
    padded, unpadded = 1, 1
    for n, dim in zip(shape, dims, strict=True):
        padded, unpadded = padded * n, unpadded * dim.size
    ways = placement.mesh.ways(tuple(axes_of(splits)))
    return PlannedTensor(
        name,
        kind,
        role,
        short_dtype(dtype),
        tuple((d.name, d.size, axes) for d, axes in zip(dims, splits, strict=True)),
        padded * jax.numpy.dtype(dtype).itemsize // ways,
        1 - unpadded / padded,
    )
