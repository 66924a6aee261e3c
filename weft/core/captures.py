"""Captures: a cache key for a Python function, so that eager control flow compiles once.

`scan(f, ...)` outside a program is a program of one op. Its trace can be reused if `f` would trace to the
same operations again. A function is determined by its code and by the values it reaches: closure cells,
defaults, and, in user code, globals. `CapturedFunction(f)` collects them:

- tensors become inputs: only their dims, dtype, role and placement are in the key;
- Python values (numbers, strings, tuples, dicts, dataclasses, other functions, ...) are in the key, so a
  changed value causes a retrace. A container that reaches no tensor is also compared by identity, because a
  function may append to it;
- modules and classes of libraries, compiled functions and JAX arrays are compared by identity.

A value that can't be compared (an instance of a plain class, a user's module, a custom_vjp, whose rules JAX
calls later) makes the function *uncacheable*: it has no key, and every call is traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import enum
import functools
import threading
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from .dims import Dim
from .errors import is_library, is_library_module
from .jax_compat import Tracer
from .layout import Layout
from .mesh import Mesh
from .signature import Static
from .tensor import Tensor
from .types import PyTree, weak_type

VALUE_TYPES = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), np.generic, np.dtype, range)
BY_VALUE = (Dim, Mesh, Layout, enum.Enum)
BUILTIN = (tuple, list, dict, set, frozenset)
MUTABLE = (list, dict, set)
DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
# Their attributes never change, and the functions they wrap are compiled: identity is enough.
COMPILED_FUNCTIONS = (np.ufunc, type(np.sum))
# With these a function reaches values that its code does not name, so no key can cover them.
DYNAMIC_LOOKUPS = {"eval", "exec", "globals", "locals", "vars", "__import__"}
# A NumPy array is mutable, so the key has a copy of its bytes, which is hashed at each call.
MAX_COMPARED_BYTES = 1 << 16


class Uncacheable(Exception):
    """A function reaches a value that can't be compared."""


class CapturedFunction:
    """A function passed to an eager op, with a key and the tensors it captures.

    Attributes:
      fn: the function.
      key: equal for functions that trace to the same operations; None if that can't be determined.
      tensors: the captured tensors; functions with equal keys have them in the same order.
    """

    def __init__(self, fn: Callable[..., PyTree]):
        self.fn = fn
        self.tensors: list[Tensor] = []
        self._seen: dict[int, tuple[int, Any]] = {}
        self.key: Any
        try:
            self.key = self._key(fn)
            hash(self.key)
        except (Uncacheable, TypeError):  # TypeError: a static field of a pytree can't be hashed
            self.key, self.tensors = None, []
        self._seen.clear()

    def __repr__(self) -> str:
        return getattr(self.fn, "__name__", None) or repr(self.fn)

    def _key(self, value: object) -> Hashable:
        if isinstance(value, VALUE_TYPES):
            return Static(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, jax.Array | np.ndarray):
            return _array_key(value)
        if isinstance(value, BY_VALUE):
            return value
        if id(value) in self._seen:  # a recursive function reaches itself, and would never end
            return ("seen", self._seen[id(value)][0])
        # The value is kept alive: the id of a dead object may be reused.
        self._seen[id(value)] = len(self._seen), value
        return self._structure(value)

    def _structure(self, value: Any) -> Hashable:
        """The key of a value that reaches other values."""
        if isinstance(value, types.FunctionType):
            return (value.__code__, *map(self._key, _reached(value)))
        if isinstance(value, types.MethodType):
            return ("method", self._key(value.__func__), self._key(value.__self__))
        if type(value) is functools.partial:
            return ("partial", *map(self._key, (value.func, value.args)), *self._fields(value.keywords))
        if isinstance(value, type):
            return (_Identity(value), *self._fields(_attributes(value)))
        if isinstance(value, slice):
            return ("slice", *map(self._key, (value.start, value.stop, value.step)))
        if isinstance(value, staticmethod | classmethod):
            return (type(value), self._key(value.__func__))
        if isinstance(value, property):
            return ("property", *map(self._key, (value.fget, value.fset, value.fdel)))
        if _is_fixed(value):
            return _Identity(value)
        if hasattr(value, "reached_values"):
            return (type(value), *map(self._key, value.reached_values()))
        before = len(self.tensors)
        key = (self._key(type(value)), self._contents(value))
        is_mutable = isinstance(value, MUTABLE) and len(self.tensors) == before
        return (key, _Identity(value)) if is_mutable else key

    def _contents(self, value: Any) -> Hashable:
        if type(value) in (set, frozenset):
            return frozenset(map(self._key, value))
        if type(value) is dict:  # in insertion order, which a trace may depend on
            return tuple(self._fields(value))
        tree: Any
        children, tree = jax.tree.flatten(value, is_leaf=lambda one: one is not value)
        is_leaf = len(children) == 1 and children[0] is value
        if dataclasses.is_dataclass(value):
            # A function may assign to the fields of a mutable object, and a cached program would not.
            kind: Any = type(value)
            if is_leaf and not kind.__dataclass_params__.frozen:
                raise Uncacheable
            # Static fields too: a treedef compares them by ==, and 1 == True.
            return tuple(self._fields(vars(value)))
        if is_leaf:
            raise Uncacheable
        # The static data of a user's class may be anything, a function that captures tensors included.
        static = None if type(value) in BUILTIN else self._key(tree.node_data()[1])
        return (len(children), static, *map(self._key, children))

    def _fields(self, named: Mapping[Any, Any]) -> list[Any]:
        return [(self._key(name), self._key(value)) for name, value in named.items()]

    def _tensor(self, t: Tensor) -> Hashable:
        if t.is_slice or isinstance(t._data, jax.ShapeDtypeStruct):
            raise Uncacheable
        self.tensors.append(t)
        # Captured tensors are identified by their arrays: two names of one array are one input.
        first = next(n for n, other in enumerate(self.tensors) if other._data is t._data)
        return (first, t.dims, t.dtype, weak_type(t._data), t.role, t.placement)


