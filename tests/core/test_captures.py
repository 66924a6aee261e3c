"""Eager control flow compiles once: functions are known by their code and by the values that they capture."""

import contextlib
import functools
import gc
import threading
import weakref
from dataclasses import dataclass
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weft as wf
from weft.core.errors import LayoutError, TensorTypeError

X = wf.tensor(np.arange(15, dtype=np.float32).reshape(5, 3), "a=5 b=3")
PLACES = {"unplaced": lambda t: t, "placed": lambda t: wf.place(t, "x=4", "a:x")}
places = pytest.mark.parametrize("put", PLACES.values(), ids=PLACES)


@contextlib.contextmanager
def compiles(expected: int | None = 0):
    """Require a number of compilations; None is any number but 0."""
    found = []
    event = "/jax/core/compile/backend_compile_duration"
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: found.append(name) if name == event else None
    )
    try:
        yield
    finally:
        jax.monitoring.clear_event_listeners()
    assert len(found) == expected if expected is not None else found


def start():
    return wf.zeros("b=3")


# Each call makes its functions again, as a user's loop does.
CALLS = {
    "scan": lambda t, k: wf.scan(lambda c, row: (c + row * k, c), start(), t, "a"),
    "vmap": lambda t, k: wf.vmap(lambda row: wf.sum(row * k), "a")(t),
    "cond": lambda t, k: wf.cond(wf.sum(t) > 0, lambda t: t * k, lambda t: t, t),
    "fori_loop": lambda t, k: wf.fori_loop(0, 3, lambda n, c: c * k + n, t),
    "while_loop": lambda t, k: wf.while_loop(lambda c: wf.sum(c) < 99, lambda c: c * k + 1.0, t),
    "local": lambda t, k: wf.local(lambda a: a * 2.0, t * k, out=t.dims, splittable=["a"]),
    "pipeline": lambda t, k: wf.pipeline(lambda c, row: c * k + wf.sum(row), start(), t, "a", batch="b"),
}


def leaves(tree):
    return [t.numpy() for t in jax.tree.leaves(tree, is_leaf=wf.is_tensor)]


