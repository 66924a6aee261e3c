"""Fields: validate the numbers of a config dataclass when it is constructed, not when a run has begun."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

from .errors import ProgramError

# In words too: the message quotes the rule that a field breaks.
FIELD_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "positive": ("a number above 0", lambda x: x > 0),
    "not negative": ("a number, at least 0", lambda x: x >= 0),
    "share": ("a number from 0 to 1, 1 itself excluded", lambda x: 0 <= x < 1),
    "part": ("a number from 0 to 1", lambda x: 0 <= x <= 1),
    "at least one": ("a number, at least 1", lambda x: x >= 1),
    "count": ("an integer, at least 1", lambda x: isinstance(x, int) and x >= 1),
}


def check_fields(owner: object, rules: dict[str, str], example: str) -> None:
    """Raise an error that lists the fields of a dataclass that break their rules.

    Args:
      owner: the dataclass; its class and field names go into the message.
      rules: for each field a name in `FIELD_RULES`.
      example: valid settings, for the hint.
    """
    given = {name: getattr(owner, name) for name in rules}
    wrong = {
        name: x for name, x in given.items() if not (is_finite_number(x) and FIELD_RULES[rules[name]][1](x))
    }
    if wrong:
        kind = type(owner).__name__
        shown = ", ".join(f"{name}={x!r}" for name, x in wrong.items())
        raise ProgramError(
            f"{kind} was given {shown}",
            rule="; ".join(f"{name} is {FIELD_RULES[rules[name]][0]}" for name in wrong),
            hint=f"for example {example}",
        ).located(f"{kind}({shown})")


def is_finite_number(x: object) -> bool:
    """Whether x is a finite real number, and not a boolean."""
    return isinstance(x, Real) and not isinstance(x, bool) and math.isfinite(x)
