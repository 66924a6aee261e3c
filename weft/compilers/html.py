"""A compiled program as one self-contained HTML page.

`page.html` has the structure, the style and a little script. The bars and the tables are built here, so the
page works without the script. The data is embedded as JSON. The page loads no fonts, scripts or images from
the network; its content security policy forbids it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from ..core.errors import TensorTypeError
from ..plan.plan import Plan
from ..plan.units import human_bytes, human_count, human_seconds
from .diff import LARGE, by_kind, compare, format_difference
from .facts import CompiledCollective, CompiledWork, PaddedArray
from .text import notes, work_by_op

if TYPE_CHECKING:
    from .compiled import Compiled

FIRST_ROWS = 20  # of a long table; a checkbox shows the others
FIRST_COPIES = 8
SHARE_WIDTH = 80  # pixels of the longest bar in a table
# The colors of the style by kind of work, the same everywhere on the page. Other kinds share "rest".
COLORS = {
    **{kind: kind for kind in ("matmul", "elementwise", "reduce", "copy", "update", "random", "prefetch")},
    **dict.fromkeys(("gather", "scatter", "sort"), "lookup"),
}


class _Markup(str):
    """HTML. Every other string is text, which is escaped."""


def compiled_page(compiled: Compiled, plan: Plan | None = None) -> str:
    """The page of a compiled program.

    Args:
      compiled: the program.
      plan: adds the numbers of a plan of the same call next to those of the compiled program.

    Returns:
      A complete HTML document.
    """
    if plan is not None and not isinstance(plan, Plan):
        raise TensorTypeError(
            f"{plan!r} is not a plan",
            rule="the page has the numbers of a plan next to those of the compiled program",
            hint="compiled.to_html(program.plan(*args))",
        ).located("to_html(plan)")
    target, mesh = compiled.target, compiled.mesh
    data = compiled.to_data()
    if plan is not None:
        data["planned"] = {row.name: row.planned for row in compare(plan, compiled)}
    all_notes = [note.partition(": ")[::2] for note in notes(compiled)]
    plural = "s" if target.devices > 1 else ""
    layout = re.sub(r"^Layout\((.*)\)$", r"\1", compiled.layout).replace('"', "")
    parts = {
        "name": escape(compiled.name),
        "mesh": escape(f'on mesh "{mesh}"' if mesh.axes else "on one device"),
        "layout": _code(layout or "none"),
        "target": escape(f"{target} ({target.devices} device{plural}, {compiled.device_kind})"),
        "compiler": escape(f"{compiled.compiler} in {human_seconds(compiled.seconds)}"),
        "totals": _totals(compiled),
        "warnings": _note_list(note for note in all_notes if note[0] == "warning"),
        "memory": _memory(compiled),
        "time": _time(compiled),
        "network": _network(compiled),
        "comparison": "" if plan is None else _comparison(plan, compiled),
        "work": _work(compiled),
        "copies": _copies(compiled),
        "padding": _padding(compiled.padded),
        "notes": _note_list(note for note in all_notes if note[0] != "warning"),
        # Without "<", no string of the program can end the script element or open a comment.
        "data": json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace(
            "<", "\\u003c"
        ),
    }
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    # In one pass: the parts may contain markers.
    return re.sub(r"\{\{(\w+)\}\}", lambda marker: parts[marker[1]], template)


# -- Pieces of HTML -----------------------------------------------------------------------------------


def _html(text: str) -> str:
    return text if isinstance(text, _Markup) else escape(text)


def _code(text: str) -> _Markup:
    """Code that may break after its commas."""
    return _Markup(f"<code>{escape(text).replace(',', ',<wbr>')}</code>" if text else "")


def _swatch(color: str, name: str) -> _Markup:
    return _Markup(f'<span class="swatch" style="--color:var(--{color})"></span>{escape(name)}')


def _text(text: str) -> _Markup:
    return _Markup(f'<p class="soft">{escape(text)}</p>')


def _note_list(notes: Iterable[Sequence[str]]) -> _Markup:
    items = "".join(f'<li class="{kind}"><b>{kind}</b> {escape(text)}</li>' for kind, text in notes)
    return _Markup(f'<ul class="notes">{items}</ul>' if items else "")


def _section(name: str, title: str, *parts: _Markup) -> str:
    body = "".join(f"    {part}\n" for part in parts)
    heading = f'    <h2 id="{name}-title">{escape(title)}</h2>\n'
    return f'  <section id="{name}" aria-labelledby="{name}-title">\n{heading}{body}  </section>\n'


def _bar(label: str, parts: Iterable[tuple[str, float, str, str]]) -> _Markup:
    """A bar.

    Args:
      label: its name for screen readers, which also read its parts.
      parts: the name, the size, the text of the size and the color of each part. Parts without a color are
        the space that is left.
    """
    parts = [part for part in parts if part[1] > 0]
    total = sum(size for _, size, _, _ in parts)
    pieces = "".join(
        f'<i style="flex:{1000 * size / total:.4g} 1 0;--color:{f"var(--{color})" if color else "none"}" '
        f'title="{escape(f"{name} {text}")}"></i>'
        for name, size, text, color in parts
    )
    spoken = escape(f"{label}: " + "; ".join(f"{name} {text}" for name, _, text, _ in parts if text))
    return _Markup(f'<div class="bar" role="img" aria-label="{spoken}">{pieces}</div>')


def _share(text: str, share: float, color: str) -> _Markup:
    """A number with a thin bar below it."""
    # In pixels: shares of the width of a column would differ from one column to the next.
    width = f"{SHARE_WIDTH * share:.1f}px"
    bar = f'<i class="share" style="--color:var(--{color});width:{width}"></i>' if share else ""
    return _Markup(_html(text) + bar)


def _table(label: str, key: str, rows: Sequence[Mapping[str, str]], first: int = 0) -> _Markup:
    """A table in a box that scrolls.

    Args:
      label: the name of the box.
      key: the column whose cells name the rows.
      rows: the cells by column. Columns whose names begin with `>` are right-aligned numbers; those without
        any text are left out.
      first: the number of rows that are visible until the reader asks for all; 0 for all.
    """
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    kinds = {name: "number" if name.startswith(">") else name.partition(" ")[0] for name in columns}

    def cell(name: str, text: str, tag: str) -> str:
        return f'<{tag} class="{kinds[name]}">{text}</{tag.partition(" ")[0]}>'

    head = (cell(name, escape(_capitalized(name.lstrip(">"))), 'th scope="col"') for name in columns)
    lines = ["".join(head)] + [
        "".join(cell(name, _html(row[name]), 'th scope="row"' if name == key else "td") for name in columns)
        for row in rows
    ]
    body = "".join(
        f"<tr{' class=later' if first and n >= first else ''}>{line}</tr>" for n, line in enumerate(lines[1:])
    )
    text = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table>'
        f"<thead><tr>{lines[0]}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    if first and len(rows) > first:
        # A rule of the style shows the rows while the box is checked: it works without the script.
        text += f'\n    <label class="more"><input type="checkbox"> Show all {len(rows)} rows</label>'
    return _Markup(text)


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]  # `capitalize` would make "Flop" of "FLOP"


# -- Numbers ------------------------------------------------------------------------------------------


def _time_text(seconds: float) -> str:
    return "0" if seconds == 0 else "< 1 ns" if 0 < seconds < 1e-9 else human_seconds(seconds)


def _range(low: float, high: float) -> str:
    """`180–303 ms`."""
    one, other = _time_text(low), _time_text(high)
    number, _, unit = one.partition(" ")
    return one if one == other else f"{number if other.endswith(f' {unit}') else one}–{other}"


def _size(group: Iterable[CompiledWork | CompiledCollective]) -> str:
    return human_bytes(sum(one.bytes * one.count for one in group))


def _runs(group: Iterable[CompiledWork | CompiledCollective]) -> str:
    return f"{sum(one.count for one in group):,}"


def _roofline(work: Iterable[CompiledWork]) -> float:
    return sum(w.roofline_seconds * w.count for w in work)


def _estimate(work: Iterable[CompiledWork]) -> float:
    """The compiler's estimate; work without one counts at its roofline, so that the parts add up."""
    return sum(
        (w.roofline_seconds if w.estimated_seconds is None else w.estimated_seconds) * w.count for w in work
    )


