"""What one trace tells of a program under every layout: work, collectives and buffers with their dims."""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.context import Pipeline
from ..core.errors import LayoutError
from ..core.layout import Layout
from ..core.mesh import Mesh
from ..core.program import Program
from ..ops import elementwise
from ..plan import primitives
from ..plan.buffers import Buffer, BufferAssignment
from ..plan.events import TracedEvent, op_label, phase_of
from ..plan.facts import Collective, PlannedTensor, Work
from ..plan.pipelines import PIPELINE_LABEL
from ..plan.plan import Plan, TracedPlan, trace_plan
from .space import DimGroup
from .universal_trace import UniversalLayout, UniversalMesh, program_on

FEW_DIMS = 8  # dims; a program with more of them is searched only along those that are worth it
NEGLIGIBLE_RATIO = (
    500  # a dim that has a smaller part of all work and all state than one in this many is not searched
)

# Ops that do the same work if their dims can be split; a convolution over split space does more.
SPLIT_INVARIANT_OPS = {
    *elementwise.__all__,
    *"einsum sum mean var max min prod softmax log_softmax logsumexp take dropout scan arange".split(),
    *"transpose optimizer gradient".split(),
}
_AROUND = re.compile("scan|while|fori|cond|map|vmap|local")  # ops with others inside, which have further dims
_DIMS, _NAME = re.compile(r"\[([^\]]*)\]"), re.compile(r"[A-Za-z_][\w.']*")
_NONE: DimGroup = frozenset()


@dataclass(frozen=True)
class WorkAtom:
    """Some work.

    Attributes:
      work: of whole tensors.
      dims: those that may share it out.
      touched: the bytes of each thing that it reads or writes, and the dims that this can be cut along.
      staged: the layers' dim of the pipeline that it is inside of.
    """

    work: Work
    dims: DimGroup
    touched: tuple[tuple[float, DimGroup], ...]
    staged: str = ""


@dataclass(frozen=True)
class CostAtoms:
    """A program, seen once.

    Attributes:
      plan: of whole tensors, with the collectives that splits call for.
      buffers: whole ones too.
      dims: the names of all dims that can be split, and the size of the largest of each name.
      meetings: dims of which no two may be on one axis.
      renamed: dims that take the place of others, and these.
      alike: sets of dims whose sums are one sum where these have one axis.
      work: the work.
      sent: the collectives, each with the dims that call for it and those that what is sent has beside them.
      whole: what the peak of memory is on one device, beside that of the opened program.
      cut: for each buffer, by its number, the dims that it may be cut along, its phase, and the layers' dim
        of the pipeline that it is inside of.
      pipelines: by the name of their layers' dim.
      unsplittable: dims that some op, like `wf.local`, can't have split.
    """

    plan: Plan
    buffers: BufferAssignment
    dims: dict[str, int]
    meetings: frozenset[DimGroup]
    renamed: frozenset[DimGroup]
    alike: frozenset[frozenset[DimGroup]]
    work: tuple[WorkAtom, ...]
    sent: tuple[tuple[Collective, DimGroup, DimGroup], ...]
    whole: float
    cut: dict[int, tuple[DimGroup, str, str]]
    pipelines: dict[str, Pipeline]
    unsplittable: DimGroup

    @property
    def inputs(self) -> list[PlannedTensor]:
        return [one for one in self.plan.stored if one.kind == "input"]

    @functools.cached_property
    def searched(self) -> list[str]:
        """The dims that are worth a search: if there are few, all of them.

        Else not those of no weight: layouts that differ by them alone are about as good, and all of these
        would have to be planned. And not those that a loop runs along: such a dim is gathered before the
        loop, and to store what it has in further pieces, which is searched, mostly costs less. A dim that
        takes the place of another one has the weight of both: if one of them is split, there is a gather.
        """
        if len(self.dims) <= FEW_DIMS:
            return sorted(self.dims)
        totals: dict[str, float] = defaultdict(float)
        weights: dict[tuple[str, str], float] = defaultdict(float)
        for what, amount, dims in (
            *(("flops", p.work.flops * p.work.count, p.dims) for p in self.work),
            *(("bytes", p.work.bytes * p.work.count, p.dims) for p in self.work),
            *(("sent", c.bytes * c.count, dims) for c, _, dims in self.sent),
            *(("state", one.bytes, frozenset(name for name, _, _ in one.dims)) for one in self.inputs),
        ):
            totals[what] += amount
            for dim in dims:
                weights[what, dim] += amount
        heavy = {
            d for d in self.dims if any(weights[what, d] > totals[what] / NEGLIGIBLE_RATIO for what in totals)
        }
        loops = (over for c, over, _ in self.sent if c.kind == "all-gather" and c.op.startswith("scan["))
        heavy = heavy.union(*(family for family in self.families if family & heavy))
        return sorted(heavy - {dim for over in loops for dim in over})

    @functools.cached_property
    def families(self) -> list[DimGroup]:
        """Sets of dims that take the place of one another, directly or by way of others."""
        found: list[DimGroup] = []
        for some in self.renamed:
            near = [family for family in found if family & some]
            found = [family for family in found if family not in near] + [some.union(*near)]
        return [family for family in found if len(family) > 1]


