"""Derivatives of functions of named tensors: JAX's own, with gradients that may stay pending.

JAX sums a cotangent over an axis as soon as it leaves the form that varies over it. Inside a program we
therefore differentiate with respect to *every varying form* of an argument: what the function asks of an
argument is then already an input, and its cotangent comes out as a pending sum, to be added up once, later,
over all micro-batches, or scattered into the optimizer's layout.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core import collectives, context
from ..core.boundary import LeafSpec, leaf_array, rebuild_leaf
from ..core.context import Context
from ..core.describe import describe, format_call, reports_call
from ..core.errors import DimError, ProgramError, TensorTypeError, nearest
from ..core.layout import axes_of
from ..core.operands import as_slice, slice_tensor
from ..core.padding import fill_padding
from ..core.placement import place, with_role
from ..core.reshard import materialize
from ..core.tensor import Tensor, check_has_values, is_tensor
from ..core.types import cast_like
from ..ops.elementwise import add
from ..ops.shape import transpose

_NONE: frozenset[str] = frozenset()


def grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """The gradient of a scalar function with respect to some arguments, as `jax.grad`.

    >>> import weft as wf
    >>> wf.grad(lambda x: wf.sum(x * x))(wf.arange(wf.Dim("a", 3), float))
    f32[a=3] [0., 2., 4.]
    """
    both = value_and_grad(f, argnums, has_aux)

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return run


def value_and_grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """The value and the gradient of a scalar function, as `jax.value_and_grad`.

    Args:
      f: takes pytrees of tensors and returns a tensor without dims (and with `has_aux` a pair of it
        and anything else).
      argnums: the positions of the arguments to differentiate with respect to.
      has_aux: whether `f` returns a pair.

    >>> import weft as wf
    >>> wf.value_and_grad(lambda x: wf.sum(x * x))(wf.arange(wf.Dim("a", 3), float))
    (f32[] 5., f32[a=3] [0., 2., 4.])
    """
    places = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        _check_places(places, args)
        numbers = [n % len(args) for n in places]
        chosen = [args[n] for n in numbers]
        leaves, tree = jax.tree.flatten(chosen, is_leaf=is_tensor)
        _check_inputs(leaves)

        def call(leaves: list[Any]) -> tuple[Any, Any]:
            new = dict(zip(numbers, jax.tree.unflatten(tree, leaves), strict=True))
            out = f(*[new.get(n, a) for n, a in enumerate(args)], **kwargs)
            value, aux = _pair(out) if has_aux else (out, None)
            return _scalar(value), aux

        program = context.current()
        if program is None:
            value, grads, aux = _eager(call, leaves)
        else:
            value, grads, aux = _staged(program, call, leaves)
        chosen = jax.tree.unflatten(tree, grads)
        value = (value, aux) if has_aux else value
        return value, chosen[0] if isinstance(argnums, int) else tuple(chosen)

    return reports_call(run, "grad of ")


def _check_places(places: Sequence[int], args: Sequence[Any]) -> None:
    wrong = [n for n in places if not -len(args) <= n < len(args)]
    if wrong:
        raise ProgramError(
            f"a gradient is asked with respect to argument {', '.join(map(str, wrong))}, and "
            f"{len(args)} were given by position",
            rule="argnums= are positions of arguments, counted from 0",
            hint="give the arguments to differentiate by position, and check argnums=",
        )


def _pair(out: Any) -> Any:
    if not isinstance(out, tuple | list) or len(out) != 2:
        shown = describe(out) if isinstance(out, Tensor) else repr(out)
        raise ProgramError(
            f"with has_aux=True the function to differentiate returned {shown}",
            rule="with has_aux=True it returns a pair: the loss, and anything else",
            hint="return loss, aux; or drop has_aux=True",
        )
    return out


def _check_inputs(leaves: list[Any]) -> None:
    for leaf in leaves:
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.asarray(leaf).dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            shown = describe(leaf) if isinstance(leaf, Tensor) else repr(leaf)
            raise TensorTypeError(
                f"a gradient is asked with respect to {shown}",
                rule="gradients exist for floating-point tensors",
                hint="choose other arguments with argnums=, or convert with x.astype(jnp.float32)",
            )


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.dims or not jnp.issubdtype(value.dtype, jnp.inexact):
        shown = describe(value) if isinstance(value, Tensor) else repr(value)
        raise ProgramError(
            f"the function to differentiate returned {shown}",
            rule="a gradient is that of one floating-point number",
            hint="reduce it: wf.mean(loss); with more to return, use has_aux=True",
        )
    return value


def _eager(call: Any, leaves: list[Any]) -> tuple[Any, list[Any], Any]:
    check_has_values(*leaves)

    def arrays(leaves: list[Any]) -> tuple[Any, Any]:
        value, aux = call(leaves)
        return value.array, (value, aux)

    with _reverse_mode():
        (_, (value, aux)), grads = jax.value_and_grad(arrays, has_aux=True)(leaves)
    return value, _typed(grads, leaves), aux


def _typed(derivatives: Any, like: Any) -> Any:
    """Derivatives in the types of what they belong to; those of integers have none (JAX's float0)."""

    def one(derivative: Any, x: Any) -> Any:
        return derivative if derivative.dtype == jax.dtypes.float0 else cast_like(derivative, jax.typeof(x))

    return jax.tree.map(one, derivatives, like)


@contextlib.contextmanager
def _reverse_mode() -> Iterator[None]:
    """The error for a loop that JAX can't differentiate backwards."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("Reverse-mode differentiation does not work for lax.while_loop"):
            raise
        raise ProgramError(
            "a while_loop, or a fori_loop whose bounds are not Python numbers, can't be differentiated "
            "in reverse",
            rule="the backward pass needs the carry of every step, and the number of steps is not known in "
            "advance",
            hint="use wf.scan, or wf.fori_loop between Python numbers; or wf.jvp; or give the loop a "
            "derivative of its own with wf.custom_vjp",
        ) from None


def _staged(program: Context, call: Any, leaves: list[Any]) -> tuple[Any, list[Any], Any]:
    value, pull, aux = _pulled(program, call, leaves)
    return value, _with_zeros(pull(slice_tensor(jnp.ones_like(value._array), ())), leaves), aux


def _with_zeros(grads: list[Any], leaves: list[Any]) -> list[Any]:
    """Zeros for the arguments that were not used."""
    return [_zeros(leaf) if g is None else g for g, leaf in zip(grads, leaves, strict=True)]


def _zeros(leaf: Tensor) -> Tensor:
    leaf = as_slice(leaf)
    zeros = cast_like(
        jnp.zeros(leaf._data.shape, leaf.dtype), leaf._data
    )  # zeros_like of a pending sum varies
    zeros = slice_tensor(zeros, leaf.dims, leaf.splits)
    zeros.role = leaf.role
    return zeros


def _pulled(program: Context, call: Any, leaves: list[Any]) -> tuple[Any, Any, Any]:
    """The value of a function of leaves, what pulls a cotangent back to them, and what else it returns.

    Gradients may be pending; those of tensors that were not used are None.
    """
    slices = [_entered(leaf, overcast=True) for leaf in leaves]
    forms = [_forms(program, t) if _is_float(t) else [(_NONE, leaf_array(t))] for t in slices]
    used: set[tuple[int, frozenset[str]]] = set()  # leaves, and the axes their form varies over
    made: dict[str, Any] = {}

    def arrays(inputs: list[list[Any]]) -> tuple[Any, Any]:
        with context.entered(program), program.frame() as frame:
            inner = []
            for n, (t, mine, given) in enumerate(zip(slices, forms, inputs, strict=True)):
                if not isinstance(t, Tensor):
                    inner.append(given[0])
                    continue
                base = given[0]
                program.register(base)
                for (axes, _), array in zip(mine[1:], given[1:], strict=True):
                    frame.variants[id(base), ("vary", axes)] = (base, array)
                    program.register(array)
                same = Tensor(base, t.dims, role=t.role, mesh=t.mesh, layout=t.layout, splits=t.splits)
                same._on_read = functools.partial(used.add, (n, _NONE))
                inner.append(same)
            value, aux = call(inner)
            found, made["tree"] = jax.tree.flatten(value, is_leaf=is_tensor)
            found = [materialize(as_slice(v)) if isinstance(v, Tensor) else v for v in found]
            made["forms"] = [LeafSpec.of(v) for v in found]
            aux = jax.tree.map(_settled, aux, is_leaf=is_tensor)
            for n, (mine, given) in enumerate(zip(forms, inputs, strict=True)):
                used.update((n, axes) for axes, _ in mine if (id(given[0]), ("vary", axes)) in frame.reused)
            return [leaf_array(v) for v in found], aux

    inputs = [[array for _, array in mine] for mine in forms]
    values, pull_arrays, aux = jax.vjp(arrays, inputs, has_aux=True)
    value = jax.tree.unflatten(made["tree"], list(map(rebuild_leaf, made["forms"], values)))

    def pull(cotangent: Any) -> list[Any]:
        given = jax.tree.leaves(_alike(cotangent, value), is_leaf=is_tensor)
        with _reverse_mode():
            (cotangents,) = pull_arrays(list(map(leaf_array, given)))
        return [
            _gradient(t, [part for part in zip(mine, arrays, strict=True) if (n, part[0][0]) in used], arrays)
            for n, (t, mine, arrays) in enumerate(zip(slices, forms, cotangents, strict=True))
        ]

    return value, pull, aux


def _gradient(t: Any, parts: list[Any], arrays: list[Any]) -> Any:
    """The sum of the cotangents of a leaf's forms, each pending over the axes it was made varying over."""
    if not isinstance(t, Tensor):
        return arrays[0]
    if not _is_float(t):
        return rebuild_leaf(LeafSpec.of(t), arrays[0])
    assert t.splits is not None
    early = _overcast(t)
    # Cotangents are zero in padding, but what one of them meets may be infinite: 0 · ∞ is not a number.
    filled = [(axes | early, fill_padding(array, t.dims, t.splits)) for (axes, _), array in parts]
    summands = [slice_tensor(cast_like(array, t._data), t.dims, t.splits, axes) for axes, array in filled]
    if not summands:
        return None
    total = _named(functools.reduce(add, summands))
    total.role = t.role
    return total


def _named(gradient: Any) -> Any:
    """A gradient whose sum, if it is pending, is called one in plans."""
    if isinstance(gradient, Tensor):
        gradient.origin = f"gradient[{','.join(d.name for d in gradient.dims)}]"
    return gradient


def _overcast(t: Tensor) -> frozenset[str]:
    """The axes over which a loop made this tensor varying beforehand: its gradient is pending over them."""
    return collectives.varying_axes(t._data) - axes_of(t.splits or ()) - context.require().vmapped_axes


def _is_float(t: Any) -> bool:
    return isinstance(t, Tensor) and bool(jnp.issubdtype(t.dtype, jnp.inexact))


def _settled(leaf: Any) -> Any:
    return materialize(as_slice(leaf)) if isinstance(leaf, Tensor) else leaf


def _forms(program: Context, t: Tensor) -> list[tuple[frozenset[str], Any]]:
    """An argument as it is, and made varying over every further set of axes."""
    have = collectives.varying_axes(t._array)
    missing = [a for a, n in program.mesh.axes if n > 1 and a not in have]
    sets = [
        frozenset(some)
        for count in range(len(missing) + 1)
        for some in itertools.combinations(missing, count)
    ]
    return [(axes, collectives.pvary(t._array, axes)) for axes in sets]


@reports_call
def jvp(f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """The value of a function and its derivative in a direction, as `jax.jvp`.

    >>> import weft as wf
    >>> x = wf.arange(wf.Dim("a", 3), float)
    >>> wf.jvp(lambda x: x * x, (x,), (wf.ones("a=3"),))[1]
    f32[a=3] [0., 2., 4.]
    """
    if len(primals) != len(tangents):
        raise ProgramError(
            f"there are {len(primals)} primals and {len(tangents)} tangents",
            rule="a direction has a tangent for each primal",
            hint="wf.jvp(f, (x, y), (dx, dy)); zeros_like is the tangent of what stands still",
        )
    primals = tuple(jax.tree.map(_entered, p, is_leaf=is_tensor) for p in primals)
    tangents = tuple(
        jax.tree.map(_entered, _alike(t, p), is_leaf=is_tensor)
        for t, p in zip(tangents, primals, strict=True)
    )
    value, tangent = jax.jvp(_framed(f), primals, tangents)
    return value, _typed(tangent, value)


@reports_call
def vjp(f: Callable[..., Any], *primals: Any, has_aux: bool = False, zeros: bool = True) -> Any:
    """The value of a function and the function that pulls a cotangent back, as `jax.vjp`.

    Args:
      f: takes pytrees of tensors and returns one (and with `has_aux` a pair of it and anything else).
      primals: where to differentiate it.
      has_aux: whether `f` returns a pair.
      zeros: whether a tensor that `f` does not use has a cotangent of zeros; else it may be None.

    >>> import weft as wf
    >>> square, pull = wf.vjp(lambda x: x * x, wf.arange(wf.Dim("a", 3), float))
    >>> pull(wf.ones("a=3"))
    (f32[a=3] [0., 2., 4.],)
    """
    program = context.current()
    if program is None:
        out, pull, *aux = jax.vjp(f, *primals, has_aux=True) if has_aux else jax.vjp(f, *primals)

        def pull_whole(cotangent: Any) -> Any:
            with _reverse_mode():
                return _typed(pull(_alike(cotangent, out)), primals)

        return out, reports_call(pull_whole, "vjp of "), *aux
    leaves, tree = jax.tree.flatten(primals, is_leaf=is_tensor)

    def call(leaves: list[Any]) -> tuple[Any, Any]:
        out = f(*jax.tree.unflatten(tree, leaves))
        return _pair(out) if has_aux else (out, None)

    out, pull_leaves, aux = _pulled(program, call, leaves)

    def pull_back(cotangent: Any) -> Any:
        grads = pull_leaves(cotangent)
        return jax.tree.unflatten(tree, _with_zeros(grads, leaves) if zeros else grads)

    return (out, pull_back, aux) if has_aux else (out, pull_back)


def _entered(leaf: Any, overcast: bool = False) -> Any:
    """Inside a program, a leaf as a settled slice; one that a loop made varying may stay so.

    Inside a vmap over a split dim every place has a derivative of its own, so what is differentiated
    varies over the dim's axes: else JAX would add up the derivatives of different places.
    """
    program = context.current()
    if program is None or not isinstance(leaf, Tensor):
        return leaf
    leaf = as_slice(leaf)
    settled = leaf.splits == program.splits(leaf.dims, leaf.role) and not leaf.pending
    leaf = leaf if overcast and settled else materialize(leaf)
    if program.vmapped_axes <= collectives.varying_axes(leaf._data):
        return leaf
    form = LeafSpec.of(leaf)
    assert form is not None
    return form.rebuild(collectives.pvary(leaf._array, program.vmapped_axes))


def _framed(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function in a frame of its own, for the JAX trace that it is called under."""
    program = context.current()
    if program is None:
        return f

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context.entered(program), program.frame():
            return jax.tree.map(_settled, f(*args, **kwargs), is_leaf=is_tensor)

    return run


def _alike(tree: Any, like: Any) -> Any:
    """Tensors with the dims, roles and places of other ones, so that JAX sees the same trees."""

    def one(like: Any, t: Any) -> Any:
        if not isinstance(t, Tensor) or not isinstance(like, Tensor):
            return t
        if set(t.dims) != set(like.dims):
            raise DimError(
                f"{describe(t)} stands for {describe(like)}",
                rule="tangents and cotangents have the dims of what they belong to",
                hint="check the order of the arguments",
            ).located()
        if t.dims != like.dims:
            t = transpose(t, like.dims)
        if like.is_slice:
            return materialize(as_slice(t), like.role)
        return place(with_role(t, like.role), like.mesh, like.layout)

    return jax.tree.map(one, like, tree, is_leaf=is_tensor)


class custom_vjp:
    """A function with a derivative of its own, as `jax.custom_vjp`.

    >>> import weft as wf
    >>> @wf.custom_vjp
    ... def clipped(x):
    ...     return x
    >>> clipped.defvjp(lambda x: (x, None), lambda _, g: (wf.clip(g, -1.0, 1.0),))
    >>> wf.grad(lambda x: wf.sum(clipped(x) * 5.0))(wf.ones("a=2"))
    f32[a=2] [1., 1.]
    """

    def __init__(self, f: Callable[..., Any]):
        self.f = f
        self.forward: Callable[..., Any] | None = None
        self.backward: Callable[..., Any] | None = None
        functools.update_wrapper(self, f)

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """`forward(*args)` returns the value and residuals; `backward(residuals, cotangent)` the
        cotangents of all arguments (None for one that has none)."""
        self.forward, self.backward = forward, backward

    def __call__(self, *args: Any) -> Any:
        forward_rule = self.forward
        if forward_rule is None:
            name = getattr(self.f, "__name__", "f")
            raise ProgramError(
                f"{name} has no derivative of its own yet",
                rule="a custom_vjp is called after defvjp(forward, backward) has said what its derivative is",
                hint=f"{name}.defvjp(lambda x: (value, kept), lambda kept, g: (cotangent of x,)); "
                "without one, drop wf.custom_vjp",
            ).located(format_call(name, args, {}))
        program = context.current()
        if program is None:
            call = jax.custom_vjp(self.f)
            call.defvjp(forward_rule, lambda kept, cotangent: self._cotangents(args, kept, cotangent))
            return call(*args)
        args = tuple(jax.tree.map(_entered, a, is_leaf=is_tensor) for a in args)
        parts = _Parts(program)

        def value(*arrays: Any) -> Any:
            with parts.inside():
                return parts.apart("value", self.f(*parts.whole("args", arrays)))

        def forward(*arrays: Any) -> Any:
            with parts.inside():
                out, kept = forward_rule(*parts.whole("args", arrays))
                return parts.apart("value", out), parts.apart("kept", kept)

        def backward(kept: Any, cotangent: Any) -> tuple[Any, ...]:
            with parts.inside():
                tensors = parts.whole("kept", kept), parts.whole("value", cotangent)
                found: list[Any] = []
                for g, a in zip(self._cotangents(args, *tensors), args, strict=True):
                    tree: Any = jax.tree.structure(a, is_leaf=is_tensor)
                    for part in [None] * tree.num_leaves if g is None else tree.flatten_up_to(g):
                        found += [None] if part is None else parts.apart("cotangent", part)
                return tuple(found)

        call = jax.custom_vjp(value)
        call.defvjp(forward, backward)
        return parts.whole("value", call(*parts.apart("args", args)))

    def _cotangents(self, args: tuple[Any, ...], kept: Any, cotangent: Any) -> tuple[Any, ...]:
        assert self.backward is not None
        given = jax.tree.map(_named, self.backward(kept, cotangent), is_leaf=is_tensor)
        if not isinstance(given, tuple | list) or len(given) != len(args):
            found = (
                f"{len(given)} cotangents" if isinstance(given, tuple | list) else f"a {type(given).__name__}"
            )
            raise ProgramError(
                f"the backward rule gave {found} for {len(args)} argument{'s' * (len(args) != 1)}",
                rule="a backward rule returns a cotangent for each argument, or None where there is none",
                hint="return (dx, None), or (dx,) where there is one argument",
            )
        return tuple(None if g is None else _alike(g, a) for g, a in zip(given, args, strict=True))


class _Parts:
    """Trees of tensors taken apart into arrays, and put together again.

    JAX may call a custom rule after the code that met it has returned, and takes what it returns apart
    even later. So arrays alone go in and out, and the rule finds itself where it was written.
    """

    def __init__(self, program: Context):
        self.program, self.place = program, (program.vmapped_axes, program.vmap_depth)
        self.shapes: dict[str, tuple[Any, list[LeafSpec | None]]] = {}

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """In the program, inside the vmaps that the rule was called in."""
        with context.entered(self.program), self.program.vmapping(*self.place), self.program.frame():
            yield

    def apart(self, name: str, tree: Any) -> list[Any]:
        """A tree's arrays, settled; what else it is, is kept under the name."""
        leaves, shape = jax.tree.flatten(tree, is_leaf=is_tensor)
        leaves = list(map(_settled, leaves))
        self.shapes[name] = shape, [LeafSpec.of(leaf) for leaf in leaves]
        return list(map(leaf_array, leaves))

    def whole(self, name: str, arrays: Sequence[Any]) -> Any:
        """The tree of that name with these arrays in it."""
        shape, forms = self.shapes[name]
        return jax.tree.unflatten(shape, list(map(rebuild_leaf, forms, arrays)))


REMAT_POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "sums": jax.checkpoint_policies.save_only_these_names("sum"),
    "dots+sums": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.save_only_these_names("sum"),
    ),
}


@reports_call
def remat(f: Callable[..., Any], policy: Any = None) -> Callable[..., Any]:
    """The same function, of which the backward pass computes again what it needs.

    Args:
      policy: what is kept nevertheless: "nothing" (the default), "sums" (results of all-reduces, so
        that no collective runs twice), "dots", "dots+sums", "everything", or a JAX policy.

    >>> import weft as wf
    >>> f = lambda x: wf.sum(wf.sin(wf.exp(x)))
    >>> plans = [wf.spmd(wf.grad(g)).plan(wf.spec("a=1024")) for g in (f, wf.remat(f))]
    >>> [plan.memory.activations for plan in plans]
    [4096, 0]
    """
    if isinstance(policy, str) and policy not in REMAT_POLICIES:
        raise ProgramError(
            f"there is no remat policy {policy!r}{nearest(policy, REMAT_POLICIES)}",
            rule="a policy says what is kept for the backward pass",
            hint=f"one of {', '.join(REMAT_POLICIES)}, or a function of jax.checkpoint_policies",
        )
    chosen = REMAT_POLICIES[policy] if isinstance(policy, str) else policy

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        program = context.current()
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_tensor)
        dynamic = [n for n, x in enumerate(leaves) if isinstance(x, Tensor | jax.Array)]

        def call(given: Sequence[Any]) -> Any:
            all_leaves = list(leaves)
            for n, leaf in zip(dynamic, given, strict=True):
                all_leaves[n] = leaf
            args, kwargs = jax.tree.unflatten(tree, all_leaves)
            return f(*args, **kwargs)

        if program is None:
            return jax.checkpoint(call, policy=chosen)([leaves[n] for n in dynamic])
        leaves = [as_slice(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        forms = [LeafSpec.of(leaves[n]) for n in dynamic]
        kept: dict[str, Any] = {}

        def inner(arrays: list[Any]) -> list[Any]:
            with program.frame(lifts_collectives=False):
                out, kept["tree"] = jax.tree.flatten(
                    call(list(map(rebuild_leaf, forms, arrays))), is_leaf=is_tensor
                )
                out = [as_slice(o) if isinstance(o, Tensor) else o for o in out]
                kept["forms"] = [LeafSpec.of(o) for o in out]
                return [leaf_array(o) for o in out]

        arrays = jax.checkpoint(inner, policy=chosen)([leaf_array(leaves[n]) for n in dynamic])
        out = [rebuild_leaf(form, a) for form, a in zip(kept["forms"], arrays, strict=True)]
        return jax.tree.unflatten(kept["tree"], out)

    return run
