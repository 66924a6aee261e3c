"""From encoded examples to rows: which examples share a row, and the arrays of a batch.

Several short examples are packed into one row, one behind the other. A packed row says of each place which
example it is of (segments, from 1; 0 at padding) and the how-manieth of that example it is (places, from 0):

    targets    7 8 1 | 5 6 9 1 | 0      two examples, each with its end (1), and padding
    tokens     0 7 8 | 0 5 6 9 | 0      what the decoder reads: each one's predecessor
    segments   1 1 1 | 2 2 2 2 | 0
    places     0 1 2 | 0 1 2 3 | 0
    weights    1 1 1 | 1 1 1 1 | 0

The examples of an encoder-decoder have inputs too; an example's inputs and targets are in the same row and
have the same segment number. A row with one example is made in the same way.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from weft.models.batch import START_TOKEN

TokenIds = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class EncodedExample:
    """An example as token ids, each list with its end.

    Attributes:
      targets: what is to be said.
      inputs: what the encoder reads; None: the model has one stack.
    """

    targets: TokenIds
    inputs: TokenIds | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        return len(self.targets), 0 if self.inputs is None else len(self.inputs)


def pack(sizes: Iterable[tuple[int, int]], rows: int, room: tuple[int, int]) -> list[list[int]]:
    """Put examples into rows: each into the first with room for it, until one finds none.

    So the examples of a batch are a range, and where it ends is all one has to know to go on.

    Args:
      sizes: of each example, the places of its targets and of its inputs.
      rows: how many rows there are.
      room: the places of a row, for targets and for inputs.

    Returns:
      For each row, the numbers of its examples, which rise.

    >>> pack([(3, 0), (4, 0), (2, 0), (3, 0), (1, 0)], rows=2, room=(6, 0))
    [[0, 2], [1]]
    """
    filled: list[list[int]] = [[] for _ in range(rows)]
    left, inputs_left = np.full(rows, room[0]), np.full(rows, room[1])
    for number, (size, input_size) in enumerate(sizes):
        fits = (left >= size) & (inputs_left >= input_size)
        row = int(fits.argmax())
        if not fits[row]:
            break
        filled[row].append(number)
        left[row] -= size
        inputs_left[row] -= input_size
    return filled


def bucket_length(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that has room for a size; the last if none has.

    >>> [bucket(size, (8, 16, 32)) for size in (1, 8, 9, 40)]
    [8, 8, 16, 32]
    """
    return buckets[min(bisect.bisect_left(buckets, size), len(buckets) - 1)]


def packed_arrays(
    rows: Sequence[Sequence[EncodedExample]],
    length: int,
    input_length: int | None = None,
    pad: int = 0,
    start: int = START_TOKEN,
) -> dict[str, np.ndarray]:
    """The arrays of a batch, by the names that `weft.models.Batch` has for them.

    Args:
      rows: the examples of each row; they have room in it.
      length: the places of a row.
      input_length: those of a row of inputs; None: there are none.
      pad: the token at padding.
      start: the token that a decoder reads where an example begins.
    """
    made = _laid([[example.targets for example in row] for row in rows], length, pad, start)
    made["weights"] = (made["segments"] > 0).astype(np.float32)
    if input_length is None:
        return made
    read = _laid(
        [[() if one.inputs is None else one.inputs for one in row] for row in rows], input_length, pad
    )
    inputs = {"inputs": read["targets"], "input_places": read["places"], "input_segments": read["segments"]}
    return made | inputs


def _laid(
    rows: Sequence[Sequence[TokenIds]], length: int, pad: int, start: int = START_TOKEN
) -> dict[str, np.ndarray]:
    """Examples one behind the other. All rows are made at once: they are filled from the left, so the filled
    places, row by row, are those of all examples in turn."""
    sizes = np.array([len(ids) for row in rows for ids in row], np.int64)
    segment = np.array([number for row in rows for number in range(1, len(row) + 1)], np.int64)
    filled = np.arange(length) < np.array([[sum(map(len, row))] for row in rows], np.int64).reshape(-1, 1)
    ids = np.concatenate([np.zeros(0, np.int32), *(ids for row in rows for ids in row)])
    places = np.arange(len(ids)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    before = np.where(places > 0, np.roll(ids, 1), start)

    def laid(values: np.ndarray, padding: int) -> np.ndarray:
        array = np.full(filled.shape, padding, np.int32)
        array[filled] = values
        return array

    return {
        "tokens": laid(before, pad),
        "targets": laid(ids, pad),
        "places": laid(places, 0),
        "segments": laid(np.repeat(segment, sizes), 0),
    }
