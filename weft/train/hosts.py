"""Many hosts, one program: how processes find each other, and how they stop together.

    hosts.join()                        # before JAX is used; does nothing where there is one process
    with hosts.Stop() as stop:
        for step in range(steps):
            ...
            if stop.asked:              # SIGTERM or SIGINT came, to any of the processes
                break                   # all processes are at this step

Each process runs the same program. `join` connects them through the coordinator, which is process 0's; after
that `jax.devices()` are the devices of all, and a mesh spans them. Beside JAX's collectives the coordinator
keeps a few words that all can read (`tell`, `told`): these may be used from threads at any time, where a
collective has to come in the same order everywhere.
"""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self

import jax

from weft import cpu
from weft.errors import WeftError

COORDINATOR, PROCESSES, PROCESS, DEVICES = (
    "WEFT_COORDINATOR",
    "WEFT_PROCESSES",
    "WEFT_PROCESS",
    "WEFT_DEVICES",
)
FOREVER = 10 * 365 * 24 * 3600.0  # seconds
_count = itertools.count()


class HostsError(WeftError, RuntimeError):
    """Processes that can't find each other."""


# Joining


@dataclass(frozen=True)
class Member:
    """One of several processes: the coordinator's `host:port`, how many there are, and which one it is."""

    coordinator: str
    processes: int
    process: int


def join(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    devices: int | None = None,
    timeout: float = 300.0,
    heartbeat: int = 20,
) -> None:
    """Join the other processes of this run; call it before the first use of JAX.

    What is not given is taken from WEFT_COORDINATOR, WEFT_PROCESSES and WEFT_PROCESS, which `weft launch`
    sets. If these are not there either, JAX is asked for a cluster that it knows (SLURM, Open MPI, an indexed
    Job of Kubernetes, a TPU pod). Else there is one process, and nothing is done.

    Args:
      coordinator: `host:port` of process 0, which listens there.
      processes: how many there are.
      process: the number of this one, from 0 on.
      devices: on a CPU, how many virtual devices a process has; by default 1.
      timeout: how many seconds to wait for the others.
      heartbeat: after so many seconds without a sign of life a process counts as dead, and all others end.
    """
    if jax.distributed.is_initialized():
        return
    try:
        member = _given(coordinator, processes, process, os.environ)
        found = None if member is not None else detected()
        if member is None and found is None:
            return
        _prepare(devices, os.environ)
        _connect(member, found, timeout, heartbeat)
    except HostsError as error:
        raise error.located("hosts.join()") from None
    _end_when_failed()


def _given(
    coordinator: str | None, processes: int | None, process: int | None, environment: Mapping[str, str]
) -> Member | None:
    """The member that arguments and environment say; None if they say nothing."""
    said = {COORDINATOR: coordinator, PROCESSES: processes, PROCESS: process}
    values = {name: environment.get(name) if one is None else one for name, one in said.items()}
    missing = [name for name, one in values.items() if one in (None, "")]
    if len(missing) == len(values):
        return None
    shown = ", ".join(f"{name}={one}" for name, one in values.items() if name not in missing)
    rule = (
        "a process knows the coordinator's host:port, how many processes there are, and its number from 0 on"
    )
    if missing:
        raise HostsError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            f"given: {shown}",
            rule=rule,
            hint="set all three, or none for a run of one process; on one machine weft launch sets them",
        )
    host, _, port = str(values[COORDINATOR]).rpartition(":")
    wrong = []
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        wrong.append(f"the coordinator {values[COORDINATOR]!r} is not host:port")
    count, number = (_whole(values[name]) for name in (PROCESSES, PROCESS))
    if count is None or count < 1:
        wrong.append(f"{values[PROCESSES]!r} is not a number of processes")
    if number is None or number < 0:
        wrong.append(f"{values[PROCESS]!r} is not the number of a process")
    elif count is not None and 0 < count <= number:
        wrong.append(f"there is no process {number} of {count}: the last one is {count - 1}")
    if wrong or count is None or number is None:
        raise HostsError(
            "; ".join(wrong), f"given: {shown}", rule=rule, hint="for example 10.0.0.1:1234, 4 and 0"
        )
    return Member(f"{host}:{port}", count, number)


