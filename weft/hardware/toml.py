"""The TOML of a hardware profile, asked for its fields; what is wrong is shown in the file's own words."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable
from typing import Any

from ..core.errors import HardwareError, caret, nearest


class TomlTable:
    """A TOML table that is asked for its fields, and complains in the file's own words."""

    def __init__(self, data: dict[str, Any], text: str, where: str, name: str, number: int = 0):
        self.data, self._text, self._where, self._name, self._number = data, text, where, name, number
        self._asked: set[str] = set()

    @classmethod
    def read(cls, text: str, where: str) -> TomlTable:
        """The table at the top of TOML text."""
        try:
            return cls(tomllib.loads(text), text, where, "")
        except tomllib.TOMLDecodeError as error:
            raise _broken(text, where, str(error)) from None

    def text(self, key: str) -> str:
        return self._get(key, "text in quotes", lambda v: isinstance(v, str) and v != "")

    def whole(self, key: str, *default: Any) -> Any:
        ok = lambda v: _is_number(v) and v == int(v) and v >= (0 if default == (0,) else 1)  # noqa: E731
        value = self._get(key, "a whole number", ok, *default)
        return int(value) if value is not None else None

    def number(self, key: str, *, least: float | None = None, most: float = math.inf) -> float:
        what = "a number" if least is not None else "a number above 0"
        what += f", at most {most:g}" if most < math.inf else ""
        in_range = lambda v: (v >= least if least is not None else v > 0) and v <= most  # noqa: E731
        return float(self._get(key, what, lambda v: _is_number(v) and in_range(v)))

    def table(self, key: str) -> TomlTable:
        found = self._get(key, f"a table: [{key}]", lambda v: isinstance(v, dict))
        return TomlTable(found, self._text, self._where, self._inner(key))

    def tables(self, key: str) -> list[TomlTable]:
        def ok(v: Any) -> bool:
            return isinstance(v, list) and bool(v) and all(isinstance(x, dict) for x in v)

        found = self._get(key, f"a list of tables: [[{key}]]", ok)
        return [TomlTable(t, self._text, self._where, self._inner(key), n) for n, t in enumerate(found)]

    def done(self) -> None:
        """An error if there are fields that nobody asked for: a misspelt one would have no effect."""
        for key in set(self.data) - self._asked:
            raise HardwareError(
                f"unknown field {self._inner(key)}{nearest(key, self._asked)}",
                *self._shown(key, value=False),
                rule=f"fields here: {', '.join(sorted(self._asked))}",
                hint="mend the name, or leave the line out",
            )

    def _called(self) -> list[str]:
        """Which one of several tables this is."""
        name = self.data.get("name") if self._name else None
        return [f"in the [[{self._name}]] named {name}"] if name else []

    def _inner(self, key: str) -> str:
        return f"{self._name}.{key}" if self._name else key

    def _get(self, key: str, what: str, ok: Callable[[Any], bool], *default: Any) -> Any:
        self._asked.add(key)
        if key not in self.data:
            if default:
                return default[0]
            close = nearest(key, set(self.data) - self._asked).replace("did you mean", "misspelt as")
            raise HardwareError(
                f"{self._inner(key)} is missing from {self._where}{close}",
                *self._called(),
                rule=f"{self._inner(key)} is {what}",
                hint="weft hardware show tpu-v4 prints a whole profile",
            )
        value = self.data[key]
        if not ok(value):
            raise HardwareError(
                f"{self._inner(key)} = {value!r} is not {what}",
                *self._shown(key),
                hint="weft hardware show tpu-v4 prints a whole profile",
            )
        return value

    def _shown(self, key: str, *, value: bool = True) -> list[str]:
        """The field's line in the file, with a caret under its value or name."""
        table, number = "", -1
        for n, line in enumerate(self._text.splitlines(), 1):
            if header := re.match(r"\s*(\[\[?)\s*([\w.]+)", line):
                number = number + 1 if header[2] == table else 0
                table = header[2]
                if table == self._inner(key):
                    return _pointed(self._where, n, line, header.start(2))
                continue
            here = table == self._name and (number == self._number or not table)
            if here and (field := re.match(rf"(\s*)\"?{re.escape(key)}\"?\s*=\s*", line)):
                return _pointed(self._where, n, line, field.end() if value else field.end(1))
        return [f"in {self._where}"]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _pointed(where: str, line: int, text: str, column: int) -> list[str]:
    return [f"{where}, line {line}:", caret(text, column)]


def _broken(text: str, where: str, message: str) -> HardwareError:
    fact, _, place = message.partition(" (at ")
    found = re.match(r"line (\d+), column (\d+)", place)
    lines = text.splitlines() or [""]
    line, column = (int(found[1]), int(found[2])) if found else (len(lines), len(lines[-1]) + 1)
    return HardwareError(
        f"{where} is not TOML: {fact[:1].lower()}{fact[1:]}",
        *_pointed(where, line, lines[min(line, len(lines)) - 1], column - 1),
        hint="weft hardware show tpu-v4 prints a profile that is",
    )
