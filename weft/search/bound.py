"""Lower bounds: what no plan of a candidate can be below.

**Work.** An op is shared out by the axes that its dims are on, and by no others: `seconds / Π sizes`, summed
over all ops. This is had for all candidates at once, from one trace.

**Collectives.** What dims on one axis make a program send over it does not depend on the other axes; these
only make slices smaller. So a group of dims is tried once, on an axis of two devices, and what it sends there
is what each candidate that has the group sends at least: divided by the other axes that its op has dims on.
A sum over several axes is one collective, so of what an op sends over each of them only the dearest counts.
What may hide behind the work of its phase counts where it is more than that.

**Memory.** What goes in, each tensor divided by the axes of its dims.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import WeftError
from ..mesh import Mesh
from ..plan.facts import Collective
from ..plan.hardware import Hardware
from ..plan.time import collective_seconds, hideable
from ..plan.walk import wire_bytes
from .facts import Facts, op_dims, planned
from .space import Candidate, Group, Sizes

TWO = 2  # devices that a group is tried on


def shares(parts: Iterable[Group], groups: Sequence[Group]) -> np.ndarray:
    """Whether a part of the work has a dim of a group: parts × groups."""
    rows = [[bool(part & group) for group in groups] for part in parts]
    return np.array(rows, bool).reshape(-1, len(groups))


def divided(amounts: np.ndarray, hits: np.ndarray, sizes: Sizes) -> np.ndarray:
    """For every choice of a group for each axis, the sum of amounts divided by the axes that share them out.

    Args:
      amounts: of each part.
      hits: from `shares`.
      sizes: of the axes.

    Returns:
      An array with a dim of groups for each axis.
    """
    factors = [np.where(hits, 1.0 / size, 1.0) for size in sizes]
    letters = "abcdefgh"[: len(sizes)]
    terms = ["z", *(f"z{letter}" for letter in letters)]
    return np.einsum(f"{','.join(terms)}->{letters}", amounts, *factors, optimize=True)


@dataclass(frozen=True)
class Sent:
    """What a group of dims makes a program send over its axis: by which op, how much, how often."""

    op: str
    phase: str
    hides: bool
    dims: Group
    kind: str
    bytes: float
    count: int


class Bound:
    """What candidates of one program take at least.

    Args:
      facts: the program.
      hardware: the machine.
      devices: how many there are.
    """

    def __init__(self, facts: Facts, hardware: Hardware, devices: int):
        self.facts, self.hardware = facts, hardware
        self.times = devices / hardware.shared_cores if hardware.shared_cores else 1.0
        self.work = {part: self.times * seconds for part, seconds in facts.seconds(hardware).items()}
        self._sent: dict[Group, list[Sent]] = {frozenset(): []}
        self._paces: dict[tuple[Sizes, int, str], tuple[float, float]] = {}

    @property
    def tried(self) -> int:
        """How many groups were tried."""
        return len(self._sent) - 1

    def seconds(self, candidate: Candidate) -> float:
        """What it takes at least, with its collectives."""
        work: dict[str, float] = defaultdict(float)
        for (phase, dims), seconds in self.work.items():
            work[phase] += seconds / _ways(candidate, dims)
        hidden: dict[str, float] = defaultdict(float)
        sent = 0.0
        for (_, phase, hides), by_axis in self._sent_by(candidate).items():
            if hides:
                hidden[phase] += max(by_axis)
            else:
                sent += max(by_axis)
        return sent + sum(max(work[phase], hidden[phase]) for phase in {*work, *hidden})

    def _sent_by(self, candidate: Candidate) -> dict[tuple[str, str, bool], list[float]]:
        """What each op's collectives take, by axis."""
        found: dict[Any, list[float]] = defaultdict(lambda: [0.0] * len(candidate.sizes))
        for axis, group in enumerate(candidate.groups):
            for sent in self._of(group):
                others = _ways(candidate, sent.dims, without=axis)
                seconds = self._least(sent, candidate.sizes, axis, others)
                found[sent.op, sent.phase, sent.hides][axis] += self.times * seconds
        return found

    def _of(self, group: Group) -> list[Sent]:
        if group not in self._sent:
            self._sent[group] = self._try(group)
        return self._sent[group]

    def _try(self, group: Group) -> list[Sent]:
        trial = Candidate((TWO,), (group,))
        plan = planned(self.facts.program, self.facts.args, trial.mesh, trial.layout)
        if isinstance(plan, WeftError):
            return []

        def hides(c: Collective) -> bool:
            return not self.hardware.shared_cores and hideable(c, plan)

        # Where a size is odd, two devices hold a place more than there is.
        full = min((n / (n + n % TWO) for n in (self.facts.dims[dim] for dim in group)), default=1.0)
        return [
            Sent(c.op, c.phase, hides(c), op_dims(c.op, self.facts), c.kind, c.bytes * full, c.count)
            for c in plan.collectives
        ]

    def _least(self, sent: Sent, sizes: Sizes, axis: int, ways: int) -> float:
        """The seconds of a collective over an axis, by itself or as part of one over several."""
        bytes = sent.bytes / ways
        if sent.kind in ("all-to-all", "permute"):
            bytes *= TWO / sizes[axis]
        latency, pace = self._pace(sizes, axis, sent.kind)
        return sent.count * (latency + bytes * pace)

    def _pace(self, sizes: Sizes, axis: int, kind: str) -> tuple[float, float]:
        """The least seconds of nothing, and of each byte, over all sets of axes with this one."""
        key = sizes, axis, kind
        if key not in self._paces:
            mesh = Mesh([(f"x{n}", size) for n, size in enumerate(sizes)])
            many = 1 << 40
            own = wire_bytes(kind, many, sizes[axis])
            found: list[tuple[float, float]] = []
            others = [n for n in range(len(sizes)) if n != axis]
            for count in range(len(others) + 1):
                for more in itertools.combinations(others, count):
                    axes = tuple(f"x{n}" for n in sorted((axis, *more)))
                    one = Collective(kind, axes, many, 1, "", "", "", own)
                    none = Collective(kind, axes, 0, 1, "", "", "", 0)
                    whole, latency = (collective_seconds(c, mesh, self.hardware) for c in (one, none))
                    found.append((latency, (whole - latency) / many))
            self._paces[key] = min(one[0] for one in found), min(one[1] for one in found)
        return self._paces[key]


def _ways(candidate: Candidate, dims: Group, without: int = -1) -> int:
    """How many devices share out what has these dims, an axis left out."""
    pairs = enumerate(zip(candidate.sizes, candidate.groups, strict=True))
    return math.prod(size for n, (size, group) in pairs if n != without and group & dims)
