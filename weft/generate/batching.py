"""From encoded prompts to the padded tensors that `prefill` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

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
    """One text, encoded as a row of a batch.

    Attributes:
      number: the number of the text; its random draws depend on it.
      inputs: the tokens that an encoder reads; empty for a decoder.
      prompt: the tokens at the start of the row.
      limit: the maximum number of generated tokens.
      cut: True if the text was truncated.
    """

    number: int
    inputs: tuple[int, ...]
    prompt: tuple[int, ...]
    limit: int
    cut: bool = False

    @property
    def last(self) -> tuple[int, ...]:
        """The last token of the text that the completion continues, or none."""
        return self.prompt[1:][-1:]  # the first is START_TOKEN


class PaddedSizes(NamedTuple):
    """The padded lengths of the parts of a row."""

    inputs: int
    prompt: int
    generated: int


def pad_batch(
    prompts: Sequence[PromptRow],
    configs: Sequence[GenerationConfig],
    rows: int,
    sizes: PaddedSizes,
    tokenizer: Tokenizer,
) -> tuple[Batch, RowSettings]:
    """Build the arguments of `prefill`.

    Args:
      prompts: the encoded texts.
      configs: the generation settings of each.
      rows: the number of rows of the batch; unused rows generate nothing.
      sizes: the lengths to pad to.
      tokenizer: defines the padding and end tokens.
    """
    end, pad, unused = tokenizer.end, tokenizer.pad, rows - len(prompts)
    prompts = [*prompts, *[PromptRow(-1, (end,) if sizes.inputs else (), (START_TOKEN,), 0)] * unused]
    configs = [*configs, *[GenerationConfig()] * unused]
    batch = wf.Dim("batch", rows)

    def padded(lists: Sequence[Sequence[int]], size: int, name: str, fill: int = pad) -> Tensor:
        array = np.full((rows, size), fill, np.int32)
        for n, ids in enumerate(lists):
            array[n, : len(ids)] = ids
        return wf.tensor(array, [batch, wf.Dim(name, size)])

    def per_row(values: Sequence[float], dtype: DTypeLike) -> Tensor:
        return wf.tensor(np.array(values, dtype), [batch])

    def float32(values: Sequence[float], low: float | np.floating = 0.0) -> Tensor:
        """Clip to float32's range: large values must not become inf, nor a tiny top_p become 0."""
        return per_row(list(np.clip(values, low, np.finfo(np.float32).max)), np.float32)

    fields = {"tokens": padded([prompt.prompt for prompt in prompts], sizes.prompt, "length")}
    if sizes.inputs:
        fields["inputs"] = padded([prompt.inputs for prompt in prompts], sizes.inputs, "length")
        segments = [[1] * len(prompt.inputs) for prompt in prompts]
        fields["input_segments"] = padded(segments, sizes.inputs, "length", 0)
    uniforms = np.ones((rows, sizes.generated), np.float32)
    for n, (prompt, config) in enumerate(zip(prompts, configs, strict=True)):
        if prompt.limit and config.temperature > 0:
            uniforms[n] = uniform_draws(config.seed, prompt.number, sizes.generated)
    settings = RowSettings(
        prompt_length=per_row([len(prompt.prompt) for prompt in prompts], np.int32),
        limit=per_row([prompt.limit for prompt in prompts], np.int32),
        ends=padded([(end, *config.ends) for config in configs], MAX_END_TOKENS, "ends", -1),
        sampling=SamplingParams(
            temperature=float32([config.temperature for config in configs]),
            top_k=per_row([min(config.top_k, np.iinfo(np.int32).max) for config in configs], np.int32),
            top_p=float32([config.top_p for config in configs], np.finfo(np.float32).tiny),
            penalty=float32([config.penalty for config in configs]),
        ),
        uniforms=wf.tensor(uniforms, [batch, wf.Dim("generated", sizes.generated)]),
    )
    return Batch(**fields), settings


def uniform_draws(seed: int, number: int, count: int) -> np.ndarray:
    """The uniform numbers, above 0 and at most 1, that select the tokens of a text."""
    return 1 - np.random.Generator(np.random.Philox(key=[seed, number])).random(count, np.float32)
