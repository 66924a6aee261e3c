"""scan, while_loop, fori_loop, cond, switch, map and vmap against jax.lax's and jax.vmap."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same, check, real
from jax import lax

import weft as wf
from weft.core.errors import DimError, LayoutError, ProgramError, TensorTypeError

# t is scanned, n mapped; d=4 is even over 2, b=3, t=5 and n=5 are not.
PLACES = [
    ("x=2 y=2 z=2", "b:x d:y t:z"),
    ("x=8", "t:x"),
    ("x=2 y=2", "b:x+y"),
]
places = pytest.mark.parametrize("mesh, layout", PLACES, ids=[f"{m}-{lay}" for m, lay in PLACES])
TENSORS = {
    "x": real(0, "b=3 d=4"),
    "xs": real(1, "t=5 b=3 d=4"),
    "ys": real(2, "b=3 t=5"),
    "w": real(3, "d=4 h=4", -0.5, 0.5),
    "ws": real(4, "d=4 t=5 h=4", -0.5, 0.5),
    "r": real(5, ""),
}


def layer(x, w):
    return wf.tanh(wf.einsum(x, w, out=["b", "h"])).rename(h="d")


def raw_layer(x, w):
    return jnp.tanh(x @ w)


T = wf.Dim("t", 5)
SCAN = {
    "carry and ys": (
        "x xs",
        lambda x, xs: wf.scan(lambda c, x: (c * 0.5 + wf.sin(x), c * x), x, xs, "t"),
        lambda x, xs: lax.scan(lambda c, x: (c * 0.5 + jnp.sin(x), c * x), x, xs),
    ),
    "reverse": (
        "x xs",
        lambda x, xs: wf.scan(lambda c, x: (c * 0.5 + x, c * x), x, xs, "t", reverse=True),
        lambda x, xs: lax.scan(lambda c, x: (c * 0.5 + x, c * x), x, xs, reverse=True),
    ),
    "unroll": (
        "x xs",
        lambda x, xs: wf.scan(lambda c, x: (c * x, None), x, xs, T, unroll=2)[0],
        lambda x, xs: lax.scan(lambda c, x: (c * x, None), x, xs)[0],
    ),
    "layers": (
        "x ws",
        lambda x, ws: wf.scan(lambda c, w: (layer(c, w), wf.sum(c, "d")), x, ws, "t"),
        lambda x, ws: lax.scan(
            lambda c, w: (raw_layer(c, w), c.sum(1)), x, jnp.moveaxis(ws, 1, 0)
        ),
    ),
    "captured": (
        "x w",
        lambda x, w: wf.scan(lambda c, _: (layer(c, w), None), x, None, T)[0],
        lambda x, w: lax.scan(lambda c, _: (raw_layer(c, w), None), x, None, length=5)[0],
    ),
    "accumulator": (
        "xs w",
        lambda xs, w: wf.scan(
            lambda c, x: (c + wf.sum(layer(x, w)), None), wf.zeros(""), xs, "t"
        )[0],
        lambda xs, w: lax.scan(lambda c, x: (c + raw_layer(x, w).sum(), None), 0.0, xs)[0],
    ),
    "accumulated, and used": (
        "xs r",
        lambda xs, r: wf.scan(lambda c, x: (c + wf.sum(x * x, "b"), wf.exp(c * 0.1)), r * wf.ones("d=4"), xs, "t"),
        lambda xs, r: lax.scan(lambda c, x: (c + jnp.sum(x * x, 0), jnp.exp(c * 0.1)), r * jnp.ones(4), xs),
    ),
    "trees": (
        "x xs ys",
        lambda x, xs, ys: jax.tree.leaves(
            wf.scan(
                lambda c, i: ({"p": c["p"] + i["a"], "q": (c["q"] * 0.5 + i["b"], c["q"].astype(jnp.int32))[0]}, (c["q"], [i["a"] * i["b"]])),
                {"p": x, "q": wf.zeros("b=3")}, {"a": xs, "b": ys}, "t",
            ),
            is_leaf=wf.is_tensor,
        ),
        lambda x, xs, ys: jax.tree.leaves(
            lax.scan(
                lambda c, i: ({"p": c["p"] + i["a"], "q": c["q"] * 0.5 + i["b"]}, (c["q"], [i["a"] * i["b"][:, None]])),
                {"p": x, "q": jnp.zeros(3)}, {"a": xs, "b": ys.T},
            )
        ),
    ),
    "nested": (
        "x ws",
        lambda x, ws: wf.scan(
            lambda c, w: (wf.scan(lambda c, _: (layer(c, w), None), c, None, wf.Dim("u", 2))[0], None), x, ws, "t"
        )[0],
        lambda x, ws: lax.scan(
            lambda c, w: (raw_layer(raw_layer(c, w), w), None), x, jnp.moveaxis(ws, 1, 0)
        )[0],
    ),
    "number as carry": (
        "xs",
        lambda xs: wf.scan(lambda c, x: (c + wf.sum(x), c), 0.0, xs, "t"),
        lambda xs: lax.scan(lambda c, x: (c + jnp.sum(x), c), 0.0, xs),
    ),
    "remat": (
        "x ws",
        lambda x, ws: wf.scan(wf.remat(lambda c, w: (layer(c, w), None)), x, ws, "t")[0],
        lambda x, ws: lax.scan(lambda c, w: (raw_layer(c, w), None), x, jnp.moveaxis(ws, 1, 0))[0],
    ),
}  # fmt: skip


@places
def test_scan(mesh, layout):
    check(SCAN, mesh, layout, TENSORS, rtol=2e-5)


def test_scan_with_raw_arrays():
    def program(x, key):
        def body(carry, part):
            x, key, n = carry
            key, now = jax.random.split(key)
            return (x + wf.random.uniform(now, x.dims), key, n + part), n

        return wf.scan(body, (x, key, jnp.int32(0)), jnp.arange(3), wf.Dim("step", 3))

    (x, _, n), ns = wf.spmd(program, "x=2", "b:x")(TENSORS["x"], jax.random.key(0))
    want, key = TENSORS["x"].array, jax.random.key(0)
    for _ in range(3):
        key, now = jax.random.split(key)
        want = want + jax.random.uniform(now, (3, 4))
    assert_same(x, want)
    assert n == 3 and ns.tolist() == [0, 0, 1]


@pytest.mark.parametrize("params", ["d:y", "h:y t:x", "t:y", "d:x+y"])
def test_scan_over_stored_parameters(params):
    """Gathered inside, layer by layer; the gradient comes out in the layout it is stored in."""
    x, ws = TENSORS["x"], wf.parameter(TENSORS["ws"])
    layout = wf.Layout("b:x", params=params)

    def loss(ws, x):
        return wf.sum(wf.square(wf.scan(lambda c, w: (layer(c, w), None), x, ws, "t")[0]))

    def raw(ws, x):
        return jnp.sum(lax.scan(lambda c, w: (raw_layer(c, w), None), x, jnp.moveaxis(ws, 1, 0))[0] ** 2)

    value, grad = wf.spmd(wf.value_and_grad(loss), "x=2 y=2", layout)(ws, x)
    want = jax.value_and_grad(raw)(ws.array, x.array)
    assert_same(value, want[0])
    assert_same(grad, want[1])
    assert grad.role == "param"
    assert grad.storage.sharding == wf.place(ws, "x=2 y=2", layout).storage.sharding


def test_what_a_scan_costs():
    def kinds(fn, layout, *tensors):
        return [(c.kind, c.count) for c in wf.spmd(fn, "x=2", layout).collectives(*tensors)]

    total = lambda xs: wf.scan(lambda c, x: (c + wf.sum(x, "d"), None), wf.zeros("b=3"), xs, "t")[0]
    # A sum that only accumulates is added up once, after the loop.
    assert kinds(total, "d:x", TENSORS["xs"]) == [("all-reduce", 1)]
    # A scanned dim that is split is gathered, before the loop.
    assert kinds(total, "t:x", TENSORS["xs"]) == [("all-gather", 1)]
    # A captured parameter's gradient is added up once, not once a step.
    loss = lambda w, x: wf.sum(wf.scan(lambda c, _: (layer(c, w), None), x, None, T)[0])
    grad = kinds(wf.grad(loss), "b:x", TENSORS["w"], TENSORS["x"])
    assert grad == [("all-reduce", 1)]


BRANCHES = [lambda x, r: x * r, lambda x, r: x - wf.sum(x, "d"), lambda x, r: wf.flip(wf.exp(x), "d") * r]
RAW_BRANCHES = [
    lambda x, r: x * r,
    lambda x, r: x - x.sum(1, keepdims=True),
    lambda x, r: jnp.exp(x)[:, ::-1] * r,
]
LOOPS = {
    "fori": (
        "x w",
        lambda x, w: wf.fori_loop(0, 3, lambda n, x: layer(x, w) * (n + 1.0), x),
        lambda x, w: lax.fori_loop(0, 3, lambda n, x: raw_layer(x, w) * (n + 1.0), x),
    ),
    "fori tree": (
        "x r",
        lambda x, r: wf.fori_loop(1, 4, lambda n, c: (c[0] * c[1], c[1] + n), (x, r)),
        lambda x, r: lax.fori_loop(1, 4, lambda n, c: (c[0] * c[1], c[1] + n), (x, r)),
    ),
    "cond": (
        "x r",
        lambda x, r: [
            wf.cond(wf.sum(x) > limit, lambda x, r: x * r, lambda x, r: wf.sin(x) + r, x, r)
            for limit in (-100.0, 100.0)
        ],
        lambda x, r: [
            lax.cond(jnp.sum(x) > limit, lambda x, r: x * r, lambda x, r: jnp.sin(x) + r, x, r)
            for limit in (-100.0, 100.0)
        ],
    ),
    "cond with sums": (
        "x w",
        lambda x, w: wf.cond(wf.any(x > 9), lambda: wf.sum(x, "d"), lambda: wf.sum(layer(x, w), "d")),
        lambda x, w: lax.cond(jnp.any(x > 9), lambda: x.sum(1), lambda: raw_layer(x, w).sum(1)),
    ),
    "switch": (
        "x r",
        lambda x, r: [wf.switch(wf.astype(wf.round(n + 0.0 * r), jnp.int32), BRANCHES, x, r) for n in (-2, 0, 1, 2, 7)],
        lambda x, r: [lax.switch(n, RAW_BRANCHES, x, r) for n in (-2, 0, 1, 2, 7)],
    ),
    "switch by a number": (
        "x r",
        lambda x, r: [wf.switch(n, BRANCHES, x, r) for n in (1, np.int8(2))],
        lambda x, r: [lax.switch(n, RAW_BRANCHES, x, r) for n in (1, np.int8(2))],
    ),
    "switch of one branch, on a tree": (
        "x r",
        lambda x, r: wf.switch(3, [lambda t: (t["x"] * t["r"], wf.sum(t["x"], "d"))], {"x": x, "r": r}),
        lambda x, r: (x * r, x.sum(1)),
    ),
    "cond in scan": (
        "x xs",
        lambda x, xs: wf.scan(lambda c, x: (wf.cond(wf.max(x) > 1.4, lambda c: c + x, lambda c: c * x, c), None), x, xs, "t")[0],
        lambda x, xs: lax.scan(lambda c, x: (lax.cond(jnp.max(x) > 1.4, lambda c: c + x, lambda c: c * x, c), None), x, xs)[0],
    ),
}  # fmt: skip


@places
def test_loops_and_branches(mesh, layout):
    check(LOOPS, mesh, layout, TENSORS, rtol=2e-5)


@pytest.mark.parametrize("layout", ["b:x d:y", "b:x+y"])
def test_while_loop(layout):
    """Without gradients, as in JAX; but with forward-mode ones."""

    def program(x, w):
        run = lambda x: wf.while_loop(
            lambda c: (c[1] < 20) & (wf.sum(wf.square(c[0])) > 0.05),
            lambda c: (layer(c[0], w), c[1] + 1),
            (x, 0),
        )
        return run(x), wf.jvp(lambda x: run(x)[0], (x,), (x,))[1]

    def raw(x, w):
        run = lambda x: lax.while_loop(
            lambda c: (c[1] < 20) & (jnp.sum(c[0] ** 2) > 0.05),
            lambda c: (raw_layer(c[0], w), c[1] + 1),
            (x, 0),
        )
        return run(x), jax.jvp(lambda x: run(x)[0], (x,), (x,))[1]

    x, w = TENSORS["x"], TENSORS["w"]
    (got, steps), tangent = wf.spmd(program, "x=2 y=2", layout)(x, w)
    (want, count), want_tangent = raw(x.array, w.array)
    assert steps.item() == int(count) > 2
    assert_same(got, want)
    assert_same(tangent, want_tangent)


VMAP_PLACES = [
    ("x=2 y=2", "n:x d:y"),
    ("x=4 y=2", "n:y+x"),
    ("x=2 y=2", "d:x b:y"),
]
MAPPED = {"z": real(6, "n=5 d=4"), "k": real(7, "n=5 b=3"), "w": TENSORS["w"], "v": real(8, "d=4")}
VMAP = {
    "one": (
        "z",
        lambda z: wf.vmap(lambda z: wf.softmax(z, "d") * wf.sum(z), "n")(z),
        lambda z: jax.vmap(lambda z: jax.nn.softmax(z) * jnp.sum(z))(z),
    ),
    "two, one without the dim": (
        "z v",
        lambda z, v: wf.vmap(lambda z, v: [wf.sum(z * v), v * z], "n")(z, v),
        lambda z, v: jax.vmap(lambda z, v: [jnp.sum(z * v), v * z], (0, None))(z, v),
    ),
    "captured": (
        "z w",
        lambda z, w: wf.vmap(lambda z: wf.tanh(wf.einsum(z, w, out=["h"])), "n")(z),
        lambda z, w: jnp.tanh(z @ w),
    ),
    "nested": (
        "z k",
        lambda z, k: wf.vmap(lambda z, k: wf.vmap(lambda k: wf.max(z * k), "b")(k), "n")(z, k),
        lambda z, k: jax.vmap(lambda z, k: jax.vmap(lambda k: jnp.max(z * k))(k))(z, k),
    ),
    "infinite at 0": (
        "z",
        lambda z: wf.vmap(lambda z: wf.log(wf.sum(z * z)), "n")(z),
        lambda z: jnp.log(jnp.sum(z * z, 1)),
    ),
    "gradients of their own": (
        "z v",
        lambda z, v: wf.vmap(lambda z: wf.grad(lambda v: wf.square(wf.sum(v * z)))(v), "n")(z),
        lambda z, v: jax.vmap(lambda z: jax.grad(lambda v: jnp.sum(v * z) ** 2)(v))(z),
    ),
    "pulled back": (
        "z v",
        lambda z, v: wf.vmap(lambda z: wf.vjp(lambda v: v * z * v, v)[1](z)[0], "n")(z),
        lambda z, v: jax.vmap(lambda z: jax.vjp(lambda v: v * z * v, v)[1](z)[0])(z),
    ),
    "scan": (
        "z k",
        lambda z, k: wf.vmap(lambda z, k: wf.scan(lambda c, k: (wf.sin(c * k), None), z, k, "b")[0], "n")(z, k),
        lambda z, k: jax.vmap(lambda z, k: lax.scan(lambda c, k: (jnp.sin(c * k), None), z, k)[0])(z, k),
    ),
    "by name": (
        "z k",
        lambda z, k: wf.vmap(lambda z, factor, k, shift=0.0: wf.sin(z * factor) + shift + wf.sum(k), "n")(z, k=k, factor=2.0),
        lambda z, k: jax.vmap(lambda z, k: jnp.sin(z * 2.0) + k.sum())(z, k),
    ),
    "constant": (
        "z",
        lambda z: wf.vmap(lambda z: [wf.ones("m=2"), z], "n")(z),
        lambda z: [jnp.ones((5, 2)), z],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mesh, layout", VMAP_PLACES, ids=[f"{m}-{lay}" for m, lay in VMAP_PLACES])
def test_vmap(mesh, layout):
    check(VMAP, mesh, layout, MAPPED)


MAP = {
    "one": (
        "z",
        lambda z: wf.map(lambda z: wf.softmax(z, "d") * wf.sum(z), z, "n"),
        lambda z: lax.map(lambda z: jax.nn.softmax(z) * jnp.sum(z), z),
    ),
    "trees and batches": (
        "z k",
        lambda z, k: [
            t
            for size in (None, 1, 2, 7)
            for t in wf.map(lambda t: (t["z"] * wf.sum(t["k"]), wf.max(t["k"])), {"z": z, "k": k}, "n", batch_size=size)
        ],
        lambda z, k: [z * k.sum(1, keepdims=True), k.max(1)] * 4,
    ),
    "captured": (
        "z w",
        lambda z, w: wf.map(lambda z: wf.tanh(wf.einsum(z, w, out=["h"])), z, "n"),
        lambda z, w: jnp.tanh(z @ w),
    ),
    "infinite at 0": (
        "z",
        lambda z: wf.map(lambda z: wf.log(wf.sum(z * z)), z, "n"),
        lambda z: jnp.log(jnp.sum(z * z, 1)),
    ),
    "gradients of their own": (
        "z v",
        lambda z, v: wf.map(lambda z: wf.grad(lambda v: wf.square(wf.sum(v * z)))(v), z, "n"),
        lambda z, v: lax.map(lambda z: jax.grad(lambda v: jnp.sum(v * z) ** 2)(v), z),
    ),
    "branches": (
        "z",
        lambda z: wf.map(lambda z: wf.cond(wf.sum(z) > 0, lambda: wf.roll(z, "d", 1), lambda: z * 2.0), z, "n"),
        lambda z: lax.map(lambda z: lax.cond(jnp.sum(z) > 0, lambda: jnp.roll(z, 1), lambda: z * 2.0), z),
    ),
    "map in map": (
        "z k",
        lambda z, k: wf.map(lambda t: wf.map(lambda k: wf.max(t[0] * k), t[1], "b"), (z, k), "n"),
        lambda z, k: jnp.max(z[:, None] * k[:, :, None], 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mesh, layout", VMAP_PLACES, ids=[f"{m}-{lay}" for m, lay in VMAP_PLACES])
def test_map(mesh, layout):
    check(MAP, mesh, layout, MAPPED)


def test_map_over_a_split_dim_sends_nothing():
    """Each device maps its own positions; the gradient of a captured tensor is summed once."""
    run = lambda z, w: wf.map(lambda z: wf.tanh(wf.einsum(z, w, out=["h"])), z, "n")
    program = wf.spmd(run, "x=2", "n:x")
    assert program.collectives(MAPPED["z"], MAPPED["w"]) == []
    grad = wf.spmd(wf.grad(lambda w, z: wf.sum(run(z, w))), "x=2", "n:x")
    assert [(c.kind, c.count) for c in grad.collectives(MAPPED["w"], MAPPED["z"])] == [("all-reduce", 1)]


@pytest.mark.parametrize("mapped", [wf.vmap, lambda f, dim: lambda *xs: wf.map(lambda xs: f(*xs), xs, dim)])
@pytest.mark.parametrize("layout", ["n:x d:y", "n:y+x"])
def test_loops_of_different_lengths_with_collectives(mapped, layout):
    """Devices whose positions need fewer steps waited for no one, and the others hung in a collective."""

    def steps(z, k):
        turned = wf.fori_loop(0, k, lambda n, c: wf.roll(c, "d", 1) + n, z)
        grown = wf.while_loop(
            lambda c: wf.sum(c[0]) < 4, lambda c: (wf.roll(c[0], "d", 1) + 1, c[1] + 1), (z, 0)
        )
        return turned, grown

    z, k = MAPPED["z"], wf.tensor(np.array([0, 3, 1, 5, 2], np.int32), "n=5")
    want = [[], [], []]
    for row, count in zip(z.numpy(), k.numpy(), strict=True):
        turned = row
        for n in range(count):
            turned = np.roll(turned, 1) + np.float32(n)
        number = 0
        while row.sum() < 4:
            row, number = np.roll(row, 1) + np.float32(1), number + 1
        for column, value in zip(want, (turned, row, np.int32(number)), strict=True):
            column.append(value)
    got = wf.spmd(mapped(steps, "n"), "x=2 y=2", layout)(z, k)
    assert_same(jax.tree.leaves(got, is_leaf=wf.is_tensor), [np.stack(column) for column in want])


def test_no_module_hides_pythons_map():
    """Only the file that defines it has the name; elsewhere in the package `map` is Python's."""
    modules = [(name, module) for name, module in sys.modules.items() if name.startswith("weft.")]
    assert [name for name, module in modules if vars(module).get("map") is wf.map] == ["weft.ops.map"]


