"""Collectives are exact: those that the lowering table calls for, in the jaxpr and in compiled HLO."""

import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import bytes_by_axes, collective_bytes
from networks import (
    PAPER,
    accumulated,
    batch,
    d_ff,
    d_kv,
    d_model,
    heads,
    hidden,
    io,
    layers,
    length,
    micro,
    network,
    parameters,
    random,
    small,
    two_layers,
)

import weft as wf
from weft.core.placement import with_role


def traffic(program, *args, scalars=False):
    """`{(kind, axes): bytes}` of the jaxpr, checked against the compiled HLO's bytes per axis."""
    planned, by_axes = Counter(), Counter()
    for c in program.collectives(*args):
        axes = tuple(a for a in program.mesh.names if a in c.axes)
        by_axes[axes] += c.bytes * c.count
        if c.bytes > 4 or scalars:
            planned[c.kind, axes] += c.bytes * c.count
    text = program.compile(*args).as_text()
    assert bytes_by_axes(text, program.mesh) == dict(by_axes), "compiled HLO has other bytes"
    return dict(planned)


# The paper's worked example


@pytest.mark.parametrize(("mesh", "layout", "values"), [p[1:] for p in PAPER], ids="ABCDE")
def test_two_layers_send_the_bytes_of_the_paper(mesh, layout, values):
    program = wf.spmd(wf.grad(two_layers, argnums=(0, 1, 2)), mesh, layout)
    args = random(io, hidden), random(hidden, io), random(batch, io)
    want = {("all-reduce", axes): 4 * n for axes, n in values.items()}
    assert traffic(program, *args) == want


def test_two_dims_on_one_axis_are_illegal():
    program = wf.spmd(two_layers, "all=8", "batch:all hidden:all")
    with pytest.raises(wf.WeftError, match="batch and hidden"):
        program(random(io, hidden), random(hidden, io), random(batch, io))


# Attention's projections: one tensor, three uses, one backward all-reduce


