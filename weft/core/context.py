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
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import jax

from .dims import Dim, check_index_range
from .jax_compat import Tracer, get_opaque_trace_state, set_current_trace, take_current_trace
from .labels import OpLabel
from .layout import Layout, Placement, Splits
from .observations import Observations

if TYPE_CHECKING:
    from .deferred import DeferredCall
    from .tensor import Tensor


class Frame:
    """One JAX trace and the variants that were computed in it.

    Attributes:
      variants: the memo, by (id of the array, request).
      arrays: the arrays that belong to this trace, by id. They are kept alive: a new object could get the id
        of a dead one.
      memo_hits: the variants that a request found in `variants`, instead of computing them.
      carries: a loop's carries: leaf number by id of the array.
      consumed: the carries that were used other than as a summand.
      pending_carries: the carries that should be pending, with the axes.
      lifts_collectives: whether collectives may be moved out of this frame into an outer one.
    """

    def __init__(self, lifts_collectives: bool = True):
        self.state = get_opaque_trace_state()
        with take_current_trace() as trace:
            self.trace = trace
        self.variants: dict[Hashable, Variant] = {}
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


class Variant:
    """An entry of the memo: an array, and what a request made of it.

    Attributes:
      array: the array, kept alive because the memo's key is its id.
      value: the result; None until `store` is called.
      owner: the frame that computes it; None if the result must not be stored.
      is_lifted: whether that is an outer frame.
    """

    __slots__ = ("array", "is_lifted", "owner", "value")

    def __init__(self, array: Any, owner: Frame | None, is_lifted: bool = False):
        self.array, self.owner, self.is_lifted = array, owner, is_lifted
        self.value: Any = None

    def tracing(self) -> contextlib.AbstractContextManager[Any]:
        """Trace in the frame that owns the result."""
        if self.owner is None or not self.is_lifted:
            return contextlib.nullcontext()
        return set_current_trace(self.owner.trace)

    def store(self, value: Any) -> Any:
        """Set the result, and return it."""
        self.value = value
        if self.owner is not None:
            self.owner.arrays[id(value)] = value
        return value


@dataclass(frozen=True)
class VmapScope:
    """The enclosing vmaps.

    Attributes:
      axes: the axes of the mapped dims.
      depth: the number of vmaps.
      branch_axes: the axes along which devices may take different branches.
    """

    axes: frozenset[str] = frozenset()
    depth: int = 0
    branch_axes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PipelineScope:
    """The enclosing pipelines.

    Attributes:
      layers: the dims of their layers.
      partial_dims: the dims of which this trace has only a part, with the number of parts and the number of
        this one.
    """

    layers: tuple[Dim, ...] = ()
    partial_dims: dict[Dim, tuple[Dim, Any]] = field(default_factory=dict)


@dataclass
class Captures:
    """The global tensors that a program's function closes over, by `operands.capture_key`.

    Attributes:
      adopts_placement: whether the program moves to the mesh of a tensor that it captures: an eager op whose
        operands are not placed.
      inputs: the inputs of this trace that stand for captured tensors.
      found: the captured tensors that are not inputs yet.
    """

    adopts_placement: bool = False
    inputs: dict[Hashable, Tensor] = field(default_factory=dict)
    found: dict[Hashable, Tensor] = field(default_factory=dict)


_SERIALS = itertools.count(1)


