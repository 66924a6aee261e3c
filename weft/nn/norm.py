"""Normalization layers, computed in float32 whatever the dtype of x."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp

import weft as wf
from weft.core.dims import DimLike, as_dim
from weft.core.tensor import Tensor

from .module import Module, declare, ones, zeros


class RMSNorm(Module):
    """`x / sqrt(mean(x²) + epsilon) · scale` over one dim: the norm of Mesh-TensorFlow and T5."""

    scale: Tensor
    dim: wf.Dim = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)

    def __init__(self, dim: DimLike, epsilon: float = 1e-6):
        self.dim, self.epsilon = as_dim(dim), epsilon
        self.scale = declare(self.dim, ones)

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.astype(jnp.float32)
        mean_square = wf.mean(wf.square(wide), self.dim)
        return (wide * wf.rsqrt(mean_square + self.epsilon) * self.scale).astype(x.dtype)


class LayerNorm(Module):
    """`(x - mean) / sqrt(variance + epsilon) · scale + bias` over one dim."""

    scale: Tensor
    bias: Tensor
    dim: wf.Dim = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)

    def __init__(self, dim: DimLike, epsilon: float = 1e-5):
        self.dim, self.epsilon = as_dim(dim), epsilon
        self.scale, self.bias = declare(self.dim, ones), declare(self.dim, zeros)

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.astype(jnp.float32)
        centered = wide - wf.mean(wide, self.dim)
        variance = wf.mean(wf.square(centered), self.dim)
        return (centered * wf.rsqrt(variance + self.epsilon) * self.scale + self.bias).astype(x.dtype)


NORMS: dict[str, type[Module]] = {"rms": RMSNorm, "layer": LayerNorm}
