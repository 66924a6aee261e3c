"""The input of a Transformer: rows of tokens, validated before use."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import numpy as np

import weft as wf
from weft.core.errors import ModelError
from weft.core.tensor import Tensor

from .config import Config

# The decoder's first input token, regardless of the tokenizer's padding token. Decoder-only models use the
# tokenizer's `start` if it has one.
START_TOKEN = 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows of tokens, each over `batch` and `length`.

    Attributes:
      tokens: the input tokens: the decoder's, or those of a model with one stack.
      targets: the target token at each position.
      weights: the loss weight of each position; None: all 1.
      places: position ids, counted within each example; None: from 0 on.
      segments: segment ids of packed rows: the example of each position, from 1 on, and 0 for padding, which
        experts skip; None: each row is one example, with id 1.
      prefix: by row, the length of the prefix that all positions may attend to (a prefix LM).
      inputs, input_places, input_segments: the same for the encoder of an encoder-decoder.
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
        """The batch with its dims in one order, or an error that names the invalid field."""
        has_both, given = config.kind == "encoder_decoder", dict[str, Tensor]()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                if not isinstance(value, Tensor):
                    raw = isinstance(value, jax.Array | np.ndarray)
                    kind = "raw array" if raw else type(value).__name__
                    raise invalid_batch(f"{field.name} is a {kind}, not a tensor")
                given[field.name] = value
        if has_both and "inputs" not in given:
            raise invalid_batch("an encoder-decoder needs inputs, and the batch has none")
        for first, names in (("tokens", _OWN), ("inputs", _INPUTS)):
            for name in (n for n in names if n in given):
                dims, expected = given[name].dims, given[first].dims
                if "length" not in {d.name for d in expected}:
                    raise invalid_batch(f"{first}{list(expected)} has no dim length")
                shared_by_rows = name.endswith("places") and {d.name for d in dims} == {"length"}
                if name != "prefix" and not shared_by_rows and set(dims) != set(expected):
                    raise invalid_batch(f"{name}{list(dims)} has other dims than {first}{list(expected)}")
                rest = [d for d in expected if d.name != "length"]
                order = [d for d in (*rest, *(d for d in expected if d.name == "length")) if d in dims]
                given[name] = wf.transpose(given[name], order) if tuple(order) != dims else given[name]
        return Batch(**given)


_OWN = ("tokens", "targets", "weights", "places", "segments", "prefix")
_INPUTS = ("inputs", "input_places", "input_segments")


def as_batch(batch: Batch, config: Config) -> Batch:
    """A batch that is valid for a model, or an error."""
    if isinstance(batch, Batch):
        return batch.checked(config)
    raise invalid_batch(f"expected a Batch, got a {type(batch).__name__}")


def invalid_batch(fact: str) -> ModelError:
    """The error for an invalid batch."""
    return ModelError(
        fact,
        rule="the fields of a Batch are tensors over batch and length, with the same dims within a sequence",
        hint="Batch(tokens, targets, inputs=...), each wf.tensor(array, [batch, length])",
    ).located("Batch")


def shift_right(targets: Tensor, segments: Tensor | None = None) -> Tensor:
    """The decoder's inputs: the token before each target, `START_TOKEN` where an example begins."""
    tokens = wf.shift(targets, "length", 1)  # fills with zeros, the value of `START_TOKEN`
    if segments is None:
        return tokens
    return wf.where(segments == wf.shift(segments, "length", 1), tokens, START_TOKEN)
