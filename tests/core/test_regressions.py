"""What the theorem's test (`test_theorem.py`) and reviews found, each as small as it became, under a name."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weft as wf
from weft.plan.advice import exceeds_memory


def values(dims):
    shape = tuple(d.size for d in wf.dims(dims))
    return wf.tensor(np.cos(1.0 + np.arange(int(np.prod(shape)))).reshape(shape), dims)


def same(fn, mesh, layout, *tensors):
    """What a program of one device and that on a mesh compute has to be the same."""
    want = jax.tree.leaves(wf.spmd(fn, wf.Mesh())(*tensors), is_leaf=wf.is_tensor)
    got = jax.tree.leaves(wf.spmd(fn, mesh, layout)(*tensors), is_leaf=wf.is_tensor)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=1e-5, atol=1e-6)


def test_custom_vjp_inside_a_program():
    """JAX flattened a tensor that held a placeholder, and the form of that was asked for."""
    rule = wf.custom_vjp(lambda x, y: x * wf.tanh(y))
    rule.defvjp(lambda x, y: (x * wf.tanh(y), (x, y)), lambda kept, g: (g * kept[1], g * kept[0]))
    for mesh, layout in ((wf.Mesh(), ""), ("x=2", "a:x")):
        grad = wf.spmd(wf.grad(lambda x: wf.sum(rule(x, x))), mesh, layout)(wf.ones("a=3"))
        np.testing.assert_allclose(grad.numpy(), 2.0)


def test_custom_vjp_inside_a_split_vmap():
    """JAX called the rule after the vmap was over, and its cotangent varied over the vmap's axes."""

    def program(x, rows):
        rule = wf.custom_vjp(lambda x: wf.tanh(x))
        rule.defvjp(lambda x: (wf.tanh(x), x), lambda x, g: (g * x,))
        mapped = wf.vmap(lambda row, x: rule(x) * row, "row")
        return wf.grad(lambda x: wf.sum(mapped(rows, x)))(x)

    same(program, "x=2", "row:x", values("a=3"), values("row=3"))


def test_custom_vjp_inside_an_eager_op():
    """JAX called forward and backward of the rule after the eager op that met it had ended."""
    rule = wf.custom_vjp(lambda x: wf.tanh(x))
    rule.defvjp(lambda x: (wf.tanh(x), x), lambda x, g: (g * x,))
    x = wf.place(values("a=5"), "x=2", "a:x")
    for fn in (lambda x: wf.cond(wf.sum(x) > -9.0, rule, wf.square, x), wf.vmap(rule, "a")):
        grad = wf.grad(lambda x: wf.sum(fn(x)))(x)
        np.testing.assert_allclose(grad.numpy(), x.numpy(), rtol=1e-6)


RULES = {
    "backward": (lambda x, g: wf.tanh(x), lambda x, g: x, lambda x, c, g: c * x * g),
    "forward": (lambda x, g: wf.tanh(x), lambda x, g: x * g, lambda kept, c, g: c * kept),
    "all": (lambda x, g: wf.tanh(x) * g, lambda x, g: x, lambda x, c, g: c * x * g * (g / g)),
}


@pytest.mark.parametrize("place", [wf.place, lambda t, *_: t], ids=["placed", "not placed"])
@pytest.mark.parametrize("name", RULES)
def test_custom_vjp_whose_rules_capture_inside_an_eager_op(name, place):
    """JAX called them after the op had ended; what they captured was zeros, or of that op's trace."""
    value, kept, back = RULES[name]
    x, g = values("a=5"), values("a=5") + 2.0
    for captured in (g, wf.place(g, "x=2", "a:x")):
        rule = wf.custom_vjp(lambda x, g=captured: value(x, g))
        rule.defvjp(
            lambda x, g=captured: (value(x, g), kept(x, g)), lambda k, c, g=captured: (back(k, c, g),)
        )
        fn = lambda x, rule=rule: wf.sum(wf.cond(wf.sum(x) > -99.0, rule, wf.square, x))
        grad = wf.grad(fn)(place(x, "x=2", "a:x"))
        np.testing.assert_allclose(grad.numpy(), (x * g).numpy(), rtol=1e-5)


