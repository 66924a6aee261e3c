"""This CPU as a hardware profile, measured with programs of Weft's own."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..core.devices import cpu_devices
from ..core.dims import Dim, dims
from ..core.layout import Layout
from ..core.mesh import Mesh
from ..core.placement import place
from ..core.program import spmd
from ..ops import reduce
from ..ops.creation import full, ones, zeros
from ..ops.einsum import einsum
from ..ops.scan import scan
from .profile import Hardware, NetworkLevel

REPEATS = 9
# Rows, inner and columns of the products that a Transformer's slices make.
_PRODUCTS = ((2048, 256, 256), (256, 2048, 256), (256, 256, 2048), (512, 512, 512), (256, 1024, 256))


def measure_cpu(devices: int = 8) -> Hardware:
    """This CPU as that many virtual devices, measured with programs of Weft's own.

    Run it on a quiet machine, and in a process that has not used JAX yet. All devices work at once, as
    in a real program, and so the times are those of shared cores; the numbers are then those of one core.
    """
    cpu_devices(devices)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    mesh, layout = Mesh(f"d={devices}"), Layout("slice:d")
    slices, times = Dim("slice", devices), Dim("times", 8)

    def seconds(body: Callable[..., Any], *args: Any) -> float:
        """Of one call of `body` on all devices; its results are new memory, as in a real program."""
        return _typical(spmd(body, mesh, layout), *(place(a, mesh, layout) for a in args))

    def looped(body: Callable[[Any], Any], carry: Any) -> float:
        """Of one run of `body` on all devices inside a program, without what a call costs."""

        def loop(carry: Any) -> Any:
            return scan(lambda c, _: (body(c), None), carry, zeros([times]), times)[0]

        return seconds(loop, carry) / times.size

    def memory(size: int) -> float:
        """Bytes/s of one core, reading and writing that many floats on each device."""
        x = ones([slices, Dim("n", size)])
        return 2 * 4 * size * devices / seconds(lambda x: x * 0.5 + 1.0, x) / cores

    def matmul(rows: int, inner: int, columns: int, dtype: Any) -> float:
        """FLOP/s of one core in products of these sizes on each device, without their memory traffic."""
        row, i, o = dims(f"row={rows} i={inner} o={columns}")
        x, w = ones([slices, row, i], dtype), full([slices, i, o], 1 / inner, dtype)
        taken = seconds(lambda x, w: einsum(x, w, out=[slices, row, o]), x, w) * cores / devices
        moved = (rows * inner + inner * columns + rows * columns) * jnp.dtype(dtype).itemsize
        return 2 * rows * inner * columns / max(taken - moved / bandwidth, taken / 2)

    def all_reduce(size: int) -> float:
        """Seconds of the sum over all devices of that many floats."""
        n = Dim("n", size)
        x = ones([slices, n])

        def body(x: Any) -> Any:
            return reduce.sum(x, "slice") * 0.5 + zeros([slices, n])

        return max(looped(body, x) - looped(lambda x: x * 0.5 + 1.0, x), 1e-9)

    bandwidth = statistics.median(memory(1 << bits) for bits in (21, 20, 19, 18, 20, 21))
    rates = sorted(matmul(*sizes, jnp.float32) for sizes in _PRODUCTS)
    half = max(matmul(*sizes, jnp.bfloat16) for sizes in _PRODUCTS)
    sharing = devices / cores
    latency = all_reduce(16) / sharing  # of one collective: threads meet once
    wire = 2 * 4 * (1 << 19) * (devices - 1) / devices
    moving = max(all_reduce(1 << 19) - latency * sharing, 1e-9)
    return Hardware(
        name="cpu",
        source=f"measured by weft hardware measure, {devices} virtual devices on {cores} cores",
        devices_per_node=cores,
        peak_flops={"f32": rates[-1], "bf16": half},
        matmul_efficiency=rates[len(rates) // 2] / rates[-1],
        memory_bytes=_ram() // devices,
        memory_bandwidth=bandwidth,
        network=(NetworkLevel("memory copies", wire * sharing / moving, latency),),
        shared_cores=cores,
    )


def _typical(program: Any, *args: Any) -> float:
    """The median of the seconds of a call, after a first one that compiles."""

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(jax.tree.leaves(program(*args)))
        return time.perf_counter() - start

    once()
    return statistics.median(once() for _ in range(REPEATS))


def _ram() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on this system
        return 8 << 30
