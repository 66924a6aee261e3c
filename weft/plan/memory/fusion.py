"""Fusion: which nodes XLA computes inside their consumers, and the order in which it runs the others.

`fuse(body, graph)` removes the nodes that need no buffer and puts the rest in XLA's order. It returns
`Reads`: for each node, by its id, the values that it reads, and whether a result may take over the value's
buffer.
"""

from __future__ import annotations

from collections import deque

from ..graph import Body, Graph, Node
from ..primitives import Fusion
from .kernels import Kernel, Kernels, is_broadcast, post_order, topological_order
from .library_fusion import fuse_library_calls
from .loop_fusion import fuse_loops

Reads = dict[int, dict[int, bool]]


def fuse(body: Body, graph: Graph) -> Reads:
    """Remove fused nodes from a body and from its inner bodies, and order the rest.

    Args:
      body: the nodes of one device; changed in place.
      graph: the graph of the body.

    Returns:
      The values that each remaining node reads.
    """
    kernels = Kernels.of(body, graph)
    fuse_library_calls(kernels)
    fuse_loops(kernels)
    reads = {id(kernel.root): _reads(kernel) for kernel in kernels.alive}
    body.nodes = [kernel.root for kernel in kernels.alive]
    body.nodes = breadth_first(post_order(body, lambda node: reads[id(node)]), reads)
    for node in body.nodes:
        for inside in node.bodies:
            reads |= fuse(inside, graph)
    return reads


def breadth_first(nodes: list[Node], reads: Reads) -> list[Node]:
    """Nodes in the order in which they become ready, given the values that each one reads.

    XLA's CPU scheduler prefers work that can run concurrently: first in, first out.
    """
    producer = {n: node for node in nodes for n in node.results}
    pending: dict[Node, int] = {}
    users: dict[Node, list[Node]] = {node: [] for node in nodes}
    for node in nodes:
        producers = {producer[n] for n in reads[id(node)] if n in producer}
        pending[node] = len(producers)
        for other in producers:
            users[other].append(node)
    ready = deque(node for node, count in pending.items() if not count)
    order = []
    while ready:
        node = ready.popleft()
        order.append(node)
        for user in users[node]:
            pending[user] -= 1
            if not pending[user]:
                ready.append(user)
    return order


# An element of the result is not where it is in the operand.
_MOVES_DATA = frozenset([Fusion.PERMUTE, Fusion.SLICE, Fusion.REDUCE])


def _reads(kernel: Kernel) -> dict[int, bool]:
    """The values that a kernel reads, and whether its result may overwrite each.

    It may if the kernel reads each element where it writes the result, along every path from the operand.
    """
    in_place: dict[int, bool] = {}
    for node in reversed(topological_order(kernel.nodes)):
        same_position = not is_broadcast(node) and node.fusion not in _MOVES_DATA
        # An update in the middle of a kernel writes a few elements, but the kernel writes all of its result.
        is_inner_update = node.fusion is Fusion.UPDATE and node is not kernel.root
        so_far = all(in_place.get(n, True) for n in node.results)
        for n in node.operands:
            in_place[n] = in_place.get(n, True) and so_far and same_position and not is_inner_update
    return {n: in_place.get(n, True) and not kernel.is_library for n in kernel.operands}
