"""What a Transformer reads: rows of tokens, checked before they are used."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import weft as wf
from weft.core.errors import ModelError
from weft.core.tensor import Tensor

from .config import Config

# The token that a decoder reads where an example begins, whichever its tokenizer has for padding; a decoder
# alone reads the `start` of a tokenizer that has one.
START_TOKEN = 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows of tokens, each over `batch` and `length`.

    Attributes:
      tokens: what the model reads: the decoder's, or those of a model with one stack.
      targets: what it should say at each place.
      weights: how much each place counts in the loss, and nothing else; None: all alike.
      places: the number of each place in its example; None: from 0 on.
      segments: which example of a packed row each place is of, from 1 on, and 0 at padding, which no expert
        sees; None: one example in a row, number 1.
      prefix: by row, how many places at its beginning all may see (a prefix LM).
      inputs, input_places, input_segments: the encoder's, of an encoder-decoder.
    """

    tokens: Tensor
    targets: Tensor | None = None
    weights: Tensor | None = None
    places: Tensor | None = None
    segments: Tensor | None = None
    prefix: Tensor | None = None
    inputs: Tensor | None = None
    input_places: Tensor | None = None
    input_segments: Tensor | None = None

    def checked(self, config: Config) -> Batch:
        """The batch with all rows' dims in one order, or an error that names the field that is wrong."""
        two, given = config.kind == "encoder_decoder", dict[str, Tensor]()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                if not isinstance(value, Tensor):
                    raw = isinstance(value, jax.Array | np.ndarray)
                    what = "raw array" if raw else type(value).__name__
                    raise invalid_batch(f"{field.name} is a {what}, not a tensor")
                given[field.name] = value
        if two and "inputs" not in given:
            raise invalid_batch("the encoder-decoder has no inputs to read")
        for first, names in (("tokens", _OWN), ("inputs", _INPUTS)):
            for name in (n for n in names if n in given):
                dims, expected = given[name].dims, given[first].dims
                if "length" not in {d.name for d in expected}:
                    raise invalid_batch(f"{first}{list(expected)} has no dim length")
                places = name.endswith("places") and {d.name for d in dims} == {"length"}
                if name != "prefix" and not places and set(dims) != set(expected):
                    raise invalid_batch(f"{name}{list(dims)} has other dims than {first}{list(expected)}")
                rest = [d for d in expected if d.name != "length"]
                order = [d for d in (*rest, *(d for d in expected if d.name == "length")) if d in dims]
                given[name] = wf.transpose(given[name], order) if tuple(order) != dims else given[name]
        return Batch(**given)


_OWN = ("tokens", "targets", "weights", "places", "segments", "prefix")
_INPUTS = ("inputs", "input_places", "input_segments")


def as_batch(batch: Any, config: Config) -> Batch:
    """A batch that fits a model, or an error."""
    if isinstance(batch, Batch):
        return batch.checked(config)
    raise invalid_batch(f"a {type(batch).__name__} was given in place of a Batch")


def invalid_batch(fact: str) -> ModelError:
    """The error for a batch that can't be read."""
    return ModelError(
        fact,
        rule="the rows of a Batch are tensors over batch and length, those of one sequence over the same",
        hint="Batch(tokens, targets, inputs=...), each wf.tensor(array, [batch, length])",
    ).located("Batch")


def shift_right(targets: Tensor, segments: Tensor | None = None) -> Tensor:
    """The decoder's inputs: the token before each target, `START_TOKEN` where an example begins."""
    tokens = wf.shift(targets, "length", 1)  # zeros come in, which `START_TOKEN` is
    if segments is None:
        return tokens
    return wf.where(segments == wf.shift(segments, "length", 1), tokens, START_TOKEN)
