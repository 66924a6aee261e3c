"""einsum: multiply by name and sum over the dims that are not in the output.

Dims are split the same way in every operand, so the product of slices is a slice of the product. If a summed
dim is split, each device sums over its own block, and the result is a pending sum over that dim's axes.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import PrecisionLike

from ..core.context import active
from ..core.dims import Dim, DimsLike, select_dims, union_dims
from ..core.errors import DimError, TensorTypeError
from ..core.op import op
from ..core.operands import as_slice, check_along, slice_tensor
from ..core.padding import fill_padding
from ..core.reshard import reshard_together
from ..core.tensor import Tensor
from ..core.types import cast_like, common_type, weak_type


@op(example=lambda op, x, y, p: op(x, y, p, out=["b"]), mixes_rows=True, split_invariant=True)
def einsum(
    *tensors: Tensor,
    out: DimsLike | None = None,
    reduce: DimsLike | None = None,
    precision: PrecisionLike = None,
) -> Tensor:
    """Multiply tensors, aligned by name, and sum over the dims that are not in the result.

    Args:
      tensors: one or more tensors; dims with the same name are the same index.
      out: the dims of the result, in order. All other dims are summed.
      reduce: alternative to `out`: the dims to sum. The others keep the order of first occurrence.
      precision: as in `jax.numpy.einsum`.

    >>> import weft as wf
    >>> x, w = wf.ones("batch=2 io=3"), wf.ones("io=3 hidden=4")
    >>> wf.einsum(x, w, out=["batch", "hidden"]).numpy().tolist()
    [[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]
    """
    if any(isinstance(t, str) for t in tensors):
        raise TensorTypeError(
            "einsum was given a formula",
            rule="operands are aligned by dim names, and out= lists the dims of the result",
            hint="einsum(x, w, out=[batch, hidden])",
        )
    if not tensors:
        raise TensorTypeError(
            "einsum was given no tensors",
            rule="einsum multiplies one or more tensors",
            hint="einsum(x, w, out=[batch, hidden])",
        )
    if (out is None) == (reduce is None):
        raise DimError(
            "einsum was given both out= and reduce=" if out is not None else "einsum has no out=",
            rule="einsum needs either the dims of the result (out=) or the dims to sum (reduce=)",
            hint="einsum(x, w, out=[batch, hidden]), or einsum(x, w, reduce=[io])",
        )
    slices = [as_slice(t) for t in tensors]
    all_dims = union_dims(t.dims for t in slices)
    if out is not None:
        out_dims = select_dims(all_dims, out)
    else:
        assert reduce is not None
        summed = select_dims(all_dims, reduce)
        out_dims = tuple(d for d in all_dims if d not in summed)
    return contract(slices, out_dims, precision)


def contract(slices: list[Tensor], out_dims: tuple[Dim, ...], precision: PrecisionLike = None) -> Tensor:
    """einsum of slices, given the dims of the result."""
    all_dims = union_dims(t.dims for t in slices)
    ctx = active.context
    splits = dict(zip(all_dims, ctx.splits(all_dims), strict=True))
    arrays = reshard_together(slices)
    summed = [d for d in all_dims if d not in out_dims]
    check_along(summed)
    for n, t in enumerate(slices):
        # Padding is zero, so the products need no mask. But if only one operand has a summed dim, its
        # cotangent along that dim is a broadcast, which is not zero in the padding. Mask it here.
        if ctx.placement.has_padding(t.dims, t_splits := ctx.splits(t.dims)):
            unshared = [d for d in summed if d in t.dims and sum(d in s.dims for s in slices) == 1]
            arrays[n] = fill_padding(arrays[n], t.dims, t_splits, only=unshared)
    result = _product([t.dims for t in slices], arrays, out_dims, precision)
    out_splits = ctx.splits(out_dims)
    # Padding times infinity is not zero.
    if ctx.placement.has_padding(out_dims, out_splits) and jnp.issubdtype(result.dtype, jnp.inexact):
        result = fill_padding(result, out_dims, out_splits)
    pending = {axis for d in summed for axis in splits[d]}
    return slice_tensor(result, out_dims, pending=pending)


def _product(
    operands: list[tuple[Dim, ...]],
    arrays: list[jax.Array],
    out_dims: tuple[Dim, ...],
    precision: PrecisionLike,
) -> jax.Array:
    """The product of arrays, with the rows of the result flattened into one dim.

    The gradient of a weight is a sum over rows. If the rows are several dims, such as batch and length, XLA's
    CPU backend copies the operands before it multiplies. The flattened operand is memoized, so several
    products of the same operand save one array for the backward pass.
    """
    n, rows = _rows(operands, out_dims)
    if len(rows) < 2:
        return _einsum(operands, arrays, out_dims, precision)
    dims, shape = operands[n], arrays[n].shape
    rest, others = [d for d in dims if d not in rows], [d for d in out_dims if d not in rows]
    order = tuple(dims.index(d) for d in (*rows, *rest))
    row_shape = [shape[i] for i in order[: len(rows)]]

    memo = active.context.variant(arrays[n], ("rows", order, len(rows)), collective=False)
    if memo.value is None:
        flat = math.prod(row_shape), *(shape[dims.index(d)] for d in rest)
        with memo.tracing():
            memo.store(lax.reshape(lax.transpose(arrays[n], order), flat))
    arrays[n] = memo.value
    operands[n] = (rows[0], *rest)  # the first row dim stands for the flattened one
    result = _einsum(operands, arrays, (rows[0], *others), precision)
    result = lax.reshape(result, (*row_shape, *result.shape[1:]))
    return lax.transpose(result, [(*rows, *others).index(d) for d in out_dims])


def _rows(operands: list[tuple[Dim, ...]], out_dims: tuple[Dim, ...]) -> tuple[int, list[Dim]]:
    """The operand that has the first dim of the result, and the dims of the result that only it has."""
    having = {d: [n for n, dims in enumerate(operands) if d in dims] for d in union_dims(operands)}
    contracts = any(len(having[d]) > 1 for d in having if d not in out_dims)
    n = having[out_dims[0]][0] if contracts and out_dims else 0
    own = [d for d in operands[n] if d in out_dims and having[d] == [n]]
    return n, own if contracts and out_dims and out_dims[0] in own else []


def _einsum(
    operands: list[tuple[Dim, ...]],
    arrays: list[jax.Array],
    out_dims: tuple[Dim, ...],
    precision: PrecisionLike,
) -> jax.Array:
    """The product of arrays, as `jnp.einsum` computes it.

    Weakly typed operands are cast first, and integers that meet floats. jnp multiplies in an order that
    depends on the sizes, hence on the layout, and it rejects a product of two operands whose dtype is wider
    than the result's.
    """
    if any([a.weak_type or a.dtype != arrays[0].dtype for a in arrays]):
        common = common_type(*arrays)
        arrays = [cast_like(a, common) if weak_type(a) or _is_exact(a) else a for a in arrays]
    index = {d: n for n, d in enumerate(union_dims(operands))}
    has_own_sums = any(d not in out_dims and sum(d in dims for dims in operands) == 1 for d in index)
    if len(arrays) == 2 and arrays[0].dtype == arrays[1].dtype and not has_own_sums:
        return _dot(operands, arrays, out_dims, precision)
    # Integers for dims, since there may be more dims than letters.
    terms = [
        term
        for dims, array in zip(operands, arrays, strict=True)
        for term in (array, [index[d] for d in dims])
    ]
    return jnp.einsum(*terms, [index[d] for d in out_dims], precision=precision)


def _is_exact(array: jax.Array) -> bool:
    return not jnp.issubdtype(array.dtype, jnp.inexact)


def _dot(
    operands: list[tuple[Dim, ...]],
    arrays: list[jax.Array],
    out_dims: tuple[Dim, ...],
    precision: PrecisionLike,
) -> jax.Array:
    """The product of two arrays that is one `lax.dot_general`: each summed dim is in both.

    jnp.einsum traces the same equations, but takes ten times as long to find them.
    """
    (x, y), (a, b) = operands, arrays
    batch = [d for d in out_dims if d in x and d in y]
    summed = [d for d in x if d in y and d not in out_dims]
    if [*batch, *_without(x, y), *_without(y, x)] != list(out_dims):
        # Like jnp.einsum, exchange the operands: it may save the transpose.
        x, y, a, b = y, x, b, a
    pairs = [([x.index(d) for d in some], [y.index(d) for d in some]) for some in (summed, batch)]
    result = lax.dot_general(a, b, (pairs[0], pairs[1]), precision, preferred_element_type=a.dtype)
    made = [*batch, *_without(x, y), *_without(y, x)]
    return lax.transpose(result, [made.index(d) for d in out_dims])


def _without(dims: tuple[Dim, ...], others: tuple[Dim, ...]) -> list[Dim]:
    return [d for d in dims if d not in others]
