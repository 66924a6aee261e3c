"""The text generator: a model with its tokenizer, from texts to texts.

    generator = TextGenerator(model, tokenizer, "data=4 model=2", "batch:data heads:model")
    for completion in generator.generate(["A cat.", "Two cats."], GenerationConfig(beams=Beams(4))):
        print(completion.text)

Texts of similar length are batched together, and the results come in the order of the texts. Rows are padded
to one of a few lengths, so that a handful of compiled programs serves all texts. The result for a text does
not depend on the other texts of its batch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

import weft as wf
from weft.core.errors import ModelError
from weft.data import EncodedExample, Tokenizer, check_vocab, packed_arrays
from weft.data.tokenizers import decode_continuation, start_id
from weft.models import Batch, Config, Transformer
from weft.models.batch import START_TOKEN

from .batching import PaddedSizes, PromptRow, pad_batch
from .beam import BeamResult, beam_search
from .config import EMPTY_COMPLETION, Completion, GenerationConfig
from .decode_loop import decode, prefill
from .requirements import check_decodable
from .score import score

LENGTH_BUCKETS = (16, 64, 256, 1024, 4096, 16384)  # rows are padded to one of these lengths
MAX_TRANSLATION_TOKENS = 256  # by default, however long the text
DEFAULT_MAX_TOKENS = 128  # generated after a prompt
SORT_WINDOW = 16  # batches of texts that are grouped by length at a time

Item = TypeVar("Item")
Size = TypeVar("Size", bound=Hashable)


class TextGenerator:
    """Models with a tokenizer, ready to generate and score texts on a mesh.

    Args:
      models: one model, or several that form an ensemble: the mean of their probabilities is used.
      tokenizer: the tokenizer of the models.
      mesh, layout: where they run.
      rows: the number of texts of a batch.
      longest: the maximum number of tokens of a text; by default 1024, or the number of positions that the
        model has learned.
    """

    def __init__(
        self,
        models: Transformer | list[Transformer] | tuple[Transformer, ...],
        tokenizer: Tokenizer,
        mesh: wf.Mesh | str | None = None,
        layout: wf.Layout | str = "",
        *,
        rows: int = 16,
        longest: int | None = None,
    ):
        self.models = tuple(models) if isinstance(models, list | tuple) else (models,)
        self.tokenizer, self.rows = tokenizer, rows
        _check_sizes(len(self.models), rows, longest)
        for model in self.models:
            check_decodable(model, "TextGenerator")
        configs = [model.config for model in self.models]
        _check_ensemble(configs)
        check_vocab(tokenizer, configs[0].vocab)
        self.translates = configs[0].kind == "encoder_decoder"
        self.start = START_TOKEN if self.translates else start_id(tokenizer)
        learned = [config.longest for config in configs if config.positions == "learned"]
        self.longest = min(longest or 1024, *learned) if learned else longest or 1024
        # All programs share one Mesh and one Layout object, so that a program recognizes the results of
        # another as placed and does not reshard them.
        mesh, layout = self.mesh, self.layout = wf.Mesh.of(mesh), wf.Layout.of(layout)
        self.prefill = wf.spmd(prefill, mesh, layout, static=("max_length",))
        self.decode = wf.spmd(decode, mesh, layout, donate=("state",))
        self.beam_search = wf.spmd(beam_search, mesh, layout, static=("beams",))
        self.score_batch = wf.spmd(score, mesh, layout)

    def bucket(self, count: int) -> int:
        """The length that a row with this number of tokens is padded to."""
        return min(next((n for n in LENGTH_BUCKETS if n >= count), self.longest), self.longest)

    def generate(
        self, texts: Iterable[str], config: GenerationConfig | None = None, first: int = 0
    ) -> Iterator[Completion]:
        """Translate texts, or continue them. The translation of a blank text is empty.

        Args:
          texts: the texts to translate, or the prompts.
          config: the generation settings.
          first: the number of the first text; random draws depend on the number of a text.
        """
        config = config or GenerationConfig()
        self._check(texts, config)
        prompts = (self.encode_prompt(n, text, config.limit) for n, text in enumerate(texts, first))
        for window in _chunks(prompts, self.rows * SORT_WINDOW):
            done = {prompt.number: EMPTY_COMPLETION for prompt in window if not prompt.limit}
            nonempty = [prompt for prompt in window if prompt.limit]
            for sizes, batch in self._batches(nonempty, self.padded_sizes):
                completions = self.generate_batch(batch, sizes, config)
                done |= dict(zip((prompt.number for prompt in batch), completions, strict=True))
            yield from (done[prompt.number] for prompt in window)

    def _check(self, texts: Iterable[str], config: GenerationConfig) -> None:
        most = self.longest if self.translates else self.longest - 1
        if isinstance(texts, str):
            raise ModelError(
                f"texts is a string, {texts[:20]!r}",
                rule="texts is a list of strings, with one completion for each",
                hint="generate([text])",
            ).located("generate")
        if config.limit is not None and config.limit > most:
            raise ModelError(
                f"limit is {config.limit} tokens, and there are positions for {most}",
                rule="a completion is at most as long as a text that can be read"
                + ("" if self.translates else ", less one token of the prompt"),
                hint=f"a limit of at most {most}",
            ).located("generate")

    def encode_prompt(self, number: int, text: str, limit: int | None) -> PromptRow:
        """Encode a text as a row, truncated if it is too long.

        Args:
          number: the number of the text.
          text: the text to translate, or the prompt.
          limit: the maximum number of generated tokens; None: the default of `GenerationConfig`.
        """
        ids, end = self.tokenizer.encode(text), self.tokenizer.end
        if self.translates and not text.strip():
            return PromptRow(number, (end,), (self.start,), 0)
        if self.translates:
            kept = ids[: self.longest - 1]
            default = min(MAX_TRANSLATION_TOKENS, (3 * len(kept)) // 2 + 10)
            most = min(default if limit is None else limit, self.longest)
            return PromptRow(number, (*kept, end), (self.start,), most, len(kept) < len(ids))
        most = min(DEFAULT_MAX_TOKENS, self.longest // 2) if limit is None else min(limit, self.longest - 1)
        kept = ids[-(self.longest - most) :] if len(ids) >= self.longest - most else ids
        return PromptRow(number, (), (self.start, *kept)[-self.longest :], most, len(kept) < len(ids))

    def padded_sizes(self, prompt: PromptRow) -> PaddedSizes:
        """The lengths that a row is padded to."""
        if self.translates:
            inputs = self.bucket(len(prompt.inputs))
            # At least the default limit of the longest text of this bucket: texts of one bucket then share a
            # program, unless their limit is set and larger.
            usual = min(MAX_TRANSLATION_TOKENS, self.bucket(3 * inputs // 2 + 10))
            return PaddedSizes(inputs, 1, max(self.bucket(prompt.limit), usual))
        return PaddedSizes(0, self.bucket(len(prompt.prompt)), self.bucket(prompt.limit))

    def generate_batch(
        self, prompts: Sequence[PromptRow], sizes: PaddedSizes, config: GenerationConfig
    ) -> list[Completion]:
        """The completions of one batch: at most `rows` prompts, padded to these sizes."""
        max_length = sizes.generated if self.translates else min(sizes.prompt + sizes.generated, self.longest)
        batch, settings = pad_batch(prompts, [config] * len(prompts), self.rows, sizes, self.tokenizer)
        state = self.prefill(self.models, batch, settings, max_length)
        if config.beams is not None:
            result = self.beam_search(self.models, state, config.beams)
            return self._beam_completions(prompts, result, config)
        state = self.decode(self.models, state, sizes.generated)
        tokens, counts, logprobs = state.generated.numpy(), state.count.numpy(), state.logprobs.numpy()
        return [
            self._completion(
                prompt, config, tokens[n, :count], logprobs[n, :count].sum(), logprobs[n, :count]
            )
            for n, (prompt, count) in enumerate(zip(prompts, counts, strict=False))
        ]

    def _beam_completions(
        self, prompts: Sequence[PromptRow], result: BeamResult, config: GenerationConfig
    ) -> list[Completion]:
        tokens = result.generated.numpy("batch", "beam", "generated")
        counts, scores, logprobs = (
            t.numpy("batch", "beam") for t in (result.count, result.score, result.logprob)
        )
        found = [
            [
                self._completion(prompt, config, tokens[n, k, :count], scores[n, k], logprobs[n, k : k + 1])
                for k, count in enumerate(counts[n])
                if count
            ]
            for n, prompt in enumerate(prompts)
        ]
        if not all(found):  # every comparison with NaN is false, so nothing is ever kept
            raise ModelError(
                "a beam search found no text: the model's logits are not finite",
                rule="beams are compared by log-probability, and NaN can't be compared",
                hint="weft eval FOLDER shows the loss; an earlier checkpoint, by --step, may be finite",
            )
        return [dataclasses.replace(best, others=tuple(others)) for best, *others in found]

    def _completion(
        self,
        prompt: PromptRow,
        config: GenerationConfig,
        tokens: np.ndarray,
        score: np.floating,
        logprobs: np.ndarray,
    ) -> Completion:
        ended = len(tokens) > 0 and int(tokens[-1]) in (self.tokenizer.end, *config.ends)
        ids = tuple(map(int, tokens))
        text = decode_continuation(prompt.last, ids[:-1] if ended else ids, self.tokenizer)
        return Completion(text, ids, float(score), tuple(map(float, logprobs)), ended, prompt.cut)

    def score(self, pairs: Iterable[tuple[str, str]], first: int = 0) -> Iterator[tuple[float, ...]]:
        """The log-probability of each token of given texts, the last one that of the end token.

        Args:
          pairs: the text to translate, or the prompt, and the text to score.
          first: the number of the first pair, for messages.
        """
        numbered = enumerate((self.encode_pair(n, *pair) for n, pair in enumerate(pairs, first)), first)
        for window in _chunks(numbered, self.rows * SORT_WINDOW):
            done: dict[int, tuple[float, ...]] = {}
            for (inputs, length), batch in self._batches(window, self._pair_sizes):
                rows = self._pad_pairs([row for _, (row, _) in batch], inputs, length)
                logprobs = self.score_batch(self.models, rows).numpy("batch", "length")
                for n, (number, (row, begin)) in enumerate(batch):
                    done[number] = tuple(map(float, logprobs[n, begin : len(row.targets)]))
            yield from (done[number] for number, _ in window)

    def encode_pair(self, number: int, text: str, target: str) -> tuple[EncodedExample, int]:
        """Encode a pair as a row, and find where the target begins; an error if it is too long."""
        end = self.tokenizer.end
        ids, targets = self.tokenizer.encode(text), [*self.tokenizer.encode(target), end]
        row = EncodedExample(targets, [*ids, end]) if self.translates else EncodedExample([*ids, *targets])
        longest = max(len(row.targets), len(ids) + 1)
        if longest > self.longest:
            raise ModelError(
                f"text {number + 1} and its target have {longest} tokens, of at most {self.longest}",
                rule="a score covers all tokens, so texts are not truncated",
                hint="shorter texts; or a larger longest=, with positions that are not learned",
            ).located("score")
        return row, 0 if self.translates else len(ids)

    def _pair_sizes(self, numbered: tuple[int, tuple[EncodedExample, int]]) -> tuple[int, int]:
        row = numbered[1][0]
        return self.bucket(len(row.inputs or ())), self.bucket(len(row.targets))

    def _pad_pairs(self, rows: Sequence[EncodedExample], inputs: int, length: int) -> Batch:
        end = [self.tokenizer.end]
        empty = EncodedExample(end, end if self.translates else None)
        padded = [[row] for row in (*rows, *[empty] * (self.rows - len(rows)))]
        arrays = packed_arrays(
            padded, length, inputs if self.translates else None, self.tokenizer.pad, self.start
        )
        batch = wf.Dim("batch", self.rows)
        return Batch(**{n: wf.tensor(a, [batch, wf.Dim("length", a.shape[1])]) for n, a in arrays.items()})

    def _batches(
        self, items: Sequence[Item], sizes: Callable[[Item], Size]
    ) -> Iterator[tuple[Size, list[Item]]]:
        """Group items of the same padded sizes, at most `rows` at a time."""
        groups: dict[Size, list[Item]] = defaultdict(list)
        for item in items:
            groups[sizes(item)].append(item)
        for key, group in groups.items():
            for at in range(0, len(group), self.rows):
                yield key, group[at : at + self.rows]


def _check_sizes(models: int, rows: int, longest: int | None) -> None:
    """Raise an error if there is no model, no row, or no position to generate at."""
    if not models or rows < 1 or (longest is not None and longest < 2):
        raise ModelError(
            f"a generator of {models} models with {rows} rows"
            + (f" of at most {longest} tokens" if longest is not None else ""),
            rule="at least one model, one row, and two tokens: one of the prompt and one generated",
            hint="TextGenerator(model, tokenizer, rows=16)",
        ).located("TextGenerator")


def _check_ensemble(configs: Sequence[Config]) -> None:
    """Raise an error if a model can't generate, or if the models can't form an ensemble."""
    kinds, vocabs = ({getattr(config, name) for config in configs} for name in ("kind", "vocab"))
    if len(kinds) > 1 or len(vocabs) > 1 or "encoder" in kinds:
        models = (f"{config.kind.replace('_', '-')} with {config.vocab} ids" for config in configs)
        raise ModelError(
            f"can't generate with {'these models together' if len(configs) > 1 else 'this model'}: "
            + ", ".join(models),
            rule="decoders and encoder-decoders generate; an ensemble has models of one kind and one "
            "vocabulary",
            hint="models that were trained the same way, from different seeds or in different sizes",
        ).located("TextGenerator")


def _chunks(items: Iterable[Item], count: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, count)):
        yield chunk
