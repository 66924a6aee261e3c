"""verify: the same call under several layouts gives the same results, or which one differs first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .core.describe import describe, short_dtype
from .core.errors import ProgramError, WeftError
from .core.layout import Layout
from .core.mesh import Mesh
from .core.placement import place
from .core.program import Program, spmd
from .core.tensor import Tensor, is_tensor
from .core.types import weak_type
from .plan.arguments import check_args_is_tuple

# What another order of additions may change, relative to the largest value: of sums in float32, and of a
# result in its own type, in units in its last place.
FLOAT32_TOLERANCE = 100 * float(np.finfo(np.float32).eps)
MAX_ULPS = 4
HINT = "look for raw JAX on slices (wf.local, jax.tree.map), or report it with this program"


class VerificationError(WeftError, AssertionError):
    """Two layouts gave different results."""


@dataclass(frozen=True)
class Comparison:
    """One output under one layout, beside the same on one device.

    Attributes:
      layout: the layout.
      name: the output's place in the results.
      difference: the largest, relative to the largest value.
      tolerance: what rounding may make of it.
    """

    layout: str
    name: str
    difference: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance


def verify(
    fn: Callable[..., Any],
    args: Sequence[Any],
    mesh: Any,
    layouts: Sequence[Any],
    *,
    tolerance: float | None = None,
) -> list[Comparison]:
    """Run the same call on one device and under each layout, and compare every output's type and values.

    Args:
      fn: the function, or a program of it; to compare gradients too, pass `wf.accumulate_gradients(fn)`.
      args: tensors with values, wherever they are placed.
      mesh: the mesh, or one for each layout.
      layouts: the layouts to try.
      tolerance: the largest difference allowed, relative to an output's largest value; by default
        what rounding explains: a hundred units in the last place of a float32, or four of the
        output's own type, if that is more.

    Returns:
      One entry for each layout and output, if all agree; else an error that names the first output
      that differs, and by how much.

    >>> import weft as wf
    >>> x = wf.arange(wf.Dim("a", 5), float)
    >>> [c.agrees for c in wf.verify(lambda x: wf.sum(x), (x,), wf.Mesh(), [wf.Layout()])]
    [True]
    """
    layouts = [layouts] if isinstance(layouts, str | Layout) else layouts
    example = 'wf.verify(fn, (x,), "data=4", ["batch:data"])'
    check_args_is_tuple(args, "verify", example)
    if not layouts:
        raise ProgramError(
            "there are no layouts to compare", rule="each layout is compared with one device", hint=example
        ).located("verify")
    if tolerance is not None and not tolerance >= 0:
        raise ProgramError(
            f"a tolerance of {tolerance}",
            rule="a difference is never below 0",
            hint="leave it out for what rounding explains, or give 0 for none",
        ).located("verify")
    fn = fn.fn if isinstance(fn, Program) else fn
    args = jax.tree.map(lambda x: place(x, None, None) if is_tensor(x) else x, args, is_leaf=is_tensor)
    several = isinstance(mesh, list | tuple) and len(mesh) == len(layouts) and not all(map(_is_axis, mesh))
    meshes = list(mesh) if several else [mesh] * len(layouts)
    programs = [spmd(fn, *pair) for pair in zip(meshes, layouts, strict=True)]
    for program in programs:  # an error in any layout comes before the first compilation
        program.jaxpr(*args)
    one = spmd(fn, Mesh(), Layout())(*args)
    compared = []
    for program in programs:
        shown = f'{program.layout!r} on mesh "{program.mesh}"'
        for entry, pair in _compare(one, program(*args), shown, tolerance):
            compared.append(entry)
            if not entry.agrees:
                raise _differs(entry, *pair).located("verify")
    return compared


def _is_axis(one: Any) -> bool:
    """Whether it is an axis of a mesh, a name and a size."""
    return isinstance(one, tuple | list) and len(one) == 2 and isinstance(one[1], int)


def _compare(one: Any, other: Any, shown: str, tolerance: float | None) -> Any:
    left = jax.tree_util.tree_leaves_with_path(one, is_leaf=is_tensor)
    right = jax.tree.leaves(other, is_leaf=is_tensor)
    structures: list[Any] = [jax.tree.structure(tree, is_leaf=is_tensor) for tree in (one, other)]
    if structures[0] != structures[1]:
        raise VerificationError(
            f"results have another structure under {shown}",
            f"on one device {structures[0]}, there {structures[1]}",
            rule="layouts never change results",
            hint="a Python `if` in the function may look at a slice: its array, or its size",
        ).located("verify")
    for (path, a), b in zip(left, right, strict=True):
        name = "result" + jax.tree_util.keystr(path)
        types = _type(a), _type(b)
        if types[0] != types[1]:
            raise VerificationError(
                f"{name} has another type under {shown}",
                f"on one device {types[0]}, there {types[1]}",
                rule="layouts never change results: neither dtypes, nor whether they are weak, nor values",
                hint=HINT,
            ).located("verify")
        want, have = _values(a, a), _values(b, a)
        allowed = _rounding(want.dtype) if tolerance is None else tolerance
        want, have = _wide(want), _wide(have)
        yield Comparison(shown, name, _difference(want, have), allowed), (a, want, have)


def _type(result: Any) -> str:
    """`bf16`, or `weak f32` for one that gives way to the type of another operand."""
    if not hasattr(result, "dtype"):
        return type(result).__name__
    return f"{'weak ' * weak_type(result)}{short_dtype(result.dtype)}"


def _values(t: Any, like: Any) -> np.ndarray:
    """A result's values; of keys the numbers that they are made of."""
    if hasattr(t, "dtype") and jnp.issubdtype(t.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(t))
    return np.asarray(t.numpy(*like.dims) if isinstance(t, Tensor) else t)


