"""Peak memory: which buffers XLA will make, when it makes them, and which of them share their place.

A program is read into nodes, one for each equation, and taken through what XLA does with it:

1. read     calls are inlined, loops keep a body; what XLA rewrites is rewritten;
2. fuse     element-wise chains are computed inside what reads them and get no buffer;
3. schedule breadth first: what is ready runs, so zeros, slices and updates run early;
4. place    a buffer lives from its node to its last reader, takes over the memory of an operand that
            dies there if it can, and may use the memory of a result that is not yet there.

The rules are those of XLA's CPU compiler, which is where they can be checked (docs/memory.md).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core as jax_core

from ..mesh import Mesh
from . import cost
from .facts import Live, Memory, Stored
from .walk import KINDS, op_of, phase_of, source_of

CALLS = frozenset(
    """
    jit pjit closed_call core_call custom_jvp_call custom_vjp_call checkpoint remat2 linear_call
    shard_map
    """.split()
)
# Other names for their operand's memory.
ALIASES = frozenset("reshape squeeze expand_dims pvary name optimization_barrier copy stop_gradient".split())
# Each element of the result is made from some of the operand: fused, but not in the operand's place.
MOVES = frozenset("slice dynamic_slice gather rev pad concatenate transpose broadcast_in_dim iota".split())
FUSED = cost.FUSED | MOVES
REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod argmax argmin".split()
)
# They read through a fused chain. All others, like matrix products and collectives, read buffers.
READERS = FUSED | REDUCTIONS | {"dynamic_update_slice"}
# They write into the memory of their first operand.
IN_PLACE = frozenset(["scatter-add", "scatter", "dynamic_update_slice"])
# Too dear to be computed once for each reader: two readers make it a buffer.
DEAR = frozenset(
    "atan2 cbrt cos div erf erf_inv erfc exp exp2 expm1 log log1p logistic pow rem rsqrt sin sqrt tan tanh".split()
)


@dataclass(eq=False)
class Node:
    """One equation with its operands and results as numbers; a loop with what it repeats."""

    primitive: str
    operands: list[int]
    results: list[int]
    eqn: Any
    name: str
    bodies: list[Body] = field(default_factory=list)
    start: int = 0
    end: int = 0


@dataclass(eq=False)
class Body:
    """What runs together. `kept` are pairs of an input and the result that takes its memory."""

    nodes: list[Node] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    kept: list[tuple[int, int]] = field(default_factory=list)


# 1. Read


class Reader:
    """Jaxprs to bodies; `sizes` has the bytes of every number on one device."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.avals: list[Any] = []
        self.copies: dict[Any, int] = {}

    def new(self, aval: Any) -> int:
        self.sizes.append(cost.size(aval))
        self.avals.append(aval)
        return len(self.sizes) - 1

    def number(self, env: dict[Any, int], atom: Any) -> int:
        if isinstance(atom, jax_core.Literal):
            return self.new(None)
        if atom not in env:
            env[atom] = self.new(atom.aval)
        return env[atom]

    def body(self, jaxpr: Any, env: dict[Any, int], name: str) -> Body:
        body = Body()
        self.add(body, jaxpr, env, name)
        body.outputs = [self.number(env, atom) for atom in jaxpr.outvars]
        return body

    def add(self, body: Body, jaxpr: Any, env: dict[Any, int], outer: str) -> None:
        for eqn in jaxpr.eqns:
            primitive = eqn.primitive.name
            name = "/".join(part for part in (outer, str(eqn.source_info.name_stack)) if part)
            inner = [getattr(sub, "jaxpr", sub) for sub in jax_core.jaxprs_in_params(eqn.params)]
            operands = [self.number(env, atom) for atom in eqn.invars]
            if primitive in CALLS and inner:
                called = dict(zip(inner[0].invars, operands[-len(inner[0].invars) :], strict=True))
                if primitive == "shard_map":  # outside it arrays are whole
                    for variable, n in called.items():
                        self.sizes[n], self.avals[n] = cost.size(variable.aval), variable.aval
                self.add(body, inner[0], called, name)
                for variable, atom in zip(eqn.outvars, inner[0].outvars, strict=True):
                    env[variable] = self.number(called, atom)
            elif primitive in ALIASES:
                env.update(zip(eqn.outvars, operands, strict=False))
            elif primitive in LOOPS:
                LOOPS[primitive](self, body, eqn, operands, env, name)
            else:
                results = [self.number(env, v) for v in eqn.outvars]
                self.split(eqn, operands, results)
                for position, order in enumerate(wanted_orders(eqn)):
                    if order:
                        operands[position] = self.copy(body, operands[position], tuple(order), eqn, name)
                body.nodes.append(Node(primitive, operands, results, eqn, name))

    def split(self, eqn: Any, operands: list[int], results: list[int]) -> None:
        """Work on whole arrays after a shard_map: a result is as split as what it is made from."""
        for r, variable in zip(results, eqn.outvars, strict=True):
            whole = [
                (self.sizes[o], cost.size(a.aval))
                for o, a in zip(operands, eqn.invars, strict=True)
                if a.aval.ndim == variable.aval.ndim
            ]
            share = min((mine / all_of_it for mine, all_of_it in whole if all_of_it), default=1)
            self.sizes[r] = round(self.sizes[r] * share)

    def copy(self, body: Body, n: int, order: tuple[int, ...], eqn: Any, name: str) -> int:
        """An operand with its dims in this order; the same copy serves all its readers."""
        key = (id(body), n, order)
        if key not in self.copies:
            self.copies[key] = self.new(self.avals[n])
            primitive = "bitcast" if list(order) == sorted(order) else "transpose"
            body.nodes.append(Node(primitive, [n], [self.copies[key]], eqn, name))
        return self.copies[key]

    def scan(self, body: Body, eqn: Any, operands: list[int], env: dict[Any, int], name: str) -> None:
        """Slices of the scanned arrays, the body, and its results written into arrays of zeros."""
        consts, carries = eqn.params["num_consts"], eqn.params["num_carry"]
        jaxpr = eqn.params["jaxpr"].jaxpr
        inner = dict(zip(jaxpr.invars[:consts], operands[:consts], strict=True))
        inside = Body()
        for variable, n in zip(jaxpr.invars[consts + carries :], operands[consts + carries :], strict=True):
            inside.nodes.append(Node("dynamic_slice", [n], [self.number(inner, variable)], eqn, name))
        old = [self.number(inner, v) for v in jaxpr.invars[consts : consts + carries]]
        self.add(inside, jaxpr, inner, name)
        made = [self.number(inner, atom) for atom in jaxpr.outvars]
        inside.kept = list(zip(old, made[:carries], strict=True))
        inside.nodes += [Node("dynamic_update_slice", [n], [], eqn, name) for n in made[carries:]]
        stacks = [self.new(v.aval) for v in eqn.outvars[carries:]]
        body.nodes += [Node("zeros", [], [n], eqn, name) for n in stacks]
        results = [self.number(env, v) for v in eqn.outvars]
        operands = (
            operands[consts : consts + carries] + stacks + operands[:consts] + operands[consts + carries :]
        )
        body.nodes.append(Node("scan", operands, results, eqn, name, [inside]))

    def loop(self, body: Body, eqn: Any, operands: list[int], env: dict[Any, int], name: str) -> None:
        """A while loop: its condition reads, its body takes over, what it carries."""
        condition, repeated = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        consts, given = operands[first : first + second], operands[first + second :]
        inner = dict(zip(repeated.invars, consts, strict=False))
        old = [self.number(inner, v) for v in repeated.invars[second:]]
        test = self.body(condition, dict(zip(condition.invars, operands[:first] + old, strict=True)), name)
        inside = self.body(repeated, inner, name)
        inside.kept, inside.outputs = list(zip(old, inside.outputs, strict=True)), []
        results = [self.number(env, v) for v in eqn.outvars]
        bodies = [test, inside]
        body.nodes.append(Node("while", given + operands[: first + second], results, eqn, name, bodies))

    def branches(self, body: Body, eqn: Any, operands: list[int], env: dict[Any, int], name: str) -> None:
        """A cond: of its branches one runs, so that their buffers never live together."""
        jaxprs = [branch.jaxpr for branch in eqn.params["branches"]]
        bodies = [self.body(j, dict(zip(j.invars, operands[1:], strict=True)), name) for j in jaxprs]
        results = [self.number(env, v) for v in eqn.outvars]
        for inside in bodies:
            inside.kept, inside.outputs = list(zip(results, inside.outputs, strict=True)), []
        body.nodes.append(Node("cond", operands, results, eqn, name, bodies))


