"""Describing tensors and calls in text: `f32[batch=64/data·4, d_model=256]`.

`repr`, errors, plans and docs use the same notation: a dim of size 64, split over axis `data`, 4 ways.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import jax
import numpy as np
from jax.typing import DTypeLike

from . import context
from .call_errors import raise_call_error
from .errors import WeftError
from .shapes import stored_splits
from .types import Function

if TYPE_CHECKING:
    from .tensor import Tensor

DTYPE_PREFIXES = {
    "float": "f",
    "bfloat": "bf",
    "int": "i",
    "uint": "u",
    "complex": "c",
    "bool": "bool",
}
MAX_ENTRY_CHARS = 300  # a list of all parameters of a model would bury the rest of a message


def short_dtype(dtype: DTypeLike) -> str:
    """`f32`, `bf16`, `i32`, `bool`, …"""
    name = np.dtype(dtype).name if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else "key"
    word = name.rstrip("0123456789")
    return DTYPE_PREFIXES.get(word, word) + name[len(word) :]


def describe(t: Tensor) -> str:
    """`f32[batch=64/data·4, d_model=256]`, followed by the axes of a pending sum."""
    mesh, splits = t.mesh, t.splits
    if splits is None:
        splits = stored_splits(t)
    parts = []
    for dim, axes in zip(t.dims, splits, strict=True):
        ways = f"/{'+'.join(axes)}·{mesh.ways(axes)}" if axes and mesh is not None else ""
        parts.append(f"{dim}{ways}")
    pending = f" pending sum over {', '.join(sorted(t.pending))}" if t.pending else ""
    # JAX fills trees with its own sentinels, which have no dtype.
    kind = short_dtype(t._data.dtype) if hasattr(t._data, "dtype") else "?"
    return f"{kind}[{', '.join(parts)}]{pending}"


def format_call(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """`einsum(f32[batch=64, io=8], f32[io=8], out=[…])`, for messages."""
    parts = [format_argument(a) for a in args] + [f"{k}={format_argument(v)}" for k, v in kwargs.items()]
    return f"{name}({', '.join(parts)})"


def format_argument(x: object) -> str:
    """An argument in short, for messages."""
    from .tensor import Tensor  # imported here because tensor.py imports this module

    if isinstance(x, Tensor):
        return describe(x)
    if isinstance(x, list | tuple):
        text = ", ".join(map(format_argument, x))
        return f"[{text}]" if len(text) < MAX_ENTRY_CHARS else "[…]"
    if isinstance(x, dict):
        text = ", ".join(f"{k}: {format_argument(v)}" for k, v in x.items())
        return f"{{{text}}}" if len(text) < MAX_ENTRY_CHARS else "{…}"
    if isinstance(x, bytes | bytearray):
        return "bytes"
    if isinstance(x, slice):
        ends = [
            "" if n is None else "…" if context.is_traced(n) else str(n) for n in (x.start, x.stop, x.step)
        ]
        return ":".join(ends if x.step is not None else ends[:2])
    # np.float32 is a type, and has a `shape` and a `dtype` all the same.
    # A declared parameter is a dataclass: it has no shape, and raises an error that says so.
    is_array = not isinstance(x, type) and not dataclasses.is_dataclass(x)
    if is_array and hasattr(x, "shape") and hasattr(x, "dtype"):
        kind = "key" if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) else "array"
        return f"{kind} of shape {tuple(x.shape)}" if x.shape or kind == "array" else kind
    text = getattr(x, "__name__", None) or repr(x)
    if " at 0x" in text.lower():  # an address
        return f"{type(x).__name__}(…)"
    if len(text) < 60 and "\n" not in text:
        return text
    return f"{type(x).__name__}(…)" if dataclasses.is_dataclass(x) else f"{text[:50]}…"


def reports_call(fn: Function, prefix: str = "") -> Function:
    """Decorate a public function so that its errors report the call and the user's line."""

    @functools.wraps(fn)
    def call(*args: object, **kwargs: object) -> object:
        try:
            return fn(*args, **kwargs)
        except WeftError as error:
            error.located(format_call(prefix + getattr(fn, "__name__", "function"), args, kwargs))
            raise
        except TypeError as error:
            raise_call_error(fn, prefix + getattr(fn, "__name__", "function"), args, kwargs, error)

    return cast(Function, call)
