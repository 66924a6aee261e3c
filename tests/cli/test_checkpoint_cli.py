"""`weft checkpoint`: reports on folders, and conversion to safetensors and back."""

import json
import math
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weft as wf
from weft import checkpoint
from weft.checkpoint import inspect
from weft.checkpoint.inspect import summarize_values
from weft.checkpoint.manifest import remove_checkpoint
from weft.cli.main import main


def model(shift=0.0):
    values = np.arange(35, dtype=np.float32).reshape(5, 7) + shift
    return {
        "block": {
            "into": wf.parameter(wf.tensor(values, "d_model=5 d_ff=7")),
            "back": wf.parameter(wf.tensor(jnp.asarray(values.T, jnp.bfloat16), "d_ff=7 d_model=5")),
        },
        "scale": wf.parameter(wf.tensor(np.float32(2), "")),
        "mask": wf.tensor(np.array([True, False, True]), "length=3"),
        "raw": np.arange(3, dtype=np.int64) << 40,
    }


def state():
    odd = np.array([1.0, np.nan, np.inf, -3.0], np.float32)
    return {"mean": wf.tensor(odd, "d=4"), "key": jax.random.key(3), "empty": np.zeros((0, 2), np.float32)}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "first"
    with checkpoint.CheckpointManager(folder) as checkpoints:
        checkpoints.save(1, model(), state(), {"example": 64, "run": "größer"})
        checkpoints.save(2, model(0.5), state(), {"example": 128})
    return folder


@pytest.fixture
def run(made, tmp_path, monkeypatch, capsys):
    """Run `weft checkpoint` beside a copy of the folder, called runs; its exit code, stdout and stderr."""
    shutil.copytree(made, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)

    def go(*arguments):
        code = main(["checkpoint", *arguments])
        return code, *capsys.readouterr()

    return go


def normalized(text):
    """Text without what changes: dates, sizes on disk, names of files."""
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "DATE", text)
    text = re.sub(r"\S*\w{32}\b", "FILE", text)
    return re.sub(r"[\d.]+ KiB|[\d,]+ bytes", "SIZE", text)


def damage(folder):
    path = max(folder.rglob("d/*"), key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[:-1] + b"?")


# -- looking -----------------------------------------------------------------------------------------


def test_list(run, tmp_path, golden):
    damage(tmp_path / "runs" / "step_2")
    shutil.copytree(tmp_path / "runs" / "step_1", tmp_path / "runs" / "step_30")
    (tmp_path / "runs" / "step_30" / "manifest.json").unlink()
    (tmp_path / "runs" / ".writing-step_31").mkdir()
    (tmp_path / "runs" / ".old-step_7").mkdir()  # a run may be between two renames: it is left alone
    code, out, err = run("list", "runs")
    assert (code, err) == (0, "")
    golden("list", re.sub(" +", " ", normalized(out)), "messages/checkpoint_cli")
    assert (tmp_path / "runs" / ".old-step_7").exists()
    output = json.loads(run("list", "runs", "--json")[1])
    assert [(one["step"], one["complete"]) for one in output] == [
        (1, True),
        (2, False),
        (30, False),
        (31, False),
    ]
    assert output[0]["bytes"] == sum(
        p.stat().st_size for p in (tmp_path / "runs" / "step_1").rglob("*") if p.is_file()
    )
    assert output[0]["damage"] is None and "SHA-256" in output[1]["damage"]


@pytest.mark.parametrize("looked", ["read_manifest", "check_files"])
def test_list_beside_a_run_that_removes_old_ones(looked, run, monkeypatch):
    usual = getattr(inspect, looked)

    def late(path, *more):
        if path.name == "step_1" and path.exists():
            remove_checkpoint(path)
        return usual(path, *more)

    monkeypatch.setattr(inspect, looked, late)
    code, out, err = run("list", "runs", "--json")
    assert (code, err) == (0, "")
    assert [(one["step"], one["complete"]) for one in json.loads(out)] == [(2, True)]


