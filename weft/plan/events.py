"""From a jaxpr to events: local work and collectives, in order, each with its count.

The jaxpr is what will run. Dead code is removed, the body of a scan counts once per iteration, a `cond`
counts its most expensive branch, a `while` counts one iteration, and recomputation under `remat` counts
again. JAX's types list the axes along which a value varies, which shows the work that devices duplicate.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax.core import ShapedArray
from jax.extend import core as jax_core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.interpreters import partial_eval

from ..core.describe import short_dtype
from ..core.errors import PACKAGE
from ..core.mesh import Mesh
from . import primitives
from .facts import Collective, Event, UnboundedLoop, Work
from .primitives import Atom, aval_of

# The `_invariant` primitives differ only in the type of their result, which no longer varies over the axes.
COLLECTIVE_KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "permute",
}
WORK_KINDS = {"dot_general": "matmul", "conv_general_dilated": "conv"}


def eliminate_dead_code(closed: ClosedJaxpr) -> Jaxpr:
    """The jaxpr without equations that no result needs, at all levels of nesting."""
    # XLA removes the same equations, but plans are made before it runs. `instantiate` keeps unused inputs:
    # donated arguments are given by position.
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return jaxpr


def extract_events(closed: ClosedJaxpr, mesh: Mesh) -> list[Event]:
    """The work and the collectives of a closed jaxpr, in order."""
    return [traced.event for traced in trace_events(eliminate_dead_code(closed), mesh)]


def trace_events(jaxpr: Jaxpr, mesh: Mesh) -> list[TracedEvent]:
    """The events of a jaxpr without dead code, each with its name stack and the arrays it accesses."""
    return _with_phases(list(_walk(jaxpr, mesh, 1, "", "")))


def extract_collectives(closed: ClosedJaxpr, mesh: Mesh) -> list[Collective]:
    """The collectives of a closed jaxpr, in order."""
    return [e for e in extract_events(closed, mesh) if isinstance(e, Collective)]


def find_unbounded_loops(jaxpr: Jaxpr, outer: str = "", line: str = "") -> Iterator[UnboundedLoop]:
    """The while loops of a jaxpr; a `fori_loop` with known bounds is a scan."""
    for eqn in jaxpr.eqns:
        name = full_name(eqn, outer)
        if eqn.primitive.name == "while":
            yield UnboundedLoop(op_label(name), user_source(eqn) or line)
        for sub in _inner_jaxprs(eqn):
            yield from find_unbounded_loops(sub, name, user_source(eqn) or line)


@dataclass
class TracedEvent:
    """An event with its full name stack and the types of the arrays it reads and writes in memory."""

    event: Event
    name: str
    accessed: list[ShapedArray]


def _walk(jaxpr: Jaxpr, mesh: Mesh, count: int, outer: str, line: str) -> Iterator[TracedEvent]:
    """The events of a jaxpr that is nested in an equation with this name stack and source line.

    An equation without a source line gets that of the enclosing one: JAX traces functions with a custom
    derivative outside of the user's frames. A collective at the end of a program has no user frame either,
    and gets the line of the equation that computes its operand.
    """
    body = _InlinedBody(jaxpr, outer, line)
    traffic = _FusedTraffic(body, mesh)
    makers = {v: eqn for eqn, _, _ in body.eqns for v in eqn.outvars}
    for eqn, name, enclosing in body.eqns:
        primitive = eqn.primitive.name
        accessed = traffic.accessed(eqn)
        if primitive in COLLECTIVE_KINDS:
            source = user_source(eqn) or _source_of_operands(eqn, makers) or enclosing
            yield TracedEvent(_collective(eqn, mesh, count, name, source), name, accessed)
            continue
        inner, source = _inner_jaxprs(eqn), user_source(eqn) or enclosing
        # Which branch of a cond runs depends on data, so a plan can only count the most expensive one.
        if primitive == "cond":
            branches = [list(_walk(sub, mesh, count, name, source)) for sub in inner]
            yield from max(branches, key=_rough_cost)
        elif inner:
            inner_count = count * (eqn.params["length"] if primitive == "scan" else 1)
            for sub in inner:
                yield from _walk(sub, mesh, inner_count, name, source)
        else:
            flops, bytes = primitives.flops(eqn), sum(map(primitives.aval_bytes, accessed))
            if flops or bytes:
                yield TracedEvent(_work(eqn, mesh, count, name, source, flops, bytes), name, accessed)


def _inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs that run as part of an equation."""
    # A scatter's jaxpr combines two elements. It is no part of the program that fuses or allocates memory.
    if eqn.primitive.name.startswith("scatter"):
        return []
    return [getattr(sub, "jaxpr", sub) for sub in jax_core.jaxprs_in_params(eqn.params)]


