"""Gradients of functions of named tensors: a function in, its derivatives out. JAX differentiates.

In JAX's types, a replicated array is cast to *varying* (`pvary`) where it meets one that varies over an
axis, and the transpose of that cast is a psum. A gradient taken with respect to the replicated array is
therefore all-reduced inside the backward pass, once per micro-batch. Inside a program we differentiate with
respect to *every varying variant* of an argument instead: the casts happen before the differentiated
function, so their psums are not part of its transpose. The cotangent of a variant comes out as a pending
sum, which is resolved once, after all micro-batches, or reduce-scattered into the optimizer's layout.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, Literal, overload

import jax
import jax.numpy as jnp

from ..core import collectives, context
from ..core.boundary import LeafSpec, leaf_array, rebuild_leaf
from ..core.call_errors import check_function, checks_arguments
from ..core.context import Context, active
from ..core.describe import describe, reports_call
from ..core.errors import DimError, ProgramError, TensorTypeError
from ..core.jax_compat import pull_back_wanted
from ..core.labels import GRADIENT, OpLabel
from ..core.layers import path_name
from ..core.layout import axes_of
from ..core.operands import as_slice, slice_tensor
from ..core.padding import fill_padding
from ..core.placement import place, with_role
from ..core.registry import register
from ..core.reshard import materialize
from ..core.signature import NUMBER_TYPES
from ..core.tensor import Tensor, check_has_values, is_tensor
from ..core.types import Out, Params, PyTree, Result, Tree, cast_like
from ..ops.einsum import einsum
from ..ops.elementwise import add
from ..ops.shape import transpose

Leaf = Tensor | jax.Array
AxisSet = frozenset[str]
Variant = tuple[AxisSet, jax.Array]
# Takes a flat list of leaves, because variants and gradients are made leaf by leaf.
LeafFunction = Callable[[list[Leaf]], tuple[PyTree, PyTree]]

_NO_AXES: AxisSet = frozenset()


@overload
def grad(f: Callable[Concatenate[Tree, Params], PyTree]) -> Callable[Concatenate[Tree, Params], Tree]: ...
@overload
def grad(
    f: Callable[Params, PyTree], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[Params, PyTree]: ...
@register(example=lambda op, x: op(lambda x: einsum(x, x, out=[]))(x), mixes_rows=True)
@checks_arguments
def grad(
    f: Callable[..., PyTree], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., PyTree]:
    """The gradient of a scalar function with respect to some arguments, as `jax.grad`.

    >>> import weft as wf
    >>> wf.grad(lambda x: wf.sum(x * x))(wf.arange(wf.Dim("a", 3), float))
    f32[a=3] [0., 2., 4.]
    """
    check_function(f, "grad")
    value_and_gradient = value_and_grad(f, argnums, has_aux)

    @functools.wraps(f)
    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        value, grads = value_and_gradient(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return run


@overload
def value_and_grad(
    f: Callable[Concatenate[Tree, Params], Result],
) -> Callable[Concatenate[Tree, Params], tuple[Result, Tree]]: ...
@overload
def value_and_grad(
    f: Callable[Params, Result], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[Params, tuple[Result, PyTree]]: ...
@register(example=lambda op, x: op(lambda x: einsum(x, x, out=[]))(x), mixes_rows=True)
@checks_arguments
def value_and_grad(
    f: Callable[..., PyTree], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., PyTree]:
    """The value and the gradient of a scalar function, as `jax.value_and_grad`.

    Args:
      f: takes pytrees of tensors and returns a tensor without dims; with `has_aux`, a pair of that tensor
        and anything else.
      argnums: the positions of the arguments to differentiate with respect to.
      has_aux: whether `f` returns a pair.

    >>> import weft as wf
    >>> wf.value_and_grad(lambda x: wf.sum(x * x))(wf.arange(wf.Dim("a", 3), float))
    (f32[] 5., f32[a=3] [0., 2., 4.])
    """
    check_function(f, "value_and_grad")
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(f)
    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        check_argnums(positions, args)
        numbers = [n % len(args) for n in positions]
        chosen = [args[n] for n in numbers]
        leaves, tree = jax.tree.flatten(chosen, is_leaf=is_tensor)
        _check_inputs(leaves)

        def call(leaves: list[Leaf]) -> tuple[Tensor, PyTree]:
            new = dict(zip(numbers, jax.tree.unflatten(tree, leaves), strict=True))
            out = f(*[new.get(n, a) for n, a in enumerate(args)], **kwargs)
            value, aux = _check_pair(out) if has_aux else (out, None)
            return _check_scalar(value), aux

        ctx = active.context
        if ctx is None:
            value, grads, aux = _eager(call, leaves)
        else:
            value, grads, aux = _staged(ctx, call, leaves)
            paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(chosen, is_leaf=is_tensor)]
            for path, gradient in zip(paths, grads, strict=True):
                # A path starts with the position of the argument and ends with the name of the parameter.
                label_gradient(gradient, layer=path_name(path[1:-1]))
        chosen = jax.tree.unflatten(tree, grads)
        value = (value, aux) if has_aux else value
        return value, chosen[0] if isinstance(argnums, int) else tuple(chosen)

    return reports_call(run, "grad of ")


def check_argnums(positions: Sequence[int], args: Sequence[PyTree]) -> None:
    """Raise an error if there is no argument at some of these positions."""
    wrong = [n for n in positions if not isinstance(n, int) or not -len(args) <= n < len(args)]
    if wrong:
        raise ProgramError(
            f"argnums= selects argument {', '.join(map(str, wrong))}, but {len(args)} "
            f"argument{'s were' if len(args) != 1 else ' was'} passed by position",
            rule="argnums= are positions of arguments, counted from 0",
            hint="pass the arguments to differentiate by position, and check argnums=",
        )


def _check_pair(out: PyTree) -> tuple[PyTree, PyTree]:
    if not isinstance(out, tuple | list) or len(out) != 2:
        shown = describe(out) if isinstance(out, Tensor) else repr(out)
        raise ProgramError(
            f"with has_aux=True the function to differentiate returned {shown}",
            rule="with has_aux=True it returns a pair: the loss, and anything else",
            hint="return loss, aux; or drop has_aux=True",
        )
    first, second = out
    return first, second


def _check_inputs(leaves: list[Leaf]) -> None:
    for leaf in leaves:
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.asarray(leaf).dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            shown = describe(leaf) if isinstance(leaf, Tensor) else repr(leaf)
            raise TensorTypeError(
                f"cannot differentiate with respect to {shown}",
                rule="gradients exist for floating-point tensors",
                hint="select other arguments with argnums=, or convert with x.astype(jnp.float32)",
            )


def _check_scalar(value: PyTree) -> Tensor:
    if not isinstance(value, Tensor) or value.dims or not jnp.issubdtype(value.dtype, jnp.floating):
        shown = describe(value) if isinstance(value, Tensor) else repr(value)
        is_complex = isinstance(value, Tensor) and jnp.issubdtype(value.dtype, jnp.complexfloating)
        raise ProgramError(
            f"the function to differentiate returned {shown}",
            rule="grad needs a floating-point scalar",
            hint="wf.abs(loss) and wf.real(loss) are real"
            if is_complex
            else "reduce it: wf.mean(loss); to return more, use has_aux=True",
        )
    return value


def _eager(call: LeafFunction, leaves: list[Leaf]) -> tuple[PyTree, list[Leaf], PyTree]:
    check_has_values(*leaves)

    def arrays(leaves: list[Leaf]) -> tuple[jax.Array, PyTree]:
        value, aux = call(leaves)
        return value.array, (value, aux)

    with _reverse_mode_errors():
        (_, (value, aux)), grads = jax.value_and_grad(arrays, has_aux=True)(leaves)
    return value, _cast_derivatives(grads, leaves), aux


def _cast_derivatives(derivatives: PyTree, like: PyTree) -> PyTree:
    """Derivatives with the dtypes and weak types of their primals; those of integers stay float0."""

    def one(derivative: Leaf, x: Leaf) -> Leaf:
        return derivative if derivative.dtype == jax.dtypes.float0 else cast_like(derivative, jax.typeof(x))

    return jax.tree.map(one, derivatives, like)


@contextlib.contextmanager
def _reverse_mode_errors() -> Iterator[None]:
    """Replace JAX's error for a loop that has no reverse-mode derivative."""
    try:
        yield
    except ValueError as error:
        # JAX raises a bare ValueError here: its text is the only thing that identifies it.
        if not str(error).startswith("Reverse-mode differentiation does not work for lax.while_loop"):
            raise
        raise ProgramError(
            "a while_loop, or a fori_loop whose bounds are not Python numbers, can't be differentiated "
            "in reverse mode",
            rule="the backward pass needs the carry of every step, and the number of steps is not known in "
            "advance",
            hint="use wf.scan, or wf.fori_loop with Python numbers as bounds; or wf.jvp; or give the loop a "
            "derivative with wf.custom_vjp",
        ) from None


