"""Observations: facts of a trace that its jaxpr no longer has. Plans and the layout search read them.

A jaxpr has arrays and axes, not dims. Which dims occur together in one tensor, which ones replace each other,
and which sums would become one under another layout is known only while the program is traced.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .dims import Dim


@dataclass(frozen=True)
class Pipeline:
    """A stack of layers that runs in pipeline stages.

    Attributes:
      layers: the dim of the layers.
      axes: the mesh axes of the stages.
      stages: the number of stages.
      batch: the dim whose rows stream through the stages.
      micro: the number of micro-batches; 0 for the default of that number of stages.
      schedule: the name of the schedule.
      recomputes: whether the backward pass recomputes the forward pass's matrix products.
    """

    layers: Dim
    axes: tuple[str, ...]
    stages: int
    batch: Dim
    micro: int
    schedule: str
    recomputes: bool


@dataclass
class Observations:
    """What a trace has seen.

    Attributes:
      seen_dims: the dims that have occurred, by name.
      pipelines: the pipelines, in order.
      joint_dims: the dims of each tensor, by role.
      vmapped_dims: the dims that a vmap hides from op labels.
      renamed: sets of dims that replace one another.
      same_sum_axes: the axes of sums that become one sum if their axes are equal.
      varied_axes: the axes over which an array was made varying, by its id.
    """

    seen_dims: dict[str, Dim] = field(default_factory=dict)
    pipelines: dict[Pipeline, None] = field(default_factory=dict)  # a set would lose the order
    joint_dims: set[tuple[str, tuple[Dim, ...]]] = field(default_factory=set)
    vmapped_dims: set[str] = field(default_factory=set)
    renamed: set[frozenset[str]] = field(default_factory=set)
    same_sum_axes: set[frozenset[frozenset[str]]] = field(default_factory=set)
    varied_axes: dict[int, frozenset[str]] = field(default_factory=dict)
