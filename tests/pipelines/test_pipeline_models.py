"""Transformers in stages: losses, gradients and training are those of the model on one device."""

import functools

import jax
import numpy as np
import pytest
from compare import assert_same

import weft as wf
from weft import nn, optim, train
from weft.models import Batch, Config, Transformer

SIZES = dict(vocab=64, d_model=16, d_ff=32, heads=2, d_kv=8, longest=16, dropout=0.1)
KEY = jax.random.key(7)

# Models: what is changed of a language model of eight layers.
MODELS = {
    "language model": {},
    "six layers": {"layers": 6},
    "mixture": {"layers": 4, "experts": 4, "expert_top": 2},
    "translation": {"layers": 4, "kind": "encoder_decoder", "positions": "relative", "decoder_layers": 5},
    "rotary, remat": {"layers": 4, "positions": "rotary", "kv_heads": 1, "remat": "dots"},
    "hashed": {"layers": 4, "attention": "lsh", "lsh_chunk": 4},
}
PACKED = ("language model", "six layers", "mixture", "rotary, remat")


def model(name, **pipeline):
    return Transformer(Config(**({"layers": 8, **SIZES} | MODELS[name] | pipeline)))


def rows(step, name, count=8):
    """A batch with packed rows, and some positions of weight 0."""
    draw = np.random.default_rng(step)
    dims = [wf.Dim("batch", count), wf.Dim("length", 12)]
    tokens, targets = (wf.tensor(draw.integers(1, 64, (count, 12)), dims) for _ in range(2))
    weights = (draw.random((count, 12)) > 0.2).astype(np.float32)
    weights[1] = 0.0  # a row of padding
    more = {"weights": wf.tensor(weights, dims)}
    if name in PACKED:
        more["segments"] = wf.tensor(np.sort(draw.integers(1, 3, (count, 12)), axis=1), dims)
    if name == "translation":
        inputs = [wf.Dim("batch", count), wf.Dim("length", 10)]
        more["inputs"] = wf.tensor(draw.integers(1, 64, (count, 10)), inputs)
    return Batch(tokens, targets, **more)


@functools.cache
def drawn(name):
    return nn.init(model(name), jax.random.key(0))


def value_and_grad(module, batch):
    return wf.value_and_grad(lambda module: module.loss(batch, KEY))(module)


@functools.cache
def on_one_device(name):
    loss, grads = wf.spmd(value_and_grad)(drawn(name), rows(0, name))
    return loss.item(), [t.numpy() for t in jax.tree.leaves(grads, is_leaf=wf.is_tensor)]


def with_parameters(name, **pipeline):
    """The drawn parameters in a model with another pipeline."""
    new = nn.specs(model(name, **pipeline))
    leaves = jax.tree.leaves(drawn(name), is_leaf=wf.is_tensor)
    return jax.tree.unflatten(jax.tree.structure(new, is_leaf=wf.is_tensor), leaves)