LOOPS = {"scan": Reader.scan, "while": Reader.loop, "cond": Reader.branches}


def wanted_orders(eqn: Any) -> list[list[int]]:
    """For each operand the order of dims that XLA wants, or nothing if it takes any.

    A matrix product has one dim that is contracted and one that is not: several are merged, for which
    they have to stand together, contracted ones last on the left and first on the right. Convolutions
    want features last; collectives that cut or join want that dim first.
    """
    if eqn.primitive.name == "dot_general":
        orders = []
        for side, (atom, c, b) in enumerate(zip(eqn.invars, *eqn.params["dimension_numbers"], strict=True)):
            free = [n for n in range(atom.aval.ndim) if n not in c and n not in b]
            order = [*b, *free, *c] if side == 0 else [*b, *c, *free]
            orders.append(order if len(c) > 1 or len(free) > 1 else [])
        return orders
    if eqn.primitive.name == "conv_general_dilated":
        (batch, feature, *space), (out, into, *window), _ = eqn.params["dimension_numbers"]
        orders = [[batch, *space, feature], [*window, into, out]]
        return [order if order != sorted(order) else [] for order in orders]
    split = eqn.params.get("scatter_dimension", eqn.params.get("all_gather_dimension", 0))
    rank = eqn.invars[0].aval.ndim if split else 0
    return [[split, *(n for n in range(rank) if n != split)]] if split else []


