"""A request's texts on their way through the engine, seen from the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self

from .engine import Engine, EngineNotReady, EngineRequest, QueueFull, TokenChunk
from .schema import APIError

RETRY_HEADERS = {"Retry-After": "1"}
UNAVAILABLE = "service_unavailable_error"


class RequestSession:
    """Jobs of one request; whatever happens, at its end nobody waits for them.

    What is told waits in a queue that can't outgrow the answer itself, and the engine never waits for a
    reader.

    Args:
      engine: who is asked.
      until: when it is too late, by the clock of the event loop.
    """

    def __init__(self, engine: Engine, until: float):
        self.engine, self.until = engine, until
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._open: set[int] = set()
        self._jobs: list[EngineRequest] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.leave(self._jobs)

    def tell(self, index: int) -> Callable[[Any], None]:
        """Takes what the engine's thread has to say of one job."""

        def tell(event: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                self._loop.call_soon_threadsafe(self._told.put_nowait, (index, event))

        return tell

    def ask(self, jobs: Sequence[EngineRequest]) -> None:
        """Ask for jobs, the first of which has index 0."""
        most = self.engine.most_waiting
        if len(jobs) > most:  # it would never be their turn
            raise APIError(400, f"the request has {len(jobs)} texts; at most {most} may wait at once")
        try:
            self.engine.ask(jobs)
        except QueueFull as error:
            message = f"{error}: try again later"
            code = "server_is_overloaded"
            raise APIError(503, message, UNAVAILABLE, headers=RETRY_HEADERS, code=code) from None
        except EngineNotReady as error:
            raise APIError(503, f"the server is {error}", UNAVAILABLE, headers=RETRY_HEADERS) from None
        self._jobs += jobs
        self._open = set(range(len(jobs)))

    def over(self, index: int) -> None:
        """No more is wanted of a job."""
        self._open.discard(index)
        self.engine.leave([self._jobs[index]])

    async def events(self) -> AsyncIterator[tuple[int, Any]]:
        """What is told, with the index of its job, until all are over."""
        while self._open:
            try:
                async with asyncio.timeout_at(self.until):
                    index, event = await self._told.get()
            except TimeoutError:
                raise APIError(504, "the answer took too long", "server_error", code="timeout") from None
            if isinstance(event, Exception):
                raise APIError(500, f"{type(event).__name__}: the answer failed", "server_error")
            if index not in self._open:
                continue
            if not isinstance(event, TokenChunk) or event.over:
                self._open.discard(index)
            yield index, event

    async def results(self) -> list[Any]:
        """The one thing that is told of each job."""
        found = {index: event async for index, event in self.events()}
        return [found[index] for index in sorted(found)]


async def wait_disconnect(receive: Callable[[], Any]) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_on_disconnect(work: Any, receive: Callable[[], Any]) -> Any:
    """The result of some work, which is given up if the client leaves: then None."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(wait_disconnect(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
