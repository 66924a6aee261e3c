"""The search: candidates in the order of their bounds, planned until no bound is below the best.

    found = search(step, args, devices=512, hardware="tpu-v2")
    found.best.layout

What is reported of a candidate is `plan`'s answer for it. Bounds only say which plans need not be made.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import LayoutError, MeshError, WeftError, nearest
from ..layout import Layout
from ..mesh import Mesh
from ..plan.hardware import Hardware
from ..plan.plan import Plan
from ..plan.time import Time
from .bound import Bound, divided, shares
from .facts import facts_of, planned
from .space import Candidate, factorisations, independent

OBJECTIVES = ("time", "memory")


@dataclass(frozen=True)
class Ranked:
    """A candidate that was planned.

    Attributes:
      candidate: it.
      plan: its plan.
      time: the plan's time on the machine.
      bound: what it could not be below: seconds, or bytes if memory is to be least.
    """

    candidate: Candidate
    plan: Plan
    time: Time
    bound: float

    @property
    def mesh(self) -> Mesh:
        return self.candidate.mesh

    @property
    def layout(self) -> Layout:
        return self.candidate.layout

    @property
    def seconds(self) -> float:
        """Of one call."""
        return self.time.overlapped_seconds

    @property
    def bytes(self) -> int:
        """At most, on one device."""
        return self.plan.memory.peak


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
      ranked: all that was planned and fits, best first.
      too_large: planned, and too large for the memory.
      legal: how many candidates there were.
      refused: how many of them could not be lowered.
      by_memory: how many were ruled out because they can't fit.
      by_bound: how many because they could not be better than the best.
      tried: how many groups of dims were tried on one axis, for the bounds.
    """

    ranked: tuple[Ranked, ...]
    too_large: tuple[Ranked, ...]
    legal: int
    refused: int
    by_memory: int
    by_bound: int
    tried: int

    @property
    def best(self) -> Ranked | None:
        return self.ranked[0] if self.ranked else None


def search(
    fn: Any,
    args: Sequence[Any] = (),
    *,
    devices: int,
    hardware: Any,
    memory: int | None = None,
    axes: int = 2,
    objective: str = "time",
    variants: Mapping[str, tuple[Any, Sequence[Any]]] | None = None,
) -> Found:
    """The mesh and the layout with the least predicted time, or memory.

    Args:
      fn: a function of tensors, or a program of one, whose mesh and layout don't matter.
      args: its arguments, tensors or `wf.spec(dims)`.
      devices: how many there are.
      hardware: a profile's name, a TOML file's path, or `Hardware`.
      memory: bytes that a device may use; by default all that the hardware has.
      axes: how many axes a mesh may have.
      objective: what is to be least, "time" or "memory".
      variants: further functions with their arguments, by name: other remat policies, micro-batches.
    """
    _check(devices, axes, objective)
    machine = Hardware.of(hardware)
    cap = machine.memory_bytes if memory is None else memory
    programs = {"": (fn, args), **(variants or {})}
    spaces = {
        name: _Space(name, fn, tuple(args), devices, axes, machine) for name, (fn, args) in programs.items()
    }
    return _run(spaces, machine, cap, objective)


def _check(devices: int, axes: int, objective: str) -> None:
    asked = f"search(devices={devices}, axes={axes}, objective={objective!r})"
    if devices < 1 or axes < 1:
        raise MeshError(
            f"a mesh of {devices} devices with at most {axes} axes",
            rule="a mesh has at least one device, and a search at least one axis to put them on",
            hint="devices=8, axes=2",
        ).located(asked)
    if objective not in OBJECTIVES:
        raise LayoutError(
            f"no such objective: {objective}{nearest(objective, OBJECTIVES)}",
            rule=f"what is to be least is one of {', '.join(OBJECTIVES)}",
            hint='objective="time"',
        ).located(asked)


class _Space:
    """The candidates of one function, with their bounds."""

    def __init__(
        self, name: str, fn: Any, args: tuple[Any, ...], devices: int, axes: int, hardware: Hardware
    ):
        self.name, self.fn, self.args = name, fn, args
        self.facts = facts_of(fn, args)
        self.bound = Bound(self.facts, hardware, devices)
        names = [dim for dim, size in self.facts.dims.items() if size > 1]
        self.groups = independent(names, self.facts.meetings.get("value", ()))
        self.meshes = factorisations(devices, axes)
        work, held = self.bound.work, self.facts.bytes()
        self.seconds = np.array(list(work.values()))
        self.bytes = np.array([size for _, size in held], float)
        self.of_work = shares([dims for _, dims in work], self.groups)
        self.of_held = shares([dims for dims, _ in held], self.groups)

    def bounded(self) -> Iterator[tuple[float, float, Candidate]]:
        """Bounds of the seconds and of the bytes of each candidate."""
        for sizes in self.meshes:
            seconds, bytes = (
                divided(amounts, hits, sizes)
                for amounts, hits in ((self.seconds, self.of_work), (self.bytes, self.of_held))
            )
            for place in np.ndindex(seconds.shape):
                groups = tuple(self.groups[n] for n in place)
                yield float(seconds[place]), float(bytes[place]), Candidate(sizes, groups, self.name)


def _run(spaces: Mapping[str, _Space], hardware: Hardware, cap: int, objective: str) -> Found:
    order = itertools.count()  # of equal bounds, the simpler candidate first
    every = sorted(
        (one for space in spaces.values() for one in space.bounded()),
        key=lambda one: sum(map(len, one[2].groups)),
    )
    fitting = [one for one in every if one[1] <= cap]
    by_time = objective == "time"
    waiting = [(one[0] if by_time else one[1], next(order), not by_time, one[2]) for one in fitting]
    heapq.heapify(waiting)
    ranked: list[Ranked] = []
    too_large: list[Ranked] = []
    refused, best = 0, float("inf")

    def value(one: Ranked) -> float:
        return one.seconds if by_time else float(one.bytes)

    while waiting and waiting[0][0] < best:
        bound, number, is_tight, candidate = heapq.heappop(waiting)
        space = spaces[candidate.variant]
        if not is_tight:
            heapq.heappush(waiting, (space.bound.seconds(candidate), number, True, candidate))
            continue
        plan = planned(space.fn, space.args, candidate.mesh, candidate.layout)
        if isinstance(plan, WeftError):
            refused += 1
            continue
        one = Ranked(candidate, plan, plan.time(hardware), bound)
        if one.bytes > cap:
            too_large.append(one)
            continue
        ranked.append(one)
        best = min(best, value(one))
    ranked.sort(key=value)
    return Found(
        tuple(ranked),
        tuple(too_large),
        len(every),
        refused,
        len(every) - len(fitting),
        len(waiting),
        sum(space.bound.tried for space in spaces.values()),
    )
