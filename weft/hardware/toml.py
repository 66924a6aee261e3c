"""Typed access to the TOML of a hardware profile, with errors that quote the offending line."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from typing import Any

from ..core.errors import HardwareError, caret, nearest
from ..core.field_types import FieldType
from ..core.fields import field_types

_EXAMPLE = "weft hardware show tpu-v4 prints a complete profile"


class TomlTable:
    """A TOML table whose fields are read one by one; `done` rejects the fields that were not read.

    Args:
      data: the parsed table.
      text: the text of the file, to quote lines from.
      where: the name of the file.
      name: the name of the table, "" at the top.
      number: the index of the table among those of its name.
    """

    def __init__(self, data: dict[str, Any], text: str, where: str, name: str, number: int = 0):
        self.data, self._text, self._where, self._name, self._number = data, text, where, name, number
        self._read_keys: set[str] = set()

    @classmethod
    def read(cls, text: str, where: str) -> TomlTable:
        """The top-level table of TOML text."""
        try:
            return cls(tomllib.loads(text), text, where, "")
        except tomllib.TOMLDecodeError as error:
            raise _syntax_error(text, where, str(error)) from None

    def fields(self, config_class: type, *names: str) -> dict[str, Any]:
        """The values of a dataclass's fields, by name; those that have a default may be missing."""
        types = field_types(config_class)
        defaults = {f.name: f.default for f in dataclasses.fields(config_class)}
        return {name: self.value(name, types[name], defaults[name]) for name in names or types}

    def value(self, key: str, kind: FieldType, default: Any = dataclasses.MISSING) -> Any:
        """The value of a field of this type."""
        given = self._get(key, kind.describe(), default)
        if given is default:
            return default
        # Large integers are often written as floats, 80e9.
        is_integral = kind.kind is int and isinstance(given, float) and given.is_integer()
        try:
            return kind.required.convert(int(given) if is_integral else given)
        except ValueError as error:
            raise self._invalid(key, str(error)) from None

    def table(self, key: str) -> TomlTable:
        """A nested table."""
        data = self._get(key, f"a table: [{key}]")
        if not isinstance(data, dict):
            raise self._invalid(key, f"a table: [{key}]")
        return TomlTable(data, self._text, self._where, self._full_key(key))

    def tables(self, key: str) -> list[TomlTable]:
        """An array of tables with at least one entry."""
        array = self._get(key, f"a list of tables: [[{key}]]")
        if not isinstance(array, list) or not array or not all(isinstance(x, dict) for x in array):
            raise self._invalid(key, f"a list of tables: [[{key}]]")
        return [TomlTable(t, self._text, self._where, self._full_key(key), n) for n, t in enumerate(array)]

    def done(self) -> None:
        """Raise an error for fields that were not read: a misspelled one would have no effect."""
        for key in set(self.data) - self._read_keys:
            raise HardwareError(
                f"unknown field {self._full_key(key)}{nearest(key, self._read_keys)}",
                *self._quote(key, value=False),
                rule=f"fields here: {', '.join(sorted(self._read_keys))}",
                hint="correct the name, or remove the line",
            )

    def _which(self) -> list[str]:
        """A line that tells which of several tables with one name this is."""
        name = self.data.get("name") if self._name else None
        return [f"in the [[{self._name}]] named {name}"] if name else []

    def _full_key(self, key: str) -> str:
        return f"{self._name}.{key}" if self._name else key

    def _get(self, key: str, what: str, default: Any = dataclasses.MISSING) -> Any:
        self._read_keys.add(key)
        if key not in self.data:
            if default is not dataclasses.MISSING:
                return default
            close = nearest(key, set(self.data) - self._read_keys).replace("did you mean", "misspelled as")
            raise HardwareError(
                f"{self._full_key(key)} is missing from {self._where}{close}",
                *self._which(),
                rule=f"{self._full_key(key)} is {what}",
                hint=_EXAMPLE,
            )
        return self.data[key]

    def _invalid(self, key: str, what: str) -> HardwareError:
        fact = f"{self._full_key(key)} = {self.data[key]!r} is not {what}"
        return HardwareError(fact, *self._quote(key), hint=_EXAMPLE)

    def _quote(self, key: str, *, value: bool = True) -> list[str]:
        """The field's line in the file, with a caret under its value or name.

        `tomllib` keeps no line numbers, so the text is scanned for the table's header and then for the key.
        """
        table, number = "", -1
        for n, line in enumerate(self._text.splitlines(), 1):
            if header := re.match(r"\s*(\[\[?)\s*([\w.]+)", line):
                number = number + 1 if header[2] == table else 0
                table = header[2]
                if table == self._full_key(key):
                    return _point_at(self._where, n, line, header.start(2))
                continue
            here = table == self._name and (number == self._number or not table)
            if here and (field := re.match(rf"(\s*)\"?{re.escape(key)}\"?\s*=\s*", line)):
                return _point_at(self._where, n, line, field.end() if value else field.end(1))
        return [f"in {self._where}"]


def _point_at(where: str, line: int, text: str, column: int) -> list[str]:
    return [f"{where}, line {line}:", caret(text, column)]


def _syntax_error(text: str, where: str, message: str) -> HardwareError:
    fact, _, location = message.partition(" (at ")
    position = re.match(r"line (\d+), column (\d+)", location)
    lines = text.splitlines() or [""]
    # At the end of the file `tomllib` gives no position.
    line, column = (int(position[1]), int(position[2])) if position else (len(lines), len(lines[-1]) + 1)
    return HardwareError(
        f"{where} is not valid TOML: {fact[:1].lower()}{fact[1:]}",
        *_point_at(where, line, lines[min(line, len(lines)) - 1], column - 1),
        hint="weft hardware show tpu-v4 prints a valid profile",
    )
