"""Pipelines in a plan: stages, idle time, bytes sent, and a chart of the schedule."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..core.observations import Pipeline
from .events import TracedEvent
from .facts import Collective, PipelinePlan, ScheduleBar, Work
from .units import human_bytes

if TYPE_CHECKING:
    from .plan import Plan

# The backward pass of a stage for one micro-batch, in units of its forward pass: the recomputed forward pass
# (1) and the gradients (2). With "1f1b" a stage recomputes the forward pass once more, as input for the next
# stage.
BACKWARD_COST = {"gpipe": 3, "1f1b": 4}


def plan_pipelines(pipelines: Sequence[Pipeline], events: Sequence[TracedEvent]) -> list[PipelinePlan]:
    """The facts of a program's pipelines.

    Args:
      pipelines: the traced pipelines, without duplicates.
      events: all events of the program.
    """
    # Stages may duplicate the work outside of a pipeline. Only the enclosing ops tell it from work inside.
    pairs = [(traced.event, traced.scope.is_inside("pipeline")) for traced in events]
    work = [(e.flops * e.count, inside, e.varies) for e, inside in pairs if isinstance(e, Work)]
    total = sum(flops for flops, _, _ in work) or 1
    plans = []
    for p in pipelines:
        sent = sum(
            e.wire_bytes * e.count
            for e, inside in pairs
            if inside and isinstance(e, Collective) and e.kind == "permute" and {*e.axes} == {*p.axes}
        )
        duplicated = sum(
            flops for flops, inside, varies in work if not inside and not set(varies) & set(p.axes)
        )
        plans.append(
            PipelinePlan(
                layers=p.layers.name,
                count=p.layers.size,
                axes=p.axes,
                stages=p.stages,
                micro=p.micro,
                schedule=p.schedule,
                ticks=p.micro + p.stages - 1,
                # 1F1B first fills the pipeline forward again, then drains it backward.
                back_ticks=p.micro + (p.stages - 1) * (1 if p.schedule == "gpipe" else 2),
                bubble=bubble_share(p.stages, p.micro, p.schedule),
                sent=sent,
                duplicated_share=duplicated / total,
            )
        )
    return plans


def bubble_share(stages: int, micro: int, schedule: str) -> float:
    """The share of its time that a stage is idle: for GPipe (K - 1) / (M + K - 1).

    >>> bubble_share(4, 8, "gpipe") == 3 / 11
    True
    """
    idle, back = stages - 1, BACKWARD_COST[schedule]
    ticks = micro + idle + back * (micro + (idle if schedule == "gpipe" else 2 * idle))
    return 1 - (1 + back) * micro / ticks


def schedule_bars(p: PipelinePlan) -> Iterator[ScheduleBar]:
    """The work of each stage over time, in units of the forward pass of one micro-batch."""
    back = BACKWARD_COST[p.schedule]
    idle = p.stages - 1
    for k in range(p.stages):
        for m in range(p.micro):
            yield ScheduleBar(k, "forward", m, m + k, 1)
            # The backward pass of GPipe is JAX's transpose of the loop over ticks, which runs in reverse.
            if p.schedule == "gpipe":
                yield ScheduleBar(k, "backward", m, p.ticks + back * (idle - k + p.micro - 1 - m), back)
            else:
                yield ScheduleBar(k, "recompute", m, p.ticks + back * (m + k), 1)
                yield ScheduleBar(k, "backward", m, p.ticks + back * (m + 2 * idle - k) + 1, back - 1)


def describe_pipelines(plan: Plan) -> Iterator[str]:
    """A line for each pipeline, and lines for each set of stage axes."""
    for p in plan.pipelines:
        yield (
            f"pipeline: {p.layers}={p.count} in {p.stages} stages of "
            f"{'at most ' if p.count % p.stages else ''}{-(-p.count // p.stages)} along {'+'.join(p.axes)}, "
            f"{p.micro} micro-batches, {p.schedule}: {p.ticks} ticks forward and {p.back_ticks} back, "
            f"a bubble of {p.bubble:.1%}"
        )
    for axes, p in {"+".join(p.axes): p for p in plan.pipelines}.items():
        yield f"{human_bytes(p.sent)} sent from stage to stage along {axes}"
        if p.duplicated_share > 0.005:
            yield (
                f"outside of stages, {p.duplicated_share:.1%} of the FLOPs are duplicated along {axes}; a "
                f"rule for a dim that is not inside, such as vocab:{axes}, divides them"
            )


COLORS = {
    "forward": "var(--forward, #4c8dd6)",
    "recompute": "var(--rest, #a9b1bd)",
    "backward": "var(--backward, #e0913a)",
}
MAX_BARS = 6000  # more are thinner than a pixel


def pipeline_svg(p: PipelinePlan) -> str:
    """The schedule as an SVG: a row for each stage, a bar for each micro-batch."""
    bars = list(schedule_bars(p)) if 3 * p.stages * p.micro <= MAX_BARS else []
    end = max((bar.start + bar.length for bar in bars), default=1)
    width, row, left = 1000, 22, 60
    scale = (width - left) / end
    parts = [
        f'<svg viewBox="0 0 {width} {row * (p.stages + 1)}" width="100%" role="img" font-family="system-ui" '
        f'font-size="11" aria-label="When each stage of {html.escape(p.layers)} works">'
    ]
    for n, (kind, color) in enumerate(COLORS.items()):
        if any(bar.kind == kind for bar in bars):
            x = left + 110 * n
            parts.append(f'<rect x="{x}" y="3" width="12" height="12" style="fill:{color}"/>')
            parts.append(f'<text x="{x + 17}" y="13" fill="currentColor">{kind}</text>')
    for k in range(p.stages):
        parts.append(f'<text x="0" y="{row * (k + 1) + 15}" fill="currentColor">stage {k}</text>')
    for bar in bars:
        start, length, y = left + bar.start * scale, bar.length * scale, row * (bar.stage + 1)
        parts.append(
            f'<rect x="{start:.2f}" y="{y}" width="{max(length - 0.5, 0.3):.2f}" height="{row - 2}" '
            f'style="fill:{COLORS[bar.kind]}"><title>micro-batch {bar.micro}, {bar.kind}</title></rect>'
        )
        if length > 14:  # a narrower bar has no room for its number
            parts.append(
                f'<text x="{start + length / 2:.2f}" y="{y + 14}" text-anchor="middle" fill="#10141a" '
                f'pointer-events="none">{bar.micro}</text>'
            )
    return "".join([*parts, "</svg>"])
