"""Several processes: how they find each other, compute as one, stop together, and leave nothing behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import jax
import process_cases
import pytest
from tiers import slow

import weft as wf
from weft import checkpoint, nn
from weft.cli.main import main
from weft.distributed import rendezvous

TESTS = Path(__file__).parents[1]
LATEST = 100  # seconds after which a process is killed, with SIGKILL


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def start(count, *arguments):
    """That many processes of process_cases.py."""
    address = f"127.0.0.1:{free_port()}"
    variables = {
        "WEFT_COORDINATOR": address,
        "WEFT_PROCESSES": str(count),
        "JAX_COORDINATOR_BIND_ADDRESS": address,
    }
    command = [sys.executable, str(TESTS / "support" / "process_cases.py"), *map(str, arguments)]
    return [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | variables | {"WEFT_PROCESS": str(n), "JAX_PLATFORMS": "cpu"},
        )
        for n in range(count)
    ]


def finish(processes, within=LATEST):
    """The output and exit codes of the processes, which are killed if they take too long."""
    end, found = time.monotonic() + within, []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(1, end - time.monotonic()))
            lines = [line for line in out.splitlines() if not line.startswith("[Gloo]")]
            found.append((lines, process.returncode, err))
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return found


def outputs(processes):
    """The lines that all processes printed."""
    found = finish(processes)
    for _, code, err in found:
        assert code == 0, err[-3000:]
    assert all(lines == found[0][0] for lines, _, _ in found), found
    return found[0][0]


# -- one program over several processes --------------------------------------------------------------


def in_one_process(folder):
    """The digest of a checkpoint that is restored here, and of the step that is made here."""
    like = nn.specs(process_cases.small())
    _, model, state, _ = checkpoint.CheckpointManager(folder).restore(
        like, process_cases.OPTIMIZER.init(like)
    )
    return process_cases.digest((model, state))


def test_two_processes(tmp_path):
    loss, digest, stopped = outputs(start(2, "all", tmp_path))
    ours, model, state = process_cases.stepped(wf.Mesh("data=2"))
    assert float.fromhex(loss) == ours  # sums of two terms: no order to differ in
    assert process_cases.digest((model, state)) == digest == in_one_process(tmp_path)
    step, reason = stopped.split()
    assert reason == "SIGTERM" and 70 <= int(step) < 1999


@pytest.mark.slow
def test_four_processes_and_back_on_two(tmp_path):
    loss, digest = outputs(start(4, "save", tmp_path))
    ours, _, _ = process_cases.stepped(wf.Mesh("data=4"))
    assert abs(float.fromhex(loss) - ours) <= 1e-6 * ours
    assert in_one_process(tmp_path) == digest
    assert outputs(start(2, "restore", tmp_path)) == [digest]
    assert outputs(start(4, "restore", tmp_path)) == [digest]


@pytest.mark.slow
def test_two_processes_write_one_hugging_face_folder(tmp_path):
    saved, loaded = outputs(start(2, "export", tmp_path / "model"))
    assert saved == loaded
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_four_processes_stop_at_one_step(name):
    (stopped,) = outputs(start(4, "stop", name))
    assert stopped.split()[1] == name and 70 <= int(stopped.split()[0]) < 1999


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["die", "fail"])
def test_when_one_ends_the_others_do(how, victim):
    processes = start(3, how, victim)
    processes[victim].wait(timeout=LATEST)
    dead = time.monotonic()
    found = finish(processes)
    assert time.monotonic() - dead < 30
    for n, (lines, code, _) in enumerate(found):
        assert lines == ["running"] and code != 0
        if n == victim:
            assert code == (-signal.SIGKILL if how == "die" else 1)


# -- stopping ----------------------------------------------------------------------------------------


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_stop_in_one_process(number):
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    with rendezvous.Stop() as stop:
        assert not stop.requested and not stop.reason
        os.kill(os.getpid(), number)
        wait_for(lambda: stop.reason)
        assert stop.requested and stop.requested and stop.reason == number.name
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == before
    assert not [t for t in threading.enumerate() if t.name == "weft stop"]


INTERRUPTED = """
import hashlib, os, signal, threading, time
from weft import distributed

