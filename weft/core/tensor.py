"""Tensor: an array whose dimensions have names.

Outside programs a tensor is *global*: `storage` is its sharded array, padded where a dim is split unevenly,
and `array` has the true size. Inside a program a tensor is one device's *slice*. Its array varies over
exactly the axes that split it, its pending axes, and the axes of an enclosing `vmap`.

A slice need not be placed as its layout says:

- `pending`: axes over which the slices still have to be summed;
- `splits`: the axes that split each dim now. More axes than in the layout mean a delayed gather, fewer a
  slice that has not been taken yet.

`core/reshard.py` changes the placement to the one that an op needs, with the fewest bytes.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import jax
import numpy as np

from . import context
from .array_protocols import ArrayProtocols
from .call_errors import check_function, checks_arguments
from .context import active
from .describe import describe, format_call, reports_call
from .dims import Dim, DimsLike, format_dims, list_dims, select_dims
from .errors import ProgramError, ShapeError, TensorTypeError, WeftError
from .jax_compat import ShapedArray, has_trace
from .labels import OpLabel
from .layout import Layout, Placement, Splits
from .mesh import Mesh
from .methods import Methods
from .operators import Operators, public_ops
from .shapes import shape_mismatch_error, true_shape
from .types import PyTree, weak_type


class Tensor(Operators, Methods, ArrayProtocols):
    """An array with named dims. Create one with `wf.tensor(array, dims)`.

    Many ops are methods, too: `x.sum("batch")` is `wf.sum(x, "batch")`.

    Attributes:
      dims: the named dimensions.
      role: value, param or optimizer: which of the layout's rules apply.
      mesh, layout: where it is placed; None if it is not.
      splits: for a slice, the axes that split each dim; None for a global tensor.
      pending: the axes over which slices still have to be summed.
      origin: the label of the op that left the pending sum, or None.

    >>> import weft as wf, numpy as np
    >>> x = wf.tensor(np.arange(6.0).reshape(2, 3), "a=2 b=3")
    >>> x.dims
    (a=2, b=3)
    >>> (x + x.sum("b")).numpy("b a")[0].tolist()
    [3.0, 15.0]
    """

    __slots__ = (
        "_cast_of",
        "_data",
        "_owner",
        "_watch",
        "dims",
        "origin",
        "pending",
        "placement",
        "role",
        "splits",
    )

    # A computation calls `_read()`. Code that looks at the array's type or identity takes `_data`, which must
    # not count as a use: for a used variant `grad` sums a gradient, and a used carry of `scan` can't stay
    # pending.
    _data: Any
    # A set, and what a read adds to it.
    _watch: tuple[set[Any], Any] | None
    # The serial number of a slice's program, or 0. JAX reports a leaked tracer late, and in terms of its own.
    _owner: int
    # The parameter of which this is a narrower cast: `reshard` makes that one varying, so that its gradient
    # is summed in the wider type.
    _cast_of: Tensor | None
    dims: tuple[Dim, ...]
    role: str
    placement: Placement | None
    splits: Splits | None
    pending: frozenset[str]
    origin: OpLabel | None

    def __init__(
        self,
        array: Any,
        dims: tuple[Dim, ...],
        *,
        role: str = "value",
        placement: Placement | None = None,
        splits: Splits | None = None,
        pending: frozenset[str] = frozenset(),
    ):
        # Nothing is checked here: JAX rebuilds trees with sentinels in place of arrays (`core/shapes.py`).
        self._data, self._watch, self._cast_of, self.dims, self.role = array, None, None, dims, role
        self.placement, self.splits, self.pending = placement, splits, pending
        self.origin = None
        ctx = active.context if splits is not None else None
        self._owner = ctx.serial if ctx is not None else 0

    def _read(self) -> Any:
        """The array, for use in a computation."""
        if self._watch is not None:
            users, name = self._watch
            users.add(name)
        if isinstance(self._data, Placeholder):
            raise self._data.use_error()
        return self._data

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that it is placed on; None if it is not placed."""
        return None if self.placement is None else self.placement.mesh

    @property
    def layout(self) -> Layout | None:
        """The layout that it is placed with; None if it is not placed."""
        return None if self.placement is None else self.placement.layout

    @property
    def is_slice(self) -> bool:
        """Whether this is one device's slice, inside a program."""
        return self.splits is not None

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the elements."""
        return self._data.dtype

    @property
    def weak_type(self) -> bool:
        """Whether the dtype gives way to that of another operand, as the dtypes of Python numbers do."""
        return weak_type(self._data)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.dims)

    @property
    def size(self) -> int:
        """The number of elements, without padding."""
        # dtype=object: the product may exceed int64 in plans of large models.
        return int(np.prod([dim.size for dim in self.dims], dtype=object)) if self.dims else 1

    @property
    def storage(self) -> jax.Array:
        """The array as it is stored, padding included."""
        check_shape(self)
        return self._materialized()._read()

    @property
    def array(self) -> jax.Array:
        """The global array without padding; inside a program, this device's slice."""
        check_shape(self)
        if self.is_slice:
            return self._materialized()._read()
        shape = true_shape(self.dims)
        if tuple(self._read().shape) == shape:
            return self._read()
        return block_on_cpu(self._read()[tuple(slice(size) for size in shape)])

    @reports_call
    def numpy(self, *order: DimsLike) -> np.ndarray:
        """A NumPy array with the dims in the given order, by default the tensor's own.

        >>> import weft as wf
        >>> wf.zeros("a=3 b=2").numpy("b a").shape
        (2, 3)
        """
        if self.is_slice or context.is_traced(self._data):
            raise ProgramError(
                f"{describe(self)} has no values yet: it is inside a program",
                rule="a program is traced before it runs, so its values can't be read",
                hint="return the tensor from the program, or print it with wf.debug(x)",
            )
        check_has_values(self)
        check_shape(self)
        wanted = select_dims(self.dims, [d for dims in order for d in list_dims(dims)] or self.dims)
        if len(wanted) != len(self.dims):
            raise ShapeError(
                f"[{format_dims(wanted)}] are not all dims of [{format_dims(self.dims)}]",
                rule="numpy() takes every dim of the tensor once, or none for its own order",
                hint=f"missing: {', '.join(d.name for d in self.dims if d not in wanted)}",
            )
        storage = np.asarray(self._read())
        unpadded = storage[tuple(slice(dim.size) for dim in self.dims)]
        return unpadded.transpose([self.dims.index(dim) for dim in wanted])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def __array_function__(self, fn: Any, _: Any, args: PyTree, kwargs: PyTree) -> Any:
        # NumPy's functions call the methods of their names, `np.sum(x)` calls `x.sum(axis=None, …)`, unless
        # this method is defined. They compute with arrays.
        args, kwargs = tree_map(lambda x: x.numpy() if is_tensor(x) else x, (args, kwargs))
        return fn(*args, **kwargs)

    @reports_call
    def item(self) -> Any:
        """The only element, as a Python number."""
        if self.size != 1:
            raise ShapeError(
                f"{describe(self)} has {self.size} elements",
                rule="item(), bool(), int() and float() are for a tensor with one element",
                hint="reduce it first (wf.sum, wf.any, wf.all), or use .numpy()",
            )
        return self.numpy().item()

    @checks_arguments
    def rename(self, **names: str) -> Tensor:
        """The same values with dims renamed: `x.rename(batch="rows")`."""
        return public_ops().rename(self, names)

    def __getitem__(self, where: Any) -> Tensor:
        return public_ops().index(self, where)

    def __repr__(self) -> str:
        text = describe(self)
        shape = getattr(self._data, "shape", None)
        if shape is None:
            return f"{text} holding {self._data!r}"
        if shape != _expected_shape(self):
            return f"{text} holding an array of shape {shape}"
        if not self.is_slice and not context.is_traced(self._data):
            if isinstance(self._read(), jax.ShapeDtypeStruct):
                return text
            if isinstance(self._read(), jax.Array) and self._read().is_deleted():
                return f"{text}, donated to a program"
            if getattr(self._read(), "is_fully_addressable", True):
                shown = np.array2string(self.numpy(), threshold=20, edgeitems=2, precision=4, separator=", ")
                return f"{text} {shown}" if "\n" not in shown else f"{text}\n{shown}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle: the values, and where they are placed; another process needs a mesh of that size."""
        from .placement import place_tensor  # imported here because placement.py imports this module

        self._check_can_be_copied("pickle")
        return _restore, (place_tensor(self, None)._data, self.dims, self.role, self.placement)

    def __copy__(self) -> Tensor:
        return self  # it is immutable

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A tensor with an array of its own, so that the original can be donated; a slice can't be."""
        if self.is_slice or context.is_traced(self._data):
            return self
        self._check_can_be_copied("copy.deepcopy")
        array = copy.deepcopy(self._data, memo)
        return Tensor(array, self.dims, role=self.role, placement=self.placement)

    def _check_can_be_copied(self, call: str) -> None:
        array, text = self._data, describe(self)
        if self.is_slice or context.is_traced(array):
            fact, hint = f"{text} has no values yet: it is inside a program", "copy the result of the program"
        elif isinstance(array, jax.Array) and array.is_deleted():
            fact, hint = (
                f"{text} was donated to a program",
                "copy it before that call, or use the call's results",
            )
        elif not getattr(array, "is_fully_addressable", True):
            fact, hint = (
                f"{text} has slices in other processes",
                "save a checkpoint, in all processes",
            )
        else:
            return
        rule = "a copy needs the values, and this process does not have all of them"
        raise ProgramError(fact, rule=rule, hint=hint).located(f"{call}({text})")

    def _repr_html_(self) -> str:
        from .html import tensor_html  # imported here because html.py imports this module

        return tensor_html(self)

    def __bool__(self) -> bool:
        return bool(self._scalar("bool"))

    def __int__(self) -> int:
        return int(self._scalar("int"))

    def __float__(self) -> float:
        return float(self._scalar("float"))

    def __index__(self) -> int:
        raise TensorTypeError(
            f"{describe(self)} can't be a Python index or a bound of range()",
            rule="a Python integer is known when a program is traced, a tensor's values only when it runs",
            hint="wf.take selects by a tensor, wf.fori_loop repeats; outside programs int(x) is an integer",
        ).located(format_call("index", (self,), {}))

    def __hash__(self) -> int:
        raise TensorTypeError(
            f"{describe(self)} can't be a key of a dict or an element of a set",
            rule="== compares the elements of tensors, so a tensor has no hash",
            hint="use a name or id(x) as the key",
        ).located(format_call("hash", (self,), {}))

    def __format__(self, spec: str) -> str:
        return format(self._scalar("number") if spec else str(self), spec)

    def _scalar(self, kind: str) -> Any:
        if self.is_slice or context.is_traced(self._data):
            raise ProgramError(
                f"{describe(self)} can't become a Python {kind}: it has no value yet",
                rule="inside a program Python's if and while can't depend on a tensor's values",
                hint="use wf.where, wf.cond or wf.while_loop; or pass the value as a static argument",
            ).located(format_call(kind, (self,), {}))
        return self.item()

    def _materialized(self) -> Tensor:
        if self.splits is None:
            return self
        from .reshard import materialize  # imported here because reshard.py imports this module

        return materialize(self)