def test_held_back_gather_inside_vjp_inside_cond():
    """A collective was made in the trace of the branch, on an array of vjp's own trace."""

    def program(x):
        def pulled():
            out, pull = wf.vjp(wf.square, x)
            return pull(out)[0]

        return wf.grad(lambda y: wf.sum(wf.cond(wf.sum(x) > 9.0, lambda: x * 2.0, pulled) * y))(x)

    layout = wf.Layout("", params="a:x")
    same(program, "x=4", layout, wf.parameter(values("a=4")))


def test_sum_is_resolved_for_two_consumers():
    """A pending sum, resolved for a consumer that varies over its axis, was kept only in that form."""

    def program(x, y):
        total = wf.einsum(x, y, out=["a"])
        return total * y, total

    same(program, "x=2", "b:x", values("a=3"), values("b=5 a=3"))


def test_cond_inside_a_split_vmap():
    """One branch varied over the axis of the mapped dim, and the other did not."""

    def program(x):
        def row(r):
            return wf.cond(wf.sum(r) > 0.5, lambda: r, lambda: wf.ones("d=3"))

        return wf.vmap(row, "a")(x)

    same(program, "x=2", "a:x", values("a=5 d=3"))


def test_loops_inside_a_split_vmap():
    """A carry that began the same on all devices varied after the first step."""

    def program(x):
        def row(r):
            for_result = wf.fori_loop(0, 3, lambda n, c: c + r, wf.zeros("d=3"))
            scanned, _ = wf.scan(lambda c, e: (c + e, None), wf.zeros(""), r, "d")
            return for_result, scanned

        return wf.vmap(row, "a")(x)

    same(program, "x=2", "a:x", values("a=5 d=3"))


# Found by a reader who tried everything


def test_max_and_min_over_a_split_dim_pass_nan_on():
    x = wf.tensor(np.array([1, np.nan, 3, 4, 5], np.float32), "a=5")
    for mesh in ("p=2", "p=4"):
        most, least = wf.spmd(lambda x: (wf.max(x), wf.min(x)), mesh, "a:p")(x)
        assert np.isnan(most.item()) and np.isnan(least.item())


def test_from_callback_is_refused_inside_a_program_and_asks_once_for_each_slice():
    asked = []

    def part(where):
        asked.append(where)
        return np.arange(1.0, 6.0)[where]

    whole = wf.from_callback(part, "a=5", "p=4", "a:p")
    assert whole.numpy().tolist() == [1, 2, 3, 4, 5] and len(asked) == 4
    with pytest.raises(wf.ProgramError, match="inside a program"):
        wf.spmd(lambda: wf.from_callback(part, "a=5", "p=4", "a:p"), "p=4", "a:p")()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: wf.stack([wf.ones("a=2")] * 2, wf.Dim("a", 2)),
        lambda: wf.merge(wf.ones("a=2 b=3 c=6"), ["a", "b"], wf.Dim("c", 6)),
        lambda: wf.split(wf.ones("a=9 b=3"), "a", wf.dims("b=3 z=3")),
        lambda: wf.ones("a=4").rename(a=wf.Dim("z", 5)),
    ],
    ids=["stack", "merge", "split", "rename"],
)
def test_no_tensor_has_a_dim_twice_or_another_size_by_name(wrong):
    with pytest.raises(wf.DimError):
        wrong()


def test_tensors_with_values_can_be_planned_on_a_mesh_without_devices():
    x, y = wf.ones("a=5"), wf.ones("a=5")
    plan = wf.spmd(lambda x: x * y, "p=64", "a:p").plan(x)
    assert plan.mesh.size == 64


def test_a_staged_method_is_bound_to_its_owner():
    class Scaled(eqx.Module):
        factor: float

        @wf.spmd(mesh="p=2", layout="a:p")
        def call(self, x):
            return x * self.factor

    assert Scaled(3.0).call(wf.ones("a=3")).numpy().tolist() == [3, 3, 3]


def test_local_in_a_scan_that_made_its_operands_varying_beforehand():
    x = wf.ones("g=1 b=1")

    def step(carry, row):
        return carry, wf.local(lambda a: a * 2, row, out=row.dims, splittable=["b"])

    _, kept = wf.spmd(lambda x: wf.scan(step, x, x, "g"), "x=2", "g:x")(x)
    assert kept.numpy("g", "b").tolist() == [[2.0]]


