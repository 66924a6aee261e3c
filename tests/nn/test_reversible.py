"""Reversible layers compared with plain autodiff of the same computation; their memory and collectives."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same

import weft as wf
from benchmarks.memory import compiled_bytes
from weft import nn
from weft.models import Batch, Config, Transformer

BATCH, LENGTH, D_MODEL, D_FF, HEADS, D_KV = wf.dims("batch=4 length=6 d_model=8 d_ff=12 heads=6 d_kv=2")
MEMORY, LAYERS = LENGTH.rename("memory_length"), wf.Dim("layers", 3)

LAYOUTS = {
    "one device": ("", ""),
    "batch": ("data=4", "batch:data"),
    "model, six heads on four": ("model=4", "heads:model d_ff:model"),
    "both": ("data=2 model=4", "batch:data heads:model d_ff:model"),
    "d_model": ("model=4", "d_model:model"),
    "length, six on four": ("seq=4", "length:seq"),
    "ZeRO-3": ("data=2 model=2", wf.Layout("batch:data heads:model d_ff:model", params="d_model:data")),
}


def draw(seed, *dims):
    values = np.random.default_rng(seed).normal(size=[d.size for d in dims])
    return wf.tensor(0.4 * values, dims)


def arguments():
    """Parameters of layers, their shared bias, the input, the target, keys and positions."""
    shapes = {
        "scale": [D_MODEL],
        "query": [D_MODEL, HEADS, D_KV],
        "key": [D_MODEL, HEADS, D_KV],
        "out": [HEADS, D_KV, D_MODEL],
        "wide": [D_MODEL, D_FF],
        "narrow": [D_FF, D_MODEL],
    }
    layers = {name: wf.parameter(draw(n, LAYERS, *dims)) for n, (name, dims) in enumerate(shapes.items())}
    x, y = draw(7, BATCH, LENGTH, D_MODEL), draw(8, BATCH, LENGTH, D_MODEL)
    keys = jax.random.split(jax.random.key(0), LAYERS.size)
    return layers, draw(6, HEADS, LENGTH, MEMORY), x, y, keys, wf.arange(LENGTH)


def branches(given, shared):
    """Attention and feed-forward with dropout."""
    (p, key), (bias, positions) = given, shared

    def attend(x):
        h = x * p["scale"]
        q = wf.einsum(h, p["query"], out=[BATCH, HEADS, LENGTH, D_KV])
        k = wf.einsum(h.rename(length="memory_length"), p["key"], out=[BATCH, HEADS, MEMORY, D_KV])
        scores = wf.einsum(q, k, out=[BATCH, HEADS, LENGTH, MEMORY]) + bias
        scores = wf.where(positions >= positions.rename(length="memory_length"), scores, -1e9)
        return wf.einsum(wf.softmax(scores, MEMORY), k, p["out"], out=[BATCH, LENGTH, D_MODEL])

    def feed(x):
        h = wf.dropout(wf.tanh(wf.einsum(x, p["wide"], out=[BATCH, LENGTH, D_FF])), 0.3, key)
        return wf.einsum(h, p["narrow"], out=[BATCH, LENGTH, D_MODEL])

    return [attend, feed]


def plain(branches, a, b, stacked, dim, shared=None):
    """The same streams, with JAX's derivative."""

    def layer(streams, given):
        a, b = streams
        for f in branches(given, shared):
            a, b = b, a + f(b)
        return (a, b), None

    return wf.scan(layer, (a, b), stacked, dim)[0]


def gradients(residual, branches=branches):
    def loss(layers, bias, x, y, keys, positions):
        a, b = residual(branches, x, x * 2.0, (layers, keys), LAYERS, (bias, positions))
        return wf.mean(a * y) + wf.mean(wf.square(b))

    return wf.value_and_grad(loss, argnums=(0, 1, 2))


@functools.cache
def expected():
    return wf.spmd(gradients(plain), wf.Mesh())(*arguments())


