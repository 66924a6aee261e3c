"""The original Mesh-TensorFlow as a worker of `make bench-peers` (see worker.py): case `mesh-tensorflow-8`.

Written as its users write: `mtf.layers` where they fit, layers unrolled in Python, a TF1 graph and session
with eight logical CPU devices. Its environment is in mesh-tensorflow.txt. What there is to know about speed:

- It has no look-up: `mtf.gather` multiplies by a one-hot matrix, and the cross-entropy does much the same.
- The devices run side by side, so each operation has its share of the cores as threads, and not all of them.
- A step fetches the first device's loss and the updates; tokens are fed at each step, lest they be folded in.
- Variables are resource variables: an update of the older kind may overwrite what the backward pass reads.
- Small variables are stacked, as is its default. Without that: a sixth more operations, and no faster.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from benchmarks.peers.worker import Step, serve

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import mesh_tensorflow as mtf
import tensorflow.compat.v1 as tf

MESHES = {8: "data:4;model:2"}
LAYOUT = "batch:data;d_ff:model;heads:model;vocab:model"
EPSILON = 1e-6

# The dimensions of each parameter; those of a block come once for each layer.
TABLES = {
    "embedding": ("vocab", "d_model"),
    "positions": ("length", "d_model"),
    "final_scale": ("d_model",),
    "projection": ("d_model", "vocab"),
}
BLOCK = {
    "attention_scale": ("d_model",),
    "wq": ("d_model", "heads", "d_kv"),
    "wk": ("d_model", "heads", "d_kv"),
    "wv": ("d_model", "heads", "d_kv"),
    "wo": ("heads", "d_kv", "d_model"),
    "feed_scale": ("d_model",),
    "w1": ("d_model", "d_ff"),
    "w2": ("d_ff", "d_model"),
}


def start(work: dict[str, np.ndarray], case: str) -> tuple[Step, Callable[[], int]]:
    devices = int(case.rsplit("-", 1)[1])
    rows = work.pop("tokens"), work.pop("targets")
    rate = float(work.pop("learning_rate"))
    tf.disable_eager_execution()
    tf.enable_resource_variables()

    values = by_layer(work)
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    feeds = [tf.placeholder(tf.int32, ids.shape) for ids in rows]
    batch, length = mtf.Dimension("batch", rows[0].shape[0]), mtf.Dimension("length", rows[0].shape[1])
    tokens, targets = (mtf.import_tf_tensor(mesh, ids, [batch, length]) for ids in feeds)
    loss = forward(parameters(mesh, values), tokens, targets, layers=len(work["wq"]))

    variables = graph.trainable_variables
    gradients = mtf.gradients([loss], [v.outputs[0] for v in variables])
    updates = mtf.optimize.SgdOptimizer(rate).apply_grads(gradients, variables)

    shape = mtf.convert_to_shape(MESHES[devices])
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(
        shape, mtf.convert_to_layout_rules(LAYOUT), [f"/cpu:{i}" for i in range(devices)]
    )
    lowering = mtf.Lowering(graph, {mesh: impl})
    # All devices hold the loss; the first one's is enough.
    value = lowering.tensors[loss].to_laid_out_tensor().tensor_list[0]
    update = tf.group([lowering.lowered_operation(op) for op in updates])

    threads = max(1, len(os.sched_getaffinity(0)) // devices)
    session = tf.Session(
        config=tf.ConfigProto(device_count={"CPU": devices}, intra_op_parallelism_threads=threads)
    )
    masters = tf.global_variables()
    session.run(
        [v.initializer for v in masters], {v.initializer.inputs[1]: values[v.op.name] for v in masters}
    )
    session.run(lowering.copy_masters_to_slices())
    run = session.make_callable([value, update], feed_list=feeds)
    return lambda: float(run(*rows)[0]), lambda: len(tf.get_default_graph().get_operations())


def by_layer(work: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The parameters with those of each layer apart: `wq` of layer 2 is `2/wq`."""
    values = {name: work[name] for name in TABLES}
    return values | {f"{i}/{name}": a for name in BLOCK for i, a in enumerate(work[name])}


def parameters(mesh: mtf.Mesh, values: dict[str, np.ndarray]) -> dict[str, mtf.Tensor]:
    """A variable for each value, yet to be loaded."""
    dims = TABLES | BLOCK
    return {
        name: mtf.get_variable(
            mesh,
            name,
            [mtf.Dimension(*d) for d in zip(dims[name.split("/")[-1]], a.shape, strict=True)],
            initializer=tf.zeros_initializer(),
        )
        for name, a in values.items()
    }


def forward(
    params: dict[str, mtf.Tensor], tokens: mtf.Tensor, targets: mtf.Tensor, layers: int
) -> mtf.Tensor:
    vocab, d_model = params["embedding"].shape.dims
    (length,) = (params["positions"].shape - d_model).dims
    mask = mtf.layers.attention_mask_autoregressive(mtf.range(tokens.mesh, length, tf.int32))
    x = mtf.gather(params["embedding"], tokens, vocab) + params["positions"]
    for i in range(layers):
        layer = {name: params[f"{i}/{name}"] for name in BLOCK}
        x += attention(norm(x, layer["attention_scale"]), layer, mask)
        x += feed_forward(norm(x, layer["feed_scale"]), layer)
    logits = mtf.einsum([norm(x, params["final_scale"]), params["projection"]], reduced_dims=[d_model])
    return mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, targets, vocab))


def norm(x: mtf.Tensor, scale: mtf.Tensor) -> mtf.Tensor:
    variance = mtf.reduce_mean(mtf.square(x), reduced_dim=scale.shape.dims[0])
    return x * mtf.rsqrt(variance + EPSILON) * scale


def attention(h: mtf.Tensor, layer: dict[str, mtf.Tensor], mask: mtf.Tensor) -> mtf.Tensor:
    batch, length, _ = h.shape.dims
    _, heads, d_kv = layer["wq"].shape.dims
    shape = mtf.Shape([batch, heads, length, d_kv])
    q, k, v = (mtf.einsum([h, layer[name]], shape) for name in ("wq", "wk", "wv"))
    k, v = (mtf.rename_dimension(t, "length", "memory_length") for t in (k, v))
    mixed = mtf.layers.dot_product_attention(q * d_kv.size**-0.5, k, v, mask, is_training=True)
    return mtf.einsum([mixed, layer["wo"]], h.shape)


def feed_forward(h: mtf.Tensor, layer: dict[str, mtf.Tensor]) -> mtf.Tensor:
    d_model, d_ff = layer["w1"].shape.dims
    hidden = mtf.relu(mtf.einsum([h, layer["w1"]], reduced_dims=[d_model]))
    return mtf.einsum([hidden, layer["w2"]], reduced_dims=[d_ff])


if __name__ == "__main__":
    serve(start)
