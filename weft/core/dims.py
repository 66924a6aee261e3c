"""Dims: the named dimensions of tensors.

A tensor of Weft has no axis 0 or axis 1. It has dims, each a name and a size, and every operation
speaks of them by name:

    >>> batch, d_model = dims("batch=64 d_model=256")
    >>> batch
    batch=64
    >>> batch.rename("rows").resize(8)
    rows=8

Wherever a tensor is at hand a dim can also be given by its name alone: `wf.sum(x, "batch")`.
A *dim* is a tensor's; an *axis* is a mesh's. The two words are never mixed.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from .errors import DimError, caret, is_tracer, nearest, python_number_error

EXAMPLES = {"dims": "batch=64 length=128", "Mesh": "data=4 model=2", "Layout": "batch:data d_ff:model"}
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.']*")
MAX_DIM_SIZE = 2**31 - 1
# An underscore in front marks dims that Weft makes for itself: they have no place in what users write.
_ANY_NAME = re.compile(rf"_*{NAME.pattern}")


@dataclass(frozen=True, slots=True)
class Dim:
    """A named dimension.

    Args:
      name: letters, digits, underscores, dots and primes, starting with a letter.
      size: the true size, at least 1. Programs take dims of up to 2**31 - 1.

    >>> Dim("batch", 64)
    batch=64
    """

    name: str
    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _ANY_NAME.fullmatch(self.name):
            raise DimError(
                f"{self.name!r} is not a name for a dim",
                rule="a name is letters, digits, underscores, dots and primes, starting with a letter",
                hint='for example Dim("batch", 64)',
            ).located(f"Dim({self.name!r}, {self.size!r})")
        try:
            object.__setattr__(self, "size", operator.index(self.size))
        except TypeError:
            raise python_number_error(
                DimError,
                f"the size of dim {self.name}",
                self.size,
                rule="a size is an integer, at least 1",
                hint=f'for example Dim("{self.name}", 64)',
            ).located(f"Dim({self.name!r}, {'…' if is_tracer(self.size) else repr(self.size)})") from None
        if self.size < 1:
            raise DimError(
                f"the size of dim {self.name} is {self.size}",
                rule="a size is a whole number, at least 1",
                hint="leave the dim out where there is nothing to count",
            ).located(f"Dim({self.name!r}, {self.size})")

    def rename(self, name: str) -> Dim:
        """The same size under another name."""
        return replace(self, name=name)

    def resize(self, size: int) -> Dim:
        """The same name with another size."""
        return replace(self, size=size)

    @property
    def is_inner(self) -> bool:
        """Whether it is one that Weft has made for itself: rules don't speak of it."""
        return self.name.startswith("_")

    def __repr__(self) -> str:
        return f"{self.name}={self.size}"


DimLike = Dim | str


def check_index_range(dims: Iterable[Dim]) -> None:
    """An error if a dim is too large for its positions to be counted, whatever an op does with it."""
    for dim in dims:
        if dim.size > MAX_DIM_SIZE:
            raise DimError(
                f"the size of dim {dim.name} is {dim.size}",
                rule=f"a dim has at most {MAX_DIM_SIZE} (2**31 - 1) positions: JAX's indices are int32",
                hint=f"use two dims, for example {dim.name}_block and {dim.name}",
            )


def is_name(given: Any) -> TypeGuard[str]:
    """Whether users may call a dim or an axis so."""
    return isinstance(given, str) and NAME.fullmatch(given) is not None


def dims(text: str) -> tuple[Dim, ...]:
    """Several dims from one string.

    >>> dims("batch=2 length=3")
    (batch=2, length=3)
    """
    return tuple(Dim(name, int(size)) for name, size in parse_pairs(text, "=:", DimError, "dims", "dim"))