class Placeholder:
    """Stands in for a tensor's array that will exist after the SPMD part (`core/deferred.py`)."""

    def use_error(self) -> ProgramError:
        """The error for computing with it."""
        raise NotImplementedError


def block_on_cpu(array: jax.Array) -> jax.Array:
    """Wait for an array on CPU devices: virtual devices deadlock when calls pile up."""
    if context.is_traced(array) or len(array.sharding.device_set) == 1:
        return array
    return jax.block_until_ready(array) if jax.default_backend() == "cpu" else array


def _expected_shape(t: Tensor) -> tuple[int, ...]:
    if t.placement is None:
        return tuple([dim.size for dim in t.dims])
    # Checked for every operand of every op, hence the look at the cache.
    known = t.placement.shapes.get((t.dims, t.role, t.splits))
    return t.placement.array_shape(t.dims, t.role, t.splits) if known is None else known


def check_shape(t: Tensor) -> None:
    """Raise an error if a tensor's array does not have the shape of its dims; see `core/shapes.py`."""
    expected = _expected_shape(t)
    if getattr(t._data, "shape", None) != expected:
        raise shape_mismatch_error(describe(t), t.dims, t._data, expected, t.is_slice)


def check_usable(t: Tensor) -> None:
    """Raise an error if a tensor's array is a placeholder, or belongs to another program."""
    if isinstance(t._data, Placeholder):
        raise t._data.use_error()
    if t._owner and t._owner != active.context.serial:
        raise ProgramError(
            f"{describe(t)} is a slice from inside another program",
            rule="a program's tensors can be used inside it only",
            hint="return the tensor from the program that created it, and use the result",
        )


