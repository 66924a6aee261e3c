"""Forms: bring a tensor inside a program into the form that an op needs.

A form is: which axes split each dim, over which axes a sum is still pending, and over which further axes
the array has been made varying. `core/relayout.py` goes from one to another with the fewest bytes.
Every form is made once per tensor (`Context.remember`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import collectives, context
from .context import Context
from .dims import Dim, check_distinct
from .errors import LayoutError, ProgramError, TensorTypeError
from .layout import Layout, Splits, axes_of
from .mesh import Mesh
from .relayout import reshard_array
from .tensor import Tensor, check_shape, describe
from .types import cast_like


class Placeholder:
    """Held by a tensor in place of an array that is not there yet (`core/deferred.py`)."""

    def refused(self) -> ProgramError:
        """The error for a use of it."""
        raise NotImplementedError


class RetraceUnvarying(Exception):
    """A tensor that a scan made varying beforehand is needed unvarying; the scan starts over."""


class RetraceOnMesh(Exception):
    """What an eager op is to capture lives on a mesh, and no operand does; the op starts over there."""

    def __init__(self, mesh: Mesh, layout: Layout):
        super().__init__()
        self.mesh, self.layout = mesh, layout


# Into the program


def slice_tensor(
    array: Any, dims: Sequence[Dim], splits: Splits | None = None, pending: Iterable[str] = ()
) -> Tensor:
    """An op's result: a slice with these dims, split as the layout says unless told otherwise."""
    program = context.require()
    dims = tuple(dims)
    if len({d.name for d in dims}) < len(dims):
        check_distinct(dims)
    splits = program.splits(dims) if splits is None else splits
    pending = frozenset(pending)
    split_axes = axes_of(splits)
    array = collectives.pvary(array, split_axes | pending)
    program.know(array)
    clash = program.mapped & (split_axes | pending)
    if clash:
        names = ", ".join(d.name for d, axes in zip(dims, splits, strict=True) if clash & set(axes))
        names = names or "a dim that is summed over"
        raise LayoutError(
            f"{names} is on axis {', '.join(sorted(clash))}, as is that of an enclosing vmap or pipeline",
            rule="an axis splits at most one dim of a tensor, that of an enclosing vmap or pipeline included",
            hint="drop one of the rules, or rename the dim",
        )
    made = Tensor(array, dims, mesh=program.mesh, layout=program.layout, splits=splits, pending=pending)
    made.origin = program.op if pending else ""
    return made


def linear_result(x: Tensor, array: Any, dims: Sequence[Dim], splits: Splits | None) -> Tensor:
    """A linear function of a slice, whatever form that is in: what was pending still is."""
    made = slice_tensor(array, dims, splits, x.pending)
    made.origin = x.origin
    return made


def from_global(array: Any, dims: Sequence[Dim]) -> Tensor:
    """A tensor inside a program from an array of the true size that every device has."""
    array = jnp.asarray(array)
    if collectives.varying_axes(array) - context.require().mapped:
        raise ProgramError(
            f"an array that varies over {', '.join(sorted(collectives.varying_axes(array)))} was named "
            "as if it were whole",
            rule="inside a program a raw array must be the same on all devices",
            hint="work on slices with wf.local(fn, *tensors, out=dims)",
        )
    return slice_tensor(array, dims, splits=((),) * len(dims))


def as_slice(x: Any) -> Tensor:
    """An operand as a slice: whole tensors become inputs of the program, numbers become constants."""
    if isinstance(x, Tensor):
        _check_there(x)
        check_shape(x)
        return _branched(_unmapped(x if x.is_slice else _capture(x)))
    if getattr(x, "shape", ()) == () and (hasattr(x, "dtype") or isinstance(x, int | float | complex)):
        return slice_tensor(jnp.asarray(x), ())
    raise _raw(x)


