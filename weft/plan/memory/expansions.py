"""Primitives that XLA lowers to several operations, some of which need memory.

`expand(graph)` replaces their nodes. Only the operations that decide what is stored are modelled: the order
and number of the others does not matter, since they are fused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from jax.lax import GatherScatterMode

from ..graph import Body, Graph, Node, bodies, like
from ..primitives import SCATTERS


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


def _threefry(node: Node, graph: Graph) -> Iterator[Node]:
    """A loop of rounds that mix two arrays: each new array depends on both, so the old ones are copied."""
    keys, counts = node.operands[:2], node.operands[2:]
    mixed, old, new = ([graph.copy_of(n) for n in node.results] for _ in range(3))
    for key, count, value in zip(keys, counts, mixed, strict=True):
        yield like(node, "add", [key, count], [value])
    # Many operations in fact: only which arrays each result depends on matters here.
    rounds = like(node, "threefry_rounds", mixed, node.results)
    mixes = [like(node, name, old, [n]) for name, n in zip(("add", "xor"), new, strict=True)]
    rounds.bodies = [Body(old, mixes, aliases=[*zip(old, new, strict=True)])]
    yield rounds


_SCAN_BLOCK = 16  # the base length of XLA's ReduceWindowRewriter on CPUs


def _cumulative(node: Node, graph: Graph) -> Iterator[Node]:
    """A scan of each block of 16 elements, and the totals of the blocks, which the readers add.

    XLA moves the scanned dim to the end and pads it to entire blocks.
    """
    axis, aval = node.eqn.params["axis"], graph.avals[node.results[0]]
    length, is_last = aval.shape[axis], axis == aval.ndim - 1
    if length <= _SCAN_BLOCK:
        yield node
        return
    blocks = -(-length // _SCAN_BLOCK)
    others = tuple(aval.shape[-1] if n == axis else aval.shape[n] for n in range(aval.ndim - 1))
    padded = aval.update(shape=(*others, blocks * _SCAN_BLOCK))
    totals = graph.new_value(aval.update(shape=(*others, blocks)))
    scanned, wide = graph.new_value(padded), graph.new_value(padded)
    is_padded = length % _SCAN_BLOCK > 0
    before = ["transpose"] * (not is_last) + ["pad"] * is_padded
    # The blocks are merged into one dim before the padding is removed. So even without padding the sum is not
    # elementwise for XLA, and does not overwrite the scanned blocks.
    after = ["slice"] * (is_padded or is_last) + ["transpose"] * (not is_last)

    operand = node.operands[0]
    for primitive in before:
        given, operand = operand, graph.new_value(padded)
        yield like(node, primitive, [given], [operand])
    yield like(node, "reduce_window", [operand], [scanned])
    # Totals of many blocks are scanned in blocks again, but these are small.
    yield like(node, "reduce_window", [scanned], [totals])
    yield like(node, "broadcast_in_dim", [totals], [wide])
    # Only the last of these is read, so the others need not have their exact types.
    results = [*(graph.new_value(padded) for _ in after), *node.results]
    yield like(node, "add", [scanned, wide], results[:1])
    for primitive, given, result in zip(after, results[:-1], results[1:], strict=True):
        yield like(node, primitive, [given], [result])


def _top_k(node: Node, graph: Graph) -> Iterator[Node]:
    """XLA selects along the last dim only: another one is moved there and back."""
    axis, aval = node.eqn.params["axis"], graph.avals[node.operands[0]]
    if axis == aval.ndim - 1:
        yield node
        return
    moved, results = graph.copy_of(node.operands[0]), node.results
    selected = [graph.copy_of(n) for n in results]
    yield like(node, "transpose", node.operands, [moved])
    yield like(node, "top_k", [moved], selected)
    for n, result in zip(selected, results, strict=True):
        yield like(node, "transpose", [n], [result])


def _indices(node: Node, graph: Graph) -> Iterator[Node]:
    """The indices of a gather or scatter with batch dims: XLA adds a column with the positions along each."""
    batch = len(node.eqn.params["dimension_numbers"].operand_batching_dims)
    if batch:
        aval, given = graph.avals[node.operands[1]], node.operands[1]
        node.operands[1] = graph.new_value(aval.update(shape=(*aval.shape[:-1], aval.shape[-1] + batch)))
        yield like(node, "stack", [given], node.operands[1:2])


def _scatter(node: Node, graph: Graph) -> Iterator[Node]:
    yield from _indices(node, graph)
    yield node


def _gather(node: Node, graph: Graph) -> Iterator[Node]:
    """A gather, and a select for the indices out of bounds."""
    given, results = node.operands[1], node.results
    yield from _indices(node, graph)
    if node.eqn.params["mode"] == GatherScatterMode.FILL_OR_DROP:
        node.results, mask = [graph.copy_of(results[0])], graph.copy_of(results[0])
        yield node
        yield like(node, "broadcast_in_dim", [given], [mask])
        yield like(node, "select_n", [mask, *node.results], results)
    else:
        yield node


EXPANSIONS: dict[str, Callable[[Node, Graph], Iterator[Node]]] = {
    "split": _split,
    "erf_inv": _inverse_error_function,
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin"], _cumulative),
    "threefry2x32": _threefry,
    "top_k": _top_k,
    "gather": _gather,
    **dict.fromkeys(SCATTERS, _scatter),
    "select_and_scatter_add": _select_and_scatter,
}
