"""train.*: optimizers over named tensors against optax, and against themselves under every layout."""

import functools
import math
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import assert_same, real
from tiers import slow_except

import weft as wf
from weft import nn, optim
from weft.models import Config, Transformer
from weft.optim.named_tree import named_tensors

# -- one device, against optax -----------------------------------------------------------------------

WARMUP = optim.LinearWarmup(3) * 0.1
OPTAX_WARMUP = optax.linear_schedule(0.0, 0.1, 3)


def matrices(params):
    return jax.tree.map(lambda a: a.ndim > 1, params)


# Optax factors over the two largest dims, whatever they are called, and measures full tensors. So here no
# tensor has a stacking dim, and no three dims of a tensor have the same size.
PAIRS = {
    "sgd": (optim.Momentum(0.1), optax.sgd(0.1)),
    "sgd, schedule": (optim.Momentum(WARMUP), optax.sgd(OPTAX_WARMUP)),
    "momentum": (optim.Momentum(0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9)),
    "nesterov": (
        optim.Momentum(WARMUP, momentum=0.9, nesterov=True),
        optax.sgd(OPTAX_WARMUP, momentum=0.9, nesterov=True),
    ),
    "adamw": (
        optim.AdamW(0.1, beta1=0.8, beta2=0.95, epsilon=1e-6, weight_decay=0.3),
        optax.adamw(0.1, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.3, mask=matrices),
    ),
    "adamw, all decay": (
        optim.AdamW(WARMUP, weight_decay=0.3, decayed="*"),
        optax.adamw(OPTAX_WARMUP, weight_decay=0.3),
    ),
    "lion": (
        optim.Lion(0.1, beta1=0.8, beta2=0.95, weight_decay=0.3, decayed="*"),
        optax.lion(0.1, b1=0.8, b2=0.95, weight_decay=0.3),
    ),
    "adafactor": (
        optim.Adafactor(0.1, min_dim_size_to_factor=4),
        optax.adafactor(0.1, min_dim_size_to_factor=4),
    ),
    "adafactor, momentum": (
        optim.Adafactor(WARMUP, min_dim_size_to_factor=4, beta1=0.7, decay_power=0.7),
        optax.adafactor(OPTAX_WARMUP, min_dim_size_to_factor=4, momentum=0.7, decay_rate=0.7),
    ),
    "adafactor, not factored": (optim.Adafactor(0.1), optax.adafactor(0.1)),
    "adafactor, plain steps": (
        optim.Adafactor(0.1, min_dim_size_to_factor=4, clipping_threshold=None, scale_by_parameter=False),
        optax.adafactor(
            0.1, min_dim_size_to_factor=4, clipping_threshold=None, multiply_by_parameter_scale=False
        ),
    ),
    "adafactor, small threshold": (
        optim.Adafactor(0.1, min_dim_size_to_factor=4, clipping_threshold=0.5),
        optax.adafactor(0.1, min_dim_size_to_factor=4, clipping_threshold=0.5),
    ),
    "clipped": (
        optim.Momentum(0.1),
        optax.chain(optax.clip_by_global_norm(1.5), optax.sgd(0.1)),
    ),
}
SMALL = {
    "cube": [wf.parameter(real(1, "d=6 e=3 h=5"))],
    "bias": wf.parameter(real(2, "h=5")),
    "gain": wf.parameter(wf.tensor(np.float32(2.0), ())),
}


def gradients(step):
    """Of very different sizes, the last ones small."""
    size = 10.0 ** -(step / 2)
    return jax.tree.map(lambda t: real(10 + step, t.dims) * size, SMALL, is_leaf=wf.is_tensor)


def arrays(tree):
    return jax.tree.map(lambda t: t.array, tree, is_leaf=wf.is_tensor)


def clipped(name, grads):
    return optim.clip_by_global_norm(grads, 1.5) if name == "clipped" else grads


