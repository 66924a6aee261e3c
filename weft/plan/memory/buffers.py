"""Peak memory: which buffers XLA allocates, when they are live, and which of them share memory.

The program goes through the stages of XLA's CPU compiler:

1. `rewrites`  changes the graph as XLA does before fusion, with `expansions`, `simplify` and `transposes`;
2. `fusion`    computes nodes inside their consumers (`library_fusion`, `loop_fusion`), and orders the rest
               breadth first;
3. `buffers`   assigns memory. A buffer is live from its node to its last reader. It reuses the buffer of an
               operand that dies there if it can, or the memory of a result that is not computed yet.

The rules are those of XLA's CPU compiler, and are checked against it (docs/memory.md, docs/limits.md). Adding
up the live values of a jaxpr does not work: fusion removes most of them, and reuse shrinks the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ...core.describe import short_dtype
from ...core.jax_compat import Jaxpr
from ...core.labels import OpLabel
from ..facts import LiveBuffer, Memory, PlannedTensor
from ..graph import Body, Graph, Node
from ..primitives import FUSIBLE, Fusion, aval_of
from .fusion import fuse
from .kernels import Kernel
from .platforms import CPU, Platform
from .rewrites import rewrite_as_xla
from .scheduling import Reads

Interval = tuple[int, int]


@dataclass(eq=False)
class Buffer:
    """Memory from time `start` to `end`, first written by `node` with `value`; `node` is None for inputs.

    In the intervals `gaps`, nothing needs its contents: XLA uses the memory for other values.
    """

    size: int
    start: int
    end: int
    value: int
    node: Node | None
    gaps: list[Interval] = field(default_factory=list)

    def intervals(self) -> list[Interval]:
        """The intervals in which it is live, without the gaps."""
        intervals, start = [], self.start
        for first, last in sorted(self.gaps):
            if start <= first and last < self.end:
                intervals.append((start, first - 1))
                start = last + 1
        return [*intervals, (start, self.end)]


def overlap(these: list[Interval], others: list[Interval]) -> bool:
    """Whether some of these intervals overlap with some of the others."""
    return any(start <= last and first <= end for start, end in these for first, last in others)


def assign_times(body: Body, now: int = 0) -> int:
    """Number the start and end of all nodes; returns the next number."""
    for node in body.nodes:
        node.start, now = now, now + 1
        for inside in node.bodies:
            now = assign_times(inside, now)
        node.end, now = now, now + 1
    return now


def copied_inputs(body: Body, reads: Reads) -> set[int]:
    """The aliased inputs that XLA copies before it overwrites them.

    XLA copies an input if some node reads it that the aliased result does not depend on: it decides this
    before it chooses an order, so such a reader might run too late. Otherwise a loop's carry, or a donated
    parameter, is updated in place.
    """
    producer = {n: node for node in body.nodes for n in node.results}
    copied = set()
    for old, new in body.aliases:
        ancestors, stack = set[int](), [new]
        while stack:
            node = producer.get(stack.pop())
            if node is not None and id(node) not in ancestors:
                ancestors.add(id(node))
                stack += reads[id(node)]
        if old != new and any(old in reads[id(node)] for node in body.nodes if id(node) not in ancestors):
            copied.add(old)
    return copied


def overwriting_results(body: Body, reads: Reads) -> set[int]:
    """The aliased results that are written over their input.

    A node that reads the input at other positions than it writes must not overwrite it: its result has a
    buffer of its own, and is copied to the input's when the body ends.
    """
    producer = {n: node for node in body.nodes for n in node.results}
    return {
        new
        for old, new in body.aliases
        if new not in producer or reads[id(producer[new])].get(old, True) or producer[new].bodies
    }


def allocate_buffers(body: Body, sizes: list[int], reads: Reads) -> tuple[dict[int, Buffer], list[Buffer]]:
    """The buffer of each value that has one, and the copies of aliased inputs."""
    last_reads = _last_reads(body, reads)
    buffers: dict[int, Buffer] = {}
    copies = [Buffer(sizes[n], 0, last_reads[n], n, None) for n in sorted(copied_inputs(body, reads))]
    # Results that overwrite an aliased input need no buffer.
    aliased = overwriting_results(body, reads)
    updated = {node.operands[0] for node in body.walk() if node.fusion is Fusion.UPDATE}
    for node in body.walk():
        gaps: dict[int, Interval] = {}
        reused: set[Buffer] = set()
        for inside in node.bodies:
            aliased |= overwriting_results(inside, reads)
            copied = copied_inputs(inside, reads)
            copies += [Buffer(sizes[n], node.start, last_reads[n], n, node) for n in copied]
            # A copied carry is read from its copy. Its memory is free until the next value is written there.
            producer = {n: one for one in inside.nodes for n in one.results}
            for position, (old, new) in enumerate(inside.aliases):
                if old in copied and new in producer:
                    aliased.add(new)
                    gaps[position] = node.start + 1, producer[new].start - 1
        for position, n in enumerate(node.results):
            if n in aliased or not sizes[n]:
                continue
            end = last_reads.get(n, node.end)
            if node.primitive == "bitcast":
                if node.operands[0] in buffers:
                    buffers[n] = buffers[node.operands[0]]
                    buffers[n].end = max(buffers[n].end, end)
                continue
            # For XLA, a value that is updated in place later is one buffer with the result of the update, and
            # such a buffer reuses no operand's.
            for operand in () if n in updated else _reusable_operands(node, position, reads[id(node)]):
                buffer = buffers.get(operand)
                dies_here = buffer is not None and buffer.end == last_reads[operand] == node.end
                # Two carries of a loop may begin with the same value: the second one begins with a copy.
                if buffer is not None and dies_here and buffer.size == sizes[n] and buffer not in reused:
                    buffers[n], buffer.end = buffer, end
                    reused.add(buffer)
                    break
            else:
                # The result of a cond replaces that of its branch, which is live until the cond ends.
                start = node.end if node.primitive == "cond" else node.start
                buffers[n] = Buffer(sizes[n], start, end, n, node)
            if position in gaps:
                buffers[n].gaps.append(gaps[position])
    return buffers, copies


def _last_reads(body: Body, reads: Reads) -> dict[int, int]:
    """Number all nodes, and return the time of the last read of each value."""
    # The caller reads the outputs: they are live until after the last node.
    last_reads = dict.fromkeys(body.outputs, assign_times(body))
    for node in body.walk():
        for n in reads[id(node)]:
            last_reads[n] = max(last_reads.get(n, 0), node.end)
        for inside in node.bodies:
            end = max((last.end for last in inside.nodes), default=0)
            last_reads.update((n, max(last_reads.get(n, 0), end)) for n in inside.outputs)
    return last_reads


def _reusable_operands(node: Node, position: int, reads: dict[int, bool]) -> list[int]:
    """The values whose buffers a result may overwrite."""
    # A loop updates its carries in place, and the zeros that stacked results are written into. `jaxpr` lists
    # these operands first, in the order of the results.
    if node.bodies and node.primitive != "cond":
        return node.operands[position : position + 1]
    # An update of one row must not copy all others.
    if node.fusion is Fusion.UPDATE:
        return node.operands[:1]
    # A sort works on its operands in place.
    if node.primitive == "sort":
        return node.operands[position : position + 1]
    return [n for n, in_place in reads.items() if in_place] if node.fusion in FUSIBLE else []


def pack_into_slots(buffers: list[Buffer], slots: list[Buffer]) -> list[Buffer]:
    """The buffers that cannot be packed into free intervals of `slots`, largest first.

    The caller of a program allocates its results before the program starts, and donated inputs that were
    copied stay allocated until it ends. XLA uses this memory for temporary buffers while it is free. It packs
    greedily, largest first, and so do we: an optimal packing could predict less memory than XLA uses.
    """
    occupied = [(slot.size, slot.intervals()) for slot in sorted(slots, key=lambda s: -s.size)]
    unpacked = []
    for b in sorted(buffers, key=lambda b: -b.size):
        for size, intervals in occupied:
            if size >= b.size and not overlap(b.intervals(), intervals):
                intervals += b.intervals()
                break
        else:
            unpacked.append(b)
    return unpacked


def find_peak(buffers: list[Buffer]) -> tuple[int, int]:
    """The most bytes that are live at once, and when."""
    changes: Counter[int] = Counter()
    for b in buffers:
        for start, end in b.intervals():
            changes[start] += b.size
            changes[end + 1] -= b.size  # at `end` its last reader still runs
    live = peak = when = 0
    for time in sorted(changes):
        live += changes[time]
        if live > peak:
            peak, when = live, time
    return peak, when


def heap_size(buffers: list[Buffer]) -> int:
    """The bytes that XLA allocates for buffers, including the gaps between them.

    XLA places them at fixed offsets, best fit, once with the largest first and once with the longest-lived
    first, and takes the better result.
    """
    peak, _ = find_peak(buffers)
    # Small buffers fit into the gaps that large ones leave.
    large = [b for b in buffers if b.size > peak / 1000]
    largest_first = sorted(large, key=lambda b: (-b.size, b.start - b.end, b.value))
    longest_first = sorted(large, key=lambda b: (b.start - b.end, -b.size, b.value))
    return max(peak, min(_packed_size(largest_first), _packed_size(longest_first)))


def _packed_size(buffers: list[Buffer]) -> int:
    """The end of the last buffer, if each is placed into the smallest gap between those that are live."""
    placed: list[tuple[int, Buffer]] = []
    total = 0
    for b in buffers:
        overlapping = sorted(
            (offset, offset + other.size)
            for offset, other in placed
            if overlap(b.intervals(), other.intervals())
        )
        best, end = None, 0
        for low, high in overlapping:
            gap = low - end
            if gap >= b.size and (best is None or gap < best[0]):
                best = gap, end
            end = max(end, high)
        offset = best[1] if best else end
        placed.append((offset, b))
        total = max(total, offset + b.size)
    return total


class PeakMemory(NamedTuple):
    """The memory that a program needs besides its inputs.

    Attributes:
      outputs: the bytes of results that do not reuse an input.
      temporary: the most bytes of other buffers that are live at once.
      when: the time at which they are.
      buffers: these buffers.
    """

    outputs: int
    temporary: int
    when: int
    buffers: list[Buffer]


@dataclass(eq=False)
class BufferAssignment:
    """The buffers of a program.

    Attributes:
      graph: the program, and the sizes and types of its values.
      kernels: the kernel of each node, by the id of the node.
      buffers: the buffer of each value that has one.
      returned: the buffers of results that do not reuse an input.
      spare: the memory of copied donated inputs, occupied from when their result is written.
      others: the other buffers.
    """

    graph: Graph
    kernels: dict[int, Kernel]
    buffers: dict[int, Buffer]
    returned: list[Buffer]
    spare: list[Buffer]
    others: list[Buffer]

    def peak(self, size: Callable[[Buffer], float] = lambda b: b.size) -> PeakMemory:
        """The memory of results, and that of other buffers at its peak.

        Args:
          size: the size of a buffer; by default its own. The layout search passes the size under a layout.
        """
        returned, spare, others = (
            [replace(b, size=int(size(b))) for b in group]
            for group in (self.returned, self.spare, self.others)
        )
        temporary = pack_into_slots(others, returned + spare)
        return PeakMemory(sum(b.size for b in returned), *find_peak(temporary), temporary)


def assign_buffers(
    graph: Graph, jaxpr: Jaxpr, donated: Sequence[int], platform: Platform = CPU
) -> BufferAssignment:
    """Assign the buffers of a program on one device.

    Args:
      graph: the program; it is rewritten as XLA does.
      jaxpr: the jaxpr it was read from.
      donated: the positions of donated inputs.
      platform: whose compiler assigns them.
    """
    rewrite_as_xla(graph, platform)
    body, sizes = graph.body, graph.sizes
    body.aliases = _donations(jaxpr, body, sizes, body.inputs[len(jaxpr.constvars) :], donated)
    kernels = fuse(body, graph, platform)
    reads = {key: kernel.reads for key, kernel in kernels.items()}
    buffers, copies = allocate_buffers(body, sizes, reads)

    end = max((node.end for node in body.nodes), default=0)
    in_place = {new for _, new in body.aliases}
    results = [n for n in dict.fromkeys(body.outputs) if n not in in_place]
    # Several results can share a buffer, hence by id. A result that is an input has none, and is copied.
    returned = {id(b): b for b in (buffers.get(n) or Buffer(sizes[n], 0, end, n, None) for n in results)}
    # A copied input is read from its copy. Its own memory is free until the result is written there.
    producer = {n: node for node in body.nodes for n in node.results}
    copied = {b.value for b in copies}
    spare = [
        Buffer(sizes[new], producer[new].end + 1, end, new, producer[new])
        for old, new in body.aliases
        if old in copied and new in producer
    ]
    others = {id(b): b for b in (*buffers.values(), *copies) if id(b) not in returned}
    return BufferAssignment(graph, kernels, buffers, [*returned.values()], spare, [*others.values()])


def summarize_memory(assignment: BufferAssignment, inputs: Sequence[PlannedTensor]) -> Memory:
    """The memory of a program on one device."""
    peak = assignment.peak()
    stored = sum(assignment.graph.sizes[n] for n in assignment.graph.body.inputs)
    buffers = (*assignment.returned, *assignment.others)
    now = [(peak.when, peak.when)]
    live = sorted((b for b in buffers if overlap(b.intervals(), now)), key=lambda b: -b.size)
    by_role = {role: sum(t.bytes for t in inputs if t.role == role) for role in ("param", "optimizer")}
    return Memory(
        params=by_role["param"],
        optimizer=by_role["optimizer"],
        inputs=stored,
        outputs=peak.outputs,
        activations=_saved_for_backward(assignment),
        peak=stored + peak.outputs + heap_size(peak.buffers),
        largest=tuple(_live_buffer(b, assignment.graph) for b in live[:10] if b.size),
    )


def _donations(
    jaxpr: Jaxpr, body: Body, sizes: list[int], inputs: list[int], donated: Sequence[int]
) -> list[tuple[int, int]]:
    """Pairs of a donated input and the result that reuses its memory.

    JAX pairs an input with the first result of the same type that has none yet.
    """
    free, pairs = list(donated), dict[int, int]()
    for n, outvar in zip(body.outputs, jaxpr.outvars, strict=True):
        result = aval_of(outvar)
        for i in free:
            aval = aval_of(jaxpr.invars[i])
            same = aval.shape == result.shape and aval.dtype == result.dtype
            if same and sizes[inputs[i]] == sizes[n] and n not in pairs:
                pairs[n] = inputs[i]
                free.remove(i)
                break
    return [(old, new) for new, old in pairs.items()]


def _saved_for_backward(assignment: BufferAssignment) -> int:
    """Bytes of forward results that the backward pass reads."""
    # By buffer, because several values can share one.
    saved, buffers = {}, assignment.buffers
    for node in assignment.graph.body.walk():
        if node.scope.phase() == "backward":
            for buffer in (buffers[n] for n in assignment.kernels[id(node)].reads if n in buffers):
                if buffer.node is not None and buffer.node.scope.phase() == "forward":
                    saved[id(buffer)] = buffer.size
    return sum(saved.values())


def _live_buffer(buffer: Buffer, graph: Graph) -> LiveBuffer:
    aval, node = graph.avals[buffer.value], buffer.node
    shape = f"{short_dtype(aval.dtype)}[{','.join(map(str, aval.shape))}]"
    if node is None:
        return LiveBuffer(buffer.size, shape, OpLabel.unlabeled("a copy of an input"), "forward", "")
    source = node.source or node.enclosing_source
    return LiveBuffer(buffer.size, shape, node.scope.op, node.scope.phase(), source)
