"""Staging: from whole arrays to slices, and from a function's results back to whole tensors."""

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
from .errors import ProgramError
from .forms import as_slice, capture_key, materialize
from .layout import Layout
from .mesh import Mesh
from .placement import partition_spec
from .signature import Static, check_result, is_dynamic
from .tensor import Tensor, check_shape


@dataclass(eq=False)
class Staged:
    """A signature's compiled function and what its flat outputs are.

    Attributes:
      is_settled: whether all that the function captures is among its inputs.
      is_stale: whether jit traced it anew since, and it then captured other tensors.
    """

    call: Any
    captured: list[Tensor] = field(default_factory=list)
    donated: tuple[int, ...] = ()
    is_settled: bool = False
    is_stale: bool = False
    out_tree: Any = None
    # For each leaf: where it comes from ("now", "later", "static"), the promise or static value, and
    # the dims and role of a tensor.
    out_leaves: list[tuple[str, Any, Any]] = field(default_factory=list)


class RestageWithCaptures(Exception):
    """Where jit traced a staged function anew, it captured other tensors than before; it is staged anew."""

    def __init__(self, found: list[Tensor]):
        super().__init__()
        self.found = found


class StagedCall:
    """A jitted function, and the context of its last trace."""

    def __init__(self, jitted: Any, last: dict[str, Any]):
        self.jitted, self.last = jitted, last

    def __call__(self, *arrays: Any) -> Any:
        return self.jitted(*arrays)

    def begin(self, arrays: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Trace; what was captured and is no input yet, and the dims that were met."""
        self.jitted.trace(*arrays)
        program = self.last["context"]
        return list(program.captured.values()), program.dims_met

    def trace(self, *arrays: Any) -> Any:
        return self.jitted.trace(*arrays)


def argument_builders(
    leaves: list[Any], static_numbers: tuple[type, ...]
) -> list[Callable[[list[Any], Context], Any]]:
    """How the leaves are rebuilt inside the program; arrays are taken from the front of a list."""
    places = itertools.count()
    return [
        _function_template(next(places))
        if isinstance(leaf, CapturedFunction)
        else _template(leaf, static_numbers)
        for leaf in leaves
    ]


def _function_template(place: int) -> Callable[[list[Any], Context], Any]:
    """A function whose captured tensors are inputs. The function itself is not held."""

    def rebuilt(arrays: list[Any], program: Context) -> Any:
        function = bound_function(place)
        for t in function.tensors:
            blank = Tensor(None, t.dims, role=t.role)
            program.captured_inputs[capture_key(t)] = input_slice(blank, arrays.pop(0), program)
        return function.fn

    return rebuilt


def _template(leaf: Any, static_numbers: tuple[type, ...]) -> Callable[[list[Any], Context], Any]:
    if isinstance(leaf, Static):
        return lambda arrays, program: leaf.value
    if not is_dynamic(leaf, static_numbers):
        return lambda arrays, program: leaf
    if not isinstance(leaf, Tensor):
        return lambda arrays, program: arrays.pop(0)
    blank = Tensor(None, leaf.dims, role=leaf.role)
    return lambda arrays, program: input_slice(blank, arrays.pop(0), program)


def input_slice(t: Tensor, array: Any, program: Context) -> Tensor:
    splits = program.splits(t.dims, t.role)
    program.know(array)
    return Tensor(array, t.dims, role=t.role, mesh=program.mesh, layout=program.layout, splits=splits)


def flatten_outputs(staged: Staged, result: Any) -> tuple[list[Any], list[Any]]:
    """What a program returns, as arrays with their specs; noted in `staged` how to put it together."""
    leaves, staged.out_tree = jax.tree.flatten(result, is_leaf=_is_output)
    outs: list[Any] = []
    specs: list[Any] = []
    staged.out_leaves = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not leaf.is_slice:
            leaf = as_slice(leaf)
        named = (leaf.dims, leaf.role) if isinstance(leaf, Tensor) else None
        held = leaf._held if isinstance(leaf, Tensor) else leaf
        if isinstance(held, Deferred):
            staged.out_leaves.append(("later", held, named))
        elif add_output(leaf, outs, specs):
            staged.out_leaves.append(("now", None, named))
        else:
            check_result(leaf)
            staged.out_leaves.append(("static", leaf, None))
    return outs, specs


def _is_output(x: Any) -> bool:
    return isinstance(x, Tensor | Deferred | Iterator)  # JAX warns of an iterator that it is not told of


def add_output(leaf: Any, outs: list[Any], specs: list[Any]) -> bool:
    """Add a leaf's array to what leaves the SPMD part; False if it is not an array."""
    if isinstance(leaf, Tensor):
        if isinstance(leaf._held, Deferred):
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
    if collectives.varying_axes(array):
        axes = ", ".join(sorted(collectives.varying_axes(array)))
        raise ProgramError(
            f"the program returns a raw array that differs between devices along {axes}",
            rule="what a program returns is a tensor, or the same on all devices",
            hint="return the tensor itself, not its .array; or reduce it over the axes inside wf.local",
        )
    outs.append(array)
    specs.append(PartitionSpec())
    return True


def rebuild_outputs(staged: Staged, outs: Any, mesh: Mesh, layout: Layout) -> Any:
    count = sum(kind == "now" for kind, *_ in staged.out_leaves)
    sources = {"now": iter(outs[:count]), "later": iter(outs[count:])}
    placed: Any = (None, None) if mesh.is_anywhere else (mesh, layout)
    leaves = []
    for kind, static, named in staged.out_leaves:
        leaf = static if kind == "static" else next(sources[kind])
        if named is not None:
            dims, role = named
            leaf = Tensor(leaf, dims, role=role, mesh=placed[0], layout=placed[1])
        leaves.append(leaf)
    return jax.tree.unflatten(staged.out_tree, leaves)
