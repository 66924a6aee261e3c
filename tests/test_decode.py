"""Cached decoding gives what running the whole prefix gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weft as wf
from weft import decode, nn
from weft.data import Bytes
from weft.decode.cache import empty, step
from weft.models import Batch, Config, Transformer

BASE = Config(vocab=37, d_model=16, d_ff=24, heads=4, d_kv=4, layers=2, longest=16)
TWO = {"kind": "encoder_decoder"}
MODELS = {
    "learned": {},
    "sinusoid": {"positions": "sinusoid", "norm": "layer", "bias": True},
    "relative": {"positions": "relative", "scaled": False, **TWO},
    "rotary": {"positions": "rotary", "kv_heads": 2, "activation": "swiglu"},
    "none, parallel": {"positions": "none", "block": "parallel"},
    "local": {"attention": "local", "window": 3},
    "translation": {"decoder_layers": 3, **TWO},
    "multi-query": {"kv_heads": 1, "tied": True},
}
LAYOUTS = {
    "one device": ("", ""),
    "both": ("data=2 model=4", "batch:data heads:model d_ff:model vocab:model"),
    "long": ("data=2 model=3", "batch:data memory_length:model"),
}
ROWS, PLACES, INPUTS = wf.Dim("batch", 3), wf.Dim("length", 7), wf.Dim("length", 5)


def batch_of(config):
    draw = np.random.default_rng(0)
    tokens = wf.tensor(draw.integers(0, config.vocab, (3, 7)).astype(np.int32), [ROWS, PLACES])
    if config.kind == "decoder":
        return Batch(tokens)
    inputs = wf.tensor(draw.integers(0, config.vocab, (3, 5)).astype(np.int32), [ROWS, INPUTS])
    held = np.arange(5) < np.array([[5], [3], [4]])  # rows of different lengths
    return Batch(
        tokens,
        segments=wf.ones([ROWS, PLACES], jnp.int32),
        inputs=inputs,
        input_segments=wf.tensor(held.astype(np.int32), [ROWS, INPUTS]),
    )


def one_by_one(model, batch):
    """The logits of all places, each from the cache of those before it."""
    one = PLACES.resize(1)

    def say(kept, place):
        token = wf.slice(batch.tokens, PLACES, place, one)
        logits, kept = step(model, kept, token, place, batch)
        return kept, wf.sum(logits, one)

    places = wf.arange(PLACES)
    _, logits = wf.scan(say, empty(model, batch, PLACES.size), places, PLACES)
    return logits


QUICK = {(name, "both") for name in MODELS} | {("rotary", "one device"), ("translation", "long")}
EVERY = [
    pytest.param(name, layout, marks=[] if (name, layout) in QUICK else pytest.mark.slow)
    for name in MODELS
    for layout in LAYOUTS
]


@pytest.mark.parametrize("name, layout", EVERY)
def test_a_cache_changes_nothing(name, layout):
    config = BASE.replace(**MODELS[name])
    model, batch = nn.init(Transformer(config), jax.random.key(1)), batch_of(config)
    expected = model.logits(batch).numpy("batch", "length", "vocab")
    found = wf.spmd(one_by_one, *LAYOUTS[layout])(model, batch).numpy("batch", "length", "vocab")
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("layout", ["both", "long"])
def test_greedy_says_the_likeliest_tokens(layout):
    config = BASE.replace(**TWO)
    model, batch = nn.init(Transformer(config), jax.random.key(4)), batch_of(config)
    said = wf.spmd(decode.greedy, *LAYOUTS[layout], static=("end",))(model, batch, 1).numpy()
    read = wf.tensor(np.pad(said, ((0, 0), (1, 0)))[:, :-1], [ROWS, PLACES])
    likeliest = (
        model.logits(dataclasses.replace(batch, tokens=read)).numpy("batch", "length", "vocab").argmax(-1)
    )
    done = np.maximum.accumulate(said == 1, axis=1)
    done = np.pad(done, ((0, 0), (1, 0)))[:, :-1]
    assert (said == np.where(done, 1, likeliest)).all()
    assert len(np.unique(said)) > 3


def test_texts_come_in_their_order_and_do_not_depend_on_their_batch():
    config = BASE.replace(**TWO, vocab=259)
    model = nn.init(Transformer(config), jax.random.key(4))
    program, words = wf.spmd(decode.greedy, static=("end",)), ["ab", "c", "hello", "x y z", "b"]
    together = list(decode.translate(program, model, words, Bytes(), 4, 8))
    alone = [next(decode.translate(program, model, [word], Bytes(), 4, 8)) for word in words]
    assert together == alone and len(set(together)) > 1


def test_quality_counts_several_references():
    found = decode.quality(["a b c d e", "x"], [["a b c d e", "other words"], ["y"]])
    assert found.exact == 0.5
    assert found.bleu > 50 and found.signatures[0].startswith("nrefs:var")
