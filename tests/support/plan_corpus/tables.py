"""Graphs and look-ups: take, scatter_add, and repeated look-ups in one table."""

import weft as wf

from .case import case, grads, ids, param, spec


@case(
    "message passing",
    "x=8",
    "edge:x",
    param("d=64 e=64"),
    param("d=64 e=64"),
    spec("node=4000 d=64"),
    ids("edge=30000"),
    ids("edge=30000"),
)
@grads(0, 1)
def message_passing(w, gate, h, source, target):
    for _ in range(2):
        message = wf.einsum(wf.take(h, source, "node"), w, reduce="d")
        both = wf.take(h, source, "node") + wf.take(h, target, "node")
        message = message * wf.sigmoid(wf.einsum(both, gate, reduce="d"))
        total = wf.scatter_add(wf.zeros([h.dims[0], w.dims[1]]), target, message, "node")
        h = wf.tanh(h + total.rename(e="d"))
    return wf.mean(wf.square(h))


@case("PageRank", "x=4 y=2", "edge:x node:y", ids("edge=400000"), ids("edge=400000"), spec("node=100001"))
def page_rank(source, target, teleport):
    node = teleport.dims[0]
    degree = wf.scatter_add(wf.zeros([node]), source, 1.0, "node")
    share = 1.0 / wf.maximum(wf.take(degree, source, "node"), 1.0)

    def step(_, rank):
        flow = wf.take(rank, source, "node") * share
        return 0.85 * wf.scatter_add(wf.zeros([node]), target, flow, "node") + 0.15 * teleport

    return wf.fori_loop(0, 10, step, teleport)


@case(
    "embedding bag",
    "x=4 y=2",
    "b:x vocab:y",
    param("vocab=20000 e=64"),
    param("e=64 label=20"),
    ids("b=512 word=32"),
    spec("b=512 label=20"),
)
@grads(0, 1)
def embedding_bag(table, head, words, target):
    total = wf.sum(wf.take(table, words, "vocab"), "word")
    largest = wf.max(wf.take(table, words, "vocab"), "word")
    size = wf.mean(wf.square(wf.take(table, words, "vocab")), "word")
    logits = wf.einsum(total + largest + size, head, reduce="e")
    return -wf.mean(wf.sum(target * wf.log_softmax(logits, "label"), "label"))
