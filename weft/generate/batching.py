"""Texts as rows: what is read, what may follow, and how it is chosen, filled up to given sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import weft as wf
from weft.core.tensor import Tensor
from weft.data import Tokenizer
from weft.models import Batch
from weft.models.batch import START_TOKEN

from .config import MAX_END_TOKENS, GenerationConfig
from .decode_loop import RowSettings
from .sampling import SamplingParams


@dataclass(frozen=True)
class PromptRow:
    """A text as a row.

    Attributes:
      number: of the text, on which what is drawn for it depends.
      inputs: what an encoder reads; nothing for a decoder.
      prompt: what the row begins with.
      limit: how many tokens may follow.
      cut: whether the text is longer than that.
    """

    number: int
    inputs: tuple[int, ...]
    prompt: tuple[int, ...]
    limit: int
    cut: bool = False

    @property
    def last(self) -> tuple[int, ...]:
        """The token of the text that what is said follows, if there is one."""
        return self.prompt[1:][-1:]  # the first is START


class PaddedSizes(NamedTuple):
    """To how many positions the parts of a row are filled up."""

    inputs: int
    prompt: int
    said: int


def pad_batch(
    items: Sequence[PromptRow],
    asks: Sequence[GenerationConfig],
    count: int,
    sizes: PaddedSizes,
    tokenizer: Tokenizer,
) -> tuple[Batch, RowSettings]:
    """What `begin` takes.

    Args:
      items: the texts.
      asks: for each, how its answer is generated.
      count: how many rows there are; for those without a text nothing is generated.
      sizes: to how many positions they are filled up.
      tokenizer: whose padding and end they have.
    """
    end, pad, missing = tokenizer.end, tokenizer.pad, count - len(items)
    items = [*items, *[PromptRow(-1, (end,) if sizes.inputs else (), (START_TOKEN,), 0)] * missing]
    asks = [*asks, *[GenerationConfig()] * missing]
    batch = wf.Dim("batch", count)

    def filled(rows: Sequence[Sequence[int]], size: int, name: str, filling: int = pad) -> Tensor:
        array = np.full((count, size), filling, np.int32)
        for n, ids in enumerate(rows):
            array[n, : len(ids)] = ids
        return wf.tensor(array, [batch, wf.Dim(name, size)])

    def each(values: Sequence[Any], type: Any) -> Tensor:
        return wf.tensor(np.array(values, type), [batch])

    def near(values: Sequence[float], least: Any = 0) -> Tensor:
        """In float32, which neither overflows nor makes nothing of the least that may be."""
        return each(list(np.clip(values, least, np.finfo(np.float32).max)), np.float32)

    fields = {"tokens": filled([item.prompt for item in items], sizes.prompt, "length")}
    if sizes.inputs:
        fields["inputs"] = filled([item.inputs for item in items], sizes.inputs, "length")
        held = [[1] * len(item.inputs) for item in items]
        fields["input_segments"] = filled(held, sizes.inputs, "length", 0)
    numbers = np.ones((count, sizes.said), np.float32)
    for n, (item, ask) in enumerate(zip(items, asks, strict=True)):
        if item.limit and ask.temperature > 0:
            numbers[n] = uniform_draws(ask.seed, item.number, sizes.said)
    rows = RowSettings(
        each([len(item.prompt) for item in items], np.int32),
        each([item.limit for item in items], np.int32),
        filled([(end, *ask.ends) for ask in asks], MAX_END_TOKENS, "ends", -1),
        SamplingParams(
            near([ask.temperature for ask in asks]),
            each([min(ask.top_k, np.iinfo(np.int32).max) for ask in asks], np.int32),
            near([ask.top_p for ask in asks], np.finfo(np.float32).tiny),
            near([ask.penalty for ask in asks]),
        ),
        wf.tensor(numbers, [batch, wf.Dim("said", sizes.said)]),
    )
    return Batch(**fields), rows


def uniform_draws(seed: int, number: int, count: int) -> np.ndarray:
    """The numbers that a text's tokens are drawn by, above 0 and up to 1."""
    return 1 - np.random.Generator(np.random.Philox(key=[seed, number])).random(count, np.float32)
