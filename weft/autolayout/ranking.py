"""The search: candidates in the order of their bounds, planned until no bound is below the best.

    found = search(step, args, devices=512, hardware="tpu-v2")
    found.best.layout

What is reported of a candidate is `plan`'s answer for it. Bounds only say which plans need not be made.
"""

from __future__ import annotations

import heapq
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.errors import DimError, LayoutError, MeshError, WeftError, nearest
from ..core.layout import Layout
from ..core.mesh import Mesh
from ..hardware.profile import Hardware
from ..plan.arguments import check_args_is_tuple
from ..plan.plan import Plan
from ..plan.time import Time
from .bound import SLACK, LowerBound
from .cost_atoms import FEW_DIMS, trace_cost_atoms
from .space import (
    STORAGE_LEVELS,
    Candidate,
    DimGroup,
    MeshShape,
    StorageLevels,
    axis_orders,
    independent_groups,
    mesh_shapes,
)
from .universal_trace import program_on

OBJECTIVES = ("time", "memory")
CANDIDATE_BATCH = 4096  # candidates of a mesh that are put in order at a time
MAX_CANDIDATES = 1 << 24  # candidates of a mesh whose bounds are held at once
FRONT_STEP = 0.8  # from one point of the front to the next, in memory
# Bounds are up to a quarter too high where the plan of a layout fuses or hides what the opened program's does
# not. Programs of few dims are planned fast, so all of their candidates within this of the best are planned.
BOUND_MARGIN = 1.3


@dataclass(frozen=True)
class RankedLayout:
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
class SearchResult:
    """What a search found.

    Attributes:
      ranked: all that was planned and fits, best first.
      too_large: planned, and too large for the memory.
      front: those of which none is both faster and smaller, the fastest first, if asked for.
      nearest: if nothing fits, what needs the least memory.
      hardware: the machine.
      devices: how many there are.
      cap: bytes that a device may use.
      objective: what is least, "time" or "memory".
      legal: how many candidates there were.
      refused: how many of them could not be lowered.
      by_memory: how many were ruled out because they can't fit.
      by_bound: how many because they could not be better than the best.
      left_out: dims that were not searched: of no weight, looped along, whole in some op, or not asked for.
    """

    ranked: tuple[RankedLayout, ...]
    too_large: tuple[RankedLayout, ...]
    front: tuple[RankedLayout, ...]
    nearest: RankedLayout | None
    hardware: Hardware
    devices: int
    cap: int
    objective: str
    legal: int
    refused: int
    by_memory: int
    by_bound: int
    left_out: tuple[str, ...]

    @property
    def best(self) -> RankedLayout | None:
        return self.ranked[0] if self.ranked else None

    def __repr__(self) -> str:
        best = f'"{self.best.mesh}" with {self.best.layout!r}' if self.best else "nothing fits"
        return f"<search of {self.legal} candidates on {self.devices} × {self.hardware.name}: {best}>"

    def __str__(self) -> str:
        return self.explain()

    def explain(self, compare: RankedLayout | None = None, rows: int = 10) -> str:
        """What was found as text: the best, a table, and why it is better than another."""
        from .report import explain

        return explain(self, compare, rows)

    def to_data(self, compare: RankedLayout | None = None) -> dict[str, Any]:
        """What was found as JSON's kinds of things."""
        from .report import result_to_data

        return result_to_data(self, compare)

    def to_html(self, compare: RankedLayout | None = None) -> str:
        """What was found as one self-contained page: time against memory, and the table."""
        from .page import search_page

        return search_page(self, compare)


