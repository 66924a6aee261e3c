"""Linear algebra over two named dims of a tensor. Its other dims are batch dims, and may be split.

    wf.linalg.cholesky(a, "row", "column")  # of every matrix in a[batch, row, column]

The matrices of a batch are independent: each device works on its own ones, with the same function of
`jax.numpy.linalg` as on one device. So layouts change neither values nor signs. A matrix dim that is split is
gathered first; plans list the all-gather under the op. Results have the batch dims first and the matrix dims
last, as in NumPy.

The padding of an uneven batch would be singular matrices of zeros, whose factors or derivatives are NaN. So
functions see regular matrices there, and the padding of results is set to zero again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np

from ..core.context import active
from ..core.describe import describe
from ..core.dims import Dim, DimLike, DimsLike, check_distinct, new_dim, select_dim, select_dims, union_dims
from ..core.errors import DimError, ShapeError, TensorTypeError
from ..core.layout import Splits
from ..core.op import op
from ..core.operands import as_slice, check_along, slice_tensor
from ..core.padding import fill_padding
from ..core.reshard import reshard_together
from ..core.tensor import Tensor
from ..core.types import PyTree
from .elementwise import align, elementwise
from .reduce import as_inexact, max, sum
from .typing import ArrayFn


def _factorize(
    fn: Callable[..., PyTree],
    a: Tensor,
    rows: DimLike,
    columns: DimLike,
    *results: str,
    new: DimLike | None = None,
    square: bool = True,
) -> tuple[Tensor, ...]:
    """Apply a function to every matrix of a tensor.

    Args:
      fn: a function of an array [..., rows, columns].
      a: the tensor.
      rows, columns: the dims of its matrices.
      results: for each result of `fn`, its matrix dims: `r`, `c` and `k` are the rows, the columns and the
        new dim.
      new: the new dim; its size is that of the smaller matrix dim.
      square: whether the matrices must be square.
    """
    a = _operand(a)
    row, column = matrix = _matrix_dims(a, rows, columns, square)
    batch = _without(a.dims, matrix)
    names = {"r": row, "c": column}
    if new is not None:
        names["k"] = _factor_dim(new, min(row.size, column.size))
    (array,) = reshard_together([a], [_splits(a.dims, matrix)])
    outs = fn(_regular(align(array, a.dims, (*batch, *matrix)), batch, matrix))
    return tuple(
        _result(out, (*batch, *(names[letter] for letter in letters)), names.values())
        for out, letters in zip(jax.tree.leaves(outs), results, strict=True)
    )


def _solve(fn: ArrayFn, a: Tensor, b: Tensor, row: DimLike, column: DimLike) -> Tensor:
    """Solve a · x = b for every matrix of `a`.

    Args:
      fn: a function of two arrays, [..., row, column] and [..., row, right-hand sides].
      a, b: the tensors.
      row, column: the dims of the matrices.
    """
    a, b = _operand(a), _operand(b)
    rows, columns = matrix = _matrix_dims(a, row, column, square=True)
    select_dim(b.dims, rows.name)
    union_dims([a.dims, b.dims])
    batch, right = _without(a.dims, matrix), _without(b.dims, a.dims)
    if columns in b.dims:
        raise DimError(
            f"the right-hand side {describe(b)} has the dim {columns.name}",
            rule=f"the solution has {columns.name} in place of {rows.name}, and a tensor has a dim once",
            hint=f'rename it: b.rename({columns.name}="{columns.name}2")',
        )
    dims = (*batch, columns, *right)
    _splits(dims, matrix)  # raises if the layout maps a batch dim and a right-hand side to one axis
    left_array, right_array = reshard_together([a, b], [_splits(t.dims, matrix) for t in (a, b)])
    left_array = _regular(align(left_array, a.dims, (*batch, *matrix)), batch, matrix)
    right_array = align(right_array, b.dims, (*batch, rows, *right))
    shape = (*left_array.shape[:-1], *right_array.shape[right_array.ndim - len(right) :])
    right_array = jnp.broadcast_to(right_array, shape).reshape(*left_array.shape[:-1], -1)
    return _result(fn(left_array, right_array).reshape(shape), dims, matrix)


def _operand(x: Tensor) -> Tensor:
    """The slice of an operand, in a dtype that factorizations are computed in."""
    x = as_inexact(as_slice(x))
    if jnp.finfo(x.dtype).bits < 32:
        raise TensorTypeError(
            f"the operand is {describe(x)}",
            rule="factorizations are computed in 32 or 64 bits",
            hint="convert it first: x.astype(jnp.float32)",
        )
    return x


def _matrix_dims(x: Tensor, rows: DimLike, columns: DimLike, square: bool) -> tuple[Dim, Dim]:
    row, column = select_dims(x.dims, [rows, columns])
    check_along([row, column])
    if square and row.size != column.size:
        raise ShapeError(
            f"the matrices are not square: {row}, {column}",
            rule="the two dims of a square matrix have the same size",
            hint="wf.linalg.qr and wf.linalg.svd take other matrices, too",
        )
    return row, column


def _factor_dim(given: DimLike, size: int) -> Dim:
    dim = new_dim(given, size)
    if dim.size != size:
        raise DimError(
            f"the new dim is {dim}, and the smaller dim of the matrices has size {size}",
            rule="a factorization has as many columns as the smaller dim of the matrices",
            hint=f'pass the name alone: "{dim.name}"',
        )
    return dim


def _without(dims: Sequence[Dim], some: Sequence[Dim]) -> tuple[Dim, ...]:
    return tuple(d for d in dims if d not in some)


def _splits(dims: tuple[Dim, ...], unsplit: Collection[Dim]) -> Splits:
    """The layout's splits, except that some dims are not split."""
    splits = zip(dims, active.context.splits(dims), strict=True)
    return tuple(() if dim in unsplit else axes for dim, axes in splits)


