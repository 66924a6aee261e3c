"""Jacobians and Hessians of functions of named tensors.

A row of a Jacobian is the pullback of a unit cotangent, and all rows are computed by one vmap. The vmap's dim
is an inner one, which no layout splits: each pullback is distributed as the function itself is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..core.boundary import flatten, numbers_as_tensors
from ..core.call_errors import check_function, checks_arguments
from ..core.context import active
from ..core.describe import describe
from ..core.dims import Dim
from ..core.errors import TensorTypeError
from ..core.op import op
from ..core.operands import as_slice, check_along
from ..core.registry import register
from ..core.tensor import Tensor, is_tensor
from ..core.types import PyTree
from ..ops.creation import arange
from ..ops.einsum import einsum
from ..ops.indexing import index
from ..ops.shape import rename, split
from ..ops.vmap import vmap
from .grad import check_argnums, grad, vjp


@checks_arguments
def jacobian(f: Callable[..., PyTree], argnums: int | Sequence[int] = 0) -> Callable[..., PyTree]:
    """The Jacobian of a function with respect to some arguments, as `jax.jacobian`, by reverse mode.

    The derivative of an output with respect to an input has the output's dims, then the input's. An input dim
    whose name an output of `f` has too gets a prime: that of `[b]` with respect to `[a, b]` is `[b, a, b']`.

    Args:
      f: takes pytrees of tensors and returns one.
      argnums: the positions of the arguments to differentiate with respect to.

    Returns:
      A function of the same arguments. It returns, in place of each output, a pytree like the arguments.

    >>> import weft as wf
    >>> x = wf.tensor([1.0, 2.0], "a=2")
    >>> wf.jacobian(lambda x: x * wf.sum(x))(x)
    f32[a=2, a'=2]
    [[4., 1.],
     [2., 5.]]
    """
    check_function(f, "jacobian")
    return functools.partial(_jacobian, f, argnums if isinstance(argnums, int) else tuple(argnums))


@register(example=lambda op, x: op(lambda x: einsum(x, x, x, out=[]))(x), mixes_rows=True)
@checks_arguments
def hessian(f: Callable[..., PyTree], argnums: int | Sequence[int] = 0) -> Callable[..., PyTree]:
    """The Hessian of a scalar function with respect to some arguments, as `jax.hessian`.

    It is the Jacobian of the gradient. The dims of the second derivative have primes.

    Args:
      f: takes pytrees of tensors and returns a tensor without dims.
      argnums: the positions of the arguments to differentiate with respect to.

    Returns:
      A function of the same arguments. It returns a pytree like them, with another one in place of each leaf.

    >>> import weft as wf
    >>> x = wf.tensor([1.0, 2.0], "a=2")
    >>> wf.hessian(lambda x: wf.sum(x * x * x))(x)
    f32[a=2, a'=2]
    [[ 6.,  0.],
     [ 0., 12.]]
    """
    check_function(f, "hessian")
    return jacobian(grad(f, argnums), argnums)


@op(
    example=lambda op, x: op(lambda x: einsum(x, x, out=["b"]))(x),
    mixes_rows=True,
    functions=True,
)
def _jacobian(
    f: Callable[..., PyTree], argnums: int | tuple[int, ...], /, *args: PyTree, **kwargs: PyTree
) -> PyTree:
    positions = (argnums,) if isinstance(argnums, int) else argnums
    check_argnums(positions, args)
    numbers = [n % len(args) for n in positions]
    inputs, in_tree = jax.tree.flatten([args[n] for n in numbers], is_leaf=is_tensor)
    inputs = [_check_float(as_slice(x), "cannot differentiate with respect to") for x in inputs]

    def call(*inputs: Tensor) -> PyTree:
        new = dict(zip(numbers, jax.tree.unflatten(in_tree, inputs), strict=True))
        return f(*[new.get(n, a) for n, a in enumerate(args)], **kwargs)

    outputs, out_tree = _outputs(call, inputs)
    check_along(d for t in [*inputs, *outputs] for d in t.dims)
    sizes = [math.prod(d.size for d in t.dims) for t in outputs]
    starts = [sum(sizes[:n]) for n in range(len(sizes))]

    def row(number: Tensor) -> tuple[Tensor, ...]:
        _, pull_back = vjp(call, *inputs)
        units = [_unit(number - start, t.dims, t.dtype) for t, start in zip(outputs, starts, strict=True)]
        return pull_back(jax.tree.unflatten(out_tree, units))

    rows = Dim("_rows", sum(sizes))
    gradients = vmap(row, rows)(arange(rows))
    names = _primed([d.name for t in inputs for d in t.dims], [d.name for t in outputs for d in t.dims])
    blocks = []
    for t, size, start in zip(outputs, sizes, starts, strict=True):
        parts = [index(g, (rows, slice(start, start + size) if t.dims else start)) for g in gradients]
        parts = [rename(p, {d.name: names[d.name] for d in p.dims if d.name in names}) for p in parts]
        parts = [split(p, rows.resize(size), t.dims) if t.dims else p for p in parts]
        block = jax.tree.unflatten(in_tree, parts)
        blocks.append(block[0] if isinstance(argnums, int) else tuple(block))
    return jax.tree.unflatten(out_tree, blocks)


def _outputs(call: Callable[..., PyTree], inputs: Sequence[Tensor]) -> tuple[list[Tensor], PyTree]:
    """The outputs of a function, of which only dims and dtypes may be used, and their structure."""
    ctx = active.context
    traced: list[tuple[list[Tensor], PyTree]] = []

    def trace() -> None:
        with ctx.frame():
            outputs, tree = flatten(call(*inputs))
            outputs = [
                _check_float(numbers_as_tensors(t), "the function to differentiate returned") for t in outputs
            ]
            traced.append((outputs, tree))

    jax.eval_shape(trace)
    return traced[0]


def _check_float(t: Tensor, fact: str) -> Tensor:
    if not isinstance(t, Tensor) or not jnp.issubdtype(t.dtype, jnp.floating):
        raise TensorTypeError(
            f"{fact} {describe(t) if isinstance(t, Tensor) else repr(t)}",
            rule="a Jacobian is the derivative of floating-point tensors with respect to such tensors",
            hint="select other arguments with argnums=, or convert with x.astype(jnp.float32)",
        )
    return t


def _unit(number: Tensor, dims: Iterable[Dim], dtype: DTypeLike) -> Tensor:
    """A tensor that is 1 at the position with this number, counted in row-major order, and 0 elsewhere."""
    position = as_slice(0)
    for dim in dims:
        position = position * dim.size + arange(dim)
    return (position == number).astype(dtype)


def _primed(names: Iterable[str], taken: Iterable[str]) -> dict[str, str]:
    """New names for those that are taken, with as many primes as they need."""
    used, new = {*names, *taken}, {}
    for name in dict.fromkeys(names):
        if name in taken:
            new[name] = name
            while new[name] in used:
                new[name] += "'"
            used.add(new[name])
    return new