def _longer(work: Iterable[CompiledWork]) -> float:
    work = list(work)
    return max(_roofline(work), _estimate(work))


def _work_cells(compiled: Compiled, group: Sequence[CompiledWork], longest: float) -> dict[str, str]:
    """The cells with the seconds of some work, and those with its size."""
    color = COLORS.get(group[0].kind, "rest")
    roofline, estimate = _roofline(group), _estimate(group)
    estimated = _share(_time_text(estimate), estimate / longest, color)
    if all(w.estimated_seconds is None for w in group):
        estimated = _Markup("none" if compiled.has_estimates else "")
    flops = sum(w.flops * w.count for w in group)
    return {
        ">roofline": _share(_time_text(roofline), roofline / longest, color),
        ">compiler's": estimated,
        ">runs": _runs(group),
        ">FLOP": human_count(flops) if flops else "",
        ">bytes": _size(group),
    }


def _where(one: CompiledWork | CompiledCollective) -> dict[str, str]:
    return {"op": _code(str(one.op) or one.instruction), "layer": one.layer, "source": _code(one.source)}


# -- At a glance --------------------------------------------------------------------------------------


def _totals(compiled: Compiled) -> str:
    m = compiled.memory
    fits = '<b class="fits">fits</b>' if m.fits else '<b class="badge">does not fit</b>'
    estimate = f"; {_time_text(compiled.estimated_seconds)} by the compiler's estimates"
    network = f"of {_time_text(compiled.network_seconds)}: nothing overlaps with it"
    totals = [
        ("Memory needed", human_bytes(m.peak + m.code), _Markup(f"of {human_bytes(m.available)}: {fits}")),
        ("Time of a call", _range(*compiled.step_seconds), "estimated; nothing ran"),
        (
            "Local work",
            _time_text(compiled.local_seconds),
            "by the roofline" + (estimate if compiled.has_estimates else ""),
        ),
        (
            "Network, exposed",
            _time_text(compiled.exposed_seconds),
            network if compiled.collectives else "no collectives",
        ),
        ("FLOPs", human_count(compiled.flops, "FLOP"), "of matmuls and convolutions, on each device"),
        ("Memory traffic", human_bytes(compiled.traffic), "read and written by each device"),
    ]
    return "".join(
        f'<div><dt>{name}</dt><dd>{escape(value)}</dd><dd class="note">{_html(note)}</dd></div>'
        for name, value, note in totals
    )


