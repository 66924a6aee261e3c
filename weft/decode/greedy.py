"""Greedy decoding: the likeliest token, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

import weft as wf
from weft.data import Encoded, Tokenizer, arrays
from weft.models import Batch
from weft.tensor import Tensor

from .cache import empty, step


def greedy(model: Any, batch: Batch, end: int) -> Tensor:
    """The likeliest continuation of nothing, given the encoder's inputs.

    Args:
      model: an encoder-decoder.
      batch: with inputs; its `tokens` only say how many places there are.
      end: the token after which a row is done.

    Returns:
      Tokens over `batch` and `length`; after the end they are `end`.
    """
    rows, length = batch.tokens.dims
    one = length.resize(1)

    def going(carry: Any) -> Tensor:
        place, _, _, done, _ = carry
        return (place < length.size) & ~wf.all(done)

    def say(carry: Any) -> Any:
        place, said, token, done, kept = carry
        logits, kept = step(model, kept, token, place, batch)
        token = wf.argmax(logits, model.embedding.vocab).astype(jnp.int32)
        token = wf.where(done, end, token)
        return place + 1, wf.update(said, length, place, token), token, done | (token == end), kept

    first = wf.zeros([rows, one], jnp.int32)
    begin = wf.zeros((), jnp.int32), wf.full([rows, length], end, jnp.int32), first, first < 0
    return wf.while_loop(going, say, (*begin, empty(model, batch, length.size)))[1]


def translate(
    program: wf.Program, model: Any, texts: Sequence[str], tokenizer: Tokenizer, rows: int, length: int
) -> Iterator[str]:
    """The translations of texts, in their order.

    Args:
      program: `greedy`, staged for a mesh and a layout, with `end` static.
      model: whose.
      texts: what is translated; a longer one than there are places is cut.
      tokenizer: of both languages.
      rows: how many are translated at once.
      length: the places of a row, on both sides.
    """
    for first in range(0, len(texts), rows):
        some = texts[first : first + rows]
        inputs = [[*tokenizer.encode(text)[: length - 1], tokenizer.end] for text in some]
        inputs += [[tokenizer.end]] * (rows - len(some))
        said = program(model, _batch(inputs, length, tokenizer.pad), tokenizer.end).numpy()
        yield from (tokenizer.decode(ids) for ids in said[: len(some)])


def _batch(inputs: list[list[int]], length: int, pad: int) -> Batch:
    """One example in each row, with as many places for what is said as there are."""
    made = arrays([[Encoded([pad] * length, ids)] for ids in inputs], length, length, pad)
    dims = wf.Dim("batch", len(inputs)), wf.Dim("length", length)
    return Batch(**{n: wf.tensor(a, dims) for n, a in made.items() if n not in ("targets", "weights")})
