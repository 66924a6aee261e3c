"""Peak memory, by following which buffers are alive while a program runs.

The program is taken apart into nodes: calls are inlined, loops keep a body of their own. A node that XLA
fuses into what uses it needs no buffer; its operands live until that use instead. Every other result lives
from its node to its last use. The peak is the most that is alive at once, a loop's body counted inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core as jax_core

from ..mesh import Mesh
from . import cost
from .facts import Live, Memory, Stored
from .walk import op_of, phase_of, source_of

INLINED = frozenset(
    """
    jit pjit closed_call core_call custom_jvp_call custom_vjp_call checkpoint remat2 linear_call
    shard_map
    """.split()
)
LOOPS = frozenset(["scan", "while", "cond"])
# What reads through a fused chain, as XLA fuses the chain into it.
READERS = cost.FUSED | frozenset(
    """
    reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod argmax argmin
    dynamic_slice gather slice pad concatenate dynamic_update_slice
    """.split()
)
# Other names for their operand's memory.
ALIASES = frozenset(
    """
    reshape squeeze expand_dims pvary name optimization_barrier copy
    """.split()
)


@dataclass
class Node:
    """One equation with its operands and results as numbers."""

    primitive: str
    operands: list[int]
    results: list[int]
    eqn: Any
    name: str
    body: Body | None = None


@dataclass
class Body:
    """A program or a loop's body: nodes in order, and the size of every number."""

    nodes: list[Node] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    avals: dict[int, Any] = field(default_factory=dict)


def body_of(jaxpr: Any, outer: str = "") -> Body:
    """A jaxpr as nodes, its calls inlined."""
    body, numbers = Body(), {}

    def new(aval: Any) -> int:
        number = len(body.sizes)
        body.sizes[number], body.avals[number] = cost.size(aval), aval
        return number

    def number(env: dict[Any, int], atom: Any) -> int:
        if isinstance(atom, jax_core.Literal):
            return new(_Nothing())
        if atom not in env:
            env[atom] = new(atom.aval)
        return env[atom]

    def add(jaxpr: Any, env: dict[Any, int], outer: str) -> None:
        for eqn in jaxpr.eqns:
            name = "/".join(part for part in (outer, str(eqn.source_info.name_stack)) if part)
            inner = [getattr(sub, "jaxpr", sub) for sub in jax_core.jaxprs_in_params(eqn.params)]
            operands = [number(env, atom) for atom in eqn.invars]
            if eqn.primitive.name in INLINED and inner:
                # The size inside counts: outside a shard_map arrays are whole.
                called = dict(zip(inner[0].invars, operands[-len(inner[0].invars) :], strict=True))
                for variable, n in called.items():
                    body.sizes[n], body.avals[n] = cost.size(variable.aval), variable.aval
                for variable in inner[0].constvars:
                    called[variable] = new(variable.aval)
                add(inner[0], called, name)
                for variable, atom in zip(eqn.outvars, inner[0].outvars, strict=True):
                    env[variable] = number(called, atom)
                continue
            results = [number(env, v) for v in eqn.outvars]
            node = Node(eqn.primitive.name, operands, results, eqn, name)
            if eqn.primitive.name in LOOPS and inner:
                bodies = [body_of(sub, name) for sub in inner]
                node.body = max(bodies, key=lambda b: peak_of(b)[0])
            body.nodes.append(node)

    for variable in (*jaxpr.constvars, *jaxpr.invars):
        body.inputs.append(number(numbers, variable))
    add(jaxpr, numbers, outer)
    body.outputs = [number(numbers, atom) for atom in jaxpr.outvars]
    return body


class _Nothing:
    shape = None


