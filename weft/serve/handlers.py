"""The handlers of the server's routes: JSON requests, and JSON or streamed responses."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from weft.generate import GenerationConfig

from .engine import Engine
from .framing import RESPONSE_HEADERS
from .metrics import ServerMetrics
from .schema import COMPLETION_FIELDS, SCORE_FIELDS, TRANSLATE_FIELDS, APIError, as_api_error, as_list
from .session import RequestSession, cancel_on_disconnect
from .stream import CONTEXT_LENGTH_EXCEEDED, CompletionDelta, CompletionStream, EventStreamResponse

if TYPE_CHECKING:
    from .app import RequestGuard

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

Json = dict[str, Any]


class Handlers:
    """The handler of each route.

    Args:
      engine: the engine.
      metrics: the metrics of the server.
      guard: checks requests and reads their bodies.
      name: the name of the model.
      timeout: the maximum seconds for a response.
    """

    def __init__(
        self, engine: Engine, metrics: ServerMetrics, guard: RequestGuard, name: str, timeout: float
    ):
        self.engine, self.metrics, self.guard = engine, metrics, guard
        self.name, self.timeout = name, timeout
        self._page = resources.files("weft.serve").joinpath("page.html").read_text(encoding="utf-8")

    # Without the engine

    async def page(self, request: Request) -> Response:
        """A page to try the model."""
        self.guard.check_host(request)
        data: Json = {"translates": self.engine.generator.translates, "beams": self.engine.beams.size}
        data |= {"token": self.guard.token is not None, "name": self.name}
        text = json.dumps(data).replace("<", "\\u003c")  # it is inside a <script>
        return HTMLResponse(
            self._page.replace("{{data}}", text),
            headers={**RESPONSE_HEADERS, "Content-Security-Policy": CONTENT_SECURITY_POLICY},
        )

    async def health(self, request: Request) -> Response:
        """The status of the engine."""
        self.guard.check_host(request)
        status = self.engine.status
        return JSONResponse({"status": status}, 200 if status == "ready" else 503, RESPONSE_HEADERS)

    async def prometheus(self, request: Request) -> Response:
        """The metrics, for Prometheus."""
        self.guard.check(request)
        return Response(self.metrics.text(), headers={**RESPONSE_HEADERS, "Content-Type": self.metrics.type})

    async def models(self, request: Request) -> Response:
        """A list of one model."""
        self.guard.check(request)
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "weft"}
        return JSONResponse({"object": "list", "data": [model]}, headers=RESPONSE_HEADERS)

    # With the engine

    async def completions(self, request: Request) -> Response:
        """Completions, or translations, in the format of OpenAI's API."""
        given = await self.guard.read(request, COMPLETION_FIELDS)
        self._check_model(given["model"])
        prompts, n = as_list(given["prompt"]), given["n"]
        self._check_best("n", n, given["beams"])
        _check_search(given)
        seed = given["seed"] if given["seed"] is not None else secrets.randbelow(2**63)
        config = self._config(
            given,
            temperature=float(given["temperature"]),
            top_p=float(given["top_p"]),
            top_k=given["top_k"],
            penalty=float(given["repetition_penalty"]),
            seed=seed,
        )
        head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.name,
        }
        stream = self._stream(config, prompts, as_list(given["stop"]), n)
        sent = [0] * len(prompts)  # tokens of each prompt whose logprobs were streamed

        def choice(delta: CompletionDelta, text: str, k: int) -> Json:
            logprobs = None
            if given["logprobs"] is not None and given["beams"] in (None, 1):
                logprobs = delta.logprobs(sent[delta.index])
            score = {"score": delta.score} if delta.score is not None else {}
            return {
                "index": delta.index * n + k,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": delta.finish_reason,
                **score,
            }

        async def events() -> AsyncGenerator[Json, None]:
            async for delta in stream.deltas():
                if delta.text or delta.finish_reason:
                    for k, each in enumerate(delta.best(n)):
                        yield {**head, "choices": [choice(each, each.text, k)]}
                    sent[delta.index] = len(delta.detokenizer.tokens)
            if (given["stream_options"] or {}).get("include_usage"):
                yield {**head, "choices": [], "usage": stream.usage()}

        async def body() -> Json:
            choices = [
                choice(each, each.detokenizer.text, k)
                for delta in await stream.finished()
                for k, each in enumerate(delta.best(n))
            ]
            return {**head, "choices": choices, "usage": stream.usage()}

        return await self._respond(request, given["stream"], stream, events, body)

    async def translate(self, request: Request) -> Response:
        """Translations of texts, greedy or by beam search."""
        given = await self.guard.read(request, TRANSLATE_FIELDS)
        if not self.engine.generator.translates:
            raise APIError(400, "this model continues texts: POST /v1/completions")
        self._check_best("best", given["best"], given["beams"])
        texts = as_list(given["text"])
        stream = self._stream(self._config(given), texts, [], given["best"])

        def result(delta: CompletionDelta) -> Json:
            score = delta.score if delta.score is not None else sum(delta.detokenizer.logprobs)
            return {
                "text": delta.detokenizer.text,
                "score": score,
                "tokens": len(delta.detokenizer.tokens),
                "finish_reason": delta.finish_reason,
                "others": [
                    {"text": other.detokenizer.text, "score": other.score}
                    for other in delta.best(given["best"])[1:]
                ],
            }

        async def attention(delta: CompletionDelta) -> Json:
            if not given["attention"]:
                return {}
            with RequestSession(self.engine, stream.session.deadline) as session:
                tokens = delta.detokenizer.tokens
                session.submit(
                    [self.engine.attention_request(texts[delta.index], tokens, session.callback(0))]
                )
                found: Any = (await session.results())[0]
            return {"attention": {"target": found.target, "source": found.source, "weights": found.weights}}

        async def events() -> AsyncGenerator[Json, None]:
            async for delta in stream.deltas():
                if delta.text:
                    yield {"index": delta.index, "text": delta.text}
                if delta.finish_reason:
                    yield {"index": delta.index, "done": True, **result(delta), **await attention(delta)}

        async def body() -> Json:
            deltas = await stream.finished()
            translations = [{**result(delta), **await attention(delta)} for delta in deltas]
            return {"translations": translations, "usage": stream.usage()}

        return await self._respond(request, given["stream"], stream, events, body)

    async def score(self, request: Request) -> Response:
        """The log-probabilities of given texts."""
        given = await self.guard.read(request, SCORE_FIELDS)
        texts, targets = as_list(given["text"]), as_list(given["target"])
        if len(texts) != len(targets):
            counts = f"{len(texts)} texts and {len(targets)} targets"
            message = f"{counts}; each text must have one target"
            raise APIError(400, message, param="target", code="invalid_value")
        session = RequestSession(self.engine, asyncio.get_running_loop().time() + self.timeout)
        pairs = enumerate(zip(texts, targets, strict=True))
        with as_api_error("target", CONTEXT_LENGTH_EXCEEDED):
            requests = [self.engine.score_request(*pair, session.callback(n), n) for n, pair in pairs]

        async def body() -> Json:
            with session:
                session.submit(requests)
                found: list[Any] = await session.results()
            scores = [
                {"score": sum(logprobs), "logs": logprobs, "tokens": len(logprobs)} for logprobs in found
            ]
            return {"scores": scores}

        return await _json_response(request, body())

    # Shared

    def _check_model(self, name: str | None) -> None:
        """Raise an error if a request names a model other than the one that is served."""
        if name is not None and name != self.name:
            message = f"the model {name[:100]!r} does not exist; this server has {self.name!r}"
            raise APIError(404, message, param="model", code="model_not_found")

    def _check_best(self, name: str, best: int, beams: int | None) -> None:
        size = self.engine.beams.size
        if beams not in (None, 1, size):
            message = f"beams is {beams}; it must be 1 or {size}"
            raise APIError(400, message, param="beams", code="invalid_value")
        if best > (beams or 1):
            rule = f"it must be at most the number of beams, which may be {size}"
            raise APIError(400, f"{name} is {best}; {rule}", param=name, code="invalid_value")

    def _config(self, given: Mapping[str, Any], **sampling: Any) -> GenerationConfig:
        beams = self.engine.beams if (given["beams"] or 1) > 1 else None
        with as_api_error(None):
            return GenerationConfig(limit=given["max_tokens"], beams=beams, **sampling)

    def _stream(
        self, config: GenerationConfig, texts: list[str], stops: list[str], best: int
    ) -> CompletionStream:
        return CompletionStream(self.engine, self.metrics, self.timeout, config, texts, stops, best)

    async def _respond(
        self,
        request: Request,
        streamed: bool,
        stream: CompletionStream,
        events: Callable[[], AsyncGenerator[Json, None]],
        body: Callable[[], Coroutine[Any, Any, Json]],
    ) -> Response:
        if not streamed:
            return await _json_response(request, body())
        stream.submit()  # before the response starts, so that an error still has its own status
        return EventStreamResponse(events, stream.session)


async def _json_response(request: Request, body: Coroutine[Any, Any, Json]) -> Response:
    result = await cancel_on_disconnect(body, request.receive)
    if result is None:
        return Response(status_code=499)
    return JSONResponse(result, headers=RESPONSE_HEADERS)


def _check_search(given: Mapping[str, Any]) -> None:
    """Raise an error if a beam search has sampling settings."""
    neutral = {"temperature": (0, 1), "top_p": (1,), "top_k": (0,), "repetition_penalty": (1,)}
    wrong = [name for name, values in neutral.items() if given[name] not in values]
    if wrong and (given["beams"] or 1) > 1:
        rule = "a beam search does not sample, and has no repetition penalty"
        message = f"beams is {given['beams']} with {' and '.join(wrong)}; {rule}"
        raise APIError(400, message, param=wrong[0], code="invalid_value")
