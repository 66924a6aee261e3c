"""verify: run one call under several layouts, and report the first result that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .core.call_errors import checks_arguments
from .core.describe import describe, short_dtype
from .core.errors import ProgramError, VerificationError
from .core.field_types import NonNegative
from .core.fields import argument_types, check_values
from .core.layout import Layout
from .core.mesh import Mesh
from .core.placement import place
from .core.program import Program, spmd
from .core.tensor import Tensor, is_tensor
from .core.traced import Traced, unpack_traced
from .core.types import PyTree, weak_type
from .plan.inputs import check_args_is_tuple

# Layouts change the order of additions, and so the rounding. Allowed differences, relative to the largest
# value: that of long float32 sums, and that of a result in its own dtype, in units in the last place.
FLOAT32_TOLERANCE = 100 * float(np.finfo(np.float32).eps)
MAX_ULPS = 4
HINT = "look for raw JAX on slices (wf.local, jax.tree.map), or report it with this program"


Result = Tensor | jax.Array | np.ndarray | complex  # one output


@dataclass(frozen=True)
class Comparison:
    """One output under one layout, compared with the same output on one device.

    Attributes:
      layout: the layout.
      name: the path of the output in the results.
      difference: the largest difference, relative to the largest value.
      tolerance: the allowed difference.
    """

    layout: str
    name: str
    difference: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance


@checks_arguments
def verify(
    fn: Callable[..., PyTree] | Traced,
    args: Sequence[PyTree],
    mesh: Mesh | str | Sequence[Mesh | str],
    layouts: Layout | str | Sequence[Layout | str],
    *,
    tolerance: NonNegative | None = None,
) -> list[Comparison]:
    """Run the same call on one device and under each layout, and compare every output's type and values.

    Args:
      fn: a function, a program, or a traced program; to compare gradients too, pass
        `wf.value_and_grad(fn)`.
      args: its arguments: tensors with values, on any mesh. For a traced program, `()` stands for those
        that it was traced for.
      mesh: the mesh, or one mesh for each layout.
      layouts: the layouts to compare.
      tolerance: the largest difference allowed, relative to an output's largest value; by default the
        difference that rounding explains: 100 units in the last place of a float32, or 4 of the output's
        own dtype, whichever is larger.

    Returns:
      One comparison for each layout and output.

    Raises:
      VerificationError: for the first output that differs.

    >>> import weft as wf
    >>> x = wf.arange(wf.Dim("a", 5), float)
    >>> [c.agrees for c in wf.verify(lambda x: wf.sum(x), (x,), wf.Mesh(), [wf.Layout()])]
    [True]
    """
    layouts = [layouts] if isinstance(layouts, str | Layout) else layouts
    example = 'wf.verify(fn, (x,), "data=4", ["batch:data"])'
    check_args_is_tuple(args, "verify", example)
    function, args = unpack_traced(fn, args, "verify")
    if not layouts:
        raise ProgramError(
            "there are no layouts to compare", rule="each layout is compared with one device", hint=example
        ).located("verify")
    hint = "leave it out to allow rounding, or pass 0 for exact equality"
    check_values(argument_types(verify), {"tolerance": tolerance}, ProgramError, hint, "verify")
    function = function.fn if isinstance(function, Program) else function
    args = jax.tree.map(lambda x: place(x, None, None) if is_tensor(x) else x, args, is_leaf=is_tensor)
    # A list can also be one mesh: `[("data", 4), ("model", 2)]`.
    meshes: Sequence[PyTree] = [mesh] * len(layouts)
    if isinstance(mesh, list | tuple) and len(mesh) == len(layouts) and not all(map(_is_axis, mesh)):
        meshes = mesh
    elif isinstance(mesh, list | tuple) and any(isinstance(one, Mesh | str | Mapping) for one in mesh):
        raise ProgramError(
            f"there are {len(mesh)} meshes for {len(layouts)} layouts",
            rule="mesh is one mesh for all layouts, or a list with one mesh for each layout",
            hint=example,
        ).located("verify")
    programs = [spmd(function, *pair) for pair in zip(meshes, layouts, strict=True)]
    for program in programs:  # raise errors of any layout before the first compilation
        program.jaxpr(*args)
    expected = spmd(function, Mesh(), Layout())(*args)
    comparisons = []
    for program in programs:
        where = f'{program.layout!r} on mesh "{program.mesh}"'
        for comparison, values in _compare(expected, program(*args), where, tolerance):
            comparisons.append(comparison)
            if not comparison.agrees:
                raise _error(comparison, *values).located("verify")
    return comparisons


def _is_axis(item: object) -> bool:
    """Whether it is a mesh axis, a name and a size."""
    return isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[1], int)


def _compare(
    expected: PyTree, actual: PyTree, where: str, tolerance: float | None
) -> Iterator[tuple[Comparison, tuple[Result, np.ndarray, np.ndarray]]]:
    """A comparison for each output, with the expected output and the values of both."""
    left = jax.tree_util.tree_leaves_with_path(expected, is_leaf=is_tensor)
    right = jax.tree.leaves(actual, is_leaf=is_tensor)
    structures: list[object] = [jax.tree.structure(tree, is_leaf=is_tensor) for tree in (expected, actual)]
    if structures[0] != structures[1]:
        raise VerificationError(
            f"the results have a different structure under {where}",
            f"on one device {structures[0]}, there {structures[1]}",
            rule="layouts never change results",
            hint="look for a Python `if` in the function that depends on a slice: its array, or its size",
        ).located("verify")
    for (path, a), b in zip(left, right, strict=True):
        name = "result" + jax.tree_util.keystr(path)
        types = _type(a), _type(b)
        if types[0] != types[1]:
            raise VerificationError(
                f"{name} has a different type under {where}",
                f"on one device {types[0]}, there {types[1]}",
                rule="layouts never change results: neither dtypes, nor weak types, nor values",
                hint=HINT,
            ).located("verify")
        want, have = _values(a, a), _values(b, a)
        allowed = _rounding(want.dtype) if tolerance is None else tolerance
        want, have = _widen(want), _widen(have)
        yield Comparison(where, name, _difference(want, have), allowed), (a, want, have)


def _type(result: Result) -> str:
    """The dtype, `bf16`, with `weak` if it is weakly typed, `weak f32`."""
    if not hasattr(result, "dtype"):
        return type(result).__name__
    return f"{'weak ' * weak_type(result)}{short_dtype(result.dtype)}"


def _values(result: Result, like: Result) -> np.ndarray:
    """The values of a result, with the dims in the order of `like`; for keys their data."""
    if hasattr(result, "dtype") and jnp.issubdtype(result.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(cast(jax.Array, result)))
    return np.asarray(result.numpy(*cast(Tensor, like).dims) if isinstance(result, Tensor) else result)


def _rounding(dtype: DTypeLike) -> float:
    """The difference that rounding explains in a result of this dtype."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return FLOAT32_TOLERANCE
    return max(FLOAT32_TOLERANCE, MAX_ULPS * float(jnp.finfo(dtype).eps))


