"""Staging: global arrays become slices where a program begins, and its results become global tensors.

Input: a function, a placement and the leaves of its arguments. Output: `Staged`, a jitted function of arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef

from . import collectives
from .call_stack import call_with_room
from .captures import CapturedFunction, bound_function
from .context import Context, entered
from .deferred import Deferred
from .errors import ProgramError
from .layout import Layout, Placement
from .mesh import Mesh
from .operands import as_slice, capture_key
from .placement import partition_spec
from .reshard import materialize
from .retrace import Retrace
from .shapes import stored_splits
from .signature import Static, check_result, is_dynamic
from .tensor import Tensor, check_shape
from .types import PyTree

UNPLACED = Placement(Mesh(), Layout())  # of eager ops whose operands are not placed

ArgumentBuilder = Callable[[list[Any], Context], Any]  # takes its arrays from the front of the list


class Staged:
    """A function staged for one signature: a jitted function of global arrays.

    Its inputs are the arrays of the arguments, then those of the captured tensors.

    Attributes:
      jitted: the jitted function.
      is_compiled: whether it has run.
      captured: the captured tensors, placed.
      in_specs: how the inputs are split.
      donated: the positions of donated inputs.
      is_stale: whether jit retraced the function and it captured different tensors.
      context: the context of the last trace.
      out_tree: the structure of its result.
      out_leaves: for each leaf of the result, its kind ("array", "deferred" or "static"), the Deferred or
        the static value, and the dims and role of a tensor.
    """

    def __init__(
        self,
        fn: Callable[..., PyTree],
        placement: Placement,
        leaves: list[Any],
        tree: PyTreeDef,
        captured: dict[Hashable, Tensor],
        *,
        donated: tuple[int, ...],
        static_numbers: tuple[type, ...],
        is_eager: bool,
        compiler_options: dict[str, Any] | None = None,
    ):
        self.fn, self.placement, self.tree, self.donated = fn, placement, tree, donated
        self.capture_keys, self.captured = list(captured), list(captured.values())
        self.builders = _argument_builders(leaves, static_numbers)
        specs = [spec for leaf in leaves for spec in _in_specs(leaf, placement, static_numbers)]
        in_specs = (*specs, *(partition_spec(stored_splits(t)) for t in self.captured))
        self.in_specs = in_specs
        mesh = placement.mesh
        self.is_stale = self.is_compiled = False
        self.context = Context(placement)
        self.out_tree: Any = None
        self.out_leaves: list[tuple[str, Any, Any]] = []

        # `run` works on global arrays, and `body` on slices inside the shard_map.
        def run(*arrays: jax.Array) -> list[Any]:
            # shard_map compares out_specs with the results, so it reads the list after it has traced the
            # body, which fills it in. Otherwise the function would be traced twice to learn what it returns.
            out_specs: list[PartitionSpec] = []

            def body(*arrays: jax.Array) -> list[Any]:
                ctx = self.context = Context(placement, is_eager and mesh.is_default)
                with entered(ctx), ctx.frame():
                    args, kwargs = self._arguments(arrays, ctx)
                    outs, out_specs[:] = self._outputs(fn(*args, **kwargs), ctx)
                ctx.is_finished = True
                if ctx.captures.found:
                    self.is_stale = True
                    raise Retrace("captures", ctx.captures.found, fn)
                return outs

            mapped = body
            if not mesh.is_unsplit:
                mapped = jax.shard_map(
                    body, mesh=mesh.jax_mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True
                )
            outs = mapped(*arrays)
            return self._call_deferred(outs) if self.context.deferred_calls else outs

        run.__name__ = run.__qualname__ = getattr(fn, "__name__", "program")  # the name of the HLO module
        sharding = NamedSharding(mesh.jax_mesh, PartitionSpec()) if mesh.is_chosen_device else None
        self.jitted = jax.jit(
            run, donate_argnums=donated, out_shardings=sharding, compiler_options=compiler_options
        )

    def trace(self, arrays: Sequence[Any]) -> Any:
        """The traced function, as a `jax.stages.Traced`."""
        return call_with_room(self.jitted.trace, *arrays)

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """The output arrays for these inputs."""
        if self.is_compiled:
            return self.jitted(*arrays)
        outs = call_with_room(self.jitted, *arrays)
        self.is_compiled = True
        return outs

    def _arguments(self, arrays: Sequence[jax.Array], ctx: Context) -> tuple[Any, Any]:
        """The function's arguments, rebuilt from arrays inside the program."""
        rest = list(arrays)
        inputs = [build(rest, ctx) for build in self.builders]
        for key, t, array in zip(self.capture_keys, self.captured, rest, strict=True):
            ctx.captures.inputs[key] = input_slice(t, array, ctx)
        return jax.tree.unflatten(self.tree, inputs)

    def _call_deferred(self, outs: list[Any]) -> list[Any]:
        """Run the deferred calls on the outputs of the SPMD part."""
        count = sum(leaf[0] == "array" for leaf in self.out_leaves)
        rest = iter(outs[count:])
        for call in self.context.deferred_calls:
            call.run(rest, self.placement)
        deferred = [leaf[1] for leaf in self.out_leaves if leaf[0] == "deferred"]
        return outs[:count] + [d.call.outputs[d.leaf] for d in deferred]

    def _outputs(self, result: PyTree, ctx: Context) -> tuple[list[Any], list[PartitionSpec]]:
        """The result as arrays with their partition specs."""
        leaves, self.out_tree = jax.tree.flatten(result, is_leaf=_is_output)
        outs: list[Any] = []
        specs: list[PartitionSpec] = []
        self.out_leaves = []
        for leaf in leaves:
            # A global tensor that the function returns without using it is a capture as well.
            if isinstance(leaf, Tensor) and leaf.splits is None:
                leaf = as_slice(leaf)
            named = (leaf.dims, leaf.role) if isinstance(leaf, Tensor) else None
            data = leaf._data if isinstance(leaf, Tensor) else leaf
            if isinstance(data, Deferred):
                self.out_leaves.append(("deferred", data, named))
            elif add_output(leaf, outs, specs):
                self.out_leaves.append(("array", None, named))
            else:
                check_result(leaf)
                self.out_leaves.append(("static", leaf, None))
        # The inputs of deferred calls leave the shard_map as additional outputs.
        for call in ctx.deferred_calls:
            for leaf in call.inputs:
                add_output(leaf, outs, specs)
        return outs, specs

    def rebuild_outputs(self, outs: list[Any]) -> PyTree:
        """The result, from the output arrays."""
        # The deferred outputs follow the others, whatever their order in the result.
        count = len([1 for kind, *_ in self.out_leaves if kind == "array"])
        sources = {"array": iter(outs[:count]), "deferred": iter(outs[count:])}
        # Without axes or a chosen device there is nothing to be placed on.
        placed = self.placement if self.placement is not UNPLACED else None
        leaves = []
        for kind, static, named in self.out_leaves:
            leaf = static if kind == "static" else next(sources[kind])
            if named is not None:
                dims, role = named
                leaf = Tensor(leaf, dims, role=role, placement=placed)
            leaves.append(leaf)
        return jax.tree.unflatten(self.out_tree, leaves)


def _in_specs(leaf: object, placement: Placement, static_numbers: tuple[type, ...]) -> list[PartitionSpec]:
    """The partition specs of an argument's arrays."""
    if isinstance(leaf, Tensor | CapturedFunction):
        tensors = [leaf] if isinstance(leaf, Tensor) else leaf.tensors
        return [partition_spec(placement.splits(t.dims, t.role)) for t in tensors]
    return [PartitionSpec()] if is_dynamic(leaf, static_numbers) else []


def _argument_builders(leaves: list[Any], static_numbers: tuple[type, ...]) -> list[ArgumentBuilder]:
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
            ctx.captures.inputs[capture_key(t)] = input_slice(blank, arrays.pop(0), ctx)
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
        outs.append(leaf._read())
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
