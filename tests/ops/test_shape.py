"""Renames, reshapes, transposes and stacks against jax.numpy; what moves is in test_relayout.py."""

import jax.numpy as jnp
import numpy as np
import pytest
from compare import booleans, check, integers, real

import weft as wf
from weft.core.errors import DimError, LayoutError, ShapeError

# a=4 is even over 2, b=3 and c=5 are not.
PLACES = [
    ("x=2 y=2 z=2", "a:x b:y c:z"),
    ("x=2 y=2", "ab:x c:y"),
    ("x=2 y=2", "c:x+y"),
    ("x=2 y=4", "a:x rows:y"),
    ("x=8", "abc:x"),
]
pytestmark = pytest.mark.filterwarnings("ignore::weft.core.errors.LayoutWarning")  # not all rows use all
ROWS = {
    "rename": ("x", lambda x: x.rename(a="rows"), lambda x: x),
    "rename two": ("x", lambda x: wf.rename(x, {"a": "c", "c": wf.Dim("a", 5)}), lambda x: x),
    "rename and use": ("x", lambda x: x.rename(a="rows") * wf.arange(wf.Dim("rows", 4)), lambda x: x * jnp.arange(4)[:, None, None]),
    "transpose": ("x", lambda x: wf.transpose(x, ["c", "a", "b"]), lambda x: x.transpose(2, 0, 1)),
    "broadcast_to": ("x", lambda x: wf.broadcast_to(x, [*wf.dims("s=2 c=5"), *x.dims[:2]]), lambda x: jnp.broadcast_to(x.transpose(2, 0, 1), (2, 5, 4, 3))),
    "broadcast a scalar": ("r", lambda r: wf.broadcast_to(r, "a=4 c=5"), lambda r: jnp.broadcast_to(r, (4, 5))),
    "broadcast_to by name": ("x", lambda x: wf.broadcast_to(x, "c s=2 a b"), lambda x: jnp.broadcast_to(x.transpose(2, 0, 1)[:, None], (5, 2, 4, 3))),
    "reshape by name": ("x", lambda x: wf.reshape(x, "a m=5 c=3"), lambda x: x.reshape(4, 5, 3)),
    "flatten": ("x", lambda x: x.flatten("c b", "rows"), lambda x: x.transpose(0, 2, 1).reshape(4, 15)),
    "unflatten": ("f", lambda f: f.unflatten("f", "s=2 rows=4 t=3"), lambda f: f.reshape(2, 4, 3, 3)),
    "reshape": ("x", lambda x: wf.reshape(x, "rows=12 c=5"), lambda x: x.reshape(12, 5)),
    "reshape to one": ("x", lambda x: wf.reshape(x, "abc=60"), lambda x: x.reshape(60)),
    "reshape across": ("x", lambda x: wf.reshape(x, "m=6 n=10"), lambda x: x.reshape(6, 10)),
    "reshape with ones": ("x", lambda x: wf.reshape(x, "one=1 a=4 o2=1 bc=15 o3=1"), lambda x: x.reshape(1, 4, 1, 15, 1)),
    "reshape ones away": ("o", lambda o: wf.reshape(o, "c=5"), lambda o: o.reshape(5)),
    "reshape a scalar": ("r", lambda r: wf.reshape(r, "one=1"), lambda r: r.reshape(1)),
    "split": ("x", lambda x: wf.split(x, "a", wf.dims("s=2 t=2")), lambda x: x.reshape(2, 2, 3, 5)),
    "split in three": ("f", lambda f: wf.split(f, "f", "s=2 rows=4 t=3"), lambda f: f.reshape(2, 4, 3, 3)),
    "merge": ("x", lambda x: wf.merge(x, ["a", "b"], "ab"), lambda x: x.reshape(12, 5)),
    "merge apart": ("x", lambda x: wf.merge(x, ["a", "c"], wf.Dim("ac", 20)), lambda x: x.transpose(0, 2, 1).reshape(20, 3)),
    "merge backwards": ("x", lambda x: wf.merge(x, ["c", "b"], "cb"), lambda x: x.transpose(0, 2, 1).reshape(4, 15)),
    "merge and split": ("x", lambda x: wf.split(wf.merge(x, ["b", "c"], "rows"), "rows", "c=5 b=3"), lambda x: x.reshape(4, 5, 3)),
    "stack": ("x y", lambda x, y: wf.stack([x, y, x * 2.0], "s"), lambda x, y: jnp.stack([x, y, x * 2])),
    "stack aligns": ("x y", lambda x, y: wf.stack([x, wf.transpose(y, ["c", "b", "a"])], wf.Dim("s", 2)), lambda x, y: jnp.stack([x, y])),
    "unstack a": ("x", lambda x: wf.unstack(x, "a"), list),
    "unstack c": ("x", lambda x: wf.unstack(x, "c"), lambda x: list(jnp.moveaxis(x, 2, 0))),
    "whole numbers": ("i", lambda i: wf.merge(wf.transpose(i, ["c", "a"]), ["c", "a"], "rows"), lambda i: i.T.reshape(20)),
    "truth": ("t", lambda t: wf.reshape(t, "ca=20"), lambda t: t.reshape(20)),
    "pending": ("x y", lambda x, y: wf.merge(wf.einsum(x, y, out=["a", "b"]), ["b", "a"], "rows"), lambda x, y: jnp.einsum("abc,abc->ba", x, y).reshape(12)),
}  # fmt: skip
TENSORS = {
    "x": real(0, "a=4 b=3 c=5"),
    "y": real(1, "a=4 b=3 c=5"),
    "f": real(2, "f=24 b=3"),
    "o": real(3, "one=1 c=5 o2=1"),
    "r": real(4, ""),
    "i": integers(5, "a=4 c=5", 0, 9),
    "t": booleans(6, "c=5 a=4"),
}


