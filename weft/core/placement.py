"""Placement: create global tensors from arrays, move them to meshes, and give them roles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from . import context
from .context import active
from .describe import describe, reports_call
from .dims import DimsLike, as_dims, list_dims, new_dim
from .errors import ProgramError, ShapeError, TensorTypeError, nearest
from .layout import ROLES, LayoutLike, Placement, Splits
from .mesh import MeshLike
from .shapes import stored_splits, true_shape
from .tensor import Tensor, block_on_cpu, check_shape, is_tensor, with_static
from .types import Tree, cast_like, weak_type


def partition_spec(splits: Splits) -> PartitionSpec:
    """Splits as a JAX PartitionSpec."""
    return PartitionSpec(*[axes if len(axes) != 1 else axes[0] for axes in splits])


@reports_call
def place(t: Tree, mesh: MeshLike, layout: LayoutLike) -> Tree:
    """Place a tensor on a mesh, split by a layout; `place(t, None, None)` takes it off the mesh.

    Args:
      t: a tensor, or a pytree of tensors, such as a model's parameters.
      mesh: a `Mesh`, or a string for one, as in `spmd`.
      layout: a `Layout`, or a string for one.

    Returns:
      The same pytree with placed tensors.

    >>> import weft as wf
    >>> placed = wf.place({"w": wf.ones("d=6"), "b": wf.zeros("")}, wf.Mesh(), wf.Layout())
    >>> placed["w"].mesh
    Mesh("")
    """
    placement = None if mesh is None else Placement.of(mesh, layout)
    return jax.tree.map(lambda one: place_tensor(one, placement), t, is_leaf=is_tensor)


def place_tensor(t: Tensor, placement: Placement | None) -> Tensor:
    """Place one tensor; None takes it off its mesh."""
    _check_tensor(t)
    if t.splits is not None or active.context is not None:
        raise ProgramError(
            f"{describe(t)} is inside a program",
            rule="a program's tensors are placed by the program's own layout",
            hint="place tensors outside; inside, rename a dim to split it differently",
        )
    check_shape(t)
    is_spec = isinstance(t._data, jax.ShapeDtypeStruct)
    if is_spec and t.placement is not None:
        t = without_values(t)
    if placement is None:
        return Tensor(_on_one_device(t), t.dims, role=t.role)
    if t.placement is placement:
        return t
    mesh, splits = placement.mesh, placement.splits(t.dims, t.role)
    shape = placement.array_shape(t.dims, t.role)
    array: Any
    if is_spec:
        array = jax.ShapeDtypeStruct(shape, t._data.dtype, weak_type=t._data.weak_type)
    elif t.mesh == mesh and stored_splits(t) == splits:
        array = t._read()
    elif mesh.is_default:
        array = _on_one_device(t)
    else:
        mesh.require_devices()
        # Padded here, not inside jit: there the first call and later ones would have different input shapes,
        # and each would be traced.
        array = _padded(t.array, shape)
        array = device_put(array, NamedSharding(mesh.jax_mesh, partition_spec(splits)))
        array = block_on_cpu(array)
    return Tensor(array, t.dims, role=t.role, placement=placement)


def _on_one_device(t: Tensor) -> Any:
    """The array without padding, moved to the first device if it is on a mesh of this process."""
    array = t.array
    is_free = t.mesh is None or t.mesh.is_default
    if is_free or context.is_traced(array) or not array.is_fully_addressable:
        return array
    return jax.device_put(array, jax.local_devices()[0])


def device_put(array: Any, sharding: NamedSharding) -> jax.Array:
    """Copy an array to the devices of a sharding, in one process or in several.

    With several processes, an array that is local to each is assumed to be equal in all of them: each process
    copies the slices of its own devices. `jax.device_put` rejects arrays that are already on a device there,
    and compares host arrays with a collective.
    """
    if context.is_traced(array):
        return _constrain_traced(array, sharding)
    is_local, is_one_process = getattr(array, "is_fully_addressable", True), sharding.is_fully_addressable
    if not is_local or (weak_type(array) and is_one_process):  # NumPy has no weak types
        return jax.device_put(array, sharding)
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    if is_one_process:
        devices = array.devices() if isinstance(array, jax.Array) and not is_key else ()
        is_on_cpu = [d.platform for d in devices] == ["cpu"]
        # jax.device_put slices a device array with programs, compiled for each shape. From NumPy it slices
        # on the host, and a CPU array viewed by NumPy is not copied.
        return jax.device_put(np.asarray(array) if is_on_cpu else array, sharding)
    if is_key:
        data = device_put(jax.random.key_data(array), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    host = np.asarray(array)
    made = jax.make_array_from_callback(host.shape, sharding, lambda where: host[where])
    return cast_like(made, array)


def _constrain_traced(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The same under a JAX transformation.

    In jax.vmap, jax.device_put applies the sharding to the batched array, whose first dimension is the mapped
    one. A sharding constraint is batched correctly.
    """
    try:
        return jax.lax.with_sharding_constraint(array, sharding)
    except ValueError:  # JAX does not constrain an array that is on other devices; it is moved first
        array = jax.device_put(array, NamedSharding(sharding.mesh, PartitionSpec()))
        return jax.lax.with_sharding_constraint(array, sharding)


