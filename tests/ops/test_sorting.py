"""Order along a dim: argmax, top_k, sort, searchsorted and running totals, against jax.numpy and jax.lax."""

import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same, check_one, collectives, cosines
from jax import lax

import weft as wf
from weft.core.errors import DimError, LayoutError, ShapeError, TensorTypeError

NAN, INF = np.nan, np.inf

# 8 over 2 divides, 9 over 2 does not, 9 over 8 leaves devices with nothing but padding.
PLACES = [
    ("x=2", "a:x", 9),
    ("x=4", "b:x", 8),
    ("x=4", "b:x best:x", 9),
    ("x=8", "b:x", 9),
    ("x=2 y=2", "a:x b:y", 9),
    ("x=2 y=2", "b:x+y", 9),
    ("x=2 y=2", "b:x best:y", 8),
]
places = pytest.mark.parametrize(
    "mesh, layout, size", PLACES, ids=[f"{m}-{lay}-{size}" for m, lay, size in PLACES]
)


def data(rows, size, seed=0):
    array = np.random.default_rng(seed).normal(size=(rows, size)).astype(np.float32)
    return wf.tensor(array, [wf.Dim("a", rows), wf.Dim("b", size)])


def hard_rows(size):
    """Rows in which padding, ties or NaN could win, wrongly."""
    negative_nan = -np.float32(NAN)
    return np.array(
        [
            np.full(size, -INF),
            np.full(size, INF),
            np.full(size, -3.0),
            [NAN if n in (2, 6) else n for n in range(size)],
            [negative_nan if n != 5 else -INF for n in range(size)],
            [-INF if n < size - 1 else -1.0 for n in range(size)],
        ],
        np.float32,
    )


@places
def test_all_with_gradients(mesh, layout, size):
    k = wf.Dim("best", 3)

    def fn(x):
        values, indices = wf.top_k(x, "b", k)
        return [
            values, indices, *wf.approx_max_k(x, "b", k), wf.argmax(x, "b"), wf.argmin(x, "b"), wf.sort(x, "b"),
            wf.argsort(x, "b"), wf.cumsum(x, "b"), wf.cumsum(x, "b", exclusive=True, reverse=True),
        ]  # fmt: skip

    def oracle(x):
        values, indices = lax.top_k(x, 3)
        return [
            values, indices, *lax.approx_max_k(x, 3), jnp.argmax(x, 1).astype(jnp.int32), jnp.argmin(x, 1).astype(jnp.int32),
            jnp.sort(x, 1), jnp.argsort(x, 1).astype(jnp.int32), jnp.cumsum(x, 1),
            lax.cumsum(x, 1, reverse=True) - x,
        ]  # fmt: skip

    check_one(fn, oracle, mesh, layout, data(5, size))


@pytest.mark.parametrize("mesh, layout", [("x=4", "b:x"), ("x=8", "b:x"), ("x=2 y=2", "a:x b:y")])
def test_padding_ties_and_nan(mesh, layout):
    size = 9
    floats = hard_rows(size)
    low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    integers = np.array([[low] * 9, [high] * 9, [-1] * 9, [low, low + 1] * 4 + [low]])
    booleans = integers[2:] > low
    arrays = [floats, integers.astype(np.int32), booleans, np.abs(integers).astype(np.uint32) % 3]
    tensors = [wf.tensor(array, [wf.Dim("a", len(array)), wf.Dim("b", size)]) for array in arrays]
    all_of_them = wf.Dim("best", size)

    def fn(tensors):
        return [
            [wf.argmax(x, "b"), wf.argmin(x, "b"), *wf.top_k(x, "b", all_of_them),
             wf.sort(x, "b", descending=True), wf.argsort(x, "b", descending=True)]
            for x in tensors
        ]  # fmt: skip

    for outs, array in zip(wf.spmd(fn, mesh, layout)(tensors), arrays, strict=True):
        expected = [
            jnp.argmax(array, 1), jnp.argmin(array, 1), *lax.top_k(array, size),
            jnp.sort(array, 1, descending=True), jnp.argsort(array, 1, descending=True),
        ]  # fmt: skip
        for got, want in zip(outs, expected, strict=True):
            np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("mesh, layout", [("", ""), ("x=4", "b:x"), ("x=8", "b:x"), ("x=2 y=2", "a:x b:y")])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_approx_max_k_is_exact_on_cpus(mesh, layout, dtype):
    """The order of ties and NaNs is that of top_k, where zeros are equal; JAX's is undefined."""
    zeros = [[0.0, -0.0, -1, -0.0, 0.0, -2, 0.0, -3, -0.0], np.arange(9) % 3]
    rows = jnp.asarray(np.vstack([hard_rows(9), zeros]), dtype)
    x = wf.tensor(rows, [wf.Dim("a", len(rows)), wf.Dim("b", 9)])
    for k in (1, 4, 9):
        fn = lambda x, k=k: wf.approx_max_k(x, "b", wf.Dim("best", k), recall_target=0.5)
        got = wf.spmd(fn, mesh, layout)(x)
        assert_same(got, tuple(lax.top_k(jnp.where(rows == 0, 0, rows), k)))


