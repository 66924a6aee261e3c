"""What XLA's GPU compiler needs to know of a GPU that is not there.

The numbers of a chip are public ones, those of the target specifications in XLA's repository (rounded for
the cache of B200); memory size and bandwidth are those of the hardware profile. The text is a
`GpuTargetConfigProto` of the XLA in JAX 0.10.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..hardware.profile import Hardware


@dataclass(frozen=True)
class GpuModel:
    """A GPU's numbers.

    Attributes:
      title: its name in XLA.
      capability: the major version of its compute capability.
      multiprocessors: their number.
      fp32_units: units for f32 of a multiprocessor.
      shared_memory: bytes of shared memory of a multiprocessor; a block can use 1 KiB less.
      l2_bytes: the second-level cache.
      clock_ghz: the boost clock.
      has_estimates: whether XLA's cost model knows it.
    """

    title: str
    capability: int
    multiprocessors: int
    fp32_units: int
    shared_memory: int
    l2_bytes: int
    clock_ghz: float
    has_estimates: bool = True


GPUS = {
    "a100": GpuModel("NVIDIA A100-SXM4-80GB", 8, 108, 64, 164 << 10, 40 << 20, 1.41, has_estimates=False),
    "h100": GpuModel("NVIDIA H100 80GB HBM3", 9, 132, 128, 228 << 10, 50 << 20, 1.98),
    # The same chip as H100, with other memory.
    "h200": GpuModel("NVIDIA H200 141GB HBM3e", 9, 132, 128, 228 << 10, 50 << 20, 1.98),
    "b200": GpuModel("NVIDIA B200", 10, 148, 128, 228 << 10, 126 << 20, 1.965),
}


def describe_gpu(hardware: Hardware) -> str:
    """The target description of a GPU, as text."""
    gpu = GPUS[hardware.name]
    accelerated = "ACCELERATED_FEATURES" if gpu.capability >= 9 else "NONE"
    return f"""gpu_device_info {{
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: {48 << 10} shared_memory_per_core: {gpu.shared_memory}
  shared_memory_per_block_optin: {gpu.shared_memory - 1024}
  core_count: {gpu.multiprocessors} fpus_per_core: {gpu.fp32_units}
  memory_bandwidth: {hardware.memory_bandwidth:.0f} device_memory_size: {hardware.memory_bytes}
  l2_cache_size: {gpu.l2_bytes} clock_rate_ghz: {gpu.clock_ghz}
  cuda_compute_capability {{ major: {gpu.capability} feature_extension: {accelerated} }}
  name: "{gpu.title}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.title}"
"""


def compile_options(hardware: Hardware) -> dict[str, bool]:
    """The options of every compilation for a GPU."""
    # Without a device Triton matmuls would be tiled by a guess; those of the library are tuned on the device.
    options = {"xla_gpu_enable_triton_gemm": False}
    if GPUS[hardware.name].has_estimates:
        options["xla_gpu_collect_cost_model_stats"] = True
    return options
