"""Kernels: the nodes of a body, grouped into those that XLA computes together.

At first each node is a kernel. `library_fusion` and `loop_fusion` fuse producers into consumers. A producer
with other consumers remains, and is computed again in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..graph import Body, Graph, Node
from ..primitives import Fusion


@dataclass(eq=False)
class Kernel:
    """Nodes that are computed together.

    Attributes:
      root: the node that computes the result.
      index: its position in the post-order of the body.
      nodes: all nodes; producers come before consumers.
      operands: the values that it reads, in XLA's order.
      is_library: whether it is a call of a library, which no loop is fused with.
      reads: the values that it reads, and whether a result may take over the buffer of each.
      access: the bytes that it reads of each value; only of kernels of accelerators.
    """

    root: Node
    index: int
    nodes: list[Node]
    operands: list[int]
    is_library: bool = False
    reads: dict[int, bool] = field(default_factory=dict)
    access: dict[int, float] = field(default_factory=dict)


@dataclass(eq=False)
class Kernels:
    """The kernels of a body.

    Attributes:
      graph: the graph of the body.
      alive: the kernels, in post-order.
      producer: the kernel that computes a value.
      users: the kernels that read the result of a kernel.
      returned: the kernels whose results leave the body.
    """

    graph: Graph
    alive: dict[Kernel, None] = field(default_factory=dict)
    producer: dict[int, Kernel] = field(default_factory=dict)
    users: dict[Kernel, set[Kernel]] = field(default_factory=dict)
    returned: set[Kernel] = field(default_factory=set)

    @classmethod
    def of(cls, body: Body, graph: Graph) -> Kernels:
        """One kernel for each node."""
        kernels = cls(graph)
        for index, node in enumerate(post_order(body)):
            kernel = Kernel(node, index, [node], [*dict.fromkeys(node.operands)])
            kernels.alive[kernel], kernels.users[kernel] = None, set()
            kernels.producer.update(dict.fromkeys(node.results, kernel))
        for kernel in kernels.alive:
            for producer in kernels.producers_of(kernel):
                kernels.users[producer].add(kernel)
        leaving = (*body.outputs, *(new for _, new in body.aliases))
        kernels.returned = {kernels.producer[n] for n in leaving if n in kernels.producer}
        return kernels

    def producers_of(self, kernel: Kernel) -> list[Kernel]:
        """The kernels whose results a kernel reads."""
        return [*dict.fromkeys(self.producer[n] for n in kernel.operands if n in self.producer)]

    def fuse(self, producer: Kernel, consumer: Kernel) -> None:
        """Compute a producer inside a consumer; it remains if it has other users."""
        # XLA appends the operands of what it fuses. Their order decides which one a result overwrites.
        results = set(producer.root.results)
        consumer.operands = [n for n in consumer.operands if n not in results]
        consumer.operands += [n for n in producer.operands if n not in consumer.operands]
        # Another producer in this kernel may have brought in the same nodes.
        have = {id(node) for node in consumer.nodes}
        consumer.nodes = [*(node for node in producer.nodes if id(node) not in have), *consumer.nodes]
        self.users[producer].discard(consumer)
        for other in self.producers_of(producer):
            self.users[other].add(consumer)
        if not self.users[producer] and producer not in self.returned:
            del self.alive[producer]
            for other in self.producers_of(producer):
                self.users[other].discard(producer)

    def true_rank(self, n: int) -> int:
        """The number of dims of a value with more than one element."""
        return sum(size != 1 for size in getattr(self.graph.avals[n], "shape", ()))

    def dtype(self, n: int) -> str:
        """The name of the dtype of a value."""
        return getattr(getattr(self.graph.avals[n], "dtype", None), "name", "")


def post_order(body: Body, reads: Callable[[Node], Iterable[int]] = lambda node: node.operands) -> list[Node]:
    """The nodes of a body, depth first from its results, as HLO computations are ordered.

    Args:
      body: the body.
      reads: the values that a node reads.
    """
    producer = {n: node for node in body.nodes for n in node.results}
    done: set[Node] = set()
    ordered: list[Node] = []
    leaving = (*body.outputs, *(new for _, new in body.aliases))
    for root in (*(producer[n] for n in leaving if n in producer), *body.nodes):
        stack = [(root, False)]
        while stack:
            node, is_ready = stack.pop()
            if node in done:
                continue
            if is_ready:
                done.add(node)
                ordered.append(node)
                continue
            stack.append((node, True))
            stack += [(producer[n], False) for n in reversed([*reads(node)]) if n in producer]
    return ordered


def topological_order(nodes: list[Node]) -> list[Node]:
    """The nodes of a kernel with producers before consumers."""
    return post_order(Body(nodes=nodes))


def is_broadcast(node: Node) -> bool:
    """Whether a node repeats its operand, or depends on no data."""
    return node.fusion in (Fusion.BROADCAST, Fusion.INDEX)
