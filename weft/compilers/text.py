"""A compiled program as text: its memory, what takes the time, what is sent, copies and padding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..plan.table import format_table, wrap
from ..plan.units import human_bytes, human_count, human_seconds
from .facts import CompiledCollective, CompiledWork, PaddedArray

if TYPE_CHECKING:
    from .compiled import Compiled

WIDTH = 118
MOST_ROWS = 20
MOST_COPIES = 8


def explain(compiled: Compiled, width: int | None = None) -> str:
    """The compiled program as plain text."""
    width = width or WIDTH
    sections = [
        _wrapped(_totals(compiled), width),
        _kinds(compiled, width),
        _work(compiled, width),
        _collectives(compiled, width),
        _largest(compiled, width),
        _copies(compiled, width),
        _padding(compiled.padded, width),
        _wrapped(notes(compiled), width),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _wrapped(texts: Iterable[str], width: int) -> str:
    return "\n".join(line for text in texts for line in wrap(text, width))


def _totals(compiled: Compiled) -> Iterator[str]:
    m = compiled.memory
    yield f'{compiled.name} on mesh "{compiled.mesh}" ({compiled.mesh.size} devices), {compiled.layout}'
    yield (
        f"compiled for {compiled.target} ({compiled.device_kind}) by {compiled.compiler} in "
        f"{human_seconds(compiled.seconds)}; nothing ran"
    )
    yield from compiled.assignment.describe()
    verdict = "fits" if m.fits else "DOES NOT FIT"
    yield (
        f"memory: {human_bytes(m.peak)} of {human_bytes(m.available)}, {verdict}: arguments "
        f"{human_bytes(m.arguments)}, temporaries {human_bytes(m.temporaries)}, results that reuse no "
        f"argument {human_bytes(m.outputs - m.aliased)}; code {human_bytes(m.code)}"
    )
    local = human_seconds(compiled.local_seconds)
    if compiled.has_estimates:
        local += f" by the roofline, {human_seconds(compiled.estimated_seconds)} by the compiler's estimates"
    yield (
        f"local work: {local}; {human_count(compiled.flops, 'FLOP')}, {human_bytes(compiled.traffic)} read "
        "and written"
    )
    if compiled.collectives:
        yield (
            f"network: {human_seconds(compiled.network_seconds)}, of which "
            f"{human_seconds(compiled.exposed_seconds)} overlap with nothing"
        )
    low, high = compiled.step_seconds
    yield f"estimated time of a call: {human_seconds(low)} to {human_seconds(high)}"


def _kinds(compiled: Compiled, width: int) -> str:
    groups: dict[str, list[CompiledWork]] = defaultdict(list)
    for one in compiled.work:
        groups[one.kind].append(one)
    totals = {kind: _seconds(group) for kind, group in groups.items()}
    rows = [
        [
            kind,
            str(sum(w.count for w in groups[kind])),
            human_count(sum(w.flops * w.count for w in groups[kind])) if kind == "matmul" else "",
            human_bytes(sum(w.bytes * w.count for w in groups[kind])),
            human_seconds(totals[kind][0]),
            _estimated(groups[kind]),
        ]
        for kind in sorted(groups, key=lambda kind: -max(totals[kind]))
        if max(totals[kind])
    ]
    return format_table(["kind", ">runs", ">FLOP", ">bytes", ">roofline", ">compiler's"], rows, width)


def _seconds(group: Iterable[CompiledWork]) -> tuple[float, float]:
    """The roofline and the compiler's estimate of some work; work without an estimate has its roofline."""
    group = list(group)
    return (
        sum(w.roofline_seconds * w.count for w in group),
        sum(w.likely_seconds * w.count for w in group),
    )


def _estimated(group: Iterable[CompiledWork]) -> str:
    group = list(group)
    if all(w.estimated_seconds is None for w in group):
        return "none"
    return human_seconds(_seconds(group)[1])


def work_by_op(compiled: Compiled) -> list[tuple[CompiledWork, list[CompiledWork]]]:
    """The work by op, phase and kind, the longest first: one of each group, and the group."""
    groups: dict[tuple[str, ...], list[CompiledWork]] = defaultdict(list)
    for one in compiled.work:
        groups[one.op, one.layer, one.phase, one.kind, one.source].append(one)
    ordered = sorted(groups.values(), key=lambda group: -max(_seconds(group)))
    return [(group[0], group) for group in ordered if max(_seconds(group))]


