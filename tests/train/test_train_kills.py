"""Longer runs of `weft train`, in separate processes that are killed or run out of disk."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from trained_runs import (
    CLOSE,
    MESHES,
    assert_same_runs,
    assert_similar_runs,
    curve,
    limited,
    lines,
    saved,
    wait_for,
)

from weft import checkpoint, data
from weft.train import run_folder

LATEST = 400  # seconds after which a process is killed, with SIGKILL
LONG = 50
RESTARTED = 30  # seconds in which the others stop when one process is killed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A file of generated phrases in two languages."""
    path = tmp_path_factory.mktemp("pairs") / "phrases.tsv"
    some = data.Phrases(2000)
    path.write_text("".join(f"{a}\t{b}\n" for a, b in (some[n] for n in range(len(some)))), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The environment of all processes, which share a compilation cache."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


@pytest.fixture(scope="module")
def arguments(pairs):
    """`arguments(folder, place)` are those of a run that trains a small translation model."""

    def make(folder, place="one", steps=LONG, every=20, keep=3):
        mesh, rules, params = MESHES[place]
        sizes = {"d_model": 16, "d_ff": 32, "heads": 4, "d_kv": 4, "layers": 1, "dropout": 0.1}
        flags = {f"model.{name}": size for name, size in sizes.items()} | {
            "folder": folder,
            "steps": steps,
            "data.kind": "tsv",
            "data.train": pairs,
            "data.rows": 8,
            "data.length": 32,
            "optimizer.schedule": "constant",
            "optimizer.warmup": 10,
            "optimizer.rate": 0.003,
            "optimizer.average": 0.9,
            "layout.mesh": mesh,
            "layout.rules": rules,
            "layout.params": params,
            "save.every": every,
            "save.keep": keep,
        }
        return ["train", "translate", *(f"--{name.replace('_', '-')}={x}" for name, x in flags.items())]

    return make


def weft(*arguments):
    return [sys.executable, "-m", "weft.cli.main", *map(str, arguments)]


@pytest.fixture(scope="module")
def long(folder, arguments, environment):
    """`long(place)` is the folder of an uninterrupted run in a new process; "four" runs in four processes."""

    def run(place, steps=LONG):
        there = folder / f"{place}-{steps}"
        if not there.exists():
            before = ["launch", "-n", "4", "--"] if place == "four" else []
            done = subprocess.run(
                weft(*before, *arguments(there, place, steps)),
                env=environment,
                capture_output=True,
                text=True,
                timeout=LATEST,
            )
            assert done.returncode == 0, done.stderr[-3000:]
        return there

    return run


@pytest.mark.slow
@pytest.mark.timeout(2 * LATEST)
@pytest.mark.parametrize("place", ["data", "model", "zero", "four"])
def test_fifty_steps_on_every_mesh(long, place):
    losses = curve(long("one"))
    assert len(losses) == LONG and losses[-1] < 0.8 * losses[0]
    ours = curve(long(place))
    print(f"{place}: off by {max(abs(np.array(ours) / losses - 1)):.1e}")
    np.testing.assert_allclose(ours, losses, rtol=CLOSE)


def start(arguments, environment, log):
    return subprocess.Popen(
        weft(*arguments), env=environment, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
    )


def kill(process):
    """End a process and its own children; it leads a session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)


def last_step(folder):
    """The last step in the journal, which a process is writing."""
    with suppress(FileNotFoundError):
        found = (folder / run_folder.METRICS_FILE).read_text().rpartition("\n")[0].splitlines()
        return max((json.loads(line)["step"] for line in found), default=0)
    return 0


def is_saving(folder):
    return any(p.name.startswith(".writing-") for p in (folder / "checkpoints").glob(".*"))


def made(folder):
    """Which file the journal is: a start makes a new one, of what its checkpoint has."""
    path = folder / run_folder.METRICS_FILE
    return path.stat().st_ino if path.exists() else None


def killed(process, folder, before, draw):
    """Kill a process at some moment; whether a checkpoint was being written, or None: it ended before."""
    end = time.monotonic() + LATEST

    def wait_until(condition):
        while process.poll() is None and not condition() and time.monotonic() < end:
            time.sleep(0.001)

    kind, more = draw.choice(["start", "step", "step", "save", "save", "save"]), draw.randrange(3, 6)
    if kind == "start":
        moment = time.monotonic() + draw.uniform(0, 15)
        wait_until(lambda: time.monotonic() > moment or made(folder) not in (before, None))
    else:
        wait_until(lambda: made(folder) not in (before, None))
        first = lines(folder / run_folder.METRICS_FILE)
        # After three steps one was saved, and what the last crash has left is gone.
        wait_until(lambda: lines(folder / run_folder.METRICS_FILE) >= first + more)
        time.sleep(draw.uniform(0, 0.3))
    if kind == "save":
        wait_until(lambda: is_saving(folder))
        time.sleep(draw.uniform(0, 0.03))
    if process.poll() is not None:
        return None
    kill(process)
    return kind != "start" and is_saving(folder)


def killed_and_started_again(folder, places, times, arguments, environment, steps):
    """Kill and restart a run until it is done; return how often a checkpoint was being written at a kill."""
    draw, saving = random.Random(times), []
    path = folder.with_suffix(".log")
    for number in range(times + 1):
        before, given = made(folder), arguments(folder, places[number % len(places)], steps, every=2)
        with path.open("w") as log:
            process = start(given, environment, log)
        try:
            if number < times:
                saving.append(killed(process, folder, before, draw))
                assert saving[-1] is not None, f"it ended after {number} times: {path.read_text()[-3000:]}"
            else:
                assert process.wait(timeout=LATEST) == 0, path.read_text()[-3000:]
        finally:
            kill(process)
    return sum(saving)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_twenty_times(long, tmp_path, arguments, environment):
    steps = 200
    saving = killed_and_started_again(tmp_path / "run", ["both"], 20, arguments, environment, steps)
    print(f"killed 20 times, {saving} of them while a checkpoint was being written")
    assert saving >= 5
    assert len(curve(tmp_path / "run")) == steps
    assert_same_runs(tmp_path / "run", long("both", steps))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_and_gone_on_on_other_meshes(long, tmp_path, arguments, environment):
    places = ["one", "both", "zero", "data"]
    killed_and_started_again(tmp_path / "run", places, 7, arguments, environment, LONG)
    off = max(abs(np.array(curve(tmp_path / "run")) / curve(long("one")) - 1))
    print(f"off by {off:.1e}")
    assert_similar_runs(tmp_path / "run", long("one"))


@pytest.mark.slow
@pytest.mark.timeout(2 * LATEST)
def test_a_full_disk(long, tmp_path, arguments, environment):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk can't be mounted here")
    try:
        command = weft(*arguments(disk / "run", "one", every=2, keep=1000))
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LATEST)
        print(done.stderr)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert re.search("^(Checkpoint|RunFolder)Error: .* could not be written to", done.stderr, re.M)
        assert "system error: No space left on device" in done.stderr
        there = saved(disk / "run")
        assert there == list(range(2, there[-1] + 1, 2)) and there[-1] < LONG
        checkpoints = checkpoint.CheckpointManager(disk / "run" / "checkpoints")
        assert checkpoints.steps() == there and checkpoints._find_intact(there[-1])
        subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True, timeout=60)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LATEST)
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"resumes after step {there[-1]} " in done.stderr
        assert_same_runs(disk / "run", long("one"))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(2 * LATEST)
def test_writing_fails_half_way(long, tmp_path, arguments, environment):
    def run(steps):
        command = weft(*arguments(tmp_path / "run", "one", steps))
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LATEST)

    assert run(4).returncode == 0
    with limited(50_000):
        failed = run(LONG)  # which inherits the limit
    print(failed.stderr)
    assert failed.returncode == 1
    assert "CheckpointError: the checkpoint of step 20 could not be written" in failed.stderr
    assert len(curve(tmp_path / "run")) < 40  # it is reported before the next one is due
    assert "File too large" in failed.stderr and "the newest checkpoint is that of step 4" in failed.stderr
    assert saved(tmp_path / "run") == [4]
    assert run(LONG).returncode == 0
    assert_same_runs(tmp_path / "run", long("one"))


def children(pid):
    """The processes that a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state not in "ZX":
                found.append(int(path.parent.name))
    return sorted(found)


@pytest.mark.slow
@pytest.mark.timeout(3 * LATEST)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")
@pytest.mark.parametrize("victim", [0, 2])
def test_one_of_four_processes_is_killed(long, tmp_path, arguments, environment, victim):
    there = tmp_path / "run"
    launched = ["launch", "-n", "4", "--restarts", "2", "--", *arguments(there, "four", every=5)]
    with (tmp_path / "log").open("w+") as log:
        process = start(launched, environment, log)
        try:
            wait_for(lambda: last_step(there) >= 12, LATEST)
            four = children(process.pid)
            assert len(four) == 4
            os.kill(four[victim], signal.SIGKILL)
            dead = time.monotonic()
            wait_for(lambda: not set(children(process.pid)) & set(four))
            seconds = time.monotonic() - dead
            assert process.wait(timeout=LATEST) == 0
        finally:
            kill(process)
            log.seek(0)
            output = log.read()
            print(output[-3000:])
    print(f"the others had stopped after {seconds:.1f} s")
    assert seconds < RESTARTED
    assert f"process {victim} ended with signal SIGKILL" in output and "starting all again (1 of 2)" in output
    assert "resumes after step " in output
    assert_same_runs(there, long("four"))
