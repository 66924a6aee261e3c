"""From a jaxpr to a graph: dead code is removed, calls are inlined, and loops have bodies.

    graph = read_jaxpr(closed.jaxpr, mesh)

This is the only code that reads jaxprs. It also merges equal equations, folds collectives of constants and
moves work out of loops, as every XLA backend does before it looks at anything else: their collectives are
never sent, or once.
"""

from __future__ import annotations

from collections.abc import Hashable

from ..core.jax_compat import (
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    dce_jaxpr,
    expand_hijax,
    jaxprs_in_params,
    scan_counts,
)
from ..core.labels import Scope
from ..core.mesh import Mesh
from . import primitives
from .graph import Body, Graph, Node
from .loop_invariants import hoist_loop_invariants
from .primitives import Atom, Fusion
from .sources import user_source

Env = dict[Var, int]

# XLA compiles the program as one computation: buffers live across the borders of remat and shard_map. But it
# does not fuse across them.
_BORDERS = frozenset(["checkpoint", "remat2", "shard_map"])
# Of an array of equal elements, these return one.
_SLICES = frozenset(["slice", "dynamic_slice", "rev"])
_FOLDED = frozenset(["all-reduce", "all-gather", "reduce-scatter"])


def read_jaxpr(jaxpr: Jaxpr, mesh: Mesh) -> Graph:
    """The graph of a program."""
    # XLA removes the same equations, but plans are made before it runs. `instantiate` keeps unused inputs:
    # donated arguments are given by position.
    jaxpr, _ = dce_jaxpr(expand_hijax(jaxpr), [True] * len(jaxpr.outvars), instantiate=True)
    reader = _Reader(mesh)
    env = Env()
    reader.graph.body.inputs = [reader.value_of(env, v) for v in (*jaxpr.constvars, *jaxpr.invars)]
    reader.read_body(jaxpr, env, Scope(), reader.graph.body)
    return reader.graph