@functools.cache
def five_steps():
    """The parameters after each of five steps, ours and optax's; all optimizers in one program."""

    @wf.spmd
    def ours(grads, states, params):
        return {n: opt.update(clipped(n, grads), states[n], params[n]) for n, (opt, _) in PAIRS.items()}

    @jax.jit
    def theirs(grads, states, params):
        new = {}
        for n, (_, tx) in PAIRS.items():
            updates, state = tx.update(grads, states[n], params[n])
            new[n] = optax.apply_updates(params[n], updates), state
        return new

    params, raw = dict.fromkeys(PAIRS, SMALL), dict.fromkeys(PAIRS, arrays(SMALL))
    states = {n: opt.init(SMALL) for n, (opt, _) in PAIRS.items()}
    raw_states = {n: tx.init(arrays(SMALL)) for n, (_, tx) in PAIRS.items()}
    found = []
    for step in range(5):
        grads = gradients(step)
        new, raw_new = ours(grads, states, params), theirs(arrays(grads), raw_states, raw)
        params, states = ({n: pair[k] for n, pair in new.items()} for k in (0, 1))
        raw, raw_states = ({n: pair[k] for n, pair in raw_new.items()} for k in (0, 1))
        found.append((params, raw, states))
    return found


@pytest.mark.parametrize("name", PAIRS)
def test_equals_optax(name):
    for step, (params, raw, _) in enumerate(five_steps()):
        for path, t in named_tensors(params[name]).items():
            want = raw[name]["cube"][0] if path == "cube.0" else raw[name][path]
            assert_same(t, want, name=f"{path} after {step + 1} steps", rtol=2e-5, atol=1e-6)
            assert t.role == "param"


def test_state():
    states = {n: s for n, s in five_steps()[-1][2].items()}
    assert states["sgd"] == {}
    assert list(states["sgd, schedule"]) == ["step"]
    assert sorted(states["momentum"]) == ["momentum"]
    assert sorted(states["adamw"]) == ["mean", "step", "variance"]
    assert list(states["adafactor"]["rows"]) == ["cube.0"]
    assert sorted(states["adafactor"]["variance"]) == ["bias", "gain"]
    assert "rows" not in states["adafactor, not factored"]
    dims = {key: [d.name for d in states["adafactor"][key]["cube.0"].dims] for key in ("rows", "columns")}
    assert dims == {"rows": ["e", "h"], "columns": ["d", "e"]}
    step = states["adamw"]["step"]
    assert (step.dtype, step.dims, int(step)) == (jnp.int32, (), 5)
    assert {t.role for t in jax.tree.leaves(states, is_leaf=wf.is_tensor)} == {"optimizer"}


def test_stacked_tensors_stand_for_several():
    """Adafactor on stacked layers is Adafactor on each: factors, limits and sizes are a layer's own."""
    opt = optim.Adafactor(0.1, min_dim_size_to_factor=4)
    layers = [{"w": real(n, "d=6 h=5") * 3.0**n, "bias": real(9 + n, "h=5")} for n in range(3)]
    grads = [{"w": real(20 + n, "d=6 h=5") * 5.0**n, "bias": real(30 + n, "h=5")} for n in range(3)]

    def together(trees):
        return {key: wf.stack([t[key] for t in trees], wf.Dim("layers", 3)) for key in trees[0]}

    new, state = opt.update(together(grads), opt.init(together(layers)), together(layers))
    assert [d.name for d in state["rows"]["w"].dims] == ["layers", "h"]
    each = [opt.update(g, opt.init(p), p)[0] for g, p in zip(grads, layers, strict=True)]
    for key, want in together(each).items():
        assert_same(new[key], want.array, name=key, rtol=1e-6, atol=1e-7)


def test_narrow_parameters_have_wide_state():
    p = wf.parameter(real(0, "a=6 b=5").astype(jnp.bfloat16))
    g = real(1, "a=6 b=5").astype(jnp.bfloat16)
    opt = optim.AdamW(0.01, weight_decay=0.1)
    new, state = opt.update(g, opt.init(p), p)
    wide, wide_state = opt.update(g.astype(jnp.float32), opt.init(p), p.astype(jnp.float32))
    assert (new.dtype, new.role, state["mean"][""].dtype) == (jnp.bfloat16, "param", jnp.float32)
    assert_same(new, wide.array.astype(jnp.bfloat16))
    assert_same(state["variance"][""], wide_state["variance"][""].array, rtol=1e-6, atol=0)


# -- layouts -----------------------------------------------------------------------------------------

LAYOUTS = {
    "data": wf.Layout("batch:data"),
    "model": wf.Layout("d_ff:model"),
    "both": wf.Layout("batch:data d_ff:model"),
    "zero-1": wf.Layout("batch:data d_ff:model", optimizer="d_model:data"),
    "zero-3": wf.Layout("batch:data d_ff:model", params="d_model:data", optimizer="d_model:data"),
    "params only": wf.Layout("batch:data", params="d_model:data", optimizer=""),
}
MESH = wf.Mesh("data=2 model=2")
OPTIMIZERS = {
    "momentum": optim.Momentum(0.1, momentum=0.9, weight_decay=0.1),
    "adamw": optim.AdamW(0.05 * optim.LinearWarmup(2), weight_decay=0.1),
    "lion": optim.Lion(0.01, weight_decay=0.1),
    "adafactor": optim.Adafactor(optim.paper_schedule(4, 20, 10), min_dim_size_to_factor=4, beta1=0.5),
}


