"""The compiled programs of the engine: a fixed set, shared by all requests.

Prefill runs on a few rows at a time, and its rows are inserted into one decode state with a slot for each
active request. Cached inputs are padded to one size, so that rows of all texts fit into that state. Only
prefill is compiled for several lengths.

The state always has all rows, but a decode step need not compute all of them. It is compiled for several row
counts; each program advances the first rows of the state and leaves the others unchanged. Busy rows are moved
to the front when fewer are busy, so that a single request costs one row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

import weft as wf
from weft.core.tensor import Tensor
from weft.generate import (
    DecodeState,
    GenerationConfig,
    KVCache,
    RowSettings,
    TextGenerator,
    decode,
    insert,
    prefill,
)
from weft.generate.batching import PaddedSizes, PromptRow, pad_batch
from weft.generate.generator import LENGTH_BUCKETS
from weft.models import Batch, Transformer

BUCKET_COUNT = 3  # of prompt lengths
ROW_COUNTS = (1, 4, 16)  # the decode step is compiled for these, if the state has more rows


class ServingPrograms(TextGenerator):
    """A generator with few rows and few prompt lengths, whose states all have the same size.

    Args:
      generator: provides the models, the tokenizer, the mesh and the layout.
      rows: the number of texts of a prefill.
      buckets: the number of lengths that prompts are padded to.
    """

    def __init__(self, generator: TextGenerator, rows: int, buckets: int = BUCKET_COUNT):
        placement = generator.mesh, generator.layout
        super().__init__(
            generator.models, generator.tokenizer, *placement, rows=rows, longest=generator.longest
        )
        self.buckets = (*[n for n in LENGTH_BUCKETS if n < self.longest][: buckets - 1], self.longest)
        memory_length = self.longest if self.translates else 0

        def prefill_padded(
            models: Sequence[Transformer], batch: Batch, settings: RowSettings, max_length: int
        ) -> DecodeState:
            state = prefill(models, batch, settings, max_length)
            caches = tuple(_pad_memory(cache, memory_length) for cache in state.caches)
            return dataclasses.replace(state, caches=caches)

        self.prefill = wf.spmd(prefill_padded, *placement, static=("max_length",))
        self.insert = wf.spmd(insert_rows, *placement, donate=("state",))
        self.decode_rows = wf.spmd(decode_rows, *placement, static=("count", "steps"), donate=("state",))
        self.move_row = wf.spmd(move_row, *placement, donate=("state",))

    def bucket(self, count: int) -> int:
        """The length that a row with this number of tokens is padded to."""
        return next(n for n in self.buckets if n >= count)

    def padded_sizes(self, prompt: PromptRow) -> PaddedSizes:
        """The lengths that a row is padded to."""
        if self.translates:
            return PaddedSizes(self.bucket(len(prompt.inputs)), 1, self.longest)
        return PaddedSizes(0, self.bucket(len(prompt.prompt)), self.longest)

    def batch_sizes(self, prompts: Sequence[PromptRow]) -> PaddedSizes:
        """The lengths that a batch is padded to: those of its longest rows."""
        return PaddedSizes(*map(max, zip(*map(self.padded_sizes, prompts), strict=True)))

    def prefill_prompts(
        self, prompts: Sequence[PromptRow], configs: Sequence[GenerationConfig]
    ) -> DecodeState:
        """The state of at most `rows` prompts."""
        sizes = self.batch_sizes(prompts)
        batch, settings = pad_batch(prompts, configs, self.rows, sizes, self.tokenizer)
        return self.prefill(self.models, batch, settings, self.longest)

    def insert_slots(self, state: DecodeState, new: DecodeState, slots: Sequence[int]) -> DecodeState:
        """Insert the first rows of a new state into these slots."""
        # Unused rows of `new` go to the first slot too; `insert_rows` writes them before the row that stays.
        targets = [*slots, *[slots[0]] * (self.rows - len(slots))]
        tensor = wf.tensor(np.array(targets, np.int32), [wf.Dim("batch", self.rows)])
        return self.insert(self.models, state, new, tensor)

    def row_counts(self, rows: int) -> tuple[int, ...]:
        """The row counts that the decode step of a state is compiled for, in ascending order.

        Where the batch is sharded there is only one: the first rows are on one device, and moving them to the
        others at each step costs more than computing all rows.
        """
        layout, mesh = self.decode_rows.layout, self.decode_rows.mesh
        (split,) = layout.splits([wf.Dim("batch", rows)], mesh)
        return (rows,) if split else (*(n for n in ROW_COUNTS if n < rows), rows)


def _pad_memory(cache: KVCache, length: int) -> KVCache:
    """Pad the cached encoder output to a length; the padding is masked."""
    if not length:
        return cache

    def padded(t: Tensor | None) -> Tensor:
        assert t is not None
        (size,) = (d.size for d in t.dims if d.name == "memory_length")
        return wf.pad(t, "memory_length", 0, length - size)

    layers = [
        dataclasses.replace(
            layer, memory_keys=padded(layer.memory_keys), memory_values=padded(layer.memory_values)
        )
        for layer in cache.layers
    ]
    return dataclasses.replace(cache, layers=tuple(layers), memory_mask=padded(cache.memory_mask))


def insert_rows(
    models: Sequence[Transformer], state: DecodeState, new: DecodeState, slots: Tensor
) -> DecodeState:
    """Insert each new row into its slot; of several for one slot, the first stays.

    The models are not used. They are an argument so that every rule of the layout has a dim, or the program
    would warn about rules without one.
    """
    (batch,) = new.token.dims
    for n in reversed(range(batch.size)):
        row = jax.tree.map(lambda t, n=n: t["batch", n : n + 1], new, is_leaf=wf.is_tensor)
        state = insert(state, row, slots["batch", n])
    return state


def decode_rows(models: Sequence[Transformer], state: DecodeState, count: int, steps: int) -> DecodeState:
    """Generate up to `steps` more tokens in each of the first `count` rows."""
    if count == state.token.dims[0].size:
        return decode(models, state, steps)
    first = jax.tree.map(lambda t: t["batch", :count], state, is_leaf=wf.is_tensor)
    new = insert(state, decode(models, first, steps), 0)
    return dataclasses.replace(new, settings=state.settings)  # they never change, so don't copy them


def move_row(models: Sequence[Transformer], state: DecodeState, slots: Tensor) -> DecodeState:
    """Copy the row of one slot to another.

    Args:
      models: unused, see `insert_rows`.
      state: the rows.
      slots: the source and the target, from `slot_pair`.
    """
    source, target = slots["ends", 0], slots["ends", 1]
    row = jax.tree.map(lambda t: wf.slice(t, "batch", source, 1), state, is_leaf=wf.is_tensor)
    return insert(state, row, target)


def slot_pair(source: int, target: int) -> Tensor:
    """The slots of `move_row`: a tensor, since a program compiled for Python numbers expects them placed
    differently from those of a call."""
    return wf.tensor(np.array([source, target], np.int32), [wf.Dim("ends", 2)])


def abstract_state(state: DecodeState) -> DecodeState:
    """The shapes, dtypes and shardings of a state: enough to compile exactly what calls will run."""

    def abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = array.sharding if array.committed else None
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return jax.tree.map(abstract, state)


def empty_state(new: DecodeState, rows: int) -> DecodeState:
    """A state with this number of rows, all of them done. Each device creates only its own part of it."""
    batch = wf.Dim("batch", rows)

    def filled(t: Tensor, value: bool | int = 0) -> Tensor:
        def part(index: Sequence[slice]) -> np.ndarray:
            return np.full([s.stop - s.start for s in index], value, t.dtype)

        dims = [batch if d.name == "batch" else d for d in t.dims]
        return wf.from_callback(part, dims, t.mesh, t.layout)

    state = jax.tree.map(filled, new, is_leaf=wf.is_tensor)
    return dataclasses.replace(state, done=filled(new.done, True))
