"""A plan as one self-contained HTML page, and as a summary for notebooks.

`page.html` has the structure, the style and the script; the plan is embedded as JSON. The page loads no
fonts, scripts or images from the network; its content security policy forbids it.
"""

from __future__ import annotations

import html
import json
from collections import defaultdict
from importlib import resources
from typing import TYPE_CHECKING, Any

from ..core.html import fragment, paragraph, table, title
from ..hardware.profile import HardwareLike
from .advice import hardware_advice
from .facts import Collective, to_jsonable
from .pipelines import describe_pipelines, pipeline_svg
from .units import human_bytes, human_count

if TYPE_CHECKING:
    from .plan import Plan

MAX_ROWS = 12


def plan_page(plan: Plan, hardware: HardwareLike | None = None) -> str:
    """The page of a plan.

    Args:
      plan: the plan.
      hardware: as of `Plan.time`; without it the timeline is drawn to the scale of FLOPs and bytes.

    Returns:
      A complete HTML document.
    """
    data = plan.to_data()
    if hardware is not None:
        time = plan.time(hardware)
        available = time.hardware.memory_bytes
        data["time"] = time.to_data() | {"memory_bytes": available}
        data["advice"] = to_jsonable(tuple(hardware_advice(plan, time.hardware))) + data["advice"]
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    # Split first: the data may contain the other markers.
    before, after = template.split("{{data}}")
    before = before.replace("{{title}}", html.escape(plan.name)).replace("{{pipelines}}", _pipelines(plan))
    return before + _embedded(data) + after


def plan_summary(plan: Plan) -> str:
    """The totals, the collectives by op, the largest first, and the advice."""
    m = plan.memory
    totals = {
        "FLOP": human_count(plan.flops),
        "done": f"{plan.duplication:.3g}×",
        "in collectives": human_bytes(sum(plan.comm_bytes.values())),
        "parameters": human_bytes(m.params),
        "optimizer state": human_bytes(m.optimizer),
        "saved for backward": human_bytes(m.activations),
        "peak memory": human_bytes(m.peak),
        "padding": f"{plan.waste:.1%}",
    }
    groups: dict[tuple[str, ...], list[Collective]] = defaultdict(list)
    for c in plan.collectives:
        groups[str(c.op), c.phase, c.kind, c.over, c.layer, c.source].append(c)
    sizes = {key: sum(c.bytes * c.count for c in group) for key, group in groups.items()}
    largest = sorted(groups, key=lambda key: -sizes[key])
    rows = [
        [*key[:4], str(sum(c.count for c in groups[key])), human_bytes(sizes[key]), key[4] or key[5]]
        for key in largest[:MAX_ROWS]
    ]
    columns = ["op", "phase", "collective", "over", ">calls", ">bytes", "where"]
    more = len(largest) - len(rows)
    return fragment(
        title(f"plan of {plan.name}", f'mesh "{plan.mesh}", {plan.layout}; on each device:'),
        table([f">{name}" for name in totals], [[*totals.values()]]),
        table(columns, rows) if rows else paragraph("no collectives"),
        paragraph(f"and {more} more: print(plan.explain())") if more else "",
        *(paragraph(f"{advice.level}: {advice.text}") for advice in plan.advice),
    )


def _pipelines(plan: Plan) -> str:
    """A section with a chart of each pipeline; empty without pipelines."""
    if not plan.pipelines:
        return ""
    text = "".join(f"    <p>{html.escape(line)}</p>\n" for line in describe_pipelines(plan))
    charts = "".join(f"    {pipeline_svg(pipeline)}\n" for pipeline in plan.pipelines)
    title = '    <h2 id="pipelines-title">Pipelines</h2>\n'
    return f'  <section aria-labelledby="pipelines-title">\n{title}{text}{charts}  </section>\n'


def _embedded(data: dict[str, Any]) -> str:
    """JSON for a script element."""
    # Without "<", no string of the plan can end the element or open a comment.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")
