"""Cost atoms: the work, collectives and buffers of one universal trace, each with the dims that scale it.

    atoms = trace_cost_atoms(step, args)
    atoms.work[0].dims            # splitting one of these dims divides this work

`bound` combines the atoms into lower bounds for every layout; the program is not traced again.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..core.errors import LayoutError
from ..core.jax_compat import ShapedArray, jaxpr_varying_axes
from ..core.labels import GRADIENT, OPTIMIZER, OpLabel, Scope
from ..core.layout import Layout
from ..core.mesh import Mesh
from ..core.observations import Observations, Pipeline
from ..core.registry import OPS
from ..core.types import PyTree
from ..plan import primitives
from ..plan.events import TracedEvent
from ..plan.facts import Collective, PlannedTensor, Work
from ..plan.memory.buffers import Buffer, BufferAssignment
from ..plan.plan import Plan, TracedPlan, derive_plan
from .space import DimGroup
from .universal_trace import UniversalLayout, UniversalMesh, program_on

FEW_DIMS = 8  # with more dims there are too many candidates to include dims that hardly matter
NEGLIGIBLE_RATIO = 500  # splitting a dim with less than 1/500 of every cost can't save 0.2%

_NO_DIMS: DimGroup = frozenset()


@dataclass(frozen=True)
class WorkAtom:
    """The local work of one equation.

    Attributes:
      work: its cost on full-size tensors.
      dims: the dims that divide the work when they are split.
      accesses: the bytes of each array it reads or writes, with the dims that array can be split along.
      pipeline: the layers dim of the pipeline that contains the work, or "".
    """

    work: Work
    dims: DimGroup
    accesses: tuple[tuple[float, DimGroup], ...]
    pipeline: str = ""


@dataclass(frozen=True)
class CollectiveAtom:
    """One collective.

    Attributes:
      collective: its cost on full-size tensors.
      trigger_dims: splitting one of these dims causes the collective, over the dim's axis.
      payload_dims: the other dims of the data; splitting one of them shrinks the data.
    """

    collective: Collective
    trigger_dims: DimGroup
    payload_dims: DimGroup


@dataclass(frozen=True)
class BufferAtom:
    """The dims that a buffer can be split along, its phase, and its pipeline's layers dim, or ""."""

    dims: DimGroup
    phase: str
    pipeline: str


