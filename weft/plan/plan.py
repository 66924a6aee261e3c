"""The plan: what one call of a program will do on each device, before it runs.

    plan = program.plan(*args)          # tensors, or wf.spec(dims, dtype)
    print(plan.explain())

It is read off the traced program, not guessed, and needs no devices.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax

from ..core.describe import short_dtype
from ..core.dims import Dim
from ..core.errors import TensorTypeError
from ..core.layout import Splits, axes_of
from ..core.mesh import Mesh
from ..core.shapes import stored_shape
from ..core.tensor import Tensor, is_tensor
from .buffers import BufferAssignment, assign_buffers, summarize_memory
from .events import TracedEvent, eliminate_dead_code, find_unbounded_loops, trace_events
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
    Work,
    to_jsonable,
)
from .inputs import find_resharded_inputs
from .pipelines import plan_pipelines
from .units import human_bytes, human_count


@dataclass(frozen=True, repr=False)
class Plan:
    """What one call of a program will do.

    Attributes:
      name: the function's.
      mesh, layout: what it is planned for.
      events: work and collectives in the order of the program.
      stored: the tensors that go in and come out.
      memory: bytes on one device.
      pipelines: stacks of layers that run in stages.
      moved: inputs that have to be laid out anew before each call, which no other number counts.
      loops: those of which one round is counted, as nobody knows how many there will be.

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

    def __repr__(self) -> str:
        sent, peak = human_bytes(sum(self.comm_bytes.values())), human_bytes(self.memory.peak)
        return (
            f'<plan of {self.name} on mesh "{self.mesh}" with {self.layout}; on each device '
            f"{human_count(self.flops)} FLOPs, {sent} in collectives, a peak of {peak}>"
        )

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
        """FLOPs of matrix products and convolutions on one device."""
        return sum(w.flops * w.count for w in self.work)

    @functools.cached_property
    def unique_flops(self) -> int:
        """The same over all devices, work that several of them do alike counted once."""
        return sum(w.unique_flops * w.count for w in self.work)

    @property
    def duplication(self) -> float:
        """How often the same work is done: 1 is the best."""
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
        whole = sum(s.bytes for s in self.stored)
        return sum(s.bytes * s.waste for s in self.stored) / whole if whole else 0.0

    @property
    def intensity(self) -> float:
        """FLOPs for each byte of memory traffic."""
        moved = sum(w.bytes * w.count for w in self.work)
        return self.flops / moved if moved else 0.0

    @functools.cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What is worth knowing or changing."""
        from .advice import generate_advice

        return tuple(generate_advice(self))

    def time(self, hardware: Any) -> Any:
        """The predicted time on a machine: a profile's name, file, or `HardwareCommand`."""
        from .time import estimate_time

        return estimate_time(self, hardware)

    def explain(self, hardware: Any = None, width: int | None = None) -> str:
        """The plan as text.

        Args:
          hardware: adds the predicted time on this machine.
          width: the columns of a line; by default 118.
        """
        from .text import explain

        return explain(self, hardware, width)

    def diff(self, other: Plan) -> str:
        """What another plan does differently, as text."""
        from .diff import diff

        if not isinstance(other, Plan):
            raise TensorTypeError(
                f"{other!r} is not a plan",
                rule="a plan is compared with another one",
                hint="plan.diff(wf.spmd(fn, mesh, other_layout).plan(*args))",
            ).located("diff(other)")
        return diff(self, other)

    def to_data(self) -> dict[str, Any]:
        """The plan as JSON's kinds of things."""
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
            "stored": to_jsonable(self.stored),
            "events": [{"type": type(e).__name__.lower(), **to_jsonable(e)} for e in self.events],
            "advice": to_jsonable(self.advice),
        }

    def to_json(self) -> str:
        """The plan as JSON; `version` says of which kind."""
        return json.dumps(self.to_data(), indent=1)

    def to_html(self, hardware: Any = None) -> str:
        """The plan as one self-contained page."""
        from .html import plan_page

        return plan_page(self, hardware)