def assert_same_gradients(actual, expected, tolerance):
    """The tolerance is relative to the largest element of each tensor."""
    actual, expected = (jax.tree.leaves(tree, is_leaf=wf.is_tensor) for tree in (actual, expected))
    for x, y in zip(actual, expected, strict=True):
        assert_same(x, y, rtol=0, atol=tolerance * np.abs(y.numpy()).max())


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_plain_autodiff(name):
    mesh, layout = LAYOUTS[name]
    with jax.enable_x64(True):
        got = wf.spmd(gradients(nn.reversible), mesh, layout)(*arguments())
        assert_same_gradients(got, expected(), 1e-10)


def test_other_keys_drop_others():
    """So that the test above would see a backward pass that drops other elements than the forward pass."""
    with jax.enable_x64(True):
        *rest, keys, positions = arguments()
        keys = jax.random.split(jax.random.key(1), LAYERS.size)
        value, _ = wf.spmd(gradients(nn.reversible), wf.Mesh())(*rest, keys, positions)
        assert abs(value.numpy() - expected()[0].numpy()) > 1e-3


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_branches_outside_programs(count):
    def some(w, shared):
        return [lambda x, n=n: wf.sin(x * w + shared * n) for n in range(count)]

    def loss(residual):
        def f(w, shared, x):
            a, b = residual(some, x, x + 1.0, w, "layers", shared)
            return wf.sum(a * b)

        return wf.value_and_grad(f, argnums=(0, 1, 2))

    with jax.enable_x64(True):
        args = draw(0, LAYERS, D_MODEL), draw(1, D_MODEL), draw(2, BATCH, D_MODEL)
        assert_same_gradients(loss(nn.reversible)(*args), loss(plain)(*args), 1e-10)


def test_tensors_hidden_in_an_object_raise():
    with pytest.raises(wf.TensorTypeError, match="the layers contain a SimpleNamespace"):
        x = draw(2, BATCH, D_MODEL)
        hidden = types.SimpleNamespace(bias=draw(1, D_MODEL))
        nn.reversible(lambda w, s: [lambda x: x * s.bias], x, x, draw(0, LAYERS, D_MODEL), "layers", hidden)


# What is sent


def plan_of(residual, name):
    mesh, layout = LAYOUTS[name]
    return wf.spmd(gradients(residual), mesh, layout).plan(*arguments())


def sent(plan, axis):
    """The bytes and the number of collectives over an axis for gradients, after the loop and inside it."""
    found = [c for c in plan.collectives if axis in c.axes and c.phase == "backward"]
    after, inside = [c for c in found if c.count == 1], [c for c in found if c.count > 1]
    return (sum(c.bytes for c in after), len(after)), sum(c.bytes * c.count for c in inside)


def test_gradients_are_summed_over_data_once():
    assert sent(plan_of(nn.reversible, "batch"), "data") == sent(plan_of(plain, "batch"), "data")
    (summed, count), inside = sent(plan_of(nn.reversible, "both"), "data")
    layers, bias, *_ = arguments()
    # Every parameter and the bias, on each of four devices; the norm's scale is replicated.
    split = sum(layers[n].size for n in layers if n != "scale") + bias.size
    heads = (LAYERS.size * 3 * D_MODEL.size * D_KV.size + LENGTH.size**2) * 2  # two of six heads each
    wide = LAYERS.size * 2 * D_MODEL.size * D_FF.size // 4
    assert split > heads and summed == 4 * (heads + wide + layers["scale"].size)
    assert count == len(layers) + 1 and inside == 0


def test_model_parallel_branches_have_three_sums_where_plain_ones_have_two():
    def sums(residual):
        found = [c for c in plan_of(residual, "both").collectives if c.axes == ("model",)]
        one = 4 * BATCH.size // 2 * LENGTH.size * D_MODEL.size
        assert all(c.bytes == one for c in found)
        return sum(c.count for c in found)

    # Two branches in each of three layers; one sum more where a stream stays pending through a loop.
    assert sums(plain) == 2 * 2 * LAYERS.size + 2
    assert sums(nn.reversible) == 3 * 2 * LAYERS.size + 2


