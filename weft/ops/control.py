"""Control flow over named tensors: `lax.while_loop`, `lax.fori_loop` and `lax.cond`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ..core import collectives
from ..core.boundary import (
    LeafSpec,
    check_carry_dtype,
    flatten,
    format_treedef,
    leaf_array,
    match_spec,
    numbers_as_tensors,
    rebuild_leaf,
    strip_weak_type,
)
from ..core.context import active
from ..core.describe import describe
from ..core.errors import ProgramError, TensorTypeError
from ..core.op import op
from ..core.operands import as_slice, slice_tensor
from ..core.reshard import materialize
from ..core.tensor import Tensor
from ..core.types import PyTree, Result, Tree


def _predicate(predicate: Tensor | ArrayLike, op_name: str) -> jax.Array:
    """A boolean scalar that is replicated. If it varied, devices would disagree on which collectives run."""
    if isinstance(predicate, Tensor):
        t = as_slice(predicate)
        if t.dims or t.dtype != jnp.bool_:
            raise ProgramError(
                f"the predicate of {op_name} is {describe(t)}",
                rule="a predicate is a boolean scalar, the same on all devices",
                hint="reduce it: wf.any(x) or wf.all(x)",
            )
        return materialize(t)._read()
    array = jnp.asarray(predicate)
    axes = collectives.varying_axes(array)
    if array.shape or array.dtype != jnp.bool_ or axes:
        raise ProgramError(
            f"the predicate of {op_name} is a raw {array.dtype} array of shape {array.shape}"
            + (f" that differs between devices along {', '.join(sorted(axes))}" if axes else ""),
            rule="a predicate is a boolean scalar, the same on all devices",
            hint="compute it from tensors: wf.any(x) or wf.all(x)",
        )
    return array


@op(
    example=lambda op, x, start: op(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2.0), (start, x)),
    functions=True,
)
def while_loop(condition: Callable[[Tree], Tensor], body: Callable[[Tree], Tree], carry: Tree) -> Tree:
    """Repeat `carry = body(carry)` while `condition(carry)`. As in JAX, it has no reverse-mode derivative.

    >>> import weft as wf
    >>> wf.while_loop(lambda n: n < 10, lambda n: n * 2, wf.tensor(1, ()))
    i32[] 16
    """
    return _loop(carry, lax.while_loop, condition, body)


@op(example=lambda op, x: op(0, 3, lambda n, x: x * 0.5 + n, x), functions=True)
def fori_loop(
    low: int | Tensor, high: int | Tensor, body: Callable[[Tensor, Tree], Tree], carry: Tree
) -> Tree:
    """Repeat `carry = body(n, carry)` for n in [low, high).

    >>> import weft as wf
    >>> wf.fori_loop(0, 4, lambda n, total: total + n, wf.tensor(0, ()))
    i32[] 6
    """
    first, end = _bound(low), _bound(high)
    return _loop(
        carry,
        lambda _, step, arrays: lax.fori_loop(first, end, lambda n, c: step(c, n), arrays),
        None,
        lambda carry, n: body(slice_tensor(n, ()), carry),
    )


def _bound(bound: int | Tensor | jax.Array) -> int | jax.Array:
    """Check a bound of a loop: an integer, or a scalar of an integer dtype."""
    n: Any = materialize(as_slice(bound))._read() if isinstance(bound, Tensor) else bound
    is_array = hasattr(n, "dtype")
    is_integer = is_array and not n.shape and jnp.issubdtype(n.dtype, jnp.integer)
    if is_integer or (isinstance(n, int) and not isinstance(n, bool)):
        return n
    array = f"an array of {n.dtype}, shape {n.shape}" if is_array else repr(bound)
    raise TensorTypeError(
        f"a bound of fori_loop is {describe(bound) if isinstance(bound, Tensor) else array}",
        rule="the bounds of a loop are integers",
        hint="fori_loop(0, 10, body, carry)",
    )


def _loop(
    carry: PyTree,
    run: Callable[..., list[jax.Array]],
    condition: Callable[[PyTree], Tensor] | None,
    body: Callable[..., PyTree],
) -> PyTree:
    """Run a loop over the arrays of a carry: `run(go, step, arrays)` calls JAX's loop."""
    ctx = active.context
    leaves, tree = flatten(carry)
    leaves = [materialize(c) if isinstance(c, Tensor) else numbers_as_tensors(c) for c in leaves]
    leaves = [strip_weak_type(c) for c in leaves]  # a carry cannot keep a weak type
    specs = [LeafSpec.of(c) for c in leaves]

    def rebuild(arrays: list[jax.Array]) -> PyTree:
        return jax.tree.unflatten(tree, [rebuild_leaf(s, a) for s, a in zip(specs, arrays, strict=True)])

    def go(arrays: list[jax.Array]) -> jax.Array:
        assert condition is not None
        with ctx.frame():
            return _predicate(condition(rebuild(arrays)), "while_loop")

    def step(arrays: list[jax.Array], *n: jax.Array) -> list[jax.Array]:
        with ctx.frame():
            out, out_tree = flatten(body(rebuild(arrays), *n))
            if out_tree != tree:
                raise ProgramError(
                    f"the carry becomes {format_treedef(out_tree)} and was {format_treedef(tree)}",
                    rule="the body of a loop returns a carry with the same tree structure (* is a leaf)",
                    hint="return the same structure",
                )
            new = [leaf_array(match_spec(c, s, "a carry")) for c, s in zip(out, specs, strict=True)]
            return [check_carry_dtype(n, a, "a carry") for n, a in zip(new, arrays, strict=True)]

    return rebuild(run(go, step, [leaf_array(c) for c in leaves]))


