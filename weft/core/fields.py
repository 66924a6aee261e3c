"""Fields of config dataclasses: each is declared once, with its type, range, default and documentation.

    @documented
    @dataclass(frozen=True)
    class SaveConfig:
        keep: PositiveInt = 3
        \"\"\"The number of checkpoints to keep.\"\"\"

        def __post_init__(self) -> None:
            validate(self)

The annotation is the rule (`core/field_types.py`). The string below is the documentation: tyro prints it for
`--help`, the reference pages list it, and `documented` adds it to the class's docstring, for `help`.

An error lists every field that breaks its rule. It names them as they were given, `keep=0` in Python,
`--save.keep 0` on the command line, `save.keep = 0` in a TOML file: it has the fields as `Offender`s, and
`respelled` writes them in another `Spelling`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from .call_errors import reports_construction
from .errors import ProgramError, WeftError
from .field_types import FieldType

Kind = TypeVar("Kind", bound=WeftError)
Class = TypeVar("Class", bound=type)


@functools.cache
def field_types(config_class: type) -> dict[str, FieldType]:
    """The types of a dataclass's fields, by name."""
    hints = typing.get_type_hints(config_class, include_extras=True)
    return {field.name: FieldType.of(hints[field.name]) for field in dataclasses.fields(config_class)}


@functools.cache
def argument_types(fn: Callable[..., Any]) -> dict[str, FieldType]:
    """The types of a function's arguments, by name."""
    return {name: FieldType.of(hint) for name, hint in typing.get_type_hints(fn, include_extras=True).items()}


# Errors


@dataclass(frozen=True)
class Offender:
    """A field that breaks its rule.

    Attributes:
      path: the names of the sections that contain it, outermost first, and its own.
      value: its value.
      rule: the valid values; it completes the sentence "FIELD is ...".
      fix: a valid value to suggest, if one is known.
    """

    path: tuple[str, ...]
    value: object
    rule: str
    fix: object = None


@dataclass(frozen=True)
class Spelling:
    """How messages write fields.

    Attributes:
      name: from a path to the text of the field.
      setting: the text of a field with a value, from the text of the field and the value.
    """

    name: Callable[[tuple[str, ...]], str]
    setting: Callable[[str, object], str]


def flag_name(path: Iterable[str]) -> str:
    """The flag of a field: `--save.keep`."""
    return "--" + ".".join(path).replace("_", "-")


def _words(value: object) -> str:
    """A value on the command line; the items of a tuple are separate words."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


PYTHON = Spelling(".".join, lambda name, value: f"{name}={value!r}")
FLAGS = Spelling(flag_name, lambda name, value: f"{name} {_words(value)}")
TOML = Spelling(".".join, lambda name, value: f"{name} = {value!r}")


def validate(
    owner: Any, error: type[WeftError] = ProgramError, hint: str = "", more: Iterable[Offender] = ()
) -> None:
    """Raise an error that lists the fields of a dataclass that break their rules.

    Args:
      owner: the dataclass; `__post_init__` calls this.
      error: the class of the error.
      hint: how to find valid values; by default the help of the dataclass.
      more: fields that contradict each other; these are reported if each field is valid on its own.
    """
    kind: type = type(owner)
    hint = hint or f"help({kind.__module__}.{kind.__name__}) describes each field"
    values = {name: getattr(owner, name) for name in field_types(kind)}
    check_values(field_types(kind), values, error, hint, kind.__name__)
    if offenders := tuple(more):
        raise field_error(error, offenders, PYTHON, hint).located(kind.__name__)


def check_values(
    known: Mapping[str, FieldType],
    values: Mapping[str, Any],
    error: type[WeftError] = ProgramError,
    hint: str = "",
    call: str = "",
) -> None:
    """Raise an error that lists the values, of fields or arguments, that their types don't accept."""
    offenders = [
        Offender((name,), value, known[name].describe(value))
        for name, value in values.items()
        if not known[name].accepts(value)
    ]
    if offenders:
        found = field_error(error, offenders, PYTHON, hint)
        raise found.located(f"{call}({found.fact})" if call else "")


def field_error(
    kind: type[Kind],
    offenders: Iterable[Offender],
    spelling: Spelling,
    hint: str,
    renamed: Mapping[str, str] | None = None,
) -> Kind:
    """An error about fields, which can be respelled.

    Args:
      kind: the class of the error.
      offenders: the fields.
      spelling: how to write them.
      hint: the hint, if the fields have no fixes.
      renamed: the fields that have another name in this spelling.
    """
    offenders = tuple(offenders)
    renamed = renamed or {}
    names = [spelling.name(tuple(renamed.get(part, part) for part in one.path)) for one in offenders]
    fixes = [
        spelling.setting(name, one.fix)
        for name, one in zip(names, offenders, strict=True)
        if one.fix is not None
    ]
    error = kind(
        ", ".join(spelling.setting(name, one.value) for name, one in zip(names, offenders, strict=True)),
        rule="\n  ".join(f"{name} is {one.rule}" for name, one in zip(names, offenders, strict=True)),
        hint=f"for example {', '.join(fixes)}" if fixes else hint,
    )
    error.offenders = offenders
    return error


def respelled(error: WeftError, spelling: Spelling, hint: str) -> WeftError:
    """The same error in another spelling; an error that is not about fields as it is."""
    return field_error(type(error), error.offenders, spelling, hint) if error.offenders else error


def replace_nested(config: Any, changes: dict[str, Any]) -> Any:
    """A copy of a dataclass with some values changed; the changes of a section are a dict.

    The offenders of a section's error get the section's name in their paths.
    """
    new = dict(changes)
    for section, inner in changes.items():
        if isinstance(inner, dict):
            try:
                new[section] = replace_nested(getattr(config, section), inner)
            except WeftError as error:
                error.offenders = tuple(
                    dataclasses.replace(one, path=(section, *one.path)) for one in error.offenders
                )
                raise
    return dataclasses.replace(config, **new)


# Documentation


def documented(config_class: Class) -> Class:
    """Add the documentation of the fields to a dataclass's docstring (a decorator)."""
    docs = field_docs(config_class)
    rows = [f"  {name}: {textwrap.indent(doc, '    ').lstrip()}" for name, doc in docs.items()]
    config_class = reports_construction(config_class)
    config_class.__doc__ = "\n".join([inspect.getdoc(config_class) or "", "", "Attributes:", *rows, ""])
    return config_class


def field_docs(config_class: type) -> dict[str, str]:
    """The documentation of each field: the string below it, in the source."""
    own: dict[str, str] = {}
    for base in reversed(config_class.__mro__):
        if dataclasses.is_dataclass(base):
            file = getattr(sys.modules.get(base.__module__), "__file__", None) or ""
            own |= _docs_by_class(file).get(base.__qualname__, {})
    return {field.name: own[field.name] for field in dataclasses.fields(config_class) if field.name in own}


@functools.cache
def _docs_by_class(file: str) -> dict[str, dict[str, str]]:
    """The strings below the fields of each class in a file."""
    if not file.endswith(".py"):  # an interactive session, or installed without sources
        return {}
    with open(file, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    found: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            docs = found[node.name] = {}
            for field, text in zip(node.body, node.body[1:], strict=False):
                match field, text:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(doc))),
                    ):
                        docs[name] = inspect.cleandoc(doc)
    return found