class Context:
    """The state of the program that is being traced.

    Attributes:
      placement: the mesh and the layout that the program is staged for.
      serial: identifies the program that a slice belongs to.
      is_finished: whether its trace has ended; JAX calls the rules of a custom_vjp after that.
      op: the label of the op that is being lowered, or None.
      frames: the frames of the open JAX traces, outermost first.
      vmap, pipeline: the enclosing vmaps and pipelines.
      captures: the tensors that the function closes over.
      deferred_calls: the calls on global arrays after the SPMD part.
      observations: facts for plans and the layout search.
    """

    def __init__(self, placement: Placement, adopts_placement: bool = False):
        self.placement = placement
        # Not the id of this object: a later program could get it, and would accept the slices of this one.
        self.serial = next(_SERIALS)
        self.is_finished = False
        self.op: OpLabel | None = None
        self.frames: list[Frame] = []
        self.vmap, self.pipeline = VmapScope(), PipelineScope()
        self.captures = Captures(adopts_placement)
        self.deferred_calls: list[DeferredCall] = []
        self.observations = Observations()

    def splits(self, dims: tuple[Dim, ...], role: str = "value") -> Splits:
        """How this program splits a tensor with these dims."""
        seen = self.observations
        if (role, dims + self.pipeline.layers) not in seen.joint_dims:
            check_index_range(dims)
            seen.joint_dims.add((role, dims + self.pipeline.layers))
            for dim in dims:
                if not dim.is_inner:
                    seen.seen_dims.setdefault(dim.name, dim)
        known = self.placement.known_splits.get((dims, role))
        return self.placement.splits(dims, role) if known is None else known

    def ways(self, axes: tuple[str, ...]) -> int:
        """How many slices these axes split a dim into."""
        return self.placement.mesh.ways(axes)

    def slice_size(self, dim: Dim, axes: tuple[str, ...]) -> int:
        """The size of one device's slice of a dim, padding included."""
        return -(-dim.size // self.ways(axes))

    def slice_shape(self, dims: Sequence[Dim], splits: Splits) -> tuple[int, ...]:
        """The shape of a device's slice of a tensor, padding included."""
        return self.placement.array_shape(tuple(dims), splits=splits)

    def register(self, array: jax.Array) -> None:
        """Record that an array belongs to the current trace, so that its variants are memoized there."""
        top = self.frames[-1]
        if top.state == get_opaque_trace_state():
            top.arrays[id(array)] = array

    def variant(self, array: jax.Array, request: Hashable, *, collective: bool) -> Variant:
        """The memo's entry for an array and a request, to be computed by the caller if it has no value yet.

        It belongs to the outermost frame that allows it.
        """
        key = (id(array), request)
        for frame in reversed(self.frames):
            found = frame.variants.get(key)
            if found is not None and found.value is not None:
                frame.memo_hits.add(key)
                return found
        top = self.frames[-1]
        # A raw JAX transformation inside ours (jax.vmap in a program, say) has opened a trace that has no
        # frame. Its tracers must not be stored: they would outlive their trace.
        if top.state != get_opaque_trace_state():
            return Variant(array, None)
        levels = range(len(self.frames))
        # An array that no frame has registered was made by JAX, and may belong to the innermost trace.
        level = max((n for n in levels if id(array) in self.frames[n].arrays), default=levels[-1])
        # Lifted out of a cond, a collective would run although its branch is not taken; out of a remat, its
        # result would be saved although it should be recomputed.
        if collective:
            level = max([level, *(n for n in levels if not self.frames[n].lifts_collectives)])
        owner = self.frames[level]
        made = owner.variants[key] = Variant(array, owner, is_lifted=owner is not top)
        return made

    def note_varying(self, array: jax.Array, axes: frozenset[str]) -> None:
        """An array is about to be made varying: the backward pass sums its cotangent over these axes."""
        seen = self.observations
        before = seen.varied_axes.setdefault(id(array), axes)
        # Two casts of one array are two sums in the backward pass. A layout that maps their dims to the same
        # axes needs only one of them.
        if before != axes:
            seen.same_sum_axes.add(frozenset([before, axes]))
            seen.varied_axes[id(array)] = before | axes

    def note_pending_operand(self, array: jax.Array, axes: frozenset[str]) -> None:
        """A pending sum is about to be added to this array. A carry that only accumulates may pend too."""
        frame = self.frames[-1]
        leaf = frame.carries.get(id(array))
        if leaf is not None and leaf not in frame.consumed:
            # The body is traced to its end before it is retraced, so one retrace serves all its carries.
            frame.pending_carries[leaf] = axes

    @contextlib.contextmanager
    def frame(self, lifts_collectives: bool = True) -> Iterator[Frame]:
        """Open a frame for the JAX trace that has just begun."""
        frame = Frame(lifts_collectives)
        self.frames.append(frame)
        # Otherwise `lowering` would take the ops inside for parts of this op, and give them no labels.
        op, self.op = self.op, None
        try:
            yield frame
        finally:
            self.op = op
            self.frames.remove(frame)
            frame.close()

    @contextlib.contextmanager
    def inside(
        self,
        *,
        vmap: VmapScope | None = None,
        pipeline: PipelineScope | None = None,
        layout: Layout | None = None,
    ) -> Iterator[None]:
        """Trace inside other vmaps or pipelines, or under another layout.

        The caller reshards the tensors that enter and leave.
        """
        before = self.vmap, self.pipeline, self.placement
        self.vmap, self.pipeline = vmap or self.vmap, pipeline or self.pipeline
        if layout is not None:
            self.placement = Placement(self.placement.mesh, layout)
        try:
            yield
        finally:
            self.vmap, self.pipeline, self.placement = before

    def in_vmap(self, axes: Iterable[str], depth: int = 1) -> contextlib.AbstractContextManager[None]:
        """Trace inside `depth` more vmaps, over dims that are split over these axes."""
        vmap = self.vmap
        return self.inside(vmap=replace(vmap, axes=vmap.axes | {*axes}, depth=vmap.depth + depth))

    def in_branch(self, axes: frozenset[str]) -> contextlib.AbstractContextManager[None]:
        """Trace a branch that devices along these axes of an enclosing vmap may or may not take."""
        return self.inside(vmap=replace(self.vmap, branch_axes=self.vmap.branch_axes | axes))

    def in_pipeline(self, layers: Dim, axes: Iterable[str]) -> contextlib.AbstractContextManager[None]:
        """Trace inside a pipeline: the axes of its stages can't split tensors in it."""
        vmap = replace(self.vmap, axes=self.vmap.axes | {*axes})
        pipeline = replace(self.pipeline, layers=(*self.pipeline.layers, layers))
        return self.inside(vmap=vmap, pipeline=pipeline)

    def in_part_of_dim(
        self, part: Dim, parts: Dim, number: jax.Array
    ) -> contextlib.AbstractContextManager[None]:
        """Trace with a part of a dim in its place: the positions n with n modulo `parts` = `number`."""
        partial = {**self.pipeline.partial_dims, part: (parts, number)}
        return self.inside(pipeline=replace(self.pipeline, partial_dims=partial))

    @contextlib.contextmanager
    def lowering(self, op: OpLabel) -> Iterator[None]:
        """Label the equations that are traced with an op; the ops that it calls add no labels."""
        if self.op:
            yield
            return
        self.op = op
        try:
            with jax.named_scope(op.scope):
                yield
        finally:
            self.op = None


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
    return isinstance(array, Tracer)