def _memory(compiled: Compiled) -> str:
    """Whether the program fits: a bar of the memory of a device, and the same as a table."""
    m = compiled.memory
    needed, available = m.peak + m.code, human_bytes(m.available)
    uses = [
        ("arguments", m.arguments, "arguments"),
        ("temporaries", m.temporaries, "temporaries"),
        ("results that reuse no argument", m.outputs - m.aliased, "results"),
        ("code", m.code, "code"),
    ]
    rest = ("free" if m.fits else "missing", abs(m.available - needed))
    parts = [(name, size, human_bytes(size), color) for name, size, color in uses]
    if m.fits:
        verdict = f'<b class="fits">It fits.</b> A device needs {human_bytes(needed)} of {available}.'
        limit = ""
        parts.append((rest[0], rest[1], human_bytes(rest[1]), ""))
    else:
        verdict = (
            f'<b class="badge">It does not fit.</b> A device has {available} (the line in the bar) and needs '
            f"{human_bytes(needed)}."
        )
        limit = f'<i class="limit" style="left:{100 * m.available / needed:.2f}%"></i>'
    reused = f" Results of {human_bytes(m.aliased)} reuse donated arguments." if m.aliased else ""
    rows = [
        {"use": use, ">bytes": human_bytes(size), ">share": f"{size / m.available:.1%}"}
        for use, size in [
            *((_swatch(color, name), size) for name, size, color in uses),
            (_Markup("<b>needed</b>"), needed),
            rest,
        ]
    ]
    bar = _bar(f"Memory of a device, {available}", parts)
    table = _table("Memory by use", "use", rows)
    return f'<p>{verdict}{reused}</p>\n    <div class="limited">{bar}{limit}</div>\n    {table}'


