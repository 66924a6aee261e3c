"""From texts to texts: a model that is ready to speak.

    speaker = Speaker(model, tokenizer, "data=4 model=2", "batch:data heads:model")
    for said in speaker.say(["A cat.", "Two cats."], Ask(beams=Beams(4))):
        print(said.text)

Texts are taken some at a time, those of about one length together, and come back in their order. Rows are
filled up to one of a few lengths, so a handful of compiled programs serves all texts; what is said to a text
does not depend on those beside it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import weft as wf
from weft.data import Encoded, Tokenizer, arrays, check_vocab
from weft.errors import ModelError
from weft.models import Batch

from .beam import Beams, search
from .choose import Choice
from .score import score
from .speak import Rows, begin, speak

ENDS = 4  # how many tokens may end a row
SIZES = (16, 64, 256, 1024, 4096, 16384)  # the lengths that rows are filled up to
MOST = 256  # tokens of a translation, however long the text
CONTINUED = 128  # tokens that are said after a prompt
AHEAD = 16  # batches of texts that are sorted by length together


@dataclass(frozen=True)
class Ask:
    """How a text is to be said.

    Attributes:
      limit: how many tokens at most; None: 128 after a prompt; for a translation 10 more than one and a half
        times those of the text, and no more than 256.
      temperature, top_k, top_p, penalty: see `Choice`.
      beams: a beam search, in place of all these.
      seed: what is drawn depends on it, and on the number of the text.
      ends: tokens that end it, beside the tokenizer's own.
    """

    limit: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    penalty: float = 1.0
    beams: Beams | None = None
    seed: int = 0
    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        wrong = {
            f"limit={self.limit}": self.limit is not None and self.limit < 1,
            f"temperature={self.temperature}": not 0 <= self.temperature < float("inf"),
            f"top_k={self.top_k}": self.top_k < 0,
            f"top_p={self.top_p}": not 0 < self.top_p <= 1,
            f"penalty={self.penalty}": not 0 < self.penalty < float("inf"),
            f"{len(self.ends)} ends": len(self.ends) >= ENDS,
        }
        facts = [fact for fact, is_wrong in wrong.items() if is_wrong]
        if facts:
            raise ModelError(
                f"texts are to be said with {' and '.join(facts)}",
                rule=f"at least one token; a temperature and top_k from 0 on; top_p above 0 and up to 1; a "
                f"penalty above 0; at most {ENDS - 1} ends",
                hint="temperature=0 takes the likeliest token; top_k=0, top_p=1 and penalty=1 change nothing",
            ).located("Ask")


@dataclass(frozen=True)
class Said:
    """What was said.

    Attributes:
      text: as the tokenizer reads the tokens, without the end.
      tokens: with the end, if it was said.
      score: the logarithm of their probability; of a beam search, divided by its penalty.
      logs: the logarithm of each token's probability; a search gives their sum alone.
      ended: whether it ended by itself, and not because it was long enough.
      cut: whether the text was longer than the model can read: its end (of a prompt, its beginning) was lost.
      others: further results of a beam search, best first.
    """

    text: str
    tokens: tuple[int, ...]
    score: float
    logs: tuple[float, ...]
    ended: bool
    cut: bool = False
    others: tuple[Said, ...] = ()


NOTHING = Said("", (), 0.0, (), True)


@dataclass(frozen=True)
class _Item:
    """A text as a row: what the encoder reads (or nothing), the beginning, and how many tokens may follow."""

    number: int
    inputs: tuple[int, ...]
    prompt: tuple[int, ...]
    limit: int
    cut: bool


class Speaker:
    """Models that are ready to speak, on a mesh, with a tokenizer.

    Args:
      models: one, or several that speak together by the mean of their probabilities.
      tokenizer: theirs.
      mesh, layout: where they run.
      rows: how many texts are said at once.
      longest: how many tokens a text may have; by default 1024, or as many as the model has places for.
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
        configs = [model.config for model in self.models]
        _check_alike(configs)
        check_vocab(tokenizer, configs[0].vocab)
        self.translates = configs[0].kind == "encoder_decoder"
        known = [config.longest for config in configs if config.positions == "learned"]
        self.longest = min(longest or 1024, *known) if known else longest or 1024
        self.mesh, self.layout = mesh, layout
        self.begin = wf.spmd(begin, mesh, layout, static=("room",))
        self.speak = wf.spmd(speak, mesh, layout, donate=("state",))
        self.search = wf.spmd(search, mesh, layout, static=("how",))
        self.scoring = wf.spmd(score, mesh, layout)

    def size(self, count: int) -> int:
        """The length that a row of so many tokens is filled up to."""
        return min(next((n for n in SIZES if n >= count), self.longest), self.longest)

    def say(self, texts: Iterable[str], ask: Ask | None = None, first: int = 0) -> Iterator[Said]:
        """Translate texts, or go on with them. The translation of a blank text is an empty one.

        Args:
          texts: what is said something to.
          ask: how.
          first: the number of the first text, on which what is drawn for it depends.
        """
        ask = ask or Ask()
        items = (self._item(n, text, ask.limit) for n, text in enumerate(texts, first))
        for some in _taken(items, self.rows * AHEAD):
            done = {item.number: NOTHING for item in some if not item.limit}
            left = [item for item in some if item.limit]
            for (inputs, prompt, said), group in _by_shape(left, self._shape).items():
                for at in range(0, len(group), self.rows):
                    part = group[at : at + self.rows]
                    found = self._said(part, inputs, prompt, said, ask)
                    done |= dict(zip((item.number for item in part), found, strict=True))
            yield from (done[item.number] for item in some)

    def _item(self, number: int, text: str, limit: int | None) -> _Item:
        ids, end, pad = self.tokenizer.encode(text), self.tokenizer.end, self.tokenizer.pad
        if self.translates and not text.strip():
            return _Item(number, (end,), (pad,), 0, False)
        if self.translates:
            kept = ids[: self.longest - 1]
            most = min(MOST, (3 * len(kept)) // 2 + 10) if limit is None else limit
            return _Item(number, (*kept, end), (pad,), min(most, self.longest), len(kept) < len(ids))
        most = min(CONTINUED if limit is None else limit, self.longest - 1)
        kept = ids[-(self.longest - most) :] if len(ids) >= self.longest - most else ids
        return _Item(number, (), (pad, *kept)[-self.longest :], most, len(kept) < len(ids))

    def _shape(self, item: _Item) -> tuple[int, int, int]:
        """The sizes of a row: of the inputs, the prompt, and what is said."""
        if self.translates:
            inputs = self.size(len(item.inputs))
            return inputs, 1, max(self.size(item.limit), min(MOST, self.size(3 * inputs // 2 + 10)))
        return 0, self.size(len(item.prompt)), self.size(item.limit)

    def _said(self, items: Sequence[_Item], inputs: int, prompt: int, said: int, ask: Ask) -> list[Said]:
        room = min(prompt + said, self.longest) if not self.translates else said
        batch, rows = self.ready(items, inputs, prompt, said, [ask] * len(items))
        state = self.begin(self.models, batch, rows, room)
        if ask.beams is not None:
            found = self.search(self.models, state, ask.beams)
            tokens, counts, scores, logs = (
                t.numpy("batch", "beam", *more)
                for t, more in (
                    (found.said, ("said",)),
                    (found.count, ()),
                    (found.score, ()),
                    (found.log, ()),
                )
            )
            every = [
                [
                    self._read(item, ask, tokens[n, k, : counts[n, k]], scores[n, k], (logs[n, k],))
                    for k in range(counts.shape[1])
                    if counts[n, k]
                ]
                for n, item in enumerate(items)
            ]
            return [dataclasses.replace(one[0], others=tuple(one[1:])) for one in every]
        state = self.speak(self.models, state, said)
        tokens, counts, logs = state.said.numpy(), state.count.numpy(), state.scores.numpy()
        return [
            self._read(item, ask, tokens[n, :count], float(logs[n, :count].sum()), logs[n, :count])
            for n, (item, count) in enumerate(zip(items, counts[: len(items)], strict=True))
        ]

    def _read(self, item: _Item, ask: Ask, tokens: Any, score: Any, logs: Any) -> Said:
        ended = len(tokens) > 0 and int(tokens[-1]) in (self.tokenizer.end, *ask.ends)
        kept = tuple(map(int, tokens))
        text = self.tokenizer.decode(kept[:-1] if ended else kept)
        return Said(text, kept, float(score), tuple(map(float, logs)), ended, item.cut)

    def ready(
        self, items: Sequence[_Item], inputs: int, prompt: int, said: int, asks: Sequence[Ask]
    ) -> tuple[Batch, Rows]:
        """Rows for texts, filled up to given sizes, and to the number of rows by ones that say nothing."""
        empty = _Item(-1, (self.tokenizer.end,) if inputs else (), (self.tokenizer.pad,), 0, False)
        every = [*items, *[empty] * (self.rows - len(items))]
        asks = [*asks, *[Ask()] * (self.rows - len(items))]
        batch = wf.Dim("batch", self.rows)

        def filled(rows: list[tuple[int, ...]], size: int, name: str) -> Any:
            array = np.full((len(rows), size), self.tokenizer.pad, np.int32)
            for n, ids in enumerate(rows):
                array[n, : len(ids)] = ids
            return wf.tensor(array, [batch, wf.Dim(name, size)])

        def each(values: list[Any], type: Any) -> Any:
            return wf.tensor(np.array(values, type), [batch])

        fields: dict[str, Any] = {"tokens": filled([item.prompt for item in every], prompt, "length")}
        if inputs:
            lengths = np.array([len(item.inputs) for item in every])
            segments = (np.arange(inputs) < lengths[:, None]).astype(np.int32)
            fields["inputs"] = filled([item.inputs for item in every], inputs, "length")
            fields["input_segments"] = wf.tensor(segments, fields["inputs"].dims)
        numbers = np.ones((self.rows, said), np.float32)
        ends = np.full((self.rows, ENDS), -1, np.int32)
        for n, (item, ask) in enumerate(zip(every, asks, strict=True)):
            if item.limit and ask.temperature > 0:
                numbers[n] = drawn(ask.seed, item.number, said)
            ends[n, : 1 + len(ask.ends)] = self.tokenizer.end, *ask.ends
        rows = Rows(
            each([len(item.prompt) for item in every], np.int32),
            each([item.limit for item in every], np.int32),
            wf.tensor(ends, [batch, wf.Dim("ends", ENDS)]),
            Choice(
                each([ask.temperature for ask in asks], np.float32),
                each([ask.top_k for ask in asks], np.int32),
                each([ask.top_p for ask in asks], np.float32),
                each([ask.penalty for ask in asks], np.float32),
            ),
            wf.tensor(numbers, [batch, wf.Dim("said", said)]),
        )
        return Batch(**fields), rows

    def score(self, texts: Iterable[tuple[str, str]], first: int = 0) -> Iterator[tuple[float, ...]]:
        """The logarithm of the probability of each token of given texts, the end's last.

        Args:
          texts: pairs: what is translated, or gone on with, and what is scored.
          first: the number of the first, from 0 on, for messages.
        """
        encoded = (self._pair(n, *pair) for n, pair in enumerate(texts, first))
        for some in _taken(encoded, self.rows * AHEAD):
            done: dict[int, tuple[float, ...]] = {}

            def shape(one: tuple[int, Encoded, int]) -> tuple[int, int]:
                return self.size(len(one[1].inputs or ())), self.size(len(one[1].targets))

            for (inputs, length), group in _by_shape(some, shape).items():
                for at in range(0, len(group), self.rows):
                    part = group[at : at + self.rows]
                    rows = [[one[1]] for one in part]
                    rows += [
                        [Encoded([self.tokenizer.end], [self.tokenizer.end] if self.translates else None)]
                    ] * (self.rows - len(part))
                    made = arrays(rows, length, inputs if self.translates else None, self.tokenizer.pad)
                    dims = {
                        name: [wf.Dim("batch", self.rows), wf.Dim("length", array.shape[1])]
                        for name, array in made.items()
                    }
                    batch = Batch(**{name: wf.tensor(array, dims[name]) for name, array in made.items()})
                    logs = self.scoring(self.models, batch).numpy("batch", "length")
                    for n, (number, one, begins) in enumerate(part):
                        done[number] = tuple(map(float, logs[n, begins : len(one.targets)]))
            yield from (done[number] for number, _, _ in some)

    def _pair(self, number: int, text: str, target: str) -> tuple[int, Encoded, int]:
        """The number, the row, and where in it what is scored begins."""
        ids, said = self.tokenizer.encode(text), [*self.tokenizer.encode(target), self.tokenizer.end]
        begins = 0 if self.translates else len(ids)
        whole = len(said) if self.translates else len(ids) + len(said)
        if max(whole, len(ids) + 1) > self.longest:
            raise ModelError(
                f"text {number + 1} and what is scored have {max(whole, len(ids) + 1)} tokens, of at most "
                f"{self.longest}",
                rule="a score is that of all tokens: none is cut off",
                hint="shorter texts; or longest=, with positions that don't end",
            ).located("score")
        if self.translates:
            return number, Encoded(said, [*ids, self.tokenizer.end]), begins
        return number, Encoded([*ids, *said]), begins


def _check_alike(configs: Sequence[Any]) -> None:
    """An error if models can't speak, or not together."""
    kinds, vocabs = ({getattr(config, name) for config in configs} for name in ("kind", "vocab"))
    if len(kinds) > 1 or len(vocabs) > 1 or "encoder" in kinds:
        shown = (f"{config.kind.replace('_', '-')} with {config.vocab} ids" for config in configs)
        raise ModelError(
            f"models that are to speak{' together' if len(configs) > 1 else ''}: {', '.join(shown)}",
            rule="decoders or encoder-decoders speak; several do together if all are of one kind, with one "
            "vocabulary",
            hint="models that were trained alike, from different seeds or in different sizes",
        ).located("Speaker")


def drawn(seed: int, number: int, count: int) -> np.ndarray:
    """The numbers that a text's tokens are drawn by, above 0 and up to 1."""
    return 1 - np.random.Generator(np.random.Philox(key=[seed, number])).random(count, np.float32)


def _taken(items: Iterable[Any], count: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while some := list(itertools.islice(iterator, count)):
        yield some


def _by_shape(items: Sequence[Any], shape: Any) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        groups[shape(item)].append(item)
    return groups