def test_vjp_inside_a_scan_leaves_the_sums_of_gradients_for_after_the_loop():
    """The layers were made varying before the loop, so vjp started over, and summed in every step."""
    io, layers = wf.dims("io=3 layers=4")
    x, w, scale = values("batch=6 io=3"), values("layers=4 io=3"), values("io=3")

    def program(x, w, scale):
        def step(carry, w):
            x, total = carry
            out, pull = wf.vjp(lambda w, s, _: wf.tanh(x * wf.sin(w) * s), w, scale, x, zeros=False)
            of_w, of_scale, unused = pull(out)
            assert unused is None
            return (out, total + of_scale), of_w

        return wf.scan(step, (x, wf.zeros([io])), w, layers)

    same(program, "p=2", "batch:p", x, w, scale)
    found = wf.spmd(program, "p=2", "batch:p").plan(x, w, scale).collectives
    assert [(c.kind, c.count, c.bytes) for c in found] == [("all-reduce", 1, 12), ("all-reduce", 1, 48)]


def test_a_loop_that_adds_up_many_gradients_is_traced_few_times():
    """Each carry that had better be pending cost one more trace of the body: 12 parameters, 13 traces."""
    params = {f"w{n}": wf.parameter(values("d=4 h=3")) for n in range(12)}
    traced = []

    def run(params, x):
        def part(total, x):
            traced.append(1)
            grads = wf.grad(
                lambda p: sum(wf.sum(wf.tanh(wf.einsum(x, w, out=["b", "h"]))) for w in p.values())
            )(params)
            return {n: total[n] + g for n, g in grads.items()}, None

        return wf.scan(part, {n: w * 0.0 for n, w in params.items()}, x, "micro")[0]

    program = wf.spmd(run, "x=2", "b:x")
    found = program.collectives(params, values("micro=3 b=4 d=4"))
    assert len(traced) == 2
    assert [(c.kind, c.bytes, c.count) for c in found] == [("all-reduce", 4 * 3 * 4, 1)] * 12


def test_vmap_keeps_roles_and_what_is_stored_split():
    """It gathered stored tensors before the function was called, and gave values back."""
    w = wf.parameter(values("n=2 d=4"))
    run = wf.spmd(wf.vmap(lambda w: wf.parameter(w), "n"), "x=2 y=2", wf.Layout("n:x", params="d:y"))
    assert run.collectives(w) == []
    np.testing.assert_array_equal(run(w).numpy(), w.numpy())
    assert run(w).role == "param"
    doubled = wf.spmd(wf.vmap(lambda w: w * wf.sum(w), "n"), "x=2 y=2", wf.Layout("n:x", params="d:y"))(w)
    np.testing.assert_allclose(doubled.numpy(), w.numpy() * w.numpy().sum(1, keepdims=True), rtol=1e-6)
    assert doubled.role == "value"
    # Where the role has another rule for the mapped dim, a tensor is mapped as a value.
    other = wf.spmd(wf.vmap(lambda w: wf.parameter(w * 2.0), "n"), "x=2 y=2", wf.Layout("n:x", params="n:y"))(
        w
    )
    np.testing.assert_array_equal(other.numpy(), w.numpy() * 2.0)


def test_a_look_up_along_the_axis_of_a_vmap_is_an_error():
    """Each device found its piece of another place's row, and the sum of these was no place's."""
    ids = wf.tensor(np.arange(4, dtype=np.int32), "n=4")

    def run(table, ids):
        return wf.vmap(lambda i: wf.take(table, i, "rows"), "n")(ids)

    with pytest.raises(wf.LayoutError, match="on axis x, in use by an enclosing vmap"):
        wf.spmd(run, "x=2", "n:x rows:x")(values("rows=4 d=3"), ids)
    same(run, "x=2", "n:x", values("rows=4 d=3"), ids)


def test_a_layout_without_a_mesh_is_an_error():
    from weft import nn

    module = nn.Linear([wf.Dim("a", 2)], [wf.Dim("b", 3)])
    with pytest.raises(wf.LayoutError, match="no axis x"):
        nn.init(module, jax.random.key(0), layout="a:x")


