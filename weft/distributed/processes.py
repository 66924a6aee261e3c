"""How the processes of one run talk beside JAX's collectives, and how long they wait for each other.

    name = processes.name("begun")                          # the same in all processes
    where = processes.from_first(name, find)                # what process 0 found
    seen = processes.gather(processes.name("seen"), "yes")  # the texts of all processes
    with processes.limit("step 7"):                         # ends the process if it takes too long
        ...

The coordinator, in process 0, keeps texts that all processes can read. They may be used from threads at any
time, whereas collectives have to come in the same order everywhere.

No wait is endless. A process that dies or freezes is noticed by JAX's heartbeats, which end the others. They
don't notice a process that is alive and doesn't get to where the others are, because it hangs in a disk or in
code of its own. Every wait for others therefore ends after `peer_timeout()` seconds.
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

from weft.core.errors import WeftError

DEFAULT_TIMEOUT = 1800.0  # seconds
MAX_REQUEST_SECONDS = 3600.0  # seconds of one request to the coordinator; longer waits are several requests
_count = itertools.count()
_wait = [DEFAULT_TIMEOUT]


class DistributedError(WeftError, RuntimeError):
    """Processes that can't find each other, or can't work together."""


class PeerTimeoutError(DistributedError):
    """Another process that did not come within the time limit."""


def _state() -> Any:
    from jax._src import distributed  # JAX has no public name for it

    return distributed.global_state


def client() -> Any:
    """JAX's connection to the coordinator; None in a run of one process."""
    return _state().client


def is_multiprocess() -> bool:
    """Whether this run has several processes. This may be called before JAX is used."""
    return client() is not None and process_count() > 1


def process_index() -> int:
    """The number of this process, from 0 on. This may be called before JAX is used."""
    return _state().process_id


def process_count() -> int:
    """How many processes there are. This may be called before JAX is used."""
    return _state().num_processes


def coordinator_address() -> str:
    """Where process 0 listens, as `host:port`."""
    return _state().coordinator_address


def process_label() -> str:
    """This process, as messages name it."""
    return f"process {process_index()} of {process_count()}"


# Time limits


def peer_timeout(seconds: float | None = None) -> float:
    """How many seconds a process waits for the others at any one point; a number sets it."""
    if seconds is not None:
        _wait[0] = float(seconds)
    return _wait[0]


@contextmanager
def watchdog(what: str, seconds: float | None = None) -> Iterator[None]:
    """End this process, with a message, if the body takes too long because others don't take part in it.

    A timer has to do that: the main thread may be inside XLA or Orbax, where no exception reaches it.

    Args:
      what: what all processes are doing together.
      seconds: how long it may take; by default `peer_timeout()`.
    """
    if not is_multiprocess():
        yield
        return
    seconds = peer_timeout() if seconds is None else seconds
    timer = exit_after(seconds, _late(what, seconds))
    try:
        yield
    finally:
        timer.cancel()


def exit_after(seconds: float, error: WeftError) -> threading.Timer:
    """End this process with a message after some seconds, whatever its threads are doing by then.

    Cancel what it returns if all went well."""
    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), _end, [error])
    timer.daemon = True
    timer.start()
    return timer


def _end(error: WeftError) -> None:
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(1)


def _late(what: str, seconds: float, *details: str) -> PeerTimeoutError:
    return PeerTimeoutError(
        f"{process_label()} waited {seconds:g} s for the others: {what}",
        *details,
        rule="all processes do the same work at about the same time",
        hint="look at the logs of the others for one that hangs, in its disk or its data; "
        "distributed.join(wait=…) or --hosts.wait sets a longer time",
    )


# Texts that all processes can read


def unique_key(what: str) -> str:
    """A new name for a text. All processes take their names in the same order."""
    return f"weft/{what}/{next(_count)}"


def publish(name: str, text: str) -> bool:
    """Publish a text under a name, once; False if there is one already."""
    try:
        client().key_value_set(name, text)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        return False
    return True


def wait_for_text(name: str, seconds: float | None = None) -> str:
    """The text of a name; waits until there is one."""
    seconds = peer_timeout() if seconds is None else seconds
    end = time.monotonic() + seconds
    while True:
        left = min(end - time.monotonic(), MAX_REQUEST_SECONDS)
        try:
            return client().blocking_key_value_get(name, max(1, int(1000 * left)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if time.monotonic() >= end:
                raise _late(_readable(name), seconds) from None


def barrier(name: str, seconds: float | None = None) -> None:
    """Wait until all processes are here."""
    if not is_multiprocess():
        return
    seconds = peer_timeout() if seconds is None else seconds
    try:
        client().wait_at_barrier(name, max(1, int(1000 * seconds)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        late = re.search(r"timed out task names:\n((?:\d+\n)+)", str(error))
        missing = [f"not there: process {', '.join(late[1].split())}"] if late else []
        raise _late(_readable(name), seconds, *missing) from None


def gather_texts(name: str, text: str, seconds: float | None = None) -> list[str]:
    """The texts that all processes give, by the number of the process; waits until all are here."""
    publish(f"{name}/{process_index():09}", text)
    barrier(name, seconds)
    return [one for _, one in sorted(client().key_value_dir_get(f"{name}/"))]


def run_on_first(name: str, work: Callable[[], str]) -> str:
    """What process 0 makes of some work; the others wait for it. If it fails, all do."""
    if not is_multiprocess():
        return work()
    if jax.process_index() > 0:
        kind, _, text = wait_for_text(name).partition(" ")
        if kind == "failed":
            raise DistributedError(
                "process 0 failed, and this one waited for it",
                text,
                rule="what one process does for all is done when it succeeds",
                hint="the log of process 0 says more",
            )
        return text
    try:
        text = work()
    except BaseException as error:
        publish(name, f"failed {type(error).__name__}: {error}")
        raise
    publish(name, f"done {text}")
    return text


def _readable(name: str) -> str:
    """What a name is about: "saved" of weft/saved/3."""
    parts = name.split("/")
    return parts[1] if len(parts) > 2 else name
