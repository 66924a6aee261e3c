"""Dims: the named dimensions of tensors.

A Weft tensor has no axis 0 or axis 1. It has dims, each with a name and a size, and every operation refers
to them by name:

    >>> batch, d_model = dims("batch=64 d_model=256")
    >>> batch
    batch=64
    >>> batch.rename("rows").resize(8)
    rows=8

An operation on a tensor also accepts a dim's name alone, and several names in one string:
`wf.sum(x, "batch")`, `wf.sum(x, "batch length")`. A size in such a string is checked: `"batch=64 length"`.
`select_dims` and `as_dims` read these arguments, for every public function.
A *dim* belongs to a tensor, an *axis* to a mesh. The two words are never mixed.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard, TypeVar

from .call_errors import checks_arguments, reports_construction
from .errors import DimError, WeftError, caret, is_tracer, nearest, python_number_error

EXAMPLES = {"dims": "batch=64 length=128", "Mesh": "data=4 model=2", "Layout": "batch:data d_ff:model"}
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.']*")
MAX_DIM_SIZE = 2**31 - 1
T = TypeVar("T")
# A leading underscore marks dims that Weft creates. Users can't write such names, so they never clash.
_ANY_NAME = re.compile(rf"_*{NAME.pattern}")


@reports_construction
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
            # NumPy's integers become ints, so that a dim prints the same and stays hashable by value.
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
                rule="a size is an integer, at least 1",
                hint="omit the dim: empty dims are not supported"
                if self.size == 0
                else "write the number of elements: a size is not inferred from the others",
            ).located(f"Dim({self.name!r}, {self.size})")

    def rename(self, name: str) -> Dim:
        """The same size under another name."""
        return replace(self, name=name)

    def resize(self, size: int) -> Dim:
        """The same name with another size."""
        return replace(self, size=size)

    @property
    def is_inner(self) -> bool:
        """Whether Weft created this dim internally; layout rules can't name it."""
        return self.name.startswith("_")

    def __repr__(self) -> str:
        return f"{self.name}={self.size}"


DimLike = Dim | str
DimsLike = Dim | str | Iterable[DimLike]


def check_index_range(dims: Iterable[Dim]) -> None:
    """Raise an error if a dim is too large for int32 indices, whatever an op does with it."""
    for dim in dims:
        if dim.size > MAX_DIM_SIZE:
            raise DimError(
                f"the size of dim {dim.name} is {dim.size}",
                rule=f"a dim has at most {MAX_DIM_SIZE} (2**31 - 1) positions: JAX's indices are int32",
                hint=f"use two dims, for example {dim.name}_block and {dim.name}",
            )


def is_name(given: object) -> TypeGuard[str]:
    """Whether this is a valid name for a user's dim or axis."""
    return isinstance(given, str) and NAME.fullmatch(given) is not None


@checks_arguments
def dims(text: str) -> tuple[Dim, ...]:
    """Several dims from one string.

    >>> dims("batch=2 length=3")
    (batch=2, length=3)
    """
    if not isinstance(text, str):
        raise DimError(
            f"{_shown(text)} is not a string",
            rule="dims are written name=size; several are separated by blanks",
            hint=f'for example wf.dims("{EXAMPLES["dims"]}")',
        ).located(f"dims({_shown(text)})")
    return tuple(Dim(name, int(size)) for name, size in parse_pairs(text, "=:", DimError, "dims", "dim"))


def parse_pairs(
    text: str,
    marks: str,
    error: type[WeftError],
    caller: str,
    what: str,
    value: str = r"-?\d+",
    *,
    optional: bool = False,
) -> list[tuple[str, str]]:
    """`"a=2 b=3"` → `[("a", "2"), ("b", "3")]`; separators are blanks, commas and semicolons.

    Args:
      text: the string to parse.
      marks: the characters that may stand between a name and its value.
      error: the error class to raise.
      caller: the public function, for the message.
      what: what a pair is called in the message.
      value: a regular expression for the values.
      optional: whether a name may lack a value, which is then "".
    """
    pairs, at = [], 0
    rest = rf"\s*[{marks}]\s*({value})"
    pair = re.compile(rf"({NAME.pattern}){f'(?:{rest})?' if optional else rest}(?=[\s,;]|$)")
    while at < len(text):
        if text[at] in " \t\n,;":
            at += 1
            continue
        match = pair.match(text, at)
        if not match:
            # The expression only reports that no pair matches. The caret needs the first character that can't
            # continue one: after the name, or after its mark.
            name = NAME.match(text, at)
            wrong = name.end() if name else at
            syntax = "dim:axis" if caller == "Layout" else f"name{marks[0]}size"
            syntax = f"{syntax}, or name alone" if optional else syntax
            if name and wrong < len(text) and text[wrong] in marks:
                wrong += 1
            raise error(
                f"can't parse the {what} at character {wrong + 1}",
                caret(text, wrong),
                rule=f"a {what} is written {syntax}; several are separated by blanks",
                hint=f'for example "{EXAMPLES[caller]}"',
            ).located(f"{caller}({text!r})")
        pairs.append((match[1], match[2] or ""))
        at = match.end()
    return pairs


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> tuple[DimLike, ...]:
    """`"a=2 b"` → `(a=2, "b")`."""
    pairs = parse_pairs(text, "=:", DimError, "dims", "dim", optional=True)
    return tuple([Dim(name, int(size)) if size else name for name, size in pairs])


def list_dims(given: DimsLike) -> tuple[DimLike, ...]:
    """The Dims and the names without a size that an argument lists.

    Every function that takes dims reads them with this one, so strings mean the same everywhere.

    >>> list_dims(["batch=64 length", Dim("d", 8)])
    (batch=64, 'length', d=8)
    """
    if isinstance(given, str):
        return _parse(given)
    # An array or a tensor is iterable, but not a list of dims.
    if isinstance(given, Iterable) and not hasattr(given, "dtype"):
        return tuple([item for one in given for item in list_dims(one)])
    return (given,)  # type: ignore[return-value]


