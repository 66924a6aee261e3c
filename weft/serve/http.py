"""The server's paths: what is asked in JSON and answered in JSON, or line by line as it is said."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import ipaddress
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from weft.core.errors import WeftError
from weft.generate import Completion, GenerationConfig, TextGenerator

from .detokenizer import Detokenizer
from .engine import Engine, EngineRequest
from .framing import DRAIN_FACTOR, FramingMiddleware
from .metrics import ServerMetrics
from .middleware import MetricsMiddleware
from .schema import COMPLETIONS, SCORE, TRANSLATE, APIError, SchemaField, as_list, parse_body
from .session import RequestSession, cancel_on_disconnect

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # OpenAI's code
RESPONSE_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def build_app(
    model: TextGenerator | Engine,
    *,
    name: str = "weft",
    token: str | None = None,
    timeout: float = 60.0,
    body_limit: int = 1 << 20,
    **engine: Any,
) -> Starlette:
    """An ASGI application that lets a model answer requests.

    Args:
      model: a speaker; or an engine, which is started and stopped by who made it.
      name: what the model is called in answers.
      token: what requests have to bring as `Authorization: Bearer TOKEN`; None: nothing.
      timeout: how many seconds an answer may take, and a client to take the next piece of it.
      body_limit: how many bytes a request may have.
      engine: further arguments of `Engine`.
    """
    given = isinstance(model, Engine)
    runs = model if isinstance(model, Engine) else Engine(model, **engine)
    paths = Handlers(runs, name, token, timeout, body_limit)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        if not given:
            runs.start()
        yield
        if not given:
            await asyncio.to_thread(runs.stop, timeout)

    routes = [
        Route("/", paths.page, methods=["GET"]),
        Route("/healthz", paths.health, methods=["GET"]),
        Route("/metrics", paths.numbers, methods=["GET"]),
        Route("/v1/models", paths.models, methods=["GET"]),
        Route("/v1/completions", paths.completions, methods=["POST"]),
        Route("/translate", paths.translate, methods=["POST"]),
        Route("/score", paths.score, methods=["POST"]),
    ]
    known = {route.path for route in routes}
    made = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[
            Middleware(MetricsMiddleware, metrics=paths.metrics, known=known, timeout=timeout),
            Middleware(FramingMiddleware, body_limit=body_limit),
        ],
        exception_handlers={APIError: _refused, HTTPException: _unknown, Exception: _broken},
    )
    made.router.redirect_slashes = False
    made.state.engine = runs
    return made


class Handlers:
    """What is done at each path."""

    def __init__(self, engine: Engine, name: str, token: str | None, timeout: float, body_limit: int):
        self.engine, self.name, self.token = engine, name, token
        self.timeout, self.body_limit = timeout, body_limit
        self.metrics = ServerMetrics(engine)
        self._page = resources.files("weft.serve").joinpath("page.html").read_text(encoding="utf-8")

    # Without asking the engine

    async def page(self, request: Request) -> Response:
        """A page to try it."""
        self._check_host(request)
        kind = {"translates": self.engine.speaker.translates, "beams": self.engine.beams.size}
        kind |= {"token": self.token is not None, "name": self.name}
        data = json.dumps(kind).replace("<", "\\u003c")
        return HTMLResponse(
            self._page.replace("{{data}}", data),
            headers={**RESPONSE_HEADERS, "Content-Security-Policy": CONTENT_SECURITY_POLICY},
        )

    async def health(self, request: Request) -> Response:
        """Whether requests are answered."""
        self._check_host(request)
        status = self.engine.status
        return JSONResponse({"status": status}, 200 if status == "ready" else 503, RESPONSE_HEADERS)

    async def numbers(self, request: Request) -> Response:
        """What Prometheus asks for."""
        self._check(request)
        return Response(self.metrics.text(), headers={**RESPONSE_HEADERS, "Content-Type": self.metrics.type})

    async def models(self, request: Request) -> Response:
        """The one model that there is."""
        self._check(request)
        one = {"id": self.name, "object": "model", "created": 0, "owned_by": "weft"}
        return JSONResponse({"object": "list", "data": [one]}, headers=RESPONSE_HEADERS)

    # Asking it

    async def completions(self, request: Request) -> Response:
        """What follows a text, or translates it, in OpenAI's words."""
        given = await self._given(request, COMPLETIONS)
        self._check_model(given["model"])
        prompts, n = as_list(given["prompt"]), given["n"]
        self._check_best("n", n, given["beams"])
        _check_search(given)
        seed = given["seed"] if given["seed"] is not None else secrets.randbelow(2**63)
        ask = self._ask(
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
        talk = CompletionStream(self, ask, prompts, as_list(given["stop"]), n)
        sent = [0] * len(prompts)  # how many tokens of each text the client was told of, in a stream

        def choice(one: CompletionDelta, whole: bool, k: int = 0) -> dict[str, Any]:
            logs = None
            if given["logprobs"] is not None and given["beams"] in (None, 1):
                logs = one.logprobs(sent[one.index])
            more = {"score": one.score} if one.score is not None else {}
            text = one.reading.text if whole else one.text
            return {
                "index": one.index * n + k,
                "text": text,
                "logprobs": logs,
                "finish_reason": one.finish,
                **more,
            }

        async def lines() -> AsyncIterator[Any]:
            async for one in talk.told():
                if one.text or one.finish:
                    for k, other in enumerate(one.best(n)):
                        yield {**head, "choices": [choice(other, False, k)]}
                    sent[one.index] = len(one.reading.tokens)
            if (given["stream_options"] or {}).get("include_usage"):
                yield {**head, "choices": [], "usage": talk.usage()}

        async def whole() -> Any:
            ends = [one async for one in talk.told() if one.finish]
            ends.sort(key=lambda one: one.index)
            choices = [choice(other, True, k) for one in ends for k, other in enumerate(one.best(n))]
            return {**head, "choices": choices, "usage": talk.usage()}

        return await self._answer(request, given["stream"], talk, lines, whole)

    async def translate(self, request: Request) -> Response:
        """Translations of texts, by the likeliest tokens or by a beam search."""
        given = await self._given(request, TRANSLATE)
        if not self.engine.speaker.translates:
            raise APIError(400, "this model goes on with texts: POST /v1/completions")
        self._check_best("best", given["best"], given["beams"])
        texts = as_list(given["text"])
        talk = CompletionStream(self, self._ask(given), texts, [], given["best"])

        def result(one: CompletionDelta) -> dict[str, Any]:
            return {
                "text": one.reading.text,
                "score": one.score if one.score is not None else sum(one.reading.logs),
                "tokens": len(one.reading.tokens),
                "finish_reason": one.finish,
                "others": [
                    {"text": other.reading.text, "score": other.score}
                    for other in one.best(given["best"])[1:]
                ],
            }

        async def seen(one: CompletionDelta) -> dict[str, Any]:
            if not given["attention"]:
                return {}
            with RequestSession(self.engine, talk.asking.until) as asking:
                asking.ask([self.engine.view(texts[one.index], one.reading.tokens, asking.tell(0))])
                return {"attention": dataclasses.asdict((await asking.results())[0])}

        async def lines() -> AsyncIterator[Any]:
            async for one in talk.told():
                if one.text:
                    yield {"index": one.index, "text": one.text}
                if one.finish:
                    yield {"index": one.index, "done": True, **result(one), **await seen(one)}

        async def whole() -> Any:
            ends = [one async for one in talk.told() if one.finish]
            ends.sort(key=lambda one: one.index)
            return {
                "translations": [{**result(one), **await seen(one)} for one in ends],
                "usage": talk.usage(),
            }

        return await self._answer(request, given["stream"], talk, lines, whole)

    async def score(self, request: Request) -> Response:
        """How likely given texts are."""
        given = await self._given(request, SCORE)
        texts, targets = as_list(given["text"]), as_list(given["target"])
        if len(texts) != len(targets):
            counts = f"{len(texts)} texts and {len(targets)} targets"
            message = f"{counts}; each text is to have one target"
            raise APIError(400, message, param="target", code="invalid_value")
        asking = RequestSession(self.engine, asyncio.get_running_loop().time() + self.timeout)
        pairs = enumerate(zip(texts, targets, strict=True))
        with _told_to_client("target", CONTEXT_LENGTH_EXCEEDED):
            jobs = [self.engine.score(*pair, asking.tell(n), n) for n, pair in pairs]

        async def whole() -> Any:
            with asking:
                asking.ask(jobs)
                found = await asking.results()
            return {"scores": [{"score": sum(logs), "logs": logs, "tokens": len(logs)} for logs in found]}

        return await self._whole(request, whole)

    # Both

    def _check(self, request: Request) -> None:
        """Whether the client may ask: it has the token, and is no page of another site."""
        self._check_host(request)
        if self.token is not None:
            given = request.headers.get("authorization", "")
            kind, _, token = given.partition(" ")
            same = hmac.compare_digest(token.strip().encode(), self.token.encode())
            if kind.lower() != "bearer" or not same:
                raise APIError(
                    401,
                    "this server wants a token: Authorization: Bearer TOKEN",
                    headers={"WWW-Authenticate": "Bearer"},
                    code="invalid_api_key",
                )
        origin = request.headers.get("origin")
        if origin is not None and not _is_of(origin, request.headers.get("host")):
            raise APIError(403, f"a page of {origin[:100]} may not ask this server", "permission_error")

    def _check_host(self, request: Request) -> None:
        """An error if another site's name leads here: its pages could then ask, and read the answers."""
        host = request.headers.get("host", "localhost")
        local = request.scope.get("state", {}).get("local", False)
        if local and self.token is None and not _is_local(host):
            rule = "without a token this server answers to localhost, 127.0.0.1 and [::1]"
            raise APIError(403, f"the Host is {host[:100]}; {rule}", "permission_error")

    async def _given(self, request: Request, fields: Mapping[str, SchemaField]) -> dict[str, Any]:
        self._check(request)
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.timeout):
                async for part in request.stream():
                    size += len(part)
                    if size > DRAIN_FACTOR * self.body_limit:
                        break
                    if size <= self.body_limit:
                        parts.append(part)
        except ClientDisconnect:
            raise APIError(499, "the client left before it had asked") from None
        except TimeoutError:
            raise APIError(408, "the request took too long to arrive", code="timeout") from None
        if size > self.body_limit:
            raise APIError(413, f"the body has more than {self.body_limit} bytes")
        return parse_body(b"".join(parts), fields)

    def _check_model(self, name: str | None) -> None:
        """An error if a request names a model other than the one that is served."""
        if name is not None and name != self.name:
            message = f"the model {name[:100]!r} does not exist; this server has {self.name!r}"
            raise APIError(404, message, param="model", code="model_not_found")

    def _check_best(self, name: str, best: int, beams: int | None) -> None:
        size = self.engine.beams.size
        if beams not in (None, 1, size):
            message = f"beams is {beams}; it is to be 1 or {size}"
            raise APIError(400, message, param="beams", code="invalid_value")
        if best > (beams or 1):
            known = f"it is to be at most as many as beams, which may be {size}"
            raise APIError(400, f"{name} is {best}; {known}", param=name, code="invalid_value")

    def _ask(self, given: Mapping[str, Any], **more: Any) -> GenerationConfig:
        beams = self.engine.beams if (given["beams"] or 1) > 1 else None
        with _told_to_client(None):
            return GenerationConfig(limit=given["max_tokens"], beams=beams, **more)

    async def _answer(
        self,
        request: Request,
        stream: bool,
        talk: CompletionStream,
        lines: Callable[[], Any],
        whole: Callable[[], Any],
    ) -> Response:
        if not stream:
            return await self._whole(request, whole)
        talk.begin()  # an error of it still has a code of its own
        return EventStreamResponse(lines, talk)

    async def _whole(self, request: Request, whole: Callable[[], Any]) -> Response:
        answer = await cancel_on_disconnect(whole(), request.receive)
        if answer is None:
            return Response(status_code=499)
        return JSONResponse(answer, headers=RESPONSE_HEADERS)


