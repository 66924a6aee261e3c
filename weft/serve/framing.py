"""Rejects a request by its headers alone, before any of its body is read.

- `Content-Length` together with `Transfer-Encoding`: a proxy in front may take the one and this server the
  other, and they then disagree on where the next request begins (RFC 9112, 6.1). The connection is closed.
- A `Content-Length` above the limit.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from starlette.responses import JSONResponse

from .schema import APIError

CLOSE_HEADERS = {"Connection": "close", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
DRAIN_FACTOR = 16  # times its limit: how much of a body is read, and thrown away
MAX_LENGTH_DIGITS = 20  # of any length there may be; Python reads no number of thousands of digits
DRAIN_SECONDS = 1.0  # seconds for which it is, after the response


class FramingMiddleware:
    """ASGI middleware.

    Args:
      app: what is behind it.
      body_limit: the largest body, in bytes.
    """

    def __init__(self, app: Any, *, body_limit: int):
        self.app, self.body_limit = app, body_limit

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or reject it."""
        lengths = [value for name, value in scope.get("headers", ()) if name == b"content-length"]
        coded = any(name == b"transfer-encoding" for name, _ in scope.get("headers", ()))
        if lengths and coded:
            rule = "the end of a body is given by one of them"
            await _reject(send, f"the request has Content-Length and Transfer-Encoding; {rule}", 400)
            await _end(send)
        elif lengths and (len(lengths[0]) > MAX_LENGTH_DIGITS or int(lengths[0]) > self.body_limit):
            size = lengths[0][:MAX_LENGTH_DIGITS].decode("ascii")
            await _reject(send, f"the body has {size} bytes; at most {self.body_limit} bytes are read", 413)
            await self._drain(receive)
            await _end(send)
        else:
            await self.app(scope, receive, send)

    async def _drain(self, receive: Any) -> None:
        """Read what a client is still sending: if the connection were closed at once, the client would be
        told that it is broken, and might not see the response."""
        size, more = 0, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while more and size <= DRAIN_FACTOR * self.body_limit:
                    message = await receive()
                    size += len(message.get("body", b""))
                    more = message.get("more_body", False)


async def _reject(send: Any, message: str, status: int) -> None:
    """Send the complete response; the connection is closed by `_end`."""
    response = JSONResponse(APIError(status, message).body, status, CLOSE_HEADERS)
    await send({"type": "http.response.start", "status": status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})


async def _end(send: Any) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})
