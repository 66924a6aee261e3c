"""The worked example of the Mesh-TensorFlow paper: two fully-connected layers in five layouts.

    y = relu(x · w) · v        x, y: [batch, io]   w: [io, hidden]   v: [hidden, io]

The function is written once. Each layout below gives another parallel program: which slices a device
holds, which collectives run and how many bytes they carry, in the value and in the gradients of w, v and x.
The results are the same.

Run it: `python examples/two_layers.py`
"""

import numpy as np

import weft as wf

wf.cpu_devices(8)  # this computer as 8 devices

batch, io, hidden = wf.dims("batch=64 io=256 hidden=1024")


def mlp(x, w, v):
    h = wf.relu(wf.einsum(x, w, out=[batch, hidden]))
    return wf.einsum(h, v, out=[batch, io])


def loss(w, v, x):
    return wf.sum(wf.square(mlp(x, w, v) - 1.0)) / batch.size


step = wf.value_and_grad(loss, argnums=(0, 1, 2))

LAYOUTS = [
    ("A  nothing split", "all=8", ""),
    ("B  data-parallel", "all=8", "batch:all"),
    ("C  model-parallel", "all=8", "hidden:all"),
    ("D  both", "rows=4 cols=2", "batch:rows hidden:cols"),
    ("E  all three dims", "rows=2 cols=2 planes=2", "batch:rows hidden:cols io:planes"),
]


def formula(mesh, layout):
    """The paper's count of values that one processor sends into all-reduces (section 8, Table 1)."""
    n = {dim: mesh.ways(layout.rules_for().get(dim, ())) for dim in ("batch", "io", "hidden")}
    b, d_io, d_h = batch.size / n["batch"], io.size / n["io"], hidden.size / n["hidden"]
    sums = {"hidden": b * d_io, "io": b * d_h, "batch": d_io * d_h}  # the slice that is left
    return sum(2 * size for dim, size in sums.items() if n[dim] > 1)


def main():
    draw = np.random.default_rng(0)
    x = wf.tensor(draw.normal(size=(64, 256)).astype(np.float32), [batch, io])
    w = wf.tensor(draw.normal(size=(256, 1024)).astype(np.float32) / 16, [io, hidden])
    v = wf.tensor(draw.normal(size=(1024, 256)).astype(np.float32) / 32, [hidden, io])

    print("y = relu(x · w) · v, loss and gradients of w, v and x\n")
    value, grads = step(w, v, x)  # op by op, on one device
    print(f"one device: loss {value.item():.6f}\n")
    for name, mesh, layout in LAYOUTS:
        program = wf.spmd(step, mesh, layout)
        other_value, other_grads = program(w, v, x)
        print(f'{name}   mesh "{mesh}"   layout "{layout}"')
        placed = [wf.place(t, program.mesh, program.layout) for t in (x, w, v)]
        slices = ", ".join(
            f"{n} {list(t.storage.sharding.shard_shape(t.storage.shape))}"
            for n, t in zip("xwv", placed, strict=True)
        )
        print(f"  slices: {slices}")
        total = 0
        for c in program.collectives(w, v, x):
            scalar = c.bytes <= 4
            total += 0 if scalar else c.bytes * c.count
            print(f"  {c.kind:<10}  {'+'.join(c.axes):<7}  {c.bytes * c.count:>9,}  {c.op.split('/')[-1]}")
        planned = 4 * int(formula(program.mesh, program.layout))
        print(f"  bytes without the scalar loss: {total:,}   by the paper: {planned:,}")
        assert total == planned
        worst = max(
            np.abs(a.numpy() - b.numpy()).max() / np.abs(a.numpy()).max()
            for a, b in zip((value, *grads), (other_value, *other_grads), strict=True)
        )
        print(f"  largest difference to one device: {worst:.1e} (relative)\n")
        assert worst < 1e-5
    print("All five agree.")


if __name__ == "__main__":
    main()
