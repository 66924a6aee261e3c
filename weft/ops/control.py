"""Control flow over named tensors: `lax.while_loop`, `lax.fori_loop`, `lax.cond` and `lax.switch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..core import collectives
from ..core.boundary import (
    LeafSpec,
    as_raw_array,
    check_carry_dtype,
    flatten,
    format_treedef,
    leaf_array,
    match_spec,
    numbers_as_tensors,
    rebuild_leaf,
    strip_weak_type,
)
from ..core.collectives import Axes
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
    return _replicated_scalar(
        predicate,
        jnp.bool_,
        f"the predicate of {op_name}",
        rule="a predicate is a boolean scalar, the same on all devices",
        hints=("reduce it: wf.any(x) or wf.all(x)", "compute it from tensors: wf.any(x) or wf.all(x)"),
    )


def _index(index: Tensor | ArrayLike) -> jax.Array:
    """An integer scalar that is replicated."""
    return _replicated_scalar(
        index,
        jnp.integer,
        "the index of switch",
        rule="an index is an integer scalar, the same on all devices",
        hints=("select one element, or reduce it; convert it with .astype(jnp.int32)",) * 2,
    )


def _replicated_scalar(
    given: Tensor | ArrayLike, kind: DTypeLike, what: str, *, rule: str, hints: tuple[str, str]
) -> jax.Array:
    """The array of a scalar of some kind that is the same on all devices.

    Args:
      given: a tensor, an array or a number.
      kind: its dtype, or a kind of dtypes.
      what: its name in the message.
      rule: the rule of the message.
      hints: the hints for a tensor and for a raw array.
    """
    if isinstance(given, Tensor):
        t = as_slice(given)
        if t.dims or not jnp.issubdtype(t.dtype, kind):
            raise ProgramError(f"{what} is {describe(t)}", rule=rule, hint=hints[0])
        return materialize(t)._read()
    array = as_raw_array(given)
    axes = collectives.varying_axes(array)
    if array.shape or not jnp.issubdtype(array.dtype, kind) or axes:
        raise ProgramError(
            f"{what} is a raw {array.dtype} array of shape {array.shape}"
            + (f" that differs between devices along {', '.join(sorted(axes))}" if axes else ""),
            rule=rule,
            hint=hints[1],
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
    if _mapped_axes(first) | _mapped_axes(end):
        # Positions of an enclosing vmap have different bounds, on different devices.
        dtype = jnp.result_type(first, end)
        n, last = (slice_tensor(jnp.asarray(one, dtype), ()) for one in (first, end))
        return while_loop(lambda s: s[0] < last, lambda s: (s[0] + 1, body(*s)), (n, carry))[1]
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


def _mapped_axes(value: ArrayLike) -> frozenset[str]:
    """The axes of enclosing vmaps along which a value differs between devices."""
    vmap = active.context.vmap
    return collectives.varying_axes(jnp.asarray(value)) & vmap.axes if vmap.depth else frozenset()


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

    def continues(arrays: list[jax.Array]) -> tuple[jax.Array, Axes]:
        """The predicate, and the axes along which devices would run different numbers of steps.

        All of them must run the collectives of the body. The stages of a pipeline can't wait for each other.
        """
        assert condition is not None
        with ctx.frame():
            predicate = _predicate(condition(rebuild(arrays)), "while_loop")
        return predicate, () if ctx.pipeline.layers else tuple(sorted(_mapped_axes(predicate)))

    def go(arrays: list[jax.Array]) -> jax.Array:
        predicate, axes = continues(arrays)
        return collectives.all_reduce_max(predicate, axes) if axes else predicate

    def step_together(arrays: list[jax.Array]) -> list[jax.Array]:
        predicate, axes = continues(arrays)
        new = step(arrays)
        return [jnp.where(predicate, n, a) for n, a in zip(new, arrays, strict=True)] if axes else new

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

    body_of = step_together if condition is not None and ctx.vmap.depth else step
    return rebuild(run(go, body_of, [leaf_array(c) for c in leaves]))


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
    names = ("true_fn", "false_fn")
    selector, branches = _predicate(predicate, "cond"), (true_fn, false_fn)
    return _branch(selector, lambda p, fns, x: lax.cond(p, *fns, x), "cond", branches, names, operands)


@op(
    example=lambda op, x, start: op(start, [lambda x: x, lambda x: x * x, lambda x: x * 2.0], x),
    functions=True,
)
def switch(index: Tensor | ArrayLike, branches: Sequence[Callable[..., Result]], *operands: PyTree) -> Result:
    """`branches[index](*operands)`, like `jax.lax.switch`. Only that branch runs.

    Args:
      index: an integer scalar. As in JAX, one that is out of range selects the first or the last branch.
      branches: functions whose results have the same structure, dims and dtypes.
      operands: the arguments of the branches, pytrees of tensors.

    Returns:
      The result of the branch.

    >>> import weft as wf
    >>> x = wf.ones("a=2")
    >>> wf.switch(wf.tensor(1, ""), [lambda x: x, lambda x: x * 10, wf.exp], x)
    f32[a=2] [10., 10.]
    """
    if not isinstance(branches, Sequence) or not branches or not all(map(callable, branches)):
        raise ProgramError(
            f"the branches of switch are {branches!r}",
            rule="an index selects one of a list of functions, which is not empty",
            hint="wf.switch(index, [f, g, h], x)",
        )
    names = [f"branch {n}" for n in range(len(branches))]
    return _branch(_index(index), lax.switch, "switch", branches, names, operands)


def _branch(
    selector: jax.Array,
    run: Callable[..., list[jax.Array]],
    op_name: str,
    branches: Sequence[Callable[..., PyTree]],
    names: Sequence[str],
    operands: PyTree,
) -> PyTree:
    """Call one of several branches.

    Args:
      selector: the predicate or the index.
      run: `run(selector, branches, arrays)` calls JAX's op, which traces the branches in order.
      op_name, names: the names of the op and of its branches in messages.
      branches: functions of the operands.
      operands: a tuple of pytrees.
    """
    ctx = active.context
    leaves, tree = flatten(operands)
    specs = [LeafSpec.of(c) for c in leaves]
    results: list[Any] = []  # structure, specs and dtypes of the first branch's results
    axes = _mapped_axes(selector)  # devices along them take different branches

    def on_arrays(fn: Callable[..., PyTree], name: str) -> Callable[[list[jax.Array]], list[jax.Array]]:
        def call(arrays: list[jax.Array]) -> list[jax.Array]:
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
                        f"{names[0]} returns {format_treedef(first_tree)} and "
                        f"{name} {format_treedef(out_tree)}",
                        rule=f"all branches of {op_name} return the same tree structure (* is a leaf)",
                        hint="return the same structure from all",
                    )
                words = (f"a result of {name}", f"that of {names[0]} is")
                new = [match_spec(o, s, *words) for o, s in zip(out, first_specs, strict=True)]
                for n, dtype in zip(new, dtypes, strict=True):
                    if n.dtype != dtype:
                        raise TensorTypeError(
                            f"{names[0]} returns {dtype} and {name} {n.dtype}",
                            rule="all branches return the same dtypes",
                            hint="convert with .astype(...)",
                        )
                return [leaf_array(n) for n in new]

        return call

    traced = [on_arrays(fn, name) for fn, name in zip(branches, names, strict=True)]
    out = run(selector, traced, [leaf_array(leaf) for leaf in leaves])
    out_tree, out_specs, _ = results[0]
    return jax.tree.unflatten(out_tree, [rebuild_leaf(s, a) for s, a in zip(out_specs, out, strict=True)])