def test_approx_max_k_is_approximate_on_tpus():
    """The TPU's code calls the primitive, with the size of the dim instead of the block's."""
    x = wf.spec("a=3 b=64")
    fn = lambda x: wf.approx_max_k(x, "b", wf.Dim("best", 2), recall_target=0.9)
    text = str(wf.spmd(fn, "x=4", "b:x").jaxpr(x))
    assert "approx_top_k" in text
    assert "recall_target=0.9" in text and "reduction_input_size_override=64" in text


SEARCHES = [
    ("", ""),
    ("x=4", "b:x"),
    ("x=8", "b:x"),
    ("x=2 y=2", "b:x v:y"),
    ("x=2 y=2", "b:y+x"),
    ("x=8", "v:x"),
]
ROW_SEARCHES = [*SEARCHES, ("x=2 y=2 z=2", "a:x b:z c:y"), ("x=4", "a:x")]


def on_places(places):
    return pytest.mark.parametrize("mesh, layout", places, ids=[f"{m}|{lay}" for m, lay in places])


SORTED = {
    "floats": np.array([-INF, -2, -0.0, 0, 0.5, 0.5, 3, INF, NAN], np.float32),
    "all equal": np.full(9, 3, np.float32),
    "not a number": np.full(9, NAN, np.float32),
    "narrow": np.array([-2, -1, 0, 0, 0.5, 0.5, 3, 3, 9], jnp.bfloat16),
    "integers": np.array([-128, -3, 0, 0, 1, 5, 5, 127, 127], np.int8),
    "unsigned": np.array([0, 0, 1, 3, 3, 5, 200, 255, 255], np.uint8),
    "booleans": np.array([False] * 4 + [True] * 5),
}
WANTED = {
    "floats": np.array([NAN, -INF, INF, 0.5, -0.0, 9, -7], np.float32),
    "integers": np.array([0, -300, 300, 127, 3, -128, 1], np.int32),
}


@on_places(SEARCHES)
def test_searchsorted(mesh, layout):
    def each(search, tables, wanted):
        return [search(t, v, side) for t in tables for v in (*wanted, 3) for side in ("left", "right")]

    tables = [wf.tensor(a, "b=9") for a in SORTED.values()]
    wanted = [wf.tensor(v, "v=7") for v in WANTED.values()]
    run = lambda tables, wanted: each(lambda t, v, side: wf.searchsorted(t, v, "b", side), tables, wanted)
    want = each(jnp.searchsorted, SORTED.values(), WANTED.values())
    for got in (wf.spmd(run, mesh, layout)(tables, wanted), run(tables, wanted)):
        for t, a in zip(got, want, strict=True):
            assert_same(t, a)


@on_places(ROW_SEARCHES)
def test_searchsorted_in_rows(mesh, layout):
    """Shared dims are aligned: each row of values has its own sorted row."""
    array = np.sort(np.random.default_rng(0).integers(0, 6, (3, 9, 2)), 1).astype(np.float32)
    values = np.random.default_rng(1).uniform(-1, 7, (7, 3)).astype(np.float32)
    table, wanted = wf.tensor(array, "a=3 b=9 c=2"), wf.tensor(values, "v=7 a=3")
    got = wf.spmd(lambda t, v: wf.searchsorted(t, v, "b"), mesh, layout)(table, wanted)
    assert [d.name for d in got.dims] == ["v", "a", "c"]
    want = [[np.searchsorted(array[a, :, c], values[:, a]) for c in range(2)] for a in range(3)]
    assert_same(got, np.asarray(want, np.int32).transpose(2, 0, 1))


