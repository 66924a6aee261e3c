"""Control flow: JAX's own while and cond over named tensors; one traced body each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core import collectives, context
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
from ..core.describe import describe
from ..core.errors import ProgramError, TensorTypeError
from ..core.op import op
from ..core.operands import as_slice, slice_tensor
from ..core.reshard import materialize
from ..core.tensor import Tensor

# while, for, cond


def _predicate(p: Any, what: str) -> Any:
    """A truth value that is the same on all devices: one that varies would hang the collectives."""
    if isinstance(p, Tensor):
        p = as_slice(p)
        if p.dims or p.dtype != jnp.bool_:
            raise ProgramError(
                f"the predicate of {what} is {describe(p)}",
                rule="a predicate is one truth value, the same on all devices",
                hint="reduce it: wf.any(x) or wf.all(x)",
            )
        return materialize(p)._array
    array = jnp.asarray(p)
    axes = collectives.varying_axes(array)
    if array.shape or array.dtype != jnp.bool_ or axes:
        raise ProgramError(
            f"the predicate of {what} is a raw {array.dtype} array of shape {array.shape}"
            + (f" that differs between devices along {', '.join(sorted(axes))}" if axes else ""),
            rule="a predicate is one truth value, the same on all devices",
            hint="make it of tensors: wf.any(x) or wf.all(x)",
        )
    return array


@op(functions=True)
def while_loop(condition: Callable[[Any], Any], body: Callable[[Any], Any], carry: Any) -> Any:
    """`carry = body(carry)` while `condition(carry)`; has no reverse-mode derivative, as in JAX.

    >>> import weft as wf
    >>> wf.while_loop(lambda n: n < 10, lambda n: n * 2, wf.tensor(1, ()))
    i32[] 16
    """
    return _loop(carry, lambda run, arrays: lax.while_loop(run["go"], run["step"], arrays), condition, body)


@op(functions=True)
def fori_loop(low: Any, high: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`carry = body(n, carry)` for n from low up to, not including, high.

    >>> import weft as wf
    >>> wf.fori_loop(0, 4, lambda n, total: total + n, wf.tensor(0, ()))
    i32[] 6
    """
    low, high = map(_bound, (low, high))
    return _loop(
        carry,
        lambda run, arrays: lax.fori_loop(low, high, lambda n, c: run["step"](c, n), arrays),
        None,
        lambda carry, n: body(slice_tensor(n, ()), carry),
    )


def _bound(given: Any) -> Any:
    """A whole number that a loop counts from, or up to."""
    n = materialize(as_slice(given))._array if isinstance(given, Tensor) else given
    is_array = hasattr(n, "dtype")
    is_unsplit = is_array and not n.shape and jnp.issubdtype(n.dtype, jnp.integer)
    if is_unsplit or (isinstance(n, int) and not isinstance(n, bool)):
        return n
    array = f"an array of {n.dtype}, shape {n.shape}" if is_array else repr(given)
    raise TensorTypeError(
        f"a bound of fori_loop is {describe(given) if isinstance(given, Tensor) else array}",
        rule="a loop counts from one whole number up to another",
        hint="fori_loop(0, 10, body, carry)",
    )


def _loop(carry: Any, start: Any, condition: Any, body: Any) -> Any:
    program = context.require()
    leaves, tree = flatten(carry)
    leaves = [materialize(c) if isinstance(c, Tensor) else numbers_as_tensors(c) for c in leaves]
    leaves = [strip_weak_type(c) for c in leaves]
    forms = [LeafSpec.of(c) for c in leaves]

    def rebuilt(arrays: list[Any]) -> Any:
        return jax.tree.unflatten(tree, [rebuild_leaf(f, a) for f, a in zip(forms, arrays, strict=True)])

    def go(arrays: list[Any]) -> Any:
        with program.frame():
            return _predicate(condition(rebuilt(arrays)), "while_loop")

    def step(arrays: list[Any], *more: Any) -> list[Any]:
        with program.frame():
            out, out_tree = flatten(body(rebuilt(arrays), *more))
            if out_tree != tree:
                raise ProgramError(
                    f"the carry becomes {format_treedef(out_tree)} and was {format_treedef(tree)}",
                    rule="the body of a loop returns a carry with the same structure of tensors (*)",
                    hint="return the same structure",
                )
            new = [leaf_array(match_spec(c, f, "a carry")) for c, f in zip(out, forms, strict=True)]
            return [check_carry_dtype(n, a, "a carry") for n, a in zip(new, arrays, strict=True)]

    last = start({"go": go, "step": step}, [leaf_array(c) for c in leaves])
    return rebuilt(last)


@op(functions=True)
def cond(predicate: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], *operands: Any) -> Any:
    """`true_fn(*operands)` or `false_fn(*operands)`, whichever the predicate says; one of them runs.

    >>> import weft as wf
    >>> x = wf.ones("a=2")
    >>> wf.cond(wf.sum(x) > 1, lambda x: x * 10, lambda x: x, x)
    f32[a=2] [10., 10.]
    """
    program = context.require()
    leaves, tree = flatten(operands)
    forms = [LeafSpec.of(c) for c in leaves]
    results: list[Any] = []

    def branch(fn: Callable[..., Any]) -> Callable[[list[Any]], list[Any]]:
        def run(arrays: list[Any]) -> list[Any]:
            # Inside a vmap, and from stage to stage of a pipeline, places take different branches: what is
            # sent is sent outside of them, or its transpose would go by what the receiver took.
            lifts = bool(program.vmap_depth or program.vmapped_axes)
            with program.frame(lifts_collectives=lifts), program.branching(axes):
                given = [rebuild_leaf(f, a) for f, a in zip(forms, arrays, strict=True)]
                out, out_tree = flatten(fn(*jax.tree.unflatten(tree, given)))
                out = [materialize(o) if isinstance(o, Tensor) else o for o in map(numbers_as_tensors, out)]
                if not results:
                    results.append((out_tree, [LeafSpec.of(o) for o in out], [o.dtype for o in out]))
                first_tree, first_forms, types = results[0]
                if out_tree != first_tree:
                    raise ProgramError(
                        f"true_fn returns {format_treedef(first_tree)} and false_fn "
                        f"{format_treedef(out_tree)}",
                        rule="both branches of cond return the same structure of tensors (*)",
                        hint="make them alike",
                    )
                words = ("a result of false_fn", "that of true_fn is")
                new = [match_spec(o, f, *words) for o, f in zip(out, first_forms, strict=True)]
                for n, dtype in zip(new, types, strict=True):
                    if n.dtype != dtype:
                        raise TensorTypeError(
                            f"true_fn returns {dtype} and false_fn {n.dtype}",
                            rule="both branches return the same dtypes",
                            hint="convert with .astype(...)",
                        )
                return [leaf_array(n) for n in new]

        return run

    chosen = _predicate(predicate, "cond")
    axes = collectives.varying_axes(chosen) & program.vmapped_axes if program.vmap_depth else frozenset[str]()
    arrays = [leaf_array(leaf) for leaf in leaves]
    out = lax.cond(chosen, branch(true_fn), branch(false_fn), arrays)
    out_tree, out_forms, _ = results[0]
    return jax.tree.unflatten(out_tree, [rebuild_leaf(f, a) for f, a in zip(out_forms, out, strict=True)])
