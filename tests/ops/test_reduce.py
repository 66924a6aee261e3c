"""Reductions against jax.numpy and jax.nn: over every set of dims, split and not."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same, booleans, check, integers, real
from jax.scipy.special import logsumexp
from tiers import slow_except

import weft as wf
from weft.core.errors import TensorTypeError

# a=4 is even over 2, b=3 and c=5 are not; over 8, c leaves three devices with nothing but padding.
PLACES = [("x=2 y=2 z=2", "a:x b:y c:z"), ("x=4 y=2", "c:y+x")]
places = pytest.mark.parametrize("mesh, layout", PLACES, ids=[f"{m}-{lay}" for m, lay in PLACES])
NAMES = "abc"
FEW = [("a",), ("c",), ("b", "c"), ("c", "b", "a")]
SETS = [s for n in (1, 2, 3) for s in itertools.combinations(NAMES, n)]


def over(name, oracle, operand, sets=SETS):
    """One row for each set of dims."""
    rows = {}
    for names in sets:
        axes = tuple(NAMES.index(n) for n in names)
        rows[f"{name} over {','.join(names)} of {operand}"] = (
            operand,
            lambda t, names=names: getattr(wf, name)(t, list(names)),
            lambda a, axes=axes: oracle(a, axis=axes),
        )
    return rows


ROWS = {
    **over("sum", jnp.sum, "x"),
    **over("mean", jnp.mean, "x", FEW),
    **over("max", jnp.max, "x", FEW),
    **over("min", jnp.min, "x", FEW),
    **over("prod", jnp.prod, "x", FEW),
    **over("var", jnp.var, "x", FEW),
    **over("std", jnp.std, "x", FEW),
    **over("logsumexp", logsumexp, "x", FEW),
    **over("softmax", jax.nn.softmax, "x"),
    **over("log_softmax", jax.nn.log_softmax, "x"),
    **over("sum", jnp.sum, "i", FEW),
    **over("max", jnp.max, "i", FEW),
    **over("min", jnp.min, "i", FEW),
    **over("prod", jnp.prod, "i", FEW),
    **over("mean", jnp.mean, "i", FEW),
    **over("var", jnp.var, "i", [("c",)]),
    **over("median", jnp.median, "x", FEW),
    **over("median", jnp.median, "i", [("c",), ("a", "b")]),
    **over("median", jnp.median, "b", [("c",)]),
    **over("any", jnp.any, "b", FEW),
    **over("all", jnp.all, "b", FEW),
    **over("any", jnp.any, "i", [("c",)]),
    **over("all", jnp.all, "x", [("a",), ("c",)]),
    **over("sum", jnp.sum, "b", [("c",), ("a", "b")]),
    **over("max", jnp.max, "b", [("c",)]),
    **over("prod", jnp.prod, "b", [("c",)]),
    "all dims": (
        "x",
        lambda x: [f(x) for f in (wf.sum, wf.mean, wf.max, wf.min, wf.prod, wf.var, wf.logsumexp)],
        lambda x: [f(x) for f in (jnp.sum, jnp.mean, jnp.max, jnp.min, jnp.prod, jnp.var, logsumexp)],
    ),
    "of a scalar": ("r", lambda r: [wf.sum(r), wf.max(r), wf.mean(r)], lambda r: [r, r, r]),
}
TENSORS = {
    "x": real(0, "a=4 b=3 c=5"),
    "i": integers(1, "a=4 b=3 c=5", -4, 5),
    "b": booleans(2, "a=4 b=3 c=5"),
    "r": real(3, ""),
}


@places
def test_reductions(mesh, layout):
    check(ROWS, mesh, layout, TENSORS)


SOME = {name: row for name, row in ROWS.items() if " over c of" in name or " over b,c of" in name}


def test_reductions_of_unsplit_dims():
    check(SOME, "x=2", "a:x", TENSORS)


TIES = {
    **over("max", jnp.max, "k", FEW),
    **over("min", jnp.min, "k", FEW),
    **over("prod", jnp.prod, "k", FEW),  # with zeros: one, several, none
    **over("prod", jnp.prod, "z", FEW),
}


@places
def test_ties_and_zeros(mesh, layout):
    grid = np.random.default_rng(5).integers(-1, 3, (4, 3, 5)).astype(np.float32)
    one_zero = np.random.default_rng(6).uniform(0.5, 1.5, (4, 3, 5)).astype(np.float32)
    one_zero[1, 2, 3] = one_zero[0, 0, 4] = one_zero[3, 1, 0] = one_zero[3, 1, 4] = 0
    check(
        TIES,
        mesh,
        layout,
        {"k": wf.tensor(grid, "a=4 b=3 c=5"), "z": wf.tensor(one_zero, "a=4 b=3 c=5")},
    )


@places
def test_infinite_ties(mesh, layout):
    """They are as padding is filled, which had a share of their gradient."""
    values = np.full((4, 3, 5), np.inf, np.float32)
    values[1, 2, 3] = values[3, :, 1] = 0.5  # some of the largest, and some of the smallest, are finite
    rows = over("max", jnp.max, "low", FEW) | over("min", jnp.min, "high", FEW)
    check(
        rows,
        mesh,
        layout,
        {n: wf.tensor(v, "a=4 b=3 c=5") for n, v in {"low": -values, "high": values}.items()},
    )


INFINITE = {
    **over("logsumexp", logsumexp, "x", [("c",), ("b", "c"), ("a", "b", "c")]),
    **over("max", jnp.max, "x", [("c",)]),
    **over("any", jnp.any, "x", [("c",)]),
    "softmax": ("x", lambda x: wf.softmax(x, "c"), lambda x: jax.nn.softmax(x, 2)),
}


@places
def test_masked_logits(mesh, layout):
    """-∞ among the values, as masks put it there, up to one number a row; and +∞."""
    values = TENSORS["x"].numpy().copy()
    values[0, 0, 1:], values[1, :, 2], values[2, 1, :4] = -np.inf, -np.inf, -np.inf
    check(INFINITE, mesh, layout, {"x": wf.tensor(values, "a=4 b=3 c=5")})
    values[0, 0, :], values[1, 1, 0] = -np.inf, np.inf
    x = wf.tensor(values, "a=4 b=3 c=5")
    got = wf.spmd(lambda x: wf.logsumexp(x, "c"), mesh, layout)(x)
    np.testing.assert_allclose(got.numpy(), logsumexp(values, axis=2), rtol=1e-5)


def test_large_values_do_not_overflow():
    x = wf.tensor(np.array([1000.0, 1001.0, -1000.0, 999.0, 1000.5], np.float32), "c=5")

    def program(x):
        return [
            wf.logsumexp(x),
            wf.softmax(x, "c"),
            wf.log_softmax(x, "c"),
            wf.grad(wf.logsumexp)(x),
        ]

    for t, f in zip(
        wf.spmd(program, "x=4", "c:x")(x),
        [logsumexp, jax.nn.softmax, jax.nn.log_softmax, jax.grad(logsumexp)],
        strict=True,
    ):
        assert_same(t, f(x.array), rtol=3e-5)


BF16 = {
    "sum": ("h", lambda h: wf.sum(h, "c"), lambda h: jnp.sum(h, 2)),
    "mean": ("h", lambda h: wf.mean(h, "c"), lambda h: jnp.mean(h, 2)),
    "max": ("h", lambda h: wf.max(h, "c"), lambda h: jnp.max(h, 2)),
    "softmax": ("h", lambda h: wf.softmax(h, "c"), lambda h: jax.nn.softmax(h, 2)),
    "logsumexp": ("h", lambda h: wf.logsumexp(h, "c"), lambda h: logsumexp(h, 2)),
}


def test_bf16_keeps_its_type():
    tensors = {"h": TENSORS["x"].astype(jnp.bfloat16)}
    check(BF16, "x=2 y=2", "a:x c:y", tensors, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_means_of_many_small_numbers(dtype):
    """As by jax.numpy; over devices each one's share of the mean is rounded to the type that is sent."""
    for size in (7, 257, 100_000):
        x = wf.ones(f"n={size}", dtype)
        assert wf.mean(x).dtype == dtype and wf.mean(x).item() == 1.0
        shared = wf.spmd(wf.mean, "x=4", "n:x")(x)
        assert shared.item() == pytest.approx(1.0, abs=2 * float(jnp.finfo(dtype).eps))


