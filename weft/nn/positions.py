"""Position encodings: learned, sinusoidal, relative (T5) and rotary.

Learned and sinusoidal ones are added to the embeddings, relative ones to attention scores; rotary ones rotate
queries and keys. All take position ids as a tensor, since packed rows and KV caches number positions their
own way.
"""

from __future__ import annotations

import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np

import weft as wf
from weft.core.describe import reports_call
from weft.core.dims import DimLike, DimsLike, as_dim, as_dims, select_dim
from weft.core.tensor import Tensor

from ..core.call_errors import checks_arguments
from .module import Module, Normal, declare


class LearnedPositions(Module):
    """A learned vector for each position, up to a maximum length."""

    weight: Tensor
    positions: wf.Dim = eqx.field(static=True)

    def __init__(self, max_length: int, d_model: DimLike, stddev: float = 0.02):
        self.positions = wf.Dim("positions", max_length)
        self.weight = declare([self.positions, d_model], Normal(stddev))

    def __call__(self, positions: Tensor) -> Tensor:
        return wf.take(self.weight, positions, self.positions)


@checks_arguments
def sinusoid(positions: Tensor, d_model: DimLike, max_period: float = 10_000.0) -> Tensor:
    """Sines (first half of d_model) and cosines (second half) of the position at geometric frequencies."""
    d_model = as_dim(d_model)
    half = d_model.size // 2
    steps = np.exp(-math.log(max_period) * np.arange(half) / max(half - 1, 1))
    odd = np.zeros(d_model.size - 2 * half)
    frequencies = wf.tensor(np.concatenate([steps, steps, odd]).astype(np.float32), [d_model])
    # cos(x) = sin(x + π/2): one sine over all features. Concatenating halves would move data if d_model is
    # split.
    phases = np.repeat([0.0, math.pi / 2, 0.0], [half, half, odd.size]).astype(np.float32)
    return wf.sin(positions.astype(jnp.float32) * frequencies + wf.tensor(phases, [d_model]))


class RelativePositions(Module):
    """T5's relative position bias: a number for each head and bucket of distances, added to the scores.

    Half of the buckets are for exact distances. The others grow logarithmically up to `max_distance`; larger
    distances share the last one.

    Args:
      heads: the dim or dims of the query heads, as in `Attention.heads`.
      bidirectional: whether positions also attend to later ones (in an encoder): half of the buckets are then
        for those.
      buckets: how many there are.
      max_distance: the distance at which the last one begins.
    """

    weight: Tensor
    buckets: wf.Dim = eqx.field(static=True)
    bidirectional: bool = eqx.field(static=True)
    max_distance: int = eqx.field(static=True)

    def __init__(
        self,
        heads: DimsLike,
        bidirectional: bool,
        buckets: int = 32,
        max_distance: int = 128,
    ):
        self.buckets, self.bidirectional = wf.Dim("buckets", buckets), bidirectional
        self.max_distance = max_distance
        self.weight = declare([self.buckets, *as_dims(heads)], Normal(1.0))

    def __call__(self, positions: Tensor, memory_positions: Tensor) -> Tensor:
        """The attention bias, from the position ids of queries and of keys."""
        bias = wf.take(self.weight, self.bucket(memory_positions - positions), self.buckets)
        (length,), (memory,) = positions.dims[-1:], memory_positions.dims[-1:]
        rest = [d for d in bias.dims if d not in (length, memory)]
        return wf.transpose(bias, [*rest, length, memory])

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance, which is negative for earlier positions."""
        count = self.buckets.size
        offset: Tensor | int = 0
        if self.bidirectional:
            count //= 2
            offset = wf.where(distance > 0, count, 0)
            distance = abs(distance)
        else:
            distance = wf.maximum(-distance, 0)
        exact = count // 2
        far = wf.log(wf.maximum(distance, exact).astype(jnp.float32) / exact)
        far = exact + (far * ((count - exact) / math.log(self.max_distance / exact))).astype(jnp.int32)
        return wf.where(distance < exact, distance, wf.minimum(far, count - 1)) + offset


@reports_call
def rotary(
    x: Tensor,
    positions: Tensor,
    d_kv: DimLike,
    base: float = 10_000.0,
    scaling: tuple[float, float, float, float] | None = None,
) -> Tensor:
    """Rotary position embedding: rotates pairs of features by angles proportional to the position.

    The product of a query and a key then depends on their distance alone. Feature n is paired with
    n + d_kv/2, as in Llama.

    Args:
      x: queries or keys.
      positions: their position ids.
      d_kv: the dim whose features are rotated, of even size.
      base: the longest wavelength is 2π times this.
      scaling: Llama 3's, for sequences longer than those trained on: (factor, low, high, length). Wavelengths
        with fewer than `low` periods in `length` positions are multiplied by `factor`, those with more than
        `high` periods stay, and those between are interpolated.
    """
    d_kv = select_dim(x.dims, d_kv)
    half = wf.Dim("half", d_kv.size // 2)
    rates = base ** (-np.arange(half.size) / half.size)  # in radians per position
    if scaling is not None:
        factor, low, high, length = scaling
        unscaled = np.clip((rates * length / (2 * math.pi) - low) / (high - low), 0, 1)
        rates = rates * (unscaled + (1 - unscaled) / factor)
    angles = positions.astype(jnp.float32) * wf.tensor(rates.astype(np.float32), [half])
    cos, sin = wf.cos(angles), wf.sin(angles)
    first, second = x[d_kv.name, : half.size], x[d_kv.name, half.size :]
    first, second = (t.astype(jnp.float32).rename(**{d_kv.name: "half"}) for t in (first, second))
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return wf.concat([t.rename(half=d_kv.name) for t in rotated], d_kv.name).astype(x.dtype)
