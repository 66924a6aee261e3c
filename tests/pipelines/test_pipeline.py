"""pipeline: layers in stages, compared with a plain JAX loop; its collectives, and its plan."""

import functools
import itertools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same, assert_same_on_mesh, cosines, integers, real
from hlo import collective_bytes, instructions
from jax import lax

import weft as wf
from weft.plan.pipelines import schedule_bars

SCHEDULES = ("gpipe", "1f1b")
PLACE = ("pipe=2 data=2", "layers:pipe batch:data")
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def shown(value):
    """A value in the name of a test."""
    return str(value).replace(" ", ",")


# -- values and gradients -----------------------------------------------------------------------------


def layer(x, p, rows, scale):
    """A layer with two products; `rows` is of the batch, `scale` is not."""
    h = wf.tanh(wf.einsum(x, p["up"], out=["batch", "d_ff"]) + p["bias"])
    return x + wf.einsum(h, p["down"], out=["batch", "d"]) * rows * scale


def raw_layer(x, p, rows, scale):
    return x + jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"] * rows[:, None] * scale


def stack(layers):
    """The parameters of `layers` layers; their dim is not always the first."""
    return {
        "up": wf.parameter(real(1, f"d=4 layers={layers} d_ff=6", -0.6, 0.6)),
        "down": wf.parameter(real(2, f"d_ff=6 d=4 layers={layers}", -0.6, 0.6)),
        "bias": wf.parameter(real(3, f"layers={layers} d_ff=6")),
    }


def in_front(p):
    """A tensor's array with the layers in front."""
    return jnp.moveaxis(p.array, [d.name for d in p.dims].index("layers"), 0)


def raw_stack(params):
    return {name: in_front(p) for name, p in params.items()}


def given(layers, batch):
    return real(0, f"batch={batch} d=4"), stack(layers), real(4, f"batch={batch}"), real(5, "d=4")


def loss(x, params, rows, scale, **options):
    out = wf.pipeline(layer, x, params, shared=(rows, scale), **options)
    return wf.mean(wf.sin(out * 2.0)), out


@functools.cache
def expected(layers, batch):
    """Value, result and gradients by JAX."""
    x, params, rows, scale = given(layers, batch)

    def raw(x, params, rows, scale):
        out = lax.scan(lambda x, p: (raw_layer(x, p, rows, scale), None), x, params)[0]
        return jnp.mean(jnp.sin(out * 2.0)), out

    run = jax.jit(jax.value_and_grad(raw, (0, 1, 2, 3), has_aux=True))
    return run(x.array, raw_stack(params), rows.array, scale.array)


PLACES = [
    # mesh, layout, layers, batch, micro
    ("pipe=2", "layers:pipe", 4, 8, 1),
    pytest.param("pipe=2", "layers:pipe", 5, 8, 4, marks=pytest.mark.slow),
    ("pipe=4", "layers:pipe", 6, 8, 2),
    ("pipe=8", "layers:pipe", 8, 8, 8),
    ("pipe=4 data=2", "layers:pipe batch:data", 4, 16, 8),
    ("data=4 pipe=2", "layers:pipe batch:data", 4, 6, 2),
    pytest.param("data=4 pipe=2", "layers:pipe batch:data", 4, 6, 3, marks=pytest.mark.slow),
    ("pipe=2 model=2", "layers:pipe d_ff:model", 4, 8, 2),
    pytest.param("pipe=2 model=2", "layers:pipe d:model", 4, 8, 8, marks=pytest.mark.slow),
    ("pipe=2 data=2 model=2", "layers:pipe batch:data d_ff:model", 3, 8, 2),
    ("a=2 b=2", "layers:b+a", 6, 4, 2),
    ("pipe=4 data=2", "layers:pipe batch:data", 5, 7, None),
]


def step(**options):
    """The program that most tests run: value, result, and all gradients."""
    return wf.value_and_grad(functools.partial(loss, **options), argnums=(0, 1, 2, 3), has_aux=True)


def check(got, want):
    """Value, result and gradients against the oracle's."""
    (value, out), grads = got
    (want_value, want_out), want_grads = want
    assert_same(value, want_value, name="the value")
    assert_same(out, want_out, name="the result")
    check_gradients(grads, want_grads)


