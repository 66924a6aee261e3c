"""Operands: turn the arguments of an op into slices inside a program, and its result into a tensor.

Input: a Tensor, a slice of this program or a global tensor that the program captures, or a Python number.
Output: a slice, that is, a Tensor with `splits`. `as_slice` reads an operand, `slice_tensor` builds a result.
`core/reshard.py` then changes how a slice is split.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from . import collectives, context
from .context import active
from .describe import describe
from .dims import Dim, check_distinct
from .errors import LayoutError, ProgramError, TensorTypeError
from .layout import Placement, Splits, axes_of
from .reshard import layout_splits, materialize, reshard
from .retrace import Retrace
from .tensor import Tensor, check_shape, check_usable
from .types import cast_like


def slice_tensor(
    array: jax.Array, dims: Sequence[Dim], splits: Splits | None = None, pending: Iterable[str] = ()
) -> Tensor:
    """An op's result: a slice with these dims.

    Args:
      array: this device's slice.
      dims: its dims.
      splits: the axes that split each dim; by default those of the layout.
      pending: axes over which the slices still have to be summed. The sum of booleans is "any", as in
        `jax.numpy`, and is computed at once: a sum of integers would change the type.
    """
    ctx = active.context
    dims = tuple(dims)
    if len({d.name for d in dims}) < len(dims):
        check_distinct(dims)
    splits = ctx.splits(dims) if splits is None else splits
    pending = frozenset(pending)
    split_axes = axes_of(splits)
    # Constants start unvarying. Restoring the invariant here (an array varies over the axes that split it
    # and its pending axes) lets loop carries type-check, whatever the op computed from.
    array = collectives.pvary(array, split_axes | pending)
    if pending and array.dtype == jnp.bool_:
        array, pending = collectives.all_reduce_max(array, tuple(sorted(pending))), frozenset()
    ctx.register(array)
    clash = ctx.vmap.axes & (split_axes | pending)
    if clash:
        names = ", ".join(d.name for d, axes in zip(dims, splits, strict=True) if clash & set(axes))
        names = names or "a dim that is summed over"
        raise LayoutError(
            f"{names} is on axis {', '.join(sorted(clash))}, in use by an enclosing vmap or pipeline",
            rule="an axis splits one dim of a tensor at most, counting that of an enclosing vmap or pipeline",
            hint="remove one of the rules, or rename the dim",
        )
    result = Tensor(array, dims, placement=ctx.placement, splits=splits, pending=pending)
    result.origin = ctx.op if pending else None
    return result


def linear_result(x: Tensor, array: jax.Array, dims: Sequence[Dim], splits: Splits | None) -> Tensor:
    """The result of a linear function of one slice: a pending sum stays pending."""
    result = slice_tensor(array, dims, splits, x.pending)
    result.origin = x.origin
    return result


def from_global(array: ArrayLike, dims: Sequence[Dim]) -> Tensor:
    """A tensor inside a program from an array of the true size that is replicated on every device."""
    array = jnp.asarray(array)
    if collectives.varying_axes(array) - active.context.vmap.axes:
        raise ProgramError(
            f"an array that varies over {', '.join(sorted(collectives.varying_axes(array)))} was named "
            "as if it were replicated",
            rule="inside a program a raw array must be the same on all devices",
            hint="work on slices with wf.local(fn, *tensors, out=dims)",
        )
    return slice_tensor(array, dims, splits=((),) * len(dims))


def as_slice(x: Tensor | ArrayLike) -> Tensor:
    """An operand as a slice: global tensors become inputs of the program, numbers become constants."""
    if isinstance(x, Tensor):
        check_usable(x)
        check_shape(x)
        return _varying_as_branch(_shared_by_vmap(x if x.splits is not None else _capture(x)))
    if getattr(x, "shape", ()) == () and (hasattr(x, "dtype") or isinstance(x, int | float | complex)):
        return slice_tensor(jnp.asarray(x), ())
    raise _not_a_tensor(x)


def as_slices(tensors: Iterable[Tensor | ArrayLike], name: str) -> list[Tensor]:
    """The operands of an op that joins a list of tensors; raises an error for a single tensor."""
    if isinstance(tensors, Tensor):
        raise TensorTypeError(
            f"{name} was given {describe(tensors)}",
            rule=f"{name} takes a list of tensors",
            hint=f"pass a list: {name}([x, y], dim)",
        )
    return [as_slice(t) for t in tensors]


def _shared_by_vmap(t: Tensor) -> Tensor:
    """Gather a tensor that is stored split over an axis of an enclosing vmap: all its positions share it.

    The gathered value varies over that axis, as the operands it meets do. The transpose of the gather is then
    a reduce-scatter. A pending sum over such an axis is resolved.
    """
    ctx = active.context
    wanted = layout_splits(t) if ctx.vmap.axes else t.splits
    gathered = axes_of(t.splits or ()) if t.splits != wanted else frozenset()
    if not ctx.vmap.axes & (gathered | t.pending):
        return t
    array = reshard(t, wanted, ctx.vmap.axes)
    return Tensor(array, t.dims, placement=ctx.placement, splits=wanted)


def _varying_as_branch(t: Tensor) -> Tensor:
    """Make a tensor vary over the axes of the predicate that selects the current branch.

    JAX's vmap makes the values that a branch closes over varying, but not the constants that they meet
    inside the branch (0.10.2).
    """
    ctx = active.context
    axes = ctx.vmap.branch_axes
    missing = axes - collectives.varying_axes(t._data) if axes else axes
    if not missing:
        return t
    array = reshard(t, t.splits, missing)
    return Tensor(array, t.dims, role=t.role, placement=ctx.placement, splits=t.splits)


def _not_a_tensor(x: object) -> TensorTypeError:
    kind = "an array" if hasattr(x, "dtype") else f"a value of type {type(x).__name__}"
    shape = f" of shape {tuple(x.shape)}" if hasattr(x, "shape") else ""
    hint = next((hint for kinds, hint in _HINTS if isinstance(x, kinds)), None)
    if isinstance(x, list | tuple) and any(isinstance(one, Tensor) for one in x):
        hint = "join the tensors first: wf.stack(tensors, dim) or wf.concat(tensors, dim)"
    hint = hint or ("call the function, and pass its result" if callable(x) else _HINT)
    return TensorTypeError(
        f"{'None' if x is None else kind + shape} is not a tensor",
        rule="operands are tensors or numbers; a raw array has no names to match by",
        hint=hint,
    )


_HINT = 'name its dimensions: wf.tensor(array, "batch=64 d_model=256")'
_HINTS = (
    (Dim, "its size is dim.size, and wf.arange(dim) has its positions"),
    (str, "convert text to numbers first; dims are a separate argument"),
    (type(None), "a function without a return statement returns None; check how the operand was computed"),
)


def check_along(dims: Iterable[Dim]) -> None:
    """Raise an error if an op works along a dim of which a pipeline stage has only one micro-batch."""
    found = [d for d in dims if d in active.context.pipeline.partial_dims]
    if found:
        raise ProgramError(
            f"a layer of a pipeline works along {found[0].name}, and it sees one micro-batch at a time",
            rule="a layer's result for a row must not depend on other rows; then stages never change results",
            hint="do it before or after the pipeline",
        )


def capture_key(t: Tensor) -> Hashable:
    """The identity of a captured tensor. Two may share an array under different names or roles."""
    return id(t._data), t.dims, t.role


def _capture(t: Tensor) -> Tensor:
    """The input that stands for a captured tensor, or a blank one if this trace is the first to see it."""
    ctx = active.context
    if not ctx.captures.adopts_placement:
        check_same_placement(t, ctx.placement)
    elif t.placement is not None and not ctx.is_finished:
        raise Retrace("placement", t.placement)
    if ctx.is_finished:
        return _constant(t)
    key = capture_key(t)
    if key in ctx.captures.inputs:
        return ctx.captures.inputs[key]
    ctx.captures.found[key] = t
    # Zeros of the right type keep this trace going. Its result is discarded: the program is traced again
    # with the tensor among its inputs.
    splits = ctx.splits(t.dims, t.role)
    shape = ctx.slice_shape(t.dims, splits)
    blank = slice_tensor(cast_like(jnp.zeros(shape, t.dtype), t._data), t.dims, splits)
    blank.role = t.role
    return blank


def _constant(t: Tensor) -> Tensor:
    """A captured tensor that can no longer become an input, embedded by its values."""
    if context.is_traced(t._data) or not t._data.is_fully_addressable:
        raise ProgramError(
            f"a rule of a custom_vjp captures {describe(t)}, whose values are not available",
            rule="JAX calls the rules of a custom_vjp after the eager op that uses it",
            hint="pass the tensor as an argument of the custom_vjp",
        )
    unpadded = np.asarray(t._data)[tuple(slice(d.size) for d in t.dims)]
    return materialize(from_global(cast_like(unpadded, t._data), t.dims), t.role)


def check_same_placement(t: Tensor, placement: Placement) -> None:
    """Raise an error if a tensor is placed on a different mesh or with a different layout."""
    # A layout that checks more is another object, and yet equal; so meshes and layouts are compared.
    if t.mesh is not None and t.mesh != placement.mesh:
        others = " of other devices" if t.mesh.axes == placement.mesh.axes else ""
        raise LayoutError(
            f'{describe(t)} is on mesh "{t.mesh}"{others}, and this runs on mesh "{placement.mesh}"',
            rule="the tensors of one operation, or program, are on one mesh",
            hint="move it with wf.place(t, mesh, layout)",
        )
    if t.mesh is not None and t.layout != placement.layout:
        raise LayoutError(
            f"{describe(t)} has {t.layout!r}, and this runs with {placement.layout!r}",
            rule="the tensors of one operation, or program, have one layout",
            hint="move it with wf.place(t, mesh, layout)",
        )
