"""Draws are the same under every layout, bit for bit; they equal jax.random's, or have the right distribution.

Seeds are fixed. Statistics are rejected at p < 0.001.
"""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_zero_padding
from scipy import special, stats

import weft as wf
from weft.core.errors import ShapeError, TensorTypeError

KEY = jax.random.key(2024)
UNLIKELY = 0.001

# Sizes 9 and 7 are uneven everywhere, and 9 over 8 leaves devices with nothing but padding.
LAYOUTS = [
    ("x=2 y=2", "b:y+x"),
    ("x=2 y=4", "a:y c:x"),
    ("x=8", "a:x"),
    ("x=2 y=2 z=2", "a:z+x b:y"),
    ("x=2 y=2 z=2", "a:y+x+z"),
]
EVERY = pytest.mark.parametrize("mesh, layout", LAYOUTS, ids=[f"{m}|{r}" for m, r in LAYOUTS])

DIMS = "a=9 b=7 c=8"
SHAPE = (9, 7, 8)


def logits():
    values = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    return wf.tensor(values, DIMS)


def bits_of(t):
    return elements(t).tobytes(), t.dtype, t.dims


def elements(t):
    """The stored elements without the padding, which must be zero."""
    assert_zero_padding(t)
    return np.asarray(t.storage)[tuple(slice(d.size) for d in t.dims)]


def draws(key, x):
    """Every kind of draw, by name."""
    inner = jax.random.split(key)[1]
    return {
        "bits": wf.random.bits(key, DIMS),
        "uniform": wf.random.uniform(key, DIMS),
        "normal": wf.random.normal(key, DIMS),
        "normal bf16": wf.random.normal(key, DIMS, jnp.bfloat16),
        "normal scaled": wf.random.normal(key, DIMS) * 0.02,
        "truncated normal": wf.random.truncated_normal(key, DIMS),
        "gumbel": wf.random.gumbel(key, DIMS),
        "bernoulli": wf.random.bernoulli(key, DIMS, 0.3),
        "bernoulli of a tensor": wf.random.bernoulli(key, DIMS, wf.sigmoid(x)),
        "randint": wf.random.randint(key, DIMS, -5, 12),
        "categorical a": wf.random.categorical(key, x, "a"),
        "categorical c": wf.random.categorical(key, x, "c"),
        "dropout": wf.dropout(x, 0.4, key),
        "a key split inside": wf.random.normal(inner, "c=8 a=9"),
        "no dims": wf.random.uniform(key, ()),
    }


@functools.cache
def on_one_device():
    return {name: bits_of(t) for name, t in wf.spmd(draws)(KEY, logits()).items()}


@EVERY
def test_draws_do_not_depend_on_the_layout(mesh, layout):
    program = wf.spmd(draws, mesh, layout)
    drawn = program(KEY, logits())
    want = on_one_device()
    different = [name for name, t in drawn.items() if bits_of(t) != want[name]]
    assert not different
    if "a" not in program.layout.dim_names and "c" not in program.layout.dim_names:
        assert program.collectives(KEY, logits()) == []  # categorical's argmax needs some over a and c


AS_USERS_DO = """
import jax, numpy as np, weft as wf
wf.cpu_devices(8)
a, b, key = wf.Dim("a", 13), wf.Dim("b", 6), jax.random.key(3)
draws = [wf.random.uniform, wf.random.normal, wf.random.gumbel, wf.random.truncated_normal]
draw = lambda key: [f(key, [a, b]) * 0.02 for f in draws]
whole = [jax.jit(lambda x: x * 0.02)(f(key, (13, 6))) for f in (jax.random.uniform, jax.random.normal)]
whole += [t.array for t in wf.spmd(draw)(key)[2:]]
for mesh, layout in [("x=8", "a:x"), ("x=2 y=4", "a:y b:x"), ("x=2 y=2", "b:y+x")]:
    for got, want in zip(wf.spmd(draw, mesh, layout)(key), whole, strict=True):
        assert got.numpy().tobytes() == np.asarray(want).tobytes(), (mesh, layout)
"""


