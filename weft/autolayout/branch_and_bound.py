"""Branch and bound: plan candidates in the order of their bounds until no bound is below the best plan.

Bounds come in two qualities. `LowerBound.mesh_seconds` bounds all candidates of a mesh at once. A candidate
that reaches the front of the queue with such a bound gets a tighter one and is queued again. Only candidates
that reach the front a second time are planned.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..core.errors import WeftError
from ..hardware.profile import Hardware
from .bound import SLACK
from .candidates import CandidateSpace
from .cost_atoms import FEW_DIMS
from .results import RankedLayout, SearchResult
from .space import Candidate, MeshShape, StorageLevels

CANDIDATE_BATCH = 4096  # few searches need a second batch of a mesh
FRONT_STEP = 0.8  # smaller steps of memory would list many layouts that are nearly the same
# Bounds can be a quarter too high where a plan fuses or overlaps more than the universal trace. Programs with
# few dims are fast to plan, so all of their candidates within this factor of the best are planned.
BOUND_MARGIN = 1.3

Queue = Iterator[tuple[float, Candidate]]


@dataclass
class _Counts:
    legal: int = 0
    by_memory: int = 0


def _by_bound(
    space: CandidateSpace, sizes: MeshShape, levels: StorageLevels, cap: int, by_time: bool, counts: _Counts
) -> Queue:
    """The candidates of a mesh that may fit, lowest bound first."""
    distinct = space.is_distinct(sizes, levels)
    if not distinct.any():
        return
    stored = space.bound.mesh_stored_bytes(sizes, levels)
    bounds = space.bound.mesh_seconds(sizes, levels) if by_time else stored
    fits = distinct & (stored <= cap)
    order_counts = space.order_counts(sizes)
    counts.legal += int(order_counts[distinct].sum())
    counts.by_memory += int(order_counts[distinct & ~fits].sum())
    remaining = np.flatnonzero(fits)
    bounds = bounds.ravel()[remaining]
    # Most searches end after a few hundred of up to 2**24 candidates. A partial sort of one batch at a time
    # is linear in their number.
    while len(remaining):
        batch = np.argpartition(bounds, min(CANDIDATE_BATCH, len(remaining) - 1))[:CANDIDATE_BATCH]
        batch = batch[np.argsort(bounds[batch], kind="stable")]
        for bound, flat in zip(bounds[batch], remaining[batch], strict=True):
            position = np.unravel_index(flat, [len(space.groups)] * len(sizes)) if sizes else ()
            for candidate in space.candidates(sizes, levels, tuple(map(int, position))):
                yield float(bound), candidate
        rest = np.ones(len(remaining), bool)
        rest[batch] = False
        remaining, bounds = remaining[rest], bounds[rest]


@dataclass(frozen=True)
class BranchAndBound:
    """A search over the spaces of several variants; plans are cached in the spaces.

    Attributes:
      spaces: the candidates of each variant, by name.
      hardware, devices: the machine and the number of devices.
      stored: whether to try extra splits of stored state.
      objective: "time" or "memory".
      top: the number of best candidates to find.
      progress: called after each plan.
    """

    spaces: Mapping[str, CandidateSpace]
    hardware: Hardware
    devices: int
    stored: bool
    objective: str
    top: int
    progress: Callable[[int, RankedLayout | None], None] | None

    def best(self, cap: int) -> SearchResult:
        """The best candidates that fit into `cap` bytes per device."""
        by_time, counts, serial = self.objective == "time", _Counts(), itertools.count()
        # Entries: bound, rank, serial, candidate, and the queue that it came from. The queue is None for
        # tight bounds. The serial number keeps heapq from comparing candidates.
        waiting: list[tuple[float, int, int, Candidate, Queue | None]] = []
        # As long as every plan equals its bound up to SLACK, the next one will too. Then the slack need not
        # be searched, which saves planning the many near ties of the best.
        exact = by_time

        def push_next(queue: Queue) -> None:
            for bound, candidate in itertools.islice(queue, 1):
                heapq.heappush(waiting, (bound, candidate.rank, next(serial), candidate, queue))

        for space in self.spaces.values():
            for sizes in space.meshes:
                for levels in space.levels(sizes, self.stored):
                    push_next(_by_bound(space, sizes, levels, cap, by_time, counts))
        ranked: list[RankedLayout] = []
        too_large: list[RankedLayout] = []
        refused = 0

        has_few_dims = all(len(space.atoms.dims) <= FEW_DIMS for space in self.spaces.values())

        def cutoff() -> float:
            """Candidates with a bound of at least this can't change the result."""
            if len(ranked) < self.top:
                return math.inf
            factor = BOUND_MARGIN if has_few_dims else SLACK if exact else 1.0
            return self._value(ranked[self.top - 1]) * factor

        while waiting and waiting[0][0] < cutoff():
            bound, rank, _, candidate, queue = heapq.heappop(waiting)
            space = self.spaces[candidate.variant]
            # Tight bounds are computed one by one, loose ones for a mesh at once. So only candidates that
            # reach the front of the queue get a tight one, and are queued again.
            if queue is not None:
                push_next(queue)
                tight = space.bound.candidate_seconds if by_time else space.bound.candidate_bytes
                heapq.heappush(waiting, (max(bound, tight(candidate)), rank, next(serial), candidate, None))
                continue
            # `_by_bound` has compared stored tensors with the cap, but not buffers, which take long to bound.
            if space.bound.candidate_bytes(candidate) > cap:
                counts.by_memory += 1
                continue
            plan = space.planned(candidate)
            # Conflicts are found by the names of dims. An op may still reject a split when it is lowered.
            if isinstance(plan, WeftError):
                refused += 1
                continue
            layout = RankedLayout(candidate, plan, plan.time(self.hardware), bound)
            (ranked if layout.bytes <= cap else too_large).append(layout)
            exact = exact and self._value(layout) * SLACK <= bound * (1 + 1e-6)
            ranked.sort(key=self._sort_key)
            if self.progress is not None:
                self.progress(len(ranked) + len(too_large), ranked[0] if ranked else None)
        return SearchResult(
            ranked=tuple(ranked),
            too_large=tuple(too_large),
            front=(),
            nearest=None,
            hardware=self.hardware,
            devices=self.devices,
            cap=cap,
            objective=self.objective,
            legal=counts.legal,
            refused=refused,
            by_memory=counts.by_memory,
            by_bound=counts.legal - counts.by_memory - len(ranked) - len(too_large) - refused,
            left_out=tuple(sorted({d for s in self.spaces.values() for d in s.left_out})),
        )

    def _value(self, layout: RankedLayout) -> float:
        """The value of the objective."""
        return layout.seconds if self.objective == "time" else float(layout.bytes)

    def _sort_key(self, layout: RankedLayout) -> tuple[float, int]:
        """Best first, then simplest; nine digits, because seconds are added in different orders."""
        return float(f"{self._value(layout):.9g}"), layout.candidate.rank

    def front(self, result: SearchResult) -> Iterator[RankedLayout]:
        """The Pareto front: the best, then the best with a fifth less memory, until nothing fits."""
        while result.best is not None:
            yield result.best
            result = self.best(int(FRONT_STEP * result.best.bytes))
