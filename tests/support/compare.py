"""Comparing Weft with an oracle on plain arrays.

`check` takes a table of ops, runs all of them in one program, and compares each result and each gradient with those
of the oracle. `assert_same` is the one comparison of tensors, arrays and pytrees that tests use.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

import weft as wf

_EXPECTED = {}


def real(seed, dims, low=-1.5, high=1.5):
    """Random floats between two bounds; none is near 0."""
    dims = wf.dims(dims) if isinstance(dims, str) else dims
    shape = [d.size for d in dims]
    values = np.random.default_rng(seed).uniform(low, high, shape)
    values = np.where(np.abs(values) < 0.05, 0.07, values)
    return wf.tensor(values.astype(np.float32), dims)


def integers(seed, dims, low, high):
    """Random integers, `high` excluded."""
    dims = wf.dims(dims)
    shape = [d.size for d in dims]
    return wf.tensor(np.random.default_rng(seed).integers(low, high, shape).astype(np.int32), dims)


def booleans(seed, dims):
    """Random booleans."""
    return wf.tensor(integers(seed, dims, 0, 2).array == 1, dims)


def weights(shape):
    """Fixed weights that all differ."""
    return np.cos(1.0 + np.arange(int(np.prod(shape)))).reshape(shape).astype(np.float32)


def cosines(dims):
    """A tensor of fixed values that all differ."""
    return wf.tensor(weights([d.size for d in wf.dims(dims)]), dims)


def _is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def outputs(result):
    """The results of a row's function as a list."""
    return list(result) if isinstance(result, list | tuple) else [result]


def expected(rows, arrays):
    """The oracles' results, and their gradients with respect to each row's own copy of its inputs."""

    def loss(copies, rest):
        outs, total = {}, 0.0
        for name, (inputs, _, oracle) in rows.items():
            given = [copies[name].get(n, rest.get(n)) for n in inputs.split()]
            outs[name] = [jnp.asarray(a) for a in outputs(oracle(*given))]
            for a in outs[name]:
                if _is_float(a):
                    total += jnp.sum(a.astype(jnp.float32) * weights(a.shape))
        return total, outs

    key = (id(rows), *((n, a.shape, a.dtype) for n, a in arrays.items()))
    if key not in _EXPECTED:
        copies, rest = _copies(rows, arrays)
        run = jax.jit(jax.grad(loss, has_aux=True))
        _EXPECTED[key] = (
            rows,
            run(copies, rest),
        )  # keeps the rows alive, so that no other object gets their id
    return _EXPECTED[key][1]


def _copies(rows, given):
    copies = {
        name: {n: given[n] for n in inputs.split() if _is_float(given[n])}
        for name, (inputs, *_) in rows.items()
    }
    return copies, {n: a for n, a in given.items() if not _is_float(a)}


def computed(rows, mesh, layout, tensors):
    """The same results and gradients from one Weft program."""

    def program(copies, rest):
        def loss(copies):
            outs, total = {}, wf.zeros("")
            scale = functools.cache(lambda dims: wf.tensor(weights([d.size for d in dims]), dims))
            for name, (inputs, fn, _) in rows.items():
                given = [copies[name].get(n, rest.get(n)) for n in inputs.split()]
                outs[name] = outputs(fn(*given))
                for t in outs[name]:
                    if _is_float(t):
                        total = total + wf.sum(t.astype(jnp.float32) * scale(t.dims))
            return total, outs

        return wf.grad(loss, has_aux=True)(copies)

    return wf.spmd(program, mesh, layout)(*_copies(rows, tensors))


def check(rows, mesh, layout, tensors, rtol=1e-5, atol=2e-6):
    """Compare the results and gradients of all rows (name: inputs, function, oracle) with the oracles'."""
    grads, outs = computed(rows, mesh, layout, tensors)
    want_grads, want = expected(rows, {n: t.array for n, t in tensors.items()})
    for name in rows:
        assert len(outs[name]) == len(want[name]), name
        for got, expect in zip(outs[name], want[name], strict=True):
            assert_same(got, expect, name=name, rtol=rtol, atol=atol)
        for n, got in grads[name].items():
            assert_same(
                got, want_grads[name][n], name=f"the gradient of {name} for {n}", rtol=rtol, atol=atol
            )


def check_one(fn, oracle, mesh, layout, *tensors):
    """Compare one function of tensors with an oracle on arrays; both return lists."""
    names = "abcdefgh"[: len(tensors)]
    check(
        {"it": (" ".join(names), fn, oracle)}, mesh, layout, dict(zip(names, tensors, strict=True)), atol=1e-6
    )


def assert_same(actual, expected, *, rtol=1e-5, atol=2e-6, name=""):
    """Two tensors, arrays or pytrees of them have the same dtypes, shapes and values.

    Integers and booleans must be equal; so must floats if `rtol` and `atol` are 0. Two tensors must have the same
    dims in the same order, and the padding of every actual tensor must be zero. `name` starts the message of a failure.
    """
    actual_leaves, actual_tree = jax.tree_util.tree_flatten_with_path(actual, is_leaf=wf.is_tensor)
    expected_leaves, expected_tree = jax.tree.flatten(expected, is_leaf=wf.is_tensor)
    assert actual_tree == expected_tree, f"{name} has the structure {actual_tree} instead of {expected_tree}"
    for (path, leaf), expected_leaf in zip(actual_leaves, expected_leaves, strict=True):
        _assert_same_leaf(leaf, expected_leaf, rtol, atol, name + jax.tree_util.keystr(path))


def _assert_same_leaf(actual, expected, rtol, atol, name):
    if wf.is_tensor(actual) and wf.is_tensor(expected):
        assert actual.dims == expected.dims, f"{name} has the dims {actual.dims} instead of {expected.dims}"
    if wf.is_tensor(actual):
        assert_zero_padding(actual, name)
    actual, expected = (x.numpy() if wf.is_tensor(x) else np.asarray(x) for x in (actual, expected))
    assert actual.dtype == expected.dtype, f"{name} is {actual.dtype} instead of {expected.dtype}"
    assert actual.shape == expected.shape, f"{name} has the shape {actual.shape} instead of {expected.shape}"
    if jnp.issubdtype(expected.dtype, jnp.inexact) and (rtol or atol):
        # NumPy has no tolerances for bfloat16; its own floats, and complex numbers, stay as they are.
        wide = np.result_type(expected.dtype, np.float32)
        actual, expected = actual.astype(wide), expected.astype(wide)
        np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol, err_msg=name)
    else:
        np.testing.assert_array_equal(actual, expected, err_msg=name)


def assert_same_on_mesh(fn, mesh, layout, *args):
    """A program computes on a mesh what it computes on one device."""
    expected = wf.spmd(fn, wf.Mesh())(*args)
    assert_same(wf.spmd(fn, mesh, layout)(*args), expected, rtol=1e-5, atol=1e-6)


def assert_zero_padding(tensor, name=""):
    """The elements that a tensor stores beyond its true size are all zero."""
    storage = np.array(tensor.storage)
    storage[tuple(slice(d.size) for d in tensor.dims)] = 0
    assert not storage.any(), f"{name} has padding that is not zero"


def collectives(jaxpr):
    """(primitive, shape of the result) of every collective in a jaxpr, except those of scalars."""
    found = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name.startswith(("psum", "all_", "reduce_scatter", "ppermute", "pmax", "pmin")):
            shape = equation.outvars[0].aval.shape
            found += [(name, shape)] if shape else []
        for inner in jaxprs_in_params(equation.params):
            found += collectives(getattr(inner, "jaxpr", inner))
    return found
