"""Op labels: written once, read once, and carried from the op through differentiation to the plan."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import weft as wf
from weft import nn
from weft.core.labels import GRADIENT, OPTAX_LABEL, OpLabel, Scope, parse_label

PACKAGE = Path(wf.__file__).parent

names = st.from_regex(r"[A-Za-z][A-Za-z0-9_.']{0,8}", fullmatch=True)
dims = st.lists(names, min_size=1, max_size=3).map(tuple)
labels = st.builds(
    OpLabel,
    st.from_regex(r"[a-z_0-9]{1,8}", fullmatch=True),
    st.lists(dims, max_size=3),
    st.none() | dims,
    st.just("") | st.lists(names, min_size=1, max_size=3).map(".".join),
)


@pytest.mark.nodevice
@given(labels)
def test_a_label_is_decoded_as_it_was_encoded(label):
    decoded = parse_label(label.scope)
    assert decoded == label
    for field in ("name", "operands", "out", "layer"):
        assert getattr(decoded, field) == getattr(label, field)


@pytest.mark.nodevice
@pytest.mark.parametrize("text", ["", "relu", "jvp()", "a user's scope", "while/body", "Scope[x"])
def test_other_names_are_not_labels(text):
    assert parse_label(text) is None


@pytest.mark.nodevice
def test_a_users_scope_is_not_taken_for_an_op():
    """Work under `jax.named_scope("scan")` was once counted as that of a scan."""

    def f(x):
        with jax.named_scope("scan"), jax.named_scope("optimizer"):
            return jnp.exp(x)

    (eqn,) = jax.make_jaxpr(f)(1.0).eqns
    scope = Scope().extend(eqn.source_info.name_stack)
    assert scope.ops == () and scope.other == "optimizer" and scope.op.name == ""
    assert scope.phase() == "forward"


@pytest.mark.nodevice
def test_phases_are_fields_of_the_scope():
    inside = Scope((OpLabel(GRADIENT, [("a",)]),))
    assert inside.phase() == "backward"
    assert Scope((OPTAX_LABEL,)).phase() == "update"
    assert Scope(transforms=frozenset(["jvp"])).phase(seen_backward=True) == "forward"
    assert Scope(transforms=frozenset(["jvp", "transpose"])).phase() == "backward"
    assert Scope().phase(seen_backward=True) == "update"


class Gate(nn.Module):
    up: nn.Linear
    down: list[nn.Linear]

    def __init__(self, d, h):
        self.up, self.down = nn.Linear([d], [h]), [nn.Linear([h], [d]), nn.Linear([d], [h])]

    def __call__(self, x):
        return self.down[0](wf.tanh(self.up(x)))


class Model(nn.Module):
    gate: Gate
    first: nn.Linear
    second: nn.Linear

    def __init__(self, d):
        self.gate = Gate(d, wf.Dim("h", 6))
        self.first, self.second = nn.Linear([d], [d.rename("e")]), nn.Linear([d.rename("e")], [d])

    def loss(self, x):
        return wf.sum(wf.square(self.gate(self.second(self.first(x)))))


def test_events_and_buffers_carry_their_layers():
    """By the names of the parameters, in the forward and in the backward pass; a cast module keeps its name if it is
    the only one of its class."""
    d, batch = wf.dims("d=4 batch=8")
    model = Model(d)
    program = wf.spmd(wf.value_and_grad(lambda m, x: m.loss(x)), "x=4 y=2", "batch:x h:y")
    plan = program.plan(nn.specs(model), wf.spec([batch, d]))
    matmuls = {(w.layer, w.phase) for w in plan.work if w.kind == "matmul"}
    layers = {"first", "second", "gate.up", "gate.down.0"}
    assert matmuls == {(layer, phase) for layer in layers for phase in ("forward", "backward")}
    # The sum over h is left pending by gate.down.0 and resolved outside of it.
    assert "gate.down.0" in {c.layer for c in plan.collectives if c.kind == "all-reduce"}
    assert {b.layer for b in plan.memory.largest} & layers
    assert {e["layer"] for e in plan.to_data()["events"]} >= layers


def test_scanned_modules_and_gradients_carry_their_layers():
    """Two stacks of one class, and the gradients of all parameters, have the names of the parameters."""
    batch, d, layers = wf.dims("batch=8 d=4 layers=3")

    class Stacks(nn.Module):
        one: nn.Linear
        first: nn.Linear
        second: nn.Linear

        def __init__(self):
            self.one = nn.Linear([d], [d.rename("e")])
            self.first, self.second = (
                nn.stack(nn.Linear([d.rename("e")], [d.rename("f")]), layers) for _ in range(2)
            )

        def loss(self, x):
            for stack in (self.first, self.second):
                x, _ = wf.scan(lambda x, m: (m(x).rename(f="e"), None), x, stack, layers)
            return wf.sum(wf.square(x))

        def __call__(self, x):
            return self.loss(self.one(x))

    program = wf.spmd(wf.grad(lambda m, x: m(x)), "x=4", "batch:x")
    plan = program.plan(nn.specs(Stacks()), wf.spec([batch, d]))
    names = {"one", "first", "second"}
    assert {w.layer for w in plan.work if w.kind == "matmul"} == names
    assert {c.layer for c in plan.collectives if c.op.name == "gradient"} == names
    replicated = wf.spmd(wf.grad(lambda m, x: m(x)), "x=4", "").plan(nn.specs(Stacks()), wf.spec([batch, d]))
    assert all(f"gradient[{dims}] in" in plan.diff(replicated) for dims in ("d,e", "layers,e,f"))


def test_equal_ops_of_two_layers_are_two_labels():
    """Also inside a loop, where JAX stores only the innermost part of the name stack."""
    batch, d = wf.dims("batch=8 d=4")

    class Loop(nn.Module):
        weight: wf.Tensor

        def __init__(self):
            self.weight = nn.declare([d], nn.ones)

        def __call__(self, x):
            def body(_, array):
                with jax.named_scope("mine"):
                    return array @ jnp.ones((4, 4))

            loop = lambda array: jax.lax.fori_loop(0, 3, body, array)
            return wf.local(loop, x * self.weight, out=x.dims, splittable=["batch"])

    class Two(nn.Module):
        one: Loop
        two: Loop

        def __call__(self, x):
            return self.two(self.one(x))

    program = wf.spmd(lambda m, x: m(x), "x=2", "batch:x")
    plan = program.plan(nn.specs(Two(Loop(), Loop())), wf.spec([batch, d]))
    assert [w.layer for w in plan.work if w.kind == "matmul"] == ["one", "two"]
    assert parse_label("local[batch] in one") != parse_label("local[batch] in two")
    # XLA drops what follows "@" in a name.
    compiled = program.lower(nn.specs(Two(Loop(), Loop())), wf.spec([batch, d])).compile().as_text()
    assert "] in one/" in compiled and "] in two/" in compiled


def test_a_backward_rule_belongs_to_the_layer_that_called_the_function():
    @wf.custom_vjp
    def double(x):
        return 2.0 * x

    double.defvjp(lambda x: (2.0 * x, None), lambda _, g: (wf.einsum(g, g, g, out=list(g.dims)),))

    class Doubling(nn.Module):
        def __call__(self, x):
            return double(x)

    class Outer(nn.Module):
        inner: Doubling

        def __call__(self, x):
            return wf.sum(self.inner(x))

    outer = Outer(Doubling())
    plan = wf.spmd(wf.grad(outer), "x=2", "a:x").plan(wf.spec("a=8"))
    assert {w.layer for w in plan.work if w.op.name in ("einsum", "multiply")} == {"inner"}


@pytest.mark.nodevice
def test_labels_are_read_by_their_fields():
    """No code takes the text of a label apart: a renamed op or a user's function can't change a plan."""
    probes = []
    for path in [*(PACKAGE / "plan").glob("*.py"), *(PACKAGE / "autolayout").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [alias.name for alias in node.names] + [getattr(node, "module", None)]
                probes += [f"{path.name}: imports re"] * ("re" in modules)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
                text = node.attr in {m for m in dir(str) if not m.startswith("_")}
                probes += [f"{path.name}:{node.lineno}"] * (text and node.value.attr in ("op", "label"))
    assert not probes
