"""Two hosts on one machine: network namespaces with their own addresses, names and disks.

A host exists as long as a `cat` that reads from a pipe of this process. When this process ends, even if it is killed,
`cat` ends too, and the kernel removes the anonymous namespaces. So nothing is left behind.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
NAMES = ("weft-a", "weft-b")
ADDRESSES = ("10.99.0.1", "10.99.0.2")
PORT = 1234  # of the coordinator; in a new namespace every port is free


class Host:
    """One host with its own network, host name and mounts."""

    def __init__(self, number, hosts_file):
        self.number, self.processes = number, []
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            if self._holder.stdout.readline() != "\n":
                pytest.skip(f"no namespaces here: {self._holder.stderr.read().strip()}")
            self.run("hostname", NAMES[number])
            self.run("ip", "link", "set", "lo", "up")
            self.mount(hosts_file, "/etc/hosts")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self):
        """The id of the process that keeps the host alive."""
        return self._holder.pid

    def inside(self, *command):
        """The command line that runs a command on this host, without a child process."""
        return ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "--", *map(str, command)]

    def run(self, *command):
        """Run a system command; skip the test if it is not permitted."""
        done = subprocess.run(self.inside(*command), capture_output=True, text=True, timeout=20)
        if done.returncode:
            pytest.skip(f"no namespaces here: {' '.join(map(str, command))}: {done.stderr.strip()}")

    def mount(self, source, target):
        """Bind another file or folder to a path on this host."""
        self.run("mount", "--bind", source, target)

    def start(self, *command, coordinator=ADDRESSES[0], **environment):
        """Start this host's process of a Python program with one process per host."""
        settings = {
            "WEFT_COORDINATOR": f"{coordinator}:{PORT}",
            "WEFT_PROCESSES": str(len(NAMES)),
            "WEFT_PROCESS": str(self.number),
            "JAX_PLATFORMS": "cpu",
            "PYTHONUNBUFFERED": "1",
        }
        process = subprocess.Popen(
            self.inside(sys.executable, *command),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | settings | {name: str(value) for name, value in environment.items()},
        )
        self.processes.append(process)
        return process

    def close(self):
        """Kill all processes of the host, which removes it."""
        for process in [*self.processes, self._holder]:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=20)


@contextmanager
def two_hosts(folder, own_name="127.0.1.1"):
    """Two hosts with a cable between them.

    Args:
      folder: a folder for files of this test.
      own_name: the address that a host's own name resolves to on it; 127.0.1.1 on Debian and Ubuntu.
    """
    missing = [name for name in ("unshare", "nsenter", "ip", "mount") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no namespaces here: {', '.join(missing)} is not installed")
    hosts = []
    try:
        for number, name in enumerate(NAMES):
            lines = [f"{address} {other}" for address, other in zip(ADDRESSES, NAMES, strict=True)]
            lines[number] = f"{own_name} {name}"
            file = folder / f"hosts-{name}"
            file.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
            hosts.append(Host(number, file))
        first, second = hosts
        first.run(
            "ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(second.pid)
        )
        for host, address in zip(hosts, ADDRESSES, strict=True):
            host.run("ip", "address", "add", f"{address}/24", "dev", "cable")
            host.run("ip", "link", "set", "cable", "up")
        yield hosts
    finally:
        for host in hosts:
            host.close()