def _whole(given: Any) -> int | None:
    try:
        return int(given)
    except ValueError:
        return None


def detected() -> str | None:
    """The cluster of several processes that JAX knows this to be one of."""
    from jax._src.clusters import ClusterEnv  # JAX has no public name for it

    for kind in ClusterEnv._cluster_types:
        # Every pod looks like Kubernetes to JAX; only those of an indexed Job are numbered.
        if kind.opt_in_only_method or (
            kind.__name__ == "K8sCluster" and "JOB_COMPLETION_INDEX" not in os.environ
        ):
            continue
        if kind.is_env_present() and kind.get_process_count() > 1:
            return kind.__name__
    return None


def _prepare(devices: int | None, environment: Mapping[str, str]) -> None:
    """JAX's settings for several processes; they have no effect on what is not a CPU."""
    wanted = devices if devices is not None else _whole(environment.get(DEVICES) or "1")
    forced = "xla_force_host_platform_device_count" in environment.get("XLA_FLAGS", "")
    try:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # JAX's own would catch SIGTERM for good, also outside of a loop that asks for it: see Stop.
        jax.config.update("jax_enable_preemption_service", False)
        if not forced:
            jax.config.update("jax_num_cpu_devices", wanted)
        if cpu.is_all_there_is():
            cpu.keep_memory()
    except RuntimeError:
        raise _late() from None


def _late() -> HostsError:
    return HostsError(
        "JAX is already in use in this process",
        rule="its devices are fixed at the first use, without those of the other processes",
        hint="call hosts.join() at the top of the program, before any array is made",
    )


def _connect(member: Member | None, found: str | None, timeout: float, heartbeat: int) -> None:
    begin = time.monotonic()
    if member is not None and member.process > 0:
        _await_coordinator(member, timeout)
    left = max(1, int(timeout - (time.monotonic() - begin)))
    more: dict[str, Any] = {
        "initialization_timeout": left + 10,
        "heartbeat_timeout_seconds": heartbeat,
    }
    if member is not None:
        more |= {
            "coordinator_address": member.coordinator,
            "num_processes": member.processes,
            "process_id": member.process,
            "cluster_detection_method": "deactivate",
        }
    timer = threading.Timer(left, _give_up, [_alone(member, found, timeout)])
    timer.start()
    try:
        jax.distributed.initialize(**more)
    except Exception as error:
        if "before any JAX calls" in str(error):
            raise _late() from None
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise _alone(member, found, timeout, f"JAX says: {said}") from None
    finally:
        timer.cancel()


def _alone(member: Member | None, found: str | None, timeout: float, *details: str) -> HostsError:
    who = f"process {member.process} of {member.processes}" if member else "this process"
    return HostsError(
        f"{who} could not join the others within {timeout:g} s",
        f"the coordinator: {member.coordinator}" if member else f"JAX found: {found}",
        *details,
        rule="all processes start within that time, and reach the coordinator, which is process 0's",
        hint="look at the logs of the others, whether one failed first; at firewalls and proxies; "
        "or set WEFT_COORDINATOR, WEFT_PROCESSES and WEFT_PROCESS yourself",
    )


def _give_up(error: HostsError) -> None:
    """End the process with a message; a little later JAX would, from C++ and with a page of its stack."""
    print(f"HostsError: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _await_coordinator(member: Member, timeout: float) -> None:
    """Wait until someone listens there. JAX itself would end the process, with pages of C++."""
    host, _, port = member.coordinator.rpartition(":")
    end, reason = time.monotonic() + timeout, ""
    while time.monotonic() < end:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=min(5.0, timeout)).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(min(0.1, max(0.0, end - time.monotonic())))
    raise HostsError(
        f"process {member.process} of {member.processes} did not reach the coordinator {member.coordinator} "
        f"within {timeout:g} s",
        f"the system says: {reason}",
        rule="process 0 listens there; it has to be started too, and to be reachable from here",
        hint="look at the log of process 0, at the name and port, and at firewalls",
    )


# Failing

_failed: list[int] = []  # the exit code, once it is known


