"""`weft launch`: run a command in several processes on this machine, which start and end together.

Each process has its own session and watches a pipe whose other end only the launcher holds
(`launch_child.py`). When the launcher ends for any reason, the pipe closes, and the process kills its process
group, workers included. Linux's PR_SET_PDEATHSIG would reach only the process itself, and other systems lack
it.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO, Annotated

from tyro.conf import Positional, arg

from ..core.errors import nearest
from ..core.field_types import NonNegative, NonNegativeInt, PositiveInt
from .flag_errors import validate_flags
from .launch_child import PIPE_VARIABLE
from .targets import UsageError

USAGE_ERROR = 2  # the exit code for a usage error, which a restart would only repeat
EXAMPLE = "for example weft launch -n 4 -- train config.toml"


@dataclass
class LaunchCommand:
    """Run a command in several processes on this machine, as if each were a host.

        weft launch -n 4 -- train config.toml

    The processes connect through a free port. Their output is printed line by line, prefixed with the process
    number. When one fails, the others are stopped. SIGINT and SIGTERM are forwarded to all of them. The exit
    code is that of the first process that failed.

    For several machines, see the page "Many hosts": there, the cluster's launcher starts the processes."""

    command: Annotated[Positional[tuple[str, ...]], arg(metavar="COMMAND ...")] = ()
    """A weft command and its arguments, after --."""
    processes: Annotated[PositiveInt, arg(aliases=["-n"], metavar="N")] = 1
    """The number of processes."""
    restarts: Annotated[NonNegativeInt, arg(metavar="N")] = 0
    """How often to restart all processes after a failure. The command resumes from its last checkpoint."""
    devices_per_process: Annotated[PositiveInt, arg(metavar="K")] = 1
    """The number of devices per process: virtual devices on a CPU, the next K GPUs otherwise."""
    grace: Annotated[NonNegative, arg(metavar="SECONDS")] = 10.0
    """How long to wait for a process to stop, after another failed or stopped, before killing it."""

    def run(self) -> None:
        """Start the processes, wait, and restart them; raise SystemExit with their exit code."""
        self._check()
        forwarder = SignalForwarder()
        handlers = {one: signal.signal(one, forwarder) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            for attempt in range(self.restarts + 1):
                group = ProcessGroup(self, forwarder)
                code = group.wait()
                if code == 0 or forwarder.signals or code == USAGE_ERROR or attempt == self.restarts:
                    break
                _log(f"restarting all processes ({attempt + 1} of {self.restarts})")
        finally:
            for one, handler in handlers.items():
                signal.signal(one, handler)
        if code:
            sys.stdout.flush()
            raise SystemExit(code)

    def _check(self) -> None:
        validate_flags(self, EXAMPLE)
        if not self.command:
            raise UsageError(
                "no command to run",
                rule="the command to run in each process comes after --",
                hint=EXAMPLE,
            )
        from .dispatch import COMMANDS

        name = self.command[0]
        if name not in COMMANDS:
            raise UsageError(
                f"unknown command {name!r}{nearest(name, COMMANDS)}",
                rule=f"the commands are {', '.join(COMMANDS)}",
                hint=EXAMPLE,
            )
        if name == "launch":
            raise UsageError(
                "nested weft launch",
                rule="the processes of an inner launch would not find those of the others",
                hint="set -n to the total number of processes",
            )


class SignalForwarder:
    """A signal handler that records signals and forwards them to the running processes."""

    def __init__(self) -> None:
        self.signals: list[int] = []
        self.group: ProcessGroup | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        if self.group is not None:
            self.group.send(number)


class ProcessGroup:
    """The processes of one attempt."""

    def __init__(self, command: LaunchCommand, forwarder: SignalForwarder):
        self.command, self.forwarder = command, forwarder
        self.ended: queue.Queue[tuple[int, int]] = queue.Queue()
        self.readers: list[threading.Thread] = []
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.code = 0
        self.deadline: float | None = None
        # Every process inherits the read end; only the launcher holds the write end.
        self.read_end, self.write_end = os.pipe()
        coordinator = f"127.0.0.1:{_free_port()}"
        try:
            for number in range(command.processes):
                self._start(number, coordinator)
        except BaseException:
            self._kill()
            raise
        finally:
            os.close(self.read_end)
        forwarder.group = self
        for number in forwarder.signals:  # received while the processes were starting
            self.send(number)

    def _start(self, number: int, coordinator: str) -> None:
        devices = self.command.devices_per_process
        own = range(number * devices, (number + 1) * devices)
        environment = os.environ | {
            "WEFT_COORDINATOR": coordinator,
            "WEFT_PROCESSES": str(self.command.processes),
            "WEFT_PROCESS": str(number),
            "WEFT_DEVICES": str(devices),
            PIPE_VARIABLE: str(self.read_end),
            "JAX_COORDINATOR_BIND_ADDRESS": coordinator,  # no other machine may connect
            "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, own)),
            "PYTHONUNBUFFERED": "1",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "weft.cli.launch_child", *self.command.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=[self.read_end],
            start_new_session=True,
        )
        self.running[number] = process
        assert process.stdout is not None and process.stderr is not None
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            self.readers.append(_start_thread(_copy_lines, source, target, f"[{number}] "))
        _start_thread(self._await_exit, number, process)

    def _await_exit(self, number: int, process: subprocess.Popen[bytes]) -> None:
        # Until `wait`, the zombie keeps its pid, so that the group killed here can't be a newer process's.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        _signal_group(process.pid, signal.SIGKILL)
        self.ended.put((number, process.wait()))

    def wait(self) -> int:
        """Wait until all processes have ended; return the exit code of the first that failed."""
        try:
            while self.running:
                left = None if self.deadline is None else _seconds_left(self.deadline)
                try:
                    self._handle_exit(*self.ended.get(timeout=left))
                except queue.Empty:
                    stuck = _format_processes(self.running)
                    _log(f"killing {stuck}, still running after {self.command.grace:g} s")
                    self._kill()
                    self.deadline = None
        finally:
            self._kill()
            self.forwarder.group = None
            os.close(self.write_end)
        for reader in self.readers:
            reader.join(timeout=5)
        return self.code

    def _handle_exit(self, number: int, code: int) -> None:
        del self.running[number]
        if code:
            how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
            _log(f"process {number} ended with {how}")
            self.code = self.code or (code if code > 0 else 128 - code)
        if not self.running or self.deadline is not None:
            return
        if code and not self.forwarder.signals:
            _log(f"stopping {_format_processes(self.running)}")
            self.send(signal.SIGTERM)
        if code or self.forwarder.signals:  # processes that stop together should also end together
            self.deadline = time.monotonic() + self.command.grace

    def send(self, number: int) -> None:
        """Send a signal to the processes; each is responsible for its own workers."""
        for process in list(self.running.values()):
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)
                    os.kill(process.pid, signal.SIGCONT)  # a stopped process would never handle it

    def _kill(self) -> None:
        for process in list(self.running.values()):
            _signal_group(process.pid, signal.SIGKILL)


def _start_thread(target: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def _seconds_left(deadline: float) -> float:
    """Seconds until a deadline; at most half of TIMEOUT_MAX, because a queue adds the current time to it."""
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX / 2)


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for a group of zombies
        os.killpg(pid, number)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


_printing = threading.Lock()


def _copy_lines(source: IO[bytes], target: IO[str], prefix: str) -> None:
    """Copy lines as they arrive, with bytes that are not UTF-8 escaped."""
    with source:
        for line in source:
            text = line.decode("utf-8", "backslashreplace").rstrip("\n")
            stream = sys.stderr if text.startswith("[Gloo] ") else target  # stdout is for data
            with _printing, suppress(BrokenPipeError, ValueError):
                stream.write(f"{prefix}{text}\n")
                stream.flush()


def _format_processes(running: dict[int, subprocess.Popen[bytes]]) -> str:
    return ("process " if len(running) == 1 else "processes ") + ", ".join(map(str, sorted(running)))


def _log(text: str) -> None:
    with _printing:
        print(f"weft launch: {text}", file=sys.stderr, flush=True)