def rewrite(body: Body) -> None:
    """What XLA changes before it fuses, in a body and all bodies inside it."""
    for node in body.nodes:
        for inside in node.bodies:
            rewrite(inside)
    _scatter_into_sums(body)
    _merge_sums(body)
    _transposed_products(body)


def _transposed_products(body: Body) -> None:
    """`(a · b)ᵀ` becomes `bᵀ · aᵀ`, a new product that comes after those that are ready with it."""
    maker = {n: node for node in body.nodes for n in node.results}
    uses = Counter(n for node in body.nodes for n in node.operands)
    for node in list(body.nodes):
        product = maker.get(node.operands[0]) if node.primitive == "transpose" else None
        if product is None or product.primitive != "dot_general" or uses[node.operands[0]] > 1:
            continue
        if node.eqn.params.get("permutation") == (1, 0):
            product.results = node.results
            body.nodes.remove(node)
            body.nodes.remove(product)
            body.nodes.append(product)


def _scatter_into_sums(body: Body) -> None:
    """`scatter(zeros, …) + y` becomes `scatter(y, …)`: the gradient of a look-up needs no zeros."""
    maker = {n: node for node in body.nodes for n in node.results}
    uses = Counter(n for node in body.nodes for n in node.operands)
    gone = set()
    for place, node in enumerate(body.nodes):
        if node.primitive not in ("add", "add_any"):
            continue
        for mine, other in (node.operands, node.operands[::-1]):
            scatter = maker.get(mine)
            if scatter is None or scatter.primitive != "scatter-add" or uses[mine] > 1:
                continue
            zeros = maker.get(scatter.operands[0])
            if zeros is not None and zeros.primitive == "broadcast_in_dim":
                rest = scatter.operands[1:]
                body.nodes[place] = Node("scatter-add", [other, *rest], node.results, node.eqn, node.name)
                gone.add(id(scatter))
                break
    body.nodes = [node for node in body.nodes if id(node) not in gone]


def _merge_sums(body: Body) -> None:
    """All-reduces over the same axes that do not wait for each other become one."""
    waits: dict[int, frozenset[Any]] = {}  # for each number the all-reduces that it waits for
    merged: dict[Any, Node] = {}
    for node in list(body.nodes):
        before = frozenset().union(*(waits.get(n, frozenset()) for n in node.operands))
        if KINDS.get(node.primitive) == "all-reduce":
            key = (node.primitive.removesuffix("_invariant"), str(node.eqn.params.get("axes")))
            turn = sum(1 for k in before if k[0] == key)
            before |= {(key, turn)}
            first = merged.setdefault((key, turn), node)
            if first is not node:
                first.operands += node.operands
                first.results += node.results
                body.nodes.remove(node)
        for n in node.results:
            waits[n] = before


# 2. and 3. Fuse and schedule


def breadth_first(nodes: list[Node], needs: dict[int, set[int]]) -> list[Node]:
    """Nodes in the order in which they become ready; `needs[place]` are the numbers that one reads."""
    maker = {n: place for place, node in enumerate(nodes) for n in node.results}
    waiting: list[int] = []
    users: list[list[int]] = [[] for _ in nodes]
    for place in range(len(nodes)):
        before = {maker[n] for n in needs[place] if n in maker}
        waiting.append(len(before))
        for other in before:
            users[other].append(place)
    ready = deque(place for place, count in enumerate(waiting) if not count)
    order = []
    while ready:
        place = ready.popleft()
        order.append(nodes[place])
        for user in users[place]:
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    return order


