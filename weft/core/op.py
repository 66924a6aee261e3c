"""Ops, and eager execution.

`@op` makes a lowering an op: inside a program it runs as it is, under a name that plans show; outside it is a
program of its own, staged and cached.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from . import context
from .captures import CapturedFunction, bind_functions
from .context import Context, RetraceOnMesh
from .describe import format_call
from .errors import WeftError
from .layout import Layout
from .mesh import Mesh
from .operands import check_same_placement
from .program import Program
from .signature import NUMBER_TYPES
from .tensor import Tensor, is_tensor

_EAGER: dict[Any, Program] = {}
STATIC_NUMBERS: dict[str, tuple[type, ...]] = {
    "static": NUMBER_TYPES,
    "dynamic": (),
    "static integers": (int, np.integer),
}


_NOWHERE = (Mesh(), Layout())


def op(fn: Any = None, *, numbers: str = "static", functions: bool = False, cached: bool = True) -> Any:
    """Make a lowering a public op: inside a program it runs as it is, outside as a program of its own.

    Args:
      numbers: "static" where a Python number is part of the signature (a shift, a size), "dynamic"
        where it is an operand, "static integers" where an integer is the former and a float the latter.
      functions: whether functions among the arguments are called while the op is traced. They are known by
        their code and by what they capture (`core/captures.py`).
      cached: whether the eager program is kept; not for an op that calls a function when it runs.
    """
    if fn is None:
        return functools.partial(op, numbers=numbers, functions=functions, cached=cached)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            program = context.current()
            if program is not None:
                with program.lowering(_label(fn.__name__, args, kwargs)):
                    return fn(*args, **kwargs)
            return run_eagerly(fn, args, kwargs, numbers, functions, cached)
        except WeftError as error:
            error.located(format_call(fn.__name__.lstrip("_"), args, kwargs))
            raise

    return call


def _label(name: str, args: Any, kwargs: Any) -> str:
    """`einsum[batch,io · io,hidden → batch,hidden]`: an op's name in jaxprs, profiles and plans."""
    given = (*args, *kwargs.values())
    operands = [
        t for a in given for t in (a if isinstance(a, list | tuple) else (a,)) if isinstance(t, Tensor)
    ]
    dims = " · ".join(",".join(d.name for d in t.dims) for t in operands)
    out = kwargs.get("out")
    if name == "einsum" and isinstance(out, list | tuple):
        dims += " → " + ",".join(getattr(d, "name", str(d)) for d in out)
    return f"{name.lstrip('_')}[{dims}]"


def run_eagerly(
    fn: Any, args: Any, kwargs: Any, numbers: str, functions: bool = False, cached: bool = True
) -> Any:
    """Call a function outside programs as one of its own, where its operands are, or what it captures."""
    where = _where(_tensors((args, kwargs)))
    if functions:
        known = jax.tree.map(_known, (args, kwargs), is_leaf=is_tensor)
        captured = [
            one for one in jax.tree.leaves(known, is_leaf=is_tensor) if isinstance(one, CapturedFunction)
        ]
        tensors = [t for one in captured for t in one.tensors if t.mesh is not None]
        where = where if where != _NOWHERE else _where(tensors)
        cached = all(one.key is not None for one in captured)
        # What lives elsewhere may be captured and never used: only a trace can tell.
        cached = cached and all((t.mesh, t.layout) == where for t in tensors)
        if cached:
            with bind_functions(captured):
                return _adopting(fn, where, numbers, cached, *known)
    return _adopting(fn, where, numbers, cached, args, kwargs)


def _known(leaf: Any) -> Any:
    return CapturedFunction(leaf) if callable(leaf) and not isinstance(leaf, Tensor) else leaf


def _adopting(fn: Any, where: Any, numbers: str, cached: bool, args: Any, kwargs: Any) -> Any:
    try:
        return _program(fn, where, numbers, cached)(*args, **kwargs)
    except RetraceOnMesh as found:
        where = found.mesh, found.layout
    return _program(fn, where, numbers, cached)(*args, **kwargs)


def _program(fn: Any, where: tuple[Mesh, Layout], numbers: str, cached: bool) -> Program:
    key = (fn, *where)
    program = _EAGER.get(key) if cached else None
    if program is None:
        program = Program(fn, *where, eager=True, static_numbers=STATIC_NUMBERS[numbers])
        if cached:
            _EAGER[key] = program
    return program


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_tensor) if isinstance(leaf, Tensor)]


def _where(tensors: list[Tensor]) -> tuple[Mesh, Layout]:
    """The mesh and layout of the operands; unplaced ones adopt the placed one's."""
    found: Tensor | None = None
    for leaf in tensors:
        if leaf.mesh is not None:
            if found is None:
                found = leaf
            elif found.mesh is not leaf.mesh or found.layout is not leaf.layout:
                assert found.mesh is not None and found.layout is not None
                check_same_placement(leaf, Context(found.mesh, found.layout))
    if found is None:
        return _NOWHERE
    assert found.mesh is not None and found.layout is not None
    return found.mesh, found.layout