def search(
    fn: Any,
    args: Sequence[Any] = (),
    *,
    devices: int | None = None,
    hardware: Any,
    mesh: Any = None,
    memory: int | None = None,
    axes: int = 2,
    dims: Any = None,
    stored: bool = True,
    objective: str = "time",
    variants: Mapping[str, tuple[Any, ...]] | None = None,
    top: int = 1,
    front: bool = False,
    progress: Callable[[int, RankedLayout | None], None] | None = None,
) -> SearchResult:
    """The mesh and the layout with the least predicted time, or memory.

    Args:
      fn: a function of tensors, or a program of one, whose mesh and layout don't matter.
      args: its arguments, tensors or `wf.spec(dims)`.
      devices: how many there are; all meshes of so many are tried.
      hardware: a profile's name, a TOML file's path, or `HardwareCommand`.
      mesh: the only mesh to try, in place of `devices`.
      memory: bytes that a device may use; by default all that the hardware has.
      axes: how many axes a mesh may have, 1 to 3.
      dims: the only dims to try to split, or their names; by default all, but in programs of more than 8 dims
        only those of weight that no loop runs along.
      stored: whether to try storing parameters and optimizer state in further pieces (ZeRO).
      objective: what is to be least, "time" or "memory".
      variants: further functions with their arguments, by name: other remat policies, micro-batches. A third
        thing names a dim: then only layouts that split it are tried, as others are the same without.
      top: how many of the best are to be found for certain.
      front: whether to find also what is fastest with less and less memory.
      progress: is called after each plan with the number of plans, and the best yet.

    >>> import weft as wf
    >>> args = wf.spec("batch=4096 d=256"), wf.spec("d=256")
    >>> found = wf.search(lambda x, w: wf.einsum(x, w, out="batch"), args, devices=4, hardware="h100")
    >>> found.best.mesh, found.best.layout
    (Mesh("data=4"), Layout("batch:data"))
    """
    if dims is not None:
        dims = dims.split() if isinstance(dims, str) else [getattr(d, "name", d) for d in dims]
    given = Mesh.of(mesh) if mesh is not None else None
    if given is not None and devices is None:
        devices = given.size
    _check(devices, given, memory, axes, objective, top)
    assert devices is not None
    machine = Hardware.of(hardware)
    cap = machine.memory_bytes if memory is None else memory
    programs = {"": (fn, args), **(variants or {})}
    for _, given_args, *_ in programs.values():
        check_args_is_tuple(given_args, "search", 'wf.search(fn, (x,), devices=8, hardware="h100")')
    spaces = {
        name: CandidateSpace(name, fn, tuple(args), devices, axes, machine, given, dims, *needed)
        for name, (fn, args, *needed) in programs.items()
    }
    if dims is not None:
        _check_dims(dims, spaces.values())
    run = _Run(spaces, machine, devices, stored, objective, top, progress)
    found = run.best(cap)
    if not found.ranked:
        smallest = replace(run, objective="memory", top=1).best(sys.maxsize)
        return replace(found, nearest=smallest.best)
    return replace(found, front=tuple(run.front(found))) if front else found


def _check(
    devices: int | None, mesh: Mesh | None, memory: int | None, axes: int, objective: str, top: int
) -> None:
    said = f'mesh="{mesh}"' if mesh is not None else f"devices={devices}"
    asked = f"search({said}, axes={axes}, objective={objective!r}, top={top})"
    for name, value, most, hint in (
        ("devices", devices, None, "devices=8, or mesh='data=4 model=2'"),
        ("axes", axes, 3, "axes=2"),
        ("top", top, None, "top=1"),
        ("memory", 1 if memory is None else memory, None, "memory=8 * 2**30, or leave it out"),
    ):
        if not isinstance(value, int | np.integer) or value < 1 or (most and value > most):
            raise MeshError(
                f"{name}={value!r}",
                rule=f"{name} is a whole number, {f'1 to {most}' if most else 'at least 1'}",
                hint=hint,
            ).located(asked)
    if mesh is not None and devices != mesh.size:
        raise MeshError(
            f'mesh "{mesh}" has {mesh.size} devices, and devices={devices}',
            rule="a search has one mesh, or tries all meshes of so many devices",
            hint=f"leave one of them out, or devices={mesh.size}",
        ).located(asked)
    if objective not in OBJECTIVES:
        raise LayoutError(
            f"no such objective: {objective}{nearest(objective, OBJECTIVES)}",
            rule=f"what is to be least is one of {', '.join(OBJECTIVES)}",
            hint='objective="time"',
        ).located(asked)


def _check_dims(dims: Sequence[str], spaces: Iterable[CandidateSpace]) -> None:
    known = sorted({dim for space in spaces for dim in space.facts.dims})
    for dim in dims:
        if dim not in known:
            raise DimError(
                f"the program has no dim {dim} to split{nearest(dim, known)}",
                f"dims that can be split: {', '.join(known) or 'none'}",
                rule="the dims of a search occur in the program, with more than one place",
                hint="correct the name, or leave it out",
            ).located(f"search(dims={list(dims)})")