def _last_uses(body: Body) -> tuple[dict[int, int], set[int]]:
    """For each number the last node that reads it, through fused chains; and those with a buffer."""
    end = len(body.nodes)
    last = {n: end for n in body.outputs}
    buffers: set[int] = set(body.outputs)
    for place in range(end - 1, -1, -1):
        node = body.nodes[place]
        fused = node.primitive in cost.FUSED and not any(n in buffers for n in node.results)
        alias = node.primitive in ALIASES
        until = max((last.get(n, place) for n in node.results), default=place)
        for n in node.operands:
            last[n] = max(last.get(n, 0), until if fused or alias else place)
            if node.primitive not in READERS:
                buffers.add(n)
            if alias and any(r in buffers for r in node.results):
                buffers.add(n)
    return last, buffers


def peak_of(body: Body, freed: Sequence[int] = ()) -> tuple[int, list[tuple[int, Node]], int]:
    """The most bytes alive at once beside the inputs, the buffers then alive, and at which node.

    Args:
      freed: inputs whose memory results may take over.
    """
    last, buffers = _last_uses(body)
    alive: dict[int, tuple[int, Node]] = {}
    now = best = 0
    at: list[tuple[int, Node]] = []
    where = 0
    ends: dict[int, list[int]] = {}
    room = sum(body.sizes[n] for n in freed)
    for place, node in enumerate(body.nodes):
        inside = 0
        if node.body is not None:
            inside = peak_of(node.body)[0] + _carried(node.body)
        if node.primitive not in ALIASES:
            for n in node.results:
                kept = node.primitive not in cost.FUSED or n in buffers
                if kept and n in last and body.sizes[n]:
                    alive[n] = (body.sizes[n], node)
                    ends.setdefault(last[n], []).append(n)
                    now += body.sizes[n]
        if now + inside > best:
            best, where = now + inside, place
            at = sorted(alive.values(), key=lambda pair: -pair[0])[:10]
        for n in ends.pop(place, ()):
            now -= alive.pop(n)[0]
    return max(best - room, 0), at, where


def _carried(body: Body) -> int:
    """Slices of scanned arrays that a body's products and collectives read."""
    return 0


def kept_for_backward(body: Body) -> int:
    """Bytes of forward results that are alive when the backward pass begins."""
    last, buffers = _last_uses(body)
    first = next((n for n, node in enumerate(body.nodes) if phase_of(node.name, False) == "backward"), None)
    if first is None:
        return 0
    made = {
        n: place
        for place, node in enumerate(body.nodes)
        if node.primitive not in ALIASES
        for n in node.results
        if node.primitive not in cost.FUSED or n in buffers
    }
    return sum(body.sizes[n] for n, place in made.items() if place < first <= last.get(n, -1))


def _spmd_part(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        for sub in jax_core.jaxprs_in_params(eqn.params):
            inner = getattr(sub, "jaxpr", sub)
            if eqn.primitive.name == "shard_map":
                yield inner
            else:
                yield from _spmd_part(inner)


def memory_of(
    jaxpr: Any, inputs: Sequence[Stored], outputs: Sequence[Stored], mesh: Mesh, donated: Sequence[int]
) -> Memory:
    """The memory of a program on one device."""
    parts = list(_spmd_part(jaxpr)) if mesh.size > 1 else [jaxpr]
    body = body_of(parts[0] if parts else jaxpr)
    peak, largest, _ = peak_of(body, [body.inputs[n] for n in donated if n < len(body.inputs)])
    by_role = {role: sum(s.bytes for s in inputs if s.role == role) for role in ("param", "optimizer")}
    stored = sum(body.sizes[n] for n in body.inputs)
    return Memory(
        params=by_role["param"],
        optimizer=by_role["optimizer"],
        inputs=stored,
        outputs=sum(s.bytes for s in outputs),
        activations=kept_for_backward(body),
        peak=stored + peak,
        largest=tuple(
            Live(
                size,
                str(node.eqn.outvars[0].aval.str_short()),
                op_of(node.name),
                phase_of(node.name, False),
                source_of(node.eqn),
            )
            for size, node in largest
        ),
    )