@places
@pytest.mark.parametrize("name", CALLS)
def test_the_second_call_compiles_nothing(name, put):
    x, first, second = put(X), wf.tensor(1.5, ()), wf.tensor(3.0, ())
    CALLS[name](x, first), first * 1.0, second * 1.0  # the multiplication of an eager op compiles too
    with compiles(0):
        got = CALLS[name](x, second)
    # In a program nothing is cached by function: it is traced as a part of it.
    expected = wf.spmd(lambda x, k: CALLS[name](x, k))(X, second)
    for a, b in zip(leaves(got), leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


class Model(eqx.Module):
    weight: wf.Tensor
    power: int = eqx.field(static=True)

    def step(self, c, row):
        return c + self.weight * row**self.power, None


@dataclass(frozen=True)
class Pair:
    weight: wf.Tensor
    scale: float


def scanned(f):
    return wf.scan(f, start(), X, "a")[0].numpy()


def in_dict(w, k):
    params = {"w": w, "k": (k,)}
    return lambda c, row: (c + params["w"] * row ** params["k"][0], None)


def in_dataclass(w, k):
    pair = Pair(w, k)
    return lambda c, row: (c + pair.weight * row**pair.scale, None)


def in_default(w, k):
    return lambda c, row, w=w, *, k=k: (c + w * row**k, None)


def in_partial(w, k):
    return functools.partial(lambda w, k, c, row: (c + w * row**k, None), w, k)


def in_method(w, k):
    return Model(w, k).step


def in_nested(w, k):
    def power(row):
        return row**k

    return lambda c, row: (c + w * power(row), None)


def in_vmap(w, k):
    return lambda c, row: (c + wf.vmap(lambda one: one**k, "b")(row) * w, None)


def in_program(w, k):
    inner = wf.spmd(lambda row: w * row**k)
    return lambda c, row: (c + inner(row), None)


def in_global(w, k):
    global WEIGHT, POWER
    WEIGHT, POWER = w, k
    return lambda c, row: (c + WEIGHT * row**POWER, None)


class Settings:
    power = 1


def in_class(w, k):
    Settings.power = k
    return lambda c, row: (c + w * row**Settings.power, None)


def in_array(w, k):
    array = np.asarray([k])
    return lambda c, row: (c + w * row ** int(array[0]), None)


WAYS = [
    in_dict, in_dataclass, in_default, in_partial, in_method, in_nested, in_vmap, in_program, in_global,
    in_class, in_array,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_captured_tensors_are_inputs_and_python_values_are_not(way):
    rows = X.numpy()
    weights = [wf.tensor(np.float32([n, 1, 2]), "b=3") for n in range(3)]
    start()
    np.testing.assert_allclose(scanned(way(weights[0], 1)), (weights[0].numpy() * rows).sum(0))
    with compiles(0):
        got = scanned(way(weights[1], 1))
    np.testing.assert_allclose(got, (weights[1].numpy() * rows).sum(0))
    with compiles(None):
        got = scanned(way(weights[2], 2))
    np.testing.assert_allclose(got, (weights[2].numpy() * rows**2).sum(0))


class Nested:
    class inner:
        power = 1


def in_nested_class(w, k):
    Nested.inner.power = k
    return lambda c, row: (c + w * row**Nested.inner.power, None)


class Reader:
    def power(self, row):
        return row**POWER


def in_method_of_a_class(w, k):
    global POWER
    POWER = k
    return lambda c, row: (c + w * Reader().power(row), None)


@dataclass(frozen=True)
class Frozen:
    power: ClassVar[int] = 1


def in_class_variable(w, k):
    Frozen.power, one = k, Frozen()
    return lambda c, row: (c + w * row**one.power, None)


def in_attribute_of_a_function(w, k):
    def power(row):
        return row**power.k

    power.k = k
    return lambda c, row: (c + w * power(row), None)


def in_keywords(w, k):
    """Values in short-lived tuples: their ids are used again at once."""
    steps = [functools.partial(lambda row, *, k: row**k, k=n) for n in (1, 1, k)]
    return lambda c, row: (c + w * steps[2](steps[1](steps[0](row))), None)


def in_keyword_defaults(w, k):
    one, two, three = (lambda row, *, k=n: row**k for n in (1, k, 1))
    return lambda c, row: (c + w * three(two(one(row))), None)


REACHED = [
    in_nested_class, in_method_of_a_class, in_class_variable, in_attribute_of_a_function, in_keywords,
    in_keyword_defaults,
]  # fmt: skip


@pytest.mark.parametrize("way", REACHED, ids=lambda way: way.__name__)
def test_a_changed_value_is_found_wherever_it_is(way):
    w, rows = wf.ones("b=3"), X.numpy()
    for k in (1, 2, 1, 3):
        np.testing.assert_allclose(scanned(way(w, k)), (rows**k).sum(0), rtol=1e-6)


class Scaled(eqx.Module):
    scale: object = eqx.field(static=True)

    def __call__(self, row):
        return row * self.scale


class Named(dict):
    """A dict with attributes."""


def test_equal_values_of_other_types_are_distinguished():
    integers = wf.tensor([[1, 2], [3, 4]], "a=2 b=2")
    scaled = lambda m: wf.vmap(lambda row: m(row), "a")(integers)
    types = [scaled(Scaled(s)).dtype for s in (1, 1.0, True)]
    assert types == [jnp.int32, jnp.float32, jnp.int32]
    named, got = Named(), []
    for named.scale in (1, 2):
        got.append(wf.vmap(lambda row: row * named.scale, "a")(integers).numpy()[0, 0])
    assert got == [1, 2]


@dataclass(frozen=True)
class Setting:
    scale: object


def test_static_arguments_distinguish_equal_values():
    run = wf.spmd(lambda s, x: x * s.scale, static=("s",))
    x = wf.ones("a=3", jnp.int32)
    assert [run(Setting(s), x).dtype for s in (1, 1.0)] == [jnp.int32, jnp.float32]


def test_arguments_that_may_change_are_rejected():
    x = wf.ones("d=3")
    with pytest.raises(TensorTypeError, match="not a pytree"):
        wf.spmd(lambda k, x: x * k.power)(Settings, x)
    with pytest.raises(TensorTypeError, match="not a pytree"):
        wf.spmd(lambda f, x: f(x))(functools.partial(lambda w, x: x * w[0], [2.0]), x)


class Plain:
    """An object that is no pytree: its attributes can't be followed."""


def test_a_plain_object_is_read_at_every_call():
    plain, got = Plain(), []
    for plain.scale in (1.0, 2.0):
        got.append(scanned(lambda c, row: (c + row * plain.scale, None)))
    np.testing.assert_allclose(got[1], 2 * got[0])


def test_a_mutated_list_is_read_at_every_call():
    scales, seen = [1.0], []
    body = lambda c, row: (seen.append(row.dims) or c + row * scales[0], None)
    first = scanned(body)
    scales[0] = 2.0
    np.testing.assert_allclose(scanned(body), 2 * first)
    before = len(seen)
    fresh: list = []
    wf.scan(lambda c, row: (fresh.append(row.dims) or c, None), start(), X, "a")
    other: list = []
    wf.scan(lambda c, row: (other.append(row.dims) or c, None), start(), X, "a")
    assert before == len(seen) and fresh and other


def test_one_tensor_under_two_names_and_then_two():
    one, two = wf.tensor(np.float32([1, 2, 3]), "b=3"), wf.tensor(np.float32([5, 5, 5]), "b=3")

    def run(p, q):
        return scanned(lambda c, row: (c + p - 2 * q, None))

    np.testing.assert_allclose(run(one, one), -5 * one.numpy())
    np.testing.assert_allclose(run(one, two), 5 * (one.numpy() - 2 * two.numpy()))


def test_the_dtype_and_dims_of_a_captured_tensor_are_in_the_key():
    for weight in (wf.ones("b=3"), wf.ones("b=3", jnp.bfloat16), wf.ones(""), wf.ones("c=2")):
        out = wf.vmap(lambda row, w=weight: row.astype(jnp.bfloat16) * w, "a")(X)
        assert out.dtype == jnp.promote_types(jnp.bfloat16, weight.dtype)
        assert {d.name for d in out.dims} == {"a", "b"} | {d.name for d in weight.dims}


def test_a_recursive_function():
    def deep(row, n):
        return row if n == 0 else deep(row + 1.0, n - 1)

    run = lambda n: wf.vmap(lambda row: deep(row, n), "a")(X).numpy()
    np.testing.assert_allclose(run(2), X.numpy() + 2)
    with compiles(0):
        run(2)
    np.testing.assert_allclose(run(3), X.numpy() + 3)


def test_gradients_flow_into_captured_tensors():
    def loss(w):
        return wf.sum(wf.square(wf.scan(lambda c, row: (c + w * row, None), start(), X, "a")[0]))

    total = X.numpy().sum(0)
    for n in (1.0, 2.0):
        w = wf.full("b=3", n)
        np.testing.assert_allclose(wf.grad(loss)(w).numpy(), 2 * n * total**2, rtol=1e-6)
    with compiles(0):
        wf.grad(loss)(w)


def test_a_cached_program_keeps_no_captured_tensor():
    def run(n):
        w = wf.tensor(np.full(3, n, np.float32), "b=3")
        scanned(lambda c, row: (c + w * row - 7.0, None))
        return weakref.ref(w._data)

    result = run(1.0)
    gc.collect()
    assert result() is None


def test_a_captured_placed_tensor_decides_where_an_op_runs():
    w = wf.place(wf.ones("b=3"), "x=4", "b:x")
    out = wf.vmap(lambda row: wf.sum(row * w), "a")(X)
    assert str(out.mesh) == "x=4"
    elsewhere = wf.place(w, "y=2", "b:y")
    with pytest.raises(LayoutError, match="is on mesh"):
        wf.vmap(lambda row: wf.sum(row * w * elsewhere), "a")(X)


def test_a_callback_calls_the_function_it_was_given():
    def run():
        seen = []
        wf.callback(lambda a: seen.append(1) or np.asarray(a), X, out=wf.spec(X.dims)).numpy()
        return seen

    assert run() and run()


def test_two_threads_with_other_captured_tensors():
    got = {}

    def run(n):
        for _ in range(20):
            w = wf.tensor(np.full(3, n, np.float32), "b=3")
            got.setdefault(n, []).append(scanned(lambda c, row: (c + w * row, None)))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(120)
    for n in range(3):
        np.testing.assert_allclose(got[n], np.broadcast_to(n * X.numpy().sum(0), (20, 3)))
