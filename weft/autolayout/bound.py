"""Lower bounds: what no plan of a candidate can be below, for all candidates of a mesh at once.

**Work.** An op is shared out by the axes that its dims are on, and by no others: `seconds / Π sizes`.

**Collectives.** Each collective of the opened program is there in a candidate that has one of its dims on an
axis, over those axes, of slices that the other axes make smaller. Dims on one axis may save some: a renamed
dim needs no gather if its new name is on the same axis, and a sum becomes a reduce-scatter; sums that meet
are one. Groups of dims for which that can happen count less. What may hide behind the work of its phase
counts where it is more than that.

**Memory.** What is stored, and the buffers of the opened program, each divided by the axes of its dims.

A mesh has a group of dims for each axis, and all that is counted is a sum of products of one factor for each
axis. So the bounds of all candidates of a mesh are a few matrix products.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..core.mesh import Mesh
from ..hardware.profile import Hardware
from ..plan.buffers import Buffer
from ..plan.events import wire_bytes
from ..plan.facts import Collective
from ..plan.time import can_overlap, collective_seconds, main_dtype, work_seconds
from .cost_atoms import CostAtoms, WorkAtom
from .space import Candidate, DimGroup, MeshShape, StorageLevels, extra_storage_dims

SLACK = 1 - 2e-3  # for sizes that are rounded, and for what is fused a little otherwise
MIN_BUFFER_SHARE = 0.8  # of the memory of buffers: a split program may be fused better than the opened one
LARGE_MESSAGE = 1 << 40  # bytes
PHASES = ("forward", "backward", "update")
SPLITS = ("plain", "param", "state")  # how values are split, stored parameters, and optimizer state
EXTRA_SPLITS = {"param more": "params", "state more": "optimizer"}  # where a collective is only for that


@dataclass(frozen=True)
class CollectiveCost:
    """A collective: the dims that call for it, and those that what is sent has beside them.

    Attributes:
      on: which dims of an axis call for it: those of one of SPLITS, or those that "param" or "state" adds.
      beside: which of SPLITS the other axes cut what is sent by.
    """

    on: str
    beside: str
    kind: str
    over: DimGroup
    dims: DimGroup
    bytes: float
    count: int
    is_gradient: bool
    number: int  # to tell equal ones apart


@dataclass(frozen=True)
class WorkCost:
    """Some work: the dims that may share it out, what it takes, and the layers' dim if it is done in stages.

    What takes less than nothing is taken away where the layers are not in stages.
    """

    dims: DimGroup
    seconds: float
    staged: str


class LowerBound:
    """What candidates of one program take at least.

    Args:
      facts: the program.
      hardware: the machine.
      devices: how many there are.
      groups: what an axis can have on it.
    """

    def __init__(self, facts: CostAtoms, hardware: Hardware, devices: int, groups: Sequence[DimGroup]):
        self.facts, self.hardware, self.groups = facts, hardware, groups
        self.dtype = main_dtype(facts.plan)
        self.times = devices / hardware.shared_cores if hardware.shared_cores else 1.0
        self.state = [one for one in facts.inputs if one.role != "value"]
        self._roles: dict[str, list[tuple[DimGroup, int]]] = defaultdict(list)
        for one in facts.inputs:
            self._roles[one.role].append((frozenset(name for name, n, _ in one.dims if n > 1), one.bytes))
        self.work = self._work()
        self.sent = self._sent()
        gathers = (over for c, over, _ in facts.sent if c.kind == "all-gather")
        self._gathered: DimGroup = frozenset().union(*gathers)
        self._paces: dict[tuple[MeshShape, tuple[int, ...], str], tuple[float, float]] = {}
        self._savings: dict[DimGroup, tuple[set[int], bool]] = {}
        self._left: dict[tuple[DimGroup, int], float] = {}
        self._further: dict[tuple[DimGroup, int], DimGroup] = {}

    # Time

    def seconds(self, sizes: MeshShape, levels: StorageLevels) -> np.ndarray:
        """The least seconds of all candidates of a mesh: an array with a dim of groups for each axis."""
        nothing = np.zeros([len(self.groups)] * len(sizes))
        plain, work, hidden = nothing, dict.fromkeys(PHASES, nothing), dict.fromkeys(PHASES, nothing)
        for phase, parts in self.work.items():
            shares = []
            for size, level in zip(sizes, levels, strict=True):
                on = self._on(size, level)
                some = [on[self._where(phase, part.dims, levels)] for part in parts]
                shares.append(
                    self._shares([part.dims for part in parts], some, size) * self._ticks(parts, some, size)
                )
            work[phase] = _summed(np.array([part.seconds for part in parts]), shares)
        for (phase, hides), sent in (*self.sent.items(), *self._gathers(levels).items()):
            seconds = self._all_sent(sent, sizes, levels)
            if hides:
                hidden[phase] = hidden[phase] + seconds
            else:
                plain = plain + seconds
        return SLACK * (plain + sum(np.maximum(work[phase], hidden[phase]) for phase in PHASES))

    def tight(self, candidate: Candidate) -> float:
        """The least seconds of one candidate: closer where one dim is on several axes."""
        levels, sizes = candidate.levels, candidate.sizes
        on = self._on_axes(candidate)
        plain, work, hidden = 0.0, defaultdict[str, float](float), defaultdict[str, float](float)
        left = functools.cache(lambda dims, where: self._left_of(dims, sizes, on[where]))
        stages = self._ways(frozenset(self.facts.pipelines), sizes, candidate.groups)
        for part in self.facts.work:
            seconds = self._of_part(part, left, levels)
            if part.staged in stages and part.work.kind == "matmul":
                seconds *= self._stretch(part.staged, stages[part.staged])
                if self._again(part):
                    work["backward"] += seconds
            work[part.work.phase] += seconds
        for (phase, hides), sent in (*self.sent.items(), *self._gathers(levels).items()):
            for s in sent:
                weights = [self._weight(s, group) for group in on[s.on]]
                axes = tuple(place for place, weight in enumerate(weights) if weight)
                if not axes:
                    continue
                latency, pace = self._pace(sizes, axes, self._kind(s, levels, axes))
                beside = [
                    frozenset[str]() if place in axes else group for place, group in enumerate(on[s.beside])
                ]
                bytes = s.bytes * self._left_of(s.dims, sizes, beside)
                if s.on in EXTRA_SPLITS:
                    bytes *= self._padded(s.dims, sizes, on[s.on.partition(" ")[0]])
                latency *= not s.is_gradient  # all of these begin once
                seconds = self.times * s.count * (latency + bytes * pace)
                seconds *= math.prod(weights[place] for place in axes)
                if hides:
                    hidden[phase] += seconds
                else:
                    plain += seconds
        return SLACK * (plain + sum(max(work[phase], hidden[phase]) for phase in PHASES))

    def _ticks(
        self, parts: Sequence[WorkCost], groups: Sequence[Sequence[DimGroup]], size: int
    ) -> np.ndarray:
        """How much longer work takes in so many stages, by the group that is on an axis.

        Work that is there only in stages counts, and is then taken away again where there are none.
        """
        found = np.ones([len(parts), len(self.groups)])
        for n, (part, some) in enumerate(zip(parts, groups, strict=True)):
            if part.staged:
                split = np.array([part.staged in group for group in some])
                found[n] = np.where(split, 0.0 if part.seconds < 0 else self._stretch(part.staged, size), 1.0)
        return found

    def _stretch(self, layers: str, stages: int) -> float:
        """(M + K - 1) / M: in how many ticks so many stages do the work of one."""
        one = self.facts.pipelines[layers]
        return 1 + (stages - 1) / (one.micro or min(4 * stages, one.batch.size))

    def _of_part(
        self, part: WorkAtom, left: Callable[[DimGroup, str], float], levels: StorageLevels
    ) -> float:
        """The least seconds of some work: what it reads and writes is cut along its own dims only."""
        where = self._where(part.work.phase, part.dims, levels)
        whole = work_seconds(part.work, self.hardware, self.dtype)
        compute, memory = (seconds * left(part.dims, where) for seconds in whole)
        touched = sum(bytes * left(dims, where) for bytes, dims in part.touched)
        if where == "param" and part.work.phase == "backward" and part.work.op.startswith("astype"):
            bytes, dims = part.touched[-1]  # a gradient, which is scattered when it is whole in its own type
            touched += bytes * (left(dims, "plain") - left(dims, where))
        memory = max(memory, touched / self.hardware.memory_bandwidth)
        seconds = compute + memory if self.hardware.shared_cores else max(compute, memory)
        return self.times * seconds * part.work.count

    def _on_axes(self, candidate: Candidate) -> dict[str, list[DimGroup]]:
        """The dims on each axis of a candidate, as `_on` has them."""
        levels = candidate.levels
        both = zip(candidate.groups, candidate.sizes, strict=True)
        more = [self.further(group, n) for group, n in both]
        return _split(candidate.groups, more, levels)

    def _left_of(self, dims: DimGroup, sizes: MeshShape, split: Sequence[DimGroup]) -> float:
        """What is left on a device of a whole with these dims; an axis cuts it along one of them."""
        ways = self._ways(dims, sizes, split)
        return math.prod(self._share(frozenset([dim]), n) for dim, n in ways.items())

    def _ways(self, dims: DimGroup, sizes: MeshShape, split: Sequence[DimGroup]) -> dict[str, int]:
        """Into how many pieces each dim is cut."""
        ways: dict[str, int] = defaultdict(lambda: 1)
        for size, group in zip(sizes, split, strict=True):
            if group & dims:
                ways[max(group & dims, key=lambda dim: (self.facts.dims[dim], dim))] *= size
        return ways

    def _padded(self, dims: DimGroup, sizes: MeshShape, split: Sequence[DimGroup]) -> float:
        """How much larger a whole is with the padding that its pieces need."""
        ways = self._ways(dims, sizes, split)
        return math.prod(n * self._share(frozenset([dim]), n) for dim, n in ways.items())

    def _where(self, phase: str, dims: DimGroup, levels: StorageLevels) -> str:
        """Whether work is done on what is stored: an update, or a cast before parameters are gathered."""
        early = "params" in levels and any(dims <= one for one, _ in self._roles.get("param", ()))
        return "state" if phase == "update" else "param" if early else "plain"

    @staticmethod
    def _kind(sent: CollectiveCost, levels: StorageLevels, axes: tuple[int, ...]) -> str:
        """A sum of gradients is a reduce-scatter where state is stored in further pieces."""
        scattered = sent.is_gradient and any(levels[n] for n in axes)
        return "reduce-scatter" if scattered and sent.kind == "all-reduce" else sent.kind

    def _again(self, part: WorkAtom) -> bool:
        """Whether stages do some work once more, in the backward pass."""
        return part.work.phase == "forward" and self.facts.pipelines[part.staged].recomputes

    def _work(self) -> dict[str, list[WorkCost]]:
        """The seconds of all work on one device, by phase and by the dims that may share it out."""
        total = defaultdict[tuple[str, DimGroup, str, bool], float](float)
        for part in self.facts.work:
            compute, memory = work_seconds(part.work, self.hardware, self.dtype)
            seconds = compute + memory if self.hardware.shared_cores else max(compute, memory)
            seconds *= self.times * part.work.count
            staged = part.staged if part.work.kind == "matmul" else ""
            total[part.work.phase, part.dims, staged, False] += seconds
            if staged and self._again(part):
                total["backward", part.dims, staged, False] += seconds
                total["backward", part.dims, staged, True] -= seconds
        found: dict[str, list[WorkCost]] = defaultdict(list)
        for (phase, dims, staged, _), seconds in total.items():
            found[phase].append(WorkCost(dims, seconds, staged))
        return found

    def _sent(self) -> dict[tuple[str, bool], list[CollectiveCost]]:
        """The collectives of the opened program, less those that a split one may not have.

        Sums of one parameter's gradients are one sum; and so are those of what differs only by a dim's name.
        """
        stored = [frozenset(name for name, n, _ in one.dims if n > 1) for one in self.facts.inputs]
        left = {dims: stored.count(dims) for dims in stored}
        seen: set[tuple[DimGroup, DimGroup]] = set()
        found: dict[tuple[str, bool], list[CollectiveCost]] = defaultdict(list)
        dear = sorted(self.facts.sent, key=lambda one: -one[0].bytes * one[0].count)
        for number, (c, over, dims) in enumerate(dear):
            count, gradient = c.count, False
            if c.phase == "backward" and c.kind == "all-reduce" and dims in left:
                if not left[dims]:
                    continue
                left[dims], count, gradient = left[dims] - 1, 1, True
            kin = [some for some in self.facts.renamed if some & dims]
            if c.phase == "backward" and c.kind == "all-reduce" and kin:
                alike = over, dims.union(*kin)
                if alike in seen:
                    continue
                seen.add(alike)
            gradient = gradient or (c.phase == "backward" and any(dims <= one for one in stored if dims))
            hides = not self.hardware.shared_cores and (gradient or can_overlap(c, self.facts.plan))
            on = "state" if c.phase == "update" else "plain"
            # What is stored in further pieces may be cut before the sum.
            beside = "state" if gradient else on
            found[c.phase, hides].append(
                CollectiveCost(on, beside, c.kind, over, dims, c.bytes, count, gradient, number)
            )
        return found

    def _gathers(self, levels: StorageLevels) -> dict[tuple[str, bool], list[CollectiveCost]]:
        """The gathers of parameters that are stored, or updated, in further pieces.

        Those that are stored so are gathered where they are used, perhaps in half of their type.
        """
        some = self._roles.get("param", [])
        found: dict[tuple[str, bool], list[CollectiveCost]] = {}
        if some and "params" in levels:
            found["forward", not self.hardware.shared_cores] = [
                CollectiveCost("param more", "plain", "all-gather", dims, dims, bytes / 2, 1, False, number)
                for number, (dims, bytes) in enumerate(some)
            ]
        if some and "optimizer" in levels:
            found["update", False] = [
                CollectiveCost("state more", "param", "all-gather", dims, dims, bytes, 1, False, number)
                for number, (dims, bytes) in enumerate(some)
            ]
        return found

    def _all_sent(self, sent: list[CollectiveCost], sizes: MeshShape, levels: StorageLevels) -> np.ndarray:
        """The seconds of collectives: over each set of axes, those that are over these and no others."""
        places = range(len(sizes))
        hits, inside = [], []
        for size, level in zip(sizes, levels, strict=True):
            on = self._on(size, level)
            hits.append(np.array([[self._weight(s, group) for group in on[s.on]] for s in sent]))
            inside.append(self._shares([s.dims for s in sent], [on[s.beside] for s in sent], size))
        counts = np.array([s.count * self.times for s in sent])
        begun = counts * [not s.is_gradient for s in sent]  # sums of gradients begin once, all of them
        bytes = np.array([s.bytes for s in sent])
        total = np.zeros([len(self.groups)] * len(sizes))
        for axes in _subsets(places):
            latency, pace = np.array([self._pace(sizes, axes, self._kind(s, levels, axes)) for s in sent]).T
            over = [hits[p] if p in axes else 1.0 * (hits[p] == 0) for p in places]
            cut = [over[p] if p in axes else over[p] * inside[p] for p in places]
            total += _summed(begun * latency, over) + _summed(counts * bytes * pace, cut)
        return total

    def _weight(self, sent: CollectiveCost, group: DimGroup) -> float:
        """How much of a collective a group of dims on an axis calls for."""
        if not sent.over & group:
            return 0.0
        if sent.on in EXTRA_SPLITS:
            return 1.0
        if group not in self._savings:
            renames = any(group & dims for dims in self.facts.renamed)
            self._savings[group] = self._merged(group), renames
        merged, renames = self._savings[group]
        if sent.number in merged:
            return 0.0
        if renames:
            return 0.5 if sent.kind == "all-reduce" else 0.0
        # A sum of what has a dim on the same axis, or had one before a gather, is scattered along that.
        scattered = sent.dims & group or (sent.is_gradient and self._gathered & group)
        return 0.5 if sent.kind == "all-reduce" and scattered else 1.0

    def _merged(self, group: DimGroup) -> set[int]:
        """The sums that may be part of others if a group is on one axis: all but the dearest of a phase."""
        meet = [some for some in self.facts.alike if all(dims & group for dims in some)]
        over = frozenset[DimGroup]().union(*meet)
        found: set[int] = set()
        for sent in self.sent.values():
            some = sorted((s for s in sent if s.over in over), key=lambda s: s.bytes * s.count)
            found.update(s.number for s in some[:-1])
        return found

    def _pace(self, sizes: MeshShape, axes: tuple[int, ...], kind: str) -> tuple[float, float]:
        """The seconds of a collective of nothing over some axes, and of each byte."""
        key = sizes, axes, kind
        if key not in self._paces:
            mesh = Mesh([(f"x{n}", size) for n, size in enumerate(sizes)])
            names, ways = tuple(f"x{n}" for n in axes), math.prod(sizes[n] for n in axes)
            sent = Collective(
                kind, names, LARGE_MESSAGE, 1, "", "", "", wire_bytes(kind, LARGE_MESSAGE, ways)
            )
            none = Collective(kind, names, 0, 1, "", "", "", 0)
            whole, latency = (collective_seconds(c, mesh, self.hardware) for c in (sent, none))
            # What is sent from each to each, or on to a neighbour, is cut by these axes too.
            pace = (whole - latency) / LARGE_MESSAGE / (ways if kind in ("all-to-all", "permute") else 1)
            # A sum is made at once; pieces may be moved over one axis after the other.
            if len(axes) > 1 and kind != "all-reduce":
                alone = [self._pace(sizes, (axis,), kind) for axis in axes]
                latency = min(latency, sum(one[0] for one in alone))
                pace = min(pace, max(one[1] for one in alone))
            self._paces[key] = latency, pace
        return self._paces[key]

    def _shares(
        self, parts: Sequence[DimGroup], groups: Sequence[Sequence[DimGroup]], size: int
    ) -> np.ndarray:
        """The share of each part that is left on a device of an axis, by the group that is on it.

        Args:
          parts: their dims.
          groups: for each part the groups that may be on the axis.
          size: of the axis.
        """
        both = zip(parts, groups, strict=True)
        return np.array([[self._share(dims & group, size) for group in some] for dims, some in both])

    def _share(self, cut: DimGroup, size: int) -> float:
        """What is left of a whole that an axis cuts along one of these dims; all, if there is none."""
        if (cut, size) not in self._left:
            sizes = [self.facts.dims[dim] for dim in cut]
            self._left[cut, size] = min((-(-n // size) / n for n in sizes), default=1.0)
        return self._left[cut, size]

    # Storage

    def _on(self, size: int, level: str) -> dict[str, list[DimGroup]]:
        """What an axis can have on it, for each of its groups: by SPLITS, and what these add."""
        more = [self.further(group, size) for group in self.groups]
        return _split(self.groups, more, [level] * len(more))

    def further(self, group: DimGroup, size: int) -> DimGroup:
        """The dims that state is stored along on an axis with a group, beside those of the group."""
        if (group, size) not in self._further:
            self._further[group, size] = extra_storage_dims(group, size, self.state, self.facts.unsplittable)
        return self._further[group, size]

    def stored(self, sizes: MeshShape, levels: StorageLevels) -> np.ndarray:
        """The bytes of what goes in, for all candidates of a mesh."""
        total = np.zeros([len(self.groups)] * len(sizes))
        split = [self._on(size, level) for size, level in zip(sizes, levels, strict=True)]
        for role, some in self._roles.items():
            dims = [dims for dims, _ in some]
            shares = [
                self._shares(dims, [on[_SPLIT_OF[role]]] * len(dims), n)
                for n, on in zip(sizes, split, strict=True)
            ]
            total += _summed(np.array([float(bytes) for _, bytes in some]), shares)
        return total

    def bytes(self, candidate: Candidate) -> float:
        """The least memory of one candidate, its buffers included."""
        on, sizes = self._on_axes(candidate), candidate.sizes
        stored = sum(
            bytes * self._left_of(dims, sizes, on[_SPLIT_OF[role]])
            for role, some in self._roles.items()
            for dims, bytes in some
        )
        scattered = "params" in candidate.levels  # then gradients are in pieces in the backward pass
        split = {
            phase: on["state" if phase == "update" or (phase == "backward" and scattered) else "plain"]
            for phase in PHASES
        }
        cut = self.facts.cut

        placed = frozenset[str]().union(*candidate.groups)

        def size(buffer: Buffer) -> float:
            dims, phase, staged = cut[buffer.number]
            if staged in placed:  # in stages a part of the batch is there at a time, and kept otherwise
                return 0.0
            return buffer.size * self._left_of(dims, sizes, split[phase])

        returned, most, _ = self.facts.buffers.peak(size)
        return SLACK * (stored + MIN_BUFFER_SHARE * self.facts.whole * (returned + most))


_SPLIT_OF = {"value": "plain", "param": "param", "optimizer": "state"}


def _split(
    groups: Sequence[DimGroup], more: Sequence[DimGroup], levels: Sequence[str]
) -> dict[str, list[DimGroup]]:
    """The dims that are on axes by SPLITS, and those that are stored on top of the ones before.

    Args:
      groups: the dims that are on each axis.
      more: those that may be stored beside them.
      levels: for what they are.
    """
    none = frozenset[str]()
    all_ = list(zip(groups, more, levels, strict=True))
    return {
        "plain": list(groups),
        "param": [group | extra if level == "params" else group for group, extra, level in all_],
        "state": [group | extra if level else group for group, extra, level in all_],
        **{
            on: [extra if level == one else none for _, extra, level in all_]
            for on, one in EXTRA_SPLITS.items()
        },
    }


def _subsets(places: Sequence[int]) -> list[tuple[int, ...]]:
    return [some for n in range(1, len(places) + 1) for some in itertools.combinations(places, n)]


def _summed(amounts: np.ndarray, factors: Sequence[np.ndarray]) -> np.ndarray:
    """Σ of amounts, each times one factor for each axis: over all choices of a group for each axis.

    Args:
      amounts: of each part.
      factors: for each axis, parts × groups.
    """
    if not factors:
        return amounts.sum()
    *first, last = factors
    rows = amounts[:, None]
    for factor in first:
        rows = (rows[:, :, None] * factor[:, None, :]).reshape(len(amounts), -1)
    shape = [factor.shape[1] for factor in factors]
    return (rows.T @ last).reshape(shape)