class _InlinedBody:
    """The equations of a jaxpr with calls inlined, each with its name stack and the enclosing source line."""

    def __init__(self, jaxpr: Jaxpr, outer: str, line: str):
        self.eqns: list[tuple[JaxprEqn, str, str]] = []
        env: dict[Var, Atom] = {}
        self._add(jaxpr, env, outer, line)
        self.outvars = [_lookup(env, v) for v in jaxpr.outvars]

    def _add(self, jaxpr: Jaxpr, env: dict[Var, Atom], outer: str, line: str) -> None:
        for eqn in jaxpr.eqns:
            name, operands = full_name(eqn, outer), [_lookup(env, v) for v in eqn.invars]
            if eqn.primitive.name in primitives.CALLS:
                called = _inner_jaxprs(eqn)[0]
                # A call can have more operands than its jaxpr has inputs, so they are matched from the end.
                passed = operands[len(operands) - len(called.invars) :]
                inside = dict(zip(called.invars, passed, strict=True))
                self._add(called, inside, name, user_source(eqn) or line)
                env.update(zip(eqn.outvars, (_lookup(inside, v) for v in called.outvars), strict=True))
            else:
                # New variables: JAX caches jaxprs, and one that is called twice has the same ones each time.
                results = [jax_core.Var(v.aval) for v in eqn.outvars]
                env.update(zip(eqn.outvars, results, strict=True))
                renamed = eqn.replace(invars=operands, outvars=results)
                self.eqns.append((renamed, name, line))


def _lookup(env: Mapping[Var, Atom], atom: Atom) -> Atom:
    return atom if isinstance(atom, jax_core.Literal) else env.get(atom, atom)


def _variables(atoms: Iterable[Atom]) -> set[Var]:
    return {v for v in atoms if not isinstance(v, jax_core.Literal)}


class _FusedTraffic:
    """The memory traffic of equations after fusion.

    XLA fuses an elementwise chain into its last link, or into a reduction at its end. The fusion reads the
    operands of the chain and writes one result; values in between stay in registers.

    Attributes:
      materialized: the values that must be in memory.
      sources: the operands of the chain that computes a value.
    """

    def __init__(self, body: _InlinedBody, mesh: Mesh):
        self.mesh = mesh
        # A chain ends where its value must be in memory: at results, and before equations that do not fuse.
        self.materialized = _variables(body.outvars)
        for eqn, _, _ in body.eqns:
            if not self.is_fused(eqn) and eqn.primitive.name not in primitives.REDUCTIONS:
                self.materialized |= _variables(eqn.invars)
        # An alias has no memory of its own, so its operand must be in memory. Backwards, because the operand
        # may be an alias too.
        for eqn, _, _ in reversed(body.eqns):
            if self.is_free(eqn) and any(v in self.materialized for v in eqn.outvars):
                self.materialized |= _variables(eqn.invars)
        self.sources: dict[Var, frozenset[Var]] = {}

    def is_fused(self, eqn: JaxprEqn) -> bool:
        """Whether an equation is a link of an elementwise chain."""
        return eqn.primitive.name in primitives.FUSED_PRIMITIVES or is_no_op(eqn, self.mesh)

    def is_free(self, eqn: JaxprEqn) -> bool:
        """Whether an equation only renames a value."""
        return eqn.primitive.name in primitives.FREE or is_no_op(eqn, self.mesh)

    def accessed(self, eqn: JaxprEqn) -> list[ShapedArray]:
        """The types of the arrays that an equation reads and writes in memory; none inside a chain."""
        sources: frozenset[Var] = frozenset().union(
            *(self.sources.get(v, frozenset([v])) for v in _variables(eqn.invars))
        )
        if self.is_fused(eqn) and not any(v in self.materialized for v in eqn.outvars):
            self.sources |= {v: sources for v in eqn.outvars}
            return []
        return [] if self.is_free(eqn) else [aval_of(v) for v in (*sources, *eqn.outvars)]


def _rough_cost(events: list[TracedEvent]) -> float:
    """The approximate duration of events, in bytes of memory traffic, to compare the branches of a cond.

    On accelerators, sending a byte takes about as long as reading 8, and reading one as long as 150 FLOPs.
    """
    cost = 0.0
    for traced in events:
        e = traced.event
        cost += e.count * (8 * e.wire_bytes if isinstance(e, Collective) else e.bytes + e.flops / 150)
    return cost


def is_no_op(eqn: JaxprEqn, mesh: Mesh) -> bool:
    """Whether an equation is a collective over one device, or a slice of the entire array."""
    if eqn.primitive.name in COLLECTIVE_KINDS:
        return mesh.ways(_axes(eqn.params)) == 1
    if eqn.primitive.name != "dynamic_slice":
        return False
    return aval_of(eqn.invars[0]).shape == aval_of(eqn.outvars[0]).shape