class _Reader:
    """Reads one jaxpr into a graph."""

    def __init__(self, mesh: Mesh) -> None:
        self.graph = Graph(mesh)
        # Equal literals, and equal equations in one body, share their results.
        self._shared: dict[Hashable, list[int]] = {}
        # Values with the same known number everywhere.
        self._constants: set[int] = set()
        self._in_shard_map = False
        self._enclosing_source = ""  # for equations that JAX adds, which have no user's line of their own

    def value_of(self, env: Env, atom: Atom) -> int:
        """The id of a variable or literal; the same one each time."""
        if isinstance(atom, Literal):
            key = str(atom), atom.aval
            if key not in self._shared:
                self._shared[key] = [self.graph.new_value(primitives.aval_of(atom))]
                self._constants.update(self._shared[key])
            return self._shared[key][0]
        if atom not in env:
            env[atom] = self.graph.new_value(primitives.aval_of(atom))
        return env[atom]

    def read_body(self, jaxpr: Jaxpr, env: Env, outer: Scope, body: Body) -> Body:
        """A jaxpr as a body; `env` has the ids of its inputs."""
        self._read_equations(body, jaxpr, env, outer)
        body.outputs = [self.value_of(env, atom) for atom in jaxpr.outvars]
        return body

    def _read_equations(self, body: Body, jaxpr: Jaxpr, env: Env, outer: Scope) -> None:
        enclosing = self._enclosing_source
        for eqn in jaxpr.eqns:
            scope, source = outer.extend(eqn.source_info.name_stack), user_source(eqn)
            operands = [self.value_of(env, atom) for atom in eqn.invars]
            node = Node(eqn.primitive.name, operands, [], eqn, scope, source, enclosing)
            if node.fusion is Fusion.CALL or eqn.params.get("branches_platforms"):
                self._enclosing_source = source or enclosing
                self._read_call(body, node, env)
            elif node.fusion is Fusion.CONTROL:
                self._enclosing_source = source or enclosing
                node.results = [self.value_of(env, v) for v in eqn.outvars]
                CONTROL_FLOW[node.primitive](self, node)
                if node.primitive != "cond":
                    self._hoist(body, node)
                body.nodes.append(node)
            else:
                env.update(zip(eqn.outvars, self._results_of(body, node), strict=True))
            self._enclosing_source = enclosing

    def _results_of(self, body: Body, node: Node) -> list[int]:
        """Add a node to the body, unless an equal one is there; returns the ids of its results."""
        eqn = node.eqn
        key = _cse_key(node, id(body))
        known = self._shared.get(key) if key is not None else None
        if known is not None:
            return known
        node.results = [self.graph.new_value(primitives.aval_of(v)) for v in eqn.outvars]
        self._scale_results(eqn, node.operands, node.results)
        # Where a slice starts does not matter if all elements are equal.
        numbers = node.operands[:1] if node.primitive in _SLICES else node.operands
        if numbers and self._constants.issuperset(numbers):
            self._fold(node)
        if key is not None:
            self._shared[key] = node.results
        body.nodes.append(node)
        return node.results

    def _hoist(self, body: Body, loop: Node) -> None:
        """Move the invariant nodes of a loop to the body around it, unless equal ones are there."""
        same: dict[int, int] = {}
        for node in hoist_loop_invariants(loop, self.graph):
            node.operands = [same.get(n, n) for n in node.operands]
            key = _cse_key(node, id(body))
            known = self._shared.setdefault(key, node.results) if key is not None else node.results
            if known is node.results:
                body.nodes.append(node)
            else:
                same.update(zip(node.results, known, strict=True))
        loop.hoisted = [same.get(n, n) for n in loop.hoisted]
        for inside in loop.bodies:
            inside.replace(same)

    def _fold(self, node: Node) -> None:
        """Note that a node of constants is constant; collectives of constants are not sent.

        XLA replaces a collective of a broadcast number by another broadcast. For XLA an array of one element
        is not a broadcast, so its collectives are sent.
        """
        is_broadcast = self.graph.elements(node.operands[0]) > 1
        if node.row.collective in _FOLDED and len(node.operands) == 1 and is_broadcast:
            node.primitive = "broadcast_in_dim"
        if node.fusion in (*primitives.CHAIN, Fusion.REDUCE) or node.primitive in _SLICES:
            self._constants.update(node.results)

    def _read_call(self, body: Body, node: Node, env: Env) -> None:
        """Inline a call."""
        eqn = node.eqn
        jaxpr, operands = _called(node)
        # JAX keeps XLA from merging recomputed values with the saved ones by a barrier.
        if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
            results = [self.graph.new_value(self.graph.avals[n]) for n in operands]
            for n, result in zip(operands, results, strict=True):
                self.graph.sizes[result] = self.graph.sizes[n]
            barrier = eqn.replace(invars=eqn.invars[len(eqn.invars) - len(operands) :], outvars=jaxpr.invars)
            body.nodes.append(
                Node("optimization_barrier", operands, results, barrier, node.scope, node.source)
            )
            operands = results
        inner = dict(zip(jaxpr.invars, operands, strict=True))
        if node.primitive == "shard_map":
            # Outside of the shard_map types are global. A device holds slices: the inputs inside.
            for variable, n in inner.items():
                self.graph.sizes[n] = primitives.aval_bytes(variable.aval)
                self.graph.avals[n] = primitives.aval_of(variable)
        outside, self._in_shard_map = self._in_shard_map, self._in_shard_map or node.primitive == "shard_map"
        self._read_equations(body, jaxpr, inner, node.scope)
        self._in_shard_map = outside
        results = [self.value_of(inner, a) for a in jaxpr.outvars]
        if node.primitive in _BORDERS:
            body.borders.update(operands, results)
        env.update(zip(eqn.outvars, results, strict=True))

    def _scale_results(self, eqn: JaxprEqn, operands: list[int], results: list[int]) -> None:
        """Set the sizes of results outside of a shard_map, where types are global.

        XLA's partitioner decides how work after the shard_map is split. We assume that a result is split
        like its most split operand of the same rank.
        """
        sizes = self.graph.sizes
        for result, variable in zip(results, eqn.outvars if not self._in_shard_map else (), strict=False):
            shares = [
                sizes[operand] / max(primitives.aval_bytes(atom.aval), 1)
                for operand, atom in zip(operands, eqn.invars, strict=True)
                if len(getattr(atom.aval, "shape", ())) == len(getattr(variable.aval, "shape", ())) > 0
            ]
            sizes[result] = round(primitives.aval_bytes(variable.aval) * min(shares, default=1))

    def _read_inner(self, jaxpr: Jaxpr, consts: list[int], scope: Scope) -> Body:
        """The body of a loop: its constants are values of the enclosing body, the other inputs its own."""
        env = dict(zip(jaxpr.invars, consts, strict=False))
        inside = Body([self.value_of(env, v) for v in jaxpr.invars])
        return self.read_body(jaxpr, env, scope, inside)

    def _read_scan(self, node: Node) -> None:
        params = node.eqn.params
        consts, _ = scan_counts(params)
        node.bodies = [self._read_inner(params["jaxpr"].jaxpr, node.operands[:consts], node.scope)]

    def _read_while(self, node: Node) -> None:
        params, operands = node.eqn.params, node.operands
        first = params["cond_nconsts"]
        last = first + params["body_nconsts"]
        repeated = self._read_inner(params["body_jaxpr"].jaxpr, operands[first:last], node.scope)
        # The condition reads the carries of the body.
        carries = repeated.inputs[last - first :]
        condition = self._read_inner(params["cond_jaxpr"].jaxpr, operands[:first] + carries, node.scope)
        node.bodies = [condition, repeated]

    def _read_cond(self, node: Node) -> None:
        branches = [branch.jaxpr for branch in node.eqn.params["branches"]]
        node.bodies = [self._read_inner(branch, node.operands[1:], node.scope) for branch in branches]