def _time(compiled: Compiled) -> str:
    """The time of a call by kind of work, by both estimates: two bars on one scale, and a table."""
    groups: dict[str, list[CompiledWork]] = defaultdict(list)
    for one in compiled.work:
        groups[one.kind].append(one)
    ordered = sorted((group for group in groups.values() if _longer(group)), key=_longer, reverse=True)
    exposed = compiled.exposed_seconds
    ends = {"roofline": compiled.local_seconds + exposed}
    estimates = [("roofline", "By the roofline", _roofline)]
    if compiled.has_estimates:
        ends["compiler's"] = compiled.estimated_seconds + exposed
        estimates.append(("compiler's", "By the compiler's estimates", _estimate))
    lines = []
    for key, name, seconds in estimates:
        parts = [(g[0].kind, seconds(g), COLORS.get(g[0].kind, "rest")) for g in ordered]
        parts.append(("network, exposed", exposed, "network"))
        bar_parts = [(kind, size, _time_text(size), color) for kind, size, color in parts]
        bar = _bar(name, [*bar_parts, ("", max(ends.values()) - ends[key], "", "")])
        lines.append(f'<p class="bar-name">{name}: <b>{_time_text(ends[key])}</b></p>{bar}')
    longest = max([*map(_longer, ordered), exposed])
    rows = [
        {"kind": _swatch(COLORS.get(g[0].kind, "rest"), g[0].kind)} | _work_cells(compiled, g, longest)
        for g in ordered
    ]
    columns = dict.fromkeys([">roofline", ">compiler's", ">runs", ">FLOP", ">bytes"], "")
    if compiled.collectives:
        cells = {f">{key}": _share(_time_text(exposed), exposed / (longest or 1), "network") for key in ends}
        runs = {">runs": _runs(compiled.collectives)}
        rows.append({"kind": _swatch("network", "network, exposed")} | columns | cells | runs)
    cells = {f">{key}": _Markup(f"<b>{_time_text(end)}</b>") for key, end in ends.items()}
    totals = {">FLOP": human_count(compiled.flops), ">bytes": human_bytes(compiled.traffic)}
    rows.append({"kind": _Markup("<b>a call</b>")} | columns | cells | totals)
    lines.append(_table("Time by kind of work", "kind", rows))
    if not compiled.has_estimates:
        lines.append(_text("The compiler has no estimates of this program."))
    elif any(w.estimated_seconds is None and w.roofline_seconds for w in compiled.work):
        lines.append(_text("Work without an estimate of the compiler counts at its roofline."))
    return "\n    ".join(lines)


def _network(compiled: Compiled) -> str:
    """The exposed and the overlapped time over each axis as bars, and each collective, the longest first."""
    groups: dict[tuple[str, ...], list[CompiledCollective]] = defaultdict(list)
    for c in compiled.collectives:
        name = str(c.op) or c.instruction
        groups[c.over, c.kind, c.requested, str(c.asynchronous), name, c.layer, c.source].append(c)
    if not groups:
        return _text("The compiled program has no collectives.")
    longest = max(_network_seconds(group)[1] for group in groups.values()) or 1.0
    rows = []
    for group in sorted(groups.values(), key=_network_seconds, reverse=True):
        one, (exposed, network) = group[0], _network_seconds(group)
        kind = escape(one.kind)
        if one.requested not in ("", one.kind):
            kind += f' <span class="badge">requested: {escape(one.requested)}</span>'
        estimates = [c.estimated_seconds * c.count for c in group if c.estimated_seconds is not None]
        where = _where(one)
        merged = sum(c.arrays - 1 for c in group)
        where["op"] = _Markup(where["op"] + (f" and {merged} more" if merged else ""))
        rows.append(
            {
                "over": one.over or "no axis",
                "collective": _Markup(kind),
                ">exposed": _share(_time_text(exposed), exposed / longest, "network"),
                ">network": _time_text(network),
                ">compiler's": _time_text(sum(estimates)) if estimates else "",
                "overlap": "async" if one.asynchronous else "sync",
                ">calls": _runs(group),
                ">bytes": _size(group),
                **where,
            }
        )
    text = (
        f"The collectives take {_time_text(compiled.network_seconds)} by the network model of plans. Sync: "
        "no other work runs meanwhile. Async: other work runs between the start and the end of the "
        "collective; exposed is the time that exceeds this work."
    )
    lines = compiled.assignment.describe()
    assignment = [_text(f"The axes on the network: {'; '.join(lines)}.")] if lines else []
    bars, table = _axis_bars(compiled), _table("Collectives", "op", rows, FIRST_ROWS)
    return "\n    ".join([_text(text), *assignment, *bars, table])


def _network_seconds(group: Iterable[CompiledCollective]) -> tuple[float, float]:
    """The exposed time and the time of some collectives."""
    group = list(group)
    return sum(c.exposed_seconds * c.count for c in group), sum(c.network_seconds * c.count for c in group)


def _axis_bars(compiled: Compiled) -> list[str]:
    groups: dict[str, list[CompiledCollective]] = defaultdict(list)
    for c in compiled.collectives:
        groups[c.over or "no axis"].append(c)
    times = {over: _network_seconds(group) for over, group in groups.items()}
    longest = max(network for _, network in times.values())
    lines = []
    for over, (exposed, network) in sorted(times.items(), key=lambda item: item[1], reverse=True):
        parts = [
            ("exposed", exposed, _time_text(exposed), "network"),
            ("overlapped", network - exposed, _time_text(network - exposed), "hidden"),
            ("", longest - network, "", ""),
        ]
        text = f"<b>{_time_text(exposed)}</b> exposed, {_time_text(network - exposed)} overlapped"
        lines.append(f'<p class="bar-name">{escape(over)}: {text}</p>{_bar(over, parts)}')
    return lines


