"""What a translation looks at: how much each of its tokens attends to each token of the text.

    seen = Viewer(speaker).view("A cat.", said.tokens)
    seen.weights[n][m]        # from 0 to 1, of the token seen.said[n] over seen.text[m]

The weights are the mean over all heads of all layers of the (first) model, from one pass over the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

import weft as wf
from weft.core.tensor import Tensor
from weft.models import Batch
from weft.models.batch import START_TOKEN
from weft.nn.attention import MASK_VALUE

from .cache import RecordingAttention, layer_runner

END_SYMBOL = "■"  # how the end is shown


@dataclass(frozen=True)
class AttentionMap:
    """Pieces of the translation and of the text, and a row of weights for each of the former."""

    said: tuple[str, ...]
    text: tuple[str, ...]
    weights: tuple[tuple[float, ...], ...]


class _Looking(RecordingAttention):
    """Attends as a whole, and notes how much every position of the encoder's result weighs."""

    def __call__(self, site: str, attention: Any, x: Tensor, memory: Tensor, **how: Any) -> Tensor:
        result = super().__call__(site, attention, x, memory, **how)
        if site != "memory":
            self.own = None
            return result
        q, k, _ = attention.project(x, memory)
        q = q * attention.d_kv.size**-0.5 if attention.scaled else q
        places = [d for d in k.dims if d.name == "memory_length"]
        scores = wf.einsum(q, k, out=[*(d for d in q.dims if d != attention.d_kv), *places])
        scores = scores.astype(jnp.float32)
        if how.get("mask") is not None:
            scores = wf.where(how["mask"], scores, MASK_VALUE)
        self.others = wf.mean(wf.softmax(scores, places[0]), list(attention.heads))
        return result


def attention_weights(model: Any, batch: Batch) -> Tensor:
    """How much each position attends to those of the inputs, over `batch`, `length` and `memory_length`.

    Args:
      model: an encoder-decoder.
      batch: inputs, and the tokens that look at them.
    """
    _, (_, weights) = model.run_with(batch, layer_runner(_Looking))
    return wf.mean(weights, [d for d in weights.dims if d.name not in ("batch", "length", "memory_length")])


class AttentionMapper:
    """Views of what a speaker's translations look at; all are of one size, for one program.

    Args:
      speaker: of an encoder-decoder.
    """

    def __init__(self, speaker: Any):
        self.speaker = speaker
        self.look = wf.spmd(attention_weights, speaker.mesh, speaker.layout)

    def view(self, text: str, tokens: Sequence[int]) -> AttentionMap:
        """What the tokens of a translation look at.

        Args:
          text: what was translated.
          tokens: its translation.
        """
        tokenizer, size = self.speaker.tokenizer, self.speaker.longest
        inputs = [*tokenizer.encode(text)[: size - 1], tokenizer.end]
        said = list(tokens)[:size]
        dims = [wf.Dim("batch", 1), wf.Dim("length", size)]

        def filled(ids: Sequence[int]) -> Tensor:
            return wf.tensor(np.array([[*ids, *[tokenizer.pad] * (size - len(ids))]], np.int32), dims)

        batch = Batch(
            filled([START_TOKEN, *said[:-1]]),
            inputs=filled(inputs),
            input_segments=wf.tensor((np.arange(size) < len(inputs)).astype(np.int32)[None], dims),
        )
        weights = self.look(self.speaker.models[0], batch).numpy("batch", "length", "memory_length")[0]
        return AttentionMap(
            tuple(map(self._piece, said)),
            tuple(map(self._piece, inputs)),
            tuple(tuple(map(float, row[: len(inputs)])) for row in weights[: len(said)]),
        )

    def _piece(self, token: int) -> str:
        return END_SYMBOL if token == self.speaker.tokenizer.end else self.speaker.tokenizer.decode([token])
