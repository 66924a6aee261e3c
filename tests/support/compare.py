"""Weft against an oracle on plain arrays: many ops in one program, each with its own gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

import weft as wf

_EXPECTED = {}


def real(seed, dims, low=-1.5, high=1.5):
    """Values between two bounds, no two alike, none near 0."""
    dims = wf.dims(dims) if isinstance(dims, str) else dims
    shape = [d.size for d in dims]
    values = np.random.default_rng(seed).uniform(low, high, shape)
    values = np.where(np.abs(values) < 0.05, 0.07, values)
    return wf.tensor(values.astype(np.float32), dims)


def whole(seed, dims, low, high):
    """Whole numbers."""
    dims = wf.dims(dims)
    shape = [d.size for d in dims]
    return wf.tensor(np.random.default_rng(seed).integers(low, high, shape).astype(np.int32), dims)


def truth(seed, dims):
    """Truth values."""
    return wf.tensor(whole(seed, dims, 0, 2).array == 1, dims)


def weights(shape):
    """Fixed weights, no two alike."""
    return np.cos(1.0 + np.arange(int(np.prod(shape)))).reshape(shape).astype(np.float32)


def _is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def outputs(result):
    """What a row returned, as a list."""
    return list(result) if isinstance(result, list | tuple) else [result]


def expected(rows, arrays):
    """Results, and gradients with respect to each row's own copy of its inputs, by the oracles."""

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
        _EXPECTED[key] = rows, run(copies, rest)  # holds the rows, so that their id stays theirs
    return _EXPECTED[key][1]


def _copies(rows, given):
    copies = {
        name: {n: given[n] for n in inputs.split() if _is_float(given[n])}
        for name, (inputs, *_) in rows.items()
    }
    return copies, {n: a for n, a in given.items() if not _is_float(a)}


def computed(rows, mesh, layout, tensors):
    """The same by Weft, in one program."""

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
    """All rows (name: inputs, function, oracle): results, gradients, dtypes, and padding at zero."""
    grads, outs = computed(rows, mesh, layout, tensors)
    want_grads, want = expected(rows, {n: t.array for n, t in tensors.items()})
    for name in rows:
        assert len(outs[name]) == len(want[name]), name
        for got, expect in zip(outs[name], want[name], strict=True):
            same(got, expect, name, rtol, atol)
        for n, got in grads[name].items():
            same(got, want_grads[name][n], f"the gradient of {name} for {n}", rtol, atol)


def check_one(fn, oracle, mesh, layout, *tensors):
    """One function of tensors that returns a list, against an oracle on arrays."""
    names = "abcdefgh"[: len(tensors)]
    check(
        {"it": (" ".join(names), fn, oracle)}, mesh, layout, dict(zip(names, tensors, strict=True)), atol=1e-6
    )


def same(got, want, name="", rtol=1e-5, atol=2e-6):
    """One tensor against an array."""
    assert got.dtype == want.dtype, f"{name} is {got.dtype} instead of {want.dtype}"
    have, want = got.numpy(), np.asarray(want)
    assert have.shape == want.shape, f"{name} has the dims {got.dims} instead of {want.shape}"
    if jnp.issubdtype(want.dtype, jnp.inexact):
        kind = np.complex64 if np.iscomplexobj(want) else np.float32
        np.testing.assert_allclose(have.astype(kind), want.astype(kind), rtol=rtol, atol=atol, err_msg=name)
    else:
        np.testing.assert_array_equal(have, want, err_msg=name)
    # What is stored behind the true size is zero, always.
    storage = np.asarray(got.storage).copy()
    storage[tuple(slice(d.size) for d in got.dims)] = 0
    assert not storage.any(), f"{name} has padding that is not zero"


def collectives(jaxpr):
    """(primitive, shape of the result) of every collective in a jaxpr, sums of scalars left out."""
    found = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name.startswith(("psum", "all_", "reduce_scatter", "ppermute", "pmax", "pmin")):
            shape = equation.outvars[0].aval.shape
            found += [(name, shape)] if shape else []
        for inner in jaxprs_in_params(equation.params):
            found += collectives(getattr(inner, "jaxpr", inner))
    return found
