"""Small programs whose layouts are searched.

`PROGRAMS[name]` is a function that returns the program and its arguments, the number of devices, and the maximum number
of axes.
"""

import jax

import weft as wf
from weft import models, nn, optim, train
from weft.models.presets import batch_specs


def of(dims, dtype="float32"):
    return wf.spec(dims, dtype)


def parameter(dims):
    return wf.spec(dims, role="param")


def chain():
    """A product of three matrices."""

    def run(x, y, z):
        return wf.einsum(wf.einsum(x, y, reduce="b"), z, reduce="c")

    return run, (of("a=512 b=256"), of("b=256 c=1024"), of("c=1024 d=96"))


def chain_of_odd_sizes():
    def run(x, y, z):
        return wf.einsum(wf.einsum(x, y, reduce="b"), z, reduce="c")

    return run, (of("a=509 b=37"), of("b=37 c=1021"), of("c=1021 d=3"))


def two_layers():
    """The paper's example, with gradients."""

    def loss(params, x):
        w, v = params
        return wf.mean(wf.square(wf.einsum(wf.relu(wf.einsum(x, w, reduce="io")), v, reduce="hidden")))

    return wf.value_and_grad(loss), (
        (parameter("io=1024 hidden=4096"), parameter("hidden=4096 io'=1024")),
        of("batch=4096 io=1024"),
    )


def two_layers_trained():
    """The same with an optimizer update, so that stored parameters and state can be sharded."""
    grads, (params, x) = two_layers()
    optimizer = optim.AdamW(1e-3)

    def step(params, state, x):
        return optimizer.update(grads(params, x)[1], state, params)

    return wf.spmd(step, donate=(0, 1)), (params, optimizer.init(params), x)


def attention():
    """Attention with several heads; the number of keys is odd."""

    def run(q, k, v):
        weights = wf.softmax(wf.einsum(q, k, reduce="d"), "keys")
        return wf.einsum(weights, v, reduce="keys")

    return run, (
        of("batch=16 heads=6 queries=256 d=64"),
        of("batch=16 heads=6 keys=129 d=64"),
        of("batch=16 heads=6 keys=129 d=64"),
    )


def gated():
    """A gated feed-forward layer: the product of two projections of one tensor."""

    def loss(params, x):
        u, v, w = params
        hidden = wf.silu(wf.einsum(x, u, reduce="d")) * wf.einsum(x, v, reduce="d")
        return wf.sum(wf.square(wf.einsum(hidden, w, reduce="h")))

    return wf.grad(loss), (
        (parameter("d=128 h=512"), parameter("d=128 h=512"), parameter("h=512 d=128")),
        of("batch=64 d=128"),
    )


def side_by_side():
    """Two parallel branches over different dims, added: one all-reduce can sum both."""

    def loss(params, x):
        a, b, c, d = params
        left = wf.einsum(wf.relu(wf.einsum(x, a, reduce="d")), b, reduce="h")
        right = wf.einsum(wf.tanh(wf.einsum(x, c, reduce="d")), d, reduce="k")
        return wf.sum(wf.square(left + right))

    return wf.grad(loss), (
        (parameter("d=96 h=256"), parameter("h=256 d=96"), parameter("d=96 k=384"), parameter("k=384 d=96")),
        of("batch=64 d=96"),
    )


def renamed():
    """A dim that is renamed, and so changes its axis."""

    def run(x, w):
        y = wf.einsum(x, w, reduce="d").rename(h="d")
        return wf.einsum(y, w, reduce="d")

    return run, (of("batch=64 d=256"), of("d=256 h=256"))


def sequence_parallel():
    """Norms on a split sequence, products on a replicated one."""

    def loss(params, x):
        w, v = params
        y = (x / wf.sqrt(wf.mean(wf.square(x), "d"))).rename(pieces="length")
        y = wf.einsum(wf.relu(wf.einsum(y, w, reduce="d")), v, reduce="h")
        return wf.sum(wf.square(x + y.rename(length="pieces")))

    return wf.grad(loss), ((parameter("d=64 h=256"), parameter("h=256 d=64")), of("batch=8 pieces=128 d=64"))


def reshaped():
    """Dims merged and split."""

    def run(x, w):
        y = wf.split(wf.einsum(x, w, reduce="d"), "out", "heads=8 each=32")
        return wf.merge(wf.softmax(y, "each"), ["batch", "heads"], "rows")

    return run, (of("batch=64 d=256"), of("d=256 out=256"))


def tied():
    """Input and output embeddings share one table, whose gradient is one sum."""

    def loss(table, ids):
        x = wf.take(table, ids, "vocab")
        return wf.mean(wf.logsumexp(wf.einsum(x, table, reduce="d"), "vocab"))

    return wf.grad(loss), (parameter("vocab=1000 d=64"), of("batch=16 length=32", "int32"))


