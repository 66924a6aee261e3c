"""The completions of one HTTP request as they grow, and the server-sent events that carry them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, cast

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.generate import Completion, GenerationConfig

from .detokenizer import Detokenizer
from .engine import Engine, EngineRequest, TokenChunk
from .framing import RESPONSE_HEADERS
from .metrics import ServerMetrics
from .schema import APIError, as_api_error
from .session import RequestSession, cancel_on_disconnect

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # OpenAI's code


@dataclasses.dataclass(frozen=True)
class CompletionDelta:
    """New text of one completion.

    Attributes:
      index: the index of the prompt.
      detokenizer: all tokens and the text so far.
      text: the new text.
      finish_reason: OpenAI's "stop" or "length" if the completion is finished, else None.
      score: the score of a beam search.
      others: the further results of a beam search.
    """

    index: int
    detokenizer: Detokenizer
    text: str
    finish_reason: str | None
    score: float | None = None
    others: tuple[CompletionDelta, ...] = ()

    def best(self, count: int) -> list[CompletionDelta]:
        """The best results of a beam search, or the only one."""
        return [self, *self.others][:count]

    def logprobs(self, since: int) -> dict[str, Any]:
        """The log-probabilities of the tokens from an index on, in OpenAI's format."""
        texts = [self.detokenizer.decode([token]) for token in self.detokenizer.tokens[since:]]
        return {
            "tokens": texts,
            "token_logprobs": self.detokenizer.logprobs[since:],
            "top_logprobs": None,
            "text_offset": self.detokenizer.offsets[since:],
        }


class CompletionStream:
    """The completions of all texts of one HTTP request.

    Args:
      engine, metrics: those of the server.
      timeout: the maximum seconds for the response.
      config: the generation settings.
      texts: the prompts, or the texts to translate.
      stops: texts before which a completion ends.
      best: the number of results of a beam search that the client gets.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: ServerMetrics,
        timeout: float,
        config: GenerationConfig,
        texts: list[str],
        stops: list[str],
        best: int = 1,
    ):
        self.engine, self.metrics = engine, metrics
        self.config, self.stops, self.best = config, stops, best
        self.session = RequestSession(engine, asyncio.get_running_loop().time() + timeout)
        with as_api_error(None, CONTEXT_LENGTH_EXCEEDED):
            self.requests = [
                engine.completion_request(text, config, self.session.callback(n), n)
                for n, text in enumerate(texts)
            ]
        self.detokenizers = [self._detokenizer(request) for request in self.requests]
        self._others: list[Detokenizer] = []
        self._submitted, self._began = False, time.monotonic()

    def _detokenizer(self, request: EngineRequest) -> Detokenizer:
        tokenizer = self.engine.generator.tokenizer
        return Detokenizer(tokenizer, self.config.ends, self.stops, request.encoded.last)

    def submit(self) -> None:
        """Submit the texts to the engine, once."""
        if not self._submitted:
            self._submitted = True
            self.session.submit(self.requests)
            self.metrics.observe("prompt", self._prompt_tokens())  # a label of weft_tokens

    async def deltas(self) -> AsyncIterator[CompletionDelta]:
        """The deltas of all texts, until all are finished."""
        with self.session:
            self.submit()
            first = True
            async for index, event in self.session.events():
                if first:
                    self.metrics.first.observe(time.monotonic() - self._began)
                    first = False
                if isinstance(event, Completion):
                    yield self._beam_delta(index, event)
                else:
                    yield self._token_delta(index, cast(TokenChunk, event))

    async def finished(self) -> list[CompletionDelta]:
        """The last delta of each text, in the order of the texts."""
        last = [delta async for delta in self.deltas() if delta.finish_reason]
        return sorted(last, key=lambda delta: delta.index)

    def _token_delta(self, index: int, chunk: TokenChunk) -> CompletionDelta:
        detokenizer = self.detokenizers[index]
        text = detokenizer.add(chunk.tokens, chunk.logprobs, chunk.finished)
        if detokenizer.stopped:
            self.session.cancel(index)
        finished = chunk.finished or detokenizer.stopped
        return CompletionDelta(index, detokenizer, text, _finish_reason(detokenizer) if finished else None)

    def _beam_delta(self, index: int, completion: Completion) -> CompletionDelta:
        deltas = []
        for n, result in enumerate((completion, *completion.others)):
            detokenizer = self.detokenizers[index] if n == 0 else self._detokenizer(self.requests[index])
            text = detokenizer.add(result.tokens, (), True)
            reason = _finish_reason(detokenizer)
            deltas.append(CompletionDelta(index, detokenizer, text, reason, result.score))
        self._others += [delta.detokenizer for delta in deltas[1 : self.best]]
        return dataclasses.replace(deltas[0], others=tuple(deltas[1:]))

    def _prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    def usage(self) -> dict[str, int]:
        """The numbers of prompt and generated tokens, in OpenAI's format."""
        prompt = self._prompt_tokens()
        generated = sum(len(each.tokens) for each in (*self.detokenizers, *self._others))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
        }


def _finish_reason(detokenizer: Detokenizer) -> str:
    ended = detokenizer.stopped or detokenizer.ended
    return "length" if detokenizer.tokens and not ended else "stop"


class EventStreamResponse(Response):
    """A response of server-sent events, sent as they are generated.

    Args:
      events: yields the JSON of each event.
      session: cancelled when the response ends.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Callable[[], AsyncGenerator[dict[str, Any], None]], session: RequestSession):
        super().__init__(headers={**RESPONSE_HEADERS, "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.events, self.session = events, session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, until they end or the client disconnects."""

        async def send_all() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async with contextlib.aclosing(self.events()) as events:
                    async for event in events:
                        await send_data(json.dumps(event))
                await send_data("[DONE]")
            except APIError as error:  # the status is sent already, so the error is an event
                await send_data(json.dumps(error.body))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async def send_data(text: str) -> None:
            await send(
                {"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True}
            )

        with self.session:
            await cancel_on_disconnect(send_all(), receive)