def test_stored_parameters_are_gathered_once_each_way():
    def bytes_of(residual, kind):
        found = plan_of(residual, "ZeRO-3").collectives
        return sum(c.bytes * c.count for c in found if c.kind == kind and c.axes == ("data",))

    assert bytes_of(nn.reversible, "all-gather") == 2 * bytes_of(plain, "all-gather")
    assert bytes_of(nn.reversible, "reduce-scatter") == bytes_of(plain, "reduce-scatter")


# The Transformer


def language_model(**changes):
    numbers = {"vocab": 11, "d_model": 8, "d_ff": 12, "heads": 6, "d_kv": 2, "layers": 2, "longest": 6}
    return Config(**(numbers | {"residual": "reversible"} | changes))


def loss_of(config, key=None):
    return wf.value_and_grad(lambda model, batch: model.loss(batch, key))


@pytest.mark.slow
def test_an_encoder_decoder(monkeypatch):
    config = language_model(
        kind="encoder_decoder", positions="relative", activation="gated_gelu", scaled=False, dropout=0.2
    )
    layout = wf.Layout("batch:data heads:model d_ff:model", params="d_model:data")
    model = nn.init(Transformer(config), jax.random.key(0))
    draw = functools.partial(wf.random.randint, dims=[BATCH, LENGTH], low=0, high=11)
    tokens, targets, inputs = (draw(jax.random.key(n)) for n in range(3))
    batch, key = Batch(tokens, targets, inputs=inputs), jax.random.key(1)
    got = wf.spmd(loss_of(config, key), "data=2 model=4", layout)(model, batch)
    monkeypatch.setattr(nn, "reversible", plain)
    assert_same_gradients(got, wf.spmd(loss_of(config, key), wf.Mesh())(model, batch), 1e-4)


def test_gradients_of_a_narrow_type_are_summed_in_the_wide_one():
    def summed(residual):
        config = language_model(compute="bfloat16", residual=residual)
        tokens = wf.spec([BATCH, LENGTH], jnp.int32)
        args = nn.specs(Transformer(config)), Batch(tokens, tokens)
        return sent(wf.spmd(loss_of(config), "data=4", "batch:data").plan(*args), "data")

    assert summed("reversible") == summed("plain")


# What is held


@functools.cache
def memory(layers, mesh, layout):
    """The plan's memory, and XLA's bytes."""
    sizes = {"vocab": 64, "d_model": 64, "d_ff": 128, "heads": 4, "d_kv": 16, "longest": 128}
    config = language_model(layers=layers, **sizes)
    tokens = wf.spec("batch=16 length=128", jnp.int32)
    program = wf.spmd(loss_of(config), mesh, layout)
    args = nn.specs(Transformer(config)), Batch(tokens, tokens)
    return program.plan(*args).memory, compiled_bytes(program.compile(*args))


ZERO_3 = wf.Layout("batch:data", params="d_model:data")


@pytest.mark.parametrize("mesh, layout", [("", ""), ("data=4", ZERO_3)], ids=["one device", "ZeRO-3"])
def test_memory_does_not_grow_with_depth(mesh, layout):
    """But for parameters and their gradients. (Under data parallelism alone, gradients are there twice: as
    summands, and summed.)"""
    (few, few_bytes), (many, many_bytes) = memory(4, mesh, layout), memory(24, mesh, layout)
    assert many.activations == few.activations
    for m, total in ((few, few_bytes), (many, many_bytes)):
        assert total > m.inputs + m.outputs
    assert many.peak - many.inputs - many.outputs <= 1.2 * (few.peak - few.inputs - few.outputs)
    assert many_bytes - many.inputs - many.outputs <= 1.2 * (few_bytes - few.inputs - few.outputs)


@pytest.mark.parametrize(
    "mesh, layout",
    [("", ""), ("data=2 model=2", "batch:data heads:model d_ff:model")],
    ids=["one device", "both"],
)
def test_plans_foresee_the_memory(mesh, layout):
    found, compiled = memory(24, mesh, layout)
    assert abs(found.peak / compiled - 1) < 0.15
