"""What every XLA backend does before it sends anything, one rule at a time; the compiled program is the oracle."""

import jax
import jax.numpy as jnp
import pytest
from hlo import _bytes as hlo_bytes
from hlo import bytes_by_axes, multiplications

import weft as wf

a, b, n = wf.dims("a=64 b=32 n=24")
MESH = "x=4 y=2"


def twice_the_same_lookup(table, ids):
    return wf.take(table, ids, "a") * wf.take(table, ids, "a")


def mean_and_variance(x):
    return wf.mean(x, "a") + wf.var(x, "a")


def gather_that_no_iteration_changes(x, w):
    full = w.rename(a="whole_a")
    return wf.fori_loop(0, 5, lambda _, x: x + wf.einsum(x, full, reduce="whole_a"), x)


def gather_inside_and_outside_of_a_loop(x, w):
    full = w.rename(a="whole_a")
    inside = wf.fori_loop(0, 5, lambda _, x: x + wf.einsum(x, full, reduce="whole_a"), x)
    return wf.einsum(inside, full, reduce="whole_a")


def gather_of_the_carry(x, w):
    return wf.fori_loop(0, 5, lambda _, x: x + wf.sum(wf.sin(x.rename(a="whole_a")), "whole_a") * w, x)


def gradient_of_a_mean(x):
    # The cotangent of the inner sum is a constant: its sum over devices is a product.
    return wf.grad(lambda x: wf.mean(wf.logsumexp(x, "b") - wf.logsumexp(x, "a")))(x)


def nested_loops(x, w):
    full = w.rename(a="whole_a")

    def outer(_, x):
        return wf.fori_loop(0, 3, lambda _, x: x * wf.sum(wf.sin(full), "whole_a"), x)

    return wf.fori_loop(0, 5, outer, x)


def maximum_of_a_constant(x):
    # Arrays of equal elements are not sent, whatever the reduction; a single number is.
    over_one = wf.max(wf.full([a], 3.0), "a")
    over_many = wf.max(wf.full([a, b], 3.0), "a") + wf.min(wf.full([a, b], 2.0), "a")
    return x * over_one + over_many


def sum_of_a_number(x):
    return x * wf.sum(wf.full([a], 3.0), "a")


def gather_of_a_constant(x):
    return x + wf.sort(wf.ones([a, b]), "a") + wf.sum(x)


def gather_of_positions(x):
    return x + wf.sort(wf.arange(a), "a")


def roll_of_a_constant(x):
    return x + wf.roll(wf.ones([a, b]), "a", 3)


def gather_in_both_branches(x):
    return wf.cond(wf.sum(x) > 0, lambda x: wf.sort(x, "a"), lambda x: -wf.sort(x, "a"), x)


def more_in_one_branch(x):
    def many(x):
        return x + wf.max(x, "a") * wf.sum(wf.sort(x, "a"), "a")

    return wf.cond(wf.sum(x) > 0, lambda x: x + wf.sum(x, "a"), many, x)


def cond_in_a_loop(x):
    def step(_, x):
        return wf.cond(wf.sum(x) > 0, lambda x: wf.sin(x) + wf.sum(x, "a"), lambda x: x, x)

    return wf.fori_loop(0, 5, step, x)


def sums_of_complex_numbers(z):
    return wf.sum(z * z, "a") + wf.sum(wf.sin(z))


