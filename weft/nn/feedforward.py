"""The feed-forward block: out to a wide dim and back."""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx

import weft as wf
from weft.core.errors import ModelError, nearest
from weft.core.tensor import Tensor

from .linear import Linear
from .module import Module

# By name: the function, and whether a second product gates it.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "relu": (wf.relu, False),
    "gelu": (lambda x: wf.gelu(x, approximate=False), False),
    "gelu_tanh": (wf.gelu, False),  # the approximation by tanh of GPT-2 and T5 v1.1
    "gated_gelu": (wf.gelu, True),
    "swiglu": (wf.silu, True),
}


class FeedForward(Module):
    """`f(x · wide) · narrow`, or gated: `(f(x · gate) * (x · wide)) · narrow`.

    Args:
      d_model: the dim of x.
      d_ff: the wide dim.
      activation: a name of `ACTIVATIONS`.
      bias: whether the maps have one.
    """

    gate: Linear | None
    wide: Linear
    narrow: Linear
    activation: str = eqx.field(static=True)

    def __init__(self, d_model: wf.Dim, d_ff: wf.Dim, activation: str = "relu", *, bias: bool = False):
        if activation not in ACTIVATIONS:
            raise ModelError(
                f"there is no activation {activation!r}{nearest(str(activation), ACTIVATIONS)}",
                rule=f"an activation is one of {', '.join(ACTIVATIONS)}",
                hint="for another function, write the block of two nn.Linear",
            ).located("FeedForward")
        gated = ACTIVATIONS[activation][1]
        self.activation = activation
        self.gate = Linear([d_model], [d_ff], bias=bias) if gated else None
        self.wide = Linear([d_model], [d_ff], bias=bias)
        self.narrow = Linear([d_ff], [d_model], bias=bias)

    def __call__(self, x: Tensor, drop: Callable[[Tensor], Tensor] = lambda h: h) -> Tensor:
        """The block's map of x; `drop` is applied to what is between, as dropout."""
        f, _ = ACTIVATIONS[self.activation]
        if self.gate is None:
            return self.narrow(drop(f(self.wide(x))))
        return self.narrow(drop(f(self.gate(x)) * self.wide(x)))
