"""Derivatives against jax's own: grad, jvp, vjp, custom_vjp, remat, and derivatives of derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same, assert_same_on_mesh, check, cosines, real

import weft as wf
from weft.autodiff.remat import REMAT_POLICIES
from weft.core.errors import DimError, ProgramError, TensorTypeError

PLACES = [("x=2 y=2 z=2", "b:x d:y h:z"), ("x=4 y=2", "b:y+x")]
places = pytest.mark.parametrize("mesh, layout", PLACES, ids=[f"{m}-{lay}" for m, lay in PLACES])
TENSORS = {"x": real(0, "b=5 d=4"), "w": real(1, "d=4 h=3"), "v": real(2, "h=3 d=4"), "r": real(3, "")}


def hidden(x, w):
    return wf.tanh(wf.einsum(x, w, out=["b", "h"]))


def net(x, w, v):
    return wf.einsum(hidden(x, w), v, out=["b", "d"])


def loss(x, w, v):
    return wf.mean(wf.square(net(x, w, v) - x))


def raw_net(x, w, v):
    return jnp.tanh(x @ w) @ v


def raw_loss(x, w, v):
    return jnp.mean((raw_net(x, w, v) - x) ** 2)


def second(grad, total):
    """The gradient of the squared length of a gradient."""

    def both(loss, x, w, v):
        return grad(lambda x, w, v: total(*grad(loss, (0, 1, 2))(x, w, v)), (0, 1, 2))(x, w, v)

    return both


# A straight-through estimator with a tensor that it saves, and a scale that has no derivative.
@wf.custom_vjp
def stepped(x, scale):
    return wf.round(x * scale)


stepped.defvjp(
    lambda x, scale: (wf.round(x * scale), (x, scale)),
    lambda saved, g: (g * wf.cos(saved[0]), None),
)


@jax.custom_vjp
def raw_stepped(x, scale):
    return jnp.round(x * scale)


raw_stepped.defvjp(
    lambda x, scale: (jnp.round(x * scale), (x, scale)),
    lambda saved, g: (g * jnp.cos(saved[0]), None),
)


# A matrix product whose weights and inputs get gradients by a rule of our own: sums over split dims.
@wf.custom_vjp
def product(x, w):
    return wf.einsum(x, w, out=["b", "h"])


product.defvjp(
    lambda x, w: (wf.einsum(x, w, out=["b", "h"]), (x, w)),
    lambda saved, g: (
        2.0 * wf.einsum(g, saved[1], out=["b", "d"]),
        3.0 * wf.einsum(saved[0], g, out=["h", "d"]),
    ),
)


@jax.custom_vjp
def raw_product(x, w):
    return x @ w


raw_product.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda saved, g: (2.0 * g @ saved[1].T, 3.0 * saved[0].T @ g),
)

lengths = lambda *g: functools.reduce(lambda a, b: a + b, [wf.sum(wf.square(t)) for t in g])
raw_lengths = lambda *g: sum(jnp.sum(a**2) for a in g)
ROWS = {
    "grad": (
        "x w v",
        lambda x, w, v: wf.grad(loss, (0, 1, 2))(x, w, v),
        lambda x, w, v: jax.grad(raw_loss, (0, 1, 2))(x, w, v),
    ),
    "grad of grad": (
        "x w v",
        lambda x, w, v: second(wf.grad, lengths)(loss, x, w, v),
        lambda x, w, v: second(jax.grad, raw_lengths)(raw_loss, x, w, v),
    ),
    "jvp": (
        "x w v",
        lambda x, w, v: wf.jvp(net, (x, w, v), (wf.sin(x), w, v)),
        lambda x, w, v: jax.jvp(raw_net, (x, w, v), (jnp.sin(x), w, v)),
    ),
    "vjp": (
        "x w v",
        lambda x, w, v: wf.vjp(net, x, w, v)[1](wf.transpose(x, ["d", "b"])),
        lambda x, w, v: jax.vjp(raw_net, x, w, v)[1](x),
    ),
    "jvp of grad": (
        "x w v",
        lambda x, w, v: wf.jvp(lambda w: wf.grad(loss, 1)(x, w, v), (w,), (w,)),
        lambda x, w, v: jax.jvp(lambda w: jax.grad(raw_loss, 1)(x, w, v), (w,), (w,)),
    ),
    "custom_vjp": (
        "x",
        lambda x: stepped(x, 3.0) * wf.sin(x),
        lambda x: raw_stepped(x, 3.0) * jnp.sin(x),
    ),
    "custom_vjp in scan": (
        "x",
        lambda x: wf.scan(lambda c, _: (c + stepped(c * x, 2.0), None), x, None, wf.Dim("t", 3))[0],
        lambda x: jax.lax.scan(lambda c, _: (c + raw_stepped(c * x, 2.0), None), x, None, length=3)[0],
    ),
    "custom_vjp with sums": (
        "x w",
        lambda x, w: wf.tanh(product(x, w)),
        lambda x, w: jnp.tanh(raw_product(x, w)),
    ),
    "custom_vjp and remat": (
        "x w",
        lambda x, w: wf.remat(lambda x: wf.tanh(product(x, w)))(x),
        lambda x, w: jnp.tanh(raw_product(x, w)),
    ),
    "custom_vjp of a grad": (
        "x w",
        lambda x, w: wf.grad(lambda w: wf.sum(wf.square(product(x, w))))(w),
        lambda x, w: jax.grad(lambda w: jnp.sum(raw_product(x, w) ** 2))(w),
    ),
    "stop_gradient": (
        "x w",
        lambda x, w: hidden(x, wf.stop_gradient(w)) + hidden(wf.stop_gradient({"x": x})["x"], w),
        lambda x, w: jnp.tanh(x @ jax.lax.stop_gradient(w)) + jnp.tanh(jax.lax.stop_gradient(x) @ w),
    ),
    "a raw number": (
        "x r",
        lambda x, r: wf.value_and_grad(lambda r: wf.sum(x * r))(r),
        lambda x, r: jax.value_and_grad(lambda r: jnp.sum(x * r))(r),
    ),
    "unused": (
        "x w",
        lambda x, w: wf.grad(lambda x, w: wf.sum(x), (0, 1))(x, w),
        lambda x, w: jax.grad(lambda x, w: jnp.sum(x), (0, 1))(x, w),
    ),
}  # fmt: skip
ROWS |= {
    f"remat {policy}": (
        "x w v",
        lambda x, w, v, policy=policy: wf.remat(net, policy)(x, w, v),
        raw_net,
    )
    for policy in (None, *REMAT_POLICIES, jax.checkpoint_policies.dots_saveable)
}


@places
def test_derivatives(mesh, layout):
    check(ROWS, mesh, layout, TENSORS, rtol=3e-5, atol=5e-6)


def test_eager_derivatives():
    """The same table, op by op, on a placed tensor too."""
    placed = {n: wf.place(t, "x=2 y=2", "b:x h:y") for n, t in TENSORS.items()}
    names = ["grad", "jvp", "vjp", "custom_vjp", "custom_vjp with sums", "remat dots+sums", "unused"]
    for name in names:
        inputs, fn, oracle = ROWS[name]
        given = inputs.split()
        want = jax.tree.leaves(oracle(*[TENSORS[n].array for n in given]))
        for tensors in (TENSORS, placed):
            got = jax.tree.leaves(fn(*[tensors[n] for n in given]), is_leaf=wf.is_tensor)
            for t, a in zip(got, want, strict=True):
                assert_same(t, a, name=name)
    x, w = placed["x"], placed["w"]
    grads = wf.grad(lambda x, w: wf.sum(wf.tanh(product(x, w))), (0, 1))(x, w)
    want = jax.grad(lambda x, w: jnp.sum(jnp.tanh(raw_product(x, w))), (0, 1))(
        TENSORS["x"].array, TENSORS["w"].array
    )
    for t, a in zip(grads, want, strict=True):
        assert_same(t, a)


def arguments(grad, value_and_grad, total):
    """argnums, has_aux, trees and keywords determine the structure of the result."""

    def run(x, w, r):
        f = lambda tree, x, scale=1.0: (
            total(x @ tree["w"] if hasattr(x, "at") else wf.einsum(x, tree["w"], out=["b", "h"]))
            * tree["more"][0]
            * scale
        )
        tree = {"w": w, "more": (r, None)}
        aux = lambda tree, x: (f(tree, x), {"twice": x * 2.0, "none": None, "three": 3})
        return {
            "one": grad(f)(tree, x),
            "last": grad(f, -1)(tree, x),
            "both": grad(f, (1, 0))(tree, x),
            "a tuple of one": grad(f, (1,))(tree, x),
            "value": value_and_grad(f)(tree, x),
            "keyword": value_and_grad(f)(tree, x, scale=2.0),
            "aux": grad(aux, has_aux=True)(tree, x),
            "value and aux": value_and_grad(aux, has_aux=True)(tree, x),
        }

    return run


def test_arguments_and_results_are_nested_as_in_jax():
    fn = arguments(wf.grad, wf.value_and_grad, wf.sum)
    oracle = arguments(jax.grad, jax.value_and_grad, jnp.sum)
    given = [TENSORS[n] for n in "xwr"]
    want = oracle(*[t.array for t in given])
    placed = [wf.place(t, "x=2", "b:x") for t in given]
    for got in (wf.spmd(fn, "x=2", "b:x")(*given), fn(*given), fn(*placed)):
        leaves, tree = jax.tree.flatten(got, is_leaf=wf.is_tensor)
        assert tree == jax.tree.structure(want)
        for t, a in zip(leaves, jax.tree.leaves(want), strict=True):
            if wf.is_tensor(t):
                assert_same(t, a)
            else:
                assert t == a == 3


def test_vjp_with_aux():
    x, w = TENSORS["x"], TENSORS["w"]

    def program(x, w):
        out, pull, aux = wf.vjp(lambda w: (hidden(x, w), x * 2.0), w, has_aux=True)
        return out, pull(out), aux

    out, (grad,), aux = wf.spmd(program, "x=2", "b:x")(x, w)
    want, pull = jax.vjp(lambda w: jnp.tanh(x.array @ w), w.array)
    assert_same(out, want)
    assert_same(grad, pull(want)[0])
    assert_same(aux, x.array * 2)


def test_gradients_keep_the_role_and_may_stay_pending():
    x, w = TENSORS["x"], wf.parameter(TENSORS["w"])

    def program(w, x):
        first, second = (wf.grad(lambda w: wf.sum(hidden(x * n, w)))(w) for n in (1.0, 2.0))
        assert first.pending == {"x"} and first.role == "param"
        return first + second

    staged = wf.spmd(program, "x=2", "b:x")
    want = jax.grad(lambda w: jnp.tanh(x.array @ w).sum() + jnp.tanh(2 * x.array @ w).sum())
    assert_same(staged(w, x), want(w.array))
    assert [(c.kind, c.bytes) for c in staged.collectives(w, x)] == [("all-reduce", 4 * 3 * 4)]


def counted(policy):
    """The collectives of a gradient through a layer whose contraction is split."""
    body = hidden if policy == "none" else wf.remat(hidden, policy)
    step = lambda w, x: wf.sum(wf.square(body(x, w)))
    found = wf.spmd(wf.grad(step, (0, 1)), "x=2", "d:x").collectives(TENSORS["w"], TENSORS["x"])
    return sorted((c.kind, c.bytes) for c in found)


def test_a_rule_of_ones_own_may_leave_out_parts_of_a_tree():
    @wf.custom_vjp
    def scaled(tree):
        return tree["w"] * tree["b"]

    scaled.defvjp(
        lambda tree: (tree["w"] * tree["b"], tree["b"]), lambda b, g: ({"w": g * b, "b": None, "none": None},)
    )
    gradient = wf.grad(lambda tree: wf.sum(scaled(tree)))
    tree = {"w": wf.ones("a=2"), "b": wf.full("a=2", 3.0), "none": None}
    for found in (gradient(tree), wf.spmd(gradient, "x=2", "a:x")(tree)):
        assert found["w"].numpy().tolist() == [3.0, 3.0] and found["b"].numpy().tolist() == [0.0, 0.0]


def test_remat_and_collectives():
    """The policy "sums" saves the results of all-reduces: no collective runs twice."""
    assert counted("none") == counted("sums") == counted("dots+sums") == counted("everything")
    assert len(counted("nothing")) == len(counted("none")) + 1


def test_remat_keeps_less():
    def saved_residuals(policy):
        body = wf.remat(lambda x: wf.sin(wf.sin(wf.sin(x))), policy)
        jaxpr = wf.spmd(wf.grad(lambda x: wf.sum(body(x))), "x=2", "b:x").jaxpr(TENSORS["x"])
        return str(jaxpr).count(" sin ")

    assert saved_residuals("everything") < saved_residuals("nothing")


@pytest.mark.parametrize(
    "error, match, call",
    [
        (ProgramError, "a floating-point scalar", lambda x: wf.grad(wf.exp)(x)),
        (TensorTypeError, "gradients exist for", lambda x: wf.grad(wf.sum)(x.astype(jnp.int32))),
        (ProgramError, "argument 3", lambda x: wf.grad(wf.sum, 3)(x)),
        (ProgramError, "returns a pair", lambda x: wf.grad(wf.sum, has_aux=True)(x)),
        (DimError, "was given as the derivative of", lambda x: wf.jvp(wf.exp, (x,), (wf.sum(x, "b"),))),
        (ProgramError, "no remat policy 'sum'", lambda x: wf.remat(wf.exp, "sum")),
    ],
    ids=["scalar", "dtype", "argnums", "aux", "tangent", "policy"],
)
def test_errors(error, match, call):
    with pytest.raises(error, match=match):
        call(TENSORS["x"])


def test_gradients_through_numpy_constants():
    scale = np.arange(4, dtype=np.float32)
    fn = lambda x: wf.sum(wf.square(x * wf.tensor(scale, "d=4")))
    got = wf.spmd(wf.grad(fn), "x=8", "d:x")(TENSORS["x"])
    assert_same(got, jax.grad(lambda x: jnp.sum((x * scale) ** 2))(TENSORS["x"].array))


def test_a_pending_gradient_of_a_narrow_type():
    """For a dtype whose sums cannot stay pending, the partial sums were dropped."""

    def run(w, x):
        grad = wf.grad(lambda w: wf.sum(wf.einsum(x, w, out=["b"])))(w)
        return grad.astype(jnp.float16)

    w, x = wf.parameter(wf.ones("d=4")), real(0, "b=5 d=4")
    got = wf.spmd(run, "x=2", "b:x")(w, x)
    assert got.dtype == jnp.float16
    np.testing.assert_allclose(got.numpy(), x.numpy().sum(0), rtol=1e-2)


def test_deferred_gather_inside_vjp_inside_cond():
    """A collective was traced in the branch, on an array of the vjp's own trace."""

    def program(x):
        def pulled():
            out, pull = wf.vjp(wf.square, x)
            return pull(out)[0]

        return wf.grad(lambda y: wf.sum(wf.cond(wf.sum(x) > 9.0, lambda: x * 2.0, pulled) * y))(x)

    layout = wf.Layout("", params="a:x")
    assert_same_on_mesh(program, "x=4", layout, wf.parameter(cosines("a=4")))


