"""The graph that plans are derived from: nodes that read and compute values, identified by integers.

A jaxpr can't serve as this graph: XLA inlines its calls, merges and reorders its equations, and gives several
of its variables one buffer. `jaxpr` reads it, `events` lists its work and collectives, and `buffers` its
memory.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..core.jax_compat import JaxprEqn, Literal, ShapedArray
from ..core.labels import Scope
from ..core.mesh import Mesh
from . import primitives
from .primitives import Fusion, Primitive


@dataclass(eq=False)
class Node:
    """One equation, or a loop with its bodies.

    Attributes:
      primitive: the name of the primitive, or "zeros", "positions" or "bitcast", which XLA adds.
      operands, results: ids of values.
      eqn: the equation it comes from.
      scope: the ops, layers and transformations around it.
      source: the user's line, or "".
      enclosing_source: the user's line of the enclosing equation, for equations without one.
      bodies: the bodies of a loop or a cond.
      hoisted: results of nodes that were moved out of the loop, which its body reads.
      start, end: its time interval, see `buffers.assign_times`.
    """

    primitive: str
    operands: list[int]
    results: list[int]
    eqn: JaxprEqn
    scope: Scope
    source: str = ""
    enclosing_source: str = ""
    bodies: list[Body] = field(default_factory=list)
    hoisted: list[int] = field(default_factory=list)
    start: int = 0
    end: int = 0

    @property
    def row(self) -> Primitive:
        """The row of its primitive."""
        return primitives.primitive(self.primitive)

    @property
    def fusion(self) -> Fusion:
        return self.row.fusion

    @property
    def has_side_effects(self) -> bool:
        """Whether it must run as often as the program says, like a callback."""
        # For JAX, collectives and `axis_index` have the effect of reading an axis.
        return bool(self.eqn.effects) and self.fusion is Fusion.LOOP and not self.row.collective

    def variables(self) -> Iterator[tuple[int, ShapedArray]]:
        """The operands that are not literals, with their types as this node sees them."""
        for n, atom in zip(self.operands, self.eqn.invars, strict=True):
            if not isinstance(atom, Literal):
                yield n, primitives.aval_of(atom)


@dataclass(eq=False)
class Body:
    """Nodes that run in one sequence.

    Attributes:
      inputs: ids of the inputs.
      nodes: the nodes.
      outputs: ids of the results.
      borders: values at the borders of inlined calls that XLA does not fuse across.
      aliases: pairs of an input and the result that takes over its memory: carries and donated arguments.
    """

    inputs: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    borders: set[int] = field(default_factory=set)
    aliases: list[tuple[int, int]] = field(default_factory=list)

    def walk(self) -> Iterator[Node]:
        """All nodes, including those inside loops."""
        for node in self.nodes:
            yield node
            for inside in node.bodies:
                yield from inside.walk()

    def replace(self, same: Mapping[int, int]) -> None:
        """Replace values, in the bodies of loops too, after nodes were removed that compute the same."""

        def replaced(values: list[int]) -> list[int]:
            return [same.get(n, n) for n in values]

        if not same:
            return
        for node in self.walk():
            node.operands, node.hoisted = replaced(node.operands), replaced(node.hoisted)
        for body in bodies(self):
            body.inputs, body.outputs = replaced(body.inputs), replaced(body.outputs)
            body.aliases = [(same.get(old, old), same.get(new, new)) for old, new in body.aliases]


@dataclass(eq=False)
class Graph:
    """A program on one device.

    Attributes:
      mesh: its mesh.
      body: its nodes.
      sizes, avals: the bytes on one device and the type of each value.
    """

    mesh: Mesh
    body: Body = field(default_factory=Body)
    sizes: list[int] = field(default_factory=list)
    avals: list[ShapedArray] = field(default_factory=list)

    def new_value(self, aval: ShapedArray) -> int:
        """The id of a new value."""
        self.sizes.append(primitives.aval_bytes(aval))
        self.avals.append(aval)
        return len(self.sizes) - 1

    def elements(self, n: int) -> int:
        """The number of elements of a value."""
        return math.prod(getattr(self.avals[n], "shape", ()))

    def copy_of(self, n: int) -> int:
        """The id of a new value with the type and size of another one."""
        value = self.new_value(self.avals[n])
        self.sizes[value] = self.sizes[n]
        return value


def bodies(body: Body) -> Iterator[Body]:
    """A body and the bodies of its loops, outermost first."""
    yield body
    for node in body.nodes:
        for inside in node.bodies:
            yield from bodies(inside)


def like(node: Node, primitive: str, operands: list[int], results: list[int]) -> Node:
    """A node that XLA adds for another one."""
    return Node(primitive, operands, results, node.eqn, node.scope, node.source, node.enclosing_source)


def program_order(nodes: list[Node]) -> list[Node]:
    """The nodes in their order, except that each comes after the producers of its operands."""
    producer = {n: index for index, node in enumerate(nodes) for n in node.results}
    pending = [{producer[n] for n in node.operands if n in producer} - {i} for i, node in enumerate(nodes)]
    users: list[list[int]] = [[] for _ in nodes]
    for index, producers in enumerate(pending):
        for other in producers:
            users[other].append(index)
    # A heap, so that nodes stay in their original order where they can: the order decides how long
    # buffers live.
    ready = [index for index, producers in enumerate(pending) if not producers]
    heapq.heapify(ready)
    ordered = []
    while ready:
        index = heapq.heappop(ready)
        ordered.append(nodes[index])
        for user in users[index]:
            pending[user].discard(index)
            if not pending[user]:
                heapq.heappush(ready, user)
    assert len(ordered) == len(nodes)
    return ordered