# -- Planned next to compiled -------------------------------------------------------------------------


def _comparison(plan: Plan, compiled: Compiled) -> str:
    """The totals of a plan next to those of the compiled program, and the collectives by axes and kind."""
    pairs = []
    for pair in compare(plan, compiled):
        pairs.append(pair)
        if pair.name.startswith("local work") and compiled.has_estimates:
            estimate = compiled.estimated_seconds
            pairs.append(replace(pair, name="local work, compiler's estimates", compiled=estimate))
    rows = []
    for pair in pairs:
        reasons = "".join(f"<li>{escape(reason)}</li>" for reason in pair.reasons)
        is_large = reasons and abs(pair.difference) > LARGE
        rows.append(
            {
                "quantity": pair.name,
                ">planned": pair.unit(pair.planned),
                ">compiled": pair.unit(pair.compiled),
                ">plan is": format_difference(pair.difference),
                "difference": _Markup(f"<ul>{reasons}</ul>" if is_large else ""),
            }
        )
    text = (
        "The plan is derived from the traced program. The compiler then fuses work, merges collectives, adds "
        "copies and assigns the memory. Seconds are estimates on both sides."
    )
    parts = [_text(text), _table("Planned next to compiled", "quantity", rows)]
    if (str(plan.mesh), plan.layout) != (str(compiled.mesh), compiled.layout):
        other = f'the plan is of mesh "{plan.mesh}" with {plan.layout}, and the compiled program is not'
        parts.insert(0, _note_list([("warning", other)]))
    planned, found = by_kind(plan.collectives), by_kind(compiled.collectives)
    kinds = []
    for over, kind in sorted({*planned, *found}):
        row = {"over": over, "kind": kind}
        for name, side in (("planned", planned), ("compiled", found)):
            calls, size = side.get((over, kind), (0, 0))
            row |= {f">calls {name}": f"{calls:,}", f">bytes {name}": human_bytes(size)}
        kinds.append(row)
    if kinds:
        parts.append(_Markup("<h3>Collectives by axes and kind</h3>"))
        parts.append(_table("Collectives by axes and kind", "kind", kinds))
    return _section("comparison", "Planned next to compiled", *parts)


# -- Tables -------------------------------------------------------------------------------------------


def _work(compiled: Compiled) -> str:
    """The work by op, phase, kind, layer and source line."""
    groups = sorted((group for _, group in work_by_op(compiled)), key=_longer, reverse=True)
    if not groups:
        return _text("The compiled program has no local work.")
    rows, longest = [], _longer(groups[0])
    for group in groups:
        where = _where(group[0])
        kind = _swatch(COLORS.get(group[0].kind, "rest"), group[0].kind)
        cells = _work_cells(compiled, group, longest)
        rows.append({"op": where.pop("op"), "kind": kind, **cells, "phase": group[0].phase, **where})
    return _table("Local work by op", "op", rows, FIRST_ROWS)


def _copies(compiled: Compiled) -> str:
    if not compiled.copies:
        return ""
    rows = [
        {
            ">bytes": _size([w]),
            ">runs": _runs([w]),
            ">roofline": _time_text(_roofline([w])),
            "array": _code(w.shape),
            **_where(w),
        }
        for w in compiled.copies
    ]
    text = f"The compiler added copies and transposes that read and write {_size(compiled.copies)}."
    table = _table("Copies", "op", rows, FIRST_COPIES)
    return _section("copies", "Copies that the program does not request", _text(text), table)


def _padding(padded: Sequence[PaddedArray]) -> str:
    if not padded:
        return ""
    rows = [
        {
            ">padding": human_bytes(p.padded_bytes - p.bytes),
            ">of": human_bytes(p.bytes),
            "array": _code(p.shape),
            "op": _code(str(p.op)),
            "layer": p.layer,
            "source": _code(p.source),
        }
        for p in padded
    ]
    text = "Arrays that take more memory than their elements: the compiler pads them to full tiles."
    table = _table("Padding", "array", rows, FIRST_COPIES)
    return _section("padding", "Padding to full tiles", _text(text), table)
