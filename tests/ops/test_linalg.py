"""Linear algebra over named dims, against jax.numpy.linalg: each dim split and not, even and uneven."""

import math

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
import pytest
from compare import assert_same, check, collectives, real
from tiers import slow, slow_except

import weft as wf

# The batch s=4 is even over 2 and 4, t=5 is uneven, and over 8 it leaves devices with nothing but padding.
PLACES = [
    ("x=2 y=2", "s:x t:y"),
    ("x=8", "t:x"),
    ("x=2 y=2 z=2", "t:x+y rhs:z"),
    ("x=2 y=2", "row:x t:y"),
    ("x=2 y=2 z=2", "row:x column:y s:z"),
    ("x=4 y=2", "column:x k:y"),
    ("x=4", "tall:x"),
]
places = pytest.mark.parametrize("mesh, layout", slow_except([PLACES[1], PLACES[4]], PLACES))


def matrices(seed, dims="s=4 t=5 row=3 column=3"):
    """Matrices far from singular, with distinct eigenvalues and singular values."""
    dims = wf.dims(dims)
    *_, rows, columns = shape = [d.size for d in dims]
    values = np.random.default_rng(seed).uniform(-0.3, 0.3, shape)
    return wf.tensor((values + np.eye(rows, columns) * np.arange(2, 2 + columns)).astype(np.float32), dims)


TENSORS = {
    "a": matrices(0),
    "h": matrices(1, "s=4 t=5 tall=4 column=3"),
    "b": real(2, "s=4 t=5 row=3 rhs=3"),
    "v": real(3, "rhs=3 row=3 t=5"),
    "w": real(4, "row=3"),
}


def symmetric(a):
    """a · aᵀ + a diagonal, for the oracle and for Weft."""
    return jnp.einsum("...ij,...kj->...ik", a, a) + jnp.diag(jnp.arange(1.0, 4.0))


def symmetric_tensor(a):
    product = wf.einsum(a, a.rename(row="other"), reduce="column").rename(other="column")
    return product + wf.tensor(np.diag(np.arange(1.0, 4.0)).astype(np.float32), "row=3 column=3")


ROWS = {
    "cholesky": (
        "a",
        lambda a: wf.linalg.cholesky(symmetric_tensor(a), "row", "column"),
        lambda a: jnp.linalg.cholesky(symmetric(a)),
    ),
    "eigh": (
        "a",
        lambda a: wf.linalg.eigh(symmetric_tensor(a), "row", "column", "k"),
        lambda a: jnp.linalg.eigh(symmetric(a)),
    ),
    "inv": ("a", lambda a: wf.linalg.inv(a, "row", "column"), jnp.linalg.inv),
    "inv of the transpose": (
        "a",
        lambda a: wf.linalg.inv(a, "column", "row"),
        lambda a: jnp.linalg.inv(a.swapaxes(-1, -2)),
    ),
    "det": ("a", lambda a: wf.linalg.det(a, "row", "column"), jnp.linalg.det),
    "slogdet": ("a", lambda a: wf.linalg.slogdet(a, "row", "column"), jnp.linalg.slogdet),
    "qr": ("a", lambda a: wf.linalg.qr(a, "row", "column", "k"), jnp.linalg.qr),
    "qr of tall matrices": ("h", lambda h: wf.linalg.qr(h, "tall", "column", "k"), jnp.linalg.qr),
    "svd": (
        "a",
        lambda a: wf.linalg.svd(a, "row", "column", "k"),
        lambda a: jnp.linalg.svd(a, full_matrices=False),
    ),
    "svd of wide matrices": (
        "h",
        lambda h: wf.linalg.svd(h, "column", "tall", wf.Dim("k", 3)),
        lambda h: jnp.linalg.svd(h.swapaxes(-1, -2), full_matrices=False),
    ),
    "solve": ("a b", lambda a, b: wf.linalg.solve(a, b, "row", "column"), jnp.linalg.solve),
    "solve, the batch in parts": (
        "a v",
        lambda a, v: wf.linalg.solve(a, v, "row", "column"),
        lambda a, v: jnp.linalg.solve(a, jnp.broadcast_to(v.transpose(2, 1, 0), (4, 5, 3, 3))),
    ),
    "solve of a vector": (
        "a w",
        lambda a, w: wf.linalg.solve(a, w, "row", "column"),
        lambda a, w: jnp.linalg.solve(a, jnp.broadcast_to(w[:, None], (4, 5, 3, 1)))[..., 0],
    ),
    "solve of the transpose": (
        "a b",
        lambda a, b: wf.linalg.solve(a, b.rename(row="column"), "column", "row"),
        lambda a, b: jnp.linalg.solve(a.swapaxes(-1, -2), b),
    ),
    "triangular_solve": (
        "a b",
        lambda a, b: [
            wf.linalg.triangular_solve(a, b, "row", "column", lower=True),
            wf.linalg.triangular_solve(a, b, "row", "column"),
        ],
        lambda a, b: [jax.scipy.linalg.solve_triangular(a, b, lower=low) for low in (True, False)],
    ),
    "norm": (
        "a",
        lambda a: [wf.linalg.norm(a, dims, ord) for dims in ("s", "t", "row") for ord in (1, 2, math.inf)],
        lambda a: [jnp.linalg.norm(a, ord, axis) for axis in (0, 1, 2) for ord in (1, 2, jnp.inf)],
    ),
    "norm of matrices": (
        "a",
        lambda a: [wf.linalg.norm(a, ["row", "column"]), wf.linalg.norm(a, ["t", "row"])],
        lambda a: [jnp.linalg.norm(a, axis=(2, 3)), jnp.linalg.norm(a, axis=(1, 2))],
    ),
    "norm of all": ("a", wf.linalg.norm, lambda a: jnp.linalg.norm(a.ravel())),
}


