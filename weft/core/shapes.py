"""Shapes: the shape that a tensor's array has to have, and the error for one that has another.

JAX's own functions change a tensor's array and leave its dims as they are: `jax.tree.map(lambda a: a[:2], x)`
slices the array, `jax.vmap` and `jax.lax.scan` take a dimension away or add one. The result can't be rejected
where it is made: JAX rebuilds trees with placeholders and with batched arrays as a matter of course. So it is
rejected where it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from .dims import Dim
from .errors import ShapeError
from .layout import Layout, Splits
from .mesh import Mesh

Shape = tuple[int, ...]


def true_shape(dims: Sequence[Dim]) -> Shape:
    """The shape without padding."""
    return tuple(dim.size for dim in dims)


def slice_shape(dims: Sequence[Dim], splits: Splits, mesh: Mesh) -> Shape:
    """The shape of one device's slice, padding included."""
    return tuple(-(-dim.size // mesh.ways(axes)) for dim, axes in zip(dims, splits, strict=True))


def stored_shape(dims: Sequence[Dim], splits: Splits, mesh: Mesh | None) -> Shape:
    """The padded shape at rest: each split dim rounded up to a multiple of its pieces."""
    ways = [mesh.ways(axes) if mesh is not None else 1 for axes in splits]
    return tuple(-(-dim.size // n) * n for dim, n in zip(dims, ways, strict=True))


@functools.lru_cache(maxsize=2**14)
def expected_shape(
    dims: tuple[Dim, ...], role: str, mesh: Mesh | None, layout: Layout | None, splits: Splits | None
) -> Shape:
    """The shape of the array of a tensor with these static parts: a slice's if it has splits."""
    if mesh is None:
        return true_shape(dims)
    if splits is not None:
        return slice_shape(dims, splits, mesh)
    return true_shape(dims) if layout is None else stored_shape(dims, layout.splits(dims, mesh, role), mesh)


def shape_mismatch_error(
    tensor: str, dims: tuple[Dim, ...], array: Any, needed: Shape, is_slice: bool
) -> ShapeError:
    """The error for a tensor whose array doesn't have the shape that its dims need."""
    if not hasattr(array, "shape"):
        return ShapeError(
            f"{tensor} holds a {type(array).__name__} in place of an array",
            rule="jax.tree.map goes to the arrays in tensors, and rebuilds tensors from the results",
            hint="for a result that is not an array: jax.tree.map(fn, tree, is_leaf=wf.is_tensor)",
        )
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
    """How a shape differs from the one needed, and what to write instead."""
    names = [dim.name for dim in dims]
    if shape == true_shape(dims):
        return (
            "without its padding",
            "x.array is the array without padding, and a new array becomes a tensor by "
            "wf.place(wf.tensor(array, x.dims), x.mesh, x.layout)",
        )
    if len(shape) == len(needed) + 1:
        for place, size in enumerate(shape):
            if _without(shape, place) == needed:
                return (
                    f"with a further dimension of size {size}",
                    f'name it: wf.stack(tensors, wf.Dim("new", {size})), for trees jax.tree.map(lambda *t: '
                    f'wf.stack(t, wf.Dim("new", {size})), *trees, is_leaf=wf.is_tensor); in place of '
                    "jax.vmap over keys, call the function for each key and stack the results",
                )
    if len(shape) == len(needed) - 1:
        for place, name in enumerate(names):
            if _without(needed, place) == shape:
                return (
                    f"which lacks {name}",
                    f'use wf.vmap(f, "{name}") in place of jax.vmap, wf.scan(f, carry, xs, "{name}") in '
                    f'place of jax.lax.scan, and x["{name}", 0] to take one position',
                )
    if sorted(shape) == sorted(needed):
        rest = list(zip(needed, names, strict=True))
        order = [rest.pop([size for size, _ in rest].index(size))[1] for size in shape]
        return "with its dimensions in another order", f"reorder dims by name: wf.transpose(x, {order})"
    if len(shape) == len(needed) and all(have <= need for have, need in zip(shape, needed, strict=True)):
        cut = [(n, have) for n, have, need in zip(names, shape, needed, strict=True) if have < need]
        name, size = cut[0]
        return (
            f"a part of {', '.join(n for n, _ in cut)}",
            f'slice by name: x["{name}", :{size}], for trees jax.tree.map(lambda t: t["{name}", :{size}], '
            "tree, is_leaf=wf.is_tensor)",
        )
    return (
        "which is not that of its dims",
        "use Weft's functions, which change dims and array together; or name the new array's dimensions: "
        "wf.tensor(array, dims)",
    )


def _without(shape: Shape, place: int) -> Shape:
    return shape[:place] + shape[place + 1 :]
