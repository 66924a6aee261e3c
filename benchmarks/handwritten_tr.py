"""The peer of Weft's translation model: one encoder-decoder train step, written by hand in plain JAX.

The paper's kind: source and target share an embedding, the softmax has a matrix of its own; each stack has
learned positions and norms by scale alone. The variants are those of `handwritten.py`: `single_step`,
`jit_step`, `shard_map_step`, each a jitted `step(params, sources, tokens, targets) -> (loss, new params)`
that donates `params`. Batch is split over the axis `data`; d_ff, heads and vocabulary over `model`.

Run it for a table of step times: `python -m benchmarks.handwritten_tr`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.handwritten import (
    BATCH_SPEC,
    MASKED,
    Params,
    Size,
    cross_entropy,
    feed_forward,
    make_mesh,
    norm,
    repeat,
    split_cross_entropy,
    split_embed,
    update,
)

STANDARD = Size(layers=2, length=64)  # layers in each stack

PROJECT, PROJECT_BACK = P(None, None, "model", None), P(None, "model", None, None)
ATTENTION_SPECS = {"wq": PROJECT, "wk": PROJECT, "wv": PROJECT, "wo": PROJECT_BACK}
FEED_SPECS = {"w1": P(None, None, "model"), "w2": P(None, "model", None)}

# Of one stack's layers, each [layers, ...].
ENCODER_SPECS = {"attention_scale": P(), "attention": ATTENTION_SPECS, "feed_scale": P(), "feed": FEED_SPECS}
DECODER_SPECS = ENCODER_SPECS | {"memory_scale": P(), "memory": ATTENTION_SPECS}

PARAMETER_SPECS = {
    "embedding": P("model", None),
    "encoder_positions": P(),
    "encoder": ENCODER_SPECS,
    "encoder_scale": P(),
    "decoder_positions": P(),
    "decoder": DECODER_SPECS,
    "decoder_scale": P(),
    "projection": P(None, "model"),
}


def init(seed: int, size: Size = STANDARD) -> Params:
    """float32 NumPy parameters: normal of deviation fan-in^-1/2 (tables 0.02), scales one."""
    generator = np.random.default_rng(seed)
    layers, model, heads, kv, ff = size.layers, size.d_model, size.heads, size.d_kv, size.d_ff

    def normal(*shape: int, deviation: float) -> np.ndarray:
        return (generator.standard_normal(shape) * deviation).astype(np.float32)

    def attention() -> Params:
        maps = {name: normal(layers, model, heads, kv, deviation=model**-0.5) for name in ("wq", "wk", "wv")}
        return maps | {"wo": normal(layers, heads, kv, model, deviation=(heads * kv) ** -0.5)}

    def scale() -> np.ndarray:
        return np.ones((layers, model), np.float32)

    def stack() -> Params:
        w1, w2 = (
            normal(layers, model, ff, deviation=model**-0.5),
            normal(layers, ff, model, deviation=ff**-0.5),
        )
        feed = {"w1": w1, "w2": w2}
        return {"attention_scale": scale(), "attention": attention(), "feed_scale": scale(), "feed": feed}

    return {
        "embedding": normal(size.vocab, model, deviation=0.02),
        "encoder_positions": normal(size.length, model, deviation=0.02),
        "encoder": stack(),
        "encoder_scale": np.ones((model,), np.float32),
        "decoder_positions": normal(size.length, model, deviation=0.02),
        "decoder": stack() | {"memory_scale": scale(), "memory": attention()},
        "decoder_scale": np.ones((model,), np.float32),
        "projection": normal(model, size.vocab, deviation=model**-0.5),
    }


def batch(seed: int, size: Size = STANDARD) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random sources, tokens and targets, int32[batch, length]."""
    generator = np.random.default_rng(seed)
    shape = (size.batch, size.length)
    sources, tokens, targets = (generator.integers(0, size.vocab, shape, dtype=np.int32) for _ in range(3))
    return sources, tokens, targets


def shardings(mesh: Mesh) -> Params:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), PARAMETER_SPECS)


def place(mesh: Mesh, params: Params, *rows: Any) -> tuple[Any, ...]:
    """Puts parameters and a batch on the mesh, as the two parallel steps take them."""
    return jax.device_put(params, shardings(mesh)), *jax.device_put(rows, NamedSharding(mesh, BATCH_SPEC))


# What all variants share: b batch, q k positions, d d_model, h heads, e d_kv.


def attention(h, memory, layer, causal: bool = False):
    """What h takes from the memory over the heads at hand: a partial sum if those are a slice."""
    q = jnp.einsum("bqd,dhe->bhqe", h, layer["wq"])
    k = jnp.einsum("bkd,dhe->bhke", memory, layer["wk"])
    v = jnp.einsum("bkd,dhe->bhke", memory, layer["wv"])
    scores = jnp.einsum("bhqe,bhke->bhqk", q * q.shape[-1] ** -0.5, k)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, MASKED)
    mixed = jnp.einsum("bhqk,bhke->bhqe", jax.nn.softmax(scores, axis=-1), v)
    return jnp.einsum("bhqe,hed->bqd", mixed, layer["wo"])


