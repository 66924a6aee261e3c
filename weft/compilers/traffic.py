"""The memory traffic of compiled instructions: what they read from and write to the device's main memory.

With the padding of tiles. A slice of an array counts as the slice, an update in place as the update, and an
array that the compiler put on the chip as nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .flops import call_target, declared_cost, parts_of
from .hlo import MAIN_MEMORY, Array, Computation, HloModule, Instruction

# Instructions that give an array another shape or name, and move nothing.
VIEWS = ("bitcast", "reshape")
PASSING = (*VIEWS, "copy", "convert", "transpose")  # each element of the result is one of the operand
# Between an operand of a fusion and its update in place. The TPU compiler writes another tiling as a copy.
IN_PLACE = (*VIEWS, "copy")
SLICES = ("dynamic-slice", "slice", "gather")


def traffic(module: HloModule, computation: Computation, instruction: Instruction) -> int:
    """The bytes of main memory that one run of an instruction reads and writes."""
    opcode = instruction.opcode
    if opcode == "copy-start":
        return _copied(instruction)
    opcode = opcode.removesuffix("-start")
    results = _results(computation, instruction)
    given = [computation.operand_arrays(instruction, n) for n in range(len(instruction.operands))]
    if opcode in ("fusion", "async"):
        results = _without_workspace(module, computation, instruction, results)
        return _fusion_traffic(module, computation, instruction, results)
    if opcode in SLICES:
        # A gather also reads its indices; the first element of a slice is a scalar.
        return _padded(results) * _is_main(given[0]) + _memory(results) + sum(map(_memory, given[1:]))
    if opcode == "dynamic-update-slice":
        return _memory(given[1]) + _padded(given[1]) * _is_main(results)
    if opcode == "scatter":
        # The operands are the arrays, the indices, and the updates of each array.
        arrays, updates = len(given) // 2, given[len(given) // 2 + 1 :]
        written = sum(map(min, map(_padded, given[:arrays]), map(_padded, updates)))
        return sum(map(_memory, given[arrays:])) + 2 * written * _is_main(results)
    if opcode == "custom-call":
        if declared := declared_cost(instruction).get("bytes_accessed"):
            return declared
        if call_target(instruction) in NO_WORK:
            return 0
        results = _without_workspace(module, computation, instruction, results)
    # An operand that occurs twice is read once.
    return _memory(results) + sum(map(_memory, dict(zip(instruction.operands, given, strict=True)).values()))


def _results(computation: Computation, instruction: Instruction) -> tuple[Array, ...]:
    """The types of the results. An asynchronous start lists its operands before them, and its state after."""
    given = [a for n in range(len(instruction.operands)) for a in computation.operand_arrays(instruction, n)]
    arrays = instruction.arrays
    if not instruction.opcode.endswith("-start") or [*arrays[: len(given)]] != given:
        return arrays
    return tuple(array for array in arrays[len(given) :] if array.shape) or arrays


def _without_workspace(
    module: HloModule, computation: Computation, instruction: Instruction, results: tuple[Array, ...]
) -> tuple[Array, ...]:
    """The results of a custom call, or of a fusion of one with slices. The last one of the GPU's libraries is
    their workspace, bytes."""
    calls = (one for _, one in parts_of(module, computation, instruction) if one.opcode == "custom-call")
    is_library = any(call_target(call).startswith(("__cublas", "__cudnn")) for call in calls)
    return results[:-1] if is_library and len(results) > 1 and results[-1].bits == 8 else results


# Custom calls of the compilers that allocate or annotate, and move nothing.
NO_WORK = (
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "ConcatBitcast",
    "PrepareAsyncCallDone",
    "PrepareAsyncCallStart",
)


def _memory(arrays: tuple[Array, ...]) -> int:
    return sum(array.memory_bytes for array in arrays)


def _is_main(arrays: tuple[Array, ...]) -> bool:
    return any(array.space == MAIN_MEMORY for array in arrays)


def _copied(start: Instruction) -> int:
    """The bytes of main memory that an asynchronous copy reads and writes."""
    return _memory(start.arrays[:2])  # the copy, and the original


def is_prefetch(instruction: Instruction) -> bool:
    """Whether it is an asynchronous copy between the main memory and the chip, while other work runs."""
    if instruction.opcode not in ("copy-start", "slice-start"):
        return False
    first, second = instruction.arrays[:2]
    return MAIN_MEMORY in (first.space, second.space) and (first.is_on_chip or second.is_on_chip)


def _fusion_traffic(
    module: HloModule, computation: Computation, fusion: Instruction, results: tuple[Array, ...]
) -> int:
    called = module.called(fusion)
    if called is None:
        return 0
    moved = in_place = 0
    for n in range(len(fusion.operands)):
        arrays = computation.operand_arrays(fusion, n)
        full = _memory(arrays)
        if not full or n not in called.parameters:
            continue
        read = written = 0
        for use in _uses(module, called, called.parameters[n].name):
            if use.reads_slices:
                # A slice of a converted operand is read with the bits of the operand.
                read += sum(array.padded_bytes * arrays[0].bits // array.bits for array in use.user.arrays)
            elif update := use.written():
                written += update
            else:
                read, written = full, 0
                break
        moved += min(full, read) + written
        in_place += full if written else 0
    return moved + max(0, _memory(results) - in_place)


Outer = tuple[tuple[Computation, str], ...]  # the fusions around a value: their computation and name


@dataclass(frozen=True)
class _Use:
    """An instruction of a fusion that uses a value.

    Attributes:
      computation: that of the instruction.
      name: the value's name there.
      outer: the fusions around it, inside the fusion that is looked at.
      unchanged: whether the value has the operand's elements in the operand's place.
    """

    computation: Computation
    user: Instruction
    name: str
    outer: Outer
    unchanged: bool

    @property
    def reads_slices(self) -> bool:
        return self.user.opcode in SLICES and self.user.operands[0] == self.name

    def written(self) -> int:
        """The bytes that it writes to the value in place, and those that it reads to add to them; 0 if it
        does something else."""
        opcode, operands = self.user.opcode, self.user.operands
        if opcode not in ("dynamic-update-slice", "scatter") or not self.unchanged:
            return 0
        # A scatter has several arrays, the indices, and as many updates.
        arrays = 1 if opcode == "dynamic-update-slice" else len(operands) // 2
        if self.name in operands[arrays:] or not _is_result(self.computation, self.user, self.outer):
            return 0
        n = operands.index(self.name)
        if opcode == "dynamic-update-slice":
            return _padded(self.computation.operand_arrays(self.user, 1))
        array, update = (self.computation.operand_arrays(self.user, k) for k in (n, arrays + 1 + n))
        return 2 * min(_padded(array), _padded(update))


def _is_result(computation: Computation, instruction: Instruction, outer: Outer) -> bool:
    """Whether a value inside a fusion is a result of the fusion, and nothing else."""
    if instruction.is_root:
        if not outer:
            return True
        (where, fusion), *rest = outer
        return _is_result(where, where.by_name[fusion], tuple(rest))
    users = computation.users[instruction.name]
    return bool(users) and all(
        (user.opcode == "tuple" and user.is_root and not outer)
        or (user.opcode in IN_PLACE and _is_result(computation, user, outer))
        for user in users
    )


def _uses(
    module: HloModule, computation: Computation, name: str, outer: Outer = (), unchanged: bool = True
) -> Iterator[_Use]:
    """The instructions of a fusion that use a value.

    Instructions that pass elements on are not uses, because a fusion computes only the elements that it
    needs: a slice of a copy reads a slice. Fusions in the fusion are looked into.
    """
    for user in computation.users[name]:
        called = module.called(user) if user.opcode == "fusion" else None
        same = unchanged and user.opcode in IN_PLACE
        if user.opcode in PASSING and not user.is_root:
            yield from _uses(module, computation, user.name, outer, same)
        elif user.opcode in PASSING and outer:
            (where, fusion), *rest = outer
            yield from _uses(module, where, fusion, tuple(rest), same)
        elif called is not None:
            for n, operand in enumerate(user.operands):
                if operand == name and n in called.parameters:
                    inside = ((computation, user.name), *outer)
                    yield from _uses(module, called, called.parameters[n].name, inside, unchanged)
        else:
            yield _Use(computation, user, name, outer, unchanged)


def _padded(arrays: tuple[Array, ...]) -> int:
    return sum(array.padded_bytes for array in arrays)
