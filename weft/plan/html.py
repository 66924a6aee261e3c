"""From a plan to one self-contained HTML page, for a person to look at.

`page.html` holds the structure, the style and the script; the plan goes into it as JSON. The page loads
nothing: no fonts, scripts or images from elsewhere (its own content policy forbids it).
"""

from __future__ import annotations

import html
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .plan import Plan


def page(plan: Plan, hardware: Any = None) -> str:
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
        data["time"] = time.to_data() | {"memory_bytes": time.hardware.memory_bytes}
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    before, after = template.split("{{data}}")
    return before.replace("{{title}}", html.escape(plan.name)) + _embedded(data) + after


def _embedded(data: Any) -> str:
    """JSON that is safe inside a script element: nothing in it can end the element or open a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")
