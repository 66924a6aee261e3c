"""Runs of `weft train`: the same on every mesh, and nothing is lost, however they end."""

import dataclasses
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import jax
import numpy as np
import pytest

import weft as wf
from weft import data, nn, train
from weft.cli.main import main
from weft.train import config_file, journal, loop
from weft.train.checkpoint_files import CheckpointWarning, present
from weft.train.config import recipe

MODEL = "batch:data d_ff:model heads:model vocab:model"
MESHES = {
    "one": ("", "", ""),
    "data": ("data=8", "batch:data", ""),
    "model": ("data=2 model=4", MODEL, ""),
    "zero": ("data=4", "batch:data", "d_model:data"),
    "both": ("data=2 model=2", MODEL, ""),
    "four": ("data=4", "batch:data", ""),
}
STEPS = 10
CLOSE = 1e-4  # relative, at float32


# -- what a run leaves -------------------------------------------------------------------------------


def curve(folder):
    """The losses of all steps; each is there once, in order."""
    rows = [json.loads(line) for line in (folder / journal.METRICS).read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, len(losses) + 1))
    return list(losses.values())


def stored(folder):
    """All arrays of the newest checkpoint by name: parameters, the optimizer's state, the running mean."""
    run = loop.prepare(config_file.read(folder / "config.toml").replace(folder=folder))
    like = nn.specs(run.model)
    _, model, state, _ = train.Checkpoints(run.checkpoints).restore(*run.learner.init(like))
    return {name: t.numpy() for name, t in nn.parameters({"model": model, "state": state}).items()}


def assert_same(folder, other):
    """Both runs have the same curve and the same arrays, bit for bit."""
    assert curve(folder) == curve(other)
    ours, theirs = stored(folder), stored(other)
    assert ours.keys() == theirs.keys()
    assert [name for name, x in ours.items() if x.tobytes() != theirs[name].tobytes()] == []


def assert_close(folder, other):
    """Both runs have the same curve and the same parameters, but for rounding."""
    np.testing.assert_allclose(curve(folder), curve(other), rtol=CLOSE)
    ours, theirs = stored(folder), stored(other)
    assert ours.keys() == theirs.keys()
    far = {name: distance(x, theirs[name]) for name, x in ours.items() if name.startswith("model")}
    assert max(far.values()) <= CLOSE, far


def distance(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return float(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30))


def saved(folder):
    return list(present(folder / "checkpoints"))


# -- small runs in this process ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of generated phrases."""
    path = tmp_path_factory.mktemp("text") / "phrases.txt"
    pairs = data.Phrases(300)
    path.write_text("".join(f"{source}\n" for source, _ in (pairs[n] for n in range(300))), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module", autouse=True)
def staged_once():
    """Programs of the same step, mesh and layout are shared: most of a small run is compiling."""
    programs, prepare = {}, loop.prepare

    def shared(config):
        run = prepare(config)
        key = (run.learner.step, str(run.mesh), str(run.layout), run.config.model, run.config.data)
        return dataclasses.replace(run, learner=programs.setdefault(key, run.learner))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "prepare", shared)
        yield


@pytest.fixture(scope="module")
def settings(text):
    """`settings(folder, place)` are those of a small run."""

    def make(folder, place="one", steps=STEPS, micro=1, **more):
        c, (mesh, rules, params) = recipe("lm"), MESHES[place]
        small = c.model.replace(d_model=16, d_ff=32, heads=4, d_kv=4, layers=1, longest=32, dropout=0.1)
        learn = dataclasses.replace(
            c.optimizer, schedule="constant", warmup=2, average=0.9, micro=micro, rate=0.01
        )
        return c.replace(
            folder=folder,
            steps=steps,
            model=small,
            data=dataclasses.replace(c.data, kind="lines", train=(text,), rows=8, length=16),
            optimizer=learn,
            layout=dataclasses.replace(c.layout, mesh=mesh, rules=rules, params=params),
            save=dataclasses.replace(c.save, every=3, keep=2),
            **more,
        )

    return make


@pytest.fixture(scope="module")
def whole(settings, folder):
    """`whole(place)` is the folder of a run that was never stopped."""

    def run(place):
        if not (folder / place).exists():
            outcome = loop.train(settings(folder / place, place), quiet=True)
            assert (outcome.step, outcome.stopped) == (STEPS, "")
        return folder / place

    return run


@pytest.fixture
def copy(whole, tmp_path):
    """`copy(place)` is a copy of such a folder, with checkpoints of steps 9 and 10."""

    def copied(place):
        shutil.copytree(whole(place), tmp_path / place)
        assert saved(tmp_path / place) == [9, 10]
        return tmp_path / place

    return copied