@dataclass(frozen=True)
class CostAtoms:
    """The costs of a program under every layout, from one trace.

    Attributes:
      plan: the plan of the universal trace: full-size tensors, with the collectives of all splits.
      assignment: its buffers, also at full size.
      dims: all dims that can be split; the size is the largest that occurs under the name.
      conflicts: sets of dims; no two dims of a set may share an axis.
      renamed: sets of dims that are renamed or reshaped to one another.
      mergeable: sets of dim groups; if the dims share an axis, their sums become one.
      work: the local work.
      collectives: the collectives.
      peak_ratio: the peak memory on one device, relative to that of the universal trace; at most 1.
      buffers: the dims of each buffer, by the id of its value.
      pipelines: the pipelines, by the name of their layers dim.
      unsplittable: dims that some op, such as `wf.local`, can't have split.
    """

    plan: Plan
    assignment: BufferAssignment
    dims: dict[str, int]
    conflicts: frozenset[DimGroup]
    renamed: frozenset[DimGroup]
    mergeable: frozenset[frozenset[DimGroup]]
    work: tuple[WorkAtom, ...]
    collectives: tuple[CollectiveAtom, ...]
    peak_ratio: float
    buffers: dict[int, BufferAtom]
    pipelines: dict[str, Pipeline]
    unsplittable: DimGroup

    @property
    def inputs(self) -> list[PlannedTensor]:
        """The program's inputs."""
        return [tensor for tensor in self.plan.stored if tensor.kind == "input"]

    @functools.cached_property
    def searched(self) -> list[str]:
        """The dims worth searching: all of them if there are few.

        Otherwise, negligible dims are left out: layouts that differ only in them cost about the same, and
        all of these would have to be planned. Dims that a loop runs along are left out too: such a dim is
        gathered before the loop, and storing its tensors in more slices, which is searched, usually costs
        less. If one dim of a rename family matters, the entire family is searched, because splitting only
        one of them causes a gather.
        """
        if len(self.dims) <= FEW_DIMS:
            return sorted(self.dims)
        totals: dict[str, float] = defaultdict(float)
        weights: dict[tuple[str, str], float] = defaultdict(float)
        for measure, amount, dims in (
            *(("flops", atom.work.flops * atom.work.count, atom.dims) for atom in self.work),
            *(("bytes", atom.work.bytes * atom.work.count, atom.dims) for atom in self.work),
            *(
                ("sent", atom.collective.bytes * atom.collective.count, atom.payload_dims)
                for atom in self.collectives
            ),
            *(("state", t.bytes, frozenset(name for name, _, _ in t.dims)) for t in self.inputs),
        ):
            totals[measure] += amount
            for dim in dims:
                weights[measure, dim] += amount
        relevant = {
            dim
            for dim in self.dims
            if any(weights[measure, dim] > totals[measure] / NEGLIGIBLE_RATIO for measure in totals)
        }
        relevant = relevant.union(*(family for family in self.families if family & relevant))
        looped = (
            atom.trigger_dims
            for atom in self.collectives
            if atom.collective.kind == "all-gather" and atom.collective.op.name == "scan"
        )
        return sorted(relevant - {dim for dims in looped for dim in dims})

    @functools.cached_property
    def families(self) -> list[DimGroup]:
        """Sets of dims that are renamed to one another, directly or through others."""
        families: list[DimGroup] = []
        for renamed in self.renamed:
            overlapping = [family for family in families if family & renamed]
            families = [family for family in families if family not in overlapping]
            families.append(renamed.union(*overlapping))
        return [family for family in families if len(family) > 1]


def trace_cost_atoms(fn: Callable[..., PyTree], args: tuple[PyTree, ...]) -> CostAtoms:
    """Trace a function once, with all its dims split.

    Args:
      fn: a function of tensors, or a program; a program's mesh and layout are ignored.
      args: its arguments: tensors, or `wf.spec(dims)`.
    """
    layout, seen, traced = _universal_plan(fn, args)
    dims = _DimAttribution(layout, seen, traced.plan)
    work = [dims.work_atom(event) for event in traced.events if isinstance(event.event, Work)]
    # Copies between pipeline stages depend on the schedule; a lower bound may ignore them.
    work = [atom for atom in work if atom.work.op.name != "pipeline"]
    peak_ratio = 1.0
    if not all(is_split_invariant(atom.work) for atom in work):
        # Ops that do more work when split would make the bound too high. The plan for one device has their
        # least work, but not which dims an array varies over: that is read from the label.
        single = program_on(fn, Mesh(), Layout()).plan(*args)
        others = [dims.work_atom_from_label(w) for w in single.work if not is_split_invariant(w)]
        work = _cap_traffic([atom for atom in work if is_split_invariant(atom.work)], single.work) + others
        peak_ratio = min(1.0, single.memory.peak / max(traced.plan.memory.peak, 1))
    buffers = traced.assignment
    return CostAtoms(
        plan=traced.plan,
        assignment=buffers,
        dims={name: max(dims.sizes[name]) for name in sorted(dims.every)},
        conflicts=dims.conflicts,
        renamed=dims.renamed,
        mergeable=dims.mergeable,
        work=tuple(work),
        collectives=tuple(
            CollectiveAtom(c, dims.on_axes(c.axes), dims.on_axes({*c.varies} - {*c.axes}))
            for c in traced.plan.collectives
        ),
        peak_ratio=peak_ratio,
        buffers={
            b.value: dims.buffer_atom(b, buffers)
            for b in (*buffers.returned, *buffers.spare, *buffers.others)
        },
        pipelines=dims.pipelines,
        unsplittable=layout.unsplittable,
    )


