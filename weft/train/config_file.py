"""Settings as TOML: read with every mistake named, written so that reading gives them back."""

from __future__ import annotations

import dataclasses
import json
import tomllib
import types
import typing
from pathlib import Path
from typing import Any

from weft.errors import ProgramError, caret, nearest

from .config import TrainConfig, recipe, with_preset


def read(path: str | Path) -> TrainConfig:
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
        raise ProgramError(f"{path} is not UTF-8: byte {error.start}", rule="TOML is UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ProgramError(f"{path} is not TOML", str(error), *_shown(text, str(error))) from None
    base = recipe(table.pop("recipe", "lm"))
    if "preset" in table:
        base = with_preset(base, table["preset"])
    return _changed(base, table, str(path), ())


def write(config: TrainConfig) -> str:
    """All settings as TOML; those that are None are left out."""
    top, sections = [], []
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        if dataclasses.is_dataclass(value):
            rows = [f"{f.name} = {_toml(getattr(value, f.name))}" for f in _given(value)]
            sections += ["", f"[{one.name}]", *rows] if rows else []
        else:
            top.append(f"{one.name} = {_toml(value)}")
    return "\n".join([*top, *sections]) + "\n"


def _given(section: Any) -> list[Any]:
    return [f for f in dataclasses.fields(section) if getattr(section, f.name) is not None]


def _toml(value: Any) -> str:
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


def _changed(given: Any, table: dict[str, Any], file: str, path: tuple[str, ...]) -> Any:
    """A dataclass with the settings of a table; every wrong key and type is named."""
    kinds = typing.get_type_hints(type(given))
    changes: dict[str, Any] = {}
    wrong: list[str] = []
    for key, value in table.items():
        name = ".".join((*path, key))
        if key not in kinds:
            wrong.append(f"{name}: there is no such setting{nearest(key, kinds)}")
        elif dataclasses.is_dataclass(kinds[key]):
            if isinstance(value, dict):
                changes[key] = _changed(getattr(given, key), value, file, (*path, key))
            else:
                wrong.append(f"{name} is a section: [{name}], not {name} = {value!r}")
        else:
            try:
                changes[key] = _as(kinds[key], value)
            except ValueError as error:
                wrong.append(f"{name} = {value!r} is not {error}")
    if wrong:
        raise ProgramError(
            f"{file} has settings that can't be used",
            *wrong,
            rule="a file has the settings that `weft train lm --print-config` prints",
            hint="weft train --help says what each one is",
        )
    return dataclasses.replace(given, **changes)


def _as(kind: Any, value: Any) -> Any:
    """A value of TOML as the type that a field has; ValueError says what it should be."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
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
        return tuple(_as(k, v) for k, v in zip(kinds, value, strict=True))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(_WORDS.get(kind, kind.__name__))
    return value


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}