def test_vjp_inside_a_scan_sums_gradients_after_the_loop():
    """The layers were made varying before the loop, so vjp was retraced and summed in every step."""
    io, layers = wf.dims("io=3 layers=4")
    x, w, scale = cosines("batch=6 io=3"), cosines("layers=4 io=3"), cosines("io=3")

    def program(x, w, scale):
        def step(carry, w):
            x, total = carry
            out, pull = wf.vjp(lambda w, s, _: wf.tanh(x * wf.sin(w) * s), w, scale, x, zeros=False)
            of_w, of_scale, unused = pull(out)
            assert unused is None
            return (out, total + of_scale), of_w

        return wf.scan(step, (x, wf.zeros([io])), w, layers)

    assert_same_on_mesh(program, "p=2", "batch:p", x, w, scale)
    found = wf.spmd(program, "p=2", "batch:p").plan(x, w, scale).collectives
    assert [(c.kind, c.count, c.bytes) for c in found] == [("all-reduce", 1, 12), ("all-reduce", 1, 48)]


def test_a_loop_that_accumulates_many_gradients_is_traced_twice():
    """Each carry that should be pending cost one more trace of the body: 12 parameters, 13 traces."""
    params = {f"w{n}": wf.parameter(cosines("d=4 h=3")) for n in range(12)}
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
    found = program.collectives(params, cosines("micro=3 b=4 d=4"))
    assert len(traced) == 2
    assert [(c.kind, c.bytes, c.count) for c in found] == [("all-reduce", 4 * 3 * 4, 1)] * 12


