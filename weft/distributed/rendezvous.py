"""Many hosts, one program: how processes find each other, and how they stop together.

    distributed.join()                        # before JAX is used; does nothing where there is one process
    with distributed.Stop() as stop:
        for step in range(steps):
            ...
            if stop.asked:              # SIGTERM or SIGINT came, to any of the processes
                break                   # all processes are at this step

Each process runs the same program. `join` connects them through the coordinator, which is process 0's; after
that `jax.devices()` are the devices of all, and a mesh spans them. How they talk beside JAX's collectives is
in `weft/processes.py`.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import jax

from weft.core.devices import is_cpu_only, retain_freed_memory
from weft.distributed.processes import (
    DEFAULT_TIMEOUT,
    DistributedError,
    PeerTimeoutError,
    exit_after,
    is_multiprocess,
    peer_timeout,
    process_count,
    process_index,
    publish,
    wait_for_text,
)

from . import gloo
from .stopping import Stop as Stop

COORDINATOR_VARIABLE, PROCESSES_VARIABLE, PROCESS_VARIABLE, DEVICES_VARIABLE = (
    "WEFT_COORDINATOR",
    "WEFT_PROCESSES",
    "WEFT_PROCESS",
    "WEFT_DEVICES",
)

# Joining


@dataclass(frozen=True)
class ProcessInfo:
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
    wait: float = DEFAULT_TIMEOUT,
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
      wait: how many seconds a process waits for the others at any later point, such as a step or a
        checkpoint, before it ends with an error.
    """
    if jax.distributed.is_initialized():
        return
    try:
        member = _given(coordinator, processes, process, os.environ)
        found = None if member is not None else detect_cluster()
        if member is None and found is None:
            return
        peer_timeout(wait)
        _prepare(devices, os.environ)
        _connect(member, found, timeout, heartbeat)
    except DistributedError as error:
        raise error.located("distributed.join()") from None
    _end_when_failed()


def _given(
    coordinator: str | None, processes: int | None, process: int | None, environment: Mapping[str, str]
) -> ProcessInfo | None:
    """The member that arguments and environment say; None if they say nothing."""
    said = {COORDINATOR_VARIABLE: coordinator, PROCESSES_VARIABLE: processes, PROCESS_VARIABLE: process}
    values = {name: environment.get(name) if one is None else one for name, one in said.items()}
    missing = [name for name, one in values.items() if one in (None, "")]
    if len(missing) == len(values):
        return None
    shown = ", ".join(f"{name}={one}" for name, one in values.items() if name not in missing)
    rule = (
        "a process knows the coordinator's host:port, how many processes there are, and its number from 0 on"
    )
    if missing:
        raise DistributedError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            f"given: {shown}",
            rule=rule,
            hint="set all three, or none for a run of one process; on one machine weft launch sets them",
        )
    host, _, port = str(values[COORDINATOR_VARIABLE]).rpartition(":")
    wrong = []
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        wrong.append(f"the coordinator {values[COORDINATOR_VARIABLE]!r} is not host:port")
    count, number = (_whole(values[name]) for name in (PROCESSES_VARIABLE, PROCESS_VARIABLE))
    if count is None or count < 1:
        wrong.append(f"{values[PROCESSES_VARIABLE]!r} is not a number of processes")
    if number is None or number < 0:
        wrong.append(f"{values[PROCESS_VARIABLE]!r} is not the number of a process")
    elif count is not None and 0 < count <= number:
        wrong.append(f"there is no process {number} of {count}: the last one is {count - 1}")
    if wrong or count is None or number is None:
        raise DistributedError(
            "; ".join(wrong), f"given: {shown}", rule=rule, hint="for example 10.0.0.1:1234, 4 and 0"
        )
    return ProcessInfo(f"{host}:{port}", count, number)


def _whole(given: Any) -> int | None:
    try:
        return int(given)
    except ValueError:
        return None


def detect_cluster() -> str | None:
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
    wanted = devices if devices is not None else _whole(environment.get(DEVICES_VARIABLE) or "1")
    forced = "xla_force_host_platform_device_count" in environment.get("XLA_FLAGS", "")
    try:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # JAX's own would catch SIGTERM for good, also outside of a loop that asks for it: see Stop.
        jax.config.update("jax_enable_preemption_service", False)
        if not forced:
            jax.config.update("jax_num_cpu_devices", wanted)
        if is_cpu_only():
            retain_freed_memory()
    except RuntimeError:
        raise _late() from None


def _late() -> DistributedError:
    return DistributedError(
        "JAX is already in use in this process",
        rule="its devices are fixed at the first use, without those of the other processes",
        hint="call distributed.join() at the top of the program, before any array is made",
    )


def _connect(member: ProcessInfo | None, found: str | None, timeout: float, heartbeat: int) -> None:
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
    timer = exit_after(left, _alone(member, found, timeout))  # later JAX would, from C++, with its stack
    try:
        jax.distributed.initialize(**more)
        gloo.use_reachable_address(left)
    except DistributedError:
        raise
    except Exception as error:
        if "before any JAX calls" in str(error):
            raise _late() from None
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise _alone(member, found, timeout, f"JAX says: {said}") from None
    finally:
        timer.cancel()


def _alone(member: ProcessInfo | None, found: str | None, timeout: float, *details: str) -> DistributedError:
    who = f"process {member.process} of {member.processes}" if member else "this process"
    return DistributedError(
        f"{who} could not join the others within {timeout:g} s",
        f"the coordinator: {member.coordinator}" if member else f"JAX found: {found}",
        *details,
        rule="all processes start within that time, and reach the coordinator, which is process 0's",
        hint="look at the logs of the others, whether one failed first; at firewalls and proxies; "
        "or set WEFT_COORDINATOR, WEFT_PROCESSES and WEFT_PROCESS yourself",
    )


def _await_coordinator(member: ProcessInfo, timeout: float) -> None:
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
    raise DistributedError(
        f"process {member.process} of {member.processes} did not reach the coordinator {member.coordinator} "
        f"within {timeout:g} s",
        f"the system says: {reason}",
        rule="process 0 listens there; it has to be started too, and to be reachable from here",
        hint="look at the log of process 0, at the name and port, and at firewalls",
    )


# Failing

FAILURE_GRACE = 3.0  # seconds that process 0 waits for others that have failed too
_failed: list[int] = []  # the exit code, once it is known


def mark_failed(code: int = 1) -> None:
    """Say that this process has failed: at its exit it will not wait for the others.

    JAX would wait there for minutes until all are at their exit, and they wait in a collective for this one.
    An exception that nobody catches is known without this.
    """
    if is_multiprocess():
        _failed.append(code)


def _end_when_failed() -> None:
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shown(kind, error, trace)
        mark_failed(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def end() -> None:
        # Threads have ended by now, and with them a checkpoint that was being written.
        if _failed:
            sys.stdout.flush()
            sys.stderr.flush()
            with suppress(PeerTimeoutError, jax.errors.JaxRuntimeError):
                _end_last()
            os._exit(_failed[0])

    sys.excepthook = hook
    atexit.register(end)  # the last one is called first: this one before JAX's


def _end_last() -> None:
    """Let process 0 end after the others that have failed: with the coordinator gone JAX aborts them, and an
    error that all have would not be shown by all."""
    if process_index() > 0:
        publish(f"weft/failed/{process_index()}", "")
        return
    end = time.monotonic() + FAILURE_GRACE
    for other in range(1, process_count()):
        wait_for_text(f"weft/failed/{other}", max(0.0, end - time.monotonic()))
