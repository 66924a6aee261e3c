"""The search: candidates in the order of their bounds, planned until no bound is below the best.

    found = search(step, args, devices=512, hardware="tpu-v2")
    found.best.layout

What is reported of a candidate is `plan`'s answer for it. Bounds only say which plans need not be made.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import LayoutError, MeshError, WeftError, nearest
from ..layout import Layout
from ..mesh import Mesh
from ..plan.hardware import Hardware
from ..plan.plan import Plan
from ..plan.time import Time
from .bound import Bound
from .facts import facts_of
from .opened import on
from .space import LEVELS, Candidate, Sizes, factorisations, independent

OBJECTIVES = ("time", "memory")
BATCH = 4096  # candidates of a mesh that are put in order at a time


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
      hardware: the machine.
      devices: how many there are.
      cap: bytes that a device may use.
      legal: how many candidates there were.
      refused: how many of them could not be lowered.
      by_memory: how many were ruled out because they can't fit.
      by_bound: how many because they could not be better than the best.
    """

    ranked: tuple[Ranked, ...]
    too_large: tuple[Ranked, ...]
    hardware: Hardware
    devices: int
    cap: int
    legal: int
    refused: int
    by_memory: int
    by_bound: int

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
    top: int = 1,
    progress: Callable[[int, int, Ranked | None], None] | None = None,
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
      top: how many of the best are to be found for certain.
      progress: is called after each plan with the number of plans, of candidates left, and the best yet.
    """
    _check(devices, axes, objective, top)
    machine = Hardware.of(hardware)
    cap = machine.memory_bytes if memory is None else memory
    programs = {"": (fn, args), **(variants or {})}
    spaces = {
        name: _Space(name, fn, tuple(args), devices, axes, machine) for name, (fn, args) in programs.items()
    }
    return _run(spaces, machine, devices, cap, objective, top, progress)


def _check(devices: int, axes: int, objective: str, top: int) -> None:
    asked = f"search(devices={devices}, axes={axes}, objective={objective!r})"
    if devices < 1 or not 1 <= axes <= 3 or top < 1:
        raise MeshError(
            f"a mesh of {devices} devices with at most {axes} axes, the best {top}",
            rule="a mesh has at least one device, and a search 1 to 3 axes and at least one result",
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
        facts = facts_of(fn, args)
        self.groups = independent(facts.searched, facts.meetings)
        self.bound = Bound(facts, hardware, devices, self.groups)
        self.meshes = factorisations(devices, axes)

    def planned(self, candidate: Candidate) -> Plan | WeftError:
        """The plan of a candidate, or why there is none."""
        try:
            return on(self.fn, candidate.mesh, candidate.layout).plan(*self.args)
        except WeftError as error:
            return error

    def is_own(self, sizes: Sizes, level: str) -> np.ndarray:
        """Which candidates of a mesh are not the same as others of fewer axes, or with less in pieces."""
        shape = [len(self.groups)] * len(sizes)
        places = np.indices(shape)
        own = np.ones(shape, bool)
        for one, two in itertools.pairwise(places):
            own &= (one != two) | (one == 0)
        if level:
            own &= level.rstrip("s") in {one.role for one in self.bound.state}
            more = [[bool(self.bound.further(g, n)) for g in self.groups] for n in sizes]
            further = [np.array(one)[place] for one, place in zip(more, places, strict=True)]
            own &= np.any(further, axis=0) if further else False
        return own

    def candidate(self, sizes: Sizes, level: str, place: tuple[int, ...]) -> Candidate:
        groups = tuple(self.groups[n] for n in place)
        both = zip(groups, sizes, strict=True)
        further = tuple(self.bound.further(group, n) for group, n in both) if level else ()
        return Candidate(sizes, groups, level, further, self.name)


@dataclass
class _Counts:
    legal: int = 0
    by_memory: int = 0


def _in_order(
    space: _Space, sizes: Sizes, level: str, cap: int, by_time: bool, counts: _Counts
) -> Iterator[tuple[float, int, Candidate]]:
    """The candidates of a mesh, those with the least bounds first, of equal ones the simplest."""
    stored = space.bound.stored(sizes, level)
    values = space.bound.seconds(sizes, level) if by_time else stored
    own = space.is_own(sizes, level)
    fits = own & (stored <= cap)
    counts.legal += int(own.sum())
    counts.by_memory += int(own.sum() - fits.sum())
    left = np.flatnonzero(fits)
    values = values.ravel()[left]
    del stored, own, fits
    while len(left):
        if len(left) > BATCH:
            chosen = np.argpartition(values, BATCH)
            now, rest = chosen[:BATCH], chosen[BATCH:]
        else:
            now, rest = np.arange(len(left)), np.arange(0)
        now = now[np.argsort(values[now], kind="stable")]
        for value, flat in zip(values[now], left[now], strict=True):
            place = np.unravel_index(flat, [len(space.groups)] * len(sizes)) if sizes else ()
            candidate = space.candidate(sizes, level, tuple(map(int, place)))
            yield float(value), sum(map(len, candidate.groups)), candidate
        left, values = left[rest], values[rest]


def _run(
    spaces: Mapping[str, _Space],
    hardware: Hardware,
    devices: int,
    cap: int,
    objective: str,
    top: int,
    progress: Any,
) -> Found:
    by_time, counts = objective == "time", _Counts()
    queues = []
    for space in spaces.values():
        for sizes in space.meshes:
            queues += [_in_order(space, sizes, level, cap, by_time, counts) for level in LEVELS]
    order = itertools.count()
    waiting: list[tuple[float, int, int, Candidate, Any]] = []

    def push(queue: Any) -> None:
        for value, simple, candidate in itertools.islice(queue, 1):
            heapq.heappush(waiting, (value, simple, next(order), candidate, queue))

    for queue in queues:
        push(queue)
    ranked: list[Ranked] = []
    too_large: list[Ranked] = []
    refused = seen = 0

    def value(one: Ranked) -> float:
        return one.seconds if by_time else float(one.bytes)

    def enough() -> bool:
        return len(ranked) >= top and waiting[0][0] >= value(ranked[top - 1])

    while waiting and not enough():
        bound, simple, _, candidate, queue = heapq.heappop(waiting)
        space = spaces[candidate.variant]
        if queue is not None:  # a first, loose bound: look closer
            push(queue)
            seen += 1
            bytes = space.bound.bytes(candidate)
            if bytes > cap:
                counts.by_memory += 1
                continue
            tight = max(bound, space.bound.tight(candidate) if by_time else bytes)
            heapq.heappush(waiting, (tight, simple, next(order), candidate, None))
            continue
        plan = space.planned(candidate)
        if isinstance(plan, WeftError):
            refused += 1
            continue
        one = Ranked(candidate, plan, plan.time(hardware), bound)
        (ranked if one.bytes <= cap else too_large).append(one)
        ranked.sort(key=value)
        if progress is not None:
            progress(len(ranked) + len(too_large), len(waiting), ranked[0] if ranked else None)
    planned = len(ranked) + len(too_large) + refused
    return Found(
        tuple(ranked),
        tuple(too_large),
        hardware,
        devices,
        cap,
        counts.legal,
        refused,
        counts.by_memory,
        counts.legal - counts.by_memory - planned,
    )
