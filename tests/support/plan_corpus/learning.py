"""Losses and networks: vmap, recurrences, contrastive and quantile losses."""

import weft as wf

from .case import case, grads, ids, param, spec


@case(
    "per-example gradients",
    "x=8",
    "b:x",
    param("d=96 h=160"),
    param("h=160"),
    spec("b=250 d=96"),
    spec("b=250"),
)
def per_example_gradients(w, v, x, y):
    def loss(w, v, x, y):
        h = wf.tanh(wf.einsum(x, w, reduce="d"))
        return wf.square(wf.einsum(h, v, reduce="h") - y)

    gw, gv = wf.vmap(lambda x, y: wf.grad(loss, argnums=(0, 1))(w, v, x, y), "b")(x, y)
    size = wf.sqrt(wf.sum(wf.square(gw), ["d", "h"]) + wf.sum(wf.square(gv), "h"))
    scale = wf.minimum(1.0, 1.0 / (size + 1e-6))  # clipping, as in differentially private training
    return wf.einsum(gw, scale, reduce="b"), wf.einsum(gv, scale, reduce="b")


@case(
    "ensemble",
    "x=4 y=2",
    "member:x b:y",
    param("member=8 d=64 h=256"),
    param("member=8 h=256 o=16"),
    spec("b=1024 d=64"),
    spec("b=1024 o=16"),
)
@grads(0, 1)
def ensemble(w, v, x, y):
    def loss(w, v):
        h = wf.relu(wf.einsum(x, w, reduce="d"))
        return wf.mean(wf.square(wf.einsum(h, v, reduce="h") - y))

    return wf.sum(wf.vmap(loss, "member")(w, v))


@case("contrastive loss", "x=8", "b:x", param("d=256 e=128"), spec("b=2048 d=256"), spec("b=2048 d=256"))
@wf.value_and_grad
def contrastive(w, x, y):
    def encode(x):
        e = wf.einsum(x, w, reduce="d")
        return e * wf.rsqrt(wf.sum(wf.square(e), "e") + 1e-6)

    left, right = encode(x), encode(y)
    logits = 10.0 * wf.einsum(left, right.rename(b="other"), reduce="e")
    positive = 10.0 * wf.sum(left * right, "e")
    rows = wf.mean(wf.logsumexp(logits, "other") - positive)
    columns = wf.mean(wf.logsumexp(logits, "b")) - wf.mean(positive)
    return 0.5 * (rows + columns)


@case("quantile loss", "x=2", "b:x", param("d=64 q=32"), spec("b=16384 d=64"), spec("b=16384"))
@wf.value_and_grad
def quantile_loss(w, x, y):
    q = wf.Dim("q", 32)
    level = (wf.arange(q, "float32") + 0.5) / q.size
    error = y - wf.sort(wf.einsum(x, w, reduce="d"), "q")  # sorted: quantiles do not cross
    return wf.mean(wf.maximum(level * error, (level - 1.0) * error))


@case(
    "LSTM",
    "x=4 y=2",
    "b:x h:y",
    param("d=64 gate=4 h=128"),
    param("k=128 gate=4 h=128"),
    spec("t=24 b=128 d=64"),
    spec("b=128 h=128"),
)
@grads(0, 1)
def lstm(w, u, x, target):
    t, b, _ = x.dims
    h_dim = target.dims[1]

    def step(carry, x):
        h, c = carry
        gates = wf.einsum(x, w, reduce="d") + wf.einsum(h.rename(h="k"), u, reduce="k")
        i, f, o, g = wf.unstack(gates, "gate")
        c = wf.sigmoid(f) * c + wf.sigmoid(i) * wf.tanh(g)
        h = wf.sigmoid(o) * wf.tanh(c)
        return (h, c), h

    start = wf.zeros([b, h_dim])
    (h, _), hs = wf.scan(step, (start, start), x, t)
    return wf.mean(wf.square(h - target)) + 1e-3 * wf.mean(wf.square(hs))


@case("state-space model", "x=8", "d:x", param("d=100 n=16"), param("d=100 n=16"), spec("t=256 b=8 d=100"))
@grads(0, 1)
def state_space(decay, out, x):
    rate = wf.exp(-wf.softplus(decay))

    def step(state, x):
        state = rate * state + x
        return state, wf.sum(state * out, "n")

    b, d, n = wf.dims("b=8 d=100 n=16")
    _, ys = wf.scan(step, wf.zeros([b, d, n]), x, "t")
    return wf.mean(wf.square(wf.gelu(ys) - x))


@case(
    "matrix factorization",
    "x=4 y=2",
    "rating:x user:y",
    param("user=6000 r=64"),
    param("item=2000 r=64"),
    ids("rating=50000"),
    ids("rating=50000"),
    spec("rating=50000"),
    donate=(0, 1),
)
def factorize(users, items, user, item, rating):
    def loss(users, items):
        predicted = wf.sum(wf.take(users, user, "user") * wf.take(items, item, "item"), "r")
        weight = wf.square(wf.take(users, user, "user")) + wf.square(wf.take(items, item, "item"))
        return wf.mean(wf.square(predicted - rating)) + 1e-3 * wf.mean(weight)

    value, (du, di) = wf.value_and_grad(loss, argnums=(0, 1))(users, items)
    return wf.parameter(users - 0.1 * du), wf.parameter(items - 0.1 * di), value