def trace_cost_atoms(fn: Any, args: tuple[Any, ...]) -> CostAtoms:
    """Trace a function once, with all its dims split.

    Args:
      fn: a function of tensors, or a program of one, whose mesh and layout don't matter.
      args: its arguments: tensors, or `wf.spec(dims)`.
    """
    program, layout, reading = _opened(fn, args)
    staged, _ = program._prepare(args, {})
    dims = _Dims(layout, staged.call.last["context"], reading.plan)
    parts = [dims.part(one) for one in reading.found if isinstance(one.event, Work)]
    parts = [one for one in parts if not one.work.op.startswith(PIPELINE_LABEL)]  # handing on is not bounded
    whole = 1.0
    if not all(is_split_invariant(part.work) for part in parts):
        alone = program_on(fn, Mesh(), Layout()).plan(*args)
        others = [dims.rough_part(work) for work in alone.work if not is_split_invariant(work)]
        parts = _fused([one for one in parts if is_split_invariant(one.work)], alone.work) + others
        whole = min(1.0, alone.memory.peak / max(reading.plan.memory.peak, 1))
    buffers = reading.buffers
    return CostAtoms(
        reading.plan,
        buffers,
        {name: max(dims.sizes[name]) for name in sorted(dims.every)},
        dims.meetings,
        dims.renamed,
        dims.alike,
        tuple(parts),
        tuple((c, dims.on(c.axes), dims.on({*c.varies} - {*c.axes})) for c in reading.plan.collectives),
        whole,
        {b.number: dims.cut(b, buffers) for b in (*buffers.returned, *buffers.spare, *buffers.others)},
        dims.pipelines,
        layout.whole,
    )


def _opened(fn: Any, args: tuple[Any, ...]) -> tuple[Program, UniversalLayout, TracedPlan]:
    """A program with all its dims split, but for those of which an op says that it can't have them so."""
    whole: DimGroup = _NONE
    while True:
        mesh = UniversalMesh()
        layout = UniversalLayout(mesh, whole)
        program = program_on(fn, mesh, layout)
        try:
            return program, layout, trace_plan(program, args, {})
        except LayoutError as error:
            if not error.unsplittable:
                raise
            whole |= error.unsplittable