def check_has_values(*leaves: object) -> None:
    """Raise an error if a leaf is a spec."""
    specs = [x for x in leaves if isinstance(getattr(x, "_data", x), jax.ShapeDtypeStruct)]
    if specs:
        first = describe(specs[0]) if isinstance(specs[0], Tensor) else repr(specs[0])
        more = len(specs) - 1
        raise ProgramError(
            f"{first} and {more} more are specs: they have no values"
            if more
            else f"{first} is a spec: it has no values",
            rule="a spec has dims and a dtype, for planning; computing needs tensors with values",
            hint="program.plan(...), .jaxpr(...) and .compile(...) take specs; create values with "
            "wf.tensor(array, dims) or wf.zeros(dims)",
        )


def is_tensor(x: object) -> bool:
    """Whether x is a Tensor (for `is_leaf=` of JAX's tree functions).

    >>> import jax, weft as wf
    >>> jax.tree.map(lambda t: t.dims, {"w": wf.ones("a=2 b=3")}, is_leaf=wf.is_tensor)
    {'w': (a=2, b=3)}
    """
    return isinstance(x, Tensor)


@checks_arguments
def tree_map(f: Callable[..., PyTree], tree: PyTree, *rest: PyTree) -> PyTree:
    """Apply a function to the tensors of a pytree, and to its other leaves: `jax.tree.map` for tensors.

    Args:
      f: takes one leaf of each tree. (`jax.tree.map` itself passes the arrays of the tensors.)
      tree: a pytree of tensors, such as a model's parameters.
      rest: more pytrees of the same structure.

    Returns:
      A pytree of the results, with the structure of the first one.

    >>> import weft as wf
    >>> wf.tree_map(lambda x, y: x + y.sum("b"), {"w": wf.ones("a=2")}, {"w": wf.ones("a=2 b=3")})
    {'w': f32[a=2] [4., 4.]}
    """
    check_function(f, "tree_map", "wf.tree_map(f, tree): the function comes first")
    try:
        return jax.tree.map(f, tree, *rest, is_leaf=is_tensor)
    except ValueError as error:
        structures = [str(jax.tree.structure(t, is_leaf=is_tensor)) for t in (tree, *rest)]
        if isinstance(error, WeftError) or all(one == structures[0] for one in structures):
            raise
        raise ProgramError(
            "the trees differ in structure",
            *[one.removeprefix("PyTreeDef(").removesuffix(")") for one in structures],
            rule="tree_map takes trees of the same structure (* is a leaf)",
            hint="pass the same containers with the same keys and lengths",
        ).located("tree_map") from None


