"""Linear algebra and Fourier transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import weft as wf
from weft.core.jax_compat import row_major

from ..program import Named
from .rows import GAP, A, Op, Rows, apart_from, broadcast, distinct, lined, one_over, over, renamed


def _numpy(*arrays: Any) -> Any:
    return jnp if any(isinstance(array, jax.Array) for array in arrays) else np


def _matrices(x: Named, row: str, column: str) -> Named:
    """tanh(x) · tanh(x)ᵀ / 2n + diag(1, …, n): positive definite, with eigenvalues at least 1/2 apart."""
    small, size = Named(A.tanh(x.array), x.names), x.sizes[row]
    product = broadcast(A.multiply, small, renamed(small, {row: column}))
    names = (*(n for n in x.names if n != row), row, column)
    return Named(lined(product, names) / (2 * size) + np.diag(np.arange(1.0, size + 1)), names)


def _matrices_weft(x: wf.Tensor, row: str, column: str) -> wf.Tensor:
    small = wf.tanh(x.astype(jnp.float64))  # typed programs have 16 bits, too few for a factorization
    size = next(d.size for d in x.dims if d.name == row)
    diagonal = wf.tensor(np.diag(np.arange(1.0, size + 1)), [wf.Dim(row, size), wf.Dim(column, size)])
    return small * small.rename(**{row: column}) / (2 * size) + diagonal


def draw_matrices(d: Any) -> Any:
    n = d.value("f", 1)
    row = d.choose(d.env[n].names)
    return (n,), {"row": row, "column": d.name(d.env[n].names)}


def draw_with_new_dim(d: Any) -> Any:
    (n,), options = draw_matrices(d)
    return (n,), options | {"k": d.name([*d.env[n].names, options["column"]])}


def draw_system(d: Any) -> Any:
    """Matrices from one value, and right-hand sides with the same rows."""
    (n,), options = draw_matrices(d)
    row, column, sizes = options["row"], options["column"], d.env[n].sizes
    agree = lambda y: all(sizes.get(name, size) == size for name, size in y.sizes.items())
    b = d.value("f", 1, test=lambda y: row in y.names and column not in y.names and agree(y))
    return (n, b), options


def _factorization(name: str, *results: str, vectors: bool = False, **options: Any) -> Op:
    """The row of a function of matrices.

    Args:
      name: the function.
      results: the matrix dims of each result: r for the rows, c for the columns, k for the new dim.
      vectors: whether results are unique up to the sign only; they are squared.
      options: further arguments of the oracle.
    """

    def weft(x: wf.Tensor, **dims: str) -> list[wf.Tensor]:
        a = _matrices_weft(x, dims["row"], dims["column"])
        outs = jax.tree.leaves(getattr(wf.linalg, name)(a, *dims.values()), is_leaf=wf.is_tensor)
        return [wf.square(out) if vectors else out for out in outs]

    def oracle(x: Named, **dims: str) -> list[Named]:
        a = _matrices(x, dims["row"], dims["column"])
        outs = jax.tree.leaves(tuple_of(getattr(_numpy(a.array).linalg, name)(a.array, **options)))
        named = {"r": dims["row"], "c": dims["column"], "k": dims.get("k", "")}
        return [
            Named(out**2 if vectors else out, (*a.names[:-2], *(named[letter] for letter in letters)))
            for out, letters in zip(outs, results, strict=True)
        ]

    draw = draw_with_new_dim if any("k" in letters for letters in results) else draw_matrices
    return Op(draw, weft, oracle, groups=_all_dims, count=len(results))


def tuple_of(outs: Any) -> Any:
    """NumPy's named tuples as tuples."""
    return tuple(outs) if isinstance(outs, tuple) else outs


def _all_dims(given: list[Named], results: list[Named], **dims: str) -> list[set[str]]:
    return [{*dims.values()}.union(*[x.names for x in (*given, *results)])]


def _system(fn: Callable[..., wf.Tensor], triangle: Callable[..., Any]) -> Op:
    """The row of a solver; `triangle` selects the part of the matrices that it reads."""

    def weft(x: wf.Tensor, b: wf.Tensor, row: str, column: str) -> wf.Tensor:
        return fn(_matrices_weft(x, row, column), b.astype(jnp.float64), row, column)

    def oracle(x: Named, b: Named, row: str, column: str) -> Named:
        a = _matrices(x, row, column)
        batch, right = a.names[:-2], tuple(n for n in b.names if n not in a.names)
        array = lined(b, (*batch, row, *right))
        shape = (*a.array.shape[:-1], *array.shape[array.ndim - len(right) :])
        columns = A.broadcast_to(array, shape).reshape(*a.array.shape[:-1], -1)
        result = _numpy(a.array, columns).linalg.solve(triangle(a.array), columns)
        return Named(result.reshape(shape), (*batch, column, *right))

    return Op(draw_system, weft, oracle, groups=_all_dims)


