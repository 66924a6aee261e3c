"""Signatures: the static part of a program's arguments, and why two signatures differ.

Tensors, arrays and numbers are inputs. Plain values (booleans, strings, dtypes, dims, functions, …) are
static. Any other object must be declared `static=` and be compared by value. An object that is compared by
identity may have different values at the next call, and the program would keep using those of the first
trace.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import KeyPath

from .describe import short_dtype
from .dims import Dim
from .errors import ProgramError, TensorTypeError, is_library_module
from .layout import Layout
from .mesh import Mesh
from .tensor import Tensor

NUMBER_TYPES = (int, float, complex, np.number)
# Listed one by one: the base class that JAX gives three of them also covers leaked tracers.
CONCRETIZATION_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
# A change of one of these is a new value, which a signature notices: they are immutable and compared by
# value.
STATIC_TYPES = (
    bool,
    np.bool_,
    str,
    bytes,
    range,
    enum.Enum,
    np.dtype,
    Dim,
    Mesh,
    Layout,
    type(...),
    type(None),
)
FUNCTION_TYPES = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, np.ufunc)
# Callables of these packages may be objects: jax.nn.relu, a jitted function, a program.
LIBRARIES = ("jax", "jaxlib", "numpy", "functools", "weft")


class Static:
    """An argument that is part of the signature. 1, 1.0 and True are equal in Python, but distinct here."""

    def __init__(self, value: Any):
        self.value = value
        self._key = _exact_key(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and bool(self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return repr(self.value)


def _exact_key(value: object) -> Any:
    """A key that includes the types of a value and of its parts."""
    if isinstance(value, tuple):
        return (type(value), *map(_exact_key, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Dim):
        compared = [field.name for field in dataclasses.fields(value) if field.compare]
        return (type(value), value, *(_exact_key(getattr(value, name)) for name in compared))
    # -0.0 == 0.0 and nan != nan, so floats are compared by their repr.
    return (type(value), repr(value) if isinstance(value, float | complex) else value)


def is_argument_leaf(x: object) -> bool:
    """Whether x is a leaf of the arguments' tree, rather than a node or an array."""
    return isinstance(x, Tensor | Static)