CASES = {
    "twice the same lookup": (twice_the_same_lookup, wf.spec([a, b]), wf.spec([n], jnp.int32)),
    "the mean inside the variance": (mean_and_variance, wf.spec([a, b])),
    "a gather that no iteration changes": (
        gather_that_no_iteration_changes,
        wf.spec([b, a]),
        wf.spec([a, b]),
    ),
    "the same gather in and out of a loop": (
        gather_inside_and_outside_of_a_loop,
        wf.spec([b, a]),
        wf.spec([a, b]),
    ),
    "a gather of the carry": (gather_of_the_carry, wf.spec([a]), wf.spec([a])),
    "a sum of a constant": (gradient_of_a_mean, wf.spec([a, b])),
    "a maximum of a constant": (maximum_of_a_constant, wf.spec([a, b])),
    "a sum of one number": (sum_of_a_number, wf.spec([a, b])),
    "a gather of a constant": (gather_of_a_constant, wf.spec([a, b])),
    "a gather of positions": (gather_of_positions, wf.spec([a, b])),
    "a permute of a constant": (roll_of_a_constant, wf.spec([a, b])),
    "a gather in both branches": (gather_in_both_branches, wf.spec([a, b])),
    "more in one branch": (more_in_one_branch, wf.spec([a, b])),
    "a cond in a loop": (cond_in_a_loop, wf.spec([a, b])),
    "complex numbers": (sums_of_complex_numbers, wf.spec([a, b], jnp.complex64)),
    "short integers": (lambda x: wf.sort(x, "a"), wf.spec([a, b], jnp.int16)),
    "nested loops": (nested_loops, wf.spec([a]), wf.spec([a])),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_compiled_program(name):
    fn, *args = CASES[name]
    program = wf.spmd(fn, MESH, "a:x")
    planned = {}
    for c in program.plan(*args).collectives:
        planned[c.axes] = planned.get(c.axes, 0) + c.bytes * c.count
    assert planned == bytes_by_axes(program.compile(*args).as_text(), program.mesh) and planned


def test_the_rules_are_at_work():
    """So that the cases above test something: without the rules there would be more collectives."""
    counts = {}
    for name, (fn, *args) in CASES.items():
        found = wf.spmd(fn, MESH, "a:x").plan(*args).collectives
        counts[name] = sum(c.count for c in found if c.kind == "all-gather" or "lookup" in name)
    assert counts["twice the same lookup"] == 1
    assert counts["a gather that no iteration changes"] == 1
    assert counts["the same gather in and out of a loop"] == 1
    assert counts["a gather of the carry"] == 5
    assert counts["a gather of a constant"] == 0
    assert counts["a gather of positions"] == 1
    assert counts["a gather in both branches"] == 1
    assert counts["nested loops"] == 1


def iterate_to_a_solution(m, v):
    """Solve by seven iterations; the derivative would be one more solution."""

    def solve(product, v):
        return jax.lax.fori_loop(0, 7, lambda _, x: x + 0.1 * (v - product(x)), v)

    return jax.lax.custom_linear_solve(lambda x: jnp.einsum("aij,aj->ai", m, x), v, solve)


def test_flops_inside_of_linear_solvers():
    args = wf.spec("a=64 i=8 j=8"), wf.spec("a=64 i=8")
    program = wf.spmd(
        lambda m, v: wf.local(iterate_to_a_solution, m, v, out=["a", "i"], splittable=["a"]), MESH, "a:x"
    )
    plan = program.plan(*args)
    assert plan.flops == multiplications(program.compile(*args).as_text()) == 7 * 2 * 16 * 8 * 8
    assert not any("not known" in advice.text for advice in plan.advice)


def test_collectives_inside_of_linear_solvers():
    def solve(x):
        def sums(product, v):
            return v - jax.lax.psum(product(v), "x")

        return jax.lax.custom_linear_solve(lambda v: 2 * v, x, sums, symmetric=True)

    program = wf.spmd(lambda x: wf.local(solve, x, out=["a"], splittable=["a"]), MESH, "a:x")
    planned = {c.axes: c.bytes * c.count for c in program.plan(wf.spec([a])).collectives}
    compiled = bytes_by_axes(program.compile(wf.spec([a])).as_text(), program.mesh)
    assert planned == compiled == {("x",): 4 * a.size // 4}


@pytest.mark.parametrize(
    "fn",
    [
        jnp.linalg.cholesky,
        jnp.linalg.inv,
        lambda m: jnp.linalg.qr(m)[0],
        lambda m: jnp.linalg.svd(m)[0],
        lambda m: jnp.linalg.eigh(m)[1],
        lambda m: jnp.fft.fft(m).real,
        lambda m: jax.lax.linalg.hessenberg(m)[0],
        lambda m: jax.lax.linalg.schur(m)[0],
        lambda m: jax.lax.linalg.tridiagonal(m)[0],
        lambda m: jax.lax.linalg.symmetric_product(m, m),
    ],
)
def test_linear_algebra_is_known(fn):
    program = wf.spmd(lambda m: wf.local(fn, m, out=["a", "i", "j"], splittable=["a"]), MESH, "a:x")
    assert not any("not known" in advice.text for advice in program.plan(wf.spec("a=64 i=8 j=8")).advice)


def test_hlo_of_an_unknown_type_is_an_error():
    with pytest.raises(AssertionError, match="unknown type in HLO: f6e3m2"):
        hlo_bytes("f6e3m2[4]{0}")
    assert hlo_bytes("(f8e4m3fn[4]{0}, c128[2]{0}, token[])") == 36
