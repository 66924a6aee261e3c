"""train.train_step: micro-batches, clipping, averages and skipped steps, against plain JAX and optax."""

import dataclasses
import functools
import re
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import assert_same, real

import weft as wf
from weft import nn, optim, train
from weft.core.tensor import Tensor
from weft.models import Batch, Config, Transformer


class Net(nn.Module):
    """A small language model without layers."""

    embedding: Tensor
    wide: Tensor
    last: Tensor

    def loss(self, batch, key):
        x = wf.tanh(wf.einsum(wf.take(self.embedding, batch.tokens, "vocab"), self.wide, reduce=["d_model"]))
        x = x if key is None else wf.dropout(x, 0.5, key)
        logits = wf.einsum(x, self.last, reduce=["d_ff"])
        losses = nn.cross_entropy(logits, batch.targets, self.embedding.dims[0])
        if batch.weights is None:
            return wf.mean(losses)
        return wf.sum(losses * batch.weights) / self.loss_weight(batch)

    def loss_weight(self, batch):
        if batch.weights is None:
            return batch.targets.size
        return wf.maximum(wf.sum(batch.weights), 1.0)


def raw_loss(params, tokens, targets, weights):
    logits = jnp.tanh(params["embedding"][tokens] @ params["wide"]) @ params["last"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def net(d_model=6, d_ff=4):
    vocab, d, wide = wf.Dim("vocab", 7), wf.Dim("d_model", d_model), wf.Dim("d_ff", d_ff)
    made = {"embedding": [vocab, d], "wide": [d, wide], "last": [wide, vocab]}
    return Net(**{name: wf.parameter(real(n, dims)) for n, (name, dims) in enumerate(made.items())})


def batch(step, rows=12, weighted=True):
    """Rows of very different weights; those of one micro-batch of three have none at all."""
    draw = np.random.default_rng(step)
    tokens, targets = (draw.integers(0, 7, (rows, 3)).astype(np.int32) for _ in range(2))
    weights = draw.integers(0, 4, (rows, 3)).astype(np.float32)
    weights[1::3] = 0.0
    dims = [wf.Dim("batch", rows), wf.Dim("length", 3)]
    given = [wf.tensor(a, dims) for a in (tokens, targets, weights)]
    return Batch(*given) if weighted else Batch(*given[:2])


def placed(model, mesh, layout):
    """A copy that can be donated."""
    model = nn.module.map_parameters(lambda t: wf.place(wf.parameter(t * 1.0), mesh, layout), model)
    return model


def specs(model):
    return nn.module.map_parameters(lambda t: wf.spec(t.dims, t.dtype, role="param"), model)


# -- all of it, on every layout ----------------------------------------------------------------------

LAYOUTS = {
    "one device": None,
    "data": wf.Layout("batch:data"),
    "both": wf.Layout("batch:data d_ff:model"),
    "zero-1": wf.Layout("batch:data d_ff:model", optimizer="d_model:data"),
    "zero-3": wf.Layout("batch:data d_ff:model", params="d_model:data"),
}
MESH = wf.Mesh("data=2 model=2")
OPTIMIZER = optim.AdamW(0.05 * optim.LinearWarmup(2), weight_decay=0.1)
KEEP, LIMIT, STEPS = 0.8, 0.3, 3


@functools.cache
def plain(sizes):
    tx = optax.chain(
        optax.clip_by_global_norm(LIMIT),
        optax.adamw(optax.linear_schedule(0.0, 0.05, 2), weight_decay=0.1),
    )
    params = {name: t.array for name, t in nn.parameters(net(*sizes)).items()}
    average, state, found = params, tx.init(params), []

    @jax.jit
    def step(params, average, state, *rows):
        loss, grads = jax.value_and_grad(raw_loss)(params, *rows)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: KEEP * a + (1 - KEEP) * p, average, params)
        return (loss, optax.tree.norm(grads)), params, average, state

    for number in range(STEPS):
        b = batch(number)
        values, params, average, state = step(
            params, average, state, b.tokens.array, b.targets.array, b.weights.array
        )
        found.append(values)
    return found, params, average


