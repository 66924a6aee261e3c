"""wf.optimizer: optax's transformations on every layout, several updates in a row, against optax itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import assert_same, real
from test_optax_layouts import loss, raw_loss
from tiers import slow_except

import weft as wf
from weft import nn, optim, train
from weft.core.tensor import Tensor


def by_shape(matrix, other):
    """Something for each parameter, matrices and others apart."""
    return lambda params: jax.tree.map(lambda p: matrix if p.ndim == 2 else other, params)


TRANSFORMATIONS = {
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(optax.linear_schedule(0.1, 0.01, 5), weight_decay=0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=4),
    "lion": optax.lion(0.01, weight_decay=0.1),
    "lamb": optax.lamb(0.1, weight_decay=0.1),
    "lars": optax.lars(0.1, weight_decay=0.1),
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
    "adaptive clipping": optax.chain(optax.adaptive_grad_clip(0.05), optax.sgd(0.1)),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "multi-steps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "rmsprop": optax.rmsprop(0.1),
    "adagrad": optax.adagrad(0.1),
    "masked": optax.masked(optax.adam(0.1), by_shape(True, False)),
    "frozen": optax.chain(optax.adam(0.1), optax.masked(optax.set_to_zero(), by_shape(False, True))),
    "partition": optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, by_shape("a", "b")),
    "muon": optax.contrib.muon(0.1),
    "sm3": optax.masked(optax.sm3(0.1), by_shape(True, False)),  # optax's own takes no scalars
    "lbfgs": optax.lbfgs(0.1, linesearch=None),
    "polyak_sgd": optax.polyak_sgd(1.0),
    "plateau": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, rtol=0.5)),
}
ASKING = ("polyak_sgd", "plateau")  # for the loss
LAYOUTS = {
    "one device": None,
    "data": wf.Layout("batch:x"),
    "model": wf.Layout("h:y"),
    "both": wf.Layout("batch:x h:y"),
    "zero-1": wf.Layout("batch:x h:y", optimizer="d:x"),
    "zero-3": wf.Layout("batch:x h:y", params="d:x", optimizer="d:x"),
}
MESH = wf.Mesh("x=2 y=2")
STEPS = 4
SIZES = {"even": "d=6 h=4", "uneven": "d=7 h=5"}


def start(sizes):
    d, h = wf.dims(SIZES[sizes])
    return {
        "w": wf.parameter(real(0, [d, h])),
        "v": [wf.parameter(real(1, [h, d]))],
        "bias": wf.parameter(real(2, [h])),
        "gain": wf.parameter(wf.tensor(np.float32(2.0), ())),
    }


def given(step, sizes):
    """A batch, and what one optimizer's gradients are multiplied by: once, not a number."""
    d, _ = wf.dims(SIZES[sizes])
    return real(10 + step, [wf.Dim("batch", 6), d]), wf.tensor(np.float32(np.nan if step == 1 else 1.0), ())


def gradients(name, grads, poison):
    if name != "apply_if_finite":
        return grads
    return jax.tree.map(lambda g: g * poison, grads, is_leaf=wf.is_tensor)


def further(name, value):
    return {"value": value} if name in ASKING else {}


def arrays(tree):
    return jax.tree.map(lambda t: t.array, tree, is_leaf=wf.is_tensor)


@functools.cache
def plain(sizes):
    """Parameters and states after each step, on plain arrays."""

    @jax.jit
    def step(params, states, x, poison):
        (value, grads), new = jax.value_and_grad(raw_loss)(params["adam"], x), {}
        for name, tx in TRANSFORMATIONS.items():
            given = gradients(name, grads, poison), states[name], params[name]
            updates, state = tx.update(*given, **further(name, value))
            new[name] = optax.apply_updates(params[name], updates), state
        return [{name: pair[n] for name, pair in new.items()} for n in (0, 1)]

    params = dict.fromkeys(TRANSFORMATIONS, arrays(start(sizes)))
    states = {name: tx.init(params[name]) for name, tx in TRANSFORMATIONS.items()}
    found = []
    for n in range(STEPS):
        params, states = step(params, states, *arrays(given(n, sizes)))
        found.append((params, states))
    return found


OPTIMIZERS = {name: wf.optimizer(tx) for name, tx in TRANSFORMATIONS.items()}


def step(params, states, x, poison):
    value, grads = wf.value_and_grad(loss)(params["adam"], x)
    new = {
        name: opt.apply(gradients(name, grads, poison), states[name], params[name], **further(name, value))
        for name, opt in OPTIMIZERS.items()
    }
    return [{name: pair[n] for name, pair in new.items()} for n in (0, 1)]


@functools.cache
def ours(layout, sizes):
    """The same by Weft: all transformations in one program."""
    layout = LAYOUTS[layout]
    mesh = None if layout is None else MESH
    program = wf.spmd(step, mesh, layout)
    first = jax.tree.map(lambda t: wf.place(t, mesh, layout), start(sizes), is_leaf=wf.is_tensor)
    params = dict.fromkeys(TRANSFORMATIONS, first)
    states = wf.spmd(lambda p: {name: opt.init(p) for name, opt in OPTIMIZERS.items()}, mesh, layout)(first)
    found = []
    for n in range(STEPS):
        params, states = program(params, states, *given(n, sizes))
        found.append((params, states))
    assert len(program.traces) == 1  # what comes back goes in again, and nothing is new
    return found


