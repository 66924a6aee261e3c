"""Token windows for language models: rows sliced out of one long token sequence, with no waste.

All texts form one sequence of tokens, with an end token after each text (see `corpus`). The sequence is tiled
with windows of `length` tokens; each row is a window. A row's targets are its tokens. The model reads each
target's predecessor in the sequence, or 0 (or the tokenizer's start token) at the start of a text, as in any
other row:

    sequence        7 8 1 5 6 9 2 1        two texts, each with its end token (1)
    targets         7 8 1 5 | 6 9 2 1      two windows of four
    tokens          0 7 8 0 | 5 6 9 2

The sequence is circular: the first text follows the last. The tiling of each epoch starts at a different
token, drawn from the seed, and each token is a target exactly once per epoch. The surplus positions of the
last window have weight 0. For evaluation use `shuffle=False, epochs=1`: the tiling starts at the first token.

    TokenWindows(PythonDocs(), ByteTokenizer(), rows=16, length=128)
    TokenWindows(PythonDocs("valid"), ByteTokenizer(), rows=16, length=128, shuffle=False, epochs=1)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from weft.core.errors import DataError
from weft.core.fields import documented

from .batches import BatchStream, HostRows
from .corpus import tokenize
from .tokenizers import check_ids, start_id


@documented
@dataclass(frozen=True)
class TokenWindows(BatchStream):
    """A stream of batches of windows; positions count windows.

    The examples are texts, or all tokens in one array, as returned by `tokenize`. A window has `length`
    tokens.

    >>> from weft.data import ByteTokenizer
    >>> windows = TokenWindows(["abc", "de"], ByteTokenizer(), rows=2, length=4, shuffle=False, epochs=1)
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
            "an array of tokens has one dimension and an integer dtype",
            "tokenize(texts, tokenizer) returns one",
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

    def make_rows(self, position: int, first: int, last: int) -> HostRows:
        numbers = range(position, self._clip(position + self.rows))
        own = numbers[first:last]
        offsets = {epoch: self._offset(epoch) for epoch in {number // self.size for number in own}}
        starts = np.array([self.index(number) * self.length for number in own], np.int64)  # within the tiling
        begins = starts + np.array([offsets[number // self.size] for number in own], np.int64)
        tokens, targets = np.full((2, last - first, self.length), self.tokenizer.pad, np.int32)
        weights = np.zeros((last - first, self.length), np.float32)
        if len(own):
            where = begins[:, None] + np.arange(-1, self.length)  # from -1: the first target's predecessor
            ids = np.asarray(self.sequence.take(where, mode="wrap"), np.int32)
            counted = starts[:, None] + np.arange(self.length) < len(self.sequence)
            read = np.where(ids[:, :-1] == self.tokenizer.end, start_id(self.tokenizer), ids[:, :-1])
            tokens[: len(own)] = np.where(counted, read, self.tokenizer.pad)
            targets[: len(own)] = np.where(counted, ids[:, 1:], self.tokenizer.pad)
            weights[: len(own)] = counted
        return HostRows({"tokens": tokens, "targets": targets, "weights": weights}, numbers.stop)

    def _offset(self, epoch: int) -> int:
        """The token at which an epoch's tiling starts."""
        return self.order.random_offset(epoch, below=len(self.sequence))