def with_buffers(nodes: list[Node], outputs: set[int]) -> set[int]:
    """The numbers that get a buffer; nodes in order."""
    buffers, reduced, readers = set(outputs), set[int](), Counter[int]()
    for node in reversed(nodes):
        fused = node.primitive in FUSED and node.results[0] not in buffers
        if fused and node.primitive in DEAR and readers[node.results[0]] > 1:
            fused = False
        # A reduction computes element-wise operands itself, but reads what is moved from a buffer.
        if fused and node.primitive in MOVES and node.results[0] in reduced:
            fused = False
        if not fused:
            buffers.update(node.results)
        for n in node.operands:
            readers[n] += 1
            if node.primitive not in READERS:
                buffers.add(n)
            if node.primitive in REDUCTIONS or (fused and node.results[0] in reduced):
                reduced.add(n)
    return buffers


def fuse(body: Body) -> dict[int, dict[int, bool]]:
    """Schedule a body, fused nodes left out; for each node (by id) what it reads.

    What it reads is true where the result may take the operand's place: element for element.
    """
    outputs = set(body.outputs) | {new for _, new in body.kept}
    nodes = breadth_first(body.nodes, {n: set(node.operands) for n, node in enumerate(body.nodes)})
    buffers = with_buffers(nodes, outputs)
    through: dict[int, dict[int, bool]] = {}
    reads, left = {}, []
    for node in nodes:
        found: dict[int, bool] = {}
        for n in node.operands:
            for source, straight in through.get(n, {n: True}).items():
                found[source] = found.get(source, True) and straight and node.primitive not in MOVES
        if node.primitive in FUSED and node.results[0] not in buffers:
            through[node.results[0]] = found
        else:
            reads[id(node)] = found
            left.append(node)
    body.nodes = breadth_first(left, {place: set(reads[id(node)]) for place, node in enumerate(left)})
    for node in body.nodes:
        for inside in node.bodies:
            reads |= fuse(inside)
    return reads


# 4. Place


@dataclass(eq=False)
class Buffer:
    """Memory from one moment to another, first filled by `node` with the value `number`."""

    size: int
    start: int
    end: int
    number: int
    node: Node | None


def tick(body: Body, now: int = 0) -> int:
    """Give all nodes their times; returns the next."""
    for node in body.nodes:
        node.start, now = now, now + 1
        for inside in node.bodies:
            now = tick(inside, now)
        node.end, now = now, now + 1
    return now


def nodes_of(body: Body) -> Iterator[Node]:
    """All nodes, those of loops too."""
    for node in body.nodes:
        yield node
        for inside in node.bodies:
            yield from nodes_of(inside)


def copied(body: Body, reads: dict[int, dict[int, bool]]) -> set[int]:
    """The kept inputs that cannot just be written over by their result.

    XLA copies an input if something reads it that the result does not wait for: it decides that before
    it chooses an order.
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
        if old != new and any(id(node) not in before for node in body.nodes if old in reads[id(node)]):
            found.add(old)
    return found


def place(body: Body, sizes: list[int]) -> tuple[dict[int, Buffer], list[Buffer], dict[int, dict[int, bool]]]:
    """The buffers by number, those of copied inputs, and what each node (by id) reads."""
    reads = fuse(body)
    end = tick(body)
    ends = {n: end for n in body.outputs}
    for node in nodes_of(body):
        for n in reads[id(node)]:
            ends[n] = max(ends.get(n, 0), node.end)
    homes: dict[int, Buffer] = {}
    copies = [Buffer(sizes[n], 0, ends[n], n, None) for n in sorted(copied(body, reads))]
    housed = {new for _, new in body.kept}
    for node in nodes_of(body):
        for inside in node.bodies:
            housed |= {new for _, new in inside.kept}
            copies += [Buffer(sizes[n], node.start, ends[n], n, node) for n in copied(inside, reads)]
        for position, n in enumerate(node.results):
            if n in housed or not sizes[n]:
                continue
            until = ends.get(n, node.end)
            if node.primitive == "bitcast":  # another name for its operand's memory
                if node.operands[0] in homes:
                    homes[n] = homes[node.operands[0]]
                    homes[n].end = max(homes[n].end, until)
                continue
            for o in _replaced(node, position, reads[id(node)]):
                home = homes.get(o)
                if home is not None and home.end == ends[o] == node.end and home.size == sizes[n]:
                    homes[n], home.end = home, until
                    break
            else:
                homes[n] = Buffer(sizes[n], node.start, until, n, node)
    return homes, copies, reads


def _replaced(node: Node, position: int, reads: dict[int, bool]) -> list[int]:
    """The operands whose memory a result may take over."""
    if node.primitive in ("scan", "while"):
        return node.operands[position : position + 1]
    if node.primitive in IN_PLACE:
        return node.operands[:1]
    return [n for n, straight in reads.items() if straight] if node.primitive in FUSED else []


def lodge(buffers: list[Buffer], rooms: list[Buffer]) -> list[Buffer]:
    """The buffers that find no place in memory that is there anyway; large ones choose first.

    A room is taken while its own value is alive: results and overwritten inputs have memory of their own
    from the start of the program to its end.
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