def _staged(ctx: Context, call: LeafFunction, leaves: list[Leaf]) -> tuple[PyTree, list[Leaf], PyTree]:
    value, pull_back, aux = _vjp_of_variants(ctx, call, leaves)
    return value, _with_zeros(pull_back(slice_tensor(jnp.ones_like(value._read()), ())), leaves), aux


def _with_zeros(grads: list[Leaf | None], leaves: list[Leaf]) -> list[Leaf]:
    """The gradients, with zeros for the arguments that were not used."""
    return [_zeros(leaf) if g is None else g for g, leaf in zip(grads, leaves, strict=True)]


def _zeros(leaf: Leaf) -> Tensor:
    t = as_slice(leaf)
    # Not zeros_like: of a pending sum that would vary too, and these zeros are resolved.
    zeros = cast_like(jnp.zeros(t._data.shape, t.dtype), t._data)
    zeros = slice_tensor(zeros, t.dims, t.splits)
    zeros.role = t.role
    return zeros


def _vjp_of_variants(
    ctx: Context, call: LeafFunction, leaves: list[Leaf]
) -> tuple[PyTree, Callable[[PyTree], list[Leaf | None]], PyTree]:
    """The value of a function of leaves, its pullback, and its auxiliary output.

    The pullback maps a cotangent to one gradient per leaf. A gradient may be pending; that of a tensor the
    function did not use is None.
    """
    slices = [enter_leaf(leaf, keep_varying=True) for leaf in leaves]
    # Every varying variant is an input of the vjp. Which one an op requests is decided during the trace, by
    # the operands it meets, so all of them have to exist beforehand: 2^k variants for k mesh axes over which
    # the argument does not vary yet. They cost nothing: `pvary` moves no data, and unused ones are dead code.
    variants = [_varying_variants(ctx, t) if _is_float(t) else [(_NO_AXES, leaf_array(t))] for t in slices]
    # (leaf, axes) of each variant that the function read. The others have no cotangents: zeros would make the
    # gradient pending over axes that it has nothing to sum over, a wasted all-reduce.
    used: set[tuple[int, AxisSet]] = set()
    traced: dict[str, Any] = {}

    def arrays(inputs: list[list[jax.Array]]) -> tuple[list[jax.Array], PyTree]:
        with context.entered(ctx), ctx.frame() as frame:
            inner: list[Leaf] = []
            for n, (t, own, given) in enumerate(zip(slices, variants, inputs, strict=True)):
                base = given[0]
                if not isinstance(t, Tensor):
                    inner.append(base)
                    continue
                # Seed the frame's cache: a request for "base, varying over these axes" now finds an input of
                # the vjp instead of emitting a cast inside it. The cache is keyed by id, and
                # `register` keeps the arrays alive so that their ids are not reused.
                ctx.register(base)
                for (axes, _), array in zip(own[1:], given[1:], strict=True):
                    ctx.variant(base, ("vary", axes), collective=False).store(array)
                    ctx.register(array)
                argument = Tensor(base, t.dims, role=t.role, placement=t.placement, splits=t.splits)
                # `memo_hits` has the requests for a cast only. An op that needs no cast reads the argument's
                # own array, and this read is the only sign that it uses the variant without further axes.
                argument._watch = used, (n, _NO_AXES)
                inner.append(argument)
            value, aux = call(inner)
            found, traced["tree"] = jax.tree.flatten(value, is_leaf=is_tensor)
            # Pending sums are resolved inside the vjp: a pending value is a varying array, so its cotangent
            # would have to vary too, and the cotangents that we are given are resolved.
            found = [materialize_leaf(v) for v in found]
            traced["specs"] = [LeafSpec.of(v) for v in found]
            # JAX flattens `aux` after this frame has closed, when a pending sum can't be resolved any more.
            aux = jax.tree.map(materialize_leaf, aux, is_leaf=is_tensor)
            for n, (own, given) in enumerate(zip(variants, inputs, strict=True)):
                used.update((n, axes) for axes, _ in own if (id(given[0]), ("vary", axes)) in frame.memo_hits)
            return [leaf_array(v) for v in found], aux

    inputs = [[array for _, array in own] for own in variants]
    pull_arrays: Any
    values, pull_arrays, aux = jax.vjp(arrays, inputs, has_aux=True)
    value = jax.tree.unflatten(traced["tree"], list(map(rebuild_leaf, traced["specs"], values)))

    # JAX would return zeros for the variants that were not read.
    wanted = [
        [(n, axes) in used or not _is_float(t) for axes, _ in own]
        for n, (t, own) in enumerate(zip(slices, variants, strict=True))
    ]

    def pull_back(cotangent: PyTree) -> list[Leaf | None]:
        given = jax.tree.leaves(match_primals(cotangent, value), is_leaf=is_tensor)
        with _reverse_mode_errors():
            (cotangents,) = pull_back_wanted(pull_arrays, wanted, list(map(leaf_array, given)))
        grads = []
        for n, (t, own, found) in enumerate(zip(slices, variants, cotangents, strict=True)):
            parts = [(axes, g) for (axes, _), g in zip(own, found, strict=True) if (n, axes) in used]
            grads.append(_gradient(t, parts, found))
        return grads

    return value, pull_back, aux


