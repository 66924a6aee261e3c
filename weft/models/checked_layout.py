"""Layouts that detect typos: from the rules of a command and the dims of its program to an error.

A rule for a dim that a program doesn't have has no effect, and a program only warns about it, since one
layout may serve several programs: `experts:model` is correct for models with experts. On the command line
such a rule is usually a typo, and every device then computes what the rule should have split. There it is an
error if a typo is likely: the name is one edit away from a dim of the program, and no preset has such a dim.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from weft.core.errors import LayoutError
from weft.core.layout import Layout

# The dims of all presets (a test traces them), including those of intermediate results.
PRESET_DIMS = frozenset(
    "batch length memory_length d_model d_ff heads kv_heads d_kv half vocab layers positions buckets "
    "experts choices pick capacity slots".split()
)


class CheckedLayout(Layout):
    """A layout from the command line: programs raise an error for a misspelled dim.

    >>> CheckedLayout("bacth:data").check_dims(["batch", "d_model"])
    Traceback (most recent call last):
    weft.core.errors.LayoutError: no tensor of the program has a dim bacth (did you mean batch?)
    ...
    """

    __slots__ = ()

    @property
    def suspects(self) -> set[str]:
        """The dims of rules that no preset has; if there are none, nothing needs to be checked."""
        return self.dim_names - PRESET_DIMS

    def check_dims(self, occurring: Iterable[str]) -> None:
        """Raise an error if a rule's dim is likely a typo of one that occurs in the program."""
        occurring = sorted(occurring)
        corrections = {
            name: close[0]
            for name in sorted(self.suspects - {*occurring})
            if (close := [one for one in occurring if one_edit_apart(name, one)])
        }
        if not corrections:
            return
        rules = str(self).strip()
        at = {name: re.search(rf"(?<![\w.']){re.escape(name)}(?=:)", rules) for name in corrections}
        columns = {match.start() for match in at.values() if match is not None}
        carets = "".join("^" if column in columns else " " for column in range(max(columns) + 1))
        raise LayoutError(
            "no tensor of the program has a dim "
            + ", ".join(f"{name} (did you mean {close}?)" for name, close in corrections.items()),
            f"rules: {rules}\n       {carets}",
            rule="a rule names a dim of the program; a name one edit away from a dim is treated as a typo",
            hint=f"correct the name to {', '.join(corrections.values())}, or drop the rule; "
            f"the dims are {', '.join(occurring)}",
        )


def one_edit_apart(name: str, other: str) -> bool:
    """Whether one letter was omitted, added or replaced, or two adjacent letters were swapped.

    Names of one letter are never misspellings of each other.

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
    rest, other_rest = name[at:], other[at:]
    return (
        rest[1:] == other_rest[1:]
        or rest[1:] == other_rest
        or rest == other_rest[1:]
        or (rest[:2] == other_rest[1::-1] and rest[2:] == other_rest[2:])
    )
