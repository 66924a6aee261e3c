"""Look-up along a dim: take, one_hot and scatter_add, against jax.numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same_on_mesh, check_one, collectives, cosines

import weft as wf
from weft.core.errors import DimError, LayoutError, ShapeError, TensorTypeError

# vocab has size 10 (even over 2), or 9 (over 8, some devices store only padding).
PLACES = [
    ("x=2", "vocab:x", 10),
    ("x=2", "batch:x", 9),
    ("x=2", "d:x", 9),
    ("x=8", "vocab:x", 9),
    ("x=2 y=2", "vocab:x batch:y", 9),
    ("x=2 y=2", "vocab:x+y", 9),
    ("x=2 y=2 z=2", "vocab:x batch:y d:z", 9),
    ("x=2 y=2", "length:x d:y", 10),
]
places = pytest.mark.parametrize(
    "mesh, layout, size", PLACES, ids=[f"{m}-{lay}-{size}" for m, lay, size in PLACES]
)


def normal(seed, **sizes):
    array = np.random.default_rng(seed).normal(size=tuple(sizes.values())).astype(np.float32)
    return wf.tensor(array, [wf.Dim(name, size) for name, size in sizes.items()])


def integers(seed, low, high, **sizes):
    array = np.random.default_rng(seed).integers(low, high, size=tuple(sizes.values()))
    return wf.tensor(array.astype(np.int32), [wf.Dim(name, size) for name, size in sizes.items()])


# take


@places
def test_take_with_gradients(mesh, layout, size):
    """An embedding, a choice for each row, and both in one; some indices out of range, filled."""
    table, logits = normal(0, vocab=size, d=3), normal(1, batch=3, vocab=size, d=3)
    ids = integers(2, -2, size + 3, batch=3, length=5)
    targets = integers(3, 0, size, batch=3)
    rest = np.where((ids.numpy() < 0) | (ids.numpy() >= size), size, ids.numpy())

    def fn(table, logits):
        return [
            wf.take(table, ids, "vocab", fill=0.5),
            wf.take(logits, targets, "vocab"),
            wf.take(logits, ids, "vocab", fill=-1),
        ]

    def oracle(table, logits):
        # Axis 1 of the logits is the vocabulary, and the dim of the indices replaces it.
        batch = np.arange(3)[:, None]
        return [
            table.at[rest].get(mode="fill", fill_value=0.5),
            jnp.take_along_axis(logits, targets.numpy()[:, None, None], 1)[:, 0],
            logits.at[batch, rest].get(mode="fill", fill_value=-1),
        ]

    check_one(fn, oracle, mesh, layout, table, logits)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8, np.int8, np.bool_, np.complex64])
@pytest.mark.parametrize("mesh, layout", [("x=4", "vocab:x"), ("x=4", "d:x")])
def test_take_out_of_range(mesh, layout, dtype):
    """Inside a program the filling is NaN, or an integer that can't be mistaken: as jnp.take."""
    table = np.arange(1, 28).reshape(9, 3).astype(dtype)
    ids = np.array([-1, 8, 9, 11, 0, 12, -12, np.iinfo(np.int32).max], np.int32)
    named = wf.tensor(table, "vocab=9 d=3"), wf.tensor(ids, "length=8")
    got = wf.spmd(lambda table, ids: wf.take(table, ids, "vocab"), mesh, layout)(*named)
    want = jnp.take(table, np.where(ids < 0, 9, ids), axis=0, mode="fill")
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.numpy("length", "d"), want)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint32])
def test_take_by_small_and_unsigned_indices(dtype):
    table, ids = normal(0, vocab=200), np.array([0, 127, 3], dtype)
    if dtype == np.uint32:
        ids[1] = 2**32 - 1
    got = wf.spmd(lambda t, i: wf.take(t, i, "vocab", fill=0), "x=4", "vocab:x")(
        table, wf.tensor(ids, "length=3")
    )
    want = [0.0 if n > 200 else table.numpy()[n] for n in ids]
    np.testing.assert_array_equal(got.numpy(), np.asarray(want, np.float32))


def test_take_order_of_dims():
    table = normal(0, a=2, vocab=4, b=3)
    ids = integers(1, 0, 4, p=2, b=3, q=5)
    out = wf.take(table, ids, "vocab")
    assert [d.name for d in out.dims] == ["a", "p", "q", "b"]
    want = np.empty((2, 2, 5, 3), np.float32)
    for a, p, q, b in np.ndindex(*want.shape):
        want[a, p, q, b] = table.numpy()[a, ids.numpy()[p, b, q], b]
    np.testing.assert_array_equal(out.numpy(), want)


