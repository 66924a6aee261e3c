"""Creation ops. Each device creates its own slice, without communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..core.context import active
from ..core.describe import reports_call
from ..core.dims import Dim, DimLike, DimsLike, as_dim, as_dims
from ..core.errors import ProgramError, ShapeError, TensorTypeError
from ..core.layout import LayoutLike, Placement
from ..core.mesh import MeshLike
from ..core.op import op
from ..core.operands import as_slice, slice_tensor
from ..core.padding import fill_padding, global_positions
from ..core.placement import canonical_dtype, partition_spec
from ..core.registry import register
from ..core.reshard import reshard
from ..core.tensor import Tensor
from ..core.types import cast_like
from .typing import Operand


@reports_call
def full(dims: DimsLike, value: Operand, dtype: DTypeLike | None = None) -> Tensor:
    """A tensor filled with one value.

    >>> import weft as wf
    >>> wf.full("a=3", 7)
    i32[a=3] [7, 7, 7]
    """
    return _full(as_dims(dims), value, dtype)


@op(example=lambda op: op("a=6 b=3", 2.5), numbers="dynamic")
def _full(dims: tuple[Dim, ...], value: Operand, dtype: DTypeLike | None) -> Tensor:
    ctx = active.context
    splits = ctx.splits(dims)
    shape = ctx.slice_shape(dims, splits)
    scalar = reshard(as_slice(value)) if isinstance(value, Tensor) else value
    if np.ndim(scalar):
        raise TensorTypeError(
            f"the value has {np.ndim(scalar)} dims",
            rule="the fill value is a scalar",
            hint="wf.broadcast_to(x, dims) repeats a tensor along new dims",
        )
    if dtype is not None:
        canonical_dtype(dtype)
    array = jnp.full(shape, scalar, dtype)
    return slice_tensor(fill_padding(array, dims, splits), dims)


@register(example=lambda op: op("a=6 b=3"))
@reports_call
def zeros(dims: DimsLike, dtype: DTypeLike = jnp.float32) -> Tensor:
    """A tensor of zeros.

    >>> import weft as wf
    >>> wf.zeros("a=2 b=3")
    f32[a=2, b=3]
    [[0., 0., 0.],
     [0., 0., 0.]]
    """
    return full(dims, 0, dtype)


@register(example=lambda op: op("a=6 b=3"))
@reports_call
def ones(dims: DimsLike, dtype: DTypeLike = jnp.float32) -> Tensor:
    """A tensor of ones.

    >>> import weft as wf
    >>> wf.ones("a=2")
    f32[a=2] [1., 1.]
    """
    return full(dims, 1, dtype)


@op(example=lambda op, x: op(x, 3))
def full_like(x: Tensor, value: Operand, dtype: DTypeLike | None = None) -> Tensor:
    """A tensor filled with one value, with the dims of another tensor and by default its dtype.

    >>> import weft as wf
    >>> wf.full_like(wf.ones("a=3"), 7)
    f32[a=3] [7., 7., 7.]
    """
    x = as_slice(x)
    filled = full(x.dims, value, x.dtype if dtype is None else dtype)
    if dtype is not None:
        return filled
    return slice_tensor(cast_like(filled._read(), x._data), filled.dims, filled.splits)


@op(example="x")
def zeros_like(x: Tensor, dtype: DTypeLike | None = None) -> Tensor:
    """Zeros with the dims of a tensor and by default its dtype.

    >>> import weft as wf
    >>> wf.zeros_like(wf.arange(wf.Dim("a", 2)))
    i32[a=2] [0, 0]
    """
    return full_like(x, 0, dtype)


@op(example="x")
def ones_like(x: Tensor, dtype: DTypeLike | None = None) -> Tensor:
    """Ones with the dims of a tensor and by default its dtype."""
    return full_like(x, 1, dtype)


@op(example=lambda op: op(Dim("a", 6)), split_invariant=True)
def arange(dim: DimLike, dtype: DTypeLike = jnp.int32) -> Tensor:
    """0, 1, 2, … along a dim.

    >>> import weft as wf
    >>> wf.arange("a=3")
    i32[a=3] [0, 1, 2]
    """
    canonical_dtype(dtype)
    dim = as_dim(dim)
    ctx = active.context
    (axes,) = ctx.splits((dim,))
    array = global_positions(dim, axes)
    # In a pipeline, row b of micro-batch m of M is row b·M + m of the batch.
    if dim in ctx.pipeline.partial_dims:
        parts, number = ctx.pipeline.partial_dims[dim]
        array = array * parts.size + number
    array = array.astype(dtype)
    return slice_tensor(fill_padding(array, (dim,), (axes,)), (dim,))


@reports_call
def from_callback(
    fn: Callable[[tuple[slice, ...]], np.ndarray],
    dims: DimsLike,
    mesh: MeshLike,
    layout: LayoutLike,
    dtype: DTypeLike | None = None,
    role: str = "value",
) -> Tensor:
    """Create a placed tensor. Each host computes only the slices of its own devices.

    Args:
      fn: takes a tuple of slices, one for each dim, that index the global array without padding. Returns
        that part as an array.
      dims: the dims of the tensor.
      mesh: the mesh to place it on.
      layout: the layout to place it by.
      dtype: the dtype of the elements. Defaults to the dtype that `fn` returns.
      role: "param" places it by the layout's `params=` rules, "optimizer" by its `optimizer=` rules.

    >>> import weft as wf, numpy as np
    >>> data = np.arange(6)
    >>> wf.from_callback(lambda index: data[index], "a=6", wf.Mesh(), wf.Layout())
    i32[a=6] [0, 1, 2, 3, 4, 5]
    """
    if active.context is not None:
        raise ProgramError(
            "from_callback was called inside a program",
            rule="a program is traced before it runs, so external data must be an input",
            hint="create the tensor outside and pass it in, or use wf.callback",
        )
    dims, placement = as_dims(dims), Placement.of(mesh, layout)
    shape = placement.array_shape(dims, role)

    # JAX asks for slices of the stored, padded shape. `fn` only knows the true sizes: clip, call, then pad.
    def padded_slice(index: Any) -> np.ndarray:
        starts = [s.start or 0 for s in index]
        stops = [n if s.stop is None else s.stop for s, n in zip(index, shape, strict=True)]
        unpadded = tuple(
            slice(min(a, d.size), min(b, d.size)) for a, b, d in zip(starts, stops, dims, strict=True)
        )
        array = np.asarray(fn(unpadded), dtype)
        expected = tuple(s.stop - s.start for s in unpadded)
        if array.shape != expected:
            bounds = ", ".join(f"{s.start}:{s.stop}" for s in unpadded)
            raise ShapeError(
                f"the callback returned shape {array.shape} for [{bounds}], which has shape {expected}",
                rule="the callback returns the part of the global array at the given index",
                hint="index the global array with the callback's argument: array[index]",
            )
        padding = [(0, b - a - n) for a, b, n in zip(starts, stops, array.shape, strict=True)]
        return np.pad(array, padding) if any(map(any, padding)) else array

    if placement.mesh.is_default:
        array = jnp.asarray(padded_slice(tuple(slice(0, n) for n in shape)))
        return Tensor(array, dims, role=role)
    placement.mesh.require_devices()
    spec = partition_spec(placement.splits(dims, role))
    sharding = jax.sharding.NamedSharding(placement.mesh.jax_mesh, spec)
    array = jax.make_array_from_callback(shape, sharding, lambda index: _canonical(padded_slice(index)))
    return Tensor(array, dims, role=role, placement=placement)


def _canonical(array: np.ndarray) -> np.ndarray:
    """Cast to the dtype that JAX uses: without x64, 64 bits become 32."""
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
