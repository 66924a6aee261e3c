"""Tensors where NumPy, JAX and Python expect arrays: the same meaning, or a message with the function to use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import cosines
from mistakes import MESH, Mistakes, ones, staged

import weft as wf
from weft.core.array_protocols import MISSING

MISTAKES = Mistakes()
ARRAY_ATTRIBUTES = [name for names, _, _ in MISSING for name in names.split()]


# -- attributes of arrays ---------------------------------------------------------------------------

MISTAKES |= {
    "attribute_shape": lambda: ones("batch=4 d=3").shape,  # wrong
    "attribute_T": lambda: ones("batch=4 d=3").T,  # wrong
    "attribute_at": lambda: ones("batch=4 d=3").at["batch", 0].set(1),  # wrong
    "attribute_dot": lambda: ones("batch=4 d=3").dot(ones("d=3")),  # wrong
    "attribute_ravel": lambda: ones("batch=4 d=3").ravel(),  # wrong
    "attribute_view": lambda: ones("batch=4 d=3").view(12),  # wrong
    "attribute_unsqueeze": lambda: ones("batch=4").unsqueeze(0),  # wrong
    "attribute_squeeze": lambda: ones("batch=1").squeeze(),  # wrong
    "attribute_tolist": lambda: ones("batch=4").tolist(),  # wrong
    "attribute_device": lambda: ones("batch=4").device,  # wrong
    "attribute_grad": lambda: ones("batch=4").grad,  # wrong
    "attribute_of_a_scalar": lambda: wf.sum(ones("batch=4")).squeeze(),  # wrong
}  # fmt: skip


@MISTAKES.add
def attribute_in_a_program():
    def program(x):
        return wf.reshape(x, x.shape)  # wrong

    staged(program, ones("batch=4 d=3"))


@pytest.mark.parametrize("name", ARRAY_ATTRIBUTES)
def test_attributes_of_arrays_are_absent(name):
    """JAX and NumPy probe attributes; completion in notebooks lists them."""
    for t in (ones("batch=4 d=3"), wf.sum(ones("batch=4")), wf.spec("batch=4")):
        assert not hasattr(t, name)
        assert getattr(t, name, None) is None
        assert name not in dir(t)
    assert not hasattr(wf.Tensor, name)


# -- NumPy ------------------------------------------------------------------------------------------

PLACES = [(None, None), ("data=2", "a:data"), ("data=4 model=2", "a:data b:model")]
UFUNCS = {
    "sin": lambda x, y: np.sin(x),
    "absolute": lambda x, y: np.abs(x),
    "two tensors": lambda x, y: np.maximum(x, y),
    "a number": lambda x, y: np.add(x, 2.0),
    "a scalar on the left": lambda x, y: np.float32(2) * x,
    "a 0-d array on the left": lambda x, y: np.array(2.0, np.float32) - x,
    "a comparison": lambda x, y: np.float32(0.5) < x,
    "a shift": lambda x, y: np.int32(1) << x.astype(np.int32),
    "a right shift": lambda x, y: x.astype(np.int32) >> 1,
}


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", UFUNCS)
def test_ufuncs_are_ops(name, place):
    """They keep dims and layout, inside programs too, and have the values of NumPy."""
    x, y = cosines("a=5 b=3"), cosines("a=5 b=3") * 0.7
    want = UFUNCS[name](x.numpy(), y.numpy())
    eager = UFUNCS[name](wf.place(x, *place), wf.place(y, *place))
    program = wf.spmd(UFUNCS[name], *place)(x, y)
    for got in (eager, program):
        assert got.dims == x.dims
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-6, atol=1e-6)
    assert eager.dtype == program.dtype


FUNCTIONS = {
    "sum": lambda x: np.sum(x, axis=0),
    "mean": np.mean,
    "transpose": np.transpose,
    "reshape": lambda x: np.reshape(x, (-1,)),
    "concatenate": lambda x: np.concatenate([x, x]),
    "allclose": lambda x: np.allclose(x, x),
    "shape": np.shape,
    "array": np.array,
}


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_functions_of_numpy_take_the_values(name, place):
    x = cosines("a=5 b=3")
    np.testing.assert_array_equal(FUNCTIONS[name](wf.place(x, *place)), FUNCTIONS[name](x.numpy()))


def test_jax_converts_a_tensor():
    x = wf.place(cosines("a=5 b=3"), "data=2", "a:data")
    np.testing.assert_array_equal(jnp.asarray(x), x.numpy())
    np.testing.assert_array_equal(jnp.array([x, x])[1], x.numpy())
    np.testing.assert_array_equal((jnp.float32(2) * x).numpy(), 2 * x.numpy())


def test_round():
    x = cosines("a=5")
    np.testing.assert_array_equal(round(x, 1).numpy(), np.round(x.numpy(), 1))


def test_divmod():
    x = cosines("a=5")
    for got, want in zip(
        (*divmod(x, 0.3), *divmod(2, x)), (*divmod(x.numpy(), 0.3), *divmod(2, x.numpy())), strict=True
    ):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)


MISTAKES |= {
    "ufunc_reduce": lambda: np.add.reduce(ones("batch=4")),  # wrong
    "ufunc_without_an_op": lambda: np.gcd(ones("batch=4", np.int32), 2),  # wrong
    "ufunc_with_an_array": lambda: np.multiply(np.ones(4), ones("batch=4")),  # wrong
    "matmul_with_an_array_on_the_left": lambda: np.ones((2, 4)) @ ones("batch=4"),  # wrong
    "matmul_with_a_jax_array_on_the_left": lambda: jnp.ones((2, 4)) @ ones("batch=4"),  # wrong
    "jax_array_on_the_left": lambda: jnp.ones(4) * ones("batch=4"),  # wrong
}  # fmt: skip


@MISTAKES.add
def tensor_added_to_an_array_in_place():
    array = np.ones(4)
    array += ones("batch=4")  # wrong


@MISTAKES.add
def numpy_function_in_a_program():
    def program(x):
        return np.sum(x)  # wrong

    staged(program, ones("batch=4"))


# -- JAX --------------------------------------------------------------------------------------------

MISTAKES |= {
    "jnp_sum": lambda: jnp.sum(ones("batch=4")),  # wrong
    "jnp_dot": lambda: jnp.dot(ones("batch=4"), ones("batch=4")),  # wrong
    "jnp_shape": lambda: jnp.shape(ones("batch=4")),  # wrong
    "jax_nn_relu": lambda: jax.nn.relu(ones("batch=4")),  # wrong
    "jax_grad": lambda: jax.grad(lambda x: wf.sum(x * x))(ones("batch=4")),  # wrong
    "jax_value_and_grad": lambda: jax.value_and_grad(lambda x: wf.sum(x * x))(ones("batch=4")),  # wrong
    "jax_grad_in_jit": lambda: jax.jit(jax.grad(lambda x: wf.sum(x * x)))(ones("batch=4")),  # wrong
    "jax_grad_of_a_program": lambda: jax.grad(wf.spmd(wf.sum, MESH, "batch:data"))(ones("batch=4")),  # wrong
}  # fmt: skip


@MISTAKES.add
def jnp_in_a_program():
    def program(x):
        return jnp.sum(x)  # wrong

    staged(program, ones("batch=4"))


@MISTAKES.add
def jax_grad_in_a_program():
    def program(x):
        return jax.grad(lambda x: wf.sum(x * x))(x)  # wrong

    staged(program, ones("batch=4"))


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_jax_grad_of_an_array_and_jit_work(place):
    """The hint of the error: JAX differentiates a function of tensors whose result is an array."""
    x = wf.place(cosines("a=5 b=3"), *place)

    def loss(x):
        return wf.sum(x * x)

    np.testing.assert_allclose(jax.grad(lambda x: loss(x).array)(x).numpy(), 2 * x.numpy(), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(loss)(x).numpy(), np.sum(x.numpy() ** 2), rtol=1e-5)


# -- Python -----------------------------------------------------------------------------------------

MISTAKES |= {
    "len_of_a_tensor": lambda: len(ones("batch=4")),  # wrong
    "loop_over_a_tensor": lambda: list(ones("batch=4")),  # wrong
    "value_in_a_tensor": lambda: 1.0 in ones("batch=4"),  # wrong
}  # fmt: skip


@MISTAKES.add
def assignment_to_an_element():
    x = ones("batch=4")
    x["batch", 0] = 2.0  # wrong


@pytest.mark.parametrize("name", MISTAKES)
def test_message(name, mistake):
    mistake(name, MISTAKES[name], "messages/arrays")
