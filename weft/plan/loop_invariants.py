"""Loop-invariant code motion: work in a loop that depends on no iteration runs once, before the loop.

XLA moves such work out of every `while` on all backends. Its collectives are then sent once, and its results
need memory as long as the loop runs. The rules are those of XLA's `WhileLoopInvariantCodeMotion`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ..core.jax_compat import scan_counts
from .graph import Body, Graph, Node, like
from .primitives import ELEMENTWISE, Fusion

# XLA moves these only together with a consumer: inside the loop they are fused, outside they need memory.
_MOVED_WITH_CONSUMERS = frozenset([Fusion.ALIAS, Fusion.INDEX, Fusion.BROADCAST, Fusion.PERMUTE])
_SLICES = frozenset(["slice", "rev"])


def hoist_loop_invariants(loop: Node, graph: Graph) -> Iterator[Node]:
    """Remove the invariant nodes from the repeated body of a scan or while, and yield them in order."""
    body = loop.bodies[-1]
    outside = _invariant_inputs(loop, body)
    # Without an invariant input XLA does not look at the loop, and computes masks in each iteration.
    if not outside and loop.primitive == "while":
        return
    varying = {n for n in body.inputs if n not in outside}
    deferred: dict[int, Node] = {}
    broadcasts = _Broadcasts(graph)
    remaining, hoisted = [], list[int]()
    for node in body.nodes:
        must_stay = node.bodies or node.has_side_effects or node.primitive == "optimization_barrier"
        if must_stay or not varying.isdisjoint(node.operands):
            varying.update(node.results)
            remaining.append(node)
        elif broadcasts.add(node) or node.fusion in _MOVED_WITH_CONSUMERS or node.primitive in _SLICES:
            deferred[node.results[0]] = node
            remaining.append(node)
        else:
            # Copies, because nodes that stay in the loop may read them as well, and compute them there.
            for n in node.operands:
                yield from _copied(n, deferred, outside, graph)
            node.operands = [outside.get(n, n) for n in node.operands]
            hoisted += node.results
            yield node
    body.nodes = _without_unused(remaining, body, deferred)
    read = {n for node in body.nodes for n in _read_values(node)}.union(body.outputs)
    loop.hoisted = [n for n in hoisted if n in read]


class _Broadcasts:
    """Finds the values that are broadcasts of one smaller value.

    XLA computes an elementwise node of broadcasts before it broadcasts, if only one of them is not a scalar.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self._sources: dict[int, frozenset[int]] = {}

    def add(self, node: Node) -> bool:
        """Whether the result of a node is a broadcast; call it for all nodes, in order."""
        is_chain = node.fusion in ELEMENTWISE | {Fusion.ALIAS, Fusion.PERMUTE, Fusion.BROADCAST}
        if not is_chain or len(node.results) != 1:
            return False
        size = self.graph.elements(node.results[0])
        sources = [self._source(n, size) for n in node.operands]
        found = frozenset().union(*(one for one in sources if one is not None))
        if None in sources or len(found) > 1:
            return False
        self._sources[node.results[0]] = found
        return size > 1

    def _source(self, n: int, size: int) -> frozenset[int] | None:
        """The value that `n` is a broadcast of, empty for a scalar; None if it is not a broadcast."""
        if n in self._sources:
            return self._sources[n]
        if self.graph.elements(n) == 1:
            return frozenset()
        return frozenset([n]) if self.graph.elements(n) < size else None


def _invariant_inputs(loop: Node, body: Body) -> dict[int, int]:
    """The inputs of the body that are the same in each iteration, with their values outside of the loop."""
    params = loop.eqn.params
    if loop.primitive == "scan":
        first, carries = scan_counts(params)
        given = loop.operands
        # The scanned arrays are invariant too, but the body only has their slices.
        stacked = {n: n for n in given[first + carries :]}
    else:
        first = params["body_nconsts"]
        given = loop.operands[params["cond_nconsts"] :]
        carries, stacked = len(given) - first, {}
    constants = {n: n for n in given[:first]}
    unchanged = {
        n: value
        for n, value, result in zip(
            body.inputs[first : first + carries], given[first : first + carries], body.outputs, strict=False
        )
        if n == result
    }
    return constants | stacked | unchanged


def _copied(n: int, deferred: dict[int, Node], outside: dict[int, int], graph: Graph) -> Iterator[Node]:
    """Copies of the deferred nodes that a hoisted node reads; `outside` then has their results."""
    if n in outside or n not in deferred:
        return
    node = deferred[n]
    for operand in node.operands:
        yield from _copied(operand, deferred, outside, graph)
    outside[n] = graph.copy_of(n)
    yield like(node, node.primitive, [outside.get(one, one) for one in node.operands], [outside[n]])


def _without_unused(nodes: list[Node], body: Body, deferred: dict[int, Node]) -> list[Node]:
    """The nodes without deferred ones that are not read any more: their only reader was hoisted."""
    uses = Counter(n for node in nodes for n in _read_values(node))
    uses.update(body.outputs)
    kept = []
    for node in reversed(nodes):
        is_deferred = not deferred.keys().isdisjoint(node.results)
        if is_deferred and not any(uses[n] for n in node.results):
            uses.subtract(node.operands)
        else:
            kept.append(node)
    return kept[::-1]


def _read_values(node: Node) -> Iterator[int]:
    yield from node.operands
    for inside in node.bodies:
        for inner in inside.nodes:
            yield from _read_values(inner)
        yield from inside.outputs
