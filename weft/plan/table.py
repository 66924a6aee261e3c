"""Tables as plain text: from rows of cells to lines of at most a given width.

phase     op                       FLOP
───────────────────────────────────────
forward   einsum[batch,d_model ·   137 G
          d_model,d_ff]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from textwrap import TextWrapper

GAP = "   "


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Rows as aligned columns under a header. Cells that don't fit are wrapped, and nothing is cut off.

    Args:
      columns: their names. Those that begin with `>` are right-aligned numbers, which are never wrapped.
      rows: a cell for each column; it may have several lines.
      width: the width of the table. Only numbers can exceed it.

    >>> print(format_table(["op", ">FLOP"], [["einsum[a · a,b]", "8"], ["sum", "120"]], 18))
    op            FLOP
    ──────────────────
    einsum[a ·       8
    a,b]
    sum            120
    """
    is_number = [name.startswith(">") for name in columns]
    rows = [[name.lstrip(">") for name in columns], *rows]
    widths = [
        max(len(line) for cell in cells for line in cell.split("\n")) for cells in zip(*rows, strict=True)
    ]
    _shrink(widths, [not number for number in is_number], width - len(GAP) * (len(widths) - 1))
    header, *body = (_format_row(row, widths, is_number) for row in rows)
    rule = "─" * (sum(widths) + len(GAP) * (len(widths) - 1))
    return "\n".join([*header, rule, *(line for lines in body for line in lines)])


def wrap(text: str, width: int) -> list[str]:
    """The lines of a text, wrapped between words; only words that are longer than a line are split."""
    wrapper = TextWrapper(width, break_on_hyphens=False)
    return [part for line in text.split("\n") for part in wrapper.wrap(line) or [""]]


def _shrink(widths: list[int], shrinkable: list[bool], total: int) -> None:
    """Narrow the widest columns until the widths add up to at most `total`."""
    while sum(widths) > total:
        widest = max(
            (n for n, may in enumerate(shrinkable) if may and widths[n] > 1),
            key=widths.__getitem__,
            default=None,
        )
        if widest is None:
            return
        widths[widest] -= 1


def _format_row(row: Sequence[str], widths: Sequence[int], is_number: Sequence[bool]) -> Iterator[str]:
    cells = [
        [cell] if number else wrap(cell, n) for cell, n, number in zip(row, widths, is_number, strict=True)
    ]
    for line in zip_longest(*cells, fillvalue=""):
        aligned = [
            part.rjust(n) if number else part.ljust(n)
            for part, n, number in zip(line, widths, is_number, strict=True)
        ]
        yield GAP.join(aligned).rstrip()