def _regular(array: jax.Array, batch: tuple[Dim, ...], matrix: tuple[Dim, Dim]) -> jax.Array:
    """Matrices with regular ones in the padding of the batch.

    Derivatives of eigenvectors divide by the differences between eigenvalues, so these differ.
    """
    rows, columns = (d.size for d in matrix)
    diagonal = np.eye(rows, columns) * np.linspace(1, 2, columns)
    return fill_padding(array, (*batch, *matrix), _splits((*batch, *matrix), matrix), diagonal)


def _result(array: jax.Array, dims: tuple[Dim, ...], matrix: Collection[Dim]) -> Tensor:
    check_distinct(dims)
    splits = _splits(dims, matrix)
    return slice_tensor(fill_padding(array, dims, splits), dims, splits)


@op(example=lambda op, m: op(m, "a", "e"), mixes_rows=True)
def cholesky(a: Tensor, row: DimLike, column: DimLike) -> Tensor:
    """The lower triangular factor of positive definite matrices: l · lᴴ = a.

    Like `jax.numpy.linalg.cholesky`, it factorizes (a + aᴴ) / 2, and a matrix that is not positive definite
    gives NaN.

    Args:
      a: the matrices, a[..., row, column].
      row, column: their dims.

    Returns:
      l[..., row, column], zero where the position along `column` is greater than that along `row`.

    >>> import weft as wf
    >>> wf.linalg.cholesky(wf.tensor([[4.0, 2.0], [2.0, 5.0]], "row=2 column=2"), "row", "column")
    f32[row=2, column=2]
    [[2., 0.],
     [1., 2.]]
    """
    return _factorize(jnp.linalg.cholesky, a, row, column, "rc")[0]


@op(example=lambda op, m: op(m, "a", "e"), mixes_rows=True)
def inv(a: Tensor, row: DimLike, column: DimLike) -> Tensor:
    """The inverse of square matrices.

    A matrix a[row, column] maps a vector along `column` to one along `row`, and its inverse maps it back:
    `wf.einsum(inverse, y, reduce="row")` is x[column] if y[row] is `wf.einsum(a, x, reduce="column")`.

    Args:
      a: the matrices, a[..., row, column].
      row, column: their dims.

    Returns:
      The inverses with the dims [..., column, row]: their rows are `column`.

    >>> import weft as wf
    >>> wf.linalg.inv(wf.tensor([[1.0, 2.0], [0.0, 4.0]], "row=2 column=2"), "row", "column")
    f32[column=2, row=2]
    [[ 1.  , -0.5 ],
     [ 0.  ,  0.25]]
    """
    return _factorize(jnp.linalg.inv, a, row, column, "cr")[0]