def heap(buffers: list[Buffer]) -> tuple[int, int]:
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


def memory_of(
    jaxpr: Any, inputs: Sequence[Stored], outputs: Sequence[Stored], mesh: Mesh, donated: Sequence[int]
) -> Memory:
    """The memory of a program on one device."""
    reader, env = Reader(), dict[Any, int]()
    given = [reader.number(env, v) for v in (*jaxpr.constvars, *jaxpr.invars)]
    body = reader.body(jaxpr, env, "")
    rewrite(body)
    sizes = reader.sizes
    results = list(dict.fromkeys(body.outputs))
    # JAX gives a donated input's memory to the first result of the same type that has none yet.
    free = [given[len(jaxpr.constvars) + n] for n in donated]
    types = {
        env[v]: (v.aval.shape, v.aval.dtype, sizes[env[v]])
        for v in (*jaxpr.invars, *jaxpr.outvars)
        if v in env
    }
    for n in results:
        same = [i for i in free if types[i] == types.get(n)]
        if same:
            free.remove(same[0])
            body.kept.append((same[0], n))
    kept = {new for _, new in body.kept}
    results = [n for n in results if n not in kept]
    homes, copies, reads = place(body, sizes)
    end = max((node.end for node in body.nodes), default=0)
    returned = [homes.get(n) or Buffer(sizes[n], 0, end, n, None) for n in results]
    # Of a copied input the place is free until its result is there.
    maker = {n: node for node in body.nodes for n in node.results}
    moved = {b.number for b in copies}
    spare = [Buffer(sizes[n], maker[n].start, end, n, maker[n]) for i, n in body.kept if i in moved]
    own = {id(b) for b in returned}
    temporary = [b for b in {id(b): b for b in (*homes.values(), *copies)}.values() if id(b) not in own]
    most, when = heap(lodge(temporary, returned + spare))
    stored = sum(sizes[n] for n in given)
    own_size = sum(b.size for b in returned)
    alive = sorted((b for b in (*temporary, *returned) if b.start <= when <= b.end), key=lambda b: -b.size)
    by_role = {role: sum(s.bytes for s in inputs if s.role == role) for role in ("param", "optimizer")}
    return Memory(
        params=by_role["param"],
        optimizer=by_role["optimizer"],
        inputs=stored,
        outputs=own_size,
        activations=_kept_for_backward(body, homes, reads),
        peak=stored + own_size + most,
        largest=tuple(_live(b, reader) for b in alive[:10]),
    )


def _kept_for_backward(body: Body, homes: dict[int, Buffer], reads: dict[int, dict[int, bool]]) -> int:
    """Bytes of what the backward pass reads of the forward pass's results."""
    kept: dict[int, int] = {}
    for node in nodes_of(body):
        if phase_of(node.name, False) == "backward":
            for n in reads[id(node)]:
                home = homes.get(n)
                if (
                    home is not None
                    and home.node is not None
                    and phase_of(home.node.name, False) == "forward"
                ):
                    kept[id(home)] = home.size
    return sum(kept.values())


def _live(buffer: Buffer, reader: Reader) -> Live:
    shape, node = str(reader.avals[buffer.number].str_short()), buffer.node
    if node is None:
        return Live(buffer.size, shape, "copy of an input", "forward", "")
    return Live(buffer.size, shape, op_of(node.name), phase_of(node.name, False), source_of(node.eqn))
