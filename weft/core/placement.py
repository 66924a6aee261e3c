"""Whole tensors: made of arrays, put on meshes, given roles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from . import context
from .dims import as_dims, format_dims
from .errors import ProgramError, ShapeError, TensorTypeError, nearest
from .layout import ROLES, Layout, Splits
from .mesh import Mesh
from .shapes import stored_shape, true_shape
from .tensor import Tensor, block_on_cpu, check_shape, describe, is_tensor, reports_call, stored_splits
from .types import cast_like, weak_type


def partition_spec(splits: Splits) -> PartitionSpec:
    """JAX's word for splits."""
    return PartitionSpec(*[axes if len(axes) != 1 else axes[0] for axes in splits])


@reports_call
def place(t: Any, mesh: Any, layout: Any) -> Any:
    """Put a whole tensor on a mesh, split by a layout; `place(t, None, None)` takes it off.

    Args:
      t: a tensor, or a tree of tensors, such as a model's parameters.
      mesh: where to, as in `spmd`.
      layout: how they are split there.

    >>> import weft as wf
    >>> placed = wf.place({"w": wf.ones("d=6"), "b": wf.zeros("")}, wf.Mesh(), wf.Layout())
    >>> placed["w"].mesh
    Mesh("")
    """
    return jax.tree.map(lambda one: _placed(one, mesh, layout), t, is_leaf=is_tensor)


def _placed(t: Tensor, mesh: Any, layout: Any) -> Tensor:
    _check_tensor(t)
    if t.is_slice or context.current() is not None:
        raise ProgramError(
            f"{describe(t)} is inside a program",
            rule="a program's tensors are placed by the program's own layout",
            hint="place tensors outside; inside, rename a dim to change its split",
        )
    check_shape(t)
    if isinstance(t._array, jax.ShapeDtypeStruct):
        t = without_values(t)
    if mesh is None:
        return Tensor(_on_one_device(t), t.dims, role=t.role)
    mesh, layout = Mesh.of(mesh), Layout.of(layout)
    layout.check(mesh)
    if t.mesh == mesh and t.layout == layout:
        return t
    splits = layout.splits(t.dims, mesh, t.role)
    shape = stored_shape(t.dims, splits, mesh)
    if isinstance(t._array, jax.ShapeDtypeStruct):
        array = jax.ShapeDtypeStruct(shape, t.dtype, weak_type=weak_type(t._array))
    elif t.mesh == mesh and stored_splits(t) == splits:
        array = t._array
    elif mesh.is_anywhere:
        array = _on_one_device(t)
    else:
        mesh.require_devices()
        array = _padded(t.array, shape)
        array = device_put(array, NamedSharding(mesh.jax_mesh, partition_spec(splits)))
        array = block_on_cpu(array)
    return Tensor(array, t.dims, role=t.role, mesh=mesh, layout=layout)


def _on_one_device(t: Tensor) -> Any:
    """The array in its true size: where it is, or on the first device if it is on a mesh of this process."""
    array = t.array
    is_free = t.mesh is None or t.mesh.is_anywhere
    if is_free or context.is_traced(array) or not array.is_fully_addressable:
        return array
    return jax.device_put(array, jax.local_devices()[0])