@op(example=lambda op, m: op(m, "a", "e"), mixes_rows=True)
def det(a: Tensor, row: DimLike, column: DimLike) -> Tensor:
    """The determinant of square matrices a[..., row, column].

    >>> import weft as wf
    >>> wf.linalg.det(wf.tensor([[1.0, 2.0], [0.0, 4.0]], "row=2 column=2"), "row", "column")
    f32[] 4.
    """
    return _factorize(jnp.linalg.det, a, row, column, "")[0]


@op(example=lambda op, m: op(m, "a", "e"), mixes_rows=True)
def slogdet(a: Tensor, row: DimLike, column: DimLike) -> tuple[Tensor, Tensor]:
    """The sign of the determinant of square matrices, and the logarithm of its absolute value.

    Args:
      a: the matrices, a[..., row, column].
      row, column: their dims.

    Returns:
      The sign (complex: a number of absolute value 1) and the logarithm.

    >>> import weft as wf
    >>> wf.linalg.slogdet(wf.tensor([[0.0, 1.0], [1.0, 0.0]], "row=2 column=2"), "row", "column")
    (f32[] -1., f32[] 0.)
    """
    sign, log = _factorize(jnp.linalg.slogdet, a, row, column, "", "")
    return sign, log


@op(example=lambda op, m: op(m, "a", "e", "k"), mixes_rows=True)
def eigh(a: Tensor, row: DimLike, column: DimLike, new_dim: DimLike) -> tuple[Tensor, Tensor]:
    """The eigenvalues and eigenvectors of symmetric (complex: Hermitian) matrices.

    Like `jax.numpy.linalg.eigh`, it decomposes (a + aᴴ) / 2. The derivative of eigenvectors is infinite where
    two eigenvalues are equal.

    Args:
      a: the matrices, a[..., row, column].
      row, column: their dims.
      new_dim: the dim that counts the eigenvalues; a name is enough.

    Returns:
      The eigenvalues w[..., new_dim] in ascending order, and the eigenvectors v[..., row, new_dim].

    >>> import weft as wf
    >>> w, v = wf.linalg.eigh(wf.tensor([[3.0, 0.0], [0.0, 2.0]], "row=2 column=2"), "row", "column", "k")
    >>> w, v.dims
    (f32[k=2] [2., 3.], (row=2, k=2))
    """
    w, v = _factorize(jnp.linalg.eigh, a, row, column, "k", "rk", new=new_dim)
    return w, v


@op(example=lambda op, m: op(m, "a", "b", "k"), mixes_rows=True)
def qr(a: Tensor, rows: DimLike, columns: DimLike, new_dim: DimLike) -> tuple[Tensor, Tensor]:
    """The QR decomposition of matrices: q · r = a, with orthonormal columns in q and an upper triangular r.

    Args:
      a: the matrices, a[..., rows, columns]. They need not be square.
      rows, columns: their dims.
      new_dim: the dim between the factors; a name is enough. Its size is that of the smaller of the two dims.

    Returns:
      q[..., rows, new_dim] and r[..., new_dim, columns].

    >>> import weft as wf
    >>> q, r = wf.linalg.qr(wf.ones("rows=4 columns=2"), "rows", "columns", "k")
    >>> q.dims, r.dims
    ((rows=4, k=2), (k=2, columns=2))
    """
    q, r = _factorize(jnp.linalg.qr, a, rows, columns, "rk", "kc", new=new_dim, square=False)
    return q, r


@op(example=lambda op, m: op(m, "a", "b", "k"), mixes_rows=True)
def svd(a: Tensor, rows: DimLike, columns: DimLike, new_dim: DimLike) -> tuple[Tensor, Tensor, Tensor]:
    """The (reduced) singular value decomposition of matrices: u · diag(s) · vh = a.

    The derivative of singular vectors is infinite where two singular values are equal.

    Args:
      a: the matrices, a[..., rows, columns]. They need not be square.
      rows, columns: their dims.
      new_dim: the dim that counts the singular values; a name is enough. Its size is that of the smaller of
        the two dims.

    Returns:
      u[..., rows, new_dim], the singular values s[..., new_dim] in descending order, and
      vh[..., new_dim, columns].

    >>> import weft as wf
    >>> a = wf.tensor([[0.0, 2.0], [3.0, 0.0]], "rows=2 columns=2")
    >>> u, s, vh = wf.linalg.svd(a, "rows", "columns", "k")
    >>> s, u.dims, vh.dims
    (f32[k=2] [3., 2.], (rows=2, k=2), (k=2, columns=2))
    """
    reduced = functools.partial(jnp.linalg.svd, full_matrices=False)
    u, s, vh = _factorize(reduced, a, rows, columns, "rk", "k", "kc", new=new_dim, square=False)
    return u, s, vh


