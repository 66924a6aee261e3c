"""ASGI middleware: count every response, and drop clients that stop reading."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .metrics import ServerMetrics


class _ClientStalled(Exception):
    """The client stopped reading."""


class MetricsMiddleware:
    """Records the status and the duration of each response, and aborts those that are not read.

    Args:
      app: the application.
      metrics: where responses are counted.
      paths: the known paths; all others are counted together.
      timeout: how many seconds a client may take to read the next part of a response.
    """

    def __init__(self, app: ASGIApp, *, metrics: ServerMetrics, paths: Collection[str], timeout: float):
        self.app, self.metrics, self.paths, self.timeout = app, metrics, paths, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, code = time.monotonic(), 500
        path = scope["path"] if scope["path"] in self.paths else "other"

        async def send_with_timeout(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            try:
                async with asyncio.timeout(self.timeout):
                    await send(message)
            except TimeoutError:
                raise _ClientStalled from None

        try:
            await self.app(scope, receive, send_with_timeout)
        except _ClientStalled:
            code = 499  # as nginx counts clients that close the connection
            # A response that has begun can't be replaced by an error, so the connection is aborted.
            if drop := scope.get("state", {}).get("drop"):
                drop()
        finally:
            self.metrics.requests.labels(path, str(code)).inc()
            self.metrics.seconds.labels(path).observe(time.monotonic() - began)