@pytest.mark.parametrize(
    "layout, sizes, micro",
    [(name, (6, 4), 3) for name in LAYOUTS if name != "data"]
    + [("zero-1", (7, 5), 4), ("zero-3", (7, 5), 4)],
)
def test_equals_plain_jax(layout, sizes, micro):
    """With 4 micro-batches of 12 rows each has 3 on two devices: uneven, as are then the dims."""
    mesh, layout = (MESH, LAYOUTS[layout]) if LAYOUTS[layout] else (None, None)
    step = train.train_step(OPTIMIZER, clip=LIMIT, micro=micro, average=KEEP, skip_nonfinite=True)
    program = wf.spmd(step, mesh, layout, donate=(0, 1))
    model = placed(net(*sizes), mesh, layout)
    state = step.init(model)
    values, params, average = plain(sizes)
    for number in range(STEPS):
        metrics, model, state = program(model, state, batch(number), None)
        assert set(metrics) == {"loss", "tokens", "grad_norm", "finite"}
        np.testing.assert_allclose(metrics["loss"].item(), values[number][0], rtol=2e-6)
        np.testing.assert_allclose(metrics["grad_norm"].item(), values[number][1], rtol=2e-5)
        assert metrics["tokens"].item() == batch(number).weights.numpy().sum()
        assert metrics["finite"].item() is True
    assert len(program.traces) == 1  # what comes back goes in again, and nothing is new
    smooth = nn.parameters(optim.with_ema_params(model, state["average"]))
    for name, p in nn.parameters(model).items():
        assert_same(p, params[name], name=name, rtol=2e-5, atol=2e-6)
        assert_same(state["average"][name], average[name], name=name, rtol=2e-5, atol=2e-6)
        assert_same(smooth[name], average[name], name=name, rtol=2e-5, atol=2e-6)
        assert (p.role, smooth[name].role, state["average"][name].role) == ("param", "param", "optimizer")


def test_eagerly():
    step, model = train.train_step(OPTIMIZER, micro=3, average=KEEP, clip=LIMIT), net()
    metrics, model, state = step(model, step.init(model), batch(0), None)
    (loss, norm), *_ = plain((6, 4))[0]
    np.testing.assert_allclose(metrics["loss"].item(), loss, rtol=2e-6)
    np.testing.assert_allclose(metrics["grad_norm"].item(), norm, rtol=2e-5)
    assert set(state["average"]) == set(nn.parameters(model))


# -- what a bare step does ---------------------------------------------------------------------------


def test_a_bare_step_is_as_written_by_hand():
    def by_hand(model, state, batch, key):
        loss, grads = wf.value_and_grad(lambda model: model.loss(batch, key))(model)
        return loss, *OPTIMIZER.update(grads, state, model)

    model = specs(net())
    step = train.train_step(OPTIMIZER)
    args = model, step.init(model), batch(0, weighted=False), None
    ours, theirs = (wf.spmd(f, MESH, LAYOUTS["zero-1"]) for f in (step, by_hand))
    events = [[dataclasses.replace(e, source="") for e in f.plan(*args).events] for f in (ours, theirs)]
    assert events[0] == events[1]
    same_text = [
        re.sub(r"\s+", " ", str(f.jaxpr(*args).jaxpr.eqns[0].params["jaxpr"])) for f in (ours, theirs)
    ]
    ops = [Counter(re.findall(r"= (\w+)", text)) for text in same_text]
    assert ops[0] - ops[1] in (Counter(), Counter(pvary=1)) and not ops[1] - ops[0]
    metrics, *_ = wf.spmd(step)(net(), step.init(net()), args[2], None)
    assert set(metrics) == {"loss", "tokens"} and metrics["tokens"].item() == 36.0


def test_state_is_the_optimizers_own():
    model = net()
    assert train.train_step(OPTIMIZER, clip=1.0, micro=2).init(model).keys() == OPTIMIZER.init(model).keys()
    assert train.train_step(OPTIMIZER, average=0.9).init(model).keys() == {"optimizer", "average"}
    planned = train.train_step(OPTIMIZER, average=0.9).init(specs(model))
    assert {t.role for t in jax.tree.leaves(planned, is_leaf=wf.is_tensor)} == {"optimizer"}


# -- micro-batches -----------------------------------------------------------------------------------

