"""Rejects a request by its headers alone, before its body is read.

- `Content-Length` together with `Transfer-Encoding`: a proxy in front may use one and this server the other,
  and they would disagree on where the next request begins (RFC 9112, 6.1). The connection is closed.
- A `Content-Length` above the limit.
"""

from __future__ import annotations

import asyncio
import contextlib

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .schema import APIError

RESPONSE_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
CLOSE_HEADERS = {"Connection": "close", **RESPONSE_HEADERS}
DRAIN_FACTOR = 16  # a body of up to this many times the limit is read and discarded
DRAIN_SECONDS = 1.0  # for this long, after the response
MAX_LENGTH_DIGITS = 20  # of a Content-Length; Python's int raises for thousands of digits


class FramingMiddleware:
    """ASGI middleware that checks how the end of a body is declared.

    Args:
      app: the application.
      body_limit: the maximum size of a body, in bytes.
    """

    def __init__(self, app: ASGIApp, *, body_limit: int):
        self.app, self.body_limit = app, body_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it."""
        lengths = [value for name, value in scope.get("headers", ()) if name == b"content-length"]
        has_encoding = any(name == b"transfer-encoding" for name, _ in scope.get("headers", ()))
        if lengths and has_encoding:
            rule = "only one of them may give the end of the body"
            await _reject(send, f"the request has Content-Length and Transfer-Encoding; {rule}", 400)
            await _end(send)
        elif lengths and (len(lengths[0]) > MAX_LENGTH_DIGITS or int(lengths[0]) > self.body_limit):
            size = lengths[0][:MAX_LENGTH_DIGITS].decode("ascii")
            await _reject(send, f"the body has {size} bytes; the limit is {self.body_limit} bytes", 413)
            await self._drain(receive)
            await _end(send)
        else:
            await self.app(scope, receive, send)

    async def _drain(self, receive: Receive) -> None:
        """Read the rest of the body. Closing the connection while the client is sending would reset it, and
        the client might not see the response."""
        size, more = 0, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while more and size <= DRAIN_FACTOR * self.body_limit:
                    message = await receive()
                    size += len(message.get("body", b""))
                    more = message.get("more_body", False)


async def _reject(send: Send, message: str, status: int) -> None:
    """Send the complete response; `_end` then closes the connection."""
    response = JSONResponse(APIError(status, message).body, status, CLOSE_HEADERS)
    await send({"type": "http.response.start", "status": status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})


async def _end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})
