"""The context of a program while it is traced: its mesh, its layout, and the forms it remembers.

Inside a program a tensor may be wanted in several forms: made varying over an axis, gathered, its
pending sum resolved. Each form must be made once per tensor, not once per use: with `h` feeding q, k
and v, three casts of `h` to varying would put three all-reduces into the backward pass, one shared cast
leaves one. The forms are kept in a stack of frames, one for each JAX trace that we open (program, scan,
grad, …), never on the tensor itself, where they would leak tracers.

A form of a tensor that belongs to an outer frame is made *in that frame*, outside the loop: a weight
shared by the steps of a scan is cast once, and its gradient is summed once.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jax_core

from .dims import Dim, check_index_range
from .layout import Layout, Splits
from .mesh import Mesh


class RetraceForCarry(Exception):
    """A loop's carries had better be pending over other axes than they began with; the loop starts over."""

    def __init__(self, frame: Frame, axes: dict[int, frozenset[str]]):
        super().__init__()
        self.frame, self.axes = frame, axes


@dataclass(frozen=True)
class Pipeline:
    """A stack of layers that runs in stages.

    Attributes:
      layers: their dim.
      axes: along which the stages are.
      stages: how many there are.
      batch: the dim whose rows stream through.
      micro: in how many parts; 0: as many as are usual for the stages.
      schedule: its name.
      again: whether the backward pass computes the products of the forward pass again.
    """

    layers: Dim
    axes: tuple[str, ...]
    stages: int
    batch: Dim
    micro: int
    schedule: str
    again: bool


class Frame:
    """One JAX trace and the forms that were made in it."""

    def __init__(self, lifts_collectives: bool = True):
        self.state = jax_core.get_opaque_trace_state()
        with jax_core.take_current_trace() as trace:
            self.trace = trace
        self.forms: dict[Any, tuple[Any, Any]] = {}
        self.known: dict[int, Any] = {}  # arrays of this trace by id; held, so that ids stay theirs
        self.used: set[Any] = set()  # the forms that were asked for again
        self.carries: dict[int, int] = {}  # a loop's carries: id of the array → leaf
        self.consumed: set[int] = set()  # the carries that were used otherwise than in a sum
        self.wished: dict[int, frozenset[str]] = {}  # the carries that had better be pending, over these axes
        self.lifts_collectives = lifts_collectives

    def close(self) -> None:
        """Let go of the trace's arrays: a loop still knows its frame when the trace is over."""
        self.trace = None
        self.forms.clear()
        self.known.clear()


_SERIALS = itertools.count(1)


