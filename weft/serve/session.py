"""The engine requests of one HTTP request, seen from the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Self, TypeVar

from starlette.types import Receive

from .engine import Engine, EngineEvent, EngineNotReady, EngineRequest, QueueFull, TokenChunk
from .schema import APIError

RETRY_HEADERS = {"Retry-After": "1"}
UNAVAILABLE = "service_unavailable_error"

Result = TypeVar("Result")


class RequestSession:
    """Submits engine requests and receives their events; on exit, all of them are cancelled.

    Events wait in a queue that can't outgrow the response itself, so the engine never waits for a client.

    Args:
      engine: the engine.
      deadline: when the response times out, by the clock of the event loop.
    """

    def __init__(self, engine: Engine, deadline: float):
        self.engine, self.deadline = engine, deadline
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, EngineEvent]] = asyncio.Queue()
        self._open: set[int] = set()
        self._requests: list[EngineRequest] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.cancel(self._requests)

    def callback(self, index: int) -> Callable[[EngineEvent], None]:
        """The `on_event` of the request with this index; the engine calls it in its own thread."""

        def on_event(event: EngineEvent) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return on_event

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Submit requests; the first has index 0."""
        most = self.engine.most_waiting
        if len(requests) > most:  # they would never fit into the queue
            raise APIError(400, f"the request has {len(requests)} texts; at most {most} may wait at once")
        try:
            self.engine.submit(requests)
        except QueueFull as error:
            message = f"{error}: try again later"
            code = "server_is_overloaded"
            raise APIError(503, message, UNAVAILABLE, headers=RETRY_HEADERS, code=code) from None
        except EngineNotReady as error:
            raise APIError(503, f"the server is {error}", UNAVAILABLE, headers=RETRY_HEADERS) from None
        self._requests += requests
        self._open = set(range(len(requests)))

    def cancel(self, index: int) -> None:
        """Cancel one request."""
        self._open.discard(index)
        self.engine.cancel([self._requests[index]])

    async def events(self) -> AsyncIterator[tuple[int, EngineEvent]]:
        """The events, each with the index of its request, until all requests are finished."""
        while self._open:
            try:
                async with asyncio.timeout_at(self.deadline):
                    index, event = await self._events.get()
            except TimeoutError:
                raise APIError(504, "the response timed out", "server_error", code="timeout") from None
            if isinstance(event, Exception):
                raise APIError(500, f"{type(event).__name__}: the request failed", "server_error")
            if index not in self._open:
                continue
            if not isinstance(event, TokenChunk) or event.finished:
                self._open.discard(index)
            yield index, event

    async def results(self) -> list[EngineEvent]:
        """The result of each request, for requests with one event."""
        found = {index: event async for index, event in self.events()}
        return [found[index] for index in sorted(found)]


async def wait_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_on_disconnect(work: Coroutine[object, object, Result], receive: Receive) -> Result | None:
    """Await a coroutine; if the client disconnects first, cancel it and return None."""
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(wait_disconnect(receive))
    try:
        await asyncio.wait([task, disconnect], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, disconnect):
            each.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)
