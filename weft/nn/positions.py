"""Positions: how a place knows where it is.

Learned and sinusoid positions are added to the embedding, relative ones to attention scores, rotary ones turn
queries and keys. All take the places' numbers as a tensor: packed rows and caches number them as they like.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np

import weft as wf
from weft.core.tensor import Tensor

from .module import Module, Normal, declare


class LearnedPositions(Module):
    """A row of numbers for each place up to a longest length."""

    weight: Tensor
    places: wf.Dim = eqx.field(static=True)

    def __init__(self, longest: int, d_model: wf.Dim, deviation: float = 0.02):
        self.places = wf.Dim("positions", longest)
        self.weight = declare([self.places, d_model], Normal(deviation))

    def __call__(self, places: Tensor) -> Tensor:
        return wf.take(self.weight, places, self.places)


def sinusoid(places: Tensor, d_model: wf.Dim, longest: float = 10_000.0) -> Tensor:
    """Sines and cosines of the place at geometric wave lengths: first half and second half of d_model."""
    half = d_model.size // 2
    steps = np.exp(-math.log(longest) * np.arange(half) / max(half - 1, 1))
    odd = np.zeros(d_model.size - 2 * half)
    rates = wf.tensor(np.concatenate([steps, steps, odd]).astype(np.float32), [d_model])
    turn = wf.tensor(np.repeat([0.0, math.pi / 2, 0.0], [half, half, odd.size]).astype(np.float32), [d_model])
    return wf.sin(places.astype(jnp.float32) * rates + turn)


class RelativePositions(Module):
    """T5's: a number for each head and bucket of distances, added to the scores.

    Half of the buckets are for exact distances, the others grow by powers up to `longest`; what is
    further shares the last one.

    Args:
      heads: the dim of the query heads, or the dims, as `Attention.heads` has them.
      both_ways: whether places also look ahead (an encoder's do): then half of the buckets are for those.
      buckets: how many there are.
      longest: the distance at which the last one begins.
    """

    weight: Tensor
    buckets: wf.Dim = eqx.field(static=True)
    both_ways: bool = eqx.field(static=True)
    longest: int = eqx.field(static=True)

    def __init__(
        self, heads: wf.Dim | Sequence[wf.Dim], both_ways: bool, buckets: int = 32, longest: int = 128
    ):
        every = [heads] if isinstance(heads, wf.Dim) else heads
        self.buckets, self.both_ways, self.longest = wf.Dim("buckets", buckets), both_ways, longest
        self.weight = declare([self.buckets, *every], Normal(1.0))

    def __call__(self, places: Tensor, memory_places: Tensor) -> Tensor:
        """The bias of scores, from the numbers of the places and of those that they look at."""
        bias = wf.take(self.weight, self.bucket(memory_places - places), self.buckets)
        (length,), (memory,) = places.dims[-1:], memory_places.dims[-1:]
        rest = [d for d in bias.dims if d not in (length, memory)]
        return wf.transpose(bias, [*rest, length, memory])

    def bucket(self, distance: Tensor) -> Tensor:
        """The number of the bucket of each distance, which is negative for places before."""
        count, offset = self.buckets.size, 0
        if self.both_ways:
            count //= 2
            offset = wf.where(distance > 0, count, 0)
            distance = abs(distance)
        else:
            distance = wf.maximum(-distance, 0)
        exact = count // 2
        far = wf.log(wf.maximum(distance, exact).astype(jnp.float32) / exact)
        far = exact + (far * ((count - exact) / math.log(self.longest / exact))).astype(jnp.int32)
        return wf.where(distance < exact, distance, wf.minimum(far, count - 1)) + offset


def rotary(
    x: Tensor,
    places: Tensor,
    d_kv: wf.Dim,
    base: float = 10_000.0,
    stretch: tuple[float, float, float, float] | None = None,
) -> Tensor:
    """Turns pairs of features by angles that grow with the place: products then depend on distances alone.

    Feature n is paired with n + d_kv/2, as in Llama.

    Args:
      x: queries or keys.
      places: the numbers of their places.
      d_kv: the dim whose features are turned, of even size.
      base: the longest wave is 2π times this.
      stretch: Llama 3's, for longer sequences than were trained on: (factor, low, high, length). Waves that
        turn fewer than `low` times in `length` places become `factor` times as long, those of more than
        `high` turns stay, between the two it goes gradually.
    """
    half = wf.Dim("half", d_kv.size // 2)
    turns = base ** (-np.arange(half.size) / half.size)  # in radians a place
    if stretch is not None:
        factor, low, high, length = stretch
        kept = np.clip((turns * length / (2 * math.pi) - low) / (high - low), 0, 1)
        turns = turns * (kept + (1 - kept) / factor)
    rates = wf.tensor(turns.astype(np.float32), [half])
    angles = places.astype(jnp.float32) * rates
    cos, sin = wf.cos(angles), wf.sin(angles)
    first, second = x[d_kv.name, : half.size], x[d_kv.name, half.size :]
    first, second = (t.astype(jnp.float32).rename(**{d_kv.name: "half"}) for t in (first, second))
    turned = [first * cos - second * sin, second * cos + first * sin]
    return wf.concat([t.rename(half=d_kv.name) for t in turned], d_kv.name).astype(x.dtype)
