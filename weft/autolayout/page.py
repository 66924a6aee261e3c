"""Search results as one self-contained HTML page, time against memory and the table; in notebooks, the table.

The page runs no script and loads nothing from the network; its content security policy forbids both.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from ..core.html import fragment, paragraph, table, title
from ..plan.units import human_bytes, human_seconds
from .report import describe_candidate, describe_counts, explain_difference, train_flags

if TYPE_CHECKING:
    from .results import RankedLayout, SearchResult

WIDTH, HEIGHT, MARGIN = 720, 380, 60
MAX_ROWS = 10
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } th { text-align: left }
td, th { padding: .25rem .7rem; border-bottom: 1px solid #ddd; vertical-align: top }
.n { text-align: right; white-space: nowrap } code { background: #f4f4f4; padding: .1rem .3rem }
pre { background: #f4f4f4; padding: .7rem; overflow-x: auto } svg text { font-size: 12px; fill: #444 }
@media (prefers-color-scheme: dark) { body { background: #161616; color: #ddd }
code, pre { background: #262626 } td, th { border-color: #333 } svg text { fill: #bbb } }
"""


def search_page(result: SearchResult, compare: RankedLayout | None) -> str:
    """The page, a complete HTML document."""
    machine = f"{result.devices} × {result.hardware.label}"
    best = result.best
    parts = [f"<h1>{escape(machine)}</h1>"]
    if best is not None:
        parts.append(f"<pre>{escape(chr(10).join(describe_candidate(best)))}</pre>")
        if flags := train_flags(best):
            parts.append(f"<p>To train with it: <code>{escape(flags)}</code></p>")
        parts.append(_scatter_plot(result))
        parts.append(_table(result.front or result.ranked))
        if compare is not None:
            parts.append(f"<pre>{escape(explain_difference(best, compare))}</pre>")
    else:
        parts.append("<p>Nothing fits.</p>")
        if result.nearest is not None:
            parts.append(
                f"<p>The nearest:</p><pre>{escape(chr(10).join(describe_candidate(result.nearest)))}</pre>"
            )
    parts.append(f"<p>{escape(describe_counts(result))}</p>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(machine)}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _scatter_plot(result: SearchResult) -> str:
    """A scatter plot of all plans, memory on the x axis and time on the y axis; the front is joined."""
    layouts = [*result.ranked, *result.too_large, *result.front]
    max_bytes = max(layout.bytes for layout in layouts) * 1.05
    max_seconds = max(layout.seconds for layout in layouts) * 1.05

    def point(layout: RankedLayout) -> tuple[float, float]:
        x = MARGIN + (WIDTH - MARGIN) * layout.bytes / max_bytes
        y = (HEIGHT - MARGIN) * (1 - layout.seconds / max_seconds) + 10
        return x, y

    front = set(map(id, result.front))
    dots = []
    for layout in layouts:
        x, y = point(layout)
        color = "#c2410c" if id(layout) in front or layout is result.best else "#64748b"
        label = escape(
            f"{human_seconds(layout.seconds)}, {human_bytes(layout.bytes)}: {layout.mesh}, {layout.layout}"
        )
        dots.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color}"><title>{label}</title></circle>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(point, result.front))
    base = HEIGHT - MARGIN + 10
    axes = (
        f'<path d="M{MARGIN},10 V{base} H{WIDTH}" fill="none" stroke="#999"/>'
        f'<text x="{WIDTH}" y="{base + 18}" text-anchor="end">memory, up to {human_bytes(max_bytes)}</text>'
        f'<text x="4" y="10" dominant-baseline="hanging">{human_seconds(max_seconds)}</text>'
        f'<text x="{MARGIN - 6}" y="{base}" text-anchor="end">0</text>'
    )
    return (
        f'<svg viewBox="0 0 {WIDTH + 20} {HEIGHT}" width="{WIDTH + 20}" role="img" '
        'aria-label="time against memory">'
        f'{axes}<polyline points="{line}" fill="none" stroke="#c2410c"/>{"".join(dots)}</svg>'
    )


def search_summary(result: SearchResult) -> str:
    """The best layouts for a notebook; if nothing fits, the nearest one."""
    memory = f"at most {human_bytes(result.cap)} on each"
    head = title(f"search on {result.devices} × {result.hardware.label}", memory)
    counts = paragraph(describe_counts(result))
    if result.best is not None:
        return fragment(head, _table(result.ranked[:MAX_ROWS]), counts)
    return fragment(
        head, paragraph("nothing fits"), _table([result.nearest] if result.nearest else []), counts
    )


def _table(layouts: Sequence[RankedLayout]) -> str:
    columns = [">time", ">memory", "bound by", ">done", "mesh", "layout"]
    rows = [
        [
            human_seconds(layout.seconds),
            human_bytes(layout.bytes),
            layout.time.bound,
            f"{layout.plan.duplication:.2f}×",
            str(layout.mesh) or "one device",
            f"{layout.layout} {layout.candidate.variant}".strip() or "nothing split",
        ]
        for layout in layouts
    ]
    return table(columns, rows)
