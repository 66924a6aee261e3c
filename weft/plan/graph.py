"""The graph from which memory is planned: nodes that read and compute values, identified by integers.

A jaxpr can't serve as this graph: XLA inlines its calls, merges and reorders its equations, and gives several
of its variables one buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jax.extend.core import JaxprEqn


@dataclass(eq=False)
class Node:
    """One equation, or a loop with its bodies.

    Attributes:
      primitive: the name of the primitive, or "zeros" or "bitcast", which XLA adds.
      operands, results: ids of values.
      eqn: the equation it comes from.
      name: the full name stack.
      enclosing_source: the user's line of the enclosing equation, for equations without one.
      bodies: the bodies of a loop or a cond.
      start, end: its time interval, see `buffers.assign_times`.
    """

    primitive: str
    operands: list[int]
    results: list[int]
    eqn: JaxprEqn
    name: str
    enclosing_source: str
    bodies: list[Body] = field(default_factory=list)
    start: int = 0
    end: int = 0


@dataclass(eq=False)
class Body:
    """Nodes that run in one sequence.

    Attributes:
      nodes: the nodes.
      outputs: ids of the results.
      aliases: pairs of an input and the result that takes over its memory: carries and donated arguments.
    """

    nodes: list[Node] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    aliases: list[tuple[int, int]] = field(default_factory=list)
