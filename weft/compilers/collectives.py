"""The collectives of a compiled program: kind, axes, bytes, and the work that runs meanwhile.

A collective is one instruction, or a pair of a start and a done, or a chain: the TPU compiler fuses the
start, steps and the end of an all-gather with other work, and marks them with the same `chain_id`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..core.mesh import Mesh
from .hlo import Computation, HloModule, Instruction
from .op_names import merged_names, parse_op_name, primitive_of
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
        """all-reduce, all-gather, reduce-scatter, all-to-all or permute."""
        opcode = self.instruction.opcode.removesuffix("-start")
        # The TPU compiler's name of a fusion that sends each device its slice of the sum only.
        is_scatter = opcode == "all-reduce" and self.inside.name.startswith("all-reduce-scatter")
        return "reduce-scatter" if is_scatter else KINDS[opcode]


def find_collectives(schedule: HloSchedule) -> Iterator[FoundCollective]:
    """The collectives of a schedule, in order; a chain is one."""
    latest: dict[tuple[int, str], int] = {}
    for step in schedule.steps:
        for inside, instruction in _collectives_in(schedule.module, step):
            chain = re.search(r'chain_id="\d+"', instruction.attributes)
            if chain is None:
                yield FoundCollective(step, inside, instruction, _end_of_pair(step))
                continue
            # A computation that is called again starts its chains again.
            key = id(step.computation), chain[0]
            is_first = key not in latest or step.position < latest[key]
            latest[key] = step.position
            if is_first:
                yield FoundCollective(
                    step, inside, instruction, _end_of_chain(schedule.module, step, chain[0])
                )


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
    if found.instruction.opcode.startswith("collective-permute"):  # a broadcast has groups
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
    # The other operands of a ragged one are its result's memory, offsets and sizes.
    sent = 1 if one.opcode.startswith("ragged") else len(one.operands)
    arrays = [found.inside.operand_arrays(one, n) for n in range(sent)]
    sizes = [scale * sum(array.bytes for array in parts) for parts in arrays]
    return sum(sizes), sizes


# Names


def describing_name(found: FoundCollective, part: int) -> Instruction:
    """An instruction with the name that describes an array that a collective sends.

    A merged collective has the name of one of its parts, or none; the GPU compiler merges the names, too.
    Instructions that take its results apart have the name of the part. Without these, a sum has the name of
    what is summed, and other collectives that of what uses the result.
    """
    own = found.instruction
    names = merged_names(own.op_name)
    if len(names) > 1:
        return _renamed(own, names[part if len(names) == len(own.operands) else 0])
    if own.op_name and len(own.operands) == 1:
        return own
    parts, users = _users_by_role(found, part)
    if parts:
        return max(parts, key=lambda one: one.bytes)
    summed = _summed(found, part) if found.kind in ("all-reduce", "reduce-scatter") else None
    return summed or next(iter(users), own)


def _users_by_role(found: FoundCollective, part: int) -> tuple[list[Instruction], list[Instruction]]:
    """The named instructions that take a result apart, and those that use it."""
    computation = found.step.computation
    holder = found.instruction if found.inside is computation else found.step.instruction
    parts: list[Instruction] = []
    users: list[Instruction] = []
    names, seen = [holder.name], {holder.name}
    tuples = {holder.name}  # of all results
    while names:
        name = names.pop(0)
        for user in computation.users[name]:
            if user.opcode == "get-tuple-element" and name in tuples and int(user.attribute("index")) != part:
                continue
            is_done = user.opcode.endswith("-done")
            if user.op_name and not is_done:
                takes_part = user.opcode in PARTS or user.name.startswith("wrapped_slice")
                (parts if takes_part else users).append(user)
            elif (is_done or user.opcode in (*MOVES, "fusion")) and user.name not in seen:
                seen.add(user.name)
                names.append(user.name)
                tuples |= {user.name} if is_done else set()
    return parts, users


# Instructions that take the results of a merged collective apart.
PARTS = ("bitcast", "get-tuple-element", "reshape", "slice")
# Instructions between a collective and what computes its operand.
MOVES = (*PARTS, "convert", "copy", "copy-done", "copy-start", "transpose")


def _summed(found: FoundCollective, part: int) -> Instruction | None:
    """What computes an array that a collective sums, with a name that ends before its primitive."""
    made = found.inside.by_name.get(found.instruction.operands[part])
    while made is not None and not parse_op_name(made.op_name).ops:
        made = found.inside.by_name.get(made.operands[0]) if made.opcode in MOVES else None
    if made is None:
        return None
    primitive = primitive_of(made.op_name)
    return _renamed(made, made.op_name.removesuffix(f"/{primitive}") if primitive else made.op_name)


def _renamed(instruction: Instruction, name: str) -> Instruction:
    """An instruction with another name, from the same line of the source."""
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    frame = instruction.stack_frame
    return replace(instruction, attributes=f'metadata={{op_name="{escaped}" stack_frame_id={frame}}}')
