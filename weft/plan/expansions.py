"""Primitives that XLA lowers to several operations, some of which need memory.

`expand(graph)` replaces their nodes. Only the operations that decide what is stored are modelled: the order
and number of the others does not matter, since they are fused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .graph import Graph, Node, bodies, like


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


def _select_and_scatter(node: Node, graph: Graph) -> Iterator[Node]:
    """The gradient of a max pool: find the position of each maximum, and scatter there.

    The positions of all elements are arrays in memory, one for each dim. They depend on no data, so the
    scheduler computes them first.
    """
    source, operand = node.operands
    full, pooled = (graph.avals[n].update(dtype=np.dtype(np.int32)) for n in (operand, source))
    positions = [graph.new_value(full) for _ in full.shape]
    found = [graph.copy_of(source), *(graph.new_value(pooled) for _ in full.shape)]
    indices = graph.new_value(pooled.update(shape=(*pooled.shape, full.ndim)))
    zeros = graph.copy_of(node.results[0])
    for n in positions:
        yield like(node, "positions", [], [n])
    yield like(node, "reduce_window", [operand, *positions], found)
    yield like(node, "stack", found[1:], [indices])
    yield like(node, "zeros", [], [zeros])
    yield like(node, "scatter-add", [zeros, indices, source], node.results)


EXPANSIONS: dict[str, Callable[[Node, Graph], Iterator[Node]]] = {
    "split": _split,
    "erf_inv": _inverse_error_function,
    "select_and_scatter_add": _select_and_scatter,
}
