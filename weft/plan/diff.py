"""What two plans do differently."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from .units import human_bytes, human_count

if TYPE_CHECKING:
    from .plan import Plan


def diff(one: Plan, other: Plan) -> str:
    """Totals side by side, then the collectives that only one of the two has."""
    lines = [f'- mesh "{one.mesh}", {one.layout}', f'+ mesh "{other.mesh}", {other.layout}', ""]
    rows = [
        ("FLOP on each device", one.flops, other.flops, human_count),
        ("duplication", one.duplication, other.duplication, lambda x: f"{x:.3g}"),
        ("memory at the peak", one.memory.peak, other.memory.peak, human_bytes),
        ("kept for the backward pass", one.memory.activations, other.memory.activations, human_bytes),
    ]
    for axes in sorted({*one.comm_bytes, *other.comm_bytes}):
        sent = one.comm_bytes.get(axes, 0), other.comm_bytes.get(axes, 0)
        rows.append((f"bytes over {axes}", *sent, human_bytes))
    for label, before, after, shown in rows:
        change = f"  ({after / before:.3g}×)" if before and before != after else ""
        lines.append(f"  {label}: {shown(before)} → {shown(after)}{change}")
    mine, theirs = _sent(one), _sent(other)
    for sign, only in (("-", mine - theirs), ("+", theirs - mine)):
        for (phase, kind, axes, size, op), count in sorted(only.items()):
            times = f" × {count}" if count > 1 else ""
            lines.append(f"{sign} {phase}: {kind} over {axes}, {human_bytes(size)}{times}, {op}")
    return "\n".join(lines) + "\n"


def _sent(plan: Plan) -> Counter[tuple[str, str, str, int, str]]:
    found: Counter[tuple[str, str, str, int, str]] = Counter()
    for c in plan.collectives:
        found[c.phase, c.kind, c.over, c.bytes, c.op] += c.count
    return found


def golden_changes(golden: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What a plan's data has become since it was stored; source lines may move, nothing else."""
    if golden.get("version") != now["version"]:
        return [f"version: {golden.get('version')} → {now['version']}"]
    lines = [
        f"{key}: {golden.get(key)!r} → {now[key]!r}"
        for key in ("name", "mesh", "layout", "flops", "unique_flops", "comm_bytes")
        if golden.get(key) != now[key]
    ]
    kept = golden.get("memory")
    for key, value in now["memory"].items():
        before = kept.get(key) if isinstance(kept, dict) else None
        if key != "largest" and before != value:
            lines.append(f"memory {key}: {before} → {value}")
    before, after = (_counted(data.get("events", [])) for data in (golden, now))
    for sign, only in (("-", before - after), ("+", after - before)):
        lines += [f"{sign} {text}" + (f" × {n}" if n > 1 else "") for text, n in sorted(only.items())]
    return lines


def _counted(events: list[dict[str, Any]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for e in events:
        if e["type"] == "collective":
            axes = "+".join(e["axes"])
            found[f"{e['phase']}: {e['kind']} over {axes}, {e['bytes']} bytes, {e['op']}"] += e["count"]
        else:
            did = f"{e['kind']}, {e['flops']} FLOP, {e['bytes']} bytes of {e['dtype'] or 'no type'}"
            found[f"{e['phase']}: {did}, {e['op']}"] += e["count"]
    return found
