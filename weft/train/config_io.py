"""Settings to and from text: TOML files and `--section.name value` flags. Errors list every mistake.

Both are parsed into nested dicts of changes to a `TrainConfig`. `_coerce` converts each value to the type of
its field; flags are first converted to the values that TOML would have.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from weft.core.errors import ProgramError, caret, nearest

from .config import TrainConfig, recipe, with_preset

# TOML


def config_from_toml(path: str | Path) -> TrainConfig:
    """Read settings from a file. Its `recipe` provides the settings that the file does not have."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as error:
        raise ProgramError(
            f"{path} can't be read: {error.strerror}",
            rule="settings come from a recipe or a TOML file",
            hint="weft train lm --print-config prints an example of such a file",
        ) from None
    except UnicodeDecodeError as error:
        raise ProgramError(
            f"{path} is not UTF-8: byte {error.start} is invalid",
            rule="a TOML file is text in UTF-8",
            hint="check the path; weft train lm --print-config prints an example of such a file",
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ProgramError(
            f"{path} is not TOML",
            str(error),
            *_error_line(text, str(error)),
            rule="a setting is name = value, a section is [name]; strings are quoted",
            hint="weft train lm --print-config prints an example of such a file",
        ) from None
    name = table.pop("recipe", "lm")
    wrong = [] if isinstance(name, str) else [f"recipe = {name!r} is not a string"]
    base = recipe("lm" if wrong else name)
    if isinstance(table.get("preset"), str):
        base = with_preset(base, table["preset"])
    changes = _changes(base, table, (), wrong)
    if wrong:
        raise ProgramError(
            f"{path} has invalid settings",
            *wrong,
            rule="a file has the settings that `weft train lm --print-config` prints",
            hint="weft train lm --help explains each setting",
        )
    return replace_nested(base, changes)


def config_to_toml(config: TrainConfig) -> str:
    """All settings as TOML. None is omitted, or "none" where the default of the recipe or preset differs."""
    top, sections = [], []
    base = recipe("lm", config.preset)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            rows = _section_rows(value, getattr(base, field.name))
            sections += ["", f"[{field.name}]", *rows] if rows else []
        else:
            top.append(f"{field.name} = {_toml_value(value)}")
    return "\n".join([*top, *sections]) + "\n"


def _section_rows(section: Any, base: Any) -> list[str]:
    names = [field.name for field in dataclasses.fields(section)]
    values = {name: (getattr(section, name), getattr(base, name)) for name in names}
    return [
        f"{name} = {_toml_value(value)}"
        for name, (value, default) in values.items()
        if (value, default) != (None, None)
    ]


def _toml_value(value: object) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    # JSON strings, numbers and booleans are valid TOML.
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


def _error_line(text: str, message: str) -> list[str]:
    """The line that tomllib complains about, with a caret."""
    if "(at line " not in message:
        return []
    line, column = (int(word) for word in message.split("(at line ")[1].rstrip(")").split(", column "))
    lines = text.splitlines()
    return [caret(lines[line - 1], column - 1)] if line <= len(lines) else []


def _changes(base: Any, table: dict[str, Any], path: tuple[str, ...], wrong: list[str]) -> dict[str, Any]:
    """The values of a table as fields of a dataclass; every invalid key and value is added to `wrong`."""
    kinds = typing.get_type_hints(type(base))
    changes: dict[str, Any] = {}
    for key, value in table.items():
        name = ".".join((*path, key))
        if key not in kinds:
            wrong.append(f"{name}: there is no such setting{nearest(key, kinds)}")
        elif dataclasses.is_dataclass(kinds[key]):
            if isinstance(value, dict):
                changes[key] = _changes(getattr(base, key), value, (*path, key), wrong)
            else:
                wrong.append(f"{name} = {value!r}: it is a section, [{name}]")
        else:
            try:
                changes[key] = _coerce(kinds[key], value)
            except ValueError as error:
                wrong.append(f"{name} = {value!r} is not {error}")
    return changes


# Flags

_SHORT = {"--mesh": "--layout.mesh", "--layout": "--layout.rules"}


def flag_types(config_class: type = TrainConfig, prefix: str = "--") -> dict[str, Any]:
    """The flags of all settings, with the type of each."""
    flags: dict[str, Any] = {}
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        flag = prefix + field.name.replace("_", "-")
        kind = hints[field.name]
        flags |= flag_types(kind, f"{flag}.") if dataclasses.is_dataclass(kind) else {flag: kind}  # type: ignore[arg-type]
    return flags


def apply_flags(config: TrainConfig, arguments: Iterable[str]) -> TrainConfig:
    """A copy of the settings with the changes that flags make."""
    known = flag_types()
    changes: dict[str, Any] = {}
    wrong = []
    given: dict[str, list[str]] = {}
    for flag, words in _group_flags(arguments):
        flag = _SHORT.get(flag, flag)
        if flag in given:
            wrong.append(f"{flag} is given twice, as {' '.join(given[flag])} and as {' '.join(words)}")
            continue
        given[flag] = words
        if flag not in known:
            wrong.append(
                f"there is no setting {flag}{nearest(flag, known)}" if flag else f"{words[0]} is not a flag"
            )
            continue
        try:
            value = _parse_flag(known[flag], words)
        except ValueError as error:
            wrong.append(f"{' '.join([flag, *filter(None, words)])} {error}")
            continue
        *sections, name = flag.removeprefix("--").replace("-", "_").split(".")
        table = changes
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    if wrong:
        raise ProgramError(
            wrong[0],
            *wrong[1:],
            rule="a setting is given as --name value, or --section.name value",
            hint="weft train lm --help lists all settings",
        )
    if "preset" in changes:
        config = with_preset(config, changes["preset"])  # before the other flags, which change its model
    return replace_nested(config, changes)


def _group_flags(arguments: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
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


def _parse_flag(kind: Any, words: list[str]) -> Any:
    """The words of a flag as its type; the ValueError completes the sentence "FLAG WORDS ..."."""
    value = _toml_like(kind, words)
    try:
        return _coerce(kind, value)
    except ValueError as error:
        raise ValueError(f"is not {error}") from None


def _toml_like(kind: Any, words: list[str]) -> Any:
    """The value that TOML would have for these words; a word that does not parse is left to `_coerce`."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return "none" if words in (["None"], ["none"]) else _toml_like(_non_optional(kind), words)
    if origin is tuple:
        if inner[1:] != (...,) and len(inner) != len(words):
            raise ValueError(f"has {len(words)} values, not {len(inner)}")
        return [_toml_like(inner[0], [word]) for word in words]
    if len(words) != 1:
        raise ValueError(f"has {len(words)} values, not 1")
    if kind is bool:
        return {"true": True, "True": True, "false": False, "False": False}.get(words[0], words[0])
    if kind in (int, float):
        try:
            return kind(words[0])
        except ValueError:
            return words[0]
    return words[0]


# Both

TYPE_DESCRIPTIONS = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    Path: "a path",
}


def replace_nested(config: Any, changes: dict[str, Any]) -> Any:
    """A copy of a dataclass with some values changed; the changes of a section are a dict."""
    new = {k: replace_nested(getattr(config, k), v) if isinstance(v, dict) else v for k, v in changes.items()}
    return dataclasses.replace(config, **new)


def _non_optional(kind: Any) -> Any:
    return next(k for k in typing.get_args(kind) if k is not type(None))


def _coerce(kind: Any, value: Any) -> Any:
    """A value of TOML as the type of a field; the ValueError completes the sentence "VALUE is not ..."."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if value == "none" else _coerce(_non_optional(kind), value)
    if origin is typing.Literal:
        if value not in inner:
            raise ValueError(f"one of {', '.join(map(str, inner))}{nearest(str(value), inner)}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError("a list")
        kinds = inner[:1] * len(value) if inner[1:] == (...,) else inner
        if len(kinds) != len(value):
            raise ValueError(f"a list of {len(kinds)}")
        try:
            return tuple(_coerce(k, v) for k, v in zip(kinds, value, strict=True))
        except ValueError as error:
            raise ValueError(f"a list in which each item is {error}") from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError("within the range of a float") from None
    if kind is Path and isinstance(value, str):
        if not value:  # Path("") would be the working directory
            raise ValueError("a path: it is empty")
        return Path(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(TYPE_DESCRIPTIONS.get(kind, kind.__name__))
    return value