@places
def test_values_and_gradients(mesh, layout):
    check(ROWS, mesh, layout, TENSORS)


@pytest.mark.slow
def test_float64():
    with jax.enable_x64(True):
        tensors = {name: t.astype(jnp.float64) for name, t in TENSORS.items()}
        check(ROWS, "x=4 y=2", "t:x column:y", tensors, rtol=1e-10, atol=1e-10)


def hermitian(re, im):
    return (re + re.swapaxes(-1, -2)) / 2 + 1j * (im - im.swapaxes(-1, -2))


def hermitian_tensor(re, im):
    swap = {"row": "column", "column": "row"}
    return (re + wf.rename(re, swap)) / 2 + 1j * (im - wf.rename(im, swap))


def absolute(fn, abs):
    """The absolute values of the results: of eigenvectors, they don't depend on the phase."""
    return lambda *args: [abs(out) for out in jax.tree.leaves(fn(*args), is_leaf=wf.is_tensor)]


def complex_row(fn, oracle, make=lambda re, im: re + 1j * im, make_tensor=lambda re, im: re + 1j * im):
    return (
        "re im",
        absolute(lambda re, im: fn(make_tensor(re, im), "row", "column"), wf.abs),
        absolute(lambda re, im: oracle(make(re, im)), jnp.abs),
    )


VECTOR = real(5, "row=3")
COMPLEX = {
    "cholesky": complex_row(wf.linalg.cholesky, jnp.linalg.cholesky, hermitian, hermitian_tensor),
    "eigh": complex_row(
        lambda *args: wf.linalg.eigh(*args, "k"), jnp.linalg.eigh, hermitian, hermitian_tensor
    ),
    "inv": complex_row(wf.linalg.inv, jnp.linalg.inv),
    "det": complex_row(wf.linalg.det, jnp.linalg.det),
    "slogdet": complex_row(lambda *args: wf.linalg.slogdet(*args)[1], lambda a: jnp.linalg.slogdet(a)[1]),
    "qr": complex_row(lambda *args: wf.linalg.qr(*args, "k"), jnp.linalg.qr),
    "svd": complex_row(
        lambda *args: wf.linalg.svd(*args, "k"), lambda a: jnp.linalg.svd(a, full_matrices=False)
    ),
    "solve": complex_row(
        lambda a, row, column: wf.linalg.solve(a, VECTOR, row, column),
        lambda a: jnp.linalg.solve(a, jnp.asarray(VECTOR.array)[:, None])[..., 0],
    ),
    "norm": complex_row(
        lambda a, *dims: (
            [wf.linalg.norm(a, dims, ord) for ord in (1, 2)] + [wf.linalg.norm(a, "t", math.inf)]
        ),
        lambda a: [jnp.abs(a).sum((1, 2)), jnp.linalg.norm(a, axis=(1, 2)), jnp.abs(a).max(0)],
    ),
}


@pytest.mark.parametrize("mesh, layout", [slow("x=4", "t:x"), ("x=2 y=2", "row:x t:y")])
def test_complex_matrices(mesh, layout):
    tensors = {"re": matrices(6, "t=5 row=3 column=3"), "im": real(7, "t=5 row=3 column=3", -0.4, 0.4)}
    check(COMPLEX, mesh, layout, tensors, rtol=3e-5, atol=1e-5)


def test_integers_become_floats():
    a = wf.tensor(np.array([[2, 1], [1, 3]]), "row=2 column=2")
    for name in ("cholesky", "inv", "det"):
        got, want = getattr(wf.linalg, name)(a, "row", "column"), getattr(jnp.linalg, name)(a.array)
        assert_same(got, want, name=name)
    assert_same(wf.linalg.norm(a, "row"), jnp.linalg.norm(a.array, axis=0))


def test_signs_are_those_of_one_device():
    """The same function runs on the same matrices: the results have the same bits."""

    def fn(a):
        dims = "row", "column", "k"
        return wf.linalg.qr(a, *dims), wf.linalg.svd(a, *dims), wf.linalg.eigh(a, *dims)

    a = real(8, "t=5 row=3 column=3")
    want = wf.spmd(fn, wf.Mesh())(a)
    for mesh, layout in [("x=4", "t:x"), ("x=2 y=2", "row:x column:y"), ("x=2", "k:x")]:
        assert_same(wf.spmd(fn, mesh, layout)(a), want, rtol=0, atol=0)


