"""The text of a compiled HLO module as data: computations, instructions, array types, source lines.

The compilers return optimized, scheduled HLO: the order of the instructions of a computation is the order in
which they run. XLA has a parser of its own, but its Python objects have neither the operands of an
instruction nor its configuration.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..plan.sources import user_line
from .groups import Groups, parse_groups

_ARRAY = re.compile(r"\b([a-z]+\d*[a-z\d]*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?(\S+) = ")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CONTROL = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}
_PARENTHESIS = re.compile(r"[()]")
_ESCAPED = re.compile(rb"\\([0-3][0-7]{2}|.)")

BITS = {"pred": 8, "token": 0, "opaque": 0}  # the names of other types end with the number
# XLA's numbers of memory spaces: the device's main memory, and the host's. All others are on the chip.
MAIN_MEMORY, HOST_MEMORY = 0, 5
# The instructions that run another computation once. A reduction names one, too, that runs for each element.
CALLS = ("fusion", "call", "async-start", "call-start", "fusion-start")


@dataclass(frozen=True)
class Array:
    """The type of an array.

    Attributes:
      order: the dims from the minor-most to the major-most.
      tile: the tile of the minor-most dims, which the compiler pads to full tiles.
      space: the number of its memory space; 0 is the device's main memory.
      element_bits: the bits that the layout reserves for an element; 0 stands for those of the dtype.
    """

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    space: int = 0
    element_bits: int = 0

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def bits(self) -> int:
        """The bits of one element."""
        digits = re.match(r"[a-z]+(\d+)", self.dtype)
        return BITS.get(self.dtype, int(digits[1]) if digits else 0)

    @property
    def bytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * self.bits // 8

    @functools.cached_property
    def padded_bytes(self) -> int:
        """The bytes that it takes in memory: the tiles are full."""
        sizes = [self.shape[d] for d in self.order or reversed(range(len(self.shape)))]
        sizes += [1] * (len(self.tile) - len(sizes))
        for n, size in enumerate(reversed(self.tile)):
            sizes[n] = -(-sizes[n] // size) * size
        return math.prod(sizes) * (self.element_bits or self.bits) // 8

    @property
    def is_on_chip(self) -> bool:
        """Whether it is in a memory of the chip itself."""
        return self.space not in (MAIN_MEMORY, HOST_MEMORY)

    @property
    def memory_bytes(self) -> int:
        """The bytes that it takes in the main memory: none if it is on the chip or on the host."""
        return self.padded_bytes if self.space == MAIN_MEMORY else 0


def parse_arrays(text: str) -> tuple[Array, ...]:
    """The arrays of a type, from left to right; a tuple has several."""
    return tuple(_array(*match.groups()) for match in _ARRAY.finditer(text))


@functools.lru_cache(maxsize=65536)
def _array(dtype: str, shape: str, layout: str | None) -> Array:
    order, _, rest = (layout or "").partition(":")
    tile = re.search(r"T\(([\d,]+)\)", rest)
    space = re.search(r"S\((\d+)\)", rest)
    element = re.search(r"E\((\d+)\)", rest)
    return Array(
        dtype,
        tuple(int(n.removeprefix("<=")) for n in shape.split(",") if n),
        tuple(int(n) for n in order.split(",") if n),
        tuple(map(int, tile[1].split(","))) if tile else (),
        int(space[1]) if space else MAIN_MEMORY,
        int(element[1]) if element else 0,
    )


@dataclass(eq=False)
class Instruction:
    """One instruction.

    Attributes:
      type: the text of its type; `arrays` are the parsed types.
      operands: the names of its operands.
      argument: the text between the parentheses; the number of a parameter, the value of a constant.
      attributes: the text after the operands.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    argument: str
    attributes: str
    is_root: bool

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The types of its results."""
        return parse_arrays(self.type)

    @functools.cached_property
    def bytes(self) -> int:
        """The bytes of its results, without padding."""
        return sum(array.bytes for array in self.arrays)

    def attribute(self, name: str) -> str:
        """The text of an attribute, such as the computation that it calls, or ""."""
        match = re.search(rf"\b{name}=%?([^\s,{{}}]+)", self.attributes)
        return match[1] if match else ""

    def listed(self, name: str) -> list[str]:
        """The items of an attribute in braces: `dimensions={0,1}`."""
        match = re.search(rf"\b{name}=\{{([^}}]*)\}}", self.attributes)
        return [item.strip().lstrip("%") for item in match[1].split(",") if item] if match else []

    @functools.cached_property
    def op_name(self) -> str:
        """The name that JAX gave it: the path of scopes and the primitive."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return _unescape(match[1]) if match else ""

    @functools.cached_property
    def config(self) -> Mapping[str, Any]:
        """The configuration that the compiler chose; empty if it has none."""
        _, found, text = self.attributes.partition("backend_config=")
        if not found or not text.startswith("{"):
            return {}
        try:
            return json.JSONDecoder().raw_decode(text)[0]
        except ValueError:
            return {}

    @property
    def stack_frame(self) -> int:
        """The number of its source location."""
        match = re.search(r"stack_frame_id=(\d+)", self.attributes)
        return int(match[1]) if match else 0

    def groups(self, devices: int) -> Groups:
        """The groups of devices of a collective; of a permute, the pairs of source and target."""
        return parse_groups(self.attributes, devices)


