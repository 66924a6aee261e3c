"""Boundary: leaves that enter and leave a traced body (scan, cond, vmap, grad).

JAX's control flow takes arrays, and our functions take tensors. A tensor is taken apart into its array and a
`LeafSpec` outside, and rebuilt inside. `match_spec` brings a body's result to the spec that JAX requires: a
carry must keep its shape, its dtype and the axes over which it varies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike

from . import collectives
from .context import active
from .describe import describe
from .dims import Dim, DimLike, format_dims, list_dim, select_dim
from .errors import DimError, ProgramError, ShapeError, TensorTypeError
from .labels import OpLabel
from .layout import Splits, axes_of
from .operands import as_slice, slice_tensor
from .reshard import materialize
from .retrace import Retrace
from .tensor import Tensor, is_tensor
from .types import PyTree, Typed, cast_like, constant_like

Leaf = Tensor | ArrayLike


def flatten(tree: PyTree) -> tuple[list[Any], PyTreeDef]:
    """The leaves of a tree, with tensors as slices, and its structure."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_tensor)
    return [as_slice(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure


@dataclass(frozen=True)
class LeafSpec:
    """The static part of a slice: everything but its array. The spec of a raw array is `None`.

    The origin of a pending sum is only a label, so it does not take part in comparisons.
    """

    dims: tuple[Dim, ...]
    role: str
    splits: Splits
    pending: frozenset[str]
    origin: OpLabel | None = field(default=None, compare=False)

    @classmethod
    def of(cls, leaf: object) -> LeafSpec | None:
        if not isinstance(leaf, Tensor):
            return None
        assert leaf.splits is not None
        return cls(leaf.dims, leaf.role, leaf.splits, leaf.pending, leaf.origin)

    def rebuild(self, array: jax.Array) -> Tensor:
        """A tensor with this spec."""
        ctx = active.context
        # Registered: variants of a carry are then memoized in the body's frame, not outside the loop.
        ctx.register(array)
        rebuilt = Tensor(
            array,
            self.dims,
            role=self.role,
            placement=ctx.placement,
            splits=self.splits,
            pending=self.pending,
        )
        rebuilt.origin = self.origin
        return rebuilt


def rebuild_leaf(spec: LeafSpec | None, array: jax.Array) -> Any:
    """A leaf from its spec and its array."""
    return array if spec is None else spec.rebuild(array)


def leaf_array(leaf: Leaf) -> jax.Array:
    """A leaf's array, placed as it is.

    Inside a vmap it is made varying over the vmap's axes: another leaf may be, and a carry's type must not
    depend on which.
    """
    if isinstance(leaf, Tensor):
        return collectives.pvary(leaf._read(), active.context.vmap.axes)
    return as_raw_array(leaf)


def as_raw_array(leaf: object) -> jax.Array:
    """A leaf that is not a tensor as an array; raises an error if it is neither an array nor a number."""
    try:
        return jnp.asarray(leaf)
    except (TypeError, ValueError):
        raise TensorTypeError(
            f"a value of type {type(leaf).__name__} was given where a tensor, an array or a number is needed",
            rule="the values that loops and branches take are pytrees of tensors, arrays and numbers",
            hint="check the order of the arguments",
        ) from None


def check_exact_varying(leaf: Any) -> Any:
    """The leaf, if its array varies over no more axes than its splits and its pending sum; else retrace."""
    if isinstance(leaf, Tensor):
        assert leaf.splits is not None
        allowed = axes_of(leaf.splits) | leaf.pending
        if collectives.varying_axes(leaf._data) - allowed - active.context.vmap.axes:
            raise Retrace("unvarying")
    return leaf


def format_treedef(tree: PyTreeDef) -> str:
    """A tree's structure for messages: `(*, {'a': *})`."""
    return str(tree).removeprefix("PyTreeDef(").removesuffix(")")


def match_spec(leaf: Any, spec: LeafSpec | None, what: str, other: str = "was") -> Any:
    """A loop's or branch's result, resharded to a spec; raises an error if its kind or dims differ.

    Args:
      leaf: the result.
      spec: the spec that it must have.
      what: the result's name in the message.
      other: in the message, the words before the required dims.
    """
    if spec is None or not isinstance(leaf, Tensor):
        if spec is not None and not spec.dims and not hasattr(leaf, "shape"):
            return match_spec(slice_tensor(jnp.asarray(leaf), ()), spec, what, other)
        if (spec is None) != (not isinstance(leaf, Tensor)):
            raise ProgramError(
                f"{what} is {describe(leaf) if isinstance(leaf, Tensor) else 'a raw array'}, and "
                f"{other} {'a raw array' if spec is None else f'a tensor [{format_dims(spec.dims)}]'}",
                rule="a carry, a combination and the results of all branches keep their kind and dims",
                hint="return the same kind: a tensor for a tensor, a raw array for a raw array",
            )
        return leaf
    if set(leaf.dims) != set(spec.dims):
        raise DimError(
            f"{what} has the dims [{format_dims(leaf.dims)}], and {other} [{format_dims(spec.dims)}]",
            rule="a carry, a combination and the results of all branches keep their dims and sizes",
            hint="check what the function returns; wf.broadcast_to adds a dim",
        )
    if leaf.dims != spec.dims:
        import weft  # imported here because the ops import this module

        leaf = weft.transpose(leaf, spec.dims)
    # JAX requires that a carry varies over the same axes before and after a step, and that all branches of a
    # cond agree. A placement that depends on the spec alone guarantees it.
    if spec.pending:
        return as_pending(leaf, spec)
    return materialize(leaf, spec.role)


def as_pending(leaf: Tensor, spec: LeafSpec) -> Tensor:
    """A tensor as a pending sum over the axes of a spec.

    A resolved value is kept on one device along these axes and set to zero on the others, so that the sum is
    the value.
    """
    if leaf.pending == spec.pending and leaf.splits == spec.splits:
        return replace(spec, origin=leaf.origin).rebuild(check_exact_varying(leaf)._read())
    array = collectives.pvary(materialize(leaf, spec.role)._read(), spec.pending)
    # Dividing by the number of devices would also sum to the value, but it rounds, and fails for integers.
    is_first = jnp.bool_(True)
    for axis in sorted(spec.pending):
        is_first = is_first & (collectives.axis_index((axis,)) == 0)
    return spec.rebuild(jnp.where(is_first, array, constant_like(0, array)))


def check_carry_dtype(new: Typed, old: Typed, what: str) -> Any:
    """A carry in its old type; raises an error if its dtype has changed."""
    if new.dtype != old.dtype:
        raise TensorTypeError(
            f"{what} becomes {new.dtype} and was {old.dtype}",
            rule=f"{what} keeps its dtype",
            hint="convert it in the function with .astype(...), or begin with the other dtype",
        )
    return cast_like(new, old)


def strip_weak_type(leaf: Any) -> Any:
    """A leaf without JAX's weak type, which a carry could not keep."""
    # lax.convert_element_type makes a type strong even if the dtype stays the same.
    if isinstance(leaf, Tensor):
        spec = LeafSpec.of(leaf)
        assert spec is not None
        return spec.rebuild(lax.convert_element_type(leaf._read(), leaf.dtype))
    array = as_raw_array(leaf)
    # Keys have an extended dtype, which has no weak type and can't be converted.
    return lax.convert_element_type(array, array.dtype) if not _is_key(array) else array


def _is_key(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def numbers_as_tensors(leaf: Leaf) -> Any:
    """A carry with Python numbers converted to tensors; raw arrays stay raw."""
    return as_slice(leaf) if isinstance(leaf, int | float | complex) else leaf


def common_dim(items: Sequence[Leaf], dim: DimLike) -> Dim:
    """The dim that all of these are scanned along. It is the first dimension of raw arrays."""
    found = _scanned_dim(items, dim)
    shapes = [np.shape(x) for x in items if not isinstance(x, Tensor)]
    wrong = [shape for shape in shapes if shape[:1] != (found.size,)]
    if wrong:
        raise ShapeError(
            f"raw arrays of shape {', '.join(map(str, wrong))} can't be scanned along {found}",
            rule="the first dimension of a scanned raw array is the dim, and has its size",
            hint=f"pass arrays with {found.size} rows; values that are the same in every step need not be "
            "passed: the function can capture them",
        )
    return found


def _scanned_dim(items: Sequence[Leaf], dim: DimLike) -> Dim:
    tensors, dim = [t for t in items if isinstance(t, Tensor)], list_dim(dim)
    if not tensors:
        if not isinstance(dim, Dim):
            raise DimError(
                f"the size of dim {dim} is unknown: no tensor is scanned",
                rule="without tensors to scan, scan needs a Dim",
                hint=f'wf.Dim("{dim}", 10)',
            )
        return dim
    found = {select_dim(t.dims, dim) for t in tensors}
    if len(found) > 1:
        raise DimError(
            f"the scanned tensors have different sizes of {dim}: {format_dims(sorted(found, key=repr))}",
            rule="all scanned tensors have the same size of the dim",
            hint="slice the longer ones",
        )
    return found.pop()