def as_slices(tensors: Any, name: str) -> list[Tensor]:
    """The slices of what an op of this name puts together; an error if that is one tensor."""
    if isinstance(tensors, Tensor):
        raise TensorTypeError(
            f"{name} was given {describe(tensors)}",
            rule=f"{name} puts the tensors of a list together",
            hint=f"give a list: {name}([x, y], dim)",
        )
    return [as_slice(t) for t in tensors]


def _unmapped(t: Tensor) -> Tensor:
    """A tensor that is stored along an axis of an enclosing vmap, as the value that all places there share.

    It varies over that axis, as what it meets does: the transpose of its gather is a reduce-scatter.
    """
    program = context.require()
    if not program.mapped or t.splits == layout_splits(t) or not axes_of(t.splits or ()) & program.mapped:
        return t
    array = reshard(t, layout_splits(t), program.mapped)
    return Tensor(array, t.dims, mesh=program.mesh, layout=program.layout, splits=layout_splits(t))


def _branched(t: Tensor) -> Tensor:
    """A tensor that varies as what decides about the branch it is used in.

    JAX's vmap makes what a branch takes from outside varying, but not the numbers that it meets (0.10.2).
    """
    program = context.require()
    missing = program.branched - collectives.varying_axes(t._held)
    if not missing:
        return t
    array = reshard(t, t.splits, missing)
    return Tensor(array, t.dims, role=t.role, mesh=program.mesh, layout=program.layout, splits=t.splits)


def _check_there(t: Tensor) -> None:
    """An error if a tensor has no array: not yet, or no longer."""
    if isinstance(t._held, Placeholder):
        raise t._held.refused()
    if t._owner and t._owner != context.require().serial:
        raise ProgramError(
            f"{describe(t)} is a slice from inside another program",
            rule="a program's tensors can be used inside it only",
            hint="return the tensor from the program that made it, and use what that returns",
        )


def _raw(x: Any) -> TensorTypeError:
    kind = "an array" if hasattr(x, "dtype") else f"a {type(x).__name__}"
    shape = f" of shape {tuple(x.shape)}" if hasattr(x, "shape") else ""
    return TensorTypeError(
        f"{'None' if x is None else kind + shape} is not a tensor",
        rule="operands are tensors or numbers; a raw array has no names to match by",
        hint='name its dimensions: wf.tensor(array, "batch=64 d_model=256")',
    )


def capture_key(t: Tensor) -> Any:
    """What tells captured tensors apart: two may hold one array under other names, or in another role."""
    return id(t._held), t.dims, t.role


def _capture(t: Tensor) -> Tensor:
    """A whole tensor met inside a program: one of its inputs, or noted to become one."""
    program = context.require()
    if not program.adopts:
        check_same_placement(t, program)
    elif t.mesh is not None and t.layout is not None and not program.is_over:
        raise RetraceOnMesh(t.mesh, t.layout)
    if program.is_over:
        return _constant(t)
    key = capture_key(t)
    if key in program.captured_inputs:
        return program.captured_inputs[key]
    program.captured[key] = t
    # Zeros of the right type: what this trace makes is not used, in the next one the tensor is an input.
    splits = program.splits(t.dims, t.role)
    shape = program.slice_shape(t.dims, splits)
    blank = slice_tensor(cast_like(jnp.zeros(shape, t.dtype), t._held), t.dims, splits)
    blank.role = t.role
    return blank


def _constant(t: Tensor) -> Tensor:
    """A whole tensor that is met when it can be no input any more, by its values."""
    if context.is_traced(t._held) or not t._held.is_fully_addressable:
        raise ProgramError(
            f"a rule of a custom_vjp captures {describe(t)}, whose values are not at hand",
            rule="JAX calls the rules of a custom_vjp after the eager op that it is used in",
            hint="give the tensor as an argument of the custom_vjp",
        )
    whole = np.asarray(t._held)[tuple(slice(d.size) for d in t.dims)]
    return materialize(from_global(cast_like(whole, t._held), t.dims), t.role)


