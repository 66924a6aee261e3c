"""Work on whole arrays after a program's SPMD part, in the same `jit`.

`later(fn, args, results)` notes a function for after the `shard_map`; what it will return is promised now.
A promise can be returned from the program or given to another `later`, but not computed with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from . import context
from .dims import Dim
from .errors import ProgramError
from .forms import Placeholder, as_slice, materialize
from .layout import Layout
from .mesh import Mesh
from .placement import partition_spec
from .shapes import stored_shape
from .tensor import Tensor, check_shape, is_tensor
from .types import weak_type

OPTAX_LABEL = "optimizer[optax]"  # in plans


@dataclass(frozen=True)
class ResultSpec:
    """What a leaf will be: a tensor with dims and a role, or (dims None) a raw array."""

    dims: tuple[Dim, ...] | None
    role: str = "value"


@dataclass
class Deferred(Placeholder):
    """A leaf that will be there after the SPMD part."""

    shape: tuple[int, ...]
    dtype: Any
    job: DeferredCall
    leaf: int

    def refused(self) -> ProgramError:
        """The error for a use of it inside the program."""
        return deferred_use_error()


@dataclass(eq=False)
class DeferredCall:
    """A function on whole arrays, its inputs and the names of its results."""

    fn: Callable[..., Any]
    tree: Any
    inputs: list[Any]  # slices and raw arrays, or promises
    results: list[ResultSpec]
    outputs: list[Any] | None = None

    def run(self, arrays: Any, mesh: Mesh, layout: Layout) -> None:
        """Take the whole arrays from an iterator, call the function, and lay its results out."""
        given = []
        for leaf in self.inputs:
            promise = _promise_of(leaf)
            array = promise.job.outputs[promise.leaf] if promise else next(arrays)  # type: ignore[index]
            if isinstance(leaf, Tensor):
                array = array[tuple(slice(d.size) for d in leaf.dims)]
            given.append(array)
        with jax.named_scope(OPTAX_LABEL):
            outs = jax.tree.leaves(self.fn(*jax.tree.unflatten(self.tree, given)))
        self.outputs = [_laid_out(a, r, mesh, layout) for a, r in zip(outs, self.results, strict=True)]


def _laid_out(array: Any, result: ResultSpec, mesh: Mesh, layout: Layout) -> Any:
    if result.dims is None:
        return array
    splits = layout.splits(result.dims, mesh, result.role)
    shape = stored_shape(result.dims, splits, mesh)
    if array.shape != shape:
        array = jnp.pad(array, [(0, n - m) for n, m in zip(shape, array.shape, strict=True)])
    if mesh.is_whole:
        return array
    spec = NamedSharding(mesh.jax_mesh, partition_spec(splits))
    return jax.lax.with_sharding_constraint(array, spec)


def defer(fn: Callable[..., Any], args: tuple[Any, ...], results: Any) -> Any:
    """Promise `fn(*args)`, to be called on whole arrays after the SPMD part."""
    program = context.require()
    leaves, tree = jax.tree.flatten(args, is_leaf=_is_leaf)
    inputs = [_input(leaf) for leaf in leaves]
    named, out_tree = jax.tree.flatten(results, is_leaf=lambda x: isinstance(x, ResultSpec))
    shapes = jax.tree.leaves(jax.eval_shape(fn, *jax.tree.unflatten(tree, map(global_shape, inputs))))
    job = DeferredCall(fn, tree, inputs, named)
    program.jobs.append(job)
    outs = []
    for n, (shape, result) in enumerate(zip(shapes, named, strict=True)):
        promise = Deferred(shape.shape, shape.dtype, job, n)
        outs.append(promise if result.dims is None else _promised_tensor(promise, result))
    return jax.tree.unflatten(out_tree, outs)


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Tensor | Deferred)


def _promised_tensor(promise: Deferred, result: ResultSpec) -> Tensor:
    program = context.require()
    assert result.dims is not None
    splits = program.splits(result.dims, result.role)
    t = Tensor(
        promise,
        result.dims,
        role=result.role,
        mesh=program.mesh,
        layout=program.layout,
        splits=splits,
    )
    t._watch = _refuse
    return t


def _refuse() -> None:
    raise deferred_use_error()


def deferred_use_error() -> ProgramError:
    return ProgramError(
        "a result of the optimizer is used inside the program",
        rule="an optax transformation runs on whole arrays after the program's SPMD part, so what it "
        "returns can only be returned from the program",
        hint="return the new parameters and state, and use them in the next call",
    ).located()


def _promise_of(leaf: Any) -> Deferred | None:
    held = leaf._held if isinstance(leaf, Tensor) else leaf
    return held if isinstance(held, Deferred) else None


def _input(leaf: Any) -> Any:
    if _promise_of(leaf) is not None:
        return leaf
    return materialize(as_slice(leaf)) if isinstance(leaf, Tensor) else jnp.asarray(leaf)


def global_shape(leaf: Any) -> Any:
    """The true shape of a tensor, or of an array."""
    if isinstance(leaf, Tensor) and _promise_of(leaf) is None:
        check_shape(leaf)
    shape = tuple(d.size for d in leaf.dims) if isinstance(leaf, Tensor) else leaf.shape
    return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=weak_type(leaf))


def global_arrays(tree: Any) -> Any:
    """A tree of whole tensors as one of plain arrays."""
    return jax.tree.map(lambda t: t.array if is_tensor(t) else t, tree, is_leaf=is_tensor)