def net(d_model, d_ff):
    """A matrix, a stack of them, and a vector."""
    shapes = {
        "w": f"d_model={d_model} d_ff={d_ff}",
        "blocks": f"layers=2 d_ff={d_ff} d_model={d_model}",
        "scale": f"d_model={d_model}",
    }
    params = {name: wf.parameter(real(n, dims)) for n, (name, dims) in enumerate(shapes.items())}
    return params, real(99, f"batch=6 d_model={d_model}")


def loss(params, x):
    hidden = wf.tanh(wf.einsum(x, params["w"], out=["batch", "d_ff"]))
    y = wf.einsum(hidden, params["blocks"], out=["batch", "d_model"])
    return wf.mean(wf.square(y * params["scale"] - x))


def step(params, states, x):
    """One update by all optimizers of separate parameters, with the gradients of the first optimizer's parameters."""
    grads = wf.grad(loss)(params["adamw"], x)
    clipped = dict.fromkeys(["adamw", "adafactor"], optim.clip_by_global_norm(grads, 0.5))
    grads = dict.fromkeys(OPTIMIZERS, grads) | clipped
    new = {name: opt.update(grads[name], states[name], params[name]) for name, opt in OPTIMIZERS.items()}
    return [{name: pair[n] for name, pair in new.items()} for n in (0, 1)]


def three_steps(sizes, mesh, layout):
    start, x = net(*sizes)
    program = wf.spmd(step, mesh, layout)
    params = dict.fromkeys(OPTIMIZERS, start)
    states = wf.spmd(lambda p: {name: opt.init(p) for name, opt in OPTIMIZERS.items()}, mesh, layout)(start)
    for _ in range(3):
        params, states = program(params, states, x)
    assert len(program.traces) == 1  # what comes back goes in again, and nothing is new
    return params, states


one_device = functools.cache(lambda sizes: three_steps(sizes, None, None))


@pytest.mark.filterwarnings("ignore::weft.core.errors.LayoutWarning")  # init has no batch
@pytest.mark.parametrize(
    "layout, sizes",
    slow_except(
        [("zero-1", (7, 5)), ("zero-3", (7, 5))],
        [(layout, (7, 5)) for layout in LAYOUTS] + [("zero-1", (8, 6))],
    ),
    ids=lambda x: x if isinstance(x, str) else "uneven" if x == (7, 5) else "even",
)
def test_layouts_change_nothing(layout, sizes):
    got, want = three_steps(sizes, MESH, LAYOUTS[layout]), one_device(sizes)
    leaves, tree = jax.tree.flatten(got, is_leaf=wf.is_tensor)
    expected, expected_tree = jax.tree.flatten(want, is_leaf=wf.is_tensor)
    assert tree == expected_tree
    for t, e in zip(leaves, expected, strict=True):
        assert (t.dims, t.role) == (e.dims, e.role)
        assert_same(t, e.array, rtol=2e-5, atol=1e-6)


def test_eagerly_on_a_mesh():
    """Outside programs an update runs as one program, and the state is stored by its rules."""
    opt = OPTIMIZERS["adamw"]
    start, _ = net(7, 5)
    params = {name: wf.place(p, MESH, LAYOUTS["zero-1"]) for name, p in start.items()}
    new, state = opt.update(params, opt.init(params), params)
    want, _ = opt.update(start, opt.init(start), start)
    assert state["mean"]["w"].storage.addressable_shards[0].data.shape == (4, 3)  # 7 and 5 over 2
    for name, t in new.items():
        assert t.mesh == MESH
        assert_same(t, want[name].array, name=name)


def test_in_a_loop():
    """Updates inside a scan, under ZeRO-1, are those of as many calls."""
    opt, (params, x) = OPTIMIZERS["adamw"], net(8, 6)

    def run(params, state, x):
        def step(carry, _):
            params, state = carry
            return opt.update(wf.grad(loss)(params, x), state, params), ()

        return wf.scan(step, (params, state), None, wf.Dim("steps", 3))[0]

    got, _ = wf.spmd(run, MESH, LAYOUTS["zero-1"])(params, opt.init(params), x)
    state, want = opt.init(params), params
    for _ in range(3):
        want, state = opt.update(wf.spmd(wf.grad(loss))(want, x), state, want)
    for name, t in got.items():
        assert_same(t, want[name].array, name=name)