def test_vmap_over_a_split_dim_costs_nothing():
    run = wf.vmap(lambda z: wf.softmax(z, "d"), "n")
    assert wf.spmd(run, "x=2", "n:x").collectives(MAPPED["z"]) == []


def test_eager():
    x, xs = TENSORS["x"], TENSORS["xs"]
    want, want_rows = lax.scan(lambda c, x: (c * 0.5 + x, c * x), x.array, xs.array)
    for place in ((None, None), ("x=2", "b:x")):
        x, xs = (wf.place(t, *place) for t in (x, xs))
        last, ys = wf.scan(lambda c, x: (c * 0.5 + x, c * x), x, xs, "t")
        assert_same(last, want)
        assert_same(ys, want_rows)
        assert_same(wf.vmap(lambda r: r * wf.sum(r), "b")(x), x.array * x.array.sum(1, keepdims=True))
        assert wf.while_loop(lambda n: n < 10, lambda n: n * 2, wf.tensor(1, ())).item() == 16
        assert_same(wf.fori_loop(0, 3, lambda n, c: c + n, x), x.array + 3)
        assert_same(wf.cond(wf.max(x) > 0, lambda: x, lambda: x * 2.0), x.array)
        assert_same(wf.switch(1, [lambda x: x, lambda x: x * 2.0], x), x.array * 2.0)
        assert_same(wf.map(lambda r: r * wf.sum(r), x, "b"), x.array * x.array.sum(1, keepdims=True))


