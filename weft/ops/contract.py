"""einsum: multiply by name, sum what is not in the output.

Every operand is split by its dims, so the product of slices is a slice of the product. Where a summed dim
is split, each device has the sum over its own piece: the result is a pending sum over that dim's axes.
"""

from __future__ import annotations

import string
from typing import Any

import jax.numpy as jnp

from .. import collectives, context
from ..dims import pick, union
from ..eager import op
from ..errors import DimError, TensorTypeError
from ..forms import as_slice, slice_tensor, together
from ..padding import fill_padding
from ..tensor import Tensor


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
    every = union(t.dims for t in slices)
    if out is not None:
        kept = pick(every, out)
    else:
        gone = pick(every, reduce)
        kept = tuple(d for d in every if d not in gone)
    return contract(slices, kept, precision)


def contract(slices: list[Tensor], kept: tuple[Any, ...], precision: Any = None) -> Tensor:
    """einsum of slices with the dims of the result given."""
    every = union(t.dims for t in slices)
    program = context.require()
    splits = dict(zip(every, program.splits(every), strict=True))
    arrays = together(slices)
    summed = [d for d in every if d not in kept]
    for place, t in enumerate(slices):
        # Padding is zero, so products need no mask; but the cotangent of a dim that only one operand
        # has, and that is summed, would not be zero there.
        lonely = [d for d in summed if d in t.dims and sum(d in s.dims for s in slices) == 1]
        home = program.splits(t.dims)
        arrays[place] = fill_padding(arrays[place], t.dims, home, only=lonely)
    letters = dict(zip(every, string.ascii_letters, strict=False))
    terms = ",".join("".join(letters[d] for d in t.dims) for t in slices)
    formula = f"{terms}->{''.join(letters[d] for d in kept)}"
    result = jnp.einsum(formula, *arrays, precision=precision)
    pending = {axis for d in summed for axis in splits[d]}
    if pending and result.dtype == jnp.bool_:  # the sum of truth values is "any", as in jax.numpy
        return slice_tensor(collectives.all_reduce_max(result, tuple(sorted(pending))), kept)
    return slice_tensor(result, kept, pending=pending)
