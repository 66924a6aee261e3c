"""Types of fields: from an annotation to a description, a check, and conversions from text and TOML.

    steps: Annotated[int, Range(at_least=1, below=2**31)] = 1000
    dropout: Share = 0.0
    norm: Annotated[str, OneOf(NORMS)] = "rms"
    kind: Literal["adamw", "lion"] = "adamw"

An annotation is the only declaration of what is valid: `FieldType.of` parses it. Python's arguments, flags,
TOML files and JSON bodies are all checked by `accepts`, and all messages quote `describe`.
"""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any

from .errors import nearest


@dataclass(frozen=True)
class Range:
    """The valid values of a number, or of each number in a tuple."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __contains__(self, x: Any) -> bool:
        return (
            (self.at_least is None or x >= self.at_least)
            and (self.above is None or x > self.above)
            and (self.at_most is None or x <= self.at_most)
            and (self.below is None or x < self.below)
        )

    def describe(self, noun: str) -> str:
        """The range of a noun: `a number above 0 and at most 1`."""
        if self.at_least is not None and self.at_most is not None:
            return f"{noun} from {_number(self.at_least)} to {_number(self.at_most)}"
        limits = {
            "of at least": self.at_least,
            "above": self.above,
            "at most": self.at_most,
            "below": self.below,
        }
        given = " and ".join(
            f"{word} {_number(limit)}" for word, limit in limits.items() if limit is not None
        )
        return f"{noun} {given}"


@dataclass(frozen=True, init=False)
class OneOf:
    """The valid values of a string, where a table has them. A `Literal` spells them out."""

    choices: tuple[Any, ...]

    def __init__(self, choices: Iterable[Any]):
        object.__setattr__(self, "choices", tuple(choices))


class NotEmpty:
    """A string has at least one character."""


# The usual rules.
Text = Annotated[str, NotEmpty()]
PositiveInt = Annotated[int, Range(at_least=1)]
NonNegativeInt = Annotated[int, Range(at_least=0)]
Positive = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(at_least=0)]
Share = Annotated[float, Range(at_least=0, below=1)]
Fraction = Annotated[float, Range(at_least=0, at_most=1)]


def is_finite_number(x: object) -> bool:
    """Whether x is a real number, not a boolean, that is finite as a float."""
    if not isinstance(x, Real) or isinstance(x, bool):
        return False
    try:
        return math.isfinite(x)
    except OverflowError:  # an integer that is too large for a float
        return False


# For each type, its name in messages and its test. Values of NumPy's types are numbers too.
SCALARS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("an integer", lambda x: isinstance(x, Integral) and not isinstance(x, bool)),
    float: ("a number", is_finite_number),
    str: ("a string", lambda x: isinstance(x, str)),
    bool: ("true or false", lambda x: isinstance(x, bool)),
    Path: ("a path", lambda x: isinstance(x, Path)),
    Callable: ("a function", callable),
    Any: ("anything", lambda x: True),
}
FLAG_WORDS = {"true": True, "True": True, "false": False, "False": False}


@dataclass(frozen=True)
class FieldType:
    """A parsed annotation.

    Attributes:
      kind: a key of `SCALARS`, `tuple`, `Mapping`, or a class.
      range: the range of a number.
      not_empty: whether a string has at least one character.
      choices: the valid values, if they are listed.
      items: the types of a tuple's items; one for all of them if it is `variadic`.
      values: the type of the values of a mapping, whose keys are strings.
      variadic: whether a tuple has any number of items.
      optional: whether None is valid.
      others: the further types of a union.
    """

    kind: Any
    range: Range | None = None
    not_empty: bool = False
    choices: tuple[Any, ...] = ()
    items: tuple[FieldType, ...] = ()
    values: FieldType | None = None
    variadic: bool = False
    optional: bool = False
    others: tuple[FieldType, ...] = ()

    @classmethod
    @functools.cache
    def of(cls, annotation: Any) -> FieldType:
        """Parse an annotation. A type that can't be checked, such as a protocol, accepts anything."""
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is Annotated:
            return functools.reduce(_constrain, arguments[1:], cls.of(arguments[0]))
        if origin in (types.UnionType, typing.Union):
            first, *others = (cls.of(one) for one in arguments if one is not type(None))
            return replace(first, optional=type(None) in arguments, others=tuple(others))
        if origin is typing.Literal:
            return cls(type(arguments[0]), choices=arguments)
        if origin is tuple:
            variadic = arguments[1:] == (...,)
            items = arguments[:1] if variadic else arguments
            return cls(tuple, items=tuple(map(cls.of, items)), variadic=variadic)
        if origin is Mapping and arguments[0] is str:
            return cls(Mapping, values=cls.of(arguments[1]))
        if annotation in SCALARS or origin in SCALARS:
            return cls(origin or annotation)
        is_class = isinstance(annotation, type) and not getattr(annotation, "_is_protocol", False)
        return cls(annotation if is_class else Any)

    @property
    def required(self) -> FieldType:
        """The same without None."""
        return replace(self, optional=False)

    def accepts(self, value: object) -> bool:
        """Whether a value is valid."""
        if value is None and self.optional:
            return True
        return self._accepts(value) or any(other.accepts(value) for other in self.others)

    def _accepts(self, value: Any) -> bool:
        if self.choices:
            return any(type(value) is type(one) and value == one for one in self.choices)
        if self.items:
            counted = isinstance(value, tuple) and (self.variadic or len(value) == len(self.items))
            return counted and all(t.accepts(x) for t, x in zip(self._item_types(value), value, strict=True))
        if self.values is not None:
            is_mapping = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
            return is_mapping and all(map(self.values.accepts, value.values()))
        if self.kind not in SCALARS:
            return isinstance(value, self.kind)
        if self.not_empty and is_empty_text(value):
            return False
        return SCALARS[self.kind][1](value) and (self.range is None or value in self.range)

    def _item_types(self, values: Any) -> tuple[FieldType, ...]:
        return self.items * len(values) if self.variadic else self.items

    def describe(self, value: object = 0) -> str:
        """The valid values; about an invalid one it adds the nearest choice, or that numbers are finite.

        None is not mentioned: it is always a default.
        """
        shown = [self._describe(value), *(other.describe(value) for other in self.others)]
        return ", or ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)

    def _describe(self, value: object) -> str:
        if self.choices:
            known = [str(one) for one in self.choices]
            return f"one of {', '.join(known)}{nearest(str(value), known)}"
        if self.items:
            items = self.items[0].describe()
            return (
                f"a list in which each item is {items}" if self.variadic else f"a list of {len(self.items)}"
            )
        if self.values is not None:
            return f"a mapping from strings, in which each value is {self.values.describe()}"
        noun = SCALARS[self.kind][0] if self.kind in SCALARS else f"a {self.kind.__name__}"
        if self.kind is float and isinstance(value, Real) and not is_finite_number(value):
            noun = "a finite number"
        if self.kind is Path and is_empty_text(value):
            noun = f"{noun}: it is empty"
        if self.not_empty:
            noun = "a non-empty string"
        return noun if self.range is None else self.range.describe(noun)

    # Conversions. The text of a ValueError completes the sentence "VALUE is not ...".

    def convert(self, value: Any) -> Any:
        """A value of TOML or JSON as this type; "none" stands for None."""
        if self.optional and isinstance(value, str) and value == "none":
            return None
        converted = value
        if self.items and isinstance(value, list):
            if not self.variadic and len(value) != len(self.items):
                raise ValueError(self.describe(value))
            try:
                converted = tuple(t.convert(x) for t, x in zip(self._item_types(value), value, strict=True))
            except ValueError as error:
                raise ValueError(f"a list in which each item is {error}") from None
        elif self.kind is Path and isinstance(value, str) and value:  # Path("") is the working directory
            converted = Path(value)
        elif self.kind is float and type(value) is int and is_finite_number(value):
            converted = float(value)
        if not self.accepts(converted):
            raise ValueError(self.describe(value))
        return converted

    def parse(self, words: list[str]) -> Any:
        """The words after a flag as this type."""
        if self.optional and words in (["None"], ["none"]):
            return None
        if self.items:
            return self.convert([self._item_types(words)[0].parse_word(word) for word in words])
        return self.convert(self.parse_word(words[0]))

    def parse_word(self, word: str) -> Any:
        """The value that TOML would have; a word that does not parse stays as it is, and is invalid."""
        if self.kind is bool:
            return FLAG_WORDS.get(word, word)
        if self.kind not in (int, float):
            return word
        try:
            return self.kind(word)
        except ValueError:
            return word


def is_empty_text(value: object) -> bool:
    """Whether a value is the empty string. A comparison would not be boolean if the value is a tensor."""
    return isinstance(value, str) and not value


def _constrain(field_type: FieldType, constraint: object) -> FieldType:
    """Apply the metadata of an `Annotated`; that of other libraries has no effect."""
    if isinstance(constraint, OneOf):
        return replace(field_type, choices=constraint.choices)
    if isinstance(constraint, NotEmpty):
        return replace(field_type, not_empty=True)
    if not isinstance(constraint, Range):
        return field_type
    if field_type.items:
        return replace(field_type, items=tuple(_constrain(item, constraint) for item in field_type.items))
    if field_type.kind is int and constraint.below is not None:
        constraint = replace(constraint, at_most=constraint.below - 1, below=None)
    return replace(field_type, range=constraint)


def _number(x: float) -> str:
    return str(int(x)) if x == int(x) else f"{x:g}"
