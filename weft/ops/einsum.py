"""einsum: multiply by name, sum what is not in the output.

Every operand is split by its dims, so the product of slices is a slice of the product. Where a summed dim
is split, each device has the sum over its own piece: the result is a pending sum over that dim's axes.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ..core import collectives, context
from ..core.dims import Dim, select_dims, union_dims
from ..core.errors import DimError, TensorTypeError
from ..core.op import op
from ..core.operands import as_slice, check_along, slice_tensor
from ..core.padding import fill_padding
from ..core.reshard import reshard_together
from ..core.tensor import Tensor
from ..core.types import cast_like, common_type, weak_type


@op
def einsum(*tensors: Tensor, out: Any = None, reduce: Any = None, precision: Any = None) -> Tensor:
    """The product of tensors, aligned by name, summed over the dims that are not wanted.

    Args:
      tensors: one or more tensors; dims with the same name are the same index.
      out: the dims of the result, in order; all others are summed.
      reduce: instead of `out`, the dims to sum; the others stay in order of first occurrence.
      precision: as in `jax.numpy.einsum`.

    >>> import weft as wf
    >>> x, w = wf.ones("batch=2 io=3"), wf.ones("io=3 hidden=4")
    >>> wf.einsum(x, w, out=["batch", "hidden"]).numpy().tolist()
    [[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]
    """
    if any(isinstance(t, str) for t in tensors):
        raise TensorTypeError(
            "einsum was given a formula",
            rule="dims have names: those that tensors share are matched, and out= says which stay",
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
            rule="einsum needs the dims of the result (out=) or those to be summed (reduce=)",
            hint="einsum(x, w, out=[batch, hidden]), or einsum(x, w, reduce=[io])",
        )
    slices = [as_slice(t) for t in tensors]
    every = union_dims(t.dims for t in slices)
    if out is not None:
        kept = select_dims(every, out)
    else:
        gone = select_dims(every, reduce)
        kept = tuple(d for d in every if d not in gone)
    return contract(slices, kept, precision)


def contract(slices: list[Tensor], kept: tuple[Any, ...], precision: Any = None) -> Tensor:
    """einsum of slices with the dims of the result given."""
    every = union_dims(t.dims for t in slices)
    program = context.require()
    splits = dict(zip(every, program.splits(every), strict=True))
    arrays = reshard_together(slices)
    summed = [d for d in every if d not in kept]
    check_along(summed)
    for place, t in enumerate(slices):
        # Padding is zero, so products need no mask; but the cotangent of a dim that only one operand
        # has, and that is summed, would not be zero there.
        lonely = [d for d in summed if d in t.dims and sum(d in s.dims for s in slices) == 1]
        home = program.splits(t.dims)
        arrays[place] = fill_padding(arrays[place], t.dims, home, only=lonely)
    result = _product([t.dims for t in slices], arrays, kept, precision)
    if jnp.issubdtype(result.dtype, jnp.inexact):  # padding times infinity is not zero
        result = fill_padding(result, kept, program.splits(kept))
    pending = {axis for d in summed for axis in splits[d]}
    if pending and result.dtype == jnp.bool_:  # the sum of truth values is "any", as in jax.numpy
        return slice_tensor(collectives.all_reduce_max(result, tuple(sorted(pending))), kept)
    return slice_tensor(result, kept, pending=pending)


def _product(
    operands: list[tuple[Dim, ...]], arrays: list[Any], kept: tuple[Dim, ...], precision: Any
) -> jax.Array:
    """jnp.einsum, with the rows of its result as one dim.

    The gradient of a weight is a sum over rows: if they are several dims, such as batch and length, XLA's CPU
    copies what it multiplies first. An operand so reshaped is a form of it, so that several products of the
    same operand keep one array for the backward pass.
    """
    place, rows = _rows(operands, kept)
    if len(rows) < 2:
        return _einsum(operands, arrays, kept, precision)
    dims, shape = operands[place], arrays[place].shape
    rest, others = [d for d in dims if d not in rows], [d for d in kept if d not in rows]
    order = tuple(dims.index(d) for d in (*rows, *rest))
    lengths = [shape[n] for n in order[: len(rows)]]

    def in_rows(array: Any) -> Any:
        return array.transpose(order).reshape(math.prod(lengths), *(shape[dims.index(d)] for d in rest))

    program = context.require()
    arrays[place] = program.memoize(arrays[place], ("rows", order, len(rows)), in_rows, collective=False)
    operands[place] = (rows[0], *rest)  # the first stands for all
    result = _einsum(operands, arrays, (rows[0], *others), precision)
    result = result.reshape(*lengths, *result.shape[1:])
    return result.transpose([(*rows, *others).index(d) for d in kept])


def _rows(operands: list[tuple[Dim, ...]], kept: tuple[Dim, ...]) -> tuple[int, list[Dim]]:
    """The operand that has the first dim of a product's result, and those of its dims that are its own."""
    having = {d: [n for n, dims in enumerate(operands) if d in dims] for d in union_dims(operands)}
    multiplied = any(len(having[d]) > 1 for d in having if d not in kept)
    place = having[kept[0]][0] if multiplied and kept else 0
    own = [d for d in operands[place] if d in kept and having[d] == [place]]
    return place, own if multiplied and kept and kept[0] in own else []


def _einsum(
    operands: list[tuple[Dim, ...]], arrays: list[Any], kept: tuple[Dim, ...], precision: Any
) -> jax.Array:
    """jnp.einsum with numbers for dims: there are more of them than letters.

    Weak operands give way first. jnp multiplies in an order that depends on the sizes, so on the layout, and
    refuses a product of two of them that is wider than the result.
    """
    if any(map(weak_type, arrays)):
        common = common_type(*arrays)
        arrays = [cast_like(a, common) if weak_type(a) else a for a in arrays]
    number = {d: n for n, d in enumerate(union_dims(operands))}
    terms = [
        term
        for dims, array in zip(operands, arrays, strict=True)
        for term in (array, [number[d] for d in dims])
    ]
    return jnp.einsum(*terms, [number[d] for d in kept], precision=precision)
