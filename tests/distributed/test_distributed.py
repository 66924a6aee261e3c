"""Two hosts with their own addresses, names and disks: what works, what raises, and that every wait ends."""

import os
import re
import signal
import subprocess
import sys
import time

import process_cases
import pytest
from namespaces import NAMES, TESTS, two_hosts

import weft as wf
from weft import checkpoint
from weft.distributed import gloo

LATEST = 100  # seconds after which a process is killed, with SIGKILL
SEVERAL = TESTS / "support" / "process_cases.py"
HEARTBEAT = 20  # seconds


def finish(processes, within=LATEST):
    """The output and exit code of each process; those still running after `within` seconds are killed."""
    end, found = time.monotonic() + within, []
    for process in processes:
        try:
            out, err = process.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate(timeout=20)
            pytest.fail(f"process {len(found)} hangs: {out[-2000:]} {err[-2000:]}")
        lines = [line for line in out.splitlines() if not line.startswith("[Gloo]")]
        found.append((lines, process.returncode, err))
    return found


def until(process, line):
    """Read the output of a process up to a line."""
    while found := process.stdout.readline():
        if found.rstrip("\n") == line:
            return
    pytest.fail(f"no {line!r}: {process.communicate(timeout=20)[1][-2000:]}")


@pytest.mark.parametrize(
    ("own", "others", "address"),
    [
        ("10.0.0.2", ["127.0.0.1", "10.0.0.2"], "10.0.0.2"),
        ("127.0.0.1", ["127.0.0.1", "127.0.0.1"], "127.0.0.1"),  # all on one machine
        ("127.0.0.1", ["127.0.0.1", "::1", ""], "127.0.0.1"),
        (
            "127.0.1.1",
            ["127.0.1.1", "127.0.0.1", "192.0.2.7"],
            "to 192.0.2.7",
        ),  # two processes on process 0's host
        ("", ["", "2001:db8::7"], "to 2001:db8::7"),
    ],
)
def test_the_address_that_others_reach(own, others, address, monkeypatch):
    monkeypatch.setattr(gloo, "_address_towards", lambda host: f"to {host}")
    assert gloo.choose_address(own, others) == address


@pytest.mark.slow
def test_a_name_that_resolves_to_loopback(tmp_path):
    """As on Debian and Ubuntu, where a host's own name is 127.0.1.1; the coordinator's is such a name too."""
    with two_hosts(tmp_path) as hosts:
        found = finish(
            [host.start(SEVERAL, "save", tmp_path / "run", coordinator=NAMES[0]) for host in hosts]
        )
    for lines, code, err in found:
        assert code == 0, err[-3000:]
        assert float.fromhex(lines[0]) == process_cases.stepped(wf.Mesh("data=2"))[0]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step_1"]  # nothing else is left there


def own_disks(hosts, folder):
    """A path that is another folder on each host."""
    (folder / "runs").mkdir()
    for host in hosts:
        (folder / f"disk{host.number}").mkdir()
        host.mount(folder / f"disk{host.number}", folder / "runs")
    return folder / "runs"


TRAIN = [
    "-m",
    "weft.cli.main",
    "train",
    "lm",
    "--mesh",
    "data=2",
    "--layout",
    "batch:data",
    "--data.rows",
    "4",
]


@pytest.mark.slow
def test_disks_that_are_not_shared(tmp_path, golden):
    with two_hosts(tmp_path) as hosts:
        runs = own_disks(hosts, tmp_path)
        found = finish([host.start(*TRAIN, "--folder", runs / "lm") for host in hosts])
    for lines, code, err in found:
        assert (lines, code) == ([], 2), err[-3000:]
        message = err[err.index("DistributedError") :]
        message = re.split(r"^[EF]\d{4} ", message, flags=re.MULTILINE)[
            0
        ]  # JAX's log, if the other left first
        golden("not_shared", message.replace(str(runs), "/runs"), "messages/hosts")
    assert not list(tmp_path.glob("disk*/*"))  # no step, and nothing is left behind


@pytest.mark.slow
@pytest.mark.parametrize("task", ["save", "restore"])
def test_checkpoints_on_disks_that_are_not_shared(task, tmp_path):
    with two_hosts(tmp_path) as hosts:
        runs = own_disks(hosts, tmp_path)
        if task == "restore":
            _, model, state = process_cases.stepped(wf.Mesh("data=2"))
            with checkpoint.CheckpointManager(tmp_path / "disk0" / "run") as checkpoints:
                checkpoints.save(1, model, state, {"example": 6})
        found = finish([host.start(SEVERAL, task, runs / "run") for host in hosts])
    start_of_error = {
        "save": "DistributedError: the folder",
        "restore": "CheckpointError: process 0 restores",
    }[task]
    for _, code, err in found:
        assert code == 1 and f"{start_of_error} {runs / 'run'}" in err and "weft-b" in err, err[-3000:]


