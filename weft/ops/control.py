"""Control flow: JAX's own scan, while and cond over named tensors; one traced body each.

A scanned body is traced once, and what it shares between steps is brought into the form it needs before
the loop: parameters are made varying outside (their gradients are summed once, not once a step), and sums
that a carry accumulates stay pending until after the loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import collectives, context
from ..context import Context, Frame, CarryForm
from ..dims import Dim, check_distinct, pick_one, show
from ..errors import DimError, ProgramError, TensorTypeError, nearest
from ..forms import Overcast, as_slice, fill_padding, in_form, settle, slice_tensor, valid
from ..layout import Splits
from ..spmd import op
from ..tensor import Tensor, describe, is_tensor


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves (tensors as slices, whatever else as it is) and the structure around them."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_tensor)
    return [as_slice(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure


@dataclass(frozen=True)
class Form:
    """What a leaf is apart from its array; `None` for a raw array."""

    dims: tuple[Dim, ...]
    role: str
    splits: Splits
    pending: frozenset[str]

    @classmethod
    def of(cls, leaf: Any) -> Form | None:
        if not isinstance(leaf, Tensor):
            return None
        assert leaf.splits is not None
        return cls(leaf.dims, leaf.role, leaf.splits, leaf.pending)

    def around(self, array: Any) -> Tensor:
        """A tensor in this form."""
        program = context.require()
        program.know(array)
        return Tensor(
            array,
            self.dims,
            role=self.role,
            mesh=program.mesh,
            layout=program.layout,
            splits=self.splits,
            pending=self.pending,
        )


def around(form: Form | None, array: Any) -> Any:
    """A leaf from its form and its array."""
    return array if form is None else form.around(array)


def array_of(leaf: Any) -> Any:
    """A leaf's array, in the form it has."""
    return leaf._array if isinstance(leaf, Tensor) else jnp.asarray(leaf)


def exact(leaf: Any) -> Any:
    """A leaf whose array varies over no more axes than its form says."""
    if isinstance(leaf, Tensor):
        assert leaf.splits is not None
        said = {axis for axes in leaf.splits for axis in axes} | leaf.pending
        if collectives.varying(leaf._held) - said - context.require().mapped:
            raise Overcast
    return leaf


def _shape_of(tree: Any) -> str:
    """A tree's structure for messages: `(*, {'a': *})`."""
    return str(tree).removeprefix("PyTreeDef(").removesuffix(")")


def _like(leaf: Any, form: Form | None, what: str, other: str = "was") -> Any:
    """A loop's or branch's result in the form it has to have; an error if it is another thing."""
    if form is None or not isinstance(leaf, Tensor):
        if form is not None and not form.dims and not hasattr(leaf, "shape"):
            return _like(slice_tensor(jnp.asarray(leaf), ()), form, what, other)
        if (form is None) != (not isinstance(leaf, Tensor)):
            raise ProgramError(
                f"{what} is {describe(leaf) if isinstance(leaf, Tensor) else 'a raw array'}, and "
                f"{other} {'a raw array' if form is None else f'a tensor [{show(form.dims)}]'}",
                rule="a carry, and the results of both branches, keep their kind and dims",
                hint="return the same kind of thing",
            )
        return leaf
    if set(leaf.dims) != set(form.dims):
        raise DimError(
            f"{what} has the dims [{show(leaf.dims)}], and {other} [{show(form.dims)}]",
            rule="a carry, and the results of both branches, keep their dims and sizes",
            hint="check what the function returns; wf.broadcast_to adds a dim",
        )
    if leaf.dims != form.dims:
        from .shape import transpose

        leaf = transpose(leaf, form.dims)
    if form.pending:
        return _as_pending(leaf, form)
    return settle(leaf, form.role)


def _as_pending(leaf: Tensor, form: Form) -> Tensor:
    """A tensor as a pending sum over the axes of a form: resolved values count on one device only."""
    if leaf.pending == form.pending and leaf.splits == form.splits:
        return form.around(exact(leaf)._array)
    array = collectives.vary(settle(leaf, form.role)._array, form.pending)
    first = jnp.bool_(True)
    for axis in sorted(form.pending):
        first = first & (collectives.index((axis,)) == 0)
    return form.around(jnp.where(first, array, jnp.zeros((), array.dtype)))


