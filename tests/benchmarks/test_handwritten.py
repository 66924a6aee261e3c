"""The three hand-written train steps agree with each other, and their loss with NumPy in float64."""

import jax
import numpy as np
import pytest

from benchmarks import handwritten, measure, run

TINY = handwritten.Size(layers=2, d_model=16, d_ff=32, heads=4, d_kv=8, vocab=40, length=6, batch=8)
STEPS = 3


def train(step, params, tokens, targets):
    losses = []
    for _ in range(STEPS):
        loss, params = step(params, tokens, targets)
        losses.append(jax.block_until_ready(loss).item())
    return losses, {name: np.asarray(p) for name, p in params.items()}


@pytest.fixture(scope="module")
def single():
    inputs = jax.device_put((handwritten.init(0, TINY), *handwritten.batch(1, TINY)))
    return train(handwritten.single_step(), *inputs)


@pytest.mark.parametrize("data, model", [(4, 2), (2, 4), (8, 1)], ids=lambda n: str(n))
@pytest.mark.parametrize("make", [handwritten.jit_step, handwritten.shard_map_step], ids=lambda f: f.__name__)
def test_parallel_steps_equal_one_device(make, data, model, single):
    mesh = handwritten.make_mesh(data, model)
    inputs = handwritten.place(mesh, handwritten.init(0, TINY), *handwritten.batch(1, TINY))
    losses, params = train(make(mesh), *inputs)
    assert losses[0] > losses[-1]
    np.testing.assert_allclose(losses, single[0], rtol=1e-5)
    assert params.keys() == single[1].keys()
    for name, expected in single[1].items():
        np.testing.assert_allclose(params[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)


def test_loss_equals_numpy(single):
    p = {name: a.astype(np.float64) for name, a in handwritten.init(0, TINY).items()}
    tokens, targets = handwritten.batch(1, TINY)

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + handwritten.EPSILON) * scale

    def log_softmax(x):
        return (
            x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
        )

    losses = []
    for row, wanted in zip(tokens, targets, strict=True):
        x = p["embedding"][row] + p["positions"]
        for i in range(TINY.layers):
            h = norm(x, p["attention_scale"][i])
            for head in range(TINY.heads):
                q, k, v = (h @ p[name][i, :, head] for name in ("wq", "wk", "wv"))
                scores = q @ k.T / np.sqrt(TINY.d_kv)
                scores[np.triu_indices(TINY.length, 1)] = -np.inf
                x = x + np.exp(log_softmax(scores)) @ v @ p["wo"][i, head]
            x = x + np.maximum(norm(x, p["feed_scale"][i]) @ p["w1"][i], 0) @ p["w2"][i]
        scored = log_softmax(norm(x, p["final_scale"]) @ p["projection"])
        losses.append(-scored[np.arange(TINY.length), wanted])
    np.testing.assert_allclose(single[0][0], np.mean(losses), rtol=1e-5)


@pytest.mark.parametrize("make", [handwritten.jit_step, handwritten.shard_map_step], ids=lambda f: f.__name__)
def test_nothing_is_gathered(make):
    mesh = handwritten.make_mesh()
    inputs = handwritten.place(mesh, handwritten.init(0, TINY), *handwritten.batch(1, TINY))
    text = make(mesh).lower(*inputs).compile().as_text()
    assert "all-reduce" in text
    for kind in ("all-gather", "all-to-all", "collective-permute"):
        assert kind not in text


def test_alternate_pairs_rounds():
    calls = []
    cases = {name: lambda name=name: calls.append(name) for name in "abc"}
    timings = measure.alternate(cases, rounds=3, warmup=1, baseline="b")
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"
    assert timings["b"].ratio == 1 and timings["b"].paired == measure.Spread(1, 1, 1)
    assert [len(t.samples) for t in timings.values()] == [3, 3, 3]
    assert measure.markdown(timings).count("\n") == 4
    with pytest.raises(ValueError, match="baseline 'd'"):
        measure.alternate(cases, 1, 0, baseline="d")


def test_a_section_reports_its_number_of_rounds():
    text = f"## Steps\n\n{measure.compared({'a': lambda: None, 'b': lambda: None}, rounds=5)}"
    page = run.with_sections("# Results\n\n## Steps\n\n*a machine, 20 rounds*\n\nold\n", text)
    assert page.count(" rounds") == 1 and page.endswith(", 5 rounds\n")
