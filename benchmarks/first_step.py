"""A process of `startup.py`: the first train step, by hand or in Weft, and its cost from the process start.

    python -m benchmarks.first_step weft 8

It prints the processor time of the process up to the end of the step, and the loss. JAX and Weft are imported
by the cases, so that one does not pay for the other.
"""

import sys
import time

MESHES = {1: (1, 1), 2: (2, 1), 8: (4, 2)}  # data, model


def single(devices: int) -> float:
    import jax

    from benchmarks import handwritten

    params, *rows = jax.device_put((handwritten.init(0), *handwritten.batch(0)))
    return float(handwritten.repeat(handwritten.single_step(), params, *rows)())


def shard_map(devices: int) -> float:
    import jax

    from benchmarks import handwritten

    jax.config.update("jax_num_cpu_devices", devices)
    mesh = handwritten.make_mesh(*MESHES[devices])
    params, *rows = handwritten.place(mesh, handwritten.init(0), *handwritten.batch(0))
    return float(handwritten.repeat(handwritten.shard_map_step(mesh), params, *rows)())


def weft(devices: int) -> float:
    import weft as wf
    from benchmarks import lm

    wf.cpu_devices(devices)
    data, model = MESHES[devices]
    return float(lm.case(lm.step(mesh=f"data={data} model={model}"))())


CASES = {case.__name__: case for case in (single, shard_map, weft)}


if __name__ == "__main__":
    loss = CASES[sys.argv[1]](int(sys.argv[2]))
    print(time.process_time(), loss, flush=True)
