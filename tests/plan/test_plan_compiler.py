"""What every XLA backend does before it sends anything, one rule at a time; the compiled program is the oracle."""

import jax.numpy as jnp
import pytest
from hlo import bytes_by_axes

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
    assert counts["nested loops"] == 1