def _universal_plan(
    fn: Callable[..., PyTree], args: tuple[PyTree, ...]
) -> tuple[UniversalLayout, Observations, TracedPlan]:
    """The plan with every dim split, except those that an op rejects."""
    unsplittable: DimGroup = _NO_DIMS
    # An op reports its unsplittable dims by raising an error, so the trace restarts without them.
    while True:
        mesh = UniversalMesh()
        layout = UniversalLayout(mesh, unsplittable)
        try:
            traced = program_on(fn, mesh, layout).trace(*args)
            return layout, traced.observations, derive_plan(traced)
        except LayoutError as error:
            if not error.unsplittable:
                raise
            unsplittable |= error.unsplittable


def _cap_traffic(atoms: Sequence[WorkAtom], single: Sequence[Work]) -> list[WorkAtom]:
    """Limit the memory traffic of each op to its traffic on one device.

    If an op lowers differently for split dims, ops before it may have to write results that are fused on one
    device. A layout that does not split these dims has no such traffic, and the bound must hold for it too.
    """

    def traffic(works: Iterable[Work]) -> dict[tuple[str, ...], float]:
        totals: dict[tuple[str, ...], float] = defaultdict(float)
        for work in works:
            totals[work.phase, work.op, work.kind] += work.bytes * work.count
        return totals

    limits, current = traffic(single), traffic(atom.work for atom in atoms)
    capped = []
    for atom in atoms:
        key = atom.work.phase, atom.work.op, atom.work.kind
        share = min(1.0, limits.get(key, 0.0) / current[key]) if current[key] else 1.0
        work = replace(atom.work, bytes=round(atom.work.bytes * share))
        accesses = tuple((bytes * share, dims) for bytes, dims in atom.accesses)
        capped.append(replace(atom, work=work, accesses=accesses))
    return capped


def is_split_invariant(work: Work) -> bool:
    """Whether the total work stays the same when dims are split; true for work outside all ops."""
    name = work.op.name
    return name in ("", GRADIENT, OPTIMIZER) or (name in OPS and OPS[name].split_invariant)


def contains_ops(work: Work) -> bool:
    """Whether the op of some work contains others, which may have dims that its own label does not list."""
    name = work.op.name
    return name in OPS and OPS[name].takes_functions


def dims_in_label(op: OpLabel | None, known: DimGroup) -> DimGroup:
    """The known dims in an op's label.

    All known dims if the label lists none: the dims could be any, and only the assumption that all of them
    divide the work keeps the result a lower bound.
    """
    return op.dims & known if op is not None and op.dims else known


