"""From texts to texts: a model that is ready to generate.

    speaker = Speaker(model, tokenizer, "data=4 model=2", "batch:data heads:model")
    for said in speaker.say(["A cat.", "Two cats."], Ask(beams=Beams(4))):
        print(said.text)

Texts are taken some at a time, those of about one length together, and come back in their order. Rows are
filled up to one of a few lengths, so a handful of compiled programs serves all texts; what is
generated for a text does not depend on those beside it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import weft as wf
from weft.core.errors import ModelError
from weft.data import EncodedExample, Tokenizer, check_vocab, packed_arrays
from weft.data.tokenizers import decode_continuation, start_id
from weft.models import Batch
from weft.models.batch import START_TOKEN

from .batching import PaddedSizes, PromptRow, pad_batch
from .beam import beam_search
from .config import EMPTY_COMPLETION, Completion, GenerationConfig
from .decode_loop import decode, prefill
from .requirements import check_decodable
from .score import score

LENGTH_BUCKETS = (16, 64, 256, 1024, 4096, 16384)  # the lengths that rows are filled up to
MAX_TRANSLATION_TOKENS = 256  # tokens of a translation, however long the text
DEFAULT_MAX_TOKENS = 128  # tokens that are generated after a prompt
SORT_WINDOW = 16  # batches of texts that are sorted by length together


class TextGenerator:
    """Models that are ready to generate and score texts, on a mesh, with a tokenizer.

    Args:
      models: one, or several that generate together by the mean of their probabilities.
      tokenizer: theirs.
      mesh, layout: where they run.
      rows: how many texts are generated or scored at once.
      longest: how many tokens a text may have; by default 1024, or as many as the model has positions for.
    """

    def __init__(
        self,
        models: Any,
        tokenizer: Tokenizer,
        mesh: Any = None,
        layout: Any = "",
        *,
        rows: int = 16,
        longest: int | None = None,
    ):
        self.models = tuple(models) if isinstance(models, list | tuple) else (models,)
        self.tokenizer, self.rows = tokenizer, rows
        _check_sizes(len(self.models), rows, longest)
        for model in self.models:
            check_decodable(model, "Speaker")
        configs = [model.config for model in self.models]
        _check_alike(configs)
        check_vocab(tokenizer, configs[0].vocab)
        self.translates = configs[0].kind == "encoder_decoder"
        self.start = START_TOKEN if self.translates else start_id(tokenizer)
        known = [config.longest for config in configs if config.positions == "learned"]
        self.longest = min(longest or 1024, *known) if known else longest or 1024
        # One object each for all programs: they then know each other's results to be in place.
        mesh, layout = self.mesh, self.layout = wf.Mesh.of(mesh), wf.Layout.of(layout)
        self.begin = wf.spmd(prefill, mesh, layout, static=("room",))
        self.speak = wf.spmd(decode, mesh, layout, donate=("state",))
        self.search = wf.spmd(beam_search, mesh, layout, static=("how",))
        self.scoring = wf.spmd(score, mesh, layout)

    def size(self, count: int) -> int:
        """The length that a row of so many tokens is filled up to."""
        return min(next((n for n in LENGTH_BUCKETS if n >= count), self.longest), self.longest)

    def say(
        self, texts: Iterable[str], ask: GenerationConfig | None = None, first: int = 0
    ) -> Iterator[Completion]:
        """Translate texts, or go on with them. The translation of a blank text is an empty one.

        Args:
          texts: what is translated, or gone on with.
          ask: how.
          first: the number of the first text, on which what is drawn for it depends.
        """
        ask = ask or GenerationConfig()
        self._check(texts, ask)
        items = (self.item(n, text, ask.limit) for n, text in enumerate(texts, first))
        for some in _taken(items, self.rows * SORT_WINDOW):
            done = {item.number: EMPTY_COMPLETION for item in some if not item.limit}
            left = [item for item in some if item.limit]
            for sizes, part in self._batches(left, self.sizes):
                found = self.answers(part, sizes, ask)
                done |= dict(zip((item.number for item in part), found, strict=True))
            yield from (done[item.number] for item in some)

    def _check(self, texts: Any, ask: GenerationConfig) -> None:
        most = self.longest if self.translates else self.longest - 1
        if isinstance(texts, str):
            raise ModelError(
                f"the texts are one text, {texts[:20]!r}",
                rule="several are given, and each of them gets an answer",
                hint="a list of one: say([text])",
            ).located("say")
        if ask.limit is not None and ask.limit > most:
            raise ModelError(
                f"{ask.limit} tokens may be said, and there are places for {most}",
                rule="what is said is no longer than what can be read"
                + ("" if self.translates else ", less one token of the prompt"),
                hint=f"a limit of at most {most}",
            ).located("say")

    def item(self, number: int, text: str, limit: int | None) -> PromptRow:
        """A text as a row, cut if it is too long.

        Args:
          number: of the text.
          text: what is translated, or gone on with.
          limit: how many tokens at most; None: as `Ask` says.
        """
        ids, end = self.tokenizer.encode(text), self.tokenizer.end
        if self.translates and not text.strip():
            return PromptRow(number, (end,), (self.start,), 0)
        if self.translates:
            kept = ids[: self.longest - 1]
            most = min(MAX_TRANSLATION_TOKENS, (3 * len(kept)) // 2 + 10) if limit is None else limit
            return PromptRow(
                number, (*kept, end), (self.start,), min(most, self.longest), len(kept) < len(ids)
            )
        most = min(DEFAULT_MAX_TOKENS, self.longest // 2) if limit is None else min(limit, self.longest - 1)
        kept = ids[-(self.longest - most) :] if len(ids) >= self.longest - most else ids
        return PromptRow(number, (), (self.start, *kept)[-self.longest :], most, len(kept) < len(ids))

    def sizes(self, item: PromptRow) -> PaddedSizes:
        """To how many positions a row is filled up."""
        if self.translates:
            inputs = self.size(len(item.inputs))
            return PaddedSizes(
                inputs,
                1,
                max(self.size(item.limit), min(MAX_TRANSLATION_TOKENS, self.size(3 * inputs // 2 + 10))),
            )
        return PaddedSizes(0, self.size(len(item.prompt)), self.size(item.limit))

    def answers(
        self, items: Sequence[PromptRow], sizes: PaddedSizes, ask: GenerationConfig
    ) -> list[Completion]:
        """What is generated for some texts, no more than there are rows, filled up to these sizes."""
        room = sizes.said if self.translates else min(sizes.prompt + sizes.said, self.longest)
        batch, rows = pad_batch(items, [ask] * len(items), self.rows, sizes, self.tokenizer)
        state = self.begin(self.models, batch, rows, room)
        if ask.beams is not None:
            return self._found(items, self.search(self.models, state, ask.beams), ask)
        state = self.speak(self.models, state, sizes.said)
        tokens, counts, logs = state.said.numpy(), state.count.numpy(), state.scores.numpy()
        return [
            self._read(item, ask, tokens[n, :count], logs[n, :count].sum(), logs[n, :count])
            for n, (item, count) in enumerate(zip(items, counts, strict=False))
        ]

    def _found(self, items: Sequence[PromptRow], found: Any, ask: GenerationConfig) -> list[Completion]:
        tokens = found.said.numpy("batch", "beam", "said")
        counts, scores, logs = (t.numpy("batch", "beam") for t in (found.count, found.score, found.log))
        every = [
            [
                self._read(item, ask, tokens[n, k, :count], scores[n, k], (logs[n, k],))
                for k, count in enumerate(counts[n])
                if count
            ]
            for n, item in enumerate(items)
        ]
        if not all(every):  # no text is better than another one then
            raise ModelError(
                "a search found no text: the model's numbers are not finite",
                rule="beams are compared by the logarithms of probabilities, which NaN has no place among",
                hint="weft eval FOLDER shows the loss; an earlier checkpoint, by --step, may be finite",
            )
        return [dataclasses.replace(one[0], others=tuple(one[1:])) for one in every]

    def _read(self, item: PromptRow, ask: GenerationConfig, tokens: Any, score: Any, logs: Any) -> Completion:
        ended = len(tokens) > 0 and int(tokens[-1]) in (self.tokenizer.end, *ask.ends)
        kept = tuple(map(int, tokens))
        text = decode_continuation(item.last, kept[:-1] if ended else kept, self.tokenizer)
        return Completion(text, kept, float(score), tuple(map(float, logs)), ended, item.cut)

    def score(self, texts: Iterable[tuple[str, str]], first: int = 0) -> Iterator[tuple[float, ...]]:
        """The logarithm of the probability of each token of given texts, the end's last.

        Args:
          texts: pairs: what is translated, or gone on with, and what is scored.
          first: the number of the first, from 0 on, for messages.
        """
        numbered = enumerate((self.pair(n, *pair) for n, pair in enumerate(texts, first)), first)
        for some in _taken(numbered, self.rows * SORT_WINDOW):
            done: dict[int, tuple[float, ...]] = {}
            for (inputs, length), part in self._batches(some, self._pair_sizes):
                logs = self.scoring(self.models, self._pairs([one for _, (one, _) in part], inputs, length))
                array = logs.numpy("batch", "length")
                for n, (number, (one, begins)) in enumerate(part):
                    done[number] = tuple(map(float, array[n, begins : len(one.targets)]))
            yield from (done[number] for number, _ in some)

    def pair(self, number: int, text: str, target: str) -> tuple[EncodedExample, int]:
        """Two texts as a row, and where in it what is scored begins; an error if they are too long."""
        end = self.tokenizer.end
        ids, said = self.tokenizer.encode(text), [*self.tokenizer.encode(target), end]
        row = EncodedExample(said, [*ids, end]) if self.translates else EncodedExample([*ids, *said])
        longest = max(len(row.targets), len(ids) + 1)
        if longest > self.longest:
            raise ModelError(
                f"text {number + 1} and what is scored have {longest} tokens, of at most {self.longest}",
                rule="a score is that of all tokens: none is cut off",
                hint="shorter texts; or longest=, with positions that don't end",
            ).located("score")
        return row, 0 if self.translates else len(ids)

    def _pair_sizes(self, numbered: tuple[int, tuple[EncodedExample, int]]) -> tuple[int, int]:
        row = numbered[1][0]
        return self.size(len(row.inputs or ())), self.size(len(row.targets))

    def _pairs(self, rows: Sequence[EncodedExample], inputs: int, length: int) -> Batch:
        end = [self.tokenizer.end]
        empty = EncodedExample(end, end if self.translates else None)
        every = [[row] for row in (*rows, *[empty] * (self.rows - len(rows)))]
        made = packed_arrays(
            every, length, inputs if self.translates else None, self.tokenizer.pad, self.start
        )
        batch = wf.Dim("batch", self.rows)
        return Batch(**{n: wf.tensor(a, [batch, wf.Dim("length", a.shape[1])]) for n, a in made.items()})

    def _batches(self, items: Sequence[Any], sizes: Callable[[Any], Any]) -> Iterator[tuple[Any, list[Any]]]:
        """Items of the same sizes together, as many as there are rows."""
        groups: dict[Any, list[Any]] = defaultdict(list)
        for item in items:
            groups[sizes(item)].append(item)
        for key, group in groups.items():
            for at in range(0, len(group), self.rows):
                yield key, group[at : at + self.rows]


def _check_sizes(models: int, rows: int, longest: int | None) -> None:
    """An error if there is no model, or no room for a text."""
    if not models or rows < 1 or (longest is not None and longest < 2):
        raise ModelError(
            f"{models} models are to say {rows} texts at once"
            + (f", of at most {longest} tokens" if longest is not None else ""),
            rule="at least one model, one text, and two tokens: one that is read and one that is said",
            hint="Speaker(model, tokenizer, rows=16)",
        ).located("Speaker")


def _check_alike(configs: Sequence[Any]) -> None:
    """An error if models can't generate, or not together."""
    kinds, vocabs = ({getattr(config, name) for config in configs} for name in ("kind", "vocab"))
    if len(kinds) > 1 or len(vocabs) > 1 or "encoder" in kinds:
        shown = (f"{config.kind.replace('_', '-')} with {config.vocab} ids" for config in configs)
        raise ModelError(
            f"models that are to speak{' together' if len(configs) > 1 else ''}: {', '.join(shown)}",
            rule="decoders or encoder-decoders speak; several do together if all are of one kind, with one "
            "vocabulary",
            hint="models that were trained alike, from different seeds or in different sizes",
        ).located("Speaker")


def _taken(items: Iterable[Any], count: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while some := list(itertools.islice(iterator, count)):
        yield some
