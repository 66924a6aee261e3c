"""eval_shape against the results themselves, and tree_map."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_op import EVERY_OP
from op_examples import OPERANDS

import weft as wf
from weft.core.errors import DimError, ProgramError
from weft.core.types import weak_type

X = wf.tensor(np.arange(30.0, dtype=np.float32).reshape(5, 6), "batch=5 d=6")
MESH, LAYOUT = "data=4 model=2", "batch:data d:model"


def kind(leaf):
    """What a spec has of a tensor or an array."""
    if isinstance(leaf, wf.Tensor):
        return leaf.dims, leaf.dtype, leaf.weak_type, leaf.role
    is_array = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    return (leaf.shape, leaf.dtype, weak_type(leaf)) if is_array else leaf


def is_spec(leaf):
    return isinstance(leaf._data if isinstance(leaf, wf.Tensor) else leaf, jax.ShapeDtypeStruct)


FUNCTIONS = {
    "a tree": lambda x: {"sum": x.sum("d"), "more": (x, None, "text")},
    "an integer": lambda x: (x > 2).astype(int),
    "weak": lambda x: wf.where(x > 2, 0.0, -1.0),
    "narrow": lambda x: x.astype(jnp.bfloat16) * 2,
    "a role": wf.parameter,
    "raw arrays": lambda x: (x * 2, jnp.ones((3, 2), int), jax.random.key(0)),
    "gradients": wf.value_and_grad(lambda x: (x * x).mean()),
    "a scan": lambda x: wf.scan(lambda c, row: (c + row, row.sum()), wf.zeros("d=6"), x, "batch"),
    "a draw": lambda x: wf.random.normal(jax.random.key(0), x.dims),
    "a capture": lambda x: x + X,
    "a program": wf.spmd(lambda x: x.sum("d"), MESH, LAYOUT),
    "a call of a program": lambda x: 2 * wf.spmd(lambda x: x.sum("d"), MESH, LAYOUT)(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("given", ["tensor", "placed", "spec"])
def test_specs_are_those_of_the_results(name, given):
    x = {"tensor": X, "placed": wf.place(X, MESH, LAYOUT), "spec": wf.spec(X.dims)}[given]
    specs, results = wf.eval_shape(FUNCTIONS[name], x), FUNCTIONS[name](X)
    assert wf.tree_map(kind, specs) == wf.tree_map(kind, results)
    leaves = jax.tree.leaves(specs, is_leaf=wf.is_tensor)
    assert all(is_spec(leaf) for leaf in leaves if not isinstance(leaf, str))
    assert all(leaf.placement is None for leaf in leaves if wf.is_tensor(leaf))


@pytest.mark.parametrize("name", EVERY_OP)
def test_every_op(name):
    row = EVERY_OP[name]
    given = {key: OPERANDS[key] for key in row.operands}
    specs = wf.eval_shape(row.run_example, given)
    assert wf.tree_map(kind, specs) == wf.tree_map(kind, row.run_example(given))


def test_raw_arrays_and_numbers():
    specs = wf.eval_shape(lambda x, a, n: (x * n, a + 1), X, np.ones((3, 2)), 2.5)
    assert wf.tree_map(kind, specs) == wf.tree_map(kind, (X * 2.5, jnp.ones((3, 2))))
    assert wf.eval_shape(jax.random.split, jax.random.key(0)).shape == (2,)
    assert wf.eval_shape(lambda a: wf.tensor(a, "a=3"), jax.ShapeDtypeStruct((3,), np.int32)).dims == wf.dims(
        "a=3"
    )


def test_a_mesh_without_devices():
    big = wf.spmd(lambda x: x.sum("d"), "data=4096", "batch:data")
    assert wf.eval_shape(big, wf.spec("batch=8192 d=1048576")).dims == wf.dims("batch=8192")


def test_a_captured_tensor_on_a_mesh():
    placed = wf.place(X, MESH, LAYOUT)
    assert kind(wf.eval_shape(lambda x: x + placed, wf.spec(X.dims))) == kind(X)


def test_inside_a_program():
    program = wf.spmd(lambda x: x * wf.eval_shape(lambda y: y.sum("d"), x).size, MESH, LAYOUT)
    np.testing.assert_array_equal(program(X).numpy(), 5 * X.numpy())


def test_the_state_of_an_optimizer():
    params = {"w": wf.parameter(X)}
    opt = wf.optimizer(optax.adam(1e-3))
    specs, state = wf.eval_shape(opt.init, params), opt.init(params)
    assert wf.tree_map(kind, specs) == wf.tree_map(kind, state)
    assert wf.tree_map(kind, wf.eval_shape(opt.apply, params, specs, params)) == wf.tree_map(
        kind, opt.apply(params, state, params)
    )


def test_the_results_of_a_traced_program_are_placed():
    traced = wf.spmd(lambda x: x * 2, MESH, LAYOUT).trace(X)
    assert traced.out_info.placement is traced.placement and is_spec(traced.out_info)
    assert repr(traced.out_info) == "f32[batch=5/data·4, d=6/model·2]"


def test_errors_name_the_line():
    with pytest.raises(DimError, match=r"test_eval_shape.py"):
        wf.eval_shape(lambda x: x.sum("e"), X)
    with pytest.raises(ProgramError, match="has no values yet"):
        wf.eval_shape(lambda x: x.numpy(), X)


def test_tree_map_passes_tensors():
    tree = {"w": X, "b": (wf.ones("d=6"), 3.0), "none": None}
    doubled = wf.tree_map(lambda x, y: x + y, tree, tree)
    np.testing.assert_array_equal(doubled["w"].numpy(), 2 * X.numpy())
    assert doubled["b"][1] == 6.0 and doubled["none"] is None
    # The tensors of the second tree may have other dims.
    sums = wf.tree_map(lambda x: x.sum(), tree["w"])
    assert wf.tree_map(lambda x, s: x * s, {"w": X}, {"w": sums})["w"].dims == X.dims
    program = wf.spmd(lambda tree: wf.tree_map(wf.exp, tree), MESH, LAYOUT)
    np.testing.assert_allclose(program([X])[0].numpy(), np.exp(X.numpy()), rtol=1e-6)
