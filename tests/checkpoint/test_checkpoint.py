"""CheckpointManager: a checkpoint saved under one layout restores under every other, and damage is reported."""

import json
import random
import re
import shutil
import subprocess
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import weft as wf
from weft import checkpoint, nn, optim
from weft.checkpoint import manifest
from weft.core.errors import ModelError, ProgramError, TensorTypeError
from weft.core.placement import with_role
from weft.core.tensor import is_tensor

MESH = wf.Mesh("data=4 model=2")
LAYOUT = wf.Layout("d_ff:model", optimizer="d_ff:model d_model:data")
OPTIMIZER = optim.AdamW(0.1)


class Block(nn.Module):
    """Sizes that nothing divides, and two types."""

    into: wf.Tensor
    back: wf.Tensor
    scale: wf.Tensor

    def __init__(self, d_ff=7):
        d_model, hidden = wf.Dim("d_model", 5), wf.Dim("d_ff", d_ff)
        self.into = nn.declare([d_model, hidden], nn.Normal(1.0))
        self.back = nn.declare([hidden, d_model], nn.Normal(1.0), jnp.bfloat16)
        self.scale = nn.declare([], nn.ones)


def made(mesh=MESH, layout=LAYOUT):
    """A model and a state whose numbers are all different."""
    model = nn.init(Block(), jax.random.key(0))
    state = OPTIMIZER.init(model)
    state = {
        "step": state["step"] + 3,
        "mean": {n: wf.random.normal(jax.random.key(1), t.dims) for n, t in state["mean"].items()},
        "variance": {n: wf.random.normal(jax.random.key(2), t.dims) for n, t in state["variance"].items()},
    }
    state = jax.tree.map(lambda t: with_role(t, "optimizer"), state, is_leaf=is_tensor)
    place = lambda t: wf.place(t, mesh, layout) if isinstance(t, wf.Tensor) else t
    return jax.tree.map(place, (model, state), is_leaf=is_tensor)


@pytest.fixture(scope="module")
def trained():
    return made()


@pytest.fixture(scope="module")
def two(tmp_path_factory, trained):
    """A folder with the checkpoints of steps 1 and 2, to copy from."""
    folder = tmp_path_factory.mktemp("two")
    with checkpoint.CheckpointManager(folder) as checkpoints:
        checkpoints.save(1, *trained, {"example": 64})
        checkpoints.save(2, *trained, {"example": 128})
    return folder


@pytest.fixture
def copy(two, tmp_path):
    return shutil.copytree(two, tmp_path / "run")


LIKE = (Block(), OPTIMIZER.init(nn.specs(Block())))


def bits(tree):
    found = nn.parameters(tree)
    return {
        n: (t.dims, t.role, t.dtype, t.numpy(*[d.name for d in t.dims]).tobytes()) for n, t in found.items()
    }


# -- round trips -------------------------------------------------------------------------------------

