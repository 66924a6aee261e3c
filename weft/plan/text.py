"""A plan as text: totals, traffic by axis, costs by op, the memory peak, and advice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..hardware.profile import HardwareLike
from .advice import hardware_advice
from .facts import Collective, Event, LiveBuffer
from .pipelines import describe_pipelines
from .table import format_table, wrap
from .units import human_bytes, human_count, human_seconds

if TYPE_CHECKING:
    from .plan import Plan
    from .time import Time

WIDTH = 118


def explain(plan: Plan, hardware: HardwareLike | None = None, width: int | None = None) -> str:
    """The plan as plain text: the same on every terminal and in golden files, unless a width is given."""
    width = width or WIDTH
    time = plan.time(hardware) if hardware is not None else None
    own_advice = hardware_advice(plan, time.hardware) if time is not None else ()
    advice = [
        f"{one.level}: {one.text}" + (f" ({one.source})" if one.source else "")
        for one in (*own_advice, *plan.advice)
    ]
    paragraphs = [
        *_wrapped(_totals(plan, time), width),
        "",
        _axes(plan, width),
        "",
        _ops(plan, width),
        "",
        *_wrapped([_memory(plan)], width),
        *_largest_buffers(plan, width),
        *_wrapped(advice, width),
    ]
    return "\n".join(paragraphs).rstrip() + "\n"


def _wrapped(texts: Iterable[str], width: int) -> list[str]:
    return [line for text in texts for line in wrap(text, width)]


def _table(columns: list[str], rows: list[list[str]], width: int) -> str:
    """A table. With less than `WIDTH` columns of text, the place is put below the op."""
    if width < WIDTH and columns[-1] == "where":
        op = next(n for n, name in enumerate(columns) if name in ("op", "made by"))
        rows = [[*row[:op], f"{row[op]}\n{row[-1]}".rstrip(), *row[op + 1 : -1]] for row in rows]
        columns = columns[:-1]
    return format_table(columns, rows, width)


def _totals(plan: Plan, time: Time | None) -> Iterator[str]:
    yield f'{plan.name} on mesh "{plan.mesh}" ({plan.mesh.size} devices), {plan.layout}'
    # With three digits a smaller factor prints as 1, and "1 times over" would puzzle.
    over = f"{plan.duplication:.3g} times over" if plan.duplication > 1.005 else "no duplication"
    yield (
        f"on each device: {human_count(plan.flops, 'FLOP')} ({over}), "
        f"{human_bytes(sum(plan.comm_bytes.values()))} in collectives, "
        f"{human_bytes(plan.memory.peak)} of memory at the peak"
    )
    if plan.waste > 0:
        yield f"padding: {plan.waste:.1%} of all inputs and outputs"
    yield from describe_pipelines(plan)
    if time is not None:
        yield (
            f"predicted time: {human_seconds(time.overlapped_seconds)} with overlap, "
            f"{human_seconds(time.total_seconds)} without; bound by {time.bound}"
        )
        if time.assignment is not None:
            yield from time.assignment.describe()
        available = time.hardware.memory_bytes
        if plan.memory.peak > available:
            yield f"does not fit: a device of {time.hardware.name} has {human_bytes(available)} of memory"


def _axes(plan: Plan, width: int) -> str:
    if not plan.collectives:
        return "no collectives"
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
    return _table(["over", "kind", ">calls", ">bytes", ">sent in a ring"], rows, width)


def _ops(plan: Plan, width: int) -> str:
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
            rows.append([phase, op, flops, collective, human_bytes(size) if size else "", where])
    return _table(["phase", "op", ">FLOP", "collective", ">bytes", "where"], rows, width)


def _where(fact: Event | LiveBuffer) -> str:
    """The layer of an op, which is more telling than a line of its code; outside of layers, the line."""
    return fact.layer or fact.source


def _memory(plan: Plan) -> str:
    m = plan.memory
    return (
        f"memory: parameters {human_bytes(m.params)}, optimizer {human_bytes(m.optimizer)}, all inputs "
        f"{human_bytes(m.inputs)}, saved for the backward pass {human_bytes(m.activations)}, "
        f"peak {human_bytes(m.peak)}"
    )


def _largest_buffers(plan: Plan, width: int) -> Iterator[str]:
    rows = [[human_bytes(b.bytes), b.shape, b.op, _where(b)] for b in plan.memory.largest]
    if rows:
        yield _table([">bytes", "alive at the peak", "made by", "where"], rows, width)