def _work(compiled: Compiled, width: int) -> str:
    found = work_by_op(compiled)
    rows = []
    for one, group in found[:MOST_ROWS]:
        flops = sum(w.flops * w.count for w in group)
        rows.append(
            [
                one.phase,
                str(one.op) or one.instruction,
                one.kind,
                human_count(flops) if flops else "",
                human_bytes(sum(w.bytes * w.count for w in group)),
                human_seconds(_seconds(group)[0]),
                _estimated(group),
                one.layer or one.source,
            ]
        )
    columns = ["phase", "op", "kind", ">FLOP", ">bytes", ">roofline", ">compiler's", "where"]
    more = f"\nand {len(found) - len(rows)} more" if len(found) > len(rows) else ""
    return format_table(columns, rows, width) + more if rows else ""


def _collectives(compiled: Compiled, width: int) -> str:
    groups: dict[tuple[str, ...], list[CompiledCollective]] = defaultdict(list)
    for c in compiled.collectives:
        groups[c.over, c.kind, c.requested or c.kind, str(c.asynchronous), str(c.op), c.layer].append(c)
    if not groups:
        return "no collectives"
    rows = []
    order = sorted(groups.values(), key=lambda g: -sum(c.network_seconds * c.count for c in g))
    for group in order[:MOST_ROWS]:
        one = group[0]
        kind = f"{one.requested}, compiled to {one.kind}" if one.requested not in ("", one.kind) else one.kind
        merged = sum(c.arrays for c in group) - len(group)
        rows.append(
            [
                one.over,
                kind,
                str(sum(c.count for c in group)),
                human_bytes(sum(c.bytes * c.count for c in group)),
                human_seconds(sum(c.network_seconds * c.count for c in group)),
                human_seconds(sum(c.exposed_seconds * c.count for c in group)),
                "async" if one.asynchronous else "sync",
                (str(one.op) or one.instruction) + (f" and {merged} more" if merged else ""),
                one.layer or one.source,
            ]
        )
    columns = ["over", "collective", ">calls", ">bytes", ">network", ">exposed", "", "op", "where"]
    more = f"\nand {len(order) - len(rows)} more" if len(order) > len(rows) else ""
    return format_table(columns, rows, width) + more


def _largest(compiled: Compiled, width: int) -> str:
    rows = [
        [human_bytes(a.bytes * a.count), str(a.count), a.shape, str(a.op), a.layer or a.source]
        for a in compiled.largest[:MOST_COPIES]
    ]
    if not rows:
        return ""
    table = format_table([">bytes", ">arrays", "array", "made by", "where"], rows, width)
    return "the largest arrays at the peak\n" + table


def _copies(compiled: Compiled, width: int) -> str:
    rows = [
        [human_bytes(w.bytes * w.count), str(w.count), w.shape, str(w.op), w.layer or w.source]
        for w in compiled.copies[:MOST_COPIES]
    ]
    if not rows:
        return ""
    total = human_bytes(sum(w.bytes * w.count for w in compiled.copies))
    head = f"copies that the program does not request: {total} read and written"
    return head + "\n" + format_table([">bytes", ">runs", "array", "op", "where"], rows, width)


def _padding(padded: Iterable[PaddedArray], width: int) -> str:
    rows = [
        [human_bytes(p.padded_bytes - p.bytes), human_bytes(p.bytes), p.shape, str(p.op), p.layer or p.source]
        for p in padded
    ]
    if not rows:
        return ""
    table = format_table([">padding", ">of", "array", "op", "where"], rows[:MOST_COPIES], width)
    return "padding to full tiles\n" + table


def notes(compiled: Compiled) -> Iterator[str]:
    changed = [c for c in compiled.collectives if c.requested and c.requested != c.kind]
    if changed:
        size = human_bytes(sum(c.bytes * c.count for c in changed))
        axes = ", ".join(dict.fromkeys(c.over for c in changed))
        kinds = ", ".join(dict.fromkeys(f"{c.requested}s to {c.kind}s" for c in changed))
        yield (
            f"warning: the compiler turned {kinds} ({size} over {axes}), which send twice the bytes; on a "
            "TPU an axis that spans all of a slice has this effect, and one that spans a part of it does not"
        )
    for loop in compiled.loops:
        yield f"warning: the number of iterations of {loop.op or 'a loop'} is not known; one is counted"
    yield (
        "note: the collectives, the work and the memory are the compiler's; the seconds are estimates: the "
        "roofline ignores everything but FLOPs and memory traffic, and the compiler's own estimates choose "
        "its tiles"
    )
