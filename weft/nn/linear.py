"""Linear maps over named dims, and look-up tables."""

from __future__ import annotations

from typing import Any

import equinox as eqx

import weft as wf
from weft.core.describe import describe
from weft.core.dims import as_dims, format_dims
from weft.core.errors import DimError, TensorTypeError, nearest
from weft.core.tensor import Tensor

from .module import Initializer, Module, Normal, declare, fan_in, zeros


def check_features(x: Any, features: tuple[wf.Dim, ...], layer: str) -> None:
    """An error if x is no tensor, or lacks dims that a layer maps: a product would broadcast it instead."""
    if not isinstance(x, Tensor):
        raise TensorTypeError(
            f"{type(x).__name__} is not a tensor",
            rule="layers match their input with their parameters by the names of dims",
            hint=f'name its dimensions: wf.tensor(array, "batch=64 {format_dims(features[:1])}")',
        ).located(layer)
    names = [d.name for d in x.dims]
    missing = [d for d in features if d.name not in names]
    if missing:
        name = missing[0].name
        raise DimError(
            f"there is no {format_dims(missing)} in {describe(x)}{nearest(name, names)}",
            rule="a layer maps the dims that it was made for",
            hint=f'rename the dim that is meant: x.rename(…="{name}"); or make the layer for another',
        ).located(layer)


class Linear(Module):
    """`x · weight + bias`, from some dims to others.

    Args:
      inputs: the dims that are summed over.
      outputs: the dims that come instead.
      bias: whether there is one.
      draw: how the weights are drawn.

    >>> from weft import nn
    >>> d_model, heads, d_kv = wf.dims("d_model=8 heads=2 d_kv=4")
    >>> nn.parameters(nn.Linear([d_model], [heads, d_kv], bias=True))
    {'weight': float32[d_model=8, heads=2, d_kv=4] declared, 'bias': float32[heads=2, d_kv=4] declared}
    """

    weight: Tensor
    bias: Tensor | None
    inputs: tuple[wf.Dim, ...] = eqx.field(static=True)
    outputs: tuple[wf.Dim, ...] = eqx.field(static=True)

    def __init__(self, inputs: Any, outputs: Any, *, bias: bool = False, draw: Initializer | None = None):
        self.inputs, self.outputs = as_dims(inputs), as_dims(outputs)
        self.weight = declare(self.inputs + self.outputs, draw or fan_in(self.inputs))
        self.bias = declare(self.outputs, zeros) if bias else None

    def __call__(self, x: Tensor, out: Any = None) -> Tensor:
        """The map of x; `out` gives the order of the result's dims, by default x's, then the outputs."""
        check_features(
            x, self.inputs, f"Linear from [{format_dims(self.inputs)}] to [{format_dims(self.outputs)}]"
        )
        if out is None:
            out = [*(d for d in x.dims if d not in self.inputs), *self.outputs]
        y = wf.einsum(x, self.weight, out=out)
        return y if self.bias is None else y + self.bias


class Embedding(Module):
    """A row of numbers for each of a vocabulary's tokens.

    Args:
      vocab: the dim of the tokens.
      features: the dim of the rows.
      draw: how they are drawn.
    """

    weight: Tensor
    vocab: wf.Dim = eqx.field(static=True)
    features: wf.Dim = eqx.field(static=True)

    def __init__(self, vocab: wf.Dim, features: wf.Dim, draw: Initializer | None = None):
        self.vocab, self.features = vocab, features
        self.weight = declare([vocab, features], draw or Normal(1.0))

    def __call__(self, tokens: Tensor) -> Tensor:
        """The rows of the tokens; split over the vocabulary, the table stays where it is."""
        return wf.take(self.weight, tokens, self.vocab)

    def logits(self, x: Tensor) -> Tensor:
        """The products of x with all rows: the same table as the last layer of a model (tied)."""
        check_features(x, (self.features,), f"Embedding of [{format_dims([self.vocab, self.features])}]")
        return wf.einsum(x, self.weight, out=[*(d for d in x.dims if d != self.features), self.vocab])
