"""Rows of complete examples: texts for language models, pairs for encoder-decoders, several to a row.

stream = ExampleStream(ParallelText("train.en", "train.fr").open(), ByteTokenizer(), rows=64, length=256)
batch, position = stream.step(0)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft.core.field_types import PositiveInt
from weft.core.fields import documented
from weft.models.batch import START_TOKEN

from .batches import BatchStream, HostRows
from .packing import EncodedExample, bucket_length, pack, packed_arrays
from .tokenizers import check_ids, start_id

CACHED_TOKENS = 1 << 22  # the encoded examples of about this many positions are cached


class BatchPlan(NamedTuple):
    """The contents of a batch: each row's example numbers, the row lengths, and the position after it."""

    rows: list[list[int]]
    length: int
    input_length: int | None
    position: int


@documented
@dataclass(frozen=True)
class ExampleStream(BatchStream):
    """A stream of batches of complete examples: texts, or pairs of texts for encoder-decoders.

    The tokenizer encodes both texts of a pair. Examples that are longer than a row are truncated.
    """

    input_length: PositiveInt | None = None
    """Positions per row of encoder inputs; None means `length`."""
    packed: bool = True
    """Whether several examples share a row."""
    buckets: tuple[int, ...] = ()
    """Without packing, further row lengths below `length`. Examples of similar length share a batch, and a
    batch has the length of the smallest bucket that fits them."""
    window: PositiveInt = 32
    """With buckets, the number of batches whose examples are sorted by length together."""

    def _rules(self) -> Iterator[tuple[bool, str, str, str]]:
        yield from super()._rules()
        yield (
            self.packed and bool(self.buckets),
            f"packed rows with buckets {self.buckets}",
            "packed rows all have one length; buckets are for rows with one example",
            "use packed=False, or omit buckets",
        )
        yield (
            list(self.buckets) != sorted({b for b in self.buckets if 0 < b < self.length}),
            f"buckets are {self.buckets}",
            f"buckets are positive, strictly increasing and below length ({self.length}), the last bucket",
            f"for example buckets=({self.length // 4}, {self.length // 2})",
        )

    @property
    def size(self) -> int:
        return len(self.examples)

    # The examples

    @functools.cached_property
    def paired(self) -> bool:
        """Whether examples are pairs, so that batches have encoder inputs."""
        return not isinstance(self.examples[0], str)

    @functools.cached_property
    def _encoded(self) -> Callable[[int], EncodedExample]:
        """Encode an example by its index, with a cache."""
        # A window of buckets is planned once per batch, and all its examples are needed each time.
        size = max(1024, 2 * self.rows * self.window, CACHED_TOKENS // (self.length + self._input_room))
        return functools.lru_cache(maxsize=size)(self._encode)

    def _encode(self, index: int) -> EncodedExample:
        example = self.examples[index]
        if not self.paired:
            return EncodedExample(self._ids(example, self.length))
        source, target = example
        return EncodedExample(self._ids(target, self.length), self._ids(source, self._input_room))

    def _ids(self, text: str, limit: int) -> np.ndarray:
        return np.array([*self.tokenizer.encode(text), self.tokenizer.end][:limit], np.int32)

    def _example(self, number: int) -> EncodedExample:
        """Example number n of the stream."""
        return self._encoded(self.index(number))

    @property
    def _input_room(self) -> int:
        return self.length if self.input_length is None else self.input_length

    # The batches

    def plan(self, position: int) -> BatchPlan:
        """The contents of the batch that starts at a position."""
        inputs = self._input_room if self.paired else None
        if self.packed:
            numbers = itertools.count(position) if self.total is None else range(position, self.total)
            sizes = (self._example(number).sizes for number in numbers)
            rows = pack(sizes, self.rows, (self.length, inputs or 0))
            rows = [[position + number for number in row] for row in rows]
            return BatchPlan(rows, self.length, inputs, position + sum(map(len, rows)))
        if not self.buckets:
            numbers = range(position, self._clip(position + self.rows))
            return BatchPlan(self._one_per_row(numbers), self.length, inputs, numbers.stop)
        return self._bucketed(position)

    def _one_per_row(self, numbers: Sequence[int]) -> list[list[int]]:
        return [[number] for number in numbers] + [[] for _ in range(self.rows - len(numbers))]

    def _bucketed(self, position: int) -> BatchPlan:
        """Sort a window of the stream by size, cut it into batches, and shuffle them.

        A position within a window counts its batches, so the plan of the window is recomputed from scratch.
        """
        size = self.rows * self.window
        window, done = divmod(position, size)
        numbers = range(window * size, self._clip((window + 1) * size))
        batches = _by_size(numbers, self.rows, lambda number: self._example(number).sizes)
        full = [batch for batch in batches if len(batch) == self.rows]
        if self.shuffle:
            rng = np.random.default_rng([self.seed, window])
            full = [full[n] for n in rng.permutation(len(full))]
        # The partial batch stays last: the batches before it all have `rows` examples, so that
        # `done // rows` is the index of the next one.
        batch = (full + [batch for batch in batches if len(batch) < self.rows])[done // self.rows]
        targets, inputs = np.max([self._example(number).sizes for number in batch], axis=0)
        length = bucket_length(targets, (*self.buckets, self.length))
        shorter = tuple(b for b in self.buckets if b < self._input_room)
        input_length = bucket_length(inputs, (*shorter, self._input_room)) if self.paired else None
        return BatchPlan(self._one_per_row(batch), length, input_length, position + len(batch))

    def make_rows(self, position: int, first: int, last: int) -> HostRows:
        plan = self.plan(position)
        rows = [[self._example(number) for number in row] for row in plan.rows[first:last]]
        start = START_TOKEN if self.paired else start_id(self.tokenizer)
        arrays = packed_arrays(rows, plan.length, plan.input_length, self.tokenizer.pad, start)
        for name in arrays.keys() & {"targets", "inputs"}:
            check_ids(arrays[name], self.tokenizer)
        return HostRows(arrays, plan.position)


def _by_size(numbers: Sequence[int], rows: int, size: Callable[[int], tuple[int, int]]) -> list[list[int]]:
    """Batches of examples of similar size; the last, with the longest, may have fewer than `rows`."""
    ordered = sorted(numbers, key=lambda number: (size(number), number))
    return [ordered[at : at + rows] for at in range(0, len(ordered), rows)]