def test_remat_takes_static_arguments_eagerly():
    """JAX rejected strings, and made a boolean a tracer."""
    x = wf.ones("a=3")
    scaled = wf.remat(lambda x, mode, twice=False: x * 2 if mode == "on" and twice else x)
    for run in (scaled, wf.spmd(scaled, static=(1, "twice"))):
        assert run(x, "on", twice=True).numpy().tolist() == [2, 2, 2]


@pytest.mark.parametrize("place", [("x=2", "a:x"), ("x=4", "a:x"), ("x=2 y=2", "b:x a:y")], ids=str)
def test_infinite_gradients_are_zero_in_padding(place):
    """They were 0 · ∞ there, and an einsum of two of them added the NaN to the result."""

    def squared(x, s):
        gradient = wf.grad(lambda x: wf.sum(x * s))(x)
        return wf.einsum(gradient, gradient, out=[]), gradient

    given = wf.ones("a=5 b=3"), wf.tensor(np.float32(np.inf), ())
    assert_same_on_mesh(squared, *place, *given)
    stored = np.asarray(wf.spmd(squared, *place)(*given)[1].storage)
    assert not np.isnan(stored).any() and (stored[5:] == 0).all()


COMPLEX = {
    "products": lambda x: wf.sin((x + 1j * x) * (x - 2j)),
    "a Fourier transform": lambda x: wf.fft.rfft(wf.tanh(x), "a") - (4 + 3j),
}


@pytest.mark.parametrize("policy", [None, "everything", "dots"])
@pytest.mark.parametrize("name", COMPLEX)
def test_remat_of_complex_values(name, policy):
    """JAX fails to save a complex value for the backward pass; Weft computes it again."""

    def loss(x, transform):
        return transform(lambda x: wf.sum(wf.abs(COMPLEX[name](x))))(x)

    x = wf.tensor(np.linspace(0.1, 2, 5, dtype=np.float32), "a=5")
    want = wf.grad(lambda x: loss(x, lambda f: f))(x)
    for mesh, layout in (("", ""), ("x=4", "a:x")):
        got = wf.spmd(wf.grad(lambda x: loss(x, lambda f: wf.remat(f, policy))), mesh, layout)(x)
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5)