class Context:
    """What an op has to know about the program that is being traced.

    Attributes:
      adopts: whether it goes where what it captures lives: an eager op without placed operands.
      is_over: whether its trace is; JAX calls the rules of a custom_vjp later than that.
    """

    def __init__(self, mesh: Mesh, layout: Layout, adopts: bool = False):
        self.mesh, self.layout = mesh, layout
        self.adopts, self.is_over = adopts, False
        self.serial = next(_SERIALS)  # slices know their program by it
        self.frames: list[Frame] = []
        self.mapped: frozenset[str] = frozenset()  # axes of dims that an enclosing vmap hides
        self.vmaps = 0  # how many of them there are
        self.branched: frozenset[str] = frozenset()  # those of them along which places take other branches
        self.captured: dict[Any, Any] = {}  # global tensors met inside (`forms.capture_key`)
        self.captured_inputs: dict[Any, Any] = {}  # the same, as inputs of this trace
        self.dims_met: dict[str, Dim] = {}
        self.meetings: set[tuple[str, tuple[Dim, ...]]] = set()  # dims that had to be split at once, by role
        self.hidden: set[str] = set()  # dims that a vmap hides from the names of ops
        self.renamed: set[frozenset[str]] = set()  # dims that took the place of others, and these
        self.alike: set[frozenset[frozenset[str]]] = set()  # axes of sums that are one where the axes are one
        self.varied: dict[int, frozenset[str]] = {}  # over which axes an array was made varying last
        self.pipelines: dict[Pipeline, None] = {}  # in the order in which they were met
        self.staged: tuple[Dim, ...] = ()  # the layers' dims of enclosing pipelines
        self.dealt: dict[Dim, tuple[Dim, Any]] = {}  # dims of which a part is at hand: of how many, and which
        self.op = ""  # the op of the language that is being lowered
        self.jobs: list[Any] = []  # work on whole arrays after the SPMD part (`core/deferred.py`)

    def splits(self, dims: tuple[Dim, ...], role: str = "value") -> Splits:
        """How this program splits a tensor with these dims."""
        if (role, dims + self.staged) not in self.meetings:
            check_index_range(dims)
            self.meetings.add((role, dims + self.staged))
            for dim in dims:
                if not dim.is_inner:
                    self.dims_met.setdefault(dim.name, dim)
        return self.layout.splits(dims, self.mesh, role)

    def ways(self, axes: tuple[str, ...]) -> int:
        """How many pieces these axes cut a dim into."""
        return self.mesh.ways(axes)

    def slice_size(self, dim: Dim, axes: tuple[str, ...]) -> int:
        """The size of one device's piece of a dim, padding included."""
        return -(-dim.size // self.ways(axes))

    def slice_shape(self, dims: Sequence[Dim], splits: Splits) -> tuple[int, ...]:
        """The shape of a device's slice of a tensor, with its padding."""
        return tuple(self.slice_size(d, axes) for d, axes in zip(dims, splits, strict=True))

    def know(self, array: Any) -> None:
        """Note that an array belongs to the trace at hand, so that its forms can be remembered."""
        top = self.frames[-1]
        if top.state == jax_core.get_opaque_trace_state():
            top.known[id(array)] = array

    def remember(self, array: Any, asked: Any, make: Callable[[Any], Any], *, collective: bool) -> Any:
        """`make(array)`, once per array and request, in the outermost frame that allows it."""
        key = (id(array), asked)
        for frame in reversed(self.frames):
            if key in frame.forms:
                frame.used.add(key)
                return frame.forms[key][1]
        top = self.frames[-1]
        if top.state != jax_core.get_opaque_trace_state():
            return make(array)  # a raw JAX transformation inside ours: its tracers are not to be kept
        levels = range(len(self.frames))
        # An array that no frame knows is JAX's own, and may belong to the innermost trace.
        level = max((n for n in levels if id(array) in self.frames[n].known), default=levels[-1])
        if collective:
            level = max([level, *(n for n in levels if not self.frames[n].lifts_collectives)])
        home = self.frames[level]
        if home is top:
            made = make(array)
        else:
            with jax_core.set_current_trace(home.trace):
                made = make(array)
        home.forms[key] = (array, made)
        home.known[id(made)] = made
        return made

    def varies(self, array: Any, axes: frozenset[str]) -> None:
        """An array is about to be made varying: in the backward pass there is a sum over these axes."""
        before = self.varied.setdefault(id(array), axes)
        if before != axes:
            self.alike.add(frozenset([before, axes]))
            self.varied[id(array)] = before | axes

    def wants_pending(self, array: Any, axes: frozenset[str]) -> None:
        """A pending sum is about to be added to this array. A carry that only accumulates pends too."""
        frame = self.frames[-1]
        leaf = frame.carries.get(id(array))
        if leaf is not None and leaf not in frame.consumed:
            frame.wished[leaf] = axes  # the body goes on, so that one new attempt serves all its carries

    def resolves(self, array: Any) -> None:
        """A pending sum is about to be resolved: if it is a carry, it had better not pend."""
        for frame in self.frames:
            leaf = frame.carries.get(id(array))
            if leaf is not None:
                raise RetraceForCarry(frame, {leaf: frozenset()})

    @contextlib.contextmanager
    def frame(self, lifts_collectives: bool = True) -> Iterator[Frame]:
        """A frame for the JAX trace that has just been opened."""
        frame = Frame(lifts_collectives)
        self.frames.append(frame)
        op, self.op = self.op, ""  # ops inside have names of their own
        try:
            yield frame
        finally:
            self.op = op
            self.frames.remove(frame)
            frame.close()

    @contextlib.contextmanager
    def mapping(self, mapped: frozenset[str], vmaps: int) -> Iterator[None]:
        """Trace inside so many vmaps, which hide dims on these axes."""
        before = self.mapped, self.vmaps
        self.mapped, self.vmaps = mapped, vmaps
        try:
            yield
        finally:
            self.mapped, self.vmaps = before

    @contextlib.contextmanager
    def branching(self, axes: frozenset[str]) -> Iterator[None]:
        """Trace a branch that some places along these axes of an enclosing vmap take, and others don't."""
        before, self.branched = self.branched, self.branched | axes
        try:
            yield
        finally:
            self.branched = before

    @contextlib.contextmanager
    def staging(self, layers: Dim) -> Iterator[None]:
        """Trace inside a pipeline: its layers' axes can't split what is in it."""
        before, self.staged = self.staged, (*self.staged, layers)
        try:
            yield
        finally:
            self.staged = before

    @contextlib.contextmanager
    def dealing(self, part: Dim, parts: Dim, number: Any) -> Iterator[None]:
        """Trace with a part of a dim in its place, the places n with n modulo `parts` = `number`."""
        before, self.dealt = self.dealt, {**self.dealt, part: (parts, number)}
        try:
            yield
        finally:
            self.dealt = before

    @contextlib.contextmanager
    def laid_out(self, layout: Layout) -> Iterator[None]:
        """Trace under another layout; what goes in and comes out has to be brought into its forms."""
        before, self.layout = self.layout, layout
        try:
            yield
        finally:
            self.layout = before

    @contextlib.contextmanager
    def lowering(self, op: str) -> Iterator[None]:
        """Name what is traced after an op; ops that it is made of don't count."""
        if self.op:
            yield
            return
        self.op = op
        try:
            with jax.named_scope(op):
                yield
        finally:
            self.op = ""


class _Stack(threading.local):
    def __init__(self) -> None:
        self.contexts: list[Context] = []


_STACK = _Stack()


def current() -> Context | None:
    """The innermost program that is being traced, or None when ops run eagerly."""
    return _STACK.contexts[-1] if _STACK.contexts else None


def require() -> Context:
    """The innermost program that is being traced."""
    assert _STACK.contexts, "an op's lowering ran outside a program"
    return _STACK.contexts[-1]


@contextlib.contextmanager
def entered(context: Context) -> Iterator[Context]:
    """Trace inside a program."""
    _STACK.contexts.append(context)
    try:
        yield context
    finally:
        _STACK.contexts.pop()


def is_traced(array: Any) -> bool:
    """Whether an array is a tracer."""
    return isinstance(array, jax.core.Tracer)
