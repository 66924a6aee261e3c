"""Forms: bring a tensor inside a program into the form that an op needs.

A form is: which axes split each dim, over which axes a sum is still pending, and over which further axes
the array has been made varying. `relayout` goes from one to another with the fewest bytes:

    pending, then split on that axis     reduce-scatter
    newly split                          local slice, no traffic
    split elsewhere                      all-to-all
    no longer split                      all-gather
    still pending                        all-reduce

Every form is made once per tensor (`Context.remember`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from . import collectives, context
from .collectives import Axes
from .context import Context
from .dims import Dim
from .errors import LayoutError, ProgramError, TensorTypeError
from .layout import Splits
from .tensor import Tensor, describe


class Absent:
    """Held by a tensor in place of an array that is not there yet (`later.py`)."""

    def refused(self) -> ProgramError:
        """The error for a use of it."""
        raise NotImplementedError


class Overcast(Exception):
    """A tensor that a scan made varying beforehand is needed unvarying; the scan starts over."""


# Into the program


def slice_tensor(
    array: Any, dims: Sequence[Dim], splits: Splits | None = None, pending: Iterable[str] = ()
) -> Tensor:
    """An op's result: a slice with these dims, split as the layout says unless told otherwise."""
    program = context.require()
    dims = tuple(dims)
    splits = program.splits(dims) if splits is None else splits
    pending = frozenset(pending)
    split_axes = {axis for axes in splits for axis in axes}
    array = collectives.vary(array, split_axes | pending)
    program.know(array)
    clash = program.mapped & split_axes
    if clash:
        names = ", ".join(d.name for d, axes in zip(dims, splits, strict=True) if clash & set(axes))
        raise LayoutError(
            f"{names} is on axis {', '.join(sorted(clash))}, over which an enclosing vmap is split",
            rule="a tensor can have at most one dim on an axis, the dims of an enclosing vmap included",
            hint="drop one of the rules, or rename the dim",
        )
    return Tensor(
        array, dims, mesh=program.mesh, layout=program.layout, splits=splits, pending=pending
    )


def from_whole(array: Any, dims: Sequence[Dim]) -> Tensor:
    """A tensor inside a program from an array of the true size that every device has."""
    array = jnp.asarray(array)
    if collectives.varying(array) - context.require().mapped:
        raise ProgramError(
            f"an array that varies over {', '.join(sorted(collectives.varying(array)))} was named "
            "as if it were whole",
            rule="inside a program a raw array must be the same on all devices",
            hint="work on slices with wf.local(fn, *tensors, out=dims)",
        )
    return slice_tensor(array, dims, splits=((),) * len(dims))


def as_slice(x: Any) -> Tensor:
    """An operand as a slice: whole tensors become inputs of the program, numbers become constants."""
    if isinstance(x, Tensor):
        _check_there(x)
        return x if x.is_slice else _capture(x)
    if getattr(x, "shape", ()) == () and (
        hasattr(x, "dtype") or isinstance(x, int | float | complex)
    ):
        return slice_tensor(jnp.asarray(x), ())
    raise _raw(x)


def _check_there(t: Tensor) -> None:
    """An error if a tensor has no array: not yet, or no longer."""
    if isinstance(t._held, Absent):
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


def _capture(t: Tensor) -> Tensor:
    """A whole tensor met inside a program: one of its inputs, or noted to become one."""
    program = context.require()
    check_same_place(t, program)
    key = id(t._held)
    if key in program.captured_inputs:
        return program.captured_inputs[key]
    program.captured[key] = t
    # Until the second trace, where it is an input: zeros of the right type.
    splits = program.splits(t.dims, t.role)
    shape = tuple(program.slice_size(d, a) for d, a in zip(t.dims, splits, strict=True))
    blank = slice_tensor(jnp.zeros(shape, t.dtype), t.dims, splits)
    blank.role = t.role
    return blank


