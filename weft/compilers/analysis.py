"""From the text of a compiled program to its facts: work, collectives, padding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..core.labels import OpLabel
from ..core.mesh import Mesh
from ..hardware.profile import Hardware
from ..hardware.topology import Assignment
from ..plan.events import wire_bytes
from ..plan.facts import Collective, UnboundedLoop
from ..plan.network import collective_seconds
from . import costs
from .collectives import FoundCollective, describing_name, find_collectives, group_axes, operand_bytes
from .estimates import estimates_of
from .facts import CompiledCollective, CompiledWork, LiveArray, PaddedArray
from .hlo import Array, Instruction, parse_hlo
from .live_arrays import Allocation, live_at_peak
from .op_names import REQUESTED, parse_op_name
from .process import CompilerOutput
from .schedule import Step, read_schedule
from .target import Target

MOST_LIVE = 24  # rows
MOST_PADDED = 12
LEAST_PADDING = 1 << 20  # bytes; smaller losses are not listed


@dataclass(frozen=True)
class Analysis:
    """The facts that are read off the text of a compiled program."""

    work: tuple[CompiledWork, ...]
    collectives: tuple[CompiledCollective, ...]
    largest: tuple[LiveArray, ...]
    padded: tuple[PaddedArray, ...]
    loops: tuple[UnboundedLoop, ...]


def analyze(output: CompilerOutput, target: Target, mesh: Mesh, assignment: Assignment) -> Analysis:
    """The facts of a compiled program."""
    reader = _Reader(output, target, mesh, assignment)
    found = list(find_collectives(reader.schedule))
    starts = {id(one.step) for one in found}
    steps = [step for step in reader.schedule.steps if id(step) not in starts or reader.has_work(step)]
    work = {id(step): reader.work(step) for step in steps}
    work |= _exposed_prefetches(steps, work, target.hardware)
    hidden = [reader.hidden_seconds(one, steps, work) for one in found]
    return Analysis(
        tuple(work.values()),
        tuple(reader.collective(one, seconds) for one, seconds in zip(found, hidden, strict=True)),
        tuple(reader.largest()),
        tuple(reader.padded()),
        tuple(UnboundedLoop(*reader.origin(one)[::2]) for one in reader.schedule.unbounded),
    )


class _Reader:
    """Reads the instructions of one module."""

    def __init__(self, output: CompilerOutput, target: Target, mesh: Mesh, assignment: Assignment):
        self.module = parse_hlo(output.hlo)
        self.schedule = read_schedule(self.module)
        self.hardware, self.mesh, self.assignment = target.hardware, mesh, assignment
        self.estimate = estimates_of(target, output.costs)
        self.seen_backward = False

    def origin(self, instruction: Instruction) -> tuple[OpLabel, str, str]:
        """The op, the phase and the source line of an instruction."""
        scope = parse_op_name(instruction.op_name)
        phase = scope.phase(self.seen_backward)
        self.seen_backward |= phase == "backward"
        return scope.op, phase, self.module.source(instruction)

    def has_work(self, step: Step) -> bool:
        """Whether a step that starts a collective also does other work: that of a chain does."""
        return costs.flops(self.module, step.computation, step.instruction) > 0

    def work(self, step: Step) -> CompiledWork:
        one, where = step.instruction, step.computation
        flops, size = costs.flops(self.module, where, one), costs.traffic(self.module, where, one)
        op, phase, source = self.origin(one if one.op_name else self._named(step))
        dtype = costs.product_dtype(self.module, where, one)
        return CompiledWork(
            op=op,
            phase=phase,
            source=source,
            instruction=one.name,
            kind=costs.kind_of(self.module, one),
            shape=", ".join(str(array) for array in one.arrays if array.shape and array.dtype != "s8"),
            flops=flops,
            bytes=size,
            count=step.count,
            roofline_seconds=roofline(flops, size, dtype, self.hardware),
            estimated_seconds=self.estimate(self.module, where, one),
        )

    def _named(self, step: Step) -> Instruction:
        """An instruction with a name, for one without: an operand's, or a user's."""
        by_name = step.computation.by_name
        near = [by_name[n] for n in step.instruction.operands if n in by_name]
        near += step.computation.users[step.instruction.name]
        # "args[0]" is the name of a parameter.
        named = (one for one in near if parse_op_name(one.op_name).ops)
        return next(named, step.instruction)

    def hidden_seconds(
        self, found: FoundCollective, steps: list[Step], work: dict[int, CompiledWork]
    ) -> float:
        """The roofline of the work that runs between the start and the end of a collective, each time."""
        if found.ends == found.step.position:
            return 0.0
        between = range(found.step.position, found.ends + 1)
        inside = (
            step for step in steps if step.computation is found.step.computation and step.position in between
        )
        return sum(work[id(step)].roofline_seconds for step in inside)

    def collective(self, found: FoundCollective, hidden: float) -> CompiledCollective:
        axes, members = group_axes(found, self.mesh)
        size, parts = operand_bytes(found, members)
        largest = max(range(len(parts)), key=parts.__getitem__, default=0)
        named = describing_name(found, largest)
        op, phase, source = self.origin(named)
        operand = found.inside.operand_arrays(found.instruction, largest)
        planned = Collective(
            found.kind, axes, size, 1, op, phase, source, wire_bytes(found.kind, size, self.mesh.ways(axes))
        )
        return CompiledCollective(
            kind=found.kind,
            requested=REQUESTED.get(parse_op_name(named.op_name).other, ""),
            axes=axes,
            dtype=operand[0].dtype if operand else "",
            bytes=size,
            arrays=len(parts),
            count=found.step.count,
            asynchronous=hidden > 0,
            hidden_seconds=hidden,
            network_seconds=collective_seconds(planned, self.mesh, self.hardware, self.assignment),
            estimated_seconds=self.estimate(self.module, found.step.computation, found.step.instruction),
            op=op,
            phase=phase,
            source=source,
            instruction=found.step.instruction.name,
        )

    def largest(self) -> Iterator[LiveArray]:
        """The largest arrays that are live at the peak; equal ones are one row."""
        groups: dict[tuple[Array, str], list[Allocation]] = defaultdict(list)
        for allocation in live_at_peak(self.module):
            groups[allocation.array, allocation.made_by.op_name].append(allocation)
        ordered = sorted(groups.items(), key=lambda item: -item[1][0].bytes * len(item[1]))
        for (array, _), group in ordered[:MOST_LIVE]:
            op, phase, source = self.origin(group[0].made_by)
            yield LiveArray(op, phase, source, str(array), group[0].bytes, len(group))

    def padded(self) -> Iterator[PaddedArray]:
        """The arrays that lose the most memory to padding."""
        lost: dict[Array, tuple[int, Instruction]] = {}
        for computation in self.module.computations.values():
            for one in computation.instructions:
                for array in one.arrays:
                    padding = array.memory_bytes - array.bytes
                    if padding >= LEAST_PADDING and array not in lost and one.op_name:
                        lost[array] = padding, one
        largest = sorted(lost.items(), key=lambda item: -item[1][0])
        for array, (_, one) in largest[:MOST_PADDED]:
            op, _, source = self.origin(one)
            tile = f" in tiles of {'x'.join(map(str, array.tile))}" if array.tile else ""
            yield PaddedArray(op, source, f"{array}{tile}", array.bytes, array.padded_bytes)


def roofline(flops: int, size: int, dtype: str, hardware: Hardware) -> float:
    """The longer of the times of FLOPs and of memory traffic, as a plan computes it."""
    compute = flops / (hardware.peak(dtype) * hardware.matmul_efficiency) if flops else 0.0
    return max(compute, size / hardware.memory_bandwidth)


def _exposed_prefetches(
    steps: list[Step], work: dict[int, CompiledWork], hardware: Hardware
) -> dict[int, CompiledWork]:
    """The prefetches, each with the part of its time that the other work of its computation does not hide.

    While FLOPs bound the work, the memory is free for prefetches.
    """
    needed: dict[int, float] = defaultdict(float)
    free: dict[int, float] = defaultdict(float)
    for step in steps:
        one = work[id(step)]
        if one.kind == "prefetch":
            needed[id(step.computation)] += one.roofline_seconds
        elif one.flops:
            free[id(step.computation)] += one.roofline_seconds - one.bytes / hardware.memory_bandwidth
    shares = {key: max(0.0, 1 - free[key] / seconds) for key, seconds in needed.items() if seconds}
    return {
        id(step): replace(
            work[id(step)],
            roofline_seconds=work[id(step)].roofline_seconds * shares.get(id(step.computation), 1.0),
        )
        for step in steps
        if work[id(step)].kind == "prefetch"
    }
