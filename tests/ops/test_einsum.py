"""einsum against jax.numpy.einsum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import booleans, check, integers, real

import weft as wf
from weft.core.errors import DimError, LayoutError, TensorTypeError
from weft.ops.einsum import _einsum

# a=4 is even over 2; b=3, c=5 and d=3 are not; over 8, b and c leave devices with nothing but padding.
PLACES = [
    ("x=2 y=2 z=2", "a:x b:y c:z"),
    ("x=2 y=2", "b:x+y"),
    ("x=8", "c:x"),
    ("x=2 y=4", "d:x a:y"),
]
places = pytest.mark.parametrize("mesh, layout", PLACES, ids=[f"{m}-{lay}" for m, lay in PLACES])
# The names of the operands are their dims: the formula is that of jax.numpy.
FORMULAS = [
    "ab,bc->ac",
    "ab,bc->ca",
    "ab,bc->abc",
    "ab,bc->b",
    "ab,bc->a",
    "ab,bc->",
    "ab->ab",
    "ab->ba",
    "ab->a",
    "ab->",
    "ab,ab->a",
    "ab,ab->ab",
    "abc,abd->acd",
    "abc,abd->dc",
    "ab,bc,cd->ad",
    "ab,bc,cd->bd",
    "ab,,bc->ac",
    ",->",
    ",ab->ba",
    "ab,bc,cd,ad->bd",
    "ab,bc,cd,ad->",
    "a,b->ab",
    "ab,cd->",
]


def row(formula):
    terms, out = formula.split("->")
    operands = [t or "r" for t in terms.split(",")]
    return (
        " ".join(operands),
        lambda *t: wf.einsum(*t, out=list(out)),
        lambda *a: jnp.einsum(formula, *a),
    )


ROWS = {formula: row(formula) for formula in FORMULAS}
ROWS |= {
    "reduce=b": ("ab bc", lambda x, y: wf.einsum(x, y, reduce="b"), lambda x, y: x @ y),
    "reduce=[]": ("ab bc", lambda x, y: wf.einsum(y, x, reduce=[]), lambda x, y: jnp.einsum("bc,ab->bca", y, x)),
    "reduce by first occurrence": ("bc ab", lambda y, x: wf.einsum(y, x, reduce=["b"]), lambda y, x: jnp.einsum("bc,ab->ca", y, x)),
    "the same twice": ("ab", lambda x: wf.einsum(x, x, out=["b"]), lambda x: jnp.einsum("ab,ab->b", x, x)),
    "gram": ("ab", lambda x: wf.einsum(x, x.rename(a="d2"), out=["a", "d2"]), lambda x: x @ x.T),
    "chained": ("ab bc cd", lambda x, y, z: wf.einsum(wf.einsum(x, y, out=["a", "c"]), z, out=["a", "d"]), lambda x, y, z: x @ y @ z),
    "added": ("ab bc", lambda x, y: wf.einsum(x, y, out=["a", "c"]) + wf.einsum(x, y * 2.0, out=["c", "a"]), lambda x, y: 3 * (x @ y)),
}  # fmt: skip
TENSORS = {
    name: real(seed, " ".join(f"{n}={dict(a=4, b=3, c=5, d=3)[n]}" for n in name))
    for seed, name in enumerate(["ab", "bc", "cd", "ad", "abc", "abd", "a", "b"])
}
TENSORS["r"] = real(9, "")


@places
def test_einsum(mesh, layout):
    check(ROWS, mesh, layout, TENSORS, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize(
    "formula",
    ["ab,bc->ac", "ab,bc->ca", "ab,bc->abc", "ab,ab->ba", "ab,ba->", "a,b->ab", "abc,abd->dac", ",ab->ba"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_the_product_of_two_is_that_of_jax(formula, dtype):
    """It bypasses jnp.einsum, which is slow to trace, and must not differ from it."""
    terms, out = formula.split("->")
    dims = {name: wf.Dim(name, size) for name, size in zip("abcd", (4, 3, 5, 2), strict=True)}
    operands = [tuple(dims[name] for name in term) for term in terms.split(",")]
    arrays = [jax.ShapeDtypeStruct([d.size for d in one], dtype) for one in operands]
    ours = lambda *a: _einsum(operands, list(a), tuple(dims[name] for name in out), None)
    theirs = lambda *a: jnp.einsum(formula, *a)
    assert str(jax.make_jaxpr(ours)(*arrays)) == str(jax.make_jaxpr(theirs)(*arrays))


TYPES = {
    "bf16": ("h k", lambda h, k: wf.einsum(h, k, out=["a", "c"]), lambda h, k: jnp.einsum("ab,bc->ac", h, k)),
    "mixed": ("h y", lambda h, y: wf.einsum(h, y, out=["a", "c"]), lambda h, y: jnp.einsum("ab,bc->ac", h, y)),
}  # fmt: skip
WHOLE = {
    "int": ("i j", lambda i, j: wf.einsum(i, j, out=["a", "c"]), lambda i, j: jnp.einsum("ab,bc->ac", i, j)),
    "int and float": ("i y", lambda i, y: wf.einsum(i, y, out=["a", "c"]), lambda i, y: jnp.einsum("ab,bc->ac", i, y)),
    "truth": ("p q", lambda p, q: wf.einsum(p, q, out=["a", "c"]), lambda p, q: jnp.einsum("ab,bc->ac", p, q)),
    "truth alone": ("p", lambda p: wf.einsum(p, out=["a"]), lambda p: jnp.einsum("ab->a", p)),
    "precision": ("x y", lambda x, y: wf.einsum(x, y, out=["a", "c"], precision="highest"), lambda x, y: x @ y),
}  # fmt: skip


def test_dtypes():
    x, y = TENSORS["ab"], TENSORS["bc"]
    half = {"h": x.astype(jnp.bfloat16), "k": y.astype(jnp.bfloat16), "y": y}
    check(TYPES, "x=2 y=2", "b:x a:y", half, rtol=0.03, atol=0.03)
    others = {"i": integers(0, "a=4 b=3", -4, 5), "j": integers(1, "b=3 c=5", -4, 5), "x": x, "y": y}
    others |= {"p": booleans(2, "a=4 b=3"), "q": booleans(3, "b=3 c=5")}
    check(WHOLE, "x=2 y=2", "b:x c:y", others)


def test_integers_are_cast_before_they_are_multiplied_by_floats():
    """jnp rejects the product of two integers that is narrower than they are; which two it multiplies depends on sizes."""
    count, x = wf.tensor(np.int32(3), ""), wf.tensor(np.array([1.5, 2.0], np.float16), "b=2")
    for layout in ("", "b:x"):
        product = wf.spmd(lambda n, x: wf.einsum(n, n, x, out=["b"]), "x=2", layout)(count, x)
        assert product.dtype == np.float16 and product.numpy().tolist() == [13.5, 18.0]


def test_collectives():
    x, y = TENSORS["ab"], TENSORS["bc"]
    product = lambda x, y: wf.einsum(x, y, out=["a", "c"])
    kinds = lambda fn, layout: [
        (c.kind, c.axes, c.bytes) for c in wf.spmd(fn, "x=2 y=2", layout).collectives(x, y)
    ]
    assert kinds(product, "a:x c:y") == []
    assert kinds(product, "b:x") == [("all-reduce", ("x",), 4 * 5 * 4)]
    assert kinds(lambda x, y: product(x, y) * 2.0 + product(x, 3.0 * y), "b:x a:y") == [
        ("all-reduce", ("x",), 2 * 5 * 4)
    ]
    # A sum that becomes split on the axis it is pending over is scattered.
    scattered = kinds(lambda x, y: product(x, y).rename(a="rows"), "b:x rows:x")
    assert scattered == [("reduce-scatter", ("x",), 4 * 5 * 4)]


def test_infinities_of_one_operand_reach_only_their_own_results():
    values = TENSORS["ab"].numpy().copy()
    values[1, 2] = np.inf
    x, y = wf.tensor(values, "a=4 b=3"), TENSORS["bc"]
    got = wf.spmd(lambda x, y: wf.einsum(x, y, out=["a", "c"]), "x=8", "c:x")(x, y)
    want = jnp.einsum("ab,bc->ac", x.array, y.array)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5)


@pytest.mark.parametrize("layout", ["a:x", "a:x c:y", "c:x+y"])
def test_infinities_do_not_spread_from_padding(layout):
    """Padding times infinity is NaN, which a later sum over the uneven dim would meet."""
    x, u = real(0, "a=5 b=3"), real(1, "a=5 e=2")
    w = real(2, "b=3 c=7")
    w = wf.tensor(np.where(np.arange(7) == 2, np.inf, w.numpy()), w.dims)

    def f(x, w, u):
        return wf.sum(wf.einsum(wf.einsum(wf.square(x), w, out=["a", "c"]), u, out=["c", "e"]), "e")

    step = wf.value_and_grad(lambda u, x, w: wf.sum(f(x, w, u)["c", 3:]))
    got, want = (wf.spmd(f, m, ly)(x, w, u).numpy() for m, ly in (("x=2 y=2", layout), ("", "")))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert np.isinf(want).any() or np.isnan(want).any()
    grads = [wf.spmd(step, m, ly)(u, x, w)[1].numpy() for m, ly in (("x=2 y=2", layout), ("", ""))]
    np.testing.assert_allclose(*grads, rtol=1e-5)


@pytest.mark.parametrize("fn", [lambda s: s / 0.0, lambda s: s * np.inf, lambda s: s * -np.inf])
def test_a_pending_sum_and_a_number_that_is_not_finite(fn):
    """Its parts have other signs than the sum: infinities of both signs would add up to NaN."""
    x = wf.tensor(np.array([[5.0, -2.0], [1.0, 1.0], [2.0, -3.0]], np.float32), "a=3 b=2")
    program = lambda x: fn(wf.sum(x, "b"))
    got = wf.spmd(program, "x=2 y=2", "b:x a:y")(x)
    np.testing.assert_array_equal(got.numpy(), program(x).numpy())


def test_the_dims_of_a_result_however_given():
    x, y = TENSORS["ab"], TENSORS["bc"]
    want = wf.einsum(x, y, out=["a", "c"]).numpy()
    for out in (lambda: (d for d in ("a", "c")), lambda: {"a": 0, "c": 1}.keys()):
        staged = wf.spmd(lambda x, y, out=out: wf.einsum(x, y, out=out()))
        np.testing.assert_array_equal(staged(x, y).numpy(), want)
    one = wf.spmd(lambda x: wf.einsum(x, out=x.dims[0]))(x)
    np.testing.assert_allclose(one.numpy(), x.numpy().sum(1), rtol=1e-6)
    same = wf.spmd(lambda x: wf.einsum(x, out=None, reduce="b"))(x)
    np.testing.assert_allclose(same.numpy(), x.numpy().sum(1), rtol=1e-6)


def test_more_dims_than_letters():
    many = [wf.full(f"d{n}=1", 1.0 + n % 2) for n in range(60)]
    assert wf.einsum(*many, out=["d59"]).item() == 2.0**30


def test_errors():
    x, y = TENSORS["ab"], TENSORS["bc"]
    with pytest.raises(TensorTypeError, match="no tensors"):
        wf.einsum(out=[])
    with pytest.raises(DimError, match="no out="):
        wf.einsum(x, y)
    with pytest.raises(DimError, match="both out= and reduce="):
        wf.einsum(x, y, out=["a"], reduce=["b"])
    with pytest.raises(DimError, match="no dim z"):
        wf.einsum(x, y, out=["a", "z"])
    with pytest.raises(DimError, match="two sizes"):
        wf.einsum(x, real(0, "b=7 c=5"), out=["a", "c"])
    with pytest.raises(LayoutError, match="both on axis x"):
        wf.spmd(lambda x, y: wf.einsum(x, y, out=["a"]), "x=2", "a:x c:x")(x, y)


def test_rows_are_one_dim_and_made_once():
    """The products of a backward pass sum over one dim of rows; q and k keep the same rows of h."""
    h, q, k = wf.ones("b=2 l=3 d=4"), wf.ones("d=4 heads=2 e=5"), wf.ones("d=4 heads=2 e=5")

    def loss(weights):
        return sum(wf.sum(wf.sin(wf.einsum(h, w, out=["b", "heads", "l", "e"]))) for w in weights)

    jaxpr = str(wf.spmd(wf.grad(loss), None, None).jaxpr((q, k)))
    assert jaxpr.count("f32[6,4] = reshape") == 1
    assert jaxpr.count("dimension_numbers=(([0], [0]), ([], []))") == 2