def scanned():
    """A stack of layers, with gradients."""

    def loss(params, x):
        def layer(x, w):
            return x + wf.tanh(wf.einsum(x, w, reduce="d").rename(e="d")), None

        return wf.sum(wf.square(wf.scan(layer, x, params, "layers")[0]))

    return wf.grad(loss), (parameter("layers=3 d=64 e=64"), of("batch=32 d=64"))


def remat_scanned():
    """The same, recomputed in the backward pass."""

    def loss(params, x):
        def layer(x, pair):
            w, v = pair
            return x + wf.einsum(wf.relu(wf.einsum(x, w, reduce="d")), v, reduce="h"), None

        return wf.sum(wf.square(wf.scan(wf.remat(layer), x, params, "layers")[0]))

    return wf.grad(loss), (
        (parameter("layers=3 d=64 h=256"), parameter("layers=3 h=256 d=64")),
        of("batch=32 d=64"),
    )


def piped():
    """The same layers as pipeline stages, if a rule splits their dim."""

    def loss(params, x):
        def layer(x, pair):
            w, v = pair
            return x + wf.einsum(wf.relu(wf.einsum(x, w, reduce="d")), v, reduce="h")

        return wf.sum(wf.square(wf.pipeline(layer, x, params, "layers", micro=4)))

    return wf.grad(loss), (
        (parameter("layers=4 d=64 h=256"), parameter("layers=4 h=256 d=64")),
        of("batch=32 d=64"),
    )


def convolution():
    """Two convolutions over spatial dims that can be split."""

    def loss(params, x):
        w, v = params
        y = wf.relu(wf.conv(x, w, {"height": "i", "width": "j"}))
        return wf.sum(wf.square(wf.conv(y, v, {"height": "i", "width": "j"})))

    return wf.grad(loss), (
        (parameter("i=3 j=3 c=8 e=32"), parameter("i=3 j=3 e=32 f=16")),
        of("batch=8 height=32 width=32 c=8"),
    )


def pooled():
    def run(x, w):
        y = wf.max_pool(wf.relu(wf.conv(x, w, {"height": "i", "width": "j"})), {"height": 2, "width": 2})
        return wf.mean(y, ["height", "width"])

    return run, (of("batch=16 height=30 width=30 c=8"), of("i=3 j=3 c=8 e=32"))


def dropped():
    """Dropout, whose random bits need no communication."""

    def run(x, w, key):
        return wf.sum(wf.einsum(wf.dropout(x, 0.1, key), w, reduce="d"), "h")

    return run, (of("batch=256 d=512"), of("d=512 h=128"), jax.eval_shape(lambda: jax.random.key(0)))


def _tiny(kind, **changes):
    sizes = dict(vocab=512, d_model=64, d_ff=256, heads=4, d_kv=16, layers=2, longest=32)
    return models.Transformer(models.Config(kind, **(sizes | changes)))


def _loss(model, batch=8, length=16):
    specs = batch_specs(model.config, batch, length)
    return lambda model, batch: model.loss(batch, None), (nn.specs(model), specs)


def language_model():
    return wf.grad(_loss(_tiny("decoder"))[0]), _loss(_tiny("decoder"))[1]


def parallel_blocks():
    model = _tiny("decoder", block="parallel", positions="rotary", tied=True)
    return wf.grad(_loss(model)[0]), _loss(model)[1]


def translation():
    fn, args = _loss(_tiny("encoder_decoder"))
    return fn, args


def mixture():
    fn, args = _loss(_tiny("decoder", experts=4, expert_top=2, layers=1))
    return fn, args


def trained_language_model():
    """A train step with micro-batches, whose state can be sharded."""
    model = nn.specs(_tiny("decoder", layers=2, heads=2, positions="none", tied=True))
    step = train.train_step(optim.Adafactor(0.01), micro=2)
    specs = batch_specs(model.config, 8, 16)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return wf.spmd(step, donate=(0, 1)), (model, step.init(model), specs, key)


QUICK = {
    "chain": (chain, 4, 2),
    "chain of odd sizes": (chain_of_odd_sizes, 6, 2),
    "two layers": (two_layers, 8, 2),
    "two layers trained": (two_layers_trained, 4, 1),
    "attention": (attention, 4, 1),
    "gated": (gated, 4, 2),
    "side by side": (side_by_side, 2, 1),
    "renamed": (renamed, 4, 2),
    "sequence parallel": (sequence_parallel, 2, 1),
    "reshaped": (reshaped, 2, 1),
    "tied": (tied, 2, 1),
    "scanned": (scanned, 4, 1),
    "convolution": (convolution, 2, 1),
    "dropped": (dropped, 4, 2),
}
LONG = {
    "piped": (piped, 4, 2),
    "remat scanned": (remat_scanned, 4, 2),
    "pooled": (pooled, 4, 1),
    "language model": (language_model, 2, 1),
    "parallel blocks": (parallel_blocks, 2, 1),
    "translation": (translation, 2, 1),
    "mixture": (mixture, 2, 1),
    "trained language model": (trained_language_model, 2, 1),
}
PROGRAMS = QUICK | LONG
