"""A program as nodes, ready for `memory`: calls inlined, loops with bodies, XLA's rewrites done.

reader = Reader(mesh)
body = reader.body(jaxpr, env, "")     # nodes that read and make numbers
reader.sizes[number]                   # bytes on one device
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core as jax_core

from ..core.mesh import Mesh
from . import primitives
from .events import COLLECTIVE_KINDS, full_name, is_no_op, user_source

INLINED_CALLS = primitives.CALLS | {"checkpoint", "remat2", "shard_map"}


@dataclass(eq=False)
class Node:
    """One equation with its operands and results as numbers; a loop with what it repeats.

    `around` is the user's line of the equation that it is inside of, for one that has none.
    """

    primitive: str
    operands: list[int]
    results: list[int]
    eqn: Any
    name: str
    around: str
    bodies: list[Body] = field(default_factory=list)
    start: int = 0
    end: int = 0


@dataclass(eq=False)
class Body:
    """What runs together. `kept` are pairs of a number and the one that takes over its memory."""

    nodes: list[Node] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    kept: list[tuple[int, int]] = field(default_factory=list)


class JaxprReader:
    """Reads jaxprs; `sizes` and `avals` tell of every number what it is on one device."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.sizes: list[int] = []
        self.avals: list[Any] = []
        self.shared: dict[Any, int] = {}  # what is made once for all who want it
        self.in_slices = False  # inside a shard_map
        self.around = ""  # the user's line of what is being read

    def new(self, aval: Any) -> int:
        self.sizes.append(primitives.aval_bytes(aval))
        self.avals.append(aval)
        return len(self.sizes) - 1

    def number(self, env: dict[Any, int], atom: Any) -> int:
        literal = isinstance(atom, jax_core.Literal)
        known, key = (self.shared, (str(atom), atom.aval)) if literal else (env, atom)
        if key not in known:
            known[key] = self.new(atom.aval)
        return known[key]

    def body(self, jaxpr: Any, env: dict[Any, int], name: str) -> Body:
        """A jaxpr as a body; `env` has the numbers of its inputs."""
        body = Body()
        self.add(body, jaxpr, env, name)
        body.outputs = [self.number(env, atom) for atom in jaxpr.outvars]
        return apply_xla_rewrites(body, self.mesh.is_unsplit)

    def node(
        self, primitive: str, operands: list[int], results: list[int], eqn: Any, name: str, *bodies: Body
    ) -> Node:
        return Node(primitive, operands, results, eqn, name, self.around, list(bodies))

    def add(self, body: Body, jaxpr: Any, env: dict[Any, int], outer: str) -> None:
        around = self.around
        for eqn in jaxpr.eqns:
            primitive = eqn.primitive.name
            name = full_name(eqn, outer)
            self.around = (
                user_source(eqn) if primitive in INLINED_CALLS or primitive in CONTROL_FLOW else ""
            ) or around
            operands = [self.number(env, atom) for atom in eqn.invars]
            if primitive in INLINED_CALLS:
                self.call(body, eqn, operands, env, name)
            elif primitive in primitives.ALIASES or is_no_op(eqn, self.mesh):
                env.update(zip(eqn.outvars, operands, strict=False))
            elif primitive in CONTROL_FLOW:
                CONTROL_FLOW[primitive](self, body, eqn, operands, env, name)
            elif primitive == "broadcast_in_dim":  # XLA makes equal ones once
                key = (id(body), operands[0], eqn.outvars[0].aval)
                if key not in self.shared:
                    self.shared[key] = self.number(env, eqn.outvars[0])
                    self.split(eqn, operands, [self.shared[key]])
                    body.nodes.append(self.node(primitive, operands, [self.shared[key]], eqn, name))
                env[eqn.outvars[0]] = self.shared[key]
            else:
                results = [self.number(env, v) for v in eqn.outvars]
                self.split(eqn, operands, results)
                for position, order in enumerate(required_dim_orders(eqn)):
                    if order:
                        operands[position] = self.ordered(body, operands[position], order, eqn, name)
                body.nodes.append(self.node(primitive, operands, results, eqn, name))
        self.around = around

    def call(self, body: Body, eqn: Any, operands: list[int], env: dict[Any, int], name: str) -> None:
        jaxpr = next(getattr(sub, "jaxpr", sub) for sub in jax_core.jaxprs_in_params(eqn.params))
        inner = dict(zip(jaxpr.invars, operands[-len(jaxpr.invars) :], strict=False))
        if eqn.primitive.name == "shard_map":  # outside it arrays are whole
            for variable, n in inner.items():
                self.sizes[n], self.avals[n] = primitives.aval_bytes(variable.aval), variable.aval
            self.in_slices = True
            self.add(body, jaxpr, inner, name)
            self.in_slices = False
        else:
            self.add(body, jaxpr, inner, name)
        env.update((v, self.number(inner, a)) for v, a in zip(eqn.outvars, jaxpr.outvars, strict=True))

    def split(self, eqn: Any, operands: list[int], results: list[int]) -> None:
        """Work on whole arrays, after a shard_map: a result is as split as what it is made from."""
        for r, variable in zip(results, eqn.outvars if not self.in_slices else (), strict=False):
            alike = [
                self.sizes[o] / max(primitives.aval_bytes(atom.aval), 1)
                for o, atom in zip(operands, eqn.invars, strict=True)
                if len(getattr(atom.aval, "shape", ())) == len(getattr(variable.aval, "shape", ())) > 0
            ]
            self.sizes[r] = round(primitives.aval_bytes(variable.aval) * min(alike, default=1))

    def ordered(self, body: Body, n: int, order: list[int], eqn: Any, name: str) -> int:
        """A number with its dims in this order: a copy, or if that changes nothing another name."""
        key = (id(body), n, *order)
        if key not in self.shared:
            primitive = "bitcast" if order == sorted(order) else "transpose"
            self.shared[key] = self.new(self.avals[n])
            body.nodes.append(self.node(primitive, [n], [self.shared[key]], eqn, name))
        return self.shared[key]

    def scan(self, body: Body, eqn: Any, operands: list[int], env: dict[Any, int], name: str) -> None:
        """Slices of the scanned arrays, the body, and its results written into arrays of zeros."""
        jaxpr, first = eqn.params["jaxpr"].jaxpr, eqn.params["num_consts"]
        last = first + eqn.params["num_carry"]
        inner, inside = dict(zip(jaxpr.invars[:first], operands[:first], strict=True)), Body()
        for variable, n in zip(jaxpr.invars[last:], operands[last:], strict=True):
            inside.nodes.append(self.node("dynamic_slice", [n], [self.number(inner, variable)], eqn, name))
        old = [self.number(inner, v) for v in jaxpr.invars[first:last]]
        self.add(inside, jaxpr, inner, name)
        made = [self.number(inner, atom) for atom in jaxpr.outvars]
        inside.kept = list(zip(old, made[: len(old)], strict=True))
        for n in made[len(old) :]:
            inside.nodes.append(self.node("dynamic_update_slice", [n], [], eqn, name))
        stacks = [self.new(v.aval) for v in eqn.outvars[len(old) :]]
        body.nodes += [self.node("zeros", [], [n], eqn, name) for n in stacks]
        results = [self.number(env, v) for v in eqn.outvars]
        operands = [*operands[first:last], *stacks, *operands[:first], *operands[last:]]
        body.nodes.append(
            self.node("scan", operands, results, eqn, name, apply_xla_rewrites(inside, self.mesh.is_unsplit))
        )

    def loop(self, body: Body, eqn: Any, operands: list[int], env: dict[Any, int], name: str) -> None:
        """A while loop: its body takes over the memory of what it carries."""
        test, repeated = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
        first = eqn.params["cond_nconsts"]
        last = first + eqn.params["body_nconsts"]
        inner = dict(zip(repeated.invars, operands[first:last], strict=False))
        old = [self.number(inner, v) for v in repeated.invars[last - first :]]
        condition = self.body(test, dict(zip(test.invars, operands[:first] + old, strict=True)), name)
        inside = self.body(repeated, inner, name)
        inside.kept, inside.outputs = list(zip(old, inside.outputs, strict=True)), []
        results = [self.number(env, v) for v in eqn.outvars]
        operands = operands[last:] + operands[:last]
        body.nodes.append(self.node("while", operands, results, eqn, name, condition, inside))

    def branches(self, body: Body, eqn: Any, operands: list[int], env: dict[Any, int], name: str) -> None:
        """A cond: one after the other, so that no two branches' buffers live together."""
        jaxprs = [branch.jaxpr for branch in eqn.params["branches"]]
        bodies = [self.body(j, dict(zip(j.invars, operands[1:], strict=True)), name) for j in jaxprs]
        results = [self.number(env, v) for v in eqn.outvars]
        body.nodes.append(self.node("cond", operands, results, eqn, name, *bodies))


