"""Continuous batching: rows of many requests are decoded together, and each starts and ends independently.

    with Engine(generator) as engine:                                    # compiles every program
        request = engine.completion_request("A cat.", GenerationConfig(), on_event)
        engine.submit([request])          # on_event(TokenChunk), …, on_event(TokenChunk(…, finished=True))

One thread owns the devices and has one call at a time under way. In a loop it

1. frees the slots of cancelled requests;
2. prefills waiting requests, up to the number of free slots, and inserts them;
3. decodes some tokens in all busy slots, and reports them to the requests;
4. runs one batch of the work that is not decoded token by token: beam searches, scores, attention maps.

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
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from weft.core.errors import ModelError
from weft.generate import Beams, Completion, DecodeState, GenerationConfig, TextGenerator
from weft.generate.attention_map import AttentionMap, AttentionMapper
from weft.generate.batching import PromptRow
from weft.generate.config import EMPTY_COMPLETION
from weft.generate.generator import DEFAULT_MAX_TOKENS

from .programs import ServingPrograms, abstract_state, empty_state, slot_pair

PREFILL_ROWS = 4  # texts that are prefilled, searched or scored at once
GENERATED = "generated"  # the label of these tokens in the metric weft_tokens


@dataclass(frozen=True)
class TokenChunk:
    """The tokens generated since the last chunk with their log-probabilities; `finished` in the last one."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool


# Chunks of a completion; or one result: of a beam search, of a score, of an attention map; or an error.
EngineEvent = TokenChunk | Completion | tuple[float, ...] | AttentionMap | Exception


