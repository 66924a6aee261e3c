"""Runs of `weft train`: the same on every mesh, and nothing is lost, however they end."""

import dataclasses
import os
import random
import re
import shutil
import signal
import threading

import jax
import numpy as np
import pytest
from tiers import slow_except
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

import weft as wf
from weft import checkpoint, data, nn
from weft.checkpoint.manifest import list_step_folders
from weft.cli.main import main
from weft.core.errors import CheckpointWarning
from weft.train import config_io, loop, run_folder
from weft.train.config import recipe
from weft.train.progress import PlannedSpeed, ProgressReporter
from weft.train.trainer import Trainer

STEPS = 10


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
    programs, prepare = {}, loop.prepare_run

    def shared(config):
        run = prepare(config)
        key = (run.trainer.step, str(run.mesh), str(run.layout), run.config.model, run.config.data)
        return dataclasses.replace(run, trainer=programs.setdefault(key, run.trainer))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "prepare_run", shared)
        yield


@pytest.fixture(scope="module")
def settings(text):
    """`settings(folder, place)` returns the settings of a small run."""

    def make(folder, place="one", steps=STEPS, micro=1, **more):
        c, (mesh, rules, params) = recipe("lm"), MESHES[place]
        small = c.model.replace(d_model=16, d_ff=32, heads=4, d_kv=4, layers=2, longest=32, dropout=0.1)
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
def uninterrupted(settings, folder):
    """`uninterrupted(place)` is the folder of a run that was never stopped."""

    def run(place):
        if not (folder / place).exists():
            outcome = loop.train(settings(folder / place, place), quiet=True)
            assert (outcome.step, outcome.stopped) == (STEPS, "")
        return folder / place

    return run


@pytest.fixture
def copy(uninterrupted, tmp_path):
    """`copy(place)` is a copy of such a folder, with checkpoints of steps 9 and 10."""

    def copied(place):
        shutil.copytree(uninterrupted(place), tmp_path / place)
        assert saved(tmp_path / place) == [9, 10]
        return tmp_path / place

    return copied


@pytest.mark.parametrize("seconds, message", [(0.4, "0:00:04"), (8640.0, "1 day, 0:00:00")], ids=str)
def test_the_time_that_is_left(seconds, message, capsys):
    reporter = ProgressReporter(20, 0, PlannedSpeed(1.0, 1.0, 1.0), every=10)
    for step in range(1, 11):
        reporter.step(step, {"loss": 1.0, "rate": 0.1, "tokens": 8.0, "seconds": seconds})
    assert capsys.readouterr().err.endswith(f"left {message}\n")


def test_a_speed_is_that_of_steps_after_the_first(capsys):
    reporter = ProgressReporter(2, 0, PlannedSpeed(1.0, 1.0, 1.0), every=1)
    for step, seconds in ((1, 60.0), (2, 0.5)):
        reporter.step(step, {"loss": 1.0, "rate": 0.1, "tokens": 8.0, "seconds": seconds})
    first, second = capsys.readouterr().err.splitlines()
    assert first == "step      1/2  loss 1.0000  rate 1.00e-01"
    assert "  16 tokens/s  200 % of peak  500 ms/step (planned 1000)  left 0:00:00" in second


def test_the_second_step_is_timed_from_its_beginning(settings, tmp_path, monkeypatch):
    """The first is read before it; later ones are read when the next has begun, so that no device waits."""
    seen = []

    def noted(kind, name):
        usual = getattr(kind, name)

        def noting(self, number, *more):
            seen.append((name, number))
            return usual(self, number, *more)

        monkeypatch.setattr(kind, name, noting)

    noted(Trainer, "run_step")
    noted(ProgressReporter, "step")
    loop.train(settings(tmp_path, steps=3), quiet=True)
    assert seen == [("run_step", 1), ("step", 1), ("run_step", 2), ("run_step", 3), ("step", 2), ("step", 3)]


def no_threads():
    names = ("prefetch", "weft stop", "weft checkpoint")
    return [t.name for t in threading.enumerate() if t.name.startswith(names)] == []


@pytest.mark.parametrize("place", slow_except(["pipe"], ["data", "model", "zero", "pipe"]))
def test_the_same_curve_on_every_mesh(uninterrupted, place):
    losses = curve(uninterrupted("one"))
    assert len(losses) == STEPS and losses[-1] < losses[0]
    np.testing.assert_allclose(curve(uninterrupted(place)), losses, rtol=CLOSE)


def test_dropout_and_seed_are_in_the_curve(settings, uninterrupted, tmp_path):
    loop.train(settings(tmp_path, steps=2, seed=1), quiet=True)
    assert abs(curve(tmp_path)[1] / curve(uninterrupted("one"))[1] - 1) > 10 * CLOSE


@pytest.mark.parametrize("place", slow_except(["zero"], ["model", "zero"]))
def test_going_on_is_never_having_stopped(settings, uninterrupted, tmp_path, place):
    for steps in (4, 5, STEPS):
        assert loop.train(settings(tmp_path, place, steps), quiet=True).step == steps
    assert_same_runs(tmp_path, uninterrupted(place))
    assert no_threads()
    assert {p.name for p in tmp_path.iterdir()} >= {"plan.txt", "versions.json", "loss.png", "tensorboard"}


@pytest.mark.slow
def test_going_on_with_gradients_in_parts(settings, tmp_path):
    for steps in (2, 5):
        loop.train(settings(tmp_path / "stopped", "one", steps, micro=2), quiet=True)
    loop.train(settings(tmp_path / "whole", "one", 5, micro=2), quiet=True)
    assert_same_runs(tmp_path / "stopped", tmp_path / "whole")


