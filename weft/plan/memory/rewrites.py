"""The rewrites of XLA's CPU compiler that change which buffers a program needs, applied before fusion.

`rewrite_as_xla(graph)` changes the graph in place. The rewrites run in this order, each on all bodies:

1. some primitives become several (`expansions`), aliases and no-ops disappear: their result is their operand;
2. operands get the dim order that their consumer requires;
3. scans and while loops get the slices, zeros and in-place carries that XLA gives them;
4. all-reduces are merged, transposed products are swapped, and scatters absorb sums;
5. algebraic simplifications (`simplify`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator

from ...core.jax_compat import JaxprEqn, Literal, scan_counts
from ..events import is_no_op
from ..graph import Body, Graph, Node, bodies, like, program_order
from ..primitives import CHAIN, ELEMENTWISE, Fusion, aval_of
from .expansions import expand
from .platforms import CPU, Platform
from .simplify import simplify


def rewrite_as_xla(graph: Graph, platform: Platform) -> None:
    """Rewrite a graph as XLA does before fusion."""
    if platform is CPU:
        expand(graph)
    _drop_aliases(graph.body, graph, {}, platform)
    if platform.tiles_arrays:
        for body in bodies(graph.body):
            _sink_reshapes(body, graph)
    for body in [*bodies(graph.body)]:
        if platform.orders_dims:
            _reorder_operands(body, graph)
        _lower_loops(body, graph)
    if platform.repeats_broadcasts:
        _sink_broadcasts(graph)
    if platform.merges_products:
        for body in bodies(graph.body):
            _concatenate_operands(body, graph)
    if platform.hoists_casts:
        _hoist_casts(graph)
    for body in bodies(graph.body):
        _merge_all_reduces(body)
        _transpose_products(body)
        _absorb_scatters(body, graph)
        _separate_zeros(body, graph)
    simplify(graph)


def _drop_aliases(body: Body, graph: Graph, same: dict[int, int], platform: Platform) -> None:
    """Replace the results of aliases and no-ops by their operands; `same` has those of enclosing bodies."""
    remaining = []
    for node in body.nodes:
        node.operands = [same.get(n, n) for n in node.operands]
        node.hoisted = [same.get(n, n) for n in node.hoisted]
        is_alias = node.fusion is Fusion.ALIAS and not (platform.tiles_arrays and _changes_tiles(node))
        if is_alias or is_no_op(node, graph.mesh):
            same.update(zip(node.results, node.operands, strict=False))
            continue
        for inside in node.bodies:
            inside.inputs = [same.get(n, n) for n in inside.inputs]
            _drop_aliases(inside, graph, same, platform)
        remaining.append(node)
    body.nodes, body.outputs = remaining, [same.get(n, n) for n in body.outputs]


def _changes_tiles(node: Node) -> bool:
    """Whether a reshape is a copy from tiles of one dim to tiles of two, or back."""
    if node.primitive != "reshape":
        return False
    (given,), (result,) = node.eqn.invars[:1], node.eqn.outvars
    ranks = [sum(size > 1 for size in aval_of(v).shape) for v in (given, result)]
    return min(ranks) == 1 < max(ranks)


def _sink_reshapes(body: Body, graph: Graph) -> None:
    """Compute on an array before it is copied to other tiles, if nothing else reads the copy: a comparison
    with a number makes it smaller."""
    uses = Counter(n for node in body.walk() for n in (*node.operands, *node.hoisted))
    uses.update([*body.outputs, *(n for pair in body.aliases for n in pair)])
    reshapes: dict[int, Node] = {}
    nodes: list[Node] = []
    for node in body.nodes:
        moved = [n for n in node.operands if n in reshapes and uses[n] == 1]
        others = [n for n in node.operands if n not in moved]
        if len(moved) == 1 and node.fusion in ELEMENTWISE and all(graph.elements(n) == 1 for n in others):
            reshape, (result,) = reshapes[moved[0]], node.results
            (given,) = reshape.operands
            early = graph.new_value(graph.avals[given].update(dtype=graph.avals[result].dtype))
            nodes.remove(reshape)
            nodes.append(
                like(node, node.primitive, [given if n in moved else n for n in node.operands], [early])
            )
            node = like(reshape, "reshape", [early], [result])
        if node.primitive == "reshape":
            reshapes[node.results[0]] = node
        nodes.append(node)
    body.nodes = nodes


def required_dim_orders(eqn: JaxprEqn) -> list[list[int]]:
    """For each operand the dim order that XLA requires, or an empty list if it accepts any.

    XLA lowers a matmul to one contracted and one free dim. Several dims are merged, so they must be adjacent:
    contracted dims last on the left, first on the right. Batch dims come first. Convolutions require features
    last. Collectives that split or join a dim require it first.
    """
    if eqn.primitive.name == "dot_general":
        orders = []
        for side, (atom, c, b) in enumerate(zip(eqn.invars, *eqn.params["dimension_numbers"], strict=True)):
            free = [n for n in range(aval_of(atom).ndim) if n not in c and n not in b]
            order = [*b, *free, *c] if side == 0 else [*b, *c, *free]
            is_leading = tuple(b) == tuple(range(len(b)))
            orders.append(order if len(c) > 1 or len(free) > 1 or not is_leading else [])
        return orders
    if eqn.primitive.name == "conv_general_dilated":
        (batch, feature, *spatial), (out, into, *window), _ = eqn.params["dimension_numbers"]
        orders = [[batch, *spatial, feature], [*window, into, out]]
        return [order if order != sorted(order) else [] for order in orders]
    dim = eqn.params.get("scatter_dimension", eqn.params.get("all_gather_dimension", 0))
    return [[dim, *(n for n in range(aval_of(eqn.invars[0]).ndim) if n != dim)]] if dim else []


def _reorder_operands(body: Body, graph: Graph) -> None:
    """Copy operands into the dim order that their consumer requires; an unchanged order is an alias."""
    made: dict[Hashable, int] = {}
    nodes = []
    for node in body.nodes:
        for position, order in enumerate([] if node.bodies else required_dim_orders(node.eqn)):
            if order:
                value = node.operands[position]
                key = (value, *order)
                if key not in made:
                    made[key] = graph.copy_of(value)
                    primitive = "bitcast" if order == sorted(order) else "transpose"
                    nodes.append(like(node, primitive, [value], [made[key]]))
                node.operands[position] = made[key]
        nodes.append(node)
    body.nodes = nodes


def _lower_loops(body: Body, graph: Graph) -> None:
    nodes: list[Node] = []
    for node in body.nodes:
        if node.primitive == "scan":
            nodes += _lower_scan(node, graph)
        elif node.primitive == "while":
            _lower_while(node)
        nodes.append(node)
    body.nodes = nodes


def _lower_scan(node: Node, graph: Graph) -> list[Node]:
    """A scan: slices of the scanned arrays, the body, and results that are written into zeros.

    The zeros are operands of the loop, as carries are: XLA updates both in place. Returns the zeros.
    """
    (inside,) = node.bodies
    first, carried = scan_counts(node.eqn.params)
    last = first + carried
    carries = inside.inputs[first:last]
    slices = [
        like(node, "dynamic_slice", [n], [part])
        for n, part in zip(node.operands[last:], inside.inputs[last:], strict=True)
    ]
    stacked = inside.outputs[len(carries) :]
    updates = [like(node, "dynamic_update_slice", [n], []) for n in stacked]
    makers = {n: maker for maker in inside.nodes for n in maker.results}
    inside.nodes = [*slices, *inside.nodes, *updates]
    inside.aliases = list(zip(carries, inside.outputs, strict=False))
    inside.outputs = []
    zeros = []
    for n, variable in zip(stacked, node.eqn.outvars[len(carries) :], strict=True):
        stack = graph.new_value(aval_of(variable))
        # The stack belongs to the op that computes what it holds, not to the loop.
        zeros.append(like(makers.get(n, node), "zeros", [], [stack]))
    stacks = [zero.results[0] for zero in zeros]
    # `buffers` pairs results with the operands whose memory they take over, by position.
    node.operands = [*node.operands[first:last], *stacks, *node.operands[:first], *node.operands[last:]]
    node.operands += node.hoisted
    return zeros


def _lower_while(node: Node) -> None:
    """A while loop: each iteration updates the carries in place."""
    _, repeated = node.bodies
    last = node.eqn.params["cond_nconsts"] + node.eqn.params["body_nconsts"]
    carries = repeated.inputs[node.eqn.params["body_nconsts"] :]
    repeated.aliases, repeated.outputs = list(zip(carries, repeated.outputs, strict=True)), []
    # Carries first, as in `_lower_scan`.
    node.operands = node.operands[last:] + node.operands[:last] + node.hoisted


def _sink_broadcasts(graph: Graph) -> None:
    """Compute what is broadcast from little inside the loops that read it, in each iteration."""
    for body in bodies(graph.body):
        producer = {n: node for node in body.nodes for n in node.results}
        # The most elements that each value is computed from.
        source: dict[int, int] = {}
        for node in body.nodes:
            most = max((source.get(n, graph.elements(n)) for n in node.operands), default=0)
            for n in node.results:
                source[n] = most if node.fusion in CHAIN else graph.elements(n)
        large = {n for n in producer if source[n] * _MUCH_LARGER < graph.elements(n)}
        for loop in body.nodes:
            for inside in loop.bodies:
                read = {n for one in inside.walk() for n in one.operands}
                same = _cloned(sorted(large & read), large, producer, inside, graph)
                inside.replace(same)
                # The first operands are those that the results take over the memory of.
                first, rest = loop.operands[: len(loop.results)], loop.operands[len(loop.results) :]
                loop.operands = [*first, *(n for n in rest if n not in same)]


def _cloned(
    values: list[int], large: set[int], producer: dict[int, Node], body: Body, graph: Graph
) -> dict[int, int]:
    """Copy the nodes that compute some values to the start of a body; returns the new values."""
    nodes: dict[Node, None] = {}
    stack = [*values]
    while stack:
        node = producer[stack.pop()]
        nodes[node] = None
        stack += [n for n in node.operands if n in large and producer[n] not in nodes]
    order = {node: position for position, node in enumerate(producer.values())}
    same: dict[int, int] = {}
    copies = []
    for node in sorted(nodes, key=order.__getitem__):
        results = [graph.copy_of(n) for n in node.results]
        copies.append(like(node, node.primitive, [same.get(n, n) for n in node.operands], results))
        same.update(zip(node.results, results, strict=True))
    body.nodes = [*copies, *body.nodes]
    return same


_MUCH_LARGER = 64  # a mask of two dims that is broadcast to all rows and heads
_MERGED_BYTES = 32 << 20  # XLA's `xla_gpu_dot_merger_threshold_mb`


def _concatenate_operands(body: Body, graph: Graph) -> None:
    """Concatenate the right operands of small matmuls that share the left one: XLA merges them.

    The matmuls remain nodes of their own, which read a part of the concatenated operands.
    """
    groups: dict[Hashable, list[Node]] = {}
    for node in body.nodes:
        if node.primitive == "dot_general":
            size = sum(graph.sizes[n] for n in (*node.operands, *node.results))
            dims = str(node.eqn.params["dimension_numbers"])
            if size < _MERGED_BYTES:
                groups.setdefault((node.operands[0], dims), []).append(node)
    made: dict[Node, list[Node]] = {}
    for group in groups.values():
        if len(group) < 2 or len({node.operands[1] for node in group}) < len(group):
            continue
        for node in group:
            part = graph.copy_of(node.operands[1])
            made[node] = [like(node, "merged_operand", node.operands[1:2], [part])]
            node.operands = [node.operands[0], part]
    body.nodes = [one for node in body.nodes for one in (*made.get(node, ()), node)]


def _hoist_casts(graph: Graph) -> None:
    """Round entire arrays before a loop, if the loop only reads their slices to round them."""
    casts: dict[tuple[int, str], int] = {}
    for body in [*bodies(graph.body)]:
        nodes: list[Node] = []
        for node in body.nodes:
            for inside in node.bodies if node.primitive == "scan" else ():
                nodes += _hoisted_casts(node, inside, graph, casts)
            nodes.append(node)
        body.nodes = nodes


def _hoisted_casts(
    loop: Node, inside: Body, graph: Graph, casts: dict[tuple[int, str], int]
) -> Iterator[Node]:
    uses = Counter(n for node in inside.walk() for n in (*node.operands, *node.hoisted))
    uses.update([*inside.outputs, *(n for pair in inside.aliases for n in pair)])
    readers: dict[int, list[Node]] = {}
    for node in inside.nodes:
        for n in node.operands:
            readers.setdefault(n, []).append(node)
    for part in [node for node in inside.nodes if node.primitive == "dynamic_slice" and node.eqn is loop.eqn]:
        (stack,), (piece,) = part.operands, part.results
        found = readers.get(piece, [])
        if not found or len(found) < uses[piece] or any(n.primitive != "convert_element_type" for n in found):
            continue
        types = {graph.avals[n.results[0]].dtype for n in found}
        if len(types) > 1 or min(types, key=str).itemsize >= graph.avals[piece].dtype.itemsize:
            continue
        (dtype,) = types
        key = stack, str(dtype)
        if key not in casts:
            casts[key] = graph.new_value(graph.avals[stack].update(dtype=dtype))
            yield like(found[0], "convert_element_type", [stack], [casts[key]])
        part.operands[0] = casts[key]
        loop.operands = [casts[key] if n == stack else n for n in loop.operands]
        part.results = found[0].results
        same = {n.results[0]: part.results[0] for n in found[1:]}
        inside.nodes = [n for n in inside.nodes if n not in found]
        inside.replace(same)


_REDUCTIONS = {"pmax": "max", "pmin": "min"}


def _merge_all_reduces(body: Body) -> None:
    """Merge all-reduces over the same axes that do not depend on each other, as XLA's combiner does.

    Merging changes the dependencies: a merged all-reduce waits for the operands of all its parts. Checking
    only the original dependencies could merge two pairs into a cycle.
    """
    # The merged all-reduces that each value, and each merged all-reduce, directly depends on. A closure would
    # become stale: each merge adds dependencies to a node that earlier values depend on.
    depends_on: dict[int, set[Node]] = {}
    waits_for: dict[Node, set[Node]] = {}
    by_kind: dict[tuple[str, str], list[Node]] = {}
    remaining = []
    for node in body.nodes:
        before = set().union(*(depends_on.get(n, ()) for n in node.operands))
        target = node
        if node.row.collective == "all-reduce":
            # Both variants of psum lower to the same HLO.
            key = _REDUCTIONS.get(node.primitive, "sum"), str(node.eqn.params["axes"])
            mergeable = by_kind.setdefault(key, [])
            dependencies = _transitive_closure(before, waits_for)
            target = next((other for other in mergeable if other not in dependencies), node)
            waits_for.setdefault(target, set()).update(before)
            before = {target}
            if target is node:
                mergeable.append(node)
        if target is node:
            remaining.append(node)
        else:
            target.operands += node.operands
            target.results += node.results
        depends_on.update((n, before) for n in node.results)
    body.nodes = program_order(remaining) if len(remaining) < len(body.nodes) else remaining


def _transitive_closure(nodes: set[Node], waits_for: dict[Node, set[Node]]) -> set[Node]:
    closure, stack = set[Node](), list(nodes)
    while stack:
        node = stack.pop()
        if node not in closure:
            closure.add(node)
            stack += waits_for.get(node, ())
    return closure


def _transpose_products(body: Body) -> None:
    """Rewrite `(a · b)ᵀ` to `bᵀ · aᵀ`.

    The new product is scheduled after those that become ready at the same time, hence it moves to the end.
    """
    producer = {n: node for node in body.nodes for n in node.results}
    uses = Counter(n for node in body.nodes for n in node.operands)
    for node in list(body.nodes):
        # A product that others read as well stays as it is: it would have to be computed twice.
        product = producer.get(node.operands[0]) if node.primitive == "transpose" else None
        if product is None or product.primitive != "dot_general" or uses[node.operands[0]] > 1:
            continue
        if node.eqn.params.get("permutation") == (1, 0):
            product.results = node.results
            body.nodes.remove(node)
            body.nodes.remove(product)
            body.nodes.append(product)


def _absorb_scatters(body: Body, graph: Graph) -> None:
    """Rewrite `x + scatter_add(zeros, …)` to `scatter_add(x, …)`, which needs no buffer for the zeros.

    XLA does not add one scatter to another, unless their updates are few.
    """
    producer = {n: node for node in body.nodes for n in node.results}
    uses = Counter([n for node in body.nodes for n in node.operands])
    uses.update([*body.outputs, *(new for _, new in body.aliases)])

    def scatter_of(n: int) -> Node | None:
        node = producer.get(n)
        return node if node is not None and node.primitive == "scatter-add" and uses[n] == 1 else None

    for node in [node for node in body.nodes if node.primitive in ("add", "add_any")]:
        scatters = [scatter for scatter in map(scatter_of, node.operands) if scatter]
        updates = sum(graph.elements(scatter.operands[2]) for scatter in scatters)
        if len(scatters) > 1 and updates >= graph.elements(node.results[0]):
            continue
        for scattered, other in (node.operands, node.operands[::-1]):
            scatter = scatter_of(scattered)
            zeros = producer.get(scatter.operands[0]) if scatter else None
            if scatter is None or zeros is None or not _is_zeros(zeros):
                continue
            uses[scatter.operands[0]] -= 1
            if not uses[scatter.operands[0]]:
                body.nodes.remove(zeros)
            scatter.operands[0], scatter.results = other, node.results
            producer[node.results[0]] = scatter
            body.nodes.remove(scatter)
            body.nodes[body.nodes.index(node)] = scatter
            break


def _separate_zeros(body: Body, graph: Graph) -> None:
    """Give each scatter zeros of its own, since it overwrites them; XLA copies them as soon as they exist."""
    producer = {n: node for node in body.nodes for n in node.results}
    shared = Counter(n for node in body.nodes for n in node.operands)
    nodes = []
    for node in body.nodes:
        zeros = producer.get(node.operands[0]) if node.primitive == "scatter-add" else None
        if zeros is not None and _is_zeros(zeros) and shared[node.operands[0]] > 1:
            shared[node.operands[0]] -= 1
            node.operands[0] = graph.copy_of(node.operands[0])
            nodes.append(like(zeros, "zeros", [], node.operands[:1]))
        nodes.append(node)
    body.nodes = nodes


def _is_zeros(node: Node) -> bool:
    if node.primitive == "zeros":
        return True
    operand = node.eqn.invars[0] if node.primitive == "broadcast_in_dim" else None
    return isinstance(operand, Literal) and operand.val == 0
