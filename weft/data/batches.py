"""From examples to a resumable stream of batches: what all streams have in common.

The order of the examples is a function of a seed (see `shuffle`), not of the hosts or the mesh. The state of
a stream is one number, its position: how many examples it has consumed. From that number it resumes with the
same batches, bit for bit, on any number of hosts.

    for batch, position in stream.batches(position):
        ...  # the position after the batch; store it with the model

A batch is planned globally (which examples go into which row), then each host builds its own rows.
`ExampleStream` packs complete examples into rows; `TokenWindows` slices rows out of one long token sequence.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np

import weft as wf
from weft.core.errors import DataError
from weft.core.field_types import NonNegativeInt, PositiveInt, Range
from weft.core.fields import documented, validate
from weft.core.layout import LayoutLike
from weft.core.mesh import MeshLike
from weft.models import Batch

from .prefetch import prefetch
from .shuffle import ExampleOrder
from .tokenizers import Tokenizer


class PositionedBatch(NamedTuple):
    """A batch, and the stream's position after it."""

    batch: Batch
    position: int


class HostRows(NamedTuple):
    """This host's rows of a batch, as arrays by the names of `Batch`'s fields, and the position after it."""

    arrays: dict[str, np.ndarray]
    position: int


@documented
@dataclass(frozen=True)
class BatchStream(abc.ABC):
    """A stream of batches that can start at any position."""

    examples: Sequence[Any]
    """The examples to batch."""
    tokenizer: Tokenizer
    """Encodes the texts."""
    rows: PositiveInt
    """Rows per batch, over all hosts."""
    length: PositiveInt
    """Positions per row."""
    _: KW_ONLY
    seed: Annotated[int, Range(at_least=0, below=2**32)] = 0
    """Seeds the shuffle order."""
    shuffle: bool = True
    """Whether to shuffle the examples of each epoch."""
    epochs: PositiveInt | None = None
    """How many epochs to run; None repeats them forever. The last batch may have empty rows."""
    process_index: NonNegativeInt = 0
    """The index of this host. A batch then contains only this host's rows."""
    process_count: PositiveInt = 1
    """The number of hosts."""
    mesh: MeshLike = None
    """The mesh to place batches on instead. Batches are then global tensors, and each host builds only the
    rows that its devices hold."""
    layout: LayoutLike = None
    """The layout to place batches with."""

    def __post_init__(self) -> None:
        validate(self, DataError)
        for wrong, fact, rule, hint in self._rules():
            if wrong:
                raise DataError(fact, rule=rule, hint=hint).located(f"{self}")

    def __str__(self) -> str:
        return f"{type(self).__name__}(rows={self.rows}, length={self.length}, ...)"

    def _rules(self) -> Iterator[tuple[bool, str, str, str]]:
        """Rules about several fields: whether the rule is violated, the fact, the rule and a hint."""
        count, index = self.process_count, self.process_index
        yield not len(self.examples), "no examples", "a stream needs at least one example", "check the source"
        yield (
            index >= count or count > self.rows,
            f"{self.rows} rows for process {index} of {count}",
            "process indices start at 0, and each process needs at least one row",
            "process_index=jax.process_index(), process_count=jax.process_count()",
        )
        yield (
            (self.mesh is None) != (self.layout is None) or (self.mesh is not None and count > 1),
            f"mesh={self.mesh}, layout={self.layout}, process_count={count}",
            "mesh and layout go together, and they determine which host builds which rows",
            "omit process_index and process_count, or omit mesh and layout",
        )

    # Each kind of stream implements these

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """The number of examples in an epoch."""

    @abc.abstractmethod
    def make_rows(self, position: int, first: int, last: int) -> HostRows:
        """Build rows `first` to `last` (exclusive) of the batch that starts at a position."""

    # The order

    @property
    def total(self) -> int | None:
        """The number of examples in all epochs; None if the stream never ends."""
        return None if self.epochs is None else self.epochs * self.size

    @functools.cached_property
    def order(self) -> ExampleOrder:
        return ExampleOrder(self.size, self.seed, self.shuffle)

    def index(self, number: int) -> int:
        """The index of the n-th example of the stream."""
        return self.order.index(number)

    def _clip(self, position: int) -> int:
        return position if self.total is None else min(position, self.total)

    # The batches

    def step(self, position: int) -> PositionedBatch:
        """The batch that starts at a position, and the position after it."""
        if position < 0 or (self.total is not None and position >= self.total):
            raise DataError(
                f"no batch starts at position {position}",
                rule=f"positions run from 0 to {'∞' if self.total is None else self.total - 1}",
                hint="a stream with epochs= ends; restart at 0, or increase epochs",
            ).located(f"step({position})")
        with contextlib.closing(self.batches(position)) as steps:
            return next(steps)

    def batches(self, position: int = 0, ahead: int = 0) -> Generator[PositionedBatch, None, None]:
        """Iterate over the batches from a position.

        Args:
          position: where to start.
          ahead: how many batches to build ahead in a thread (see `prefetch`). They are placed on devices by
            the caller's thread, so that only one thread ever talks to the devices.
        """
        produced = self._produce(position, *self._host_range)
        try:
            with contextlib.closing(prefetch(produced, ahead) if ahead else produced) as all_rows:
                for rows in all_rows:
                    yield PositionedBatch(self._place(rows.arrays), rows.position)
        except DataError as error:
            raise error.located(f"{self}") from None

    def _produce(self, position: int, first: int, last: int) -> Generator[HostRows, None, None]:
        while self.total is None or position < self.total:
            rows = self.make_rows(position, first, last)
            position = rows.position
            yield rows

    @functools.cached_property
    def _host_range(self) -> tuple[int, int]:
        """The first of this host's rows, and one past its last."""
        if self.mesh is None or self.layout is None:
            index, count = self.process_index, self.process_count
            return self.rows * index // count, self.rows * (index + 1) // count
        # `from_callback` asks only for the slices that this host's devices hold: record what it asks for.
        requested: list[slice] = []

        def record(where: tuple[slice, ...]) -> np.ndarray:
            requested.append(where[0])
            return np.zeros([at.stop - at.start for at in where], np.int32)

        wf.from_callback(record, _dims(self.rows, 1), self.mesh, self.layout)
        rows = [at for at in requested if at.start < at.stop]  # empty slices are padding only
        return min((at.start for at in rows), default=0), max((at.stop for at in rows), default=0)

    def _place(self, arrays: dict[str, np.ndarray]) -> Batch:
        mesh, layout = self.mesh, self.layout
        if mesh is None or layout is None:
            return Batch(**{name: wf.tensor(array, _dims(*array.shape)) for name, array in arrays.items()})
        first, _ = self._host_range

        def place(array: np.ndarray) -> wf.Tensor:
            def host_slice(where: tuple[slice, ...]) -> np.ndarray:
                return array[where[0].start - first : where[0].stop - first, where[1]]

            return wf.from_callback(host_slice, _dims(self.rows, array.shape[1]), mesh, layout)

        return Batch(**{name: place(array) for name, array in arrays.items()})


def _dims(rows: int, length: int) -> tuple[wf.Dim, wf.Dim]:
    return wf.Dim("batch", rows), wf.Dim("length", length)
