"""Attention maps of translations: how much each generated token attends to each token of the text.

    attention = AttentionMapper(generator).attention_map("A cat.", completion.tokens)
    attention.weights[n][m]        # from 0 to 1, of the token attention.target[n] over attention.source[m]

The weights are the mean over all heads of all layers of the (first) model, from one pass over all positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

import weft as wf
from weft import nn
from weft.core.tensor import Tensor
from weft.models import Batch, Transformer
from weft.models.batch import START_TOKEN
from weft.nn.attention import MASK_VALUE

from .cache import RecordingAttention, layer_runner

if TYPE_CHECKING:
    from .generator import TextGenerator

END_SYMBOL = "■"  # shown for the end token


@dataclass(frozen=True)
class AttentionMap:
    """The tokens of a translation and of its source as texts, and one row of weights per target token."""

    target: tuple[str, ...]
    source: tuple[str, ...]
    weights: tuple[tuple[float, ...], ...]


class _RecordingWeights:
    """Attention over all positions at once that records the weights of cross-attention."""

    def __init__(self) -> None:
        self.attend = RecordingAttention()
        self.own: None = None
        self.others: Any = None

    def __call__(self, site: str, attention: nn.Attention, x: Tensor, memory: Tensor, **how: Any) -> Tensor:
        result = self.attend(site, attention, x, memory, **how)
        if site != "memory":
            return result
        q, k, _ = attention.project(x, memory)
        q = q * attention.d_kv.size**-0.5 if attention.scaled else q
        positions = [d for d in k.dims if d.name == "memory_length"]
        scores = wf.einsum(q, k, out=[*(d for d in q.dims if d != attention.d_kv), *positions])
        scores = scores.astype(jnp.float32)
        if how.get("visible") is not None:
            scores = wf.where(how["visible"], scores, MASK_VALUE)
        self.others = wf.mean(wf.softmax(scores, positions[0]), list(attention.heads))
        return result


def attention_weights(model: Transformer, batch: Batch) -> Tensor:
    """The attention of each position to the inputs, over `batch`, `length` and `memory_length`.

    Args:
      model: an encoder-decoder.
      batch: the inputs, and the tokens that attend to them.
    """
    _, (_, weights) = model.read(batch, layer_runner(_RecordingWeights))
    return wf.mean(weights, [d for d in weights.dims if d.name not in ("batch", "length", "memory_length")])


class AttentionMapper:
    """Computes attention maps of translations. All texts are padded to one length, for one program.

    Args:
      generator: a generator of an encoder-decoder.
    """

    def __init__(self, generator: TextGenerator):
        self.generator = generator
        self.attention_weights = wf.spmd(attention_weights, generator.mesh, generator.layout)

    def attention_map(self, text: str, tokens: Sequence[int]) -> AttentionMap:
        """The attention of a translation's tokens to the tokens of its source.

        Args:
          text: the source.
          tokens: the translation.
        """
        tokenizer, size = self.generator.tokenizer, self.generator.longest
        source = [*tokenizer.encode(text)[: size - 1], tokenizer.end]
        target = list(tokens)[:size]
        dims = [wf.Dim("batch", 1), wf.Dim("length", size)]

        def padded(ids: Sequence[int]) -> Tensor:
            return wf.tensor(np.array([[*ids, *[tokenizer.pad] * (size - len(ids))]], np.int32), dims)

        batch = Batch(
            padded([START_TOKEN, *target[:-1]]),
            inputs=padded(source),
            input_segments=wf.tensor((np.arange(size) < len(source)).astype(np.int32)[None], dims),
        )
        weights = self.attention_weights(self.generator.models[0], batch)
        array = weights.numpy("batch", "length", "memory_length")[0]
        return AttentionMap(
            tuple(map(self._text, target)),
            tuple(map(self._text, source)),
            tuple(tuple(map(float, row[: len(source)])) for row in array[: len(target)]),
        )

    def _text(self, token: int) -> str:
        tokenizer = self.generator.tokenizer
        return END_SYMBOL if token == tokenizer.end else tokenizer.decode([token])
