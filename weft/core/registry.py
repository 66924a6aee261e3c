"""One row of metadata per op. The tests, the search and the reference pages read it, so an op is listed once.

    @op(example=lambda op, x: op(x, "a"), mixes_rows=True)
    def sort(x, dim): ...

    OPS["sort"].family      # "sorting": the file that the op is in

An example takes the op and operands, by the names of its parameters:

    x, y          floats [a=6, b=3] and [b=3, a=6]
    p, u, g       floats [a=6, b=3]: positive, between -1 and 1, above 1
    i, j          integers from 0 to 4: [a=6, b=3] and [a=6]
    c, d          booleans [a=6, b=3] and [b=3]
    ids, start    integers [m=2], and one without dims
    kernel        floats [w=3, b=3, f=2]
    m             floats [b=3, a=6, e=6]: positive definite matrices
    key           a JAX key

An op that works along a dim works along `a` in its example.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from .types import PyTree

Example = str | Callable[..., PyTree]
Fn = TypeVar("Fn", bound=Callable[..., PyTree])


@dataclass(frozen=True)
class OpInfo:
    """The row of an op.

    Attributes:
      name: its public name, and its name in labels.
      module: the module that defines it.
      operands: the names of the operands of its example.
      example: takes the op and these operands, and calls the op.
      mixes_rows: whether the example's result for a position of `a` depends on other positions. Such a call
        is an error for the batch of a pipeline, whose stages have one micro-batch at a time.
      split_invariant: whether the total work does not depend on which dims are split. Most ops do more work
        when they are split: a convolution over a split spatial dim computes halos.
      takes_functions: whether it calls functions among its arguments, so that it contains other ops.
    """

    name: str
    module: str
    operands: tuple[str, ...]
    example: Callable[..., PyTree]
    mixes_rows: bool = False
    split_invariant: bool = False
    takes_functions: bool = False

    @property
    def family(self) -> str:
        """The name of the file that defines the op."""
        return self.module.rpartition(".")[2]

    @property
    def public(self) -> Callable[..., PyTree]:
        """The function that users call; for the lowering `_take` it is `take`, in the same module."""
        return getattr(sys.modules[self.module], self.name)

    def run_example(self, operands: Mapping[str, PyTree]) -> PyTree:
        """The result of the example for operands given by name."""
        return self.example(self.public, *[operands[name] for name in self.operands])


# Filled when the modules of ops are imported: an op that was called has a row.
OPS: dict[str, OpInfo] = {}


def register(
    example: Example,
    *,
    mixes_rows: bool = False,
    split_invariant: bool = False,
    takes_functions: bool = False,
) -> Callable[[Fn], Fn]:
    """Add the row of an op; `@op` does so for its lowering.

    Args:
      example: a function of the op and operands, or the operands' names if they are the op's arguments.
      mixes_rows, split_invariant, takes_functions: as in `OpInfo`.
    """

    def add(fn: Fn) -> Fn:
        name = fn.__name__.lstrip("_")
        names, call = (example.split(), _apply) if isinstance(example, str) else (_operands(example), example)
        OPS[name] = OpInfo(
            name, fn.__module__, tuple(names), call, mixes_rows, split_invariant, takes_functions
        )
        return fn

    return add


def _apply(op: Callable[..., PyTree], *operands: PyTree) -> PyTree:
    return op(*operands)


def _operands(example: Callable[..., PyTree]) -> tuple[str, ...]:
    code = example.__code__
    return code.co_varnames[1 : code.co_argcount]
