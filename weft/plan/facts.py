"""The facts of a plan: plain data, the same in text, JSON and HTML. Field names are the JSON format."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from ..core.labels import OpLabel
from ..core.types import PyTree

VERSION = 2  # a golden file of another format is reported as such, not as a changed plan


class OfOp:
    """A fact about an op."""

    op: OpLabel

    @property
    def layer(self) -> str:
        """The path of the layer that calls the op, `decoder.block.attention`, or ""."""
        return self.op.layer

    @property
    def op_in_layer(self) -> str:
        """The op and its layer as text, `relu[batch,d_ff] in decoder.block`."""
        return f"{self.op} in {self.layer}" if self.layer else str(self.op)


@dataclass(frozen=True)
class Work(OfOp):
    """The local work of one op in one phase.

    Attributes:
      op: its label, `einsum[batch,io · io,hidden → batch,hidden]`.
      phase: forward, backward or update.
      source: the user's `file:line`.
      kind: matmul, conv, factorization, fft or other.
      dtype: the dtype of the result.
      flops: multiplications and additions of matmuls, convolutions, factorizations and Fourier transforms, on
        one device, each time.
      unique_flops: the same over all devices; work that several devices duplicate counts once.
      bytes: memory traffic on one device, each time; elementwise chains are fused.
      count: how often it runs in one call.
      varies: the axes along which devices do different work.
    """

    op: OpLabel
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
class Collective(OfOp):
    """One collective.

    Attributes:
      kind: all-reduce, all-gather, reduce-scatter, all-to-all or permute.
      axes: the mesh axes it runs over, in mesh order.
      bytes: bytes on one device: of the operand, for an all-gather of the result.
      count: how often it runs in one call.
      op, phase, source: as of `Work`.
      wire_bytes: bytes that one device sends in a ring.
      varies: the axes along which the operand differs.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int
    op: OpLabel
    phase: str
    source: str
    wire_bytes: int
    varies: tuple[str, ...] = ()

    @property
    def over(self) -> str:
        """Its axes as text, `pod+data`."""
        return "+".join(self.axes)

    def __str__(self) -> str:
        suffix = f" × {self.count}" if self.count != 1 else ""
        return f"{self.kind} over {self.over}: {self.bytes} bytes{suffix} ({self.op_in_layer})"


@dataclass(frozen=True)
class PlannedTensor:
    """An input or output of a program.

    Attributes:
      name: its path in the arguments or results, `params.w`.
      kind: input or output.
      role: value, param or optimizer.
      dims: name, size and axes of each dim.
      bytes: bytes on one device, padding included.
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
class LiveBuffer(OfOp):
    """A buffer that is live at the peak; `op`, `phase` and `source` are those of the work that writes it."""

    bytes: int
    shape: str
    op: OpLabel
    phase: str
    source: str


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      params, optimizer: the inputs with these roles.
      inputs: all inputs.
      outputs: outputs that do not reuse a donated input.
      activations: results of the forward pass that are saved for the backward pass.
      peak: the largest sum of all live buffers, including all of the above.
      largest: the largest live buffers at the peak.
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
    """A stack of layers that runs as a pipeline.

    Attributes:
      layers, count: the name and size of the layers dim.
      axes: the axes of the stages.
      stages: the number of stages.
      micro: the number of micro-batches.
      schedule: "gpipe" or "1f1b".
      ticks, back_ticks: ticks of the forward and of the backward pass.
      bubble: the share of its time that a stage is idle.
      sent: bytes that a device sends to other stages in one call, over all pipelines on these axes.
      duplicated_share: the share of all FLOPs that runs outside of pipelines and is duplicated on all stages.
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
    duplicated_share: float


@dataclass(frozen=True)
class ReshardedInput:
    """An input whose layout differs from the program's; it is resharded before each call.

    Attributes:
      name: its path in the arguments.
      given, wanted: its type as passed, and as the program needs it.
      bytes: the most bytes that a device receives.
    """

    name: str
    given: str
    wanted: str
    bytes: int


@dataclass(frozen=True)
class UnboundedLoop(OfOp):
    """A loop whose number of iterations is not known before it runs; the plan counts one.

    Attributes:
      op, source: as of `Work`.
    """

    op: OpLabel
    source: str


@dataclass(frozen=True)
class UnknownPrimitive(OfOp):
    """A JAX primitive without a row in the table of primitives; its cost is a guess.

    Attributes:
      primitive: its name.
      op, source: as of `Work`, of its first use.
    """

    primitive: str
    op: OpLabel
    source: str


@dataclass(frozen=True)
class ScheduleBar:
    """One micro-batch on one stage, in relative time; `kind` is forward, recompute or backward."""

    stage: int
    kind: str
    micro: int
    start: float
    length: float


@dataclass(frozen=True)
class Advice:
    """A warning, or a suggestion for a better layout.

    Attributes:
      level: "warning" or "advice".
      text: the message.
      source: the user's `file:line`, or "".
    """

    level: str
    text: str
    source: str = ""


Event = Work | Collective


def to_jsonable(x: PyTree) -> Any:
    """Facts as JSON-compatible data."""
    if is_dataclass(x):
        data = {f.name: to_jsonable(getattr(x, f.name)) for f in fields(x)}
        return {**data, "layer": x.layer} if isinstance(x, OfOp) else data
    if isinstance(x, dict):
        return {str(k): to_jsonable(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [to_jsonable(v) for v in x]
    return x