def no_threads():
    names = ("prefetch", "weft stop", "weft checkpoint")
    return [t.name for t in threading.enumerate() if t.name.startswith(names)] == []


@pytest.mark.parametrize("place", ["data", "model", "zero"])
def test_the_same_curve_on_every_mesh(whole, place):
    losses = curve(whole("one"))
    assert len(losses) == STEPS and losses[-1] < losses[0]
    np.testing.assert_allclose(curve(whole(place)), losses, rtol=CLOSE)


def test_dropout_and_seed_are_in_the_curve(settings, whole, tmp_path):
    loop.train(settings(tmp_path, steps=2, seed=1), quiet=True)
    assert abs(curve(tmp_path)[1] / curve(whole("one"))[1] - 1) > 10 * CLOSE


@pytest.mark.parametrize("place", ["model", "zero"])
def test_going_on_is_never_having_stopped(settings, whole, tmp_path, place):
    for steps in (4, 5, STEPS):
        assert loop.train(settings(tmp_path, place, steps), quiet=True).step == steps
    assert_same(tmp_path, whole(place))
    assert no_threads()
    assert {p.name for p in tmp_path.iterdir()} >= {"plan.txt", "versions.json", "loss.png", "tensorboard"}


def test_going_on_with_gradients_in_parts(settings, tmp_path):
    for steps in (2, 5):
        loop.train(settings(tmp_path / "stopped", "one", steps, micro=2), quiet=True)
    loop.train(settings(tmp_path / "whole", "one", 5, micro=2), quiet=True)
    assert_same(tmp_path / "stopped", tmp_path / "whole")


def test_going_on_on_another_mesh(settings, whole, tmp_path):
    for steps, place in ((3, "one"), (6, "model"), (STEPS, "zero")):
        loop.train(settings(tmp_path, place, steps), quiet=True)
    assert curve(tmp_path)[:3] == curve(whole("one"))[:3]
    assert_close(tmp_path, whole("one"))


def test_a_finished_run_is_left_as_it_is(settings, copy, whole):
    there = copy("one")
    outcome = loop.train(settings(there), quiet=True)
    assert outcome.step == STEPS and not outcome.stopped
    assert_same(there, whole("one"))


def test_another_seed_is_warned_of(settings, copy):
    there = copy("one")
    with pytest.warns(UserWarning, match="began with seed 0, and goes on with 1"):
        loop.train(settings(there, steps=STEPS + 1, seed=1), quiet=True)


# -- damage ------------------------------------------------------------------------------------------


