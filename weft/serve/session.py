"""A request's texts on their way through the engine, seen from the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self

from .engine import Engine, Full, Job, NotReady, Piece
from .schema import Refused

BUSY = {"Retry-After": "1"}
UNAVAILABLE = "service_unavailable_error"


class Asking:
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
        self._jobs: list[Job] = []

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

    def ask(self, jobs: Sequence[Job]) -> None:
        """Ask for jobs, the first of which has index 0."""
        most = self.engine.most_waiting
        if len(jobs) > most:  # it would never be their turn
            raise Refused(400, f"the request has {len(jobs)} texts; at most {most} may wait at once")
        try:
            self.engine.ask(jobs)
        except Full as error:
            message = f"{error}: try again later"
            code = "server_is_overloaded"
            raise Refused(503, message, UNAVAILABLE, headers=BUSY, code=code) from None
        except NotReady as error:
            raise Refused(503, f"the server is {error}", UNAVAILABLE, headers=BUSY) from None
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
                raise Refused(504, "the answer took too long", "server_error", code="timeout") from None
            if isinstance(event, Exception):
                raise Refused(500, f"{type(event).__name__}: the answer failed", "server_error")
            if index not in self._open:
                continue
            if not isinstance(event, Piece) or event.over:
                self._open.discard(index)
            yield index, event

    async def results(self) -> list[Any]:
        """The one thing that is told of each job."""
        found = {index: event async for index, event in self.events()}
        return [found[index] for index in sorted(found)]


async def gone(receive: Callable[[], Any]) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(work: Any, receive: Callable[[], Any]) -> Any:
    """The result of some work, which is given up if the client leaves: then None."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
