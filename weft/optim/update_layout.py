"""The layout of an update: reshard gradients and parameters into the optimizer state's layout, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from weft.core.context import active
from weft.core.labels import OPTIMIZER, OpLabel
from weft.core.layout import Layout
from weft.core.op import run_eagerly
from weft.core.operands import as_slice
from weft.core.reshard import materialize
from weft.core.tensor import Tensor, with_static
from weft.core.types import PyTree

Result = TypeVar("Result")


def call_in_program(fn: Callable[..., Result], *args: PyTree) -> Result:
    """`fn(*args)`: directly inside a program, otherwise as a program of its own."""
    if active.context is not None:
        return fn(*args)
    return run_eagerly(fn, args, {}, "dynamic")


@contextmanager
def update_scope(name: str) -> Iterator[None]:
    """Label the traced operations `optimizer[name]`: plans count them in the update phase."""
    with active.context.lowering(OpLabel(OPTIMIZER, [tuple(name.split(","))])):
        yield


@contextmanager
def under_optimizer_layout(name: str) -> Iterator[None]:
    """Trace with the layout's rules for optimizer state applied to all tensors."""
    ctx = active.context
    with update_scope(name), ctx.inside(layout=Layout(ctx.placement.layout.rules_for("optimizer"))):
        yield


def to_optimizer_layout(t: Tensor) -> Tensor:
    """Reshard a tensor as optimizer state. A pending sum is reduce-scattered there, not all-reduced."""
    return materialize(as_slice(t), "optimizer")


def to_stored_layout(t: Tensor, role: str) -> Tensor:
    """Reshard a result of an update into the layout in which its role is stored."""
    return materialize(with_program_layout(t, role), role)


def with_program_layout(t: Tensor, role: str) -> Tensor:
    """The same slice labeled with the program's layout. Its splits and pending sums don't change."""
    ctx = active.context
    return with_static(t, role, ctx.placement)


def at_least_float32(dtype: DTypeLike) -> np.dtype:
    """The dtype to compute and accumulate in: float32, or the given dtype if it is wider."""
    return jnp.promote_types(dtype, jnp.float32)
