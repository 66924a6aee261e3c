"""Discrete Fourier transforms along named dims. The other dims are batch dims, and may be split.

The transforms of a batch are independent: each device computes its own ones. A transformed dim that is split
is gathered first; plans list the all-gather under the op. Transforms are linear, so padding stays zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from ..core.context import active
from ..core.describe import describe
from ..core.dims import Dim, DimLike, DimsLike, as_dim, format_dims, select_dims
from ..core.errors import ProgramError, ShapeError, TensorTypeError, nearest
from ..core.jax_compat import row_major
from ..core.op import op
from ..core.operands import as_slice, check_along, slice_tensor
from ..core.padding import fill_padding, global_positions
from ..core.reshard import layout_splits, reshard
from ..core.tensor import Tensor
from ..core.types import at_least_float32
from .typing import ArrayFn

# A transform and its inverse together divide by the number of positions: the inverse does, or the transform,
# or each divides by the square root.
Norm = Literal["backward", "ortho", "forward"]
NORMS = ("backward", "ortho", "forward")


def _transform(
    fn: ArrayFn, x: Tensor, dims: DimsLike, norm: Norm, resized: Callable[[Dim], Dim] = lambda last: last
) -> Tensor:
    """Apply a function of `jax.numpy.fft` along dims.

    Args:
      fn: takes the array, and the sizes and positions of the transformed dims in the signal.
      x: a tensor.
      dims: the dims to transform.
      norm: which of the two transforms divides.
      resized: maps the last of them to that dim of the signal; only `irfft` has another one.
    """
    if norm not in NORMS:
        raise ProgramError(
            f"there is no norm {norm!r}{nearest(norm, NORMS)}",
            rule="the inverse transform divides by the number of positions (backward), the transform does "
            "(forward), or both divide by its square root (ortho)",
            hint='norm="ortho", for example',
        )
    x = as_slice(x)
    chosen = select_dims(x.dims, dims)
    check_along(chosen)
    if not 1 <= len(chosen) <= 3:
        raise ShapeError(
            f"a transform is along {len(chosen)} dims: [{format_dims(chosen)}]",
            rule="XLA's transforms are along 1, 2 or 3 dims",
            hint="transform the other dims in a second call",
        )
    splits = tuple(() if d in chosen else axes for d, axes in zip(x.dims, layout_splits(x), strict=True))
    array = reshard(x, splits)
    if jnp.issubdtype(array.dtype, jnp.inexact):
        array = array.astype(at_least_float32(array.dtype))
    sizes = [d.size for d in (*chosen[:-1], resized(chosen[-1]))]
    positions, last = [x.dims.index(d) for d in chosen], range(-len(chosen), 0)
    array = row_major(jnp.moveaxis(array, positions, last))
    result = jnp.moveaxis(row_major(fn(array, sizes, last, norm)), last, positions)
    new = [d.resize(size) if d in chosen else d for d, size in zip(x.dims, result.shape, strict=True)]
    return slice_tensor(result, new, splits)


@op(example=lambda op, x: op(x, "a"), mixes_rows=True)
def fft(x: Tensor, dims: DimsLike, norm: Norm = "backward") -> Tensor:
    """The discrete Fourier transform along a dim, or along several: 2 or 3 are NumPy's `fft2` and `fftn`.

    Args:
      x: a tensor, real or complex.
      dims: one to three of its dims, which keep their names and sizes.
      norm: which transform divides, as in NumPy: "backward" (the inverse, by the number of positions),
        "forward" (this one), or "ortho" (both, by its square root).

    Returns:
      A complex tensor with the same dims.

    >>> import weft as wf
    >>> wf.abs(wf.fft.fft(wf.tensor([1.0, -1.0, 1.0, -1.0], "time=4"), "time"))
    f32[time=4] [0., 0., 4., 0.]
    """
    return _transform(jnp.fft.fftn, x, dims, norm)


@op(example=lambda op, x: op(x, "a"), mixes_rows=True)
def ifft(x: Tensor, dims: DimsLike, norm: Norm = "backward") -> Tensor:
    """The inverse of `fft`, with the same arguments. By default it divides by the sizes of the dims.

    >>> import weft as wf
    >>> x = wf.tensor([1.0, 2.0, 4.0], "time=3")
    >>> wf.abs(wf.fft.ifft(wf.fft.fft(x, "time"), "time"))
    f32[time=3] [1., 2., 4.]
    """
    return _transform(jnp.fft.ifftn, x, dims, norm)


@op(example=lambda op, x: op(x, "a"), mixes_rows=True)
def rfft(x: Tensor, dims: DimsLike, norm: Norm = "backward") -> Tensor:
    """The discrete Fourier transform of a real tensor, without the frequencies that follow by symmetry.

    Args:
      x: a real tensor.
      dims: one to three of its dims.
      norm: which transform divides, as for `fft`.

    Returns:
      A complex tensor. The last of `dims` keeps its name, and has n // 2 + 1 positions instead of n.

    >>> import weft as wf
    >>> wf.fft.rfft(wf.ones("batch=2 time=8"), "time").dims
    (batch=2, time=5)
    """
    x = as_slice(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TensorTypeError(
            f"rfft was given {describe(x)}",
            rule="rfft takes real numbers",
            hint="transform complex numbers with wf.fft.fft",
        )
    return _transform(jnp.fft.rfftn, x, dims, norm)


@op(example=lambda op, x: op(x, "a", size=7), mixes_rows=True)
def irfft(x: Tensor, dims: DimsLike, size: int | None = None, norm: Norm = "backward") -> Tensor:
    """The inverse of `rfft`.

    Args:
      x: a tensor, real or complex.
      dims: one to three of its dims.
      size: the size of the last of them in the result, by default 2 · (m - 1) for m positions. An odd size
        must be given.
      norm: which transform divides, as for `fft`.

    Returns:
      A real tensor.

    >>> import weft as wf
    >>> x = wf.tensor([1.0, 2.0, 4.0], "time=3")
    >>> wf.fft.irfft(wf.fft.rfft(x, "time"), "time", size=3)
    f32[time=3] [1., 2., 4.]
    """

    def resized(last: Dim) -> Dim:
        return last.resize(2 * (last.size - 1) if size is None else size)

    return _transform(jnp.fft.irfftn, x, dims, norm, resized)


def _frequencies(dim: Dim, cycles: ArrayFn, duration: float) -> Tensor:
    """A tensor of frequencies: the cycles at each position of the dim, by the duration of the signal."""
    splits = active.context.splits((dim,))
    dtype = jax.dtypes.canonicalize_dtype(float)
    array = cycles(global_positions(dim, splits[0])).astype(dtype) / jnp.asarray(duration, dtype)
    return slice_tensor(fill_padding(array, [dim], splits), [dim])


@op(example=lambda op: op(Dim("a", 6), 0.5))
def fftfreq(dim: DimLike, spacing: float = 1.0) -> Tensor:
    """The frequencies of the positions of a dim after `fft`, in cycles per unit of `spacing`.

    Args:
      dim: the dim.
      spacing: the distance between two samples.

    >>> import weft as wf
    >>> wf.fft.fftfreq(wf.Dim("time", 4))
    f32[time=4] [ 0.  ,  0.25, -0.5 , -0.25]
    """
    dim = as_dim(dim)
    half = dim.size // 2
    return _frequencies(dim, lambda n: (n + half) % dim.size - half, spacing * dim.size)


@op(example=lambda op: op(Dim("a", 6), 0.5))
def rfftfreq(dim: DimLike, spacing: float = 1.0) -> Tensor:
    """The frequencies of the positions of a dim after `rfft`.

    Args:
      dim: the dim before `rfft`, of n positions; the result has n // 2 + 1.
      spacing: the distance between two samples.

    >>> import weft as wf
    >>> wf.fft.rfftfreq(wf.Dim("time", 4))
    f32[time=3] [0.  , 0.25, 0.5 ]
    """
    dim = as_dim(dim)
    return _frequencies(dim.resize(dim.size // 2 + 1), lambda n: n, spacing * dim.size)