def test_going_on_on_another_mesh(settings, uninterrupted, tmp_path):
    for steps, place in ((3, "one"), (6, "model"), (STEPS, "zero")):
        loop.train(settings(tmp_path, place, steps), quiet=True)
    assert curve(tmp_path)[:3] == curve(uninterrupted("one"))[:3]
    assert_similar_runs(tmp_path, uninterrupted("one"))


def test_a_finished_run_is_left_as_it_is(settings, copy, uninterrupted):
    there = copy("one")
    outcome = loop.train(settings(there), quiet=True)
    assert outcome.step == STEPS and not outcome.stopped
    assert_same_runs(there, uninterrupted("one"))


def test_another_seed_is_warned_of(settings, copy):
    there = copy("one")
    with pytest.warns(UserWarning, match="started with seed 0 and resumes with 1"):
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
def test_one_flipped_bit(settings, copy, uninterrupted, seed):
    there = copy("one")
    damaged(there / "checkpoints" / "step_10", random.Random(seed))
    with pytest.warns(CheckpointWarning, match="skipping checkpoint .*step_10: .*trying the one before it"):
        outcome = loop.train(settings(there), quiet=True)
    assert outcome.step == STEPS
    assert_same_runs(there, uninterrupted("one"))


def test_half_written(settings, copy, uninterrupted):
    there = copy("one")
    steps = there / "checkpoints"
    (steps / "step_10").rename(steps / ".writing-step_10")
    (steps / ".writing-step_10" / "manifest.json").unlink()
    with pytest.warns(
        CheckpointWarning, match="skipping checkpoint .*writing-step_10: it was never finished"
    ):
        loop.train(settings(there), quiet=True)
    assert_same_runs(there, uninterrupted("one"))


def test_only_half_written(settings, tmp_path):
    (tmp_path / "checkpoints" / ".writing-step_3").mkdir(parents=True)
    with pytest.warns(CheckpointWarning, match="no earlier one: the run starts from scratch"):
        assert loop.train(settings(tmp_path, steps=1), quiet=True).step == 1


# -- ends that come too early ------------------------------------------------------------------------


def command(config, path):
    """The exit code of `weft train` with these settings."""
    path.write_text(config_io.config_to_toml(config), encoding="utf-8")
    return main(["train", str(path)])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_saves_and_reports_it(settings, uninterrupted, tmp_path, capsys, number):
    there = tmp_path / "run"
    over = threading.Event()

    def send():
        wait_for(lambda: lines(there / run_folder.METRICS_FILE) >= 3 or over.is_set())
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    code = command(settings(there, steps=100_000), tmp_path / "run.toml")
    over.set()
    thread.join()
    assert code == 1
    *before, message = capsys.readouterr().err.splitlines()
    interrupted = number == signal.SIGINT
    assert ("stopping after this step; press again to exit at once" in before) == interrupted
    (step,) = saved(there)[-1:]
    assert message.startswith(
        f"stopped by {number.name} after step {step} of 100000, which is saved in {there}"
    )
    assert len(curve(there)) == step and no_threads()
    ours, theirs = curve(there)[:STEPS], curve(uninterrupted("one"))
    assert ours == theirs[: len(ours)]


def test_a_checkpoint_that_cannot_be_written(settings, copy, uninterrupted, tmp_path, capsys):
    there = copy("one")
    odd = there / "checkpoints" / ".going-step_99"
    odd.touch()  # a file, and what a crash leaves there are folders
    assert command(settings(there, steps=STEPS + 5), tmp_path / "run.toml") == 1
    message = capsys.readouterr().err
    assert "CheckpointError: the checkpoint of step 12 could not be written" in message
    assert "the newest checkpoint is that of step 10" in message and no_threads()
    assert saved(there) == [9, 10]
    odd.unlink()
    loop.train(settings(there), quiet=True)
    assert_same_runs(there, uninterrupted("one"))


def test_a_loss_that_is_not_finite(settings, copy, tmp_path, capsys):
    there = copy("one")
    run = loop.prepare_run(settings(there))
    like = nn.specs(run.model)
    checkpoints = checkpoint.CheckpointManager(run.checkpoints)
    step, model, state, extra = checkpoints.restore(*run.trainer.init(like))
    broken = jax.tree.map(lambda t: t * float("nan"), model, is_leaf=wf.is_tensor)
    checkpoints.save(step, broken, state, extra, wait=True)
    before = {p.name for p in run.checkpoints.iterdir()}
    assert command(settings(there, steps=STEPS + 5), tmp_path / "run.toml") == 1
    message = capsys.readouterr().err
    assert (
        re.search("TrainingError: step 11 gave .*loss nan", message)
        and "the last good checkpoint: step 10 in" in message
    ), message
    assert {p.name for p in run.checkpoints.iterdir()} == before and no_threads()
    assert len(curve(there)) == STEPS


def test_an_error_is_not_hidden_by_that_of_a_save(tmp_path):
    small = {"w": wf.ones("a=4")}
    with pytest.warns(CheckpointWarning, match="step 2 could not be written"):
        with pytest.raises(KeyError, match="its own"):
            with checkpoint.CheckpointManager(tmp_path) as checkpoints:
                checkpoints.save(1, small, {}, wait=True)
                with limited(1000):
                    checkpoints.save(2, small, {})
                    checkpoints._thread.join()
                raise KeyError("its own")
    assert saved_in(tmp_path) == [1]


def saved_in(folder):
    return list(list_step_folders(folder))
