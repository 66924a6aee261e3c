"""scan: one traced body for all places of a dim.

What the steps share is brought into the form that they need before the loop: parameters are made varying
outside (their gradients are summed once, not once a step), and sums that a carry accumulates stay pending
until after the loop. Both are guesses, corrected by tracing the body again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core import context
from ..core.boundary import (
    LeafSpec,
    as_pending,
    check_carry_dtype,
    check_exact_varying,
    common_dim,
    flatten,
    format_treedef,
    leaf_array,
    match_spec,
    numbers_as_tensors,
    rebuild_leaf,
    strip_weak_type,
)
from ..core.context import Frame, RetraceForCarry, RetraceUnvarying
from ..core.dims import Dim, check_distinct
from ..core.errors import ProgramError
from ..core.op import op
from ..core.operands import slice_tensor
from ..core.reshard import materialize, reshard
from ..core.tensor import Tensor


@op(functions=True)
def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    dim: Any,
    *,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Any, Any]:
    """`f` over the places of a dim, one after the other, handing on a carry.

    Args:
      f: takes the carry and the tensors at one place (without the dim); returns the new carry and what
        to keep of this step.
      carry: a tree of tensors to begin with.
      xs: a tree of tensors that have the dim, or None.
      dim: the dim, by name where `xs` has it. If it is split it is gathered.
      reverse: from the last place to the first.
      unroll: as in `jax.lax.scan`.

    Returns:
      The last carry, and what was kept, with the dim in front.

    >>> import weft as wf
    >>> total, sums = wf.scan(lambda c, x: (c + x, c + x), 0.0, wf.ones("step=3"), "step")
    >>> sums
    f32[step=3] [1., 2., 3.]
    """
    carries, carry_tree = flatten(carry)
    items, items_tree = flatten(xs)
    dim = common_dim(items, dim)
    carries = [materialize(c) if isinstance(c, Tensor) else numbers_as_tensors(c) for c in carries]
    carries = [strip_weak_type(c) for c in carries]
    attempt = _Scan(f, dim, carry_tree, items_tree, reverse, unroll)
    cast_early, pending = True, dict[int, frozenset[str]]()
    while True:
        begun = [
            as_pending(c, LeafSpec(c.dims, c.role, c.splits, pending[n])) if pending.get(n) else c
            for n, c in enumerate(carries)
        ]
        used = [(frame, set(frame.reused)) for frame in context.require().frames]
        try:
            return attempt.run(begun, items, cast_early, fixed=set(pending))
        except RetraceUnvarying:
            if not cast_early:
                raise
            cast_early = False
        except RetraceForCarry as better:
            if better.frame is not attempt.frame:
                raise
            pending |= better.axes
        for frame, before in used:  # what a failed attempt used counts for nothing
            frame.reused = before


@dataclass
class _Scan:
    f: Any
    dim: Dim
    carry_tree: Any
    items_tree: Any
    reverse: bool
    unroll: int
    frame: Frame | None = None

    def run(self, carries: list[Any], items: list[Any], cast_early: bool, fixed: set[int]) -> tuple[Any, Any]:
        """One attempt; `fixed` are the carries that were found to be better pending, or not."""
        program = context.require()
        carry_forms = [LeafSpec.of(c) for c in carries]
        axes = _carry_axes(carries) if cast_early else frozenset()
        scanned = [self._without_dim(x, axes) for x in items]
        item_forms = [form for form, _ in scanned]
        kept: dict[str, Any] = {}

        def body(carry: list[Any], item: list[Any]) -> tuple[list[Any], list[Any]]:
            with program.frame() as frame:
                self.frame = frame
                inner = [rebuild_leaf(f, a) for f, a in zip(carry_forms, carry, strict=True)]
                for n, t in enumerate(inner):
                    # A carry that is found pending too late is fixed as resolved, and that's that.
                    if isinstance(t, Tensor) and (n not in fixed or t.pending):
                        frame.carries[id(t._data)] = n
                        t._on_read = functools.partial(frame.consumed.add, n)
                given = [rebuild_leaf(f, a) for f, a in zip(item_forms, item, strict=True)]
                out = self.f(
                    jax.tree.unflatten(self.carry_tree, inner),
                    jax.tree.unflatten(self.items_tree, given),
                )
                if frame.pending_carries:
                    raise RetraceForCarry(frame, frame.pending_carries)
                return self._results(out, carry_forms, carry, kept)

        last, stacked = lax.scan(
            body,
            [leaf_array(c) for c in carries],
            [array for _, array in scanned],
            length=self.dim.size,
            reverse=self.reverse,
            unroll=self.unroll,
        )
        # The same forms; but only the body knows what its pending sums come from.
        carry = [rebuild_leaf(f, a) for f, a in zip(kept["carries"], last, strict=True)]
        ys = [self._with_dim(f, a) for f, a in zip(kept["forms"], stacked, strict=True)]
        return jax.tree.unflatten(self.carry_tree, carry), jax.tree.unflatten(kept["tree"], ys)

    def _results(self, out: Any, forms: list[Any], before: list[Any], kept: dict[str, Any]) -> Any:
        if not isinstance(out, tuple) or len(out) != 2:
            raise ProgramError(
                f"the function of scan returned a {type(out).__name__}",
                rule="it returns a pair: the new carry, and what to keep of this step (or None)",
                hint="return carry, None; or return carry, y to keep y",
            )
        carries, tree = flatten(out[0])
        if tree != self.carry_tree:
            raise ProgramError(
                f"the carry becomes {format_treedef(tree)} and was {format_treedef(self.carry_tree)}",
                rule="the function of scan returns a carry with the same structure of tensors (*)",
                hint="return the same structure",
            )
        new = [match_spec(c, f, "a carry of scan") for c, f in zip(carries, forms, strict=True)]
        arrays = [
            check_carry_dtype(leaf_array(c), b, "a carry of scan") for c, b in zip(new, before, strict=True)
        ]
        kept["carries"] = [LeafSpec.of(c) for c in new]
        leaves, kept["tree"] = flatten(out[1])
        leaves = [check_exact_varying(numbers_as_tensors(leaf)) for leaf in leaves]
        kept["forms"] = [LeafSpec.of(leaf) for leaf in leaves]
        return arrays, [leaf_array(leaf) for leaf in leaves]

    def _without_dim(self, x: Any, axes: frozenset[str]) -> tuple[LeafSpec | None, Any]:
        """A scanned tensor with the dim unsplit and in front, and the form of one place of it.

        Other dims stay as they are stored: gathered inside, step by step. Parameters are made varying
        over the carry's axes before the loop, as nearly every body will want them.
        """
        if not isinstance(x, Tensor):
            return None, jnp.asarray(x)
        program = context.require()
        place = x.dims.index(self.dim)
        stored = program.splits(x.dims, x.role)
        splits = tuple(() if n == place else one for n, one in enumerate(stored))
        early = axes if jnp.issubdtype(x.dtype, jnp.inexact) else frozenset()
        array = reshard(x, splits, early)
        array = jnp.moveaxis(array, place, 0) if place else array
        dims = x.dims[:place] + x.dims[place + 1 :]
        return LeafSpec(dims, x.role, splits[:place] + splits[place + 1 :], frozenset()), array

    def _with_dim(self, form: LeafSpec | None, array: Any) -> Any:
        if form is None:
            return array
        dims = (self.dim, *form.dims)
        check_distinct(dims)
        made = slice_tensor(array, dims, ((), *form.splits), form.pending)
        made.origin = form.origin
        return made


def _carry_axes(carries: list[Any]) -> frozenset[str]:
    """The axes over which the values that are handed on vary."""
    return frozenset(
        axis
        for c in carries
        if isinstance(c, Tensor) and jnp.issubdtype(c.dtype, jnp.inexact)
        for axes in c.splits or ()
        for axis in axes
    )
