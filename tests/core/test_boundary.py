"""The boundary to Python and JAX: tensors that JAX rebuilt, objects as arguments, abstract values."""

import dataclasses
import enum
import functools
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import weft as wf
from weft import checkpoint
from weft.core.errors import ProgramError, ShapeError, TensorTypeError

PLACES = {"unplaced": (None, None), "even": ("x=2", "a:x"), "uneven": ("x=4", "a:x")}


def tensor(place="unplaced", dims="a=6 b=5"):
    dims = wf.dims(dims)
    values = np.arange(np.prod([d.size for d in dims]), dtype=np.float32)
    return wf.place(wf.tensor(values.reshape([d.size for d in dims]), dims), *PLACES[place])


# -- a tensor whose array does not have the shape of its dims ------------------------------------------------

CHANGES = {
    "sliced": lambda t: jax.tree.map(lambda a: a[:2], t),
    "indexed": lambda t: jax.tree.map(lambda a: a[0], t),
    "stacked": lambda t: jax.tree.map(lambda *a: jnp.stack(a), t, t),
    "transposed": lambda t: jax.tree.map(jnp.transpose, t),
    "longer": lambda t: jax.tree.map(lambda a: jnp.concatenate([a, a]), t),
    "summed": lambda t: jax.tree.map(jnp.sum, t),
    "no array": lambda t: jax.tree.map(lambda a: True, t),
    "true size": lambda t: jax.tree.map(lambda a: a[:6], t),  # of a stored array that is padded
}
HINTS = {
    "sliced": r'x\["a", :2\]',
    "indexed": r'wf\.vmap\(f, "a"\)',
    "stacked": r"wf\.stack",
    "transposed": r"wf\.transpose\(x, \['b', 'a'\]\)",
    "longer": r"wf\.tensor",
    "summed": r"wf\.tensor",
    "no array": "is_leaf=wf.is_tensor",
    "true size": r"wf\.place\(wf\.tensor\(array, x\.dims\), x\.mesh",
}
USES = {
    "eager op": lambda t, *_: wf.sum(t),
    "operator": lambda t, *_: t * 2,
    "indexing": lambda t, *_: t["a", 0],
    "program": lambda t, *place: wf.spmd(wf.mean, *place)(t),
    "plan": lambda t, *place: wf.spmd(wf.mean, *place).plan(t),
    "plan without devices": lambda t, *_: wf.spmd(wf.mean, "x=512", "a:x").plan(wf.place(t, None, None)),
    "captured": lambda t, *place: wf.spmd(lambda: wf.mean(t), *place)(),
    "grad": lambda t, *_: wf.grad(wf.sum)(t),
    "scan": lambda t, *_: wf.scan(lambda c, x: (c, None), 0.0, t, "a"),
    "numpy": lambda t, *_: t.numpy(),
    "np.asarray": lambda t, *_: np.asarray(t),
    "array": lambda t, *_: t.array,
    "storage": lambda t, *_: t.storage,
    "place": lambda t, *_: wf.place(t, "x=8", "b:x"),
    "unplace": lambda t, *_: wf.place(t, None, None),
    "optimizer": lambda t, *_: wf.optimizer(optax.sgd(0.1)).init(t),
}