def is_dynamic(leaf: object, static_numbers: tuple[type, ...]) -> bool:
    """Whether a leaf is an input: a tensor, array or number, not a boolean, string, function, …"""
    # bool is a subclass of int, so it is tested first.
    if isinstance(leaf, bool | Static):
        return False
    if isinstance(leaf, NUMBER_TYPES):
        return not isinstance(leaf, static_numbers)
    return isinstance(leaf, Tensor | jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def is_implicitly_static(x: object) -> bool:
    """Whether x is a valid static argument without being declared `static=`."""
    if isinstance(x, type):  # a dtype, for example; the attributes of a user's class may change
        return is_library_module(x.__module__)
    return isinstance(x, STATIC_TYPES) or _is_function(x)


def _is_function(x: object) -> bool:
    """Whether x is a function, compared by identity, that is not bound to a mutable object."""
    if isinstance(x, types.MethodType):
        return _is_by_value(x.__self__)
    if isinstance(x, functools.partial):
        parts = (x.func, *x.args, *x.keywords.values())
        return all(_is_hashable(part) and _is_by_value(part) for part in parts)
    return isinstance(x, FUNCTION_TYPES) or (
        callable(x) and type(x).__module__.partition(".")[0] in LIBRARIES
    )


def _is_hashable(x: object) -> bool:
    """Whether x is hashable, which a value with a list in it is not. Tensors count: they are immutable."""
    try:
        hash(x)
    except TypeError:
        return isinstance(x, Tensor)
    return True


def _is_by_value(x: object) -> bool:
    """Whether x and its parts are compared by value, so that a change to them changes the signature."""
    if is_implicitly_static(x) or isinstance(x, (type, *NUMBER_TYPES, Tensor, jax.Array)):
        return True
    if isinstance(x, tuple | frozenset):
        return all(map(_is_by_value, x))
    if isinstance(x, types.MethodType | functools.partial) or type(x).__eq__ is object.__eq__:
        return False
    fields = dataclasses.fields(x) if dataclasses.is_dataclass(x) else ()
    return all(_is_by_value(getattr(x, field.name)) for field in fields if field.compare)


def check_arguments(fn: Callable[..., Any], leaves: list[tuple[KeyPath, Any]]) -> None:
    """Raise an error for a leaf of (args, kwargs) whose current values a trace would freeze."""
    for path, leaf in leaves:
        if isinstance(leaf, Static):
            if not _is_by_value(leaf.value):
                raise _compared_by_identity(_argument_name(fn, path), leaf.value)
        elif not is_dynamic(leaf, ()) and not is_implicitly_static(leaf):
            raise _not_a_pytree(_argument_name(fn, path), leaf)


def _argument_name(fn: Callable[..., Any], path: KeyPath) -> str:
    """The user's name of a leaf of (args, kwargs): `batch['x']`."""
    first: Any
    which, first, *rest = path
    if which.idx:
        name = first.key
    else:
        names = _parameters(fn)
        name = names[first.idx] if first.idx < len(names) else f"argument {first.idx}"
    return f"{name}{jax.tree_util.keystr(tuple(rest))}"


def _parameters(fn: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters that can be passed by position."""
    try:
        found = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature that Python can read
        return []
    return [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _not_a_pytree(name: str, x: object) -> TensorTypeError:
    bound = isinstance(x, types.MethodType | functools.partial)
    argument = name.partition("[")[0].partition(".")[0]
    if bound:
        fix = "pass a plain function, and the values it needs as arguments"
    elif type(x).__module__ == "builtins":
        fix = "pass a list, tuple or dict"
    else:
        fix = "make its class an equinox.Module, or register it with jax.tree_util.register_dataclass; or "
        fix += "pass the values themselves"
    return TensorTypeError(
        f"{name} is a {type(x).__name__}{' bound to an object' * bound}, which is not a pytree",
        rule="arguments are pytrees of tensors, arrays and numbers; the values in any other object would be "
        "frozen when the program is traced, and later changes ignored",
        hint=f'{fix}; or declare static=("{argument}",) if it is compared by value, as a frozen dataclass is',
    )


def _compared_by_identity(name: str, x: object) -> TensorTypeError:
    return TensorTypeError(
        f"the static argument {name} is a {type(x).__name__}, which is, or contains, an object compared "
        "by identity",
        rule="a static argument is part of the signature: if its values change, the program is retraced",
        hint="make its class a dataclass with frozen=True, or define __eq__ and __hash__; or make it a "
        "pytree and don't declare it static",
    )


def check_result(x: object) -> None:
    """Raise an error for a returned object with mutable values: each call would return the first trace's."""
    if _is_by_value(x) and not isinstance(x, Iterator | types.CoroutineType):
        return
    if isinstance(x, types.CoroutineType):
        x.close()  # otherwise Python warns that it was never awaited
    raise TensorTypeError(
        f"the program returns a {type(x).__name__}",
        rule="a program returns a pytree of tensors, arrays, numbers and static values",
        hint="return a list, tuple or dict of tensors; or make the object's class an equinox.Module",
    )


def number_names(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """The names of the arguments of a call that are Python numbers."""
    named = {**dict(zip(_parameters(fn), args, strict=False)), **kwargs}
    return [name for name, given in named.items() if type(given) in (int, float)]


def unknown_value_error(error: Exception, numbers: list[str]) -> ProgramError:
    """The error for Python code that needs the value of a tracer.

    Args:
      error: JAX's error.
      numbers: the arguments that could be declared static.
    """
    names = ", ".join(f'"{name}"' for name in numbers) + "," * (len(numbers) == 1)
    declare = f"declare the number static: wf.spmd(fn, mesh, layout, static=({names})); " if numbers else ""
    return ProgramError(
        "this Python code needs the value of a program input, which is not known while the program is traced",
        f"JAX: {str(error).splitlines()[0].strip()}",
        rule="numbers and arrays passed to a program are inputs, which have no value yet: if, while, range, "
        "int() and sizes can't depend on them",
        hint=f"{declare}to branch or loop on values use wf.where, wf.cond, wf.while_loop or wf.fori_loop",
    )


def unhashable_error(key: list[Any]) -> TensorTypeError:
    """The error for a signature with values that can't be hashed."""
    unhashable = []
    for leaf in key:
        try:
            hash(leaf)
        except TypeError:
            unhashable.append(repr(leaf))
    return TensorTypeError(
        f"{', '.join(unhashable)} is a static argument, and can't be hashed",
        rule="an argument that is not a tensor, an array or a number is part of the program's signature",
        hint="pass a tuple instead of a list or a set, a frozen dataclass instead of a mutable one; "
        "lists and dicts of tensors need not be static",
    )


def _format_leaf(leaf: object) -> str:
    if isinstance(leaf, tuple) and len(leaf) == 4:
        dims, dtype, _, role = leaf
        word = "" if role == "value" else f" ({role})"
        return f"{short_dtype(dtype)}[{', '.join(map(repr, dims))}]{word}"
    if isinstance(leaf, tuple) and len(leaf) == 3:
        shape, dtype, _ = leaf
        name = dtype.__name__ if isinstance(dtype, type) else short_dtype(dtype)
        return f"{name}{list(shape)}" if shape else name
    return f"static {leaf!r}"


def format_signature(key: tuple[Any, ...]) -> str:
    """A signature as text."""
    return ", ".join(_format_leaf(leaf) for leaf in key[1:])


def retrace_reason(key: tuple[Any, ...], before: list[Any]) -> str:
    """Why a signature needs a trace: its difference from the most similar earlier one."""
    if not before:
        return "first call"
    # Leaves correspond only under the same tree structure, which is the first entry of a key.
    similar = [k for k in before if k[0] == key[0]]
    if not similar:
        return "the arguments have a different structure"
    changed = min(([(a, b) for a, b in zip(k[1:], key[1:], strict=True) if a != b] for k in similar), key=len)
    return "changed " + ", ".join(f"{_format_leaf(a)} → {_format_leaf(b)}" for a, b in changed)
