"""GPT in about a hundred lines: a language model of bytes, on as many devices as one line says.

A decoder-only Transformer in full: weights are declared by their dims, a layer is a few einsums, the stack is
a scan over `layers`. It reads a text, learns to continue it from any position, and generates more. Look for
what is about devices: `MESH` and `LAYOUT`, which split data and model, and nothing else.

Run it: `python examples/gpt.py [FILE [STEPS]]`; without a file it reads its own source.
"""

import sys
from pathlib import Path

import jax
import numpy as np

import weft as wf
from weft import nn, optim

given = sys.argv[1:] + [__file__, "300"][len(sys.argv) - 1 :]
if len(given) != 2 or not Path(given[0]).is_file() or not given[1].isdecimal():
    print(__doc__)
    sys.exit(0 if "--help" in given else 2)

wf.cpu_devices(8)  # this computer as 8 devices

MESH, LAYOUT = "data=4 model=2", "batch:data heads:model d_ff:model vocab:model"
STEPS, WRITTEN = int(given[1]), 150

batch, length, vocab, layers = wf.dims("batch=16 length=64 vocab=256 layers=2")
d_model, heads, d_kv, d_ff = wf.dims("d_model=64 heads=4 d_kv=16 d_ff=256")
memory = length.rename("memory")


def weight(before, after):
    return nn.declare([*before, *after], nn.fan_in(before))


LAYER = {
    "scales": [nn.declare([d_model], nn.ones), nn.declare([d_model], nn.ones)],
    "qkv": [weight([d_model], [heads, d_kv]) for _ in range(3)],
    "out": weight([heads, d_kv], [d_model]),
    "feed": [weight([d_model], [d_ff]), weight([d_ff], [d_model])],
}
GPT = {
    "table": nn.declare([vocab, d_model], nn.Normal(0.1)),
    "places": nn.declare([length, d_model], nn.Normal(0.1)),
    "layers": nn.stack(LAYER, layers),  # every weight with a dim more
    "scale": nn.declare([d_model], nn.ones),
}


def norm(x, scale):
    return x * wf.rsqrt(wf.mean(wf.square(x), d_model) + 1e-6) * scale


def layer(x, w):
    """x, to which attention to the places before is added, and then a feed-forward block."""
    q, k, v = (wf.einsum(norm(x, w["scales"][0]), w_, reduce=[d_model]) for w_ in w["qkv"])
    scores = wf.einsum(q, k.rename(length="memory"), reduce=[d_kv]) / d_kv.size**0.5
    scores = wf.where(wf.arange(length) >= wf.arange(memory), scores, -np.inf)
    mixed = wf.einsum(wf.softmax(scores, memory), v.rename(length="memory"), reduce=[memory])
    x = x + wf.einsum(mixed, w["out"], reduce=[heads, d_kv])
    h = wf.gelu(wf.einsum(norm(x, w["scales"][1]), w["feed"][0], reduce=[d_model]))
    return x + wf.einsum(h, w["feed"][1], reduce=[d_ff])


def logits(model, text):
    x = wf.take(model["table"], text, vocab) + model["places"]
    x, _ = wf.scan(lambda x, w: (layer(x, w), None), x, model["layers"], layers)
    return wf.einsum(norm(x, model["scale"]), model["table"], reduce=[d_model])


def loss(model, text):
    return wf.mean(nn.cross_entropy(logits(model, text["length", :-1]), text["length", 1:], vocab))


def learn(mesh, layout, text, steps):
    optimizer, draw = optim.AdamW(6e-3), np.random.default_rng(0)
    model = nn.init(GPT, jax.random.key(0), mesh, layout)
    state, losses = optimizer.init(model), []

    @wf.spmd(mesh=mesh, layout=layout, donate=(0, 1))
    def step(model, state, text):
        value, grads = wf.value_and_grad(loss)(model, text)
        return value, *optimizer.update(grads, state, model)

    for number in range(steps):
        starts = draw.integers(0, len(text) - 64, (16, 1))
        rows = wf.tensor(np.int32(text[starts + np.arange(65)]), [batch, length.resize(65)])
        value, model, state = step(model, state, rows)
        losses.append(value.item())
        if number % 25 == 0 or number == STEPS - 1:
            print(f"step {number:3}  loss {value.item():.4f}")
    return model, losses


text = np.frombuffer(Path(given[0]).read_bytes(), np.uint8)
assert len(text) > 65 and STEPS > 0, "too little to learn from"
model, losses = learn(MESH, LAYOUT, text, STEPS)
written, speak = list(text[:64]), wf.spmd(lambda *a: logits(*a)["length", -1], MESH, LAYOUT)
for key in jax.random.split(jax.random.key(1), WRITTEN):
    last = wf.tensor(np.array([written[-64:]], np.int32), [batch.resize(1), length])
    written.append(wf.random.categorical(key, speak(model, last) / 0.5, vocab).numpy()[0])
print("", bytes(written).decode(errors="replace"), "", "one device:", sep="\n")
np.testing.assert_allclose(learn(None, "", text, 1)[1], losses[:1], rtol=1e-5)