class _BoundFunctions(threading.local):
    def __init__(self) -> None:
        self.calls: list[list[CapturedFunction]] = []


_BOUND = _BoundFunctions()


@contextlib.contextmanager
def bind_functions(functions: list[CapturedFunction]) -> Iterator[None]:
    """Call an eager program with these functions.

    A cached program must not keep a function alive, nor the tensors that it captures. If jit retraces the
    program, it looks up the functions of the current call.
    """
    _BOUND.calls.append(functions)
    try:
        yield
    finally:
        _BOUND.calls.pop()


def bound_function(position: int) -> CapturedFunction:
    """The function at a position among those of the current call."""
    return _BOUND.calls[-1][position]


class _Identity:
    """Wraps an object so that it is equal to itself only."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _array_key(array: jax.Array | np.ndarray) -> Hashable:
    if isinstance(array, Tracer):
        raise Uncacheable
    if isinstance(array, jax.Array):  # immutable, so its identity is enough
        return _Identity(array)
    if array.nbytes > MAX_COMPARED_BYTES or array.dtype.hasobject:
        raise Uncacheable
    return (array.shape, array.dtype.str, array.tobytes())


def _is_fixed(value: object) -> bool:
    """Whether an object never changes its behavior: a library's module, a builtin, a compiled function."""
    if isinstance(value, types.ModuleType):
        return is_library_module(value.__name__)
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, types.ModuleType)
    is_jax = type(value).__module__.partition(".")[0] in ("jax", "jaxlib")
    return isinstance(value, COMPILED_FUNCTIONS) or (is_jax and callable(value))


def _attributes(cls: type) -> dict[str, Any]:
    """The attributes of a user's class and its bases, without those of libraries, which don't change."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if not is_library_module(base.__module__):
            found |= {
                name: _unwrapped(value) for name, value in vars(base).items() if _is_relevant(name, value)
            }
    return found


def _is_relevant(name: str, value: object) -> bool:
    """Whether an attribute of a class affects behavior: of those that Python adds, only functions do."""
    return not isinstance(value, DESCRIPTORS) and (
        not name.startswith(("__", "_abc_")) or isinstance(value, types.FunctionType)
    )


def _unwrapped(value: object) -> Any:
    """The method itself: equinox.Module wraps methods in its own objects."""
    is_wrapper = type(value).__module__.partition(".")[0] == "equinox"
    return getattr(value, "method", value) if is_wrapper else value


def _reached(fn: types.FunctionType) -> Iterator[Any]:
    """The values that a function can reach besides its arguments."""
    yield fn.__defaults__
    for name, value in (fn.__kwdefaults__ or {}).items():
        yield name
        yield value
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell: its variable is not assigned yet, so there is nothing to compare
            yield None
    # A library's globals don't change, and following them would reach half of Python.
    if is_library(fn.__code__.co_filename):
        return
    names, imports = _external_names(fn.__code__)
    if DYNAMIC_LOOKUPS & {*names} or not all(map(is_library_module, imports)):
        raise Uncacheable
    for name in names:
        yield fn.__globals__.get(name)
    for name, value in fn.__dict__.items():
        yield name
        yield value


@functools.lru_cache(maxsize=4096)
def _external_names(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The globals that code reads and the modules that it imports, including its nested functions."""
    names, imports = set(), set()
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(one.argval)
        elif one.opname == "IMPORT_NAME":
            imports.add(one.argval or "__main__")  # a relative import has no name here; it is user code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, more = _external_names(constant)
            names |= {*inner}
            imports |= {*more}
    return tuple(sorted(names)), tuple(sorted(imports))