def _widen(values: np.ndarray) -> np.ndarray:
    """Floating-point values in double precision, so that their difference is exact; others unchanged."""
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        return values.astype(np.complex128)
    return values.astype(np.float64) if jnp.issubdtype(values.dtype, jnp.inexact) else values


def _difference(want: np.ndarray, have: np.ndarray) -> float:
    """The largest difference relative to the largest value; 0 or 1 for values that are not floating-point."""
    if not np.issubdtype(want.dtype, np.inexact):
        return float(not np.array_equal(want, have))
    distance = _distance(want, have)
    scale = np.max(np.abs(want), initial=0, where=np.isfinite(want))
    return float(np.max(distance, initial=0) / (scale or 1))


def _distance(want: np.ndarray, have: np.ndarray) -> np.ndarray:
    """The distance of each pair of values; infinities and nan are equal or infinitely far apart."""
    if not np.issubdtype(want.dtype, np.inexact):
        return want != have
    finite = np.isfinite(want) & np.isfinite(have)
    same = (want == have) | (np.isnan(want) & np.isnan(have))
    distance = np.abs(np.subtract(want, have, where=finite, out=np.zeros_like(want)))
    return np.where(finite, distance, np.where(same, 0.0, np.inf))


def _error(comparison: Comparison, like: Result, want: np.ndarray, have: np.ndarray) -> VerificationError:
    index = np.unravel_index(int(np.argmax(_distance(want, have))), want.shape) if want.shape else ()
    position = ", ".join(f"{d.name} {int(n)}" for d, n in zip(getattr(like, "dims", ()), index, strict=False))
    return VerificationError(
        f"{comparison.name} differs by {comparison.difference:.2g} (relative) under {comparison.layout}",
        f"{describe(like) if isinstance(like, Tensor) else ''} {position}: {want[index]} on one device, "
        f"{have[index]} there",
        f"rounding explains {comparison.tolerance:.2g}",
        rule="layouts never change results",
        hint=HINT,
    )