@pytest.mark.parametrize(
    "error, match, call",
    [
        (DimError, "size of dim t is unknown", lambda x: wf.scan(lambda c, _: (c, None), x, None, "t")),
        (ProgramError, "returned a Tensor", lambda x: wf.scan(lambda c, _: c, x, None, T)),
        (ProgramError, "carry becomes", lambda x: wf.scan(lambda c, _: ((c, c), None), x, None, T)),
        (DimError, "carry of scan has the dims", lambda x: wf.scan(lambda c, _: (wf.sum(c, "b"), None), x, None, T)),
        (TensorTypeError, "becomes bfloat16", lambda x: wf.scan(lambda c, _: (c.astype(jnp.bfloat16), None), x, None, T)),
        (ProgramError, "predicate of cond", lambda x: wf.cond(x > 0, lambda: x, lambda: x)),
        (ProgramError, "predicate of while_loop", lambda x: wf.while_loop(lambda x: x > 0, lambda x: x, x)),
        (DimError, "false_fn has the dims", lambda x: wf.cond(wf.all(x > 0), lambda: x, lambda: wf.sum(x, "d"))),
        (TensorTypeError, "true_fn returns", lambda x: wf.cond(wf.all(x > 0), lambda: x, lambda: x > 0)),
        (DimError, "no argument .* has a dim z", lambda x: wf.vmap(wf.exp, "z")(x)),
        (ProgramError, "returned a raw array", lambda x: wf.vmap(lambda x: x.array, "b")(x)),
    ],
    ids=["size", "pair", "structure", "dims", "dtype", "cond", "while", "branches", "types", "vmap", "raw"],
)  # fmt: skip
def test_errors(error, match, call):
    with pytest.raises(error, match=match):
        call(TENSORS["x"])


