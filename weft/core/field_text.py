"""Configs from text: changes to a dataclass from the tables of a TOML file, and from `--section.name` flags.

Both readers return the changes as nested dicts, for `fields.replace_nested`, and a list of all mistakes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .errors import nearest
from .field_types import FieldType
from .fields import field_types, flag_name

Changes = dict[str, Any]


def read_table(
    config_class: type, table: Mapping[str, Any], path: tuple[str, ...] = ()
) -> tuple[Changes, list[str]]:
    """The changes in a TOML table, and the mistakes."""
    known = field_types(config_class)
    changes: Changes = {}
    mistakes: list[str] = []
    for key, value in table.items():
        name = ".".join((*path, key))
        if key not in known:
            mistakes.append(f"{name}: there is no such setting{nearest(key, known)}")
        elif dataclasses.is_dataclass(known[key].kind):
            if isinstance(value, dict):
                changes[key], inner = read_table(known[key].kind, value, (*path, key))
                mistakes += inner
            else:
                mistakes.append(f"{name} = {value!r}: it is a section, [{name}]")
        else:
            try:
                changes[key] = known[key].convert(value)
            except ValueError as error:
                mistakes.append(f"{name} = {value!r} is not {error}")
    return changes, mistakes


def flag_types(
    config_class: type, path: tuple[str, ...] = ()
) -> dict[str, tuple[tuple[str, ...], FieldType]]:
    """The flags of all fields, with the path and the type of each."""
    flags: dict[str, tuple[tuple[str, ...], FieldType]] = {}
    for name, kind in field_types(config_class).items():
        inner, section = (*path, name), kind.kind
        is_section = dataclasses.is_dataclass(section)
        flags |= flag_types(section, inner) if is_section else {flag_name(inner): (inner, kind)}
    return flags


def read_flags(
    config_class: type, arguments: Iterable[str], short: Mapping[str, str]
) -> tuple[Changes, list[str]]:
    """The changes that flags make, and the mistakes.

    Args:
      config_class: the dataclass.
      arguments: flags, each followed by the words of its value.
      short: short names of flags.
    """
    known = flag_types(config_class)
    changes: Changes = {}
    mistakes: list[str] = []
    given: dict[str, list[str]] = {}
    for flag, words in group_flags(arguments):
        flag = short.get(flag, flag)
        if flag in given:
            mistakes.append(f"{flag} is given twice, as {' '.join(given[flag])} and as {' '.join(words)}")
            continue
        given[flag] = words
        if flag not in known:
            mistakes.append(
                f"there is no setting {flag}{nearest(flag, known)}" if flag else f"{words[0]} is not a flag"
            )
            continue
        (*sections, name), kind = known[flag]
        table = changes
        for section in sections:
            table = table.setdefault(section, {})
        try:
            table[name] = _parse(kind, words)
        except ValueError as error:
            mistakes.append(f"{' '.join([flag, *filter(None, words)])} {error}")
    return changes, mistakes


def _parse(kind: FieldType, words: list[str]) -> Any:
    """The words of a flag as its type; the ValueError completes the sentence "FLAG WORDS ..."."""
    count = len(kind.items) or 1
    is_none = kind.optional and words in (["none"], ["None"])
    if not kind.variadic and not is_none and len(words) != count:
        raise ValueError(f"has {len(words)} values, not {count}")
    try:
        return kind.parse(words)
    except ValueError as error:
        raise ValueError(f"is not {error}") from None


def group_flags(arguments: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the words after it, from `--flag word ...` or `--flag=word`."""
    flag, words = "", list[str]()
    for argument in arguments:
        if argument.startswith("--"):
            if flag or words:
                yield flag, words
            name, equals, word = argument.partition("=")
            flag, words = name.replace("_", "-"), [word] if equals else []
        else:
            words.append(argument)
    if flag or words:
        yield flag, words
