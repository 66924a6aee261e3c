"""A mixture of experts whose experts come to specialise, an expert on each device.

There are eight kinds of tokens, in eight clouds, and each kind has to be rotated differently. A router sends
every token to one of eight small experts; it does not know the kinds. Experts and batch are on one axis:
tokens travel to their expert's device and back. Look at the all-to-alls in the plan, at the table of who
serves whom, and at the balance, which is 1 when all experts have the same amount to do.

Run it: `python examples/moe.py`
"""

import jax
import numpy as np

import weft as wf
from weft import nn, optim

wf.cpu_devices(8)  # this computer as 8 devices

MESH, LAYOUT = "all=8", "batch:all experts:all"
STEPS = 150

batch, tokens, d_model, d_ff = wf.dims("batch=16 tokens=32 d_model=16 d_ff=32")
experts = wf.Dim("experts", 8)

random = np.random.default_rng(0)
CENTRES = random.normal(size=(8, 16)) * 2
TURNS = np.linalg.qr(random.normal(size=(8, 16, 16)))[0]


def draw():
    """Tokens, what is to become of each, and of which kind it is."""
    kind = random.integers(0, 8, (batch.size, tokens.size))
    x = CENTRES[kind] + random.normal(size=(*kind.shape, 16))
    y = np.einsum("btij,btj->bti", TURNS[kind], x)
    return *(wf.tensor(np.float32(a), [batch, tokens, d_model]) for a in (x, y)), kind


def loss(layer, x, y):
    out, router = layer(x)
    error = wf.mean(wf.square(out - y))
    return error + router.balance, (error, router.balance)


def learn(mesh, layout, batches):
    """The layer after a step on each batch, and at each step its error and its balance."""
    optimizer = optim.AdamW(1e-2)
    layer = nn.MixtureOfExperts(d_model, d_ff, experts, capacity=2.0, bias=True)
    layer = nn.init(layer, jax.random.key(0), mesh, layout)
    state, history = optimizer.init(layer), []

    @wf.spmd(mesh=mesh, layout=layout, donate=(0, 1))
    def step(layer, state, x, y):
        grads, seen = wf.grad(loss, has_aux=True)(layer, x, y)
        return seen, *optimizer.update(grads, state, layer)

    for x, y, _ in batches:
        seen, layer, state = step(layer, state, x, y)
        history.append([t.item() for t in seen])
    return layer, history


def main():
    batches = [draw() for _ in range(STEPS)]
    x, y, kind = batches[-1]

    layer, history = learn(MESH, LAYOUT, batches)
    for c in wf.spmd(wf.grad(loss, has_aux=True), MESH, LAYOUT).plan(layer, x, y).collectives:
        print(f"{c.phase:8} {c.kind} over {'+'.join(c.axes)}: {c.bytes:,} bytes")
    for number in (*range(0, STEPS, 25), STEPS - 1):
        error, balance = history[number]
        print(f"step {number:3}  error {error:.3f}  balance {balance:.2f}")

    chosen = wf.spmd(lambda layer, x: layer.route(x)[0].experts, MESH, LAYOUT)(layer, x)
    table = np.zeros((8, 8), int)
    np.add.at(table, (kind, chosen.numpy("batch", "tokens", "pick")[..., 0]), 1)
    print("tokens of each kind, a row, at each expert, a column:", table, sep="\n")
    print(f"{table.max(1).sum() / kind.size:.1%} go where most of their kind do")

    _, alone = learn(None, "", batches[:3])
    np.testing.assert_allclose(alone, history[:3], rtol=1e-4)
    print("one device gives the same errors:", *[f"{error:.5f}" for error, _ in alone])


if __name__ == "__main__":
    main()