def plan_program(program: Any, args: Any, kwargs: Any) -> Plan:
    """The plan of a program for these arguments."""
    return trace_plan(program, args, kwargs).plan


@dataclass(frozen=True)
class TracedPlan:
    """A plan, with what its events and its memory were read off."""

    plan: Plan
    found: list[TracedEvent]
    buffers: BufferAssignment


def trace_plan(program: Any, args: Any, kwargs: Any) -> TracedPlan:
    """The plan of a program for these arguments, and what it is made of."""
    staged, arrays = program._prepare(args, kwargs)
    traced = staged.call.trace(*program._abstract(arrays))
    jaxpr = eliminate_dead_code(traced.jaxpr)
    given = _inputs(program, args, kwargs)
    given += [(f"captured {n}", t) for n, t in enumerate(staged.captured)]
    inputs = [_stored(name, "input", t.dims, t.role, t.dtype, program) for name, t in given]
    outputs = _outputs(program, staged, traced.jaxpr.jaxpr)
    found, buffers = trace_events(jaxpr, program.mesh), assign_buffers(jaxpr, program.mesh, staged.donated)
    events = [one.event for one in found]
    pipelines = [one for one in staged.call.last["context"].pipelines if one.stages > 1]
    plan = Plan(
        getattr(program.fn, "__name__", "program"),
        program.mesh,
        repr(program.layout),
        tuple(events),
        tuple(inputs + outputs),
        summarize_memory(buffers, inputs),
        tuple(plan_pipelines(pipelines, events, [one.name for one in found])),
        tuple(find_resharded_inputs(given, program)),
        tuple(dict.fromkeys(find_unbounded_loops(jaxpr))),
    )
    return TracedPlan(plan, found, buffers)


def _inputs(program: Any, args: Any, kwargs: Any) -> list[tuple[str, Tensor]]:
    """The tensors among the arguments, with their names."""
    names = list(inspect.signature(program.fn).parameters) if callable(program.fn) else []
    found = []
    trees = [(names[n] if n < len(names) else f"argument {n}", a) for n, a in enumerate(args)]
    for name, tree in [*trees, *kwargs.items()]:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_tensor):
            if isinstance(leaf, Tensor):
                found.append((name + _shown(path), leaf))
    return found


def _outputs(program: Any, staged: Any, jaxpr: Any) -> list[PlannedTensor]:
    """The tensors that come out; their types are those of the jaxpr's results, in order."""
    numbers = jax.tree.unflatten(staged.out_tree, range(len(staged.out_leaves)))
    paths = {n: path for path, n in jax.tree_util.tree_leaves_with_path(numbers)}
    kinds = [kind for kind, *_ in staged.out_leaves]
    order = [n for kind in ("array", "deferred") for n, k in enumerate(kinds) if k == kind]
    dtypes = {n: v.aval.dtype for n, v in zip(order, jaxpr.outvars, strict=True)}
    return [
        _stored("result" + _shown(paths[n]), "output", named[0], named[1], dtypes[n], program)
        for n, (_, _, named) in enumerate(staged.out_leaves)
        if named is not None
    ]


def _shown(path: Any) -> str:
    return "".join(f".{getattr(k, 'key', getattr(k, 'name', getattr(k, 'idx', k)))}" for k in path)


def _stored(
    name: str, kind: str, dims: tuple[Dim, ...], role: str, dtype: Any, program: Any
) -> PlannedTensor:
    splits: Splits = program.layout.splits(dims, program.mesh, role)
    shape = stored_shape(dims, splits, program.mesh)
    elements, true = 1, 1
    for n, dim in zip(shape, dims, strict=True):
        elements, true = elements * n, true * dim.size
    ways = program.mesh.ways(tuple(axes_of(splits)))
    return PlannedTensor(
        name,
        kind,
        role,
        short_dtype(dtype),
        tuple((d.name, d.size, axes) for d, axes in zip(dims, splits, strict=True)),
        elements * jax.numpy.dtype(dtype).itemsize // ways,
        1 - true / elements,
    )
