"""From examples to an endless, resumable stream of batches.

The order of the examples is a function of a seed: example number n of the stream is number `n % size` of a
permutation that is computed from the seed and the epoch `n // size`. Neither hosts nor meshes are in it. How
many examples were used is the whole state of a stream: from that one number, and on any number of hosts, it
goes on with the same batches, bit for bit.

    stream = Stream(examples, Bytes(), rows=64, length=256)
    for batch, position in stream.batches(position):
        ...  # the position is that behind the batch: it is stored with the model

Batches are planned globally (which examples are in which row), then each host makes its rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import weft as wf
from weft.errors import DataError
from weft.models import Batch

from .packing import Encoded, arrays, bucket, pack
from .tokenizers import Tokenizer


class Step(NamedTuple):
    """A batch, and how many examples of the stream are used after it."""

    batch: Batch
    position: int


class Plan(NamedTuple):
    """What is in a batch: for each row, its examples' numbers in the stream; the places; and what is next."""

    rows: list[list[int]]
    length: int
    input_length: int | None
    position: int


@dataclass(frozen=True)
class Stream:
    """Batches of examples, from any position on.

    Attributes:
      examples: texts, or pairs of texts; pairs are for encoder-decoders.
      tokenizer: of the texts, both of a pair.
      rows: the rows of a batch, on all hosts together.
      length: the places of a row; a longer example is cut.
      input_length: those of the encoder's rows; None: the same.
      packed: several examples share a row.
      buckets: if not packed, the lengths that rows may have, below `length`: batches are of examples that are
        about equally long, and as long as the smallest bucket with room for them.
      window: with buckets, the batches among whose examples equally long ones are sought.
      seed: of the order.
      shuffle: whether the order is shuffled.
      epochs: how often the examples are gone through; None: for ever. The last batch may have empty rows.
      process_index, process_count: which host this is, and of how many: a batch has this host's rows.
      mesh, layout: where batches are put, instead: they are whole tensors, of which each host makes only what
        its devices hold.
    """

    examples: Sequence[Any]
    tokenizer: Tokenizer
    rows: int
    length: int
    input_length: int | None = None
    packed: bool = True
    buckets: tuple[int, ...] = ()
    window: int = 32
    seed: int = 0
    shuffle: bool = True
    epochs: int | None = None
    process_index: int = 0
    process_count: int = 1
    mesh: Any = None
    layout: Any = None

    def __post_init__(self) -> None:
        for wrong, fact, rule, hint in self._rules():
            if wrong:
                asked = f"Stream(rows={self.rows}, length={self.length}, ...)"
                raise DataError(fact, rule=rule, hint=hint).located(asked)

    def _rules(self) -> Iterator[tuple[bool, str, str, str]]:
        count, index = self.process_count, self.process_index
        sizes = (self.rows, self.length, self.window, 1 if self.input_length is None else self.input_length)
        yield not len(self.examples), "there are no examples", "a stream has at least one", "check its source"
        yield (
            min(sizes) < 1 or (self.epochs is not None and self.epochs < 1),
            f"rows, length, input_length, window, epochs = {(*sizes, self.epochs)}",
            "each is at least 1",
            "epochs=None goes on for ever",
        )
        yield (
            not 0 <= self.seed < 2**32,
            f"the seed is {self.seed}",
            "a seed is from 0 to 2³² - 1",
            "any will do, for example seed=0",
        )
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
        yield (
            not 0 <= index < count or count > self.rows,
            f"{self.rows} rows for process {index} of {count}",
            "processes are numbered from 0, and each has at least one row",
            "process_index=jax.process_index(), process_count=jax.process_count()",
        )
        yield (
            (self.mesh is None) != (self.layout is None) or (self.mesh is not None and count > 1),
            f"mesh={self.mesh}, layout={self.layout}, process_count={count}",
            "mesh and layout are given together, and say which host makes which rows",
            "leave out process_index and process_count, or mesh and layout",
        )

    # The order

    @property
    def total(self) -> int | None:
        """How many examples there are, in all epochs."""
        return None if self.epochs is None else self.epochs * len(self.examples)

    @functools.cached_property
    def _shuffled(self) -> Any:
        import grain

        return grain.MapDataset.range(len(self.examples)).seed(self.seed).shuffle().repeat()

    def index(self, number: int) -> int:
        """Which example comes at a place of the stream."""
        return int(self._shuffled[number]) if self.shuffle else number % len(self.examples)

    # The examples

    @functools.cached_property
    def pairs(self) -> bool:
        """Whether examples are pairs, and batches have inputs."""
        return not isinstance(self.examples[0], str)

    @functools.cached_property
    def _encoded(self) -> Callable[[int], Encoded]:
        """Example number n of the stream; those of the last batches are kept."""
        return functools.lru_cache(maxsize=max(1024, 2 * self.rows * self.window))(self._encode)

    def _encode(self, number: int) -> Encoded:
        example = self.examples[self.index(number)]
        if not self.pairs:
            return Encoded(self._ids(example, self.length))
        source, target = example
        return Encoded(self._ids(target, self.length), self._ids(source, self._input_room))

    def _ids(self, text: str, most: int) -> list[int]:
        return [*self.tokenizer.encode(text), self.tokenizer.end][:most]

    @property
    def _input_room(self) -> int:
        return self.length if self.input_length is None else self.input_length

    # The batches

    def plan(self, position: int) -> Plan:
        """What is in the batch that begins at a position."""
        inputs = self._input_room if self.pairs else None
        if self.packed:
            last = itertools.count(position) if self.total is None else range(position, self.total)
            sizes = (self._encoded(number).sizes for number in last)
            rows = pack(sizes, self.rows, (self.length, inputs or 0))
            rows = [[position + number for number in row] for row in rows]
            return Plan(rows, self.length, inputs, position + sum(map(len, rows)))
        if not self.buckets:
            numbers = range(position, self._until(position + self.rows))
            return Plan(self._one_each(numbers), self.length, inputs, numbers.stop)
        return self._bucketed(position)

    def _until(self, position: int) -> int:
        return position if self.total is None else min(position, self.total)

    def _one_each(self, numbers: Sequence[int]) -> list[list[int]]:
        return [[number] for number in numbers] + [[] for _ in range(self.rows - len(numbers))]

    def _bucketed(self, position: int) -> Plan:
        """Sort a window of the stream by size, cut it into batches, and shuffle these.

        A position inside a window counts its batches, so the window is planned anew there.
        """
        size = self.rows * self.window
        window, done = divmod(position, size)
        numbers = range(window * size, self._until((window + 1) * size))
        batches = _by_size(numbers, self.rows, lambda number: self._encoded(number).sizes)
        whole = [batch for batch in batches if len(batch) == self.rows]
        if self.shuffle:
            draw = np.random.default_rng([self.seed, window])
            whole = [whole[n] for n in draw.permutation(len(whole))]
        batch = (whole + [batch for batch in batches if len(batch) < self.rows])[done // self.rows]
        targets, inputs = np.max([self._encoded(number).sizes for number in batch], axis=0)
        length = bucket(targets, (*self.buckets, self.length))
        shorter = tuple(b for b in self.buckets if b < self._input_room)
        input_length = bucket(inputs, (*shorter, self._input_room)) if self.pairs else None
        return Plan(self._one_each(batch), length, input_length, position + len(batch))

    def step(self, position: int) -> Step:
        """The batch that begins at a position, and the position behind it."""
        if position < 0 or (self.total is not None and position >= self.total):
            raise DataError(
                f"no batch begins at {position}",
                rule=f"positions are from 0 to {'∞' if self.total is None else self.total - 1}",
                hint="a stream with epochs= ends; start again at 0, or ask for more epochs",
            ).located(f"step({position})")
        plan = self.plan(position)
        return Step(self._made(plan), plan.position)

    def batches(self, position: int = 0) -> Iterator[Step]:
        """The batches from a position on."""
        while self.total is None or position < self.total:
            step = self.step(position)
            position = step.position
            yield step

    def _made(self, plan: Plan) -> Batch:
        @functools.cache
        def part(start: int, stop: int) -> dict[str, np.ndarray]:
            rows = [[self._encoded(number) for number in row] for row in plan.rows[start:stop]]
            return arrays(rows, plan.length, plan.input_length, self.tokenizer.pad)

        if self.mesh is None:
            first, last = (self.rows * n // self.process_count for n in self._processes)
            return Batch(
                **{name: wf.tensor(array, _dims(*array.shape)) for name, array in part(first, last).items()}
            )

        def placed(name: str, width: int) -> wf.Tensor:
            def piece(where: tuple[slice, ...]) -> np.ndarray:
                return part(where[0].start, where[0].stop)[name][:, where[1]]

            return wf.from_callback(piece, _dims(self.rows, width), self.mesh, self.layout)

        return Batch(**{name: placed(name, array.shape[1]) for name, array in part(0, 0).items()})

    @property
    def _processes(self) -> tuple[int, int]:
        return self.process_index, self.process_index + 1


def _dims(rows: int, length: int) -> tuple[wf.Dim, wf.Dim]:
    return wf.Dim("batch", rows), wf.Dim("length", length)


def _by_size(numbers: Sequence[int], rows: int, size: Callable[[int], Any]) -> list[list[int]]:
    """Batches of equally long examples; the last, of the longest, may lack some."""
    ordered = sorted(numbers, key=lambda number: (size(number), number))
    return [ordered[at : at + rows] for at in range(0, len(ordered), rows)]
