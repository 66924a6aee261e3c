"""Settings as TOML: read with every mistake named, written so that reading gives them back."""

from __future__ import annotations

import dataclasses
import json
import tomllib
import types
import typing
from pathlib import Path
from typing import Any

from weft.core.errors import ProgramError, caret, nearest

from .config import TrainConfig, recipe, with_preset


def config_from_toml(path: str | Path) -> TrainConfig:
    """The settings in a file. `recipe` in it says what those begin with that are left out."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as error:
        raise ProgramError(
            f"{path} can't be read: {error.strerror}",
            rule="settings are in a recipe or a TOML file",
            hint="weft train lm --print-config shows what such a file says",
        ) from None
    except UnicodeDecodeError as error:
        raise ProgramError(
            f"{path} is not UTF-8: byte {error.start} is none of its characters",
            rule="a TOML file is text in UTF-8",
            hint="was another file meant? weft train lm --print-config shows what such a file says",
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ProgramError(
            f"{path} is not TOML",
            str(error),
            *_shown(text, str(error)),
            rule="a setting is name = value, a section [name]; texts are in quotes",
            hint="weft train lm --print-config shows what such a file says",
        ) from None
    named = table.pop("recipe", "lm")
    wrong = [] if isinstance(named, str) else [f"recipe = {named!r} is not text"]
    base = recipe("lm" if wrong else named)
    if isinstance(table.get("preset"), str):
        base = with_preset(base, table["preset"])
    changes = _changes(base, table, (), wrong)
    if wrong:
        raise ProgramError(
            f"{path} has settings that can't be used",
            *wrong,
            rule="a file has the settings that `weft train lm --print-config` prints",
            hint="weft train lm --help says what each one is",
        )
    return replace_nested(base, changes)


def config_to_toml(config: TrainConfig) -> str:
    """All settings as TOML. A None is left out, or "none" if the recipe or the preset has something there."""
    top, sections = [], []
    base = recipe("lm", config.preset)
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        if dataclasses.is_dataclass(value):
            rows = _rows(value, getattr(base, one.name))
            sections += ["", f"[{one.name}]", *rows] if rows else []
        else:
            top.append(f"{one.name} = {_toml(value)}")
    return "\n".join([*top, *sections]) + "\n"


def _rows(section: Any, base: Any) -> list[str]:
    names = [f.name for f in dataclasses.fields(section)]
    values = {name: (getattr(section, name), getattr(base, name)) for name in names}
    return [
        f"{name} = {_toml(value)}" for name, (value, other) in values.items() if (value, other) != (None,) * 2
    ]


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # JSON's text, numbers and truth values are TOML's.
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


def _shown(text: str, said: str) -> list[str]:
    """The line that TOML complains of, with a caret."""
    if "(at line " not in said:
        return []
    line, column = (int(word) for word in said.split("(at line ")[1].rstrip(")").split(", column "))
    lines = text.splitlines()
    return [caret(lines[line - 1], column - 1)] if line <= len(lines) else []


# From tables to dataclasses


def _changes(given: Any, table: dict[str, Any], path: tuple[str, ...], wrong: list[str]) -> dict[str, Any]:
    """The values in a table as fields of a dataclass; every key and type that is wrong is named."""
    kinds = typing.get_type_hints(type(given))
    changes: dict[str, Any] = {}
    for key, value in table.items():
        name = ".".join((*path, key))
        if key not in kinds:
            wrong.append(f"{name}: there is no such setting{nearest(key, kinds)}")
        elif dataclasses.is_dataclass(kinds[key]):
            if isinstance(value, dict):
                changes[key] = _changes(getattr(given, key), value, (*path, key), wrong)
            else:
                wrong.append(f"{name} = {value!r}: it is a section, [{name}]")
        else:
            try:
                changes[key] = _as(kinds[key], value)
            except ValueError as error:
                wrong.append(f"{name} = {value!r} is not {error}")
    return changes


def replace_nested(given: Any, changes: dict[str, Any]) -> Any:
    """A dataclass with other values; those of a section are in a dict of their own."""
    new = {k: replace_nested(getattr(given, k), v) if isinstance(v, dict) else v for k, v in changes.items()}
    return dataclasses.replace(given, **new)


def _as(kind: Any, value: Any) -> Any:
    """A value of TOML as the type that a field has; ValueError says what it should be."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value == "none":
            return None
        return _as(next(k for k in inside if k is not type(None)), value)
    if origin is typing.Literal:
        if value not in inside:
            raise ValueError(f"one of {', '.join(map(repr, inside))}{nearest(str(value), inside)}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError("a list")
        kinds = inside[:1] * len(value) if inside[1:] == (...,) else inside
        if len(kinds) != len(value):
            raise ValueError(f"a list of {len(kinds)}")
        try:
            return tuple(_as(k, v) for k, v in zip(kinds, value, strict=True))
        except ValueError as error:
            raise ValueError(f"a list of which each is {error}") from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError("a number that a float can hold") from None
    if kind is Path and isinstance(value, str) and value:  # "" would be the folder that one is in
        return Path(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(TYPE_DESCRIPTIONS.get(kind, kind.__name__))
    return value


TYPE_DESCRIPTIONS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    Path: "a path",
}