def test_sums_stay_pending_and_are_added_up_once():
    def program(x):
        return wf.sum(x, "c") + 2.0 * wf.mean(x, "c") - wf.sum(x * x, "c").astype(jnp.float32)

    staged = wf.spmd(program, "x=2 y=2", "c:x a:y")
    assert_same(
        staged(TENSORS["x"]),
        (lambda x: x.sum(2) + 2 * x.mean(2) - (x * x).sum(2))(TENSORS["x"].array),
    )
    assert [(c.kind, c.axes) for c in staged.collectives(TENSORS["x"])] == [("all-reduce", ("x",))]


def test_collectives_are_those_of_the_table():
    def kinds(fn, layout="c:x"):
        found = wf.spmd(fn, "x=4", layout).collectives(TENSORS["x"])
        return [(c.kind, c.bytes) for c in found]

    row = 4 * 3 * 4  # the bytes of [a=4, b=3]
    flags = ("all-reduce", row // 4)  # whether there is a NaN
    assert kinds(lambda x: wf.max(x, "c")) == [("all-reduce", row), flags]
    assert kinds(lambda x: wf.any(x > 0, "c")) == [("all-reduce", row // 4)]
    assert kinds(lambda x: wf.logsumexp(x, "c")) == [("all-reduce", row)] * 2
    assert kinds(lambda x: wf.softmax(x, "c")) == [("all-reduce", row)] * 2
    assert kinds(lambda x: wf.softmax(x, "b c")) == [("all-reduce", row // 3)] * 2
    assert kinds(lambda x: wf.softmax(x, "a b")) == []
    assert kinds(lambda x: wf.prod(x, "c")) == [("all-gather", row * 4)] * 2  # mantissas and exponents
    for fn in (wf.max, wf.logsumexp, wf.prod, wf.var):
        assert kinds(lambda x, fn=fn: fn(x, ["a", "b"])) == []


METHODS = ("linear", "lower", "higher", "midpoint", "nearest", "inverted_cdf")
QUANTILES = {
    **{
        method: (
            "x",
            lambda x, m=method: [wf.quantile(x, q, d, m) for q in (0, 0.3, np.float64(1)) for d in ("b", "c", ["a", "c"], None)],
            lambda x, m=method: [
                jnp.quantile(x, q, d, method=m) for q in (0.0, 0.3, 1.0) for d in (1, 2, (0, 2), None)
            ],
        )
        for method in METHODS
    },
    "of integers": (
        "i b",
        lambda i, b: [wf.quantile(i, 0.3, "c"), wf.quantile(b, 0.6, "a")],
        lambda i, b: [jnp.quantile(i, 0.3, 2), jnp.quantile(b, 0.6, 0)],
    ),
    "several": (
        "x q r",
        lambda x, q, r: [
            wf.quantile(x, q, "c"), wf.quantile(x, q, ["a", "b"], "nearest"), wf.quantile(x, q),
            wf.quantile(x, r, "b"), wf.quantile(x, q.rename(q="c"), ["b", "c"]),
        ],
        lambda x, q, r: [
            jnp.quantile(x, q, 2), jnp.quantile(x, q, (0, 1), method="nearest"), jnp.quantile(x, q),
            jnp.quantile(x, r, 1), jnp.quantile(x, q, (1, 2)),
        ],
    ),
}  # fmt: skip
QUANTILE_PLACES = [*PLACES, ("x=2", "q:x"), ("x=2 y=4", "a:x q:y"), ("x=2", "a:x")]


@pytest.mark.parametrize("mesh, layout", slow_except([PLACES[0], QUANTILE_PLACES[3]], QUANTILE_PLACES))
def test_quantiles(mesh, layout):
    shares = {"q": wf.tensor(np.float32([0.1, 0.9, 0.35]), "q=3"), "r": wf.tensor(np.float32(0.45), "")}
    check(QUANTILES, mesh, layout, TENSORS | shares)


@places
def test_quantiles_with_nan_ties_and_16_bits(mesh, layout):
    values = np.random.default_rng(5).integers(-2, 3, (4, 3, 5)).astype(np.float32)
    rows = {
        "ties": ("k", lambda k: [wf.median(k, "c"), wf.quantile(k, 0.3, ["a", "b"])],
                 lambda k: [jnp.median(k, 2), jnp.quantile(k, 0.3, (0, 1))]),
        "16 bits": ("h", lambda h: [wf.median(h, "c"), wf.quantile(h, 0.3, ["a", "b"])],
                    lambda h: [jnp.median(h, 2), jnp.quantile(h, 0.3, (0, 1))]),
    }  # fmt: skip
    x = wf.tensor(values, "a=4 b=3 c=5")
    check(rows, mesh, layout, {"k": x, "h": TENSORS["x"].astype(jnp.bfloat16)}, rtol=1e-5)
    values[0, 0, 4], values[1, 1, 0], values[2, :, 3] = np.nan, np.inf, np.nan
    got = wf.spmd(lambda x: [wf.median(x, d) for d in ("a", "c", ["a", "c"])], mesh, layout)(
        wf.tensor(values, "a=4 b=3 c=5")
    )
    for t, axis in zip(got, (0, 2, (0, 2)), strict=True):
        np.testing.assert_array_equal(t.numpy(), jnp.median(values, axis))


def test_quantiles_gather_only_the_split_dim():
    def sent(fn, layout):
        return [(c.kind, c.bytes) for c in wf.spmd(fn, "x=4 y=3", layout).collectives(TENSORS["x"])]

    gathered = 4 * 3 * 8 * 4  # c=5 over 4 devices, with padding
    assert sent(lambda x: wf.median(x, "c"), "c:x") == [("all-gather", gathered)]
    assert sent(lambda x: wf.quantile(x, 0.2, "c"), "c:x b:y") == [("all-gather", gathered // 3)]
    assert sent(lambda x: wf.median(x, "c"), "a:x b:y") == []
    backward = wf.grad(lambda x: wf.sum(wf.median(x, "c")))
    assert sent(backward, "c:x") == [("all-gather", gathered)]


@places
def test_allclose(mesh, layout):
    x = TENSORS["x"].numpy().copy()
    near, far, nan = x * (1 + 1e-6), x.copy(), x.copy()
    far[3, 2, 4] += 0.01
    nan[0, 0, 0] = np.nan
    options = [{}, {"atol": 0.1}, {"rtol": 1e-9, "atol": 0}, {"equal_nan": True}]

    def each(allclose):
        return lambda x, near, far, nan: [
            allclose(a, b, **o) for a, b in ((x, near), (x, far), (nan, nan), (x, 0.5)) for o in options
        ]

    tensors = [wf.tensor(a, "a=4 b=3 c=5") for a in (x, near, far, nan)]
    for results in (wf.spmd(each(wf.allclose), mesh, layout)(*tensors), each(wf.allclose)(*tensors)):
        for t, a in zip(results, each(np.allclose)(x, near, far, nan), strict=True):
            assert_same(t, np.asarray(a))


def test_quantile_errors():
    x = TENSORS["x"]
    with pytest.raises(TensorTypeError, match="q is 50"):
        wf.quantile(x, 50)
    with pytest.raises(TensorTypeError, match=r"no method 'linaer'.*linear"):
        wf.quantile(x, 0.5, method="linaer")
    with pytest.raises(TensorTypeError, match="q is f32"):
        wf.quantile(x, x)
    with pytest.raises(wf.DimError, match="a occurs twice"):
        wf.quantile(x, wf.ones("a=4"), "c")
    with pytest.raises(TensorTypeError, match="complex numbers are not ordered"):
        wf.median(x * 1j)


def test_integers_have_no_softmax():
    with pytest.raises(TensorTypeError, match="floating-point"):
        wf.softmax(TENSORS["i"], "c")
    with pytest.raises(TensorTypeError, match="floating-point"):
        wf.logsumexp(TENSORS["i"])


# Elements whose product is 0, 1 or large, while products of some of them overflow or underflow in 32 bits.
EXTREME = {
    "a zero and an overflow": [1e-3, 0.0, 1e30, 1e30, 1e-30, 1e-30],
    "a zero last": [1e30, 1e30, 1e30, -1e30, 3.0, 0.0],
    "over and under": [1e30, 1e30, 1e-30, 1e-30, -4.0, 0.5],
    "under and over": [1e-30, 1e-30, 1e30, 1e30, 2.0, 3.0],
    "truly infinite": [1e30, 1e30, 1e30, 1.0, 1.0, 1.0],
    "an infinity and a zero": [np.inf, 1.0, 0.0, 1.0, 2.0, 3.0],
    "an infinity": [np.inf, 1.0, 2.0, -1.0, 2.0, 3.0],
    "a NaN": [np.nan, 1.0, 0.0, 1.0, 2.0, 3.0],
}
LAYOUTS = [("", ""), ("x=2", "a:x"), ("x=3", "a:x"), ("x=4", "a:x"), ("x=8", "a:x"), ("x=2 y=2", "a:x+y")]


@pytest.mark.parametrize("mesh, layout", LAYOUTS, ids=[m or "one device" for m, _ in LAYOUTS])
def test_products_do_not_overflow_on_the_way(mesh, layout):
    """The oracle is NumPy in 64 bits, where no partial product of these overflows."""
    rows = np.asarray(list(EXTREME.values()), np.float32)
    run = wf.spmd(
        lambda x: [wf.prod(x, "a"), wf.cumprod(x, "a"), wf.cumprod(x, "a", reverse=True)], mesh, layout
    )
    product, forward, backward = run(wf.tensor(rows, "case=8 a=6"))
    wide = rows.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = [wide.prod(1), wide.cumprod(1), wide[:, ::-1].cumprod(1)[:, ::-1]]
        for got, want in zip((product, forward, backward), exact, strict=True):
            np.testing.assert_allclose(got.numpy(), want.astype(np.float32), rtol=1e-6)


def test_long_products_have_the_oracles_gradients():
    """Hundreds of factors, in several chunks; first and second derivatives."""
    values = np.random.default_rng(0).uniform(0.5, 1.9, (2, 300)).astype(np.float32)
    values[1, 7] = 0.0
    x = wf.tensor(values, "b=2 a=300")
    with jax.enable_x64(True):
        exact = jax.grad(lambda v: jnp.sum(jnp.prod(v, 1)))(jnp.asarray(values, jnp.float64))
    for mesh, layout in (("", ""), ("x=8", "a:x")):
        got = wf.spmd(wf.grad(lambda x: wf.sum(wf.prod(x, "a"))), mesh, layout)(x)
        np.testing.assert_allclose(got.numpy(), exact, rtol=2e-5)
    small = wf.tensor(values[:, :5], "b=2 a=5")
    second = lambda f: (
        lambda x: wf.grad(lambda x: wf.sum(wf.square(wf.grad(lambda x: wf.sum(f(x, "a")))(x))))(x)
    )
    raw = lambda f: jax.grad(lambda x: jnp.sum(jnp.square(jax.grad(lambda x: jnp.sum(f(x, 1)))(x))))
    for mine, oracle in ((wf.prod, jnp.prod), (wf.cumprod, jnp.cumprod)):
        got = wf.spmd(second(mine), "x=2", "a:x")(small)
        np.testing.assert_allclose(got.numpy(), raw(oracle)(small.array), rtol=1e-4)


def test_max_and_min_over_a_split_dim_propagate_nan():
    x = wf.tensor(np.array([1, np.nan, 3, 4, 5], np.float32), "a=5")
    for mesh in ("p=2", "p=4"):
        most, least = wf.spmd(lambda x: (wf.max(x), wf.min(x)), mesh, "a:p")(x)
        assert np.isnan(most.item()) and np.isnan(least.item())
