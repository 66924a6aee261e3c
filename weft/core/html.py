"""How a notebook displays tensors, meshes, layouts and programs: an HTML fragment for `_repr_html_` of each.

A fragment is a few tables in a `div`. It has no script, loads nothing, and takes its colors from the page, so
it is legible in light and dark notebooks. Texts of the user are escaped. `plan/html.py` and
`autolayout/page.py` build theirs from the same pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from .describe import describe
from .layout import ROLES, Layout, Splits
from .mesh import Mesh
from .shapes import stored_splits
from .tensor import Tensor

if TYPE_CHECKING:
    from .program import Program

# Translucent grays and hues: the page determines the background and the color of the text.
STYLE = """
.weft { font-family: system-ui, sans-serif; font-size: 13px; line-height: 1.5; overflow-x: auto }
.weft code, .weft pre { font-family: ui-monospace, monospace; background: none; color: inherit; padding: 0 }
.weft pre { margin: .4em 0 0; line-height: 1.35 }
.weft p { margin: .2em 0 }
.weft table { border-collapse: collapse; margin: .4em 0; color: inherit; font-size: 12px; table-layout: auto }
.weft th, .weft td { text-align: left; padding: .2em .7em; border: 1px solid rgba(128,128,128,.35);
  background: none; font-variant-numeric: tabular-nums; vertical-align: top }
