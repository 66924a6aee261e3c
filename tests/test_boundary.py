"""Where Weft meets Python and JAX: tensors that JAX rebuilt, objects as arguments, values that are not known yet."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import weft as wf
from weft import train
from weft.errors import ShapeError

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
    "true size": r'x\["a", :6\]',
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
        train.Checkpoints(tmp_path).save(1, {"w": CHANGES["sliced"](tensor())}, {}, wait=True)


def test_changed_arrays_are_shown():
    assert repr(CHANGES["sliced"](tensor())) == "f32[a=6, b=5] holding an array of shape (2, 5)"
    assert repr(CHANGES["no array"](tensor("even"))) == "?[a=6/x·2, b=5] holding True"


@pytest.mark.parametrize("place", PLACES)
def test_trees_with_changed_arrays_can_be_taken_apart(place):
    """JAX rebuilds tensors on the way; only their use is an error."""
    x = tensor(place)
    rows = x.storage.shape[0]
    doubled = jax.vmap(lambda t: jax.tree.map(lambda a: 2 * a, t))(x)  # inside, the array lacks a dimension
    np.testing.assert_array_equal(doubled.numpy(), 2 * x.numpy())
    _, kept = jax.lax.scan(lambda c, t: (c, jax.tree.map(jnp.cos, t)), 0.0, x)
    np.testing.assert_allclose(kept.numpy(), np.cos(x.numpy()), rtol=1e-6)
    stacked = CHANGES["stacked"](x)
    assert jax.tree.leaves(stacked)[0].shape == (2, rows, 5)
    np.testing.assert_array_equal(jax.tree.map(lambda a: a[1], stacked).numpy(), x.numpy())
    assert jax.eval_shape(lambda t: jax.tree.map(lambda a: a[0], t), x)._held.shape == (5,)
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
    "tx", [optax.adam(0.1), optax.adafactor(0.1), optax.chain(optax.centralize(), optax.trace(0.9))], ids=["a", "f", "c"]
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
