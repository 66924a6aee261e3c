"""Making the next batches in a thread, while this one is used.

    for step in prefetch(made, ahead=2):
        ...

The thread makes what comes next and waits once `ahead` of them are ready. They come in their order, and what
fails there is raised here, at its place in that order. The thread ends with the loop: at the last one, at an
error, and when the loop is left (`break`, `close()`, or nobody holds the iterator any longer).

Arrays of the host are made in the thread; placing them on devices is left to whoever takes them. Streams do
both: `stream.batches(position, ahead=2)`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from weft.core.errors import DataError

T = TypeVar("T")


class ProducerExit(NamedTuple):
    """In place of what would have come next."""

    error: BaseException


def prefetch(items: Iterable[T], ahead: int = 2) -> Generator[T, None, None]:
    """The same items, of which up to `ahead` are made before they are asked for.

    Args:
      items: what is gone through, in a thread that starts when the first one is asked for.
      ahead: how many wait, at most.

    >>> list(prefetch(range(5), ahead=2))
    [0, 1, 2, 3, 4]
    """
    if ahead < 1:
        raise DataError(
            f"ahead is {ahead}",
            rule="at least one is made ahead",
            hint="prefetch(items, ahead=2); without prefetch nothing is made ahead",
        ).located(f"prefetch(items, ahead={ahead})")
    return _taken(iter(items), ahead)


def _taken(items: Iterator[T], ahead: int) -> Generator[T, None, None]:
    made: queue.SimpleQueue[Any] = queue.SimpleQueue()
    room, closed = threading.Semaphore(ahead), threading.Event()
    # A daemon: a program may end while it still holds the iterator.
    thread = threading.Thread(target=_make, args=(items, made, room, closed), name="prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(item := made.get(), ProducerExit):
            room.release()
            yield item
    finally:
        closed.set()
        room.release()
        thread.join()
    if not isinstance(item.error, StopIteration):
        raise item.error


def _make(items: Iterator[Any], made: Any, room: threading.Semaphore, closed: threading.Event) -> None:
    try:
        while room.acquire() and not closed.is_set():
            made.put(next(items))
    except BaseException as error:  # the end of the items too
        made.put(ProducerExit(error))
    finally:
        if hasattr(items, "close"):
            items.close()
