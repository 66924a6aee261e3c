"""Prefetching: produce the next batches in a thread while the current one is in use.

    for step in prefetch(batches, ahead=2):
        ...

The thread produces items and blocks once `ahead` of them are ready. Items arrive in order, and an exception
in the thread is raised in the consumer at that item's position. The thread ends with the loop: after the last
item, after an exception, and when the loop exits early (`break`, `close()`, or garbage collection of the
iterator).

The thread builds host arrays; the consumer places them on devices. A stream does both:
`stream.batches(position, ahead=2)`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from weft.core.errors import DataError

T = TypeVar("T")


class ProducerExit(NamedTuple):
    """The last item in the queue: the exception that ended the thread, StopIteration at the end of the
    items."""

    error: BaseException


def prefetch(items: Iterable[T], ahead: int = 2) -> Generator[T, None, None]:
    """Iterate over the same items, producing up to `ahead` of them in advance.

    Args:
      items: what to iterate over, in a thread that starts when the first item is requested.
      ahead: the maximum number of items that wait in the queue.

    >>> list(prefetch(range(5), ahead=2))
    [0, 1, 2, 3, 4]
    """
    if ahead < 1:
        raise DataError(
            f"ahead is {ahead}",
            rule="prefetch produces at least one item ahead",
            hint="prefetch(items, ahead=2); to produce nothing ahead, don't use prefetch",
        ).located(f"prefetch(items, ahead={ahead})")
    return _consume(iter(items), ahead)


def _consume(items: Iterator[T], ahead: int) -> Generator[T, None, None]:
    produced: queue.SimpleQueue[Any] = queue.SimpleQueue()
    room, closed = threading.Semaphore(ahead), threading.Event()
    # A daemon thread, so that the interpreter can exit while the iterator is still referenced.
    thread = threading.Thread(
        target=_produce, args=(items, produced, room, closed), name="prefetch", daemon=True
    )
    thread.start()
    try:
        while not isinstance(item := produced.get(), ProducerExit):
            room.release()
            yield item
    finally:
        closed.set()
        room.release()  # the thread may be blocked on a full queue
        thread.join()
    if not isinstance(item.error, StopIteration):
        raise item.error


def _produce(
    items: Iterator[T],
    produced: queue.SimpleQueue[Any],
    room: threading.Semaphore,
    closed: threading.Event,
) -> None:
    try:
        while room.acquire() and not closed.is_set():
            produced.put(next(items))
    except BaseException as error:  # including StopIteration
        produced.put(ProducerExit(error))
    finally:
        if hasattr(items, "close"):
            items.close()