# -- waits that end ----------------------------------------------------------------------------------


def trains(hosts, folder, *more):
    """`weft train` on both hosts, in the middle of its steps."""
    processes = [
        host.start(*TRAIN, "--folder", folder, "--steps", "100000", "--save.every", "50", *more)
        for host in hosts
    ]
    end = time.monotonic() + LATEST
    while not list(folder.glob("checkpoints/step_*")):
        assert time.monotonic() < end and all(process.poll() is None for process in processes)
        time.sleep(0.1)
    return processes


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
def test_a_host_that_dies_or_freezes_ends_the_other(number, victim, tmp_path):
    with two_hosts(tmp_path) as hosts:
        processes = trains(hosts, tmp_path / "run")
        processes[victim].send_signal(number)
        ((_, code, err),) = finish([processes[1 - victim]], within=2 * HEARTBEAT)
        assert code != 0 and err


@pytest.mark.slow
def test_a_cable_that_is_cut_ends_both(tmp_path):
    with two_hosts(tmp_path) as hosts:
        processes = trains(hosts, tmp_path / "run")
        hosts[0].run("ip", "link", "set", "cable", "down")
        for _, code, err in finish(processes, within=3 * HEARTBEAT):
            assert code != 0 and err


@pytest.mark.slow
def test_sigterm_on_one_host_stops_and_saves_on_both(tmp_path):
    with two_hosts(tmp_path) as hosts:
        processes = trains(hosts, tmp_path / "run")
        processes[1].send_signal(signal.SIGTERM)
        for _, code, err in finish(processes):
            assert code == 1 and (step := re.search(r"stopped by SIGTERM after step (\d+) of", err)), err
        assert (tmp_path / "run" / "checkpoints" / f"step_{step[1]}").is_dir()


# Where one process hangs, which one waits, and for what.
STUCK = {
    "step": (0, "step 2"),
    "write": (0, "the checkpoint of step 2"),
    "seal": (1, ""),  # of the first process's seal, in a thread, and of the thread
}


def one_hangs(hosts, where, folder, **environment):
    """Start both processes, and return when one hangs and the other waits for it."""
    processes = [host.start(SEVERAL, "stuck", f"{where}@{folder}", **environment) for host in hosts]
    waits = STUCK[where][0]
    until(processes[waits], "step 1" if where == "step" else "step 2")
    return processes[waits], processes[1 - waits]


@pytest.mark.slow
@pytest.mark.parametrize("where", STUCK)
def test_sigterm_while_waiting_for_another(where, tmp_path):
    """The other is alive and never comes; both end within the grace of 4 s."""
    with two_hosts(tmp_path) as hosts:
        processes = one_hangs(hosts, where, tmp_path / "run")
        time.sleep(1)
        processes[0].send_signal(signal.SIGTERM)
        begun = time.monotonic()
        for _, code, err in finish(processes, within=15):
            assert code == 1 and "could not stop within 4 s of SIGTERM" in err, err[-3000:]
        assert time.monotonic() - begun > 3


@pytest.mark.slow
@pytest.mark.parametrize("where", STUCK)
def test_a_wait_for_another_ends(where, tmp_path):
    """The other process is alive but never arrives, and no signal is sent."""
    waits, what = STUCK[where]
    with two_hosts(tmp_path) as hosts:
        waiting, hanging = one_hangs(hosts, where, tmp_path / "run", WAIT=5)
        ((_, code, err),) = finish([waiting], within=20)
        assert (
            code == 1 and f"PeerTimeoutError: process {waits} of 2 waited 5 s for the others: {what}" in err
        ), err
        ((_, code, _),) = finish([hanging], within=2 * HEARTBEAT)  # the other one is gone
        assert code != 0


@pytest.mark.slow
def test_a_host_that_is_never_started(tmp_path):
    with two_hosts(tmp_path) as hosts:
        start = "from weft import distributed; distributed.join(timeout=3)"
        for host in hosts:
            begun = time.monotonic()
            ((_, code, err),) = finish([host.start("-c", start)], within=40)
            assert code == 1 and "within 3 s" in err and time.monotonic() - begun < 30


GRACE = """
import hashlib, os, signal
from weft import distributed

with distributed.Stop(grace=0.5):
    os.kill(os.getpid(), signal.SIGTERM)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # in C, as a long step is
"""


def test_sigterm_ends_a_process_that_can_not_stop(golden):
    done = subprocess.run([sys.executable, "-c", GRACE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    golden("could_not_stop", done.stderr, "messages/hosts")
