"""The order in which a compiled module runs: every instruction that does something, with its number of runs.

The body of a loop counts once per iteration, of a conditional the branch with the most traffic. Loops whose
number of iterations depends on data count one, and are listed. `loops.py` finds the number of iterations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .hlo import Computation, HloModule, Instruction
from .loops import trip_count
from .traffic import traffic

# Instructions without work of their own. The end of an asynchronous operation belongs to its start.
FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "domain",
    "add-dependency",
}


@dataclass(frozen=True, eq=False)
class Step:
    """An instruction that runs.

    Attributes:
      position: its position in its computation.
      count: how often it runs in one call of the program.
      depth: the number of loops around it.
    """

    instruction: Instruction
    computation: Computation
    position: int
    count: int
    depth: int


@dataclass(frozen=True)
class HloSchedule:
    """The steps of a module.

    Attributes:
      unbounded: the loops whose number of iterations is not known; they count one.
    """

    module: HloModule
    steps: list[Step]
    unbounded: list[Instruction] = field(default_factory=list)


def read_schedule(module: HloModule) -> HloSchedule:
    """The steps of a module, in order."""
    schedule = HloSchedule(module, [])
    schedule.steps.extend(_walk(schedule, module.entry, 1, 0))
    return schedule


def _walk(schedule: HloSchedule, computation: Computation, count: int, depth: int) -> Iterator[Step]:
    module = schedule.module
    for position, instruction in enumerate(computation.instructions):
        opcode = instruction.opcode
        if opcode == "while":
            trips = trip_count(module, computation, instruction)
            if trips is None:
                schedule.unbounded.append(instruction)
            repeats = count * (1 if trips is None else trips)
            for part in ("condition", "body"):
                inside = module.computations[instruction.attribute(part)]
                yield from _walk(schedule, inside, repeats, depth + 1)
        elif opcode == "conditional":
            branches = [_branch(module, name, count, depth) for name in _branch_names(instruction)]
            largest = max(branches, key=_total_traffic)
            schedule.unbounded.extend(largest.unbounded)
            yield from largest.steps
        elif opcode in ("call", "call-start"):
            called = module.called(instruction)
            if called is not None:
                yield from _walk(schedule, called, count, depth)
        elif opcode not in FREE and not opcode.endswith(("-done", "-update")):
            yield Step(instruction, computation, position, count, depth)


def _branch_names(conditional: Instruction) -> list[str]:
    return conditional.listed("branch_computations") or [
        conditional.attribute("true_computation"),
        conditional.attribute("false_computation"),
    ]


def _branch(module: HloModule, name: str, count: int, depth: int) -> HloSchedule:
    """The schedule of a branch alone: its loops are listed only if it is counted."""
    schedule = HloSchedule(module, [])
    schedule.steps.extend(_walk(schedule, module.computations[name], count, depth))
    return schedule


def _total_traffic(branch: HloSchedule) -> int:
    return sum(traffic(branch.module, s.computation, s.instruction) * s.count for s in branch.steps)