@dataclasses.dataclass(frozen=True)
class CompletionDelta:
    """Something new about one text: what was said since, and why it is over, if it is."""

    index: int
    reading: Detokenizer
    text: str
    finish: str | None
    score: float | None = None
    others: tuple[CompletionDelta, ...] = ()

    def best(self, count: int) -> list[CompletionDelta]:
        """It, and the next best ones of a search."""
        return [self, *self.others][:count]

    def logprobs(self, since: int) -> dict[str, Any]:
        """As OpenAI has them: of all tokens but the first ones."""
        pieces = [self.reading.read([token]) for token in self.reading.tokens[since:]]
        return {
            "tokens": pieces,
            "token_logprobs": self.reading.logs[since:],
            "top_logprobs": None,
            "text_offset": self.reading.offsets[since:],
        }


class CompletionStream:
    """Texts of a request that are said or searched, and as many of a search as the client gets."""

    def __init__(
        self, paths: Handlers, ask: GenerationConfig, texts: list[str], stops: list[str], best: int = 1
    ):
        self.paths, self.ask, self.stops, self.best = paths, ask, stops, best
        self.asking = RequestSession(paths.engine, asyncio.get_running_loop().time() + paths.timeout)
        engine = paths.engine
        with _told_to_client(None, CONTEXT_LENGTH_EXCEEDED):
            self.jobs: list[EngineRequest] = [
                engine.say(text, ask, self.asking.tell(n), n) for n, text in enumerate(texts)
            ]
        self.readings = [self._reading(job) for job in self.jobs]
        self._others: list[Detokenizer] = []
        self._begun, self._since = False, time.monotonic()

    def _reading(self, job: EngineRequest) -> Detokenizer:
        return Detokenizer(self.paths.engine.speaker.tokenizer, self.ask.ends, self.stops, job.item.last)

    def begin(self) -> None:
        """Ask the engine, once."""
        if not self._begun:
            self._begun = True
            self.asking.ask(self.jobs)
            self.paths.metrics.observe("read", sum(job.prompt for job in self.jobs))

    async def told(self) -> AsyncIterator[CompletionDelta]:
        """What is told of all texts, until they are over."""
        with self.asking:
            self.begin()
            first = True
            async for index, event in self.asking.events():
                if first:
                    self.paths.metrics.first.observe(time.monotonic() - self._since)
                    first = False
                yield (
                    self._searched(index, event)
                    if isinstance(event, Completion)
                    else self._said(index, event)
                )

    def _said(self, index: int, event: Any) -> CompletionDelta:
        reading = self.readings[index]
        text = reading.more(event.tokens, event.logs, event.over)
        if reading.stopped:
            self.asking.over(index)
        finish = _finish(reading) if event.over or reading.stopped else None
        return CompletionDelta(index, reading, text, finish)

    def _searched(self, index: int, said: Completion) -> CompletionDelta:
        every = []
        for n, one in enumerate((said, *said.others)):
            reading = self.readings[index] if n == 0 else self._reading(self.jobs[index])
            text = reading.more(one.tokens, (), True)
            every.append(CompletionDelta(index, reading, text, _finish(reading), one.score))
        self._others += [one.reading for one in every[1 : self.best]]
        return dataclasses.replace(every[0], others=tuple(every[1:]))

    def usage(self) -> dict[str, int]:
        """How many tokens were read and said."""
        read = sum(job.prompt for job in self.jobs)
        said = sum(len(one.tokens) for one in (*self.readings, *self._others))
        return {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}