# Global arrays: XLA's partitioner, or one device.


def global_loss(constrain: Callable) -> Callable:
    def loss(params, sources, tokens, targets):
        def encode(x, layer):
            h = norm(x, layer["attention_scale"])
            x = constrain(x + attention(h, h, layer["attention"]), "data", None, None)
            x = x + feed_forward(norm(x, layer["feed_scale"]), layer["feed"])
            return constrain(x, "data", None, None), None

        def decode(x, layer):
            h = norm(x, layer["attention_scale"])
            x = constrain(x + attention(h, h, layer["attention"], causal=True), "data", None, None)
            h = norm(x, layer["memory_scale"])
            x = constrain(x + attention(h, memory, layer["memory"]), "data", None, None)
            x = x + feed_forward(norm(x, layer["feed_scale"]), layer["feed"])
            return constrain(x, "data", None, None), None

        x = constrain(params["embedding"][sources] + params["encoder_positions"], "data", None, None)
        x, _ = lax.scan(encode, x, params["encoder"])
        memory = norm(x, params["encoder_scale"])
        x = constrain(params["embedding"][tokens] + params["decoder_positions"], "data", None, None)
        x, _ = lax.scan(decode, x, params["decoder"])
        logits = norm(x, params["decoder_scale"]) @ params["projection"]
        return cross_entropy(constrain(logits, "data", None, "model"), targets)

    return loss


def single_step() -> Callable:
    loss = global_loss(lambda x, *axes: x)

    def step(params, sources, tokens, targets):
        return update(loss, params, sources, tokens, targets)

    return jax.jit(step, donate_argnums=0)


def jit_step(mesh: Mesh) -> Callable:
    loss = global_loss(lambda x, *axes: lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes))))

    def step(params, sources, tokens, targets):
        return update(loss, params, sources, tokens, targets)

    rows = NamedSharding(mesh, BATCH_SPEC)
    return jax.jit(
        step,
        in_shardings=(shardings(mesh), rows, rows, rows),
        out_shardings=(NamedSharding(mesh, P()), shardings(mesh)),
        donate_argnums=0,
    )


# Local slices, explicit collectives.


def shard_map_step(mesh: Mesh) -> Callable:
    def vary(x, axis):
        return lax.pcast(x, axis, to="varying")

    def loss(params, sources, tokens, targets):
        def encode(x, layer):
            # One cast for q, k and v (Megatron's f): one backward all-reduce, not three.
            h = vary(norm(x, layer["attention_scale"]), "model")
            x = x + lax.psum(attention(h, h, layer["attention"]), "model")
            h = vary(norm(x, layer["feed_scale"]), "model")
            return x + lax.psum(feed_forward(h, layer["feed"]), "model"), None

        def decode(x, layer):
            h = vary(norm(x, layer["attention_scale"]), "model")
            x = x + lax.psum(attention(h, h, layer["attention"], causal=True), "model")
            h = vary(norm(x, layer["memory_scale"]), "model")
            x = x + lax.psum(attention(h, memory, layer["memory"]), "model")
            h = vary(norm(x, layer["feed_scale"]), "model")
            return x + lax.psum(feed_forward(h, layer["feed"]), "model"), None

        # Cast outside the scans: one all-reduce of each stacked gradient, not one for each layer.
        params = jax.tree.map(lambda p: vary(p, "data"), params)
        # One look-up for both sequences: one all-reduce.
        both = split_embed(params["embedding"], jnp.stack([sources, tokens]))
        x, _ = lax.scan(encode, both[0] + params["encoder_positions"], params["encoder"])
        # Cast outside too: the layers' gradients of it are added up before their all-reduce.
        memory = vary(norm(x, params["encoder_scale"]), "model")
        x, _ = lax.scan(decode, both[1] + params["decoder_positions"], params["decoder"])
        logits = vary(norm(x, params["decoder_scale"]), "model") @ params["projection"]
        return lax.pmean(jnp.mean(split_cross_entropy(logits, targets)), "data")

    def step(params, sources, tokens, targets):
        return update(loss, params, sources, tokens, targets)

    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(PARAMETER_SPECS, BATCH_SPEC, BATCH_SPEC, BATCH_SPEC),
            out_specs=(P(), PARAMETER_SPECS),
            check_vma=True,
        ),
        donate_argnums=0,
    )


# Running.


def cases(size: Size = STANDARD, mesh: Mesh | None = None, seed: int = 0) -> dict[str, Callable[[], Any]]:
    """The three variants, each from the same numbers, ready for `measure.alternate`."""
    mesh = make_mesh() if mesh is None else mesh
    params, rows = init(seed, size), batch(seed, size)
    return {
        "shard_map": repeat(shard_map_step(mesh), *place(mesh, params, *rows)),
        "jit": repeat(jit_step(mesh), *place(mesh, params, *rows)),
        "single": repeat(single_step(), jax.device_put(params), *jax.device_put(rows)),
    }


if __name__ == "__main__":
    from benchmarks.measure import alternate, markdown

    jax.config.update("jax_num_cpu_devices", 8)
    print(markdown(alternate(cases(), rounds=20, warmup=2)))