def _gradient(t: Leaf, parts: list[Variant], cotangents: list[jax.Array]) -> Leaf | None:
    """The sum of the cotangents of a leaf's variants; each is pending over the axes of its variant."""
    if not isinstance(t, Tensor):
        return cotangents[0]
    # JAX's cotangent of integers has the dtype float0, which can't be cast or added.
    if not _is_float(t):
        return rebuild_leaf(LeafSpec.of(t), cotangents[0])
    assert t.splits is not None
    # A cast that a loop lifted out of its body is outside this vjp, so its psum is not part of the cotangent.
    lifted = _lifted_axes(t)
    # A cotangent is zero in padding, but it may have been multiplied by an infinite derivative: 0 · ∞ = NaN.
    filled = [(axes | lifted, fill_padding(array, t.dims, t.splits)) for axes, array in parts]
    summands = [slice_tensor(cast_like(array, t._data), t.dims, t.splits, axes) for axes, array in filled]
    if not summands:
        return None
    total = label_gradient(functools.reduce(add, summands))
    total.role = t.role
    return total


def label_gradient(gradient: PyTree, layer: str = "") -> PyTree:
    """Label a gradient for plans: a pending sum is reported under the op and the layer that it comes from."""
    if isinstance(gradient, Tensor):
        gradient.origin = OpLabel(GRADIENT, [tuple(d.name for d in gradient.dims)], layer=layer)
    return gradient


