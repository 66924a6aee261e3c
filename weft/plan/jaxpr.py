"""From a jaxpr to a graph: calls are inlined, loops have bodies, and XLA's rewrites are applied.

reader = JaxprReader(mesh)
body = reader.read_body(jaxpr, env, "")
reader.sizes[value]                    # bytes on one device
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import cast

from jax.core import AbstractValue, ShapedArray
from jax.extend import core as jax_core
from jax.extend.core import Jaxpr, JaxprEqn, Var

from ..core.mesh import Mesh
from . import primitives
from .events import full_name, is_no_op, user_source
from .graph import Body, Node
from .primitives import Atom
from .rewrites import apply_xla_rewrites, required_dim_orders

# XLA compiles the program as one computation: buffers live across the borders of remat and shard_map.
INLINED_CALLS = primitives.CALLS | {"checkpoint", "remat2", "shard_map"}
Env = dict[Var, int]


class JaxprReader:
    """Reads jaxprs.

    Attributes:
      sizes, avals: the bytes on one device and the type of each value.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.sizes: list[int] = []
        self.avals: list[ShapedArray] = []
        # XLA's common subexpression elimination leaves one of several equal literals, broadcasts and
        # transposes.
        self._shared: dict[Hashable, int] = {}
        self._in_shard_map = False
        self._enclosing_source = ""  # for equations that JAX adds, which have no user's line of their own

    def new_value(self, aval: AbstractValue) -> int:
        """The id of a new value."""
        self.sizes.append(primitives.aval_bytes(aval))
        self.avals.append(cast(ShapedArray, aval))
        return len(self.sizes) - 1

    def value_of(self, env: Env, atom: Atom) -> int:
        """The id of a variable or literal; the same one each time."""
        if isinstance(atom, jax_core.Literal):
            key = str(atom), atom.aval
            if key not in self._shared:
                self._shared[key] = self.new_value(atom.aval)
            return self._shared[key]
        if atom not in env:
            env[atom] = self.new_value(atom.aval)
        return env[atom]

    def read_body(self, jaxpr: Jaxpr, env: Env, name: str) -> Body:
        """A jaxpr as a body; `env` has the ids of its inputs."""
        body = Body()
        self._read_equations(body, jaxpr, env, name)
        body.outputs = [self.value_of(env, atom) for atom in jaxpr.outvars]
        return apply_xla_rewrites(body, self.mesh.is_unsplit)

    def _node(
        self, primitive: str, operands: list[int], results: list[int], eqn: JaxprEqn, name: str, *bodies: Body
    ) -> Node:
        return Node(primitive, operands, results, eqn, name, self._enclosing_source, list(bodies))

    def _read_equations(self, body: Body, jaxpr: Jaxpr, env: Env, outer: str) -> None:
        enclosing = self._enclosing_source
        for eqn in jaxpr.eqns:
            primitive = eqn.primitive.name
            name = full_name(eqn, outer)
            nests = primitive in INLINED_CALLS or primitive in CONTROL_FLOW
            self._enclosing_source = (user_source(eqn) if nests else "") or enclosing
            operands = [self.value_of(env, atom) for atom in eqn.invars]
            if primitive in INLINED_CALLS:
                self._read_call(body, eqn, operands, env, name)
            # Aliases and no-ops need no node: the result is the operand.
            elif primitive in primitives.ALIASES or is_no_op(eqn, self.mesh):
                env.update(zip(eqn.outvars, operands, strict=False))
            elif primitive in CONTROL_FLOW:
                CONTROL_FLOW[primitive](self, body, eqn, operands, env, name)
            elif primitive == "broadcast_in_dim":  # equal ones share a node, see `_shared`
                key = (id(body), operands[0], eqn.outvars[0].aval)
                if key not in self._shared:
                    self._shared[key] = self.value_of(env, eqn.outvars[0])
                    self._scale_results(eqn, operands, [self._shared[key]])
                    body.nodes.append(self._node(primitive, operands, [self._shared[key]], eqn, name))
                env[eqn.outvars[0]] = self._shared[key]
            else:
                results = [self.value_of(env, v) for v in eqn.outvars]
                self._scale_results(eqn, operands, results)
                for position, order in enumerate(required_dim_orders(eqn)):
                    if order:
                        operands[position] = self._reordered(body, operands[position], order, eqn, name)
                body.nodes.append(self._node(primitive, operands, results, eqn, name))
        self._enclosing_source = enclosing

    def _read_call(self, body: Body, eqn: JaxprEqn, operands: list[int], env: Env, name: str) -> None:
        """Inline a call."""
        jaxpr: Jaxpr = next(getattr(sub, "jaxpr", sub) for sub in jax_core.jaxprs_in_params(eqn.params))
        inner = dict(zip(jaxpr.invars, operands[-len(jaxpr.invars) :], strict=False))
        if eqn.primitive.name == "shard_map":
            # Outside of the shard_map types are global. A device holds slices: the inputs inside.
            for variable, n in inner.items():
                self.sizes[n] = primitives.aval_bytes(variable.aval)
                self.avals[n] = primitives.aval_of(variable)
            self._in_shard_map = True
            self._read_equations(body, jaxpr, inner, name)
            self._in_shard_map = False
        else:
            self._read_equations(body, jaxpr, inner, name)
        env.update((v, self.value_of(inner, a)) for v, a in zip(eqn.outvars, jaxpr.outvars, strict=True))

    def _scale_results(self, eqn: JaxprEqn, operands: list[int], results: list[int]) -> None:
        """Set the sizes of results outside of a shard_map, where types are global.

        XLA's partitioner decides how work after the shard_map is split. We assume that a result is split
        like its most split operand of the same rank.
        """
        for result, variable in zip(results, eqn.outvars if not self._in_shard_map else (), strict=False):
            shares = [
                self.sizes[operand] / max(primitives.aval_bytes(atom.aval), 1)
                for operand, atom in zip(operands, eqn.invars, strict=True)
                if len(getattr(atom.aval, "shape", ())) == len(getattr(variable.aval, "shape", ())) > 0
            ]
            self.sizes[result] = round(primitives.aval_bytes(variable.aval) * min(shares, default=1))

    def _reordered(self, body: Body, value: int, order: list[int], eqn: JaxprEqn, name: str) -> int:
        """A value with its dims in this order: a copy, or an alias if the order does not change."""
        key = (id(body), value, *order)
        if key not in self._shared:
            primitive = "bitcast" if order == sorted(order) else "transpose"
            self._shared[key] = self.new_value(self.avals[value])
            body.nodes.append(self._node(primitive, [value], [self._shared[key]], eqn, name))
        return self._shared[key]

    def _read_scan(self, body: Body, eqn: JaxprEqn, operands: list[int], env: Env, name: str) -> None:
        """A scan: slices of the scanned arrays, the body, and results that are written into zeros.

        The zeros are operands of the loop, as carries are: XLA updates both in place.
        """
        jaxpr, first = eqn.params["jaxpr"].jaxpr, eqn.params["num_consts"]
        last = first + eqn.params["num_carry"]
        inner, inside = dict(zip(jaxpr.invars[:first], operands[:first], strict=True)), Body()
        for variable, n in zip(jaxpr.invars[last:], operands[last:], strict=True):
            inside.nodes.append(self._node("dynamic_slice", [n], [self.value_of(inner, variable)], eqn, name))
        carries = [self.value_of(inner, v) for v in jaxpr.invars[first:last]]
        self._read_equations(inside, jaxpr, inner, name)
        results = [self.value_of(inner, atom) for atom in jaxpr.outvars]
        inside.aliases = list(zip(carries, results[: len(carries)], strict=True))
        for n in results[len(carries) :]:
            inside.nodes.append(self._node("dynamic_update_slice", [n], [], eqn, name))
        stacks = [self.new_value(v.aval) for v in eqn.outvars[len(carries) :]]
        body.nodes += [self._node("zeros", [], [n], eqn, name) for n in stacks]
        outputs = [self.value_of(env, v) for v in eqn.outvars]
        # `buffers` pairs results with the operands whose memory they take over, by position.
        operands = [*operands[first:last], *stacks, *operands[:first], *operands[last:]]
        inside = apply_xla_rewrites(inside, self.mesh.is_unsplit)
        body.nodes.append(self._node("scan", operands, outputs, eqn, name, inside))

    def _read_while(self, body: Body, eqn: JaxprEqn, operands: list[int], env: Env, name: str) -> None:
        """A while loop: each iteration updates the carries in place."""
        test, repeated = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
        first = eqn.params["cond_nconsts"]
        last = first + eqn.params["body_nconsts"]
        inner = dict(zip(repeated.invars, operands[first:last], strict=False))
        carries = [self.value_of(inner, v) for v in repeated.invars[last - first :]]
        condition_env = dict(zip(test.invars, operands[:first] + carries, strict=True))
        condition = self.read_body(test, condition_env, name)
        inside = self.read_body(repeated, inner, name)
        inside.aliases, inside.outputs = list(zip(carries, inside.outputs, strict=True)), []
        results = [self.value_of(env, v) for v in eqn.outvars]
        operands = operands[last:] + operands[:last]  # carries first, as in `_read_scan`
        body.nodes.append(self._node("while", operands, results, eqn, name, condition, inside))

    def _read_cond(self, body: Body, eqn: JaxprEqn, operands: list[int], env: Env, name: str) -> None:
        """A cond: its branches in sequence, so that buffers of different branches can share memory."""
        jaxprs = [branch.jaxpr for branch in eqn.params["branches"]]
        bodies = [self.read_body(j, dict(zip(j.invars, operands[1:], strict=True)), name) for j in jaxprs]
        results = [self.value_of(env, v) for v in eqn.outvars]
        body.nodes.append(self._node("cond", operands, results, eqn, name, *bodies))


CONTROL_FLOW = {
    "scan": JaxprReader._read_scan,
    "while": JaxprReader._read_while,
    "cond": JaxprReader._read_cond,
}
