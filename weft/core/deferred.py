"""Deferred calls: functions of global arrays that run after a program's SPMD part, in the same `jit`.

`defer(fn, args, results)` records a function to call after the `shard_map`, and returns placeholders for its
results. A placeholder can be returned from the program or passed to another `defer`, but not computed with.

Optax transformations run this way. Inside the `shard_map` their leaves would be slices, and a global norm
would silently be the norm of one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.tree_util import PyTreeDef

from .context import active
from .dims import Dim
from .errors import ProgramError
from .labels import OPTAX_LABEL
from .layout import Placement
from .operands import as_slice
from .placement import partition_spec
from .reshard import materialize
from .tensor import Placeholder, Tensor, check_shape, is_tensor
from .types import PyTree, weak_type


@dataclass(frozen=True)
class ResultSpec:
    """One leaf of a deferred result: a tensor with dims and a role, or (dims None) a raw array."""

    dims: tuple[Dim, ...] | None
    role: str = "value"


@dataclass
class Deferred(Placeholder):
    """A leaf that will exist after the SPMD part.

    Attributes:
      shape, dtype: of the global array, without padding.
      call: the call that computes it.
      leaf: its number among that call's results.
    """

    shape: tuple[int, ...]
    dtype: Any
    call: DeferredCall
    leaf: int

    def use_error(self) -> ProgramError:
        """The error for computing with it inside the program."""
        return deferred_use_error()


@dataclass(eq=False)
class DeferredCall:
    """A function of global arrays, its inputs, and the specs of its results.

    Attributes:
      fn: the function.
      tree: the structure of its arguments.
      inputs: their leaves: slices, raw arrays or deferred results.
      results: for each result, what it becomes.
      outputs: the results, once it has run.
    """

    fn: Callable[..., PyTree]
    tree: PyTreeDef
    inputs: list[Any]
    results: list[ResultSpec]
    outputs: list[Any] = field(default_factory=list)

    def run(self, arrays: Iterator[Any], placement: Placement) -> None:
        """Call the function on the next arrays of an iterator, and shard its results."""
        given = []
        for leaf in self.inputs:
            deferred = _as_deferred(leaf)
            array = deferred.call.outputs[deferred.leaf] if deferred else next(arrays)
            if isinstance(leaf, Tensor):
                # fn must see the true sizes: padding would change a mean or a factored second moment.
                array = array[tuple(slice(d.size) for d in leaf.dims)]
            given.append(array)
        with jax.named_scope(OPTAX_LABEL.scope):
            outs = jax.tree.leaves(self.fn(*jax.tree.unflatten(self.tree, given)))
        self.outputs = [_sharded(a, r, placement) for a, r in zip(outs, self.results, strict=True)]


def _sharded(array: jax.Array, result: ResultSpec, placement: Placement) -> jax.Array:
    """A result, padded and constrained to the sharding of its layout."""
    if result.dims is None:
        return array
    shape = placement.array_shape(result.dims, result.role)
    if array.shape != shape:
        array = jnp.pad(array, [(0, n - m) for n, m in zip(shape, array.shape, strict=True)])
    if placement.mesh.is_unsplit:
        return array
    # Here XLA partitions the computation (GSPMD), so the results need an explicit sharding.
    spec = NamedSharding(placement.mesh.jax_mesh, partition_spec(placement.splits(result.dims, result.role)))
    return jax.lax.with_sharding_constraint(array, spec)


def defer(fn: Callable[..., PyTree], args: tuple[PyTree, ...], results: PyTree) -> PyTree:
    """Call `fn(*args)` on global arrays after the SPMD part.

    Args:
      fn: takes and returns pytrees of arrays without padding.
      args: pytrees of slices, arrays and deferred results.
      results: a pytree of `ResultSpec`s with the structure of fn's result.

    Returns:
      That pytree with placeholders.
    """
    ctx = active.context
    leaves, tree = jax.tree.flatten(args, is_leaf=_is_leaf)
    inputs = [_as_input(leaf) for leaf in leaves]
    specs, out_tree = jax.tree.flatten(results, is_leaf=lambda x: isinstance(x, ResultSpec))
    # The arrays exist only after the shard_map, so fn can be traced here with their shapes alone.
    shapes = jax.tree.leaves(jax.eval_shape(fn, *jax.tree.unflatten(tree, map(global_shape, inputs))))
    call = DeferredCall(fn, tree, inputs, specs)
    ctx.deferred_calls.append(call)
    outs = []
    for n, (shape, result) in enumerate(zip(shapes, specs, strict=True)):
        deferred = Deferred(shape.shape, shape.dtype, call, n)
        outs.append(deferred if result.dims is None else _deferred_tensor(deferred, result))
    return jax.tree.unflatten(out_tree, outs)


def is_deferred(leaf: object) -> bool:
    """Whether a leaf will exist only after the SPMD part."""
    return _as_deferred(leaf) is not None


def _is_leaf(x: object) -> bool:
    return isinstance(x, Tensor | Deferred)


def _deferred_tensor(deferred: Deferred, result: ResultSpec) -> Tensor:
    ctx = active.context
    assert result.dims is not None
    splits = ctx.splits(result.dims, result.role)
    return Tensor(deferred, result.dims, role=result.role, placement=ctx.placement, splits=splits)


def deferred_use_error() -> ProgramError:
    return ProgramError(
        "a result of the optimizer is used inside the program",
        rule="an optax transformation runs on global arrays after the program's SPMD part, so the program "
        "can only return its results",
        hint="return the new parameters and state, and use them in the next call",
    ).located()


def _as_deferred(leaf: object) -> Deferred | None:
    data = leaf._data if isinstance(leaf, Tensor) else leaf
    return data if isinstance(data, Deferred) else None


def _as_input(leaf: Any) -> Any:
    if _as_deferred(leaf) is not None:
        return leaf
    return materialize(as_slice(leaf)) if isinstance(leaf, Tensor) else jnp.asarray(leaf)


def global_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a tensor's global array without padding, or of a raw array."""
    if isinstance(leaf, Tensor) and _as_deferred(leaf) is None:
        check_shape(leaf)
    shape = tuple(d.size for d in leaf.dims) if isinstance(leaf, Tensor) else leaf.shape
    return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=weak_type(leaf))


def global_arrays(tree: PyTree) -> PyTree:
    """A pytree of global tensors as one of raw arrays without padding."""
    return jax.tree.map(lambda t: t.array if is_tensor(t) else t, tree, is_leaf=is_tensor)