def _unescape(text: str) -> str:
    r"""A text as it was before HLO escaped it: UTF-8 as octal, `\302\267`."""
    if "\\" not in text:
        return text
    return _ESCAPED.sub(_unescaped_byte, text.encode()).decode("utf-8", "replace")


def _unescaped_byte(match: re.Match[bytes]) -> bytes:
    code = match[1]
    return bytes([int(code, 8)]) if len(code) == 3 else _CONTROL.get(code, code)


@dataclass(eq=False)
class Computation:
    """A computation: its instructions in the order in which they run."""

    name: str
    instructions: list[Instruction]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {one.name: one for one in self.instructions}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that have each one as an operand."""
        found: dict[str, list[Instruction]] = {one.name: [] for one in self.instructions}
        for one in self.instructions:
            for name in dict.fromkeys(one.operands):
                if name in found:
                    found[name].append(one)
        return found

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by number."""
        return {int(one.argument): one for one in self.instructions if one.opcode == "parameter"}

    @property
    def root(self) -> Instruction:
        """The instruction that computes the result."""
        return next((one for one in self.instructions if one.is_root), self.instructions[-1])

    def operand_arrays(self, instruction: Instruction, n: int) -> tuple[Array, ...]:
        """The types of an operand."""
        name = instruction.operands[n] if n < len(instruction.operands) else ""
        return self.by_name[name].arrays if name in self.by_name else ()


@dataclass(eq=False)
class HloModule:
    """A compiled module.

    Attributes:
      devices: the number of its partitions.
      aliases: the results that reuse the memory of an argument, as text: `{1}: (0, {}, may-alias)`.
    """

    computations: dict[str, Computation]
    entry: Computation
    devices: int
    aliases: str
    _files: dict[int, str]
    _locations: dict[int, tuple[int, int]]
    _frames: dict[int, tuple[int, int]]

    @functools.cached_property
    def loops(self) -> dict[str, tuple[Computation, Instruction]]:
        """The loops by the names of their body and condition, each with the computation that runs it."""
        return {
            one.attribute(name): (computation, one)
            for computation in self.computations.values()
            for one in computation.instructions
            if one.opcode == "while"
            for name in ("body", "condition")
        }

    def called(self, instruction: Instruction) -> Computation | None:
        """The computation that a fusion, a call or an asynchronous operation runs."""
        if instruction.opcode not in CALLS:
            return None  # `to_apply` of a reduction, of a sort: it runs for each element
        return self.computations.get(instruction.attribute("calls") or instruction.attribute("to_apply"))

    def fused(self, instruction: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """The instructions inside a fusion, and inside fusions and calls in it."""
        computation = self.called(instruction)
        if computation is not None:
            for inner in computation.instructions:
                yield computation, inner
                yield from self.fused(inner)

    def source(self, instruction: Instruction) -> str:
        """The user's `file:line` that an instruction comes from, or ""."""
        frame = instruction.stack_frame
        while frame in self._frames:
            location, parent = self._frames[frame]
            file, line = self._locations.get(location, (0, 0))
            if source := user_line(self._files.get(file, "<unknown>"), line):
                return source
            frame = parent
        return ""


def parse_hlo(text: str) -> HloModule:
    """Parse the text of a compiled module."""
    computations: dict[str, Computation] = {}
    entry, current = None, None
    tables: dict[str, dict[int, str]] = {name: {} for name in ("FileNames", "FileLocations", "StackFrames")}
    table: dict[int, str] | None = None
    for line in text.splitlines():
        if current is not None:
            if line.startswith("}"):
                current = None
            elif instruction := _parse_instruction(line):
                current.instructions.append(instruction)
        elif line.endswith("{") and (head := _COMPUTATION.match(line)):
            current = computations[head[2]] = Computation(head[2], [])
            entry = current if head[1] else entry
        elif line in tables or line == "FunctionNames":
            table = tables.get(line, {})
        elif table is not None and line[:1].isdigit():
            number, _, rest = line.partition(" ")
            table[int(number)] = rest
    header = text.partition("\n")[0]
    partitions = re.search(r"\bnum_partitions=(\d+)", header)
    aliases = re.search(r"\binput_output_alias=\{((?:[^{}]|\{[^{}]*\})*)\}", header)
    if entry is None:
        raise ValueError("the text has no ENTRY computation")
    return HloModule(
        computations,
        entry,
        int(partitions[1]) if partitions else 1,
        aliases[1].strip() if aliases else "",
        {n: _unescape(rest.strip('"')) for n, rest in tables["FileNames"].items()},
        {n: (_number(r, "file_name_id"), _number(r, "line")) for n, r in tables["FileLocations"].items()},
        # The numbers of parents are printed with one added.
        {
            n: (_number(r, "file_location_id"), _number(r, "parent_frame_id") - 1)
            for n, r in tables["StackFrames"].items()
        },
    )


def _number(text: str, name: str) -> int:
    match = re.search(rf"\b{name}=(\d+)", text)
    return int(match[1]) if match else 0


def _parse_instruction(line: str) -> Instruction | None:
    head = _INSTRUCTION.match(line)
    if head is None:
        return None
    start = head.end()
    end = _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    opens = line.index("(", end)
    closes = _closing(line, opens)
    argument = line[opens + 1 : closes]
    return Instruction(
        head[2],
        line[start:end],
        line[end:opens].strip(),
        tuple(_OPERAND.findall(argument)),
        argument,
        line[closes + 1 :],
        head[1] is not None,
    )


def _closing(line: str, start: int) -> int:
    """The position of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in _PARENTHESIS.finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(line)