def test_q_k_and_v_of_one_tensor_share_one_backward_all_reduce():
    def loss(x, wq, wk, wv):
        h = wf.tanh(x)
        q, k, v = (wf.einsum(h, w, out=[small, length, heads, d_kv]) for w in (wq, wk, wv))
        return wf.sum(q * k * v)

    program = wf.spmd(wf.grad(loss, argnums=0), "data=4 model=2", "batch:data heads:model")
    weights = [random(d_model, heads, d_kv, seed=n) for n in range(3)]
    got = traffic(program, random(small, length, d_model), *weights)
    assert got == {("all-reduce", ("model",)): 4 * 8 * 8 * 16 // 4}


def test_a_sequence_parallel_block_gathers_and_scatters_each_way():
    sequence = wf.Dim("sequence", 8)

    def loss(x, w, v):
        h = wf.tanh(x).rename(sequence="length")
        h = wf.relu(wf.einsum(h, w, out=[small, length, d_ff]))
        y = wf.einsum(h, v, out=[small, length, d_model]).rename(length="sequence")
        return wf.sum(wf.square(x + y))

    layout = "batch:data sequence:model d_ff:model"
    program = wf.spmd(wf.grad(loss, argnums=0), "data=4 model=2", layout)
    args = random(small, sequence, d_model), random(d_model, d_ff), random(d_ff, d_model)
    full = 4 * 2 * 8 * 16
    assert traffic(program, *args) == {
        ("all-gather", ("model",)): 2 * full,
        ("reduce-scatter", ("model",)): 2 * full,
    }


def test_a_sum_of_two_pending_sums_is_one_all_reduce():
    def f(x, w1, w2):
        both = wf.einsum(x, w1, out=[small, d_ff]) + wf.einsum(x, w2, out=[small, d_ff])
        return wf.tanh(both)

    program = wf.spmd(f, "model=2", "d_model:model")
    args = random(small, d_model), random(d_model, d_ff), random(d_model, d_ff, seed=1)
    assert traffic(program, *args) == {("all-reduce", ("model",)): 4 * 8 * 32}


def test_scalars_casts_transposes_and_sums_keep_a_sum_pending():
    def f(x, w):
        y = wf.einsum(x, w, out=[small, d_ff]) * 2.0 / 3.0
        y = -wf.transpose(y, [d_ff, small]).astype(jnp.float32)
        return wf.exp(wf.sum(y, d_ff))

    program = wf.spmd(f, "model=2", "d_model:model")
    got = traffic(program, random(small, d_model), random(d_model, d_ff))
    assert got == {("all-reduce", ("model",)): 4 * 8}


def test_a_rename_that_splits_a_pending_sum_is_a_reduce_scatter():
    def f(x, w):
        return wf.tanh(wf.einsum(x, w, out=[small, d_ff]).rename(d_ff="columns"))

    program = wf.spmd(f, "model=2", "d_model:model columns:model")
    got = traffic(program, random(small, d_model), random(d_model, d_ff))
    assert got == {("reduce-scatter", ("model",)): 4 * 8 * 32}


def test_a_rename_that_splits_is_a_slice_and_its_transpose_a_gather():
    def loss(x):
        return wf.sum(wf.square(x.rename(d_ff="columns")))

    program = wf.spmd(wf.grad(loss), "model=2", "columns:model")
    assert traffic(program, random(small, d_ff)) == {("all-gather", ("model",)): 4 * 8 * 32}


def test_a_rename_that_moves_a_split_is_an_all_to_all():
    def f(x):
        return wf.tanh(wf.tanh(x).rename(batch="rows", d_ff="columns"))

    program = wf.spmd(f, "model=2", "batch:model columns:model")
    assert traffic(program, random(small, d_ff)) == {("all-to-all", ("model",)): 4 * 8 * 32 // 2}


# A split vocabulary

vocab = wf.Dim("vocab", 64)


def test_look_up_and_cross_entropy_never_gather_the_table():
    def loss(table, tokens, targets):
        x = wf.take(table, tokens, vocab)
        logits = wf.einsum(wf.tanh(x), table, out=[small, length, vocab])
        return wf.mean(wf.logsumexp(logits, vocab) - wf.take(logits, targets, vocab))

    program = wf.spmd(wf.value_and_grad(loss), "data=4 model=2", "batch:data vocab:model")
    ids = wf.tensor(np.arange(64, dtype=np.int32).reshape(8, 8), [small, length])
    got = traffic(program, random(vocab, d_model), ids, ids)
    tokens, table = 2 * 8, 64 * 16 // 2
    assert got == {
        # the embedding and its gradient; maximum, total and chosen logit
        ("all-reduce", ("model",)): 4 * (2 * tokens * 16 + 3 * tokens),
        ("all-reduce", ("data",)): 4 * table,
    }


def test_softmax_over_a_split_dim_reduces_only():
    program = wf.spmd(wf.grad(lambda x: wf.sum(wf.square(wf.softmax(x, vocab)))), "m=4", "vocab:m")
    got = traffic(program, random(small, vocab))
    assert set(got) == {("all-reduce", ("m",))}
    assert got["all-reduce", ("m",)] == 4 * 8 * 3  # maximum, total; one total backward


# Data-parallel gradients, micro-batches, ZeRO

COUNT = 3 * (16 + 2 * 16 * 32)  # parameters


@pytest.mark.parametrize("micro_batches", [False, True], ids=["full batch", "micro-batches"])
def test_data_parallel_gradients_travel_once(micro_batches):
    fn = accumulated if micro_batches else wf.grad(network)
    x = random(micro, small, d_model) if micro_batches else random(small, d_model)
    program = wf.spmd(fn, "data=8", "batch:data")
    assert traffic(program, parameters(), x) == {("all-reduce", ("data",)): 4 * COUNT}


@pytest.mark.parametrize("micro_batches", [False, True], ids=["full batch", "micro-batches"])
def test_with_a_model_axis_too(micro_batches):
    fn = accumulated if micro_batches else wf.grad(network)
    x = random(micro, small, d_model) if micro_batches else random(small, d_model)
    program = wf.spmd(fn, "data=4 model=2", "batch:data d_ff:model")
    got = traffic(program, parameters(), x)
    times = 4 if micro_batches else 1
    activations = 4 * 2 * 16 * 3 * times  # per layer one forward and one backward
    assert got == {
        ("all-reduce", ("data",)): 4 * (3 * 16 + 3 * 2 * 16 * 32 // 2),
        ("all-reduce", ("model",)): 2 * activations,
    }


def test_stored_parameters_are_gathered_forward_and_scattered_backward():
    layout = wf.Layout("batch:data", params="d_model:data")
    program = wf.spmd(wf.grad(network), "data=8", layout)
    got = traffic(program, parameters(), random(small, d_model))
    assert got == {
        ("all-gather", ("data",)): 4 * COUNT,
        ("reduce-scatter", ("data",)): 4 * COUNT,
    }


def test_gradients_meet_the_optimizer_state_by_a_reduce_scatter():
    def step(params, momentum, x):
        grads = wf.grad(network)(params, x)
        new = [m * 0.9 + g for m, g in zip(momentum, grads, strict=True)]
        return [wf.parameter(p - 0.1 * m) for p, m in zip(params, new, strict=True)]

    layout = wf.Layout("batch:data", optimizer="d_model:data")
    program = wf.spmd(step, "data=8", layout)
    state = [with_role(p * 0.0, "optimizer") for p in parameters()]
    got = traffic(program, parameters(), state, random(small, d_model))
    assert got == {
        ("reduce-scatter", ("data",)): 4 * COUNT,
        ("all-gather", ("data",)): 4 * COUNT,
    }


def test_the_hlo_reader_sees_trip_counts():
    """The oracle itself: a collective in a scanned body counts once a step."""

    def f(x):
        return wf.scan(lambda c, _: (wf.tanh(c * wf.sum(c, small)), None), x, None, layers)[0]

    program = wf.spmd(f, "data=8", "batch:data")
    x = random(small, d_model)
    text = program.compile(x).as_text()
    assert collective_bytes(text, program.mesh) == {("all-reduce", ("data",)): 3 * 4 * 16}


def test_draws_move_nothing():
    def f(key):
        return wf.random.normal(key, [small, d_model]), wf.random.uniform(key, [vocab])

    program = wf.spmd(f, "data=4 model=2", "batch:data vocab:model")
    assert traffic(program, jax.random.key(0), scalars=True) == {}


def test_element_counts_are_those_of_padded_slices():
    rows = wf.Dim("rows", 9)
    program = wf.spmd(lambda x: wf.tanh(x.rename(rows="all")), "x=8", "rows:x")
    x = random(rows)
    assert traffic(program, x) == {("all-gather", ("x",)): 4 * math.ceil(9 / 8) * 8}


def test_a_parameter_that_is_cast_to_a_narrower_type_has_its_gradient_summed_in_its_own():
    """The weight is made varying before the cast, so its gradient is f32 when it is summed, once."""
    batch, i, o = wf.dims("batch=8 i=4 o=4")

    def loss(w, x):
        narrow = w.astype(jnp.bfloat16)
        y = wf.einsum(x.astype(jnp.bfloat16), narrow, out=[batch, o])
        return wf.mean(y.astype(jnp.float32))

    w, x = wf.spec([i, o], role="param"), wf.spec([batch, i])
    plan = wf.spmd(wf.grad(loss), "data=4", "batch:data").plan(w, x)
    (sent,) = [c for c in plan.collectives if c.phase == "backward"]
    assert (sent.kind, sent.bytes, sent.count) == ("all-reduce", 4 * 4 * 4, 1)
