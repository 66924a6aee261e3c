"""JAX's own transformations around Weft programs and eager ops, and its branches inside programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same_on_mesh, cosines

import weft as wf

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
def test_jax_transformations_of_placed_tensors(around, used, place):
    """JAX's device_put took the dim of a jax.vmap for the tensor's first one, and rejected its size."""
    v = cosines("a=5").array
    got = AROUND[around](lambda v: SQUARED_SUMS[used](wf.tensor(v, "a=5"), *place).array, v)
    want = AROUND[around](lambda v: jnp.cumsum(v**2), v)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("around", ["vmap", "jacfwd", "jacrev", "hessian"])
def test_jax_transformations_of_tensors_on_other_devices(around):
    v, program = cosines("a=5").array, wf.spmd(lambda t: wf.cumsum(t, "a"), "x=2", "a:x")

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
def test_jax_branches_inside_a_program(branches, place):
    """JAX flattened tensors that held types instead of arrays, which then had no layout to report."""
    fn = BRANCHES[branches]

    def program(x, n):
        return fn(x, n), wf.grad(lambda x: wf.sum(fn(x, n)))(x)

    for n in (0, 1):
        assert_same_on_mesh(program, *place, cosines("a=5 b=2"), jnp.int32(n))