PLACES = {
    "one device": (None, None),
    "no axes": (wf.Mesh(""), wf.Layout("")),
    "model=8": (wf.Mesh("model=8"), wf.Layout("d_ff:model")),
    "ZeRO-3": (wf.Mesh("data=8"), wf.Layout("batch:data", params="d_model:data", optimizer="d_model:data")),
    "the same": (MESH, LAYOUT),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_restores_the_same_bits_on_any_mesh(two, trained, place):
    step, model, state, extra = checkpoint.CheckpointManager(two).restore(*LIKE, *place)
    assert (step, extra) == (2, {"example": 128})
    assert bits(model) == bits(trained[0]) and bits(state) == bits(trained[1])
    for t in nn.parameters((model, state)).values():
        # As placed by hand: the same split, and zeros in the padding.
        by_hand = wf.place(wf.Tensor(jnp.asarray(t.array), t.dims, role=t.role), *place)
        assert (t.mesh, t.layout) == (by_hand.mesh, by_hand.layout)
        assert t.storage.sharding.is_equivalent_to(by_hand.storage.sharding, len(t.dims))
        assert np.asarray(t.storage).tobytes() == np.asarray(by_hand.storage).tobytes()


def test_real_trees_determine_the_placement(two, trained):
    _, model, state, _ = checkpoint.CheckpointManager(two).restore(*trained)
    assert model.into.mesh == MESH and state["mean"]["into"].layout == LAYOUT
    assert bits(model) == bits(trained[0]) and bits(state) == bits(trained[1])


def test_files_hold_true_sizes(two):
    listed = json.loads((two / "step_2" / "manifest.json").read_text())
    declared = {"dtype": "float32", "shape": [5, 7], "dims": ["d_model", "d_ff"]}
    assert listed["tensors"]["model.into"] == listed["tensors"]["state.mean.into"] == declared
    for path in (p for p in (two / "step_2").rglob("*") if p.is_file() and p.name != "manifest.json"):
        assert str(path.relative_to(two / "step_2")) in listed["files"]


def test_state_can_be_left_out(two, trained):
    _, model, state, _ = checkpoint.CheckpointManager(two).restore(Block(), None)
    assert bits(model) == bits(trained[0]) and state is None


def test_extra_raw_arrays_keys_and_nothing(tmp_path):
    extra = {"example": 2**60, "loss": 0.1 + 0.2, "run": "größer\n", "done": False, "none": None}
    state = {
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(8, impl="rbg"), 3),
        "count": jnp.int32(9),
        "host": np.arange(3, dtype=np.int64) << 40,
        "flags": np.array([True, False]),
        "a/b %": wf.ones("x=2"),
        "empty": np.zeros((0, 3), np.float32),
    }
    checkpoints = checkpoint.CheckpointManager(tmp_path)
    checkpoints.save(0, {}, state, extra, wait=True)
    step, model, back, again = checkpoints.restore({"rate": 0.5}, state)
    assert step == 0 and model == {"rate": 0.5} and again == extra and type(again["example"]) is int
    for name in ("key", "keys"):
        assert back[name].dtype == state[name].dtype
        assert (jax.random.key_data(back[name]) == jax.random.key_data(state[name])).all()
    for name in ("count", "host", "flags"):
        assert type(back[name]) is type(state[name]) and back[name].dtype == state[name].dtype
        assert np.array_equal(back[name], state[name])
    assert bits({"x": back["a/b %"]}) == bits({"x": state["a/b %"]}) and back["empty"].shape == (0, 3)


def test_the_state_of_optax(tmp_path, trained):
    optimizer = wf.optimizer(optax.adam(0.1))
    state = optimizer.init(trained[0])
    checkpoints = checkpoint.CheckpointManager(tmp_path)
    checkpoints.save(1, trained[0], state, wait=True)
    _, _, back, _ = checkpoints.restore(*(trained[0], state))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert all(map(np.array_equal, jax.tree.leaves(back), jax.tree.leaves(state)))


# -- saving ------------------------------------------------------------------------------------------


