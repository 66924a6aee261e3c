"""The few programs that all requests share: rows are begun some at a time, and put where others have ended.

However long a text is, what has been read of it is filled up to one size: the rows of all texts lie beside
each other in one state. Only what reads the texts is compiled for several lengths.

The state always has all rows, but a decode step need not compute all of them. It is compiled for several row
counts; each program advances the first rows of the state and leaves the others as they are. Rows are moved to
the front when fewer are busy, so a single request costs one row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import weft as wf
from weft.generate import DecodeState, KVCache, RowSettings, TextGenerator, decode, insert, prefill
from weft.generate.batching import PaddedSizes, PromptRow, pad_batch
from weft.generate.generator import LENGTH_BUCKETS
from weft.models import Batch

BUCKET_COUNT = 3  # how many lengths texts are filled up to
ROW_COUNTS = (1, 4, 16)  # the decode step is compiled for these, if the state has more rows


class ServingPrograms(TextGenerator):
    """A speaker of few rows, whose texts are filled up to few lengths, and whose states are all of one size.

    Args:
      speaker: whose models and tokenizer these are.
      rows: how many texts are read at once.
      lengths: how many lengths texts are filled up to.
    """

    def __init__(self, speaker: TextGenerator, rows: int, lengths: int = BUCKET_COUNT):
        place = speaker.mesh, speaker.layout
        super().__init__(speaker.models, speaker.tokenizer, *place, rows=rows, longest=speaker.longest)
        self.lengths = (*[n for n in LENGTH_BUCKETS if n < self.longest][: lengths - 1], self.longest)
        memory = self.longest if self.translates else 0

        def begun(models: Sequence[Any], batch: Batch, rows: RowSettings, room: int) -> DecodeState:
            state = prefill(models, batch, rows, room)
            return dataclasses.replace(state, kept=tuple(_filled(kept, memory) for kept in state.kept))

        self.begin = wf.spmd(begun, *place, static=("room",))
        self.admit = wf.spmd(insert_rows, *place, donate=("state",))
        self.advance = wf.spmd(decode_rows, *place, static=("count", "steps"), donate=("state",))
        self.move = wf.spmd(move_row, *place, donate=("state",))

    def size(self, count: int) -> int:
        """The length that a row of so many tokens is filled up to."""
        return next(n for n in self.lengths if n >= count)

    def sizes(self, item: PromptRow) -> PaddedSizes:
        """To how many places a row is filled up."""
        if self.translates:
            return PaddedSizes(self.size(len(item.inputs)), 1, self.longest)
        return PaddedSizes(0, self.size(len(item.prompt)), self.longest)

    def begun(self, items: Sequence[PromptRow], asks: Sequence[Any]) -> DecodeState:
        """The rows of some texts, no more than there are rows."""
        sizes = PaddedSizes(*map(max, zip(*map(self.sizes, items), strict=True)))
        batch, rows = pad_batch(items, asks, self.rows, sizes, self.tokenizer)
        return self.begin(self.models, batch, rows, self.longest)

    def put(self, state: DecodeState, new: DecodeState, slots: Sequence[int]) -> DecodeState:
        """The first of the new rows in some slots of a state."""
        places = [*slots, *[slots[0]] * (self.rows - len(slots))]
        slots_of = wf.tensor(np.array(places, np.int32), [wf.Dim("batch", self.rows)])
        return self.admit(self.models, state, new, slots_of)

    def row_counts(self, rows: int) -> tuple[int, ...]:
        """The row counts that the decode step of a state is compiled for, in ascending order.

        Where the batch is sharded there is only one: the first rows are on one device, and moving them to the
        others at each step costs more than computing all rows.
        """
        layout, mesh = self.advance.layout, self.advance.mesh
        (split,) = layout.splits([wf.Dim("batch", rows)], mesh)
        return (rows,) if split else (*(n for n in ROW_COUNTS if n < rows), rows)


def _filled(kept: KVCache, memory: int) -> KVCache:
    """What an encoder has read, filled up with places that are not seen."""
    if not memory:
        return kept

    def filled(t: Any) -> Any:
        (here,) = (d.size for d in t.dims if d.name == "memory_length")
        return wf.pad(t, "memory_length", 0, memory - here)

    layers = [
        dataclasses.replace(one, memory_keys=filled(one.memory_keys), memory_values=filled(one.memory_values))
        for one in kept.layers
    ]
    return dataclasses.replace(kept, layers=tuple(layers), memory_seen=filled(kept.memory_seen))


def insert_rows(models: Sequence[Any], state: DecodeState, new: DecodeState, slots: Any) -> DecodeState:
    """The state with new rows, each in its slot; of several for one slot, the first stays.

    Nothing is asked of the models; they are here so that every rule of their layout has a dim.
    """
    (batch,) = new.token.dims
    for n in reversed(range(batch.size)):
        row = jax.tree.map(lambda t, n=n: t["batch", n : n + 1], new, is_leaf=wf.is_tensor)
        state = insert(state, row, slots["batch", n])
    return state


def decode_rows(models: Sequence[Any], state: DecodeState, count: int, steps: int) -> DecodeState:
    """The state with up to `steps` more tokens in each of its first `count` rows."""
    if count == state.token.dims[0].size:
        return decode(models, state, steps)
    first = jax.tree.map(lambda t: t["batch", :count], state, is_leaf=wf.is_tensor)
    new = insert(state, decode(models, first, steps), 0)
    return dataclasses.replace(new, rows=state.rows)  # they never change


def move_row(models: Sequence[Any], state: DecodeState, ends: Any) -> DecodeState:
    """The state with the row of one slot in another slot too.

    Args:
      models: as for `admitted`.
      state: the rows.
      ends: the slot that is read and the one that is written, over `ends`.
    """
    source, target = ends["ends", 0], ends["ends", 1]
    row = jax.tree.map(lambda t: wf.slice(t, "batch", source, 1), state, is_leaf=wf.is_tensor)
    return insert(state, row, target)


def slot_pair(source: int, target: int) -> Any:
    """What `moved` takes: a tensor, since numbers are compiled for another placement than calls have."""
    return wf.tensor(np.array([source, target], np.int32), [wf.Dim("ends", 2)])


def abstract_state(state: DecodeState) -> DecodeState:
    """The same without values, on the same devices: enough to compile exactly what calls will run."""

    def shape(array: Any) -> Any:
        where = array.sharding if array.committed else None
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)

    return jax.tree.map(shape, state)


def empty_state(new: DecodeState, rows: int) -> DecodeState:
    """A state of so many rows, all of them over, like another one; each device makes its own part of it."""
    batch = wf.Dim("batch", rows)

    def filled(t: Any, value: Any = 0) -> Any:
        def part(where: Sequence[slice]) -> np.ndarray:
            return np.full([one.stop - one.start for one in where], value, t.dtype)

        dims = [batch if d.name == "batch" else d for d in t.dims]
        return wf.from_callback(part, dims, t.mesh, t.layout)

    state = jax.tree.map(filled, new, is_leaf=wf.is_tensor)
    return dataclasses.replace(state, done=filled(new.done, True))
