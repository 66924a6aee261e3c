"""Index, slice, update, concat, pad, shift, roll, flip, diff: equal to NumPy and lax under every layout."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same
from jax import lax
from jax.extend.core import jaxprs_in_params
from tiers import slow_except

import weft as wf
from weft.core.errors import DimError, ShapeError, TensorTypeError

# (mesh, layout, size of a, size of b): `a` is the dim that moves, `b` another one, `c` a new name
LAYOUTS = [
    ("x=2", "b:x", 7, 3),
    ("x=4", "a:x", 8, 3),
    ("x=4", "a:x c:x", 7, 3),
    ("x=2 y=2", "a:x+y", 7, 3),
    ("x=2 y=2", "a:x b:y c:x", 9, 3),
    ("x=8", "a:x", 9, 3),
]
EVERY = pytest.mark.parametrize(
    "mesh, layout, a, b",
    slow_except([LAYOUTS[3], LAYOUTS[5]], LAYOUTS),
    ids=[f"{m}|{lay}|{a}x{b}" for m, lay, a, b in LAYOUTS],
)


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def a_first(x):
    return {d.name: d for d in x.dims}["a"]


# Each family: a function of (x[b, a], y[a, b], start) → list of tensors, and the same on arrays.
# `a` is shorter by two in `y` than in `x`, and the dims of `y` are in the other order.


def indexed(x, y, i):
    size = a_first(x).size
    return [
        x["a", 0], x["a", size - 1, "b", -2], x["a", i], x["a", i - 2 * size], x["a", 2:5],
        x["a", 1:], x["a", -1:], x["a", 1::3], x["a", -2:0:-2], x["a", 4:1:-1, "b", 0],
        x[x.dims[0], ::-1, "a", 3], y["b", i, "a", :3], x["a", :],
    ]  # fmt: skip


def indexed_arrays(x, y, i):
    size = x.shape[1]
    return [
        x[:, 0], x[-2, size - 1], x[:, i], x[:, i - 2 * size], x[:, 2:5],
        x[:, 1:], x[:, -1:], x[:, 1::3], x[:, -2:0:-2], x[0, 4:1:-1],
        x[::-1, 3], y[:3, i], x,
    ]  # fmt: skip


def sliced(x, y, i):
    c = wf.Dim("c", 3)
    return [
        wf.slice(x, "a", i, 3), wf.slice(x, "a", i, c),
        wf.slice(x, "a", 2, 3), wf.slice(x, "a", 2, c), wf.slice(x, "a", -4, 4), wf.slice(x, "a", i + 99, 4), wf.slice(x, "b", i, 1),
        wf.update(x, "a", i, y), wf.update(x, "a", 1, y), wf.update(x, "a", -3, y["a", :2]),
        wf.update(x, "a", i, y["a", 1:2]), wf.update(x, "a", 3, y["a", 1]),
        wf.update(x, "a", i, y["a", 1:3, "b", 0]), wf.update(x, "b", i, y["b", 0, "a", 0]),
    ]  # fmt: skip


def sliced_arrays(x, y, i):
    take = lambda x, start, size: lax.dynamic_slice_in_dim(x, start, size, 1)
    put = lambda x, value, start, axis=1: lax.dynamic_update_slice_in_dim(x, value, start, axis)
    row = jnp.broadcast_to(y[1:3, 0], (x.shape[0], 2))
    return [
        take(x, i, 3), take(x, i, 3),
        take(x, 2, 3), take(x, 2, 3), x[:, -4:], x[:, -4:], lax.dynamic_slice_in_dim(x, i, 1, 0),
        put(x, y.T, i), put(x, y.T, 1), put(x, y.T[:, :2], -3),
        put(x, y.T[:, 1:2], i), put(x, y.T[:, 1:2], 3),
        put(x, row, i), put(x, jnp.full((1, x.shape[1]), y[0, 0]), i, 0),
    ]  # fmt: skip


def joined(x, y, i):
    return [
        wf.concat([x, y], "a"), wf.concat([y, x, y], "a"), wf.concat([x["a", :1], x], "a"),
        wf.concat([y["a", :2], x["a", -1:]], wf.Dim("a", 3)), wf.concat([x, x], "b"),
        wf.pad(x, "a", 2, 1), wf.pad(x, "a", 11, 0, value=3),
        wf.pad(x, "b", 1, 1, value=2.0),
    ]  # fmt: skip


def joined_arrays(x, y, i):
    put = lambda x, a, b, value=0: jnp.pad(x, (a, b), constant_values=value)
    return [
        jnp.concatenate([x, y.T], 1), jnp.concatenate([y, x.T, y]), jnp.concatenate([x[:, :1], x], 1),
        jnp.concatenate([y[:2], x.T[-1:]]), jnp.concatenate([x, x]),
        put(x, (0, 0), (2, 1)), put(x, (0, 0), (11, 0), 3),
        put(x, (1, 1), (0, 0), 2.0),
    ]  # fmt: skip


HOW_FAR = [1, 3, -4, 100]


def shifted(x, y, i):
    return [
        *[wf.shift(x, "a", by) for by in HOW_FAR],
        *[wf.roll(x, "a", by) for by in HOW_FAR],
        wf.shift(x, "b", -1), wf.shift(x, "b", 1, wrap=True), wf.flip(x, "a"), wf.flip(x, "b"),
    ]  # fmt: skip


def shifted_arrays(x, y, i):
    def shift(x, by, axis):
        positions = np.arange(x.shape[axis]) - by
        inside = (positions >= 0) & (positions < x.shape[axis])
        moved = jnp.take(x, positions.clip(0, x.shape[axis] - 1), axis=axis)
        return jnp.where(inside if axis == 1 else inside[:, None], moved, 0)

    return [
        *[shift(x, by, 1) for by in HOW_FAR],
        *[jnp.roll(x, by, 1) for by in HOW_FAR],
        shift(x, -1, 0), jnp.roll(x, 1, 0), jnp.flip(x, 1), jnp.flip(x, 0),
    ]  # fmt: skip


def differences(x, y, i):
    size = a_first(x).size
    return [
        *[wf.diff(x, "a", n) for n in (1, 2, 4, size - 1, 0)],
        wf.diff(x, x.dims[0]),
        wf.diff(y, "b", n=2),
    ]


def differences_of_arrays(x, y, i):
    size = x.shape[1]
    return [*[jnp.diff(x, n) for n in (1, 2, 4, size - 1, 0)], jnp.diff(x, axis=0), jnp.diff(y, 2)]


FAMILIES = {
    "index": (indexed, indexed_arrays),
    "slice": (sliced, sliced_arrays),
    "concat": (joined, joined_arrays),
    "shift": (shifted, shifted_arrays),
    "diff": (differences, differences_of_arrays),
}
FAMILY = pytest.mark.parametrize("family", FAMILIES)


def weighted(outs, total):
    """A loss with a different weight for each element."""
    loss = 0
    for n, out in enumerate(outs):
        if isinstance(out, wf.Tensor):
            weight = wf.tensor(draw(n, *(d.size for d in out.dims)), out.dims)
        else:
            weight = draw(n, *out.shape)
        loss = loss + total(out * weight)
    return loss


def inputs(a, b):
    x, y = draw(1, b, a), draw(2, a - 2, b)
    return x, y, wf.tensor(x, [wf.Dim("b", b), wf.Dim("a", a)]), wf.tensor(y, f"a={a - 2} b={b}")


@functools.cache
def oracle(family, a, b):
    fn = FAMILIES[family][1]

    def loss(x, y, i):
        outs = fn(x, y, i)
        return weighted(outs, jnp.sum), outs

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))


@FAMILY
@EVERY
def test_values_and_gradients_equal_the_oracle(family, mesh, layout, a, b):
    fn = FAMILIES[family][0]
    x_array, y_array, x, y = inputs(a, b)

    def loss(x, y, i):
        outs = fn(x, y, i)
        return weighted(outs, wf.sum), outs

    layout = layout if family == "slice" else re.sub(" c:.", "", layout)
    program = wf.spmd(wf.grad(loss, (0, 1), has_aux=True), mesh, layout)
    starts = [a - 3, -2] if family in ("index", "slice") else [0]
    for start in starts:
        grads, outs = program(x, y, wf.tensor(start, ()))
        want_grads, want = oracle(family, a, b)(x_array, y_array, start)
        for n, (have, wanted) in enumerate(zip(outs, want, strict=True)):
            assert_same(have, wanted, rtol=0, atol=0, name=f"output {n}")
        for have, wanted in zip(grads, want_grads, strict=True):
            assert_same(have, wanted, rtol=1e-5, atol=1e-5)


def test_eager_equals_staged():
    *_, x, y = inputs(7, 3)

    def each(x, y, i):
        return [
            x["a", i], x["a", -1:1:-2, "b", 0], wf.slice(x, "a", i, 3), wf.update(x, "a", i, y),
            wf.concat([x, y], "a"), wf.pad(x, "a", 1, 2, value=-np.inf), wf.shift(x, "a", 2),
            wf.roll(x, "a", 2), wf.flip(x, "a"),
        ]  # fmt: skip

    i = wf.tensor(4, ())
    staged = wf.spmd(each, "x=4", "a:x")(x, y, i)
    eager = each(*(wf.place(t, "x=4", "a:x") for t in (x, y, i)))
    for have, wanted in zip(eager, staged, strict=True):
        assert have.dims == wanted.dims and have.layout == wanted.layout
        np.testing.assert_array_equal(have.numpy(), wanted.numpy())


def test_axes_in_another_order_than_the_mesh():
    *_, x, _ = inputs(7, 3)
    moved = wf.spmd(lambda x: wf.shift(x, "a", 1), "x=2 y=2", "a:y+x")(x)
    np.testing.assert_array_equal(moved.numpy()[:, 1:], x.numpy()[:, :-1])


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint32], ids=str)
def test_other_dtypes(dtype):
    integers = (draw(3, 7) > 0).astype(dtype)
    x = wf.tensor(integers, "a=7")

    @wf.spmd(mesh="x=4", layout="a:x")
    def moved(x, i):
        return [
            x["a", 3], x["a", i], wf.slice(x, "a", i, 2), wf.roll(x, "a", 2), wf.shift(x, "a", -2),
            wf.flip(x, "a"), wf.concat([x, x], "a"), wf.pad(x, "a", 1, 0, value=1),
            wf.update(x, "a", i, x["a", :2]), wf.diff(x, "a"), wf.diff(x, "a", 3),
        ]  # fmt: skip

    want = [
        integers[3], integers[4], integers[4:6], np.roll(integers, 2), np.append(integers[2:], integers[:2] * 0),
        integers[::-1], np.tile(integers, 2), np.pad(integers, (1, 0), constant_values=1),
        np.concatenate([integers[:4], integers[:2], integers[6:]]), np.diff(integers), np.diff(integers, 3),
    ]  # fmt: skip
    for have, wanted in zip(moved(x, wf.tensor(4, ())), want, strict=True):
        assert have.dtype == dtype
        np.testing.assert_array_equal(have.numpy(), wanted)


def test_the_difference_of_a_pending_sum_is_added_up():
    x, w = draw(4, 6, 8), draw(5, 8, 4)
    program = wf.spmd(lambda x, w: wf.diff(wf.einsum(x, w, out=["a", "b"]), "a"), "x=4 y=2", "k:x a:y")
    arguments = wf.tensor(x, "a=6 k=8"), wf.tensor(w, "k=8 b=4")
    assert_same(program(*arguments), np.diff(x @ w, axis=0), rtol=1e-5, atol=1e-5)
    assert collectives(program.jaxpr(*arguments)) == {"ppermute": [(1, 4)], "psum": [(3, 4)]}


def test_a_pending_sum_is_cut_before_it_is_added_up():
    x, w = draw(4, 6, 8), draw(5, 8, 4)

    @wf.spmd(mesh="x=4", layout="k:x")
    def last(x, w):
        return wf.einsum(x, w, out=["a", "b"])["a", -1, "b", 1:3]

    arguments = wf.tensor(x, "a=6 k=8"), wf.tensor(w, "k=8 b=4")
    np.testing.assert_allclose(last(*arguments).numpy(), (x @ w)[-1, 1:3], rtol=1e-5)
    assert collectives(last.jaxpr(*arguments)) == {"psum": [(2,)]}


# What travels: the kind of each collective and the shape of its operand


def collectives(jaxpr, found=None):
    found = {} if found is None else found
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = re.sub("_invariant|2", "", equation.primitive.name)
        if name in ("psum", "all_gather", "reduce_scatter", "ppermute", "all_to_all", "pmax"):
            found.setdefault(name, []).append(equation.invars[0].aval.shape)
        for sub in jaxprs_in_params(equation.params):
            collectives(sub, found)
    return found


TRAFFIC = {
    # name: (function of x[a=16 or 14] and a scalar, size of a, collectives on 4 devices)
    "one place": (lambda x, i: x["a", 5], 14, {"psum": [()]}),
    "a place by tensor": (lambda x, i: x["a", i], 14, {"psum": [()]}),
    "all but the first": (lambda x, i: x["a", 1:], 16, {"ppermute": [(1,)]}),
    "all but the last": (lambda x, i: x["a", :-1], 16, {}),
    "every second": (lambda x, i: x["a", ::2], 16, {}),
    "the first": (lambda x, i: x["a", :1], 16, {}),
    "the last": (lambda x, i: x["a", -1:], 16, {"ppermute": [(1,)]}),
    "a slice by tensor": (lambda x, i: wf.slice(x, "a", i, 8), 16, {"reduce_scatter": [(8,)]}),
    "shift": (lambda x, i: wf.shift(x, "a", 1), 14, {"ppermute": [(1,)]}),
    "roll": (lambda x, i: wf.roll(x, "a", 1), 16, {"ppermute": [(1,)]}),
    "roll unevenly": (lambda x, i: wf.roll(x, "a", -1), 14, {"ppermute": [(1,), (1,)]}),
    "flip": (lambda x, i: wf.flip(x, "a"), 16, {"ppermute": [(4,)]}),
    "flip unevenly": (lambda x, i: wf.flip(x, "a"), 14, {"ppermute": [(2,), (2,)]}),
    "diff": (lambda x, i: wf.diff(x, "a"), 16, {"ppermute": [(1,)]}),
    "diff twice": (lambda x, i: wf.diff(x, "a", 2), 16, {"ppermute": [(2,)]}),
    "pad": (lambda x, i: wf.pad(x, "a", 0, 2), 14, {}),
    "update": (lambda x, i: wf.update(x, "a", 4, x["a", :1]), 16, {"ppermute": [(1,)]}),
    "update by tensor": (lambda x, i: wf.update(x, "a", i, x["a", :1]), 16, {"psum": [()]}),
    "concat": (lambda x, i: wf.concat([x, x["a", :2]], "a"), 14, {"ppermute": [(1,)] * 3}),
}


@pytest.mark.parametrize("case", TRAFFIC)
def test_only_what_moves_travels(case):
    fn, size, wanted = TRAFFIC[case]
    program = wf.spmd(fn, "x=4", "a:x")
    jaxpr = program.jaxpr(wf.spec(f"a={size}"), wf.spec((), jnp.int32))
    assert collectives(jaxpr) == wanted


def test_the_gradient_of_a_slice_by_tensor_is_gathered():
    def loss(x, i):
        return wf.sum(wf.square(wf.slice(x, "a", i, 8)))

    jaxpr = wf.spmd(wf.grad(loss), "x=4", "a:x").jaxpr(wf.spec("a=16"), wf.spec((), jnp.int32))
    wanted = {"reduce_scatter": [(8,)], "all_gather": [(2,)], "psum": [()]}  # the sum is the loss
    assert collectives(jaxpr) == wanted


# Mistakes

x = wf.spec("a=6 b=2")
MISTAKES = {
    "out of range": (lambda x: x["a", 6], ShapeError, "index 6 of dim a=6 is out of range"),
    "below": (lambda x: x["a", -7], ShapeError, "index -7 of dim a=6 is out of range"),
    "empty": (lambda x: x["a", 4:4], ShapeError, "the slice 4:4 of dim a=6 is empty"),
    "no step": (lambda x: x["a", ::0], ShapeError, "step 0"),
    "no pair": (lambda x: x[0], TensorTypeError, "indexed by 0"),
    "a list": (lambda x: x["a", [0, 1]], TensorTypeError, "the index of dim a is"),
    "a float": (lambda x: x["a", 1.0], TensorTypeError, "the index of dim a is"),
    "bounds": (lambda x: x["a", 0.5:], TensorTypeError, "a bound of the slice is 0.5"),
    "misspelt": (lambda x: x["aa", 0], DimError, "did you mean a"),
    "twice": (lambda x: x["a", 0, "a", 0], DimError, "occurs twice"),
    "too long": (lambda x: wf.slice(x, "a", 0, 7), ShapeError, "7 elements don't fit into dim a=6"),
    "a split start": (lambda x: wf.slice(x, "a", x, 1), TensorTypeError, "start is f32"),
    "a strange value": (lambda x: wf.update(x, "a", 0, wf.ones("c=2")), DimError, "dims c=2"),
    "a float in ints": (
        lambda x: wf.update(x.astype(int), "a", 0, 0.5), TensorTypeError, "float32 was written into"),
    "other dims": (lambda x: wf.concat([x, x["b", 0]], "a"), DimError, "differ in more than a"),
    "the total": (lambda x: wf.concat([x, x], wf.Dim("a", 9)), ShapeError, r"6 \+ 6 = 12"),
    "nothing": (lambda x: wf.concat([], "a"), ShapeError, "no tensors"),
    "less": (lambda x: wf.pad(x, "a", -1, 0), ShapeError, "padding of dim a=6 is -1 before"),
    "too many differences": (lambda x: wf.diff(x, "a", 6), ShapeError, r"n is 6, .* has 6 elements"),
    "a tensor's n": (lambda x: wf.diff(x, "a", x["a", 0, "b", 0]), TensorTypeError, "n is f32"),
    "a tensor's by": (lambda x: wf.shift(x, "a", x["a", 0, "b", 0]), TensorTypeError, "by is f32"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_explained(mistake):
    fn, kind, message = MISTAKES[mistake]
    with pytest.raises(kind, match=message) as caught:
        wf.spmd(fn, "", "").jaxpr(x)
    assert caught.value.rule and caught.value.hint and "test_shifting.py" in str(caught.value)


def test_numpy_numbers_are_numbers():
    x = wf.arange(wf.Dim("a", 5))
    three = np.int64(3)
    assert x["a", three].item() == 3
    assert x["a", three:].numpy().tolist() == [3, 4]
    assert wf.slice(x, "a", three, 2).numpy().tolist() == [3, 4]


@pytest.mark.parametrize("layout", ["", "a:x"])
def test_eager_positions_are_compiled_once(layout):
    """Each position compiled another program, which stayed in the cache."""
    x = wf.place(wf.tensor(np.arange(21.0).reshape(7, 3), "a=7 b=3"), "x=4", layout)
    np.testing.assert_array_equal(x["a", 0].numpy(), x.numpy()[0])
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        for position in (*range(7), *range(-7, 0), np.int64(3)):
            np.testing.assert_array_equal(x["a", position].numpy(), x.numpy()[position])
    finally:
        jax.monitoring.clear_event_listeners()
    assert not [name for name in compiled if "compile" in name]
