"""Shapes: the shape that a tensor's array must have, and the error for an array with a different one.

JAX's own functions change a tensor's array and not its dims: `jax.tree.map(lambda a: a[:2], x)` slices the
array, `jax.vmap` and `jax.lax.scan` remove a dimension or add one. A Tensor can't reject such an array when
it is constructed, because JAX routinely rebuilds trees with sentinels and batched arrays. So the shape is
checked where the tensor is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .dims import Dim
from .errors import ShapeError
from .layout import Splits

if TYPE_CHECKING:
    from .tensor import Tensor

Shape = tuple[int, ...]


def true_shape(dims: Sequence[Dim]) -> Shape:
    """The shape without padding."""
    return tuple(dim.size for dim in dims)


def stored_splits(t: Tensor) -> Splits:
    """How a global tensor is split over its mesh."""
    return ((),) * len(t.dims) if t.placement is None else t.placement.splits(t.dims, t.role)


def shape_mismatch_error(
    tensor: str, dims: tuple[Dim, ...], array: object, needed: Shape, is_slice: bool
) -> ShapeError:
    """The error for a tensor whose array does not have the shape of its dims."""
    if not hasattr(array, "shape"):
        return ShapeError(
            f"{tensor} holds a {type(array).__name__} instead of an array",
            rule="jax.tree.map maps over the arrays in tensors, and rebuilds tensors from the results",
            hint="for a result that is not an array: jax.tree.map(fn, tree, is_leaf=wf.is_tensor)",
        )
    # The expected shape may be padded, or that of a slice; users know the true sizes, so say which it is.
    shape = tuple(array.shape)
    fact, hint = _difference(dims, shape, needed)
    why = ", that of one device's slice" if is_slice else ", padded so that all devices have equal slices"
    return ShapeError(
        f"{tensor} holds an array of shape {shape}, {fact}",
        f"its dims need the shape {needed}{why if needed != true_shape(dims) else ''}",
        rule="jax.tree.map, jax.vmap and jax.lax.scan change a tensor's array and not its dims; "
        "an array that does not have the shape of its dims can't be used",
        hint=hint,
    )


def _difference(dims: tuple[Dim, ...], shape: Shape, needed: Shape) -> tuple[str, str]:
    """How a shape differs from the one needed, and a hint.

    The tests are ordered from the most specific explanation to the least.
    """
    names = [dim.name for dim in dims]
    if shape == true_shape(dims):
        return (
            "without its padding",
            "x.array is the array without padding; turn a new array into a tensor with "
            "wf.place(wf.tensor(array, x.dims), x.mesh, x.layout)",
        )
    if len(shape) == len(needed) + 1:
        for position, size in enumerate(shape):
            if _without(shape, position) == needed:
                return (
                    f"with an additional dimension of size {size}",
                    f'name it: wf.stack(tensors, wf.Dim("new", {size})), for trees jax.tree.map(lambda *t: '
                    f'wf.stack(t, wf.Dim("new", {size})), *trees, is_leaf=wf.is_tensor); instead of '
                    "jax.vmap over keys, call the function for each key and stack the results",
                )
    if len(shape) == len(needed) - 1:
        for position, name in enumerate(names):
            if _without(needed, position) == shape:
                return (
                    f"without {name}",
                    f'use wf.vmap(f, "{name}") instead of jax.vmap, wf.scan(f, carry, xs, "{name}") instead '
                    f'of jax.lax.scan, and x["{name}", 0] to select one position',
                )
    if sorted(shape) == sorted(needed):
        # Several dims may have one size: each is used once.
        rest = list(zip(needed, names, strict=True))
        order = [rest.pop([size for size, _ in rest].index(size))[1] for size in shape]
        return "with its dimensions in a different order", f"reorder dims by name: wf.transpose(x, {order})"
    if len(shape) == len(needed) and all(have <= need for have, need in zip(shape, needed, strict=True)):
        sliced = [(n, have) for n, have, need in zip(names, shape, needed, strict=True) if have < need]
        name, size = sliced[0]
        return (
            f"a part of {', '.join(n for n, _ in sliced)}",
            f'slice by name: x["{name}", :{size}], for trees jax.tree.map(lambda t: t["{name}", :{size}], '
            "tree, is_leaf=wf.is_tensor)",
        )
    return (
        "which is not the shape of its dims",
        "use Weft's functions, which change dims and array together; or name the new array's dimensions: "
        "wf.tensor(array, dims)",
    )


def _without(shape: Shape, position: int) -> Shape:
    return shape[:position] + shape[position + 1 :]
