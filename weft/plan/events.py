"""From a jaxpr to events: local work and collectives, in order, with trip counts.

The jaxpr is what will run: dead code is removed, scanned bodies count as often as they run, of a `cond` the
dearer branch counts, of a `while` one round, and what `remat` computes again is there twice. Types say over
which axes a value varies, and so which work is done by several devices alike.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jax.extend import core as jax_core
from jax.interpreters import partial_eval

from ..core.describe import short_dtype
from ..core.errors import PACKAGE
from ..core.mesh import Mesh
from . import primitives
from .facts import Collective, Event, UnboundedLoop, Work

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


def eliminate_dead_code(closed: Any) -> Any:
    """The jaxpr without equations that no result needs, through all its inner jaxprs."""
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return jaxpr


def extract_events(closed: Any, mesh: Mesh) -> list[Event]:
    """The work and the collectives of a closed jaxpr, in order."""
    return [e.event for e in trace_events(eliminate_dead_code(closed), mesh)]


def trace_events(jaxpr: Any, mesh: Mesh) -> list[TracedEvent]:
    """The same of a jaxpr without dead code, with what each event reads and writes."""
    return _with_phases(list(_walk(jaxpr, mesh, 1, "", "")))


def extract_collectives(closed: Any, mesh: Mesh) -> list[Collective]:
    """The collectives of a closed jaxpr, in order."""
    return [e for e in extract_events(closed, mesh) if isinstance(e, Collective)]


def find_unbounded_loops(jaxpr: Any, outer: str = "", line: str = "") -> Iterator[UnboundedLoop]:
    """The loops of a jaxpr whose number of rounds is not in it; a `fori_loop` of known bounds is a scan."""
    for eqn in jaxpr.eqns:
        name = full_name(eqn, outer)
        if eqn.primitive.name == "while":
            yield UnboundedLoop(op_label(name), user_source(eqn) or line)
        for sub in _inner(eqn):
            yield from find_unbounded_loops(sub, name, user_source(eqn) or line)


@dataclass
class TracedEvent:
    """An event, its whole name stack, and the types of what it reads and writes in memory."""

    event: Event
    name: str
    touched: list[Any]


def _walk(jaxpr: Any, mesh: Mesh, times: int, outer: str, line: str) -> Iterator[TracedEvent]:
    """The events of a jaxpr inside an equation of this whole name and line.

    What has no line has that of what is around it: JAX traces a function with a derivative of its own apart
    from the user's. A collective at a program's end has that of what it sums up or gathers.
    """
    body = _Body(jaxpr, outer, line)
    chains = _Chains(body, mesh)
    makers = {v: eqn for eqn, _, _ in body.eqns for v in eqn.outvars}
    for eqn, name, around in body.eqns:
        primitive = eqn.primitive.name
        touched = chains.touched(eqn)
        if primitive in COLLECTIVE_KINDS:
            source = user_source(eqn) or _source_of_operands(eqn, makers) or around
            yield TracedEvent(_collective(eqn, mesh, times, name, source), name, touched)
            continue
        inner, source = _inner(eqn), user_source(eqn) or around
        if primitive == "cond":
            branches = [list(_walk(sub, mesh, times, name, source)) for sub in inner]
            yield from max(branches, key=_dearness)
        elif inner:
            trips = eqn.params["length"] if primitive == "scan" else 1
            for sub in inner:
                yield from _walk(sub, mesh, times * trips, name, source)
        else:
            flops, traffic = primitives.flops(eqn), sum(map(primitives.aval_bytes, touched))
            if flops or traffic:
                yield TracedEvent(_work(eqn, mesh, times, name, source, flops, traffic), name, touched)


def _inner(eqn: Any) -> list[Any]:
    """The jaxprs inside an equation that run as it does."""
    if eqn.primitive.name.startswith("scatter"):  # how one number is added to another
        return []
    return [getattr(sub, "jaxpr", sub) for sub in jax_core.jaxprs_in_params(eqn.params)]


class _Body:
    """The equations of a jaxpr, calls inlined, each with its whole name and the line that it is inside of."""

    def __init__(self, jaxpr: Any, outer: str, line: str):
        self.eqns: list[tuple[Any, str, str]] = []
        env: dict[Any, Any] = {}
        self._add(jaxpr, env, outer, line)
        self.outvars = [_of(env, v) for v in jaxpr.outvars]

    def _add(self, jaxpr: Any, env: dict[Any, Any], outer: str, line: str) -> None:
        for eqn in jaxpr.eqns:
            name, given = full_name(eqn, outer), [_of(env, v) for v in eqn.invars]
            if eqn.primitive.name in primitives.CALLS:
                called = _inner(eqn)[0]
                inside = dict(zip(called.invars, given[len(given) - len(called.invars) :], strict=True))
                self._add(called, inside, name, user_source(eqn) or line)
                env.update(zip(eqn.outvars, (_of(inside, v) for v in called.outvars), strict=True))
            else:  # a jaxpr that is called twice has other variables each time
                env |= {v: jax_core.Var(v.aval) for v in eqn.outvars}
                made = eqn.replace(invars=given, outvars=[env[v] for v in eqn.outvars])
                self.eqns.append((made, name, line))


def _of(env: dict[Any, Any], atom: Any) -> Any:
    return atom if isinstance(atom, jax_core.Literal) else env.get(atom, atom)


def _variables(atoms: Any) -> set[Any]:
    return {v for v in atoms if not isinstance(v, jax_core.Literal)}


class _Chains:
    """Element-wise chains: XLA fuses each into its last link, or into a reduction, which reads what the chain
    begins with and writes its own result. What is between needs no memory traffic."""

    def __init__(self, body: _Body, mesh: Mesh):
        self.mesh = mesh
        self.read = _variables(body.outvars)
        for eqn, _, _ in body.eqns:
            if not self.fused(eqn) and eqn.primitive.name not in primitives.REDUCTIONS:
                self.read |= _variables(eqn.invars)
        for eqn, _, _ in reversed(body.eqns):  # what is read under another name is read
            if self.free(eqn) and any(v in self.read for v in eqn.outvars):
                self.read |= _variables(eqn.invars)
        self.sources: dict[Any, frozenset[Any]] = {}

    def fused(self, eqn: Any) -> bool:
        """Whether an equation is a link of a chain."""
        return eqn.primitive.name in primitives.FUSED_PRIMITIVES or is_no_op(eqn, self.mesh)

    def free(self, eqn: Any) -> bool:
        """Whether an equation only gives another name to what is there."""
        return eqn.primitive.name in primitives.FREE or is_no_op(eqn, self.mesh)

    def touched(self, eqn: Any) -> list[Any]:
        """The types of what an equation reads and writes in memory; nothing inside a chain."""
        begins: frozenset[Any] = frozenset().union(
            *(self.sources.get(v, frozenset([v])) for v in _variables(eqn.invars))
        )
        if self.fused(eqn) and not any(v in self.read for v in eqn.outvars):
            self.sources |= {v: begins for v in eqn.outvars}
            return []
        return [] if self.free(eqn) else [v.aval for v in (*begins, *eqn.outvars)]


def _dearness(found: list[TracedEvent]) -> float:
    """About how long events take, in bytes of memory traffic: on accelerators a byte that is sent takes about
    as long as eight that are read, and one that is read as long as 150 FLOPs."""
    return sum(
        f.event.count
        * (8 * f.event.wire_bytes if isinstance(f.event, Collective) else f.event.bytes + f.event.flops / 150)
        for f in found
    )


def is_no_op(eqn: Any, mesh: Mesh) -> bool:
    """A collective over one device, or a slice that is all there is."""
    if eqn.primitive.name in COLLECTIVE_KINDS:
        return mesh.ways(_axes(eqn.params)) == 1
    return eqn.primitive.name == "dynamic_slice" and eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape


def _collective(eqn: Any, mesh: Mesh, times: int, name: str, source: str) -> Collective:
    kind, over = COLLECTIVE_KINDS[eqn.primitive.name], _axes(eqn.params)
    axes = tuple(axis for axis in mesh.names if axis in over)
    variables = eqn.outvars if kind == "all-gather" else eqn.invars
    size = sum(primitives.aval_bytes(v.aval) for v in variables)
    wire = wire_bytes(kind, size, mesh.ways(axes))
    return Collective(kind, axes, size, times, op_label(name), "", source, wire, _varies(eqn.invars))


def wire_bytes(kind: str, size: int, ways: int) -> int:
    """What one device sends for a collective in a ring of this many devices."""
    if kind == "all-reduce":
        return 2 * size * (ways - 1) // ways
    return size if kind == "permute" else size * (ways - 1) // ways


def _work(eqn: Any, mesh: Mesh, times: int, name: str, source: str, flops: int, traffic: int) -> Work:
    varies = _varies(eqn.outvars)
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
        times,
        varies,
    )


def _varies(variables: Any) -> tuple[str, ...]:
    """The axes along which devices have different values."""
    return tuple(
        sorted(frozenset().union(*(v.aval.mat.varying for v in variables if hasattr(v.aval, "mat"))))
    )


def _axes(params: dict[str, Any]) -> tuple[str, ...]:
    axes = params.get("axes", params.get("axis_name"))
    return tuple(axes) if isinstance(axes, tuple | list | frozenset) else (axes,)  # type: ignore[return-value]


# Names, phases and source lines

_OP = re.compile(r"[a-z_0-9]+\[[^\]]*\]")


def full_name(eqn: Any, outer: str) -> str:
    """The whole name stack of an equation inside one of that name: in a scanned body it carries only its own
    part, and the name is put together on the way down."""
    return "/".join(part for part in (outer, str(eqn.source_info.name_stack)) if part)


def op_label(name: str) -> str:
    """The innermost op of the language in a name stack."""
    ops = _OP.findall(name)
    return ops[-1] if ops else name.rsplit("/", 1)[-1].strip("()")


def _with_phases(found: list[TracedEvent]) -> list[TracedEvent]:
    seen_backward = False
    for f in found:
        phase = phase_of(f.name, seen_backward)
        seen_backward |= phase == "backward"
        f.event = replace(f.event, phase=phase)
    return found


def phase_of(name: str, seen_backward: bool) -> str:
    """forward, backward, or, in an optimizer and once there was a backward pass, update."""
    if "transpose(" in name or "gradient[" in name:
        return "backward"
    return "update" if (seen_backward or "optimizer[" in name) and "jvp(" not in name else "forward"


def _source_of_operands(eqn: Any, makers: dict[Any, Any]) -> str:
    """The first line among the equations that made an equation's operands."""
    made = (makers.get(v) for v in eqn.invars if not isinstance(v, jax_core.Literal))
    return next(filter(None, (user_source(maker) for maker in made if maker is not None)), "")


_MODELS = f"{PACKAGE}models{os.sep}"


def user_source(eqn: Any) -> str:
    """The user's `file:line` of an equation; models are written in the language, and count as the user's."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        name = frame.file_name
        library = f"{os.sep}site-packages{os.sep}" in name or f"{os.sep}lib{os.sep}python" in name
        if name.startswith(_MODELS):
            return f"weft/{os.path.relpath(name, PACKAGE)}:{frame.line_num}"
        if not name.startswith(PACKAGE) and not library and not name.startswith("<"):
            short = os.path.relpath(name) if os.path.isabs(name) else name
            return f"{name if short.startswith('..') else short}:{frame.line_num}"
    return ""
