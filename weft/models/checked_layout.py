"""Misspelt rules: from a command's layout and the dims of its program to an error.

A rule for a dim that a program doesn't have does nothing, and a program only warns about it, since one layout
may serve several programs: `experts:model` is right for the models that have experts. On the command line it
is usually a typo, and every device computes what the rule should have split. So there it is an error where a
typo is likely: the name is one edit away from a dim of the program, and no known model has such a dim.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from weft.core.errors import LayoutError
from weft.core.layout import Layout

# The dims of all known models (a test traces them), those of intermediate results included.
PRESET_DIMS = frozenset(
    "batch length memory_length d_model d_ff heads kv_heads d_kv half vocab layers positions buckets "
    "experts choices pick capacity slots".split()
)


class CheckedLayout(Layout):
    """A layout as somebody typed it: programs raise an error for a misspelt dim.

    >>> CheckedLayout("bacth:data").check_dims(["batch", "d_model"])
    Traceback (most recent call last):
    weft.core.errors.LayoutError: no tensor of the program has a dim bacth (did you mean batch?)
    ...
    """

    __slots__ = ()

    @property
    def suspects(self) -> set[str]:
        """The dims of rules that no known model has; if there are none, nothing needs to be checked."""
        return self.dim_names - PRESET_DIMS

    def check_dims(self, occurring: Iterable[str]) -> None:
        occurring = sorted(occurring)
        meant = {
            name: close[0]
            for name in sorted(self.suspects - {*occurring})
            if (close := [one for one in occurring if one_edit_apart(name, one)])
        }
        if not meant:
            return
        rules = str(self).strip()
        at = {name: re.search(rf"(?<![\w.']){re.escape(name)}(?=:)", rules) for name in meant}
        columns = {match.start() for match in at.values() if match is not None}
        carets = "".join("^" if column in columns else " " for column in range(max(columns) + 1))
        raise LayoutError(
            "no tensor of the program has a dim "
            + ", ".join(f"{name} (did you mean {close}?)" for name, close in meant.items()),
            f"rules: {rules}\n       {carets}",
            rule="a rule names a dim of the program; a name one edit away from a dim is taken for a typo",
            hint=f"correct the name to {', '.join(meant.values())}, or drop the rule; "
            f"the dims are {', '.join(occurring)}",
        )


def one_edit_apart(name: str, other: str) -> bool:
    """Whether one letter was left out, added or replaced, or two neighbours were swapped.

    Two names of one letter have nothing in common: neither is a misspelling of the other.

    >>> [one_edit_apart("batch", name) for name in ("bach", "batcch", "botch", "bacth", "batch", "bahtc")]
    [True, True, True, True, False, False]
    >>> one_edit_apart("q", "k")
    False
    """
    if name == other or len(name) == len(other) == 1:
        return False
    at = next(
        (n for n, (a, b) in enumerate(zip(name, other, strict=False)) if a != b), min(len(name), len(other))
    )
    rest, wanted = name[at:], other[at:]
    return (
        rest[1:] == wanted[1:]
        or rest[1:] == wanted
        or rest == wanted[1:]
        or (rest[:2] == wanted[1::-1] and rest[2:] == wanted[2:])
    )
