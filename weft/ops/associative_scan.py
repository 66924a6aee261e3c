"""associative_scan: combine the elements along a named dim, in parallel.

Along a split dim, each device scans its own block. The devices exchange the totals of their blocks only, and
each combines the totals of the preceding blocks with its results. Unlike a sum, the user's function has no
known identity element, for padding and for the first block. So it is extended by one: an element has a flag,
and one whose flag is false is the identity.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ..core import collectives
from ..core.boundary import (
    LeafSpec,
    check_carry_dtype,
    common_dim,
    flatten,
    format_treedef,
    leaf_array,
    match_spec,
    numbers_as_tensors,
)
from ..core.context import active
from ..core.dims import DimLike
from ..core.errors import ProgramError, TensorTypeError
from ..core.op import op
from ..core.operands import check_along, slice_tensor
from ..core.padding import fill_padding, global_positions, is_uneven, safe_padding
from ..core.reshard import layout_splits, reshard
from ..core.tensor import Tensor
from ..core.types import Tree
from .sorting import gather_totals

Arrays = list[jax.Array]  # the leaves of some elements; their first position is that of the dim
Combine = Callable[[Arrays, Arrays], Arrays]


@op(
    example=lambda op, x, p: op(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (p, x), "a"),
    mixes_rows=True,
    functions=True,
)
def associative_scan(
    f: Callable[[Tree, Tree], Tree], xs: Tree, dim: DimLike, *, reverse: bool = False
) -> Tree:
    """Combine the elements of `xs` along a dim cumulatively, in parallel, like `jax.lax.associative_scan`.

    If the dim is split, devices exchange the totals of their blocks only.

    Args:
      f: an associative function: takes two elements, pytrees of tensors without the dim, and returns one.
      xs: a pytree of tensors that have the dim.
      dim: the dim to scan over.
      reverse: start from the end. As in JAX, the later element is the first argument of `f`.

    Returns:
      A pytree like `xs`: at each position, the combination of all elements up to it.

    >>> import weft as wf
    >>> wf.associative_scan(wf.maximum, wf.tensor([3, 1, 4, 1, 5], "a=5"), "a")
    i32[a=5] [3, 3, 4, 4, 5]
    """
    items, tree = flatten(xs)
    if not items or not all(isinstance(x, Tensor) for x in items):
        raise TensorTypeError(
            "associative_scan was given " + ("a raw array or a number" if items else "no tensors"),
            rule="associative_scan takes a pytree of tensors that have the dim",
            hint='name the dimensions of an array: wf.tensor(array, "length=128 d=8")',
        )
    dim = common_dim(items, dim)
    check_along([dim])
    ctx = active.context
    (axes,) = ctx.splits((dim,))
    ctx.observations.vmapped_dims.add(dim.name)  # ops inside don't have the dim
    places = [x.dims.index(dim) for x in items]
    elements: Arrays = []
    specs: list[LeafSpec] = []
    for x, n in zip(items, places, strict=True):
        splits = layout_splits(x)
        # `f` may be infinite at zero, so padding gets valid elements.
        array = jnp.moveaxis(safe_padding(reshard(x), x.dims, splits, dim), n, 0)
        array = lax.convert_element_type(array, x.dtype)  # like that of cumsum, the result is strongly typed
        elements.append(collectives.pvary(array, ctx.vmap.axes))
        rest = x.dims[:n] + x.dims[n + 1 :]
        specs.append(LeafSpec(rest, "value", splits[:n] + splits[n + 1 :], frozenset()))

    def combine_one(left: Arrays, right: Arrays) -> Arrays:
        with ctx.frame(), ctx.in_vmap(axes):
            pair = ([s.rebuild(a) for s, a in zip(specs, side, strict=True)] for side in (left, right))
            out, out_tree = flatten(f(*(jax.tree.unflatten(tree, side) for side in pair)))
            if out_tree != tree:
                raise ProgramError(
                    f"the function of associative_scan returns {format_treedef(out_tree)}, and an element is "
                    f"{format_treedef(tree)}",
                    rule="it takes two elements and returns one, of the same tree structure (* is a leaf)",
                    hint="return the same structure",
                )
            found = [
                match_spec(numbers_as_tensors(o), s, "a combination", "an element has")
                for o, s in zip(out, specs, strict=True)
            ]
            return [
                check_carry_dtype(leaf_array(t), a, "an element") for t, a in zip(found, left, strict=True)
            ]

    combine: Combine = jax.vmap(combine_one)
    has_padding = is_uneven(dim, axes)
    if not has_padding:
        scanned = lax.associative_scan(combine, elements, reverse=reverse)
    if axes:
        combine_flagged = _with_identity(combine)
        is_element = global_positions(dim, axes) < dim.size
        if has_padding:
            flagged = [is_element, *elements]
            _, *scanned = lax.associative_scan(combine_flagged, flagged, reverse=reverse)
        totals, precedes = gather_totals(scanned, 0, axes, reverse)
        is_filled = lax.iota(jnp.int32, ctx.ways(axes)) * is_element.size < dim.size
        before = lax.associative_scan(combine_flagged, [precedes & is_filled, *totals], reverse=reverse)
        # The last position has the total of all preceding blocks.
        last = [a[:1] if reverse else a[-1:] for a in before]
        block = [jnp.broadcast_to(a, (is_element.size, *a.shape[1:])) for a in last]
        _, *scanned = combine_flagged(block, [is_element, *scanned])
    results = []
    for x, n, array in zip(items, places, scanned, strict=True):
        array = fill_padding(jnp.moveaxis(array, 0, n), x.dims, layout_splits(x))
        results.append(slice_tensor(array, x.dims))
    return jax.tree.unflatten(tree, results)


def _with_identity(combine: Combine) -> Combine:
    """The function on elements that start with a flag. One whose flag is false is the identity element."""

    def select(flags: jax.Array, left: Arrays, right: Arrays) -> Arrays:
        return [
            jnp.where(flags.reshape(-1, *[1] * (a.ndim - 1)), a, b) for a, b in zip(left, right, strict=True)
        ]

    def run(left: Arrays, right: Arrays) -> Arrays:
        (has_left, *left), (has_right, *right) = left, right
        # Where one of the two is the identity, the other one takes its place: `combine` sees elements only,
        # and has a finite derivative there.
        first = select(has_left, left, right)
        combined = combine(first, select(has_right, right, left))
        return [has_left | has_right, *select(has_left & has_right, combined, first)]

    return run
