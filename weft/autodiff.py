"""Derivatives of functions of named tensors: JAX's own, with gradients that may stay pending.

JAX sums a cotangent over an axis as soon as it leaves the form that varies over it. Inside a program we
therefore differentiate with respect to *every varying form* of an argument: what the function asks of an
argument is then already an input, and its cotangent comes out as a pending sum, to be added up once, later,
over all micro-batches, or scattered into the optimizer's layout.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import collectives, context
from .context import Context
from .errors import ProgramError, TensorTypeError
from .forms import as_slice, settle, slice_tensor
from .ops import add
from .tensor import Tensor, describe, is_tensor


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
    """
    places = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        chosen = [args[n] for n in places]
        leaves, tree = jax.tree.flatten(chosen, is_leaf=is_tensor)
        _check_inputs(leaves)

        def call(leaves: list[Any]) -> tuple[Any, Any]:
            new = dict(zip(places, jax.tree.unflatten(tree, leaves), strict=True))
            out = f(*[new.get(n, a) for n, a in enumerate(args)], **kwargs)
            value, aux = out if has_aux else (out, None)
            return _scalar(value), aux

        program = context.current()
        if program is None:
            value, grads, aux = _eager(call, leaves)
        else:
            value, grads, aux = _staged(program, call, leaves)
        grads = jax.tree.unflatten(tree, grads)
        grads = grads[0] if isinstance(argnums, int) else tuple(grads)
        return ((value, aux) if has_aux else value), grads

    return run


def _check_inputs(leaves: list[Any]) -> None:
    for leaf in leaves:
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.asarray(leaf).dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            shown = describe(leaf) if isinstance(leaf, Tensor) else repr(leaf)
            raise TensorTypeError(
                f"a gradient is asked with respect to {shown}",
                rule="gradients exist for floating-point tensors",
                hint="choose other arguments with argnums=, or convert with x.astype(jnp.float32)",
            ).located("grad")


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.dims or not jnp.issubdtype(value.dtype, jnp.inexact):
        shown = describe(value) if isinstance(value, Tensor) else repr(value)
        raise ProgramError(
            f"the function to differentiate returned {shown}",
            rule="a gradient is that of one floating-point number",
            hint="reduce it: wf.mean(loss); with more to return, use has_aux=True",
        ).located("grad")
    return value


def _eager(call: Any, leaves: list[Any]) -> tuple[Any, list[Any], Any]:
    def arrays(leaves: list[Any]) -> tuple[Any, Any]:
        value, aux = call(leaves)
        return value.array, (value, aux)

    (_, (value, aux)), grads = jax.value_and_grad(arrays, has_aux=True)(leaves)
    return value, grads, aux


def _staged(program: Context, call: Any, leaves: list[Any]) -> tuple[Any, list[Any], Any]:
    slices = [settle(as_slice(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    forms = [_forms(program, t) if isinstance(t, Tensor) else [(frozenset(), t)] for t in slices]
    used: set[tuple[int, frozenset[str]]] = set()

    def arrays(inputs: list[list[Any]]) -> tuple[Any, Any]:
        with program.frame() as frame:
            inner = []
            for n, (t, mine, given) in enumerate(zip(slices, forms, inputs, strict=True)):
                if not isinstance(t, Tensor):
                    inner.append(given[0])
                    continue
                base = given[0]
                program.know(base)
                for (axes, _), array in zip(mine[1:], given[1:], strict=True):
                    frame.forms[id(base), ("vary", axes)] = (base, array)
                    program.know(array)
                same = Tensor(
                    base, t.dims, role=t.role, mesh=t.mesh, layout=t.layout, splits=t.splits
                )
                same._watch = functools.partial(used.add, (n, frozenset()))
                inner.append(same)
            value, aux = call(inner)
            value = settle(as_slice(value))
            aux = jax.tree.map(_settled, aux, is_leaf=is_tensor)
            for n, (mine, given) in enumerate(zip(forms, inputs, strict=True)):
                used.update(
                    (n, axes) for axes, _ in mine if (id(given[0]), ("vary", axes)) in frame.used
                )
            return value._array, aux

    inputs = [[array for _, array in mine] for mine in forms]
    value, pull, aux = jax.vjp(arrays, inputs, has_aux=True)
    (cotangents,) = pull(jnp.ones((), value.dtype))
    grads: list[Any] = []
    for n, (t, mine, given) in enumerate(zip(slices, forms, cotangents, strict=True)):
        if not isinstance(t, Tensor):
            grads.append(given[0])
            continue
        parts = [
            slice_tensor(array, t.dims, t.splits, axes)
            for (axes, _), array in zip(mine, given, strict=True)
            if (n, axes) in used
        ]
        # Without any use, the cotangent of the argument as it is: zeros.
        total = functools.reduce(add, parts) if parts else slice_tensor(given[0], t.dims, t.splits)
        total.role = t.role
        grads.append(total)
    return slice_tensor(value, ()), grads, aux


def _settled(leaf: Any) -> Any:
    return settle(as_slice(leaf)) if isinstance(leaf, Tensor) else leaf


def _forms(program: Context, t: Tensor) -> list[tuple[frozenset[str], Any]]:
    """An argument as it is, and made varying over every further set of axes."""
    have = collectives.varying(t._array)
    missing = [a for a, n in program.mesh.axes if n > 1 and a not in have]
    sets = [
        frozenset(some)
        for count in range(len(missing) + 1)
        for some in itertools.combinations(missing, count)
    ]
    return [(axes, collectives.vary(t._array, axes)) for axes in sets]