def _lifted_axes(t: Tensor) -> AxisSet:
    """The axes over which an enclosing loop made this tensor varying: its gradient is pending over them.

    A loop lifts such a cast out of its body. The tensor then varies over more axes than split its dims.
    """
    return collectives.varying_axes(t._data) - axes_of(t.splits or ()) - active.context.vmap.axes


def _is_float(t: Leaf) -> bool:
    return isinstance(t, Tensor) and bool(jnp.issubdtype(t.dtype, jnp.inexact))


def materialize_leaf(leaf: PyTree) -> PyTree:
    """A tensor in the layout's placement, its pending sum resolved; other leaves unchanged."""
    return materialize(as_slice(leaf)) if isinstance(leaf, Tensor) else leaf


def _varying_variants(ctx: Context, t: Tensor) -> list[Variant]:
    """An argument as it is, first, and made varying over every set of further axes.

    A variant has these further axes and its array.
    """
    have = collectives.varying_axes(t._read())
    missing = [a for a, n in ctx.placement.mesh.axes if n > 1 and a not in have]
    sets = [
        frozenset(some)
        for count in range(len(missing) + 1)
        for some in itertools.combinations(missing, count)
    ]
    return [(axes, collectives.pvary(t._read(), axes)) for axes in sets]


@register(example=lambda op, x, p: op(lambda x: x * x, (x,), (p,)))
@reports_call
def jvp(
    f: Callable[..., Result], primals: Sequence[PyTree], tangents: Sequence[PyTree]
) -> tuple[Result, Result]:
    """The value of a function and its directional derivative, as `jax.jvp`.

    >>> import weft as wf
    >>> x = wf.arange(wf.Dim("a", 3), float)
    >>> wf.jvp(lambda x: x * x, (x,), (wf.ones("a=3"),))[1]
    f32[a=3] [0., 2., 4.]
    """
    if not all(isinstance(given, list | tuple) for given in (primals, tangents)):
        raise ProgramError(
            "the primals and the tangents of jvp are not both tuples",
            rule="jvp takes a tuple of arguments, and a tuple with a tangent for each",
            hint="wf.jvp(f, (x,), (dx,))",
        )
    if len(primals) != len(tangents):
        raise ProgramError(
            f"there are {len(primals)} primals and {len(tangents)} tangents",
            rule="each primal has one tangent",
            hint="wf.jvp(f, (x, y), (dx, dy)); use wf.zeros_like for a primal that does not change",
        )
    primals = tuple(jax.tree.map(enter_leaf, p, is_leaf=is_tensor) for p in primals)
    tangents = tuple(
        jax.tree.map(enter_leaf, match_primals(t, p), is_leaf=is_tensor)
        for t, p in zip(tangents, primals, strict=True)
    )
    value, tangent = jax.jvp(_in_frame(f), primals, tangents)
    return value, _cast_derivatives(tangent, value)


