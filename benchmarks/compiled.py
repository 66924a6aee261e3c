"""Plans beside programs that the vendors' compilers compiled; writes docs/compiled.md.

python -m benchmarks.compiled [NUMBER …]

Nothing runs. Each case takes the compiler one to two minutes the first time; later its result comes from the
cache. With numbers of cases, only these are compared, and the page stays as it is. It needs the extras
tpu-compiler and gpu-compiler.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.compiled_cases import CASES, Case
from weft.compilers.diff import ComparedNumber, by_kind, compare
from weft.core.errors import CompileError
from weft.plan.units import human_bytes, human_seconds

PAGE = Path(__file__).parents[1] / "docs" / "compiled.md"
MEMORY, FLOPS, WORK = "memory at the peak", "FLOP on each device", "local work, roofline"
LARGE = 0.1  # differences of memory above this share are explained


@dataclass(frozen=True)
class Found:
    """A case, and its plan beside the compiled program."""

    case: Case
    rows: dict[str, ComparedNumber]
    kinds: str
    compiler: str
    fits: bool
    seconds: float

    @property
    def bytes(self) -> list[ComparedNumber]:
        """What is sent, by axis."""
        return [row for name, row in self.rows.items() if name.startswith("bytes over ")]


def compare_case(case: Case) -> Found:
    """Plan and compile a case."""
    program, args = case.program()
    traced = program.trace(*args)
    plan, compiled = traced.plan(), traced.compile_for(case.target)
    kinds = [
        f"{kind} over {over} {human_bytes(size)}"
        for (over, kind), (_, size) in sorted(by_kind(compiled.collectives).items())
        if size >= 1 << 20
    ]
    return Found(
        case,
        {row.name: row for row in compare(plan, compiled)},
        ", ".join(kinds),
        compiled.compiler,
        compiled.memory.fits,
        compiled.seconds,
    )


def page(found: list[Found]) -> str:
    """The comparison as a page."""
    compilers = ", ".join(dict.fromkeys(one.compiler for one in found))
    lines = [HEADER.format(count=len(found), compilers=compilers) + "\n".join(_summary(found)), ""]
    lines += [
        "| program | what is split | machine | memory: planned | compiled | plan is | local work: planned | "
        "compiled | plan is | FLOPs | bytes |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        *map(_row, found),
        "",
        "## Where the differences come from",
        "",
        *(line for one in found for line in _reasons(one)),
        "## Collectives as compiled",
        "",
        "| program | what is split | machine | collectives of at least 1 MiB |",
        "|---|---|---|---|",
        *(f"| {_names(one)} | {one.kinds} |" for one in found),
    ]
    return "\n".join(lines) + "\n" + RULES


def _summary(found: list[Found]) -> list[str]:
    lines = []
    for name, what in ((MEMORY, "Peak memory"), (WORK, "Local work")):
        errors = [abs(one.rows[name].difference) for one in found]
        lines.append(f"- {what}: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}.")
    flops = sum(not _differs(one.rows[FLOPS]) for one in found)
    sent = sum(not any(map(_differs, one.bytes)) for one in found)
    lines.append(f"- FLOPs are equal in {flops} of {len(found)} cases, bytes over each axis in {sent}.")
    return lines


def _differs(row: ComparedNumber) -> bool:
    return abs(row.difference) >= 0.0005


def _names(one: Found) -> str:
    mesh = f"`{one.case.mesh}`"
    return f"{one.case.name} | {one.case.kind}, {mesh} | {one.case.target}"


def _row(one: Found) -> str:
    memory, work = one.rows[MEMORY], one.rows[WORK]
    cells = [
        _names(one),
        human_bytes(memory.planned),
        human_bytes(memory.compiled),
        f"{memory.difference:+.1%}",
        human_seconds(work.planned),
        human_seconds(work.compiled),
        f"{work.difference:+.1%}",
        _difference(one.rows[FLOPS]),
        "; ".join(dict.fromkeys(map(_difference, one.bytes))) or "none",
    ]
    return f"| {' | '.join(cells)} |"


def _difference(row: ComparedNumber) -> str:
    return f"{row.difference:+.1%}" if _differs(row) else "equal"


def _reasons(one: Found) -> list[str]:
    """The reasons of large differences of one case."""
    exact = [one.rows[FLOPS], *one.bytes]
    rows = [row for row in exact if _differs(row)]
    rows += [row for row in [one.rows[MEMORY]] if abs(row.difference) > LARGE]
    if not rows:
        return []
    lines = [f"**{one.case.name}, {one.case.kind}, {one.case.target}**", ""]
    lines += [f"- {row.name} {row.difference:+.1%}: {'; '.join(row.reasons)}" for row in rows]
    return [*lines, ""]


HEADER = """# Plans beside compiled programs

Plans of {count} programs of real sizes, for the machines that they were compiled for, beside the programs
that the vendors' compilers made of them: {compilers}. Nothing ran. The page is generated by `python -m
benchmarks.compiled`.

Peak memory is that of one device, as the compiler reports it. Local work is the time of the roofline, with
the same profile for both: what the plan reads, writes and computes, and what the compiled program does.
FLOPs and bytes are those of one device.

"""

RULES = """
## How plans follow the compilers

`plan.on(hardware)` is the plan of a program as the compiler of a machine compiles it. The rules are in
`weft/plan/memory/accelerator_fusion.py`, `rewrites.py` and `scheduling.py`, and what distinguishes the
compilers is the table in `platforms.py`. They were developed on the cases of this page: the compilers' own
models are not public for TPUs, and other programs may be further off.

- **Fusion.** Elementwise work is computed inside the kernels that read it, again in each of them, unless
  storing it saves traffic. `exp` and the like are computed once. On TPUs, matmuls compute elementwise work
  on their operands and results.
- **Merging.** A kernel that reads what another one computes, element by element or from sums of its rows,
  is merged with it.
- **On the chip.** A TPU's compiler keeps arrays on the chip (`Hardware.on_chip_bytes`) from the kernel that
  computes them to the last one that reads them. They cost no traffic.
- **Casts.** If a loop over layers only reads the slices of stacked weights to round them, libtpu rounds all
  of them before the loop: two more bytes for each parameter.
- **Reshapes.** On TPUs, a reshape between one dim and several is a copy to other tiles. This is a large
  part of dropout, whose random bits are drawn along one dim.
- **Broadcasts.** Masks that depend on little are computed in the loops that read them.
- **Matmuls of one operand.** XLA for GPUs concatenates the right operands of small matmuls that share the
  left one: in a decode step it copies the weights of the queries, keys and values.
- **Schedule.** Of the orders that XLA's memory schedulers try, the one that needs the least memory.
"""


def main(numbers: list[int]) -> None:
    found = []
    for n in numbers or range(len(CASES)):
        try:
            one = compare_case(CASES[n])
        except CompileError as error:
            print(f"{n:3}  {CASES[n].name}, {CASES[n].kind}, {CASES[n].target}: {error.fact}", flush=True)
            continue
        found.append(one)
        memory, work = one.rows[MEMORY].difference, one.rows[WORK].difference
        case = one.case
        print(
            f"{n:3}  memory {memory:+7.1%}  work {work:+7.1%}  {case.name}, {case.kind}, {case.target}",
            flush=True,
        )
    if not numbers:
        PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main([int(n) for n in sys.argv[1:]])