def test_draws_do_not_depend_on_the_layout_as_users_compile_them():
    """The other tests compile without optimizations, which could not show all that optimizations may do."""
    plain = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-c", AS_USERS_DO], env=plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_eager_draws_equal_staged_ones():
    want = on_one_device()
    eager = {
        "bits": wf.random.bits(KEY, DIMS),
        "uniform": wf.random.uniform(KEY, DIMS),
        "normal": wf.random.normal(KEY, DIMS),
        "normal scaled": wf.random.normal(KEY, DIMS) * 0.02,
        "truncated normal": wf.random.truncated_normal(KEY, DIMS),
        "gumbel": wf.random.gumbel(KEY, DIMS),
        "bernoulli": wf.random.bernoulli(KEY, DIMS, 0.3),
        "randint": wf.random.randint(KEY, DIMS, -5, 12),
    }
    assert [name for name, t in eager.items() if bits_of(t) != want[name]] == []


@pytest.mark.parametrize("mesh, layout", [("", ""), ("x=2 y=4", "a:y c:x")], ids=["one", "2x4"])
def test_eager_draws_for_a_tensor_equal_staged_ones(mesh, layout):
    x, want = wf.place(logits(), mesh, layout), on_one_device()
    assert bits_of(wf.dropout(x, 0.4, KEY)) == want["dropout"]
    assert bits_of(wf.random.bernoulli(KEY, DIMS, wf.sigmoid(x))) == want["bernoulli of a tensor"]
    assert bits_of(wf.random.categorical(KEY, x, "a")) == want["categorical a"]


# Equal to jax.random


def assert_same_bits(have, want):
    have, want = elements(have), np.asarray(want)
    assert (have.dtype, have.shape, have.tobytes()) == (want.dtype, want.shape, want.tobytes())


SPANS = [(-5, 12), (0, 2**16), (-30_000, 20_011)]


@pytest.mark.parametrize("typed", [True, False], ids=["typed", "raw"])
def test_equal_to_jax(typed):
    key = jax.random.key(5) if typed else jax.random.PRNGKey(5)
    dtypes = [jnp.float32, jnp.bfloat16, jnp.float16]

    def draw(key):
        return (
            [wf.random.bits(key, DIMS, bit_width=n) for n in (8, 16, 32)],
            [wf.random.normal(key, DIMS, t) for t in dtypes],
            [wf.random.uniform(key, DIMS)],
            [wf.random.uniform(key, DIMS, -3.0, 0.7, dtype=t) for t in dtypes[:2]],
            [wf.random.randint(key, DIMS, *span) for span in SPANS],
        )

    bits, normal, uniform, between, integers = wf.spmd(draw, "x=2 y=4", "a:y c:x")(key)
    for n, have in zip((8, 16, 32), bits, strict=True):
        assert_same_bits(have, jax.random.bits(key, SHAPE, f"uint{n}"))
    for n, dtype in enumerate(dtypes):
        assert_same_bits(normal[n], jax.random.normal(key, SHAPE, dtype))
    assert_same_bits(uniform[0], jax.random.uniform(key, SHAPE))
    for dtype, have in zip(dtypes, between, strict=False):
        assert_same_bits(have, jax.random.uniform(key, SHAPE, dtype, -3.0, 0.7))
    for span, have in zip(SPANS, integers, strict=True):
        assert_same_bits(have, jax.random.randint(key, SHAPE, *span))


# Distributions. Everything is drawn in one program, on two devices; the layout does not matter.

MANY = 100_003
LOGITS = np.array([0.0, 1.0, -1.0, 2.0, -np.inf, 0.5], np.float32)
FAIR_SPANS = [(0, 2), (0, 3), (-5, 12), (-100, -90), (1000, 2000)]