def damaged(path, draw):
    """One bit of one file is flipped."""
    file = draw.choice(sorted(p for p in path.rglob("*") if p.is_file() and p.stat().st_size))
    bits = bytearray(file.read_bytes())
    bit = draw.randrange(8 * len(bits))
    bits[bit // 8] ^= 1 << bit % 8
    file.write_bytes(bits)


@pytest.mark.parametrize("seed", range(2))
def test_one_flipped_bit(settings, copy, whole, seed):
    there = copy("one")
    damaged(there / "checkpoints" / "step_10", random.Random(seed))
    with pytest.warns(CheckpointWarning, match="step_10 is left out.*the one before it is tried"):
        outcome = loop.train(settings(there), quiet=True)
    assert outcome.step == STEPS
    assert_same(there, whole("one"))


def test_half_written(settings, copy, whole):
    there = copy("one")
    steps = there / "checkpoints"
    (steps / "step_10").rename(steps / ".writing-step_10")
    (steps / ".writing-step_10" / "manifest.json").unlink()
    with pytest.warns(CheckpointWarning, match="writing-step_10 is left out: it was never finished"):
        loop.train(settings(there), quiet=True)
    assert_same(there, whole("one"))


def test_only_half_written(settings, tmp_path):
    (tmp_path / "checkpoints" / ".writing-step_3").mkdir(parents=True)
    with pytest.warns(CheckpointWarning, match="none before it: the run begins anew"):
        assert loop.train(settings(tmp_path, steps=1), quiet=True).step == 1


# -- ends that come too early ------------------------------------------------------------------------


def command(config, path):
    """The exit code of `weft train` with these settings."""
    path.write_text(config_file.write(config), encoding="utf-8")
    return main(["train", str(path)])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_saves_and_says_so(settings, whole, tmp_path, capsys, number):
    there = tmp_path / "run"
    over = threading.Event()

    def send():
        wait_for(lambda: lines(there / journal.METRICS) >= 3 or over.is_set())
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    code = command(settings(there, steps=100_000), tmp_path / "run.toml")
    over.set()
    thread.join()
    assert code == 1
    said = capsys.readouterr().err.splitlines()[-1]
    (step,) = saved(there)[-1:]
    assert said.startswith(f"stopped by {number.name} after step {step} of 100000, which is saved in {there}")
    assert len(curve(there)) == step and no_threads()
    ours, theirs = curve(there)[:STEPS], curve(whole("one"))
    assert ours == theirs[: len(ours)]


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_checkpoint_that_cannot_be_written(settings, copy, whole, tmp_path, capsys):
    there = copy("one")
    odd = there / "checkpoints" / ".going-step_99"
    odd.touch()  # a file, and what a crash leaves there are folders
    assert command(settings(there, steps=STEPS + 5), tmp_path / "run.toml") == 1
    said = capsys.readouterr().err
    assert "CheckpointError: the checkpoint of step 12 could not be written" in said
    assert "step 10 is the newest that is there" in said and no_threads()
    assert saved(there) == [9, 10]
    odd.unlink()
    loop.train(settings(there), quiet=True)
    assert_same(there, whole("one"))


def test_a_loss_that_is_not_finite(settings, copy, tmp_path, capsys):
    there = copy("one")
    run = loop.prepare(settings(there))
    like = nn.specs(run.model)
    checkpoints = train.Checkpoints(run.checkpoints)
    step, model, state, extra = checkpoints.restore(*run.learner.init(like))
    broken = jax.tree.map(lambda t: t * float("nan"), model, is_leaf=wf.is_tensor)
    checkpoints.save(step, broken, state, extra, wait=True)
    before = {p.name for p in run.checkpoints.iterdir()}
    assert command(settings(there, steps=STEPS + 5), tmp_path / "run.toml") == 1
    said = capsys.readouterr().err
    assert re.search("TrainingError: step 11 gave .*loss nan", said) and "that of step 10 in" in said, said
    assert {p.name for p in run.checkpoints.iterdir()} == before and no_threads()
    assert len(curve(there)) == STEPS


def test_an_error_is_not_hidden_by_that_of_a_save(tmp_path):
    small = {"w": wf.ones("a=4")}
    with pytest.warns(CheckpointWarning, match="step 2 could not be written"):
        with pytest.raises(KeyError, match="its own"):
            with train.Checkpoints(tmp_path) as checkpoints:
                checkpoints.save(1, small, {}, wait=True)
                with limited(1000):
                    checkpoints.save(2, small, {})
                    checkpoints._thread.join()
                raise KeyError("its own")
    assert saved_in(tmp_path) == [1]


def saved_in(folder):
    return list(present(folder))


@contextmanager
def limited(size):
    """No file may be larger than that: as on a full disk, writing fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# -- the journal -------------------------------------------------------------------------------------


def test_a_journal_on_a_full_disk(tmp_path, golden):
    with pytest.raises(journal.JournalError) as error:
        with journal.Journal(tmp_path, 0) as one:
            one.write(1, {"loss": 2.0})
            with limited((tmp_path / journal.METRICS).stat().st_size + 10):
                one.write(2, {"loss": 1.0})
    golden("journal_full_disk", str(error.value).replace(str(tmp_path), "runs/lm"), "messages/train")
    with journal.Journal(tmp_path, 1) as one:
        one.write(2, {"loss": 1.5})
    assert curve(tmp_path) == [2.0, 1.5]


def test_lines_that_are_not_whole_are_left_out_alone(tmp_path):
    good = [json.dumps({"step": n, "loss": 1.0 / n}) for n in (1, 2, 3, 4)]
    broken = [*good[:2], '{"st\xff', "7", good[2], good[3], good[3][:9]]
    (tmp_path / journal.METRICS).write_text("\n".join(broken), encoding="latin-1")
    with journal.Journal(tmp_path, 3) as one:
        one.write(4, {"loss": 0.5})
    assert curve(tmp_path) == [1.0, 0.5, 1.0 / 3, 0.5]


def test_tensorboard_has_what_was_written_when_killed(tmp_path):
    program = (
        "import os, signal, sys; from pathlib import Path; from weft.train.journal import Journal\n"
        "one = Journal(Path(sys.argv[1]), 0)\n"
        "for n in range(1, 6): one.write(n, {'loss': 1.0 / n})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=100)
    assert done.returncode == -signal.SIGKILL
    with journal.Journal(tmp_path, 3) as one:
        one.write(4, {"loss": 4.0})
    assert events(tmp_path / "tensorboard") == {1: 1.0, 2: 0.5, 3: pytest.approx(1 / 3), 4: 4.0}


def events(folder):
    """The losses that TensorBoard shows: what comes after a new start counts, older ones of its steps not."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found = {}
    for path in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime_ns):
        rest = path.read_bytes()
        while rest:
            size = int.from_bytes(rest[:8], "little")  # then 4 bytes, the event and 4 bytes
            event = Event.FromString(rest[12 : 12 + size])
            rest = rest[16 + size :]
            if event.session_log.status == SessionLog.START:
                found = {step: loss for step, loss in found.items() if step < event.step}
            for value in event.summary.value:
                if value.tag == "loss":
                    found[event.step] = value.simple_value
    return found