@op(example=lambda op, m, x: op(m, x.rename(b="f"), "a", "e"), mixes_rows=True)
def solve(a: Tensor, b: Tensor, row: DimLike, column: DimLike) -> Tensor:
    """Solve systems of linear equations: a · x = b, summed over `column`.

    Dims of `b` that `a` lacks count right-hand sides, and dims of `a` that `b` lacks repeat `b`. All of them
    may be split.

    Args:
      a: square matrices, a[..., row, column].
      b: the right-hand sides, b[..., row, ...]. It has no dim `column`.
      row, column: the dims of the matrices.

    Returns:
      x[..., column, ...]: the batch dims of `a`, `column`, and the dims that only `b` has.

    >>> import weft as wf
    >>> a = wf.tensor([[1.0, 2.0], [0.0, 4.0]], "row=2 column=2")
    >>> wf.linalg.solve(a, wf.tensor([5.0, 8.0], "row=2"), "row", "column")
    f32[column=2] [1., 2.]
    """
    return _solve(jnp.linalg.solve, a, b, row, column)


@op(example=lambda op, m, x: op(m, x.rename(b="f"), "a", "e", lower=True), mixes_rows=True)
def triangular_solve(a: Tensor, b: Tensor, row: DimLike, column: DimLike, lower: bool = False) -> Tensor:
    """Solve systems of linear equations with triangular matrices.

    To solve with the transposed matrices, swap `row` and `column`. A lower triangular matrix is then upper
    triangular.

    Args:
      a: square matrices, a[..., row, column]. Only one triangle is read.
      b: the right-hand sides, as for `solve`.
      row, column: the dims of the matrices.
      lower: whether to read the lower triangle, whose positions along `column` are at most those along `row`.

    Returns:
      x[..., column, ...], as from `solve`.

    >>> import weft as wf
    >>> a = wf.tensor([[1.0, 2.0], [0.0, 4.0]], "row=2 column=2")
    >>> wf.linalg.triangular_solve(a, wf.tensor([5.0, 8.0], "row=2"), "row", "column")
    f32[column=2] [1., 2.]
    """
    fn = functools.partial(jax.scipy.linalg.solve_triangular, lower=lower)
    return _solve(fn, a, b, row, column)


@op(example=lambda op, x: op(x, "a"), mixes_rows=True)
def norm(x: Tensor, dims: DimsLike | None = None, ord: float = 2) -> Tensor:
    """The norm of the elements along dims, by default all of them: of vectors, or Frobenius' of matrices.

    A split dim needs an all-reduce, as in `sum` and `max`. As in `jax.numpy.linalg.norm`, the gradient of the
    2-norm is NaN where the norm is zero.

    Args:
      x: a tensor.
      dims: the dims of the vectors or matrices.
      ord: 2 for the square root of the sum of squares, 1 for the sum of absolute values, `math.inf` for the
        largest of them.

    >>> import weft as wf
    >>> wf.linalg.norm(wf.tensor([[3.0, 4.0], [6.0, 8.0]], "a=2 b=2"), "b")
    f32[a=2] [ 5., 10.]
    """
    x = as_inexact(as_slice(x))
    if ord == 2:
        squares = elementwise(lambda a: jnp.real(a * jnp.conj(a)), [x])
        return elementwise(jnp.sqrt, [sum(squares, dims)], undefined_at_zero=True)
    if ord in (1, math.inf):
        return (sum if ord == 1 else max)(elementwise(jnp.abs, [x]), dims)
    raise ShapeError(
        f"the order of the norm is {ord!r}",
        rule="the order is 1, 2 or math.inf",
        hint="wf.linalg.norm(x, dims) is the Euclidean norm",
    )
