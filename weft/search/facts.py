"""What one trace on one device tells of a program under every layout."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from ..errors import WeftError
from ..layout import Layout
from ..mesh import Mesh
from ..plan.hardware import Hardware
from ..plan.plan import Plan
from ..plan.time import main_dtype, work_seconds
from ..spmd import Program
from .space import Group

_DIMS, _NAME = re.compile(r"\[([^\]]*)\]"), re.compile(r"[A-Za-z_][\w.']*")


@dataclass(frozen=True)
class Facts:
    """A program, seen once.

    Attributes:
      program: what was traced, on one device.
      args: for what.
      plan: of one device.
      dims: the names of all dims, and the size of the largest of each name.
      meetings: by role, the dims that one tensor or op has.
      hidden: dims that a vmap hides from the names of ops.
    """

    program: Program
    args: tuple[Any, ...]
    plan: Plan
    dims: dict[str, int]
    meetings: dict[str, set[Group]]
    hidden: Group

    def seconds(self, hardware: Hardware) -> dict[tuple[str, Group], float]:
        """The seconds of all work on one device, by phase, and by the dims that may share it out.

        On several devices each op does at least its part of it: no op can be cut along a dim that it lacks.
        """
        dtype, total = main_dtype(self.plan), defaultdict[tuple[str, Group], float](float)
        for work in self.plan.work:
            compute, memory = work_seconds(work, hardware, dtype)
            seconds = compute + memory if hardware.shared_cores else max(compute, memory)
            total[work.phase, op_dims(work.op, self)] += seconds * work.count
        return dict(total)

    def bytes(self) -> list[tuple[Group, int]]:
        """The dims and the bytes, on one device, of all that goes in."""
        inputs = [one for one in self.plan.stored if one.kind == "input"]
        return [(frozenset(name for name, _, _ in one.dims), one.bytes) for one in inputs]


def op_dims(op: str, facts: Facts) -> Group:
    """The dims of an op by its name, `einsum[batch,io · io,hidden → batch,hidden]`; all if it has none."""
    named, every = _DIMS.search(op), frozenset(facts.dims)
    found = frozenset(_NAME.findall(named[1])) if named is not None else every
    return (found | facts.hidden) & every if found <= every else every


def facts_of(fn: Any, args: tuple[Any, ...]) -> Facts:
    """Trace a function once, on one device.

    Args:
      fn: a function of tensors, or a program of one, whose mesh and layout don't matter.
      args: its arguments: tensors, or `wf.spec(dims)`.
    """
    program = on(fn, Mesh(), Layout())
    plan = program.plan(*args)
    staged, _ = program._prepare(args, {})
    context = staged.call.last["context"]
    meetings: dict[str, set[Group]] = defaultdict(set)
    sizes: dict[str, int] = {}
    for role, dims in context.meetings:
        meetings[role].add(frozenset(d.name for d in dims))
        for d in dims:
            sizes[d.name] = max(d.size, sizes.get(d.name, 0))
    for one in plan.stored:
        meetings[one.role].add(frozenset(name for name, _, _ in one.dims))
        for name, size, _ in one.dims:
            sizes[name] = max(size, sizes.get(name, 0))
    dims, hidden = dict(sorted(sizes.items())), frozenset(context.hidden)
    return Facts(program, tuple(args), plan, dims, dict(meetings), hidden)


def on(fn: Any, mesh: Mesh, layout: Layout) -> Program:
    """A function, or what a program is made of, as a program of a mesh and a layout."""
    if isinstance(fn, Program):
        return Program(fn.fn, mesh, layout, static=fn.static, donate=fn.donate)
    return Program(fn, mesh, layout)


def planned(fn: Any, args: tuple[Any, ...], mesh: Mesh, layout: Layout) -> Plan | WeftError:
    """The plan for a mesh and a layout, or why there is none."""
    try:
        return on(fn, mesh, layout).plan(*args)
    except WeftError as error:
        return error
