"""The differences of two plans."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from .units import human_bytes, human_count

if TYPE_CHECKING:
    from .plan import Plan


def diff(one: Plan, other: Plan) -> str:
    """The totals side by side, then the collectives that only one of the two has."""
    lines = [f'- mesh "{one.mesh}", {one.layout}', f'+ mesh "{other.mesh}", {other.layout}', ""]
    lines += compare_totals(one, other)
    mine, theirs = _count_collectives(one), _count_collectives(other)
    for sign, only in (("-", mine - theirs), ("+", theirs - mine)):
        for (phase, kind, axes, size, op), count in sorted(only.items()):
            suffix = f" × {count}" if count > 1 else ""
            lines.append(f"{sign} {phase}: {kind} over {axes}, {human_bytes(size)}{suffix}, {op}")
    return "\n".join(lines) + "\n"


def compare_totals(one: Plan, other: Plan) -> list[str]:
    """The totals of two plans, a line for each."""
    rows = [
        ("FLOP on each device", one.flops, other.flops, human_count),
        ("duplication", one.duplication, other.duplication, lambda x: f"{x:.3g}"),
        ("memory at the peak", one.memory.peak, other.memory.peak, human_bytes),
        ("saved for the backward pass", one.memory.activations, other.memory.activations, human_bytes),
    ]
    for axes in sorted({*one.comm_bytes, *other.comm_bytes}):
        sent = one.comm_bytes.get(axes, 0), other.comm_bytes.get(axes, 0)
        rows.append((f"bytes over {axes}", *sent, human_bytes))
    lines = []
    for label, before, after, format_value in rows:
        change = f"  ({after / before:.3g}×)" if before and before != after else ""
        lines.append(f"  {label}: {format_value(before)} → {format_value(after)}{change}")
    return lines


def _count_collectives(plan: Plan) -> Counter[tuple[str, str, str, int, str]]:
    counts: Counter[tuple[str, str, str, int, str]] = Counter()
    for c in plan.collectives:
        counts[c.phase, c.kind, c.over, c.bytes, c.op_in_layer] += c.count
    return counts


def golden_changes(golden: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The changes of a plan's data since the golden file was written.

    Source lines are not compared: they change with every edit of the program.
    """
    if golden.get("version") != now["version"]:
        return [f"version: {golden.get('version')} → {now['version']}"]
    lines = [
        f"{key}: {golden.get(key)!r} → {now[key]!r}"
        for key in ("name", "mesh", "layout", "flops", "unique_flops", "comm_bytes")
        if golden.get(key) != now[key]
    ]
    memory = golden.get("memory")
    for key, value in now["memory"].items():
        previous = memory.get(key) if isinstance(memory, dict) else None
        # The largest live buffers contain source lines, which change with every edit.
        if key != "largest" and previous != value:
            lines.append(f"memory {key}: {previous} → {value}")
    before, after = (_count_events(data.get("events", [])) for data in (golden, now))
    for sign, only in (("-", before - after), ("+", after - before)):
        lines += [f"{sign} {text}" + (f" × {n}" if n > 1 else "") for text, n in sorted(only.items())]
    return lines


def _count_events(events: list[dict[str, Any]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for e in events:
        if e["type"] == "collective":
            axes = "+".join(e["axes"])
            counts[f"{e['phase']}: {e['kind']} over {axes}, {e['bytes']} bytes, {e['op']}"] += e["count"]
        else:
            work = f"{e['kind']}, {e['flops']} FLOP, {e['bytes']} bytes of {e['dtype'] or 'no type'}"
            counts[f"{e['phase']}: {work}, {e['op']}"] += e["count"]
    return counts