def test_take_one_number():
    table = wf.place(normal(0, vocab=9, d=3), wf.Mesh("x=4"), wf.Layout("vocab:x"))
    np.testing.assert_array_equal(wf.take(table, 7, "vocab").numpy(), table.numpy()[7])


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8])
@pytest.mark.parametrize("staged", [False, True], ids=["eager", "staged"])
@pytest.mark.parametrize("place", [(None, None), ("x=4", "vocab:x"), ("x=2", "length:x")], ids=str)
def test_take_out_of_range_is_one_rule(place, staged, dtype):
    """Outside programs it raised, inside it gave NaN. `jnp.take` fills in both cases."""
    ids = np.array([0, 12, -1, 8, 9])
    table = wf.tensor(np.arange(27).reshape(9, 3).astype(dtype), "vocab=9 d=3")
    named = wf.place((table, wf.tensor(ids, "length=5")), *place)
    raw = np.where(ids < 0, 9, ids)  # jnp counts negative ones from the end
    for fill in (None, 7):
        look_up = lambda t, i, fill=fill: wf.take(t, i, "vocab", fill=fill)
        got = (wf.spmd(look_up, *place) if staged else look_up)(*named)
        want = jnp.take(jnp.asarray(table.numpy()), raw, axis=0, mode="fill", fill_value=fill)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got.numpy("length", "d"), want)


@pytest.mark.parametrize("staged", [False, True], ids=["eager", "staged"])
@pytest.mark.parametrize("index", [9, -1, np.int64(12)], ids=str)
def test_take_of_a_number_out_of_range(index, staged):
    """A Python number is known in a program too, where it gave NaN."""
    look_up = lambda table: wf.take(table, index, "vocab")
    with pytest.raises(ShapeError, match=f"index {index} is out of range for vocab=9") as caught:
        (wf.spmd(look_up, "x=4", "vocab:x") if staged else look_up)(normal(0, vocab=9, d=3))
    assert "test_lookup.py" in str(caught.value) and "in take(f32[vocab=9" in str(caught.value)
    assert wf.take(normal(0, vocab=9), index, "vocab", fill=0).item() == 0


# Collectives


def test_a_split_vocabulary_is_never_gathered():
    """Cross-entropy: only sums (and a maximum) of results without the vocabulary travel."""
    hidden, vocab_table = wf.spec("batch=4 d=6", jnp.float32), wf.spec("vocab=40 d=6", jnp.float32)
    targets = wf.spec("batch=4", jnp.int32)

    def loss(hidden, table, targets):
        logits = wf.einsum(hidden, table, reduce=["d"])
        return wf.mean(wf.logsumexp(logits, "vocab") - wf.take(logits, targets, "vocab"))

    program = wf.spmd(wf.value_and_grad(loss, argnums=(0, 1)), "x=4", "vocab:x")
    found = collectives(program.jaxpr(hidden, vocab_table, targets).jaxpr)
    # Forward: the maximum, the sum of exponentials, the targets' logits. Backward: d hidden.
    assert sorted(found) == [
        ("pmax", (4, 1)),
        ("psum_invariant", (4,)),
        ("psum_invariant", (4, 1)),
        ("psum_invariant", (4, 6)),
    ]


def test_an_embedding_is_one_all_reduce():
    table, ids = wf.spec("vocab=40 d=6", jnp.float32), wf.spec("batch=4 length=5", jnp.int32)

    def travels(fn, layout, *args):
        return collectives(wf.spmd(fn, "x=2 y=2", layout).jaxpr(*args).jaxpr)

    embed = lambda table, ids: wf.take(table, ids, "vocab")
    squares = wf.grad(lambda table, ids: wf.sum(embed(table, ids) ** 2))
    assert travels(embed, "vocab:x", table, ids) == [("psum_invariant", (4, 5, 6))]
    assert travels(squares, "vocab:x", table, ids) == [("psum_invariant", (4, 5, 6))]
    assert travels(embed, "batch:x d:y", table, ids) == []
    # Data parallel: the gradient of each device's slice of the table.
    assert travels(squares, "batch:y vocab:x", table, ids) == [
        ("psum_invariant", (2, 5, 6)),
        ("psum_invariant", (20, 6)),
    ]
    scatter = lambda table, ids: wf.scatter_add(table, ids, 1, "vocab")
    assert travels(scatter, "vocab:x d:y", table, ids) == []
    assert travels(scatter, "batch:x", table, ids) == [("psum_invariant", (40, 6))]
    one_hot = lambda ids: wf.one_hot(ids, wf.Dim("vocab", 40))
    assert travels(one_hot, "vocab:x batch:y", ids) == []


# one_hot