def check_same_placement(t: Tensor, program: Context) -> None:
    """An error if a tensor lives on another mesh or layout than the program."""
    if t.mesh is not None and t.mesh != program.mesh:
        others = " of other devices" if t.mesh.axes == program.mesh.axes else ""
        raise LayoutError(
            f'{describe(t)} lives on mesh "{t.mesh}"{others}, and this runs on mesh "{program.mesh}"',
            rule="the tensors of one operation, or program, live on one mesh",
            hint="move it with wf.place(t, mesh, layout)",
        )
    if t.mesh is not None and t.layout != program.layout:
        raise LayoutError(
            f"{describe(t)} is laid out by {t.layout!r}, and this by {program.layout!r}",
            rule="the tensors of one operation, or program, have one layout",
            hint="move it with wf.place(t, mesh, layout)",
        )


# From form to form


def materialize(t: Tensor, role: str | None = None) -> Tensor:
    """The form its layout says: split by its role's rules, nothing pending."""
    _check_there(t)
    program = context.require()
    role = t.role if role is None else role
    splits = program.splits(t.dims, role)
    array = reshard(t, splits)
    extra = collectives.varying_axes(array) - axes_of(splits)
    if extra - program.mapped:
        raise RetraceUnvarying
    if array is t._held and role == t.role:
        return t
    return Tensor(array, t.dims, role=role, mesh=program.mesh, layout=program.layout, splits=splits)


def layout_splits(t: Tensor) -> Splits:
    """How an op wants this tensor: split by the layout's rules for values."""
    return context.require().splits(t.dims)


def reshard(t: Tensor, splits: Splits | None = None, axes: Iterable[str] = ()) -> Any:
    """The tensor's array, split as told (by default as the layout says), varying over `axes` too."""
    program = context.require()
    splits = layout_splits(t) if splits is None else splits
    array, axes = t._held, frozenset(axes)
    if t.splits != splits or t.pending:
        assert t.splits is not None
        if t.pending:
            program.resolves(array)
        gathered = axes_of(t.splits) - axes_of(splits)
        asked = ("form", t.splits, t.pending, splits, axes & gathered)
        array = program.remember(
            array,
            asked,
            lambda _: _moved(t, splits, axes),
            collective=True,
        )
    missing = axes - collectives.varying_axes(array)
    if not missing:
        return t._array if array is t._held else array
    program.varies(array, missing)
    wide = t._cast_of
    if wide is not None and array is t._held:
        # A parameter is made varying before it is cast: its gradient is then summed in its own type.
        make = lambda _: cast_like(reshard(wide, splits, axes), t._held)  # noqa: E731
    else:
        make = lambda held: collectives.pvary(t._array if held is t._held else held, missing)  # noqa: E731
    return program.remember(array, ("vary", missing), make, collective=False)


def _moved(t: Tensor, splits: Splits, axes: frozenset[str]) -> Any:
    with jax.named_scope(t.origin) if t.origin else contextlib.nullcontext():
        return reshard_array(t._array, t.dims, t.splits, t.pending, splits, axes)


def reshard_together(tensors: Sequence[Tensor], splits: Sequence[Splits] | None = None) -> list[Any]:
    """The tensors' arrays, split as told, all varying over the same axes."""
    wanted = [layout_splits(t) for t in tensors] if splits is None else splits
    axes: set[str] = set()
    for t, new in zip(tensors, wanted, strict=True):
        axes |= axes_of(new)
        moved = axes_of(t.splits or ()) | t.pending
        axes |= collectives.varying_axes(t._held) - moved
    return [reshard(t, new, axes) for t, new in zip(tensors, wanted, strict=True)]


def check_along(dims: Iterable[Dim]) -> None:
    """An error if an op is about to run along a dim of which a part is at hand, in a pipeline."""
    found = [d for d in dims if d in context.require().dealt]
    if found:
        raise ProgramError(
            f"a layer of a pipeline works along {found[0].name}, of which it has a micro-batch at a time",
            rule="what a layer makes of a row does not depend on other rows: so stages never change results",
            hint="do it before or after the pipeline",
        )
