"""Compute in the layout of a role: an optimizer's update runs where its state is stored (ZeRO).

    with wf.under_layout("optimizer"):
        average = 0.9 * average + 0.1 * wf.store(grad, "optimizer")

Ops work on the layout's rules for values. Inside `under_layout(role)` these are the rules for that role: a
replicated operand is sliced locally, and a device computes only its slice of the result. `store` reshards a
tensor to where the program stores a role: a pending sum is reduce-scattered there instead of all-reduced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from .context import Context, active
from .describe import reports_call
from .dims import Dim
from .errors import ProgramError
from .labels import OPTIMIZER, OpLabel
from .layout import ROLES, Layout
from .operands import as_slice
from .placement import check_role, with_role
from .reshard import materialize
from .tensor import Tensor, with_static

# A name becomes part of an op's label, in which brackets, @, / and the signs · and → have a meaning.
_LABEL_NAME = re.compile(r"[\w ,.'-]*")


class RoleLayout(Layout):
    """A layout in which values are split by the rules of a role; stored tensors are split as in `base`."""

    __slots__ = ("base",)

    base: Layout

    def __init__(self, base: Layout, role: str):
        # Not Layout's constructor: it would add the rules for values to those of the other roles.
        self._set_rules({one: base.rules_for(one) for one in ROLES} | {"value": base.rules_for(role)})
        self.base = base


@reports_call
def under_layout(role: str, name: str | None = None) -> AbstractContextManager[None]:
    """Inside a program, split tensors by the layout's rules for a role.

    Layouts never change results, so this changes only where the work is done: under "optimizer" each device
    updates its own slice of the optimizer state.

    Args:
      role: "param" or "optimizer"; "value" is the default of a program.
      name: if given, plans show the work as `optimizer[name]`, and count it in the update phase. It has
        letters, digits, blanks, and the characters `_ , . ' -`.

    >>> import weft as wf
    >>> def update(average, x):
    ...     grad = wf.sum(x, "batch")
    ...     with wf.under_layout("optimizer"):
    ...         new = average / 2 + wf.store(grad, "optimizer") / 2
    ...         return wf.store(new, "optimizer")
    >>> program = wf.spmd(update, "data=4", wf.Layout("batch:data", optimizer="d:data"))
    >>> args = wf.zeros("d=4"), wf.ones("batch=8 d=4")
    >>> program(*args)
    f32[d=4/data·4] [4., 4., 4., 4.]
    >>> [str(one) for one in program.collectives(*args)]
    ['reduce-scatter over data: 16 bytes (sum[batch,d])']
    """
    check_role(role)
    if name is not None and not (isinstance(name, str) and _LABEL_NAME.fullmatch(name)):
        raise ProgramError(
            f"name={name!r} is not a name for the work",
            rule="a name is a string of letters, digits, blanks, and the characters _ , . ' -",
            hint='for example wf.under_layout("optimizer", "average")',
        )
    if active.context is None:
        raise ProgramError(
            f'under_layout("{role}") outside a program',
            rule="outside programs each op runs in the layout of its operands",
            hint="call it in a function that is staged: wf.spmd(fn, mesh, layout)",
        )
    return _under(active.context, role, name)


@contextmanager
def _under(ctx: Context, role: str, name: str | None) -> Iterator[None]:
    base = program_layout(ctx.placement.layout)
    is_same = base.rules_for(role) == base.rules_for("value")
    label = nullcontext() if name is None else ctx.lowering(OpLabel(OPTIMIZER, [tuple(name.split(","))]))
    with label, ctx.inside(layout=base if is_same else RoleLayout(base, role)):
        yield


@reports_call
def store(t: Tensor, role: str) -> Tensor:
    """The tensor with a role, resharded to where the layout stores tensors with this role.

    Args:
      t: a tensor.
      role: "value", "param" or "optimizer": which of the layout's rules apply.

    >>> import weft as wf
    >>> x = wf.place(wf.ones("d=4"), "data=4", wf.Layout("batch:data", optimizer="d:data"))
    >>> x
    f32[d=4] [1., 1., 1., 1.]
    >>> wf.store(x, "optimizer")
    f32[d=4/data·4] [1., 1., 1., 1.]
    """
    check_role(role)
    ctx = active.context
    if ctx is None:
        return with_role(t, role)
    with ctx.inside(layout=program_layout(ctx.placement.layout)):
        t = as_slice(t)
        if t.placement is not ctx.placement:  # it was computed under a role's layout
            t = with_static(t, t.role, ctx.placement)
        return materialize(t, role)


def allow_unused_rules() -> None:
    """Inside a program, accept rules without effect: the layout is shared with another program."""
    ctx = active.context
    for name in ctx.placement.layout.dim_names:
        ctx.observations.seen_dims.setdefault(name, Dim(name, 1))


def program_layout(layout: Layout) -> Layout:
    """The layout of the program: that without `under_layout`."""
    return layout.base if isinstance(layout, RoleLayout) else layout