def _norm(ord: float, oracle: Callable[..., Any], sound: Callable[..., bool]) -> Op:
    return Op(one_over(), lambda x, dims: wf.linalg.norm(x, dims, ord), over(oracle), sound)


def _not_zero(x: Named, dims: Any) -> bool:
    return bool(np.all(over(np.sum)(Named(x.array**2, x.names), dims).array > 0.01))


def _distinct_sizes(x: Named, dims: Any) -> bool:
    """Whether absolute values differ; then only one is the maximum, and it is not 0."""
    return apart_from(0)(x) and distinct(Named(np.abs(x.array), x.names), dims)


LINALG: Rows = {
    "cholesky": _factorization("cholesky", "rc"),
    "inv": _factorization("inv", "cr"),
    "det": _factorization("det", ""),
    "slogdet": _factorization("slogdet", "", ""),
    "eigh": _factorization("eigh", "k", "rk", vectors=True),
    "qr": _factorization("qr", "rk", "kc"),
    "svd": _factorization("svd", "rk", "k", "kc", vectors=True, full_matrices=False),
    "solve": _system(wf.linalg.solve, lambda a: a),
    "triangular_solve": _system(wf.linalg.triangular_solve, A.triu),
    "norm": _norm(2, lambda a, axis: A.sqrt(A.sum(a * a, axis=axis)), _not_zero),
    "norm 1": _norm(1, lambda a, axis: A.sum(A.abs(a), axis=axis), apart_from(0)),
    "norm inf": _norm(np.inf, lambda a, axis: A.max(A.abs(a), axis=axis), _distinct_sizes),
}


# Fourier transforms


def draw_transform(d: Any) -> Any:
    n = d.value("f", 1)
    return (n,), {"dims": d.some(d.env[n].names)[:3]}


def draw_irfft(d: Any) -> Any:
    (n,), options = draw_transform(d)
    positions = d.env[n].sizes[options["dims"][-1]]
    return (n,), options | {"size": d.choose([2 * positions - 1, max(2 * positions - 2, 1)])}


def _transformed(name: str, x: Named, dims: list[str], sizes: list[int] | None = None) -> Any:
    """A function of `numpy.fft` or `jax.numpy.fft` along dims."""
    numpy, axes, last = _numpy(x.array), [x.names.index(n) for n in dims], range(-len(dims), 0)
    # XLA's CPU backend fails on arrays that it stores in another order itself, in plain JAX too.
    ordered = row_major if numpy is jnp else lambda array: array
    array = ordered(numpy.moveaxis(x.array, axes, last))
    result = getattr(numpy.fft, name)(array, s=sizes, axes=last)
    return numpy.moveaxis(ordered(result), last, axes)


def _transform(name: str, factor: complex) -> Op:
    """The row of a transform: how far its result is from 4 + 3i, because the programs have real numbers only."""

    def weft(x: wf.Tensor, dims: list[str]) -> wf.Tensor:
        return wf.abs(getattr(wf.fft, name)(wf.tanh(x) * factor, dims) - (4 + 3j))

    def oracle(x: Named, dims: list[str]) -> Named:
        given = Named(A.tanh(x.array) * factor, x.names)
        return Named(A.abs(_transformed(f"{name}n", given, dims) - (4 + 3j)), x.names)

    return Op(draw_transform, weft, oracle, lambda x, dims: bool(np.all(oracle(x, dims).array > GAP)))


def _irfft(x: Named, dims: list[str], size: int) -> Named:
    given = Named(A.tanh(x.array) * (1 + 2j), x.names)
    return Named(_transformed("irfftn", given, dims, [*(x.sizes[n] for n in dims[:-1]), size]), x.names)


FFT: Rows = {
    "fft": _transform("fft", 1 + 2j),
    "ifft": _transform("ifft", 1 + 2j),
    "rfft": _transform("rfft", 1.0),
    "irfft": Op(
        draw_irfft, lambda x, dims, size: wf.fft.irfft(wf.tanh(x) * (1 + 2j), dims, size=size), _irfft
    ),
}