CONTROL_FLOW = {
    "scan": _Reader._read_scan,
    "while": _Reader._read_while,
    "cond": _Reader._read_cond,
}


def _called(node: Node) -> tuple[Jaxpr, list[int]]:
    """The jaxpr that a call runs, and the operands that it reads."""
    params, operands = node.eqn.params, node.operands
    if node.primitive == "custom_linear_solve":
        # Of its four functions only the solution is computed; the others are for derivatives.
        lengths, solve = params["const_lengths"], params["jaxprs"].solve.jaxpr
        first = lengths.matvec + lengths.vecmat
        return solve, operands[first : first + lengths.solve] + operands[sum(lengths) :]
    called = [getattr(sub, "jaxpr", sub) for sub in jaxprs_in_params(params)]
    # Of `jax.lax.platform_dependent`, XLA compiles one branch. The last one may be for all other platforms.
    platforms = params.get("branches_platforms") or [None]
    jaxpr: Jaxpr = next(
        sub for sub, names in zip(called, platforms, strict=False) if "cpu" in (names or ["cpu"])
    )
    # A call can have more operands than its jaxpr has inputs, so they are matched from the end.
    return jaxpr, operands[len(operands) - len(jaxpr.invars) :]


def _cse_key(node: Node, body: int) -> Hashable:
    """Equal for equations of one body that compute the same; None for those that must not be merged."""
    if node.has_side_effects or node.primitive == "optimization_barrier":
        return None
    # The types of JAX's two kinds of psum and all_gather differ, but not the HLO that they lower to.
    name = node.primitive.removesuffix("_invariant")
    avals = tuple((aval.shape, aval.dtype) for aval in map(primitives.aval_of, node.eqn.outvars))
    params = tuple(sorted((key, value) for key, value in node.eqn.params.items() if value is not None))
    key = (body, name, tuple(node.operands), avals, params)
    try:
        hash(key)
    except TypeError:
        return None
    return key
