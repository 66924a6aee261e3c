"""The context of a program while it is traced: its mesh, its layout, and a memo of resharded arrays.

Inside a program an op may need several *variants* of a tensor: made varying over an axis, gathered, its
pending sum resolved. Each variant must be computed once per tensor, not once per use. With `h` feeding q, k
and v, three casts of `h` to varying would put three all-reduces into the backward pass; one shared cast
leaves one. The variants are memoized in a stack of frames, one for each JAX trace that Weft opens (program,
scan, grad, …), never on the tensor itself, where they would leak tracers.

A variant of a tensor that belongs to an outer frame is computed *in that frame*, outside the loop: a weight
shared by the steps of a scan is cast once, and its gradient is summed once.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import jax
from jax.extend import core as jax_core

from .dims import Dim, check_index_range
from .layout import Layout, Placement, Splits

if TYPE_CHECKING:
    from .deferred import DeferredCall
    from .tensor import Tensor

# Some decisions depend on code that has not been traced yet: whether a carry may stay pending is known only
# after the loop body. Tracing is cheap, so Weft traces with a guess and raises one of these exceptions if the
# guess turns out wrong. Each names the reason; the code that guessed catches it and traces again.


class RetraceForCarry(Exception):
    """Retrace a loop: some of its carries should be pending over different axes.

    Attributes:
      frame: the loop's frame.
      axes: the pending axes of each such carry, by leaf number.
    """

    def __init__(self, frame: Frame, axes: dict[int, frozenset[str]]):
        super().__init__()
        self.frame, self.axes = frame, axes


class RetraceUnvarying(Exception):
    """Retrace a scan: a tensor that it made varying in advance is needed unvarying."""


class RetraceOnMesh(Exception):
    """Retrace an eager op on the mesh of a tensor that it captures: none of its operands is placed."""

    def __init__(self, placement: Placement):
        super().__init__()
        self.placement = placement


@dataclass(frozen=True)
class Pipeline:
    """A stack of layers that runs in pipeline stages.

    Attributes:
      layers: the dim of the layers.
      axes: the mesh axes of the stages.
      stages: the number of stages.
      batch: the dim whose rows stream through the stages.
      micro: the number of micro-batches; 0 for the default of that number of stages.
      schedule: the name of the schedule.
      recomputes: whether the backward pass recomputes the forward pass's matrix products.
    """

    layers: Dim
    axes: tuple[str, ...]
    stages: int
    batch: Dim
    micro: int
    schedule: str
    recomputes: bool


class Frame:
    """One JAX trace and the variants that were computed in it.

    Attributes:
      variants: (array, result) by (id of the array, request). The array is kept alive: a new object could
        get the id of a dead one.
      arrays: the arrays that belong to this trace, by id, kept alive for the same reason.
      memo_hits: the variants that a request found in `variants`, instead of computing them.
      carries: a loop's carries: leaf number by id of the array.
      consumed: the carries that were used other than as a summand.
      pending_carries: the carries that should be pending, with the axes.
      lifts_collectives: whether collectives may be moved out of this frame into an outer one.
    """

    def __init__(self, lifts_collectives: bool = True):
        self.state = jax_core.get_opaque_trace_state()
        with jax_core.take_current_trace() as trace:
            self.trace = trace
        self.variants: dict[Hashable, tuple[Any, Any]] = {}
        self.arrays: dict[int, Any] = {}
        self.memo_hits: set[Hashable] = set()
        self.carries: dict[int, int] = {}
        self.consumed: set[int] = set()
        self.pending_carries: dict[int, frozenset[str]] = {}
        self.lifts_collectives = lifts_collectives

    def close(self) -> None:
        """Release the trace's arrays: a loop keeps its frame after the trace has ended."""
        self.trace = None
        self.variants.clear()
        self.arrays.clear()


_SERIALS = itertools.count(1)