def _fused(parts: Sequence[WorkAtom], alone: Sequence[Work]) -> list[WorkAtom]:
    """Some work, with no more memory traffic than the same ops have on one device.

    Where an op does other work on split dims, the ones before it may have to write out what it fuses with
    on one device.
    """

    def totals(some: Iterable[Work]) -> dict[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = defaultdict(float)
        for work in some:
            found[work.phase, work.op, work.kind] += work.bytes * work.count
        return found

    most, have = totals(alone), totals(part.work for part in parts)
    found = []
    for part in parts:
        key = part.work.phase, part.work.op, part.work.kind
        share = min(1.0, most.get(key, 0.0) / have[key]) if have[key] else 1.0
        touched = tuple((bytes * share, dims) for bytes, dims in part.touched)
        found.append(
            replace(part, work=replace(part.work, bytes=round(part.work.bytes * share)), touched=touched)
        )
    return found


def is_split_invariant(work: Work) -> bool:
    """Whether an op, or what is outside all ops, does the same work if dims can be split."""
    name, named, _ = work.op.partition("[")
    return not named or name in SPLIT_INVARIANT_OPS


def dims_in_label(op: str, known: DimGroup) -> DimGroup:
    """Those of the known dims in the name of an op, `einsum[batch,io · io,hidden]`.

    All if it has none: such a name does not tell, and a bound is only sure below what any dims would give.
    """
    found = _DIMS.search(op)
    return frozenset(_NAME.findall(found[1])) & known if found and found[1] else known


class _Dims:
    """The dims of an opened program, and which of them things have."""

    def __init__(self, layout: UniversalLayout, context: Any, plan: Plan):
        self.names = {axis: name for name, axis in layout.axes.items()}
        self.every = frozenset(layout.axes)
        self.hidden = frozenset(context.vmapped_dims) & self.every
        self.sizes: dict[str, set[int]] = defaultdict(set)
        for _, dims in context.joint_dims:
            for d in dims:
                self.sizes[d.name].add(d.size)
        self.meetings = frozenset(
            frozenset(d.name for d in dims) & self.every for _, dims in context.joint_dims
        )
        self.renamed = frozenset(dims & self.every for dims in context.renamed)
        self.alike = frozenset(frozenset(map(self.on, some)) for some in context.same_sum_axes)
        gathers = (self.on(c.axes) for c in plan.collectives if c.kind == "all-gather")
        self.gathered = _NONE.union(*gathers)
        self.of_array = functools.cache(self._of_array)
        self.pipelines = {one.layers.name: one for one in context.pipelines}

    def on(self, axes: Any) -> DimGroup:
        """The dims on some axes."""
        return frozenset(self.names[axis] for axis in axes)

    def named(self, op: str) -> DimGroup:
        """The dims that an op may have, by its name."""
        return dims_in_label(op, self.every) | self.hidden

    def kin(self, dims: DimGroup) -> DimGroup:
        """Some dims, and those renamed to them: what is element-wise may still be cut along these."""
        return dims.union(*(some for some in self.renamed if some & dims))

    def of_type(self, aval: Any, op: str) -> DimGroup:
        """The dims that a value can be cut along.

        What is the same on all devices, like zeros, does not vary, and goes by the op that makes it.
        """
        varying = self.on(aval.mat.varying) if hasattr(aval, "mat") else _NONE
        return self.kin(self.of_array(math.prod(aval.shape), varying) or self.named(op))

    def _of_array(self, elements: int, varying: DimGroup) -> DimGroup:
        """Those of the dims along which an array varies that it can have: a weight may vary like a batch."""
        sets = self._products(tuple(sorted(varying | self.gathered)), elements)
        return varying & _NONE.union(*sets) if sets else varying

    def _products(self, dims: tuple[str, ...], elements: int) -> list[DimGroup]:
        """All sets of some dims that so many elements can be along."""
        if not dims:
            return [_NONE] if elements == 1 else []
        first, rest = dims[0], dims[1:]
        found = self._products(rest, elements)
        for size in self.sizes[first]:
            if size > 1 and elements % size == 0:
                found = [*found, *(some | {first} for some in self._products(rest, elements // size))]
        return found

    def part(self, one: TracedEvent) -> WorkAtom:
        """Some work of the opened program."""
        work = one.event
        assert isinstance(work, Work)
        inside = self.on(work.varies) if _AROUND.match(work.op) else _NONE
        staged = self.staged(one.name, work.varies)
        layers = frozenset([staged]) if staged else _NONE
        touched = tuple(
            (primitives.aval_bytes(a), self.of_type(a, work.op) | layers)
            for a in one.touched
            if primitives.aval_bytes(a)
        )
        own = self.named(work.op)
        dims = (own if work.kind == "matmul" else self.kin(own)) | inside | layers
        return WorkAtom(work, dims, touched, staged)

    def staged(self, name: str, varies: Any) -> str:
        """The layers' dim of the pipeline that something of this whole name is inside of."""
        return next(iter(self.on(varies) & self.pipelines.keys()), "") if PIPELINE_LABEL in name else ""

    def rough_part(self, work: Work) -> WorkAtom:
        """Some work of which only the name tells the dims."""
        dims = self.kin(self.named(work.op))
        return WorkAtom(work, dims, ((work.bytes, dims),))

    def cut(self, buffer: Buffer, buffers: BufferAssignment) -> tuple[DimGroup, str, str]:
        """The dims that a buffer may be cut along, its phase, and the pipeline that it is inside of."""
        aval, node = buffers.reader.avals[buffer.number], buffer.node
        if node is None:
            return self.of_type(aval, ""), "update", ""
        staged = self.staged(node.name, getattr(getattr(aval, "mat", None), "varying", ()))
        return self.of_type(aval, op_label(node.name)), phase_of(node.name, False), staged
