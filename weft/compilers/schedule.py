"""The order in which a compiled module runs: every instruction that does something, with its number of runs.

The body of a loop counts once per iteration, of a conditional the branch with the most traffic. Loops whose
number of iterations depends on data count one, and are listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .hlo import Computation, HloModule, Instruction

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
        if instruction.opcode == "while":
            trips = trip_count(module, computation, instruction)
            if trips is None:
                schedule.unbounded.append(instruction)
            body = module.computations[instruction.attribute("body")]
            yield from _walk(schedule, body, count * (1 if trips is None else trips), depth + 1)
        elif instruction.opcode == "conditional":
            names = instruction.listed("branch_computations") or [
                instruction.attribute("true_computation"),
                instruction.attribute("false_computation"),
            ]
            branches = [list(_walk(schedule, module.computations[n], count, depth)) for n in names]
            yield from max(branches, key=lambda steps: sum(s.instruction.bytes * s.count for s in steps))
        elif instruction.opcode == "call":
            called = module.called(instruction)
            if called is not None:
                yield from _walk(schedule, called, count, depth)
        elif instruction.opcode not in FREE and not instruction.opcode.endswith("-done"):
            yield Step(instruction, computation, position, count, depth)


def trip_count(module: HloModule, outer: Computation, loop: Instruction) -> int | None:
    """The number of iterations of a loop, or None if it depends on data.

    The GPU compiler states it. For the others it is read off the condition, which compares a counter of the
    loop's state with a constant, from the counter's first value, and from its step in the body.
    """
    known = loop.config.get("known_trip_count", {}).get("n")
    if known is not None:
        return int(known)
    condition = module.computations[loop.attribute("condition")]
    compared = _comparison(module, condition)
    if compared is None:
        return None
    index, limit, direction = compared
    start = _constant(outer, _element(outer, loop.operands[0], index))
    body = module.computations[loop.attribute("body")]
    step = _counter_step(module, body, index)
    if step is None or direction not in ("LT", "LE", "GT", "GE", "NE"):
        return None
    span = (limit - (start or 0)) * (1 if step > 0 else -1)
    span += direction in ("LE", "GE")
    return max(0, -(-span // abs(step)))


def _comparison(module: HloModule, condition: Computation) -> tuple[int, int, str] | None:
    """The element of the state that a condition compares, the constant, and the direction."""
    root = condition.root
    compare, inside, names = root, condition, list(root.operands)
    if root.opcode == "fusion":
        called = module.called(root)
        if called is None:
            return None
        compare, inside = called.root, called
        # Parameters of the fusion stand for its operands.
        given = {p.name: root.operands[n] for n, p in called.parameters.items() if n < len(root.operands)}
        names = [given.get(name, name) for name in compare.operands]
    if compare.opcode != "compare" or len(names) != 2:
        return None
    direction = compare.attribute("direction")
    values = [_constant(condition, n) if n in condition.by_name else _constant(inside, n) for n in names]
    if values[0] is not None and values[1] is None:
        flipped = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}
        names, values, direction = names[::-1], values[::-1], flipped.get(direction, direction)
    element = condition.by_name.get(names[0])
    if values[1] is None or element is None or element.opcode != "get-tuple-element":
        return None
    return int(element.attribute("index")), values[1], direction


def _element(computation: Computation, name: str, index: int) -> str:
    """The name of an element of a tuple."""
    made = computation.by_name.get(name)
    if made is None or made.opcode != "tuple" or index >= len(made.operands):
        return ""
    return made.operands[index]


def _constant(computation: Computation, name: str) -> int | None:
    """The value of an integer constant, also behind copies."""
    made = computation.by_name.get(name)
    while made is not None and made.opcode in ("copy", "bitcast") and made.operands:
        made = computation.by_name.get(made.operands[0])
    if made is None or made.opcode != "constant":
        return None
    try:
        return int(made.argument)
    except ValueError:
        return None


def _counter_step(module: HloModule, body: Computation, index: int) -> int | None:
    """What an iteration adds to an element of the state."""
    name = _element(body, body.root.name, index)
    made, inside = body.by_name.get(name), body
    while made is not None and made.opcode == "copy":
        made = inside.by_name.get(made.operands[0])
    if made is not None and made.opcode == "fusion":
        called = module.called(made)
        if called is None:
            return None
        # A constant may be an operand of the fusion.
        given = {p.name: made.operands[n] for n, p in called.parameters.items()}
        made = called.root
        values = [_constant(called, n) for n in made.operands]
        values += [_constant(body, given[n]) for n in made.operands if n in given]
    else:
        values = [_constant(inside, n) for n in made.operands] if made is not None else []
    found = [value for value in values if value is not None]
    return found[0] if made is not None and made.opcode == "add" and len(found) == 1 else None
