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


@dataclass(frozen=True)
class Encoded:
    """An example as token ids, each list with its end.

    Attributes:
      targets: what is to be said.
      inputs: what the encoder reads; None: the model has one stack.
    """

    targets: Sequence[int]
    inputs: Sequence[int] | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        return len(self.targets), len(self.inputs or ())


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
    left = np.tile(np.asarray(room), (rows, 1))
    for number, size in enumerate(sizes):
        fitting = np.flatnonzero((left >= size).all(1))
        if not len(fitting):
            break
        filled[fitting[0]].append(number)
        left[fitting[0]] -= size
    return filled


def bucket(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that has room for a size; the last if none has.

    >>> [bucket(size, (8, 16, 32)) for size in (1, 8, 9, 40)]
    [8, 8, 16, 32]
    """
    return buckets[min(bisect.bisect_left(buckets, size), len(buckets) - 1)]


def arrays(
    rows: Sequence[Sequence[Encoded]], length: int, input_length: int | None = None, pad: int = 0
) -> dict[str, np.ndarray]:
    """The arrays of a batch, by the names that `weft.models.Batch` has for them.

    Args:
      rows: the examples of each row; they have room in it.
      length: the places of a row.
      input_length: those of a row of inputs; None: there are none.
      pad: the token at padding.
    """
    shape = (len(rows), length)
    tokens, targets = np.full(shape, pad, np.int32), np.full(shape, pad, np.int32)
    places, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for number, row in enumerate(rows):
        for where, segment, example in _places([example.targets for example in row]):
            targets[number, where] = example
            tokens[number, where] = [0, *example[:-1]]
            places[number, where] = np.arange(len(example))
            segments[number, where] = segment
    made = {"tokens": tokens, "targets": targets, "places": places, "segments": segments}
    made["weights"] = (segments > 0).astype(np.float32)
    if input_length is None:
        return made
    shape = (len(rows), input_length)
    inputs = np.full(shape, pad, np.int32)
    places, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for number, row in enumerate(rows):
        for where, segment, example in _places([example.inputs or () for example in row]):
            inputs[number, where] = example
            places[number, where] = np.arange(len(example))
            segments[number, where] = segment
    return made | {"inputs": inputs, "input_places": places, "input_segments": segments}


def _places(examples: Sequence[Sequence[int]]) -> Iterable[tuple[slice, int, Sequence[int]]]:
    """Of each example in a row: where it is, its segment number, and itself."""
    at = 0
    for segment, example in enumerate(examples, start=1):
        yield slice(at, at + len(example)), segment, example
        at += len(example)
