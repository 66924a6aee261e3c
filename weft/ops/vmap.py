"""vmap: a function at all places of a dim at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..core import collectives, context
from ..core.boundary import LeafSpec, common_dim, flatten, leaf_array, numbers_as_tensors
from ..core.dims import Dim, check_distinct
from ..core.errors import DimError, ProgramError, nearest
from ..core.op import op
from ..core.operands import slice_tensor
from ..core.padding import fill_padding, safe_padding
from ..core.reshard import materialize, reshard
from ..core.tensor import Tensor, is_tensor


def vmap(f: Callable[..., Any], dim: Any) -> Callable[..., Any]:
    """`f` at every place of a dim at once; inside, tensors don't have the dim, results get it in front.

    Tensors without the dim are the same at every place, as is all else that is given, by position or by
    name. A split dim stays split. Roles are kept.

    >>> import weft as wf
    >>> x = wf.tensor([[1.0, 2.0], [3.0, 4.0]], "row=2 column=2")
    >>> wf.vmap(lambda r: wf.max(r), "row")(x)
    f32[row=2] [2., 4.]
    """

    return functools.partial(_vmap, f, dim)


@op(functions=True)
def _vmap(f: Callable[..., Any], dim: Any, /, *args: Any, **kwargs: Any) -> Any:
    program = context.require()
    leaves, tree = flatten((args, kwargs))
    name = dim.name if isinstance(dim, Dim) else dim
    mapped = [n for n, t in enumerate(leaves) if isinstance(t, Tensor) and name in [d.name for d in t.dims]]
    if not mapped:
        known = list(dict.fromkeys(d.name for t in leaves if is_tensor(t) for d in t.dims))
        raise DimError(
            f"no argument of the mapped function has a dim {name}{nearest(name, known)}",
            rule="vmap maps over a dim that at least one argument has",
            hint=f"the dims are {', '.join(known) or 'none'}",
        )
    found = common_dim([leaves[n] for n in mapped], dim)
    (axes,) = program.splits((found,))
    program.vmapped_dims.add(found.name)
    forms, arrays = [], []
    for n in mapped:
        t = leaves[n]
        place = t.dims.index(found)
        # Other dims stay as they are stored, and are gathered inside where that is wanted.
        role, splits = t.role, program.splits(t.dims, t.role)
        if splits[place] != axes:
            role, splits = "value", program.splits(t.dims)
        array = safe_padding(reshard(t, splits), t.dims, splits, found)
        rest = t.dims[:place] + t.dims[place + 1 :]
        forms.append(LeafSpec(rest, role, splits[:place] + splits[place + 1 :], frozenset()))
        arrays.append(jnp.moveaxis(array, place, 0))
    others = [n for n, t in enumerate(leaves) if isinstance(t, Tensor) and n not in mapped]
    leaves = [_free(t, axes) if n in others else t for n, t in enumerate(leaves)]
    kept: dict[str, Any] = {}

    def inner(arrays: list[Any]) -> list[Any]:
        with program.frame(), program.vmapping(program.vmapped_axes | set(axes), program.vmap_depth + 1):
            given = list(leaves)
            for n, form, array in zip(mapped, forms, arrays, strict=True):
                given[n] = form.rebuild(array)
            positional, named = jax.tree.unflatten(tree, given)
            out, kept["tree"] = flatten(f(*positional, **named))
            out = [_free(o, axes) if isinstance(o, Tensor) else o for o in map(numbers_as_tensors, out)]
            kept["forms"] = [LeafSpec.of(o) for o in out]
            return [collectives.pvary(leaf_array(o), axes) for o in out]

    stacked = jax.vmap(inner)(arrays)
    results = []
    for form, array in zip(kept["forms"], stacked, strict=True):
        if form is None:
            raise ProgramError(
                "the mapped function returned a raw array",
                rule="a mapped function returns tensors, so that the dim can be given back",
                hint="return the tensor, not its .array",
            )
        dims, splits = (found, *form.dims), (axes, *form.splits)
        check_distinct(dims)
        made = slice_tensor(fill_padding(array, dims, splits), dims, splits)
        made.role = form.role
        results.append(made)
    return jax.tree.unflatten(kept["tree"], results)


def _free(t: Tensor, axes: tuple[str, ...]) -> Tensor:
    """A tensor as it is stored; or, if that is in pieces along the axes that are mapped over, as a value."""
    stored = {axis for one in context.require().splits(t.dims, t.role) for axis in one}
    return materialize(t, "value" if stored & set(axes) else t.role)
