"""Functions of a sequence in pieces: the same values and gradients, with less held and nothing more sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same
from jax.extend import core as jax_core

import weft as wf
from weft import nn
from weft.models import Batch, Config, Transformer

BATCH, LENGTH, D_MODEL, D_FF = wf.dims("batch=4 length=12 d_model=6 d_ff=10")


def draw(seed, *dims):
    return wf.tensor(np.random.default_rng(seed).normal(size=[d.size for d in dims]), dims)


def feed(x, w, v, pieces):
    """A feed-forward block in chunks; `pieces=None` computes it without chunks."""

    def f(x, scale):
        h = wf.tanh(wf.einsum(x, w, out=[*(d for d in x.dims if d != D_MODEL), D_FF]))
        return wf.einsum(h, v, reduce=[D_FF]) * scale + 1.0, wf.sum(h, D_FF)

    scale = wf.arange(next(d for d in x.dims if d.name == "length")).astype(x.dtype)
    return f(x, scale) if pieces is None else nn.chunked(f, (x, scale), "length", pieces)


def gradients(pieces):
    def loss(x, w, v):
        y, sums = feed(x, w, v, pieces)
        return wf.mean(wf.square(y)) + wf.mean(wf.sin(sums)), (y, sums)

    return wf.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)


TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}  # in float64
LAYOUTS = {
    "one device": ("", ""),
    "batch and d_ff": ("data=2 model=4", "batch:data d_ff:model"),
    "length": ("seq=2", "length:seq"),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("length, pieces", [(12, 3), (11, 4), (5, 5), (7, 1)])
def test_chunks_equal_the_full_computation(length, pieces, name):
    """Eleven positions in four chunks of three: the last chunk is padded."""
    with jax.enable_x64(True):
        args = draw(0, BATCH, LENGTH.resize(length), D_MODEL), draw(1, D_MODEL, D_FF), draw(2, D_FF, D_MODEL)
        found = wf.spmd(gradients(pieces), *LAYOUTS[name])(*args)
        assert_same(found, gradients(None)(*args), **TOLERANCE)


@pytest.mark.parametrize("name", LAYOUTS)
def test_dropout_in_chunks_equals_that_of_the_full_tensor(name):
    key = jax.random.key(3)

    def dropped(x, key, pieces):
        return nn.chunked(lambda x: wf.dropout(x, 0.5, key), x, "length", pieces)

    x = wf.ones([BATCH, LENGTH, D_FF])
    for pieces in (1, 3, 6):
        got = wf.spmd(lambda x, key, pieces=pieces: dropped(x, key, pieces), *LAYOUTS[name])(x, key)
        assert (got.numpy("batch", "length", "d_ff") == wf.dropout(x, 0.5, key).numpy()).all()
    assert (dropped(x, key, 3).numpy() == wf.dropout(x, 0.5, key).numpy()).all()  # eagerly
    uneven = wf.spmd(lambda x, key: dropped(x, key, 5), *LAYOUTS[name])(x, key).numpy(
        "length", "batch", "d_ff"
    )
    assert len({each.tobytes() for each in uneven}) == LENGTH.size  # other masks, all different
    assert (uneven == dropped(x, key, 5).numpy("length", "batch", "d_ff")).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_model_with_dropout_is_the_same_in_chunks(name):
    with jax.enable_x64(True):
        config = Config(
            vocab=9, d_model=6, d_ff=10, heads=2, d_kv=4, layers=2, dropout=0.3, compute="float64"
        )
        tokens = wf.tensor(np.random.default_rng(1).integers(0, 9, (4, 12)), [BATCH, LENGTH])
        rows, key = Batch(tokens, tokens), jax.random.key(1)

        def loss(chunks):
            model = nn.init(Transformer(config.replace(feed_chunks=chunks)), jax.random.key(0))
            found = wf.spmd(wf.value_and_grad(lambda m, key: m.loss(rows, key)), *LAYOUTS[name])(model, key)
            return found[0], [t for _, t in sorted(nn.parameters(found[1]).items())]

        assert_same(loss(3), loss(1), **TOLERANCE)


def test_more_chunks_than_positions_raise():
    with pytest.raises(wf.ShapeError, match="13 chunks of length=12"):
        nn.chunked(lambda x: x, wf.ones([LENGTH]), "length", 13)


# What is sent


def moved(length, pieces, mesh, layout):
    args = [
        wf.spec(dims) for dims in ([BATCH, LENGTH.resize(length), D_MODEL], [D_MODEL, D_FF], [D_FF, D_MODEL])
    ]
    found = wf.spmd(gradients(pieces), mesh, layout).plan(*args).collectives
    return sorted((c.kind, c.axes, c.bytes * c.count) for c in found)


@pytest.mark.parametrize(
    "mesh, layout",
    [("seq=2", "length:seq"), ("seq=2 model=2", "length:seq d_ff:model"), ("data=4", "batch:data")],
)
@pytest.mark.parametrize("pieces", [2, 3, 6])
def test_pieces_of_a_split_length_are_made_of_what_each_device_has(mesh, layout, pieces):
    """If the positions of a chunk divide evenly, chunks add no collectives."""
    assert moved(LENGTH.size, pieces, mesh, layout) == moved(LENGTH.size, None, mesh, layout)


# The loss


VOCAB, PLACES = 1000, 4 * 32


def language_model(chunks):
    return Config(vocab=VOCAB, d_model=20, d_ff=12, heads=2, d_kv=6, layers=1, longest=32, loss_chunks=chunks)


def loss(model, batch):
    return model.loss(batch)


def program(chunks, mesh, layout):
    tokens = wf.spec("batch=4 length=32", jnp.int32)
    args = nn.specs(Transformer(language_model(chunks))), Batch(tokens, tokens)
    return wf.spmd(wf.value_and_grad(loss), mesh, layout), args


def shapes(jaxpr):
    """The shapes of all floating-point arrays of a jaxpr, inner ones included."""
    for eqn in jaxpr.eqns:
        for v in eqn.outvars:
            if jnp.issubdtype(v.aval.dtype, jnp.floating):
                yield v.aval.shape
        for inner in jax_core.jaxprs_in_params(eqn.params):
            yield from shapes(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("chunks, places", [(1, PLACES), (4, PLACES // 4)])
def test_a_loss_in_chunks_holds_the_logits_of_one(chunks, places):
    made, args = program(chunks, "", "")
    with_vocab = [s for s in shapes(made.jaxpr(*args).jaxpr) if VOCAB in s]
    rows = {int(np.prod(s)) // VOCAB for s in with_vocab} - {1, 20}  # d_model=20: the weights
    assert max(rows) == places


@pytest.mark.parametrize(
    "mesh, layout", [("", ""), ("data=2", "batch:data"), ("seq=2", "length:seq"), ("model=2", "vocab:model")]
)
def test_a_loss_in_chunks_needs_less_memory(mesh, layout):
    def peak(chunks):
        made, args = program(chunks, mesh, layout)
        return made.plan(*args).memory.peak

    assert peak(4) < 0.7 * peak(1)  # most of it are logits and their gradients


def test_a_loss_in_chunks_is_the_same():
    key, tokens = jax.random.key(0), wf.random.randint(jax.random.key(1), "batch=4 length=32", 0, VOCAB)
    unchunked, pieces = (nn.init(Transformer(language_model(n)), key) for n in (1, 4))
    want = wf.spmd(wf.value_and_grad(loss), wf.Mesh())(unchunked, Batch(tokens, tokens))
    split = wf.spmd(wf.value_and_grad(loss), "data=2 model=2", "batch:data vocab:model")
    got = split(pieces, Batch(tokens, tokens))
    for x, y in zip(*(jax.tree.leaves(tree, is_leaf=wf.is_tensor) for tree in (got, want)), strict=True):
        np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=1e-4, atol=1e-6)
