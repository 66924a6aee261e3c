"""Peak memory: which buffers XLA will make, when it makes them, and which of them share a place.

The program is taken through what XLA does with it:

1. `nodes`   reads it: calls inlined, loops with bodies, what XLA rewrites rewritten;
2. `fusion`  computes element-wise chains inside what reads them, and orders the rest breadth first;
3. `memory`  places buffers: one lives from its node to its last reader, takes over the memory of an operand
             that dies there if it can, and may use the memory of a result that is not there yet.

The rules are those of XLA's CPU compiler, against which they are checked (docs/memory.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.describe import short_dtype
from ..core.mesh import Mesh
from .events import op_label, phase_of, user_source
from .facts import LiveBuffer, Memory, PlannedTensor
from .fusion import FUSIBLE, Reads, fuse
from .jaxpr import Body, JaxprReader, Node

# They write into the memory of their first operand.
IN_PLACE = frozenset(["scatter-add", "scatter", "dynamic_update_slice"])


@dataclass(eq=False)
class Buffer:
    """Memory from one moment to another, first filled by `node` with `number`."""

    size: int
    start: int
    end: int
    number: int
    node: Node | None


def assign_times(body: Body, now: int = 0) -> int:
    """Give all nodes their times; returns the next."""
    for node in body.nodes:
        node.start, now = now, now + 1
        for inside in node.bodies:
            now = assign_times(inside, now)
        node.end, now = now, now + 1
    return now


def walk_nodes(body: Body) -> Iterator[Node]:
    """All nodes, those of loops too."""
    for node in body.nodes:
        yield node
        for inside in node.bodies:
            yield from walk_nodes(inside)


def copied_inputs(body: Body, reads: Reads) -> set[int]:
    """The kept inputs that their result cannot just be written over.

    XLA copies an input if something reads it that the result does not wait for: it decides that before
    it chooses an order. Else a loop's carry, or a donated parameter, is updated where it is.
    """
    maker = {n: node for node in body.nodes for n in node.results}
    found = set()
    for old, new in body.kept:
        before, todo = set[int](), [new]
        while todo:
            node = maker.get(todo.pop())
            if node is not None and id(node) not in before:
                before.add(id(node))
                todo += reads[id(node)]
        if old != new and any(old in reads[id(node)] for node in body.nodes if id(node) not in before):
            found.add(old)
    return found


def allocate_buffers(body: Body, sizes: list[int], reads: Reads) -> tuple[dict[int, Buffer], list[Buffer]]:
    """The buffer of each number that has one, and the copies of kept inputs."""
    end = assign_times(body)
    ends = dict.fromkeys(body.outputs, end)
    for node in walk_nodes(body):
        for n in reads[id(node)]:
            ends[n] = max(ends.get(n, 0), node.end)
        for inside in node.bodies:
            done = max((last.end for last in inside.nodes), default=0)
            ends.update((n, max(ends.get(n, 0), done)) for n in inside.outputs)
    homes: dict[int, Buffer] = {}
    copies = [Buffer(sizes[n], 0, ends[n], n, None) for n in sorted(copied_inputs(body, reads))]
    housed = {new for _, new in body.kept}
    written = {node.operands[0] for node in walk_nodes(body) if node.primitive in IN_PLACE}
    for node in walk_nodes(body):
        for inside in node.bodies:
            housed.update(new for _, new in inside.kept)
            copies += [Buffer(sizes[n], node.start, ends[n], n, node) for n in copied_inputs(inside, reads)]
        for position, n in enumerate(node.results):
            if n in housed or not sizes[n]:
                continue
            until = ends.get(n, node.end)
            if node.primitive == "bitcast":  # another name for its operand's memory
                if node.operands[0] in homes:
                    homes[n] = homes[node.operands[0]]
                    homes[n].end = max(homes[n].end, until)
                continue
            # What is written into later is, for XLA, one with what is then there: it takes no other's place.
            for o in () if n in written else _replaced(node, position, reads[id(node)]):
                home = homes.get(o)
                if home is not None and home.end == ends[o] == node.end and home.size == sizes[n]:
                    homes[n], home.end = home, until
                    break
            else:
                # The result of a cond takes the place of its branch's.
                start = node.end if node.primitive == "cond" else node.start
                homes[n] = Buffer(sizes[n], start, until, n, node)
    return homes, copies


def _replaced(node: Node, position: int, reads: dict[int, bool]) -> list[int]:
    """The numbers whose memory a result may take over."""
    if node.primitive in ("scan", "while"):  # what it carries, and the zeros that it fills
        return node.operands[position : position + 1]
    if node.primitive in IN_PLACE:
        return node.operands[:1]
    return [n for n, alike in reads.items() if alike] if node.primitive in FUSIBLE else []


def pack_into_slots(buffers: list[Buffer], rooms: list[Buffer]) -> list[Buffer]:
    """The buffers that find no place in rooms while these are empty; large ones choose first.

    Results, and donated inputs that were copied, have memory from the start of the program to its end.
    """
    taken = [(room.size, [(room.start, room.end)]) for room in sorted(rooms, key=lambda r: -r.size)]
    left = []
    for b in sorted(buffers, key=lambda b: -b.size):
        for size, times in taken:
            if size >= b.size and all(b.end < start or end < b.start for start, end in times):
                times.append((b.start, b.end))
                break
        else:
            left.append(b)
    return left


def find_peak(buffers: list[Buffer]) -> tuple[int, int]:
    """The most bytes alive at once, and when."""
    changes: Counter[int] = Counter()
    for b in buffers:
        changes[b.start] += b.size
        changes[b.end + 1] -= b.size
    now = best = when = 0
    for time in sorted(changes):
        now += changes[time]
        if now > best:
            best, when = now, time
    return best, when


# The facts


@dataclass(eq=False)
class BufferAssignment:
    """Where a program's buffers are.

    Attributes:
      body, reader, reads, homes: the program, the sizes of its numbers, what reads them, their buffers.
      given: the numbers that go in.
      returned: the buffers of results that have memory of their own.
      spare: places of donated inputs, from when they are free.
      others: the other buffers.
    """

    body: Body
    reader: JaxprReader
    reads: Reads
    homes: dict[int, Buffer]
    given: list[int]
    returned: list[Buffer]
    spare: list[Buffer]
    others: list[Buffer]

    def peak(self, size: Callable[[Buffer], float] = lambda b: b.size) -> tuple[int, int, int]:
        """The bytes of results, the most of all else that is alive at once, and when.

        Args:
          size: of a buffer; by default its own.
        """
        returned, spare, others = (
            [replace(b, size=int(size(b))) for b in some] for some in (self.returned, self.spare, self.others)
        )
        most, when = find_peak(pack_into_slots(others, returned + spare))
        return sum(b.size for b in returned), most, when


def assign_buffers(jaxpr: Any, mesh: Mesh, donated: Sequence[int]) -> BufferAssignment:
    """The buffers of a program on one device."""
    reader, env = JaxprReader(mesh), dict[Any, int]()
    given = [reader.number(env, v) for v in (*jaxpr.constvars, *jaxpr.invars)]
    body, sizes = reader.body(jaxpr, env, ""), reader.sizes
    body.kept = _donations(jaxpr, body, sizes, given[len(jaxpr.constvars) :], donated)
    reads = fuse(body, alone=mesh.is_unsplit)
    homes, copies = allocate_buffers(body, sizes, reads)

    end = max((node.end for node in body.nodes), default=0)
    in_place = {new for _, new in body.kept}
    results = [n for n in dict.fromkeys(body.outputs) if n not in in_place]
    returned = {id(b): b for b in (homes.get(n) or Buffer(sizes[n], 0, end, n, None) for n in results)}
    # A copied input's own place is free until its result is there, made in place of what it is made from.
    maker = {n: node for node in body.nodes for n in node.results}
    moved = {b.number for b in copies}
    spare = [
        Buffer(sizes[n], maker[n].end + 1, end, n, maker[n])
        for i, n in body.kept
        if i in moved and n in maker
    ]
    others = {id(b): b for b in (*homes.values(), *copies) if id(b) not in returned}
    return BufferAssignment(
        body, reader, reads, homes, given, [*returned.values()], spare, [*others.values()]
    )


def summarize_memory(found: BufferAssignment, inputs: Sequence[PlannedTensor]) -> Memory:
    """The memory of a program on one device."""
    own, most, when = found.peak()
    stored = sum(found.reader.sizes[n] for n in found.given)
    buffers = (*found.returned, *found.others)
    alive = sorted((b for b in buffers if b.start <= when <= b.end), key=lambda b: -b.size)
    by_role = {role: sum(s.bytes for s in inputs if s.role == role) for role in ("param", "optimizer")}
    return Memory(
        params=by_role["param"],
        optimizer=by_role["optimizer"],
        inputs=stored,
        outputs=own,
        activations=_kept_for_backward(found.body, found.homes, found.reads),
        peak=stored + own + most,
        largest=tuple(_live(b, found.reader) for b in alive[:10] if b.size),
    )


def _donations(
    jaxpr: Any, body: Body, sizes: list[int], given: list[int], donated: Sequence[int]
) -> list[tuple[int, int]]:
    """JAX gives a donated input's memory to the first result of the same type that has none yet."""
    free, pairs = list(donated), dict[int, int]()
    for n, variable in zip(body.outputs, jaxpr.outvars, strict=True):
        for i in free:
            aval = jaxpr.invars[i].aval
            same = aval.shape == variable.aval.shape and aval.dtype == variable.aval.dtype
            if same and sizes[given[i]] == sizes[n] and n not in pairs:
                pairs[n] = given[i]
                free.remove(i)
                break
    return [(old, new) for new, old in pairs.items()]


def _kept_for_backward(body: Body, homes: dict[int, Buffer], reads: Reads) -> int:
    """Bytes of what the backward pass reads of the forward pass's results."""
    kept = {}
    for node in walk_nodes(body):
        if phase_of(node.name, False) == "backward":
            for home in (homes[n] for n in reads[id(node)] if n in homes):
                if home.node is not None and phase_of(home.node.name, False) == "forward":
                    kept[id(home)] = home.size
    return sum(kept.values())


def _live(buffer: Buffer, reader: JaxprReader) -> LiveBuffer:
    aval, node = reader.avals[buffer.number], buffer.node
    shape = f"{short_dtype(aval.dtype)}[{','.join(map(str, aval.shape))}]"
    if node is None:
        return LiveBuffer(buffer.size, shape, "a copy of an input", "forward", "")
    source = user_source(node.eqn) or node.around
    return LiveBuffer(buffer.size, shape, op_label(node.name), phase_of(node.name, False), source)