class EventStreamResponse(Response):
    """An answer that is sent as it is said: server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, lines: Callable[[], AsyncGenerator[Any, None]], talk: CompletionStream):
        super().__init__(headers={**RESPONSE_HEADERS, "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.lines, self.talk = lines, talk

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it, until it is over or the client is gone."""

        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async with contextlib.aclosing(self.lines()) as lines:
                    async for line in lines:
                        await body(json.dumps(line))
                await body("[DONE]")
            except APIError as error:
                await body(json.dumps(error.body))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async def body(text: str) -> None:
            await send(
                {"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True}
            )

        with self.talk.asking:
            await cancel_on_disconnect(write(), receive)


def _is_of(origin: str, host: str | None) -> bool:
    """Whether a page's Origin is the Host that it asks."""
    try:
        return urlsplit(origin).netloc == host
    except ValueError:
        return False


def _is_local(host: str) -> bool:
    """Whether a Host, with or without a port, is this machine whatever name servers say."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _check_search(given: Mapping[str, Any]) -> None:
    """An error if a search is to draw tokens, or to make some less likely."""
    neutral = {"temperature": (0, 1), "top_p": (1,), "top_k": (0,), "repetition_penalty": (1,)}
    wrong = [name for name, values in neutral.items() if given[name] not in values]
    if wrong and (given["beams"] or 1) > 1:
        rule = "a search takes the likeliest texts; nothing is drawn or made less likely"
        message = f"beams is {given['beams']} with {' and '.join(wrong)}; {rule}"
        raise APIError(400, message, param=wrong[0], code="invalid_value")


def _finish(reading: Detokenizer) -> str:
    return "length" if reading.tokens and not (reading.stopped or reading.ended) else "stop"


@contextlib.contextmanager
def _told_to_client(param: str | None, code: str | None = None) -> Any:
    """Mistakes in what was asked are the client's."""
    try:
        yield
    except WeftError as error:
        hint = f" (hint: {error.hint})" if error.hint else ""
        raise APIError(400, f"{error.fact}; {error.rule}{hint}", param=param, code=code) from None


async def _refused(_: Request, error: Any) -> Response:
    return JSONResponse(error.body, error.status, {**RESPONSE_HEADERS, **(error.headers or {})})


async def _unknown(request: Request, error: Any) -> Response:
    status, path = error.status_code, request.url.path[:100]
    known = {
        404: (f"there is no path {path}", "unknown_url"),
        405: (f"{path} does not answer {request.method[:20]}", "method_not_supported"),
    }
    message, code = known.get(status, (error.detail, None))
    return await _refused(request, APIError(status, message, headers=error.headers, code=code))


async def _broken(request: Request, error: Exception) -> Response:
    return await _refused(request, APIError(500, "the server failed; its log says why", "server_error"))