class Context:
    """The state of the program that is being traced.

    Attributes:
      placement: the mesh and the layout that the program is staged for.
      adopts_placement: whether it moves to the mesh of a tensor that it captures: an eager op whose operands
        are not placed.
      is_finished: whether its trace has ended; JAX calls the rules of a custom_vjp after that.
      serial: identifies the program that a slice belongs to.
      op: the label of the op that is being lowered.
      frames: the frames of the open JAX traces, outermost first.
      vmapped_axes, vmap_depth: the axes of the dims of enclosing vmaps, and the number of these vmaps.
      branch_axes: the vmapped axes along which devices may take different branches.
      captured: the captured tensors that are not inputs yet, by `operands.capture_key`.
      captured_inputs: the inputs of this trace that stand for captured tensors.
      deferred_calls: the calls on global arrays after the SPMD part.
      seen_dims: the dims that have occurred, by name.
      pipelines: the pipelines, in order.
      pipeline_dims: the layers' dims of enclosing pipelines.
      partial_dims: the dims of which this trace has only a part, with the number of parts and the number of
        this one.
      joint_dims: the dims of each tensor, by role.
      vmapped_dims: the dims that a vmap hides from op labels.
      renamed: sets of dims that replace one another.
      same_sum_axes: the axes of sums that become one sum if their axes are equal.
      varied_axes: the axes over which an array was made varying, by its id.
    """

    def __init__(self, placement: Placement, adopts_placement: bool = False):
        self.placement = placement
        self.adopts_placement, self.is_finished = adopts_placement, False
        # Not the id of this object: a later program could get it, and would accept the slices of this one.
        self.serial = next(_SERIALS)
        self.op = ""
        self.frames: list[Frame] = []
        self.vmapped_axes: frozenset[str] = frozenset()
        self.vmap_depth = 0
        self.branch_axes: frozenset[str] = frozenset()
        self.captured: dict[Hashable, Tensor] = {}
        self.captured_inputs: dict[Hashable, Tensor] = {}
        self.deferred_calls: list[DeferredCall] = []
        self.seen_dims: dict[str, Dim] = {}
        self.pipelines: dict[Pipeline, None] = {}  # a set would lose the order, in which plans list them
        self.pipeline_dims: tuple[Dim, ...] = ()
        self.partial_dims: dict[Dim, tuple[Dim, Any]] = {}
        # The layout search (`autolayout/cost_atoms.py`) needs facts that a jaxpr no longer has: which dims
        # occur together, and which sums become one under another layout.
        self.joint_dims: set[tuple[str, tuple[Dim, ...]]] = set()
        self.vmapped_dims: set[str] = set()
        self.renamed: set[frozenset[str]] = set()
        self.same_sum_axes: set[frozenset[frozenset[str]]] = set()
        self.varied_axes: dict[int, frozenset[str]] = {}

    def splits(self, dims: tuple[Dim, ...], role: str = "value") -> Splits:
        """How this program splits a tensor with these dims."""
        if (role, dims + self.pipeline_dims) not in self.joint_dims:
            check_index_range(dims)
            self.joint_dims.add((role, dims + self.pipeline_dims))
            for dim in dims:
                if not dim.is_inner:
                    self.seen_dims.setdefault(dim.name, dim)
        return self.placement.splits(dims, role)

    def ways(self, axes: tuple[str, ...]) -> int:
        """How many slices these axes split a dim into."""
        return self.placement.mesh.ways(axes)

    def slice_size(self, dim: Dim, axes: tuple[str, ...]) -> int:
        """The size of one device's slice of a dim, padding included."""
        return -(-dim.size // self.ways(axes))

    def slice_shape(self, dims: Sequence[Dim], splits: Splits) -> tuple[int, ...]:
        """The shape of a device's slice of a tensor, padding included."""
        return tuple(self.slice_size(d, axes) for d, axes in zip(dims, splits, strict=True))

    def register(self, array: jax.Array) -> None:
        """Record that an array belongs to the current trace, so that its variants are memoized there."""
        top = self.frames[-1]
        if top.state == jax_core.get_opaque_trace_state():
            top.arrays[id(array)] = array

    def memoize(
        self, array: jax.Array, request: Hashable, make: Callable[[Any], Any], *, collective: bool
    ) -> Any:
        """`make(array)`, once per array and request, in the outermost frame that allows it."""
        key = (id(array), request)
        for frame in reversed(self.frames):
            if key in frame.variants:
                frame.memo_hits.add(key)
                return frame.variants[key][1]
        top = self.frames[-1]
        # A raw JAX transformation inside ours (jax.vmap in a program, say) has opened a trace that has no
        # frame. Its tracers must not be stored: they would outlive their trace.
        if top.state != jax_core.get_opaque_trace_state():
            return make(array)
        levels = range(len(self.frames))
        # An array that no frame has registered was made by JAX, and may belong to the innermost trace.
        level = max((n for n in levels if id(array) in self.frames[n].arrays), default=levels[-1])
        # Lifted out of a cond, a collective would run although its branch is not taken; out of a remat, its
        # result would be saved although it should be recomputed.
        if collective:
            level = max([level, *(n for n in levels if not self.frames[n].lifts_collectives)])
        owner = self.frames[level]
        if owner is top:
            made = make(array)
        else:
            with jax_core.set_current_trace(owner.trace):
                made = make(array)
        owner.variants[key] = (array, made)
        owner.arrays[id(made)] = made
        return made

    def note_varying(self, array: jax.Array, axes: frozenset[str]) -> None:
        """An array is about to be made varying: the backward pass sums its cotangent over these axes."""
        before = self.varied_axes.setdefault(id(array), axes)
        # Two casts of one array are two sums in the backward pass. A layout that maps their dims to the same
        # axes needs only one of them.
        if before != axes:
            self.same_sum_axes.add(frozenset([before, axes]))
            self.varied_axes[id(array)] = before | axes

    def note_pending_operand(self, array: jax.Array, axes: frozenset[str]) -> None:
        """A pending sum is about to be added to this array. A carry that only accumulates may pend too."""
        frame = self.frames[-1]
        leaf = frame.carries.get(id(array))
        if leaf is not None and leaf not in frame.consumed:
            # The body is traced to its end before it is retraced, so one retrace serves all its carries.
            frame.pending_carries[leaf] = axes

    def note_resolve(self, array: jax.Array) -> None:
        """A pending sum is about to be resolved. A carry would resolve in every step, so it must not pend."""
        for frame in self.frames:
            leaf = frame.carries.get(id(array))
            if leaf is not None:
                raise RetraceForCarry(frame, {leaf: frozenset()})

    @contextlib.contextmanager
    def frame(self, lifts_collectives: bool = True) -> Iterator[Frame]:
        """Open a frame for the JAX trace that has just begun."""
        frame = Frame(lifts_collectives)
        self.frames.append(frame)
        # Otherwise `lowering` would take the ops inside for parts of this op, and give them no labels.
        op, self.op = self.op, ""
        try:
            yield frame
        finally:
            self.op = op
            self.frames.remove(frame)
            frame.close()

    @contextlib.contextmanager
    def vmapping(self, axes: frozenset[str], depth: int) -> Iterator[None]:
        """Trace inside `depth` vmaps, over dims that are split over these axes."""
        before = self.vmapped_axes, self.vmap_depth
        self.vmapped_axes, self.vmap_depth = axes, depth
        try:
            yield
        finally:
            self.vmapped_axes, self.vmap_depth = before

    @contextlib.contextmanager
    def branching(self, axes: frozenset[str]) -> Iterator[None]:
        """Trace a branch that devices along these axes of an enclosing vmap may or may not take."""
        before, self.branch_axes = self.branch_axes, self.branch_axes | axes
        try:
            yield
        finally:
            self.branch_axes = before

    @contextlib.contextmanager
    def in_pipeline(self, layers: Dim) -> Iterator[None]:
        """Trace inside a pipeline: the axes of its layers' dim can't split tensors in it."""
        before, self.pipeline_dims = self.pipeline_dims, (*self.pipeline_dims, layers)
        try:
            yield
        finally:
            self.pipeline_dims = before

    @contextlib.contextmanager
    def part_of_dim(self, part: Dim, parts: Dim, number: jax.Array) -> Iterator[None]:
        """Trace with a part of a dim in its place: the positions n with n modulo `parts` = `number`."""
        before, self.partial_dims = self.partial_dims, {**self.partial_dims, part: (parts, number)}
        try:
            yield
        finally:
            self.partial_dims = before

    @contextlib.contextmanager
    def under_layout(self, layout: Layout) -> Iterator[None]:
        """Trace under another layout. The caller reshards the tensors that enter and leave."""
        before, self.placement = self.placement, Placement(self.placement.mesh, layout)
        try:
            yield
        finally:
            self.placement = before

    @contextlib.contextmanager
    def lowering(self, op: str) -> Iterator[None]:
        """Label the equations that are traced with an op; the ops that it calls add no labels."""
        if self.op:
            yield
            return
        self.op = op
        try:
            with jax.named_scope(op):
                yield
        finally:
            self.op = ""


# Per thread, as JAX's own trace state is: a server compiles programs in a thread of its own.
class _Active(threading.local):
    """`active.context` is that of the innermost program being traced; None when ops run eagerly."""

    context: Context = cast("Context", None)


active = _Active()


@contextlib.contextmanager
def entered(ctx: Context) -> Iterator[Context]:
    """Trace inside a program."""
    before, active.context = active.context, ctx
    try:
        yield ctx
    finally:
        active.context = before


def is_traced(array: object) -> bool:
    """Whether an array is a tracer."""
    return isinstance(array, jax.core.Tracer)