.weft th { font-weight: 600; background: rgba(128,128,128,.14) }
.weft .n { text-align: right; white-space: nowrap }
.weft small { opacity: .75; font-size: 12px }
"""
MAX_ROWS = MAX_COLUMNS = 8
ROLE_COLUMNS = {"value": "split over", "param": "stored parameters", "optimizer": "optimizer state"}


def fragment(*parts: str) -> str:
    """The HTML of an object, from its parts."""
    return f'<div class="weft"><style>{STYLE}</style>{"".join(parts)}</div>'


def title(code: str, text: str = "") -> str:
    """The first line: code, and a text after it."""
    return f"<p><code><b>{escape(code)}</b></code>{f' <small>{escape(text)}</small>' if text else ''}</p>"


def paragraph(text: str) -> str:
    return f"<p><small>{escape(text)}</small></p>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts. Columns whose names begin with `>` are right-aligned numbers."""
    kinds = [' class="n"' if name.startswith(">") else "" for name in columns]
    head = "".join(f"<th{kind}>{escape(n.lstrip('>'))}</th>" for n, kind in zip(columns, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{k}>{escape(c)}</td>" for c, k in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def tensor_html(t: Tensor) -> str:
    """Dims, dtype and layout; which device has which slice; the first and the last values."""
    text = describe(t)
    role = "" if t.role == "value" else t.role
    parts = [title(text, role)]
    if t.placement is not None:
        parts.append(paragraph(f'mesh "{t.mesh}", layout "{t.layout}"'))
    if t.mesh is not None and not t.is_slice:
        parts.append(_slices(t, t.mesh))
    values = repr(t).removeprefix(text).strip()
    if values:
        parts.append(f"<pre>{escape(values)}</pre>")
    return fragment(*parts)


def mesh_html(mesh: Mesh) -> str:
    """The devices along the axes; the last axis is across."""
    parts = [title(repr(mesh), f"{mesh.size} device{'s' * (mesh.size != 1)}")]
    if not mesh.has_devices:
        parts.append(paragraph("more devices than this machine has: programs can be planned, not run"))
    if mesh.axes:
        ids = _device_ids(mesh)
        blocks = [[f"{name} {n}" for n in range(size)] for name, size in mesh.axes]
        parts.append(_grid(" × ".join(mesh.names), blocks, lambda index: _device_text([ids[index]])))
    return fragment(*parts)


def layout_html(layout: Layout) -> str:
    """One row for each dim that a rule names, one column for each role with rules of its own."""
    rules = {role: layout.rules_for(role) for role in ROLES}
    shown = [role for n, role in enumerate(ROLES) if n == 0 or rules[role] != rules[ROLES[n - 1]]]
    names = dict.fromkeys(name for role in shown for name in rules[role])
    rows = [[name, *(" + ".join(rules[role].get(name, ())) or "—" for role in shown)] for name in names]
    columns = ["dim", *(ROLE_COLUMNS[role] for role in shown)]
    return fragment(title(repr(layout)), table(columns, rows) if rows else paragraph("no dim is split"))


def program_html(program: Program) -> str:
    """Its mesh and layout, and why it was traced."""
    name = getattr(program.fn, "__name__", type(program.fn).__name__)
    traces = [[trace.reason, trace.signature] for trace in program.traces]
    parts = [title(f"program {name}", f'mesh "{program.mesh}", layout "{program.layout}"')]
    parts.append(
        table(["traced", "arguments"], traces[-MAX_ROWS:]) if traces else paragraph("not traced yet")
    )
    return fragment(*parts)


def _slices(t: Tensor, mesh: Mesh) -> str:
    """Which devices have which block of the split dims; the last split dim is across."""
    splits = stored_splits(t)
    split = [(dim, axes) for dim, axes in zip(t.dims, splits, strict=True) if axes]
    if not split:
        return paragraph(f"replicated on {mesh.size} device{'s' * (mesh.size != 1)}")
    blocks = []
    for dim, axes in split:
        ways = mesh.ways(axes)
        size = -(-dim.size // ways)
        starts = range(0, size * ways, size)
        ends = [min(start + size, dim.size) for start in starts]
        texts = [
            f"{start}:{end}" if start < end else "padding" for start, end in zip(starts, ends, strict=True)
        ]
        blocks.append([f"{dim.name} {text}" for text in texts])
    owners = _block_owners(mesh, tuple(axes for _, axes in split))
    corner = f"{len(owners)} slices"
    return _grid(corner, blocks, lambda index: _device_text(owners[index]))


def _block_owners(mesh: Mesh, splits: Splits) -> dict[tuple[int, ...], list[int]]:
    """The ids of the devices that have each block."""
    owners: dict[tuple[int, ...], list[int]] = {}
    for index, device in np.ndenumerate(_device_ids(mesh)):
        position = dict(zip(mesh.names, index, strict=True))
        # Several axes of one dim count in row-major order.
        block = [
            int(np.ravel_multi_index([position[a] for a in axes], [mesh.shape[a] for a in axes]))
            for axes in splits
        ]
        owners.setdefault(tuple(block), []).append(device)
    return owners


def _device_ids(mesh: Mesh) -> Any:
    """The id of the device at each position of a mesh; without devices, they are numbered."""
    sizes = [size for _, size in mesh.axes]
    if not mesh.has_devices:
        return np.arange(mesh.size).reshape(sizes)
    return np.vectorize(lambda device: device.id, otypes=[int])(mesh.jax_mesh.devices)


def _device_text(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:4])) + ("…" if len(ids) > 4 else "")
    return f"device{'s' * (len(ids) > 1)} {shown}"


def _grid(corner: str, blocks: Sequence[Sequence[str]], cell: Callable[[tuple[int, ...]], str]) -> str:
    """A table with the last list of blocks across, and the product of the others down.

    Args:
      corner: the text of the first cell.
      blocks: for each dimension of the grid, the names of its blocks.
      cell: the text of the cell at an index, one integer for each dimension.
    """
    *down, across = blocks
    columns = across[:MAX_COLUMNS]
    rows = [
        [
            ", ".join(blocks[n][i] for n, i in enumerate(index)),
            *(cell((*index, i)) for i in range(len(columns))),
        ]
        for index in itertools.islice(itertools.product(*(range(len(names)) for names in down)), MAX_ROWS)
    ]
    count = int(np.prod([len(names) for names in down], initial=1))
    parts = [table([corner, *columns], rows)]
    if count > MAX_ROWS or len(across) > MAX_COLUMNS:
        parts.append(paragraph(f"the first {len(rows)} × {len(columns)} of {count} × {len(across)}"))
    return "".join(parts)
