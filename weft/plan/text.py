"""A plan as text: totals, traffic by axis, costs by op, the memory peak, and advice."""

from __future__ import annotations

import io
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..hardware.profile import HardwareLike
from .advice import exceeds_memory
from .facts import Collective, Event, LiveBuffer
from .pipelines import describe_pipelines
from .units import human_bytes, human_count, human_seconds

if TYPE_CHECKING:
    from .plan import Plan
    from .time import Time

WIDTH = 118


def explain(plan: Plan, hardware: HardwareLike | None = None, width: int | None = None) -> str:
    """The plan as plain text."""
    text = io.StringIO()
    # The same text on every terminal and in golden files: no colors, no detected width.
    console = Console(file=text, width=width or WIDTH, color_system=None, highlight=False, soft_wrap=False)
    time = plan.time(hardware) if hardware is not None else None
    _print_totals(console, plan, time)
    _print_axes(console, plan)
    _print_ops(console, plan)
    _print_memory(console, plan)
    memory_advice = exceeds_memory(plan, time.hardware.memory_bytes) if time is not None else ()
    for advice in (*memory_advice, *plan.advice):
        at = f" ({advice.source})" if advice.source else ""
        console.print(f"{advice.level}: {advice.text}{at}", markup=False)
    return text.getvalue().rstrip() + "\n"


def _print_table(console: Console, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table. Columns whose names begin with `>` are right-aligned numbers.

    With less than `WIDTH` columns of text, the place is put below the op.
    """
    narrow = console.width < WIDTH
    if narrow and columns[-1] == "where":
        op = next(n for n, name in enumerate(columns) if name in ("op", "made by"))
        rows = [[*row[:op], f"{row[op]}\n{row[-1]}".rstrip(), *row[op + 1 : -1]] for row in rows]
        columns = columns[:-1]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        number = column.startswith(">")
        table.add_column(
            column.lstrip(">"),
            justify="right" if number else "left",
            no_wrap=narrow and number,
            overflow="fold" if narrow else "ellipsis",
        )
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _print_totals(console: Console, plan: Plan, time: Time | None) -> None:
    # Without `markup=False` rich would parse the brackets of labels and types as styles.
    console.print(
        f'{plan.name} on mesh "{plan.mesh}" ({plan.mesh.size} devices), {plan.layout}', markup=False
    )
    # With three digits a smaller factor prints as 1, and "1 times over" would puzzle.
    over = f"{plan.duplication:.3g} times over" if plan.duplication > 1.005 else "no duplication"
    console.print(
        f"on each device: {human_count(plan.flops, 'FLOP')} ({over}), "
        f"{human_bytes(sum(plan.comm_bytes.values()))} in collectives, "
        f"{human_bytes(plan.memory.peak)} of memory at the peak",
        markup=False,
    )
    if plan.waste > 0:
        console.print(f"padding: {plan.waste:.1%} of all inputs and outputs", markup=False)
    for line in describe_pipelines(plan):
        console.print(line, markup=False)
    if time is not None:
        console.print(
            f"predicted time: {human_seconds(time.overlapped_seconds)} with overlap, "
            f"{human_seconds(time.total_seconds)} without; bound by {time.bound}",
            markup=False,
        )
        available = time.hardware.memory_bytes
        if plan.memory.peak > available:
            console.print(
                f"does not fit: a device of {time.hardware.name} has {human_bytes(available)} of memory",
                markup=False,
            )
    console.print()


def _print_axes(console: Console, plan: Plan) -> None:
    if not plan.collectives:
        console.print("no collectives\n")
        return
    groups: dict[tuple[str, str], list[Collective]] = defaultdict(list)
    for c in plan.collectives:
        groups[c.over, c.kind].append(c)
    rows = [
        [
            axes,
            kind,
            str(sum(c.count for c in group)),
            human_bytes(sum(c.bytes * c.count for c in group)),
            human_bytes(sum(c.wire_bytes * c.count for c in group)),
        ]
        for (axes, kind), group in sorted(groups.items())
    ]
    _print_table(console, ["over", "kind", ">calls", ">bytes", ">sent in a ring"], rows)
    console.print()


def _print_ops(console: Console, plan: Plan) -> None:
    ops: dict[tuple[str, str, str], dict[str, Any]] = {}
    for e in plan.events:
        if isinstance(e, Collective) or e.flops:
            row = ops.setdefault((e.op, e.phase, _where(e)), {"flops": 0, "sent": defaultdict(int)})
            if isinstance(e, Collective):
                row["sent"][f"{e.kind} {e.over}"] += e.bytes * e.count
            else:
                row["flops"] += e.flops * e.count
    rows = []
    for (op, phase, where), row in ops.items():
        sent = list(row["sent"].items()) or [("", 0)]
        for n, (collective, size) in enumerate(sent):
            flops = human_count(row["flops"]) if row["flops"] and not n else ""
            rows.append([phase, escape(op), flops, collective, human_bytes(size) if size else "", where])
    _print_table(console, ["phase", "op", ">FLOP", "collective", ">bytes", "where"], rows)
    console.print()


def _where(fact: Event | LiveBuffer) -> str:
    """The layer of an op, which is more telling than a line of its code; outside of layers, the line."""
    return fact.layer or fact.source


def _print_memory(console: Console, plan: Plan) -> None:
    m = plan.memory
    console.print(
        f"memory: parameters {human_bytes(m.params)}, optimizer {human_bytes(m.optimizer)}, all inputs "
        f"{human_bytes(m.inputs)}, saved for the backward pass {human_bytes(m.activations)}, "
        f"peak {human_bytes(m.peak)}",
        markup=False,
    )
    if m.largest:
        rows = [[human_bytes(b.bytes), escape(b.shape), escape(b.op), _where(b)] for b in m.largest]
        _print_table(console, [">bytes", "alive at the peak", "made by", "where"], rows)
