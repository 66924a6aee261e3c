"""Rows out of one long text, for language models: nothing is cut off, and no place is empty.

All texts are one sequence of tokens, each text with its end behind it (see `corpus`). It is tiled with
windows of `length` tokens; a row is one of them. A row's targets are its tokens; what the model reads is each
one's predecessor in the sequence, and 0 (or the tokenizer's start) where a text begins, as in any row:

    the sequence    7 8 1 5 6 9 2 1        two texts, each with its end (1)
    targets         7 8 1 5 | 6 9 2 1      two windows of four
    tokens          0 7 8 0 | 5 6 9 2

The sequence is a ring: the first text follows upon the last. Each epoch's tiling begins at another token of
it, drawn from the seed, and each token is a target exactly once. What the last window has too many counts
nothing (weight 0). To evaluate, take `shuffle=False, epochs=1`: the tiling begins at the first token.

    Windows(PythonDocs(), Bytes(), rows=16, length=128)
    Windows(PythonDocs("valid"), Bytes(), rows=16, length=128, shuffle=False, epochs=1)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from weft.core.errors import DataError

from .batches import BatchStream, HostRows
from .corpus import tokenize
from .tokenizers import check_ids, start_id


@dataclass(frozen=True)
class TokenWindows(BatchStream):
    """Batches of windows, from any position on; positions count windows. See `BatchStream` for all settings.

    Attributes:
      examples: texts; or all tokens in one array, as `tokenize` makes it.
      length: the tokens of a window.

    >>> from weft.data import Bytes
    >>> windows = Windows(["abc", "de"], Bytes(), rows=2, length=4, shuffle=False, epochs=1)
    >>> batch, position = windows.step(0)
    >>> batch.tokens
    i32[batch=2, length=4]
    [[  0, 100, 101, 102],
     [  0, 103, 104,   0]]
    >>> batch.targets
    i32[batch=2, length=4]
    [[100, 101, 102,   1],
     [103, 104,   1,   0]]
    >>> float(batch.weights.numpy().sum()), position
    (7.0, 2)
    """

    def _rules(self) -> Iterator[tuple[bool, str, str, str]]:
        yield from super()._rules()
        given = self.examples
        yield (
            isinstance(given, np.ndarray) and (given.ndim != 1 or given.dtype.kind not in "iu"),
            f"the tokens are {getattr(given, 'dtype', '')}{list(getattr(given, 'shape', ()))}",
            "an array of tokens is one long row of whole numbers",
            "tokenize(texts, tokenizer) makes it",
        )

    @functools.cached_property
    def sequence(self) -> np.ndarray:
        """All tokens."""
        try:
            if isinstance(self.examples, np.ndarray):
                return check_ids(self.examples, self.tokenizer)
            return tokenize(self.examples, self.tokenizer)
        except DataError as error:
            raise error.located(f"{self}") from None

    @property
    def size(self) -> int:
        return -(-len(self.sequence) // self.length)

    def make(self, position: int, first: int, last: int) -> HostRows:
        numbers = range(position, self._until(position + self.rows))
        own = numbers[first:last]
        shifts = {epoch: self._shift(epoch) for epoch in {number // self.size for number in own}}
        starts = np.array([self.index(number) * self.length for number in own], np.int64)  # in the tiling
        begins = starts + np.array([shifts[number // self.size] for number in own], np.int64)
        tokens, targets = np.full((2, last - first, self.length), self.tokenizer.pad, np.int32)
        weights = np.zeros((last - first, self.length), np.float32)
        if len(own):
            where = begins[:, None] + np.arange(-1, self.length)  # one more: the first one's predecessor
            ids = np.asarray(self.sequence.take(where, mode="wrap"), np.int32)
            counted = starts[:, None] + np.arange(self.length) < len(self.sequence)
            read = np.where(ids[:, :-1] == self.tokenizer.end, start_id(self.tokenizer), ids[:, :-1])
            tokens[: len(own)] = np.where(counted, read, self.tokenizer.pad)
            targets[: len(own)] = np.where(counted, ids[:, 1:], self.tokenizer.pad)
            weights[: len(own)] = counted
        return HostRows({"tokens": tokens, "targets": targets, "weights": weights}, numbers.stop)

    def _shift(self, epoch: int) -> int:
        """The token at which an epoch's tiling begins."""
        return self.order.drawn(epoch, below=len(self.sequence))
