"""A plan as text: totals first, then by axis, by op, the memory peak, and advice."""

from __future__ import annotations

import io
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .facts import Collective
from .stages import described
from .units import human_bytes, human_count, human_seconds

if TYPE_CHECKING:
    from .plan import Plan

WIDTH = 118


def explain(plan: Plan, hardware: Any = None) -> str:
    """The plan as plain text, a table for each question."""
    text = io.StringIO()
    console = Console(file=text, width=WIDTH, color_system=None, highlight=False, soft_wrap=False)
    time = plan.time(hardware) if hardware is not None else None
    _totals(console, plan, time)
    _axes(console, plan)
    _ops(console, plan)
    _memory(console, plan)
    for advice in plan.advice:
        at = f" ({advice.source})" if advice.source else ""
        console.print(f"{advice.level}: {advice.text}{at}", markup=False)
    return text.getvalue().rstrip() + "\n"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left")
    return table


def _totals(console: Console, plan: Plan, time: Any) -> None:
    console.print(
        f'{plan.name} on mesh "{plan.mesh}" ({plan.mesh.size} devices), {plan.layout}', markup=False
    )
    over = f"{plan.duplication:.3g} times over" if plan.duplication > 1.005 else "nothing twice"
    console.print(
        f"on each device: {human_count(plan.flops, 'FLOP')} ({over}), "
        f"{human_bytes(sum(plan.comm_bytes.values()))} in collectives, "
        f"{human_bytes(plan.memory.peak)} of memory at the peak",
        markup=False,
    )
    if plan.waste > 0:
        console.print(f"padding: {plan.waste:.1%} of what is stored", markup=False)
    for line in described(plan):
        console.print(line, markup=False)
    if time is not None:
        console.print(
            f"predicted time: {human_seconds(time.overlapped_seconds)} with overlap, "
            f"{human_seconds(time.total_seconds)} without; bound by {time.bound}",
            markup=False,
        )
        has = time.hardware.memory_bytes
        if plan.memory.peak > has:
            console.print(
                f"does not fit: a device of {time.hardware.name} has {human_bytes(has)} of memory",
                markup=False,
            )
    console.print()


def _axes(console: Console, plan: Plan) -> None:
    if not plan.collectives:
        console.print("no collectives\n")
        return
    table = _table("over", "kind", ">calls", ">bytes", ">sent in a ring")
    groups: dict[tuple[str, str], list[Collective]] = defaultdict(list)
    for c in plan.collectives:
        groups[c.over, c.kind].append(c)
    for (axes, kind), some in sorted(groups.items()):
        table.add_row(
            axes,
            kind,
            str(sum(c.count for c in some)),
            human_bytes(sum(c.bytes * c.count for c in some)),
            human_bytes(sum(c.wire_bytes * c.count for c in some)),
        )
    console.print(table)
    console.print()


def _ops(console: Console, plan: Plan) -> None:
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for e in plan.events:
        if isinstance(e, Collective) or e.flops:
            row = rows.setdefault((e.op, e.phase, e.source), {"flops": 0, "sent": defaultdict(int)})
            if isinstance(e, Collective):
                row["sent"][f"{e.kind} {e.over}"] += e.bytes * e.count
            else:
                row["flops"] += e.flops * e.count
    table = _table("phase", "op", ">FLOP", "collective", ">bytes", "line")
    for (op, phase, source), row in rows.items():
        sent = list(row["sent"].items()) or [("", 0)]
        for n, (what, size) in enumerate(sent):
            flops = human_count(row["flops"]) if row["flops"] and not n else ""
            table.add_row(phase, escape(op), flops, what, human_bytes(size) if size else "", source)
    console.print(table)
    console.print()


def _memory(console: Console, plan: Plan) -> None:
    m = plan.memory
    console.print(
        f"memory: parameters {human_bytes(m.params)}, optimizer {human_bytes(m.optimizer)}, all inputs "
        f"{human_bytes(m.inputs)}, kept for the backward pass {human_bytes(m.activations)}, "
        f"peak {human_bytes(m.peak)}",
        markup=False,
    )
    if m.largest:
        table = _table(">bytes", "alive at the peak", "made by", "line")
        for live in m.largest:
            table.add_row(human_bytes(live.bytes), escape(live.shape), escape(live.op), live.source)
        console.print(table)
