"""Tensor: an array whose dimensions have names.

Outside programs a tensor is whole: `storage` is the array at rest, padded where a dim is split unevenly,
and `array` its true size. Inside a program a tensor is one device's slice, and its array varies over
exactly the axes that split it, its pending axes, and those of an enclosing `vmap`.

A tensor inside a program may be in another *form* than its layout says:

- `pending`: axes over which the slices still have to be added up;
- `splits`: the axes that split each dim now; more than the layout wants is a gather held back, fewer
  is a slice not yet taken.

`core/forms.py` brings it into the form that an op needs, with the fewest bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import jax
import numpy as np

from . import context
from .dims import Dim, format_dims, select_dims
from .errors import ProgramError, ShapeError, TensorTypeError, WeftError
from .layout import Layout, Splits
from .mesh import Mesh
from .shapes import expected_shape, shape_mismatch_error, true_shape
from .types import weak_type

Function = TypeVar("Function", bound=Callable[..., Any])
DTYPE_PREFIXES = {
    "float": "f",
    "bfloat": "bf",
    "int": "i",
    "uint": "u",
    "complex": "c",
    "bool": "bool",
}


MAX_ENTRY_CHARS = (
    300  # characters, from which on the entries of a list, tuple or dict are left out of messages
)


def format_call(name: str, args: Any, kwargs: Any) -> str:
    """`einsum(f32[batch=64, io=8], f32[io=8], out=[…])`, for messages."""

    def shown(x: Any) -> str:
        if isinstance(x, Tensor):
            return describe(x)
        if isinstance(x, list | tuple):
            text = ", ".join(map(shown, x))
            return f"[{text}]" if len(text) < MAX_ENTRY_CHARS else "[…]"
        if isinstance(x, dict):
            text = ", ".join(f"{k}: {shown(v)}" for k, v in x.items())
            return f"{{{text}}}" if len(text) < MAX_ENTRY_CHARS else "{…}"
        if isinstance(x, slice):
            ends = [
                "" if n is None else "…" if context.is_traced(n) else str(n)
                for n in (x.start, x.stop, x.step)
            ]
            return ":".join(ends if x.step is not None else ends[:2])
        if hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type):  # np.float32 is one
            kind = "key" if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) else "array"
            return f"{kind} of shape {tuple(x.shape)}" if x.shape or kind == "array" else kind
        if type(x).__repr__ is object.__repr__:  # which has an address in it
            return f"{type(x).__name__}(…)"
        text = getattr(x, "__name__", None) or repr(x)
        if len(text) < 60 and "\n" not in text:
            return text
        return f"{type(x).__name__}(…)" if dataclasses.is_dataclass(x) else f"{text[:50]}…"

    parts = [shown(a) for a in args] + [f"{k}={shown(v)}" for k, v in kwargs.items()]
    return f"{name}({', '.join(parts)})"


def reports_call(fn: Function, before: str = "") -> Function:
    """Let the errors of a public function say what was asked, and on which line."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except WeftError as error:
            error.located(format_call(before + getattr(fn, "__name__", "function"), args, kwargs))
            raise

    return call  # type: ignore[return-value]