# -- longer runs, in processes of their own ----------------------------------------------------------

LATEST = 400  # seconds after which a process is killed, with SIGKILL
LONG = 50
RESTARTED = 30  # seconds in which the others stop when one process is killed


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A file of generated phrases in two languages."""
    path = tmp_path_factory.mktemp("pairs") / "phrases.tsv"
    some = data.Phrases(2000)
    path.write_text("".join(f"{a}\t{b}\n" for a, b in (some[n] for n in range(len(some)))), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of processes: what one has compiled the next ones load."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


@pytest.fixture(scope="module")
def arguments(pairs):
    """`arguments(folder, place)` train a small translation model."""

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
    """`long(place)` is the folder of a run in a process of its own; "four" is one in four processes."""

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
        found = (folder / journal.METRICS).read_text().rpartition("\n")[0].splitlines()
        return max((json.loads(line)["step"] for line in found), default=0)
    return 0


def is_saving(folder):
    return any(p.name.startswith(".writing-") for p in (folder / "checkpoints").glob(".*"))


def made(folder):
    """Which file the journal is: a start makes a new one, of what its checkpoint has."""
    path = folder / journal.METRICS
    return path.stat().st_ino if path.exists() else None


def killed(process, folder, before, draw):
    """Kill a process at some moment; whether a checkpoint was being written, or None: it ended before."""
    end = time.monotonic() + LATEST

    def wait_until(condition):
        while process.poll() is None and not condition() and time.monotonic() < end:
            time.sleep(0.001)

    kind, more = draw.choice(["start", "step", "step", "save", "save", "save"]), draw.randrange(3, 6)
    if kind == "start":
        time.sleep(draw.uniform(0, 15))
    else:
        wait_until(lambda: made(folder) not in (before, None))
        first = lines(folder / journal.METRICS)
        # After three steps one was saved, and what the last crash has left is gone.
        wait_until(lambda: lines(folder / journal.METRICS) >= first + more)
        time.sleep(draw.uniform(0, 0.3))
    if kind == "save":
        wait_until(lambda: is_saving(folder))
        time.sleep(draw.uniform(0, 0.03))
    if process.poll() is not None:
        return None
    kill(process)
    return kind != "start" and is_saving(folder)


def killed_and_started_again(folder, places, times, arguments, environment, steps):
    """How often a checkpoint was being written when a run was killed; it goes on until it is done."""
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
    assert_same(tmp_path / "run", long("both", steps))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_and_gone_on_on_other_meshes(long, tmp_path, arguments, environment):
    places = ["one", "both", "zero", "data"]
    killed_and_started_again(tmp_path / "run", places, 7, arguments, environment, LONG)
    off = max(abs(np.array(curve(tmp_path / "run")) / curve(long("one")) - 1))
    print(f"off by {off:.1e}")
    assert_close(tmp_path / "run", long("one"))


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
        assert re.search("^(Checkpoint|Journal)Error: .* could not be written to", done.stderr, re.M)
        assert "the system says: No space left on device" in done.stderr
        there = saved(disk / "run")
        assert there == list(range(2, there[-1] + 1, 2)) and there[-1] < LONG
        checkpoints = train.Checkpoints(disk / "run" / "checkpoints")
        assert checkpoints.steps() == there and checkpoints._whole(there[-1])
        subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True, timeout=60)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LATEST)
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"goes on after step {there[-1]} " in done.stderr
        assert_same(disk / "run", long("one"))
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
    assert len(curve(tmp_path / "run")) < 40  # it is told before the next one is due
    assert "File too large" in failed.stderr and "step 4 is the newest that is there" in failed.stderr
    assert saved(tmp_path / "run") == [4]
    assert run(LONG).returncode == 0
    assert_same(tmp_path / "run", long("one"))


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
            said = log.read()
            print(said[-3000:])
    print(f"the others had stopped after {seconds:.1f} s")
    assert seconds < RESTARTED
    assert f"process {victim} ended with signal SIGKILL" in said and "starting all again (1 of 2)" in said
    assert "goes on after step " in said
    assert_same(there, long("four"))