def check_gradients(grads, want):
    for name, g, w in zip(("x", "params", "rows", "scale"), grads, want, strict=True):
        if name != "params":
            assert_same(g, w, name=f"the gradient of {name}")
            continue
        for part, one in g.items():
            assert one.role == "param"
            front = [d.name for d in one.dims].index("layers")
            assert_same(one, jnp.moveaxis(w[part], 0, front), name=f"the gradient of {part}")


@schedules
@pytest.mark.parametrize("mesh, layout, layers, batch, micro", PLACES, ids=shown)
def test_a_pipeline_equals_a_loop(mesh, layout, layers, batch, micro, schedule):
    program = wf.spmd(step(micro=micro, schedule=schedule), mesh, layout)
    check(program(*given(layers, batch)), expected(layers, batch))


INFINITE = [
    ("pipe=2", "layers:pipe", 3),
    ("pipe=4", "layers:pipe", 5),  # of 2, 2, 1 and 0
    ("pipe=2 data=2", "layers:pipe d:data", 3),
]


@schedules
@pytest.mark.parametrize("mesh, layout, layers", INFINITE, ids=shown)
def test_layers_that_are_infinite_at_zero(mesh, layout, layers, schedule):
    """Where a stage has fewer layers, the gradients of what stood for one were not numbers."""
    x, w = real(0, "batch=4 d=5"), real(1, f"d=5 layers={layers}", 1.0, 2.0)

    def layer(h, w):
        return h * w / wf.sum(w * w, "d")

    def loss(x, w):
        return wf.sum(wf.pipeline(layer, x, w, micro=2, schedule=schedule))

    gradients = wf.grad(loss, argnums=(0, 1))
    for got, want in zip(wf.spmd(gradients, mesh, layout)(x, w), gradients(x, w), strict=True):
        assert_same(got, want.array, name="a gradient")


@schedules
@pytest.mark.parametrize("policy", ["dots", "sums", "everything"])
@pytest.mark.slow
def test_the_remat_policy_does_not_change_results(schedule, policy):
    program = wf.spmd(
        step(micro=2, schedule=schedule, remat=policy), "pipe=2 data=2", "layers:pipe batch:data"
    )
    check(program(*given(4, 8)), expected(4, 8))


@pytest.mark.parametrize("place", [(None, None), ("pipe=2", "layers:pipe"), ("data=2", "batch:data")])
def test_outside_a_program(place):
    args = jax.tree.map(lambda t: wf.place(t, *place), given(4, 8), is_leaf=wf.is_tensor)
    assert_same(loss(*args, micro=2)[1], expected(4, 8)[0][1])


@schedules
@pytest.mark.parametrize(
    "layout", ["layers:pipe batch:data", pytest.param("layers:pipe d:data", marks=pytest.mark.slow)]
)
def test_a_tree_of_two_tensors(layout, schedule):
    """In one of them the batch is the last dim, and they do not share all dims."""
    b, d = wf.dims("batch=6 d=4")
    x, y, w = real(0, [b, d]), real(1, [wf.Dim("e", 3), b]), real(2, "layers=5 d=4")

    def f(both, w):
        x, y = both["x"], both["y"]
        return {
            "x": wf.tanh(x * w) + wf.sum(y, "e"),
            "y": wf.transpose(wf.sin(y), [b.name, "e"]) * wf.mean(x, "d"),
        }

    def run(x, y, w):
        out = wf.pipeline(f, {"x": x, "y": y}, w, micro=3, schedule=schedule)
        return wf.sum(wf.square(out["x"])) + wf.sum(wf.sin(out["y"])), out

    def raw(x, y, w):
        for one in w:
            x, y = jnp.tanh(x * one) + y.sum(0)[:, None], jnp.sin(y) * x.mean(1)
        return jnp.sum(x**2) + jnp.sum(jnp.sin(y)), (x, y)

    program = wf.spmd(wf.value_and_grad(run, argnums=(0, 1, 2), has_aux=True), "pipe=2 data=2", layout)
    (value, out), grads = program(x, y, w)
    (want_value, want), want_grads = jax.value_and_grad(raw, (0, 1, 2), has_aux=True)(
        x.array, y.array, w.array
    )
    assert_same(value, want_value)
    assert_same(out["x"], want[0])
    assert_same(out["y"], want[1])
    for got, expect in zip(grads, want_grads, strict=True):
        assert_same(got, expect)


