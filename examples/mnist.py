"""The image classifier of Mesh-TensorFlow's examples: pictures cut in blocks, a block for each device.

Two convolutions, their mean over filters, two hidden layers, ten classes. There a picture is reshaped to a
grid of blocks by hand, and a convolution for blocks exchanges their borders. Here it has rows and columns,
and the layout cuts them: look at the permutes, which are that exchange. A further axis splits the batch.
After one pass over the pictures, the net is tested on a seventh of them that it has not seen.

Run it: `python examples/mnist.py [FOLDER]`, with the files of MNIST or Fashion-MNIST in the folder (those of
Debian's package dataset-fashion-mnist are found without it). Where there are none, or for `drawn` in its
place, digits are drawn.
"""

import gzip
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np

import weft as wf
from weft import nn, optim

wf.cpu_devices(8)  # this computer as 8 devices

MESH, LAYOUT = "data=2 down=2 across=2", "batch:data rows:down cols:across"
FONT = (
    "75557 26227 71747 71717 55711 74717 74757 71122 75757 75717".split()
)  # five rows of three bits a digit

rows, cols, channels, one, two = wf.dims("rows=28 cols=28 channels=1 one=8 two=8")
tall, wide, first, second, classes = wf.dims("tall=5 wide=5 first=64 second=64 classes=10")


KERNELS = [tall, wide, channels, one], [tall, wide, one, two]
NET = {
    "kernels": [nn.declare(dims, nn.fan_in(dims[:3])) for dims in KERNELS],
    "hidden": [nn.Linear([rows, cols], [first], bias=True), nn.Linear([first], [second], bias=True)],
    "last": nn.Linear([second], [classes], bias=True),
}


def logits(net, x):
    for kernel in net["kernels"]:
        x = wf.relu(wf.conv(x, kernel, window={"rows": "tall", "cols": "wide"}))
    x = wf.mean(x, two)
    for layer in net["hidden"]:
        x = wf.relu(layer(x))
    return net["last"](x)


def loss(net, images, labels):
    return wf.mean(nn.cross_entropy(logits(net, images), labels, classes))


def accuracy(net, images, labels):
    return wf.mean((wf.argmax(logits(net, images), classes) == labels).astype("float32"))


def read(folder, what, header):
    files = sorted(
        folder.glob(f"*-{what}-idx*.gz"), reverse=True
    )  # train-… before t10k-…, which is for the test
    return np.frombuffer(b"".join(gzip.open(file).read()[header:] for file in files), np.uint8)


def drawn(count, random):
    """Digits of 20 by 12 points, somewhere in pictures full of noise."""
    images, labels = random.normal(0, 0.2, (count, 28, 28)), random.integers(0, 10, count)
    for image, label in zip(images, labels, strict=True):
        digit = [[int(row) >> bit & 1 for bit in (2, 1, 0)] for row in FONT[label]]
        down, across = random.integers((2, 6), (7, 11))
        image[down : down + 20, across : across + 12] += np.kron(digit, np.ones((4, 4)))
    return images, labels


def data(folder):
    """Pictures and what they show, as tensors over one batch."""
    if folder.exists():
        images, labels = read(folder, "images", 16).reshape(-1, 28, 28) / 255, read(folder, "labels", 8)
    else:
        images, labels = drawn(3000, np.random.default_rng(0))
    batch = wf.Dim("batch", len(labels))
    images = np.asarray((images - images.mean()) / images.std(), np.float32)
    return wf.tensor(images[..., None], [batch, rows, cols, channels]), wf.tensor(np.int32(labels), [batch])


def learn(mesh, layout, images, labels, steps):
    """The net after `steps` steps of 32 pictures, and the losses."""
    optimizer = optim.AdamW(2e-3)
    net = nn.init(NET, jax.random.key(0), mesh, layout)
    state, losses = optimizer.init(net), []

    @wf.spmd(mesh=mesh, layout=layout, donate=(0, 1))
    def step(net, state, images, labels):
        value, grads = wf.value_and_grad(loss)(net, images, labels)
        return value, *optimizer.update(grads, state, net)

    for number in range(steps):
        value, net, state = step(
            net, state, *(wf.slice(t, "batch", 32 * number, 32) for t in (images, labels))
        )
        losses.append(value.item())
    return net, losses


def main():
    if "--help" in sys.argv or sys.argv[2:]:
        print(__doc__)
        sys.exit(0 if "--help" in sys.argv else 2)
    folder = Path(sys.argv[1] if sys.argv[1:] else "/usr/share/datasets/fashion-mnist")
    if sys.argv[1:] not in ([], ["drawn"]) and not [*folder.glob("*-images-idx*.gz")]:
        sys.exit(f"there are no *-images-idx*.gz in {folder}")
    images, labels = data(folder)
    known = labels.size * 6 // 7
    test = images["batch", known:], labels["batch", known:]

    plan = wf.spmd(wf.grad(loss), MESH, LAYOUT).plan(nn.specs(NET), *test)
    for what, count in Counter(f"{c.kind} over {'+'.join(c.axes)}" for c in plan.collectives).items():
        print(f"{count} × {what}")
    net, losses = learn(MESH, LAYOUT, images, labels, known // 32)
    for number in range(0, len(losses), max(1, len(losses) // 8)):
        print(f"step {number:3}  loss {losses[number]:.3f}")
    share = wf.spmd(accuracy, MESH, LAYOUT)(net, *test).item()
    print(f"{known:,} pictures learned; of {labels.size - known:,} others {share:.1%} are recognised")

    _, alone = learn(None, "", images, labels, 3)
    np.testing.assert_allclose(alone, losses[:3], rtol=1e-4)
    print("one device gives the same losses:", *[f"{value:.5f}" for value in alone])


if __name__ == "__main__":
    main()