def without_values(t: Tensor) -> Tensor:
    """A spec with the tensor's dims, dtype and role."""
    data = jax.ShapeDtypeStruct(true_shape(t.dims), t.dtype, weak_type=weak_type(t._data))
    return Tensor(data, t.dims, role=t.role)


def _padded(array: jax.Array, shape: tuple[int, ...]) -> jax.Array | np.ndarray:
    """The array with zeros appended, up to a shape."""
    if tuple(array.shape) == shape:
        return array
    extra = [(0, new - old) for new, old in zip(shape, array.shape, strict=True)]
    # On the host if possible: nothing to compile. NumPy has no weak types.
    if not context.is_traced(array) and array.is_fully_addressable and not weak_type(array):
        return np.pad(np.asarray(array), extra)
    return jnp.pad(array, extra)


@reports_call
def tensor(array: ArrayLike | Sequence[Any] | jax.ShapeDtypeStruct, dims: DimsLike) -> Tensor:
    """A tensor from an array (or number) and the names of its dimensions.

    Args:
      array: anything that JAX or NumPy can convert to an array, without padding.
      dims: one dim for each dimension, in the array's order: Dims, or a string such as `"batch=2 length=3"`.
        Names without a size have the array's.

    Returns:
      A tensor that is not placed on a mesh; inside a program, a replicated slice.

    >>> import weft as wf
    >>> wf.tensor([[1, 2, 3]], "row=1 column=3")
    i32[row=1, column=3] [[1, 2, 3]]
    >>> wf.tensor([[1, 2, 3]], "row column").dims
    (row=1, column=3)
    """
    if isinstance(array, Tensor):
        raise TensorTypeError(
            f"{describe(array)} is a tensor already",
            rule="tensor() names the dimensions of a raw array",
            hint='to rename dims use x.rename(old="new"); to reorder them wf.transpose(x, dims)',
        )
    found: Any = array if isinstance(array, jax.Array | jax.ShapeDtypeStruct) else _as_array(array)
    _check_no_keys(found.dtype)
    shape, given = tuple(found.shape), list_dims(dims)
    dims = as_dims([new_dim(dim, size) for dim, size in zip(given, shape, strict=False)])
    if len(given) != len(shape) or shape != tuple(dim.size for dim in dims):
        raise ShapeError(
            f"an array of shape {shape} was given the dims [{', '.join(map(str, given))}]",
            rule="an array needs one dim for each of its dimensions, of the same size",
            hint="pass the dims in the array's own order; wf.transpose reorders them afterwards",
        )
    ctx = active.context
    if ctx is None:
        return Tensor(found, dims)
    from .operands import from_global  # operands.py imports tensors and reshards; this module is below it

    return from_global(found, dims)


