"""Continuous batching: rows of many requests advance together, each begins and ends in its own time.

    with Engine(speaker) as engine:                          # compiles every program
        engine.ask([engine.say("A cat.", Ask(), tell)])      # tell(Piece), …, tell(Piece(…, over=True))

One thread owns the devices and has one call at a time under way. Again and again it

1. lets go of requests whose clients are gone;
2. reads texts that wait, as many as there are free slots, and puts them there;
3. says some tokens more in all slots, and tells those who asked;
4. does one batch of what is not said token by token: beam searches, scores, views of attention.

The engine is ready as soon as it can answer every request. Another thread then compiles the decode step for
fewer rows, and never runs anything. Until that is done, one busy slot costs as much as all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from weft.core.errors import ModelError
from weft.generate import Beams, GenerationConfig, TextGenerator
from weft.generate.attention_map import AttentionMapper
from weft.generate.batching import PaddedSizes
from weft.generate.config import EMPTY_COMPLETION
from weft.generate.generator import DEFAULT_MAX_TOKENS

from .programs import ServingPrograms, abstract_state, empty_state, slot_pair

PREFILL_ROWS = 4  # texts that are read, searched or scored at once


@dataclass(frozen=True)
class TokenChunk:
    """What was said since the last one: tokens, the logarithms of their probabilities; whether it is all."""

    tokens: tuple[int, ...]
    logs: tuple[float, ...]
    over: bool


@dataclass(eq=False)
class EngineRequest:
    """One text of a request.

    Attributes:
      kind: "say", or one of ASIDE.
      tell: called in the engine's thread, with pieces or one result, or with what went wrong.
      ask: how it is said or searched.
      item: the text as a row.
      given: of a score or a view, both texts, or the text and the tokens.
      count: how many tokens were told.
      gone: nobody waits for it any more.
    """

    kind: str
    tell: Callable[[Any], None]
    ask: GenerationConfig = field(default_factory=GenerationConfig)
    item: Any = None
    given: Any = None
    count: int = 0
    gone: bool = False

    @property
    def prompt(self) -> int:
        """How many tokens the text has that was read."""
        return len(self.item.inputs or self.item.prompt[1:])  # the first of a prompt is START


class QueueFull(Exception):
    """More waits than may."""


class EngineNotReady(Exception):
    """It is starting or stopping, or has failed."""


class Engine:
    """Models that answer many requests at once.

    Args:
      speaker: the models, their tokenizer and where they run; its `longest` is the size of every slot.
      rows: how many texts are said at once.
      stride: how many tokens are said between two looks at who waits.
      beams: how a search is done: there is one program for all.
      most_waiting: how many texts may wait.
    """

    def __init__(
        self,
        speaker: TextGenerator,
        *,
        rows: int | None = None,
        stride: int = 8,
        beams: Beams | None = None,
        most_waiting: int = 256,
    ):
        self.speaker, self.rows, self.stride = speaker, rows or speaker.rows, stride
        self.beams, self.most_waiting = beams or Beams(4), most_waiting
        self.few = ServingPrograms(speaker, min(PREFILL_ROWS, self.rows))
        self.whole = ServingPrograms(speaker, self.few.rows, lengths=1)  # for scores: one program
        self.viewer = AttentionMapper(speaker) if speaker.translates else None
        self.status = "starting"
        self.failure: BaseException | None = None
        self.observe: Callable[[str, float], None] = lambda what, amount: None
        self.slots: list[EngineRequest | None] = [None] * self.rows
        self._waiting: deque[EngineRequest] = deque()
        self._aside: deque[EngineRequest] = deque()
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="weft engine", daemon=True)
        self._state: Any = None
        # Ascending. The compiler's thread replaces it, the engine's thread reads it.
        self.row_counts: tuple[int, ...] = (self.rows,)
        self._compiler = threading.Thread(target=self._compile_smaller, name="weft compiler", daemon=True)
        self._compiled = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        if not self.wait() and self.failure is not None:
            raise self.failure
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    # For those who ask

    def say(
        self, text: str, ask: GenerationConfig, tell: Callable[[Any], None], number: int = 0
    ) -> EngineRequest:
        """A text that is to be said, or searched if it asks for beams."""
        ids = len(self.speaker.tokenizer.encode(text))
        longest, limit = self.speaker.longest, ask.limit
        room = longest - 1 - ids if not self.speaker.translates else longest
        if limit is None and not self.speaker.translates:
            limit = max(1, min(DEFAULT_MAX_TOKENS, room))
        if ids > longest - 1 or (limit or 1) > room:
            what = f"text {number + 1} has {ids} tokens" + (f" and {limit} are to follow" if limit else "")
            raise ModelError(
                f"{what}: too many",
                rule=f"a text and what follows it have at most {longest - 1} together"
                if not self.speaker.translates
                else f"a text has at most {longest - 1}, what is said {longest}",
                hint="a shorter text, or fewer tokens",
            )
        kind = "say" if ask.beams is None else "search"
        return EngineRequest(kind, tell, ask, self.speaker.item(number, text, limit))

    def score(self, text: str, target: str, tell: Callable[[Any], None], number: int = 0) -> EngineRequest:
        """A text that is to be scored; how likely each token is, is told."""
        self.speaker.pair(number, text, target)  # an error if it is too long
        return EngineRequest("score", tell, given=(text, target))

    def view(self, text: str, tokens: Sequence[int], tell: Callable[[Any], None]) -> EngineRequest:
        """What tokens of a translation look at; a table of weights is told."""
        return EngineRequest("view", tell, given=(text, tuple(tokens)))

    def ask(self, jobs: Sequence[EngineRequest]) -> None:
        """Let jobs wait for their turn, all or none of them."""
        with self._news:
            if self.status != "ready":
                raise EngineNotReady(self.status)
            if self.waiting + len(jobs) > self.most_waiting:
                raise QueueFull(f"{self.waiting} texts wait, of at most {self.most_waiting}")
            for job in jobs:
                if job.item is not None and not job.item.limit:  # a blank text has an empty translation
                    job.tell(EMPTY_COMPLETION if job.kind == "search" else TokenChunk((), (), True))
                else:
                    (self._waiting if job.kind == "say" else self._aside).append(job)
            self._news.notify()

    def leave(self, jobs: Sequence[EngineRequest]) -> None:
        """Nobody waits for these any more: their slots and places in the queue are free."""
        with self._news:
            for job in jobs:
                job.gone = True
            for waiting in (self._waiting, self._aside):
                kept = [job for job in waiting if not job.gone]
                if len(kept) < len(waiting):
                    waiting.clear()
                    waiting.extend(kept)

    @property
    def waiting(self) -> int:
        """How many texts wait."""
        return len(self._waiting) + len(self._aside)

    @property
    def busy(self) -> int:
        """How many slots are taken."""
        return sum(job is not None for job in self.slots)

    @property
    def compilations(self) -> int:
        """How many programs were compiled."""
        few = self.few
        programs = [few.begin, few.admit, few.advance, few.move, few.search, self.whole.scoring]
        programs += [self.viewer.look] if self.viewer is not None else []
        return sum(len(program.traces) for program in programs)

    def start(self) -> None:
        """Compile what requests need, then answer; returns at once."""
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is ready; whether it is."""
        with self._news:
            self._news.wait_for(lambda: self.status != "starting", seconds)
        return self.status == "ready"

    def wait_compiled(self, seconds: float | None = None) -> bool:
        """Wait until the decode step is compiled for fewer rows too (or failed to); whether that is over."""
        return self._compiled.wait(seconds)

    def stop(self, seconds: float | None = None) -> None:
        """Take no more, finish what was taken, and end."""
        with self._news:
            self.status = "stopping" if self.status != "failed" else "failed"
            self._news.notify_all()
        for thread in (self._thread, self._compiler):  # to exit within a compilation would crash
            if thread.ident is not None:
                thread.join(seconds)

    # The thread

    def _run(self) -> None:
        try:
            self._warm()
        except BaseException as error:
            self.failure = error
            self._become("failed")
            return
        self._like = abstract_state(self._state)
        self._become("ready")
        self._compiler.start()
        while self._something():
            try:
                self._turn()
            except Exception as error:  # a full memory, perhaps: what was under way is lost, the rest is not
                traceback.print_exc(file=sys.stderr)
                lost = [job for job in self.slots if job is not None]
                self.slots = [None] * self.rows
                for job in lost:
                    job.tell(error)
                self._state = None

    def _become(self, status: str) -> None:
        with self._news:
            if self.status == "starting":
                self.status = status
            self._news.notify_all()

    def _something(self) -> bool:
        with self._news:
            self._news.wait_for(lambda: self.waiting or self.busy or self.status == "stopping")
            return bool(self.waiting or self.busy)

    def _warm(self) -> None:
        """Every program once: of each length, and with each way to choose tokens (these are all in one)."""
        item, pad = self.speaker.item(0, "", 1), self.speaker.tokenizer.pad
        rows: list[Any] = []
        for size in self.few.lengths:
            filled: dict[str, Any] = {"inputs" if self.speaker.translates else "prompt": (pad,) * size}
            rows.append(dataclasses.replace(item, limit=1, **filled))
        works: list[Callable[[], None]] = [functools.partial(self._try, one) for one in rows]
        works += [
            functools.partial(
                self._search, [EngineRequest("search", _nobody, GenerationConfig(beams=self.beams), rows[0])]
            )
        ]
        works += [functools.partial(self._score, [EngineRequest("score", _nobody, given=("", ""))])]
        if self.viewer is not None:
            works += [functools.partial(self._view, [EngineRequest("view", _nobody, given=("", [pad]))])]
        for work in works:
            if self.status == "starting":  # it may have been told to stop
                work()

    def _compile_smaller(self) -> None:
        """Compile the decode step for fewer rows, the fewest first: a single client waits for that one."""
        *smaller, _ = self.few.row_counts(self.rows)
        models = self.speaker.models
        try:
            if smaller:
                self.few.move.compile(models, self._like, slot_pair(0, 0))
            for count in smaller:
                if self.status != "ready":
                    break
                self.few.advance.compile(models, self._like, count, self.stride)
                self.row_counts = tuple(sorted((count, *self.row_counts)))
        except Exception:  # the programs for more rows do the same
            traceback.print_exc(file=sys.stderr)
        finally:
            self._compiled.set()

    def _try(self, item: Any) -> None:
        self._put([EngineRequest("say", _nobody, item=item)], [0])
        self._speak()

    def _turn(self) -> None:
        self.slots = [None if job is None or job.gone else job for job in self.slots]
        while self._admit():
            pass
        if self.busy:
            began = time.monotonic()
            self._speak()
            self.observe("step", time.monotonic() - began)
        some = self._taken(self._aside, self.few.rows, lambda job: (job.kind, job.ask.beams, job.ask.ends))
        if some:
            began = time.monotonic()
            try:
                BATCH_HANDLERS[some[0].kind](self, some)
            except Exception as error:  # the slots are as they were
                traceback.print_exc(file=sys.stderr)
                _fail(some, error)
            self.observe(some[0].kind, time.monotonic() - began)

    def _admit(self) -> bool:
        """Put some that wait into free slots; whether there were any."""
        free = [n for n, job in enumerate(self.slots) if job is None]
        new = self._taken(self._waiting, min(len(free), self.few.rows), lambda job: None)
        if not new:
            return False
        began = time.monotonic()
        try:
            self._put(new, free[: len(new)])
        except Exception as error:
            _fail(new, error)
            raise
        for n, job in zip(free, new, strict=False):
            self.slots[n] = job
        self.observe("prefill", time.monotonic() - began)
        return True

    def _taken(
        self, waiting: deque[EngineRequest], most: int, like: Callable[[EngineRequest], Any]
    ) -> list[EngineRequest]:
        """The first that wait, of one kind."""
        some: list[EngineRequest] = []
        with self._news:
            while waiting and len(some) < most and (not some or like(waiting[0]) == like(some[0])):
                some.append(waiting.popleft())
        return some

    def _put(self, jobs: Sequence[EngineRequest], slots: Sequence[int]) -> None:
        new = self.few.begun([job.item for job in jobs], [job.ask for job in jobs])
        if self._state is None:
            self._state = empty_state(new, self.rows)
        self._state = self.few.put(self._state, new, slots)

    def _fit(self) -> int:
        """The least row count with a program for all busy slots, which are moved to the front."""
        count = next(n for n in self.row_counts if n >= self.busy)
        behind = [n for n in range(count, self.rows) if self.slots[n] is not None]
        free = [n for n in range(count) if self.slots[n] is None]
        for source, target in zip(behind, free, strict=False):
            self._state = self.few.move(self.speaker.models, self._state, slot_pair(source, target))
            self.slots[source], self.slots[target] = None, self.slots[source]
        return count

    def _speak(self) -> None:
        count = self._fit()
        self._state = self.few.advance(self.speaker.models, self._state, count, self.stride)
        counts, done = self._state.count.numpy(), self._state.done.numpy()
        said, logs = (t.numpy("batch", "said") for t in (self._state.said, self._state.scores))
        for n, job in enumerate(self.slots):
            if job is None:
                continue
            new = slice(job.count, int(counts[n]))
            job.count, over = int(counts[n]), bool(done[n])
            if over:
                self.slots[n] = None
            self.observe("said", new.stop - new.start)
            job.tell(TokenChunk(tuple(said[n, new].tolist()), tuple(logs[n, new].tolist()), over))

    def _search(self, jobs: Sequence[EngineRequest]) -> None:
        # A row of a search depends on its own limit alone: texts with different ones go together.
        items = [job.item for job in jobs]
        sizes = PaddedSizes(*map(max, zip(*map(self.few.sizes, items), strict=True)))
        found = self.few.answers(items, sizes, jobs[0].ask)
        for job, one in zip(jobs, found, strict=True):
            self.observe("said", len(one.tokens))
            job.tell(one)

    def _score(self, jobs: Sequence[EngineRequest]) -> None:
        found = self.whole.score([job.given for job in jobs])
        for job, logs in zip(jobs, found, strict=True):
            job.tell(logs)

    def _view(self, jobs: Sequence[EngineRequest]) -> None:
        assert self.viewer is not None
        for job in jobs:
            job.tell(self.viewer.view(*job.given))


BATCH_HANDLERS: dict[str, Callable[[Engine, Sequence[EngineRequest]], None]] = {
    "search": Engine._search,
    "score": Engine._score,
    "view": Engine._view,
}


def _nobody(_: Any) -> None:
    """Who asks when programs are warmed up."""


def _fail(jobs: Sequence[EngineRequest], error: Exception) -> None:
    for job in jobs:
        job.tell(error)
