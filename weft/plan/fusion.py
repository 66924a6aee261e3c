"""What XLA computes together, and in which order it runs what is left.

`fuse(body)` leaves out the nodes that need no buffer, because they are computed inside what reads them, and
puts the others in XLA's order.
"""

from __future__ import annotations

from collections import Counter, deque

from . import primitives
from .jaxpr import Body, Node

# Fused, but a result is not element for element in its operand's place.
DATA_MOVEMENT = frozenset("slice dynamic_slice gather rev pad concatenate transpose".split())
BROADCASTS = frozenset(["broadcast_in_dim", "iota"])
FUSIBLE = primitives.FUSED_PRIMITIVES | DATA_MOVEMENT
# Computed once even if several nodes read them: they are dear.
EXPENSIVE = frozenset(
    """
    acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv erfc exp exp2 expm1 lgamma
    log log1p logistic pow rem rsqrt sin sinh sqrt tan tanh
    """.split()
)
ELEMENTWISE = primitives.FUSED_PRIMITIVES - DATA_MOVEMENT - BROADCASTS
# They read through a fused chain. All others, like products, collectives and loops, read buffers.
FUSING_CONSUMERS = FUSIBLE | primitives.REDUCTIONS | {"dynamic_update_slice"}
# For each node, by id, the numbers that it reads; true if a result may take that number's place.
Reads = dict[int, dict[int, bool]]


def breadth_first(nodes: list[Node], needs: list[set[int]]) -> list[Node]:
    """Nodes in the order in which they become ready, given the numbers that each one needs.

    XLA's CPU scheduler favours work that can run at the same time: first in, first out.
    """
    maker = {n: place for place, node in enumerate(nodes) for n in node.results}
    waiting: list[int] = []
    users: list[list[int]] = [[] for _ in nodes]
    for place, numbers in enumerate(needs):
        before = {maker[n] for n in numbers if n in maker}
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


def is_expensive(node: Node, spread: set[int]) -> bool:
    """Whether a node is not worth repeating. A division by one number for many is a multiplication."""
    return node.primitive in EXPENSIVE and not (node.primitive == "div" and node.operands[1] in spread)


def is_recomputed(node: Node, spread: set[int]) -> bool:
    """Whether a node that has a buffer, because one of its readers needs it, is computed by others anew.

    XLA does so where that reads no more than the buffer would: of one operand as large as the result.
    """
    if node.primitive not in ELEMENTWISE or is_expensive(node, spread):
        return False
    rank = len(node.eqn.outvars[0].aval.shape)
    large = [
        n
        for n, atom in zip(node.operands, node.eqn.invars, strict=False)
        if n not in spread and len(getattr(atom.aval, "shape", ())) >= rank
    ]
    return len(set(large)) <= 1


def materialized_values(nodes: list[Node], outputs: set[int], spread: set[int]) -> set[int]:
    """The numbers that get a buffer; nodes in order."""
    buffers, reduced = set(outputs), set[int]()
    readers = Counter(n for node in nodes for n in node.operands)
    for node in reversed(nodes):
        fused = node.primitive in FUSIBLE and node.results[0] not in buffers
        if fused and is_expensive(node, spread) and readers[node.results[0]] > 1:
            fused = False
        # XLA's reductions compute element-wise operands themselves, but read what is moved from a buffer.
        if fused and node.primitive in DATA_MOVEMENT and node.results[0] in reduced:
            fused = False
        if not fused:
            buffers.update(node.results)
        if node.primitive not in FUSING_CONSUMERS:
            buffers.update(node.operands)
        if node.primitive in primitives.REDUCTIONS or (fused and node.results[0] in reduced):
            reduced.update(node.operands)
    return buffers


def fuse(body: Body, alone: bool) -> Reads:
    """Leave fused nodes out of a body and of all inside it, and put the others in order.

    Args:
      body: what runs on one device.
      alone: whether there is only that device. XLA then gives whole softmaxes, and products with them, to a
        library, which repeats nothing.
    """
    nodes = breadth_first(body.nodes, [set(node.operands) for node in body.nodes])
    spread = {n for node in nodes if node.primitive in BROADCASTS for n in node.results}
    buffers = materialized_values(nodes, {*body.outputs, *(new for _, new in body.kept)}, spread)
    through: dict[int, dict[int, bool]] = {}  # what a fused or repeated number is computed from
    reads: Reads = {}
    left = []
    for node in nodes:
        found: dict[int, bool] = {}
        alike = node.primitive not in DATA_MOVEMENT and node.primitive not in BROADCASTS
        for n in node.operands:
            anew = ELEMENTWISE | primitives.REDUCTIONS if n in buffers else FUSING_CONSUMERS
            sources = through.get(n, {n: True}) if node.primitive in anew else {n: True}
            for source, straight in sources.items():
                found[source] = found.get(source, True) and straight and alike
        fused = node.primitive in FUSIBLE and node.results[0] not in buffers
        if fused or (not alone and is_recomputed(node, spread)):
            through[node.results[0]] = found
        if not fused:
            reads[id(node)] = found
            left.append(node)
    body.nodes = breadth_first(left, [set(reads[id(node)]) for node in left])
    for node in body.nodes:
        for inside in node.bodies:
            reads |= fuse(inside, alone)
    return reads