# -- eager, with nothing placed among the operands ----------------------------------------------------

ADOPTING = {
    "fori_loop": lambda x: wf.fori_loop(0, 3, lambda n, c: c + wf.sum(x), 0.0),
    "while_loop": lambda x: wf.while_loop(
        lambda c: c < 2.0 * wf.sum(x * x), lambda c: c + wf.sum(x * x), 0.0
    ),
    "cond": lambda x: wf.cond(True, lambda: x * 2.0, lambda: x),
    "switch": lambda x: wf.switch(1, [lambda: x, lambda: x * 2.0]),
    "map": lambda x: wf.map(lambda row: row + wf.sum(x), wf.ones("rows=2"), "rows"),
    "associative_scan": lambda x: wf.associative_scan(
        lambda a, b: a + b + wf.sum(x), wf.ones("rows=3"), "rows"
    ),
    "scan": lambda x: wf.scan(
        lambda c, _: (c + wf.sum(x, "batch"), None), wf.zeros("d=6"), None, wf.Dim("t", 3)
    )[0],
    "vmap": lambda x: wf.vmap(lambda row: row + wf.sum(x), "rows")(wf.ones("rows=2")),
    "one in another": lambda x: wf.cond(
        True, lambda: wf.fori_loop(0, 3, lambda n, c: c + wf.sum(x), 0.0), lambda: 0.0
    ),
    "grad": lambda x: wf.grad(lambda s: wf.fori_loop(0, 3, lambda n, c: c * s + wf.sum(x), s))(wf.ones("")),
}


