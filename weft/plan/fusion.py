"""Fusion: which nodes XLA computes inside their consumers, and the order in which it runs the others.

`fuse(body)` removes the nodes that need no buffer and puts the rest in XLA's order. It returns `Reads`: for
each node, by its id, the values that it reads, and whether a result may take over the value's buffer.
"""

from __future__ import annotations

from collections import Counter, deque

from .graph import Body, Node
from .library_fusion import fuse_library_calls
from .primitives import Fusion, aval_of

# Computed inside their consumers, where these can.
FUSIBLE = frozenset(
    [Fusion.ELEMENTWISE, Fusion.EXPENSIVE, Fusion.BROADCAST, Fusion.INDEX, Fusion.PERMUTE, Fusion.SLICE]
)
ELEMENTWISE = frozenset([Fusion.ELEMENTWISE, Fusion.EXPENSIVE])
# An element of the result is not where it is in the operand: a fusion with one of these can't overwrite that
# operand.
DATA_MOVEMENT = frozenset([Fusion.PERMUTE, Fusion.SLICE])
BROADCASTS = frozenset([Fusion.BROADCAST, Fusion.INDEX])
Reads = dict[int, dict[int, bool]]


def is_fusible(node: Node) -> bool:
    """Whether XLA can compute a node inside a consumer."""
    return node.fusion in FUSIBLE and not _concatenates_rows(node)


def fuses_operands(node: Node) -> bool:
    """Whether a node has a loop over elements that can compute a fused operand. Others read buffers."""
    has_loop = node.fusion is Fusion.REDUCE or node.primitive == "dynamic_update_slice"
    return is_fusible(node) or has_loop


def _concatenates_rows(node: Node) -> bool:
    """Whether a node concatenates along the last dim, which XLA does by copying contiguous memory."""
    if node.primitive != "concatenate":
        return False
    aval = aval_of(node.eqn.outvars[0])
    is_last = aval.ndim > 1 and node.eqn.params["dimension"] == aval.ndim - 1
    return is_last and aval.shape[-1] * aval.dtype.itemsize >= 64 and aval.size * aval.dtype.itemsize >= 2048


def breadth_first(nodes: list[Node], needs: list[set[int]]) -> list[Node]:
    """Nodes in the order in which they become ready, given the values that each one needs.

    XLA's CPU scheduler prefers work that can run concurrently: first in, first out.
    """
    producer = {n: index for index, node in enumerate(nodes) for n in node.results}
    pending: list[int] = []
    users: list[list[int]] = [[] for _ in nodes]
    for index, values in enumerate(needs):
        producers = {producer[n] for n in values if n in producer}
        pending.append(len(producers))
        for other in producers:
            users[other].append(index)
    ready = deque(index for index, count in enumerate(pending) if not count)
    order = []
    while ready:
        index = ready.popleft()
        order.append(nodes[index])
        for user in users[index]:
            pending[user] -= 1
            if not pending[user]:
                ready.append(user)
    return order


def is_expensive(node: Node, broadcast: set[int]) -> bool:
    """Whether a node is too expensive to duplicate."""
    # XLA turns a division by a broadcast scalar into a multiplication by its reciprocal.
    return node.fusion is Fusion.EXPENSIVE and not (node.primitive == "div" and node.operands[1] in broadcast)


def is_recomputed(node: Node, broadcast: set[int]) -> bool:
    """Whether consumers recompute a node even though another consumer needs it in a buffer.

    XLA does so if recomputation reads no more than the buffer would: one operand as large as the result.
    """
    if node.fusion not in ELEMENTWISE or is_expensive(node, broadcast):
        return False
    rank = len(aval_of(node.eqn.outvars[0]).shape)
    large = [
        n
        for n, atom in zip(node.operands, node.eqn.invars, strict=False)
        if n not in broadcast and len(getattr(atom.aval, "shape", ())) >= rank
    ]
    return len(set(large)) <= 1


def materialized_values(nodes: list[Node], outputs: set[int], broadcast: set[int]) -> set[int]:
    """The values that get a buffer.

    Args:
      nodes: in topological order.
      outputs: values that need a buffer in any case.
      broadcast: values that are broadcasts.
    """
    materialized, reduced = set(outputs), set[int]()
    uses = Counter(n for node in nodes for n in node.operands)
    # Consumers first: whether a node is fused depends on what reads it.
    for node in reversed(nodes):
        fused = is_fusible(node) and node.results[0] not in materialized
        if fused and is_expensive(node, broadcast) and uses[node.results[0]] > 1:
            fused = False
        # XLA's reductions compute elementwise operands in their loop, but read moved data from a buffer.
        if fused and node.fusion in DATA_MOVEMENT and node.results[0] in reduced:
            fused = False
        if not fused:
            materialized.update(node.results)
        if not fuses_operands(node):
            materialized.update(node.operands)
        if node.fusion is Fusion.REDUCE or (fused and node.results[0] in reduced):
            reduced.update(node.operands)
    return materialized


def fuse(body: Body, single_device: bool) -> Reads:
    """Remove fused nodes from a body and from its inner bodies, and order the rest.

    Args:
      body: the nodes of one device; changed in place.
      single_device: whether it is the only device. XLA then calls a library for an entire softmax and for
        products with it, and recomputes nothing.

    Returns:
      The values that each remaining node reads.
    """
    fuse_library_calls(body)
    nodes = breadth_first(body.nodes, [set(node.operands) for node in body.nodes])
    broadcast = {n for node in nodes if node.fusion in BROADCASTS for n in node.results}
    outputs = {*body.outputs, *(new for _, new in body.aliases)}
    materialized = materialized_values(nodes, outputs, broadcast)
    # A fused value has no buffer. Its consumers read the buffers that it is computed from.
    sources: dict[int, dict[int, bool]] = {}
    reads: Reads = {}
    remaining = []
    for node in nodes:
        found: dict[int, bool] = {}
        same_position = node.fusion not in DATA_MOVEMENT and node.fusion not in BROADCASTS
        for n in node.operands:
            # XLA recomputes a value that also has a buffer only in elementwise consumers and reductions.
            # Others read the buffer, although they could compute a fused operand.
            elementwise = node.fusion in ELEMENTWISE or node.fusion is Fusion.REDUCE
            recomputes = elementwise if n in materialized else fuses_operands(node)
            buffers = sources.get(n, {n: True}) if recomputes else {n: True}
            # A fusion may overwrite an operand only if it reads each element where it writes the result:
            # this must hold along every path from the operand.
            for buffer, in_place in buffers.items():
                found[buffer] = found.get(buffer, True) and in_place and same_position
        fused = is_fusible(node) and node.results[0] not in materialized
        if fused or (not single_device and is_recomputed(node, broadcast)):
            sources[node.results[0]] = found
        if not fused:
            reads[id(node)] = found
            remaining.append(node)
    body.nodes = breadth_first(remaining, [set(reads[id(node)]) for node in remaining])
    for node in body.nodes:
        for inside in node.bodies:
            reads |= fuse(inside, single_device)
    return reads
