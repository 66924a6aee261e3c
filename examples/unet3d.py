"""A 3-D U-Net on volumes that no device holds whole: depth and height are split, as the paper's authors did.

Medical volumes are large and their batches small, so it is space that has to be split. The net is written as
for one device. On a mesh, a convolution sends its neighbours the borders of its block and nothing else: look
at the permutes, and at the memory that each of 8 devices needs for a volume that is planned, not computed.
Then a small one learns to find balls in noise.

Run it: `python examples/unet3d.py`
"""

from collections import Counter
from itertools import pairwise

import jax
import numpy as np

import weft as wf
from weft import nn, optim

wf.cpu_devices(8)  # this computer as 8 devices

MESH, LAYOUT = "deep=4 high=2", "depth:deep height:high"
STEPS = 20

space = wf.dims("depth=16 height=16 width=16")
batch, *channels = wf.dims("batch=2 c0=1 c1=8 c2=16 c3=16")
taps, pair = wf.dims("td=3 th=3 tw=3"), wf.dims("pd=2 ph=2 pw=2")
HALF = {d.name: 2 for d in space}


def weight(window, before, after):
    return nn.declare([*window, before, after], nn.fan_in([*window, before]))


LEVELS = list(pairwise(channels))
NET = {
    "down": [weight(taps, before, after) for before, after in LEVELS],
    "up": [weight(pair, after, before) for before, after in LEVELS[1:]],
    "join": [weight(taps, c.resize(2 * c.size), c.rename("joined")) for c in channels[1:-1]],
    "last": nn.declare(channels[1:2], nn.fan_in(channels[1:2])),
}


def conv(x, kernel, window, **options):
    names = {place.name: tap.name for place, tap in zip(space, window, strict=True)}
    return wf.relu(wf.conv(x, kernel, names, **options))


def logits(net, x):
    x, skips = conv(x, net["down"][0], taps), []
    for kernel in net["down"][1:]:
        skips.append(x)
        x = conv(wf.max_pool(x, HALF), kernel, taps)
    for up, join, skip in reversed(list(zip(net["up"], net["join"], skips, strict=True))):
        name = skip.dims[-1].name
        x = wf.concat([skip, conv(x, up, pair, stride=2, transpose=True)], name)
        x = conv(x, join, taps).rename(joined=name)
    return wf.einsum(x, net["last"], reduce=channels[1:2]) - 1.0


def loss(net, volume, ball):
    """The cross-entropy of each place: is it inside a ball?"""
    guess = logits(net, volume)
    return wf.mean(wf.softplus(guess) - guess * ball)


def overlap(net, volume, ball):
    """Dice: twice what is in both, by the sizes of both."""
    found = (logits(net, volume) > 0).astype("float32")
    return 2 * wf.sum(found * ball) / (wf.sum(found) + wf.sum(ball))


def balls(random):
    """Volumes with a ball each, under noise as strong as they are."""
    grid = np.stack([*np.indices([d.size for d in space])], -1)
    centres, radii = (
        random.uniform(4, 12, (batch.size, 1, 1, 1, 3)),
        random.uniform(3, 6, (batch.size, 1, 1, 1)),
    )
    ball = (np.linalg.norm(grid - centres, axis=-1) < radii).astype(np.float32)
    volume = ball + random.normal(size=ball.shape).astype(np.float32)
    return wf.tensor(volume[..., None], [batch, *space, channels[0]]), wf.tensor(ball, [batch, *space])


def learn(mesh, layout, batches):
    """The net after a step on each batch, and the losses."""
    optimizer = optim.AdamW(1e-2)
    net = nn.init(NET, jax.random.key(0), mesh, layout)
    state, losses = optimizer.init(net), []

    @wf.spmd(mesh=mesh, layout=layout, donate=(0, 1))
    def step(net, state, volume, ball):
        value, grads = wf.value_and_grad(loss)(net, volume, ball)
        return value, *optimizer.update(grads, state, net)

    for volume, ball in batches:
        value, net, state = step(net, state, volume, ball)
        losses.append(value.item())
    return net, losses


def main():
    large = [d.resize(256) for d in space]
    specs = nn.specs(NET), wf.spec([batch, *large, channels[0]]), wf.spec([batch, *large])
    plan, alone = (wf.spmd(wf.grad(loss), *where).plan(*specs) for where in ((MESH, LAYOUT), (None, "")))
    print(f"volumes of 256³: {alone.memory.peak / 2**30:.1f} GiB on one device, ", end="")
    print(f"{plan.memory.peak / 2**30:.1f} GiB on each of 8")
    sent: Counter[str] = Counter()
    for c in plan.collectives:
        sent[f"{c.kind} over {'+'.join(c.axes)}"] += c.bytes * c.count
    for what, count in sent.items():
        print(f"  {what}: {count / 2**20:.2f} MiB")

    random = np.random.default_rng(0)
    batches = [balls(random) for _ in range(STEPS)]
    net, losses = learn(MESH, LAYOUT, batches)
    for number in (*range(0, STEPS, 5), STEPS - 1):
        print(f"step {number:2}  loss {losses[number]:.3f}")
    print(f"overlap with new balls: {wf.spmd(overlap, MESH, LAYOUT)(net, *balls(random)).item():.2f}")

    _, alone = learn(None, "", batches[:3])
    np.testing.assert_allclose(alone, losses[:3], rtol=1e-4)
    print("one device gives the same losses:", *[f"{value:.5f}" for value in alone])


if __name__ == "__main__":
    main()
