"""Identity matrices, evenly spaced numbers and triangles against jax.numpy; constants are in test_elementwise.py."""

import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same, booleans, check, integers, real

import weft as wf
from weft.core.errors import DimError, TensorTypeError

# a=6 is even over 2 and leaves a device with nothing but padding over 4, as b=3 does; s=9 is uneven over all.
PLACES = [
    ("", ""),
    ("x=4", "a:x"),
    ("x=2 y=4", "a:x b:y"),
    ("x=8", "s:x"),
    ("x=2 y=2 z=2", "s:y+x b:z"),
]
places = pytest.mark.parametrize("mesh, layout", PLACES, ids=[f"{m}|{lay}" for m, lay in PLACES])
A, B, S = wf.dims("a=6 b=3 s=9")
TENSORS = {
    "x": real(0, "a=6 b=3"),
    "z": real(1, "b=3 c=2 a=6"),
    "h": real(2, "a=6 b=3").astype(jnp.bfloat16),
    "i": integers(3, "a=6 b=3", -4, 5),
    "t": booleans(4, "a=6 b=3"),
    "u": real(5, "b=3"),
    "r": real(6, ""),
}


def triangles(x, rows, columns):
    return [f(x, rows, columns, k) for f in (wf.tril, wf.triu) for k in (0, 1, -2, 9)]


def triangles_of(x):
    return [f(x, k) for f in (jnp.tril, jnp.triu) for k in (0, 1, -2, 9)]


ROWS = {
    "eye": (
        "",
        lambda: [wf.eye(A, B), wf.eye(B, A, jnp.int32), wf.eye(S, A, bool), wf.eye(A, B, k=-2), wf.eye(B, A, int, 1)],
        lambda: [jnp.eye(6, 3), jnp.eye(3, 6, dtype=jnp.int32), jnp.eye(9, 6, dtype=bool), jnp.eye(6, 3, k=-2), jnp.eye(3, 6, 1, int)],
    ),
    "triangles": ("x", lambda x: triangles(x, "a", "b"), triangles_of),
    "triangles of columns": (
        "x",
        lambda x: triangles(x, "b", "a"),
        lambda x: [t.T for t in triangles_of(x.T)],
    ),
    "triangles in a batch": (
        "z",
        lambda z: triangles(z, A, "b"),
        lambda z: [t.transpose(2, 0, 1) for t in triangles_of(z.transpose(1, 2, 0))],
    ),
    "triangles of 16 bits": ("h", lambda h: triangles(h, "a", "b"), triangles_of),
    "triangles of integers": ("i", lambda i: triangles(i, "a", "b"), triangles_of),
    "triangles of booleans": ("t", lambda t: triangles(t, "a", "b"), triangles_of),
    "linspace of tensors": (
        "u r",
        lambda u, r: [
            wf.linspace(u, r, S), wf.linspace(0, u, S, endpoint=False), wf.linspace(r, 2.5, S),
            wf.linspace(u, r, wf.Dim("one", 1)),
        ],
        lambda u, r: [
            jnp.linspace(u, r, 9), jnp.linspace(0, u, 9, endpoint=False), jnp.linspace(r, 2.5, 9),
            jnp.linspace(u, r, 1),
        ],
    ),
    "linspace of integers": (
        "i",
        lambda i: [wf.linspace(i, 40, S), wf.linspace(i, 8 + i, S, dtype=jnp.int32)],
        lambda i: [jnp.linspace(i, 40, 9), jnp.linspace(i, 8 + i, 9, dtype=jnp.int32)],
    ),
}  # fmt: skip


@places
def test_values_and_gradients(mesh, layout):
    check(ROWS, mesh, layout, TENSORS)


@pytest.mark.parametrize("mesh, layout", [("", ""), ("x=8", "s:x"), ("x=2 y=2", "s:y+x"), ("x=3", "s:x")])
def test_numbers_are_spaced_by_numpy_bit_for_bit(mesh, layout):
    """XLA rounds the elements of jax.numpy.linspace differently from program to program."""
    bounds = [(0, 1), (-1.3, 2.7), (5, -3.2), (1e-3, 1e3), (1 + 2j, 3 - 1j)]

    def each():
        spaced = [wf.linspace(*pair, S, endpoint=e) for pair in bounds for e in (True, False)]
        return [*spaced, wf.linspace(0, 7.9, S, dtype=jnp.int32), wf.linspace(2, 3, wf.Dim("one", 1))]

    spaced = [np.linspace(*pair, 9, endpoint=e) for pair in bounds for e in (True, False)]
    narrow = [x.astype(np.complex64 if x.dtype.kind == "c" else np.float32) for x in spaced]
    want = [*narrow, np.linspace(0, 7.9, 9, dtype=np.int32), np.float32([2])]
    for results in (each(), wf.spmd(each, mesh, layout)()):
        for have, wanted in zip(results, want, strict=True):
            assert_same(have, wanted, rtol=0, atol=0)
    np.testing.assert_allclose(each()[2].numpy(), jnp.linspace(-1.3, 2.7, 9), rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("mesh, layout", [("", ""), ("x=8", "s:x"), ("x=2 y=2 z=2", "s:y+x b:z")])
def test_linspace_in_16_bits(mesh, layout):
    u = TENSORS["u"].astype(jnp.bfloat16)
    rows = {"it": ("u", lambda u: [wf.linspace(u, 2, S)], lambda u: [jnp.linspace(u, 2, 9)])}
    check(rows, mesh, layout, {"u": u}, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint8", "bool", "complex64"])
def test_the_type_is_that_of_jax(dtype):
    bound = wf.tensor(jnp.ones((), dtype), "")
    spaced, wanted = wf.linspace(bound, 3, S), jnp.linspace(bound.array, 3, 9)
    assert (spaced.dtype, spaced.weak_type) == (wanted.dtype, wanted.weak_type)
    lower = wf.tril(wf.full([A, B], bound), A, B)
    assert lower.dtype == dtype and not lower.weak_type


def test_nothing_is_sent():
    def each(x):
        return [wf.eye(A, B), wf.linspace(0, 1, S), wf.linspace(x, 1, S), wf.tril(x, "a", "b")]

    assert wf.spmd(each, "x=2 y=2 z=2", "a:x b:y s:z").collectives(TENSORS["x"]) == []


def test_a_diagonal_outside_of_all_matrices():
    x = TENSORS["x"]
    for k in (10**12, -(10**12)):
        for triangle, keeps in ((wf.tril, k > 0), (wf.triu, k < 0)):
            assert_same(triangle(x, "a", "b", k), x.array * keeps, rtol=0, atol=0)


def test_errors():
    x = TENSORS["x"]
    with pytest.raises(DimError, match="a occurs twice"):
        wf.eye(A, A)
    with pytest.raises(DimError, match="a occurs twice"):
        wf.tril(x, "a", "a")
    with pytest.raises(TensorTypeError, match=r"k is 0.5"):
        wf.triu(x, "a", "b", 0.5)
    with pytest.raises(DimError, match="a occurs twice"):
        wf.linspace(x, 1.0, A)