@pytest.mark.parametrize(
    "mesh, layout", [("x=4", "vocab:x"), ("x=2", "batch:x"), ("x=2 y=2", "vocab:x batch:y")]
)
def test_one_hot(mesh, layout):
    ids, vocab = integers(0, -3, 13, batch=3, length=5), wf.Dim("vocab", 9)

    def fn(ids):
        return [wf.one_hot(ids, vocab), wf.one_hot(ids, vocab, dtype=jnp.int32)]

    outs = wf.spmd(fn, mesh, layout)(ids)
    for got, eager, dtype in zip(outs, fn(ids), (jnp.float32, jnp.int32), strict=True):
        want = jax.nn.one_hot(ids.numpy(), 9, dtype=dtype)
        assert got.dtype == want.dtype and [d.name for d in got.dims] == [
            "batch",
            "length",
            "vocab",
        ]
        np.testing.assert_array_equal(got.numpy(), want)
        np.testing.assert_array_equal(eager.numpy(), want)
        assert np.asarray(got.storage).sum() == want.sum()


# scatter_add


@places
def test_scatter_add_with_gradients(mesh, layout, size):
    """A histogram's and an embedding gradient's scatter, aligned rows, and updates that broadcast."""
    table, rows = normal(0, vocab=size, d=3), normal(1, batch=3, vocab=size, d=3)
    ids, targets = integers(2, -2, size + 3, batch=3, length=5), integers(3, 0, size, batch=3)
    full, single = normal(4, batch=3, length=5, d=3), normal(5, length=5)
    drop = np.where(ids.numpy() < 0, size, ids.numpy())

    def fn(table, rows, full, single):
        return [
            wf.scatter_add(table, ids, full, "vocab"),
            wf.scatter_add(rows, ids, full, "vocab"),
            wf.scatter_add(rows, ids, single, "vocab"),
            wf.scatter_add(rows, targets, 2.5, "vocab"),
        ]

    def oracle(table, rows, full, single):
        batch = np.arange(3)[:, None]
        return [
            table.at[drop].add(full, mode="drop"),
            rows.at[batch, drop].add(full, mode="drop"),
            rows.at[batch, drop].add(single[None, :, None], mode="drop"),
            rows.at[np.arange(3), targets.numpy()].add(2.5),
        ]

    check_one(fn, oracle, mesh, layout, table, rows, full, single)


def test_scatter_add_eagerly():
    x = wf.place(wf.zeros("word=5", jnp.int32), wf.Mesh("x=4"), wf.Layout("word:x"))
    ids = wf.tensor(np.array([0, 4, 4, 5, -1]), "length=5")
    assert wf.scatter_add(x, ids, 1, "word").numpy().tolist() == [1, 0, 0, 0, 2]


# Errors


def test_errors():
    table, ids = normal(0, vocab=9, d=3), integers(1, 0, 9, batch=4)
    with pytest.raises(TensorTypeError, match="the indices are f32"):
        wf.take(table, ids.astype(jnp.float32), "vocab")
    with pytest.raises(DimError, match="have the dim vocab that they index"):
        wf.take(table, ids.rename(batch="vocab"), "vocab")
    with pytest.raises(DimError, match=r"there is no dim voc.*did you mean vocab"):
        wf.take(table, ids, "voc")
    with pytest.raises(DimError, match="batch occurs twice"):
        wf.one_hot(ids, wf.Dim("batch", 3))
    with pytest.raises(DimError, match="dims length=2 of the updates"):
        wf.scatter_add(table, ids, normal(2, batch=4, length=2), "vocab")
    with pytest.raises(LayoutError, match=r"vocab and batch .* both on axis x"):
        program = wf.spmd(lambda t, i: wf.take(t, i, "vocab"), "x=2", "vocab:x batch:x")
        program(table, ids)


def test_scatter_add_keeps_what_updates_mean():
    """Fractions were added to integers as zeros."""
    ids = wf.tensor([0, 2], "length=2")
    with pytest.raises(TensorTypeError, match="float32 was written into a tensor of dtype int32"):
        wf.scatter_add(wf.zeros("word=3", jnp.int32), ids, 0.5, "word")
    assert wf.scatter_add(wf.zeros("word=3", jnp.int32), ids, True, "word").numpy().tolist() == [1, 0, 1]


def test_a_scalar_index_is_looked_up_on_the_device_that_stores_it():
    """XLA merged two slices, and the other device's gradient came from outside its slice."""

    def run(x):
        def loss(x):
            lowest = wf.take(x, wf.argmin(x, "h"), "h")
            return lowest * 0.7 + wf.sum(x * wf.tensor(np.arange(1.0, 5.0, dtype=np.float32), "h=4"))

        return wf.grad(loss)(x)

    assert_same_on_mesh(run, "x=2", "h:x", wf.tensor(np.float32([-1, 3, 2, 4]), "h=4"))


def test_a_scalar_index_is_added_to_on_the_device_that_stores_it():
    def run(x, index):
        return wf.scatter_add(x * wf.tensor(np.arange(1.0, 5.0, dtype=np.float32), "h=4"), index, 7.0, "h")

    for n in range(4):
        assert_same_on_mesh(run, "x=2", "h:x", cosines("h=4"), wf.tensor(np.int32(n), ()))
