"""The facts of a plan: plain data, the same in text, JSON and HTML."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

VERSION = 1


@dataclass(frozen=True)
class Work:
    """Local work of one op of the language, in one phase.

    Attributes:
      op: its name with its dims, `einsum[batch,io · io,hidden → batch,hidden]`.
      phase: forward, backward or update.
      source: the user's `file:line`.
      kind: matmul, conv or other.
      dtype: of the result.
      flops: multiplications and additions of matrix products and convolutions, on one device, each time.
      unique_flops: the same over all devices, work that several of them do alike counted once.
      bytes: memory traffic on one device, each time; element-wise chains are fused.
      count: how often it runs in one call.
      varies: the axes along which devices do different work.
    """

    op: str
    phase: str
    source: str
    kind: str
    dtype: str
    flops: int
    unique_flops: int
    bytes: int
    count: int
    varies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
      kind: all-reduce, all-gather, reduce-scatter, all-to-all or permute.
      axes: the mesh axes that it runs over, in the order of the mesh.
      bytes: on one device: the operand's, for an all-gather the result's.
      count: how often it runs in one call.
      op, phase, source: as of `Work`.
      wire_bytes: what one device sends for it in a ring.
      varies: the axes along which what goes in differs.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int
    op: str
    phase: str
    source: str
    wire_bytes: int
    varies: tuple[str, ...] = ()

    @property
    def over(self) -> str:
        """Its axes as text, `pod+data`."""
        return "+".join(self.axes)

    def __str__(self) -> str:
        times = f" × {self.count}" if self.count != 1 else ""
        return f"{self.kind} over {self.over}: {self.bytes} bytes{times} ({self.op})"


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that goes into or comes out of a program.

    Attributes:
      name: its place in the arguments or results, `params.w`.
      kind: input or output.
      role: value, param or optimizer.
      dims: for each dim its name, size and the axes that split it.
      bytes: on one device, padding included.
      waste: the share of the stored elements that are padding.
    """

    name: str
    kind: str
    role: str
    dtype: str
    dims: tuple[tuple[str, int, tuple[str, ...]], ...]
    bytes: int
    waste: float


@dataclass(frozen=True)
class LiveBuffer:
    """A buffer that is alive at the peak."""

    bytes: int
    shape: str
    op: str
    phase: str
    source: str


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      params, optimizer, inputs, outputs: what is stored, by role; outputs that reuse a donated input
        are not counted again.
      activations: what is kept of the forward pass for the backward pass.
      peak: the most that is alive at any moment, all of the above included.
      largest: the largest buffers at that moment.
    """

    params: int
    optimizer: int
    inputs: int
    outputs: int
    activations: int
    peak: int
    largest: tuple[LiveBuffer, ...] = field(default_factory=tuple)


@dataclass(frozen=True)
class PipelinePlan:
    """Layers that run in stages, as a pipeline.

    Attributes:
      layers, count: the name of their dim, and how many there are.
      axes: along which the stages are.
      stages: how many there are.
      micro: how many micro-batches stream through.
      schedule: "gpipe" or "1f1b".
      ticks, back_ticks: of the forward and of the backward pass.
      bubble: the share of its time that a stage has nothing to do.
      sent: bytes that a device sends to the next stages in one call, along these axes for all pipelines.
      alike: the share of all FLOPs that is outside of pipelines, and done alike on all stages.
    """

    layers: str
    count: int
    axes: tuple[str, ...]
    stages: int
    micro: int
    schedule: str
    ticks: int
    back_ticks: int
    bubble: float
    sent: int
    alike: float


@dataclass(frozen=True)
class ReshardedInput:
    """An input that is laid out otherwise than the program wants it, and moved before each call.

    Attributes:
      name: its place in the arguments.
      given, wanted: its type as it is, and as the program wants it.
      bytes: what a device has to be sent of it, at most.
    """

    name: str
    given: str
    wanted: str
    bytes: int


@dataclass(frozen=True)
class UnboundedLoop:
    """A loop of which nobody can say beforehand how many rounds it has: one is counted.

    Attributes:
      op, source: as of `Work`.
    """

    op: str
    source: str


@dataclass(frozen=True)
class ScheduleBar:
    """What a stage does for a while: a micro-batch forward, again, or backward; times are relative."""

    stage: int
    kind: str
    micro: int
    start: float
    length: float


@dataclass(frozen=True)
class Advice:
    """Something worth knowing, or worth changing."""

    level: str  # "warning" or "advice"
    text: str
    source: str = ""


Event = Work | Collective


def to_jsonable(x: Any) -> Any:
    """Facts as JSON's kinds of things."""
    if is_dataclass(x):
        return {f.name: to_jsonable(getattr(x, f.name)) for f in fields(x)}
    if isinstance(x, dict):
        return {str(k): to_jsonable(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [to_jsonable(v) for v in x]
    return x
