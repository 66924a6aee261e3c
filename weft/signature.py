"""Signatures: what a program's arguments are apart from their values, and why two of them differ.

Tensors, arrays and numbers are inputs; truth values, strings, functions and what else there is are static.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from .errors import (
    TensorTypeError,
)
from .tensor import Tensor, short_type

NUMBERS = (int, float, complex, np.number)


class Static:
    """An argument that is part of the signature; 1, 1.0 and True are equal, and not the same."""

    def __init__(self, value: Any):
        self.value = value
        self._told = _told(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and bool(self._told == other._told)

    def __hash__(self) -> int:
        return hash(self._told)

    def __repr__(self) -> str:
        return repr(self.value)


def _told(value: Any) -> Any:
    """What tells a value from all others, those in tuples too."""
    if isinstance(value, tuple):
        return (type(value), *map(_told, value))
    # -0.0 == 0.0 and nan != nan; their text tells.
    return (type(value), repr(value) if isinstance(value, float | complex) else value)


def is_leaf(x: Any) -> bool:
    return isinstance(x, Tensor | Static)


def is_dynamic(leaf: Any, static_numbers: tuple[type, ...]) -> bool:
    """Tensors, arrays and numbers are inputs; truth values, strings, functions, … are static."""
    if isinstance(leaf, bool | Static):
        return False
    if isinstance(leaf, NUMBERS):
        return not isinstance(leaf, static_numbers)
    return isinstance(leaf, Tensor | jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def unhashable(key: list[Any]) -> TensorTypeError:
    shown = []
    for leaf in key:
        try:
            hash(leaf)
        except TypeError:
            shown.append(repr(leaf))
    return TensorTypeError(
        f"{', '.join(shown)} is a static argument, and can't be hashed",
        rule="what is not a tensor, an array or a number is part of the program's signature",
        hint="pass a tuple instead of a list or a set; lists and dicts of tensors need not be static",
    )


def _show_leaf(leaf: Any) -> str:
    if isinstance(leaf, tuple) and len(leaf) == 4:
        dims, dtype, _, role = leaf
        word = "" if role == "value" else f" ({role})"
        return f"{short_type(dtype)}[{', '.join(map(repr, dims))}]{word}"
    if isinstance(leaf, tuple) and len(leaf) == 3:
        shape, dtype, _ = leaf
        name = dtype.__name__ if isinstance(dtype, type) else short_type(dtype)
        return f"{name}{list(shape)}" if shape else name
    return f"static {leaf!r}"


def shown(key: Any) -> str:
    """A signature as text."""
    return ", ".join(_show_leaf(leaf) for leaf in key[1:])


def reason(key: Any, before: list[Any]) -> str:
    """Why a signature needs a trace: what is new in it."""
    if not before:
        return "first call"
    near = [k for k in before if k[0] == key[0]]
    if not near:
        return "the arguments have another structure"
    changed = min(([(a, b) for a, b in zip(k[1:], key[1:], strict=True) if a != b] for k in near), key=len)
    return "changed " + ", ".join(f"{_show_leaf(a)} → {_show_leaf(b)}" for a, b in changed)