def test_the_axis_of_a_dim_of_one_moves_to_another_dim_and_back():
    """XLA refused to compile the way back, where the second device's piece is padding and nothing else."""

    def run(x):
        def loss(x):
            return wf.sum(wf.einsum(x, x.rename(g="d"), out=["g", "d"]))

        return wf.grad(loss)(x)

    x = wf.parameter(values("a=1 h=2 g=3"))
    same(run, "x=2", wf.Layout("d:x", params="a:x"), x)


def test_one_place_is_looked_up_on_the_device_that_has_it():
    """XLA merged two slices, and the other device's gradient came from beyond its block."""

    def run(x):
        def loss(x):
            lowest = wf.take(x, wf.argmin(x, "h"), "h")
            return lowest * 0.7 + wf.sum(x * wf.tensor(np.arange(1.0, 5.0, dtype=np.float32), "h=4"))

        return wf.grad(loss)(x)

    same(run, "x=2", "h:x", wf.tensor(np.float32([-1, 3, 2, 4]), "h=4"))


def test_one_place_is_added_to_on_the_device_that_has_it():
    def run(x, place):
        return wf.scatter_add(x * wf.tensor(np.arange(1.0, 5.0, dtype=np.float32), "h=4"), place, 7.0, "h")

    for n in range(4):
        same(run, "x=2", "h:x", values("h=4"), wf.tensor(np.int32(n), ()))


def test_a_branch_under_vmap_fetches_ranges_of_a_split_dim():
    """JAX can't batch a branch that looks up in an array of its own."""

    def run(x):
        def row(x):
            return wf.cond(
                wf.mean(x) > 0.1,
                lambda x: wf.concat([x, x, x], "e"),
                lambda x: wf.zeros("e=9") + wf.sum(x),
                x,
            )

        return wf.vmap(row, "b")(x)

    same(run, "y=2 z=2", "b:y e:z", values("b=3 e=3"))


def test_what_is_stored_along_the_axis_of_a_vmap_is_used_as_a_value():
    """The result had the role of what came in, and by its rules two dims on one axis."""
    layout = wf.Layout("n:x", params="d:x")
    w, x = wf.parameter(values("d=4 e=3")), values("n=4 e=3")

    def run(w, x):
        return wf.vmap(lambda x, w: (w, wf.einsum(w, x, out=["d"])), "n")(x, w)

    def held(w, x):
        return wf.vmap(lambda x: (w, wf.einsum(w, x, out=["d"])), "n")(x)

    for each in (run, held):
        for got, want in zip(wf.spmd(each, "x=2", layout)(w, x), wf.spmd(each)(w, x), strict=True):
            np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-6)
            assert got.dims == want.dims


def test_a_plan_says_that_it_does_not_fit_the_machine():
    """It gave the peak and the time, and left it to the reader to know how much memory there is."""
    plan = wf.spmd(lambda x: x * 2.0, "data=2", "batch:data").plan(wf.spec("batch=4 d_model=1000000000"))
    assert "does not fit: a device of tpu-v2 has 8 GiB of memory" in plan.explain("tpu-v2")
    assert "does not fit" not in plan.explain("h100") and "does not fit" not in plan.explain()


def test_a_plan_that_does_not_fit_says_what_would_help():
    """The page said "Nothing to warn of, nothing to advise." beside "does not fit", and the text nothing."""
    batch, d_model, layers = wf.dims("batch=1048576 d_model=1024 layers=16")

    def layer(x, w):
        return wf.relu(wf.einsum(x, w, reduce="d_model")).rename(d_out="d_model"), None

    def loss(w, x):
        return wf.mean(wf.scan(layer, x, w, "layers")[0])

    w = wf.spec([layers, d_model, d_model.rename("d_out")], role="param")
    plan = wf.spmd(wf.grad(loss), "data=2", "batch:data").plan(w, wf.spec([batch, d_model]))
    asked = "are saved for the backward pass: recompute them (wf.remat; --model.remat nothing)"
    for shown in (" ".join(plan.explain("tpu-v2").split()), plan.to_html("tpu-v2")):
        assert "the peak exceeds the memory of a device by" in shown and asked in shown
        assert "are parameters" not in shown  # they are small
    assert not [*exceeds_memory(plan, plan.memory.peak)]


