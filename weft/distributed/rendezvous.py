"""Join the processes of a distributed run.

    distributed.join()                  # before the first use of JAX; does nothing in a single process
    with distributed.Stop() as stop:
        for step in range(steps):
            ...
            if stop.requested:          # some process received SIGTERM or SIGINT
                break                   # all processes stop at the same step

Each process runs the same program. `join` connects them through the coordinator in process 0; afterwards
`jax.devices()` lists the devices of all processes, and a mesh spans them. `processes` has the messages that
they exchange outside JAX's collectives.
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

from weft.core import jax_compat
from weft.core.devices import is_cpu_only, retain_freed_memory
from weft.core.errors import DistributedError, PeerTimeoutError
from weft.distributed.processes import (
    DEFAULT_TIMEOUT,
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
    """One of several processes: the coordinator's `host:port`, the number of processes, and its index."""

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
    """Join the other processes of this run. Call it before the first use of JAX.

    The defaults are the environment variables WEFT_COORDINATOR, WEFT_PROCESSES and WEFT_PROCESS, which
    `weft launch` sets. Without them, JAX's cluster detection is used (SLURM, Open MPI, an indexed Job of
    Kubernetes, a TPU pod). If it finds no cluster, there is one process, and `join` does nothing.

    Args:
      coordinator: `host:port` at which process 0 listens.
      processes: the number of processes.
      process: the index of this process, from 0 on.
      devices: on a CPU, the number of virtual devices per process; by default 1.
      timeout: how many seconds to wait for the others to join.
      heartbeat: a process that sends no heartbeat for this many seconds counts as dead, and all others exit.
      wait: how many seconds a process waits for the others at any later point, such as a step or a
        checkpoint, before it exits with an error.
    """
    if jax.distributed.is_initialized():
        return
    try:
        info = _read_settings(coordinator, processes, process, os.environ)
        cluster = None if info is not None else detect_cluster()
        if info is None and cluster is None:
            return
        peer_timeout(wait)
        _configure_jax(devices, os.environ)
        _connect(info, cluster, timeout, heartbeat)
    except DistributedError as error:
        raise error.located("distributed.join()") from None
    _exit_without_waiting_after_failure()


def _read_settings(
    coordinator: str | None, processes: int | None, process: int | None, environment: Mapping[str, str]
) -> ProcessInfo | None:
    """The process described by arguments and environment variables; None if none of them is set."""
    arguments = {
        COORDINATOR_VARIABLE: coordinator,
        PROCESSES_VARIABLE: processes,
        PROCESS_VARIABLE: process,
    }
    values = {name: environment.get(name) if value is None else value for name, value in arguments.items()}
    missing = [name for name, value in values.items() if value in (None, "")]
    if len(missing) == len(values):
        return None
    shown = ", ".join(f"{name}={value}" for name, value in values.items() if name not in missing)
    rule = "a process needs the coordinator's host:port, the number of processes, and its index from 0 on"
    if missing:
        raise DistributedError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            f"given: {shown}",
            rule=rule,
            hint="set all three, or none for a single-process run; on one machine weft launch sets them",
        )
    host, _, port = str(values[COORDINATOR_VARIABLE]).rpartition(":")
    wrong = []
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        wrong.append(f"the coordinator {values[COORDINATOR_VARIABLE]!r} is not host:port")
    count, index = (_parse_int(values[name]) for name in (PROCESSES_VARIABLE, PROCESS_VARIABLE))
    if count is None or count < 1:
        wrong.append(f"{values[PROCESSES_VARIABLE]!r} is not a number of processes")
    if index is None or index < 0:
        wrong.append(f"{values[PROCESS_VARIABLE]!r} is not the index of a process")
    elif count is not None and 0 < count <= index:
        wrong.append(f"there is no process {index} of {count}: the last one is {count - 1}")
    if wrong or count is None or index is None:
        raise DistributedError(
            "; ".join(wrong), f"given: {shown}", rule=rule, hint="for example 10.0.0.1:1234, 4 and 0"
        )
    return ProcessInfo(f"{host}:{port}", count, index)


def _parse_int(value: int | str | None) -> int | None:
    try:
        return int(value)  # type: ignore[arg-type]
    except ValueError:
        return None


def detect_cluster() -> str | None:
    """The name of the multi-process cluster that JAX detects; None if there is none."""
    for kind in jax_compat.cluster_environments():
        # JAX takes every pod for Kubernetes, but only the pods of an indexed Job are numbered.
        if kind.opt_in_only_method or (
            kind.__name__ == "K8sCluster" and "JOB_COMPLETION_INDEX" not in os.environ
        ):
            continue
        if kind.is_env_present() and kind.get_process_count() > 1:
            return kind.__name__
    return None


