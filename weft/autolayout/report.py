"""What a search found, as text and as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..plan.diff import diff
from ..plan.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from .ranking import RankedLayout, SearchResult

VERSION = 1
VARIANT_FLAGS = {  # of variants
    "remat": "--model.remat",
    "micro": "--optimizer.micro",
    "pipeline": "--model.pipeline",
    "pipeline-micro": "--model.pipeline-micro",
}


def explain(found: SearchResult, compare: RankedLayout | None, rows: int) -> str:
    """The best, the table, what was ruled out, and why the best is better than another."""
    lines = [
        f"{_name(found)} on {found.devices} × {found.hardware.name}, "
        f"at most {human_bytes(found.cap)} on each",
        "",
    ]
    if found.best is None:
        lines += _nothing(found)
    else:
        lines += [*(f"  {line}" for line in describe_candidate(found.best)), "", *_table(found.ranked[:rows])]
        if found.front:
            lines += ["", "the fastest with less and less memory:", "", *_table(found.front)]
    lines += ["", describe_counts(found)]
    if compare is not None and found.best is not None:
        lines += ["", explain_difference(found.best, compare)]
    return "\n".join(lines) + "\n"


def describe_candidate(one: RankedLayout) -> list[str]:
    """What to write down of a candidate: its mesh, its rules, and what it takes."""
    c = one.candidate
    lines = [f'mesh    "{c.mesh}"', f'layout  "{c.rules}"']
    lines += [f'{name:<7} "{rules}"' for name, rules in c.stored.items()]
    if c.variant:
        lines.append(f"with    {c.variant}")
    time = one.time
    lines.append(
        f"time    {human_seconds(one.seconds)}, bound by {time.bound}; {time.flops_share:.0%} of the peak"
    )
    lines.append(f"memory  {human_bytes(one.bytes)} on each device")
    return lines


def train_flags(one: RankedLayout) -> str:
    """The flags of `weft train` that say the same."""
    c = one.candidate
    flags = {"mesh": str(c.mesh), "rules": c.rules, **c.stored}
    given = [f'--layout.{name} "{value}"' for name, value in flags.items() if value]
    words = [word.partition(" ") for word in c.variant.split(", ")]
    return " ".join(
        [*given, *(f"{VARIANT_FLAGS[name]} {value}" for name, _, value in words if name in VARIANT_FLAGS)]
    )


def describe_counts(found: SearchResult) -> str:
    """How many candidates there were, and what became of them."""
    planned = len(found.ranked) + len(found.too_large)
    text = (
        f"{found.legal:,} legal candidate{'s' * (found.legal != 1)}: {found.by_memory:,} can't fit, "
        f"{found.by_bound:,} can't be better, {found.refused:,} could not be lowered, "
        f"{planned:,} planned"
    )
    if found.too_large:
        text += f", of which {len(found.too_large):,} were too large"
    if found.best is not None and found.best.bound:
        value = found.best.seconds if found.objective == "time" else found.best.bytes
        text += f"; the bound of the best was {found.best.bound / value:.1%} of what it takes"
    if found.left_out:
        reasons = "of no weight, looped along, whole in some op, or not asked for"
        text += f"\nnot searched ({reasons}): {', '.join(found.left_out)}"
    return text


def explain_difference(best: RankedLayout, other: RankedLayout) -> str:
    """What makes the best better than another: by what the time goes to, then by what is sent."""
    lines = [
        f'compared with mesh "{other.mesh}", {other.layout!r}: '
        f"{human_seconds(other.seconds)} → {human_seconds(best.seconds)} "
        f"({other.seconds / best.seconds:.2f} times as fast), "
        f"{human_bytes(other.bytes)} → {human_bytes(best.bytes)}"
    ]
    words = ("multiplications", "memory traffic", "network", "of it hidden")
    for word, before, after in zip(words, _parts(other), _parts(best), strict=True):
        lines.append(f"  {word}: {human_seconds(before)} → {human_seconds(after)}")
    lines += [line for line in diff(other.plan, best.plan).splitlines() if line.startswith("  ")]
    return "\n".join(lines)


def _parts(one: RankedLayout) -> list[float]:
    """What the time goes to: multiplications, memory traffic, the network, and what is hidden of that."""
    time = one.time
    network = sum(time.network_seconds.values())
    return [time.compute_seconds, time.memory_seconds, network, time.total_seconds - time.overlapped_seconds]


def _nothing(found: SearchResult) -> list[str]:
    """The nearest miss."""
    near = found.nearest
    if near is None:
        return ["nothing fits."]
    m, missing = near.plan.memory, human_bytes(near.bytes - found.cap)
    parts = {
        "parameters": m.params,
        "optimizer state": m.optimizer,
        "activations and the rest": m.peak - m.params - m.optimizer,
    }
    return [
        f"nothing fits. The nearest needs {human_bytes(near.bytes)}, {missing} too much:",
        "",
        *(f"  {line}" for line in describe_candidate(near)),
        "  of it " + ", ".join(f"{word} {human_bytes(size)}" for word, size in parts.items()),
    ]


def _name(found: SearchResult) -> str:
    some = [*found.ranked, *found.too_large, *([found.nearest] if found.nearest else [])]
    return some[0].plan.name if some else "the program"


def _table(some: Sequence[RankedLayout]) -> list[str]:
    rows = [("time", "memory", "bound by", "done", "mesh", "sent by each device", "layout")]
    for one in some:
        c = one.candidate
        words = [c.rules or "nothing split", *(f"{name} {rules}" for name, rules in c.stored.items())]
        sent = (f"{axes} {human_bytes(n)}" for axes, n in one.plan.comm_bytes.items())
        rows.append(
            (
                human_seconds(one.seconds),
                human_bytes(one.bytes),
                one.time.bound,
                f"{one.plan.duplication:.2f}×",
                str(c.mesh) or "one device",
                ", ".join(sent) or "nothing",
                "; ".join([*words, *([c.variant] if c.variant else [])]),
            )
        )
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]


def candidate_to_data(one: RankedLayout) -> dict[str, Any]:
    """A candidate as data."""
    c = one.candidate
    return {
        "mesh": str(c.mesh),
        "rules": c.rules,
        "params": c.params,
        "optimizer": c.optimizer,
        "variant": c.variant,
        "seconds": one.seconds,
        "total_seconds": one.time.total_seconds,
        "bytes": one.bytes,
        "bound_by": one.time.bound,
        "duplication": one.plan.duplication,
        "comm_bytes": one.plan.comm_bytes,
        "bound": one.bound,
        "train_flags": train_flags(one),
    }


def result_to_data(found: SearchResult, compare: RankedLayout | None) -> dict[str, Any]:
    """What was found as JSON's kinds of things, and what it was compared with."""
    return {
        "version": VERSION,
        "name": _name(found),
        "devices": found.devices,
        "hardware": found.hardware.name,
        "memory": found.cap,
        "objective": found.objective,
        "legal": found.legal,
        "refused": found.refused,
        "by_memory": found.by_memory,
        "by_bound": found.by_bound,
        "left_out": list(found.left_out),
        "ranked": [candidate_to_data(one) for one in found.ranked],
        "too_large": [candidate_to_data(one) for one in found.too_large],
        "front": [candidate_to_data(one) for one in found.front],
        "nearest": candidate_to_data(found.nearest) if found.nearest is not None else None,
        "compare": candidate_to_data(compare) if compare is not None else None,
    }