def test_list_beside_a_run_that_finishes_one(run, monkeypatch):
    """What was being written has got its name by the time it is looked at."""
    monkeypatch.setattr(inspect, "list_unfinished_folders", lambda folder: {2: folder / ".writing-step_2"})
    code, out, err = run("list", "runs", "--json")
    assert (code, err) == (0, "") and [one["step"] for one in json.loads(out)] == [1, 2]


def test_list_of_nothing(run, tmp_path):
    (tmp_path / "empty").mkdir()
    assert run("list", "empty") == (0, "", "no checkpoints in empty\n")
    assert json.loads(run("list", "empty", "--json")[1]) == []


def test_inspect(run, golden):
    code, out, err = run("inspect", "runs", "--step", "1", "--values")
    assert (code, err) == (0, "")
    golden("inspect", out, "messages/checkpoint_cli")
    assert run("inspect", "runs@1", "--values")[1] == out
    output = json.loads(run("inspect", "runs", "--json")[1])
    assert output["step"] == 2 and output["extra"] == {"example": 128}
    into = {"dtype": "float32", "shape": [5, 7], "dims": ["d_model", "d_ff"], "bytes": 140}
    assert output["tensors"]["model.block.into"] == into
    assert output["bytes"] == sum(one["bytes"] for one in output["tensors"].values())
    values = json.loads(run("inspect", "runs", "--values", "--json")[1])["tensors"]
    assert values["model.block.into"]["mean"] == 17.5 and values["state.mean"]["max"] == "inf"
    assert values["state.mean"]["nan"] == 1 and values["state.empty"]["mean"] == "nan"


def test_summary_is_numpys(monkeypatch):
    monkeypatch.setattr("weft.checkpoint.inspect.CHUNK_ELEMENTS", 7)
    values = np.random.default_rng(0).standard_normal((5, 9)).astype(np.float32)
    values[2, 3] = np.nan
    found, wide = summarize_values(values), values.astype(np.float64)
    assert math.isclose(found.mean, np.nanmean(wide), rel_tol=1e-12)
    assert math.isclose(found.std, np.nanstd(wide), rel_tol=1e-12)
    assert (found.min, found.max, found.nan) == (np.nanmin(wide), np.nanmax(wide), 1)


def test_diff(run, tmp_path, golden):
    assert run("diff", "runs", "runs@2") == (0, "all 8 tensors are equal\n", "")
    code, out, err = run("diff", "runs@1", "runs@2", "--json")
    output = json.loads(out)
    assert code == 1 and "2 tensors differ" in err and output["same"] == 6
    largest = {d["name"]: (d["unequal"], d["largest"]) for d in output["differences"]}
    assert largest == {"model.block.back": (35, 0.5), "model.block.into": (35, 0.5)}
    other = model()
    other["block"]["into"] = wf.ones("d_model=5 d_ff=8")
    other["new"] = other.pop("raw")
    changed = state() | {"key": jax.random.key(4), "mean": wf.tensor(np.zeros(4, np.float32), "d=4")}
    checkpoint.CheckpointManager(tmp_path / "second").save(3, other, changed, wait=True)
    code, out, err = run("diff", "runs@1", "second")
    assert code == 1
    golden("diff", out + err, "messages/checkpoint_cli")


# -- safetensors -------------------------------------------------------------------------------------


def test_there_and_back(run, tmp_path):
    assert run("export", "runs", "model.safetensors", "--step", "1") == (
        0,
        "model.safetensors\n",
        "5 tensors\n",
    )
    found = load_file("model.safetensors")  # an oracle: the library that others read with
    assert set(found) == {"block.into", "block.back", "scale", "mask", "raw"}
    assert np.array_equal(found["block.into"], model()["block"]["into"].numpy())
    assert found["block.back"].dtype == jnp.bfloat16 and found["raw"].dtype == np.int64
    code, out, _ = run("import", "model.safetensors", "second", "--step", "7")
    assert (code, out) == (0, "second/step_7\n")
    step, back, _, extra = checkpoint.CheckpointManager("second").restore(model(9.0), None)
    assert (step, extra) == (7, {"imported": "model.safetensors"})
    for ours, theirs in zip(jax.tree.leaves(model()), jax.tree.leaves(back), strict=True):
        assert ours.dtype == theirs.dtype and np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    assert back["block"]["into"].role == "param" and [d.name for d in back["block"]["back"].dims] == [
        "d_ff",
        "d_model",
    ]
    output = json.loads(run("diff", "runs@1", "second", "--json")[1])
    assert {d["name"] for d in output["differences"]} == {"state.mean", "state.key", "state.empty"}
    assert {p.name for p in tmp_path.iterdir()} == {"runs", "second", "model.safetensors"}


