"""Ops, and eager execution.

`@op` makes a lowering an op: inside a program it runs as it is, under a name that plans show; outside it is a
program of its own, staged and cached.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from . import context
from .context import Context
from .errors import WeftError
from .forms import Elsewhere, check_same_place
from .layout import Layout
from .mesh import Mesh
from .spmd import Program
from .tensor import Tensor, asked, is_tensor

_EAGER: dict[Any, Program] = {}


_NOWHERE = (Mesh(), Layout())


def op(fn: Any = None, *, numbers: str = "static", cached: bool = True) -> Any:
    """Make a lowering a public op: inside a program it runs as it is, outside as a program of its own.

    Args:
      numbers: "static" where a Python number is part of the signature (a shift, a size), "dynamic"
        where it is an operand.
      cached: whether the eager program is kept; not for ops that take functions.
    """
    if fn is None:
        return functools.partial(op, numbers=numbers, cached=cached)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            program = context.current()
            if program is not None:
                with program.lowering(_label(fn.__name__, args, kwargs)):
                    return fn(*args, **kwargs)
            return run_eagerly(fn, args, kwargs, numbers, cached)
        except WeftError as error:
            error.located(asked(fn.__name__.lstrip("_"), args, kwargs))
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


def run_eagerly(fn: Any, args: Any, kwargs: Any, numbers: str, cached: bool) -> Any:
    """Call a function outside programs as one of its own, where its operands are, or what it captures."""
    where = _where(args, kwargs)
    try:
        return _program(fn, where, numbers, cached)(*args, **kwargs)
    except Elsewhere as found:
        where = found.mesh, found.layout
    return _program(fn, where, numbers, cached)(*args, **kwargs)


def _program(fn: Any, where: tuple[Mesh, Layout], numbers: str, cached: bool) -> Program:
    key = (fn, *where)
    program = _EAGER.get(key)
    if program is None:
        program = Program(fn, *where, eager=True, static_numbers=numbers == "static")
        if cached:
            _EAGER[key] = program
    return program


def _where(args: Any, kwargs: Any) -> tuple[Mesh, Layout]:
    """The mesh and layout of the operands; unplaced ones adopt the placed one's."""
    found: Tensor | None = None
    for leaf in jax.tree.leaves((args, kwargs), is_leaf=is_tensor):
        if isinstance(leaf, Tensor) and leaf.mesh is not None:
            if found is None:
                found = leaf
            elif found.mesh is not leaf.mesh or found.layout is not leaf.layout:
                assert found.mesh is not None and found.layout is not None
                check_same_place(leaf, Context(found.mesh, found.layout))
    if found is None:
        return _NOWHERE
    assert found.mesh is not None and found.layout is not None
    return found.mesh, found.layout