@overload
def vjp(
    f: Callable[..., Result], *primals: PyTree, has_aux: Literal[False] = False, zeros: bool = True
) -> tuple[Result, Callable[[Result], tuple[PyTree, ...]]]: ...
@overload
def vjp(
    f: Callable[..., tuple[Result, Out]], *primals: PyTree, has_aux: Literal[True], zeros: bool = True
) -> tuple[Result, Callable[[Result], tuple[PyTree, ...]], Out]: ...
@register(example=lambda op, x, p: op(lambda x: x * x, x)[1](p))
@reports_call
def vjp(f: Callable[..., PyTree], *primals: PyTree, has_aux: bool = False, zeros: bool = True) -> PyTree:
    """The value of a function and its pullback, as `jax.vjp`.

    Args:
      f: takes pytrees of tensors and returns one; with `has_aux`, a pair of it and anything else.
      primals: the arguments at which to differentiate.
      has_aux: whether `f` returns a pair.
      zeros: whether a tensor that `f` does not use gets a cotangent of zeros; if not, it may be None.

    >>> import weft as wf
    >>> square, pull_back = wf.vjp(lambda x: x * x, wf.arange(wf.Dim("a", 3), float))
    >>> pull_back(wf.ones("a=3"))
    (f32[a=3] [0., 2., 4.],)
    """
    ctx = active.context
    if ctx is None:
        out, pull, *aux = jax.vjp(f, *primals, has_aux=True) if has_aux else jax.vjp(f, *primals)

        def pull_back_eagerly(cotangent: PyTree) -> PyTree:
            with _reverse_mode_errors():
                return _cast_derivatives(pull(match_primals(cotangent, out)), primals)

        return out, reports_call(pull_back_eagerly, "vjp of "), *aux
    leaves, tree = jax.tree.flatten(primals, is_leaf=is_tensor)

    def call(leaves: list[Leaf]) -> tuple[PyTree, PyTree]:
        out = f(*jax.tree.unflatten(tree, leaves))
        return _check_pair(out) if has_aux else (out, None)

    out, pull_leaves, aux = _vjp_of_variants(ctx, call, leaves)

    def pull_back(cotangent: PyTree) -> PyTree:
        grads = pull_leaves(cotangent)
        return jax.tree.unflatten(tree, _with_zeros(grads, leaves) if zeros else grads)

    return (out, pull_back, aux) if has_aux else (out, pull_back)