def _configure_jax(devices: int | None, environment: Mapping[str, str]) -> None:
    """JAX's configuration for several processes. It affects only CPUs."""
    count = devices if devices is not None else _parse_int(environment.get(DEVICES_VARIABLE) or "1")
    forced = "xla_force_host_platform_device_count" in environment.get("XLA_FLAGS", "")
    try:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # JAX's preemption service would catch SIGTERM for good, even outside a loop that polls it: see Stop.
        jax.config.update("jax_enable_preemption_service", False)
        if not forced:
            jax.config.update("jax_num_cpu_devices", count)
        if is_cpu_only():
            retain_freed_memory()
    except RuntimeError:
        raise _jax_in_use_error() from None


def _jax_in_use_error() -> DistributedError:
    return DistributedError(
        "JAX is already in use in this process",
        rule="the first use of JAX fixes the devices, without those of the other processes",
        hint="call distributed.join() at the top of the program, before any array is created",
    )


def _connect(info: ProcessInfo | None, cluster: str | None, timeout: float, heartbeat: int) -> None:
    start = time.monotonic()
    if info is not None and info.process > 0:
        _await_coordinator(info, timeout)
    left = max(1, int(timeout - (time.monotonic() - start)))
    arguments: dict[str, Any] = {
        "initialization_timeout": left + 10,
        "heartbeat_timeout_seconds": heartbeat,
    }
    if info is not None:
        arguments |= {
            "coordinator_address": info.coordinator,
            "num_processes": info.processes,
            "process_id": info.process,
            "cluster_detection_method": "deactivate",
        }
    # Exit before JAX's own timeout does: that one aborts from C++ and prints its stack.
    timer = exit_after(left, _join_error(info, cluster, timeout))
    try:
        jax.distributed.initialize(**arguments)
        gloo.use_reachable_address(left)
    except DistributedError:
        raise
    except Exception as error:
        if "before any JAX calls" in str(error):
            raise _jax_in_use_error() from None
        message = (str(error).splitlines() or [type(error).__name__])[0]
        raise _join_error(info, cluster, timeout, f"JAX error: {message}") from None
    finally:
        timer.cancel()


def _join_error(
    info: ProcessInfo | None, cluster: str | None, timeout: float, *details: str
) -> DistributedError:
    who = f"process {info.process} of {info.processes}" if info else "this process"
    return DistributedError(
        f"{who} could not join the others within {timeout:g} s",
        f"coordinator: {info.coordinator}" if info else f"cluster detected by JAX: {cluster}",
        *details,
        rule="all processes must start within that time and reach the coordinator in process 0",
        hint="check the logs of the others for an earlier failure; check firewalls and proxies; "
        "or set WEFT_COORDINATOR, WEFT_PROCESSES and WEFT_PROCESS yourself",
    )


def _await_coordinator(info: ProcessInfo, timeout: float) -> None:
    """Wait until the coordinator listens. JAX itself would abort the process, with pages of C++ output."""
    host, _, port = info.coordinator.rpartition(":")
    end, reason = time.monotonic() + timeout, ""
    while time.monotonic() < end:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=min(5.0, timeout)).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(min(0.1, max(0.0, end - time.monotonic())))
    raise DistributedError(
        f"process {info.process} of {info.processes} could not reach the coordinator {info.coordinator} "
        f"within {timeout:g} s",
        f"system error: {reason}",
        rule="process 0 listens there; it must be running and reachable from here",
        hint="check the log of process 0, the host name and port, and firewalls",
    )


# Failing

FAILURE_GRACE = 3.0  # seconds that process 0 waits for others that failed too
_failed: list[int] = []  # the exit code, once it is known


def mark_failed(code: int = 1) -> None:
    """Record that this process has failed, so that its exit does not wait for the others.

    JAX's exit handler would wait for minutes until all processes exit, while they wait for this one in a
    collective. An uncaught exception is recorded automatically.
    """
    if is_multiprocess():
        _failed.append(code)


def _exit_without_waiting_after_failure() -> None:
    previous_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous_hook(kind, error, trace)
        mark_failed(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def at_exit() -> None:
        # The threads have ended by now, so a checkpoint that was being written is finished.
        if _failed:
            sys.stdout.flush()
            sys.stderr.flush()
            with suppress(PeerTimeoutError, jax.errors.JaxRuntimeError):
                _exit_last()
            os._exit(_failed[0])

    sys.excepthook = hook
    atexit.register(at_exit)  # handlers run in reverse order: this one before JAX's


def _exit_last() -> None:
    """Make process 0 exit after the other failed processes: JAX aborts them when the coordinator is gone, and
    they could not report an error that occurs in all processes."""
    if process_index() > 0:
        publish(f"weft/failed/{process_index()}", "")
        return
    end = time.monotonic() + FAILURE_GRACE
    for other in range(1, process_count()):
        wait_for_text(f"weft/failed/{other}", max(0.0, end - time.monotonic()))