def _rounding(dtype: Any) -> float:
    """What rounding may change in a result of this type."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return FLOAT32_TOLERANCE
    return max(FLOAT32_TOLERANCE, MAX_ULPS * float(jnp.finfo(dtype).eps))


def _wide(values: np.ndarray) -> np.ndarray:
    """Values that rounding can change in double precision, the others as they are."""
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        return values.astype(np.complex128)
    return values.astype(np.float64) if jnp.issubdtype(values.dtype, jnp.inexact) else values


def _difference(want: np.ndarray, have: np.ndarray) -> float:
    """The largest difference relative to the largest value; where there is no number to compare: 0 or inf."""
    if not np.issubdtype(want.dtype, np.inexact):
        return float(not np.array_equal(want, have))
    apart = _apart(want, have)
    scale = np.max(np.abs(want), initial=0, where=np.isfinite(want))
    return float(np.max(apart, initial=0) / (scale or 1))


def _apart(want: np.ndarray, have: np.ndarray) -> np.ndarray:
    """How far apart each two values are: infinities and nan are the same or infinitely far."""
    if not np.issubdtype(want.dtype, np.inexact):
        return want != have
    finite = np.isfinite(want) & np.isfinite(have)
    same = (want == have) | (np.isnan(want) & np.isnan(have))
    apart = np.abs(np.subtract(want, have, where=finite, out=np.zeros_like(want)))
    return np.where(finite, apart, np.where(same, 0.0, np.inf))


def _differs(entry: Comparison, like: Any, want: np.ndarray, have: np.ndarray) -> VerificationError:
    where = np.unravel_index(int(np.argmax(_apart(want, have))), want.shape) if want.shape else ()
    place = ", ".join(f"{d.name} {int(n)}" for d, n in zip(getattr(like, "dims", ()), where, strict=False))
    return VerificationError(
        f"{entry.name} differs by {entry.difference:.2g} (relative) under {entry.layout}",
        f"{describe(like) if isinstance(like, Tensor) else ''} {place}: {want[where]} on one device, "
        f"{have[where]} there",
        f"rounding explains {entry.tolerance:.2g}",
        rule="layouts never change results",
        hint=HINT,
    )
