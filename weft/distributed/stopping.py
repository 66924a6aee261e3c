"""Coordinated stop: after a signal all processes stop at the same step, within a bounded time."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

import jax

from weft.core.errors import DistributedError
from weft.distributed import processes

DEFAULT_GRACE = 300.0  # seconds
FINISHED = "finished"


class Stop:
    """A context around a loop that polls `requested`, and stops after SIGTERM or SIGINT.

    A signal reaches the processes at different steps, or only one of them. They agree on a step: the process
    with the signal notifies the others, all pause and publish how often they have polled `requested`, and
    they stop at the poll after the largest of these counts. Nothing is sent before a signal arrives.

    A second SIGINT ends the process at once. If the context is not left within `grace` seconds, because the
    process waits for another one or for a disk, it exits with a message.

    Args:
      grace: the maximum number of seconds from the signal until the context is left.

    Attributes:
      reason: the name of the signal, once all processes know it.
    """

    def __init__(self, grace: float = DEFAULT_GRACE) -> None:
        self.reason, self.grace = "", grace
        self._timer: threading.Timer | None = None
        self._polls = 0
        self._stop_at: int | None = None  # the poll at which all processes stop
        self._lock, self._timer_lock = threading.Lock(), threading.Lock()
        self._key = processes.unique_key("stop")

    @property
    def requested(self) -> bool:
        """Whether to stop now.

        The processes agree on a number of reads. So all of them must read it at the same steps, once at each,
        whether or not a signal has arrived. A step that ends the loop in every process needs no read.
        """
        with self._lock:
            self._polls += 1
            return self._stop_at is not None and self._polls >= self._stop_at

    def __enter__(self) -> Self:
        # Python runs signal handlers between two bytecodes of the main thread, which may be inside a long
        # step. The wakeup pipe is written at once.
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._catch()
        targets = [self._listen, self._agree] if processes.is_multiprocess() else [self._listen]
        self._threads = [threading.Thread(target=run, name="weft stop", daemon=True) for run in targets]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()
        os.close(self._write)
        if processes.is_multiprocess():
            with suppress(jax.errors.JaxRuntimeError):  # the coordinator has exited
                processes.publish(self._key, FINISHED)
        for thread in self._threads:
            thread.join(timeout=10)
        os.close(self._read)
        if self._timer is not None:
            self._timer.cancel()

    def _catch(self) -> None:
        self._old_handlers: dict[int, Any] = {}
        # Python lets only the main thread set handlers. Elsewhere, only the signals of other processes count.
        if threading.current_thread() is threading.main_thread():
            self._old_pipe = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._old_handlers = {s: signal.signal(s, _ignore) for s in (signal.SIGTERM, signal.SIGINT)}
            _catching.append(self)

    def _release(self) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._old_handlers:
            signal.set_wakeup_fd(self._old_pipe)
            _catching.remove(self)

    def _listen(self) -> None:
        """Wait for signals, in a thread."""
        interrupted = False
        while byte := os.read(self._read, 1):
            if byte[0] == signal.SIGINT and interrupted:
                os._exit(130)
            if byte[0] == signal.SIGINT:
                interrupted = True
                print("stopping after this step; press again to exit at once", file=sys.stderr, flush=True)
            if byte[0] not in (signal.SIGTERM, signal.SIGINT) or self.reason:
                continue
            reason = signal.Signals(byte[0]).name
            self._start_timer(reason)
            if processes.is_multiprocess():
                with suppress(jax.errors.JaxRuntimeError):
                    processes.publish(self._key, reason)
            else:
                self.reason, self._stop_at = reason, 0

    def _agree(self) -> None:
        """Wait until a process publishes a signal, then agree on the step to stop at; in a thread."""
        # An error means that another process died or does not answer: its own message reports it.
        with suppress(jax.errors.JaxRuntimeError, DistributedError):
            reason = processes.wait_for_text(self._key, math.inf)
            if reason == FINISHED:
                return
            self._start_timer(reason)
            with self._lock:  # blocks `requested` until its answer is known
                polls = processes.gather_texts(f"{self._key}/polls", str(self._polls), self.grace)
                self.reason, self._stop_at = reason, max(map(int, polls)) + 1

    def _start_timer(self, reason: str) -> None:
        """Exit if the context is not left in time."""
        with self._timer_lock:
            if self._timer is None:
                self._timer = processes.exit_after(self.grace, _grace_error(reason, self.grace))


def _grace_error(reason: str, grace: float) -> DistributedError:
    who = processes.process_label() if processes.is_multiprocess() else "this process"
    return DistributedError(
        f"{who} could not stop within {grace:g} s of {reason}",
        "it waits for another process or a disk, or the last checkpoint is still being written",
        rule="a process that does not stop in time exits; the run resumes from its last complete checkpoint",
        hint="check the logs of the others; distributed.Stop(grace=…) or --hosts.grace sets a longer time",
    )


_catching: list[Stop] = []


def _release_in_child() -> None:
    """A forked worker must end on SIGTERM, and must not write into the parent's pipe."""
    for stop in reversed(_catching.copy()):
        stop._release()


os.register_at_fork(after_in_child=_release_in_child)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Python writes to the wakeup pipe only if the signal has a handler."""