class CandidateSpace:
    """The candidates of one function, with their bounds and the plans that were made.

    Args:
      name: of the variant.
      fn, args: as of `search`.
      devices, axes: for all meshes of so many.
      hardware: the machine.
      mesh: the only mesh, if it is given.
      dims: the only dims, if they are given.
      needed: a dim that has to be split.
    """

    def __init__(
        self,
        name: str,
        fn: Any,
        args: tuple[Any, ...],
        devices: int,
        axes: int,
        hardware: Hardware,
        mesh: Mesh | None = None,
        dims: Sequence[str] | None = None,
        needed: str = "",
    ):
        self.name, self.fn, self.args, self.needed = name, fn, args, needed
        self.facts = trace_cost_atoms(fn, args)
        self.dims = self.facts.searched if dims is None else [d for d in self.facts.dims if d in dims]
        count = axes if mesh is None else len(mesh.axes)
        self.groups = independent_groups(
            self.dims, self.facts.meetings, int(MAX_CANDIDATES ** (1 / max(count, 1)))
        )
        self.bound = LowerBound(self.facts, hardware, devices, self.groups)
        self.meshes = mesh_shapes(devices, axes)
        self.axes: tuple[str, ...] = ()
        if mesh is not None:
            cut = [(axis, size) for axis, size in mesh.axes if size > 1]
            self.meshes = [tuple(size for _, size in cut)]
            self.axes = tuple(axis for axis, _ in cut)
        self.plans: dict[Candidate, Plan | WeftError] = {}

    @property
    def left_out(self) -> set[str]:
        """The dims that are not searched."""
        return {*self.facts.dims, *self.facts.unsplittable} - {*self.dims}

    def planned(self, candidate: Candidate) -> Plan | WeftError:
        """The plan of a candidate, or why there is none."""
        if candidate not in self.plans:
            try:
                plan = program_on(self.fn, candidate.mesh, candidate.layout).plan(*self.args)
                self.plans[candidate] = plan
            except WeftError as error:
                self.plans[candidate] = error
        return self.plans[candidate]

    def levels(self, sizes: MeshShape, stored: bool) -> Iterator[StorageLevels]:
        """What may be stored in further pieces, for the axes of a mesh."""
        roles = {one.role for one in self.bound.state} if stored else set()
        some = [level for level in STORAGE_LEVELS if not level or level.rstrip("s") in roles]
        return itertools.product(some, repeat=len(sizes))

    def is_own(self, sizes: MeshShape, levels: StorageLevels) -> np.ndarray:
        """Which candidates of a mesh are not the same as others of fewer axes, or with less in pieces."""
        shape = [len(self.groups)] * len(sizes)
        places = np.indices(shape)
        own = np.ones(shape, bool)
        for n in range(1, len(sizes)) if not self.axes else ():
            if levels[n - 1] == levels[n]:
                is_one = self._is_one_axis(sizes[n - 1], sizes[n], levels[n])
                own &= (places[n - 1] != places[n]) | ~is_one[places[n]]
        if self.needed:
            splits = np.array([self.needed in group for group in self.groups])
            own &= np.any([splits[place] for place in places], axis=0) if sizes else False
        for size, level, place in zip(sizes, levels, places, strict=True):
            if level:
                own &= np.array([bool(self.bound.further(group, size)) for group in self.groups])[place]
        return own

    def _is_one_axis(self, one: int, two: int, level: str) -> np.ndarray:
        """Which groups are laid out alike on two neighbouring axes and on one in place of both.

        Not those that leave other pieces of state to store there.
        """
        if not level:
            return np.ones(len(self.groups), bool)
        of = self.bound.further
        return np.array([of(g, one) == of(g, two) == of(g, one * two) for g in self.groups])

    def orders(self, sizes: MeshShape) -> np.ndarray:
        """How many orders of their dims' axes the candidates of a mesh have."""
        places = np.indices([len(self.groups)] * len(sizes))
        found = np.ones(places.shape[1:], int)
        ways = np.array([math.factorial(n) for n in range(len(sizes) + 1)])
        for family in self.facts.families if len(sizes) > 1 else ():
            has = {dim: np.array([dim in group for group in self.groups])[places] for dim in family}
            for dim, axes in has.items():
                shared = np.any([axes & other for kin, other in has.items() if kin != dim], axis=(0, 1))
                found *= np.where(shared, ways[axes.sum(axis=0)], 1)
        return found

    def candidates(
        self, sizes: MeshShape, levels: StorageLevels, place: tuple[int, ...]
    ) -> Iterator[Candidate]:
        """The candidates with these groups on their axes: one for each order that may matter."""
        groups = tuple(self.groups[n] for n in place)
        all_ = zip(groups, sizes, levels, strict=True)
        further = tuple(self.bound.further(group, n) if level else DimGroup() for group, n, level in all_)
        for order in axis_orders(groups, self.facts.families):
            yield Candidate(sizes, groups, levels, further, order, self.name, self.axes)


@dataclass
class _Counts:
    legal: int = 0
    by_memory: int = 0