def with_static(t: Tensor, role: str, placement: Placement | None) -> Tensor:
    """The same array with another role, mesh and layout; its splits and its pending sum don't change."""
    changed = Tensor(t._read(), t.dims, role=role, placement=placement, splits=t.splits, pending=t.pending)
    changed.origin = t.origin
    return changed


def _restore(array: Any, dims: tuple[Dim, ...], role: str, placement: Placement | None) -> Tensor:
    """An unpickled tensor, placed as the pickled one was."""
    from .placement import place_tensor

    t = Tensor(array, dims, role=role)
    return t if placement is None else place_tensor(t, placement)


# A Tensor is a pytree with one array leaf; dims, role, mesh and layout are static. JAX's caches are keyed by
# tree and shapes: without mesh and layout in the static part, a jaxpr traced under one layout would be reused
# under another. Flattening materializes a slice, or `jax.tree.map(jnp.exp, x)` would work on a pending sum.


def _flatten(t: Tensor) -> tuple[tuple[Any], Any]:
    if t.splits is not None or (t.placement is not None and _expected_shape(t) != true_shape(t.dims)):
        _reject_optax(t)
    # JAX fills trees with its own sentinels, some of which are avals; those can't be resharded.
    is_array = hasattr(t._data, "dtype") and not isinstance(t._data, ShapedArray)
    try:
        stored = t._materialized() if is_array else t
    except (jax.errors.UnexpectedTracerError, AssertionError) as error:
        if isinstance(error, AssertionError) and has_trace():
            raise
        raise ProgramError(
            f"{describe(t)} leaves a function that JAX transforms",
            rule="jax.jvp flattens a function's results after its trace has ended, when a pending sum can't "
            "be resolved any more",
            hint="use wf.jvp(f, primals, tangents), which resolves it in time",
        ).located("jax.jvp") from None
    return (stored._read(),), (t.dims, t.role, t.placement, t.splits is not None)


def _reject_optax(t: Tensor) -> None:
    """Raise an error if optax is flattening a tensor whose array is a slice, or padded.

    A tree function doesn't know its caller, so this looks at the stack. optax calls jax.tree functions a few
    frames below its own, hence a bounded walk.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(12):
        if frame is None or frame.f_globals.get("__name__", "").partition(".")[0] == "optax":
            break
        frame = frame.f_back
    else:
        return
    if frame is not None:
        # The outermost frame of optax is the function that the user called.
        while frame.f_back is not None and frame.f_back.f_globals.get("__name__", "").startswith(
            ("optax", "jax")
        ):
            frame = frame.f_back
        what, why, more = (
            (
                "slices inside a program",
                "inside a program these are slices, and a global norm, say, would be that of one slice",
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


def _unflatten(static: tuple[Any, ...], children: Iterable[Any]) -> Tensor:
    dims, role, placement, is_slice = static
    splits = placement.splits(dims, role) if is_slice else None
    (array,) = children
    return Tensor(array, dims, role=role, placement=placement, splits=splits)


jax.tree_util.register_pytree_with_keys(Tensor, _flatten_with_keys, _unflatten, _flatten)
