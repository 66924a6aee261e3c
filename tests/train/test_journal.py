"""The journal of a run: each step once, whatever happened to the process or the disk."""

import json
import math
import signal
import subprocess
import sys

import pytest
from trained_runs import curve, limited, strictly

from weft.train import run_folder


def test_a_journal_on_a_full_disk(tmp_path, golden):
    with pytest.raises(run_folder.RunFolderError) as error:
        with run_folder.RunFolderWriter(tmp_path, 0) as one:
            one.write(1, {"loss": 2.0})
            with limited((tmp_path / run_folder.METRICS_FILE).stat().st_size + 10):
                one.write(2, {"loss": 1.0})
    golden("journal_full_disk", str(error.value).replace(str(tmp_path), "runs/lm"), "messages/train")
    with run_folder.RunFolderWriter(tmp_path, 1) as one:
        one.write(2, {"loss": 1.5})
    assert curve(tmp_path) == [2.0, 1.5]


def test_what_is_run_on_a_full_disk(tmp_path):
    with (
        run_folder.RunFolderWriter(tmp_path, 0) as one,
        limited(10),
        pytest.raises(run_folder.RunFolderError),
    ):
        one.describe("steps = 3\n" * 100, "the plan")


def test_only_incomplete_lines_are_skipped(tmp_path):
    good = [json.dumps({"step": n, "loss": 1.0 / n}) for n in (1, 2, 3, 4)]
    broken = [*good[:2], '{"st\xff', "7", good[2], good[3], good[3][:9]]
    (tmp_path / run_folder.METRICS_FILE).write_text("\n".join(broken), encoding="latin-1")
    with run_folder.RunFolderWriter(tmp_path, 3) as one:
        one.write(4, {"loss": 0.5})
    assert curve(tmp_path) == [1.0, 0.5, 1.0 / 3, 0.5]


def test_a_number_that_is_not_finite_is_a_text(tmp_path):
    """JSON has none; a row that an older version wrote is mended, and all can be drawn."""
    (tmp_path / run_folder.METRICS_FILE).write_text('{"step": 1, "loss": NaN}\n')
    for step in (1, 2):
        with run_folder.RunFolderWriter(tmp_path, step) as one:
            one.write(step + 1, {"loss": math.inf, "seconds": 0.5})
    rows = [strictly(line) for line in (tmp_path / run_folder.METRICS_FILE).read_text().splitlines()]
    assert [row["loss"] for row in rows] == ["nan", "inf", "inf"] and rows[1]["seconds"] == 0.5


def test_of_many_steps_a_picture_has_some_and_the_lines_have_all(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(run_folder, "MAX_POINTS", 10)
    monkeypatch.setattr(run_folder, "plot_curves", lambda curves, _: drawn.update(curves))
    for begin, end in ((0, 40), (40, 100)):
        with run_folder.RunFolderWriter(tmp_path, begin) as one:
            for step in range(begin + 1, end + 1):
                one.write(step, {"loss": 1.0 / step})
                if step % 50 == 0:
                    one.write(step, {"valid_loss": 2.0 / step})
    assert drawn["loss"] == [(step, 1.0 / step) for step in range(1, 101, 16)]
    assert drawn["valid_loss"] == [(50, 0.04), (100, 0.02)]
    assert curve(tmp_path) == [1.0 / step for step in range(1, 101)]


def test_tensorboard_has_what_was_written_when_killed(tmp_path):
    program = (
        "import os, signal, sys; from pathlib import Path; from weft.train.run_folder import RunFolderWriter\n"
        "one = RunFolderWriter(Path(sys.argv[1]), 0)\n"
        "for n in range(1, 6): one.write(n, {'loss': 1.0 / n})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=100)
    assert done.returncode == -signal.SIGKILL
    with run_folder.RunFolderWriter(tmp_path, 3) as one:
        one.write(4, {"loss": 4.0})
    assert events(tmp_path / "tensorboard") == {1: 1.0, 2: 0.5, 3: pytest.approx(1 / 3), 4: 4.0}


def test_tensorboard_has_each_step_once_after_a_restart(tmp_path):
    board = tmp_path / "tensorboard"
    with run_folder.RunFolderWriter(tmp_path, 0) as one:
        one.write(1, {"loss": 1.0})
        one.write(2, {"loss": 0.5})
    next(board.iterdir()).rename(board / "events.of another process")  # this one would take the same name
    with run_folder.RunFolderWriter(tmp_path, 0) as one:
        one.write(1, {"loss": 2.0})
    assert events(board) == {1: 2.0}


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
