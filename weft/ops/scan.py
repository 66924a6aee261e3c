"""scan: `lax.scan` over a named dim, with one traced body for all steps.

Two choices depend on the body and are made before it is traced. Parameters are made varying outside the
loop, so that their gradients are summed once and not in every step. Carries start resolved; a carry that only
accumulates pending sums should stay pending until after the loop. Both are guesses: if the body contradicts
one, it is traced again with the other choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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
from ..core.context import Frame, active
from ..core.dims import Dim, DimLike, check_distinct
from ..core.errors import ProgramError
from ..core.layers import rebuilt
from ..core.op import op
from ..core.operands import check_along, slice_tensor
from ..core.reshard import materialize, reshard
from ..core.retrace import Retrace, trace_with_guess
from ..core.tensor import Tensor
from ..core.types import Out, PyTree, Tree

Leaf = Tensor | jax.Array


@op(
    example=lambda op, x, d: op(lambda c, row: (c + row, c * row), d * 1.0, x, "a"),
    mixes_rows=True,
    split_invariant=True,
    functions=True,
)
def scan(
    f: Callable[[Tree, PyTree], tuple[Tree, Out]],
    carry: Tree,
    xs: PyTree,
    dim: DimLike,
    *,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Tree, Out]:
    """Apply `f` to the slices of `xs` along a dim, one after the other, with a carry, like `jax.lax.scan`.

    Args:
      f: takes the carry and one slice of `xs` (without the dim). Returns the new carry and the output of this
        step.
      carry: the initial carry, a pytree of tensors.
      xs: a pytree of tensors that have the dim, or None.
      dim: the dim to scan over; a name is enough if `xs` has it. A split dim is gathered.
      reverse: scan from the last element to the first.
      unroll: as in `jax.lax.scan`.

    Returns:
      The final carry, and the outputs of all steps, stacked along the dim, which comes first.

    >>> import weft as wf
    >>> total, sums = wf.scan(lambda c, x: (c + x, c + x), 0.0, wf.ones("step=3"), "step")
    >>> sums
    f32[step=3] [1., 2., 3.]
    """
    carries, carry_tree = flatten(carry)
    items, items_tree = flatten(xs)
    dim = common_dim(items, dim)
    check_along([dim])
    carries = [materialize(c) if isinstance(c, Tensor) else numbers_as_tensors(c) for c in carries]
    carries = [strip_weak_type(c) for c in carries]
    attempt = _Scan(f, dim, carries, carry_tree, xs, items, items_tree, reverse, unroll)

    def revise(guess: _Guess, found: Retrace) -> _Guess | None:
        # The body needs an array that does not vary over the carry's axes.
        if found.kind == "unvarying" and guess.vary_early:
            return replace(guess, vary_early=False)
        # The scope may also be the frame of an enclosing scan.
        if found.kind == "carries" and found.scope is attempt.frame:
            return replace(guess, pending=guess.pending | found.value)
        return None

    return trace_with_guess(attempt.run, _Guess(), revise)


@dataclass(frozen=True)
class _Guess:
    """What `scan` decides before it has traced the body.

    Attributes:
      vary_early: whether to make parameters varying before the loop.
      pending: the axes over which carries are pending, by leaf number.
    """

    vary_early: bool = True
    pending: dict[int, frozenset[str]] = field(default_factory=dict)


@dataclass
class _Scan:
    f: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    dim: Dim
    carries: list[Any]
    carry_tree: jax.tree_util.PyTreeDef
    xs: PyTree
    items: list[Leaf]
    items_tree: jax.tree_util.PyTreeDef
    reverse: bool
    unroll: int
    frame: Frame | None = None

    def run(self, guess: _Guess) -> tuple[PyTree, PyTree]:
        """Trace the scan once."""
        pending = guess.pending
        # A pending carry starts with its value on one device and zeros on the others.
        carries = [
            as_pending(c, LeafSpec(c.dims, c.role, c.splits, pending[n])) if pending.get(n) else c
            for n, c in enumerate(self.carries)
        ]
        ctx = active.context
        carry_specs = [LeafSpec.of(c) for c in carries]
        axes = _carry_axes(carries) if guess.vary_early else frozenset()
        scanned = [self._without_dim(x, axes) for x in self.items]
        item_specs = [spec for spec, _ in scanned]
        traced: dict[str, Any] = {}  # specs and structure of the body's results

        def body(carry: list[jax.Array], item: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            with ctx.frame() as frame:
                self.frame = frame
                inner = [rebuild_leaf(s, a) for s, a in zip(carry_specs, carry, strict=True)]
                for n, t in enumerate(inner):
                    # A carry that an attempt fixed as resolved is not watched, so attempts cannot alternate.
                    if isinstance(t, Tensor) and (n not in pending or t.pending):
                        frame.carries[id(t._data)] = n
                        t._watch = frame.consumed, n
                xs = [rebuild_leaf(s, a) for s, a in zip(item_specs, item, strict=True)]
                item_tree = jax.tree.unflatten(self.items_tree, xs)
                with rebuilt(item_tree, self.xs):
                    out = self.f(jax.tree.unflatten(self.carry_tree, inner), item_tree)
                if frame.pending_carries:
                    raise Retrace("carries", frame.pending_carries, frame)
                return self._results(out, carry_specs, carry, traced)

        last, stacked = lax.scan(
            body,
            [leaf_array(c) for c in carries],
            [array for _, array in scanned],
            length=self.dim.size,
            reverse=self.reverse,
            unroll=self.unroll,
        )
        # These specs equal carry_specs, except that they record the ops that the pending sums come from.
        carry = [rebuild_leaf(s, a) for s, a in zip(traced["carries"], last, strict=True)]
        ys = [self._with_dim(s, a) for s, a in zip(traced["ys"], stacked, strict=True)]
        return jax.tree.unflatten(self.carry_tree, carry), jax.tree.unflatten(traced["tree"], ys)

    def _results(
        self, out: PyTree, specs: list[LeafSpec | None], before: list[jax.Array], traced: dict[str, Any]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Check the result of the body, and return the arrays of the new carry and of the outputs."""
        if not isinstance(out, tuple) or len(out) != 2:
            raise ProgramError(
                f"the function of scan returned a {type(out).__name__}",
                rule="it returns a pair: the new carry, and the output of this step (or None)",
                hint="return carry, None; or return carry, y to stack the outputs y",
            )
        carries, tree = flatten(out[0])
        if tree != self.carry_tree:
            raise ProgramError(
                f"the carry becomes {format_treedef(tree)} and was {format_treedef(self.carry_tree)}",
                rule="the function of scan returns a carry with the same tree structure (* is a leaf)",
                hint="return the same structure",
            )
        new = [match_spec(c, s, "a carry of scan") for c, s in zip(carries, specs, strict=True)]
        arrays = [
            check_carry_dtype(leaf_array(c), b, "a carry of scan") for c, b in zip(new, before, strict=True)
        ]
        traced["carries"] = [LeafSpec.of(c) for c in new]
        leaves, traced["tree"] = flatten(out[1])
        leaves = [check_exact_varying(numbers_as_tensors(leaf)) for leaf in leaves]
        traced["ys"] = [LeafSpec.of(leaf) for leaf in leaves]
        return arrays, [leaf_array(leaf) for leaf in leaves]

    def _without_dim(self, x: Leaf, axes: frozenset[str]) -> tuple[LeafSpec | None, jax.Array]:
        """The spec of one slice of a scanned leaf, and the array with the dim unsplit and first.

        Other dims keep their stored splits and are gathered inside, step by step. Parameters are made varying
        over the carry's axes before the loop, because nearly every body needs them so.
        """
        if not isinstance(x, Tensor):
            return None, jnp.asarray(x)
        ctx = active.context
        dim_index = x.dims.index(self.dim)
        stored = ctx.splits(x.dims, x.role)
        splits = tuple(() if n == dim_index else split for n, split in enumerate(stored))
        early = axes if jnp.issubdtype(x.dtype, jnp.inexact) else frozenset()
        array = reshard(x, splits, early)
        array = jnp.moveaxis(array, dim_index, 0) if dim_index else array
        dims = x.dims[:dim_index] + x.dims[dim_index + 1 :]
        return LeafSpec(dims, x.role, splits[:dim_index] + splits[dim_index + 1 :], frozenset()), array

    def _with_dim(self, spec: LeafSpec | None, array: jax.Array) -> Leaf:
        if spec is None:
            return array
        dims = (self.dim, *spec.dims)
        check_distinct(dims)
        stacked = slice_tensor(array, dims, ((), *spec.splits), spec.pending)
        stacked.origin = spec.origin
        return stacked


def _carry_axes(carries: list[Leaf]) -> frozenset[str]:
    """The axes over which the floating-point carries vary."""
    return frozenset(
        axis
        for c in carries
        if isinstance(c, Tensor) and jnp.issubdtype(c.dtype, jnp.inexact)
        for axes in c.splits or ()
        for axis in axes
    )