def test_the_batch_by_its_dim():
    x, w = wf.ones("rows=4 d=2"), wf.arange("layers=4").astype(jnp.float32) + 1.0
    run = lambda x, w: wf.pipeline(lambda x, w: x * w, x, w, batch=x.dims[0], micro=np.int64(2))
    assert_same(
        wf.spmd(run, "pipe=2 data=2", "layers:pipe rows:data")(x, w), np.full((4, 2), 24.0, np.float32)
    )


def test_integers_can_stream():
    """They have no gradients; what is sent on of them is the same on all devices nevertheless."""
    x, n, w = real(0, "batch=8 d=4"), integers(1, "batch=8", 0, 5), real(2, "layers=4 d=4")

    def run(w, x, n):
        x, n = wf.pipeline(lambda h, w: (wf.sin(h[0] * w) + h[1] * 1.0, h[1] + 1), (x, n), w, micro=4)
        return wf.sum(wf.square(x)), n

    def raw(w, x, n):
        for one in w:
            x, n = jnp.sin(x * one) + n[:, None], n + 1
        return jnp.sum(x**2), n

    (value, out), grad = wf.spmd(wf.value_and_grad(run, has_aux=True), *PLACE)(w, x, n)
    (want, want_out), want_grad = jax.value_and_grad(raw, has_aux=True)(w.array, x.array, n.array)
    assert_same(value, want)
    assert_same(out, want_out)
    assert_same(grad, want_grad)


DRAWN = [
    ("pipe=2", "layers:pipe", 4, 2, "1f1b"),
    ("pipe=4 data=2", "layers:pipe batch:data", 6, 3, "gpipe"),
    ("pipe=2 data=2", "layers:pipe d:data", 4, 6, "gpipe"),
    ("data=4 pipe=2", "batch:data layers:pipe", 6, 2, "1f1b"),
]


def noisy(x, layer):
    """Element by element, in operations that are rounded one by one, so that bits can be compared."""
    w, key = layer
    drop, noise = jax.random.split(key)
    noise = wf.random.uniform(noise, [wf.Dim("d", 4), *(d for d in x.dims if d.name == "batch")])
    return wf.dropout(x, 0.25, drop) * wf.sign(w) + noise


@functools.cache
def drawn(mesh, layout, layers, **options):
    """A result and a gradient, with dropout."""
    x, w = real(0, "batch=12 d=4 length=3"), real(1, f"layers={layers} d=4")
    keys = jax.random.split(jax.random.key(7), layers)

    def run(x, w, keys):
        out = wf.pipeline(noisy, x, (w, keys), **options)
        return wf.sum(out), out

    (_, out), grad = wf.spmd(wf.value_and_grad(run, has_aux=True), mesh, layout)(x, w, keys)
    return out.numpy(), grad.numpy()


@pytest.mark.parametrize("mesh, layout, layers, micro, schedule", DRAWN, ids=shown)
def test_draws_are_those_of_the_full_batch(mesh, layout, layers, micro, schedule):
    """Bit for bit: each micro-batch drops what it would in one batch, and the backward pass the same."""
    out, grad = drawn(mesh, layout, layers, micro=micro, schedule=schedule)
    want, want_grad = drawn(None, None, layers)
    assert 0.1 < (want_grad == 0).mean() < 0.9
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(grad, want_grad)


def test_rows_have_their_indices_in_the_full_batch():
    x, w = wf.zeros("batch=12"), wf.ones("layers=2")

    def run(x, w):
        return wf.pipeline(lambda x, w: x + wf.arange(x.dims[0], float) * w, x, w, micro=3)

    for mesh, layout in (("pipe=2", "layers:pipe"), ("pipe=2 data=2", "layers:pipe batch:data")):
        np.testing.assert_array_equal(wf.spmd(run, mesh, layout)(x, w).numpy(), 2 * np.arange(12))


# -- what is sent ---------------------------------------------------------------------------------------


def sent(plan):
    return Counter((c.kind, c.axes, c.phase, c.bytes, c.count) for c in plan.collectives if c.bytes > 4)


def on_the_wire(program, *args):
    """The bytes of the plan's collectives, which are those of the compiled program, scalars included."""
    plan, total = program.plan(*args), Counter()
    for c in plan.collectives:
        total[c.kind, tuple(a for a in program.mesh.names if a in c.axes)] += c.bytes * c.count
    assert collective_bytes(program.compile(*args).as_text(), program.mesh) == dict(total)
    return plan


