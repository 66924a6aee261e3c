"""The collectives of a compiled program: kind, axes, bytes, and the work that runs meanwhile.

A collective is one instruction, or a pair of a start and a done, or a chain: the TPU compiler fuses the
start, steps and the end of an all-gather with other work, and marks them with the same `chain_id`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..core.mesh import Mesh
from .hlo import Computation, HloModule, Instruction
from .schedule import HloSchedule, Step

KINDS = {
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "permute",
    "collective-broadcast": "permute",
}


@dataclass(frozen=True, eq=False)
class FoundCollective:
    """A collective in a schedule.

    Attributes:
      step: the step that starts it.
      inside: the computation that contains `instruction`, which is the step's or inside of it.
      ends: the position of its end in the step's computation; that of its start if it is synchronous.
    """

    step: Step
    inside: Computation
    instruction: Instruction
    ends: int

    @property
    def kind(self) -> str:
        return KINDS[self.instruction.opcode.removesuffix("-start")]


def find_collectives(schedule: HloSchedule) -> Iterator[FoundCollective]:
    """The collectives of a schedule, in order; a chain is one."""
    seen = set()
    for step in schedule.steps:
        for inside, instruction in _collectives_in(schedule.module, step):
            chain = re.search(r'chain_id="(\d+)"', instruction.attributes)
            key = (id(step.computation), chain[1]) if chain else (id(step.computation), step.position)
            if key in seen and chain:
                continue
            seen.add(key)
            ends = _end_of_chain(schedule.module, step, chain[0]) if chain else _end_of_pair(step)
            yield FoundCollective(step, inside, instruction, ends)


def _collectives_in(module: HloModule, step: Step) -> Iterator[tuple[Computation, Instruction]]:
    own = step.instruction
    if own.opcode.removesuffix("-start") in KINDS:
        yield step.computation, own
    elif own.opcode in ("fusion", "async-start"):
        for inside, one in module.fused(own):
            if one.opcode.removesuffix("-start") in KINDS:
                yield inside, one


def _end_of_pair(step: Step) -> int:
    """The position of the instruction that waits for an asynchronous start."""
    if not step.instruction.opcode.endswith("-start") or _is_synchronous(step.instruction):
        return step.position
    names = {step.instruction.name}
    for position, one in enumerate(step.computation.instructions[step.position + 1 :], step.position + 1):
        if not names.isdisjoint(one.operands):
            if one.opcode.endswith("-done"):
                return position
            if one.opcode.endswith("-update"):
                names.add(one.name)
    return step.position


def _is_synchronous(start: Instruction) -> bool:
    """Whether the GPU compiler runs a pair of start and done on the stream of all other work."""
    return bool(start.config.get("collective_backend_config", {}).get("is_sync"))


def _end_of_chain(module: HloModule, step: Step, mark: str) -> int:
    """The position of the last instruction of a chain."""
    last = step.position
    for position, one in enumerate(step.computation.instructions[step.position + 1 :], step.position + 1):
        if one.opcode == "fusion" and any(mark in inner.attributes for _, inner in module.fused(one)):
            last = position
    return last


def group_axes(found: FoundCollective, mesh: Mesh) -> tuple[tuple[str, ...], int]:
    """The mesh axes that a collective runs over, and the size of its groups."""
    groups = found.instruction.groups(mesh.size)
    if not groups or not mesh.axes:
        return (), 1
    sizes = [size for _, size in mesh.axes]
    if found.kind == "permute":
        sources, targets = (np.array(np.unravel_index(ids, sizes)) for ids in zip(*groups, strict=True))
        differs = (sources != targets).any(axis=1)
        axes = tuple(name for name, other in zip(mesh.names, differs, strict=True) if other)
        return axes, mesh.ways(axes)
    coordinates = np.array(np.unravel_index(groups[0], sizes))
    differs = (coordinates != coordinates[:, :1]).any(axis=1)
    return tuple(n for n, other in zip(mesh.names, differs, strict=True) if other), len(groups[0])


def operand_bytes(found: FoundCollective, members: int) -> tuple[int, list[int]]:
    """The bytes of a collective, by a plan's rule: of the operand, for an all-gather of the result; and those
    of each of the arrays that it sends."""
    one = found.instruction
    scale = members if found.kind == "all-gather" else 1
    sizes = []
    for n in range(len(one.operands)):
        arrays = found.inside.operand_arrays(one, n)
        sizes.append(scale * sum(array.bytes for array in arrays))
    return sum(sizes), sizes


def describing_name(found: FoundCollective, part: int) -> Instruction:
    """The instruction whose name describes an array that a collective sends.

    A merged collective has the name of one of its parts, or none. Those that take its results apart have
    the names of all.
    """
    results = found.step.computation
    holder = found.instruction if found.inside is results else found.step.instruction
    merged = len(found.instruction.operands) > 1
    if found.instruction.op_name and not merged:
        return found.instruction
    names = [holder.name]
    while names:
        name = names.pop(0)
        for user in results.users.get(name, ()):
            if user.opcode == "get-tuple-element" and int(user.attribute("index")) != part:
                continue
            if user.op_name:
                return user
            if user.opcode in ("get-tuple-element", "bitcast", "slice", "fusion") or "-done" in user.opcode:
                names.append(user.name)
    return found.instruction