@pytest.mark.parametrize("used", USES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", PLACES)
def test_changed_array_is_rejected_where_it_is_used(place, change, used):
    if change == "true size" and place != "uneven":
        return
    changed = CHANGES[change](tensor(place))
    with pytest.raises(ShapeError, match=HINTS[change]):
        USES[used](changed, *PLACES[place])


@pytest.mark.parametrize("change", ["sliced", "indexed", "stacked", "transposed"])
@pytest.mark.parametrize("place", PLACES)
def test_changed_slice_is_rejected_inside_a_program(place, change):
    t = tensor(place, "a=9 b=5 c=4")
    for use in (wf.sum, lambda t: t.array, lambda t: t):
        with pytest.raises(ShapeError, match="holds"):
            wf.spmd(lambda t, use=use: use(CHANGES[change](t)), *PLACES[place])(t)


def test_known_program_rejects_a_changed_array():
    program = wf.spmd(wf.mean, "x=2", "a:x")
    for good in (tensor(), tensor("even")):
        assert float(program(good)) == pytest.approx(14.5)
        with pytest.raises(ShapeError, match="a part of a"):
            program(CHANGES["sliced"](good))


def test_jax_transformations_over_tensors_are_rejected():
    x = tensor()
    with pytest.raises(ShapeError, match=r'wf\.vmap\(f, "a"\)'):
        jax.vmap(wf.sum)(x)
    with pytest.raises(ShapeError, match=r'wf\.scan\(f, carry, xs, "a"\)'):
        jax.lax.scan(lambda c, t: (c, wf.sum(t)), 0.0, x)
    drawn = jax.vmap(lambda key: wf.random.normal(key, "a=2 b=3"))(jax.random.split(jax.random.key(0), 4))
    with pytest.raises(ShapeError, match=r'wf\.Dim\("new", 4\)'):
        wf.sum(drawn)


def test_checkpoint_rejects_a_changed_array(tmp_path):
    with pytest.raises(ShapeError, match="a part of a"):
        checkpoint.CheckpointManager(tmp_path).save(1, {"w": CHANGES["sliced"](tensor())}, {}, wait=True)


def test_changed_arrays_are_printed():
    assert repr(CHANGES["sliced"](tensor())) == "f32[a=6, b=5] holding an array of shape (2, 5)"
    assert repr(CHANGES["no array"](tensor("even"))) == "?[a=6/x·2, b=5] holding True"


@pytest.mark.parametrize("place", PLACES)
def test_trees_with_changed_arrays_can_be_taken_apart(place):
    """JAX rebuilds tensors on the way; only their use is an error."""
    x = tensor(place)
    rows = x.storage.shape[0]
    doubled = jax.vmap(lambda t: jax.tree.map(lambda a: 2 * a, t))(x)  # inside, the array lacks a dimension
    np.testing.assert_array_equal(doubled.numpy(), 2 * x.numpy())
    _, cosines = jax.lax.scan(lambda c, t: (c, jax.tree.map(jnp.cos, t)), 0.0, x)
    np.testing.assert_allclose(cosines.numpy(), np.cos(x.numpy()), rtol=1e-6)
    stacked = CHANGES["stacked"](x)
    assert jax.tree.leaves(stacked)[0].shape == (2, rows, 5)
    np.testing.assert_array_equal(jax.tree.map(lambda a: a[1], stacked).numpy(), x.numpy())
    assert jax.eval_shape(lambda t: jax.tree.map(lambda a: a[0], t), x)._data.shape == (5,)
    swapped = eqx.tree_at(lambda tree: tree["w"], {"w": x}, replace_fn=lambda t: t * 0)
    assert float(wf.sum(swapped["w"])) == 0


@pytest.mark.parametrize("place", ["even", "uneven"])
def test_jax_vmap_inside_a_program(place):
    def program(x):
        keys = jax.random.split(jax.random.key(0), 3)
        drawn = jax.vmap(lambda key: wf.random.normal(key, x.dims))(keys)
        return jax.tree.map(lambda a: a[0], drawn)

    want = wf.spmd(program)(tensor())
    np.testing.assert_array_equal(wf.spmd(program, *PLACES[place])(tensor()).numpy(), want.numpy())


# -- raw optax on tensors that are stored with padding -------------------------------------------------------

OPTAX = {
    "init": lambda tx, t: tx.init(t),
    "update": lambda tx, t: tx.update(t, tx.init(wf.place(t, None, None)), t),
    "update in jit": lambda tx, t: jax.jit(lambda t: tx.init(t))(t),
    "apply_updates": lambda tx, t: optax.apply_updates(t, t),
    "norm": lambda tx, t: optax.tree.norm(t),
}


@pytest.mark.parametrize("call", OPTAX)
@pytest.mark.parametrize(
    "tx",
    [optax.adam(0.1), optax.adafactor(0.1), optax.chain(optax.centralize(), optax.trace(0.9))],
    ids=["a", "f", "c"],
)
def test_raw_optax_on_padded_tensors_is_rejected(tx, call):
    """adafactor, centralize and add_noise were silently wrong there."""
    with pytest.raises(wf.ProgramError, match=r"stored with padding(.|\n)*wf\.optimizer\(tx\)"):
        OPTAX[call](tx, tensor("uneven"))


@pytest.mark.parametrize("place", ["unplaced", "even"])
def test_raw_optax_on_tensors_without_padding(place):
    tx, w = optax.chain(optax.centralize(), optax.adafactor(0.1)), tensor(place)
    raw, state = w.array, tx.init(w)
    want, _ = tx.update(raw, tx.init(raw), raw)
    updates, _ = tx.update(w, state, w)
    np.testing.assert_allclose(updates.numpy(), want, rtol=1e-5, atol=1e-6)


# -- objects as arguments ------------------------------------------------------------------------------------


class Model:
    """Not a pytree."""

    def __init__(self):
        self.w, self.rate = wf.zeros("d=3"), 0.5

    @wf.spmd(mesh="x=4", layout="batch:x")
    def loss(self, x):
        return wf.mean(wf.square(wf.einsum(x, self.w, reduce="d") - 1.0))

    @wf.spmd(mesh="x=4", layout="batch:x", static="self")
    def static_loss(self, x):
        return wf.mean(x)

    def scale(self, x):
        return x * self.rate

    def __call__(self, x):
        return x * self.rate


class Module(eqx.Module):
    """A pytree."""

    w: wf.Tensor
    rate: float
    activation: object = jax.nn.relu

    @wf.spmd(mesh="x=4", layout="batch:x")
    def loss(self, x):
        return wf.mean(self.rate * wf.einsum(x, self.w, reduce="d"))


@dataclasses.dataclass(frozen=True)
class Config:
    scale: float
    inner: object = None


@dataclasses.dataclass
class Loose:
    scale: float = 2.0


@dataclasses.dataclass(frozen=True, eq=False)
class Identity:
    scale: float = 2.0


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


OBJECTS = {
    "object": Model,
    "method": lambda: Model().scale,
    "callable object": Model,
    "partial of a method": lambda: functools.partial(Model().scale),
    "partial with an object": lambda: functools.partial(lambda m, x: x, Model()),
    "frozen dataclass": lambda: Config(2.0),
    "dataclass": Loose,
    "set": lambda: {1, 2},
    "path": lambda: pathlib.Path("a"),
    "optimizer": lambda: wf.optimizer(optax.sgd(0.1)),
    "iterator": lambda: iter([1]),
}
X = wf.ones("batch=6 d=3")


@pytest.mark.parametrize(
    "nested", [lambda o: o, lambda o: {"a": [o]}, lambda o: (o, 1.0)], ids=["", "dict", "pair"]
)
@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")  # JAX's own, of iterators
def test_objects_that_are_no_pytrees_are_rejected(kind, nested):
    """Their tensors and numbers were those of the first trace. jax.jit rejects them too."""
    program = wf.spmd(lambda thing, x: wf.mean(x), "x=4", "batch:x")
    with pytest.raises(
        TensorTypeError, match=r"thing.* is a (.|\n)*not a pytree(.|\n)*static=\(\"thing\",\)"
    ):
        program(nested(OBJECTS[kind]()), X)
    with pytest.raises(TensorTypeError, match="not a pytree"):
        program.plan(x=X, thing=nested(OBJECTS[kind]()))


def test_objects_whose_methods_are_programs_are_rejected():
    with pytest.raises(TensorTypeError, match="self is a Model, which is not a pytree"):
        Model().loss(X)
    with pytest.raises(TensorTypeError, match=r"static argument self is a Model, .* compared by identity"):
        Model().static_loss(X)
    for rate in (1.0, 2.0):  # an equinox module's values are inputs
        module = Module(wf.ones("d=3") * rate, rate)
        assert float(module.loss(X)) == pytest.approx(3 * rate**2)
    assert len(Module.loss.traces) == 1


IDENTITIES = {
    "object": Model,
    "method": lambda: Model().scale,
    "dataclass compared by identity": Identity,
    "object in a tuple": lambda: (1, Model()),
    "object in a dataclass": lambda: Config(1.0, Model()),
    "dataclass in a dataclass": lambda: Config(1.0, Config(2.0, (Identity(),))),
}


@pytest.mark.parametrize("kind", IDENTITIES)
def test_static_objects_that_are_compared_by_identity_are_rejected(kind):
    program = wf.spmd(lambda thing, x: wf.mean(x), static="thing")
    with pytest.raises(TensorTypeError, match=r"static argument thing is a .* compared by identity"):
        program(IDENTITIES[kind](), X)


def test_static_objects_that_are_compared_by_value():
    program = wf.spmd(lambda config, x: wf.mean(x) * config.scale, static="config")
    for scale in (2.0, 3.0, 2.0, 3.0):
        assert float(program(Config(scale, (1, "a", None, jnp.float32)), X)) == scale
    assert len(program.traces) == 2
    with pytest.raises(TensorTypeError, match="can't be hashed"):
        program(Loose(), X)
    optimizer = wf.spmd(lambda opt, w: opt.init(w), static="opt")
    optimizer(wf.optimizer(tx := optax.sgd(0.1)), X)
    optimizer(wf.optimizer(tx), X)
    assert len(optimizer.traces) == 1


PLAIN = {
    "bool": True,
    "np.bool_": np.bool_(True),
    "string": "a",
    "bytes": b"a",
    "enum": Color.RED,
    "None": None,
    "dtype": np.dtype("float32"),
    "jnp type": jnp.bfloat16,
    "class": dict,
    "range": range(3),
    "dim": wf.Dim("a", 3),
    "mesh": wf.Mesh("x=2"),
    "layout": wf.Layout("a:x"),
    "function": lambda x: x,
    "builtin": abs,
    "jax.nn": jax.nn.relu,
    "jitted": jax.jit(jnp.sin),
    "ufunc": np.exp,
    "jnp": jnp.exp,
    "weft": wf.relu,
    "partial": functools.partial(wf.sum, dims="d"),
    "program": wf.spmd(wf.relu),
    "transformation": optax.adam(0.1),
    "int enum": Level.LOW,
}


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_values_need_not_be_declared(kind):
    program = wf.spmd(lambda thing, x: wf.mean(x), "x=4", "batch:x")
    for _ in range(2):
        assert float(program(PLAIN[kind], X)) == 1
    assert len(program.traces) == 1


RESULTS = {
    "generator": lambda x: (t * 2 for t in [x]),
    "object": lambda x: Model(),
    "map": lambda x: map(wf.sin, [x]),
    "object in a dict": lambda x: {"a": [Model(), x]},
}


@pytest.mark.parametrize("kind", RESULTS)
def test_objects_that_are_returned_are_rejected(kind):
    with pytest.raises(TensorTypeError, match=r"returns a (generator|Model|map)(.|\n)*list"):
        wf.spmd(RESULTS[kind], "x=4", "batch:x")(X)


def test_coroutines_are_rejected():
    async def asynchronous(x):
        return x

    with pytest.raises(TensorTypeError, match=r"returns a coroutine"):
        wf.spmd(asynchronous, "x=4", "batch:x")(X)
    out = wf.spmd(lambda x: (x, "name", None, wf.sin, Config(1.0), X.dims[0]))(X)
    assert out[1:] == ("name", None, wf.sin, Config(1.0), X.dims[0])


# -- programs inside eager control flow ----------------------------------------------------------------------

AROUND = {
    "vmap": lambda p, x: wf.vmap(p, "a")(x),
    "scan": lambda p, x: wf.scan(lambda c, t: (c + p(t), p(t)), 0.0, x, "a"),
    "fori_loop": lambda p, x: wf.fori_loop(0, 3, lambda n, c: c + p(x), wf.zeros("")),
    "while_loop": lambda p, x: wf.while_loop(lambda c: c < 100.0, lambda c: c + 1.0 + p(x), wf.zeros("")),
    "cond": lambda p, x: wf.cond(wf.sum(x) > 0, p, lambda x: wf.sum(x), x),
    "grad": lambda p, x: wf.grad(p)(x),
    "grad of vmap": lambda p, x: wf.grad(lambda x: wf.sum(wf.vmap(p, "a")(x)))(x),
}


@pytest.mark.parametrize("around", AROUND)
def test_eager_control_flow_around_a_program(around):
    """vmap and scan reported that the program was called inside one on mesh ""; now they run on its mesh."""
    square = lambda t: wf.mean(wf.square(t))
    x = tensor("unplaced", "a=6 b=5")
    want = AROUND[around](square, x)
    got = AROUND[around](wf.spmd(square, "x=4", "b:x"), x)
    for one, other in zip(*(jax.tree.leaves(t, is_leaf=wf.is_tensor) for t in (got, want)), strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5)


@pytest.mark.parametrize("place", PLACES)
def test_forward_derivative_of_a_while_loop(place):
    """The loop that has no gradient has a derivative in a direction."""
    run = lambda x: wf.while_loop(lambda c: wf.sum(c) < 99.0, lambda c: c * 2.0, x)
    x = wf.ones("a=6")
    for fn in (
        lambda x: wf.jvp(run, (x,), (x,))[1],
        wf.spmd(lambda x: wf.jvp(run, (x,), (x,))[1], *PLACES[place]),
    ):
        np.testing.assert_allclose(fn(x).numpy(), np.full(6, 32.0))


def test_numbers_that_are_static_are_known():
    x = tensor()
    program = wf.spmd(lambda x, n: wf.stack([x] * n, wf.Dim("new", n)), "x=4", "a:x", static=("n",))
    assert [program(x, n).dims[0].size for n in (2, 3)] == [2, 3]
    with pytest.raises(wf.ProgramError) as caught:
        wf.spmd(lambda x, n: x if n else -x)(x, 1)
    assert isinstance(caught.value.__cause__, jax.errors.TracerBoolConversionError)


def test_a_donated_tensor_is_printed_without_values():
    """A message may show a dataclass that holds one, and must not fail itself."""
    x = wf.place(wf.ones("a=6"), "x=2", "a:x")
    step = wf.spmd(lambda x: x + 1, "x=2", "a:x", donate=(0,))
    step(x)
    assert repr(x) == "f32[a=6/x·2], donated to a program"
    with pytest.raises(ProgramError, match="have been deleted"):
        step(x)


def test_static_tuples_of_different_number_types_are_traced_separately():
    """1, 1.0 and True are equal, so a tuple of one reused the trace of another."""
    program = wf.spmd(lambda x, s: x * s[0][0], static=(1,))
    x = wf.arange(wf.Dim("a", 3))
    assert [program(x, ((s,),)).dtype for s in (1, 1.0, True)] == [jnp.int32, jnp.float32, jnp.int32]
    assert len(program.traces) == 3
