"""Settings to and from text: TOML files and `--section.name value` flags. Errors list every mistake."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weft.core.errors import ProgramError, WeftError, caret
from weft.core.field_text import read_flags, read_table
from weft.core.fields import FLAGS, TOML, replace_nested, respelled

from .config import TrainConfig, recipe, with_preset

SHORT_FLAGS = {"--mesh": "--layout.mesh", "--layout": "--layout.rules"}
HINT = "weft train lm --help explains each setting"


def apply_flags(config: TrainConfig, arguments: Iterable[str]) -> TrainConfig:
    """A copy of the settings with the changes that flags make."""
    changes, mistakes = read_flags(TrainConfig, arguments, SHORT_FLAGS)
    if mistakes:
        raise ProgramError(
            mistakes[0],
            *mistakes[1:],
            rule="a setting is given as --name value, or --section.name value",
            hint=HINT,
        )
    if "preset" in changes:
        config = with_preset(config, changes["preset"])  # before the other flags, which change its model
    try:
        return replace_nested(config, changes)
    except WeftError as error:
        raise respelled(error, FLAGS, HINT) from None


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
    mistakes = [] if isinstance(name, str) else [f"recipe = {name!r} is not a string"]
    base = recipe("lm" if mistakes else name)
    if isinstance(table.get("preset"), str):
        base = with_preset(base, table["preset"])
    changes, others = read_table(TrainConfig, table)
    if mistakes + others:
        raise ProgramError(
            f"{path} has invalid settings",
            *mistakes,
            *others,
            rule="a file has the settings that `weft train lm --print-config` prints",
            hint=HINT,
        )
    try:
        return replace_nested(base, changes)
    except WeftError as error:
        raise respelled(error, TOML, HINT) from None


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