TINY = Config(vocab=8, d_model=8, d_ff=12, heads=2, d_kv=4, layers=2, longest=4, positions="sinusoid")


def collectives(layout, micro, config=TINY):
    """The collectives over data of a step, scalars left out."""
    model = nn.specs(Transformer(config))
    row = wf.spec("batch=16 length=4", jnp.int32)
    step = train.train_step(optim.AdamW(0.1), micro=micro)
    program = wf.spmd(step, MESH, layout)
    plan = program.plan(model, step.init(model), Batch(row, row), None)
    return plan, [c for c in plan.collectives if "data" in c.axes and c.bytes > 4]


def stored_bytes(split=1):
    """The bytes of each parameter on one device of `model`."""
    model = nn.parameters(Transformer(TINY))
    on_model = {n: 2 if "d_ff" in str(p.dims) else 1 for n, p in model.items()}
    return sorted(4 * p.size // on_model[n] // split for n, p in model.items())


def test_data_parallel_gradients_are_added_up_once():
    _, found = collectives(LAYOUTS["both"], micro=4)
    assert {(c.kind, c.count, c.phase) for c in found} == {("all-reduce", 1, "backward")}
    assert sorted(c.bytes for c in found) == stored_bytes()


def test_zero_1_gradients_are_scattered_once():
    _, found = collectives(LAYOUTS["zero-1"], micro=4)
    for kind in ("reduce-scatter", "all-gather"):
        assert sorted(c.bytes for c in found if c.kind == kind) == stored_bytes()
    assert {c.count for c in found} == {1} and len(found) == 2 * len(stored_bytes())


def test_zero_3_scatters_in_each_part():
    """Nothing is all-reduced: each part gathers its layers and scatters its gradients, layer by layer.

    One sum after the loop would need a full gradient on each device, which ZeRO-3 avoids. The parameters outside of
    layers are the same in each part: XLA gathers them once, before the loop.
    """
    _, found = collectives(LAYOUTS["zero-3"], micro=4)
    assert {c.kind for c in found} == {"all-gather", "reduce-scatter"}
    sent = Counter()
    for c in found:
        sent[c.kind] += c.bytes * c.count
    assert sent["reduce-scatter"] == 4 * sum(stored_bytes())
    parameters = nn.parameters(Transformer(TINY))
    once = sum(4 * p.size for name, p in parameters.items() if ".blocks." not in name)
    assert sent["all-gather"] == 4 * sum(stored_bytes()) - 3 * once and once


def test_learned_positions_are_the_exception():
    """Their sum is added to rows: what pends is not their gradient but that of the table's rows."""
    _, found = collectives(LAYOUTS["data"], 4, TINY.replace(positions="learned"))
    assert [(c.bytes, c.phase) for c in found if c.count > 1] == [(4 * 4 * 8, "backward")]


def test_micro_batches_hold_less():
    full, parts = (collectives(LAYOUTS["both"], micro)[0].memory.peak for micro in (1, 4))
    assert parts < 0.7 * full


def test_each_part_has_its_own_dropout():
    model, rows, key = net(), batch(0, weighted=False), jax.random.key(5)
    step = train.train_step(optim.Momentum(0.1), micro=3)
    found = []
    for mesh, layout in ((None, None), (MESH, LAYOUTS["both"])):
        found.append(wf.spmd(step, mesh, layout)(model, {}, rows, key)[0]["loss"].item())
    losses = []
    for n in range(3):
        part = Batch(*(wf.tensor(t.array[n::3], "batch=4 length=3") for t in (rows.tokens, rows.targets)))
        losses.append(model.loss(part, jax.random.fold_in(key, n)).item())
    np.testing.assert_allclose(found, [np.mean(losses)] * 2, rtol=1e-6)


def test_sequences_to_sequences():
    """All fields with rows are divided among the parts, also the encoder's; positions without rows are shared."""
    config = TINY.replace(kind="encoder_decoder", layers=1)
    draw = np.random.default_rng(0)
    long, short = ([wf.Dim("batch", 4), wf.Dim("length", n)] for n in (5, 3))
    tokens, targets = (wf.tensor(draw.integers(0, 8, (4, 3)).astype(np.int32), short) for _ in range(2))
    inputs, segments = (wf.tensor(draw.integers(0, 3, (4, 5)).astype(np.int32), long) for _ in range(2))
    weights = wf.tensor(draw.integers(0, 3, (4, 3)).astype(np.float32), short)
    positions = wf.tensor(np.arange(3, dtype=np.int32), short[1:])
    given = Batch(tokens, targets, weights, positions, inputs=inputs, input_segments=segments)
    given = dataclasses.replace(given, segments=wf.ones(short, jnp.int32))
    model, found = nn.init(Transformer(config), jax.random.key(0)), []
    for micro, mesh, layout in ((1, None, None), (2, "data=2", "batch:data")):
        step = train.train_step(optim.Momentum(1.0), micro=micro, clip=1e9)
        found.append(wf.spmd(step, mesh, layout)(model, {}, given, None))
    (full, new, _), (parts, new_by_parts, _) = found
    for name in full:
        np.testing.assert_allclose(full[name].item(), parts[name].item(), rtol=2e-5)
    for name, p in nn.parameters(new).items():
        assert_same(nn.parameters(new_by_parts)[name], p.array, name=name, rtol=2e-5, atol=2e-6)


# -- micro-batches of any batch ----------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Samples:
    x: Tensor
    y: Tensor
    importance: Tensor
    scale: Tensor


class Example(eqx.Module):
    pair: tuple[Tensor, Tensor]
    counts: Tensor
    more: dict
    kind: str = eqx.field(static=True)


# How a batch is made of x, y, the weights of its rows and a scale without rows, and how these are found in it.
BATCHES = {
    "dict": (
        lambda x, y, w, scale: {"x": x, "y": y, "importance": w, "scale": scale, "power": 2.0, "none": None},
        lambda b: (b["x"], b["y"], b["importance"], b["scale"]),
    ),
    "dataclass": (Samples, lambda b: (b.x, b.y, b.importance, b.scale)),
    "module": (
        lambda x, y, w, scale: Example((x, y), w, {"scale": scale}, "training"),
        lambda b: (*b.pair, b.counts, b.more["scale"]),
    ),
    "tuple": (lambda *given: (given[:2], given[2:]), lambda b: (*b[0], *b[1])),
}


class Regression(nn.Module):
    """A linear map to a dim that is called micro; the loss is the weighted mean of its errors, 0 / 0 without weights."""

    w: Tensor
    fields: object = eqx.field(static=True)

    def loss(self, batch, key=None):
        x, y, weights, scale = self.fields(batch)
        error = wf.square(wf.einsum(x, self.w, reduce=["d"]) - y) * scale
        return wf.sum(wf.mean(error, "micro") * weights) / wf.sum(weights)


def samples(rows=12, dtype=np.float32):
    """Arrays: x, y, the weights of the rows and a scale. One in four rows, all in one micro-batch of four, weighs 0."""
    draw = np.random.default_rng(0)
    weights = draw.integers(1, 5, rows) * 0.25
    weights[1::4] = 0.0
    arrays = draw.normal(size=(rows, 5)), draw.normal(size=(rows, 2)), weights, draw.uniform(1, 2, 2)
    return [np.asarray(a, dtype) for a in (*arrays, draw.normal(size=(5, 2)))]


def regression(kind, dtype=np.float32):
    """The model and the batch."""
    make, fields = BATCHES[kind]
    dims = ["batch=12 d=5", "batch=12 micro=2", "batch=12", "micro=2", "d=5 micro=2"]
    *given, w = (wf.tensor(a, wf.dims(d)) for a, d in zip(samples(dtype=dtype), dims, strict=True))
    return Regression(wf.parameter(w), fields), make(*given)


def raw_regression(w, x, y, weights, scale):
    return jnp.sum(jnp.mean((x @ w - y) ** 2 * scale, 1) * weights) / jnp.sum(weights)


@pytest.mark.parametrize(
    "kind, mesh, layout",
    [
        ("dict", None, None),
        ("dict", MESH, wf.Layout("batch:data micro:model")),
        ("dataclass", MESH, wf.Layout("batch:data", optimizer="d:model")),
        ("module", MESH, wf.Layout("batch:data+model", params="d:data")),
        ("tuple", MESH, wf.Layout("batch:data")),
    ],
    ids=["dict, one device", "dict", "dataclass", "module", "tuple"],
)
def test_any_batch_in_parts_is_the_full_batch(kind, mesh, layout):
    """Whatever it is and whatever its weights are called. A part of 3 or 6 rows is uneven on 2 or 4 devices."""
    model, rows = regression(kind)
    *given, w = samples()
    loss, grads = jax.value_and_grad(raw_regression)(w, *given)
    for micro in (1, 2, 4):
        step = train.train_step(
            optim.Momentum(1.0), micro=micro, norm=True, weight=lambda b: wf.sum(model.fields(b)[2])
        )
        metrics, new, _ = wf.spmd(step, mesh, layout)(model, {}, rows, None)
        np.testing.assert_allclose(metrics["loss"].item(), loss, rtol=1e-6)
        np.testing.assert_allclose(metrics["grad_norm"].item(), np.linalg.norm(grads), rtol=1e-6)
        assert metrics["tokens"].item() == given[2].sum()
        assert_same(new.w, w - grads, name=f"micro={micro}", rtol=1e-5, atol=1e-6)


class Weighted(Regression):
    """The same with its own loss weight."""

    def loss_weight(self, batch):
        return wf.sum(self.fields(batch)[2])


def test_a_loss_has_the_precision_of_its_model():
    """A share that was rounded to float32 would show. The loss has the type that it has without parts."""
    with jax.enable_x64(True):
        model, rows = regression("dict", np.float64)
        *given, w = samples(dtype=np.float64)
        loss, grads = jax.value_and_grad(raw_regression)(w, *given)
        for weight in (None, lambda b: wf.sum(b["importance"])):
            own = Weighted(model.w, model.fields) if weight is None else model
            step = train.train_step(optim.Momentum(1.0), micro=3, weight=weight)
            metrics, new, _ = step(own, {}, rows, None)
            assert metrics["loss"].dtype == loss.dtype == np.float64
            np.testing.assert_allclose(metrics["loss"].item(), loss, rtol=1e-14)
            np.testing.assert_allclose(new.w.numpy(), w - grads, rtol=1e-12)
    half = nn.cast(model, "bfloat16")
    step = train.train_step(optim.Momentum(1.0), micro=3, weight=lambda b: wf.sum(b["importance"]))
    narrow = {n: t.astype(jnp.bfloat16) if wf.is_tensor(t) else t for n, t in regression("dict")[1].items()}
    assert step(half, {}, narrow, None)[0]["loss"].dtype == half.loss(narrow).dtype == jnp.bfloat16


class Plain(nn.Module):
    """A loss of rows that all count the same: their mean, or their sum."""

    w: Tensor
    reduce: object = eqx.field(static=True)
    loss_weight: Tensor | None = None  # a parameter of that name is not the method

    def loss(self, batch, key=None):
        return self.reduce(wf.square(batch * self.w))


@pytest.mark.parametrize(
    "reduce, weight",
    [(wf.mean, train.count_rows), (wf.mean, lambda b: b.size), (wf.sum, lambda b: wf.ones(()))],
    ids=["rows", "elements", "a sum"],
)
def test_rows_that_count_the_same(reduce, weight):
    """Even if a dim has the name that the dim of the parts would have, and its size."""
    taken = wf.Dim("_micro", 3)
    x, w = real(0, [wf.Dim("batch", 6), taken]), real(1, [taken])
    model = Plain(wf.parameter(w), reduce)
    found = []
    for micro in (1, 3):
        step = train.train_step(optim.Momentum(1.0), micro=micro, weight=weight)
        found.append(wf.spmd(step, "data=2", "batch:data")(model, {}, x, None))
    for metrics, new, _ in found:
        np.testing.assert_allclose(metrics["loss"].item(), reduce(wf.square(x * w)).item(), rtol=1e-6)
        assert_same(new.w, found[0][1].w.array, rtol=1e-6)


def test_batches_that_weigh_nothing():
    """A batch without any weight is 0 / 0 in parts too, or what the loss makes of it."""
    model, rows = regression("dict")
    empty = rows | {"importance": wf.zeros("batch=12")}
    step = train.train_step(optim.Momentum(1.0), micro=2, weight=lambda b: wf.sum(b["importance"]))
    assert np.isnan(step(model, {}, empty, None)[0]["loss"].item())
    nothing = dataclasses.replace(batch(0), weights=wf.zeros("batch=12 length=3"))
    metrics, new, _ = train.train_step(optim.Momentum(1.0), micro=2)(net(), {}, nothing, None)
    assert metrics["loss"].item() == 0.0
    assert_same(new.wide, net().wide.array)


def test_an_eager_step_in_parts_is_traced_once():
    model, rows = regression("dict")
    calls = []

    def weight(batch):
        calls.append(1)
        return wf.sum(batch["importance"])

    step = train.train_step(optim.Momentum(0.1), micro=2, weight=weight)
    _, model, state = step(model, {}, rows, None)
    traced = len(calls)
    step(model, state, rows, None)
    assert len(calls) == traced > 0


def test_inside_replicas():
    """Each replica has its own micro-batches, and the losses equal those without micro-batches."""
    model, rows = regression("dict")
    found = []
    for micro in (1, 3):
        step = train.train_step(optim.Momentum(1.0), micro=micro, weight=lambda b: wf.sum(b["importance"]))
        diloco = train.DiLoCo(step, replicas=2, every=1)
        program = wf.spmd(diloco.step, "pod=2 data=2", "replicas:pod batch:data")
        found.append(program(*diloco.init(model), rows, None))
    for name in ("loss", "tokens"):
        np.testing.assert_allclose(found[0][0][name].numpy(), found[1][0][name].numpy(), rtol=1e-6)
    assert_same(found[1][1].w, found[0][1].w.array, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("experts", [0, 4], ids=["dense", "experts"])
def test_weights_count_by_their_ratios(experts):
    """Also where the weights of a part add up to less than 1: there a mixture's losses counted several times."""
    config = TINY.replace(layers=1, experts=experts, router_z=0.1 if experts else 0.0)
    model, rows = nn.init(Transformer(config), jax.random.key(0)), batch(0)
    light = dataclasses.replace(rows, weights=rows.weights * 0.01)
    for micro in (1, 3):
        step = wf.spmd(train.train_step(optim.Momentum(1.0), micro=micro, norm=True), "data=2", "batch:data")
        (one, *_), (other, *_) = (step(model, {}, b, None) for b in (rows, light))
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(one[name].item(), other[name].item(), rtol=1e-5)
        np.testing.assert_allclose(other["tokens"].item(), 0.01 * one["tokens"].item(), rtol=1e-5)


# -- steps that are skipped --------------------------------------------------------------------------


@pytest.mark.parametrize("layout, average", [("one device", None), ("zero-1", 0.9), ("zero-3", None)])
def test_a_step_that_is_not_finite_changes_nothing(layout, average):
    mesh, layout = (MESH, LAYOUTS[layout]) if LAYOUTS[layout] else (None, None)
    step = train.train_step(OPTIMIZER, average=average, skip_nonfinite=True)
    program = wf.spmd(step, mesh, layout)
    model = placed(net(7, 5), mesh, layout)
    state = step.init(model)
    metrics, model, state = program(model, state, batch(0), None)
    assert metrics["finite"].item() is True
    bad = dataclasses.replace(batch(1), weights=wf.full(batch(1).weights.dims, jnp.inf))
    metrics, same_model, same_state = program(model, state, bad, None)
    assert metrics["finite"].item() is False and not np.isfinite(metrics["loss"].item())
    for old, new in zip(*map(jax.tree.leaves, [(model, state), (same_model, same_state)]), strict=True):
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()
    stored = same_state if average is None else same_state["optimizer"]
    assert stored["step"].item() == 1
    metrics, new_model, _ = program(same_model, same_state, batch(2), None)
    assert metrics["finite"].item() is True
    assert (new_model.wide.numpy() != model.wide.numpy()).all()


def test_a_gradient_that_is_not_finite_is_noticed():
    """The loss is 0, and its slope there infinite."""

    class Root(nn.Module):
        w: Tensor

        def loss(self, batch, key):
            return wf.sum(wf.sqrt(self.w * batch))

    model, step = (
        Root(wf.parameter(wf.zeros("a=2"))),
        train.train_step(optim.Momentum(0.1), skip_nonfinite=True),
    )
    metrics, new, _ = step(model, {}, wf.ones("a=2"), None)
    assert metrics["loss"].item() == 0.0 and not metrics["finite"].item() and "tokens" not in metrics
    assert (new.w.numpy() == 0.0).all()


# -- narrow computations -----------------------------------------------------------------------------


def test_narrow_computations_have_wide_parameters_state_and_sums():
    config = TINY.replace(compute="bfloat16", layers=1)
    mesh, layout = "data=2", wf.Layout("batch:data", optimizer="d_model:data")
    step = train.train_step(optim.AdamW(0.02), micro=2, average=0.9)
    model = nn.init(Transformer(config), jax.random.key(0), mesh, layout)
    program, state, losses = wf.spmd(step, mesh, layout, donate=(0, 1)), step.init(model), []
    tokens = np.random.default_rng(0).integers(0, 8, (8, 4)).astype(np.int32)
    rows = Batch(*(wf.tensor(tokens, "batch=8 length=4") for _ in range(2)))
    plan = program.plan(model, state, rows, None)
    sums = sorted(c.bytes for c in plan.collectives if c.kind == "reduce-scatter")
    assert sums == sorted(4 * p.size for p in nn.parameters(model).values())
    for _ in range(8):
        metrics, model, state = program(model, state, rows, None)
        losses.append(metrics["loss"].item())
    assert losses[-1] < 0.7 * losses[0]
    stored = jax.tree.leaves((model, state["average"], state["optimizer"]["mean"]), is_leaf=wf.is_tensor)
    assert {t.dtype for t in stored} == {jnp.dtype(jnp.float32)}
    assert "bf16" in str(program.jaxpr(model, state, rows, None))


# -- mistakes ----------------------------------------------------------------------------------------

ADAM = optim.AdamW(0.1)


def parts(weight, **more):
    model, rows = regression("dict")
    step = wf.spmd(train.train_step(ADAM, micro=2, weight=weight))
    return step(model, ADAM.init(model), rows | more, None)  # wrong


MISTAKES = {
    "step_in_half_a_part": lambda: train.train_step(ADAM, micro=0.5),  # wrong
    "step_with_settings_out_of_range": lambda: train.train_step(ADAM, clip=0.0, average=1.0),  # wrong
    "rows_that_parts_do_not_divide": lambda: train.train_step(ADAM, micro=5)(  # wrong
        net(), ADAM.init(net()), batch(0), None
    ),
    "batch_without_rows": lambda: train.train_step(ADAM, micro=2)(  # wrong
        net(), ADAM.init(net()), Batch(wf.ones("rows=4 length=3", jnp.int32)), None
    ),
    "micro_batches_of_unknown_weight": lambda: train.train_step(ADAM, micro=2)(  # wrong
        regression("dict")[0], {}, regression("dict")[1], None
    ),
    "micro_batches_of_one_weight": lambda: parts(lambda batch: 1),
    "weight_of_each_row": lambda: parts(lambda batch: batch["importance"]),
    "weight_of_nothing": lambda: parts(lambda batch: 0),
    "weight_that_is_a_tensor": lambda: train.train_step(ADAM, weight=wf.ones("batch=2")),  # wrong
    "micro_batches_of_raw_arrays": lambda: parts(train.count_rows, mask=np.ones(12), key=jax.random.key(0)),
    "state_without_average": lambda: train.train_step(ADAM, average=0.9)(  # wrong
        net(), ADAM.init(net()), batch(0), None
    ),
    "step_without_optimizer": lambda: train.train_step(0.1),  # wrong
    "step_with_a_seed": lambda: train.train_step(ADAM)(net(), ADAM.init(net()), batch(0), 3),  # wrong
    "mean_of_no_models": lambda: optim.average_models(iter([])),  # wrong
    "average_of_other_parameters": lambda: optim.update_ema({}, net(), 0.9),  # wrong
}


@pytest.mark.parametrize("name", MISTAKES)
def test_messages(name, mistake):
    mistake(name, MISTAKES[name], "messages/train")
