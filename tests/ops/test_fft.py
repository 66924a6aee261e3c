"""Fourier transforms along named dims, against jax.numpy.fft: each dim split and not, even and uneven."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same, check, collectives, real
from tiers import slow_except

import weft as wf

# t=5 is uneven over 2, 4 and 8; over 8 it leaves devices with nothing but padding.
PLACES = [
    ("x=2 y=2", "t:x h:y"),
    ("x=8", "t:x"),
    ("x=2 y=2 z=2", "h:x w:y+z"),
    ("x=4 y=2", "w:x t:y"),
    ("x=3", "h:x"),
]
places = pytest.mark.parametrize("mesh, layout", slow_except(PLACES[:2], PLACES))
X = {"x": real(0, "t=5 h=6 w=7"), "y": real(1, "t=5 h=6 w=7")}
DIMS = {"t": 0, "h": 1, "w": 2}


def distances(complex_result, abs):
    """Distances from several points: together they determine a complex number."""
    return [abs(complex_result - point) for point in (9.0, 9.0j)]


def row(name, dims, size=None, norm="backward"):
    """A transform of complex numbers along dims; `rfft` is one of real numbers."""
    axes = [DIMS[d] for d in dims]
    make = (lambda x, y: x) if name == "rfft" else (lambda x, y: x + 1j * y)

    def fn(x, y):
        sized = {} if size is None else {"size": size}
        return distances(getattr(wf.fft, name)(make(x, y), dims, norm=norm, **sized), wf.abs)

    def oracle(x, y):
        sized = {} if size is None else {"s": [*(x.shape[n] for n in axes[:-1]), size]}
        return distances(getattr(jnp.fft, f"{name}n")(make(x, y), axes=axes, norm=norm, **sized), jnp.abs)

    return "x y", fn, oracle


ROWS = {
    f"{name} along {','.join(dims)}, size {size}": row(name, dims, size)
    for name in ("fft", "ifft", "rfft", "irfft")
    for dims in (["t"], ["h"], ["w"], ["w", "t"], ["h", "t", "w"])
    for size in ((None, 9) if name == "irfft" else (None,))
}
ROWS |= {
    f"{name}, {norm}": row(name, ["w", "t"], norm=norm)
    for name in ("fft", "ifft", "rfft", "irfft")
    for norm in ("ortho", "forward")
}


@places
def test_values_and_gradients(mesh, layout):
    check(ROWS, mesh, layout, X, atol=1e-5)


@pytest.mark.slow
def test_float64():
    with jax.enable_x64(True):
        tensors = {name: t.astype(jnp.float64) for name, t in X.items()}
        check(ROWS, "x=4 y=2", "w:x t:y", tensors, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", ["bfloat16", "int32", "bool"])
def test_other_types(dtype):
    """As in jax.numpy, they become complex64. There the real transform of 16 bits is an error."""
    x = wf.tensor(np.arange(8).reshape(2, 4) % 3, "t=2 w=4").astype(dtype)
    for name in ("fft", "rfft"):
        want = getattr(jnp.fft, name)(x.array.astype(jnp.float32), axis=1)
        assert_same(getattr(wf.fft, name)(x, "w"), want, name=name)


@pytest.mark.parametrize("size", [1, 2, 7, 8])
@pytest.mark.parametrize("layout", ["", "time:x"])
def test_frequencies(size, layout):
    dim = wf.Dim("time", size)
    for name in ("fftfreq", "rfftfreq"):
        fn = lambda name=name: [getattr(wf.fft, name)(dim), getattr(wf.fft, name)(dim, 0.25)]
        want = [getattr(jnp.fft, name)(size), getattr(jnp.fft, name)(size, 0.25)]
        assert_same(wf.spmd(fn, "x=4", layout)(), want, rtol=1e-7, atol=0)


def test_the_names_for_several_dims():
    x = X["x"]
    assert_same(wf.fft.fft2(x, ["h", "w"]), jnp.fft.fft2(x.array), atol=1e-5)
    assert wf.fft.irfftn(wf.fft.rfftn(x, ["h", "w"]), ["h", "w"], 7).dims == x.dims


@pytest.mark.parametrize("size", [1, 6])
def test_a_transform_between_gathers(size):
    """XLA stores a gathered array in another order, and its CPU backend can't transform it in that order."""
    dims = [wf.Dim("t", 8), wf.Dim("w", size)]

    def loss(x):
        y = wf.abs(wf.fft.rfft(wf.tanh(wf.split(x, "both", dims)), "w") - 4.0)
        return wf.sum(y), y

    oracle = lambda x: jnp.sum(jnp.abs(jnp.fft.rfft(jnp.tanh(x.reshape(8, size))) - 4.0))
    x = real(2, [wf.Dim("both", 8 * size)])
    gradient, _ = wf.spmd(wf.grad(loss, has_aux=True), "x=2", "w:x")(x)
    assert_same(gradient, jax.grad(oracle)(x.array))


def test_inside_vmap():
    x = X["x"]
    got = wf.spmd(lambda x: wf.vmap(lambda x: wf.fft.fft(x, "w"), "t")(x), "x=4", "t:x")(x)
    assert_same(wf.transpose(got, x.dims), jnp.fft.fft(x.array, axis=2), atol=1e-5)


def test_only_split_transformed_dims_travel():
    x = wf.spec("t=6 w=8")
    travels = lambda fn, layout: collectives(wf.spmd(fn, "x=2", layout).jaxpr(x).jaxpr)
    for name in ("fft", "ifft", "rfft", "irfft"):
        fn = lambda x, name=name: wf.fft.__dict__[name](x, "w")
        assert travels(fn, "t:x") == travels(wf.grad(lambda x: wf.sum(wf.abs(fn(x)))), "t:x") == []
        assert travels(fn, "w:x") == [("all_gather_invariant", (6, 8))]


def test_a_plan_names_the_gather_and_counts_the_work():
    x = wf.spec("t=6 w=8")
    plan = wf.spmd(lambda x: wf.fft.fft(x, "w"), "x=2", "w:x").plan(x)
    (gather,) = plan.collectives
    assert (gather.kind, gather.axes, gather.op.name) == ("all-gather", ("x",), "fft")
    assert plan.flops == 6 * 5 * 8 * 3
    assert wf.spmd(lambda x: wf.fft.rfft(x, "w"), "x=2", "t:x").plan(x).flops == plan.flops / 4