@op(example=lambda op, x, start: op(start > 0, lambda x: x * 2.0, lambda x: x, x), functions=True)
def cond(
    predicate: Tensor | ArrayLike,
    true_fn: Callable[..., Result],
    false_fn: Callable[..., Result],
    *operands: PyTree,
) -> Result:
    """`true_fn(*operands)` if the predicate is true, else `false_fn(*operands)`. Only one of them runs.

    >>> import weft as wf
    >>> x = wf.ones("a=2")
    >>> wf.cond(wf.sum(x) > 1, lambda x: x * 10, lambda x: x, x)
    f32[a=2] [10., 10.]
    """
    ctx = active.context
    leaves, tree = flatten(operands)
    specs = [LeafSpec.of(c) for c in leaves]
    results: list[Any] = []  # structure, specs and dtypes of true_fn's results, which JAX traces first

    def branch(fn: Callable[..., PyTree]) -> Callable[[list[jax.Array]], list[jax.Array]]:
        def run(arrays: list[jax.Array]) -> list[jax.Array]:
            # Inside a vmap, and between the stages of a pipeline, devices take different branches.
            # Collectives must run outside the branches: the transpose of one inside would follow the
            # receiver's branch.
            lifts = bool(ctx.vmap.depth or ctx.vmap.axes)
            with ctx.frame(lifts_collectives=lifts), ctx.in_branch(axes):
                inputs = [rebuild_leaf(s, a) for s, a in zip(specs, arrays, strict=True)]
                out, out_tree = flatten(fn(*jax.tree.unflatten(tree, inputs)))
                out = [materialize(o) if isinstance(o, Tensor) else o for o in map(numbers_as_tensors, out)]
                if not results:
                    results.append((out_tree, [LeafSpec.of(o) for o in out], [o.dtype for o in out]))
                first_tree, first_specs, dtypes = results[0]
                if out_tree != first_tree:
                    raise ProgramError(
                        f"true_fn returns {format_treedef(first_tree)} and "
                        f"false_fn {format_treedef(out_tree)}",
                        rule="both branches of cond return the same tree structure (* is a leaf)",
                        hint="return the same structure from both",
                    )
                words = ("a result of false_fn", "that of true_fn is")
                new = [match_spec(o, s, *words) for o, s in zip(out, first_specs, strict=True)]
                for n, dtype in zip(new, dtypes, strict=True):
                    if n.dtype != dtype:
                        raise TensorTypeError(
                            f"true_fn returns {dtype} and false_fn {n.dtype}",
                            rule="both branches return the same dtypes",
                            hint="convert with .astype(...)",
                        )
                return [leaf_array(n) for n in new]

        return run

    condition = _predicate(predicate, "cond")
    # Inside a vmap the predicate may vary over the mapped axes: devices along them take different branches.
    axes = frozenset[str]()
    if ctx.vmap.depth:
        axes = collectives.varying_axes(condition) & ctx.vmap.axes
    arrays = [leaf_array(leaf) for leaf in leaves]
    out = lax.cond(condition, branch(true_fn), branch(false_fn), arrays)
    out_tree, out_specs, _ = results[0]
    return jax.tree.unflatten(out_tree, [rebuild_leaf(s, a) for s, a in zip(out_specs, out, strict=True)])
