"""Linear layers over named dims, and embedding tables."""

from __future__ import annotations

import equinox as eqx

import weft as wf
from weft.core.describe import describe
from weft.core.dims import DimLike, DimsLike, as_dim, as_dims, format_dims
from weft.core.errors import DimError, TensorTypeError, nearest
from weft.core.tensor import Tensor

from .module import Initializer, Module, Normal, declare, fan_in, zeros


def check_features(x: Tensor, features: tuple[wf.Dim, ...], layer: str) -> None:
    """Raise if x is not a tensor, or lacks dims that a layer contracts: einsum would broadcast it."""
    if not isinstance(x, Tensor):
        raise TensorTypeError(
            f"{type(x).__name__} is not a tensor",
            rule="layers match their input and their parameters by dim names",
            hint=f'name its dimensions: wf.tensor(array, "batch=64 {format_dims(features[:1])}")',
        ).located(layer)
    names = [d.name for d in x.dims]
    missing = [d for d in features if d.name not in names]
    if missing:
        name = missing[0].name
        raise DimError(
            f"there is no {format_dims(missing)} in {describe(x)}{nearest(name, names)}",
            rule="a layer contracts the dims that it was made for",
            hint=f'rename the dim: x.rename(…="{name}"); or make the layer for another one',
        ).located(layer)


class Linear(Module):
    """`x · weight + bias`, from some dims to others.

    Args:
      inputs: the dims that are contracted.
      outputs: the dims that replace them.
      bias: whether there is a bias.
      initializer: how the weights are initialized.

    >>> from weft import nn
    >>> d_model, heads, d_kv = wf.dims("d_model=8 heads=2 d_kv=4")
    >>> nn.parameters(nn.Linear([d_model], [heads, d_kv], bias=True))
    {'weight': float32[d_model=8, heads=2, d_kv=4] declared, 'bias': float32[heads=2, d_kv=4] declared}
    """

    weight: Tensor
    bias: Tensor | None
    inputs: tuple[wf.Dim, ...] = eqx.field(static=True)
    outputs: tuple[wf.Dim, ...] = eqx.field(static=True)

    def __init__(
        self,
        inputs: DimsLike,
        outputs: DimsLike,
        *,
        bias: bool = False,
        initializer: Initializer | None = None,
    ):
        self.inputs, self.outputs = as_dims(inputs), as_dims(outputs)
        self.weight = declare(self.inputs + self.outputs, initializer or fan_in(self.inputs))
        self.bias = declare(self.outputs, zeros) if bias else None

    def __call__(self, x: Tensor, out: DimsLike | None = None) -> Tensor:
        """`x · weight + bias`; `out` is the order of the result's dims, by default x's, then the outputs."""
        check_features(
            x, self.inputs, f"Linear from [{format_dims(self.inputs)}] to [{format_dims(self.outputs)}]"
        )
        if out is None:
            out = [*(d for d in x.dims if d not in self.inputs), *self.outputs]
        y = wf.einsum(x, self.weight, out=out)
        return y if self.bias is None else y + self.bias


class Embedding(Module):
    """An embedding table: a vector for each token of a vocabulary.

    Args:
      vocab: the dim of the tokens.
      features: the dim of the vectors.
      initializer: how they are initialized.
    """

    weight: Tensor
    vocab: wf.Dim = eqx.field(static=True)
    features: wf.Dim = eqx.field(static=True)

    def __init__(self, vocab: DimLike, features: DimLike, initializer: Initializer | None = None):
        self.vocab, self.features = as_dim(vocab), as_dim(features)
        self.weight = declare([self.vocab, self.features], initializer or Normal(1.0))

    def __call__(self, tokens: Tensor) -> Tensor:
        """The vectors of the tokens. A table that is split over the vocabulary is not gathered."""
        return wf.take(self.weight, tokens, self.vocab)

    def logits(self, x: Tensor) -> Tensor:
        """The products of x with all vectors: the table as the output layer of a model (tied embeddings)."""
        check_features(x, (self.features,), f"Embedding of [{format_dims([self.vocab, self.features])}]")
        return wf.einsum(x, self.weight, out=[*(d for d in x.dims if d != self.features), self.vocab])