ALL = "layers:pipe batch:data heads:model d_ff:model vocab:pipe"
CASES = [  # model, mesh, layout, schedule, micro-batches
    ("language model", "pipe=2 data=2 model=2", ALL, "gpipe", 2),
    ("mixture", "pipe=2 data=4", "layers:pipe batch:data experts:data", "1f1b", 2),
]
SLOW = [
    ("mixture", "pipe=2 data=2 model=2", ALL, "gpipe", None),
    ("translation", "pipe=4 data=2", "layers:pipe batch:data", "gpipe", 4),
    ("rotary, remat", "pipe=2 data=2", "layers:pipe batch:data", "1f1b", 4),
    *(("language model", f"pipe={k}", "layers:pipe", s, m)
      for k in (2, 4, 8) for m in (1, 2, 8) for s in ("gpipe", "1f1b")),
    *(("language model", "pipe=2 data=2 model=2", ALL, "1f1b", m) for m in (1, 2, 4)),
    *(("six layers", "pipe=4", "layers:pipe", s, 2) for s in ("gpipe", "1f1b")),
    *(("translation", "pipe=2 data=2 model=2", ALL, s, 2) for s in ("gpipe", "1f1b")),
    *(("hashed", "pipe=2 data=2", "layers:pipe batch:data", s, 2) for s in ("gpipe", "1f1b")),
    ("language model", "pipe=2 data=3", "layers:pipe batch:data", "gpipe", 4),  # rows that don't divide
    ("language model", "pipe=2 data=2", wf.Layout("layers:pipe batch:data", params="d_model:data"), "gpipe", 4),
    ("language model", "pipe=2 data=2", wf.Layout("layers:pipe batch:data", params="d_model:data"), "1f1b", 4),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_gradients(case):
    equals_one_device(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_losses_and_gradients_at_length(case):
    equals_one_device(*case)


def equals_one_device(name, mesh, layout, schedule, micro):
    module = with_parameters(name, pipeline=schedule, pipeline_micro=micro)
    program = wf.spmd(value_and_grad, mesh, layout)
    loss, grads = program(module, rows(0, name))
    want, want_grads = on_one_device(name)
    np.testing.assert_allclose(loss.item(), want, rtol=1e-6)
    for got, wanted in zip(jax.tree.leaves(grads, is_leaf=wf.is_tensor), want_grads, strict=True):
        assert_same(got, wanted, rtol=2e-5, atol=2e-6 * max(1.0, float(np.abs(wanted).max())))
    if wf.Layout.of(layout).rules_for("param") == wf.Layout.of(layout).rules_for():
        plan = program.plan(module, rows(0, name))
        assert not [c for c in plan.collectives if c.kind == "all-gather" and "pipe" in c.axes]


# Training

TRAINED = [
    ("language model", "pipe=4 data=2", "layers:pipe batch:data", "gpipe", None),
    *(("language model", f"pipe={k}", "layers:pipe", s, 8) for k in (2, 4, 8) for s in ("gpipe", "1f1b")),
    ("language model", "pipe=2 model=2", "layers:pipe heads:model d_ff:model", "gpipe", 2),
    ("language model", "pipe=2 data=2 model=2", ALL, "1f1b", 2),
    ("six layers", "pipe=4 data=2", "layers:pipe batch:data", "gpipe", 4),
    ("six layers", "pipe=4 data=2", "layers:pipe batch:data", "1f1b", 1),
]


@functools.cache
def trained_on_one_device(name):
    return steps(drawn(name), name, None, None)


def steps(module, name, mesh, layout):
    """The losses of 20 steps, and the parameters at last."""
    step = train.train_step(optim.Momentum(0.05, momentum=0.9))
    program = wf.spmd(step, mesh, layout)
    state = step.init(module)
    losses = []
    for n in range(20):
        metrics, module, state = program(module, state, rows(n, name), jax.random.key(n))
        losses.append(metrics["loss"].item())
    return losses, jax.tree.leaves(module, is_leaf=wf.is_tensor)


def equals_training(name, mesh, layout, schedule, micro):
    module = with_parameters(name, pipeline=schedule, pipeline_micro=micro)
    losses, params = steps(module, name, mesh, layout)
    want, want_params = trained_on_one_device(name)
    assert want[-1] < want[0]
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    for got, wanted in zip(params, want_params, strict=True):
        assert_same(got, wanted.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_twenty_steps(case):
    equals_training(*case)


# Memory

WIDE = dict(vocab=512, d_model=128, d_ff=512, heads=4, d_kv=32, layers=16, longest=128)


@functools.cache
def memory(stages, schedule, micro):
    """The planned peak of a loss with its gradients, XLA's own number, and the bytes of one batch of activations."""
    module = nn.specs(Transformer(Config(**WIDE, pipeline=schedule, pipeline_micro=micro)))
    tokens = wf.spec("batch=32 length=128", "int32")
    program = wf.spmd(value_and_grad, f"pipe={stages}", "layers:pipe vocab:pipe")
    args = module, Batch(tokens, tokens)
    found = program.lower(*args).compile().memory_analysis()
    total_bytes = found.temp_size_in_bytes + found.argument_size_in_bytes + found.output_size_in_bytes
    return program.plan(*args).memory, total_bytes - found.alias_size_in_bytes, 32 * 128 * 128 * 4


@pytest.mark.parametrize(("stages", "micro"), [(2, 8), (4, 16)])
def test_memory_is_what_is_planned(stages, micro):
    """And is that of GPipe: a batch of boundaries, and the layers of a stage for one micro-batch."""
    plan, measured, _ = memory(stages, "gpipe", micro)
    assert abs(plan.peak / measured - 1) < 0.15
    other, other_measured, _ = memory(stages, "1f1b", micro)
    assert abs(other.peak / other_measured - 1) < 0.15
    assert other_measured < measured and other.peak < plan.peak


@pytest.mark.slow
def test_memory_follows_gpipe():
    """Peak = a·N + b·(L/K)·(N/M): two points give a and b, the others lie on it."""
    points = {(k, m): memory(k, "gpipe", m)[0] for k in (2, 4) for m in (4, 8, 16)}
    one = 32 * 128 * 128 * 4
    activation_bytes = {at: plan.peak - 2 * plan.params for at, plan in points.items()}
    slope = (activation_bytes[2, 4] - activation_bytes[2, 16]) / (16 / 2 * one * (1 / 4 - 1 / 16))
    for k in (2, 4):
        for m in (4, 8, 16):
            fixed = activation_bytes[2, 16] - slope * 16 / 2 * one / 16
            assert activation_bytes[k, m] == pytest.approx(fixed + slope * 16 / k * one / m, rel=0.15)
