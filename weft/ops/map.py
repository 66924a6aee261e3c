"""map: call a function for each position of a named dim, one after the other.

In a file of its own, because the name hides Python's `map`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax

from ..core.boundary import common_dim, flatten
from ..core.collectives import Axes
from ..core.dims import DimLike
from ..core.errors import TensorTypeError
from ..core.op import op
from ..core.tensor import Tensor
from ..core.types import Result, Tree
from .vmap import ArraysFn, map_positions


@op(example=lambda op, x: op(lambda row: row * row["b", 0], x, "a"), functions=True)
def map(f: Callable[[Tree], Result], xs: Tree, dim: DimLike, *, batch_size: int | None = None) -> Result:
    """Apply `f` to the slices of `xs` along a dim, one after the other, like `jax.lax.map`.

    It needs less memory than `vmap`. If the dim is split, each device maps its own positions.

    Args:
      f: takes one slice of `xs` (without the dim).
      xs: a pytree of tensors that have the dim.
      dim: the dim to map over.
      batch_size: how many positions a device computes at once; by default one.

    Returns:
      The results for all positions, stacked along the dim, which comes first.

    >>> import weft as wf
    >>> x = wf.tensor([[1.0, 2.0], [3.0, 4.0]], "row=2 column=2")
    >>> wf.map(lambda r: r / wf.sum(r), x, "row")
    f32[row=2, column=2]
    [[0.3333, 0.6667],
     [0.4286, 0.5714]]
    """
    items, _ = flatten(xs)
    raw = [x for x in items if not isinstance(x, Tensor)]
    if raw or not items:
        raise TensorTypeError(
            f"map was given {'a raw array or a number' if raw else 'no tensors'}",
            rule="map takes a pytree of tensors that have the dim",
            hint="values that are the same at all positions need not be passed: the function can capture "
            "them; wf.scan takes raw arrays",
        )
    if batch_size is not None and not (type(batch_size) is int and batch_size > 0):
        raise TensorTypeError(
            f"batch_size is {batch_size!r}",
            rule="a device computes at least one position at a time, and the number is not an input",
            hint="pass a Python integer, or omit batch_size=",
        )
    dim = common_dim(items, dim)

    def run(inner: ArraysFn, arrays: list[jax.Array], axes: Axes) -> list[jax.Array]:
        # Devices whose positions take different branches must still run the same collectives. Batches use
        # JAX's vmap, which computes all branches and selects.
        return lax.map(inner, arrays, batch_size=batch_size or (1 if axes else None))

    return map_positions(run, f, dim, (xs,), {})
