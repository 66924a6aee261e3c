"""Settings from flags: `--section.name value`, read with every mistake named."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from weft.core.errors import ProgramError, nearest

from .config import TrainConfig, with_preset
from .config_io import TYPE_DESCRIPTIONS, replace_nested

_SHORT = {"--mesh": "--layout.mesh", "--layout": "--layout.rules"}


def flag_types(kind: Any = TrainConfig, before: str = "--") -> dict[str, Any]:
    """The flags of all settings, and the type of each."""
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(kind)
    for one in dataclasses.fields(kind):
        flag = before + one.name.replace("_", "-")
        inner = hints[one.name]
        found |= flag_types(inner, f"{flag}.") if dataclasses.is_dataclass(inner) else {flag: inner}
    return found


def apply_flags(config: TrainConfig, arguments: Iterable[str]) -> TrainConfig:
    """Settings with those changed that flags give."""
    known = flag_types()
    changes: dict[str, Any] = {}
    wrong = []
    given: dict[str, list[str]] = {}
    for flag, values in _grouped(arguments):
        flag = _SHORT.get(flag, flag)
        if flag in given:
            wrong.append(f"{flag} is given twice, as {' '.join(given[flag])} and as {' '.join(values)}")
            continue
        given[flag] = values
        if flag not in known:
            wrong.append(
                f"there is no setting {flag}{nearest(flag, known)}" if flag else f"{values[0]} is no flag"
            )
            continue
        try:
            value = _as(known[flag], values)
        except ValueError as error:
            wrong.append(f"{' '.join([flag, *filter(None, values)])} {error}")
            continue
        *sections, name = flag.removeprefix("--").replace("-", "_").split(".")
        place = changes
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    if wrong:
        raise ProgramError(
            wrong[0],
            *wrong[1:],
            rule="a setting is given as --name value, or --section.name value",
            hint="weft train lm --help lists all settings",
        )
    if "preset" in changes:
        config = with_preset(config, changes["preset"])  # and other flags change that model
    return replace_nested(config, changes)


def _grouped(arguments: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the values behind it, as `--flag value` or `--flag=value`."""
    flag, values = "", list[str]()
    for one in arguments:
        if one.startswith("--"):
            if flag or values:
                yield flag, values
            name, equals, value = one.partition("=")
            flag, values = name.replace("_", "-"), [value] if equals else []
        else:
            values.append(one)
    if flag or values:
        yield flag, values


def _as(kind: Any, values: list[str]) -> Any:
    """Words as the type that a setting has; ValueError says what is wrong."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if values in (["None"], ["none"]) else _as(inside[0], values)
    if origin is tuple:
        if inside[1:] != (...,) and len(inside) != len(values):
            raise ValueError(f"has {len(values)} values, not {len(inside)}")
        return tuple(_as(inside[0], [value]) for value in values)
    if len(values) != 1:
        raise ValueError(f"has {len(values)} values, not 1")
    if origin is typing.Literal:
        if values[0] not in inside:
            raise ValueError(f"is not one of {', '.join(inside)}{nearest(values[0], inside)}")
        return values[0]
    if kind is Path and not values[0]:  # it would be the folder that one is in
        raise ValueError("is empty")
    try:
        return _READ.get(kind, kind)(values[0])
    except (ValueError, KeyError):
        raise ValueError(f"is not {TYPE_DESCRIPTIONS[kind]}") from None


_READ = {bool: {"true": True, "True": True, "false": False, "False": False}.__getitem__}
