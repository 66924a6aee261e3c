"""vmap: vectorize a function over a named dim.

`map_positions` is the common part of `vmap`, which computes all positions at once, and `map`, which computes
one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core import collectives
from ..core.boundary import LeafSpec, common_dim, flatten, leaf_array, numbers_as_tensors
from ..core.call_errors import check_function, checks_arguments
from ..core.collectives import Axes
from ..core.context import active
from ..core.dims import DimLike, check_distinct, dim_name
from ..core.errors import DimError, ProgramError, nearest
from ..core.layout import axes_of
from ..core.op import op
from ..core.operands import slice_tensor
from ..core.padding import fill_padding, safe_padding
from ..core.reshard import materialize, reshard
from ..core.tensor import Tensor, is_tensor
from ..core.types import Params, PyTree, Result

ArraysFn = Callable[[list[jax.Array]], list[jax.Array]]


@checks_arguments
def vmap(f: Callable[Params, Result], dim: DimLike) -> Callable[Params, Result]:
    """Vectorize `f` over a dim. Inside, tensors lack the dim; results have it first.

    Tensors without the dim, and all other arguments, are shared by all calls. A split dim stays split. Roles
    are preserved.

    >>> import weft as wf
    >>> x = wf.tensor([[1.0, 2.0], [3.0, 4.0]], "row=2 column=2")
    >>> wf.vmap(lambda r: wf.max(r), "row")(x)
    f32[row=2] [2., 4.]
    """

    check_function(f, "vmap")
    return functools.partial(_vmap, f, dim)


@op(example=lambda op, x: op(lambda row: row * row["b", 0], "a")(x), functions=True)
def _vmap(f: Callable[..., PyTree], dim: DimLike, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
    return map_positions(lambda inner, arrays, axes: jax.vmap(inner)(arrays), f, dim, args, kwargs)


def map_positions(
    run: Callable[[ArraysFn, list[jax.Array], Axes], list[jax.Array]],
    f: Callable[..., PyTree],
    dim: DimLike,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
) -> PyTree:
    """Call `f` for each position of a dim, and stack the results.

    Args:
      run: calls a function of arrays for each of their first positions. It is also given the axes that split
        the dim: a device has some of the positions.
      f: a function of tensors without the dim.
      dim: the dim.
      args, kwargs: the arguments of `f`. Tensors without the dim are shared by all calls.
    """
    ctx = active.context
    leaves, tree = flatten((args, kwargs))
    name = dim_name(dim)
    mapped = [n for n, t in enumerate(leaves) if isinstance(t, Tensor) and name in [d.name for d in t.dims]]
    if not mapped:
        known = list(dict.fromkeys(d.name for t in leaves if is_tensor(t) for d in t.dims))
        raise DimError(
            f"no argument of the mapped function has a dim {name}{nearest(name, known)}",
            rule="vmap maps over a dim that at least one argument has",
            hint=f"the dims are {', '.join(known) or 'none'}",
        )
    found = common_dim([leaves[n] for n in mapped], dim)
    (axes,) = ctx.splits((found,))
    # Ops inside don't have the dim in their labels, from which layout search reads the dims of an op.
    ctx.observations.vmapped_dims.add(found.name)
    specs, arrays = [], []
    for n in mapped:
        t = leaves[n]
        dim_index = t.dims.index(found)
        # Other dims keep their stored splits, and are gathered inside if an op needs that.
        role, splits = t.role, ctx.splits(t.dims, t.role)
        if splits[dim_index] != axes:
            role, splits = "value", ctx.splits(t.dims)
        # `f` may be infinite at zero, so padding gets valid elements before the call and zeros after it.
        array = safe_padding(reshard(t, splits), t.dims, splits, found)
        rest = t.dims[:dim_index] + t.dims[dim_index + 1 :]
        specs.append(LeafSpec(rest, role, splits[:dim_index] + splits[dim_index + 1 :], frozenset()))
        arrays.append(jnp.moveaxis(array, dim_index, 0))
    others = [n for n, t in enumerate(leaves) if isinstance(t, Tensor) and n not in mapped]
    leaves = [_off_axes(t, axes) if n in others else t for n, t in enumerate(leaves)]
    traced: dict[str, Any] = {}  # specs and structure of the results of `f`

    def inner(arrays: list[jax.Array]) -> list[jax.Array]:
        with ctx.frame(), ctx.in_vmap(axes):
            arguments = list(leaves)
            for n, spec, array in zip(mapped, specs, arrays, strict=True):
                arguments[n] = spec.rebuild(array)
            positional, named = jax.tree.unflatten(tree, arguments)
            out, traced["tree"] = flatten(f(*positional, **named))
            out = [_off_axes(o, axes) if isinstance(o, Tensor) else o for o in map(numbers_as_tensors, out)]
            traced["specs"] = [LeafSpec.of(o) for o in out]
            return [collectives.pvary(leaf_array(o), axes) for o in out]

    stacked = run(inner, arrays, axes)
    results = []
    for spec, array in zip(traced["specs"], stacked, strict=True):
        if spec is None:
            raise ProgramError(
                "the mapped function returned a raw array",
                rule="a mapped function returns tensors, which get the dim",
                hint="return the tensor, not its .array",
            )
        dims, splits = (found, *spec.dims), (axes, *spec.splits)
        check_distinct(dims)
        result = slice_tensor(fill_padding(array, dims, splits), dims, splits)
        result.role = spec.role
        results.append(result)
    return jax.tree.unflatten(traced["tree"], results)


def _off_axes(t: Tensor, axes: Axes) -> Tensor:
    """A tensor with the splits of its role, or those of a value if its role uses the mapped axes."""
    stored = axes_of(active.context.splits(t.dims, t.role))
    return materialize(t, "value" if stored & set(axes) else t.role)
