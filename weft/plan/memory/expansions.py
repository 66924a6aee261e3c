"""Primitives that XLA lowers to several operations, some of which need memory.

`expand(graph)` replaces their nodes. Only the operations that decide what is stored are modelled: the order
and number of the others does not matter, since they are fused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..graph import Graph, Node, bodies, like


def expand(graph: Graph) -> None:
    """Replace the nodes of a graph that XLA expands."""
    for body in [*bodies(graph.body)]:
        nodes, body.nodes = body.nodes, []
        for node in nodes:
            body.nodes += EXPANSIONS.get(node.primitive, _same)(node, graph)


def _same(node: Node, graph: Graph) -> Iterator[Node]:
    yield node


def _split(node: Node, graph: Graph) -> Iterator[Node]:
    """A split is a slice for each result."""
    for n in node.results:
        yield like(node, "slice", node.operands, [n])


def _inverse_error_function(node: Node, graph: Graph) -> Iterator[Node]:
    """Two polynomials, of log1p(-x²) and of its square root, which are used many times each."""
    (x,), (result,) = node.operands, node.results
    log, root, argument = (graph.copy_of(result) for _ in range(3))
    yield like(node, "log1p", [x], [log])
    yield like(node, "sqrt", [log], [root])
    yield like(node, "select_n", [log, log, root], [argument])
    yield like(node, "mul", [argument, x, root], [result])


EXPANSIONS: dict[str, Callable[[Node, Graph], Iterator[Node]]] = {
    "split": _split,
    "erf_inv": _inverse_error_function,
}
