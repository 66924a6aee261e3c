"""The ASGI application: routes, middleware, authorization and the limits of requests."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from weft.generate import TextGenerator

from .engine import Engine
from .framing import DRAIN_FACTOR, RESPONSE_HEADERS, FramingMiddleware
from .handlers import Handlers
from .metrics import ServerMetrics
from .middleware import MetricsMiddleware
from .schema import APIError, SchemaField, parse_body


def build_app(
    model: TextGenerator | Engine,
    *,
    name: str = "weft",
    token: str | None = None,
    timeout: float = 60.0,
    body_limit: int = 1 << 20,
    **engine: Any,
) -> Starlette:
    """An ASGI application that serves a model.

    Args:
      model: a generator; or an engine, which the caller starts and stops.
      name: the name of the model in responses.
      token: the token that requests must send as `Authorization: Bearer TOKEN`; None: no authorization.
      timeout: the maximum seconds for a response, and for a client to read the next part of it.
      body_limit: the maximum size of a request, in bytes.
      engine: further arguments of `Engine`.
    """
    owned = not isinstance(model, Engine)
    running = model if isinstance(model, Engine) else Engine(model, **engine)
    guard = RequestGuard(token, timeout, body_limit)
    metrics = ServerMetrics(running)
    handlers = Handlers(running, metrics, guard, name, timeout)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        if owned:
            running.start()
        yield
        if owned:
            await asyncio.to_thread(running.stop, timeout)

    routes = [
        Route("/", handlers.page, methods=["GET"]),
        Route("/healthz", handlers.health, methods=["GET"]),
        Route("/metrics", handlers.prometheus, methods=["GET"]),
        Route("/v1/models", handlers.models, methods=["GET"]),
        Route("/v1/completions", handlers.completions, methods=["POST"]),
        Route("/translate", handlers.translate, methods=["POST"]),
        Route("/score", handlers.score, methods=["POST"]),
    ]
    paths = {route.path for route in routes}
    errors: dict[Any, Any] = {APIError: _api_error, HTTPException: _http_error, Exception: _server_error}
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[
            Middleware(MetricsMiddleware, metrics=metrics, paths=paths, timeout=timeout),
            Middleware(FramingMiddleware, body_limit=body_limit),
        ],
        exception_handlers=errors,
    )
    app.router.redirect_slashes = False  # /translate/ is 404, not a redirect
    app.state.engine = running
    return app


class RequestGuard:
    """Checks who sent a request, and reads its body within the limits.

    Args:
      token: the bearer token, or None.
      timeout: the maximum seconds until the body has arrived.
      body_limit: the maximum size of a body, in bytes.
    """

    def __init__(self, token: str | None, timeout: float, body_limit: int):
        self.token, self.timeout, self.body_limit = token, timeout, body_limit

    def check(self, request: Request) -> None:
        """Raise an error unless the client has the token and is not a page of another site."""
        self.check_host(request)
        if self.token is not None:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            # In constant time, so that the time of a response reveals nothing about the token.
            same = hmac.compare_digest(token.strip().encode(), self.token.encode())
            if scheme.lower() != "bearer" or not same:
                raise APIError(
                    401,
                    "this server requires a token: Authorization: Bearer TOKEN",
                    headers={"WWW-Authenticate": "Bearer"},
                    code="invalid_api_key",
                )
        origin = request.headers.get("origin")
        if origin is not None and not _is_same_origin(origin, request.headers.get("host")):
            message = f"pages of {origin[:100]} may not use this server"
            raise APIError(403, message, "permission_error")

    def check_host(self, request: Request) -> None:
        """Raise an error if the Host is another site's name.

        Such a name may resolve to this machine (DNS rebinding). Its pages would have the same origin as this
        server, and could read the responses.
        """
        host = request.headers.get("host", "localhost")
        local = request.scope.get("state", {}).get("local", False)
        if local and self.token is None and not _is_local(host):
            rule = "without a token this server accepts localhost, 127.0.0.1 and [::1]"
            raise APIError(403, f"the Host is {host[:100]}; {rule}", "permission_error")

    async def read(self, request: Request, fields: Mapping[str, SchemaField]) -> dict[str, Any]:
        """Check a request, and parse its body."""
        self.check(request)
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.timeout):
                # Beyond the limit the body is read and discarded: a client that is still sending might not
                # see the response if the connection were closed.
                async for part in request.stream():
                    size += len(part)
                    if size > DRAIN_FACTOR * self.body_limit:
                        break
                    if size <= self.body_limit:
                        parts.append(part)
        except ClientDisconnect:
            raise APIError(499, "the client disconnected before the request was complete") from None
        except TimeoutError:
            raise APIError(408, "the request took too long to arrive", code="timeout") from None
        if size > self.body_limit:
            raise APIError(413, f"the body has more than {self.body_limit} bytes")
        return parse_body(b"".join(parts), fields)


def _is_same_origin(origin: str, host: str | None) -> bool:
    """Whether the Origin of a page is the Host that it sends a request to."""
    try:
        return urlsplit(origin).netloc == host
    except ValueError:
        return False


def _is_local(host: str) -> bool:
    """Whether a Host, with or without a port, is this machine whatever name servers answer."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def _api_error(_: Request, error: APIError) -> Response:
    return JSONResponse(error.body, error.status, {**RESPONSE_HEADERS, **(error.headers or {})})


async def _http_error(request: Request, error: HTTPException) -> Response:
    status, path = error.status_code, request.url.path[:100]
    known = {
        404: (f"there is no path {path}", "unknown_url"),
        405: (f"{path} does not support {request.method[:20]}", "method_not_supported"),
    }
    message, code = known.get(status, (error.detail, None))
    return await _api_error(request, APIError(status, message, headers=error.headers, code=code))


async def _server_error(request: Request, error: Exception) -> Response:
    return await _api_error(request, APIError(500, "the server failed; see its log", "server_error"))
