"""The compilers' own estimates of how long an instruction takes.

They are not measurements. The TPU compiler estimates cycles to choose tiles: those of large matmuls are
credible, those of work that memory bounds are two to four times what the memory needs. The GPU compiler has
tables of measured matmuls and collectives, and a roofline for the rest; two known errors are corrected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ..hardware.profile import Hardware
from .flops import call_target
from .hlo import Computation, HloModule, Instruction
from .target import Target
from .traffic import traffic

Estimate = Callable[[HloModule, Computation, Instruction], float | None]

# A number near 2^63 stands for no estimate.
NO_ESTIMATE = 10**12
# The dtypes of the GPU compiler's tables: of both operands and of the result.
TABULATED = {
    ("bf16", "bf16", "bf16"),
    ("f32", "f32", "f32"),
    ("f8e4m3fn", "f8e4m3fn", "bf16"),
    ("f8e4m3fn", "f8e5m2", "bf16"),
    ("f8e5m2", "f8e4m3fn", "bf16"),
}


def estimates_of(target: Target, costs: Mapping[str, float]) -> Estimate:
    """The function that returns the compiler's estimate of an instruction in seconds, or None.

    Args:
      target: what the program was compiled for.
      costs: microseconds of instructions whose text has none.
    """
    generation = target.generation
    if generation is not None:
        return lambda module, computation, one: tpu_seconds(one, generation.clock)
    return lambda module, computation, one: gpu_seconds(module, computation, one, target.hardware, costs)


def tpu_seconds(instruction: Instruction, clock: float) -> float | None:
    """The estimated cycles of an instruction, in seconds."""
    cycles = int(instruction.config.get("window_config", {}).get("estimated_cycles", NO_ESTIMATE))
    return cycles / clock if cycles < NO_ESTIMATE else None


def gpu_seconds(
    module: HloModule,
    computation: Computation,
    instruction: Instruction,
    hardware: Hardware,
    costs: Mapping[str, float],
) -> float | None:
    """The estimate of XLA's GPU cost model."""
    listed = instruction.config.get("reification_cost") or []
    by_model = {one["name"]: float(one["exec_time_us"]) * 1e-6 for one in listed}
    if not by_model:
        return costs[instruction.name] * 1e-6 if instruction.name in costs else None
    if instruction.opcode == "fusion" and instruction.config.get("fusion_backend_config", {}).get(
        "kind", ""
    ).startswith("__triton"):
        # The other models return 0, or minutes, for these.
        return by_model.get("indexing-cost-model")
    seconds = by_model.get("sol", by_model.get(""))
    if seconds is None or not math.isfinite(seconds):  # infinite: "Infinity", as text
        return None
    if call_target(instruction).startswith("__cublas"):
        arrays = [computation.operand_arrays(instruction, n)[0] for n in (0, 1)] + [instruction.arrays[0]]
        if tuple(array.dtype for array in arrays) not in TABULATED:
            # For other dtypes the model scales each of the three sizes by the bytes of an element of the
            # result, and does not undo it.
            seconds /= (arrays[2].bits / 8) ** 3
        # The tables are those of large matmuls, and ignore the memory.
        seconds = max(seconds, traffic(module, computation, instruction) / hardware.memory_bandwidth)
    return seconds