@pytest.mark.filterwarnings("ignore::weft.core.errors.LayoutWarning")  # init has no batch
@pytest.mark.parametrize(
    "layout, sizes",
    slow_except(
        [("zero-3", "uneven"), ("data", "uneven")],
        [("zero-3", "even"), *((name, "uneven") for name in LAYOUTS)],
    ),
)
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_equals_optax(name, layout, sizes):
    for n, (got, want) in enumerate(zip(ours(layout, sizes), plain(sizes), strict=True)):
        leaves, tree = jax.tree.flatten([part[name] for part in got], is_leaf=wf.is_tensor)
        expected, expected_tree = jax.tree.flatten([part[name] for part in want])
        assert tree == expected_tree
        for t, a in zip(leaves, expected, strict=True):
            if wf.is_tensor(t):
                assert_same(t, a, name=f"{name} after {n + 1} steps", rtol=2e-5, atol=2e-6)
            else:
                np.testing.assert_allclose(t, a, rtol=2e-5, atol=2e-6)


def test_one_step_was_not_finite():
    before, after = (plain("uneven")[n][0]["apply_if_finite"]["w"] for n in (0, 1))
    np.testing.assert_array_equal(before, after)  # or the test above would not show that norms are global


@pytest.mark.parametrize("layout", ["", "h:y", "d:x h:y", wf.Layout("h:y", params="d:x")], ids=str)
def test_a_search_along_a_line(layout):
    """It requires a function of global arrays, and gradients whose dims may be in another order."""
    tx, first = optax.lbfgs(), start("uneven")["w"]
    opt, goal = wf.optimizer(tx), first.array[::-1] ** 2

    def distance(w):
        return jnp.sum(jnp.cosh(w - goal))

    def step(w, state):
        missing = w - wf.tensor(goal, w.dims)
        value, g = wf.sum(wf.cosh(missing)), wf.transpose(wf.sinh(missing), w.dims[::-1])
        return opt.apply(g, state, w, value=value, grad=g, value_fn=distance)

    @jax.jit
    def plain(w, state):
        value, g = jax.value_and_grad(distance)(w)
        updates, state = tx.update(g, state, w, value=value, grad=g, value_fn=distance)
        return w + updates, state

    w, want, program = first, first.array, wf.spmd(step, MESH, layout)
    state, want_state = opt.init(w), tx.init(want)
    for _ in range(3):
        (w, state), (want, want_state) = program(w, state), plain(want, want_state)
        assert_same(w, want, rtol=1e-4, atol=1e-5)


# -- as the optimizer of a train step ----------------------------------------------------------------


class Net(nn.Module):
    """The two-layer network of above as a model."""

    w: Tensor
    v: Tensor

    def loss(self, batch, key):
        hidden = wf.tanh(wf.einsum(batch, self.w, out=["batch", "h"]))
        return wf.mean(wf.square(wf.einsum(hidden, self.v, out=["batch", "d"]) - batch))


def net():
    d, h = wf.dims(SIZES["uneven"])
    return Net(wf.parameter(real(0, [d, h])), wf.parameter(real(1, [h, d])))


def test_in_a_train_step():
    """An optax transformation, or wf.optimizer of it, is an optimizer like the package's own."""
    options = {"clip": 0.5, "average": 0.9, "skip_nonfinite": True, "micro": 2, "weight": train.count_rows}
    tx = optax.adamw(0.01, weight_decay=0.1)
    found = {}
    for name, optimizer in {"ours": optim.AdamW(0.01, weight_decay=0.1), "optax": tx}.items():
        step = train.train_step(optimizer, **options)
        model = nn.module.map_parameters(lambda t: wf.place(t, MESH, LAYOUTS["zero-1"]), net())
        state, program = step.init(model), wf.spmd(step, MESH, LAYOUTS["zero-1"])
        for n in range(2):
            metrics, model, state = program(model, state, given(n, "uneven")[0], None)
        bad = given(0, "uneven")[0] * jnp.inf
        skip, same_model, same_state = program(model, state, wf.place(bad, None, None), None)
        assert metrics["finite"] and not skip["finite"] and len(program.traces) == 1
        for old, new in zip(*map(jax.tree.leaves, [(model, state), (same_model, same_state)]), strict=True):
            np.testing.assert_array_equal(old, new)
        found[name] = model, state["average"], metrics["grad_norm"]
    for t, expected in zip(*(jax.tree.leaves(found[k], is_leaf=wf.is_tensor) for k in found), strict=True):
        assert t.role == expected.role
        assert_same(t, expected.array, rtol=2e-5, atol=2e-6)
    assert train.train_step(tx).optimizer.tx is tx


def test_specs_have_states_of_specs():
    """A step with an optax transformation is planned without values."""
    step, x = train.train_step(wf.optimizer(optax.adam(0.1))), wf.spec("batch=6 d=6")
    model = Net(wf.spec("d=6 h=4", role="param"), wf.spec("h=4 d=6", role="param"))
    layout = wf.Layout("batch:x", optimizer="d:x")
    plan = wf.spmd(step, "x=2", layout).plan(model, step.init(model), x, None)
    assert (plan.memory.params, plan.memory.optimizer) == (4 * 48, 8 * 48 // 2)


def test_an_eager_step_is_compiled_once():
    """Each call created a new function, which JAX compiled again."""
    traced = []

    def update(grads, state, params=None):
        traced.append(1)
        return jax.tree.map(lambda g: -0.5 * g, grads), state

    made = wf.optimizer(optax.GradientTransformation(lambda params: (), update))
    w, state = wf.parameter(wf.ones("a=3")), ()
    for _ in range(4):
        w, state = made.apply(wf.ones("a=3"), state, w)
    assert len(traced) == 1
    np.testing.assert_allclose(w.numpy(), -1.0)
