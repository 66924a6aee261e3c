"""Transposes that XLA removes: layout assignment lets operations work on data in the order that it is stored.

`sink_transposes(body, graph)` moves transposes past elementwise operations, into reductions and into matrix
products, where they cost nothing. The others remain as copies.
"""

from __future__ import annotations

from typing import NamedTuple

from ..graph import Body, Graph, Node, like
from ..primitives import ELEMENTWISE, Fusion


class _View(NamedTuple):
    """A value that is another one with its dims permuted; `node` is the transpose."""

    source: int
    permutation: tuple[int, ...]
    node: Node


def sink_transposes(body: Body, graph: Graph) -> None:
    """Move the transposes of a body to where they cost nothing, or as far down as possible."""
    views: dict[int, _View] = {}
    nodes: list[Node] = []
    broadcast = {n for node in body.nodes if node.fusion is Fusion.BROADCAST for n in node.results}

    def materialize(values: list[int]) -> None:
        for n in dict.fromkeys(values):
            if n in views:
                view = views.pop(n)
                nodes.append(like(view.node, "transpose", [view.source], [n]))

    def sources(node: Node) -> list[int]:
        return [views[n].source if n in views else n for n in node.operands]

    for node in body.nodes:
        viewed = [views[n] for n in node.operands if n in views]
        if node.primitive == node.eqn.primitive.name == "transpose":
            (n,), permutation = node.operands, tuple(node.eqn.params["permutation"])
            # Of another length if a reshape, which is an alias, is in between.
            if n in views and len(views[n].permutation) == len(permutation):
                permutation = tuple(views[n].permutation[i] for i in permutation)
                n = views[n].source
            else:
                materialize([n])
            views[node.results[0]] = _View(n, permutation, node)
            continue
        if viewed and node.fusion in ELEMENTWISE and _permutes_equally(node, views, broadcast, graph):
            (result,) = node.results
            # The transpose moves below the node; if nothing needs its order, there will be no copy.
            views[result] = _View(graph.copy_of(result), viewed[0].permutation, viewed[0].node)
            node.operands, node.results = sources(node), [views[result].source]
        elif viewed and _accepts_any_order(node, graph):
            # A reduction's result is small: the order of its dims needs no copy worth counting.
            node.operands = sources(node)
        else:
            materialize([*node.operands, *node.hoisted])
        nodes.append(node)
    materialize([*body.outputs, *(n for pair in body.aliases for n in pair)])
    body.nodes = nodes


def _permutes_equally(node: Node, views: dict[int, _View], broadcast: set[int], graph: Graph) -> bool:
    """Whether an elementwise node can be computed before its operands are transposed."""
    permutations = {views[n].permutation for n in node.operands if n in views}
    others = [n for n in node.operands if n not in views and n not in broadcast]
    return len(permutations) == 1 and all(not getattr(graph.avals[n], "shape", ()) for n in others)


def _accepts_any_order(node: Node, graph: Graph) -> bool:
    """Whether a node can read its operands in any order."""
    ranks = [len(getattr(graph.avals[n], "shape", ())) for n in node.operands]
    is_required_copy = node.primitive == "transpose"
    is_product = node.primitive == "dot_general" and max(ranks) <= 2
    return node.fusion is Fusion.REDUCE or is_required_copy or is_product
