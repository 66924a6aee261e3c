"""From a graph to events: local work and collectives, in order, each with its count.

The graph is what will run. The body of a scan counts once per iteration, a `cond` counts its most expensive
branch, a `while` counts one iteration, and recomputation under `remat` counts again. JAX's types list the
axes along which a value varies, which shows the work that devices duplicate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..core.describe import short_dtype
from ..core.jax_compat import ClosedJaxpr, ShapedArray, jaxpr_varying_axes
from ..core.labels import Scope
from ..core.mesh import Mesh
from . import primitives
from .facts import Collective, Event, UnboundedLoop, UnknownPrimitive, Work
from .graph import Body, Graph, Node
from .jaxpr import read_jaxpr
from .primitives import Atom, Fusion, aval_of


@dataclass
class TracedEvent:
    """An event with the node it comes from and the types of the arrays that it accesses in memory."""

    event: Event
    node: Node
    accessed: list[ShapedArray]

    @property
    def scope(self) -> Scope:
        """The ops, layers and transformations around it."""
        return self.node.scope


def trace_events(graph: Graph) -> list[TracedEvent]:
    """The events of a graph, each with its scope and the arrays it accesses."""
    return with_phases(list(_walk(graph.body, graph.mesh, 1)))


def with_phases(events: list[TracedEvent]) -> list[TracedEvent]:
    """Set the phase of each event; they are in program order."""
    seen_backward = False
    for traced in events:
        phase = traced.scope.phase(seen_backward)
        seen_backward |= phase == "backward"
        traced.event = replace(traced.event, phase=phase)
    return events


def extract_collectives(closed: ClosedJaxpr, mesh: Mesh) -> list[Collective]:
    """The collectives of a closed jaxpr, in order."""
    events = trace_events(read_jaxpr(closed.jaxpr, mesh))
    return [traced.event for traced in events if isinstance(traced.event, Collective)]


def find_unbounded_loops(graph: Graph) -> list[UnboundedLoop]:
    """The while loops of a graph; a `fori_loop` with known bounds is a scan."""
    loops = (node for node in graph.body.walk() if node.primitive == "while")
    return [*dict.fromkeys(UnboundedLoop(n.scope.op, n.source or n.enclosing_source) for n in loops)]


def find_unknown_primitives(graph: Graph) -> list[UnknownPrimitive]:
    """The primitives of a graph that the table has no row for, each with the first op that uses it."""
    found: dict[str, UnknownPrimitive] = {}
    for node in graph.body.walk():
        if node.primitive not in primitives.PRIMITIVES and node.primitive not in found:
            source = node.source or node.enclosing_source
            found[node.primitive] = UnknownPrimitive(node.primitive, node.scope.op, source)
    return [*found.values()]


def _walk(body: Body, mesh: Mesh, count: int) -> Iterator[TracedEvent]:
    """The events of a body that runs `count` times."""
    traffic = _FusedTraffic(body, mesh)
    makers = {n: node for node in body.nodes for n in node.results}
    for node in body.nodes:
        accessed = traffic.accessed(node)
        if node.row.collective:
            yield TracedEvent(_collective(node, mesh, count, makers), node, accessed)
        # Which branch of a cond runs depends on data, so a plan can only count the most expensive one.
        elif node.primitive == "cond":
            branches = [list(_walk(branch, mesh, count)) for branch in node.bodies]
            yield from max(branches, key=_rough_cost)
        elif node.bodies:
            trips = node.eqn.params["length"] if node.primitive == "scan" else 1
            for inside in node.bodies:
                yield from _walk(inside, mesh, count * trips)
        else:
            flops, bytes = primitives.flops(node.eqn), sum(map(primitives.aval_bytes, accessed))
            if flops or bytes:
                yield TracedEvent(work_of(node, mesh, count, flops, bytes), node, accessed)


class _FusedTraffic:
    """The memory traffic of the nodes of a body after fusion.

    XLA fuses an elementwise chain into its last link, or into a reduction at its end. The fusion reads the
    operands of the chain and writes one result; values in between stay in registers.

    Attributes:
      materialized: the values that must be in memory.
      sources: the operands of the chain that computes a value, with their types.
    """

    def __init__(self, body: Body, mesh: Mesh):
        self.mesh = mesh
        # A chain ends where its value must be in memory: at results, and before nodes that do not fuse.
        self.materialized = {*body.outputs, *body.borders}
        for node in body.nodes:
            if not self.is_fused(node) and node.fusion is not Fusion.REDUCE:
                self.materialized.update((n for n, _ in node.variables()), node.hoisted)
        # An alias has no memory of its own, so its operand must be in memory. Backwards, because the operand
        # may be an alias too.
        for node in reversed(body.nodes):
            if self.is_free(node) and not self.materialized.isdisjoint(node.results):
                self.materialized.update(n for n, _ in node.variables())
        self.sources: dict[int, dict[int, ShapedArray]] = {}

    def is_fused(self, node: Node) -> bool:
        """Whether a node is a link of an elementwise chain."""
        return node.fusion in primitives.CHAIN or is_no_op(node, self.mesh)

    def is_free(self, node: Node) -> bool:
        """Whether a node only renames a value."""
        return node.fusion in primitives.FREE or is_no_op(node, self.mesh)

    def accessed(self, node: Node) -> list[ShapedArray]:
        """The types of the arrays that a node reads and writes in memory; none inside a chain."""
        sources: dict[int, ShapedArray] = {}
        for n, aval in node.variables():
            sources |= self.sources.get(n, {n: aval})
        if self.is_fused(node) and self.materialized.isdisjoint(node.results):
            self.sources |= dict.fromkeys(node.results, sources)
            return []
        if self.is_free(node):
            return []
        results = [aval_of(v) for v in node.eqn.outvars]
        if node.row.window is None:
            return [*sources.values(), *results]
        # A slice, a lookup or an update accesses only a part of its first operand, however large that is.
        window = aval_of([*node.eqn.invars, *node.eqn.outvars][node.row.window])
        rest = [aval for n, aval in sources.items() if n != node.operands[0]]
        return [window, *rest, *([window] if node.fusion is Fusion.UPDATE else results)]


def _rough_cost(events: list[TracedEvent]) -> float:
    """The approximate duration of events, in bytes of memory traffic, to compare the branches of a cond.

    On accelerators, sending a byte takes about as long as reading 8, and reading one as long as 150 FLOPs.
    """
    cost = 0.0
    for traced in events:
        e = traced.event
        cost += e.count * (8 * e.wire_bytes if isinstance(e, Collective) else e.bytes + e.flops / 150)
    return cost


def is_no_op(node: Node, mesh: Mesh) -> bool:
    """Whether a node is a collective over one device, or a slice of the entire array."""
    if node.row.collective:
        return mesh.ways(collective_axes(node)) == 1
    if node.primitive != "dynamic_slice":
        return False
    return aval_of(node.eqn.invars[0]).shape == aval_of(node.eqn.outvars[0]).shape


def collective_axes(node: Node) -> tuple[str, ...]:
    """The mesh axes of a collective."""
    params: Mapping[str, Any] = node.eqn.params
    axes = params.get("axes", params.get("axis_name"))
    return tuple(axes) if isinstance(axes, tuple | list | frozenset) else (axes,)


def _collective(node: Node, mesh: Mesh, count: int, makers: Mapping[int, Node]) -> Collective:
    kind, over = node.row.collective, collective_axes(node)
    axes = tuple(axis for axis in mesh.names if axis in over)
    variables = node.eqn.outvars if kind == "all-gather" else node.eqn.invars
    size = sum(primitives.aval_bytes(v.aval) for v in variables)
    # A collective at the end of a program has no user frame. It gets the line that computes its operand.
    producers = (makers[n].source for n, _ in node.variables() if n in makers)
    source = node.source or next(filter(None, producers), "") or node.enclosing_source
    return Collective(
        kind=kind,
        axes=axes,
        bytes=size,
        count=count,
        op=node.scope.op,
        phase="",
        source=source,
        wire_bytes=wire_bytes(kind, size, mesh.ways(axes)),
        varies=_varying_axes(node.eqn.invars),
    )


def wire_bytes(kind: str, size: int, ways: int) -> int:
    """The bytes that one device sends for a collective in a ring of `ways` devices."""
    if kind == "all-reduce":  # in a ring it is a reduce-scatter and an all-gather
        return 2 * size * (ways - 1) // ways
    return size if kind == "permute" else size * (ways - 1) // ways


def work_of(node: Node, mesh: Mesh, count: int, flops: int, traffic: int) -> Work:
    """The work of a node that runs `count` times."""
    varies = _varying_axes(node.eqn.outvars)
    dtype = getattr(node.eqn.outvars[0].aval, "dtype", None) if node.eqn.outvars else None
    return Work(
        op=node.scope.op,
        phase="",
        source=node.source or node.enclosing_source,
        kind=node.row.kind,
        dtype=short_dtype(dtype) if dtype is not None else "",
        flops=flops,
        unique_flops=flops * mesh.ways(varies),
        bytes=traffic,
        count=count,
        varies=varies,
    )


def _varying_axes(atoms: Iterable[Atom]) -> tuple[str, ...]:
    """The axes along which devices have different values."""
    return tuple(sorted(frozenset().union(*(jaxpr_varying_axes(aval_of(atom)) for atom in atoms))))
