"""Leaves: what goes in and out of a traced body, as arrays on JAX's side and tensors on ours."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import collectives, context
from .context import RetraceUnvarying
from .describe import describe
from .dims import Dim, format_dims, select_dim
from .errors import DimError, ProgramError, ShapeError, TensorTypeError
from .layout import Splits, axes_of
from .operands import as_slice, check_along, slice_tensor
from .reshard import materialize
from .tensor import Tensor, is_tensor
from .types import cast_like, constant_like


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves (tensors as slices, whatever else as it is) and the structure around them."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_tensor)
    return [as_slice(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure


@dataclass(frozen=True)
class LeafSpec:
    """What a leaf is apart from its array; `None` for a raw array.

    Forms that differ in the op that a pending sum comes from are the same.
    """

    dims: tuple[Dim, ...]
    role: str
    splits: Splits
    pending: frozenset[str]
    origin: str = field(default="", compare=False)

    @classmethod
    def of(cls, leaf: Any) -> LeafSpec | None:
        if not isinstance(leaf, Tensor):
            return None
        assert leaf.splits is not None
        return cls(leaf.dims, leaf.role, leaf.splits, leaf.pending, leaf.origin)

    def rebuild(self, array: Any) -> Tensor:
        """A tensor in this form."""
        program = context.require()
        program.register(array)
        made = Tensor(
            array,
            self.dims,
            role=self.role,
            mesh=program.mesh,
            layout=program.layout,
            splits=self.splits,
            pending=self.pending,
        )
        made.origin = self.origin
        return made


def rebuild_leaf(form: LeafSpec | None, array: Any) -> Any:
    """A leaf from its form and its array."""
    return array if form is None else form.rebuild(array)


def leaf_array(leaf: Any) -> Any:
    """A leaf's array, in the form it has; inside a vmap it varies over that one's axes, as others may."""
    if isinstance(leaf, Tensor):
        return collectives.pvary(leaf._array, context.require().vmapped_axes)
    return jnp.asarray(leaf)


def check_exact_varying(leaf: Any) -> Any:
    """A leaf whose array varies over no more axes than its form says."""
    if isinstance(leaf, Tensor):
        assert leaf.splits is not None
        said = axes_of(leaf.splits) | leaf.pending
        if collectives.varying_axes(leaf._data) - said - context.require().vmapped_axes:
            raise RetraceUnvarying
    return leaf


def format_treedef(tree: Any) -> str:
    """A tree's structure for messages: `(*, {'a': *})`."""
    return str(tree).removeprefix("PyTreeDef(").removesuffix(")")


def match_spec(leaf: Any, form: LeafSpec | None, what: str, other: str = "was") -> Any:
    """A loop's or branch's result in the form it has to have; an error if it is another thing."""
    if form is None or not isinstance(leaf, Tensor):
        if form is not None and not form.dims and not hasattr(leaf, "shape"):
            return match_spec(slice_tensor(jnp.asarray(leaf), ()), form, what, other)
        if (form is None) != (not isinstance(leaf, Tensor)):
            raise ProgramError(
                f"{what} is {describe(leaf) if isinstance(leaf, Tensor) else 'a raw array'}, and "
                f"{other} {'a raw array' if form is None else f'a tensor [{format_dims(form.dims)}]'}",
                rule="a carry, and the results of both branches, keep their kind and dims",
                hint="return the same kind of thing",
            )
        return leaf
    if set(leaf.dims) != set(form.dims):
        raise DimError(
            f"{what} has the dims [{format_dims(leaf.dims)}], and {other} [{format_dims(form.dims)}]",
            rule="a carry, and the results of both branches, keep their dims and sizes",
            hint="check what the function returns; wf.broadcast_to adds a dim",
        )
    if leaf.dims != form.dims:
        import weft  # ops are above this module, which they import

        leaf = weft.transpose(leaf, form.dims)
    if form.pending:
        return as_pending(leaf, form)
    return materialize(leaf, form.role)


def as_pending(leaf: Tensor, form: LeafSpec) -> Tensor:
    """A tensor as a pending sum over the axes of a form: resolved values count on one device only."""
    if leaf.pending == form.pending and leaf.splits == form.splits:
        return replace(form, origin=leaf.origin).rebuild(check_exact_varying(leaf)._array)
    array = collectives.pvary(materialize(leaf, form.role)._array, form.pending)
    first = jnp.bool_(True)
    for axis in sorted(form.pending):
        first = first & (collectives.axis_index((axis,)) == 0)
    return form.rebuild(jnp.where(first, array, constant_like(0, array)))


def check_carry_dtype(new: Any, old: Any, what: str) -> Any:
    """A carry in the type that it had; an error if its dtype has changed."""
    if new.dtype != old.dtype:
        raise TensorTypeError(
            f"{what} becomes {new.dtype} and was {old.dtype}",
            rule="a carry keeps its dtype",
            hint="convert it in the function: carry.astype(...), or begin with the other dtype",
        )
    return cast_like(new, old)


def strip_weak_type(leaf: Any) -> Any:
    """Without JAX's weak type, which a carry could not keep."""
    if isinstance(leaf, Tensor):
        form = LeafSpec.of(leaf)
        assert form is not None
        return form.rebuild(lax.convert_element_type(leaf._array, leaf.dtype))
    array = jnp.asarray(leaf)
    return lax.convert_element_type(array, array.dtype) if not _is_key(array) else array


def _is_key(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def numbers_as_tensors(leaf: Any) -> Any:
    """Python numbers among the carries become tensors; raw arrays stay."""
    return as_slice(leaf) if isinstance(leaf, int | float | complex) else leaf


def common_dim(items: list[Any], dim: Any) -> Dim:
    """The dim along which all of these are gone through; raw arrays have it in front."""
    found = _named_dim(items, dim)
    shapes = [np.shape(x) for x in items if not isinstance(x, Tensor)]
    wrong = [shape for shape in shapes if shape[:1] != (found.size,)]
    if wrong:
        raise ShapeError(
            f"raw arrays of shape {', '.join(map(str, wrong))} are to be gone through along {found}",
            rule="the first dimension of a raw array that is scanned is the dim, in its size",
            hint=f"give arrays of {found.size} rows; what is the same in all steps is used by the function "
            "as it is",
        )
    return found


def _named_dim(items: list[Any], dim: Any) -> Dim:
    tensors = [t for t in items if isinstance(t, Tensor)]
    if not tensors:
        if not isinstance(dim, Dim):
            raise DimError(
                f"the size of dim {dim} is not known: no tensor is scanned",
                rule="without tensors to scan, scan needs a Dim",
                hint=f'wf.Dim("{dim}", 10)',
            )
        return dim
    found = {select_dim(t.dims, dim) for t in tensors}
    if len(found) > 1:
        raise DimError(
            f"the scanned tensors have different sizes of {dim}: {format_dims(sorted(found, key=repr))}",
            rule="all scanned tensors have the dim in one size",
            hint="slice the longer ones",
        )
    check_along(found)
    return found.pop()
