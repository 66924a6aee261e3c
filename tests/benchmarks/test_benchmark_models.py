"""The hand-written train steps and the library's models that `make bench` compares compute the same."""

import jax
import numpy as np
import pytest
from compare import assert_same

import weft as wf
from benchmarks import handwritten, handwritten_tr, lm, models
from weft import nn

TINY = handwritten.Size(layers=2, d_model=16, d_ff=32, heads=4, d_kv=8, vocab=40, length=6, batch=8)
STEPS = 3
PEERS = {
    "lm": (handwritten, models.language_model, models.LM_NAMES),
    "translation": (handwritten_tr, models.translation_model, models.TRANSLATION_NAMES),
}


def by_hand(step, params, *rows):
    """Losses, and the parameters at last by their names in the module."""
    losses = []
    for _ in range(STEPS):
        loss, params = step(params, *rows)
        losses.append(jax.block_until_ready(loss).item())
    return losses, params


def renamed(params, names):
    flat = jax.tree_util.tree_leaves_with_path(params)
    return {names[".".join(key.key for key in path)]: np.asarray(a) for path, a in flat}


def assert_same_training(found, expected):
    """The losses fall; they and the final parameters are the expected ones."""
    losses, params = found
    assert losses[0] > losses[-1]
    assert_same(losses, expected[0], rtol=1e-5, atol=0)
    assert_same(params, expected[1], rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def singles():
    found = {}
    for peer, (module, _, names) in PEERS.items():
        inputs = jax.device_put((module.init(0, TINY), *module.batch(0, TINY)))
        losses, params = by_hand(module.single_step(), *inputs)
        found[peer] = losses, renamed(params, names)
    return found


@pytest.mark.parametrize(
    "make", [handwritten_tr.jit_step, handwritten_tr.shard_map_step], ids=lambda f: f.__name__
)
def test_parallel_translation_steps_equal_one_device(make, singles):
    mesh = handwritten.make_mesh()
    inputs = handwritten_tr.place(mesh, handwritten_tr.init(0, TINY), *handwritten_tr.batch(0, TINY))
    losses, params = by_hand(make(mesh), *inputs)
    assert_same_training((losses, renamed(params, models.TRANSLATION_NAMES)), singles["translation"])


@pytest.mark.parametrize("mesh, layout", [("", ""), (models.MESH, models.LAYOUT)], ids=["one", "eight"])
@pytest.mark.parametrize("peer", PEERS)
def test_models_equal_hand_written_ones(peer, mesh, layout, singles):
    program = models.step(mesh, layout)
    model, batch = wf.place(PEERS[peer][1](TINY), program.mesh, program.layout)
    losses, state = [], {}
    for _ in range(STEPS):
        metrics, model, state = program(model, state, batch, None)
        losses.append(float(metrics["loss"]))
    params = {name: np.asarray(p.numpy()) for name, p in nn.parameters(model).items()}
    assert_same_training((losses, params), singles[peer])


@pytest.mark.parametrize("place", [("", ""), (models.MESH, models.LAYOUT)], ids=["one", "eight"])
def test_calls_of_a_case_are_the_hand_written_steps(place, singles):
    run = lm.case(lm.step(TINY, *place), TINY)
    np.testing.assert_allclose([float(run()) for _ in range(STEPS)], singles["lm"][0], rtol=1e-5)
