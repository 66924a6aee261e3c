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
from ..core.dims import (
    MAX_DIM_SIZE,
    Dim,
    DimLike,
    DimsLike,
    as_dim,
    as_dims,
    check_distinct,
    select_dims,
    union_dims,
)
from ..core.errors import ProgramError, ShapeError, TensorTypeError
from ..core.layout import LayoutLike, Placement
from ..core.mesh import MeshLike
from ..core.op import op
from ..core.operands import as_slice, check_along, from_global, slice_tensor
from ..core.padding import fill_padding, global_positions
from ..core.placement import canonical_dtype, partition_spec
from ..core.registry import register
from ..core.reshard import reshard
from ..core.signature import NUMBER_TYPES
from ..core.tensor import Tensor
from ..core.types import cast_like, common_type, constant_like
from .elementwise import astype, elementwise
from .shifting import as_integer
from .typing import ArrayFn, Operand


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
    dim = as_dim(dim)
    canonical_dtype(dtype)
    ctx = active.context
    (axes,) = ctx.splits((dim,))
    array = global_positions(dim, axes)
    # In a pipeline, row b of micro-batch m of M is row b·M + m of the batch.
    if dim in ctx.pipeline.partial_dims:
        parts, number = ctx.pipeline.partial_dims[dim]
        array = array * parts.size + number
    array = array.astype(dtype)
    return slice_tensor(fill_padding(array, (dim,), (axes,)), (dim,))


@op(example=lambda op: op(Dim("a", 6), Dim("b", 3)), split_invariant=True)
def eye(rows: DimLike, columns: DimLike, dtype: DTypeLike = jnp.float32, k: int = 0) -> Tensor:
    """Ones where the positions along two dims are equal and zeros elsewhere: the identity matrix.

    Args:
      rows: the first dim of the result.
      columns: the second dim. It has another name, and may have another size.
      dtype: the dtype of the result.
      k: the diagonal of ones, whose column is k more than its row.

    >>> import weft as wf
    >>> wf.eye(wf.Dim("a", 2), wf.Dim("b", 3)).numpy().tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    rows, columns = as_dim(rows), as_dim(columns)
    check_distinct([rows, columns])
    return astype(
        elementwise(
            jnp.equal,
            [
                arange(rows)
                + as_integer(k, "k", hint="compare positions: wf.arange(rows) + k == wf.arange(columns)"),
                arange(columns),
            ],
            keeps_zero=False,
        ),
        dtype,
    )


@op(example=lambda op, x: op(x, 2.5, Dim("s", 5), endpoint=False), split_invariant=True)
def linspace(
    start: Operand, stop: Operand, dim: DimLike, endpoint: bool = True, dtype: DTypeLike | None = None
) -> Tensor:
    """Evenly spaced numbers along a new first dim, from `start` to `stop`, like `jax.numpy.linspace`.

    Args:
      start: the first element, a number or a tensor.
      stop: the last element, a number or a tensor. Between two numbers, the elements are computed in float64
        when the program is traced, and so are the same bits under every layout.
      dim: the new dim; its size is the number of elements.
      endpoint: whether `stop` is an element. If not, it is the one after the last.
      dtype: the dtype of the result. Defaults to the floating-point type of the bounds. Integers are rounded
        down.

    >>> import weft as wf
    >>> wf.linspace(0, 1, wf.Dim("a", 5))
    f32[a=5] [0.  , 0.25, 0.5 , 0.75, 1.  ]
    """
    dim = as_dim(dim)
    check_along([dim])  # the distance depends on the size, and a pipeline stage has only one micro-batch
    if dtype is None:
        arrays = [as_slice(x)._data for x in (start, stop)]
        dtype = jax.eval_shape(lambda x: jnp.linspace(x, x, 2), common_type(*arrays)).dtype
    dtype = canonical_dtype(dtype)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if isinstance(start, NUMBER_TYPES) and isinstance(stop, NUMBER_TYPES):
        # XLA folds constants and fuses multiply-adds, so it would round them differently in each program.
        table = np.linspace(start, stop, dim.size, endpoint)
        return from_global((np.floor(table) if is_integer else table).astype(dtype), (dim,))
    bounds = [as_slice(x) for x in (start, stop)]
    check_distinct([dim, *union_dims(x.dims for x in bounds)])
    wide, count = jnp.result_type(dtype, float), max(dim.size - endpoint, 1)

    def interpolate(position: jax.Array, start: jax.Array, stop: jax.Array) -> jax.Array:
        share = (position.astype(jnp.finfo(wide).dtype) / count).astype(wide)
        start, stop = start.astype(wide), stop.astype(wide)
        found = jnp.where(position == count, stop, start * (1 - share) + stop * share)
        return (jnp.floor(found) if is_integer else found).astype(dtype)

    return elementwise(interpolate, [arange(dim), *bounds], keeps_zero=False)


@op(example=lambda op, x: op(x, "a", "b"), split_invariant=True)
def tril(x: Tensor, rows: DimLike, columns: DimLike, k: int = 0) -> Tensor:
    """The lower triangle of matrices, with zeros above a diagonal.

    Args:
      x: a tensor; it may have further dims.
      rows: the dim that indexes the rows of the matrices.
      columns: the dim that indexes their columns.
      k: the diagonal; 1 is the one above the main diagonal, and -1 the one below.

    >>> import weft as wf
    >>> wf.tril(wf.ones("row=2 column=3"), "row", "column").numpy().tolist()
    [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    """
    return _triangle(x, rows, columns, k, jnp.less_equal)


@op(example=lambda op, x: op(x, "a", "b", 1), split_invariant=True)
def triu(x: Tensor, rows: DimLike, columns: DimLike, k: int = 0) -> Tensor:
    """The upper triangle of matrices, with zeros below a diagonal; arguments as for `tril`.

    >>> import weft as wf
    >>> wf.triu(wf.ones("row=2 column=3"), "row", "column").numpy().tolist()
    [[1.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
    """
    return _triangle(x, rows, columns, k, jnp.greater_equal)


def _triangle(x: Tensor, rows: DimLike, columns: DimLike, k: int, keeps: ArrayFn) -> Tensor:
    """The elements whose diagonal, the column minus the row, compares with `k`."""
    x, diagonal = as_slice(x), as_integer(k, "k", hint="select with a mask: wf.where(mask, x, 0)")
    row, column = select_dims(x.dims, [rows, columns])
    diagonal = max(-MAX_DIM_SIZE, min(MAX_DIM_SIZE, diagonal))  # within int32, as all diagonals are

    def select(a: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        return jnp.where(keeps(j - i, diagonal), a, constant_like(0, a))

    return elementwise(select, [x, arange(row), arange(column)])


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