def check_same_place(t: Tensor, program: Context) -> None:
    """An error if a tensor lives on another mesh or layout than the program."""
    if t.mesh is not None and t.mesh != program.mesh:
        raise LayoutError(
            f'{describe(t)} lives on mesh "{t.mesh}", and this runs on mesh "{program.mesh}"',
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


def settle(t: Tensor, role: str | None = None) -> Tensor:
    """The form its layout says: split by its role's rules, nothing pending."""
    _check_there(t)
    program = context.require()
    role = t.role if role is None else role
    splits = program.splits(t.dims, role)
    array = in_form(t, splits)
    extra = collectives.varying(array) - {axis for axes in splits for axis in axes}
    if extra - program.mapped:
        raise Overcast
    if array is t._held and role == t.role:
        return t
    return Tensor(array, t.dims, role=role, mesh=program.mesh, layout=program.layout, splits=splits)


def home(t: Tensor) -> Splits:
    """How an op wants this tensor: split by the layout's rules for values."""
    return context.require().splits(t.dims)


def in_form(t: Tensor, splits: Splits | None = None, axes: Iterable[str] = ()) -> Any:
    """The tensor's array, split as told (by default as the layout says), varying over `axes` too."""
    program = context.require()
    splits = home(t) if splits is None else splits
    array, axes = t._held, frozenset(axes)
    if t.splits != splits or t.pending:
        assert t.splits is not None
        if t.pending:
            program.resolves(array)
        gathered = {a for old in t.splits for a in old} - {a for new in splits for a in new}
        asked = ("form", t.splits, t.pending, splits, axes & gathered)
        array = program.remember(
            array,
            asked,
            lambda _: relayout(t._array, t.dims, t.splits, t.pending, splits, axes),
            collective=True,
        )
    missing = axes - collectives.varying(array)
    if not missing:
        return t._array if array is t._held else array
    return program.remember(
        array,
        ("vary", missing),
        lambda held: collectives.vary(t._array if held is t._held else held, missing),
        collective=False,
    )


def together(tensors: Sequence[Tensor], splits: Sequence[Splits] | None = None) -> list[Any]:
    """The tensors' arrays, split as told, all varying over the same axes."""
    wanted = [home(t) for t in tensors] if splits is None else splits
    axes: set[str] = set()
    for t, new in zip(tensors, wanted, strict=True):
        axes |= {a for one in new for a in one}
        moved = {a for one in t.splits or () for a in one} | t.pending
        axes |= collectives.varying(t._held) - moved
    return [in_form(t, new, axes) for t, new in zip(tensors, wanted, strict=True)]


def relayout(
    array: Any,
    dims: Sequence[Dim],
    old: Splits | None,
    pending: frozenset[str],
    new: Splits,
    axes: frozenset[str] = frozenset(),
) -> Any:
    """An array split as `old`, with a pending sum, as an array split as `new` without one.

    Args:
      axes: where a consumer varies, a gathered array stays varying, so that the transpose is a
        reduce-scatter.
    """
    assert old is not None
    work = _Relayout(array, dims, old, pending, new)
    stays = {axis for one in new for axis in one} | axes
    while work.pending or work.wrong():
        # First what is free, then what makes the rest smaller; a gather comes last.
        work.slice() or work.scatter() or work.move() or work.sum(axes) or work.gather(stays)
    return work.array


class _Relayout:
    """A relayout under way. Its steps say whether there was something for them to do.

    A dim's axes are added and taken away at the end, and only where blocks nest: 6 over x+y has
    blocks of 2, which do not lie within the blocks of 3 that it has over x. From one to the other
    such a dim goes by way of the whole one.
    """

    def __init__(
        self, array: Any, dims: Sequence[Dim], old: Splits, pending: frozenset[str], new: Splits
    ):
        self.array, self.dims, self.new = array, dims, new
        self.now, self.pending = list(old), set(pending)
        self.program = context.require()

    def wrong(self) -> list[int]:
        """The positions that are not yet split as they are to be."""
        return [p for p in range(len(self.dims)) if self.now[p] != self.new[p]]

    def slice(self) -> bool:
        """Splits a dim on axes that nothing is on."""
        busy = {axis for one in self.now for axis in one} | self.pending
        for position, added in self._growing():
            if not busy & set(added):
                self._make_room(position, added)
                self.now[position] += added
                block = self._block(position, self.now[position])
                self.array = collectives.local_slice(
                    self.array, added, position, block, plain=self.program.vmaps > 0
                )
                return True
        return False

    def scatter(self) -> bool:
        """Splits a dim on axes over which a sum is pending."""
        for position, added in self._growing():
            if self.pending >= set(added):
                self._make_room(position, added)
                self.now[position] += added
                self.array = collectives.reduce_scatter(self.array, added, position)
                self.pending -= set(added)
                return True
        return False

    def move(self) -> bool:
        """Takes the last axes of one dim to another."""
        for source in self.wrong():
            for keep in self._keeping(source):
                moved = self.now[source][len(keep) :]
                for target, added in self._growing():
                    if moved == added:
                        self._make_room(target, added)
                        self.array = collectives.all_to_all(self.array, added, target, source)
                        self.now[target] += added
                        self._keep(source, keep)
                        return True
        return False

    def sum(self, axes: frozenset[str]) -> bool:
        """Makes the sum that is pending; the result varies over those of its axes that are in `axes`."""
        if not self.pending:
            return False
        summed = collectives.all_reduce(self.array, tuple(sorted(self.pending)))
        summed = checkpoint_name(summed, "sum")  # for the remat policy "sums"
        self.array = collectives.vary(summed, self.pending & axes)
        self.pending.clear()
        return True

    def gather(self, stays: set[str]) -> bool:
        """Takes axes from the dim that is split least; the result still varies over those in `stays`."""
        source = min(
            (p for p in self.wrong() if self._keeping(p)),
            key=lambda p: self.program.ways(self.now[p]),
        )
        keep = self._keeping(source)[0]
        gone = self.now[source][len(keep) :]
        self.array = collectives.all_gather(self.array, gone, source, stays_varying=stays)
        self._keep(source, keep)
        return True

    def _growing(self) -> list[tuple[int, Axes]]:
        """The axes that can be added to dims on the way to the new form, for each dim the most first."""
        growing = []
        for p in self.wrong():
            have, want = self.now[p], self.new[p]
            for n in range(len(want), len(have), -1):
                if self._nests(p, have, want[:n]) and self._nests(p, want[:n], want):
                    growing.append((p, want[len(have) : n]))
        return growing

    def _keeping(self, position: int) -> list[Axes]:
        """What can be left of a dim's axes when those that have to go are taken, the least first."""
        have, want = self.now[position], self.new[position]
        fits = [n for n in range(len(have) + 1) if self._nests(position, have[:n], have)]
        stays = max(n for n in fits if self._nests(position, have[:n], want))
        return [have[:n] for n in fits if stays <= n < len(have)]

    def _nests(self, position: int, outer: Axes, inner: Axes) -> bool:
        """Whether `inner` continues `outer`, and its blocks lie within those of `outer`."""
        rest = self.program.ways(inner[len(outer) :])
        within = self._block(position, outer) == rest * self._block(position, inner)
        return inner[: len(outer)] == outer and (within or not outer)

    def _block(self, position: int, axes: Axes) -> int:
        return self.program.slice_size(self.dims[position], axes)

    def _make_room(self, position: int, added: Axes) -> None:
        """Pads a whole dim to a multiple of the pieces that it is to be cut into."""
        block = self._block(position, self.now[position] + added)
        self.array = _resize(self.array, position, self.program.ways(added) * block)

    def _keep(self, position: int, axes: Axes) -> None:
        """Leaves a dim these axes, and cuts the padding off that the others needed."""
        self.now[position] = axes
        self.array = _resize(self.array, position, self._block(position, axes))


def _resize(array: Any, position: int, size: int) -> Any:
    """Zeros added, or padding cut off, at the end of one position."""
    have = array.shape[position]
    if have < size:
        pads = [(0, 0, 0)] * array.ndim
        pads[position] = (0, size - have, 0)
        return lax.pad(array, jnp.zeros((), array.dtype), pads)
    return array if have == size else lax.slice_in_dim(array, 0, size, axis=position)


# Padding


def start_of(axes: Axes, block: int) -> Any:
    """Where this device's block begins in the whole dim."""
    return collectives.index(axes) * block if axes else 0


def positions(dim: Dim, axes: Axes) -> Any:
    """The places of this device's block in the whole dim, as int32."""
    program = context.require()
    block = program.slice_size(dim, axes)
    return lax.iota(jnp.int32, block) + jnp.int32(start_of(axes, block))


def is_uneven(dim: Dim, axes: Axes) -> bool:
    """Whether some device's block of this dim has padding."""
    return bool(axes) and dim.size % context.require().ways(axes) != 0


def valid(dims: Sequence[Dim], splits: Splits, only: Iterable[Dim] | None = None) -> Any:
    """True where a slice holds an element and False where it is padding; None if nowhere."""
    mask = None
    for position, (dim, axes) in enumerate(zip(dims, splits, strict=True)):
        if is_uneven(dim, axes) and (only is None or dim in only):
            here = positions(dim, axes) < dim.size
            here = here.reshape([-1 if p == position else 1 for p in range(len(dims))])
            mask = here if mask is None else mask & here
    return mask


def fill_padding(
    array: Any,
    dims: Sequence[Dim],
    splits: Splits,
    value: Any = 0,
    only: Iterable[Dim] | None = None,
) -> Any:
    """The slice with its padding set to a value, by default back to zero."""
    mask = valid(dims, splits, only)
    if mask is None:
        return array
    axes = collectives.varying(array) | collectives.varying(mask)
    array = collectives.vary(array, axes)
    filling = jnp.asarray(value, array.dtype)
    return jnp.where(collectives.vary(mask, axes), array, collectives.vary(filling, axes))