def _collective(eqn: JaxprEqn, mesh: Mesh, count: int, name: str, source: str) -> Collective:
    kind, over = COLLECTIVE_KINDS[eqn.primitive.name], _axes(eqn.params)
    axes = tuple(axis for axis in mesh.names if axis in over)
    variables = eqn.outvars if kind == "all-gather" else eqn.invars
    size = sum(primitives.aval_bytes(v.aval) for v in variables)
    wire = wire_bytes(kind, size, mesh.ways(axes))
    return Collective(kind, axes, size, count, op_label(name), "", source, wire, _varying_axes(eqn.invars))


def wire_bytes(kind: str, size: int, ways: int) -> int:
    """The bytes that one device sends for a collective in a ring of `ways` devices."""
    if kind == "all-reduce":  # in a ring it is a reduce-scatter and an all-gather
        return 2 * size * (ways - 1) // ways
    return size if kind == "permute" else size * (ways - 1) // ways


def _work(eqn: JaxprEqn, mesh: Mesh, count: int, name: str, source: str, flops: int, traffic: int) -> Work:
    varies = _varying_axes(eqn.outvars)
    dtype = getattr(eqn.outvars[0].aval, "dtype", None) if eqn.outvars else None
    return Work(
        op_label(name),
        "",
        source,
        WORK_KINDS.get(eqn.primitive.name, "other"),
        short_dtype(dtype) if dtype is not None else "",
        flops,
        flops * mesh.ways(varies),
        traffic,
        count,
        varies,
    )


def _varying_axes(atoms: Iterable[Atom]) -> tuple[str, ...]:
    """The axes along which devices have different values."""
    # `mat`, the manual axis type, exists only inside a shard_map. JAX does not document it.
    avals = [aval_of(atom) for atom in atoms]
    return tuple(sorted(frozenset().union(*(aval.mat.varying for aval in avals if hasattr(aval, "mat")))))


def _axes(params: Mapping[str, Any]) -> tuple[str, ...]:
    axes = params.get("axes", params.get("axis_name"))
    return tuple(axes) if isinstance(axes, tuple | list | frozenset) else (axes,)


_OP_LABEL = re.compile(r"[a-z_0-9]+\[[^\]]*\]")


def full_name(eqn: JaxprEqn, outer: str) -> str:
    """The name stack of an equation, including that of the enclosing equation.

    JAX stores only the innermost part for equations in a scanned body.
    """
    return "/".join(part for part in (outer, str(eqn.source_info.name_stack)) if part)


def op_label(name: str) -> str:
    """The label of the innermost op in a name stack."""
    # Outside of all ops the stack has only JAX's own names, such as `jvp()`.
    labels = _OP_LABEL.findall(name)
    return labels[-1] if labels else name.rsplit("/", 1)[-1].strip("()")


def _with_phases(events: list[TracedEvent]) -> list[TracedEvent]:
    seen_backward = False
    for traced in events:
        phase = phase_of(traced.name, seen_backward)
        seen_backward |= phase == "backward"
        traced.event = replace(traced.event, phase=phase)
    return events


def phase_of(name: str, seen_backward: bool) -> str:
    """The phase of an equation, by its name stack: forward, backward or update.

    JAX marks transposed equations in the stack. Work after the backward pass that is not differentiated, and
    work inside an optimizer, is the update.
    """
    if "transpose(" in name or "gradient[" in name:
        return "backward"
    return "update" if (seen_backward or "optimizer[" in name) and "jvp(" not in name else "forward"


def _source_of_operands(eqn: JaxprEqn, makers: Mapping[Var, JaxprEqn]) -> str:
    """The first source line among the equations that compute the operands."""
    producers = (makers.get(v) for v in eqn.invars if not isinstance(v, jax_core.Literal))
    return next(filter(None, (user_source(maker) for maker in producers if maker is not None)), "")


_MODELS = f"{PACKAGE}models{os.sep}"


def user_source(eqn: JaxprEqn) -> str:
    """The user's `file:line` of an equation. Weft's own models count as user code."""
    traceback: Any = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        name = frame.file_name
        # Frames of JAX, the standard library and Weft would point to code that the user can't change.
        # Generated code has no file.
        library = f"{os.sep}site-packages{os.sep}" in name or f"{os.sep}lib{os.sep}python" in name
        if name.startswith(_MODELS):
            return f"weft/{os.path.relpath(name, PACKAGE)}:{frame.line_num}"
        if not name.startswith(PACKAGE) and not library and not name.startswith("<"):
            short = os.path.relpath(name) if os.path.isabs(name) else name
            return f"{name if short.startswith('..') else short}:{frame.line_num}"
    return ""