def test_searches_exchange_counts():
    table, wanted = wf.spec("b=1000"), wf.spec("v=6")
    fn = lambda t, v: wf.searchsorted(t, v, "b")
    (only,) = wf.spmd(fn, "x=4", "b:x").collectives(table, wanted)
    assert (only.kind, only.bytes) == ("all-reduce", 6 * 4)
    assert wf.spmd(fn, "x=4", "v:x").collectives(table, wanted) == []


@pytest.mark.parametrize("k", [1, 2, 9])
def test_top_k_of_more_than_a_block(k):
    """9 over 8: blocks of 2, three devices with padding only."""
    x, best = data(3, 9), wf.Dim("best", k)
    fn = lambda x: wf.top_k(x, "b", best)
    check_one(fn, lambda x: lax.top_k(x, k), "x=8", "b:x", x)


RUNNING = [("x=4", "b:x", 8), ("x=2 y=2", "b:x+y", 9), ("x=2", "a:x", 9)]


@pytest.mark.parametrize("mesh, layout, size", RUNNING, ids=[f"{m}-{n}-{k}" for m, n, k in RUNNING])
def test_running_totals(mesh, layout, size):
    array = data(5, size).numpy().copy()
    array[1, 2] = array[2, 5] = array[2, 6] = 0  # the derivative of a product at zeros
    x = wf.tensor(array, data(5, size).dims)

    def shifted(total, reverse, first):
        edge = jnp.full_like(total[:, :1], first)
        parts = [total[:, 1:], edge] if reverse else [edge, total[:, :-1]]
        return jnp.concatenate(parts, 1)

    def fn(x):
        options = [(e, r) for e in (False, True) for r in (False, True)]
        return [op(x, "b", exclusive=e, reverse=r) for op in (wf.cumsum, wf.cumprod) for e, r in options]

    def oracle(x):
        outs = []
        for op, first in ((lax.cumsum, 0), (lax.cumprod, 1)):
            inclusive = [op(x, 1, reverse=r) for r in (False, True)]
            outs += inclusive + [shifted(t, r, first) for r, t in enumerate(inclusive)]
        return outs

    check_one(fn, oracle, mesh, layout, x)


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.int32])
def test_running_totals_of_integers(dtype):
    array = (np.arange(18).reshape(2, 9) % 3).astype(dtype)
    x = wf.tensor(array, "a=2 b=9")
    outs = wf.spmd(lambda x: [wf.cumsum(x, "b"), wf.cumprod(x, "b")], "x=4", "b:x")(x)
    for got, want in zip(outs, [jnp.cumsum(array, 1), jnp.cumprod(array, 1)], strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got.numpy(), want)


def test_eager_equals_staged():
    best = wf.Dim("best", 4)

    def fn(x):
        return [*wf.top_k(x, "b", best), wf.argmax(x, "a"), wf.sort(x, "b"), wf.cumsum(x, "b")]

    x = data(5, 9)
    placed = wf.place(x, wf.Mesh("x=4"), wf.Layout("b:x"))
    staged = wf.spmd(fn, "x=4", "b:x")(x)
    for one, two, three in zip(fn(x), fn(placed), staged, strict=True):
        assert one.dims == two.dims == three.dims
        np.testing.assert_allclose(two.numpy(), one.numpy(), rtol=1e-6)
        np.testing.assert_allclose(three.numpy(), one.numpy(), rtol=1e-6)


