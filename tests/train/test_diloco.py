"""train.DiLoCo against as many separate plain runs, with optax inside and outside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import assert_same, real
from tiers import slow_except

import weft as wf
from weft import nn, optim, train
from weft.core.errors import WeftError
from weft.core.tensor import Tensor
from weft.models import Batch, Config, Transformer

RATE, ROUNDS, EVERY = 0.05, 2, 2


class Net(nn.Module):
    """Two matrices and a vector; rows have weights."""

    w: Tensor
    v: Tensor
    scale: Tensor

    def loss(self, batch, key):
        x = wf.take(self.w, batch.tokens, "vocab") * self.scale
        if key is not None:
            x = wf.dropout(x, 0.5, key)
        logits = wf.einsum(wf.tanh(x), self.v, out=["batch", "vocab"])
        losses = nn.cross_entropy(logits, batch.targets, wf.Dim("vocab", logits.dims[-1].size))
        return wf.sum(losses * batch.weights) / self.loss_weight(batch)

    def loss_weight(self, batch):
        return wf.maximum(wf.sum(batch.weights), 1.0)


def raw_loss(params, tokens, targets, weights):
    logits = jnp.tanh(params["w"][tokens] * params["scale"]) @ params["v"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def net(d_model=5):
    vocab, d = wf.Dim("vocab", 7), wf.Dim("d_model", d_model)
    made = {"w": real(0, [vocab, d]), "v": real(1, [d, vocab]), "scale": real(2, [d])}
    return Net(**{name: wf.parameter(t) for name, t in made.items()})


def raw(model):
    return {name: t.array for name, t in nn.parameters(model).items()}


def batch(step, rows=12):
    draw = np.random.default_rng(step)
    tokens, targets = (draw.integers(0, 7, rows).astype(np.int32) for _ in range(2))
    given = tokens, targets, draw.integers(1, 4, rows).astype(np.float32)
    return Batch(*(wf.tensor(a, [wf.Dim("batch", rows)]) for a in given))


INNER = optim.AdamW(RATE, weight_decay=0.1, decayed="*")


@functools.cache
def separate(replicas, every=EVERY, rate=0.7, momentum=0.9, rounds=ROUNDS):
    """The losses, replicas and outer parameters of plain runs, each on its own rows."""
    inner, outer_tx = optax.adamw(RATE, weight_decay=0.1), optax.sgd(rate, momentum, nesterov=True)
    outer = raw(net())
    outer_state, runs = outer_tx.init(outer), [(outer, inner.init(outer)) for _ in range(replicas)]
    losses = []

    @jax.jit
    def step(params, state, rows):
        loss, grads = jax.value_and_grad(raw_loss)(params, *rows)
        updates, state = inner.update(grads, state, params)
        return loss, optax.apply_updates(params, updates), state

    for number in range(rounds * every):
        given = batch(number)
        arrays = [t.array for t in (given.tokens, given.targets, given.weights)]
        found = [step(*run, [a[r::replicas] for a in arrays]) for r, run in enumerate(runs)]
        losses.append([one[0] for one in found])
        runs = [one[1:] for one in found]
        if (number + 1) % every == 0:
            mean = jax.tree.map(lambda *a: sum(a) / replicas, *(params for params, _ in runs))
            apart = jax.tree.map(lambda a, b: a - b, outer, mean)
            updates, outer_state = outer_tx.update(apart, outer_state, outer)
            outer = optax.apply_updates(outer, updates)
            runs = [(outer, state) for _, state in runs]
    return np.array(losses), runs, outer


def trained(diloco, mesh, layout, rounds=ROUNDS, model=None):
    """The same by Weft."""
    model, state = diloco.init(nn.module.map_parameters(lambda t: wf.place(t, mesh, layout), model or net()))
    step, outer = (wf.spmd(f, mesh, layout, donate=(0, 1)) for f in (diloco.step, diloco.outer))
    losses = []
    for number in range(1, rounds * diloco.every + 1):
        metrics, model, state = step(model, state, batch(number - 1), None)
        losses.append(metrics["loss"].numpy())
        if diloco.due(number):
            model, state = outer(model, state)
    assert len(step.traces) == len(outer.traces) == 1  # what comes back goes in again, and nothing is new
    return np.array(losses), metrics, model, state


LAYOUTS = {
    "one device": (None, None, 2),
    "pod": ("pod=2", "replicas:pod", 2),
    "pod, data": ("pod=2 data=2", "replicas:pod batch:data", 2),
    "replicas unsplit": ("data=2", "batch:data", 2),
    "uneven replicas": ("pod=2 data=2", "replicas:pod batch:data", 3),
    "zero-1": ("pod=2 data=2", wf.Layout("replicas:pod batch:data", optimizer="d_model:data"), 2),
    "zero-3": ("pod=2 data=2", wf.Layout("replicas:pod batch:data", params="d_model:data"), 2),
}


@pytest.mark.parametrize("name", slow_except(["uneven replicas", "zero-1", "zero-3"], LAYOUTS))
def test_equals_separate_runs(name):
    mesh, layout, replicas = LAYOUTS[name]
    mesh, layout = mesh and wf.Mesh(mesh), layout and wf.Layout.of(layout)
    diloco = train.DiLoCo(INNER, replicas, EVERY)
    losses, metrics, model, state = trained(diloco, mesh, layout)
    want_losses, runs, outer = separate(replicas)
    np.testing.assert_allclose(losses, want_losses, rtol=2e-5)
    merged = diloco.merged(model, state)
    for key, t in nn.parameters(model).items():
        assert (t.role, t.dims[0]) == ("param", diloco.dim)
        assert_same(t, np.stack([params[key] for params, _ in runs]), name=key, rtol=2e-5, atol=1e-6)
        assert_same(getattr(merged, key), outer[key], name=key, rtol=2e-5, atol=1e-6)
        means = np.stack([inner[0].mu[key] for _, inner in runs])
        assert_same(state["inner"]["mean"][key], means, name=key, rtol=2e-5, atol=1e-6)
        assert state["inner"]["mean"][key].role == state["outer"][key].role == "optimizer"
    assert state["inner"]["step"].numpy().tolist() == [ROUNDS * EVERY] * replicas
    reported = diloco.reduce_metrics(metrics)
    np.testing.assert_allclose(float(reported["loss"]), want_losses[-1].mean(), rtol=2e-5)
    assert float(reported["tokens"]) == batch(ROUNDS * EVERY - 1).weights.numpy().sum()


def test_one_replica_that_meets_itself_is_adamw():
    diloco = train.DiLoCo(INNER, replicas=1, every=1, outer_rate=1.0, outer_momentum=0.0)
    losses, _, model, state = trained(diloco, None, None, rounds=4)
    plain, plain_state = net(), INNER.init(net())
    step = wf.spmd(train.train_step(INNER))
    for number in range(4):
        metrics, plain, plain_state = step(plain, plain_state, batch(number), None)
        np.testing.assert_allclose(losses[number], metrics["loss"].item(), rtol=1e-6)
    for key, t in nn.parameters(diloco.merged(model, state)).items():
        assert_same(t, getattr(plain, key).array, name=key, rtol=1e-6, atol=1e-6)
    assert state["momentum"] == {}


def test_dropout_is_each_replicas_own():
    """The same bits on every layout, others for each replica: its key is folded with its number."""
    diloco, key = train.DiLoCo(optim.Momentum(0.1), 2, 1), jax.random.key(3)
    found = []
    for mesh, layout in ((None, None), ("pod=2 data=2", "replicas:pod batch:data")):
        metrics, *_ = wf.spmd(diloco.step, mesh, layout)(*diloco.init(net()), batch(0), key)
        found.append(metrics["loss"].numpy())
    np.testing.assert_allclose(*found, rtol=1e-6)
    given = batch(0)
    for r, got in enumerate(found[0]):
        own = [wf.tensor(t.array[r::2], "batch=6") for t in (given.tokens, given.targets, given.weights)]
        want = net().loss(Batch(*own), jax.random.fold_in(key, r))
        np.testing.assert_allclose(got, want.item(), rtol=1e-6)


def planned(layout, **options):
    config = Config(vocab=16, d_model=8, d_ff=12, heads=2, d_kv=4, layers=2, longest=6, dropout=0.1)
    diloco = train.DiLoCo(train.train_step(optim.AdamW(0.01), **options), 2, 2)
    plain = nn.specs(Transformer(config))
    row = wf.spec("batch=8 length=6", jnp.int32)
    model, state = diloco.init(plain)
    step, outer = (wf.spmd(f, "pod=2 data=2", layout) for f in (diloco.step, diloco.outer))
    key = jax.eval_shape(lambda: jax.random.key(0))
    return plain, step.plan(model, state, Batch(row, row), key), outer.plan(model, state)


@pytest.mark.parametrize(
    "further",
    [{}, {"optimizer": "d_model:data"}, {"params": "d_model:data"}],
    ids=["data", "zero-1", "zero-3"],
)
def test_pods_meet_in_the_outer_step_only(further):
    model, step, outer = planned(wf.Layout("replicas:pod batch:data", **further), clip=1.0)
    assert not [c for c in step.collectives if "pod" in c.axes]
    over = [c for c in outer.collectives if "pod" in c.axes]
    assert {(c.kind, c.axes, c.count) for c in over} == {("all-reduce", ("pod",), 1)}
    share = 2 if further else 1  # each device of a pod has its part of the state
    assert sorted(c.bytes for c in over) == sorted(4 * p.size // share for p in nn.parameters(model).values())
    # A pod stores what one replica needs.
    stored = 2 if "params" in further else 1
    assert step.memory.params == 4 * nn.count(model) // stored


MISTAKES = {
    "replicas_that_are_none": lambda: train.DiLoCo(INNER, 0, 10),
    "replicas_with_optax": lambda: train.DiLoCo(optax.adam(0.1), 2, 10),
    "rows_that_replicas_do_not_divide": lambda: train.DiLoCo(INNER, 5, 1).step(
        *train.DiLoCo(INNER, 5, 1).init(net()), batch(0), None
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_messages(name):
    with pytest.raises(WeftError) as caught:
        MISTAKES[name]()
    for part in ("call", "fact", "rule", "hint"):
        assert getattr(caught.value, part), f"the message has no part: {part}\n{caught.value}"
