"""Ways out: local, callback and debug."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same, check, integers, real

import weft as wf
from weft.core.errors import LayoutError, ProgramError, ShapeError, TensorTypeError

TENSORS = {"x": real(0, "b=5 d=4"), "y": real(1, "d=4 h=3"), "i": integers(2, "b=5", 0, 9)}
LOCAL = {
    "one": (
        "x",
        lambda x: wf.local(lambda a: jnp.cumsum(a, 1), x, out=x.dims, splittable=["b"]),
        lambda x: jnp.cumsum(x, 1),
    ),
    "two in, by name": (
        "x y",
        lambda x, y: wf.local(lambda a, b: jnp.tanh(a @ b), x, y, out=["b", "h"], splittable=["b", "h"]),
        lambda x, y: jnp.tanh(x @ y),
    ),
    "two out": (
        "x",
        lambda x: wf.local(lambda a: (a.max(1), jnp.cos(a).T), x, out=[["b"], ["d", "b"]], splittable="b"),
        lambda x: (x.max(1), jnp.cos(x).T),
    ),
    "new dims": (
        "x",
        lambda x: wf.local(lambda a: a[:, :, None] ** jnp.arange(3), x, out=[*x.dims, wf.Dim("k", 3)], splittable=["b"]),
        lambda x: x[:, :, None] ** jnp.arange(3),
    ),
    "of a pending sum": (
        "x y",
        lambda x, y: wf.local(lambda a: jnp.sort(a), wf.sum(x, "b"), out=["d"]),
        lambda x, y: jnp.sort(x.sum(0)),
    ),
    "to a scalar": ("y", lambda y: wf.local(jnp.linalg.norm, y.rename(h="k"), out=[]), jnp.linalg.norm),
    "whole numbers": ("i", lambda i: wf.local(lambda a: a + 1, i, out="b=5", splittable=["b"]), lambda i: i + 1),
}  # fmt: skip
PLACES = [("x=2 y=2", "b:x h:y"), ("x=8", "b:x"), ("x=4", "h:x")]


@pytest.mark.parametrize("mesh, layout", PLACES, ids=[f"{m}-{lay}" for m, lay in PLACES])
def test_local(mesh, layout):
    check(LOCAL, mesh, layout, TENSORS)


@pytest.mark.parametrize("devices", [2, 8])
def test_padding_is_zero_in_local(devices):
    """So a function may add up over devices by itself."""

    def total(x):
        return wf.local(lambda a: jax.lax.psum(a.sum(0), "x"), wf.exp(x), out=["d"], splittable=["b"])

    x = TENSORS["x"]
    assert_same(wf.spmd(total, f"x={devices}", "b:x")(x), jnp.exp(x.array).sum(0))


@pytest.mark.parametrize(
    "error, match, fn, out",
    [
        (LayoutError, "does not declare splittable", lambda a: a, "b=5 d=4"),
        (ShapeError, "returned shape", lambda a: a[:, :2], "b=5 d=4"),
        (ShapeError, "returned 1 arrays", lambda a: (a,), [["b", "d"], ["b"]]),
        (ProgramError, "varies over x", lambda a: a.sum(0), ["d"]),
    ],
    ids=["split", "shape", "number", "partial"],
)
def test_local_errors(error, match, fn, out):
    splittable = [] if error is LayoutError else ["b"]
    with pytest.raises(error, match=match):
        wf.spmd(lambda x: wf.local(fn, x, out=out, splittable=splittable), "x=2", "b:x")(TENSORS["x"])


@pytest.mark.parametrize("mesh, layout", [("", ""), *PLACES[:2]], ids=["one", "x=2 y=2", "x=8"])
def test_callback(mesh, layout):
    shapes = []

    def python(a, b):
        shapes.append((type(a), a.shape, b.shape))
        return np.linalg.norm(a, axis=1) + b.sum()

    def program(x, y):
        h = wf.einsum(x, y, out=["b", "h"])
        return wf.callback(python, x * 2.0, h, out=wf.spec("b=5")) * 2.0

    def oracle(x, y):
        return (np.linalg.norm(2 * x, axis=1) + (x @ y).sum()) * 2

    x, y = TENSORS["x"], TENSORS["y"]
    assert_same(wf.spmd(program, mesh, layout)(x, y), oracle(x.numpy(), y.numpy()))
    assert set(shapes) == {(np.ndarray, (5, 4), (5, 3))}  # global values without padding


def test_callback_eagerly_and_its_errors():
    x = TENSORS["x"]
    assert_same(wf.callback(lambda a: a[::-1], x, out=wf.spec(x.dims)), x.numpy()[::-1])
    placed = wf.place(x, "x=2", "b:x")
    assert_same(wf.callback(lambda a: a[::-1], placed, out=wf.spec(x.dims)), x.numpy()[::-1])
    with pytest.raises(TensorTypeError, match="described by a spec"):
        wf.callback(lambda a: a, x, out=x.dims)
    with pytest.raises(Exception, match="returned shape"):
        wf.callback(lambda a: a[0], x, out=wf.spec(x.dims))


@pytest.mark.parametrize("mesh, layout", [("", ""), ("x=2 y=2", "b:x d:y"), ("x=8", "b:x")])
def test_callback_inside_vmap(mesh, layout):
    """JAX requires a vmap method: sequential."""
    each = lambda x: wf.callback(np.cumsum, x, out=wf.spec("d=4"))
    x = TENSORS["x"]
    want = x.numpy().cumsum(1)
    assert_same(wf.spmd(wf.vmap(each, "b"), mesh, layout)(x), want)
    assert_same(wf.vmap(each, "b")(wf.place(x, mesh, layout)), want)


@pytest.mark.parametrize("mesh, layout", [("", ""), ("x=2 y=2", "b:x d:y"), ("x=8", "b:x")])
def test_callback_beside_a_derivative(mesh, layout):
    """It has no gradient; stop_gradient and custom rules around it are differentiated as usual."""
    double = lambda x: wf.callback(lambda a: a * 2, x, out=wf.spec(x.dims))
    given = wf.custom_vjp(double)
    given.defvjp(lambda x: (double(x), None), lambda _, g: (g * 2,))
    loss = lambda x: wf.sum(x * double(wf.stop_gradient(x)) + given(x))
    x = TENSORS["x"]
    assert_same(wf.spmd(wf.grad(loss), mesh, layout)(x), 2 * x.numpy() + 2)


@pytest.mark.parametrize("mesh, layout", [("", ""), *PLACES[:2]], ids=["one", "x=2 y=2", "x=8"])
def test_debug(mesh, layout, capsys):
    values = np.arange(10, dtype=np.float32).reshape(5, 2)

    def program(x):
        return wf.debug(wf.debug(x) * 2.0, "twice") + wf.debug(wf.sum(x), "sum")

    fn = wf.spmd(program, mesh, layout.replace("h:y", "d:y"))
    assert_same(fn(wf.tensor(values, "b=5 d=2")), values * 2 + 45)
    jax.effects_barrier()
    printed = capsys.readouterr().out
    # Each is printed once on any number of devices, as a global value without padding.
    assert printed.count("f32[b=5, d=2]") == 2 and printed.count("sum: f32[] 45.") == 1
    assert f"f32[b=5, d=2] {np.array2string(values)}" in printed
    assert f"twice: f32[b=5, d=2] {np.array2string(values * 2)}" in printed


def test_debug_eagerly_and_in_loops(capsys):
    x = wf.place(wf.tensor(np.arange(3.0, dtype=np.float32), "a=3"), "x=2", "a:x")
    assert wf.debug(x, "x").dims == x.dims
    wf.spmd(
        lambda x: wf.scan(lambda c, _: (wf.debug(c + 1.0, "c"), None), x, None, wf.Dim("t", 3))[0],
        "x=2",
        "a:x",
    )(x)
    jax.effects_barrier()
    printed = capsys.readouterr().out
    assert printed.count("x: f32[a=3] [0. 1. 2.]") == 1
    assert [line for line in printed.splitlines() if line.startswith("c:")] == [
        f"c: f32[a=3] [{n}. {n + 1}. {n + 2}.]" for n in (1, 2, 3)
    ]


def test_debug_does_not_change_the_gradient():
    fn = lambda x: wf.sum(wf.square(wf.debug(x)))
    assert_same(wf.spmd(wf.grad(fn), "x=2", "b:x")(TENSORS["x"]), 2 * TENSORS["x"].array)


@pytest.mark.parametrize("layout", ["", "a:x", "c:y", "a:x c:y", "a:y c:x", "a:x+y"])
def test_a_result_that_does_not_depend_on_a_split_operand(layout):
    x, w = wf.tensor(np.arange(30.0, dtype="f").reshape(6, 5), "a=6 b=5"), wf.ones("b=5 c=8")
    outs = [["a", "c"], ["a"], ["c"], []]
    fn = lambda a, w: (a @ w, a.sum(1), w.sum(0), jnp.float32(2.0))
    run = lambda x, w: wf.local(fn, x, w, out=outs, splittable=["a", "c"])
    loss = lambda x, w: wf.sum(wf.square(run(x, w)[0])) + wf.sum(wf.square(run(x, w)[1]))
    raw = lambda a, w: jnp.sum((a @ w) ** 2) + jnp.sum(a.sum(1) ** 2)
    got = wf.spmd(run, "x=2 y=4", layout)(x, w)
    for mine, want in zip(got, fn(x.array, w.array), strict=True):
        np.testing.assert_allclose(mine.numpy(), want, rtol=1e-6)
    grads = wf.spmd(wf.grad(loss, (0, 1)), "x=2 y=4", layout)(x, w)
    for mine, want in zip(grads, jax.grad(raw, (0, 1))(x.array, w.array), strict=True):
        np.testing.assert_allclose(mine.numpy(), want, rtol=1e-5)


def test_a_result_that_depends_on_a_split_operand_has_its_dim():
    x, w = wf.ones("a=6 b=5"), wf.ones("b=5 c=8")
    with pytest.raises(ProgramError, match="varies over y") as caught:
        wf.spmd(
            lambda x, w: wf.local(lambda a, w: a @ w.sum(1), x, w, out=["a"], splittable=["a", "c"]),
            "x=2 y=2",
            "a:x c:y",
        )(x, w)
    assert "psum" not in str(caught.value)  # it would also multiply what does not vary


def test_local_in_a_scan_with_varying_operands():
    x = wf.ones("g=1 b=1")

    def step(carry, row):
        return carry, wf.local(lambda a: a * 2, row, out=row.dims, splittable=["b"])

    _, rows = wf.spmd(lambda x: wf.scan(step, x, x, "g"), "x=2", "g:x")(x)
    assert rows.numpy("g", "b").tolist() == [[2.0]]