def _same_dtype(new: Any, old: Any, what: str) -> Any:
    if new.dtype != old.dtype:
        raise TensorTypeError(
            f"{what} becomes {new.dtype} and was {old.dtype}",
            rule="a carry keeps its dtype",
            hint="convert it in the function: carry.astype(...), or begin with the other dtype",
        )
    return new


def _strong(leaf: Any) -> Any:
    """Without JAX's weak type, which a carry could not keep."""
    if isinstance(leaf, Tensor):
        form = Form.of(leaf)
        assert form is not None
        return form.around(lax.convert_element_type(leaf._array, leaf.dtype))
    array = jnp.asarray(leaf)
    return lax.convert_element_type(array, array.dtype) if not _is_key(array) else array


def _is_key(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


# scan


@op(cached=False)
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
    carries, carry_tree = _flatten(carry)
    items, items_tree = _flatten(xs)
    dim = _scanned_dim(items, dim)
    carries = [settle(c) if isinstance(c, Tensor) else slice_or_array(c) for c in carries]
    carries = [_strong(c) for c in carries]
    attempt = _Scan(f, dim, carry_tree, items_tree, reverse, unroll)
    cast_early, pending = True, dict[int, frozenset[str]]()
    while True:
        begun = [
            _as_pending(c, Form(c.dims, c.role, c.splits, pending[n])) if pending.get(n) else c
            for n, c in enumerate(carries)
        ]
        try:
            return attempt.run(begun, items, cast_early, fixed=set(pending))
        except Overcast:
            if not cast_early:
                raise
            cast_early = False
        except CarryForm as better:
            if better.frame is not attempt.frame:
                raise
            pending[better.leaf] = better.axes


def slice_or_array(leaf: Any) -> Any:
    """Python numbers among the carries become tensors; raw arrays stay."""
    return as_slice(leaf) if isinstance(leaf, int | float | complex) else leaf


def _scanned_dim(items: list[Any], dim: Any) -> Dim:
    tensors = [t for t in items if isinstance(t, Tensor)]
    if not tensors:
        if not isinstance(dim, Dim):
            raise DimError(
                f"the size of dim {dim} is not known: no tensor is scanned",
                rule="without tensors to scan, scan needs a Dim",
                hint=f'wf.Dim("{dim}", 10)',
            )
        return dim
    found = {pick_one(t.dims, dim) for t in tensors}
    if len(found) > 1:
        raise DimError(
            f"the scanned tensors have different sizes of {dim}: {show(sorted(found, key=repr))}",
            rule="all scanned tensors have the dim in one size",
            hint="slice the longer ones",
        )
    return found.pop()


@dataclass
class _Scan:
    f: Any
    dim: Dim
    carry_tree: Any
    items_tree: Any
    reverse: bool
    unroll: int
    frame: Frame | None = None

    def run(
        self, carries: list[Any], items: list[Any], cast_early: bool, fixed: set[int]
    ) -> tuple[Any, Any]:
        """One attempt; `fixed` are the carries that were found to be better pending, or not."""
        program = context.require()
        carry_forms = [Form.of(c) for c in carries]
        axes = _carry_axes(carries) if cast_early else frozenset()
        scanned = [self._without_dim(x, axes) for x in items]
        item_forms = [form for form, _ in scanned]
        kept: dict[str, Any] = {}

        def body(carry: list[Any], item: list[Any]) -> tuple[list[Any], list[Any]]:
            with program.frame() as frame:
                self.frame = frame
                inner = [around(f, a) for f, a in zip(carry_forms, carry, strict=True)]
                for n, t in enumerate(inner):
                    # A carry that is found pending too late is fixed as resolved, and that's that.
                    if isinstance(t, Tensor) and (n not in fixed or t.pending):
                        frame.carries[id(t._held)] = n
                        t._watch = functools.partial(frame.consumed.add, n)
                given = [around(f, a) for f, a in zip(item_forms, item, strict=True)]
                out = self.f(
                    jax.tree.unflatten(self.carry_tree, inner),
                    jax.tree.unflatten(self.items_tree, given),
                )
                return self._results(out, carry_forms, carry, kept)

        last, stacked = lax.scan(
            body,
            [array_of(c) for c in carries],
            [array for _, array in scanned],
            length=self.dim.size,
            reverse=self.reverse,
            unroll=self.unroll,
        )
        carry = [around(f, a) for f, a in zip(carry_forms, last, strict=True)]
        ys = [self._with_dim(f, a) for f, a in zip(kept["forms"], stacked, strict=True)]
        return jax.tree.unflatten(self.carry_tree, carry), jax.tree.unflatten(kept["tree"], ys)

    def _results(self, out: Any, forms: list[Any], before: list[Any], kept: dict[str, Any]) -> Any:
        if not isinstance(out, tuple) or len(out) != 2:
            raise ProgramError(
                f"the function of scan returned a {type(out).__name__}",
                rule="it returns a pair: the new carry, and what to keep of this step (or None)",
                hint="return carry, None; or return carry, y to keep y",
            )
        carries, tree = _flatten(out[0])
        if tree != self.carry_tree:
            raise ProgramError(
                f"the carry becomes {_shape_of(tree)} and was {_shape_of(self.carry_tree)}",
                rule="the function of scan returns a carry with the same structure of tensors (*)",
                hint="return the same structure",
            )
        new = [_like(c, f, "a carry of scan") for c, f in zip(carries, forms, strict=True)]
        arrays = [
            _same_dtype(array_of(c), b, "a carry of scan") for c, b in zip(new, before, strict=True)
        ]
        leaves, kept["tree"] = _flatten(out[1])
        leaves = [exact(slice_or_array(leaf)) for leaf in leaves]
        kept["forms"] = [Form.of(leaf) for leaf in leaves]
        return arrays, [array_of(leaf) for leaf in leaves]

    def _without_dim(self, x: Any, axes: frozenset[str]) -> tuple[Form | None, Any]:
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
        array = jnp.moveaxis(in_form(x, splits, early), place, 0)
        dims = x.dims[:place] + x.dims[place + 1 :]
        return Form(dims, x.role, splits[:place] + splits[place + 1 :], frozenset()), array

    def _with_dim(self, form: Form | None, array: Any) -> Any:
        if form is None:
            return array
        dims = (self.dim, *form.dims)
        check_distinct(dims)
        return slice_tensor(array, dims, ((), *form.splits), form.pending)


def _carry_axes(carries: list[Any]) -> frozenset[str]:
    """The axes over which the values that are handed on vary."""
    return frozenset(
        axis
        for c in carries
        if isinstance(c, Tensor) and jnp.issubdtype(c.dtype, jnp.inexact)
        for axes in c.splits or ()
        for axis in axes
    )


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
        return settle(p)._array
    array = jnp.asarray(p)
    axes = collectives.varying(array)
    if array.shape or array.dtype != jnp.bool_ or axes:
        raise ProgramError(
            f"the predicate of {what} is a raw {array.dtype} array of shape {array.shape}"
            + (f" that differs between devices along {', '.join(sorted(axes))}" if axes else ""),
            rule="a predicate is one truth value, the same on all devices",
            hint="make it of tensors: wf.any(x) or wf.all(x)",
        )
    return array


@op(cached=False)
def while_loop(condition: Callable[[Any], Any], body: Callable[[Any], Any], carry: Any) -> Any:
    """`carry = body(carry)` while `condition(carry)`; has no reverse-mode derivative, as in JAX.

    >>> import weft as wf
    >>> wf.while_loop(lambda n: n < 10, lambda n: n * 2, wf.tensor(1, ()))
    i32[] 16
    """
    return _loop(carry, lambda run, arrays: lax.while_loop(run["go"], run["step"], arrays), condition, body)


@op(cached=False)
def fori_loop(low: Any, high: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`carry = body(n, carry)` for n from low up to, not including, high.

    >>> import weft as wf
    >>> wf.fori_loop(0, 4, lambda n, total: total + n, wf.tensor(0, ()))
    i32[] 6
    """
    low, high = (settle(as_slice(n))._array if isinstance(n, Tensor) else n for n in (low, high))
    return _loop(
        carry,
        lambda run, arrays: lax.fori_loop(low, high, lambda n, c: run["step"](c, n), arrays),
        None,
        lambda carry, n: body(slice_tensor(n, ()), carry),
    )


def _loop(carry: Any, start: Any, condition: Any, body: Any) -> Any:
    program = context.require()
    leaves, tree = _flatten(carry)
    leaves = [settle(c) if isinstance(c, Tensor) else slice_or_array(c) for c in leaves]
    leaves = [_strong(c) for c in leaves]
    forms = [Form.of(c) for c in leaves]

    def rebuilt(arrays: list[Any]) -> Any:
        return jax.tree.unflatten(tree, [around(f, a) for f, a in zip(forms, arrays, strict=True)])

    def go(arrays: list[Any]) -> Any:
        with program.frame():
            return _predicate(condition(rebuilt(arrays)), "while_loop")

    def step(arrays: list[Any], *more: Any) -> list[Any]:
        with program.frame():
            out, out_tree = _flatten(body(rebuilt(arrays), *more))
            if out_tree != tree:
                raise ProgramError(
                    f"the carry becomes {_shape_of(out_tree)} and was {_shape_of(tree)}",
                    rule="the body of a loop returns a carry with the same structure of tensors (*)",
                    hint="return the same structure",
                )
            new = [array_of(_like(c, f, "a carry")) for c, f in zip(out, forms, strict=True)]
            return [_same_dtype(n, a, "a carry") for n, a in zip(new, arrays, strict=True)]

    last = start({"go": go, "step": step}, [array_of(c) for c in leaves])
    return rebuilt(last)


@op(cached=False)
def cond(
    predicate: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], *operands: Any
) -> Any:
    """`true_fn(*operands)` or `false_fn(*operands)`, whichever the predicate says; one of them runs.

    >>> import weft as wf
    >>> x = wf.ones("a=2")
    >>> wf.cond(wf.sum(x) > 1, lambda x: x * 10, lambda x: x, x)
    f32[a=2] [10., 10.]
    """
    program = context.require()
    leaves, tree = _flatten(operands)
    forms = [Form.of(c) for c in leaves]
    results: list[Any] = []

    def branch(fn: Callable[..., Any]) -> Callable[[list[Any]], list[Any]]:
        def run(arrays: list[Any]) -> list[Any]:
            with program.frame(lifts_collectives=False):
                given = [around(f, a) for f, a in zip(forms, arrays, strict=True)]
                out, out_tree = _flatten(fn(*jax.tree.unflatten(tree, given)))
                out = [settle(o) if isinstance(o, Tensor) else o for o in map(slice_or_array, out)]
                if not results:
                    results.append((out_tree, [Form.of(o) for o in out], [o.dtype for o in out]))
                first_tree, first_forms, types = results[0]
                if out_tree != first_tree:
                    raise ProgramError(
                        f"true_fn returns {_shape_of(first_tree)} and false_fn {_shape_of(out_tree)}",
                        rule="both branches of cond return the same structure of tensors (*)",
                        hint="make them alike",
                    )
                words = ("a result of false_fn", "that of true_fn is")
                new = [_like(o, f, *words) for o, f in zip(out, first_forms, strict=True)]
                for n, dtype in zip(new, types, strict=True):
                    if n.dtype != dtype:
                        raise TensorTypeError(
                            f"true_fn returns {dtype} and false_fn {n.dtype}",
                            rule="both branches return the same dtypes",
                            hint="convert with .astype(...)",
                        )
                return [array_of(n) for n in new]

        return run

    arrays = [array_of(leaf) for leaf in leaves]
    out = lax.cond(_predicate(predicate, "cond"), branch(true_fn), branch(false_fn), arrays)
    out_tree, out_forms, _ = results[0]
    return jax.tree.unflatten(out_tree, [around(f, a) for f, a in zip(out_forms, out, strict=True)])


# vmap


def vmap(f: Callable[..., Any], dim: Any) -> Callable[..., Any]:
    """`f` at every place of a dim at once; inside, tensors don't have the dim, results get it in front.

    Tensors without the dim are the same at every place. A split dim stays split.

    >>> import weft as wf
    >>> x = wf.tensor([[1.0, 2.0], [3.0, 4.0]], "row=2 column=2")
    >>> wf.vmap(lambda r: wf.max(r), "row")(x)
    f32[row=2] [2., 4.]
    """

    @op(cached=False)
    def vmap(*args: Any) -> Any:
        return _vmap(f, dim, args)

    return vmap


def _vmap(f: Callable[..., Any], dim: Any, args: Any) -> Any:
    program = context.require()
    leaves, tree = _flatten(args)
    name = dim.name if isinstance(dim, Dim) else dim
    mapped = [
        n for n, t in enumerate(leaves) if isinstance(t, Tensor) and name in [d.name for d in t.dims]
    ]
    if not mapped:
        known = list(dict.fromkeys(d.name for t in leaves if is_tensor(t) for d in t.dims))
        raise DimError(
            f"no argument of the mapped function has a dim {name}{nearest(name, known)}",
            rule="vmap maps over a dim that at least one argument has",
            hint=f"the dims are {', '.join(known) or 'none'}",
        )
    found = _scanned_dim([leaves[n] for n in mapped], dim)
    (axes,) = program.splits((found,))
    forms, arrays = [], []
    for n in mapped:
        t = leaves[n]
        place = t.dims.index(found)
        array = jnp.moveaxis(in_form(t), place, 0)
        splits = program.splits(t.dims)
        forms.append(
            Form(
                t.dims[:place] + t.dims[place + 1 :],
                "value",
                splits[:place] + splits[place + 1 :],
                frozenset(),
            )
        )
        arrays.append(_sound_padding(array, found, axes))
    kept: dict[str, Any] = {}

    def inner(arrays: list[Any]) -> list[Any]:
        with program.frame(), _mapping(program, axes):
            given = list(leaves)
            for n, form, array in zip(mapped, forms, arrays, strict=True):
                given[n] = form.around(array)
            out, kept["tree"] = _flatten(f(*jax.tree.unflatten(tree, given)))
            out = [settle(o) if isinstance(o, Tensor) else o for o in map(slice_or_array, out)]
            kept["forms"] = [Form.of(o) for o in out]
            return [collectives.vary(array_of(o), axes) for o in out]

    stacked = jax.vmap(inner)(arrays)
    results = []
    for form, array in zip(kept["forms"], stacked, strict=True):
        if form is None:
            raise ProgramError(
                "the mapped function returned a raw array",
                rule="a mapped function returns tensors, so that the dim can be given back",
                hint="return the tensor, not its .array",
            )
        dims, splits = (found, *form.dims), (axes, *form.splits)
        check_distinct(dims)
        results.append(slice_tensor(fill_padding(array, dims, splits), dims, splits))
    return jax.tree.unflatten(kept["tree"], results)


def _sound_padding(array: Any, dim: Dim, axes: tuple[str, ...]) -> Any:
    """Padding places hold a copy of a true one, or ones: f(0) could be infinite."""
    mask = valid((dim,), (axes,))
    if mask is None:
        return array
    mask = mask.reshape([-1] + [1] * (array.ndim - 1))
    mask = collectives.vary(mask, collectives.varying(array))
    ones = jnp.ones((), array.dtype)
    stand_in = jnp.where(mask[:1], array[:1], ones)
    return jnp.where(mask, array, stand_in)


class _mapping:
    """Axes of a dim that an enclosing vmap hides."""

    def __init__(self, program: Context, axes: tuple[str, ...]):
        self.program, self.axes = program, axes

    def __enter__(self) -> None:
        self.before = self.program.mapped
        self.program.mapped = self.before | set(self.axes)
        self.program.vmaps += 1

    def __exit__(self, *_: Any) -> None:
        self.program.mapped = self.before
        self.program.vmaps -= 1


