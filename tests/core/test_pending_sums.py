"""Pending sums: resolved for all consumers, and before a wider type hides an overflow."""

import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same_on_mesh, cosines

import weft as wf


def test_sum_is_resolved_for_two_consumers():
    """A sum that was resolved for a consumer varying over its axis was stored only as that varying value."""

    def program(x, y):
        total = wf.einsum(x, y, out=["a"])
        return total * y, total

    assert_same_on_mesh(program, "x=2", "b:x", cosines("a=3"), cosines("b=5 a=3"))


ONES = wf.ones("d=4", jnp.int8)


SMALL = wf.tensor(np.array([100, 100, -50, -50], np.int8), "d=4")


SUMS = {
    "unsigned, divided": (
        lambda a: (wf.sum(a) - wf.sum(wf.flip(a, "d")) + 4) / 4,
        wf.tensor(np.array([0, 1, 60, 40], np.uint32), "d=4"),
    ),
    "too long for a float": (
        lambda a: wf.sum(a) / 2,
        wf.tensor(np.array([100000007, 3, -100000000, 0], np.int32), "d=4"),
    ),
    "times a float": (lambda a: wf.einsum(a, ONES, out=[]) * 0.5, SMALL),
    "and a wider one": (lambda a: wf.einsum(a, ONES, out=[]) + wf.sum(a), SMALL),
    "summed further": (
        lambda a: wf.sum(wf.einsum(wf.stack([a, a], wf.Dim("n", 2)), ONES, reduce=["d"])),
        SMALL,
    ),
    "into a carry of floats": (
        lambda a: wf.fori_loop(0, 2, lambda _, carry: carry + wf.einsum(a, ONES, out=[]), 0.0),
        SMALL,
    ),
    "to a narrower float": (
        lambda a: wf.sum(a).astype(jnp.float16),
        wf.tensor(np.array([71000, 0, -69000, 0], np.float32), "d=4"),
    ),
}


@pytest.mark.parametrize("kind", SUMS)
def test_a_pending_sum_is_resolved_before_it_is_widened(kind):
    """The devices' partial sums wrapped around or were rounded, where the total does neither."""
    fn, given = SUMS[kind]
    assert wf.spmd(fn, "model=2", "d:model")(given).item() == fn(given).item()


HALVES = {
    "multiplied": (lambda h: wf.sum(h) * 1000, [400, 400, -400, -399], 1000),
    "added": (lambda h: wf.sum(h), [40000, 40000, -40000, -39000], 1000),
}


@pytest.mark.parametrize("kind", HALVES)
def test_partial_sums_that_overflow_in_float16(kind):
    """A documented limitation, and the documented workaround."""
    fn, numbers, want = HALVES[kind]
    given, program = wf.tensor(np.array(numbers, np.float16), "d=4"), wf.spmd(fn, "model=2", "d:model")
    assert np.isfinite(fn(given).item()) and np.isnan(program(given).item())
    assert program(given.astype(jnp.float32)).item() == pytest.approx(want, rel=0.01)