def _in_order(
    space: CandidateSpace, sizes: MeshShape, levels: StorageLevels, cap: int, by_time: bool, counts: _Counts
) -> Iterator[tuple[float, Candidate]]:
    """The candidates of a mesh, those with the least bounds first."""
    own = space.is_own(sizes, levels)
    if not own.any():
        return
    stored = space.bound.stored(sizes, levels)
    bounds = space.bound.seconds(sizes, levels) if by_time else stored
    fits = own & (stored <= cap)
    orders = space.orders(sizes)
    counts.legal += int(orders[own].sum())
    counts.by_memory += int(orders[own & ~fits].sum())
    left = np.flatnonzero(fits)
    bounds = bounds.ravel()[left]
    while len(left):
        first = np.argpartition(bounds, min(CANDIDATE_BATCH, len(left) - 1))[:CANDIDATE_BATCH]
        first = first[np.argsort(bounds[first], kind="stable")]
        for bound, flat in zip(bounds[first], left[first], strict=True):
            place = np.unravel_index(flat, [len(space.groups)] * len(sizes)) if sizes else ()
            for candidate in space.candidates(sizes, levels, tuple(map(int, place))):
                yield float(bound), candidate
        rest = np.ones(len(left), bool)
        rest[first] = False
        left, bounds = left[rest], bounds[rest]


@dataclass(frozen=True)
class _Run:
    """A search over some spaces; the plans that it makes stay with these."""

    spaces: Mapping[str, CandidateSpace]
    hardware: Hardware
    devices: int
    stored: bool
    objective: str
    top: int
    progress: Callable[[int, RankedLayout | None], None] | None

    def best(self, cap: int) -> SearchResult:
        """What is best with so much memory."""
        by_time, counts, order = self.objective == "time", _Counts(), itertools.count()
        waiting: list[tuple[float, int, int, Candidate, Any]] = []
        exact = by_time  # whether all plans came out as bounded but for the slack; then that is not needed

        def push(queue: Iterator[tuple[float, Candidate]]) -> None:
            for bound, candidate in itertools.islice(queue, 1):
                heapq.heappush(waiting, (bound, candidate.rank, next(order), candidate, queue))

        for space in self.spaces.values():
            for sizes in space.meshes:
                for levels in space.levels(sizes, self.stored):
                    push(_in_order(space, sizes, levels, cap, by_time, counts))
        ranked: list[RankedLayout] = []
        too_large: list[RankedLayout] = []
        refused = 0

        is_small = all(len(space.facts.dims) <= FEW_DIMS for space in self.spaces.values())

        def goal() -> float:
            """No bound that is not below this matters any more."""
            if len(ranked) < self.top:
                return math.inf
            return self._value(ranked[self.top - 1]) * (BOUND_MARGIN if is_small else SLACK if exact else 1.0)

        while waiting and waiting[0][0] < goal():
            bound, rank, _, candidate, queue = heapq.heappop(waiting)
            space = self.spaces[candidate.variant]
            if queue is not None:  # its bound is a first, loose one: look closer
                push(queue)
                closer = space.bound.tight if by_time else space.bound.bytes
                heapq.heappush(waiting, (max(bound, closer(candidate)), rank, next(order), candidate, None))
                continue
            if space.bound.bytes(candidate) > cap:
                counts.by_memory += 1
                continue
            plan = space.planned(candidate)
            if isinstance(plan, WeftError):
                refused += 1
                continue
            one = RankedLayout(candidate, plan, plan.time(self.hardware), bound)
            (ranked if one.bytes <= cap else too_large).append(one)
            exact = exact and self._value(one) * SLACK <= bound * (1 + 1e-6)
            ranked.sort(key=self._order)
            if self.progress is not None:
                self.progress(len(ranked) + len(too_large), ranked[0] if ranked else None)
        return SearchResult(
            tuple(ranked),
            tuple(too_large),
            (),
            None,
            self.hardware,
            self.devices,
            cap,
            self.objective,
            counts.legal,
            refused,
            counts.by_memory,
            counts.legal - counts.by_memory - len(ranked) - len(too_large) - refused,
            tuple(sorted({d for s in self.spaces.values() for d in s.left_out})),
        )

    def _value(self, one: RankedLayout) -> float:
        return one.seconds if self.objective == "time" else float(one.bytes)

    def _order(self, one: RankedLayout) -> tuple[float, int]:
        """The best first; of equals, but for the order in which seconds were added up, the simplest."""
        return float(f"{self._value(one):.9g}"), one.candidate.rank

    def front(self, found: SearchResult) -> Iterator[RankedLayout]:
        """The best, and then the fastest with a fifth less memory, and so on until nothing fits."""
        while found.best is not None:
            yield found.best
            found = self.best(int(FRONT_STEP * found.best.bytes))
