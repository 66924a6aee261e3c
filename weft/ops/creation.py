"""Making tensors: constants and counters are made at slice size, without traffic."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import context
from ..core.describe import reports_call
from ..core.dims import Dim, as_dim, as_dims
from ..core.errors import ProgramError, ShapeError, TensorTypeError
from ..core.layout import Layout
from ..core.mesh import Mesh
from ..core.op import op
from ..core.operands import as_slice, slice_tensor
from ..core.padding import fill_padding, global_positions
from ..core.placement import canonical_dtype, partition_spec
from ..core.reshard import reshard
from ..core.shapes import stored_shape
from ..core.tensor import Tensor
from ..core.types import cast_like


@reports_call
def full(dims: Any, value: Any, dtype: Any = None) -> Tensor:
    """A tensor filled with one value.

    >>> import weft as wf
    >>> wf.full("a=3", 7)
    i32[a=3] [7, 7, 7]
    """
    return _full(as_dims(dims), value, dtype)


@op(numbers="dynamic")
def _full(dims: tuple[Dim, ...], value: Any, dtype: Any) -> Tensor:
    program = context.require()
    splits = program.splits(dims)
    shape = program.slice_shape(dims, splits)
    if isinstance(value, Tensor):
        value = reshard(as_slice(value))
    if np.ndim(value):
        raise TensorTypeError(
            f"the value has {np.ndim(value)} dims",
            rule="a tensor is filled with one number",
            hint="wf.broadcast_to(x, dims) repeats a tensor along new dims",
        )
    if dtype is not None:
        canonical_dtype(dtype)
    array = jnp.full(shape, value, dtype)
    return slice_tensor(fill_padding(array, dims, splits), dims)


@reports_call
def zeros(dims: Any, dtype: Any = jnp.float32) -> Tensor:
    """A tensor of zeros.

    >>> import weft as wf
    >>> wf.zeros("a=2 b=3")
    f32[a=2, b=3]
    [[0., 0., 0.],
     [0., 0., 0.]]
    """
    return full(dims, 0, dtype)


@reports_call
def ones(dims: Any, dtype: Any = jnp.float32) -> Tensor:
    """A tensor of ones.

    >>> import weft as wf
    >>> wf.ones("a=2")
    f32[a=2] [1., 1.]
    """
    return full(dims, 1, dtype)


@op
def full_like(x: Tensor, value: Any, dtype: Any = None) -> Tensor:
    """A tensor with the dims of another, and by default its dtype, filled with one value.

    >>> import weft as wf
    >>> wf.full_like(wf.ones("a=3"), 7)
    f32[a=3] [7., 7., 7.]
    """
    x = as_slice(x)
    made = full(x.dims, value, x.dtype if dtype is None else dtype)
    return (
        made if dtype is not None else slice_tensor(cast_like(made._array, x._data), made.dims, made.splits)
    )


@op
def zeros_like(x: Tensor, dtype: Any = None) -> Tensor:
    """Zeros with the dims of a tensor, and by default its dtype.

    >>> import weft as wf
    >>> wf.zeros_like(wf.arange(wf.Dim("a", 2)))
    i32[a=2] [0, 0]
    """
    return full_like(x, 0, dtype)


@op
def ones_like(x: Tensor, dtype: Any = None) -> Tensor:
    """Ones with the dims of a tensor, and by default its dtype."""
    return full_like(x, 1, dtype)


@op
def arange(dim: Dim, dtype: Any = jnp.int32) -> Tensor:
    """0, 1, 2, … along a dim.

    >>> import weft as wf
    >>> wf.arange(wf.Dim("a", 3))
    i32[a=3] [0, 1, 2]
    """
    canonical_dtype(dtype)
    dim = as_dim(dim)
    program = context.require()
    (axes,) = program.splits((dim,))
    array = global_positions(dim, axes)
    if dim in program.partial_dims:  # in a pipeline: the places of the rows at hand in the whole batch
        parts, number = program.partial_dims[dim]
        array = array * parts.size + number
    array = array.astype(dtype)
    return slice_tensor(fill_padding(array, (dim,), (axes,)), (dim,))


@reports_call
def from_callback(
    fn: Any, dims: Any, mesh: Any, layout: Any, dtype: Any = None, role: str = "value"
) -> Tensor:
    """A placed tensor of which every host makes only the slices that its devices hold.

    Args:
      fn: takes a tuple of slices in the true sizes, one for each dim; returns that part as an array.
      dims: the dims of the whole.
      mesh, layout: where it goes.
      dtype: the type of the elements; by default what `fn` returns.
      role: "param" stores it by the layout's `params=` rules, "optimizer" by those of optimizer state.

    >>> import weft as wf, numpy as np
    >>> whole = np.arange(6)
    >>> wf.from_callback(lambda where: whole[where], "a=6", wf.Mesh(), wf.Layout())
    i32[a=6] [0, 1, 2, 3, 4, 5]
    """
    if context.current() is not None:
        raise ProgramError(
            "from_callback was called inside a program",
            rule="a program is traced before it runs: what comes from outside is an input",
            hint="make the tensor outside and pass it in, or use wf.callback",
        )
    dims, mesh, layout = as_dims(dims), Mesh.of(mesh), Layout.of(layout)
    layout.check(mesh)
    splits = layout.splits(dims, mesh, role)
    shape = stored_shape(dims, splits, mesh)

    def part(where: Any) -> np.ndarray:
        starts = [s.start or 0 for s in where]
        stops = [n if s.stop is None else s.stop for s, n in zip(where, shape, strict=True)]
        true = tuple(
            slice(min(a, d.size), min(b, d.size)) for a, b, d in zip(starts, stops, dims, strict=True)
        )
        array = np.asarray(fn(true), dtype)
        wanted = tuple(s.stop - s.start for s in true)
        if array.shape != wanted:
            places = ", ".join(f"{s.start}:{s.stop}" for s in true)
            raise ShapeError(
                f"the callback returned the shape {array.shape} for [{places}], whose shape is {wanted}",
                rule="the callback returns the part of the whole that it is asked for",
                hint="index the whole array by what the callback is given: whole[where]",
            )
        missing = [(0, b - a - n) for a, b, n in zip(starts, stops, array.shape, strict=True)]
        return np.pad(array, missing) if any(map(any, missing)) else array

    if mesh.is_default:
        array = jnp.asarray(part(tuple(slice(0, n) for n in shape)))
        return Tensor(array, dims, role=role)
    mesh.require_devices()
    sharding = jax.sharding.NamedSharding(mesh.jax_mesh, partition_spec(splits))
    array = jax.make_array_from_callback(shape, sharding, lambda where: _canonical(part(where)))
    return Tensor(array, dims, role=role, mesh=mesh, layout=layout)


def _canonical(array: np.ndarray) -> np.ndarray:
    """In the type that JAX would give it: without x64, 64 bits become 32."""
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
