"""Rows of whole examples: texts for language models, pairs for encoder-decoders, several to a row.

stream = Stream(Parallel("train.en", "train.fr").open(), Bytes(), rows=64, length=256)
batch, position = stream.step(0)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from weft.models.batch import START_TOKEN

from .batches import BatchStream, HostRows
from .packing import EncodedExample, bucket_length, pack, packed_arrays
from .tokenizers import check_ids, start_id

CACHED_TOKENS = 1 << 22  # so many places' examples are kept encoded


class BatchPlan(NamedTuple):
    """What is in a batch: for each row, its examples' numbers in the stream; the places; and what is next."""

    rows: list[list[int]]
    length: int
    input_length: int | None
    position: int


@dataclass(frozen=True)
class ExampleStream(BatchStream):
    """Batches of whole examples, from any position on. See `BatchStream` for the other settings.

    Attributes:
      examples: texts, or pairs of texts; pairs are for encoder-decoders.
      tokenizer: of the texts, both of a pair.
      length: the places of a row; a longer example is cut.
      input_length: those of the encoder's rows; None: the same.
      packed: several examples share a row.
      buckets: if not packed, the lengths that rows may have, below `length`: batches are of examples that are
        about equally long, and as long as the smallest bucket with room for them.
      window: with buckets, the batches among whose examples equally long ones are sought.
    """

    input_length: int | None = None
    packed: bool = True
    buckets: tuple[int, ...] = ()
    window: int = 32

    def _rules(self) -> Iterator[tuple[bool, str, str, str]]:
        yield from super()._rules()
        yield (
            self.packed and bool(self.buckets),
            f"packed rows with buckets {self.buckets}",
            "packed rows are all of one length; buckets are for rows of one example",
            "packed=False, or no buckets",
        )
        yield (
            list(self.buckets) != sorted({b for b in self.buckets if 0 < b < self.length}),
            f"buckets are {self.buckets}",
            f"buckets rise, from 1 or more, and stay below length ({self.length}), which is the last",
            f"for example buckets=({self.length // 4}, {self.length // 2})",
        )

    def _sizes(self) -> dict[str, int | None]:
        return super()._sizes() | {"input_length": self.input_length, "window": self.window}

    @property
    def size(self) -> int:
        return len(self.examples)

    # The examples

    @functools.cached_property
    def pairs(self) -> bool:
        """Whether examples are pairs, and batches have inputs."""
        return not isinstance(self.examples[0], str)

    @functools.cached_property
    def _encoded(self) -> Callable[[int], EncodedExample]:
        """An example by its index. As many are kept as planning ahead needs, and more if they are short."""
        kept = max(1024, 2 * self.rows * self.window, CACHED_TOKENS // (self.length + self._input_room))
        return functools.lru_cache(maxsize=kept)(self._encode)

    def _encode(self, index: int) -> EncodedExample:
        example = self.examples[index]
        if not self.pairs:
            return EncodedExample(self._ids(example, self.length))
        source, target = example
        return EncodedExample(self._ids(target, self.length), self._ids(source, self._input_room))

    def _ids(self, text: str, most: int) -> np.ndarray:
        return np.array([*self.tokenizer.encode(text), self.tokenizer.end][:most], np.int32)

    def _numbered(self, number: int) -> EncodedExample:
        """Example number n of the stream."""
        return self._encoded(self.index(number))

    @property
    def _input_room(self) -> int:
        return self.length if self.input_length is None else self.input_length

    # The batches

    def plan(self, position: int) -> BatchPlan:
        """What is in the batch that begins at a position."""
        inputs = self._input_room if self.pairs else None
        if self.packed:
            last = itertools.count(position) if self.total is None else range(position, self.total)
            sizes = (self._numbered(number).sizes for number in last)
            rows = pack(sizes, self.rows, (self.length, inputs or 0))
            rows = [[position + number for number in row] for row in rows]
            return BatchPlan(rows, self.length, inputs, position + sum(map(len, rows)))
        if not self.buckets:
            numbers = range(position, self._until(position + self.rows))
            return BatchPlan(self._one_each(numbers), self.length, inputs, numbers.stop)
        return self._bucketed(position)

    def _one_each(self, numbers: Sequence[int]) -> list[list[int]]:
        return [[number] for number in numbers] + [[] for _ in range(self.rows - len(numbers))]

    def _bucketed(self, position: int) -> BatchPlan:
        """Sort a window of the stream by size, cut it into batches, and shuffle these.

        A position inside a window counts its batches, so the window is planned anew there.
        """
        size = self.rows * self.window
        window, done = divmod(position, size)
        numbers = range(window * size, self._until((window + 1) * size))
        batches = _by_size(numbers, self.rows, lambda number: self._numbered(number).sizes)
        whole = [batch for batch in batches if len(batch) == self.rows]
        if self.shuffle:
            draw = np.random.default_rng([self.seed, window])
            whole = [whole[n] for n in draw.permutation(len(whole))]
        batch = (whole + [batch for batch in batches if len(batch) < self.rows])[done // self.rows]
        targets, inputs = np.max([self._numbered(number).sizes for number in batch], axis=0)
        length = bucket_length(targets, (*self.buckets, self.length))
        shorter = tuple(b for b in self.buckets if b < self._input_room)
        input_length = bucket_length(inputs, (*shorter, self._input_room)) if self.pairs else None
        return BatchPlan(self._one_each(batch), length, input_length, position + len(batch))

    def make(self, position: int, first: int, last: int) -> HostRows:
        plan = self.plan(position)
        rows = [[self._numbered(number) for number in row] for row in plan.rows[first:last]]
        first = START_TOKEN if self.pairs else start_id(self.tokenizer)
        made = packed_arrays(rows, plan.length, plan.input_length, self.tokenizer.pad, first)
        for name in made.keys() & {"targets", "inputs"}:
            check_ids(made[name], self.tokenizer)
        return HostRows(made, plan.position)


def _by_size(numbers: Sequence[int], rows: int, size: Callable[[int], Any]) -> list[list[int]]:
    """Batches of equally long examples; the last, of the longest, may lack some."""
    ordered = sorted(numbers, key=lambda number: (size(number), number))
    return [ordered[at : at + rows] for at in range(0, len(ordered), rows)]
