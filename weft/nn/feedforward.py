"""The feed-forward block: a projection to a wide dim, an activation, and a projection back."""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx

import weft as wf
from weft.core.dims import DimLike
from weft.core.errors import ModelError, nearest
from weft.core.tensor import Tensor

from .linear import Linear
from .module import Module

# By name: the function, and whether a second projection is gated by it.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "relu": (wf.relu, False),
    "gelu": (lambda x: wf.gelu(x, approximate=False), False),
    "gelu_tanh": (wf.gelu, False),  # the tanh approximation, as in GPT-2 and T5 v1.1
    "gated_gelu": (wf.gelu, True),
    "swiglu": (wf.silu, True),
}


class FeedForward(Module):
    """`f(x · wide) · narrow`, or gated: `(f(x · gate) * (x · wide)) · narrow`.

    Args:
      d_model: the dim of x.
      d_ff: the wide dim.
      activation: a name of `ACTIVATIONS`.
      bias: whether the projections have biases.
    """

    gate: Linear | None
    wide: Linear
    narrow: Linear
    activation: str = eqx.field(static=True)

    def __init__(self, d_model: DimLike, d_ff: DimLike, activation: str = "relu", *, bias: bool = False):
        if activation not in ACTIVATIONS:
            raise ModelError(
                f"there is no activation {activation!r}{nearest(str(activation), ACTIVATIONS)}",
                rule=f"an activation is one of {', '.join(ACTIVATIONS)}",
                hint="for another function, build the block from two nn.Linear",
            ).located("FeedForward")
        gated = ACTIVATIONS[activation][1]
        self.activation = activation
        self.gate = Linear([d_model], [d_ff], bias=bias) if gated else None
        self.wide = Linear([d_model], [d_ff], bias=bias)
        self.narrow = Linear([d_ff], [d_model], bias=bias)

    def __call__(self, x: Tensor, dropout: Callable[[Tensor], Tensor] = lambda h: h) -> Tensor:
        """The block applied to x, with dropout on the hidden features."""
        f, _ = ACTIVATIONS[self.activation]
        if self.gate is None:
            return self.narrow(dropout(f(self.wide(x))))
        return self.narrow(dropout(f(self.gate(x)) * self.wide(x)))