class Tensor:
    """An array with named dims. Make one with `wf.tensor(array, dims)`.

    >>> import weft as wf, numpy as np
    >>> x = wf.tensor(np.arange(6.0).reshape(2, 3), "a=2 b=3")
    >>> x.dims
    (a=2, b=3)
    >>> (x + wf.sum(x, "b")).numpy("b", "a")[0].tolist()
    [3.0, 15.0]
    """

    __slots__ = (
        "_cast_of",
        "_held",
        "_owner",
        "_watch",
        "dims",
        "layout",
        "mesh",
        "origin",
        "pending",
        "role",
        "splits",
    )
    __array_priority__ = 1000  # NumPy scalars leave `scalar * tensor` to us

    _held: Any  # the array, for looking at its type or identity only
    _owner: int  # the serial number of a slice's program, 0 if not known
    _watch: Any  # called when the array is used; how `grad` knows which forms of an argument were
    _cast_of: Tensor | None  # the parameter that this is a narrower cast of
    dims: tuple[Dim, ...]
    role: str
    mesh: Mesh | None
    layout: Layout | None
    splits: Splits | None  # None: a whole tensor, outside programs
    pending: frozenset[str]
    origin: str  # the op that a pending sum comes from

    def __init__(
        self,
        array: Any,
        dims: tuple[Dim, ...],
        *,
        role: str = "value",
        mesh: Mesh | None = None,
        layout: Layout | None = None,
        splits: Splits | None = None,
        pending: frozenset[str] = frozenset(),
    ):
        self._held, self._watch, self._cast_of, self.dims, self.role = array, None, None, dims, role
        self.mesh, self.layout, self.splits, self.pending = mesh, layout, splits, pending
        self.origin = ""
        program = context.current() if splits is not None else None
        self._owner = program.serial if program is not None else 0

    @property
    def _array(self) -> Any:
        """The array, to be used in a computation."""
        if self._watch is not None:
            self._watch()
        return self._held

    # Looking

    @property
    def is_slice(self) -> bool:
        """Whether this is one device's slice, inside a program."""
        return self.splits is not None

    @property
    def dtype(self) -> Any:
        """The type of the elements."""
        return self._held.dtype

    @property
    def weak_type(self) -> bool:
        """Whether the type gives way to that of another operand, as the types of Python's numbers do."""
        return weak_type(self._held)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.dims)

    @property
    def size(self) -> int:
        """The true number of elements."""
        return int(np.prod([dim.size for dim in self.dims], dtype=object)) if self.dims else 1

    @property
    def storage(self) -> Any:
        """The array at rest, padding included."""
        check_shape(self)
        return self._settled()._array

    @property
    def array(self) -> Any:
        """The whole array in its true size; inside a program this device's slice."""
        check_shape(self)
        if self.is_slice:
            return self._settled()._array
        shape = true_shape(self.dims)
        if tuple(self._array.shape) == shape:
            return self._array
        return block_on_cpu(self._array[tuple(slice(size) for size in shape)])

    @reports_call
    def numpy(self, *order: Any) -> np.ndarray:
        """A NumPy array with the dims in the order given, by default the tensor's own.

        >>> import weft as wf
        >>> wf.arange(wf.Dim("a", 3)).numpy("a").tolist()
        [0, 1, 2]
        """
        if self.is_slice or context.is_traced(self._held):
            raise ProgramError(
                f"{describe(self)} has no values yet: it is inside a program",
                rule="a program is traced before it runs, so values can't be looked at",
                hint="return the tensor from the program, or print it with wf.debug(x)",
            )
        check_has_values(self)
        check_shape(self)
        order = order or self.dims
        wanted = select_dims(self.dims, order)
        if len(wanted) != len(self.dims):
            raise ShapeError(
                f"[{format_dims(wanted)}] are not all dims of [{format_dims(self.dims)}]",
                rule="numpy() takes every dim of the tensor once, or none for its own order",
                hint=f"missing: {', '.join(d.name for d in self.dims if d not in wanted)}",
            )
        storage = np.asarray(self._array)
        whole = storage[tuple(slice(dim.size) for dim in self.dims)]
        return whole.transpose([self.dims.index(dim) for dim in wanted])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    @reports_call
    def item(self) -> Any:
        """The one element as a Python number."""
        if self.size != 1:
            raise ShapeError(
                f"{describe(self)} has {self.size} elements",
                rule="item(), bool(), int() and float() are for a tensor with one element",
                hint="reduce it first (wf.sum, wf.any, wf.all), or use .numpy()",
            )
        return self.numpy().item()

    def astype(self, dtype: Any) -> Tensor:
        """The same values as another dtype."""
        return _ops().astype(self, dtype)

    def rename(self, **names: str) -> Tensor:
        """The same values with dims renamed: `x.rename(batch="rows")`."""
        return _ops().rename(self, names)

    def __getitem__(self, where: Any) -> Tensor:
        return _ops().index(self, where)

    def __repr__(self) -> str:
        text = describe(self)
        shape = getattr(self._held, "shape", None)
        if shape is None:
            return f"{text} holding {self._held!r}"
        if shape != _needed_shape(self):
            return f"{text} holding an array of shape {shape}"
        if not self.is_slice and not context.is_traced(self._held):
            if isinstance(self._array, jax.ShapeDtypeStruct):
                return text
            if isinstance(self._array, jax.Array) and self._array.is_deleted():
                return f"{text}, donated to a program"
            if getattr(self._array, "is_fully_addressable", True):
                shown = np.array2string(self.numpy(), threshold=20, edgeitems=2, precision=4, separator=", ")
                return f"{text} {shown}" if "\n" not in shown else f"{text}\n{shown}"
        return text

    def __bool__(self) -> bool:
        return bool(self._scalar("bool"))

    def __int__(self) -> int:
        return int(self._scalar("int"))

    def __float__(self) -> float:
        return float(self._scalar("float"))

    def __format__(self, form: str) -> str:
        return format(self._scalar("number") if form else str(self), form)

    def _scalar(self, kind: str) -> Any:
        if self.is_slice or context.is_traced(self._held):
            raise ProgramError(
                f"a Python {kind} is wanted of {describe(self)}, which has no value yet",
                rule="inside a program Python's if and while can't depend on a tensor's values",
                hint="use wf.where, wf.cond or wf.while_loop; or pass the value as a static argument",
            ).located(format_call(kind, (self,), {}))
        return self.item()

    def _settled(self) -> Tensor:
        if self.splits is None:
            return self
        from .forms import materialize

        return materialize(self)

    # Arithmetic, broadcasting by name

    def __add__(self, other: Any) -> Tensor:
        return _ops().add(self, other)

    def __radd__(self, other: Any) -> Tensor:
        return _ops().add(other, self)

    def __sub__(self, other: Any) -> Tensor:
        return _ops().subtract(self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return _ops().subtract(other, self)

    def __mul__(self, other: Any) -> Tensor:
        return _ops().multiply(self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return _ops().multiply(other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return _ops().divide(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return _ops().divide(other, self)

    def __floordiv__(self, other: Any) -> Tensor:
        return _ops().floor_divide(self, other)

    def __rfloordiv__(self, other: Any) -> Tensor:
        return _ops().floor_divide(other, self)

    def __mod__(self, other: Any) -> Tensor:
        return _ops().remainder(self, other)

    def __rmod__(self, other: Any) -> Tensor:
        return _ops().remainder(other, self)

    def __pow__(self, other: Any) -> Tensor:
        return _ops().power(self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return _ops().power(other, self)

    def __neg__(self) -> Tensor:
        return _ops().negative(self)

    def __pos__(self) -> Tensor:
        return self

    def __abs__(self) -> Tensor:
        return _ops().abs(self)

    def __invert__(self) -> Tensor:
        return _ops().bitwise_not(self)

    def __and__(self, other: Any) -> Tensor:
        return _ops().bitwise_and(self, other)

    def __rand__(self, other: Any) -> Tensor:
        return _ops().bitwise_and(other, self)

    def __or__(self, other: Any) -> Tensor:
        return _ops().bitwise_or(self, other)

    def __ror__(self, other: Any) -> Tensor:
        return _ops().bitwise_or(other, self)

    def __xor__(self, other: Any) -> Tensor:
        return _ops().bitwise_xor(self, other)

    def __rxor__(self, other: Any) -> Tensor:
        return _ops().bitwise_xor(other, self)

    def __lt__(self, other: Any) -> Tensor:
        return _ops().less(self, other)

    def __le__(self, other: Any) -> Tensor:
        return _ops().less_equal(self, other)

    def __gt__(self, other: Any) -> Tensor:
        return _ops().greater(self, other)

    def __ge__(self, other: Any) -> Tensor:
        return _ops().greater_equal(self, other)

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return _ops().equal(self, other)

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return _ops().not_equal(self, other)

    def __matmul__(self, other: Any) -> Tensor:
        raise TensorTypeError(
            "@ does not say which dims to sum",
            rule="tensors are multiplied by name: einsum sums the dims that are not in out=",
            hint="wf.einsum(x, w, out=[...]), or wf.einsum(x, w, reduce=[...])",
        ).located(format_call("matmul", (self, other), {}))

    __hash__ = None  # type: ignore[assignment]


def _ops() -> Any:
    import weft  # the ops are above this module, which they import

    return weft


def block_on_cpu(array: Any) -> Any:
    """The array when it is there. Virtual CPU devices deadlock when calls pile up."""
    if context.is_traced(array) or len(array.sharding.device_set) == 1:
        return array
    return jax.block_until_ready(array) if jax.default_backend() == "cpu" else array


def _needed_shape(t: Tensor) -> tuple[int, ...]:
    return expected_shape(t.dims, t.role, t.mesh, t.layout, t.splits)


def check_shape(t: Tensor) -> None:
    """An error if a tensor's array has another shape than its dims need; see `core/shapes.py`."""
    needed = _needed_shape(t)
    if getattr(t._held, "shape", None) != needed:
        raise shape_mismatch_error(describe(t), t.dims, t._held, needed, t.is_slice)


def check_has_values(*leaves: Any) -> None:
    """An error if something is a spec."""
    specs = [x for x in leaves if isinstance(getattr(x, "_held", x), jax.ShapeDtypeStruct)]
    if specs:
        first = describe(specs[0]) if isinstance(specs[0], Tensor) else repr(specs[0])
        more = len(specs) - 1
        raise ProgramError(
            f"{first} and {more} more are specs: they have no values"
            if more
            else f"{first} is a spec: it has no values",
            rule="a spec has dims and a type, for planning; to compute takes tensors with values",
            hint="program.plan(...), .jaxpr(...) and .compile(...) take specs; make values with "
            "wf.tensor(array, dims) or wf.zeros(dims)",
        )


def is_tensor(x: Any) -> bool:
    """Whether x is a Tensor (for `is_leaf=` of JAX's tree functions).

    >>> import jax, weft as wf
    >>> jax.tree.map(lambda t: t.dims, {"w": wf.ones("a=2 b=3")}, is_leaf=wf.is_tensor)
    {'w': (a=2, b=3)}
    """
    return isinstance(x, Tensor)


def short_dtype(dtype: Any) -> str:
    """`f32`, `bf16`, `i32`, `bool`, …"""
    name = np.dtype(dtype).name if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else "key"
    word = name.rstrip("0123456789")
    return DTYPE_PREFIXES.get(word, word) + name[len(word) :]


def describe(t: Tensor) -> str:
    """`f32[batch=64/data·4, d_model=256]`, with pending sums behind it."""
    mesh, splits = t.mesh, t.splits
    if splits is None:
        splits = stored_splits(t) if mesh is not None else ((),) * len(t.dims)
    parts = []
    for dim, axes in zip(t.dims, splits, strict=True):
        ways = f"/{'+'.join(axes)}·{mesh.ways(axes)}" if axes and mesh is not None else ""
        parts.append(f"{dim}{ways}")
    pending = f" pending sum over {', '.join(sorted(t.pending))}" if t.pending else ""
    kind = short_dtype(t._held.dtype) if hasattr(t._held, "dtype") else "?"
    return f"{kind}[{', '.join(parts)}]{pending}"


def stored_splits(t: Tensor) -> Splits:
    """How a whole tensor is split over its mesh."""
    if t.mesh is None or t.layout is None:
        return ((),) * len(t.dims)
    return t.layout.splits(t.dims, t.mesh, t.role)


# A pytree: one array leaf; dims, role, mesh and layout are static. JAX's caches go by tree and shapes:
# without mesh and layout in the static part, what was traced under one layout would be reused under
# another. Flattening settles a tensor, or `jax.tree.map(jnp.exp, x)` would work on a pending sum.


def _flatten(t: Tensor) -> tuple[tuple[Any], Any]:
    if t.splits is not None or (t.mesh is not None and _needed_shape(t) != true_shape(t.dims)):
        _reject_optax(t)
    # JAX fills trees with placeholders of its own, some of which are types; those have no form.
    is_array = hasattr(t._held, "dtype") and not isinstance(t._held, jax.core.ShapedArray)
    try:
        settled = t._settled() if is_array else t
    except jax.errors.UnexpectedTracerError:
        raise ProgramError(
            f"{describe(t)} leaves a function that JAX transforms",
            rule="jax.jvp flattens the results of a function when its trace is over, and a pending sum can't "
            "be resolved then",
            hint="wf.jvp(f, primals, tangents) resolves it in time",
        ).located("jax.jvp") from None
    return (settled._array,), (t.dims, t.role, t.mesh, t.layout, t.splits is not None)


def _reject_optax(t: Tensor) -> None:
    """An error if it is optax that flattens a tensor whose array is a slice, or padded."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(12):
        if frame is None or frame.f_globals.get("__name__", "").partition(".")[0] == "optax":
            break
        frame = frame.f_back
    else:
        return
    if frame is not None:
        while frame.f_back is not None and frame.f_back.f_globals.get("__name__", "").startswith(
            ("optax", "jax")
        ):
            frame = frame.f_back
        what, why, more = (
            (
                "slices inside a program",
                "inside a program those are slices, and a global norm, say, would be that of one slice",
                "",
            )
            if t.is_slice
            else (
                f"{describe(t)}, which is stored with padding",
                "a shape, a mean or a random draw there would include the padding",
                "; or take the tensors off the mesh: wf.place(params, None, None)",
            )
        )
        raise ProgramError(
            f"an optax transformation was called on {what}",
            rule=f"optax sees plain arrays: {why}",
            hint="wrap it: opt = wf.optimizer(tx); state = opt.init(params); "
            f"params, state = opt.apply(grads, state, params){more}",
        ).located(f"optax's {frame.f_code.co_name.removesuffix('_fn')}")


def _flatten_with_keys(t: Tensor) -> tuple[tuple[Any], Any]:
    (array,), static = _flatten(t)
    return ((jax.tree_util.GetAttrKey("array"), array),), static


def _unflatten(static: Any, children: Any) -> Tensor:
    dims, role, mesh, layout, is_slice = static
    splits = layout.splits(dims, mesh, role) if is_slice else None
    (array,) = children
    return Tensor(array, dims, role=role, mesh=mesh, layout=layout, splits=splits)


jax.tree_util.register_pytree_with_keys(Tensor, _flatten_with_keys, _unflatten, _flatten)
