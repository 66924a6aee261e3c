"""Multi-head causal attention from scratch: einsum, rename, softmax and a mask.

Queries and keys are over the same positions, and their products need both. So the keys' dim gets a name of
its own, `memory`. Heads are split over `model`: each device works on its own heads from beginning to end,
and only the last einsum, which sums over heads, needs an all-reduce. Look at the collectives that the plan
lists, at the gradients', and at how far the result is from JAX's own attention.

Run it: `python examples/attention.py`
"""

import jax
import numpy as np

import weft as wf

wf.cpu_devices(8)  # this computer as 8 devices

MESH, LAYOUT = "data=4 model=2", "batch:data heads:model"

batch, length, d_model, heads, d_kv = wf.dims("batch=8 length=32 d_model=64 heads=4 d_kv=16")
memory = length.rename("memory")


def attention(weights, x):
    q, k, v = (wf.einsum(x, weights[name], reduce=[d_model]) for name in "qkv")
    k, v = k.rename(length="memory"), v.rename(length="memory")
    scores = wf.einsum(q, k, reduce=[d_kv]) / d_kv.size**0.5  # [batch, length, heads, memory]
    seen = wf.arange(length) >= wf.arange(memory)
    shares = wf.softmax(wf.where(seen, scores, -np.inf), memory)
    mixed = wf.einsum(shares, v, reduce=[memory])
    return wf.einsum(mixed, weights["out"], out=[batch, length, d_model])


def loss(weights, x):
    return wf.mean(wf.square(attention(weights, x)))


def in_jax(weights, x):
    """The same with JAX's attention, on arrays: [batch, length, heads, d_kv], in this order."""
    x, w = x.array, {name: weight.array for name, weight in weights.items()}
    q, k, v = (jax.numpy.einsum("blm,mhd->blhd", x, w[name]) for name in "qkv")
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return jax.numpy.einsum("blhd,hdm->blm", mixed, w["out"])


def show(title, plan):
    print(title)
    for c in plan.collectives:
        print(f"  {c.phase:8} {c.kind} over {'+'.join(c.axes)}: {c.bytes:,} bytes, for {c.op.split('/')[-1]}")


def main():
    keys = iter(jax.random.split(jax.random.key(0), 5))
    weights = {name: wf.random.normal(next(keys), [d_model, heads, d_kv]) / 8 for name in "qkv"}
    weights["out"] = wf.random.normal(next(keys), [heads, d_kv, d_model]) / 8
    x = wf.random.normal(next(keys), [batch, length, d_model])

    program = wf.spmd(attention, MESH, LAYOUT)
    step = wf.spmd(wf.value_and_grad(loss), MESH, LAYOUT)
    show("the attention:", program.plan(weights, x))
    show("with gradients:", step.plan(weights, x))

    apart = np.abs(program(weights, x).numpy() - in_jax(weights, x)).max()
    print(f"largest difference to jax.nn.dot_product_attention: {apart:.1e}")
    assert apart < 1e-5
    found = wf.verify(wf.value_and_grad(loss), (weights, x), MESH, [LAYOUT])
    print(f"{len(found)} values and gradients are the same as on one device")


if __name__ == "__main__":
    main()
