"""What a search found as one self-contained HTML page: time against memory, and the table.

The page loads nothing from elsewhere and runs no script.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ..plan.units import human_bytes, human_seconds
from .report import describe_candidate, describe_counts, explain_difference, train_flags

if TYPE_CHECKING:
    from .ranking import RankedLayout, SearchResult

WIDE, HIGH, EDGE = 720, 380, 60
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } th { text-align: left }
td, th { padding: .25rem .7rem; border-bottom: 1px solid #ddd; vertical-align: top }
td.n { text-align: right; white-space: nowrap } code { background: #f4f4f4; padding: .1rem .3rem }
pre { background: #f4f4f4; padding: .7rem; overflow-x: auto } svg text { font-size: 12px; fill: #444 }
@media (prefers-color-scheme: dark) { body { background: #161616; color: #ddd }
code, pre { background: #262626 } td, th { border-color: #333 } svg text { fill: #bbb } }
"""


def search_page(found: SearchResult, compare: RankedLayout | None) -> str:
    """A whole HTML document."""
    title = f"{found.devices} × {found.hardware.name}"
    best = found.best
    parts = [f"<h1>{escape(title)}</h1>"]
    if best is not None:
        parts.append(f"<pre>{escape(chr(10).join(describe_candidate(best)))}</pre>")
        if flags := train_flags(best):
            parts.append(f"<p>To train with it: <code>{escape(flags)}</code></p>")
        parts.append(_picture(found))
        parts.append(_table(found.front or found.ranked))
        if compare is not None:
            parts.append(f"<pre>{escape(explain_difference(best, compare))}</pre>")
    else:
        parts.append("<p>Nothing fits.</p>")
        if found.nearest is not None:
            parts.append(
                f"<p>The nearest:</p><pre>{escape(chr(10).join(describe_candidate(found.nearest)))}</pre>"
            )
    parts.append(f"<p>{escape(describe_counts(found))}</p>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _picture(found: SearchResult) -> str:
    """Every plan that was made, time upwards and memory to the right; the front is joined."""
    every = [*found.ranked, *found.too_large, *found.front]
    most = max(one.bytes for one in every) * 1.05
    slow = max(one.seconds for one in every) * 1.05

    def at(one: RankedLayout) -> tuple[float, float]:
        return EDGE + (WIDE - EDGE) * one.bytes / most, (HIGH - EDGE) * (1 - one.seconds / slow) + 10

    front = set(map(id, found.front))
    dots = []
    for one in every:
        x, y = at(one)
        colour = "#c2410c" if id(one) in front or one is found.best else "#64748b"
        label = escape(f"{human_seconds(one.seconds)}, {human_bytes(one.bytes)}: {one.mesh}, {one.layout}")
        dots.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"><title>{label}</title></circle>'
        )
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, found.front))
    base = HIGH - EDGE + 10
    axes = (
        f'<path d="M{EDGE},10 V{base} H{WIDE}" fill="none" stroke="#999"/>'
        f'<text x="{WIDE}" y="{base + 18}" text-anchor="end">memory, up to {human_bytes(most)}</text>'
        f'<text x="4" y="10" dominant-baseline="hanging">{human_seconds(slow)}</text>'
        f'<text x="{EDGE - 6}" y="{base}" text-anchor="end">0</text>'
    )
    return (
        f'<svg viewBox="0 0 {WIDE + 20} {HIGH}" width="{WIDE + 20}" role="img" '
        'aria-label="time against memory">'
        f'{axes}<polyline points="{line}" fill="none" stroke="#c2410c"/>{"".join(dots)}</svg>'
    )


def _table(rows: tuple[RankedLayout, ...]) -> str:
    head = "".join(f"<th>{word}</th>" for word in ("time", "memory", "bound by", "done", "mesh", "layout"))
    body = "".join(
        f'<tr><td class="n">{human_seconds(one.seconds)}</td><td class="n">{human_bytes(one.bytes)}</td>'
        f"<td>{one.time.bound}</td><td class='n'>{one.plan.duplication:.2f}×</td>"
        f"<td>{escape(str(one.mesh))}</td>"
        f"<td>{escape(f'{one.layout} {one.candidate.variant}')}</td></tr>"
        for one in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