def test_the_running_sum_of_one_element_among_zeros():
    """XLA gave that element everywhere: the gradient of one place of a running sum was wrong."""
    x = values("g=7")
    for reverse in (False, True):
        gradient = wf.grad(lambda x, reverse=reverse: wf.cumsum(x, "g", reverse=reverse)["g", 3])
        want = np.arange(7) >= 3 if reverse else np.arange(7) <= 3
        np.testing.assert_array_equal(wf.spmd(gradient)(x).numpy(), want)
    padded = wf.spmd(lambda x: wf.cumsum(wf.pad(x, "g", 2, 2), "g"))(values("g=1"))
    np.testing.assert_array_equal(padded.numpy() != 0, [False, False, True, True, True])


# -- a parameter that is stored along the axis of an enclosing vmap ------------------------------------


def product(row, w):
    return wf.einsum(row, w, reduce=["d"])


own_rule = wf.custom_vjp(product)
own_rule.defvjp(
    lambda row, w: (product(row, w), (row, w)),
    lambda kept, g: (wf.einsum(g, kept[1], reduce=["h"]), wf.einsum(g, kept[0], out=["d", "h"])),
)


def chosen(row, w):
    return wf.cond(wf.sum(row) > 0, product, lambda row, w: 2 * product(row, w), row, w)


def chosen_and_held(row, w):
    return wf.cond(wf.sum(row) > 0, lambda: product(row, w), lambda: 2 * product(row, w))


def by_sign(row, w):
    return jnp.where(jnp.sum(row) > 0, 1, 2) * (row @ w)


# For each: what uses the parameter, and the same in plain JAX.
USES = {
    "einsum": (product, lambda row, w: row @ w),
    "custom_vjp": (own_rule, lambda row, w: row @ w),
    "cond": (chosen, by_sign),
    "cond that holds it": (chosen_and_held, by_sign),
    "jvp": (lambda row, w: wf.jvp(lambda w: product(row, w), (w,), (w,))[1], lambda row, w: row @ w),
    "grad": (
        lambda row, w: product(row, wf.grad(lambda w: wf.sum(wf.sin(product(row, w))))(w)),
        lambda row, w: row @ jax.grad(lambda w: jnp.sum(jnp.sin(row @ w)))(w),
    ),
    "scaled": (lambda row, w: product(row, w * 2), lambda row, w: row @ (2 * w)),
    "stop_gradient": (
        lambda row, w: product(row, wf.stop_gradient(w) + w),
        lambda row, w: row @ (jax.lax.stop_gradient(w) + w),
    ),
    "remat": (lambda row, w: wf.remat(product)(row, w), lambda row, w: row @ w),
}
STORED = {
    "on its axis": ("data=4", wf.Layout("batch:data", params="d:data")),
    "on another": ("data=4 model=2", wf.Layout("batch:data", params="d:model")),
    "on both": ("data=2 model=2", wf.Layout("batch:data", params="d:data+model")),
    "split too": ("data=2 model=2", wf.Layout("batch:data h:model", params="d:data")),
    "uneven": ("data=3", wf.Layout("batch:data", params="d:data")),
    "whole": ("data=4", wf.Layout("batch:data")),
}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("use", USES)
def test_stored_parameters_in_a_vmap(use, stored):
    """Gradients were wrong in custom_vjp and cond, or refused; a reader's scripts found it."""
    fn, plain = USES[use]
    x, w = values("batch=5 d=4"), wf.parameter(values("d=4 h=2"))

    def gradient(w, x):
        return wf.grad(lambda w: wf.sum(wf.square(wf.vmap(lambda row: fn(row, w), "batch")(x))))(w)

    want = jax.grad(lambda w: jnp.sum(jax.vmap(lambda row: plain(row, w))(x.numpy()) ** 2))(w.numpy())
    program = wf.spmd(gradient, *STORED[stored])
    np.testing.assert_allclose(program(w, x).numpy(), want, rtol=1e-5, atol=1e-5)
    if stored == "on its axis":
        assert {c.kind for c in program.collectives(w, x)} == {"all-gather", "reduce-scatter"}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_parameters_shared_by_stages_and_stored_along_them(schedule):
    def run(w, layers, x):
        def layer(h, b, w):
            return h + wf.tanh(wf.einsum(h, w, reduce=["d"]).rename(h="d") + b)

        out = wf.pipeline(layer, x, layers, "layers", micro=2, shared=(w,), schedule=schedule)
        return wf.sum(wf.square(out))

    given = wf.parameter(values("d=4 h=4")), values("layers=4 d=4"), values("batch=8 d=4")
    same(wf.grad(run), "pipe=2 data=2", wf.Layout("layers:pipe batch:data", params="d:pipe"), *given)


