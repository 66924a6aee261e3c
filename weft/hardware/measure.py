"""Measures this CPU and returns a hardware profile."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..core.devices import cpu_devices
from ..core.dims import Dim, dims
from ..core.layout import Layout
from ..core.mesh import Mesh
from ..core.placement import place
from ..core.program import Program, spmd
from ..core.tensor import Tensor
from ..ops import reduce
from ..ops.creation import full, ones, zeros
from ..ops.einsum import einsum
from ..ops.scan import scan
from .profile import Hardware, NetworkLevel

REPEATS = 9
# Rows, inner size and columns of matmuls that are typical of the slices of a Transformer.
_PRODUCTS = ((2048, 256, 256), (256, 2048, 256), (256, 256, 2048), (512, 512, 512), (256, 1024, 256))


def measure_cpu(devices: int = 8) -> Hardware:
    """Measure this CPU, used as virtual devices, with small Weft programs.

    Run it on an idle machine, in a process that has not used JAX yet. All devices work at once, as in a real
    program, so they share the cores; the profile has the numbers of one core.
    """
    cpu_devices(devices)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    mesh, layout = Mesh(f"d={devices}"), Layout("slice:d")
    slices, iterations = Dim("slice", devices), Dim("times", 8)

    def seconds(body: Callable[..., Tensor], *args: Tensor) -> float:
        """Seconds of one call of `body` on all devices. Results are newly allocated, as in a real program."""
        return _median_seconds(spmd(body, mesh, layout), *(place(a, mesh, layout) for a in args))

    def looped(body: Callable[[Tensor], Tensor], carry: Tensor) -> float:
        """Seconds of one run of `body` inside a program, without the overhead of a call."""

        def loop(carry: Tensor) -> Tensor:
            return scan(lambda c, _: (body(c), None), carry, zeros([iterations]), iterations)[0]

        return seconds(loop, carry) / iterations.size

    def memory(size: int) -> float:
        """Bytes/s of one core that reads and writes `size` floats on each device."""
        x = ones([slices, Dim("n", size)])
        return 2 * 4 * size * devices / seconds(lambda x: x * 0.5 + 1.0, x) / cores

    def matmul(rows: int, inner: int, columns: int, dtype: DTypeLike) -> float:
        """FLOP/s of one core in matmuls of these sizes, without the time of their memory traffic."""
        row, i, o = dims(f"row={rows} i={inner} o={columns}")
        x, w = ones([slices, row, i], dtype), full([slices, i, o], 1 / inner, dtype)
        elapsed = seconds(lambda x, w: einsum(x, w, out=[slices, row, o]), x, w) * cores / devices
        traffic = (rows * inner + inner * columns + rows * columns) * jnp.dtype(dtype).itemsize
        # Traffic of cached operands costs less than the bandwidth says: subtract half of the time at most.
        return 2 * rows * inner * columns / max(elapsed - traffic / bandwidth, elapsed / 2)

    def all_reduce(size: int) -> float:
        """Seconds of an all-reduce of `size` floats over all devices."""
        n = Dim("n", size)
        x = ones([slices, n])

        def body(x: Tensor) -> Tensor:
            # The zeros have the dim that the sum removes, so that the result can be the next carry.
            return reduce.sum(x, "slice") * 0.5 + zeros([slices, n])

        return max(looped(body, x) - looped(lambda x: x * 0.5 + 1.0, x), 1e-9)

    bandwidth = statistics.median(memory(1 << bits) for bits in (21, 20, 19, 18, 20, 21))
    rates = sorted(matmul(*sizes, jnp.float32) for sizes in _PRODUCTS)
    bf16_rate = max(matmul(*sizes, jnp.bfloat16) for sizes in _PRODUCTS)
    sharing = devices / cores
    latency = all_reduce(16) / sharing  # threads synchronize once per collective
    wire = 2 * 4 * (1 << 19) * (devices - 1) / devices
    transfer = max(all_reduce(1 << 19) - latency * sharing, 1e-9)
    return Hardware(
        name="cpu",
        source=f"measured by weft hardware measure, {devices} virtual devices on {cores} cores",
        devices_per_node=cores,
        peak_flops={"f32": rates[-1], "bf16": bf16_rate},
        matmul_efficiency=rates[len(rates) // 2] / rates[-1],
        memory_bytes=_ram() // devices,
        memory_bandwidth=bandwidth,
        network=(NetworkLevel("memory copies", wire * sharing / transfer, latency),),
        shared_cores=cores,
        platform="cpu",
    )


def _median_seconds(program: Program, *args: Tensor) -> float:
    """The median time of a call, after a first call that compiles."""

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(jax.tree.leaves(program(*args)))
        return time.perf_counter() - start

    once()
    return statistics.median(once() for _ in range(REPEATS))


def _ram() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not available on this system
        return 8 << 30
