"""The arrays that are live when a compiled program needs the most memory.

The compilers report the sum, not its parts. So they are found from the schedule: an array lives from the
instruction that computes it to its last use. Some instructions compute no new array: views and parts of
tuples, updates in place, loops, whose state stays where it is, and results that reuse a donated argument.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .hlo import Array, Computation, HloModule, Instruction

# Instructions whose results are (parts of) their operands.
RENAMING = ("bitcast", "opt-barrier", "domain", "add-dependency", "copy-done", "optimization-barrier")
NAMING = (*RENAMING, "get-tuple-element", "tuple")
_ALIASES = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")


@dataclass(eq=False)
class Allocation:
    """An array in memory.

    Attributes:
      array: its type.
      made_by: the instruction that computes it.
      bytes: what it takes in the main memory; 0 if it reuses the memory of another.
      last: the position of its last use in its computation.
    """

    array: Array
    made_by: Instruction
    bytes: int
    last: int = 0


@dataclass
class _Peak:
    """The largest sum of live arrays in a computation, and these arrays."""

    bytes: int = 0
    live: list[Allocation] = field(default_factory=list)


def live_at_peak(module: HloModule) -> list[Allocation]:
    """The arrays that are live at the peak, the largest first, without the arguments of the program."""
    reused = {int(out or 0) for out, _, _ in _ALIASES.findall(module.aliases)}
    peak = _peak_of(module, module.entry, reused)
    return sorted(peak.live, key=lambda one: -one.bytes)


def _peak_of(module: HloModule, computation: Computation, in_place: set[int] | None) -> _Peak:
    """The peak of a computation.

    Args:
      module: the module.
      computation: the computation.
      in_place: the numbers of its results that reuse memory of the caller; None: all of them do.
    """
    values: dict[str, list[Allocation]] = {}
    made: list[list[Allocation]] = []
    for position, one in enumerate(computation.instructions):
        values[one.name], new = _results(module, computation, one, values)
        # A view, or a part of a tuple, is no use of what it names.
        uses = () if one.opcode in NAMING else one.operands
        for allocation in (a for name in uses for a in values.get(name, ())):
            allocation.last = position
        for allocation in new:
            allocation.last = position
        made.append(new)
    end = len(computation.instructions)
    for n, allocation in enumerate(values[computation.root.name]):
        allocation.last = end
        if in_place is None or n in in_place:
            allocation.bytes = 0
    peak, live = _Peak(), list[Allocation]()
    for position, one in enumerate(computation.instructions):
        live = [a for a in live if a.last >= position] + made[position]
        inner = _inner_peak(module, one)
        total = sum(a.bytes for a in live) + inner.bytes
        if total > peak.bytes:
            peak = _Peak(total, [a for a in live if a.bytes] + inner.live)
    return peak


def _inner_peak(module: HloModule, one: Instruction) -> _Peak:
    """The peak of the computations that an instruction runs."""
    names = [one.attribute(key) for key in ("body", "true_computation", "false_computation")]
    names += one.listed("branch_computations") + ([one.attribute("to_apply")] if one.opcode == "call" else [])
    called = [module.computations[name] for name in names if name in module.computations]
    return max((_peak_of(module, inner, None) for inner in called), key=lambda p: p.bytes, default=_Peak())


def _results(
    module: HloModule, computation: Computation, one: Instruction, values: dict[str, list[Allocation]]
) -> tuple[list[Allocation], list[Allocation]]:
    """The allocations of the results of an instruction, and those that are new."""
    operands = [values.get(name, []) for name in one.operands]
    if one.opcode == "get-tuple-element":
        start, count = _elements(computation, one)
        return operands[0][start : start + count], []
    if one.opcode == "tuple":
        return [a for operand in operands for a in operand], []
    if one.opcode == "while" or one.opcode in RENAMING or one.opcode.endswith("-done"):
        given = operands[0] if operands else []
        return given[: max(1, len(one.arrays))] if one.opcode != "while" else given, []
    if one.opcode in ("parameter", "constant"):
        return [Allocation(array, one, 0) for array in one.arrays], []
    shared = dict(_in_place(module, one))
    repeated = _repeated_operands(computation, one)
    results, new = [], []
    for n, array in enumerate(one.arrays):
        operand = operands[shared[n]] if n in shared and shared[n] < len(operands) else []
        if operand:
            results.append(operand[0])
            continue
        allocation = Allocation(array, one, 0 if n in repeated else array.memory_bytes)
        # The result of a start comes after its operands; its end takes the first array.
        results.insert(0 if one.opcode.endswith("-start") and n not in repeated else n, allocation)
        new.append(allocation)
    return results, new


def _repeated_operands(computation: Computation, start: Instruction) -> range:
    """The arrays in the type of an asynchronous start that are its operands."""
    if start.opcode == "copy-start":
        return range(1, len(start.arrays))
    if not start.opcode.endswith("-start"):
        return range(0)
    arrays = [a for n in range(len(start.operands)) for a in computation.operand_arrays(start, n)]
    leading = start.arrays[: len(arrays)]
    is_repeated = len(start.arrays) > len(arrays) and [a.shape for a in leading] == [a.shape for a in arrays]
    return range(len(arrays) if is_repeated else 0)


def _elements(computation: Computation, part: Instruction) -> tuple[int, int]:
    """The first array of a part of a tuple, and the number of its arrays; tuples may be nested."""
    outer = computation.by_name.get(part.operands[0])
    index = int(part.attribute("index"))
    if outer is None or "((" not in outer.type:
        return index, 1
    return index, len(part.arrays)


def _in_place(module: HloModule, one: Instruction) -> Iterator[tuple[int, int]]:
    """The results that reuse the memory of an operand: pairs of their numbers."""
    if one.opcode == "dynamic-update-slice":
        yield 0, 0
    elif one.opcode == "fusion":
        for out, operand, _ in _ALIASES.findall(one.attributes):
            yield int(out or 0), int(operand)
        called = module.called(one)
        root = called.root if called is not None else None
        for n, name in enumerate(root.operands if root is not None and root.opcode == "tuple" else [""]):
            made = called.by_name.get(name, root) if called is not None else None
            while made is not None and made.opcode == "bitcast":
                made = called.by_name.get(made.operands[0]) if called is not None else None
            if made is not None and made.opcode == "dynamic-update-slice":
                target = called.by_name.get(made.operands[0]) if called is not None else None
                if target is not None and target.opcode == "parameter":
                    yield n, int(target.argument)
