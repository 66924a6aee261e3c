"""Random tensors. Where `jax.random` has no equivalent, the oracle is Weft on one device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import weft as wf

from ..program import Named
from .order import position_of
from .rows import MOST_ELEMENTS, A, Op, Rows, as_dims, integers, one_along


def draw_random(d: Any) -> Any:
    return (), {"dims": d.dims(d.draw(integers(1, 3))), "seed": d.draw(integers(0, 99))}


@functools.cache
def flat_draw(fn: Callable[..., Any], seed: int, **options: Any) -> np.ndarray:
    """A draw along one long dim, whose beginning is the draw of any shape with the same key.

    An element depends only on its index in row-major order. So one compilation serves all shapes.
    """
    with jax.ensure_compile_time_eval():
        if fn.__module__.startswith("jax"):
            return np.asarray(fn(jax.random.key(seed), (MOST_ELEMENTS,)))
        return fn(jax.random.key(seed), wf.Dim("n", MOST_ELEMENTS), **options).numpy()


def drawn(fn: Callable[..., Any], shape: Sequence[int], seed: int, **options: Any) -> np.ndarray:
    return flat_draw(fn, seed, **options)[: math.prod(shape)].reshape(shape)


def _random(ours: Callable[..., Any], theirs: Callable[..., Any] | None = None, **options: Any) -> Op:
    """A draw with a seed and dims. Without `theirs`, the oracle is our own draw on one device."""

    def oracle(dims: Any, seed: int) -> Named:
        shape = [size for _, size in dims]
        array = drawn(theirs, shape, seed) if theirs else drawn(ours, shape, seed, **options)
        return Named(array, tuple(n for n, _ in dims))

    def weft(dims: Any, seed: int) -> wf.Tensor:
        return ours(jax.random.key(seed), as_dims(dims), **options)

    return Op(draw_random, weft, oracle)


def draw_drop(d: Any) -> Any:
    return (d.value("f", 1),), {"rate": d.choose([0.1, 0.5]), "seed": d.draw(integers(0, 99))}


def _dropped(x: Named, rate: float, seed: int) -> Named:
    mask = drawn(wf.random.bernoulli, x.array.shape, seed, p=1.0 - rate)
    return Named(A.where(mask, x.array / (1.0 - rate), 0), x.names)


def _categorical(x: Named, dim: str, seed: int) -> Named:
    noise = drawn(wf.random.gumbel, x.array.shape, seed)
    return position_of("argmax")(Named(x.array + noise, x.names), dim)


RANDOM: Rows = {
    "normal": _random(wf.random.normal, jax.random.normal, dtype=jnp.float64),
    "uniform": _random(wf.random.uniform, jax.random.uniform, dtype=jnp.float64),
    "truncated_normal": _random(wf.random.truncated_normal, dtype=jnp.float64),
    "bernoulli": _random(wf.random.bernoulli, p=0.3),
    "randint": _random(wf.random.randint, low=0, high=4),
    "dropout": Op(
        draw_drop,
        lambda x, rate, seed: wf.dropout(x, rate, jax.random.key(seed)),
        _dropped,
    ),
    "categorical": Op(
        one_along(seed=integers(0, 99)),
        lambda x, dim, seed: wf.random.categorical(jax.random.key(seed), x, dim),
        _categorical,
    ),
}
