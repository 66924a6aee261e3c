"""`weft launch`: one command in several processes on this machine, which live and die together.

Each process is in a session of its own and watches a pipe that only the launcher holds open (`launched.py`):
when the launcher is gone, however it went, the pipe ends, and the process ends its group, workers included.
Linux's PR_SET_PDEATHSIG would reach only the process itself, and is not on other systems.
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
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO, Annotated

from tyro.conf import Positional, arg

from ..core.errors import nearest
from .launch_child import PIPE_VARIABLE
from .targets import UsageError

USAGE_ERROR = 2  # the exit code of a mistake in what was asked: it will not go better next time
EXAMPLE = "for example weft launch -n 4 -- train config.toml"


@dataclass
class LaunchCommand:
    """Run a command in several processes on this machine, as if each were a host.

        weft launch -n 4 -- train config.toml

    The processes find each other through a port that is free. What they print comes line by line, with the
    number of the process before it. When one fails, the others are stopped. SIGINT and SIGTERM are passed on
    to all. The exit code is that of the process that failed first.

    For many machines see the page "Many hosts"; there a cluster's own launcher starts the processes."""

    command: Annotated[Positional[tuple[str, ...]], arg(metavar="COMMAND ...")] = ()
    """A weft command and its arguments, after --."""
    processes: Annotated[int, arg(aliases=["-n"], metavar="N")] = 1
    """How many processes."""
    restarts: Annotated[int, arg(metavar="N")] = 0
    """How often all are started again after one has failed; the command goes on from its last checkpoint."""
    devices_per_process: Annotated[int, arg(metavar="K")] = 1
    """How many devices each process has: virtual ones on a CPU, the next K on GPUs."""
    grace: Annotated[float, arg(metavar="SECONDS")] = 10.0
    """How long a process may take to stop after another one failed or stopped, before it is killed."""

    def run(self) -> None:
        """Start, watch, and start again; leaves with the processes' exit code."""
        self._check()
        stopping = SignalForwarder()
        handlers = {one: signal.signal(one, stopping) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            for again in range(self.restarts + 1):
                group = ProcessGroup(self, stopping)
                code = group.wait()
                if code == 0 or stopping.signals or code == USAGE_ERROR or again == self.restarts:
                    break
                _log(f"starting all again ({again + 1} of {self.restarts})")
        finally:
            for one, handler in handlers.items():
                signal.signal(one, handler)
        if code:
            sys.stdout.flush()
            raise SystemExit(code)

    def _check(self) -> None:
        counts = {"-n": self.processes, "--devices-per-process": self.devices_per_process}
        wrong = [f"{flag} {count}" for flag, count in counts.items() if count < 1]
        wrong += [f"--restarts {self.restarts}"] if self.restarts < 0 else []
        wrong += [f"--grace {self.grace:g}"] if not self.grace >= 0 else []
        if wrong:
            raise UsageError(
                ", ".join(wrong),
                rule="there is at least 1 process with 1 device; restarts and seconds are not below 0",
                hint=EXAMPLE,
            )
        if not self.command:
            raise UsageError(
                "no command to run",
                rule="what is to be run in each process comes after --",
                hint=EXAMPLE,
            )
        from .dispatch import COMMANDS

        name = self.command[0]
        if name not in COMMANDS:
            raise UsageError(
                f"there is no command {name!r}{nearest(name, COMMANDS)}",
                f"commands of weft: {', '.join(COMMANDS)}",
                hint=EXAMPLE,
            )
        if name == "launch":
            raise UsageError(
                "weft launch in weft launch",
                rule="the processes of the inner one would not find those of the others",
                hint="give -n the number of all processes",
            )


class SignalForwarder:
    """A handler that remembers signals, and passes them on to the processes that run."""

    def __init__(self) -> None:
        self.signals: list[int] = []
        self.group: ProcessGroup | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        if self.group is not None:
            self.group.send(number)


class ProcessGroup:
    """The processes of one start."""

    def __init__(self, asked: LaunchCommand, stopping: SignalForwarder):
        self.asked, self.stopping = asked, stopping
        self.ended: queue.Queue[tuple[int, int]] = queue.Queue()
        self.readers: list[threading.Thread] = []
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.code = 0
        self.deadline: float | None = None
        self.pipe, self.held = os.pipe()  # processes have the one end, the other is held here
        coordinator = f"127.0.0.1:{_free_port()}"
        try:
            for number in range(asked.processes):
                self._start(number, coordinator)
        except BaseException:
            self._kill()
            raise
        finally:
            os.close(self.pipe)
        stopping.group = self
        for number in stopping.signals:  # it came while they were started
            self.send(number)

    def _start(self, number: int, coordinator: str) -> None:
        devices = self.asked.devices_per_process
        own = range(number * devices, (number + 1) * devices)
        environment = os.environ | {
            "WEFT_COORDINATOR": coordinator,
            "WEFT_PROCESSES": str(self.asked.processes),
            "WEFT_PROCESS": str(number),
            "WEFT_DEVICES": str(devices),
            PIPE_VARIABLE: str(self.pipe),
            "JAX_COORDINATOR_BIND_ADDRESS": coordinator,  # not for other machines
            "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, own)),
            "PYTHONUNBUFFERED": "1",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "weft.cli.launch_child", *self.asked.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=[self.pipe],
            start_new_session=True,
        )
        self.running[number] = process
        assert process.stdout is not None and process.stderr is not None
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            self._thread(_copy_lines, source, target, f"[{number}] ")
        self._thread(self._await, number, process, keep=False)

    def _thread(self, target: object, *args: object, keep: bool = True) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        thread.start()
        if keep:
            self.readers.append(thread)

    def _await(self, number: int, process: subprocess.Popen[bytes]) -> None:
        # Its number stays taken until `wait`: the group to be cleared is its own and no new one's.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        _signal_group(process.pid, signal.SIGKILL)
        self.ended.put((number, process.wait()))

    def wait(self) -> int:
        """Wait until all have ended; the exit code of the first that failed."""
        try:
            while self.running:
                left = None if self.deadline is None else _left(self.deadline)
                try:
                    self._note(*self.ended.get(timeout=left))
                except queue.Empty:
                    _log(f"killing {_named(self.running)}, still there after {self.asked.grace:g} s")
                    self._kill()
                    self.deadline = None
        finally:
            self._kill()
            self.stopping.group = None
            os.close(self.held)
        for reader in self.readers:
            reader.join(timeout=5)
        return self.code

    def _note(self, number: int, code: int) -> None:
        del self.running[number]
        if code:
            how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
            _log(f"process {number} ended with {how}")
            self.code = self.code or (code if code > 0 else 128 - code)
        if not self.running or self.deadline is not None:
            return
        if code and not self.stopping.signals:
            _log(f"stopping {_named(self.running)}")
            self.send(signal.SIGTERM)
        if code or self.stopping.signals:  # processes that stop together end together
            self.deadline = time.monotonic() + self.asked.grace

    def send(self, number: int) -> None:
        """Send a signal to the processes; it is theirs to tell their own workers."""
        for process in list(self.running.values()):
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)
                    os.kill(process.pid, signal.SIGCONT)  # one that is frozen would never notice

    def _kill(self) -> None:
        for process in list(self.running.values()):
            _signal_group(process.pid, signal.SIGKILL)


def _left(deadline: float) -> float:
    """Seconds until then, as many as can be waited for: a queue does sums with them."""
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX / 2)


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of the dead
        os.killpg(pid, number)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


_printing = threading.Lock()


def _copy_lines(source: IO[bytes], target: IO[str], before: str) -> None:
    """Copy lines as they come; bytes that are no text are shown as such."""
    with source:
        for line in source:
            text = line.decode("utf-8", "backslashreplace").rstrip("\n")
            stream = sys.stderr if text.startswith("[Gloo] ") else target  # stdout is for data
            with _printing, suppress(BrokenPipeError, ValueError):
                stream.write(f"{before}{text}\n")
                stream.flush()


def _named(running: dict[int, subprocess.Popen[bytes]]) -> str:
    return ("process " if len(running) == 1 else "processes ") + ", ".join(map(str, sorted(running)))


def _log(text: str) -> None:
    with _printing:
        print(f"weft launch: {text}", file=sys.stderr, flush=True)
