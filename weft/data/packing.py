"""Packing: from encoded examples to rows, and from rows to the arrays of a batch.

Several short examples share a row, one after the other. For each position, a packed row records which example
it belongs to (segments, from 1; 0 for padding) and its position within that example (places, from 0):

    targets    7 8 1 | 5 6 9 1 | 0      two examples, each with its end token (1), and padding
    tokens     0 7 8 | 0 5 6 9 | 0      the decoder's input: each target's predecessor
    segments   1 1 1 | 2 2 2 2 | 0
    places     0 1 2 | 0 1 2 3 | 0
    weights    1 1 1 | 1 1 1 1 | 0

Examples for an encoder-decoder also have inputs; an example's inputs and targets are in the same row and have
the same segment number. A row with a single example has the same format.
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
    """An example as token ids, each list with its end token.

    Attributes:
      targets: the tokens to predict.
      inputs: the encoder's input; None for a model with one stack.
    """

    targets: TokenIds
    inputs: TokenIds | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        return len(self.targets), 0 if self.inputs is None else len(self.inputs)


def pack(sizes: Iterable[tuple[int, int]], rows: int, room: tuple[int, int]) -> list[list[int]]:
    """Assign examples to rows: each goes into the first row with room for it, until one fits nowhere.

    Stopping at the first example that does not fit keeps the examples of a batch a contiguous range of the
    stream, so that one number, the end of the range, is enough to resume.

    Args:
      sizes: for each example, the number of target tokens and of input tokens.
      rows: the number of rows.
      room: the positions in a row, for targets and for inputs.

    Returns:
      For each row, the numbers of its examples in ascending order.

    >>> pack([(3, 0), (4, 0), (2, 0), (3, 0), (1, 0)], rows=2, room=(6, 0))
    [[0, 2], [1]]
    """
    packed: list[list[int]] = [[] for _ in range(rows)]
    left, inputs_left = np.full(rows, room[0]), np.full(rows, room[1])
    for number, (size, input_size) in enumerate(sizes):
        fits = (left >= size) & (inputs_left >= input_size)
        row = int(fits.argmax())
        if not fits[row]:
            break
        packed[row].append(number)
        left[row] -= size
        inputs_left[row] -= input_size
    return packed


def bucket_length(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket with room for a size, or the last bucket if none has.

    >>> [bucket_length(size, (8, 16, 32)) for size in (1, 8, 9, 40)]
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
    """The arrays of a batch, by the names of `weft.models.Batch`'s fields.

    Args:
      rows: the examples of each row; they must fit into it.
      length: positions per row.
      input_length: positions per row of inputs; None if there are no inputs.
      pad: the padding token.
      start: the token that a decoder reads at the start of an example.
    """
    made = _concatenate_rows([[example.targets for example in row] for row in rows], length, pad, start)
    made["weights"] = (made["segments"] > 0).astype(np.float32)
    if input_length is None:
        return made
    read = _concatenate_rows(
        [[() if one.inputs is None else one.inputs for one in row] for row in rows], input_length, pad
    )
    inputs = {"inputs": read["targets"], "input_places": read["places"], "input_segments": read["segments"]}
    return made | inputs


def _concatenate_rows(
    rows: Sequence[Sequence[TokenIds]], length: int, pad: int, start: int = START_TOKEN
) -> dict[str, np.ndarray]:
    """Concatenate the examples of each row."""
    # Rows are filled from the left, so in row-major order the filled positions are exactly the tokens of all
    # examples in turn. One boolean assignment then fills all rows, with no Python loop over examples.
    sizes = np.array([len(ids) for row in rows for ids in row], np.int64)
    segment = np.array([number for row in rows for number in range(1, len(row) + 1)], np.int64)
    filled = np.arange(length) < np.array([[sum(map(len, row))] for row in rows], np.int64).reshape(-1, 1)
    ids = np.concatenate([np.zeros(0, np.int32), *(ids for row in rows for ids in row)])
    positions = np.arange(len(ids)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    predecessors = np.where(positions > 0, np.roll(ids, 1), start)

    def fill(values: np.ndarray, padding: int) -> np.ndarray:
        array = np.full(filled.shape, padding, np.int32)
        array[filled] = values
        return array

    return {
        "tokens": fill(predecessors, pad),
        "targets": fill(ids, pad),
        "places": fill(positions, 0),
        "segments": fill(np.repeat(segment, sizes), 0),
    }
