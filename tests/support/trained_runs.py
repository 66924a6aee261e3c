"""Compare the folders that runs of `weft train` write, and the meshes of these runs."""

import json
import resource
import time
from contextlib import contextmanager

import numpy as np
import pytest

from weft import checkpoint, nn
from weft.checkpoint.manifest import list_step_folders
from weft.train import config_io, loop, run_folder

MODEL = "batch:data d_ff:model heads:model vocab:model"
MESHES = {
    "one": ("", "", ""),
    "data": ("data=8", "batch:data", ""),
    "model": ("data=2 model=4", MODEL, ""),
    "zero": ("data=4", "batch:data", "d_model:data"),
    "pipe": ("pipe=2 data=2", "layers:pipe batch:data", ""),
    "both": ("data=2 model=2", MODEL, ""),
    "four": ("data=4", "batch:data", ""),
}
CLOSE = 1e-4  # relative, at float32


def curve(folder):
    """The losses of all steps, each logged once and in order."""
    rows = [json.loads(line) for line in (folder / run_folder.METRICS_FILE).read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, len(losses) + 1))
    return list(losses.values())


def stored(folder):
    """All arrays of the newest checkpoint by name: parameters, optimizer state and EMA."""
    run = loop.prepare_run(config_io.config_from_toml(folder / "config.toml").replace(folder=folder))
    like = nn.specs(run.model)
    _, model, state, _ = checkpoint.CheckpointManager(run.checkpoints).restore(*run.trainer.init(like))
    return {name: t.numpy() for name, t in nn.parameters({"model": model, "state": state}).items()}


def assert_same_runs(folder, other):
    """Both runs have the same curve and the same arrays, bit for bit."""
    assert curve(folder) == curve(other)
    ours, theirs = stored(folder), stored(other)
    assert ours.keys() == theirs.keys()
    assert [name for name, x in ours.items() if x.tobytes() != theirs[name].tobytes()] == []


def assert_similar_runs(folder, other):
    """Both runs have the same curve and the same parameters, up to rounding."""
    np.testing.assert_allclose(curve(folder), curve(other), rtol=CLOSE)
    ours, theirs = stored(folder), stored(other)
    assert ours.keys() == theirs.keys()
    far = {name: distance(x, theirs[name]) for name, x in ours.items() if name.startswith("model")}
    assert max(far.values()) <= CLOSE, far


def distance(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return float(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30))


def strictly(text):
    """Parse JSON strictly: NaN and Infinity, which Python accepts, are not JSON."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def saved(folder):
    return list(list_step_folders(folder / "checkpoints"))


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextmanager
def limited(size):
    """Limit the size of files, so that writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