def test_training_may_donate_what_is_being_saved(tmp_path, trained, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr("weft.checkpoint.manager.seal", lambda *args: go.wait(20) and manifest.seal(*args))
    before = bits(trained[0])
    (model, state), checkpoints = made(), checkpoint.CheckpointManager(tmp_path)
    double = wf.spmd(
        lambda model: jax.tree.map(lambda p: p + p, model, is_leaf=is_tensor), MESH, LAYOUT, donate=(0,)
    )
    checkpoints.save(1, model, state)
    for _ in range(3):
        model = double(model)
    assert not (tmp_path / "step_1").exists()  # not under its true name before it is sealed
    go.set()
    checkpoints.wait()
    assert bits(checkpoints.restore(*LIKE)[1]) == before != bits(model)


def test_keeps_the_newest(tmp_path, trained):
    with checkpoint.CheckpointManager(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 10, 3):
            checkpoints.save(step, trained[0], {})
    assert checkpoints.steps() == [3, 10]
    assert {p.name for p in tmp_path.iterdir()} == {"step_3", "step_10"}


@pytest.mark.parametrize("keep", range(1, 7))
def test_retains_the_configured_number(tmp_path, keep):
    with checkpoint.CheckpointManager(tmp_path, keep=keep) as checkpoints:
        for step in range(1, 8):
            checkpoints.save(step, {}, {})
    assert checkpoints.steps() == list(range(1, 8))[-keep:]


def test_a_step_can_be_saved_again(copy, trained):
    checkpoints = checkpoint.CheckpointManager(copy)
    checkpoints.save(2, *trained, {"example": 5}, wait=True)
    assert checkpoints.steps() == [1, 2] and checkpoints.restore(*LIKE)[3] == {"example": 5}


def test_a_crash_between_two_renames(copy):
    (copy / "step_2").rename(copy / ".old-step_2")
    assert checkpoint.CheckpointManager(copy).steps() == [1, 2]


def test_tensors_in_several_chunks(tmp_path, trained, monkeypatch):
    monkeypatch.setattr("weft.checkpoint.manager.ORBAX_CHUNK_BYTES", 16)
    checkpoints = checkpoint.CheckpointManager(tmp_path)
    checkpoints.save(1, *trained, wait=True)
    _, model, state, _ = checkpoints.restore(*LIKE, wf.Mesh("model=8"), wf.Layout("d_ff:model"))
    assert bits(model) == bits(trained[0]) and bits(state) == bits(trained[1])


def test_what_a_crash_left_is_reported_and_cleared(copy, trained):
    shutil.copytree(copy / "step_2" / "arrays", copy / ".writing-step_3" / "arrays")
    checkpoints = checkpoint.CheckpointManager(copy)
    with pytest.warns(
        checkpoint.CheckpointWarning, match="skipping checkpoint .*step_3: it was never finished"
    ):
        assert checkpoints.restore(*LIKE)[0] == 2
    checkpoints.save(4, *trained, wait=True)
    assert {p.name for p in copy.iterdir()} == {"step_1", "step_2", "step_4"}


FULL_DISK = """
import resource, sys
import jax, numpy as np
import weft as wf
from weft import checkpoint, optim, train

small, large = {"w": wf.zeros("n=10")}, {"w": wf.tensor(np.random.rand(300_000).astype(np.float32), "n=300000")}
checkpoints = checkpoint.CheckpointManager(sys.argv[1])
checkpoints.save(1, small, {}, wait=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
checkpoints.save(2, large, {})
try:
    checkpoints.wait()
except checkpoint.CheckpointError as error:
    print(error)
print(checkpoints.steps(), checkpoints.restore(small, {})[0])
checkpoints.save(3, small, {})  # Python's exit waits for it
"""


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 3),
    reason="this Python starts no thread once its main one has ended",
)
def test_a_full_disk(tmp_path, golden):
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)  # then it is killed
    lines = done.stdout.splitlines()
    assert lines[-1] == "[1] 1", done.stdout + done.stderr[-2000:]
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"step_1", "step_3"}
    assert checkpoint.CheckpointManager(tmp_path / "run").steps() == [1, 3]
    text = "\n".join(lines[:-1]).replace(str(tmp_path), "runs")
    text = re.sub(r"[\d.,]+ GB", "… GB", text)
    golden("full_disk", text, "messages/checkpoint")


# -- damage ------------------------------------------------------------------------------------------


def flip(path, draw):
    data = bytearray(path.read_bytes())
    bit = draw.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def truncate(path, draw):
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


DAMAGE = {"flip": flip, "truncate": truncate, "delete": lambda path, draw: path.unlink()}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_any_damage_is_reported_and_the_one_before_is_used(copy, damage):
    draw, newest, checkpoints = random.Random(0), copy / "step_2", checkpoint.CheckpointManager(copy)
    files = sorted(p for p in newest.rglob("*") if p.is_file())
    assert len({p.suffix for p in files}) >= 3
    for path in files:
        content = path.read_bytes()
        for _ in range(8 if damage is not DAMAGE["delete"] else 1):
            damage(path, draw)
            with pytest.warns(checkpoint.CheckpointWarning, match=re.escape(path.name)):
                assert checkpoints._find_intact(None)[0].name == "step_1"
            path.write_bytes(content)
    assert checkpoints._find_intact(None)[0].name == "step_2"


def test_every_bit_of_a_manifest_counts(copy):
    path = copy / "step_2" / "manifest.json"
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 61):
        data = bytearray(content)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(manifest.DamagedCheckpoint):
            manifest.read_manifest(path.parent)


def data_file(folder):
    return max(folder.rglob("d/*"), key=lambda p: p.stat().st_size)


def normalized(text, folder):
    text = re.sub(r"[\d,]+ bytes", "… bytes", str(text).replace(str(folder), "runs/first"))
    # Orbax moves the data of a process to the common folder, or leaves it, depending on its size.
    return re.sub(r"(ocdbt.process_0/)?d/\w{32}", "d/FILE", text)