def test_an_export_is_complete_or_absent(run, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    (tmp_path / "model.safetensors").write_text("before")
    monkeypatch.setattr("weft.train.safetensors.SafetensorsWriter.write", full)
    code, out, err = run("export", "runs", "model.safetensors")
    assert (code, out) == (1, "") and "No space left" in err
    assert (tmp_path / "model.safetensors").read_text() == "before"
    assert {p.name for p in tmp_path.iterdir()} == {"runs", "model.safetensors"}


def without_dims(folder):
    save_file({"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}, folder / "plain.safetensors")


def with_wrong_dims(folder):
    dims = {"weft.dims": json.dumps({"a": ["x", "y"], "b": ["x", "x"]})}
    save_file(
        {"a": np.zeros(2, np.float32), "b": np.zeros((3, 3), np.float32)}, folder / "odd.safetensors", dims
    )


def cut_short(folder):
    save_file({"a": np.zeros(2, np.float32)}, folder / "short.safetensors")
    (folder / "short.safetensors").write_bytes((folder / "short.safetensors").read_bytes()[:-1])


MISTAKES = {
    "no_folder": (None, ["list", "run"]),
    "file_for_a_folder": (None, ["inspect", "runs/step_1/manifest.json"]),
    "no_step": (None, ["inspect", "runs", "--step", "12"]),
    "two_steps": (None, ["inspect", "runs@1", "--step", "2"]),
    "damaged_step": (lambda folder: damage(folder / "runs" / "step_2"), ["export", "runs", "a.safetensors"]),
    "not_safetensors": (None, ["export", "runs", "model.bin"]),
    "no_folder_to_write": (None, ["export", "runs", "nowhere/model.safetensors"]),
    "file_to_write_into": (None, ["export", "runs", "runs/step_1/manifest.json/model.safetensors"]),
    "no_file": (without_dims, ["import", "plane.safetensors", "new", "--step", "0"]),
    "no_dims": (without_dims, ["import", "plain.safetensors", "new", "--step", "0"]),
    "wrong_dims": (with_wrong_dims, ["import", "odd.safetensors", "new", "--step", "0"]),
    "cut_short": (cut_short, ["import", "short.safetensors", "new", "--step", "0"]),
    "step_below_zero": (without_dims, ["import", "plain.safetensors", "new", "--step", "-1"]),
    "step_is_there": (without_dims, ["import", "plain.safetensors", "runs", "--step", "2"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name, run, tmp_path, golden):
    prepare, arguments = MISTAKES[name]
    if prepare is not None:
        prepare(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert sorted(tmp_path.rglob("*")) == before
    golden(name, normalized(err.replace(str(tmp_path), "HERE")), "messages/checkpoint_cli")


def test_the_folder_of_a_run_will_do(run, tmp_path):
    (tmp_path / "of_a_run").mkdir()
    shutil.copytree(tmp_path / "runs", tmp_path / "of_a_run" / "checkpoints")
    for command in (["list"], ["inspect", "--step", "1"]):
        code, out, _ = run(command[0], "of_a_run", *command[1:])
        assert code == 0 and out == run(command[0], "of_a_run/checkpoints", *command[1:])[1] != ""
    assert run("diff", "of_a_run@1", "runs@1")[0] == 0
    run("export", "of_a_run", "model.safetensors")
    assert run("import", "model.safetensors", "of_a_run", "--step", "0")[:2] == (
        0,
        "of_a_run/checkpoints/step_0\n",
    )
    assert [one["step"] for one in json.loads(run("list", "of_a_run", "--json")[1])] == [0, 1, 2]
