"""The FLOPs of compiled instructions: those of matmuls and convolutions, as in a plan."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .hlo import CALLS, Computation, HloModule, Instruction


def flops(module: HloModule, computation: Computation, instruction: Instruction) -> int:
    """The FLOPs of one run of an instruction, with those of the instructions that are fused into it."""
    return sum(_own_flops(where, one) for where, one in parts_of(module, computation, instruction))


def parts_of(
    module: HloModule, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """An instruction, or those that are fused into it."""
    if instruction.opcode in CALLS:
        yield from module.fused(instruction)
    else:
        yield computation, instruction


def _own_flops(computation: Computation, instruction: Instruction) -> int:
    count = _FLOPS.get(instruction.opcode)
    return count(computation, instruction) if count is not None else 0


def _dot_flops(computation: Computation, dot: Instruction) -> int:
    contracted = [int(d) for d in dot.listed("lhs_contracting_dims")]
    return _product_flops(computation, dot, contracted)


def _product_flops(computation: Computation, product: Instruction, contracted: list[int]) -> int:
    left = computation.operand_arrays(product, 0)
    if not left:
        return 0
    return 2 * math.prod(product.arrays[0].shape) * math.prod(left[0].shape[d] for d in contracted)


def _convolution_flops(computation: Computation, convolution: Instruction) -> int:
    """A convolution multiplies where its window lies on elements, not on padding or between dilated ones."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    arrays = [computation.operand_arrays(convolution, n)[:1] for n in (0, 1)] + [convolution.arrays[:1]]
    if labels is None or not all(arrays):
        return 0
    # A gradient by the GPU library has the labels and the window of the convolution that it belongs to.
    order = LIBRARY_CONVOLUTIONS.get(call_target(convolution), (0, 1, 2))
    lengths, kernel, out = (arrays[n][0].shape for n in order)
    of_input, of_kernel, of_out = labels.groups()
    window = _window(convolution)
    products = 1
    for n, name in enumerate(sorted(letter for letter in of_out if letter.isdigit())):
        sizes = lengths[of_input.index(name)], kernel[of_kernel.index(name)], out[of_out.index(name)]
        products *= _window_products(*sizes, {key: values[n] for key, values in window.items()})
    # The kernel has the input features of one group, and the result the batch of one group.
    outputs = out[of_out.index("b")] * out[of_out.index("f")]
    return 2 * outputs * kernel[of_kernel.index("i")] * products


# The convolutions of the GPU library. Which of the first operand, the second operand and the result is the
# input of the convolution, its kernel and its result.
LIBRARY_CONVOLUTIONS = {
    "__cudnn$convForward": (0, 1, 2),
    "__cudnn$convForwardGraph": (0, 1, 2),
    "__cudnn$convBiasActivationForward": (0, 1, 2),
    "__cudnn$convBackwardInput": (2, 1, 0),
    "__cudnn$convBackwardFilter": (0, 2, 1),
}


def _window(convolution: Instruction) -> dict[str, list[str]]:
    """The settings of each spatial dim of a convolution's window."""
    match = re.search(r"window=\{([^}]*)\}", convolution.attributes)
    parts = (part.split("=", 1) for part in match[1].split()) if match else ()
    return {key: values.split("x") for key, values in parts}


def _window_products(length: int, size: int, steps: int, window: Mapping[str, str]) -> int:
    """The pairs of an output position and a window element that lie on an element of the input."""
    stride, of_input, of_window = (
        int(window.get(key, "1")) for key in ("stride", "lhs_dilate", "rhs_dilate")
    )
    before = int(window.get("pad", "0_0").split("_")[0])
    span = (length - 1) * of_input
    # The TPU compiler writes the batch dims of a matmul as dilated dims of thousands of positions, so these
    # are not tried one by one: every `period`-th lies on an element, if any does.
    common = math.gcd(stride, of_input)
    period = of_input // common
    inverse = pow(stride // common, -1, period)
    count = 0
    for element in range(size):
        offset = element * of_window - before
        if offset % common:
            continue
        # The output positions whose window element lies between the first and the last input element.
        first = max(0, -(offset // stride))
        last = min(steps - 1, (span - offset) // stride)
        first += (-offset // common * inverse - first) % period
        count += max(0, (last - first) // period + 1)
    return count


def _custom_call_flops(computation: Computation, call: Instruction) -> int:
    """A matmul of the GPU libraries, or the FLOPs that a kernel declares."""
    config = call.config
    gemm = config.get("gemm_backend_config")
    if gemm:
        contracted = gemm["dot_dimension_numbers"].get("lhs_contracting_dimensions", [])
        return _product_flops(computation, call, [int(d) for d in contracted])
    if call_target(call) in LIBRARY_CONVOLUTIONS:
        return _convolution_flops(computation, call)
    return declared_cost(call).get("flops", 0)


def declared_cost(call: Instruction) -> dict[str, int]:
    """The `flops` and `bytes_accessed` that a kernel declares (`pl.CostEstimate`); empty if it does not."""
    found: Any = call.config.get("custom_call_config", call.config)
    estimate = found.get("cost_estimate", {}) if isinstance(found, Mapping) else {}
    return {key: int(estimate[key]) for key in ("flops", "bytes_accessed") if key in estimate}


_FLOPS = {"dot": _dot_flops, "convolution": _convolution_flops, "custom-call": _custom_call_flops}


def product_dtype(module: HloModule, computation: Computation, instruction: Instruction) -> str:
    """The dtype of the operands of a matmul or convolution, or ""."""
    for where, one in parts_of(module, computation, instruction):
        if _own_flops(where, one):
            arrays = where.operand_arrays(one, 0)
            return arrays[0].dtype if arrays else ""
    return ""


def call_target(call: Instruction) -> str:
    """What a custom call runs, or ""."""
    return call.attribute("custom_call_target").strip('"')