def list_dim(given: DimLike) -> DimLike:
    """The Dim, or the name without a size, of an argument that is one dim."""
    dim = _only(list_dims(given))
    if not isinstance(dim, Dim | str):
        raise DimError(
            f"{_shown(dim)} is not a dim",
            rule="a dim is given as a Dim or by its name",
            hint='for example wf.Dim("batch", 64), or "batch"',
        )
    return dim


def _shown(given: object) -> str:
    """An argument that is not a dim, for messages."""
    if hasattr(given, "dtype"):
        return "a tensor" if hasattr(given, "dims") else "an array"
    return repr(given)


def _only(found: Sequence[T]) -> T:
    if len(found) != 1:
        raise DimError(
            f"{len(found)} dims were given, and one is needed",
            rule="this argument is one dim: a Dim, or its name",
            hint='for example wf.Dim("batch", 64), or "batch"',
        )
    return found[0]


def dim_name(given: DimLike) -> str:
    """The name of a dim that is given by a Dim or by its name."""
    dim = list_dim(given)
    return dim.name if isinstance(dim, Dim) else dim


def as_dims(given: DimsLike, known: Sequence[Dim] = ()) -> tuple[Dim, ...]:
    """Dims from a Dim, a string such as `"a=2 b=3"`, or a sequence of them; names must be distinct.

    Args:
      given: new dims, with their sizes.
      known: dims that may also be given by name alone.
    """
    found = tuple([_with_size(item, known) for item in list_dims(given)])
    check_distinct(found)
    return found


def as_dim(given: DimLike) -> Dim:
    """One Dim from a Dim or a string such as `"a=2"`."""
    return _only(as_dims(given))


def _with_size(item: DimLike, known: Sequence[Dim]) -> Dim:
    if isinstance(item, Dim):
        return item
    if not isinstance(item, str):
        raise DimError(
            f"{_shown(item)} is not a Dim",
            rule="a new tensor's dims need names and sizes",
            hint='use wf.Dim("batch", 64) or wf.dims("batch=64 length=128")',
        ).located()
    by_name = {dim.name: dim for dim in known}
    if item not in by_name:
        raise DimError(
            f"there is no dim {item} in [{format_dims(known)}]{nearest(item, by_name)}, and no size is given"
            if known
            else f"dim {item} has no size",
            rule="a new dim needs a name and a size",
            hint=f'"{item}=64", or wf.Dim("{item}", 64)',
        ).located()
    return by_name[item]


def new_dim(given: DimLike, size: int) -> Dim:
    """A new dim that may be given by name alone, because its size is known."""
    dim = list_dim(given)
    return Dim(dim, size) if isinstance(dim, str) else dim


def check_distinct(found: Sequence[Dim]) -> None:
    """Raise an error if two dims of a tensor have the same name."""
    names = [dim.name for dim in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DimError(
            f"dim {', '.join(twice)} occurs twice in [{format_dims(found)}]",
            rule="the dims of a tensor have distinct names",
            hint=f'rename one of them: x.rename({twice[0]}="{twice[0]}2")',
        )


def select_dims(found: Sequence[Dim], wanted: DimsLike) -> tuple[Dim, ...]:
    """The dims of a tensor that a Dim, a string of names, or a sequence of either refers to."""
    by_name = {dim.name: dim for dim in found}
    selected = []
    for item in list_dims(wanted):
        name = item.name if isinstance(item, Dim) else item
        dim = by_name.get(name) if isinstance(name, str) else None
        if dim is None:
            raise DimError(
                f"{_shown(item)} was given as a dim of [{format_dims(found)}]"
                if hasattr(item, "dtype")
                else f"there is no dim {name} in [{format_dims(found)}]{nearest(str(name), by_name)}",
                rule="a dim is named by a Dim of the tensor or by its name",
                hint=f"the dims are {', '.join(by_name) or 'none: it is a scalar'}",
            )
        if isinstance(item, Dim) and item.size != dim.size:
            raise DimError(
                f"dim {name} has size {item.size} here and {dim.size} in [{format_dims(found)}]",
                rule="a dim has one size in one operation",
                hint=f'use the tensor\'s own dim, or its name "{name}"',
            )
        selected.append(dim)
    check_distinct(selected)
    return tuple(selected)


def select_dim(found: Sequence[Dim], wanted: DimLike) -> Dim:
    """The dim of a tensor that a Dim or a name refers to."""
    return _only(select_dims(found, wanted))


def union_dims(groups: Iterable[Sequence[Dim]]) -> tuple[Dim, ...]:
    """All dims in order of first occurrence; raises an error if a name has two sizes."""
    groups = list(groups)
    seen: dict[str, Dim] = {}  # not a set: the order of insertion is the order of the result's dims
    for group in groups:
        for dim in group:
            if seen.setdefault(dim.name, dim).size != dim.size:
                clash = [f"[{format_dims(g)}]" for g in groups if any(d.name == dim.name for d in g)]
                error = DimError(
                    f"dim {dim.name} has two sizes: {seen[dim.name].size} and {dim.size}",
                    *clash,
                    rule="operands are matched by name, so a name has one size in one operation",
                    hint=f'if they are different dims, rename one: x.rename({dim.name}="other")',
                )
                error.two_sizes = dim.name
                raise error
    return tuple(seen.values())


def format_dims(found: Iterable[Dim]) -> str:
    """`batch=64, d_model=256`."""
    return ", ".join(map(repr, found))
