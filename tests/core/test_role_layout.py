"""`wf.under_layout` and `wf.store`: they move work and tensors, and never change results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mistakes import Mistakes

import weft as wf
from weft.core.layout import Layout
from weft.core.role_layout import RoleLayout, program_layout

batch, d, h = wf.dims("batch=7 d=5 h=6")  # uneven on every mesh below
# Numbers that are exact in float32, so that results are equal to the last bit.
X = wf.tensor(np.arange(35, dtype=np.float32).reshape(7, 5) - 17, [batch, d])
Y = wf.tensor(np.arange(42, dtype=np.float32).reshape(7, 6) % 5 - 2, [batch, h])
STATE = wf.tensor(np.arange(30, dtype=np.float32).reshape(5, 6), [d, h])
PLACEMENTS = {
    "zero-1": ("data=4", Layout("batch:data", optimizer="d:data")),
    "zero-3": ("data=4", Layout("batch:data", params="h:data")),
    "another dim": ("data=2 model=4", Layout("batch:data h:model", params="d:data", optimizer="d:data")),
    "two axes": ("pod=2 data=4", Layout("batch:pod", optimizer="d:pod+data")),
    "moved": ("data=2 model=4", Layout("batch:data d:model", optimizer=[("d", "data"), ("h", "model")])),
    "one rule": ("data=8", Layout("batch:data")),
}


def update(state, x, y):
    """An update with a loop, a derivative and a mean inside; results that are stored, and one that is not."""
    grad = wf.einsum(x, y, out=[d, h])
    with wf.under_layout("optimizer", "w"):
        old, new = wf.store(state, "optimizer"), wf.store(grad, "optimizer")
        halved, _ = wf.scan(lambda c, _: (c / 2 + new, None), old, wf.arange(wf.Dim("n", 3)), "n")
        slope = wf.grad(lambda t: wf.sum(t * t * 0.5))(halved)
        total = wf.sum(slope, d)
        stored = wf.store(slope, "optimizer"), wf.store(slope, "param")
    doubled = jax.tree.map(lambda t: t * 2, [halved], is_leaf=wf.is_tensor)
    return *stored, total, halved, doubled, wf.store(halved + 1, "value")


EXPECTED = wf.spmd(update)(STATE, X, Y)


@pytest.mark.parametrize(("mesh", "layout"), PLACEMENTS.values(), ids=PLACEMENTS)
def test_results_are_the_same(mesh, layout):
    given = wf.store(wf.place(STATE, mesh, layout), "optimizer")
    found = wf.spmd(update, mesh, layout)(given, X, Y)
    same = lambda a, b: np.testing.assert_array_equal(a.numpy(*b.dims), b.numpy())
    jax.tree.map(same, found, EXPECTED, is_leaf=wf.is_tensor)
    for t, role in zip(found[:2], ("optimizer", "param"), strict=True):
        assert t.role == role
        assert t.placement is given.placement


def collectives(layout, fn, *args):
    program = wf.spmd(fn, "data=4", layout)
    return [(one.kind, one.phase, str(one.op)) for one in program.collectives(*args)]


def test_a_pending_sum_is_scattered():
    args = wf.spec([d, h]), wf.spec([batch, d]), wf.spec([batch, h])

    def step(state, x, y):
        grad = wf.einsum(x, y, out=[d, h])
        with wf.under_layout("optimizer", "w"):
            return wf.store(state + wf.store(grad, "optimizer"), "param")

    zero = Layout("batch:data", optimizer="d:data")
    (scatter, *_), (gather, phase, label) = collectives(zero, step, *args)
    assert (scatter, gather, phase, label) == ("reduce-scatter", "all-gather", "update", "optimizer[w]")
    ((kind, *_),) = collectives(Layout("batch:data"), step, *args)
    assert kind == "all-reduce"


def test_work_keeps_its_labels_without_a_name():
    def step(x):
        total = wf.sum(x, batch)
        with wf.under_layout("optimizer"):
            return wf.exp(total)

    layout = Layout("batch:data", optimizer="d:data")
    (*_, first), *_ = collectives(layout, step, wf.spec([batch, d]))
    assert first == "sum[batch,d]"


def test_outside_programs_store_reshards():
    x = wf.place(STATE, *PLACEMENTS["zero-1"])
    stored = wf.store(x, "optimizer")
    assert repr(stored).startswith("f32[d=5/data·4, h=6]") and stored.role == "optimizer"
    np.testing.assert_array_equal(stored.numpy(), STATE.numpy())
    assert wf.store(STATE, "param").role == "param"


def test_blocks_nest():
    def step(x):
        with wf.under_layout("optimizer"), wf.under_layout("param"):
            inner = x + 1
            return inner, inner.splits == (("data",), ())

    value, is_split = wf.spmd(step, "data=4", Layout("", params="d:data", optimizer="h:data"))(STATE)
    assert is_split
    np.testing.assert_array_equal(value.numpy(), STATE.numpy() + 1)


def test_the_layout_of_a_role():
    base = Layout("batch:data", params="d:data", optimizer="h:data")
    inner = RoleLayout(base, "optimizer")
    assert inner.rules_for("value") == {"batch": ("data",), "h": ("data",)}
    assert [inner.rules_for(role) for role in ("param", "optimizer")] == [
        base.rules_for(role) for role in ("param", "optimizer")
    ]
    assert program_layout(inner) is base and program_layout(base) is base


MISTAKES = Mistakes(
    under_layout_outside_a_program=lambda: wf.under_layout("optimizer"),  # wrong
    store_with_a_misspelt_role=lambda: wf.store(STATE, "optimiser"),  # wrong
    under_a_misspelt_layout=lambda: wf.spmd(lambda x: wf.under_layout("values"))(STATE),  # wrong
    under_a_layout_with_a_number_as_name=lambda: wf.under_layout("optimizer", 3),  # wrong
    under_a_layout_with_a_bracket_in_the_name=lambda: wf.under_layout("optimizer", "a]b@c"),  # wrong
    store_of_a_number=lambda: wf.store(3, "param"),  # wrong
    store_of_an_array=lambda: wf.spmd(lambda x: wf.store(jnp.ones(3), "param"))(STATE),  # wrong
)


@pytest.mark.parametrize("name", MISTAKES)
def test_messages(name, mistake):
    mistake(name, MISTAKES[name], "messages/role_layout")