class _DimAttribution:
    """Attributes the work, arrays and buffers of a universal trace to dims."""

    def __init__(self, layout: UniversalLayout, seen: Observations, plan: Plan):
        self.names = {axis: name for name, axis in layout.axes.items()}
        self.every = frozenset(layout.axes)
        self.hidden = frozenset(seen.vmapped_dims) & self.every
        self.sizes: dict[str, set[int]] = defaultdict(set)
        for _, dims in seen.joint_dims:
            for d in dims:
                self.sizes[d.name].add(d.size)
        self.conflicts = frozenset(
            frozenset(d.name for d in dims) & self.every for _, dims in seen.joint_dims
        )
        self.renamed = frozenset(dims & self.every for dims in seen.renamed)
        self.mergeable = frozenset(frozenset(map(self.on_axes, some)) for some in seen.same_sum_axes)
        gathers = (self.on_axes(c.axes) for c in plan.collectives if c.kind == "all-gather")
        self.gathered = _NO_DIMS.union(*gathers)
        self.dims_of_array = functools.cache(self._dims_of_array)
        self.pipelines = {one.layers.name: one for one in seen.pipelines}

    def on_axes(self, axes: Iterable[str]) -> DimGroup:
        """The dims on these axes."""
        return frozenset(self.names[axis] for axis in axes)

    def of_label(self, op: OpLabel | None) -> DimGroup:
        """The dims that an op may have, by its label."""
        return dims_in_label(op, self.every) | self.hidden

    def with_renamed(self, dims: DimGroup) -> DimGroup:
        """The dims and all dims renamed to them: elementwise work can be split along either name."""
        return dims.union(*(renamed for renamed in self.renamed if renamed & dims))

    def of_aval(self, aval: ShapedArray, op: OpLabel | None) -> DimGroup:
        """The dims that an array can be split along.

        An array that is the same on all devices, such as zeros, varies over no axis. Its dims come from the
        label of the op that makes it.
        """
        varying = self.on_axes(jaxpr_varying_axes(aval))
        return self.with_renamed(self.dims_of_array(math.prod(aval.shape), varying) or self.of_label(op))

    def _dims_of_array(self, elements: int, varying: DimGroup) -> DimGroup:
        """The varying dims that an array of this many elements can have.

        The type lists the axes an array varies over, not its dims: a weight made varying for a product
        with a batch varies over the batch's axis without having that dim. The number of elements rules such
        dims out. An array after a gather may have dims that it no longer varies over.
        """
        sets = self._factorizations(tuple(sorted(varying | self.gathered)), elements)
        return varying & _NO_DIMS.union(*sets) if sets else varying

    def _factorizations(self, dims: tuple[str, ...], elements: int) -> list[DimGroup]:
        """All subsets of the dims whose sizes multiply to this many elements."""
        if not dims:
            return [_NO_DIMS] if elements == 1 else []
        first, rest = dims[0], dims[1:]
        subsets = self._factorizations(rest, elements)
        for size in self.sizes[first]:
            if size > 1 and elements % size == 0:
                subsets = [
                    *subsets,
                    *(subset | {first} for subset in self._factorizations(rest, elements // size)),
                ]
        return subsets

    def work_atom(self, traced: TracedEvent) -> WorkAtom:
        """The atom of some work in the universal trace."""
        work = traced.event
        assert isinstance(work, Work)
        inside = self.on_axes(work.varies) if contains_ops(work) else _NO_DIMS
        pipeline = self.pipeline_of(traced.scope, work.varies)
        layers = frozenset([pipeline]) if pipeline else _NO_DIMS
        accesses = tuple(
            (primitives.aval_bytes(aval), self.of_aval(aval, work.op) | layers)
            for aval in traced.accessed
            if primitives.aval_bytes(aval)
        )
        own = self.of_label(work.op)
        # A product contracts exactly the dims in its label. Elementwise work may run before a rename.
        dims = (own if work.kind == "matmul" else self.with_renamed(own)) | inside | layers
        return WorkAtom(work, dims, accesses, pipeline)

    def pipeline_of(self, scope: Scope, varies: Iterable[str]) -> str:
        """The layers dim of the pipeline that contains an equation, or ""."""
        if not scope.is_inside("pipeline"):
            return ""
        return next(iter(self.on_axes(varies) & self.pipelines.keys()), "")

    def work_atom_from_label(self, work: Work) -> WorkAtom:
        """The atom of work in the plan for one device, which has no axes to identify dims by."""
        dims = self.with_renamed(self.of_label(work.op))
        return WorkAtom(work, dims, ((work.bytes, dims),))

    def buffer_atom(self, buffer: Buffer, assignment: BufferAssignment) -> BufferAtom:
        """The atom of a buffer."""
        aval, node = assignment.graph.avals[buffer.value], buffer.node
        if node is None:
            return BufferAtom(self.of_aval(aval, None), "update", "")
        pipeline = self.pipeline_of(node.scope, jaxpr_varying_axes(aval))
        return BufferAtom(self.of_aval(aval, node.scope.op), node.scope.phase(), pipeline)
