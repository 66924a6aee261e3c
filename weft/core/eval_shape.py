"""eval_shape: the dims and dtypes of a function's results, from those of its arguments."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from .describe import reports_call
from .op import call_adopting
from .placement import without_values
from .program import Program
from .staging import UNPLACED
from .tensor import Tensor, tree_map
from .types import PyTree, Result


@reports_call
def eval_shape(fn: Callable[..., Result], /, *args: PyTree, **kwargs: PyTree) -> Result:
    """The results of a function as specs, without computing them, like `jax.eval_shape`.

    Args:
      fn: takes and returns pytrees of tensors; a program, too.
      args, kwargs: its arguments: tensors, or `wf.spec`s; arrays, or `jax.ShapeDtypeStruct`s.

    Returns:
      The result with a spec for each tensor, and a `jax.ShapeDtypeStruct` for each raw array. They are not
      placed on a mesh.

    >>> import weft as wf
    >>> x, w = wf.spec("batch=64 d=8"), wf.ones("d=8 h=4")
    >>> wf.eval_shape(lambda x, w: wf.einsum(x, w, out="batch h"), x, w)
    f32[batch=64, h=4]
    """
    args, kwargs = tree_map(_without_values, (args, kwargs))
    # A function that captures placed tensors, or calls a program, is traced on their mesh.
    specs = call_adopting(
        lambda placement: (
            Program(fn, placement.mesh, placement.layout, eager=True).trace(*args, **kwargs).out_info
        ),
        UNPLACED,
    )
    return tree_map(_without_values, specs)


def _without_values(leaf: PyTree) -> PyTree:
    if isinstance(leaf, Tensor):
        return without_values(leaf)
    return jax.eval_shape(lambda x: x, leaf) if isinstance(leaf, jax.Array | np.ndarray) else leaf