def alone(params, x, **options):
    """Nothing is shared."""
    f = lambda x, p: wf.tanh(wf.einsum(x, p["up"], out=["batch", "d_ff"]) + p["bias"])
    g = lambda x, p: x + wf.einsum(f(x, p), p["down"], out=["batch", "d"])
    return wf.mean(wf.sin(wf.pipeline(g, x, params, **options)))


# Ticks of the backward pass, and how often something is sent in each; forward it is always M + K - 1, and once.
BACK = {"gpipe": lambda m, k: [m + k - 1], "1f1b": lambda m, k: [m + 2 * (k - 1)] * 2}
LAYERS, ROWS = 8, 32


@schedules
@pytest.mark.parametrize("stages, micro", [(2, 8), (4, 4), (4, 1)])
def test_what_is_sent(stages, micro, schedule):
    """Boundaries over pipe, one micro-batch at a time; of parameters their gradients, once, over data."""
    fn = wf.value_and_grad(functools.partial(alone, micro=micro, schedule=schedule), argnums=(0, 1))
    program = wf.spmd(fn, f"pipe={stages} data=2", "layers:pipe batch:data")
    plan = on_the_wire(program, stack(LAYERS), real(0, f"batch={ROWS} d=4"))
    boundary = 4 * (ROWS // 2 // micro) * 4
    permutes = [
        ("forward", micro + stages - 1),  # from stage to stage
        ("forward", micro + stages - 2),  # from the last one to all
        *(("backward", ticks) for ticks in BACK[schedule](micro, stages)),
        ("backward", micro + stages - 2),  # the gradient of x, from the first one to all
    ]
    want = Counter(("permute", ("pipe",), phase, boundary, count) for phase, count in permutes)
    for size in (4 * 6, 6 * 4, 6):
        want["all-reduce", ("data",), "backward", 4 * size * LAYERS // stages, 1] += 1
    assert sent(plan) == want
    assert plan.pipelines[0].sent == sum(boundary * count for _, count in permutes)


@schedules
def test_what_is_shared_is_summed_once(schedule):
    """It was, tick by tick, all of it: what has the batch was made varying in the loop."""
    program = wf.spmd(step(micro=4, schedule=schedule), *PLACE)
    plan = on_the_wire(program, *given(4, 16))
    over_pipe = [
        (c.kind, c.bytes, c.count) for c in plan.collectives if "pipe" in c.axes and c.kind != "permute"
    ]
    rows, scale = 4 * 16 // 2, 4 * 4
    assert sorted(over_pipe) == [("all-reduce", scale, 1), ("all-reduce", rows, 1)]


@schedules
@pytest.mark.parametrize("params", ["d:data", "layers:pipe+data"])
def test_stored_parameters_are_gathered_once(params, schedule):
    layout = wf.Layout("layers:pipe batch:data", params=params)
    program = wf.spmd(step(micro=4, schedule=schedule), "pipe=2 data=2", layout)
    args = given(4, 16)
    check(program(*args), expected(4, 16))
    plan = on_the_wire(program, *args)
    stored = [p for name, p in args[1].items() if params != "d:data" or name != "bias"]
    sizes = Counter(4 * p.size // 2 for p in stored)
    moved = {kind: Counter() for kind in ("all-gather", "reduce-scatter")}
    for c in plan.collectives:
        if c.kind in moved:
            assert (c.axes, c.count) == (("data",), 1)
            moved[c.kind][c.bytes] += 1
    assert moved["all-gather"] == sizes
    # Of layers that are stored in further pieces "1f1b" sums all of the gradients.
    assert moved["reduce-scatter"] == (
        Counter() if (params, schedule) == ("layers:pipe+data", "1f1b") else sizes
    )


def test_split_layers_without_stages_are_gathered():
    """A scan over a split dim is correct, but gathers all parameters, which the plan reports."""
    x, params, rows, scale = given(4, 8)

    def run(x, params):
        return wf.scan(lambda x, p: (layer(x, p, rows, scale), None), x, params, "layers")[0]

    program = wf.spmd(run, "pipe=4", "layers:pipe")
    assert_same(program(x, params), expected(4, 8)[0][1])
    plan = program.plan(x, params)
    assert {(c.kind, c.axes) for c in plan.collectives} == {("all-gather", ("pipe",))}
    assert sum(c.bytes for c in plan.collectives) == sum(4 * p.size for p in params.values())
    assert plan.pipelines == ()


@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_the_program_does_not_grow(schedule):
    """Neither with the micro-batches, nor with the stages or the layers."""

    def count(stages, layers, micro):
        program = wf.spmd(
            step(micro=micro, schedule=schedule), f"pipe={stages} data=2", "layers:pipe batch:data"
        )
        return instructions(program.compile(*given(layers, 8 * micro)).as_text())

    first = count(2, 8, 16)  # XLA sums fewer micro-batches in another way, with fewer instructions
    for stages, layers, micro in ((2, 8, 64), (4, 8, 16), (2, 16, 16)):
        assert count(stages, layers, micro) == pytest.approx(first, rel=0.01)


# -- the plan -------------------------------------------------------------------------------------


@schedules
@pytest.mark.parametrize("stages, micro", [(2, 4), (4, 2), (4, 8), (8, 1)])
def test_the_plan(stages, micro, schedule):
    program = wf.spmd(step(micro=micro, schedule=schedule), f"pipe={stages}", "layers:pipe")
    plan = program.plan(*given(8, 8))
    (found,) = plan.pipelines
    idle = stages - 1
    assert (found.layers, found.count, found.axes) == ("layers", 8, ("pipe",))
    assert (found.stages, found.micro, found.schedule) == (stages, micro, schedule)
    assert (found.ticks, found.back_ticks) == (micro + idle, BACK[schedule](micro, stages)[0])
    if schedule == "gpipe":
        assert found.bubble == pytest.approx(idle / (micro + idle), abs=1e-12)
    text = " ".join(plan.explain().split())
    assert f"layers=8 in {stages} stages" in text and f"{micro} micro-batches, {schedule}" in text
    assert f"a bubble of {found.bubble:.1%}" in text

    bars = list(schedule_bars(found))
    kinds = {"gpipe": {"forward", "backward"}, "1f1b": {"forward", "recompute", "backward"}}[schedule]
    assert Counter((b.stage, b.micro, b.kind) for b in bars) == Counter(
        (k, m, kind) for k in range(stages) for m in range(micro) for kind in kinds
    )
    at = {(b.kind, b.micro, b.stage): b for b in bars}
    for k in range(stages):
        mine = sorted((b for b in bars if b.stage == k), key=lambda b: b.start)
        for one, after in itertools.pairwise(mine):
            assert one.start + one.length <= after.start, "a stage does two things at once"
    for (kind, m, k), bar in at.items():
        if kind == "backward":
            done = at["recompute" if schedule == "1f1b" else "forward", m, k]
            assert done.start + done.length <= bar.start, "the gradient comes first"
        if k + 1 < stages:
            one, after = (bar, at[kind, m, k + 1]) if kind != "backward" else (at[kind, m, k + 1], bar)
            assert one.start + one.length <= after.start, f"{kind} of {m} overtakes itself at stage {k}"

    (picture,) = re.findall(r"<svg.*?</svg>", plan.to_html(), re.DOTALL)
    titles = re.findall(r"<title>micro-batch (\d+), (\w+)</title>", picture)
    assert Counter(titles) == Counter((str(b.micro), b.kind) for b in bars)


def test_a_plan_without_a_pipeline_has_no_chart():
    plan = wf.spmd(step(), "data=2", "batch:data").plan(*given(4, 8))
    assert plan.pipelines == () and "pipeline:" not in plan.explain() and "<svg" not in plan.to_html()


# -- inside other things ----------------------------------------------------------------------------------


@schedules
def test_inside_remat(schedule):
    run = wf.remat(functools.partial(loss, micro=2, schedule=schedule))
    program = wf.spmd(wf.value_and_grad(run, argnums=(0, 1, 2, 3), has_aux=True), *PLACE)
    check(program(*given(4, 8)), expected(4, 8))


@schedules
def test_gradients_added_up_in_a_loop(schedule):
    """Like a train step with its own micro-batches."""
    parts = wf.Dim("parts", 2)

    def run(x, params, rows, scale):
        def part(total, given):
            x, rows = given
            one = lambda *args: loss(x, args[0], rows, args[1], micro=2, schedule=schedule)[0] * 0.5
            grads = wf.grad(one, argnums=(0, 1))(params, scale)
            return jax.tree.map(wf.add, total, grads, is_leaf=wf.is_tensor), None

        zeros = jax.tree.map(lambda t: t * 0.0, (params, scale), is_leaf=wf.is_tensor)
        rest = wf.Dim("batch", 4)
        pairs = wf.split(x, "batch", [rest, parts]), wf.split(rows, "batch", [rest, parts])
        return wf.scan(part, zeros, pairs, parts)[0]

    program = wf.spmd(run, *PLACE)
    grads, scale = program(*given(4, 8))
    want = expected(4, 8)[1]
    for name, g in grads.items():
        assert_same(g, jnp.moveaxis(want[1][name], 0, [d.name for d in g.dims].index("layers")), name=name)
    assert_same(scale, want[3])
    if schedule == "gpipe":  # gradients stay pending, and are summed once, after the loop
        over_data = [c.count for c in program.plan(*given(4, 8)).collectives if "data" in c.axes]
        assert over_data == [1] * 4


@schedules
def test_second_derivatives(schedule):
    x, w = real(7, "batch=4 d=3"), real(8, "layers=4 d=3")
    f = lambda x, w: wf.sin(x * w) + x

    def run(x, w):
        value = lambda w: wf.sum(wf.square(wf.pipeline(f, x, w, micro=2, schedule=schedule)))
        return wf.grad(lambda w: wf.sum(wf.sin(wf.grad(value)(w))))(w)

    def raw(x, w):
        value = lambda w: jnp.sum(lax.scan(lambda x, w: (jnp.sin(x * w) + x, None), x, w)[0] ** 2)
        return jax.grad(lambda w: jnp.sum(jnp.sin(jax.grad(value)(w))))(w)

    want = raw(x.array, w.array)
    assert_same(
        wf.spmd(run, "pipe=2", "layers:pipe")(x, w), want, rtol=1e-4, atol=1e-4 * float(jnp.abs(want).max())
    )


@schedules
@pytest.mark.parametrize(
    "layout", ["layers:pipe batch:data", pytest.param("layers:pipe n:data", marks=pytest.mark.slow)]
)
def test_inside_vmap(layout, schedule):
    _, params, rows, scale = given(4, 8)
    xs = real(6, "n=2 batch=8 d=4")

    def run(xs, params, rows, scale):
        one = lambda x: loss(x, params, rows, scale, micro=4, schedule=schedule)[0]
        return wf.sum(wf.vmap(one, "n")(xs))

    def raw(xs, params, rows, scale):
        one = lambda x: lax.scan(lambda x, p: (raw_layer(x, p, rows, scale), None), x, params)[0]
        return jnp.sum(jnp.mean(jnp.sin(jax.vmap(one)(xs) * 2.0), (1, 2)))

    arrays = xs.array, raw_stack(params), rows.array, scale.array
    want, want_grads = jax.value_and_grad(raw, (0, 1, 2, 3))(*arrays)
    program = wf.spmd(wf.value_and_grad(run, argnums=(0, 1, 2, 3)), "pipe=2 data=2", layout)
    value, grads = program(xs, params, rows, scale)
    assert_same(value, want)
    check_gradients(grads, want_grads)


@pytest.mark.parametrize("layout", ["layers:pipe batch:data", "layers:pipe d_ff:data"])
def test_forward_mode(layout):
    """Of "gpipe" only: the other schedule has a custom_vjp, which has no forward-mode derivative."""
    args = given(4, 8)
    tangents = jax.tree.map(lambda t: wf.cos(t * 3.0), args, is_leaf=wf.is_tensor)

    def run(args, tangents):
        return wf.jvp(lambda *args: loss(*args, micro=2)[1], args, tangents)

    def raw(x, params, rows, scale):
        return lax.scan(lambda x, p: (raw_layer(x, p, rows, scale), None), x, params)[0]

    arrays = [(x.array, raw_stack(p), rows.array, scale.array) for x, p, rows, scale in (args, tangents)]
    want, want_tangent = jax.jvp(raw, *arrays)
    out, tangent = wf.spmd(run, "pipe=2 data=2", layout)(args, tangents)
    assert_same(out, want)
    assert_same(tangent, want_tangent)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_parameters_shared_by_stages_and_stored_along_them(schedule):
    def run(w, layers, x):
        def layer(h, b, w):
            return h + wf.tanh(wf.einsum(h, w, reduce=["d"]).rename(h="d") + b)

        out = wf.pipeline(layer, x, layers, "layers", micro=2, shared=(w,), schedule=schedule)
        return wf.sum(wf.square(out))

    given = wf.parameter(cosines("d=4 h=4")), cosines("layers=4 d=4"), cosines("batch=8 d=4")
    assert_same_on_mesh(
        wf.grad(run), "pipe=2 data=2", wf.Layout("layers:pipe batch:data", params="d:pipe"), *given
    )
