"""The peer that Weft has to match: one Transformer LM train step, written by hand in plain JAX.

Three variants of the same mathematics, with no use of weft:

- `single_step`: one device, `jax.jit`;
- `jit_step`: global arrays, shardings on the way in and out, constraints on activations; XLA finds
  the collectives;
- `shard_map_step`: local slices and explicit collectives, in the manner of Megatron.

Each returns a jitted `step(params, tokens, targets) -> (loss, new params)` that donates `params`.
Batch is split over the axis `data`; d_ff, heads and vocabulary over `model`.

Run it for a table of step times: `python -m benchmarks.handwritten`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Params = dict[str, Any]

LEARNING_RATE = 0.1
EPSILON = 1e-6
MASKED = -1e30  # finite, so that no inf - inf can arise

STACKED = ("attention_scale", "wq", "wk", "wv", "wo", "feed_scale", "w1", "w2")  # [layers, ...]

PARAMETER_SPECS = {
    "embedding": P("model", None),
    "positions": P(),
    "attention_scale": P(),
    "wq": P(None, None, "model", None),
    "wk": P(None, None, "model", None),
    "wv": P(None, None, "model", None),
    "wo": P(None, "model", None, None),
    "feed_scale": P(),
    "w1": P(None, None, "model"),
    "w2": P(None, "model", None),
    "final_scale": P(),
    "projection": P(None, "model"),
}
BATCH_SPEC = P("data", None)


@dataclass(frozen=True)
class Size:
    layers: int = 4
    d_model: int = 256
    d_ff: int = 1024
    heads: int = 8
    d_kv: int = 32
    vocab: int = 8192
    length: int = 128
    batch: int = 16


STANDARD = Size()


def init(seed: int, size: Size = STANDARD) -> Params:
    """float32 NumPy parameters: normal of deviation fan-in^-1/2 (tables 0.02), scales one."""
    generator = np.random.default_rng(seed)

    def normal(*shape: int, deviation: float) -> np.ndarray:
        return (generator.standard_normal(shape) * deviation).astype(np.float32)

    layers, model, heads, kv, ff = size.layers, size.d_model, size.heads, size.d_kv, size.d_ff
    return {
        "embedding": normal(size.vocab, model, deviation=0.02),
        "positions": normal(size.length, model, deviation=0.02),
        "attention_scale": np.ones((layers, model), np.float32),
        "wq": normal(layers, model, heads, kv, deviation=model**-0.5),
        "wk": normal(layers, model, heads, kv, deviation=model**-0.5),
        "wv": normal(layers, model, heads, kv, deviation=model**-0.5),
        "wo": normal(layers, heads, kv, model, deviation=(heads * kv) ** -0.5),
        "feed_scale": np.ones((layers, model), np.float32),
        "w1": normal(layers, model, ff, deviation=model**-0.5),
        "w2": normal(layers, ff, model, deviation=ff**-0.5),
        "final_scale": np.ones((model,), np.float32),
        "projection": normal(model, size.vocab, deviation=model**-0.5),
    }


def batch(seed: int, size: Size = STANDARD) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens and targets, int32[batch, length]."""
    generator = np.random.default_rng(seed)
    shape = (size.batch, size.length)
    tokens = generator.integers(0, size.vocab, shape, dtype=np.int32)
    targets = generator.integers(0, size.vocab, shape, dtype=np.int32)
    return tokens, targets


def make_mesh(data: int = 4, model: int = 2) -> Mesh:
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def place(mesh: Mesh, params: Params, tokens: Any, targets: Any) -> tuple[Params, Any, Any]:
    """Puts parameters and a batch on the mesh, as the two parallel steps take them."""
    rows = NamedSharding(mesh, BATCH_SPEC)
    placed = {
        name: jax.device_put(a, NamedSharding(mesh, PARAMETER_SPECS[name])) for name, a in params.items()
    }
    return placed, jax.device_put(tokens, rows), jax.device_put(targets, rows)


# What all variants share: b batch, q k positions, d d_model, h heads, e d_kv.


def norm(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPSILON) * scale


def attention(h, layer):
    """Causal self-attention over the heads at hand: a partial sum if those are a slice."""
    q = jnp.einsum("bqd,dhe->bhqe", h, layer["wq"])
    k = jnp.einsum("bkd,dhe->bhke", h, layer["wk"])
    v = jnp.einsum("bkd,dhe->bhke", h, layer["wv"])
    scores = jnp.einsum("bhqe,bhke->bhqk", q * q.shape[-1] ** -0.5, k)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, MASKED), axis=-1)
    mixed = jnp.einsum("bhqk,bhke->bhqe", weights, v)
    return jnp.einsum("bhqe,hed->bqd", mixed, layer["wo"])


def feed_forward(h, layer):
    return jax.nn.relu(h @ layer["w1"]) @ layer["w2"]


def cross_entropy(logits, targets):
    # A look-up, not a one-hot sum: faster, and XLA keeps a split vocabulary split here too.
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def sgd(params: Params, gradients: Params) -> Params:
    return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, gradients)


def update(loss: Callable, params: Params, *rows):
    value, gradients = jax.value_and_grad(loss)(params, *rows)
    return value, sgd(params, gradients)


def split_layers(params: Params) -> Params:
    return {name: params[name] for name in STACKED}


# One device.


