"""The results of a search: ranked layouts, and how the other candidates were ruled out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.layout import Layout
from ..core.mesh import Mesh
from ..hardware.profile import Hardware
from ..plan.plan import Plan
from ..plan.time import Time
from .space import Candidate


@dataclass(frozen=True)
class RankedLayout:
    """A candidate with its plan.

    Attributes:
      candidate: the mesh and the layout.
      plan: its plan.
      time: the plan's time on the machine.
      bound: its lower bound: seconds, or bytes if the objective is memory.
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
        """The predicted time of one call."""
        return self.time.overlapped_seconds

    @property
    def bytes(self) -> int:
        """The peak memory of one device."""
        return self.plan.memory.peak


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
      ranked: all planned candidates that fit, best first.
      too_large: planned candidates that exceed the memory.
      front: the Pareto front of time and memory, fastest first, if requested.
      nearest: if nothing fits, the candidate that needs the least memory.
      hardware: the machine.
      devices: the number of devices.
      cap: the bytes that a device may use.
      objective: "time" or "memory".
      legal: the number of candidates.
      refused: the number of candidates that could not be lowered.
      by_memory: the number of candidates whose bound exceeds the memory.
      by_bound: the number of candidates whose bound is no better than the best.
      left_out: dims that were not searched: negligible, looped over, unsplittable in some op, or excluded.
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
        return f"<search of {self.legal} candidates on {self.devices} × {self.hardware.label}: {best}>"

    def __str__(self) -> str:
        return self.explain()

    def _repr_html_(self) -> str:
        from .page import search_summary

        return search_summary(self)

    def explain(self, compare: RankedLayout | None = None, rows: int = 10) -> str:
        """The result as text: the best layout, a table, and why it is better than `compare`."""
        from .report import explain

        return explain(self, compare, rows)

    def to_data(self, compare: RankedLayout | None = None) -> dict[str, Any]:
        """The result as JSON-compatible data."""
        from .report import result_to_data

        return result_to_data(self, compare)

    def to_html(self, compare: RankedLayout | None = None) -> str:
        """The result as one self-contained page: time against memory, and the table."""
        from .page import search_page

        return search_page(self, compare)