CONTROL_FLOW = {"scan": JaxprReader.scan, "while": JaxprReader.loop, "cond": JaxprReader.branches}


# What XLA changes


def required_dim_orders(eqn: Any) -> list[list[int]]:
    """For each operand the order of dims that XLA wants, or nothing if it takes any.

    A matrix product has one dim that is contracted and one that is not: several are merged, for which
    they have to stand together, contracted ones last on the left and first on the right. Convolutions
    want features last; collectives that cut or join want that dim first.
    """
    if eqn.primitive.name == "dot_general":
        orders = []
        for side, (atom, c, b) in enumerate(zip(eqn.invars, *eqn.params["dimension_numbers"], strict=True)):
            free = [n for n in range(atom.aval.ndim) if n not in c and n not in b]
            order = [*b, *free, *c] if side == 0 else [*b, *c, *free]
            orders.append(order if len(c) > 1 or len(free) > 1 else [])
        return orders
    if eqn.primitive.name == "conv_general_dilated":
        (batch, feature, *space), (out, into, *window), _ = eqn.params["dimension_numbers"]
        orders = [[batch, *space, feature], [*window, into, out]]
        return [order if order != sorted(order) else [] for order in orders]
    split = eqn.params.get("scatter_dimension", eqn.params.get("all_gather_dimension", 0))
    return [[split, *(n for n in range(eqn.invars[0].aval.ndim) if n != split)]] if split else []