@functools.cache
def sample():
    n = wf.Dim("n", MANY)

    def draw(logits, p):
        keys = iter(jax.random.split(jax.random.key(17), 64))
        return {
            "truncated": wf.random.truncated_normal(next(keys), [n]),
            "truncated to one side": wf.random.truncated_normal(next(keys), [n], 0.5, 4.0),
            "gumbel": wf.random.gumbel(next(keys), [n]),
            "bernoulli": [wf.random.bernoulli(next(keys), [n], q) for q in (0.5, 0.1, 0.003)],
            "never and always": [wf.random.bernoulli(next(keys), [n], q) for q in (0.0, 1.0)],
            "bernoulli of a tensor": wf.random.bernoulli(next(keys), [n, *p.dims], p),
            "randint": [wf.random.randint(next(keys), [n], *span) for span in FAIR_SPANS],
            "randint of one": wf.random.randint(next(keys), [n], 41, 42),
            "randint wide": wf.random.randint(next(keys), [n], 0, 2**31 - 1),
            "randint of thirds": wf.random.randint(next(keys), [n], -(2**31), 2**30, jnp.int32),
            "categorical": wf.random.categorical(next(keys), wf.broadcast_to(logits, [n, *logits.dims]), "k"),
            "dropout": wf.dropout(wf.ones([n]) * 3.0, 0.25, next(keys)),
        }  # fmt: skip

    p = wf.tensor(np.array([0.2, 0.9], np.float32), "p=2")
    drawn = wf.spmd(draw, "x=2", "n:x")(wf.tensor(LOGITS, "k=6"), p)
    return jax.tree.map(elements, drawn, is_leaf=wf.is_tensor)


def check_frequencies(counts, probabilities):
    assert stats.chisquare(counts, np.asarray(probabilities) * sum(counts)).pvalue > UNLIKELY


def check_rate(hits, p):
    check_frequencies([hits.sum(), hits.size - hits.sum()], [p, 1 - p])


def test_truncated_normal():
    usual, one_side = sample()["truncated"], sample()["truncated to one side"]
    assert stats.kstest(usual, stats.truncnorm(-2, 2).cdf).pvalue > UNLIKELY
    assert stats.kstest(one_side, stats.truncnorm(0.5, 4).cdf).pvalue > UNLIKELY
    assert (np.abs(usual) < 2).all() and (one_side > 0.5).all() and (one_side < 4).all()


def test_gumbel():
    assert np.isfinite(sample()["gumbel"]).all()
    assert stats.kstest(sample()["gumbel"], stats.gumbel_r.cdf).pvalue > UNLIKELY


def test_bernoulli():
    for p, drawn in zip((0.5, 0.1, 0.003), sample()["bernoulli"], strict=True):
        assert drawn.dtype == bool
        check_rate(drawn, p)
    never, always = sample()["never and always"]
    assert not never.any() and always.all()
    for p, drawn in zip((0.2, 0.9), sample()["bernoulli of a tensor"].T, strict=True):
        check_rate(drawn, p)


def test_randint():
    for (low, high), drawn in zip(FAIR_SPANS, sample()["randint"], strict=True):
        assert low <= drawn.min() and drawn.max() < high
        counts = np.bincount(drawn - low, minlength=high - low)
        check_frequencies(counts, np.full(high - low, 1 / (high - low)))
    assert (sample()["randint of one"] == 41).all()


def test_randint_of_a_wide_span():
    wide = sample()["randint wide"].astype(np.int64)
    assert stats.kstest(wide / (2**31 - 1), "uniform").pvalue > UNLIKELY
    for bit in range(31):
        check_rate((wide >> bit) & 1, 0.5)


def test_randint_of_a_span_that_jax_draws_unevenly():
    thirds = (sample()["randint of thirds"].astype(np.int64) + 2**31) // 2**30
    check_frequencies(np.bincount(thirds, minlength=3), [1 / 3] * 3)


def test_categorical():
    possible = np.isfinite(LOGITS)
    counts = np.bincount(sample()["categorical"], minlength=LOGITS.size)
    assert not counts[~possible].any()
    check_frequencies(counts[possible], special.softmax(LOGITS.astype(float))[possible])


def test_dropout_drops_at_its_rate_and_scales():
    dropped = sample()["dropout"]
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(4)}
    check_rate(dropped == 0, 0.25)


# Dropout, and draws in loops and recomputed ones


