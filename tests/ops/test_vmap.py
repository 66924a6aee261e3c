"""vmap over a split dim: with branches, loops, lookups and stored parameters inside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same_on_mesh, cosines

import weft as wf


def test_cond_inside_a_split_vmap():
    """One branch varied over the axis of the mapped dim, and the other did not."""

    def program(x):
        def row(r):
            return wf.cond(wf.sum(r) > 0.5, lambda: r, lambda: wf.ones("d=3"))

        return wf.vmap(row, "a")(x)

    assert_same_on_mesh(program, "x=2", "a:x", cosines("a=5 d=3"))


def test_loops_inside_a_split_vmap():
    """A carry that was replicated at first varied after the first step."""

    def program(x):
        def row(r):
            for_result = wf.fori_loop(0, 3, lambda n, c: c + r, wf.zeros("d=3"))
            scanned, _ = wf.scan(lambda c, e: (c + e, None), wf.zeros(""), r, "d")
            return for_result, scanned

        return wf.vmap(row, "a")(x)

    assert_same_on_mesh(program, "x=2", "a:x", cosines("a=5 d=3"))


def test_vmap_preserves_roles_and_storage():
    """Stored tensors were gathered before the function was called, and came back as values."""
    w = wf.parameter(cosines("n=2 d=4"))
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


def test_a_lookup_along_the_axis_of_a_vmap_raises():
    """Each device looked up its slice of another index's row, so the sum of the rows was wrong."""
    ids = wf.tensor(np.arange(4, dtype=np.int32), "n=4")

    def run(table, ids):
        return wf.vmap(lambda i: wf.take(table, i, "rows"), "n")(ids)

    with pytest.raises(wf.LayoutError, match="on axis x, in use by an enclosing vmap"):
        wf.spmd(run, "x=2", "n:x rows:x")(cosines("rows=4 d=3"), ids)
    assert_same_on_mesh(run, "x=2", "n:x", cosines("rows=4 d=3"), ids)


def test_a_branch_under_vmap_gathers_ranges_of_a_split_dim():
    """JAX cannot batch a branch that indexes a constant array."""

    def run(x):
        def row(x):
            return wf.cond(
                wf.mean(x) > 0.1,
                lambda x: wf.concat([x, x, x], "e"),
                lambda x: wf.zeros("e=9") + wf.sum(x),
                x,
            )

        return wf.vmap(row, "b")(x)

    assert_same_on_mesh(run, "y=2 z=2", "b:y e:z", cosines("b=3 e=3"))


def test_a_parameter_stored_along_the_axis_of_a_vmap_is_used_as_a_value():
    """The result had the role of the operand, whose rules mapped two of its dims to one axis."""
    layout = wf.Layout("n:x", params="d:x")
    w, x = wf.parameter(cosines("d=4 e=3")), cosines("n=4 e=3")

    def run(w, x):
        return wf.vmap(lambda x, w: (w, wf.einsum(w, x, out=["d"])), "n")(x, w)

    def captured(w, x):
        return wf.vmap(lambda x: (w, wf.einsum(w, x, out=["d"])), "n")(x)

    for each in (run, captured):
        for got, want in zip(wf.spmd(each, "x=2", layout)(w, x), wf.spmd(each)(w, x), strict=True):
            np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-6)
            assert got.dims == want.dims


def product(row, w):
    return wf.einsum(row, w, reduce=["d"])


own_rule = wf.custom_vjp(product)


own_rule.defvjp(
    lambda row, w: (product(row, w), (row, w)),
    lambda residuals, g: (
        wf.einsum(g, residuals[1], reduce=["h"]),
        wf.einsum(g, residuals[0], out=["d", "h"]),
    ),
)


def branches(row, w):
    return wf.cond(wf.sum(row) > 0, product, lambda row, w: 2 * product(row, w), row, w)


def branches_that_capture(row, w):
    return wf.cond(wf.sum(row) > 0, lambda: product(row, w), lambda: 2 * product(row, w))


def by_sign(row, w):
    return jnp.where(jnp.sum(row) > 0, 1, 2) * (row @ w)


# Functions that use a parameter, and the same in plain JAX.
USES = {
    "einsum": (product, lambda row, w: row @ w),
    "custom_vjp": (own_rule, lambda row, w: row @ w),
    "cond": (branches, by_sign),
    "cond that captures it": (branches_that_capture, by_sign),
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


# Where the parameter is stored, relative to the axis of the vmap.
STORED = {
    "on its axis": ("data=4", wf.Layout("batch:data", params="d:data")),
    "on another": ("data=4 model=2", wf.Layout("batch:data", params="d:model")),
    "on both": ("data=2 model=2", wf.Layout("batch:data", params="d:data+model")),
    "split too": ("data=2 model=2", wf.Layout("batch:data h:model", params="d:data")),
    "uneven": ("data=3", wf.Layout("batch:data", params="d:data")),
    "replicated": ("data=4", wf.Layout("batch:data")),
}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("use", USES)
def test_stored_parameters_in_a_vmap(use, stored):
    """Gradients were wrong, or raised, in custom_vjp and cond."""
    fn, plain = USES[use]
    x, w = cosines("batch=5 d=4"), wf.parameter(cosines("d=4 h=2"))

    def gradient(w, x):
        return wf.grad(lambda w: wf.sum(wf.square(wf.vmap(lambda row: fn(row, w), "batch")(x))))(w)

    want = jax.grad(lambda w: jnp.sum(jax.vmap(lambda row: plain(row, w))(x.numpy()) ** 2))(w.numpy())
    program = wf.spmd(gradient, *STORED[stored])
    np.testing.assert_allclose(program(w, x).numpy(), want, rtol=1e-5, atol=1e-5)
    if stored == "on its axis":
        assert {c.kind for c in program.collectives(w, x)} == {"all-gather", "reduce-scatter"}


LINEAR = {
    "2 * m": lambda m: 2.0 * m,
    "m / 2": lambda m: m / 2,
    "-m": lambda m: -m,
    "m + m": lambda m: m + m,
    "real": lambda m: wf.real(m * (1 + 2j)),
    "sum": wf.sum,
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_captured_sum_over_the_mapped_dim(name):
    """It was an error: a linear function left the sum pending over the axis of the vmap."""

    def program(x):
        mean = wf.mean(x, "f")
        return wf.vmap(lambda row: row * LINEAR[name](mean), "f")(x)

    assert_same_on_mesh(program, "x=4", "f:x", wf.tensor(np.arange(5, dtype=np.float32), "f=5"))