def device_put(array: Any, sharding: NamedSharding) -> Any:
    """An array on the devices of a sharding.

    Over several processes an array that each has for itself is taken to be the same in all: each gives its
    own devices their slices. JAX's device_put refuses those that are on a device already, and compares the
    others by a collective. In one process it takes an array of a device apart by programs, compiled for each
    shape: a CPU's is given to it as NumPy sees it, which is no copy.
    """
    if context.is_traced(array):
        return _put_traced(array, sharding)
    is_here, is_one_process = getattr(array, "is_fully_addressable", True), sharding.is_fully_addressable
    if not is_here or (weak_type(array) and is_one_process):  # NumPy has no weak types
        return jax.device_put(array, sharding)
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    if is_one_process:
        devices = array.devices() if isinstance(array, jax.Array) and not is_key else ()
        is_on_cpu = [d.platform for d in devices] == ["cpu"]
        return jax.device_put(np.asarray(array) if is_on_cpu else array, sharding)
    if is_key:
        data = device_put(jax.random.key_data(array), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    whole = np.asarray(array)
    made = jax.make_array_from_callback(whole.shape, sharding, lambda where: whole[where])
    return cast_like(made, array)


def _put_traced(array: Any, sharding: NamedSharding) -> Any:
    """The same under JAX's transformations. In a jax.vmap device_put takes its dim for the array's first."""
    try:
        return jax.lax.with_sharding_constraint(array, sharding)
    except ValueError:  # it is on other devices
        array = jax.device_put(array, NamedSharding(sharding.mesh, PartitionSpec()))
        return jax.lax.with_sharding_constraint(array, sharding)


def without_values(t: Tensor) -> Tensor:
    """The tensor's dims, type and role."""
    held = jax.ShapeDtypeStruct(true_shape(t.dims), t.dtype, weak_type=weak_type(t._held))
    return Tensor(held, t.dims, role=t.role)


def _padded(array: Any, shape: tuple[int, ...]) -> Any:
    """The array with zeros at the ends, up to a shape."""
    if tuple(array.shape) == shape:
        return array
    extra = [(0, new - old) for new, old in zip(shape, array.shape, strict=True)]
    # On the host where that can be: there is nothing to compile. NumPy has no weak types.
    if not context.is_traced(array) and array.is_fully_addressable and not weak_type(array):
        return np.pad(np.asarray(array), extra)
    return jnp.pad(array, extra)


@reports_call
def tensor(array: Any, dims: Any) -> Tensor:
    """A tensor from an array (or number) and the names of its dimensions.

    Args:
      array: anything JAX or NumPy can make an array of, in its true size.
      dims: as many dims, in the array's order: Dims, or a string such as `"batch=2 length=3"`.

    >>> import weft as wf
    >>> wf.tensor([[1, 2, 3]], "row=1 column=3")
    i32[row=1, column=3] [[1, 2, 3]]
    """
    dims = as_dims(dims)
    if isinstance(array, Tensor):
        raise TensorTypeError(
            f"{describe(array)} is a tensor already",
            rule="tensor() names the dimensions of a raw array",
            hint='to rename dims use x.rename(old="new"); to reorder them wf.transpose(x, dims)',
        )
    if not isinstance(array, jax.Array | jax.ShapeDtypeStruct):
        array = _as_array(array)
    _check_no_keys(array.dtype)
    shape = tuple(array.shape)
    if shape != tuple(dim.size for dim in dims):
        raise ShapeError(
            f"an array of shape {shape} was given the dims [{format_dims(dims)}]",
            rule="an array needs one dim for each of its dimensions, of the same size",
            hint="give the dims in the array's own order; wf.transpose reorders them afterwards",
        )
    program = context.current()
    if program is None:
        return Tensor(array, dims)
    from .forms import from_global

    return from_global(array, dims)


def _check_no_keys(dtype: Any) -> None:
    """An error if elements of this type are random keys: they can't be padded, shown or computed with."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        raise TensorTypeError(
            "a tensor of random keys was asked for",
            rule="a tensor's elements are numbers or truth values",
            hint="pass keys to programs as they are; wf.scan goes over an array of them as it is; one key "
            'draws along all dims: wf.random.normal(key, "batch=64 d=8")',
        )


def _as_array(given: Any) -> Any:
    try:
        return jnp.asarray(given)
    except (TypeError, ValueError) as error:
        text = repr(given)
        raise TensorTypeError(
            f"{text if len(text) < 60 else type(given).__name__} is not an array, and none can be made of it",
            f"JAX says: {str(error).splitlines()[0]}",
            rule="a tensor's elements are numbers or truth values, and its rows are equally long",
            hint="turn text into whole numbers first; pad rows to one length",
        ) from None


@reports_call
def spec(dims: Any, dtype: Any = jnp.float32, role: str = "value") -> Tensor:
    """A tensor without values, for planning.

    >>> import weft as wf
    >>> wf.spec("batch=64 d_model=256")
    f32[batch=64, d_model=256]
    """
    if role not in ROLES:
        raise TensorTypeError(
            f"there is no role {role!r}{nearest(str(role), ROLES)}",
            rule="a tensor is a value, a param or optimizer state",
            hint=f"one of {', '.join(ROLES)}",
        )
    dims = as_dims(dims)
    shape = tuple(dim.size for dim in dims)
    return Tensor(jax.ShapeDtypeStruct(shape, canonical_dtype(dtype)), dims, role=role)


@reports_call
def parameter(t: Tensor) -> Tensor:
    """The same tensor with the role of a parameter: stored by the layout's `params=` rules.

    >>> import weft as wf
    >>> w = wf.parameter(wf.ones("d=4"))
    >>> wf.place(w, "data=4", wf.Layout("batch:data", params="d:data"))
    f32[d=4/data·4] [1., 1., 1., 1.]
    """
    return with_role(t, "param")


def with_role(t: Tensor, role: str) -> Tensor:
    """The same tensor with another role."""
    _check_tensor(t)
    if t.is_slice or t.mesh is None or t.layout is None:
        return Tensor(
            t._array,
            t.dims,
            role=role,
            mesh=t.mesh,
            layout=t.layout,
            splits=t.splits,
            pending=t.pending,
        )
    if t.layout.splits(t.dims, t.mesh, role) == stored_splits(t):
        return Tensor(t._array, t.dims, role=role, mesh=t.mesh, layout=t.layout)
    if isinstance(t._array, jax.ShapeDtypeStruct):
        return place(with_role(without_values(t), role), t.mesh, t.layout)
    return place(Tensor(t.array, t.dims, role=role), t.mesh, t.layout)


def _check_tensor(t: Any) -> None:
    if not isinstance(t, Tensor):
        raise TensorTypeError(
            f"a {type(t).__name__} is not a tensor",
            rule="a tensor is an array with named dims",
            hint='name its dimensions: wf.tensor(array, "batch=64 d_model=256")',
        )


def canonical_dtype(dtype: Any) -> Any:
    """What JAX makes of a dtype: without x64, 64 bits become 32."""
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