# -- pending sums ----------------------------------------------------------------------------------------

ONES = wf.ones("d=4", jnp.int8)
SMALL = wf.tensor(np.array([100, 100, -50, -50], np.int8), "d=4")
SUMS = {
    "unsigned, divided": (
        lambda a: (wf.sum(a) - wf.sum(wf.flip(a, "d")) + 4) / 4,
        wf.tensor(np.array([0, 1, 60, 40], np.uint32), "d=4"),
    ),
    "too long for a float": (
        lambda a: wf.sum(a) / 2,
        wf.tensor(np.array([100000007, 3, -100000000, 0], np.int32), "d=4"),
    ),
    "times a float": (lambda a: wf.einsum(a, ONES, out=[]) * 0.5, SMALL),
    "and a wider one": (lambda a: wf.einsum(a, ONES, out=[]) + wf.sum(a), SMALL),
    "summed further": (
        lambda a: wf.sum(wf.einsum(wf.stack([a, a], wf.Dim("n", 2)), ONES, reduce=["d"])),
        SMALL,
    ),
    "into a carry of floats": (
        lambda a: wf.fori_loop(0, 2, lambda _, carry: carry + wf.einsum(a, ONES, out=[]), 0.0),
        SMALL,
    ),
    "to a narrower float": (
        lambda a: wf.sum(a).astype(jnp.float16),
        wf.tensor(np.array([71000, 0, -69000, 0], np.float32), "d=4"),
    ),
}


@pytest.mark.parametrize("kind", SUMS)
def test_a_pending_sum_is_not_widened_before_it_is_added_up(kind):
    """Its parts had wrapped around, or were rounded, where the sum does neither."""
    fn, given = SUMS[kind]
    assert wf.spmd(fn, "model=2", "d:model")(given).item() == fn(given).item()


HALVES = {
    "multiplied": (lambda h: wf.sum(h) * 1000, [400, 400, -400, -399], 1000),
    "added": (lambda h: wf.sum(h), [40000, 40000, -40000, -39000], 1000),
}


@pytest.mark.parametrize("kind", HALVES)
def test_sums_that_are_too_large_in_parts(kind):
    """A known limit, and what the page says against it."""
    fn, numbers, want = HALVES[kind]
    given, program = wf.tensor(np.array(numbers, np.float16), "d=4"), wf.spmd(fn, "model=2", "d:model")
    assert np.isfinite(fn(given).item()) and np.isnan(program(given).item())
    assert program(given.astype(jnp.float32)).item() == pytest.approx(want, rel=0.01)


def test_remat_takes_what_is_no_array_eagerly_too():
    """JAX refused words, and made a truth value a tracer."""
    x = wf.ones("a=3")
    scaled = wf.remat(lambda x, mode, twice=False: x * 2 if mode == "on" and twice else x)
    for run in (scaled, wf.spmd(scaled, static=(1, "twice"))):
        assert run(x, "on", twice=True).numpy().tolist() == [2, 2, 2]


# -- JAX's own transformations -----------------------------------------------------------------------------

AROUND = {
    "vmap": lambda f, v: jax.vmap(f)(jnp.stack([v, 2 * v, 3 * v])),
    "jacfwd": lambda f, v: jax.jacfwd(f)(v),
    "jacrev": lambda f, v: jax.jacrev(f)(v),
    "hessian": lambda f, v: jax.hessian(lambda v: jnp.sum(f(jnp.sin(v))))(v),
    "jit of vmap": lambda f, v: jax.jit(jax.vmap(f))(jnp.stack([v, 2 * v])),
    "vmap of grad": lambda f, v: jax.vmap(jax.grad(lambda v: jnp.sum(f(v))))(jnp.stack([v, 2 * v, 3 * v])),
}
SQUARED_SUMS = {
    "a program": lambda t, *place: wf.spmd(lambda t: wf.cumsum(wf.square(t), "a"), *place)(t),
    "eager ops": lambda t, *place: wf.cumsum(wf.square(wf.place(t, *place)), "a"),
}