def test_a_damaged_one_is_named_then_replaced(copy, trained, golden):
    flip(data_file(copy / "step_2"), random.Random(1))
    checkpoints = checkpoint.CheckpointManager(copy, keep=2)
    with pytest.warns(checkpoint.CheckpointWarning) as caught:
        step, model, _, extra = checkpoints.restore(*LIKE)
    assert (step, extra, bits(model)) == (1, {"example": 64}, bits(trained[0]))
    assert caught[0].filename == __file__
    golden("damaged", normalized(caught[0].message, copy), "messages/checkpoint")
    # One that is known to be damaged does not push a good one out.
    checkpoints.save(3, *trained, wait=True)
    assert checkpoints.steps() == [1, 3]


def test_a_checkpoint_of_a_newer_format_is_skipped_but_never_removed(copy, trained):
    path = copy / "step_2" / "manifest.json"
    content = json.loads(path.read_bytes()) | {"format": manifest.FORMAT_VERSION + 1}
    path.write_bytes(manifest._sealed({k: v for k, v in content.items() if k != "sha256"}))
    checkpoints = checkpoint.CheckpointManager(copy, keep=2)
    with pytest.warns(checkpoint.CheckpointWarning, match="this version reads format"):
        assert checkpoints.restore(*LIKE)[0] == 1
    checkpoints.save(3, *trained, wait=True)
    assert path.exists()


def test_a_folder_without_manifest(copy):
    (copy / "step_2" / "manifest.json").unlink()
    checkpoints = checkpoint.CheckpointManager(copy)
    with pytest.warns(checkpoint.CheckpointWarning, match="the checkpoint is incomplete"):
        assert checkpoints.steps() == [1]
    with pytest.warns(checkpoint.CheckpointWarning, match="the checkpoint is incomplete"):
        assert checkpoints.restore(*LIKE)[0] == 1


def test_all_damaged(copy, golden):
    data_file(copy / "step_1").unlink()
    (copy / "step_2" / "manifest.json").write_text("{}")
    with pytest.warns(checkpoint.CheckpointWarning), pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.CheckpointManager(copy).restore(*LIKE)
    error.value.where = ""
    golden("all_damaged", normalized(error.value, copy), "messages/checkpoint")


def test_restore_of_a_given_step(copy):
    checkpoints = checkpoint.CheckpointManager(copy)
    assert checkpoints.restore(*LIKE, step=1)[3] == {"example": 64}
    with pytest.raises(
        checkpoint.CheckpointError, match=r"no checkpoint of step 7.*\n.*available steps: 1, 2"
    ):
        checkpoints.restore(*LIKE, step=7)
    flip(data_file(copy / "step_2"), random.Random(2))
    with pytest.raises(checkpoint.CheckpointError, match=r"no checkpoint of step 2 .* is intact"):
        checkpoints.restore(*LIKE, step=2)


# -- mistakes ----------------------------------------------------------------------------------------


def test_all_that_does_not_fit_is_listed(two, golden):
    model = {"into": Block(9).into, "scale": nn.declare([], nn.ones, jnp.bfloat16), "bias": Block().into}
    with warnings.catch_warnings(), pytest.raises(ModelError) as error:
        checkpoint.CheckpointManager(two).restore(model, {"mean": {}})
    error.value.where = ""
    golden("misfit", normalized(error.value, two), "messages/checkpoint")


def test_mistakes_in_calls(tmp_path, trained):
    checkpoints = checkpoint.CheckpointManager(tmp_path)
    with pytest.raises(checkpoint.CheckpointError, match="there is no checkpoint"):
        checkpoints.restore(*LIKE)
    with pytest.raises(TensorTypeError, match="keep=0"):
        checkpoint.CheckpointManager(tmp_path, keep=0)
    with pytest.raises(TensorTypeError, match="step=-1"):
        checkpoints.save(-1, *trained)
    with pytest.raises(TensorTypeError, match="'loss': float64"):
        checkpoints.save(1, *trained, {"loss": np.float64(1.0)})
    with pytest.raises(ProgramError, match="declared"):
        checkpoints.save(1, Block(), {})
    with pytest.raises(ProgramError, match="spec"):
        checkpoints.save(1, nn.specs(Block()), {})
    with pytest.raises(ProgramError, match=r"several tensors are called model\.a\.b"):
        checkpoints.save(1, {"a": {"b": wf.ones("x=2")}, "a.b": wf.ones("x=2")}, {})
    assert checkpoints.steps() == [] and not any(tmp_path.iterdir())