@pytest.mark.parametrize("name", ADOPTING)
def test_eager_control_flow_goes_where_what_it_captures_is(name):
    x = real(0, "batch=9 d=6")
    placed = wf.place(x, "data=4", "batch:data")
    got = ADOPTING[name](placed)
    assert_same(got, ADOPTING[name](x).array)
    assert name == "grad" or got.mesh == placed.mesh


def test_captures_of_eager_control_flow_share_one_placement():
    x = wf.place(real(0, "batch=9 d=6"), "data=4", "batch:data")
    for other in (wf.place(x, "data=2", "batch:data"), wf.place(x, "data=4", "d:data")):
        with pytest.raises(LayoutError, match="the tensors of one operation, or program,"):
            wf.cond(True, lambda other=other: x + other, lambda: x)
    with pytest.raises(LayoutError, match='this runs on mesh ""'):
        wf.spmd(lambda: wf.cond(True, lambda: x * 2.0, lambda: x))()


@pytest.mark.parametrize("stored", ["", "o:y"])
@pytest.mark.parametrize("layout", ["b:y", "b:y e:z", "b:y o:z"])
def test_branches_of_a_split_vmap_on_shared_operands(layout, stored):
    """JAX made the weights of a branch varying, but not the numbers that they are multiplied by there."""

    def loss(w, x):
        def row(x):
            def widely(x):
                return wf.sum(w * 2.0) + wf.einsum(x, w + 1.0, out=["o"])

            return wf.cond(wf.mean(x) > 0.1, widely, lambda x: -wf.einsum(x, w, out=["o"]), x)

        return wf.sum(wf.square(wf.vmap(row, "b")(x)))

    grads = wf.value_and_grad(loss, argnums=(0, 1))
    w, x = wf.parameter(real(0, "e=5 o=3")), real(1, "b=3 e=5")
    want = wf.spmd(grads)(w, x)
    got = wf.spmd(grads, "y=2 z=2", wf.Layout(layout, params=stored))(w, x)
    for a, b in zip(*(jax.tree.leaves(tree, is_leaf=wf.is_tensor) for tree in (got, want)), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [3, 5])