def enter_leaf(leaf: PyTree, keep_varying: bool = False) -> PyTree:
    """Inside a program, a tensor as a materialized slice; other leaves, and all of them outside, unchanged.

    Args:
      keep_varying: whether a tensor that an enclosing loop made varying may stay so. Materializing it would
        make it replicated again, and the psum of that cast would move into the loop.
    """
    ctx = active.context
    if ctx is None or not isinstance(leaf, Tensor):
        return leaf
    leaf = as_slice(leaf)
    is_materialized = leaf.splits == ctx.splits(leaf.dims, leaf.role) and not leaf.pending
    leaf = leaf if keep_varying and is_materialized else materialize(leaf)
    # Inside a vmap over a split dim, each position along the dim has a derivative of its own. The argument
    # has to vary over the dim's axes, or JAX would sum the derivatives of different positions.
    if ctx.vmap.axes <= collectives.varying_axes(leaf._data):
        return leaf
    spec = LeafSpec.of(leaf)
    assert spec is not None
    return spec.rebuild(collectives.pvary(leaf._read(), ctx.vmap.axes))


def _in_frame(f: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """The function in a frame of its own, for the JAX trace that calls it."""
    ctx = active.context
    if ctx is None:
        return f

    @functools.wraps(f)
    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        with context.entered(ctx), ctx.frame():
            return jax.tree.map(materialize_leaf, f(*args, **kwargs), is_leaf=is_tensor)

    return run


def match_primals(tree: PyTree, primals: PyTree) -> PyTree:
    """Tangents or cotangents with the dim order, roles and placements of their primals.

    These are static parts of a Tensor's tree: if they differ, JAX rejects the trees as different structures.
    """

    def one(like: Leaf, t: Leaf) -> Leaf:
        if not isinstance(t, Tensor) or not isinstance(like, Tensor):
            if isinstance(like, Tensor) and isinstance(t, NUMBER_TYPES):
                raise TensorTypeError(
                    f"the number {t} was given as the derivative of {describe(like)}",
                    rule="tangents and cotangents are tensors with the dims of their primals",
                    hint="pass a tensor: wf.ones_like(x)",
                )
            return t
        if set(t.dims) != set(like.dims):
            raise DimError(
                f"{describe(t)} was given as the derivative of {describe(like)}",
                rule="tangents and cotangents have the dims of their primals",
                hint="check the order of the arguments",
            ).located()
        ordered = t if t.dims == like.dims else transpose(t, like.dims)
        if like.is_slice:
            return materialize(as_slice(ordered), like.role)
        return place(with_role(ordered, like.role), like.mesh, like.layout)

    return jax.tree.map(one, primals, tree, is_leaf=is_tensor)
