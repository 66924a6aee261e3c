"""The algebraic simplifications of XLA that change which values need memory, applied before fusion.

`simplify(graph)` changes the graph in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator

from ...core.jax_compat import Literal
from ..graph import Body, Graph, Node, bodies, like
from ..primitives import ELEMENTWISE, FUSIBLE, Fusion
from .transposes import sink_transposes


def simplify(graph: Graph) -> None:
    """Simplify all bodies of a graph."""
    # Of the entire graph: a loop reads the constants of the bodies around it.
    constants = _constants(graph)
    for body in [*bodies(graph.body)]:
        for rule in (
            _drop_reshaping_broadcasts,
            _merge_equal_nodes,
            _broadcast_explicitly,
            _multiply_outer_products,
            _negate_after_sums,
        ):
            body.nodes = [*rule(body, graph)]
        _merge_constant_factors(body, constants)
        body.nodes = [*_multiply_by_reciprocals(body, graph)]
        _remove_unused(body)
        sink_transposes(body, graph)


_PURE = FUSIBLE | {Fusion.REDUCE}


def _constants(graph: Graph) -> set[int]:
    """The values that no node computes and that are not inputs: literals."""
    computed = {n for node in graph.body.walk() for n in node.results}
    inputs = {n for body in bodies(graph.body) for n in body.inputs}
    return {n for node in graph.body.walk() for n in node.operands} - computed - inputs


def _drop_reshaping_broadcasts(body: Body, graph: Graph) -> Iterator[Node]:
    """A broadcast that only adds dims of size 1 is an alias."""
    same: dict[int, int] = {}
    for node in body.nodes:
        is_broadcast = node.primitive == node.eqn.primitive.name == "broadcast_in_dim"
        is_literal = is_broadcast and isinstance(node.eqn.invars[0], Literal)
        # The array of a literal must be filled, even if it has one element only.
        if is_broadcast and not is_literal:
            source, result = node.operands[0], node.results[0]
            if graph.elements(source) == graph.elements(result):
                same[result] = same.get(source, source)
                continue
        yield node
    body.replace(same)


def _broadcast_explicitly(body: Body, graph: Graph) -> Iterator[Node]:
    """Dims of size 1 are broadcast implicitly in a jaxpr, but not in HLO."""
    made: dict[Hashable, int] = {}
    for node in body.nodes:
        if node.fusion in ELEMENTWISE and len(node.operands) == len(node.eqn.invars):
            result = node.results[0]
            for position, n in enumerate(node.operands):
                is_literal = isinstance(node.eqn.invars[position], Literal)
                if is_literal or graph.elements(n) >= graph.elements(result):
                    continue
                key = n, getattr(node.eqn.invars[position].aval, "shape", ()), graph.avals[result].shape
                if key not in made:
                    made[key] = graph.new_value(graph.avals[result].update(dtype=graph.avals[n].dtype))
                    yield like(node, "broadcast_in_dim", [n], [made[key]])
                node.operands[position] = made[key]
        yield node


def _merge_equal_nodes(body: Body, graph: Graph) -> Iterator[Node]:
    """Nodes that have become equal, since aliases are gone or since they were moved out of a loop."""
    same: dict[int, int] = {}
    seen: dict[Hashable, list[int]] = {}
    for node in body.nodes:
        node.operands = [same.get(n, n) for n in node.operands]
        if node.fusion in _PURE and not node.bodies:
            avals = tuple((graph.avals[n].shape, str(graph.avals[n].dtype)) for n in node.results)
            # The parameters of a node that XLA added are not those of its equation.
            is_added = node.primitive != node.eqn.primitive.name
            params = (id(node.eqn),) if is_added else tuple(sorted(map(str, node.eqn.params.items())))
            key = node.primitive, tuple(node.operands), avals, params
            if key in seen:
                same.update(zip(node.results, seen[key], strict=True))
                continue
            seen[key] = node.results
        yield node
    body.replace(same)


def _multiply_outer_products(body: Body, graph: Graph) -> Iterator[Node]:
    """A matmul that contracts nothing is a product of broadcasts, which can be fused."""
    for node in body.nodes:
        if node.primitive != "dot_general":
            yield node
            continue
        (contracted, _), _ = node.eqn.params["dimension_numbers"]
        shape = getattr(node.eqn.invars[0].aval, "shape", ())
        if any(shape[n] != 1 for n in contracted):
            yield node
            continue
        operands = []
        for n in node.operands:
            if graph.elements(n) < graph.elements(node.results[0]):
                wide = graph.copy_of(node.results[0])
                yield like(node, "broadcast_in_dim", [n], [wide])
                operands.append(wide)
            else:
                operands.append(n)
        yield like(node, "mul", operands, node.results)


def _negate_after_sums(body: Body, graph: Graph) -> Iterator[Node]:
    """sum(-x) = -sum(x)"""
    producer, uses = _producers(body), _uses(body)
    for node in body.nodes:
        inner = producer.get(node.operands[0]) if node.primitive == "reduce_sum" else None
        if inner is not None and inner.primitive == "neg" and uses[node.operands[0]] == 1:
            total, results = graph.copy_of(node.results[0]), node.results
            node.operands, node.results = inner.operands, [total]
            yield node
            yield like(inner, "neg", [total], results)
        else:
            yield node


def _merge_constant_factors(body: Body, constants: set[int]) -> None:
    """(x · c) · broadcast(y) = x · broadcast(c · y), where c is a constant."""
    producer = _producers(body)
    constant = set(constants)
    for node in body.nodes:
        if (
            node.operands
            and node.fusion in ELEMENTWISE | {Fusion.BROADCAST}
            and constant.issuperset(node.operands)
        ):
            constant.update(node.results)
    for node in body.nodes:
        if node.primitive != "mul" or len(node.operands) != 2:
            continue
        for product, other in (node.operands, node.operands[::-1]):
            inner, factor = producer.get(product), producer.get(other)
            is_broadcast = other in constant or (factor is not None and factor.fusion is Fusion.BROADCAST)
            if inner is None or inner.primitive != "mul" or not is_broadcast or product in constant:
                continue
            rest = [n for n in inner.operands if n not in constant]
            # The inner product is not removed here: others may read it.
            if len(rest) == len(inner.operands) - 1 == 1:
                node.operands = [rest[0], other]
                break


def _multiply_by_reciprocals(body: Body, graph: Graph) -> Iterator[Node]:
    """x / broadcast(y) = x · broadcast(1 / y)"""
    producer = _producers(body)
    made: dict[int, int] = {}
    for node in body.nodes:
        divisor = (
            producer.get(node.operands[1]) if node.primitive == "div" and len(node.operands) == 2 else None
        )
        if divisor is None or divisor.fusion is not Fusion.BROADCAST:
            yield node
            continue
        wide = divisor.results[0]
        # One reciprocal serves all divisions by the same array.
        if wide not in made:
            narrow, made[wide] = graph.copy_of(divisor.operands[0]), graph.copy_of(wide)
            yield like(node, "div", divisor.operands, [narrow])
            yield like(divisor, "broadcast_in_dim", [narrow], [made[wide]])
        yield like(node, "mul", [node.operands[0], made[wide]], node.results)


def _remove_unused(body: Body) -> None:
    """Remove the nodes whose only readers have been rewritten."""
    removable = ELEMENTWISE | {Fusion.BROADCAST, Fusion.INDEX, Fusion.PERMUTE}
    uses, kept = _uses(body), []
    for node in reversed(body.nodes):
        if node.fusion in removable and not any(uses[n] for n in node.results):
            uses.subtract(node.operands)
        else:
            kept.append(node)
    body.nodes = kept[::-1]


def _producers(body: Body) -> dict[int, Node]:
    return {n: node for node in body.nodes for n in node.results}


def _uses(body: Body) -> Counter[int]:
    """How often each value is read, inside loops too, or leaves the body."""
    uses = Counter(n for node in body.walk() for n in node.operands)
    for one in bodies(body):
        uses.update([*one.inputs, *one.outputs, *(n for pair in one.aliases for n in pair)])
    return uses
