"""An op of your own: a recurrence along a dim, by JAX's parallel scan, with a derivative of its own.

    h[t] = decay[t] · h[t-1] + x[t]

Weft has no function for `jax.lax.associative_scan`. `wf.local` passes it the slices, and declares which dims
may be split: all but `length`, along which the scan needs every position. Look at the error for a layout that
splits `length`, at the layouts that just work, and at the gradient, a `wf.custom_vjp`: the same scan from the
other end. It keeps only h, not the levels of the scan, and so needs less memory than JAX's derivative.

Run it: `python examples/custom_op.py`
"""

import jax
import numpy as np

import weft as wf

wf.cpu_devices(8)  # this computer as 8 devices

MESH, LAYOUT = "data=4 model=2", "batch:data features:model"
OTHERS = ["features:data+model", "batch:model", ""]

batch, length, features = wf.dims("batch=8 length=64 features=16")


def scanned(decay, x, reverse=False):
    """The recurrence, from the first place to the last or back."""
    place = x.dims.index(length)

    def along(decay, x):  # plain JAX: what one device holds of the two
        def join(early, late):
            return early[0] * late[0], early[1] * late[0] + late[1]

        return jax.lax.associative_scan(join, (decay, x), reverse=reverse, axis=place)[1]

    return wf.local(along, decay, x, out=x.dims, splittable=[d for d in x.dims if d != length])


@wf.custom_vjp
def recurrence(decay, x):
    return scanned(decay, x)


def forward(decay, x):
    h = scanned(decay, x)
    return h, (decay, h)


def backward(kept, slope):
    decay, h = kept
    slope_x = scanned(wf.shift(decay, length, -1), slope, reverse=True)  # x[t] is in h[t], h[t+1], …
    return slope_x * wf.shift(h, length, 1), slope_x


recurrence.defvjp(forward, backward)


def one_by_one(decay, x):
    """The same as a loop over the places."""
    start = wf.zeros([d for d in x.dims if d != length])

    def step(h, item):
        h = item[0] * h + item[1]
        return h, h

    return wf.transpose(wf.scan(step, start, (decay, x), length)[1], x.dims)


def gradient(op):
    return wf.value_and_grad(lambda decay, x: wf.mean(wf.square(op(decay, x))), argnums=(0, 1))


def main():
    keys = jax.random.split(jax.random.key(0))
    decay = wf.random.uniform(keys[0], [batch, length, features])
    x = wf.random.normal(keys[1], [batch, length, features])

    value, slopes = wf.spmd(gradient(recurrence), MESH, LAYOUT)(decay, x)
    value_loop, slopes_loop = wf.spmd(gradient(one_by_one), MESH, LAYOUT)(decay, x)
    print(f"mean square {value.item():.6f}, by a loop {value_loop.item():.6f}")
    for ours, loop in zip(slopes, slopes_loop, strict=True):
        np.testing.assert_allclose(ours.numpy(), loop.numpy(), atol=1e-6)
    print("the gradients agree with the loop's")

    ours, plain = (wf.spmd(gradient(op), MESH, LAYOUT).plan(decay, x) for op in (recurrence, scanned))
    print(f"peak memory {ours.memory.peak:,} bytes, with JAX's derivative {plain.memory.peak:,}")

    found = wf.verify(gradient(recurrence), (decay, x), MESH, [LAYOUT, *OTHERS])
    print(f"{len(found) // 3} layouts give what one device gives\n")
    try:
        wf.spmd(recurrence, MESH, "length:data")(decay, x)
    except wf.LayoutError as error:
        print(error)


if __name__ == "__main__":
    main()
