"""Messages between the processes of one run, outside JAX's collectives, and timeouts on every wait.

    key = processes.unique_key("begun")                                 # the same in all processes
    where = processes.run_on_first(key, find)                           # the result of process 0
    seen = processes.gather_texts(processes.unique_key("seen"), "yes")  # the texts of all processes
    with processes.watchdog("step 7"):                                  # exits if it takes too long
        ...

The coordinator, in process 0, is a key-value store that all processes can read. It may be used from threads
at any time, while collectives must run in the same order everywhere.

Every wait has a timeout. JAX's heartbeats detect a process that died or froze, and end the others. They don't
detect a live process that never reaches the point where the others wait, because it hangs in a disk access or
in its own code. So each wait for other processes ends after `peer_timeout()` seconds.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax

from weft.core import jax_compat
from weft.core.errors import DistributedError, PeerTimeoutError, WeftError

DEFAULT_TIMEOUT = 1800.0  # seconds
MAX_REQUEST_SECONDS = 3600.0  # of one request to the coordinator; a longer wait sends several
_count = itertools.count()
_timeout = [DEFAULT_TIMEOUT]


def client() -> Any:
    """JAX's client of the coordinator; None in a single-process run."""
    return jax_compat.distributed_state().client


def is_multiprocess() -> bool:
    """Whether this run has several processes. May be called before the first use of JAX."""
    return client() is not None and process_count() > 1


def process_index() -> int:
    """The index of this process, from 0 on. May be called before the first use of JAX."""
    return jax_compat.distributed_state().process_id


def process_count() -> int:
    """The number of processes. May be called before the first use of JAX."""
    return jax_compat.distributed_state().num_processes


def coordinator_address() -> str:
    """The address at which process 0 listens, as `host:port`."""
    return jax_compat.distributed_state().coordinator_address


def process_label() -> str:
    """The name of this process in messages."""
    return f"process {process_index()} of {process_count()}"


# Timeouts


def peer_timeout(seconds: float | None = None) -> float:
    """The number of seconds that a process waits for the others at any one point; an argument sets it."""
    if seconds is not None:
        _timeout[0] = float(seconds)
    return _timeout[0]


@contextmanager
def watchdog(activity: str, seconds: float | None = None) -> Iterator[None]:
    """Exit with a message if the body takes too long because other processes don't take part in it.

    This needs a timer thread: the main thread may be inside XLA or Orbax, where no exception reaches it.

    Args:
      activity: the work that all processes do together, for the message.
      seconds: the timeout; by default `peer_timeout()`.
    """
    if not is_multiprocess():
        yield
        return
    seconds = peer_timeout() if seconds is None else seconds
    timer = exit_after(seconds, _timeout_error(activity, seconds))
    try:
        yield
    finally:
        timer.cancel()


def exit_after(seconds: float, error: WeftError) -> threading.Timer:
    """Exit with a message after some seconds, whatever the threads do, unless the timer is canceled."""
    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), _exit, [error])
    timer.daemon = True
    timer.start()
    return timer


def _exit(error: WeftError) -> None:
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(1)


def _timeout_error(activity: str, seconds: float, *details: str) -> PeerTimeoutError:
    return PeerTimeoutError(
        f"{process_label()} waited {seconds:g} s for the others: {activity}",
        *details,
        rule="all processes do the same work at about the same time",
        hint="check the logs of the others for one that hangs, in disk access or in its data; "
        "distributed.join(wait=…) or --hosts.wait sets a longer timeout",
    )


# The coordinator's key-value store


def unique_key(subject: str) -> str:
    """A new key. All processes must create their keys in the same order."""
    return f"weft/{subject}/{next(_count)}"


def publish(key: str, text: str) -> bool:
    """Publish a text under a key; False if the key already has one."""
    try:
        client().key_value_set(key, text)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        return False
    return True


def wait_for_text(key: str, seconds: float | None = None) -> str:
    """The text of a key; waits until it is published."""
    seconds = peer_timeout() if seconds is None else seconds
    end = time.monotonic() + seconds
    while True:
        left = min(end - time.monotonic(), MAX_REQUEST_SECONDS)
        try:
            return client().blocking_key_value_get(key, max(1, int(1000 * left)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if time.monotonic() >= end:
                raise _timeout_error(_subject(key), seconds) from None


def barrier(key: str, seconds: float | None = None) -> None:
    """Wait until all processes arrive here."""
    if not is_multiprocess():
        return
    seconds = peer_timeout() if seconds is None else seconds
    try:
        client().wait_at_barrier(key, max(1, int(1000 * seconds)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        late = re.search(r"timed out task names:\n((?:\d+\n)+)", str(error))
        missing = [f"missing: process {', '.join(late[1].split())}"] if late else []
        raise _timeout_error(_subject(key), seconds, *missing) from None


def gather_texts(key: str, text: str, seconds: float | None = None) -> list[str]:
    """The texts of all processes, by process index; waits until all arrive."""
    publish(f"{key}/{process_index():09}", text)
    barrier(key, seconds)
    return [value for _, value in sorted(client().key_value_dir_get(f"{key}/"))]


def run_on_first(key: str, work: Callable[[], str]) -> str:
    """Run `work` in process 0 and return its result in all processes. If it fails, all raise an error."""
    if not is_multiprocess():
        return work()
    if jax.process_index() > 0:
        kind, _, text = wait_for_text(key).partition(" ")
        if kind == "failed":
            raise DistributedError(
                "process 0 failed while this process waited for it",
                text,
                rule="work that process 0 does for all processes must succeed there",
                hint="the log of process 0 has the details",
            )
        return text
    try:
        text = work()
    except BaseException as error:
        publish(key, f"failed {type(error).__name__}: {error}")
        raise
    publish(key, f"done {text}")
    return text


def _subject(key: str) -> str:
    """The subject of a key: "saved" of weft/saved/3."""
    parts = key.split("/")
    return parts[1] if len(parts) > 2 else key
