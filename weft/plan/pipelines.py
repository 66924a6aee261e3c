"""Pipelines in a plan: how many stages, how long they are idle, what they send, and who is busy when."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..core.context import Pipeline
from .facts import Collective, Event, PipelinePlan, ScheduleBar, Work
from .units import human_bytes

if TYPE_CHECKING:
    from .plan import Plan

# In the whole name of what is inside a pipeline, the op's.
PIPELINE_LABEL = "pipeline["
# What the backward pass of a stage takes for one micro-batch, in forward passes: once again, and back (2).
# With "1f1b" it goes forward once more, for the next stage.
BACKWARD_COST = {"gpipe": 3, "1f1b": 4}


def plan_pipelines(
    pipelines: Sequence[Pipeline], events: Sequence[Event], names: Sequence[str]
) -> list[PipelinePlan]:
    """The facts of a program's pipelines.

    Args:
      pipelines: as they were traced; of those that are alike in all that is said of them, one.
      events: all of the program's.
      names: the whole names of these.
    """
    pairs = list(zip(events, names, strict=True))
    work = [(e.flops * e.count, PIPELINE_LABEL in name, e.varies) for e, name in pairs if isinstance(e, Work)]
    total = sum(flops for flops, _, _ in work) or 1
    found = []
    for p in pipelines:
        sent = sum(
            e.wire_bytes * e.count
            for e, name in pairs
            if PIPELINE_LABEL in name
            and isinstance(e, Collective)
            and e.kind == "permute"
            and {*e.axes} == {*p.axes}
        )
        alike = sum(flops for flops, own, varies in work if not own and not set(varies) & set(p.axes))
        found.append(
            PipelinePlan(
                p.layers.name,
                p.layers.size,
                p.axes,
                p.stages,
                p.micro,
                p.schedule,
                p.micro + p.stages - 1,
                p.micro + (p.stages - 1) * (1 if p.schedule == "gpipe" else 2),
                bubble_share(p.stages, p.micro, p.schedule),
                sent,
                alike / total,
            )
        )
    return found


def bubble_share(stages: int, micro: int, schedule: str) -> float:
    """The share of its time that a stage has nothing to do: for GPipe (K - 1) / (M + K - 1).

    >>> bubble(4, 8, "gpipe") == 3 / 11
    True
    """
    idle, back = stages - 1, BACKWARD_COST[schedule]
    ticks = micro + idle + back * (micro + (idle if schedule == "gpipe" else 2 * idle))
    return 1 - (1 + back) * micro / ticks


def schedule_bars(s: PipelinePlan) -> Iterator[ScheduleBar]:
    """When each stage does what, in forward passes of one micro-batch."""
    back = BACKWARD_COST[s.schedule]
    idle = s.stages - 1
    for k in range(s.stages):
        for m in range(s.micro):
            yield ScheduleBar(k, "forward", m, m + k, 1)
            if s.schedule == "gpipe":
                yield ScheduleBar(k, "backward", m, s.ticks + back * (idle - k + s.micro - 1 - m), back)
            else:
                yield ScheduleBar(k, "again", m, s.ticks + back * (m + k), 1)
                yield ScheduleBar(k, "backward", m, s.ticks + back * (m + 2 * idle - k) + 1, back - 1)


def describe_pipelines(plan: Plan) -> Iterator[str]:
    """A line of text for each pipeline, and one for what is outside."""
    for s in plan.pipelines:
        yield (
            f"pipeline: {s.layers}={s.count} in {s.stages} stages of "
            f"{'at most ' if s.count % s.stages else ''}{-(-s.count // s.stages)} along {'+'.join(s.axes)}, "
            f"{s.micro} micro-batches, {s.schedule}: {s.ticks} ticks forward and {s.back_ticks} back, "
            f"a bubble of {s.bubble:.1%}"
        )
    for axes, s in {"+".join(s.axes): s for s in plan.pipelines}.items():
        yield f"{human_bytes(s.sent)} sent from stage to stage along {axes}"
        if s.alike > 0.005:
            yield (
                f"outside of stages, {s.alike:.1%} of the FLOPs are done alike along {axes}; a rule for a "
                f"dim that is not inside, such as vocab:{axes}, shares them out"
            )


COLOURS = {
    "forward": "var(--forward, #4c8dd6)",
    "again": "var(--rest, #a9b1bd)",
    "backward": "var(--backward, #e0913a)",
}
MAX_BARS = 6000  # more can't be told apart


def pipeline_svg(s: PipelinePlan) -> str:
    """The chart as a picture: a row for each stage, a bar for each micro-batch that it works on."""
    bars = list(schedule_bars(s)) if 3 * s.stages * s.micro <= MAX_BARS else []
    end = max((bar.start + bar.length for bar in bars), default=1)
    width, row, left = 1000, 22, 60
    scale = (width - left) / end
    parts = [
        f'<svg viewBox="0 0 {width} {row * (s.stages + 1)}" width="100%" role="img" font-family="system-ui" '
        f'font-size="11" aria-label="When each stage of {html.escape(s.layers)} works">'
    ]
    for n, (kind, colour) in enumerate(COLOURS.items()):
        if any(bar.kind == kind for bar in bars):
            at = left + 110 * n
            parts.append(f'<rect x="{at}" y="3" width="12" height="12" style="fill:{colour}"/>')
            parts.append(f'<text x="{at + 17}" y="13" fill="currentColor">{kind}</text>')
    for k in range(s.stages):
        parts.append(f'<text x="0" y="{row * (k + 1) + 15}" fill="currentColor">stage {k}</text>')
    for bar in bars:
        x, wide, y = left + bar.start * scale, bar.length * scale, row * (bar.stage + 1)
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{max(wide - 0.5, 0.3):.2f}" height="{row - 2}" '
            f'style="fill:{COLOURS[bar.kind]}"><title>micro-batch {bar.micro}, {bar.kind}</title></rect>'
        )
        if wide > 14:
            parts.append(
                f'<text x="{x + wide / 2:.2f}" y="{y + 14}" text-anchor="middle" fill="#10141a" '
                f'pointer-events="none">{bar.micro}</text>'
            )
    return "".join([*parts, "</svg>"])
