"""Search results as text and as JSON-compatible data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..plan.diff import compare_totals
from ..plan.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from .results import RankedLayout, SearchResult

VERSION = 1


def explain(result: SearchResult, compare: RankedLayout | None, rows: int) -> str:
    """The best layout, the table, the counts, and why the best is better than `compare`."""
    lines = [
        f"{_name(result)} on {result.devices} × {result.hardware.label}, "
        f"at most {human_bytes(result.cap)} on each",
        "",
    ]
    if result.best is None:
        lines += _describe_nearest(result)
    else:
        best = describe_candidate(result.best)
        lines += [*(f"  {line}" for line in best), "", *_table(result.ranked[:rows])]
        if result.front:
            lines += ["", "the fastest with less and less memory:", "", *_table(result.front)]
    lines += ["", describe_counts(result)]
    if compare is not None and result.best is not None:
        lines += ["", explain_difference(result.best, compare)]
    return "\n".join(lines) + "\n"


def describe_candidate(layout: RankedLayout) -> list[str]:
    """The mesh, the rules, the time and the memory of a candidate, one line each."""
    c = layout.candidate
    lines = [f'mesh    "{c.mesh}"', f'layout  "{c.rules}"']
    lines += [f'{role:<7} "{rules}"' for role, rules in c.storage_rules.items()]
    if c.variant:
        lines.append(f"with    {c.variant}")
    time = layout.time
    lines.append(
        f"time    {human_seconds(layout.seconds)}, bound by {time.bound}; {time.flops_share:.0%} of the peak"
    )
    lines.append(f"memory  {human_bytes(layout.bytes)} on each device")
    return lines


def train_flags(layout: RankedLayout) -> str:
    """The equivalent flags of `weft train`."""
    c = layout.candidate
    flags = {"mesh": str(c.mesh), "rules": c.rules, **c.storage_rules}
    layout_flags = [f'--layout.{name} "{value}"' for name, value in flags.items() if value]
    return " ".join([*layout_flags, *getattr(c.variant, "flags", ())])


def describe_counts(result: SearchResult) -> str:
    """The number of candidates, and how many were ruled out for which reason."""
    planned = len(result.ranked) + len(result.too_large)
    text = (
        f"{result.legal:,} legal candidate{'s' * (result.legal != 1)}: {result.by_memory:,} can't fit, "
        f"{result.by_bound:,} can't be better, {result.refused:,} could not be lowered, "
        f"{planned:,} planned"
    )
    if result.too_large:
        text += f" ({len(result.too_large):,} too large)"
    if result.best is not None and result.best.bound:
        value = result.best.seconds if result.objective == "time" else result.best.bytes
        text += f"; the bound of the best was {result.best.bound / value:.1%} of its plan"
    if result.left_out:
        reasons = "negligible, looped over, unsplittable in some op, or excluded"
        text += f"\nnot searched ({reasons}): {', '.join(result.left_out)}"
    return text


def explain_difference(best: RankedLayout, other: RankedLayout) -> str:
    """Why the best is better than another layout: by parts of the time, then by totals of the plans."""
    lines = [
        f'compared with mesh "{other.mesh}", {other.layout!r}: '
        f"{human_seconds(other.seconds)} → {human_seconds(best.seconds)} "
        f"({other.seconds / best.seconds:.2f} times as fast), "
        f"{human_bytes(other.bytes)} → {human_bytes(best.bytes)}"
    ]
    labels = ("compute", "memory traffic", "network", "of it overlapped")
    for label, before, after in zip(labels, _time_parts(other), _time_parts(best), strict=True):
        lines.append(f"  {label}: {human_seconds(before)} → {human_seconds(after)}")
    return "\n".join([*lines, *compare_totals(other.plan, best.plan)])


def _time_parts(layout: RankedLayout) -> list[float]:
    """The seconds of compute, memory traffic and the network, and how much of them overlaps."""
    time = layout.time
    network = sum(time.network_seconds.values())
    return [time.compute_seconds, time.memory_seconds, network, time.total_seconds - time.overlapped_seconds]


def _describe_nearest(result: SearchResult) -> list[str]:
    """The candidate that comes closest to fitting."""
    nearest = result.nearest
    if nearest is None:
        return ["nothing fits."]
    m, missing = nearest.plan.memory, human_bytes(nearest.bytes - result.cap)
    parts = {
        "parameters": m.params,
        "optimizer state": m.optimizer,
        "activations and the rest": m.peak - m.params - m.optimizer,
    }
    return [
        f"nothing fits. The nearest needs {human_bytes(nearest.bytes)}, {missing} too much:",
        "",
        *(f"  {line}" for line in describe_candidate(nearest)),
        "  of it " + ", ".join(f"{part} {human_bytes(size)}" for part, size in parts.items()),
    ]


def _name(result: SearchResult) -> str:
    layouts = [*result.ranked, *result.too_large, *([result.nearest] if result.nearest else [])]
    return layouts[0].plan.name if layouts else "the program"


def _table(layouts: Sequence[RankedLayout]) -> list[str]:
    rows = [("time", "memory", "bound by", "done", "mesh", "sent by each device", "layout")]
    for layout in layouts:
        c = layout.candidate
        rules = [
            c.rules or "nothing split",
            *(f"{role} {extra}" for role, extra in c.storage_rules.items()),
        ]
        sent = (f"{axes} {human_bytes(n)}" for axes, n in layout.plan.comm_bytes.items())
        rows.append(
            (
                human_seconds(layout.seconds),
                human_bytes(layout.bytes),
                layout.time.bound,
                f"{layout.plan.duplication:.2f}×",
                str(c.mesh) or "one device",
                ", ".join(sent) or "nothing",
                "; ".join([*rules, *([c.variant] if c.variant else [])]),
            )
        )
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]


def candidate_to_data(layout: RankedLayout) -> dict[str, Any]:
    """A candidate as JSON-compatible data."""
    c = layout.candidate
    return {
        "mesh": str(c.mesh),
        "rules": c.rules,
        "params": c.params,
        "optimizer": c.optimizer,
        "variant": c.variant,
        "seconds": layout.seconds,
        "total_seconds": layout.time.total_seconds,
        "bytes": layout.bytes,
        "bound_by": layout.time.bound,
        "duplication": layout.plan.duplication,
        "comm_bytes": layout.plan.comm_bytes,
        "bound": layout.bound,
        "train_flags": train_flags(layout),
    }


def result_to_data(result: SearchResult, compare: RankedLayout | None) -> dict[str, Any]:
    """The result and the layout it is compared with, as JSON-compatible data."""
    return {
        "version": VERSION,
        "name": _name(result),
        "devices": result.devices,
        "hardware": result.hardware.label,
        "memory": result.cap,
        "objective": result.objective,
        "legal": result.legal,
        "refused": result.refused,
        "by_memory": result.by_memory,
        "by_bound": result.by_bound,
        "left_out": list(result.left_out),
        "ranked": [candidate_to_data(layout) for layout in result.ranked],
        "too_large": [candidate_to_data(layout) for layout in result.too_large],
        "front": [candidate_to_data(layout) for layout in result.front],
        "nearest": candidate_to_data(result.nearest) if result.nearest is not None else None,
        "compare": candidate_to_data(compare) if compare is not None else None,
    }
