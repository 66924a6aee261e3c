"""Planned next to compiled, with the ops that each large difference comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ..plan.facts import Collective
from ..plan.table import format_table, wrap
from ..plan.units import human_bytes, human_count, human_seconds
from .analysis import MOST_LIVE
from .facts import CompiledCollective

if TYPE_CHECKING:
    from ..plan.plan import Plan
    from .compiled import Compiled

WIDTH = 118
LARGE = 0.01  # differences above this share get a reason
MOST_REASONS = 4  # ops for one difference

Key = TypeVar("Key")


@dataclass(frozen=True)
class ComparedNumber:
    """A number of the plan next to that of the compiled program.

    Attributes:
      name: what it is.
      planned, compiled: the numbers.
      unit: how they are written.
      reasons: where the difference comes from, the largest part first.
    """

    name: str
    planned: float
    compiled: float
    unit: Callable[[float], str]
    reasons: tuple[str, ...] = ()

    @property
    def difference(self) -> float:
        """How much the plan is above the compiled number, as a share of it."""
        return self.planned / self.compiled - 1 if self.compiled else float(self.planned > 0)


def compare(plan: Plan, compiled: Compiled) -> list[ComparedNumber]:
    """The numbers of a plan next to those of the same program compiled for a target."""
    plan = plan.on(compiled.target.hardware)
    time = plan.time(compiled.target.hardware)
    rows = [
        ComparedNumber(
            "memory at the peak",
            plan.memory.peak,
            compiled.memory.peak,
            human_bytes,
            _memory(plan, compiled),
        ),
        ComparedNumber(
            "FLOP on each device", plan.flops, compiled.flops, human_count, _flops(plan, compiled)
        ),
        ComparedNumber(
            "read and written", sum(w.bytes * w.count for w in plan.work), compiled.traffic, human_bytes
        ),
        ComparedNumber(
            "local work, roofline",
            time.compute_seconds + time.memory_seconds,
            compiled.local_seconds,
            human_seconds,
        ),
    ]
    for axes in sorted({*plan.comm_bytes, *compiled.comm_bytes} - {""}):
        sent = plan.comm_bytes.get(axes, 0), compiled.comm_bytes.get(axes, 0)
        rows.append(
            ComparedNumber(f"bytes over {axes}", *sent, human_bytes, _collectives(plan, compiled, axes))
        )
    network = sum(time.network_seconds.values())
    rows.append(ComparedNumber("network", network, compiled.network_seconds, human_seconds))
    hidden = time.total_seconds - time.overlapped_seconds
    rows.append(
        ComparedNumber("network without overlap", network - hidden, compiled.exposed_seconds, human_seconds)
    )
    return rows


def diff_compiled(plan: Plan, compiled: Compiled) -> str:
    """The comparison as text."""
    rows = compare(plan, compiled)
    table = [
        [row.name, row.unit(row.planned), row.unit(row.compiled), format_difference(row.difference)]
        for row in rows
    ]
    fits = "fits" if compiled.memory.fits else "DOES NOT FIT"
    head = (
        f'{plan.name} on mesh "{plan.mesh}", {plan.layout}, planned, and compiled for {compiled.target} by '
        f"{compiled.compiler}; nothing ran. It {fits}: {human_bytes(compiled.memory.peak)} of "
        f"{human_bytes(compiled.memory.available)}"
    )
    lines = [*wrap(head, WIDTH), "", format_table(["", ">planned", ">compiled", ">plan is"], table, WIDTH)]
    for row in rows:
        if row.reasons and abs(row.difference) > LARGE:
            lines += ["", f"{row.name}, {format_difference(row.difference)}:"]
            lines += [f"  {line}" for reason in row.reasons for line in wrap(reason, WIDTH - 2)]
    kinds = _kinds(plan, compiled)
    return "\n".join([*lines, "", kinds]) + "\n" if kinds else "\n".join(lines) + "\n"


def format_difference(share: float) -> str:
    return "equal" if share == 0 else f"{share:+.1%}"


def _memory(plan: Plan, compiled: Compiled) -> tuple[str, ...]:
    """The largest arrays of the compiled program that are not among the planned ones, and what is lost."""
    planned = {buffer.shape for buffer in plan.memory.largest}
    lines = [
        f"{human_bytes(a.bytes * a.count)} compiled: {a.count} × {a.shape} of {a.op_in_layer or 'no op'}"
        for a in compiled.largest
        if a.shape not in planned
    ]
    live = sum(a.bytes * a.count for a in compiled.largest)
    own = compiled.memory.temporaries + compiled.memory.outputs - compiled.memory.aliased
    if own > live * (1 + LARGE) and len(compiled.largest) < MOST_LIVE:
        lines.append(f"{human_bytes(own - live)} compiled: gaps between arrays of different lifetimes")
    return tuple(lines[:MOST_REASONS])


def _flops(plan: Plan, compiled: Compiled) -> tuple[str, ...]:
    """The ops whose FLOPs differ."""
    planned = _sums((w.op_in_layer, w.flops * w.count) for w in plan.work)
    found = _sums((w.op_in_layer, w.flops * w.count) for w in compiled.work)
    return tuple(_largest(planned, found, human_count))


def _collectives(plan: Plan, compiled: Compiled, axes: str) -> tuple[str, ...]:
    """The kinds and ops whose bytes over some axes differ."""
    planned = _sums((c.op_in_layer, c.bytes * c.count) for c in plan.collectives if c.over == axes)
    found = _sums((c.op_in_layer, c.bytes * c.count) for c in compiled.collectives if c.over == axes)
    merged = sum((c.arrays - 1) * c.count for c in compiled.collectives if c.over == axes)
    lines = list(_largest(planned, found, human_bytes))
    dtypes = _sums((c.dtype, c.bytes * c.count) for c in compiled.collectives if c.over == axes)
    if len(dtypes) > 1:
        # Where a matmul rounds its operands, the compiler may round them before it gathers them.
        lines.append(
            f"by dtype, as compiled: {', '.join(f'{d} {human_bytes(n)}' for d, n in dtypes.most_common())}"
        )
    if merged:
        # A merged collective has the name of its largest part.
        lines.append(f"{merged} of the compiled collectives are merged into others, and counted with them")
    return tuple(lines)


def _largest(
    planned: Mapping[str, float], found: Mapping[str, float], unit: Callable[[float], str]
) -> Iterator[str]:
    keys = sorted({*planned, *found}, key=lambda key: -abs(planned.get(key, 0) - found.get(key, 0)))
    for key in keys[:MOST_REASONS]:
        before, after = planned.get(key, 0), found.get(key, 0)
        if before != after:
            yield f"{key or 'outside of ops'}: {unit(before)} planned, {unit(after)} compiled"


def _kinds(plan: Plan, compiled: Compiled) -> str:
    """The collectives by axes and kind, planned next to compiled."""
    planned, found = by_kind(plan.collectives), by_kind(compiled.collectives)
    rows = []
    for key in sorted({*planned, *found}):
        (calls, size), (new_calls, new_size) = planned.get(key, (0, 0)), found.get(key, (0, 0))
        group = [c for c in compiled.collectives if (c.over, c.kind) == key]
        overlapped = sum(c.bytes * c.count for c in group if c.asynchronous)
        share = f"{overlapped / new_size:.0%}" if new_size else ""
        rows.append([*key, str(calls), human_bytes(size), str(new_calls), human_bytes(new_size), share])
    columns = ["over", "kind", ">planned", ">bytes", ">compiled", ">bytes", ">overlapped"]
    return format_table(columns, rows, WIDTH) if rows else ""


def by_kind(
    collectives: Iterable[Collective] | Iterable[CompiledCollective],
) -> dict[tuple[str, str], tuple[int, int]]:
    calls: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for c in collectives:
        calls[c.over, c.kind] += c.count
        sizes[c.over, c.kind] += c.bytes * c.count
    return {key: (calls[key], sizes[key]) for key in calls if key[0]}


def _sums(pairs: Iterable[tuple[Key, float]]) -> Counter[Key]:
    total: Counter[Key] = Counter()
    for key, value in pairs:
        total[key] += value  # type: ignore[assignment]
    return total
