"""From examples to an endless, resumable stream of batches: what all streams have in common.

The order of the examples is a function of a seed (see `order`). Neither hosts nor meshes are in it. How many
examples were used is the whole state of a stream: from that one number, and on any number of hosts, it goes
on with the same batches, bit for bit.

    for batch, position in stream.batches(position):
        ...  # the position is that behind the batch: it is stored with the model

Batches are planned globally (which examples are in which row), then each host makes its rows. `Stream` has
rows of whole examples; `TokenWindows` cuts its rows out of one long text.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np

import weft as wf
from weft.core.errors import DataError
from weft.models import Batch

from .prefetch import prefetch
from .shuffle import ExampleOrder
from .tokenizers import Tokenizer


class PositionedBatch(NamedTuple):
    """A batch, and how many examples of the stream are used after it."""

    batch: Batch
    position: int


class HostRows(NamedTuple):
    """This host's rows of a batch: arrays, by the names that it has for them, and the position behind it."""

    arrays: dict[str, np.ndarray]
    position: int


@dataclass(frozen=True)
class BatchStream(abc.ABC):
    """Batches of examples, from any position on.

    Attributes:
      examples: what they are made of.
      tokenizer: of the texts.
      rows: the rows of a batch, on all hosts together.
      length: the places of a row.
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
    _: KW_ONLY
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
                raise DataError(fact, rule=rule, hint=hint).located(f"{self}")

    def __str__(self) -> str:
        return f"{type(self).__name__}(rows={self.rows}, length={self.length}, ...)"

    def _rules(self) -> Iterator[tuple[bool, str, str, str]]:
        """What must not be, and what to say of it."""
        count, index, sizes = self.process_count, self.process_index, self._sizes()
        yield not len(self.examples), "there are no examples", "a stream has at least one", "check its source"
        yield (
            min(size for size in sizes.values() if size is not None) < 1,
            f"{', '.join(sizes)} = {', '.join(map(str, sizes.values()))}",
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

    def _sizes(self) -> dict[str, int | None]:
        """Settings that are at least 1."""
        return {"rows": self.rows, "length": self.length, "epochs": self.epochs}

    # What each kind of stream says

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """How many examples an epoch has."""

    @abc.abstractmethod
    def make(self, position: int, first: int, last: int) -> HostRows:
        """Rows from `first` up to `last` of the batch that begins at a position."""

    # The order

    @property
    def total(self) -> int | None:
        """How many examples there are, in all epochs."""
        return None if self.epochs is None else self.epochs * self.size

    @functools.cached_property
    def order(self) -> ExampleOrder:
        return ExampleOrder(self.size, self.seed, self.shuffle)

    def index(self, number: int) -> int:
        """Which example comes at a place of the stream."""
        return self.order.index(number)

    def _until(self, position: int) -> int:
        return position if self.total is None else min(position, self.total)

    # The batches

    def step(self, position: int) -> PositionedBatch:
        """The batch that begins at a position, and the position behind it."""
        if position < 0 or (self.total is not None and position >= self.total):
            raise DataError(
                f"no batch begins at {position}",
                rule=f"positions are from 0 to {'∞' if self.total is None else self.total - 1}",
                hint="a stream with epochs= ends; start again at 0, or ask for more epochs",
            ).located(f"step({position})")
        with contextlib.closing(self.batches(position)) as steps:
            return next(steps)

    def batches(self, position: int = 0, ahead: int = 0) -> Generator[PositionedBatch, None, None]:
        """The batches from a position on.

        Args:
          position: where it begins.
          ahead: how many are made in a thread before they are asked for (see `prefetch`). They are placed
            here, not there, so only one thread ever speaks to the devices.
        """
        made = self._made(position, *self._own)
        try:
            with contextlib.closing(prefetch(made, ahead) if ahead else made) as all_rows:
                for rows in all_rows:
                    yield PositionedBatch(self._placed(rows.arrays), rows.position)
        except DataError as error:
            raise error.located(f"{self}") from None

    def _made(self, position: int, first: int, last: int) -> Generator[HostRows, None, None]:
        while self.total is None or position < self.total:
            rows = self.make(position, first, last)
            position = rows.position
            yield rows

    @functools.cached_property
    def _own(self) -> tuple[int, int]:
        """The first of this host's rows, and that behind its last."""
        if self.mesh is None:
            index, count = self.process_index, self.process_count
            return self.rows * index // count, self.rows * (index + 1) // count
        asked: list[slice] = []  # which rows this host's devices hold is told by what they ask for

        def part(where: tuple[slice, ...]) -> np.ndarray:
            asked.append(where[0])
            return np.zeros([at.stop - at.start for at in where], np.int32)

        wf.from_callback(part, _dims(self.rows, 1), self.mesh, self.layout)
        held = [at for at in asked if at.start < at.stop]  # others hold nothing but padding
        return min((at.start for at in held), default=0), max((at.stop for at in held), default=0)

    def _placed(self, arrays: dict[str, np.ndarray]) -> Batch:
        if self.mesh is None:
            return Batch(**{name: wf.tensor(array, _dims(*array.shape)) for name, array in arrays.items()})
        first, _ = self._own

        def placed(array: np.ndarray) -> wf.Tensor:
            def part(where: tuple[slice, ...]) -> np.ndarray:
                return array[where[0].start - first : where[0].stop - first, where[1]]

            return wf.from_callback(part, _dims(self.rows, array.shape[1]), self.mesh, self.layout)

        return Batch(**{name: placed(array) for name, array in arrays.items()})


def _dims(rows: int, length: int) -> tuple[wf.Dim, wf.Dim]:
    return wf.Dim("batch", rows), wf.Dim("length", length)
