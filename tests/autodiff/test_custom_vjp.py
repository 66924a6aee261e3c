"""custom_vjp inside programs, vmap and eager ops, also with rules that capture tensors."""

import numpy as np
import pytest
from compare import assert_same_on_mesh, cosines

import weft as wf


def test_custom_vjp_inside_a_program():
    """JAX flattened a tensor that held a placeholder, which then had no layout to report."""
    rule = wf.custom_vjp(lambda x, y: x * wf.tanh(y))
    rule.defvjp(
        lambda x, y: (x * wf.tanh(y), (x, y)), lambda residuals, g: (g * residuals[1], g * residuals[0])
    )
    for mesh, layout in ((wf.Mesh(), ""), ("x=2", "a:x")):
        grad = wf.spmd(wf.grad(lambda x: wf.sum(rule(x, x))), mesh, layout)(wf.ones("a=3"))
        np.testing.assert_allclose(grad.numpy(), 2.0)


def test_custom_vjp_inside_a_split_vmap():
    """JAX called the rule after the vmap had ended, and its cotangent varied over the axes of the vmap."""

    def program(x, rows):
        rule = wf.custom_vjp(lambda x: wf.tanh(x))
        rule.defvjp(lambda x: (wf.tanh(x), x), lambda x, g: (g * x,))
        mapped = wf.vmap(lambda row, x: rule(x) * row, "row")
        return wf.grad(lambda x: wf.sum(mapped(rows, x)))(x)

    assert_same_on_mesh(program, "x=2", "row:x", cosines("a=3"), cosines("row=3"))


def test_custom_vjp_inside_an_eager_op():
    """JAX called the forward and backward functions after the enclosing eager op had ended."""
    rule = wf.custom_vjp(lambda x: wf.tanh(x))
    rule.defvjp(lambda x: (wf.tanh(x), x), lambda x, g: (g * x,))
    x = wf.place(cosines("a=5"), "x=2", "a:x")
    for fn in (lambda x: wf.cond(wf.sum(x) > -9.0, rule, wf.square, x), wf.vmap(rule, "a")):
        grad = wf.grad(lambda x: wf.sum(fn(x)))(x)
        np.testing.assert_allclose(grad.numpy(), x.numpy(), rtol=1e-6)


RULES = {
    "backward": (lambda x, g: wf.tanh(x), lambda x, g: x, lambda x, c, g: c * x * g),
    "forward": (lambda x, g: wf.tanh(x), lambda x, g: x * g, lambda residuals, c, g: c * residuals),
    "all": (lambda x, g: wf.tanh(x) * g, lambda x, g: x, lambda x, c, g: c * x * g * (g / g)),
}


@pytest.mark.parametrize("place", [wf.place, lambda t, *_: t], ids=["placed", "not placed"])
@pytest.mark.parametrize("name", RULES)
def test_custom_vjp_whose_rules_capture_inside_an_eager_op(name, place):
    """JAX called the rules after the op had ended: captured tensors were zeros, or tracers of that op."""
    value, residuals, back = RULES[name]
    x, g = cosines("a=5"), cosines("a=5") + 2.0
    for captured in (g, wf.place(g, "x=2", "a:x")):
        rule = wf.custom_vjp(lambda x, g=captured: value(x, g))
        rule.defvjp(
            lambda x, g=captured: (value(x, g), residuals(x, g)), lambda k, c, g=captured: (back(k, c, g),)
        )
        fn = lambda x, rule=rule: wf.sum(wf.cond(wf.sum(x) > -99.0, rule, wf.square, x))
        grad = wf.grad(fn)(place(x, "x=2", "a:x"))
        np.testing.assert_allclose(grad.numpy(), (x * g).numpy(), rtol=1e-5)