def _check_no_keys(dtype: Any) -> None:
    """Raise an error for a dtype of random keys: they can't be padded, printed or computed with."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        raise TensorTypeError(
            "a tensor can't hold random keys",
            rule="a tensor's elements are numbers or booleans",
            hint="pass keys to programs as raw arrays; wf.scan can iterate over an array of keys; one key "
            'draws along all dims: wf.random.normal(key, "batch=64 d=8")',
        )


def as_array(given: Any) -> jax.Array:
    """The array as a JAX array on the default device."""
    # jnp.asarray compiles a program for each shape. jax.device_put does not, but it may use the memory of a
    # NumPy array, which its owner can change; hence the copy.
    return jax.device_put(np.array(given)) if isinstance(given, np.ndarray) else jnp.asarray(given)


def _as_array(given: object) -> jax.Array:
    try:
        return as_array(given)
    except (TypeError, ValueError) as error:
        is_iterator = isinstance(given, Iterator)  # its text is an address
        text, reason = repr(given), str(error).splitlines()[0]
        text = type(given).__name__ if is_iterator or len(text) >= 60 else text
        raise TensorTypeError(
            f"{text} can't be converted to an array",
            *([] if is_iterator else [f"JAX: {reason}"]),
            rule="a tensor's elements are numbers or booleans, and its rows have equal lengths",
            hint="make a list of its items: list(items)"
            if is_iterator
            else "tokenize text first; pad rows to one length",
        ) from None


@reports_call
def spec(dims: DimsLike, dtype: DTypeLike = jnp.float32, role: str = "value") -> Tensor:
    """A tensor without values, for planning, like `jax.ShapeDtypeStruct`.

    Args:
      dims: the dims.
      dtype: the dtype.
      role: "value", "param" or "optimizer": which of the layout's rules apply.

    Returns:
      A tensor that programs can be traced, planned and compiled with.

    >>> import weft as wf
    >>> wf.spec("batch=64 d_model=256")
    f32[batch=64, d_model=256]
    """
    check_role(role)
    dims = as_dims(dims)
    shape = tuple(dim.size for dim in dims)
    return Tensor(jax.ShapeDtypeStruct(shape, canonical_dtype(dtype)), dims, role=role)


@reports_call
def parameter(t: Tensor) -> Tensor:
    """The same tensor with the role of a parameter: stored by the layout's `params=` rules.

    Args:
      t: a tensor.

    Returns:
      The tensor, resharded if it is placed and the rules for parameters differ.

    >>> import weft as wf
    >>> w = wf.parameter(wf.ones("d=4"))
    >>> wf.place(w, "data=4", wf.Layout("batch:data", params="d:data"))
    f32[d=4/data·4] [1., 1., 1., 1.]
    """
    return with_role(t, "param")


def with_role(t: Tensor, role: str) -> Tensor:
    """The same tensor with another role."""
    _check_tensor(t)
    # A slice keeps its splits until an op materializes it: it may be a pending sum, which can still be
    # scattered.
    if t.is_slice or t.placement is None or t.placement.splits(t.dims, role) == stored_splits(t):
        return with_static(t, role, t.placement)
    if isinstance(t._read(), jax.ShapeDtypeStruct):
        return place(with_role(without_values(t), role), t.mesh, t.layout)
    return place(Tensor(t.array, t.dims, role=role), t.mesh, t.layout)


def check_role(role: str) -> None:
    """Raise an error if there is no such role."""
    if role not in ROLES:
        raise TensorTypeError(
            f"there is no role {role!r}{nearest(str(role), ROLES)}",
            rule="a tensor is a value, a param or optimizer state",
            hint=f"use one of {', '.join(ROLES)}",
        )


def is_spec(t: Tensor) -> bool:
    """Whether a tensor is a spec: it has no values."""
    return isinstance(t._data, jax.ShapeDtypeStruct)


def _check_tensor(t: object) -> None:
    if not isinstance(t, Tensor):
        raise TensorTypeError(
            f"{'an array' if hasattr(t, 'dtype') else f'a value of type {type(t).__name__}'} is not a tensor",
            rule="a tensor is an array with named dims",
            hint='name its dimensions: wf.tensor(array, "batch=64 d_model=256")',
        )


def canonical_dtype(dtype: DTypeLike) -> Any:
    """The dtype that JAX uses for this one: without x64, 64 bits become 32."""
    try:
        known = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    except TypeError:
        raise TensorTypeError(
            f"{dtype!r} is not a dtype",
            rule="a dtype is one of JAX's or NumPy's, or its name",
            hint='for example jnp.float32, jnp.bfloat16 or "int32"',
        ) from None
    _check_no_keys(known)
    return known
