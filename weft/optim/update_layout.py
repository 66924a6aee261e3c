"""The layout of an update: slices of gradients and parameters where the optimizer's state is, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp

from weft.core import context
from weft.core.layout import Layout
from weft.core.op import run_eagerly
from weft.core.operands import as_slice
from weft.core.reshard import materialize
from weft.core.tensor import Tensor


def call_in_program(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`, outside programs as one of its own."""
    if context.current() is not None:
        return fn(*args)
    return run_eagerly(fn, args, {}, "dynamic")


@contextmanager
def update_scope(what: str) -> Iterator[None]:
    """Name what is traced, for plans: it belongs to the update."""
    with context.require().lowering(f"optimizer[{what}]"):
        yield


@contextmanager
def under_optimizer_layout(what: str) -> Iterator[None]:
    """Trace with the layout's rules for optimizer state as those for all tensors."""
    program = context.require()
    with update_scope(what), program.under_layout(Layout(program.layout.rules_for("optimizer"))):
        yield


def to_optimizer_layout(t: Tensor) -> Tensor:
    """A tensor laid out as optimizer state: a pending sum is scattered there, not added up everywhere."""
    return materialize(as_slice(t), "optimizer")


def to_stored_layout(t: Tensor, role: str) -> Tensor:
    """A result of an update in the form in which its role is stored."""
    return materialize(with_program_layout(t, role), role)


def with_program_layout(t: Tensor, role: str) -> Tensor:
    """The same slice in the program's own layout; what its form is, it is still."""
    program = context.require()
    made = Tensor(
        t._array,
        t.dims,
        role=role,
        mesh=program.mesh,
        layout=program.layout,
        splits=t.splits,
        pending=t.pending,
    )
    made.origin = t.origin
    return made


def at_least_float32(dtype: Any) -> Any:
    """The type to compute in."""
    return jnp.promote_types(dtype, jnp.float32)
