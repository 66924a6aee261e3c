"""The number of iterations of a loop.

    while (i, …) with i < 6 in its condition and (i + 1, …) as the result of its body, from (0, …): 6

The GPU compiler states it. For the others it is read off the condition, which compares a counter of the
loop's state with a constant, from the counter's first value, and from its step in the body. Both may be
fused, lie behind copies, or be in the state of loops around, which passes a constant on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

from .hlo import Computation, HloModule, Instruction

# Instructions whose result has the value of their first operand.
SAME = ("bitcast", "convert", "copy", "copy-done", "copy-start", "reshape")
COMPARISONS = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}
FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}


@dataclass(frozen=True)
class _Linear:
    """A value of an iteration: an element of the loop's state plus a constant; without one, the constant."""

    element: int | None
    constant: int


@dataclass(frozen=True)
class _Comparison:
    left: _Linear
    right: _Linear
    direction: str


_Value = _Linear | _Comparison | None
_Arguments = Callable[[int, int | None], _Value]  # the value of a parameter, or of an element of a parameter


def trip_count(module: HloModule, outer: Computation, loop: Instruction) -> int | None:
    """The number of iterations of a loop in a computation, or None if it depends on data."""
    known = loop.config.get("known_trip_count", {}).get("n")
    if known is not None:
        return int(known)
    condition = module.computations[loop.attribute("condition")]
    body = module.computations[loop.attribute("body")]
    compared = _read(module, condition, condition.root.name)
    if not isinstance(compared, _Comparison):
        return None
    left, right, direction = compared.left, compared.right, compared.direction
    if left.element is None:
        left, right, direction = right, left, FLIPPED.get(direction, direction)
    if left.element is None or right.element is not None:
        return None
    start = _constant(module, outer, loop.operands[0], left.element)
    following = _read(module, body, body.root.name, left.element)
    if start is None or not isinstance(following, _Linear) or following.element != left.element:
        return None
    return _count(start + left.constant, following.constant, right.constant, direction)


def _count(value: int, step: int, limit: int, direction: str) -> int | None:
    """How often a value fulfills a condition until it first does not; None if it always does."""
    if direction not in COMPARISONS:
        return None
    if not COMPARISONS[direction](value, limit):
        return 0
    if direction == "EQ":
        return 1 if step else None
    distance, pace = (value - limit, -step) if direction in ("GT", "GE") else (limit - value, step)
    if direction == "NE" and step:
        return distance // step if distance % step == 0 and distance // step > 0 else None
    if pace <= 0:
        return None
    return (distance if direction in ("LE", "GE") else distance - 1) // pace + 1


def _constant(module: HloModule, computation: Computation, name: str, element: int | None) -> int | None:
    """An integer that is the same in each iteration of the loops around, or None."""
    value = _read(module, computation, name, element)
    return value.constant if isinstance(value, _Linear) and value.element is None else None


def _state(module: HloModule, computation: Computation) -> _Arguments:
    """The state of the loop that a computation is the body or the condition of."""

    def read(number: int, element: int | None) -> _Value:
        found = module.loops.get(computation.name)
        if found is None or element is None:
            return None
        outer, loop = found
        body = module.computations[loop.attribute("body")]
        if not _is_passed_on(body, element):
            return _Linear(element, 0)
        constant = _constant(module, outer, loop.operands[0], element)
        return None if constant is None else _Linear(None, constant)

    return read


def _is_passed_on(body: Computation, element: int) -> bool:
    """Whether the body of a loop returns an element of its state as it is."""
    if body.root.opcode != "tuple" or element >= len(body.root.operands):
        return False
    made = body.by_name.get(body.root.operands[element])
    while made is not None and made.opcode in SAME:
        made = body.by_name.get(made.operands[0])
    if made is None or made.opcode != "get-tuple-element" or int(made.attribute("index")) != element:
        return False
    return body.by_name[made.operands[0]].opcode == "parameter"


def _read(
    module: HloModule,
    computation: Computation,
    name: str,
    element: int | None = None,
    arguments: _Arguments | None = None,
) -> _Value:
    """The value of an instruction, or of an element of its tuple; None if it is neither linear nor compared.

    `arguments` has the values of the computation's parameters; those of a loop are its state.
    """
    arguments = arguments or _state(module, computation)
    made = computation.by_name.get(name)
    if made is None:
        return None
    operands = made.operands

    def operand(n: int, of: int | None = None) -> _Value:
        return _read(module, computation, operands[n], of, arguments)

    if made.opcode == "parameter":
        return arguments(int(made.argument), element)
    if made.opcode == "constant":
        return _Linear(None, int(made.argument)) if made.argument.lstrip("-").isdigit() else None
    if made.opcode in SAME:
        return operand(0, element)
    if made.opcode == "get-tuple-element":
        return operand(0, int(made.attribute("index")))
    if made.opcode == "tuple" and element is not None:
        return operand(element)
    called = module.called(made)
    if called is not None and made.opcode in ("fusion", "call"):
        return _read(module, called, called.root.name, element, operand)
    if made.opcode in ("add", "subtract", "compare"):
        left, right = operand(0), operand(1)
        if isinstance(left, _Linear) and isinstance(right, _Linear):
            return _combine(made, left, right)
    return None


def _combine(made: Instruction, left: _Linear, right: _Linear) -> _Value:
    if made.opcode == "compare":
        return _Comparison(left, right, made.attribute("direction"))
    if made.opcode == "subtract" and right.element is None:
        return _Linear(left.element, left.constant - right.constant)
    if made.opcode == "add" and None in (left.element, right.element):
        element = right.element if left.element is None else left.element
        return _Linear(element, left.constant + right.constant)
    return None