def test_only_candidates_and_totals_travel():
    best = wf.Dim("best", 2)
    x = wf.spec("a=3 b=64", jnp.float32)

    def travels(fn):
        return collectives(wf.spmd(fn, "x=4", "b:x").jaxpr(x).jaxpr)

    assert travels(lambda x: wf.argmax(x, "b")) == [("all_gather_invariant", (3, 4))] * 2
    assert travels(lambda x: wf.top_k(x, "b", best)) == [("all_gather_invariant", (3, 8))] * 2
    assert travels(lambda x: wf.approx_max_k(x, "b", best)) == [("all_gather_invariant", (3, 8))] * 2
    assert travels(lambda x: wf.cumsum(x, "b")) == [("all_gather", (3, 4))]
    backward = wf.grad(lambda x: wf.sum(wf.cumsum(x, "b") ** 2))
    assert sorted(travels(backward)) == [("all_gather", (3, 4)), ("reduce_scatter", (3, 1))]
    backward = wf.grad(lambda x: wf.sum(wf.top_k(x, "b", best)[0] ** 2))
    assert travels(backward) == [("all_gather_invariant", (3, 8))] * 2
    for fn in (wf.argmax, wf.argmin, wf.sort, wf.cumsum):
        assert travels(lambda x, fn=fn: fn(x, "a")) == []


def test_errors():
    x = data(3, 4)
    with pytest.raises(ShapeError, match=r"k is 5 \(best=5\), and the dim has 4 elements \(b=4\)"):
        wf.top_k(x, "b", wf.Dim("best", 5))
    with pytest.raises(DimError, match="a occurs twice"):
        wf.top_k(x, "b", wf.Dim("a", 2))
    with pytest.raises(DimError, match="2 dims"):
        wf.top_k(x, "b", "c=2 d=2")
    with pytest.raises(DimError, match="there is no dim c"):
        wf.argmax(x, "c")
    with pytest.raises(TensorTypeError, match="takes floating-point"):
        wf.approx_max_k(x > 0, "b", wf.Dim("best", 2))
    with pytest.raises(TensorTypeError, match="recall_target is 95"):
        wf.approx_max_k(x, "b", wf.Dim("best", 2), recall_target=95)
    with pytest.raises(DimError, match="have the dim b that is searched"):
        wf.searchsorted(x, x, "b")
    with pytest.raises(TensorTypeError, match="side is 'middle'"):
        wf.searchsorted(x, 0.5, "b", side="middle")
    with pytest.raises(LayoutError, match="both on axis x"):
        wf.spmd(lambda x: wf.top_k(x, "b", wf.Dim("best", 2)), "x=2", "a:x best:x")(x)


@pytest.mark.parametrize("layout", ["", "a:x"])
@pytest.mark.parametrize("size", [3_000_000_000, 3_000_000_001])
def test_a_dim_too_large_for_int32_is_an_error_in_every_op(size, layout):
    x = wf.spec(f"a={size}", jnp.int8)
    ops = [
        lambda t: wf.sum(wf.exp(t)),
        lambda t: wf.argmax(t, "a"),
        lambda t: wf.arange(t.dims[0]),
        lambda t: t + 1,
    ]
    for f in ops:
        with pytest.raises(DimError, match="at most 2147483647"):
            wf.spmd(f, "x=8", layout).plan(x)


def test_the_running_sum_of_one_nonzero_element():
    """XLA returned that element at all positions: the gradient of one element of a running sum was wrong."""
    x = cosines("g=7")
    for reverse in (False, True):
        gradient = wf.grad(lambda x, reverse=reverse: wf.cumsum(x, "g", reverse=reverse)["g", 3])
        want = np.arange(7) >= 3 if reverse else np.arange(7) <= 3
        np.testing.assert_array_equal(wf.spmd(gradient)(x).numpy(), want)
    padded = wf.spmd(lambda x: wf.cumsum(wf.pad(x, "g", 2, 2), "g"))(cosines("g=1"))
    np.testing.assert_array_equal(padded.numpy() != 0, [False, False, True, True, True])


@pytest.mark.parametrize("select", [wf.top_k, wf.approx_max_k])
def test_zeros_are_equal_whatever_their_sign(select):
    x = wf.tensor([-0.0, 0.0, -1.0], "a=3")
    assert select(x, "a", "k=2")[1].numpy().tolist() == [0, 1]
    assert wf.grad(lambda x: wf.sum(select(x, "a", "k=2")[0]))(x).numpy().tolist() == [1, 1, 0]
