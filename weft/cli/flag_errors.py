"""Errors about the fields of a config that come from flags: they name the flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..core.errors import WeftError
from ..core.fields import FLAGS, field_error, validate
from .targets import UsageError

HINT = "omit the flag to use its default; see --help"


@contextmanager
def naming_flags(hint: str = HINT, names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Raise errors about fields as usage errors about flags.

    Args:
      hint: how to find valid values.
      names: the fields whose flags have other names.
    """
    try:
        yield
    except WeftError as error:
        if not error.offenders:
            raise
        raise field_error(UsageError, error.offenders, FLAGS, hint, names) from None


def validate_flags(command: Any, hint: str = HINT) -> None:
    """Raise a usage error that lists the flags of a command that are out of range."""
    with naming_flags(hint):
        validate(command)
