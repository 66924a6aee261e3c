"""Small networks whose collectives are known, for tests of collectives and of plans."""

import jax
import numpy as np

import weft as wf


def random(*dims, seed=0):
    draw = np.random.default_rng(seed + sum(map(len, map(repr, dims))))
    return wf.tensor(draw.normal(size=[d.size for d in dims]).astype(np.float32), dims)


# -- the paper's worked example: two layers ----------------------------------------------------------------

batch, io, hidden = wf.dims("batch=64 io=256 hidden=1024")


def two_layers(w, v, x):
    h = wf.relu(wf.einsum(x, w, out=[batch, hidden]))
    return wf.sum(wf.square(wf.einsum(h, v, out=[batch, io]) - 1.0))


b, d_io, d_h = batch.size, io.size, hidden.size

PAPER = [
    ("A", "all=8", "", {}),
    ("B", "all=8", "batch:all", {("all",): 2 * d_io * d_h}),
    ("C", "all=8", "hidden:all", {("all",): 2 * b * d_io}),
    (
        "D",
        "rows=4 cols=2",
        "batch:rows hidden:cols",
        {("rows",): 2 * d_io * d_h / 2, ("cols",): 2 * b * d_io / 4},
    ),
    (
        "E",
        "rows=2 cols=2 planes=2",
        "batch:rows hidden:cols io:planes",
        {
            ("planes",): 2 * b * d_h / 4,
            ("cols",): 2 * b * d_io / 4,
            ("rows",): 2 * d_io * d_h / 4,
        },
    ),
]


# -- residual layers in a scan, with gradient accumulation ----------------------------------------------------

length, d_model, heads, d_kv, d_ff = wf.dims("length=8 d_model=16 heads=4 d_kv=8 d_ff=32")
small = wf.Dim("batch", 8)
layers, micro = wf.dims("layers=3 micro=4")


def network(params, x):
    def layer(h, p):
        scale, w1, w2 = p
        y = wf.relu(wf.einsum(h * scale, w1, out=[small, d_ff]))
        return h + wf.einsum(y, w2, out=[small, d_model]), None

    return wf.mean(wf.square(wf.scan(layer, x, params, layers)[0]))


def parameters():
    tensors = random(layers, d_model), random(layers, d_model, d_ff), random(layers, d_ff, d_model)
    return tuple(map(wf.parameter, tensors))


def accumulated(params, batches):
    def one(total, x):
        grads = wf.grad(network)(params, x)
        return jax.tree.map(lambda a, g: a + g, total, grads, is_leaf=wf.is_tensor), None

    zeros = jax.tree.map(lambda p: p * 0.0, params, is_leaf=wf.is_tensor)
    return wf.scan(one, zeros, batches, micro)[0]
