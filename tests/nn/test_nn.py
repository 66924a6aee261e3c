"""Layers report inputs that do not fit, and never broadcast them."""

import jax
import numpy as np
import pytest

import weft as wf
from weft import nn

D_MODEL, D_FF, HEADS, D_KV, VOCAB = wf.dims("d_model=8 d_ff=16 heads=2 d_kv=4 vocab=9")
X = wf.ones("batch=2 length=3 d_model=8")
MISSPELT = X.rename(d_model="d_modle")
MEMORY = X.rename(length="memory_length")
PLACES = wf.arange(wf.Dim("length", 3))


def made(layer):
    return nn.init(layer, jax.random.key(0))


LINEAR = made(nn.Linear([D_MODEL], [D_FF]))
FEED = made(nn.FeedForward(D_MODEL, D_FF))
TABLE = made(nn.Embedding(VOCAB, D_MODEL))
ATTENTION = made(nn.Attention(D_MODEL, HEADS, D_KV))
LSH = made(nn.LSHAttention(D_MODEL, HEADS, D_KV))

MISTAKES = {
    "linear_without_its_dim": lambda: LINEAR(MISSPELT),  # wrong
    "linear_of_an_array": lambda: LINEAR(np.ones((2, 8))),  # wrong
    "feed_forward_without_its_dim": lambda: FEED(MISSPELT),  # wrong
    "unknown_activation": lambda: nn.FeedForward(D_MODEL, D_FF, "silu"),  # wrong
    "logits_without_features": lambda: TABLE.logits(MISSPELT),  # wrong
    "attention_to_itself": lambda: ATTENTION(X, X),  # wrong
    "attention_of_an_array": lambda: ATTENTION(np.ones((2, 3, 8)), MEMORY),  # wrong
    "queries_without_features": lambda: ATTENTION(MISSPELT, MEMORY),  # wrong
    "memory_without_features": lambda: ATTENTION(X, MEMORY.rename(d_model="features")),  # wrong
    "lsh_without_features": lambda: LSH(MISSPELT, PLACES),  # wrong
}


@pytest.mark.parametrize("name", MISTAKES)
def test_messages(name, mistake):
    mistake(name, MISTAKES[name], "messages/nn")


def test_init_with_a_layout_but_no_mesh_raises():
    module = nn.Linear([wf.Dim("a", 2)], [wf.Dim("b", 3)])
    with pytest.raises(wf.LayoutError, match="no axis x"):
        nn.init(module, jax.random.key(0), layout="a:x")
