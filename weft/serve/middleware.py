"""Between the network and the paths: every answer is counted, and a client that takes none of it is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any

from .metrics import ServerMetrics


class _Stuck(Exception):
    """The client does not read."""


class MetricsMiddleware:
    """ASGI middleware.

    Args:
      app: what is behind it.
      metrics: where answers are counted.
      known: the paths; all others are counted together.
      timeout: how many seconds a client may take to read on.
    """

    def __init__(self, app: Any, *, metrics: ServerMetrics, known: Collection[str], timeout: float):
        self.app, self.metrics, self.known, self.timeout = app, metrics, known, timeout

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Let a request in."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, code = time.monotonic(), 500
        path = scope["path"] if scope["path"] in self.known else "other"

        async def watched(message: Any) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            try:
                async with asyncio.timeout(self.timeout):
                    await send(message)
            except TimeoutError:
                raise _Stuck from None

        try:
            await self.app(scope, receive, watched)
        except _Stuck:
            code = 499
            if drop := scope.get("state", {}).get("drop"):
                drop()
        finally:
            self.metrics.requests.labels(path, str(code)).inc()
            self.metrics.seconds.labels(path).observe(time.monotonic() - began)
