"""Ops and eager execution.

`@op` turns a lowering, a function of slices, into a public op. Inside a program the lowering is called
directly, under a label that plans show. Outside, it is staged and cached as a program of one op, on the mesh
and layout of its operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import numpy as np

from .arguments import Args, Kwargs
from .call_errors import raise_call_error
from .captures import CapturedFunction, bind_functions
from .context import active
from .describe import format_call
from .dims import list_dims
from .errors import WeftError
from .labels import OpLabel, op_label
from .layers import running
from .layout import Placement
from .operands import check_same_placement
from .program import Program
from .registry import Example, register
from .retrace import trace_with_guess
from .signature import NUMBER_TYPES
from .staging import UNPLACED
from .tensor import Tensor, is_tensor
from .types import Params, PyTree, Result

Lowering = Callable[..., PyTree]

STATIC_NUMBERS: dict[str, tuple[type, ...]] = {
    "static": NUMBER_TYPES,
    "dynamic": (),
    "static integers": (int, np.integer),
}

_EAGER_PROGRAMS: dict[Any, Program] = {}


def op(
    *,
    example: Example,
    mixes_rows: bool = False,
    split_invariant: bool = False,
    numbers: str = "static",
    functions: bool = False,
    cached: bool = True,
) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    """Turn a lowering into a public op: called directly inside a program, as a program of one op outside.

    Args:
      example, mixes_rows, split_invariant: the op's row of metadata (`core/registry.py`).
      numbers: "static" if a Python number is part of the signature (a shift, a size), "dynamic" if it is an
        operand, "static integers" if an integer is the former and a float the latter.
      functions: whether functions among the arguments are called while the op is traced. Their cache key is
        their code and the values they capture (`core/captures.py`).
      cached: whether the eager program is cached; not for an op that calls a function when it runs.
    """
    row = register(example, mixes_rows=mixes_rows, split_invariant=split_invariant, takes_functions=functions)
    return lambda fn: row(_public(fn, numbers, functions, cached))


def _public(
    fn: Callable[Params, Result], numbers: str, functions: bool, cached: bool
) -> Callable[Params, Result]:
    """The function that users call."""

    @functools.wraps(fn)
    def call(*args: PyTree, **kwargs: PyTree) -> Any:
        try:
            ctx = active.context
            if ctx is None:
                return run_eagerly(fn, args, kwargs, numbers, functions, cached)
            if ctx.op:  # a part of another op, whose label it has
                return fn(*args, **kwargs)
            with ctx.lowering(_label(fn.__name__, args, kwargs)):
                return fn(*args, **kwargs)
        except WeftError as error:
            error.located(format_call(fn.__name__.lstrip("_"), args, kwargs))
            raise
        except TypeError as error:
            raise_call_error(fn, fn.__name__, args, kwargs, error)

    return cast(Callable[Params, Result], call)


def _label(name: str, args: Args, kwargs: Kwargs) -> OpLabel:
    """The label of a call, from the dims of its operands."""
    given = (*args, *kwargs.values())
    operands = tuple(
        [t.dims for a in given for t in (a if isinstance(a, list | tuple) else (a,)) if isinstance(t, Tensor)]
    )
    out = kwargs.get("out") if name == "einsum" else None
    names = None
    if out is not None and not isinstance(out, Iterator):  # an iterator can be read once, by the lowering
        names = tuple([str(getattr(dim, "name", dim)) for dim in list_dims(out)])
    return op_label(name, operands, names, running.layer.path)


def run_eagerly(
    fn: Lowering,
    args: Args,
    kwargs: Kwargs,
    numbers: str,
    functions: bool = False,
    cached: bool = True,
) -> Any:
    """Call a lowering outside programs, as a program on the mesh of its operands or captured tensors."""
    placement = _common_placement(_tensors((args, kwargs)))
    if functions:
        keyed = jax.tree.map(_keyed, (args, kwargs), is_leaf=is_tensor)
        captured = [
            leaf for leaf in jax.tree.leaves(keyed, is_leaf=is_tensor) if isinstance(leaf, CapturedFunction)
        ]
        tensors = [t for function in captured for t in function.tensors if t.mesh is not None]
        placement = placement if placement is not UNPLACED else _common_placement(tensors)
        cached = all(function.key is not None for function in captured)
        # A function may capture a tensor on another mesh and never use it. Only tracing can tell, so the
        # captured tensors are not made inputs in advance then.
        cached = cached and all(t.placement is placement for t in tensors)
        if cached:
            with bind_functions(captured):
                return _run(fn, placement, numbers, cached, *keyed)
    return _run(fn, placement, numbers, cached, args, kwargs)


def call_in_program(fn: Callable[..., Result], *args: PyTree) -> Result:
    """`fn(*args)`: directly inside a program, otherwise as a program on the mesh of the arguments."""
    return fn(*args) if active.context is not None else run_eagerly(fn, args, {}, "dynamic")


def _keyed(leaf: object) -> object:
    """A function with its cache key; any other leaf as it is."""
    return CapturedFunction(leaf) if callable(leaf) and not isinstance(leaf, Tensor) else leaf


def _run(fn: Lowering, placement: Placement, numbers: str, cached: bool, args: Args, kwargs: Kwargs) -> Any:
    return call_adopting(lambda guess: _program(fn, guess, numbers, cached)(*args, **kwargs), placement)


def call_adopting(call: Callable[[Placement], Result], placement: Placement) -> Result:
    """`call(placement)`; if it is unplaced, again with the placement of a tensor or a program it captures."""
    return trace_with_guess(
        call,
        placement,
        lambda guess, found: found.value if found.kind == "placement" and guess is UNPLACED else None,
    )


def _program(fn: Lowering, placement: Placement, numbers: str, cached: bool) -> Program:
    # Dims and dtypes are not in this key: a program has a cache of its own, by signature.
    key = (fn, placement)
    program = _EAGER_PROGRAMS.get(key) if cached else None
    if program is None:
        program = Program(
            fn, placement.mesh, placement.layout, eager=True, static_numbers=STATIC_NUMBERS[numbers]
        )
        if cached:
            _EAGER_PROGRAMS[key] = program
    return program


def _tensors(tree: PyTree) -> list[Tensor]:
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_tensor) if isinstance(leaf, Tensor)]


def _common_placement(tensors: list[Tensor]) -> Placement:
    """The mesh and layout of the placed tensors; unplaced ones adopt it. Raises an error if they differ."""
    found: Placement | None = None
    for leaf in tensors:
        if found is None:
            found = leaf.placement
        elif leaf.placement is not None and leaf.placement is not found:
            check_same_placement(leaf, found)
    return UNPLACED if found is None else found
