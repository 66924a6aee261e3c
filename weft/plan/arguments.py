"""The arguments of a call that is planned, searched or compared: a tuple of what the function takes."""

from __future__ import annotations

from typing import Any

from ..core.describe import describe
from ..core.errors import ProgramError
from ..core.tensor import Tensor


def check_args_is_tuple(args: Any, asked: str, hint: str) -> None:
    """An error unless they are a tuple or a list: a tensor alone, or a tree, could be taken apart as if it
    were one."""
    if isinstance(args, tuple | list):
        return
    what = f"one tensor, {describe(args)}" if isinstance(args, Tensor) else f"of type {type(args).__name__}"
    raise ProgramError(
        f"args is {what}",
        rule="args are a tuple of what the function takes",
        hint=hint,
    ).located(asked)
