"""Staging: global arrays become slices where a program begins, and its results become global tensors.

`argument_builders` turn the arrays that enter the `shard_map` back into the function's arguments.
`flatten_outputs` turns the function's result into arrays that leave it, and `rebuild_outputs` into tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from . import collectives
from .captures import CapturedFunction, bound_function
from .context import Context
from .deferred import Deferred
from .dims import Dim
from .errors import ProgramError
from .layout import Placement
from .operands import as_slice, capture_key
from .placement import partition_spec
from .reshard import materialize
from .signature import Static, check_result, is_dynamic
from .tensor import Tensor, check_shape
from .types import PyTree

# A builder takes its arrays from the front of the list: only it knows how many it needs.
ArgumentBuilder = Callable[[list[Any], Context], Any]


@dataclass(eq=False)
class Staged:
    """The compiled function of one signature, and the structure of its outputs.

    Attributes:
      call: the jitted function.
      captured: the captured tensors, which are its last inputs.
      donated: the positions of donated inputs.
      has_all_captures: whether all tensors that the function captures are inputs.
      is_stale: whether jit retraced the function and it captured different tensors.
      out_tree: the structure of its result.
      out_leaves: for each leaf of the result, its kind ("array", "deferred" or "static"), the Deferred or
        the static value, and the dims and role of a tensor.
    """

    call: Any
    captured: list[Tensor] = field(default_factory=list)
    donated: tuple[int, ...] = ()
    has_all_captures: bool = False
    is_stale: bool = False
    out_tree: Any = None
    out_leaves: list[tuple[str, Any, Any]] = field(default_factory=list)


class RestageWithCaptures(Exception):
    """Restage a function: jit retraced it and it captured different tensors."""

    def __init__(self, captured: list[Tensor]):
        super().__init__()
        self.captured = captured


class StagedCall:
    """A jitted function, and the context of its last trace."""

    def __init__(self, jitted: Any, last: dict[str, Any]):
        self.jitted, self.last = jitted, last

    def __call__(self, *arrays: jax.Array) -> Any:
        return self.jitted(*arrays)

    def trace_captures(self, arrays: list[Any]) -> tuple[list[Tensor], dict[str, Dim]]:
        """Trace; returns the captured tensors that are not inputs yet, and the dims that occurred."""
        self.jitted.trace(*arrays)
        ctx = self.last["context"]
        return list(ctx.captured.values()), ctx.seen_dims

    def trace(self, *arrays: jax.Array) -> Any:
        return self.jitted.trace(*arrays)


def argument_builders(leaves: list[Any], static_numbers: tuple[type, ...]) -> list[ArgumentBuilder]:
    """One function per leaf, which rebuilds it inside the program."""
    positions = itertools.count()
    return [
        _function_builder(next(positions))
        if isinstance(leaf, CapturedFunction)
        else _builder(leaf, static_numbers)
        for leaf in leaves
    ]


def _function_builder(position: int) -> ArgumentBuilder:
    """Rebuild a function whose captured tensors are inputs.

    The staged program does not keep the function alive, nor the tensors that it captures.
    """

    def build(arrays: list[Any], ctx: Context) -> Any:
        function = bound_function(position)
        for t in function.tensors:
            blank = Tensor(None, t.dims, role=t.role)
            ctx.captured_inputs[capture_key(t)] = input_slice(blank, arrays.pop(0), ctx)
        return function.fn

    return build


def _builder(leaf: object, static_numbers: tuple[type, ...]) -> ArgumentBuilder:
    if isinstance(leaf, Static):
        return lambda arrays, ctx: leaf.value
    if not is_dynamic(leaf, static_numbers):
        return lambda arrays, ctx: leaf
    if not isinstance(leaf, Tensor):
        return lambda arrays, ctx: arrays.pop(0)
    # A tensor without its array: the builder outlives the call, and must not keep the array alive.
    blank = Tensor(None, leaf.dims, role=leaf.role)
    return lambda arrays, ctx: input_slice(blank, arrays.pop(0), ctx)


def input_slice(t: Tensor, array: jax.Array, ctx: Context) -> Tensor:
    """The slice of an input, from its array inside the program."""
    splits = ctx.splits(t.dims, t.role)
    ctx.register(array)
    return Tensor(array, t.dims, role=t.role, placement=ctx.placement, splits=splits)


def flatten_outputs(staged: Staged, result: PyTree) -> tuple[list[Any], list[PartitionSpec]]:
    """A program's result as arrays with their partition specs; records in `staged` how to rebuild it."""
    leaves, staged.out_tree = jax.tree.flatten(result, is_leaf=_is_output)
    outs: list[Any] = []
    specs: list[PartitionSpec] = []
    staged.out_leaves = []
    for leaf in leaves:
        # A global tensor that the function returns without using it is a capture as well: only slices leave
        # the shard_map.
        if isinstance(leaf, Tensor) and not leaf.is_slice:
            leaf = as_slice(leaf)
        named = (leaf.dims, leaf.role) if isinstance(leaf, Tensor) else None
        data = leaf._data if isinstance(leaf, Tensor) else leaf
        if isinstance(data, Deferred):
            staged.out_leaves.append(("deferred", data, named))
        elif add_output(leaf, outs, specs):
            staged.out_leaves.append(("array", None, named))
        else:
            check_result(leaf)
            staged.out_leaves.append(("static", leaf, None))
    return outs, specs


def _is_output(x: object) -> bool:
    # JAX warns about an iterator in a pytree unless it is declared a leaf.
    return isinstance(x, Tensor | Deferred | Iterator)


def add_output(leaf: Any, outs: list[Any], specs: list[PartitionSpec]) -> bool:
    """Append a leaf's array to the outputs of the SPMD part; returns False if it is not an array."""
    if isinstance(leaf, Tensor):
        if isinstance(leaf._data, Deferred):
            return False
        check_shape(leaf)
        leaf = materialize(leaf)
        outs.append(leaf._array)
        specs.append(partition_spec(leaf.splits or ()))
        return True
    if isinstance(leaf, bool) or not isinstance(
        leaf, jax.Array | np.ndarray | np.number | int | float | complex
    ):
        return False
    array = jnp.asarray(leaf)
    # shard_map would reject it with a message about out_specs and replication.
    if collectives.varying_axes(array):
        axes = ", ".join(sorted(collectives.varying_axes(array)))
        raise ProgramError(
            f"the program returns a raw array that differs between devices along {axes}",
            rule="a program returns tensors, or raw arrays that are the same on all devices",
            hint="return the tensor itself, not its .array; or reduce it over the axes inside wf.local",
        )
    outs.append(array)
    specs.append(PartitionSpec())
    return True


def rebuild_outputs(staged: Staged, outs: list[Any], placement: Placement) -> PyTree:
    """A program's result, from its output arrays."""
    # Deferred results are computed after the SPMD part. So they follow the others, whatever their order in
    # the user's result.
    count = sum(kind == "array" for kind, *_ in staged.out_leaves)
    sources = {"array": iter(outs[:count]), "deferred": iter(outs[count:])}
    placed = None if placement.mesh.is_default else placement
    leaves = []
    for kind, static, named in staged.out_leaves:
        leaf = static if kind == "static" else next(sources[kind])
        if named is not None:
            dims, role = named
            leaf = Tensor(leaf, dims, role=role, placement=placed)
        leaves.append(leaf)
    return jax.tree.unflatten(staged.out_tree, leaves)