@pytest.mark.parametrize("mesh, layout", [("", ""), ("x=2 y=4", "a:y c:x")], ids=["one", "2x4"])
def test_the_gradient_of_dropout_has_the_same_mask(mesh, layout):
    def run(x):
        out, pull = wf.vjp(lambda x: wf.dropout(x, 0.4, KEY), x)
        return out, pull(wf.ones(DIMS))[0]

    x = wf.tensor(np.full(SHAPE, 1.2, np.float32), DIMS)
    out, gradient = wf.spmd(run, mesh, layout)(x)
    np.testing.assert_array_equal(gradient.numpy() == 0, out.numpy() == 0)
    np.testing.assert_allclose(gradient.numpy()[out.numpy() != 0], 1 / 0.6, rtol=1e-6)
    assert 0 < (out.numpy() == 0).sum() < out.size


def test_dropout_of_nothing_is_the_same():
    x = logits()
    assert bits_of(wf.dropout(x, 0.0, KEY)) == bits_of(x)


@pytest.mark.parametrize("mesh, layout", [("", ""), ("x=2 y=4", "a:y c:x")], ids=["one", "2x4"])
@pytest.mark.parametrize("typed", [True, False], ids=["typed", "raw"])
def test_draws_in_a_scan(mesh, layout, typed):
    keys = jax.random.split(jax.random.key(3) if typed else jax.random.PRNGKey(3), 5)

    def steps(keys):
        def step(total, key):
            drawn = wf.random.normal(key, "a=9 c=8")
            return total + drawn, drawn

        return wf.scan(step, wf.zeros("a=9 c=8"), keys, wf.Dim("step", 5))[1]

    drawn = wf.spmd(steps, mesh, layout)(keys)
    want = np.stack([jax.random.normal(key, (9, 8)) for key in keys])
    assert drawn.numpy("step", "a", "c").tobytes() == want.tobytes()


@pytest.mark.parametrize("mesh, layout", [("", ""), ("x=2 y=4", "a:y c:x")], ids=["one", "2x4"])
def test_a_recomputed_draw_is_the_same(mesh, layout):
    keys = jax.random.split(jax.random.PRNGKey(4), 3)

    def run(x, keys):
        def step(x, key):
            noise = wf.random.normal(key, x.dims) * 0.5
            return wf.dropout(wf.sin(x * noise), 0.3, key), None

        def layers(x):
            return wf.scan(wf.remat(step), x, keys, wf.Dim("step", 3))[0]

        return wf.value_and_grad(lambda x: wf.sum(layers(x)))(x)

    def oracle(x):
        for key in keys:
            mask = jax.random.uniform(key, SHAPE) < 0.7
            x = jnp.where(mask, jnp.sin(x * jax.random.normal(key, SHAPE) * 0.5) / 0.7, 0)
        return x.sum()

    value, gradient = wf.spmd(run, mesh, layout)(logits(), keys)
    want, want_gradient = jax.value_and_grad(oracle)(logits().array)
    np.testing.assert_allclose(value.item(), want, rtol=1e-5)
    np.testing.assert_allclose(gradient.numpy(), want_gradient, rtol=1e-5, atol=1e-6)


# Refusals


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda: wf.random.normal(0, "a=3"), TensorTypeError),
        (lambda: wf.random.normal(jax.random.split(KEY), "a=3"), TensorTypeError),
        (lambda: wf.random.normal(jax.random.key(0, impl="rbg"), "a=3"), TensorTypeError),
        (lambda: wf.random.normal(KEY, "a=3", jnp.int32), TensorTypeError),
        (lambda: wf.random.randint(KEY, "a=3", 5, 5), ShapeError),
        (lambda: wf.dropout(wf.ones("a=3"), 1.0, KEY), ShapeError),
    ],
    ids=["a seed", "two keys", "a key of rbg", "normal integers", "an empty span", "all dropped"],
)
def test_refusals(call, error):
    with pytest.raises(error):
        call()


def test_integers_are_within_their_type():
    """Integers beyond the range of their type became negative."""
    drawn = wf.random.randint(jax.random.key(0), "a=999", -128, 128, jnp.int8).numpy()
    assert drawn.min() == -128 and drawn.max() == 127
    np.testing.assert_array_equal(drawn, jax.random.randint(jax.random.key(0), (999,), -128, 128, jnp.int8))
    for low, high, dtype in ((0, 300, jnp.int8), (-1, 9, jnp.uint8), (0, 2**32 - 1, jnp.int32)):
        with pytest.raises(ShapeError, match="range"):
            wf.random.randint(jax.random.key(0), "a=9", low, high, dtype)