def single_step() -> Callable:
    def loss(params, tokens, targets):
        def block(x, layer):
            x = x + attention(norm(x, layer["attention_scale"]), layer)
            x = x + feed_forward(norm(x, layer["feed_scale"]), layer)
            return x, None

        x = params["embedding"][tokens] + params["positions"]
        x, _ = lax.scan(block, x, split_layers(params))
        logits = norm(x, params["final_scale"]) @ params["projection"]
        return cross_entropy(logits, targets)

    def step(params, tokens, targets):
        return update(loss, params, tokens, targets)

    return jax.jit(step, donate_argnums=0)


# Global arrays, XLA's partitioner.


def jit_step(mesh: Mesh) -> Callable:
    def constrain(x, *axes):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))

    def loss(params, tokens, targets):
        def block(x, layer):
            x = x + attention(norm(x, layer["attention_scale"]), layer)
            x = constrain(x, "data", None, None)
            x = x + feed_forward(norm(x, layer["feed_scale"]), layer)
            return constrain(x, "data", None, None), None

        x = constrain(params["embedding"][tokens] + params["positions"], "data", None, None)
        x, _ = lax.scan(block, x, split_layers(params))
        logits = norm(x, params["final_scale"]) @ params["projection"]
        logits = constrain(logits, "data", None, "model")
        return cross_entropy(logits, targets)

    def step(params, tokens, targets):
        return update(loss, params, tokens, targets)

    parameters = {name: NamedSharding(mesh, spec) for name, spec in PARAMETER_SPECS.items()}
    rows = NamedSharding(mesh, BATCH_SPEC)
    return jax.jit(
        step,
        in_shardings=(parameters, rows, rows),
        out_shardings=(NamedSharding(mesh, P()), parameters),
        donate_argnums=0,
    )


# Local slices, explicit collectives.


def local_index(ids, slice_size: int):
    """Which `ids` are in this device's slice of the vocabulary, and where (0 if they aren't)."""
    local = ids - lax.axis_index("model") * slice_size
    mine = (local >= 0) & (local < slice_size)
    return mine, jnp.where(mine, local, 0)


def split_embed(table, tokens):
    mine, local = local_index(tokens, table.shape[0])
    return lax.psum(jnp.where(mine[..., None], table[local], 0), "model")


def split_cross_entropy(logits, targets):
    """-log softmax(logits)[targets], vocabulary split: three reductions of [batch, length]."""
    mine, local = local_index(targets, logits.shape[-1])
    highest = lax.pmax(lax.stop_gradient(jnp.max(logits, axis=-1)), "model")
    total = lax.psum(jnp.sum(jnp.exp(logits - highest[..., None]), axis=-1), "model")
    chosen = jnp.take_along_axis(logits, local[..., None], axis=-1)[..., 0]
    chosen = lax.psum(jnp.where(mine, chosen, 0), "model")
    return jnp.log(total) + highest - chosen


def shard_map_step(mesh: Mesh) -> Callable:
    def vary(x, axis):
        return lax.pcast(x, axis, to="varying")

    def loss(params, tokens, targets):
        def block(x, layer):
            # One cast for q, k and v (Megatron's f): one backward all-reduce, not three.
            h = vary(norm(x, layer["attention_scale"]), "model")
            x = x + lax.psum(attention(h, layer), "model")
            h = vary(norm(x, layer["feed_scale"]), "model")
            x = x + lax.psum(feed_forward(h, layer), "model")
            return x, None

        # Cast outside the scan: one all-reduce of each stacked gradient, not one for each layer.
        params = {name: vary(p, "data") for name, p in params.items()}
        x = split_embed(params["embedding"], tokens) + params["positions"]
        x, _ = lax.scan(block, x, split_layers(params))
        logits = vary(norm(x, params["final_scale"]), "model") @ params["projection"]
        return lax.pmean(jnp.mean(split_cross_entropy(logits, targets)), "data")

    def step(params, tokens, targets):
        return update(loss, params, tokens, targets)

    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(PARAMETER_SPECS, BATCH_SPEC, BATCH_SPEC),
            out_specs=(P(), PARAMETER_SPECS),
            check_vma=True,
        ),
        donate_argnums=0,
    )


# Running.


def repeat(step: Callable, params: Params, *rows) -> Callable[[], Any]:
    """A case for `measure.alternate`: each call is the next train step and returns its loss."""

    def run():
        nonlocal params
        value, params = step(params, *rows)
        jax.block_until_ready(params)
        return value

    return run


def cases(size: Size = STANDARD, mesh: Mesh | None = None, seed: int = 0) -> dict[str, Callable[[], Any]]:
    """The three variants, each from the same numbers, ready for `measure.alternate`."""
    mesh = make_mesh() if mesh is None else mesh
    params, rows = init(seed, size), batch(seed, size)
    device = jax.device_put(params), *jax.device_put(rows)
    return {
        "shard_map": repeat(shard_map_step(mesh), *place(mesh, params, *rows)),
        "jit": repeat(jit_step(mesh), *place(mesh, params, *rows)),
        "single": repeat(single_step(), *device),
    }


if __name__ == "__main__":
    from benchmarks.measure import alternate, markdown

    jax.config.update("jax_num_cpu_devices", 8)
    print(markdown(alternate(cases(), rounds=20, warmup=2)))
