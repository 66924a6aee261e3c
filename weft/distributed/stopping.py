"""How processes stop together when a signal comes: all at the same step, and within a bounded time."""

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

from weft.distributed import processes
from weft.distributed.processes import DistributedError

DEFAULT_GRACE = 300.0  # seconds
FINISHED = "over"


class Stop:
    """Whether the run is to stop, because SIGTERM or SIGINT came: a context around a loop.

    A signal reaches the processes at different steps, or only one of them. They agree on a step: whoever
    gets the signal tells the others, all hold still for a moment and say how often they have asked, and the
    next time after the largest of these is when they stop. Nothing is sent before a signal comes.

    A second SIGINT ends the process at once. If the context is not left within `grace` seconds, because the
    process waits for another one or for a disk, it ends with a message.

    Args:
      grace: how many seconds there are, from the signal on, until the context is left.

    Attributes:
      reason: the signal's name, once all know of it.
    """

    def __init__(self, grace: float = DEFAULT_GRACE) -> None:
        self.reason, self.grace = "", grace
        self._timer: threading.Timer | None = None
        self._times = 0  # how often it was asked
        self._at: int | None = None  # at which time of asking all stop
        self._lock, self._hurrying = threading.Lock(), threading.Lock()
        self._name = processes.unique_key("stop")

    @property
    def asked(self) -> bool:
        """Whether to stop now. Every process asks once a step, also those that got no signal."""
        with self._lock:
            self._times += 1
            return self._at is not None and self._times >= self._at

    def __enter__(self) -> Self:
        # Python runs its handlers between two lines of the main thread, which may be inside a long step. What
        # it writes into this pipe comes at once.
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._catch()
        targets = [self._listen, self._agree] if processes.is_multiprocess() else [self._listen]
        self._threads = [threading.Thread(target=one, name="weft stop", daemon=True) for one in targets]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()
        os.close(self._write)
        if processes.is_multiprocess():
            with suppress(jax.errors.JaxRuntimeError):  # the coordinator is gone
                processes.publish(self._name, FINISHED)
        for thread in self._threads:
            thread.join(timeout=10)
        os.close(self._read)
        if self._timer is not None:
            self._timer.cancel()

    def _catch(self) -> None:
        self._before: dict[int, Any] = {}
        if (
            threading.current_thread() is threading.main_thread()
        ):  # others may not; they hear of others' signals
            self._pipe_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._before = {one: signal.signal(one, _ignored) for one in (signal.SIGTERM, signal.SIGINT)}
            _catching.append(self)

    def _release(self) -> None:
        for one, handler in self._before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)
        if self._before:
            signal.set_wakeup_fd(self._pipe_before)
            _catching.remove(self)

    def _listen(self) -> None:
        """Wait for signals."""
        interrupted = False
        while byte := os.read(self._read, 1):
            if byte[0] == signal.SIGINT and interrupted:
                os._exit(130)
            if byte[0] == signal.SIGINT:
                interrupted = True
                print("stopping after this step; once more ends it at once", file=sys.stderr, flush=True)
            if byte[0] not in (signal.SIGTERM, signal.SIGINT) or self.reason:
                continue
            reason = signal.Signals(byte[0]).name
            self._hurry(reason)
            if processes.is_multiprocess():
                with suppress(jax.errors.JaxRuntimeError):
                    processes.publish(self._name, reason)
            else:
                self.reason, self._at = reason, 0

    def _agree(self) -> None:
        """Wait until one of the processes has told of a signal, then agree on when to stop."""
        with suppress(
            jax.errors.JaxRuntimeError, DistributedError
        ):  # another one has died, or does not answer
            reason = processes.wait_for_text(self._name, math.inf)
            if reason == FINISHED:
                return
            self._hurry(reason)
            with self._lock:  # whoever asks now waits: its answer is not known yet
                times = processes.gather_texts(f"{self._name}/times", str(self._times), self.grace)
                self.reason, self._at = reason, max(map(int, times)) + 1

    def _hurry(self, reason: str) -> None:
        """Have the process end if the context is not left in time."""
        with self._hurrying:
            if self._timer is None:
                self._timer = processes.exit_after(self.grace, _too_slow(reason, self.grace))


def _too_slow(reason: str, grace: float) -> DistributedError:
    who = processes.process_label() if processes.is_multiprocess() else "this process"
    return DistributedError(
        f"{who} could not stop within {grace:g} s of {reason}",
        "it waits for another process or for its disk, or the last checkpoint is still being written",
        rule="what is not done by then is left; the run resumes from its last complete checkpoint",
        hint="look at the logs of the others; distributed.Stop(grace=…) or --hosts.grace sets a longer time",
    )


_catching: list[Stop] = []


def _forked() -> None:
    """A worker that is forked off ends by SIGTERM, and does not write into our pipe."""
    for stop in reversed(_catching.copy()):
        stop._release()


os.register_at_fork(after_in_child=_forked)


def _ignored(number: int, frame: FrameType | None) -> None:
    """A handler has to be there for Python to write into the pipe."""
