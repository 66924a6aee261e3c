"""Renaming and reshaping: how a tensor changes its layout.

Renaming moves no data. A renamed tensor keeps its splits. If the layout splits the new name differently, its
first consumer performs the gather, slice, all-to-all or reduce-scatter. The same holds for a reshape that
maps every slice to a slice. Any other reshape moves the data immediately (`ops/refinement.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from ..core.context import active
from ..core.dims import (
    Dim,
    DimLike,
    DimsLike,
    as_dims,
    check_distinct,
    format_dims,
    new_dim,
    select_dim,
    select_dims,
    union_dims,
)
from ..core.errors import DimError, ShapeError
from ..core.layout import Splits, axes_of
from ..core.op import op
from ..core.operands import as_slice, as_slices, check_along, linear_result, slice_tensor
from ..core.padding import fill_padding
from ..core.reshard import check_may_resolve, layout_splits, reshard, reshard_together
from ..core.tensor import Tensor
from .elementwise import align
from .refinement import DimGroup, refine_dims


@op(example=lambda op, x: op(x, {"a": "n"}))
def rename(x: Tensor, names: Mapping[str, DimLike]) -> Tensor:
    """Rename dims. This is the way to change how a dim is split.

    >>> import weft as wf
    >>> wf.rename(wf.ones("length=2"), {"length": "memory"})
    f32[memory=2] [1., 1.]
    """
    x = as_slice(x)
    new = {}
    for old, name in names.items():
        dim = select_dim(x.dims, old)
        renamed = new_dim(name, dim.size)
        if renamed.size != dim.size:
            raise DimError(
                f"{dim} can't be renamed {renamed}: the sizes differ",
                rule="a rename keeps the size",
                hint="wf.split and wf.merge change sizes; wf.slice shortens a dim and wf.pad extends it",
            )
        new[dim.name] = renamed.name
    dims = tuple(d.rename(new.get(d.name, d.name)) for d in x.dims)
    check_distinct(dims)
    ctx = active.context
    ctx.splits(dims)  # raises if the layout maps two of them to one axis
    ctx.observations.renamed.update(map(frozenset, new.items()))
    for was, dim in zip(x.dims, dims, strict=True):
        if was in ctx.pipeline.partial_dims:
            ctx.pipeline.partial_dims[dim] = ctx.pipeline.partial_dims[was]
    return linear_result(x, x._read(), dims, x.splits)


@op(example=lambda op, x: op(x, ["b", "a"]), split_invariant=True)
def transpose(x: Tensor, dims: DimsLike) -> Tensor:
    """Reorder the dims of a tensor.

    >>> import weft as wf
    >>> wf.transpose(wf.tensor([[1, 2]], "a=1 b=2"), "b a")
    i32[b=2, a=1]
    [[1],
     [2]]
    """
    x = as_slice(x)
    order = select_dims(x.dims, dims)
    if len(order) != len(x.dims):
        raise DimError(
            f"[{format_dims(order)}] are not all dims of [{format_dims(x.dims)}]",
            rule="transpose takes every dim exactly once",
            hint="to drop dims, reduce them: wf.sum(x, dims)",
        )
    permutation = [x.dims.index(d) for d in order]
    assert x.splits is not None
    return linear_result(x, x._read().transpose(permutation), order, tuple(x.splits[n] for n in permutation))


@op(example=lambda op, x: op(x, [Dim("n", 2), *x.dims]))
def broadcast_to(x: Tensor, dims: DimsLike) -> Tensor:
    """Repeat a tensor along the dims that it lacks. `dims` are all dims of the result; new ones have sizes.

    >>> import weft as wf
    >>> wf.broadcast_to(wf.tensor([1, 2], "a=2"), "b=2 a")
    i32[b=2, a=2]
    [[1, 2],
     [1, 2]]
    """
    x = as_slice(x)
    out_dims = as_dims(dims, x.dims)
    all_dims = union_dims([out_dims, x.dims])
    if len(all_dims) != len(out_dims):
        lost = [d for d in all_dims if d not in out_dims]
        raise DimError(
            f"dims {format_dims(lost)} of [{format_dims(x.dims)}] are not in [{format_dims(out_dims)}]",
            rule="broadcast_to adds dims and doesn't drop any",
            hint="list all dims of the result",
        )
    ctx = active.context
    splits = ctx.splits(out_dims)
    shape = ctx.slice_shape(out_dims, splits)
    array = jnp.broadcast_to(_expand(reshard(x, axes=axes_of(splits)), x.dims, out_dims), shape)
    return slice_tensor(fill_padding(array, out_dims, splits), out_dims)


def _expand(array: jax.Array, have: Sequence[Dim], want: Sequence[Dim]) -> jax.Array:
    array = align(array, have, want)
    return array.reshape((1,) * (len(want) - array.ndim) + array.shape)


@op(example=lambda op, x: op(x, "m=9 n=2"), mixes_rows=True)
def reshape(x: Tensor, dims: DimsLike) -> Tensor:
    """Reshape to other dims of the same total size, in row-major order. A name alone keeps its size.

    >>> import weft as wf
    >>> wf.reshape(wf.tensor([[1, 2], [3, 4]], "a=2 b=2"), "c=4")
    i32[c=4] [1, 2, 3, 4]
    """
    x = as_slice(x)
    new = as_dims(dims, x.dims)
    size = math.prod(d.size for d in new)
    if size != x.size:
        raise ShapeError(
            f"[{format_dims(x.dims)}] has {x.size} elements and [{format_dims(new)}] has {size}",
            rule="reshape keeps the elements, so the sizes must have the same product",
            hint="check the sizes of the new dims",
        )
    return _reshape(x, new)


@op(example=lambda op, x: op(x, "a", "m=2 n=3"), mixes_rows=True)
def split(x: Tensor, dim: DimLike, into: DimsLike) -> Tensor:
    """Split one dim into several, in row-major order: `split(x, "length", [blocks, block])`.

    `unflatten` is another name for it, PyTorch's. `numpy.split` and `torch.split` return several arrays, as
    `x["length", :3]` and `unstack` do here.

    >>> import weft as wf
    >>> wf.split(wf.arange(wf.Dim("length", 6)), "length", "blocks=2 block=3")
    i32[blocks=2, block=3]
    [[0, 1, 2],
     [3, 4, 5]]
    """
    x = as_slice(x)
    old, parts = select_dim(x.dims, dim), as_dims(into)
    _check_same_size([old], parts)
    n = x.dims.index(old)
    return _reshape(x, x.dims[:n] + parts + x.dims[n + 1 :])


@op(example=lambda op, x: op(x, ["b", "a"], "n"), mixes_rows=True)
def merge(x: Tensor, dims: DimsLike, into: DimLike) -> Tensor:
    """Merge several dims into one, in row-major order: `merge(x, [a, b], ab)`. It replaces the first one.

    `flatten` is another name for it, PyTorch's.

    >>> import weft as wf
    >>> wf.merge(wf.tensor([[1, 2], [3, 4]], "a=2 b=2"), "b a", "ba")
    i32[ba=4] [1, 3, 2, 4]
    """
    x = as_slice(x)
    parts = select_dims(x.dims, dims)
    merged = new_dim(into, math.prod(d.size for d in parts))
    _check_same_size(parts, [merged])
    first = x.dims.index(parts[0])
    rest = [d for d in x.dims if d not in parts]
    before = [d for d in x.dims[:first] if d not in parts]
    after = [d for d in rest if d not in before]
    adjacent = transpose(x, [*before, *parts, *after])
    return _reshape(adjacent, (*before, merged, *after))


# PyTorch's names of the same functions.
flatten, unflatten = merge, split


def _check_same_size(old: Sequence[Dim], new: Sequence[Dim]) -> None:
    have, want = math.prod(d.size for d in old), math.prod(d.size for d in new)
    if have != want:
        raise ShapeError(
            f"[{format_dims(old)}] has {have} elements and [{format_dims(new)}] has {want}",
            rule="splitting and merging dims keeps the elements",
            hint="check the sizes",
        )


def _groups(old: Sequence[Dim], new: Sequence[Dim]) -> list[DimGroup]:
    """Partition both lists, without dims of size 1, into the shortest runs of equal product."""
    groups: list[DimGroup] = []
    # Dims of size 1 don't affect the row-major order.
    rest_old, rest_new = ([d for d in dims if d.size != 1] for dims in (old, new))
    while rest_old:
        left, right = [rest_old.pop(0)], [rest_new.pop(0)]
        while math.prod(d.size for d in left) != math.prod(d.size for d in right):
            extend_left = math.prod(d.size for d in left) < math.prod(d.size for d in right)
            (left if extend_left else right).append((rest_old if extend_left else rest_new).pop(0))
        groups.append((left, right))
    return groups


def _reshape(x: Tensor, new: tuple[Dim, ...]) -> Tensor:
    ctx = active.context
    # A dim of size 1 is not moved. If the layout splits it, its consumer slices it.
    target = {d: axes if d.size > 1 else () for d, axes in zip(new, ctx.splits(new), strict=True)}
    ctx.observations.renamed.add(frozenset(d.name for d in {*x.dims} ^ {*new}))
    assert x.splits is not None
    now = dict(zip(x.dims, x.splits, strict=True))
    before: dict[Dim, tuple[str, ...]] = {}
    after: dict[Dim, tuple[str, ...]] = {}
    stays = dict(target)
    check_along(d for d in x.dims if d not in new)
    groups = _groups(x.dims, new)
    for left, right in groups:
        check_along(left if left != right else ())
        ways = ctx.ways(now[left[0]])
        # A split run can be reshaped locally if only its leading dim is split, and the blocks of the leading
        # dims on both sides consist of the same elements.
        same = len(left) == len(right) == 1
        divides = left[0].size % ways == 0 and right[0].size % ways == 0
        if (same or divides) and not any(now[d] for d in left[1:]):
            before[left[0]] = after[right[0]] = now[left[0]]
            stays |= dict.fromkeys(right, ()) | {right[0]: now[left[0]]}
    splits = tuple(before.get(d, ()) for d in x.dims)
    new_splits = tuple(after.get(d, ()) for d in new)
    shape = ctx.slice_shape(new, new_splits)
    if x.splits == splits:
        return linear_result(x, x._read().reshape(shape), new, new_splits)
    # Runs that can be reshaped locally are, unless one of them needs an axis that another run gives up.
    leaving = axes_of(x.splits) & axes_of(tuple(target.values())) - axes_of(tuple(stays.values()))
    options = [target, stays] if leaving else [stays, target]
    # Axes that don't split the tensor yet may make a move impossible. They are then left to the consumer.
    have = axes_of(x.splits) | x.pending
    options += [{d: tuple(itertools.takewhile(have.__contains__, axes)) for d, axes in options[0].items()}]
    for option in options:
        reshaped = _reshard_refined(x, groups, new, tuple(option.values()))
        if reshaped is not None:
            return reshaped
    return slice_tensor(reshard(x, splits).reshape(shape), new, new_splits)


def _reshard_refined(
    x: Tensor, groups: Sequence[DimGroup], new: tuple[Dim, ...], splits: Splits
) -> Tensor | None:
    """Reshape to the given splits by resharding a tensor of finer dims. None if there are no such dims."""
    ctx = active.context
    assert x.splits is not None
    now, then = dict(zip(x.dims, x.splits, strict=True)), dict(zip(new, splits, strict=True))
    axes = [axis for one in splits for axis in one]
    ones = [axis for d, one in now.items() if d.size == 1 for axis in one]
    refined = refine_dims(groups, now, then, ctx.ways)
    if refined is None or ones or len({*axes}) < len(axes) or ctx.vmap.axes & {*axes}:
        return None
    dims, old, target = refined
    if x.pending:
        check_may_resolve(x)
    shape = ctx.slice_shape(dims, old)
    # Memoized like the resharding: equal reshapes of a tensor share both, and both are hoisted out of loops.
    memo = ctx.variant(x._data, ("refined", shape), collective=False)
    if memo.value is None:
        with memo.tracing():
            memo.store(x._read().reshape(shape))
    finer = Tensor(memo.value, dims, placement=ctx.placement, splits=old, pending=x.pending)
    finer.origin = x.origin
    return slice_tensor(reshard(finer, target).reshape(ctx.slice_shape(new, splits)), new, splits)


@op(example=lambda op, x, p: op([x, p], "n"))
def stack(tensors: Sequence[Tensor], dim: DimLike) -> Tensor:
    """Stack tensors with the same dims along a new first dim.

    >>> import weft as wf
    >>> wf.stack([wf.zeros("a=2"), wf.ones("a=2")], "b")
    f32[b=2, a=2]
    [[0., 0.],
     [1., 1.]]
    """
    slices = as_slices(tensors, "stack")
    new = new_dim(dim, max(len(slices), 1))
    if new.size != len(slices):
        raise ShapeError(
            f"{len(slices)} tensors can't be stacked along {dim}",
            rule="the size of the new dim is the number of tensors",
            hint=f'stack(tensors, "{new.name}") infers the size',
        )
    dims = union_dims(t.dims for t in slices)
    if any(set(t.dims) != set(dims) for t in slices):
        raise DimError(
            "the tensors have different dims: " + ", ".join(f"[{format_dims(t.dims)}]" for t in slices),
            rule="stack takes tensors with the same dims",
            hint="wf.broadcast_to(x, dims) adds missing ones",
        )
    active.context.splits((new, *dims))  # raises if the layout maps two of them to one axis
    arrays = reshard_together(slices)
    rest = active.context.splits(dims)
    array = jnp.stack([align(a, t.dims, dims) for a, t in zip(arrays, slices, strict=True)])
    return slice_tensor(array, (new, *dims), ((), *rest))


@op(example=lambda op, x: op(x, "a"), mixes_rows=True)
def unstack(x: Tensor, dim: DimLike) -> list[Tensor]:
    """Split a tensor along a dim into a list of tensors without it.

    >>> import weft as wf
    >>> wf.unstack(wf.tensor([[1, 2], [3, 4]], "a=2 b=2"), "b")
    [i32[a=2] [1, 3], i32[a=2] [2, 4]]
    """
    x = as_slice(x)
    removed = select_dim(x.dims, dim)
    check_along([removed])
    dim_index = x.dims.index(removed)
    splits = tuple(() if n == dim_index else axes for n, axes in enumerate(layout_splits(x)))
    # Every device needs all elements of the dim, one for each result: a split dim is gathered.
    leading = jnp.moveaxis(reshard(x, splits), dim_index, 0)
    dims = x.dims[:dim_index] + x.dims[dim_index + 1 :]
    rest = splits[:dim_index] + splits[dim_index + 1 :]
    return [slice_tensor(leading[n], dims, rest) for n in range(removed.size)]