def apply_xla_rewrites(body: Body, alone: bool) -> Body:
    """A body as XLA has it before it fuses.

    On one device, `alone`, the sums that take in what is scattered are a library's, with their softmax.
    """
    _merge_sums(body)
    _transposed_products(body)
    if not alone:
        _scatters_into_sums(body)
    return body


def _merge_sums(body: Body) -> None:
    """All-reduces over the same axes that do not wait for each other become one."""
    after: dict[int, set[Node]] = {}  # for each number the all-reduces, merged ones, that it comes after
    waits: dict[Node, set[Node]] = {}  # the same for each of these: it grows as others are merged into it
    merged: dict[Any, list[Node]] = {}
    left = []
    for node in body.nodes:
        before = set().union(*(after.get(n, ()) for n in node.operands))
        first = node
        if COLLECTIVE_KINDS.get(node.primitive) == "all-reduce":
            alike = merged.setdefault(
                (node.primitive.removesuffix("_invariant"), str(node.eqn.params["axes"])), []
            )
            late = _closure(before, waits)
            first = next((one for one in alike if one not in late), node)
            waits.setdefault(first, set()).update(before)
            before = {first}
            if first is node:
                alike.append(node)
        if first is node:
            left.append(node)
        else:
            first.operands += node.operands
            first.results += node.results
        after.update((n, before) for n in node.results)
    body.nodes = _in_order(left) if len(left) < len(body.nodes) else left


def _closure(some: set[Node], waits: dict[Node, set[Node]]) -> set[Node]:
    found, todo = set[Node](), list(some)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += waits.get(node, ())
    return found


def _in_order(nodes: list[Node]) -> list[Node]:
    """The nodes in the order they are in, but each after those that make what it reads."""
    maker = {n: place for place, node in enumerate(nodes) for n in node.results}
    before = [{maker[n] for n in node.operands if n in maker} - {at} for at, node in enumerate(nodes)]
    users: list[list[int]] = [[] for _ in nodes]
    for place, others in enumerate(before):
        for other in others:
            users[other].append(place)
    ready = [place for place, others in enumerate(before) if not others]
    heapq.heapify(ready)
    ordered = []
    while ready:
        place = heapq.heappop(ready)
        ordered.append(nodes[place])
        for user in users[place]:
            before[user].discard(place)
            if not before[user]:
                heapq.heappush(ready, user)
    assert len(ordered) == len(nodes)
    return ordered


def _transposed_products(body: Body) -> None:
    """`(a · b)ᵀ` becomes `bᵀ · aᵀ`, a new product that comes after those that are ready with it."""
    maker = {n: node for node in body.nodes for n in node.results}
    uses = Counter(n for node in body.nodes for n in node.operands)
    for node in list(body.nodes):
        product = maker.get(node.operands[0]) if node.primitive == "transpose" else None
        if product is None or product.primitive != "dot_general" or uses[node.operands[0]] > 1:
            continue
        if node.eqn.params.get("permutation") == (1, 0):
            product.results = node.results
            body.nodes.remove(node)
            body.nodes.remove(product)
            body.nodes.append(product)


def _scatters_into_sums(body: Body) -> None:
    """`x + scatter_add(zeros, …)` becomes `scatter_add(x, …)`."""
    maker = {n: node for node in body.nodes for n in node.results}
    uses = Counter([n for node in body.nodes for n in node.operands])
    uses.update([*body.outputs, *(new for _, new in body.kept)])
    for node in [node for node in body.nodes if node.primitive in ("add", "add_any")]:
        for one, other in (node.operands, node.operands[::-1]):
            scatter = maker.get(one)
            if scatter is None or scatter.primitive != "scatter-add" or uses[one] > 1:
                continue
            zeros = maker.get(scatter.operands[0])
            if zeros is None or not _is_zeros(zeros):
                continue
            uses[scatter.operands[0]] -= 1
            if not uses[scatter.operands[0]]:
                body.nodes.remove(zeros)
            scatter.operands[0], scatter.results = other, node.results
            maker[node.results[0]] = scatter
            body.nodes.remove(scatter)
            body.nodes[body.nodes.index(node)] = scatter
            break


def _is_zeros(node: Node) -> bool:
    made_of = node.eqn.invars[0] if node.primitive == "broadcast_in_dim" else None
    return isinstance(made_of, jax_core.Literal) and made_of.val == 0
