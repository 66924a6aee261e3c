"""associative_scan against jax.lax's: values, gradients and collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same, check, integers, real
from jax import lax
from tiers import slow_except

import weft as wf

# t is scanned. Over 8 devices, 5 and 9 positions leave some devices with padding only.
PLACES = [
    ("x=2 y=2 z=2", "b:x i:y t:z", 5),
    ("x=8", "t:x", 9),
    ("x=8", "t:x", 8),
    ("x=4 y=2", "t:y+x", 5),
    ("x=3 y=2", "b:x t:y", 1),
    ("x=2", "b:x", 5),
]


def tensors(size):
    return {
        "x": real(0, f"t={size} b=3"),
        "p": real(1, f"b=3 t={size}", 0.5, 1.5),
        "m": real(2, f"t={size} i=2 j=2"),
        "w": real(3, "b=3", 0.5, 1.0),
        "n": integers(4, f"t={size}", 0, 9),
    }


def linear(left, right):
    """The composition of x → p x + q, first the left one."""
    return left[0] * right[0], right[0] * left[1] + right[1]


def named_product(left, right):
    return wf.einsum(left.rename(j="k"), right.rename(i="k"), out=["i", "j"])


def rows(reverse):
    return {
        "a tree": (
            "p x",
            lambda p, x: wf.associative_scan(linear, (p, x), "t", reverse=reverse),
            lambda p, x: (lambda out: (out[0].T, out[1]))(lax.associative_scan(linear, (p.T, x), reverse=reverse)),
        ),
        "products of matrices": (
            "m",
            lambda m: wf.associative_scan(named_product, m, "t", reverse=reverse),
            lambda m: lax.associative_scan(jnp.matmul, m, reverse=reverse),
        ),
        "captured": (
            "x w",
            lambda x, w: wf.associative_scan(lambda a, b: a * b * w / wf.sum(w), x, wf.Dim("t", x.dims[0].size), reverse=reverse),
            lambda x, w: lax.associative_scan(lambda a, b: a * b * w / w.sum(), x, reverse=reverse),
        ),
        "infinite at 0": (
            "p",
            lambda p: wf.associative_scan(lambda a, b: wf.exp(wf.log(a) + wf.log(b)), p, "t", reverse=reverse),
            lambda p: lax.associative_scan(lambda a, b: jnp.exp(jnp.log(a) + jnp.log(b)), p, reverse=reverse, axis=1),
        ),
        "integers": (
            "n",
            lambda n: wf.associative_scan(wf.maximum, n, "t", reverse=reverse),
            lambda n: lax.associative_scan(jnp.maximum, n, reverse=reverse),
        ),
        "in a vmap": (
            "p x",
            lambda p, x: wf.vmap(lambda p, x: wf.associative_scan(linear, (p, x), "t", reverse=reverse)[1], "b")(p, x),
            lambda p, x: lax.associative_scan(linear, (p.T, x), reverse=reverse)[1].T,
        ),
    }  # fmt: skip


CASES = [(*place, reverse) for place in PLACES for reverse in (False, True)]


@pytest.mark.parametrize("mesh, layout, size, reverse", slow_except([CASES[0], CASES[3]], CASES))
def test_associative_scan(mesh, layout, size, reverse):
    check(rows(reverse), mesh, layout, tensors(size), rtol=2e-5, atol=1e-5)


def test_only_totals_are_sent():
    """48 bytes are one row of 3 floats from each of 4 devices; the gradient scatters their cotangents."""
    run = lambda x: wf.associative_scan(wf.multiply, x, "t")
    spec = wf.spec("t=64 b=3")
    (total,) = wf.spmd(run, "x=4", "t:x").collectives(spec)
    assert (total.kind, total.bytes) == ("all-gather", 48)
    both = wf.spmd(wf.grad(lambda x: wf.sum(run(x))), "x=4", "t:x").collectives(spec)
    assert [(c.kind, c.bytes) for c in both] == [("all-gather", 48), ("reduce-scatter", 48)]
    assert wf.spmd(run, "x=4", "b:x").collectives(spec) == []


def test_the_result_is_strongly_typed():
    for mesh, layout in [(None, None), ("x=2", "t:x")]:
        weak = wf.spmd(
            lambda: wf.associative_scan(wf.add, wf.arange(wf.Dim("t", 5)) * 0.5, "t"), mesh, layout
        )()
        assert not weak.weak_type
        assert_same(weak, np.cumsum(np.arange(5) * 0.5, dtype=np.float32))


def test_eagerly_on_placed_tensors():
    x = wf.place(tensors(9)["x"], "x=2 y=2", "t:x b:y")
    got = wf.associative_scan(wf.multiply, x, "t")
    assert got.mesh == x.mesh
    assert_same(got, lax.associative_scan(jnp.multiply, x.array))
    grad = wf.grad(lambda x: wf.sum(wf.associative_scan(wf.multiply, x, "t")))(x)
    assert_same(grad, jax.grad(lambda x: jnp.sum(lax.associative_scan(jnp.multiply, x)))(x.array))