@pytest.mark.parametrize("mesh, layout", PLACES, ids=[f"{m}-{lay}" for m, lay in PLACES])
def test_shape(mesh, layout):
    check(ROWS, mesh, layout, TENSORS)


def test_what_a_relayout_costs():
    x = TENSORS["x"]

    def kinds(fn, mesh, layout):
        return [(c.kind, c.axes) for c in wf.spmd(fn, mesh, layout).collectives(x)]

    assert kinds(lambda x: x.rename(a="rows"), "x=2", "a:x") == [("all-gather", ("x",))]
    assert kinds(lambda x: x.rename(a="rows"), "x=2", "rows:x") == []
    assert kinds(lambda x: x.rename(a="rows"), "x=2", "a:x rows:x") == []
    assert kinds(lambda x: x.rename(a="rows", c="k"), "x=2", "a:x k:x") == [("all-to-all", ("x",))]
    assert kinds(lambda x: wf.sum(x, "a").rename(b="rows"), "x=2", "a:x rows:x") == [
        ("reduce-scatter", ("x",))
    ]
    # Held back until used: renamed there and back, nothing travels.
    assert kinds(lambda x: x.rename(a="rows").rename(rows="a") * 2.0, "x=2", "a:x") == []
    assert kinds(lambda x: wf.merge(x, ["a", "b"], "rows"), "x=2", "a:x rows:x") == []
    assert kinds(lambda x: wf.split(x, "a", "s=2 t=2"), "x=2", "a:x s:x") == []


def test_numpy_takes_the_dims_in_any_order():
    x = TENSORS["x"]
    np.testing.assert_array_equal(x.numpy("c", "a", "b"), x.numpy().transpose(2, 0, 1))
    placed = wf.place(x, "x=2 y=2", "c:x b:y")
    np.testing.assert_array_equal(placed.numpy("b", "c", "a"), x.numpy().transpose(1, 2, 0))


@pytest.mark.parametrize(
    "error, match, call",
    [
        (ShapeError, "60 elements", lambda x: wf.reshape(x, "m=7 n=8")),
        (ShapeError, "has 4 elements", lambda x: wf.split(x, "a", "s=2 t=3")),
        (ShapeError, "12 elements", lambda x: wf.merge(x, ["a", "b"], wf.Dim("ab", 13))),
        (DimError, "not all dims", lambda x: wf.transpose(x, ["a", "b"])),
        (DimError, "not in", lambda x: wf.broadcast_to(x, "a=4 b=3")),
        (DimError, "occurs twice", lambda x: x.rename(a="b")),
        (DimError, "no dim z", lambda x: wf.unstack(x, "z")),
        (ShapeError, "can't be stacked", lambda x: wf.stack([x, x], wf.Dim("s", 3))),
        (DimError, "different dims", lambda x: wf.stack([x, wf.sum(x, "a")], "s")),
    ],
    ids=["reshape", "split", "merge", "transpose", "broadcast", "rename", "unstack", "stack", "dims"],
)
def test_errors(error, match, call):
    with pytest.raises(error, match=match):
        call(TENSORS["x"])


def test_an_illegal_layout_of_the_result_is_an_error():
    with pytest.raises(LayoutError, match="both on axis x"):
        wf.spmd(lambda x: x.rename(a="rows"), "x=2", "rows:x c:x")(TENSORS["x"])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: wf.stack([wf.ones("a=2")] * 2, wf.Dim("a", 2)),
        lambda: wf.merge(wf.ones("a=2 b=3 c=6"), ["a", "b"], wf.Dim("c", 6)),
        lambda: wf.split(wf.ones("a=9 b=3"), "a", wf.dims("b=3 z=3")),
        lambda: wf.ones("a=4").rename(a=wf.Dim("z", 5)),
    ],
    ids=["stack", "merge", "split", "rename"],
)
def test_repeated_dims_and_renames_to_another_size_raise(wrong):
    with pytest.raises(wf.DimError):
        wrong()
