"""jacobian and hessian against JAX's, in programs and eagerly."""

import jax
import jax.numpy as jnp
import pytest
from compare import assert_same, check, real
from tiers import slow, slow_except

import weft as wf

# a=5 and b=3 are uneven over 2.
PLACES = [
    (None, None),
    ("x=2 y=2", "a:x b:y"),
    ("x=8", "a:x"),
    ("x=2 y=2", "a:x+y"),
    ("x=2 y=2", "a:x b':y"),
]
TENSORS = {"x": real(0, "a=5 b=3"), "w": real(1, "b=3 c=2"), "v": real(2, "b=3")}


def layer(x, w):
    return wf.tanh(wf.einsum(x, w, out=["a", "c"]))


def leaves(tree):
    return jax.tree.leaves(tree, is_leaf=wf.is_tensor)


def loss(p):
    return wf.sum(wf.square(layer(p["x"], p["w"]))) + wf.sum(wf.softmax(p["x"], "a") * p["x"])


def raw_loss(p):
    return jnp.sum(jnp.square(jnp.tanh(p["x"] @ p["w"]))) + jnp.sum(jax.nn.softmax(p["x"], 0) * p["x"])


ROWS = {
    "of one argument": (
        "x w",
        lambda x, w: wf.jacobian(layer)(x, w),
        lambda x, w: jax.jacobian(lambda x, w: jnp.tanh(x @ w))(x, w),
    ),
    "of two": (
        "x w",
        lambda x, w: list(wf.jacobian(layer, argnums=(1, -2))(x, w)),
        lambda x, w: list(jax.jacobian(lambda x, w: jnp.tanh(x @ w), argnums=(1, 0))(x, w)),
    ),
    "of several outputs": (
        "x",
        lambda x: leaves(wf.jacobian(lambda x: {"s": wf.logsumexp(x), "y": (wf.sum(x * x, "b"), wf.cumsum(x, "a"))})(x)),
        lambda x: leaves(jax.jacobian(lambda x: {"s": jax.nn.logsumexp(x), "y": (jnp.sum(x * x, 1), jnp.cumsum(x, 0))})(x)),
    ),
    "infinite at 0": (
        "v",
        lambda v: wf.jacobian(lambda v: wf.log(v * v))(v),
        lambda v: jax.jacobian(lambda v: jnp.log(v * v))(v),
    ),
    "of a scan": (
        "x v",
        lambda x, v: wf.jacobian(lambda v: wf.scan(lambda c, x: (wf.sin(c * x), None), v, x, "a")[0])(v),
        lambda x, v: jax.jacobian(lambda v: jax.lax.scan(lambda c, x: (jnp.sin(c * x), None), v, x)[0])(v),
    ),
    "hessian": (
        "x w",
        lambda x, w: leaves(wf.hessian(loss)({"x": x, "w": w})),
        lambda x, w: leaves(jax.hessian(raw_loss)({"x": x, "w": w})),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mesh, layout", slow_except([PLACES[1], PLACES[4]], PLACES))
def test_jacobians(mesh, layout):
    """With gradients: third derivatives of the last row."""
    check(ROWS, mesh, layout, TENSORS, rtol=5e-5, atol=1e-5)


@pytest.mark.parametrize("mesh, layout", [PLACES[1], slow(*PLACES[2])])
def test_eagerly_on_placed_tensors(mesh, layout):
    given = {n: wf.place(TENSORS[n], mesh, layout) for n in ("x", "w")}
    got = wf.hessian(loss)(given)
    want = jax.hessian(raw_loss)({n: t.array for n, t in given.items()})
    assert_same(leaves(got), leaves(want), rtol=5e-5, atol=1e-5)
    assert got["x"]["x"].mesh == given["x"].mesh


def test_names():
    """The outputs' dims, then the inputs'; with primes, as many as needed, if any output has the name."""
    x, w, v = TENSORS.values()
    names = lambda t: [d.name for d in t.dims]
    assert names(wf.jacobian(lambda v: wf.sum(v))(v)) == ["b"]
    assert names(wf.jacobian(layer)(x, w)) == ["a", "c", "a'", "b"]
    both = wf.jacobian(lambda x: [wf.sum(x, "a"), wf.sum(x, "b")])(x)
    assert [names(t) for t in both] == [["b", "a'", "b'"], ["a", "a'", "b'"]]
    assert names(wf.jacobian(wf.hessian(lambda v: wf.sum(v * v * v)))(v)) == ["b", "b'", "b''"]
    twice = wf.hessian(lambda x, v: wf.sum(x * x * v), argnums=(0, 1))(x, v)
    assert [[names(t) for t in row] for row in twice] == [
        [["a", "b", "a'", "b'"], ["a", "b", "b'"]],
        [["b", "a'", "b'"], ["b", "b'"]],
    ]
    assert_same(wf.jacobian(lambda s: s * s)(2.0), jnp.float32(4.0))


def test_collectives():
    """The pullbacks of all rows share one collective."""
    x, w, _ = TENSORS.values()
    kinds = lambda fn, layout, *args: [
        (c.kind, c.count) for c in wf.spmd(fn, "x=2", layout).collectives(*args)
    ]
    # The gradient of w is summed over the batch, where it is used; that of x is split as x is.
    assert kinds(wf.jacobian(layer, argnums=1), "b:x", x, w) == [("all-reduce", 1)]
    assert kinds(wf.hessian(lambda x: wf.sum(x * x * x)), "a:x", x) == [("all-to-all", 1)]