@pytest.mark.parametrize("place", [("x=2", "a:x"), ("x=4", "a:x"), ("x=2 y=2", "a:y+x")], ids=str)
@pytest.mark.parametrize("used", SQUARED_SUMS)
@pytest.mark.parametrize("around", AROUND)
def test_transformations_of_jax_around_what_is_placed(around, used, place):
    """JAX's device_put took the dim of a jax.vmap for the first one of the tensor, and refused its size."""
    v = values("a=5").array
    got = AROUND[around](lambda v: SQUARED_SUMS[used](wf.tensor(v, "a=5"), *place).array, v)
    want = AROUND[around](lambda v: jnp.cumsum(v**2), v)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("around", ["vmap", "jacfwd", "jacrev", "hessian"])
def test_transformations_of_jax_around_what_is_on_other_devices(around):
    v, program = values("a=5").array, wf.spmd(lambda t: wf.cumsum(t, "a"), "x=2", "a:x")

    def moved(v):
        return program(wf.place(wf.square(wf.place(wf.tensor(v, "a=5"), "x=4", "a:x")), None, None)).array

    want = AROUND[around](lambda v: jnp.cumsum(v**2), v)
    for given in (v, jax.device_put(v, jax.devices()[3])):
        np.testing.assert_allclose(AROUND[around](moved, given), want, rtol=1e-5, atol=1e-5)


BRANCHES = {
    "cond": lambda x, n: jax.lax.cond(n > 0, wf.sin, wf.exp, x),
    "switch": lambda x, n: jax.lax.switch(n, [wf.sin, wf.exp, lambda x: 2 * x], x),
    "captured": lambda x, n: jax.lax.cond(n > 0, lambda: wf.sin(x), lambda: wf.exp(x)),
    "pending": lambda x, n: jax.lax.cond(n > 0, wf.sin, lambda s: 2 * s, wf.sum(x)),
    "sums": lambda x, n: jax.lax.cond(n > 0, wf.sum, wf.max, x),
}


@pytest.mark.parametrize("place", [("x=2", "a:x"), ("x=4", "a:x"), ("x=2 y=2", "b:x a:y")], ids=str)
@pytest.mark.parametrize("branches", BRANCHES)
def test_branches_of_jax_inside_a_program(branches, place):
    """JAX flattened tensors that held types, and the form of those was asked for."""
    fn = BRANCHES[branches]

    def program(x, n):
        return fn(x, n), wf.grad(lambda x: wf.sum(fn(x, n)))(x)

    for n in (0, 1):
        same(program, *place, values("a=5 b=2"), jnp.int32(n))


@pytest.mark.parametrize("place", [("x=2", "a:x"), ("x=4", "a:x"), ("x=2 y=2", "b:x a:y")], ids=str)
def test_infinite_gradients_are_zero_in_padding(place):
    """They had 0 · ∞ there, which an einsum of two of them added to the rest."""

    def squared(x, s):
        gradient = wf.grad(lambda x: wf.sum(x * s))(x)
        return wf.einsum(gradient, gradient, out=[]), gradient

    given = wf.ones("a=5 b=3"), wf.tensor(np.float32(np.inf), ())
    same(squared, *place, *given)
    stored = np.asarray(wf.spmd(squared, *place)(*given)[1].storage)
    assert not np.isnan(stored).any() and (stored[5:] == 0).all()


def test_numbers_in_static_tuples_are_told_apart():
    """1, 1.0 and True are equal, and a tuple of one had the trace of the other."""
    program = wf.spmd(lambda x, s: x * s[0][0], static=(1,))
    x = wf.arange(wf.Dim("a", 3))
    assert [program(x, ((s,),)).dtype for s in (1, 1.0, True)] == [jnp.int32, jnp.float32, jnp.int32]
    assert len(program.traces) == 3
