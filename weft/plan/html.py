"""A plan as one self-contained HTML page.

`page.html` has the structure, the style and the script; the plan is embedded as JSON. The page loads no
fonts, scripts or images from the network; its content security policy forbids it.
"""

from __future__ import annotations

import html
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

from ..hardware.profile import HardwareLike
from .advice import exceeds_memory
from .facts import to_jsonable
from .pipelines import describe_pipelines, pipeline_svg

if TYPE_CHECKING:
    from .plan import Plan


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
        data["advice"] = to_jsonable(tuple(exceeds_memory(plan, available))) + data["advice"]
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    # Split first: the data may contain the other markers.
    before, after = template.split("{{data}}")
    before = before.replace("{{title}}", html.escape(plan.name)).replace("{{pipelines}}", _pipelines(plan))
    return before + _embedded(data) + after


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
