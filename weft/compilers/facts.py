"""The facts of a compiled program: plain data, the same in text, JSON and HTML. Field names are the JSON
format. `Work` and `Collective` of a plan are what the program requests; these are what will run."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.labels import OpLabel
from ..plan.facts import OfOp

VERSION = 1


@dataclass(frozen=True)
class CompiledMemory:
    """Bytes of one device, as the compiler assigned them.

    Attributes:
      arguments, outputs: of the program.
      aliased: outputs that reuse the memory of donated arguments.
      temporaries: everything between.
      code: the program itself.
      peak: arguments, outputs and temporaries, without what is aliased.
      available: the memory of a device.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    available: int

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @property
    def fits(self) -> bool:
        """Whether the program fits the device. The compilers don't check it for every target."""
        return self.peak + self.code <= self.available


@dataclass(frozen=True)
class CompiledWork(OfOp):
    """The local work of one instruction.

    Attributes:
      op, phase, source: as of `plan.facts.Work`.
      instruction: its name in the compiled program.
      kind: matmul, elementwise, reduce, copy, prefetch, random, update, gather, scatter, sort, or the custom
        call.
      shape: its result.
      flops: of matmuls and convolutions, each time.
      bytes: what it reads from and writes to the main memory, each time.
      count: how often it runs in one call.
      roofline_seconds: the longer of the times of its FLOPs and of its bytes, each time; of a prefetch what
        other work of the same computation does not hide.
      estimated_seconds: the compiler's own estimate, each time; None if it has none.
    """

    op: OpLabel
    phase: str
    source: str
    instruction: str
    kind: str
    shape: str
    flops: int
    bytes: int
    count: int
    roofline_seconds: float
    estimated_seconds: float | None

    @property
    def likely_seconds(self) -> float:
        """The compiler's estimate, or the roofline if it has none, each time."""
        return self.roofline_seconds if self.estimated_seconds is None else self.estimated_seconds


@dataclass(frozen=True)
class CompiledCollective(OfOp):
    """A collective as compiled.

    Attributes:
      kind: all-reduce, all-gather, reduce-scatter, all-to-all or permute.
      requested: the kind that the program requests; "" if its name is lost.
      axes: the mesh axes that it runs over.
      dtype: of its largest array.
      bytes: as of `plan.facts.Collective`, each time.
      arrays: the number of collectives that the compiler merged into this one.
      count: how often it runs in one call.
      asynchronous: whether other work runs between its start and its end.
      hidden_seconds: the roofline of that work, each time.
      network_seconds: the time on the target's network, each time, by the network model of plans.
      estimated_seconds: the compiler's own estimate, each time; None if it has none.
      op, phase, source: as of `plan.facts.Work`, of its largest array.
      instruction: its name in the compiled program.
    """

    kind: str
    requested: str
    axes: tuple[str, ...]
    dtype: str
    bytes: int
    arrays: int
    count: int
    asynchronous: bool
    hidden_seconds: float
    network_seconds: float
    estimated_seconds: float | None
    op: OpLabel
    phase: str
    source: str
    instruction: str

    @property
    def over(self) -> str:
        """Its axes as text, `pod+data`."""
        return "+".join(self.axes)

    @property
    def exposed_seconds(self) -> float:
        """The time that nothing overlaps with, each time."""
        return max(0.0, self.network_seconds - self.hidden_seconds)


@dataclass(frozen=True)
class LiveArray(OfOp):
    """An array that is live when the program needs the most memory; arguments are not among them.

    Attributes:
      op, phase, source: as of `plan.facts.Work`, of the instruction that computes it.
      shape: its type.
      bytes: what it takes, with padding.
      count: the number of such arrays.
    """

    op: OpLabel
    phase: str
    source: str
    shape: str
    bytes: int
    count: int


@dataclass(frozen=True)
class PaddedArray(OfOp):
    """An array that takes more memory than its elements, because the compiler pads it to full tiles.

    Attributes:
      op, source: as of `plan.facts.Work`.
      shape: with the tile.
      bytes: its elements.
      padded_bytes: what it takes.
    """

    op: OpLabel
    source: str
    shape: str
    bytes: int
    padded_bytes: int