def fail(code: int = 1) -> None:
    """Say that this process has failed: at its exit it will not wait for the others.

    JAX would wait there for minutes until all are at their exit, and they wait in a collective for this one.
    An exception that nobody catches is known without this.
    """
    if several():
        _failed.append(code)


def _end_when_failed() -> None:
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shown(kind, error, trace)
        fail(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def end() -> None:
        # Threads have ended by now, and with them a checkpoint that was being written.
        if _failed:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(_failed[0])

    sys.excepthook = hook
    atexit.register(end)  # the last one is called first: this one before JAX's


# Words that all processes can read


def _client() -> Any:
    from jax._src import distributed  # JAX has no public name for it

    return distributed.global_state.client


def several() -> bool:
    """Whether this run has several processes. It can be asked before JAX is used."""
    from jax._src import distributed

    return _client() is not None and distributed.global_state.num_processes > 1


def tell(name: str, text: str) -> bool:
    """Tell the other processes something, once; False if that was told already."""
    try:
        _client().key_value_set(name, text)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        return False
    return True


def told(name: str, seconds: float = FOREVER) -> str:
    """What was told under that name; waits until it is."""
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        try:
            return _client().blocking_key_value_get(name, max(1, int(1000 * min(left, 3600))))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error) or time.monotonic() >= end:
                raise


def name(what: str) -> str:
    """A name to tell something by, new each time. All processes take theirs in the same order."""
    return f"weft/{what}/{next(_count)}"


def from_first(name: str, work: Callable[[], str]) -> str:
    """What process 0 makes of some work; the others wait for it. If it fails, all do."""
    if not several():
        return work()
    if jax.process_index() > 0:
        kind, _, text = told(name).partition(" ")
        if kind == "failed":
            raise HostsError(
                "process 0 failed, and this one waited for it",
                text,
                rule="what one process does for all is done when it succeeds",
                hint="the log of process 0 says more",
            )
        return text
    try:
        text = work()
    except BaseException as error:
        tell(name, f"failed {type(error).__name__}: {error}")
        raise
    tell(name, f"done {text}")
    return text


# Stopping

OVER = "over"


class Stop:
    """Whether the run is to stop, because SIGTERM or SIGINT came: a context around a loop.

    A signal reaches the processes at different steps, or only one of them. They agree on a step: whoever
    gets the signal tells the others, all hold still for a moment and say how often they have asked, and the
    next time after the largest of these is when they stop. Nothing is sent before a signal comes.

    A second SIGINT ends the process at once.

    Attributes:
      reason: the signal's name, once all know of it.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._times = 0  # how often it was asked
        self._at: int | None = None  # at which time of asking all stop
        self._lock = threading.Lock()
        self._name = name("stop")

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
        targets = [self._listen, self._agree] if several() else [self._listen]
        self._threads = [threading.Thread(target=one, name="weft stop", daemon=True) for one in targets]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()
        os.close(self._write)
        if several():
            with suppress(jax.errors.JaxRuntimeError):  # the coordinator is gone
                tell(self._name, OVER)
        for thread in self._threads:
            thread.join(timeout=10)
        os.close(self._read)

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
            if several():
                with suppress(jax.errors.JaxRuntimeError):
                    tell(self._name, reason)
            else:
                self.reason, self._at = reason, 0

    def _agree(self) -> None:
        """Wait until one of the processes has told of a signal, then agree on when to stop."""
        with suppress(jax.errors.JaxRuntimeError):  # then JAX ends the process: another one has died
            reason = told(self._name)
            if reason == OVER:
                return
            with self._lock:  # whoever asks now waits: its answer is not known yet
                tell(f"{self._name}/times/{jax.process_index()}", str(self._times))
                _client().wait_at_barrier(f"{self._name}/barrier", 3_600_000)
                times = [int(one) for _, one in _client().key_value_dir_get(f"{self._name}/times/")]
                self.reason, self._at = reason, max(times) + 1


_catching: list[Stop] = []


def _forked() -> None:
    """A worker that is forked off ends by SIGTERM, and does not write into our pipe."""
    for stop in reversed(_catching.copy()):
        stop._release()


os.register_at_fork(after_in_child=_forked)


def _ignored(number: int, frame: FrameType | None) -> None:
    """A handler has to be there for Python to write into the pipe."""
