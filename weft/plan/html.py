"""From a plan to one self-contained HTML page, for a person to look at.

`page.html` holds the structure, the style and the script; the plan goes into it as JSON. The page loads
nothing: no fonts, scripts or images from elsewhere (its own content policy forbids it).
"""

from __future__ import annotations

import html
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

from .advice import exceeds_memory
from .facts import to_jsonable
from .pipelines import describe_pipelines, pipeline_svg

if TYPE_CHECKING:
    from .plan import Plan


def plan_page(plan: Plan, hardware: Any = None) -> str:
    """The page of a plan.

    Args:
      plan: what to show.
      hardware: as of `Plan.time`; without it the timeline is drawn by FLOPs and bytes.

    Returns:
      A whole HTML document.
    """
    data = plan.to_data()
    if hardware is not None:
        time = plan.time(hardware)
        room = time.hardware.memory_bytes
        data["time"] = time.to_data() | {"memory_bytes": room}
        data["advice"] = to_jsonable(tuple(exceeds_memory(plan, room))) + data["advice"]
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    before, after = template.split("{{data}}")
    before = before.replace("{{title}}", html.escape(plan.name)).replace("{{pipelines}}", _pipelines(plan))
    return before + _embedded(data) + after


def _pipelines(plan: Plan) -> str:
    """A section with a chart of each pipeline, or nothing."""
    if not plan.pipelines:
        return ""
    said = "".join(f"    <p>{html.escape(line)}</p>\n" for line in describe_pipelines(plan))
    charts = "".join(f"    {pipeline_svg(stages)}\n" for stages in plan.pipelines)
    title = '    <h2 id="pipelines-title">Pipelines</h2>\n'
    return f'  <section aria-labelledby="pipelines-title">\n{title}{said}{charts}  </section>\n'


def _embedded(data: Any) -> str:
    """JSON that is safe inside a script element: nothing in it can end the element or open a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")