def test_the_inverse_maps_back():
    a, x = matrices(9), real(10, "t=5 column=3")
    y = wf.einsum(a, x, reduce="column")
    back = wf.einsum(wf.linalg.inv(a, "row", "column"), y, reduce="row")
    assert_same(wf.transpose(back, ["s", "t", "column"]), np.broadcast_to(x.array, (4, 5, 3)), atol=1e-5)
    assert wf.linalg.inv(a, "row", "column").dims == wf.dims("s=4 t=5 column=3 row=3")
    low = wf.linalg.cholesky(symmetric_tensor(a), "row", "column")
    half = wf.linalg.triangular_solve(low, y, "row", "column", lower=True)
    whole = wf.linalg.triangular_solve(low, half, "column", "row")
    want = wf.linalg.solve(symmetric_tensor(a), y, "row", "column")
    assert_same(whole.rename(row="column"), want, atol=1e-5)


def test_the_gradient_of_the_norm_at_zero():
    """As in JAX it is NaN, but not that of the padding, nor of other rows."""
    values = np.ones((5, 3), np.float32)
    values[1] = 0
    gradient = wf.spmd(wf.grad(lambda x: wf.sum(wf.linalg.norm(x, "d"))), "x=4", "t:x")
    want = jax.grad(lambda x: jnp.sum(jnp.linalg.norm(x, axis=1)))(values)
    assert np.isnan(want[1]).all()
    assert_same(gradient(wf.tensor(values, "t=5 d=3")), want)


def test_inside_vmap():
    a, b = matrices(0), TENSORS["b"]

    def fn(a, b):
        return wf.linalg.inv(a, "row", "column"), wf.linalg.solve(a, b, "row", "column"), wf.linalg.norm(a)

    got = wf.spmd(wf.vmap(fn, "t"), "x=4 y=2", "t:x s:y")(a, b)
    norms = jax.vmap(jnp.linalg.norm)(a.array.swapaxes(0, 1).reshape(5, -1))
    want = jnp.linalg.inv(a.array), jnp.linalg.solve(a.array, b.array), norms
    order = wf.dims("s=4 t=5 column=3 row=3"), wf.dims("s=4 t=5 column=3 rhs=3"), wf.dims("t=5")
    for out, dims, expected in zip(got, order, want, strict=True):
        assert_same(wf.transpose(out, dims), expected)


def calls(names, *args):
    return {name: lambda a, name=name: getattr(wf.linalg, name)(a, *args) for name in names.split()}


CALLS = {
    **calls("cholesky inv det slogdet", "row", "column"),
    **calls("eigh qr svd", "row", "column", "k"),
    **calls("solve triangular_solve", wf.ones("row=4"), "row", "column"),
}
A = wf.spec("t=6 row=4 column=4")


def travels(fn, layout):
    return collectives(wf.spmd(fn, "x=2", layout).jaxpr(A).jaxpr)


@pytest.mark.parametrize("name", CALLS)
def test_only_split_matrix_dims_travel(name):
    """The operand is gathered, and the gradient of a result that has the split dim."""
    last = lambda a: jax.tree.leaves(CALLS[name](a), is_leaf=wf.is_tensor)[-1]
    backward = wf.grad(lambda a: wf.sum(last(a)))
    assert travels(last, "t:x") == travels(backward, "t:x") == []
    gathered = [A.dims] + [dims for dims in [jax.eval_shape(last, A).dims] if "column" in str(dims)]
    gathers = [("all_gather_invariant", tuple(d.size for d in dims)) for dims in gathered]
    assert travels(last, "column:x") == gathers[:1]
    assert travels(backward, "column:x") == gathers


def test_only_results_of_a_norm_travel():
    for ord, kind in {1: "psum_invariant", 2: "psum_invariant", math.inf: "pmax"}.items():
        fn = lambda a, ord=ord: wf.linalg.norm(a, "t", ord)
        assert {*travels(fn, "t:x")} == {(kind, (4, 4))}
        assert travels(fn, "row:x") == []


FLOPS = {  # of one 4 × 4 matrix
    "cholesky": 64 / 3,
    "det": 4 * 64 / 6,
    "qr": 8 * 64 / 3,
    "eigh": 9 * 64,
    "svd": 26 * 64,
    "triangular_solve": 16,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_plan_names_the_gather_and_counts_the_work(name):
    plan = wf.spmd(CALLS[name], "x=2", "column:x").plan(A)
    (gather,) = plan.collectives
    assert (gather.kind, gather.axes, gather.op.name) == ("all-gather", ("x",), name)
    assert not [advice for advice in plan.advice if "is not known" in str(advice)]
    split = wf.spmd(CALLS[name], "x=2", "t:x").plan(A)
    assert split.flops == plan.flops / 2 > 0
    if name in FLOPS:
        assert split.flops == pytest.approx(3 * FLOPS[name], abs=1)