def parse_pairs(
    text: str, marks: str, error: type[Any], asked: str, what: str, value: str = r"-?\d+"
) -> list[tuple[str, str]]:
    """`"a=2 b=3"` → `[("a", "2"), ("b", "3")]`; separators are blanks, commas and semicolons."""
    pairs, at = [], 0
    pair = re.compile(rf"({NAME.pattern})\s*[{marks}]\s*({value})(?=[\s,;]|$)")
    while at < len(text):
        if text[at] in " \t\n,;":
            at += 1
            continue
        match = pair.match(text, at)
        if not match:
            name = NAME.match(text, at)
            wrong = name.end() if name else at
            form = "dim:axis" if asked == "Layout" else f"name{marks[0]}size"
            if name and wrong < len(text) and text[wrong] in marks:
                wrong += 1
            raise error(
                f"can't read the {what} at character {wrong + 1}",
                caret(text, wrong),
                rule=f"a {what} is written {form}; several are separated by blanks",
                hint=f'for example "{EXAMPLES[asked]}"',
            ).located(f"{asked}({text!r})")
        pairs.append((match[1], match[2]))
        at = match.end()
    return pairs


def as_dims(given: Any) -> tuple[Dim, ...]:
    """Dims from a Dim, a string such as `"a=2 b=3"`, or a sequence of Dims; no name twice."""
    if isinstance(given, str):
        found = dims(given)
    else:
        found = tuple(given) if isinstance(given, Iterable) else (given,)
    for dim in found:
        if not isinstance(dim, Dim):
            raise DimError(
                f"{dim!r} is not a Dim",
                rule="a new tensor's dims need names and sizes",
                hint='use wf.Dim("batch", 64) or wf.dims("batch=64 length=128")',
            )
    check_distinct(found)
    return found


def as_dim(given: Any) -> Dim:
    """The one Dim that is given, as a Dim or a string such as `"a=2"`."""
    found = as_dims(given)
    if len(found) != 1:
        raise DimError(
            f"{len(found)} dims were given where one is made",
            rule="the new dim is one Dim, with a name and a size",
            hint='for example wf.Dim("best", 4)',
        )
    return found[0]


def check_distinct(found: Sequence[Dim]) -> None:
    """No name twice in one tensor."""
    names = [dim.name for dim in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DimError(
            f"dim {', '.join(twice)} occurs twice in [{format_dims(found)}]",
            rule="the dims of one tensor have different names",
            hint=f'rename one of them: x.rename({twice[0]}="{twice[0]}2")',
        )


def select_dims(found: Sequence[Dim], asked: Any) -> tuple[Dim, ...]:
    """The dims of a tensor that are meant by a Dim, a name, or a sequence of either."""
    items = (asked,) if isinstance(asked, str) or not isinstance(asked, Iterable) else tuple(asked)
    by_name = {dim.name: dim for dim in found}
    picked = []
    for item in items:
        name = item.name if isinstance(item, Dim) else item
        dim = by_name.get(name) if isinstance(name, str) else None
        if dim is None:
            raise DimError(
                f"there is no dim {name} in [{format_dims(found)}]{nearest(str(name), by_name)}",
                rule="a dim is named by a Dim of the tensor or by its name",
                hint=f"the dims are {', '.join(by_name) or 'none: it is a scalar'}",
            )
        if isinstance(item, Dim) and item.size != dim.size:
            raise DimError(
                f"dim {name} has size {item.size} here and {dim.size} in [{format_dims(found)}]",
                rule="a dim has one size in one operation",
                hint=f'use the tensor\'s own dim, or its name "{name}"',
            )
        picked.append(dim)
    check_distinct(picked)
    return tuple(picked)


def select_dim(found: Sequence[Dim], asked: DimLike) -> Dim:
    """The one dim of a tensor that is meant by a Dim or a name."""
    return select_dims(found, asked)[0]


def union_dims(groups: Iterable[Sequence[Dim]]) -> tuple[Dim, ...]:
    """All dims in order of first occurrence; a name with two sizes is an error."""
    groups = list(groups)
    seen: dict[str, Dim] = {}
    for group in groups:
        for dim in group:
            if seen.setdefault(dim.name, dim).size != dim.size:
                clash = [f"[{format_dims(g)}]" for g in groups if any(d.name == dim.name for d in g)]
                raise DimError(
                    f"dim {dim.name} has two sizes: {seen[dim.name].size} and {dim.size}",
                    *clash,
                    rule="operands are matched by name, so a name has one size in one operation",
                    hint=f'if they are different things, rename one: x.rename({dim.name}="other")',
                )
    return tuple(seen.values())


def format_dims(found: Iterable[Dim]) -> str:
    """`batch=64, d_model=256`."""
    return ", ".join(map(repr, found))