def test_branches_of_a_split_vmap_that_spread_a_split_dim(size):
    """The start of a device's slice of a transposed convolution was looked up in an array."""

    def run(x, w):
        def spread(x):
            return wf.conv(x, w, {"e": "t"}, stride=2, transpose=True)

        return wf.vmap(lambda x: wf.cond(wf.mean(x) > 0.1, spread, lambda x: -spread(x), x), "b")(x)

    x, w = real(0, f"b=3 e={size} c=1"), real(1, "t=3 c=1 o=2")
    got, want = wf.spmd(run, "y=2 z=2", "b:y e:z")(x, w), wf.spmd(run)(x, w)
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5, atol=1e-6)


def test_gradients_of_a_cast_parameter_in_a_branch_are_summed_in_its_own_type():
    """In bfloat16 the sum would be 1.015625."""

    def loss(w, x):
        narrow = w.astype(jnp.bfloat16)

        def row(x):
            return wf.cond(wf.sum(x) > 2.0, lambda x: -wf.sum(x * narrow), lambda x: wf.sum(x * narrow), x)

        return wf.sum(wf.vmap(row, "b")(x))

    x = wf.tensor(jnp.asarray([[1.0]] + [[2.0**-9]] * 7, jnp.bfloat16), "b=8 d=1")
    grad = wf.spmd(wf.grad(loss), "y=8", "b:y")(wf.parameter(wf.ones("d=1")), x)
    np.testing.assert_array_equal(grad.numpy(), [1.0 + 7 * 2.0**-9])
