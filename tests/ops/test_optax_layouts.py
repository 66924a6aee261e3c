"""wf.optimizer: an optax transformation in programs and outside; `test_optax.py` has all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import assert_same, real

import weft as wf
from weft.core.errors import DimError, ProgramError

LAYOUTS = {
    "zero-3": wf.Layout("batch:x h:y", params="d:x", optimizer="d:x"),
    "zero-1": wf.Layout("batch:x", optimizer="d:x+y"),
    "params only": wf.Layout("batch:x", params="d:y h:x"),
}
TRANSFORMATIONS = {
    "adamw": lambda: optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.adamw(optax.linear_schedule(0.1, 0.01, 5), weight_decay=0.1),
    ),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=4),
}


def loss(params, x):
    hidden = wf.tanh(wf.einsum(x, params["w"], out=["batch", "h"]) + params["bias"])
    return wf.mean(wf.square(wf.einsum(hidden, params["v"][0], out=["batch", "d"]) - x)) * params["gain"]


def raw_loss(params, x):
    hidden = jnp.tanh(x @ params["w"] + params["bias"])
    return jnp.mean((hidden @ params["v"][0] - x) ** 2) * params["gain"]


PARAMS = {
    "w": wf.parameter(real(0, "d=6 h=5")),
    "v": [wf.parameter(real(1, "h=5 d=6"))],
    "bias": wf.parameter(real(2, "h=5")),
    "gain": wf.parameter(wf.tensor(np.float32(2.0), ())),
}
X = real(3, "batch=7 d=6")
STEPS = 3


def arrays(tree):
    return jax.tree.map(lambda t: t.array, tree, is_leaf=wf.is_tensor)


@functools.cache
def plain(name):
    """The parameters and the state after a few steps on plain arrays."""
    tx = TRANSFORMATIONS[name]()
    params, x = arrays(PARAMS), X.array
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(raw_loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(STEPS):
        params, state = step(params, state)
    return params, state


@pytest.mark.parametrize("name, layout", [("adamw", "zero-1"), ("adafactor", "params only")])
def test_in_a_program(name, layout):
    mesh, layout = wf.Mesh("x=2 y=2"), LAYOUTS[layout]
    opt = wf.optimizer(TRANSFORMATIONS[name]())

    traced = []

    def step(params, state, x):
        traced.append(1)
        value, grads = wf.value_and_grad(loss)(params, x)
        return *opt.apply(grads, state, params), value

    staged = wf.spmd(step, mesh, layout, donate=(0, 1))
    params = jax.tree.map(lambda t: wf.place(t, mesh, layout), PARAMS, is_leaf=wf.is_tensor)
    params = jax.tree.map(lambda t: t * 1.0, params, is_leaf=wf.is_tensor)  # to be donated
    params = jax.tree.map(wf.parameter, params, is_leaf=wf.is_tensor)
    state = opt.init(params)
    for _ in range(STEPS):
        params, state, _ = staged(params, state, X)
    assert len(staged.traces) == len(traced) == 1  # what comes back goes in again, and nothing is new
    assert_same((params, state), plain(name), rtol=1e-5, atol=1e-6)
    for new, old in zip(*(jax.tree.leaves(p, is_leaf=wf.is_tensor) for p in (params, PARAMS)), strict=True):
        assert (new.dims, new.role) == (old.dims, "param")
        where = wf.place(old, mesh, layout).storage.sharding
        assert new.storage.sharding.is_equivalent_to(where, new.ndim)


@pytest.mark.parametrize("place", [None, "zero-3"])
def test_eagerly(place):
    where = (wf.Mesh("x=2 y=2"), LAYOUTS[place]) if place else (None, None)
    params = jax.tree.map(lambda t: wf.place(t, *where), PARAMS, is_leaf=wf.is_tensor)
    x = wf.place(X, *where)
    opt = wf.optimizer(TRANSFORMATIONS["adamw"]())
    state = opt.init(params)
    for _ in range(STEPS):
        params, state = opt.apply(wf.grad(loss)(params, x), state, params)
    assert_same((params, state), plain("adamw"), rtol=1e-5, atol=1e-6)


def test_update_gives_what_is_to_be_added():
    opt = wf.optimizer(TRANSFORMATIONS["adamw"]())

    def step(params, x):
        return opt.update(wf.grad(loss)(params, x), opt.init(params), params)

    updates, _ = wf.spmd(step, "x=2 y=2", LAYOUTS["zero-3"])(PARAMS, X)
    tx = TRANSFORMATIONS["adamw"]()
    params = arrays(PARAMS)
    want, _ = tx.update(jax.grad(raw_loss)(params, X.array), tx.init(params), params)
    assert_same(updates, want, rtol=1e-5, atol=1e-6)


def test_state_has_the_dims_of_its_parameters():
    mesh, layout = wf.Mesh("x=2 y=2"), wf.Layout("h:x", optimizer="d:y")
    opt = wf.optimizer(optax.adam(0.1))
    for state in (opt.init(PARAMS), wf.spmd(opt.init, mesh, layout)(PARAMS)):
        moments = [t for t in jax.tree.leaves(state, is_leaf=wf.is_tensor) if wf.is_tensor(t)]
        assert [t.dims for t in moments] == 2 * [
            t.dims for t in jax.tree.leaves(PARAMS, is_leaf=wf.is_tensor)
        ]
        assert {t.role for t in moments} == {"optimizer"}
    w = next(t for t in moments if t.dims == PARAMS["w"].dims)
    assert w.storage.addressable_shards[0].data.shape == (3, 3)  # d=6 and h=5 over 2


def test_gradients_meet_the_state_by_a_reduce_scatter():
    opt = wf.optimizer(optax.adam(0.1))

    def step(w, state, x):
        grad = wf.grad(lambda w: wf.sum(wf.tanh(wf.einsum(x, w, out=["batch", "h"]))))(w)
        return opt.apply(grad, state, w)

    w = PARAMS["w"]
    staged = wf.spmd(step, "x=2", wf.Layout("batch:x", optimizer="d:x"))
    found = [(c.kind, c.bytes) for c in staged.collectives(w, opt.init(w), X)]
    assert ("reduce-scatter", 6 * 5 * 4) in found and ("all-reduce", 6 * 5 * 4) not in found


def test_gradients_in_another_order_of_dims():
    opt = wf.optimizer(optax.sgd(1.0))
    w, g = PARAMS["w"], real(5, "h=5 d=6")
    new, _ = opt.apply(g, opt.init(w), w)
    assert_same(new, w.array - g.array.T)


def test_errors():
    opt, w = wf.optimizer(optax.adam(0.1)), PARAMS["w"]
    with pytest.raises(DimError, match="belongs to the parameter"):
        opt.apply(PARAMS["bias"], opt.init(w), w)
    with pytest.raises(ProgramError, match="gradients for"):
        opt.apply([w, w], opt.init(w), w)
    with pytest.raises(ProgramError, match="used inside the program"):
        wf.spmd(lambda w: opt.apply(w, opt.init(w), w)[0] * 2.0, "x=2", "d:x")(w)
    with pytest.raises(ProgramError, match="called on slices"):
        wf.spmd(lambda w: optax.adam(0.1).init(w), "x=2", "d:x")(w)