with distributed.Stop() as stop:
    ready, begun = os.pipe()
    worker = os.fork()
    if not worker:
        os.write(begun, b".")
        time.sleep(60)
    os.read(ready, 1)
    os.kill(worker, signal.SIGTERM)
    print(os.WTERMSIG(os.waitpid(worker, 0)[1]), stop.requested, flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    while not stop.reason:
        time.sleep(0.01)
    print(stop.requested, flush=True)
    # In a line of C, as a long step is: handlers in Python would have to wait for its end.
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


def test_workers_end_and_a_second_interrupt_ends_at_once():
    command = [sys.executable, "-W", "ignore", "-c", INTERRUPTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split("\n")) == (130, ["15 False", "True", ""]), done.stderr


# -- joining -----------------------------------------------------------------------------------------


def test_one_process_joins_nothing(monkeypatch):
    for name in (rendezvous.COORDINATOR_VARIABLE, rendezvous.PROCESSES_VARIABLE, rendezvous.PROCESS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    rendezvous.join()
    assert not jax.distributed.is_initialized() and not rendezvous.is_multiprocess()


MISTAKES = {
    "missing": ("10.0.0.1:1234", None, None),
    "no_port": ("10.0.0.1", 4, 0),
    "out_of_range": ("10.0.0.1:1234", 4, 4),
    "not_a_number": ("10.0.0.1:1234", "four", -1),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_joining(name, monkeypatch, golden):
    monkeypatch.delenv(rendezvous.PROCESS_VARIABLE, raising=False)
    with pytest.raises(rendezvous.DistributedError) as error:
        rendezvous.join(*MISTAKES[name])
    error.value.where = ""
    golden(name, str(error.value), "messages/hosts")


def test_a_coordinator_that_is_not_there(golden):
    with pytest.raises(rendezvous.DistributedError) as error:
        rendezvous._await_coordinator(rendezvous.ProcessInfo(f"127.0.0.1:{free_port()}", 4, 1), timeout=0.3)
    golden("not_there", re.sub(r"127.0.0.1:\d+", "10.0.0.1:1234", str(error.value)), "messages/hosts")


def test_joining_too_late(golden):
    jax.devices()
    with pytest.raises(rendezvous.DistributedError) as error:
        rendezvous.join("127.0.0.1:1234", 2, 0)
    error.value.where = ""
    golden("too_late", str(error.value), "messages/hosts")


def test_clusters_that_jax_knows(monkeypatch):
    assert rendezvous.detect_cluster() is None
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")  # any pod has this
    assert rendezvous.detect_cluster() is None
    slurm = {"JOB_ID": "7", "STEP_NODELIST": "node[001-004]", "NTASKS": "4", "PROCID": "2", "LOCALID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert rendezvous.detect_cluster() == "SlurmCluster"
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert rendezvous.detect_cluster() is None


# -- weft launch -------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time
from pathlib import Path

folder, me = Path(__file__).parent, os.environ["WEFT_PROCESS"]
print("über", me, os.environ["WEFT_PROCESSES"], os.environ["WEFT_DEVICES"])
print("log", me, file=sys.stderr)


def example():
    import weft as wf

    return (lambda x: x + x), (wf.spec("a=4"),)


def fails():
    tries = folder / f"tries{me}"
    tries.write_text(tries.read_text() + "." if tries.exists() else ".")
    if me == "1":
        os._exit(7)
    time.sleep(60)


def waits():
    signal.signal(signal.SIGTERM, lambda *_: os._exit(5 if me == "1" else 0))
    worker = os.fork()
    if worker == 0:
        time.sleep(60)
    (folder / f"draft{me}").write_text(f"{os.getpid()} {worker}")
    (folder / f"draft{me}").rename(folder / f"pids{me}")
    time.sleep(60)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return lambda name: ["plan", f"{path}:{name}", "--mesh", "a=1", "--layout", ""]


def test_lines_come_with_their_process(program, capsys):
    assert main(["launch", "-n", "2", "--devices-per-process", "3", "--", *program("example")]) == 0
    out, err = capsys.readouterr()
    for n in (0, 1):
        own = [line for line in out.splitlines() if line.startswith(f"[{n}] ")]
        assert own[0] == f"[{n}] über {n} 2 3" and f"[{n}] no collectives" in own
        assert f"[{n}] log {n}" in err.splitlines()
    assert all(line.startswith(("[0] ", "[1] ")) for line in out.splitlines())


def test_all_are_started_again_when_one_fails(program, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["launch", "-n", "2", "--restarts", "1", "--", *program("fails")])
    assert ended.value.code == 7
    assert (tmp_path / "tries1").read_text() == ".."
    log = [line for line in capsys.readouterr().err.splitlines() if line.startswith("weft launch")]
    once = [
        "process 1 ended with exit code 7",
        "stopping process 0",
        "process 0 ended with signal SIGTERM",
    ]
    assert log == [f"weft launch: {line}" for line in [*once, "restarting all processes (1 of 1)", *once]]


def test_any_number_of_seconds_can_be_waited_for(program, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["launch", "-n", "2", "--grace", "1e12", "--", *program("fails")])
    assert ended.value.code == 7 and "process 0 ended with signal SIGTERM" in capsys.readouterr().err


def alive(pid):
    """Whether a process runs; one that is dead and not yet buried does not."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")
@pytest.mark.parametrize(
    ("number", "frozen"),
    [(signal.SIGTERM, False), slow(signal.SIGTERM, True), (signal.SIGKILL, False)],
    ids=["SIGTERM", "SIGTERM-frozen", "SIGKILL"],
)
def test_nothing_is_left_behind(program, tmp_path, number, frozen):
    command = [sys.executable, "-m", "weft.cli.main", "launch", "-n", "2", "--", *program("waits")]
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    files, pids = [tmp_path / f"pids{n}" for n in (0, 1)], []
    try:
        wait_for(lambda: all(file.exists() for file in files), LATEST)
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        assert all(map(alive, pids))
        if frozen:
            os.kill(pids[0], signal.SIGSTOP)
        launcher.send_signal(number)
        assert launcher.wait(timeout=30) == (5 if number == signal.SIGTERM else -9)  # the first failing one's
        wait_for(lambda: not any(map(alive, pids)))
    finally:
        for pid in [launcher.pid, *pids]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


USAGE = {
    "no_process": ["-n", "0", "--restarts", "-1", "--", "models"],
    "no_command": ["-n", "2"],
    "no_such_command": ["-n", "2", "--", "modles", "list"],
    "launch_in_launch": ["-n", "2", "--", "launch", "-n", "2", "--", "models"],
}


@pytest.mark.parametrize("name", USAGE)
def test_mistakes_in_usage(name, capsys, golden):
    assert main(["launch", *USAGE[name]]) == 2
    out, err = capsys.readouterr()
    assert not out
    golden(name, re.sub("(the commands are).*", r"\1 …", err), "messages/launch")