# -- communication and memory ------------------------------------------------------------------


def planned(name, layout):
    params, x = net(8, 6)
    opt = OPTIMIZERS[name]

    def step(params, state, x):
        return opt.update(wf.grad(loss)(params, x), state, params)

    plan = wf.spmd(step, MESH, LAYOUTS[layout]).plan(params, opt.init(params), x)
    full_bytes = sum(
        p.size * 4 // (2 if any(d.name == "d_ff" for d in p.dims) else 1) for p in params.values()
    )
    return plan, full_bytes


def sent(collectives):
    total = Counter()
    for c in collectives:
        total[c.phase, c.kind, "+".join(c.axes)] += c.bytes * c.count
    return dict(total)


def of_parameters(plan):
    """The collectives of gradients and of the update; not those of activations."""
    return [c for c in plan.collectives if c.phase == "update" or c.op.startswith("gradient[")]


@pytest.mark.parametrize("name", ["momentum", "adamw", "lion"])
def test_zero_1_scatters_gradients_and_gathers_parameters(name):
    plan, full_bytes = planned(name, "zero-1")
    over_data = [c for c in of_parameters(plan) if "data" in c.axes]
    assert sent(over_data) == {
        ("backward", "reduce-scatter", "data"): full_bytes,
        ("update", "all-gather", "data"): full_bytes,
    }
    # `scale` has no d_ff: its gradient is a sum over model as well, cut down to the slice before that.
    rest = [c for c in of_parameters(plan) if "data" not in c.axes]
    assert sent(rest) in ({}, {("backward", "all-reduce", "model"): 8 * 4 // 2})
    assert {c.phase for c in plan.collectives if c.kind == "all-gather"} == {"update"}


def test_zero_3_gathers_nothing_in_the_update():
    plan, full_bytes = planned("adamw", "zero-3")
    assert not [c for c in plan.collectives if c.phase == "update"]
    assert sent(c for c in plan.collectives if c.kind == "reduce-scatter") == {
        ("backward", "reduce-scatter", "data"): full_bytes
    }
    assert plan.memory.params == full_bytes // 2
    assert plan.memory.optimizer == 2 * full_bytes // 2 + 4  # two moments, and the step


@pytest.mark.parametrize("layout", ["both", "zero-1", "zero-3"])
def test_adafactor_sends_statistics_only(layout):
    """Sums of statistics, listed apart: at most a vector at a time, never a matrix."""
    plan, full_bytes = planned("adafactor", layout)
    update = [c for c in plan.collectives if c.phase == "update"]
    sums = [c for c in update if c.kind == "all-reduce"]
    gathers = [c for c in update if c.kind == "all-gather"]
    assert max(c.bytes for c in sums) <= 2 * 8 * 4  # a row or column for each of two layers
    assert sum(c.bytes * c.count for c in gathers) == (full_bytes if layout == "zero-1" else 0)
    assert len(sums) + len(gathers) == len(update)
    matrices = 2  # each: rows, columns, the mean of rows, the size of the step, that of the parameter
    assert len(sums) <= 5 * matrices + 2


def test_adafactor_keeps_little():
    config = Config(vocab=512, d_model=256, d_ff=512, heads=2, d_kv=128, layers=2, longest=128)
    params = nn.specs(Transformer(config))
    grads = jax.tree.map(lambda p: wf.spec(p.dims), params, is_leaf=wf.is_tensor)

    def memory(opt, layout=""):
        program = wf.spmd(opt.update, "data=2 model=2", layout)
        return program.plan(grads, opt.init(params), params).memory

    small, large = memory(optim.Adafactor(0.01)), memory(optim.AdamW(0.01))
    assert 0 < small.optimizer < 0.02 * small.params
    assert large.optimizer == 2 * large.params + 4
    split = memory(optim.Adafactor(0.01), wf.Layout("d_ff:model heads:model", optimizer="d_model:data"))
    assert split.optimizer < small.optimizer


def test_an_update_alone_is_the_update_phase():
    params, _ = net(8, 6)
    program = wf.spmd(OPTIMIZERS["adafactor"].update, MESH, LAYOUTS["zero-1"])
    with pytest.warns(wf.LayoutWarning, match="batch:data"):
        plan = program.plan(params, OPTIMIZERS["adafactor"].init(params), params)
    assert plan.collectives and {e.phase for e in plan.events} == {"update"}
    assert {e.op.partition("[")[0] for e in plan.collectives} == {"optimizer"}


# -- clipping, NaN, decay ----------------------------------------------------------------------------


def test_global_norm_adds_up_once():
    """Scalars that wait for the same axes share a collective."""
    grads, _ = net(8, 6)
    norm = wf.spmd(optim.global_norm, MESH, wf.Layout("d_ff:model", params="d_model:data"))
    found = Counter((c.kind, c.axes, c.bytes) for c in norm.collectives(grads))
    assert found == {
        ("all-reduce", ("data", "model"), 4): 1,  # w, blocks
        ("all-reduce", ("data",), 4): 1,  # scale
    }
    np.testing.assert_allclose(float(norm(grads)), float(optax.tree.norm(arrays(grads))), rtol=1e-6)


def test_clipping_below_the_limit_changes_nothing():
    grads = gradients(0)
    norm = optim.global_norm(grads)
    for t, g in zip(
        *(jax.tree.leaves(arrays(x)) for x in (optim.clip_by_global_norm(grads, 1e3), grads)), strict=True
    ):
        np.testing.assert_array_equal(t, g)
    known = optim.clip_by_global_norm(grads, 1.0, norm)
    np.testing.assert_allclose(float(optim.global_norm(known)), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    "layout", [None, wf.Layout("d_ff:model", optimizer="d_model:data")], ids=["one", "zero-1"]
)
def test_nan_stays(layout):
    """A gradient that is not a number makes its parameter one that is not, and leaves others alone."""
    params, _ = net(7, 5)
    bad = params | {"w": wf.tensor(params["w"].array.at[6, 2].set(jnp.nan), params["w"].dims)}

    def update(grads, params):
        new = {name: opt.update(grads, opt.init(params), params) for name, opt in OPTIMIZERS.items()}
        return new, optim.clip_by_global_norm(grads, 1.0)

    new, clipped = wf.spmd(update, MESH if layout else None, layout)(bad, params)
    for params, state in new.values():
        assert np.isnan(params["w"].numpy()[6, 2])
        assert np.isfinite(params["blocks"].numpy()).all() and np.isfinite(params["scale"].numpy()).all()
        assert any(np.isnan(t.numpy()).any() for t in jax.tree.leaves(state, is_leaf=wf.is_tensor))
    assert all(np.isnan(t.numpy()).all() for t in clipped.values())


class Layer(nn.Module):
    linear: nn.Linear
    norm: nn.RMSNorm
    activation: object
    name: str = eqx.field(static=True)

    def __init__(self):
        a, b, c = wf.dims("a=4 b=3 c=2")
        self.linear, self.norm = nn.Linear([a], [b, c], bias=True), nn.RMSNorm(a)
        self.activation, self.name = wf.tanh, "layer"


def test_modules_and_what_decays():
    """Any tree with tensors in it; norms' scales and biases don't decay unless they are named."""
    module = nn.init(nn.stack(Layer(), wf.Dim("layers", 2)), jax.random.key(0))
    module = jax.tree.map(lambda t: t + 1.0 if wf.is_tensor(t) else t, module, is_leaf=wf.is_tensor)
    zeros = jax.tree.map(lambda t: t * 0.0 if wf.is_tensor(t) else None, module, is_leaf=wf.is_tensor)
    for decayed, wanted in {
        None: {"linear.weight"},
        "linear.*": {"linear.weight", "linear.bias"},
        ("norm.scale", "*bias"): {"linear.bias", "norm.scale"},
        (): set(),
    }.items():
        opt = optim.AdamW(0.5, weight_decay=0.5, decayed=decayed)
        state = opt.init(module)
        assert set(state["mean"]) == set(nn.parameters(module))
        new, _ = opt.update(zeros, state, module)
        assert type(new) is Layer and new.activation is wf.tanh
        shrunk = set()
        for name, p in nn.parameters(new).items():
            ratio = p.numpy() / nn.parameters(module)[name].numpy()
            np.testing.assert_allclose(ratio, ratio.flat[0], rtol=1e-6)
            np.testing.assert_allclose(ratio.flat[0], 0.75 if name in wanted else 1.0, rtol=1e-6)
            shrunk |= {name} if ratio.flat[0] < 0.9 else set()
        assert shrunk == wanted


# -- schedules ---------------------------------------------------------------------------------------

SCHEDULES = {
    "constant": (optim.Constant(0.3), lambda t: 0.3),
    "warm-up": (optim.LinearWarmup(10), lambda t: min(1, t / 10)),
    "rsqrt": (optim.RsqrtDecay(10), lambda t: max(t, 10) ** -0.5),
    "linear decay": (optim.LinearDecay(40, 15), lambda t: min(1, max(0, (40 - t) / 15))),
    "cosine": (optim.Cosine(30, floor=0.1), optax.cosine_decay_schedule(1.0, 30, 0.1)),
    "warm-up, cosine": (
        2.0 * optim.LinearWarmup(10) * optim.Cosine(30, after=10),
        optax.warmup_cosine_decay_schedule(0.0, 2.0, 10, 40),
    ),
    "the paper's": (
        optim.paper_schedule(10, 40, 15),
        lambda t: min(1, t / 10) * max(t, 10) ** -0.5 * min(1, max(0, (40 - t) / 15)),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name):
    schedule, oracle = SCHEDULES[name]
    steps = wf.Dim("steps", 45)
    curve = wf.spmd(
        lambda: wf.scan(lambda t, _: (t + 1, schedule(t)), wf.zeros("", jnp.int32), None, steps)[1]
    )()
    want = [float(oracle(t)) for t in range(45)]
    np.testing.assert_allclose(curve.numpy(), want, rtol=1e-5, atol=1e-7)
    assert math.isclose(float(schedule(12)), want[12], rel_tol=1e-5)
    assert eval(repr(schedule), vars(optim)) == schedule and hash(schedule) == hash(schedule)


def test_the_rate_may_be_a_function():
    p, g = real(0, "a=3"), real(1, "a=3")
    opt = optim.Momentum(lambda step: 0.5 / (step + 1.0))
    new, state = opt.update(g, opt.init(p), p)
    new, state = opt.update(g, state, new)
    assert_same(new, p.array - g.array * 0.75, rtol=1e-6)


def test_optimizers_print_and_compare():
    for opt in OPTIMIZERS.values():
        again = eval(repr(opt), vars(optim))
        assert again == opt and hash(again) == hash(opt)


# -- mistakes ----------------------------------------------------------------------------------------

P = {"w": wf.parameter(wf.ones("a=2 b=3")), "bias": wf.parameter(wf.ones("b=3"))}
SWAPPED = {"w": P["bias"], "bias": P["w"]}
SGD, ADAM = optim.Momentum(0.1, momentum=0.9), optim.AdamW(0.1)

MISTAKES = {
    "negative_learning_rate": lambda: optim.AdamW(-0.1),  # wrong
    "settings_out_of_range": lambda: optim.AdamW(0.1, beta1=1.0, beta2=-0.5),  # wrong
    "learning_rate_that_is_a_word": lambda: optim.Lion("fast"),  # wrong
    "learning_rate_that_is_not_a_number": lambda: optim.Adafactor(math.nan),  # wrong
    "warm_up_of_no_steps": lambda: optim.LinearWarmup(0),  # wrong
    "schedule_times_a_word": lambda: optim.LinearWarmup(5) * "2",  # wrong
    "norm_limited_to_nothing": lambda: optim.clip_by_global_norm(P, 0.0),  # wrong
    "decay_of_no_parameter": lambda: optim.AdamW(0.1, decayed=["*.weight", "bais"]).init(P),  # wrong
    "gradients_of_other_parameters": lambda: SGD.update({"v": P["w"]}, SGD.init(P), P),  # wrong
    "gradients_with_other_dims": lambda: SGD.update(SWAPPED, SGD.init(P), P),  # wrong
    "state_of_another_optimizer": lambda: ADAM.update(P, SGD.init(P), P),  # wrong
    "parameters_that_are_arrays": lambda: ADAM.init({"w": jnp.ones(3)}),  # wrong
    "parameters_that_are_integers": lambda: ADAM.init({"ids": wf.arange(wf.Dim("a", 3))}),  # wrong
    "parameters_that_are_declared": lambda: ADAM.init(Layer()),  # wrong
    "two_parameters_of_one_name": lambda: ADAM.init({"a.b": P["w"], "a": {"b": P["w"]}}),  # wrong
}


@pytest.mark.parametrize("name", MISTAKES)
def test_messages(name, mistake):
    mistake(name, MISTAKES[name], "messages/train")