@dataclass(eq=False)
class EngineRequest:
    """One text of an HTTP request.

    Attributes:
      kind: "generate", or a key of BATCH_HANDLERS.
      on_event: called in the engine's thread with each event.
      config: the generation settings.
      prompt: the encoded text.
      inputs: for a score, the text and its target; for an attention map, the text and the tokens.
      sent: the number of tokens reported so far.
      cancelled: True if the client no longer waits.
    """

    kind: str
    on_event: Callable[[EngineEvent], None]
    config: GenerationConfig = field(default_factory=GenerationConfig)
    prompt: PromptRow | None = None
    inputs: tuple[str, Any] | None = None
    sent: int = 0
    cancelled: bool = False

    @property
    def encoded(self) -> PromptRow:
        """The encoded text of a completion or a beam search."""
        assert self.prompt is not None
        return self.prompt

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the text."""
        return len(self.encoded.inputs or self.encoded.prompt[1:])  # the first of a prompt is START_TOKEN


class QueueFull(Exception):
    """There are too many waiting texts."""


class EngineNotReady(Exception):
    """The engine is starting or stopping, or has failed."""


class Engine:
    """Models that answer many requests at once.

    Args:
      generator: the models, their tokenizer and where they run; its `longest` is the size of every slot.
      rows: the number of slots: texts that are generated at once.
      stride: the number of tokens decoded between two looks at the queue.
      beams: the settings of all beam searches: there is one program for them.
      most_waiting: the maximum number of waiting texts.
    """

    def __init__(
        self,
        generator: TextGenerator,
        *,
        rows: int | None = None,
        stride: int = 8,
        beams: Beams | None = None,
        most_waiting: int = 256,
    ):
        self.generator, self.rows, self.stride = generator, rows or generator.rows, stride
        self.beams, self.most_waiting = beams or Beams(4), most_waiting
        self.programs = ServingPrograms(generator, min(PREFILL_ROWS, self.rows))
        # One length for scores, so that there is only one more program to compile before the engine is ready.
        self.score_programs = ServingPrograms(generator, self.programs.rows, buckets=1)
        self.attention_mapper = AttentionMapper(generator) if generator.translates else None
        self.status = "starting"
        self.failure: BaseException | None = None
        self.observe: Callable[[str, float], None] = lambda kind, amount: None
        self.slots: list[EngineRequest | None] = [None] * self.rows
        self._queue: deque[EngineRequest] = deque()
        self._batch_queue: deque[EngineRequest] = deque()
        self._changed = threading.Condition()  # guards the queues and the status
        self._thread = threading.Thread(target=self._run, name="weft engine", daemon=True)
        self._state: Any = None
        # Ascending. The compiler thread replaces it, the engine thread reads it.
        self.row_counts: tuple[int, ...] = (self.rows,)
        self._compiler = threading.Thread(target=self._compile_smaller, name="weft compiler", daemon=True)
        self._compiled = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        if not self.wait() and self.failure is not None:
            raise self.failure
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Requests, from any thread

    def completion_request(
        self,
        text: str,
        config: GenerationConfig,
        on_event: Callable[[EngineEvent], None],
        number: int = 0,
    ) -> EngineRequest:
        """A request to generate a completion, or to run a beam search if `config` has beams."""
        ids = len(self.generator.tokenizer.encode(text))
        longest, limit = self.generator.longest, config.limit
        most = longest - 1 - ids if not self.generator.translates else longest
        if limit is None and not self.generator.translates:
            limit = max(1, min(DEFAULT_MAX_TOKENS, most))
        if ids > longest - 1 or (limit or 1) > most:
            fact = f"text {number + 1} has {ids} tokens" + (f", and {limit} may follow" if limit else "")
            raise ModelError(
                f"{fact}: too many",
                rule=f"a text and its completion have at most {longest - 1} tokens together"
                if not self.generator.translates
                else f"a text has at most {longest - 1} tokens, its translation {longest}",
                hint="a shorter text, or fewer tokens",
            )
        kind = "generate" if config.beams is None else "search"
        return EngineRequest(kind, on_event, config, self.generator.encode_prompt(number, text, limit))

    def score_request(
        self, text: str, target: str, on_event: Callable[[EngineEvent], None], number: int = 0
    ) -> EngineRequest:
        """A request for the log-probabilities of a target's tokens."""
        self.generator.encode_pair(number, text, target)  # an error if it is too long
        return EngineRequest("score", on_event, inputs=(text, target))

    def attention_request(
        self, text: str, tokens: Sequence[int], on_event: Callable[[EngineEvent], None]
    ) -> EngineRequest:
        """A request for the attention map of a translation."""
        return EngineRequest("attention", on_event, inputs=(text, tuple(tokens)))

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Put requests into the queue, all or none of them."""
        with self._changed:
            if self.status != "ready":
                raise EngineNotReady(self.status)
            if self.waiting + len(requests) > self.most_waiting:
                raise QueueFull(f"{self.waiting} texts are waiting, of at most {self.most_waiting}")
            for request in requests:
                if request.prompt is not None and not request.prompt.limit:
                    # The translation of a blank text is empty.
                    search = request.kind == "search"
                    request.on_event(EMPTY_COMPLETION if search else TokenChunk((), (), True))
                else:
                    (self._queue if request.kind == "generate" else self._batch_queue).append(request)
            self._changed.notify()

    def cancel(self, requests: Sequence[EngineRequest]) -> None:
        """Remove requests from the queue, and free their slots before the next step."""
        with self._changed:
            for request in requests:
                request.cancelled = True
            for queue in (self._queue, self._batch_queue):
                remaining = [request for request in queue if not request.cancelled]
                if len(remaining) < len(queue):
                    queue.clear()
                    queue.extend(remaining)

    @property
    def waiting(self) -> int:
        """The number of waiting texts."""
        return len(self._queue) + len(self._batch_queue)

    @property
    def busy(self) -> int:
        """The number of busy slots."""
        return sum(request is not None for request in self.slots)

    @property
    def compilations(self) -> int:
        """The number of compiled programs."""
        p = self.programs
        programs: list[Any] = [p.prefill, p.insert, p.decode_rows, p.move_row, p.beam_search]
        programs += [self.score_programs.score_batch]
        programs += [self.attention_mapper.attention_weights] if self.attention_mapper is not None else []
        return sum(len(program.traces) for program in programs)

    def start(self) -> None:
        """Start compiling and then answering; returns at once."""
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the engine is ready or has failed; return whether it is ready."""
        with self._changed:
            self._changed.wait_for(lambda: self.status != "starting", seconds)
        return self.status == "ready"

    def wait_compiled(self, seconds: float | None = None) -> bool:
        """Wait until the decode step is compiled for fewer rows, or can't be; return False on timeout."""
        return self._compiled.wait(seconds)

    def stop(self, seconds: float | None = None) -> None:
        """Accept no more requests, finish those that were accepted, and end."""
        with self._changed:
            self.status = "stopping" if self.status != "failed" else "failed"
            self._changed.notify_all()
        for thread in (self._thread, self._compiler):  # exiting during a compilation would crash
            if thread.ident is not None:
                thread.join(seconds)

    # The engine thread

    def _run(self) -> None:
        try:
            self._warm_up()
        except BaseException as error:
            self.failure = error
            self._set_started("failed")
            return
        self._abstract_state = abstract_state(self._state)
        self._set_started("ready")
        self._compiler.start()
        while self._wait_for_work():
            try:
                self._step()
            except (
                Exception
            ) as error:  # out of memory, perhaps: the active requests are lost, the rest is not
                traceback.print_exc(file=sys.stderr)
                lost = [request for request in self.slots if request is not None]
                self.slots = [None] * self.rows
                _fail(lost, error)
                self._state = None  # it may have been donated

    def _set_started(self, status: str) -> None:
        with self._changed:
            if self.status == "starting":  # and not stopped meanwhile
                self.status = status
            self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        """Wait for requests; return False when the engine stops and none are left."""
        with self._changed:
            self._changed.wait_for(lambda: self.waiting or self.busy or self.status == "stopping")
            return bool(self.waiting or self.busy)

    def _warm_up(self) -> None:
        """Run every program once, prefill with each length. One program has all sampling settings."""
        prompt, pad = self.generator.encode_prompt(0, "", 1), self.generator.tokenizer.pad
        prompts = []
        for size in self.programs.buckets:
            tokens: dict[str, Any] = {"inputs" if self.generator.translates else "prompt": (pad,) * size}
            prompts.append(dataclasses.replace(prompt, limit=1, **tokens))
        search = EngineRequest("search", _ignore, GenerationConfig(beams=self.beams), prompts[0])
        score = EngineRequest("score", _ignore, inputs=("", ""))
        attention = EngineRequest("attention", _ignore, inputs=("", [pad]))
        runs: list[Callable[[], None]] = [functools.partial(self._warm_up_decode, one) for one in prompts]
        runs += [functools.partial(self._beam_search, [search]), functools.partial(self._score, [score])]
        if self.attention_mapper is not None:
            runs += [functools.partial(self._map_attention, [attention])]
        for run in runs:
            if self.status == "starting":  # `stop` may have been called
                run()

    def _warm_up_decode(self, prompt: PromptRow) -> None:
        self._insert([EngineRequest("generate", _ignore, prompt=prompt)], [0])
        self._decode()

    def _compile_smaller(self) -> None:
        """Compile the decode step for fewer rows, the fewest first: a single client waits for that one."""
        *smaller, _ = self.programs.row_counts(self.rows)
        models = self.generator.models
        try:
            if smaller:
                self.programs.move_row.compile(models, self._abstract_state, slot_pair(0, 0))
            for count in smaller:
                if self.status != "ready":
                    break
                self.programs.decode_rows.compile(models, self._abstract_state, count, self.stride)
                self.row_counts = tuple(sorted((count, *self.row_counts)))
        except Exception:  # not fatal: the program for all rows gives the same results
            traceback.print_exc(file=sys.stderr)
        finally:
            self._compiled.set()

    def _step(self) -> None:
        self.slots = [None if request is None or request.cancelled else request for request in self.slots]
        while self._admit():
            pass
        if self.busy:
            began = time.monotonic()
            self._decode()
            self.observe("step", time.monotonic() - began)
        batch = self._pop(
            self._batch_queue,
            self.programs.rows,
            lambda request: (request.kind, request.config.beams, request.config.ends),
        )
        if batch:
            began = time.monotonic()
            try:
                BATCH_HANDLERS[batch[0].kind](self, batch)
            except Exception as error:  # the slots are not affected
                traceback.print_exc(file=sys.stderr)
                _fail(batch, error)
            self.observe(batch[0].kind, time.monotonic() - began)

    def _admit(self) -> bool:
        """Move waiting requests into free slots; return whether there were any."""
        free = [n for n, request in enumerate(self.slots) if request is None]
        new = self._pop(self._queue, min(len(free), self.programs.rows), lambda request: None)
        if not new:
            return False
        began = time.monotonic()
        try:
            self._insert(new, free[: len(new)])
        except Exception as error:
            _fail(new, error)
            raise
        for n, request in zip(free, new, strict=False):
            self.slots[n] = request
        self.observe("prefill", time.monotonic() - began)
        return True

    def _pop(
        self, queue: deque[EngineRequest], most: int, key: Callable[[EngineRequest], Hashable]
    ) -> list[EngineRequest]:
        """Take the first requests of a queue, as long as they have the same key."""
        taken: list[EngineRequest] = []
        with self._changed:
            while queue and len(taken) < most and (not taken or key(queue[0]) == key(taken[0])):
                taken.append(queue.popleft())
        return taken

    def _insert(self, requests: Sequence[EngineRequest], slots: Sequence[int]) -> None:
        """Prefill requests into slots."""
        new = self.programs.prefill_prompts(
            [request.encoded for request in requests], [request.config for request in requests]
        )
        if self._state is None:
            self._state = empty_state(new, self.rows)
        self._state = self.programs.insert_slots(self._state, new, slots)

    def _pack_rows(self) -> int:
        """Move busy rows to the front, and return the smallest compiled row count that holds them."""
        count = next(n for n in self.row_counts if n >= self.busy)
        behind = [n for n in range(count, self.rows) if self.slots[n] is not None]
        free = [n for n in range(count) if self.slots[n] is None]
        for source, target in zip(behind, free, strict=False):
            self._state = self.programs.move_row(
                self.generator.models, self._state, slot_pair(source, target)
            )
            self.slots[source], self.slots[target] = None, self.slots[source]
        return count

    def _decode(self) -> None:
        """Decode `stride` tokens in all busy rows, and report them."""
        count = self._pack_rows()
        state: DecodeState = self.programs.decode_rows(self.generator.models, self._state, count, self.stride)
        self._state = state
        counts, done = state.count.numpy(), state.done.numpy()
        tokens, logprobs = (t.numpy("batch", "generated") for t in (state.generated, state.logprobs))
        for n, request in enumerate(self.slots):
            if request is None:
                continue
            new = slice(request.sent, int(counts[n]))
            request.sent, finished = int(counts[n]), bool(done[n])
            if finished:
                self.slots[n] = None
            self.observe(GENERATED, new.stop - new.start)
            chunk = TokenChunk(tuple(tokens[n, new].tolist()), tuple(logprobs[n, new].tolist()), finished)
            request.on_event(chunk)

    def _beam_search(self, requests: Sequence[EngineRequest]) -> None:
        # Each row of a search has its own limit, so texts with different limits share a batch.
        prompts = [request.encoded for request in requests]
        sizes = self.programs.batch_sizes(prompts)
        completions = self.programs.generate_batch(prompts, sizes, requests[0].config)
        for request, completion in zip(requests, completions, strict=True):
            self.observe(GENERATED, len(completion.tokens))
            request.on_event(completion)

    def _score(self, requests: Sequence[EngineRequest]) -> None:
        pairs = [request.inputs for request in requests if request.inputs is not None]
        for request, logprobs in zip(requests, self.score_programs.score(pairs), strict=True):
            request.on_event(logprobs)

    def _map_attention(self, requests: Sequence[EngineRequest]) -> None:
        assert self.attention_mapper is not None
        for request in requests:
            assert request.inputs is not None
            request.on_event(self.attention_mapper.attention_map(*request.inputs))


# By kind; these kinds are also labels of the metric weft_work_seconds.
BATCH_HANDLERS: dict[str, Callable[[Engine, Sequence[EngineRequest]], None]] = {
    "search": Engine._beam_search,
    "score": Engine._score,
    "attention": Engine._map_attention,
}


def _ignore(event: EngineEvent) -> None:
    """The `on_event` of requests that warm up programs."""


def _fail(requests: Sequence[EngineRequest], error: Exception) -> None:
    for request in requests:
        request.on_event(error)
