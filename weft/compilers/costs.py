"""The FLOPs and the memory traffic of compiled instructions.

FLOPs are those of matmuls and convolutions, as in a plan. Traffic is what an instruction reads from and
writes to the device's main memory, with the padding of tiles: a slice of an array counts as the slice, an
update in place as the update, and an array that the compiler put on the chip as nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .hlo import Array, Computation, HloModule, Instruction

# Instructions that give an array another shape or name, and move nothing.
VIEWS = ("bitcast", "reshape")
PASSING = (*VIEWS, "copy", "convert", "transpose")  # each element of the result is one of the operand
SLICES = ("dynamic-slice", "slice", "gather")


# FLOPs


def flops(module: HloModule, computation: Computation, instruction: Instruction) -> int:
    """The FLOPs of one run of an instruction, with those of the instructions that are fused into it."""
    return sum(_own_flops(where, one) for where, one in _parts(module, computation, instruction))


def _parts(
    module: HloModule, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """An instruction, or those that are fused into it."""
    if instruction.opcode in ("fusion", "async-start"):
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
    left, right = (computation.operand_arrays(convolution, n) for n in (0, 1))
    if labels is None or not left or not right:
        return 0
    of_left, of_kernel, of_out = labels.groups()
    lengths, kernel, out = left[0].shape, right[0].shape, convolution.arrays[0].shape
    window = _window(convolution)
    products = 1
    for n, name in enumerate(sorted(letter for letter in of_out if letter.isdigit())):
        sizes = lengths[of_left.index(name)], kernel[of_kernel.index(name)], out[of_out.index(name)]
        products *= _window_products(*sizes, {key: values[n] for key, values in window.items()})
    groups = int(convolution.attribute("batch_group_count") or 1)
    outputs = out[of_out.index("b")] * out[of_out.index("f")]
    return 2 * outputs * kernel[of_kernel.index("i")] * products // groups


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
    count = 0
    for element in range(size):
        offset = element * of_window - before
        # The output positions whose window element lies between the first and the last input element.
        first = max(0, -(offset // stride)) if offset < 0 else 0
        last = min(steps - 1, (span - offset) // stride)
        if of_input == 1:
            count += max(0, last - first + 1)
        else:
            count += sum((p * stride + offset) % of_input == 0 for p in range(first, last + 1))
    return count


def _custom_call_flops(computation: Computation, call: Instruction) -> int:
    """A matmul of the GPU libraries, or the FLOPs that a kernel declares."""
    config = call.config
    gemm = config.get("gemm_backend_config")
    if gemm:
        contracted = gemm["dot_dimension_numbers"]["lhs_contracting_dimensions"]
        return _product_flops(computation, call, [int(d) for d in contracted])
    return declared_cost(call).get("flops", 0)


def declared_cost(call: Instruction) -> dict[str, int]:
    """The `flops` and `bytes_accessed` that a kernel declares (`pl.CostEstimate`); empty if it does not."""
    found: Any = call.config.get("custom_call_config", call.config)
    estimate = found.get("cost_estimate", {}) if isinstance(found, Mapping) else {}
    return {key: int(estimate[key]) for key in ("flops", "bytes_accessed") if key in estimate}


_FLOPS = {"dot": _dot_flops, "convolution": _convolution_flops, "custom-call": _custom_call_flops}


def product_dtype(module: HloModule, computation: Computation, instruction: Instruction) -> str:
    """The dtype of the operands of a matmul or convolution, or ""."""
    for where, one in _parts(module, computation, instruction):
        if _own_flops(where, one):
            arrays = where.operand_arrays(one, 0)
            return arrays[0].dtype if arrays else ""
    return ""


# Memory traffic


def traffic(module: HloModule, computation: Computation, instruction: Instruction) -> int:
    """The bytes of main memory that one run of an instruction reads and writes."""
    opcode = instruction.opcode
    operands = [computation.operand_arrays(instruction, n) for n in range(len(instruction.operands))]
    if opcode == "fusion":
        return _fusion_traffic(module, computation, instruction)
    if opcode in ("copy-start", "slice-start"):
        return _copied(instruction)
    if opcode == "dynamic-update-slice":
        return 2 * _memory(operands[1])
    if opcode in SLICES:
        return 2 * _memory(instruction.arrays)
    if opcode == "scatter":
        return 3 * _memory(operands[-1])
    if opcode == "custom-call":
        if declared := declared_cost(instruction).get("bytes_accessed"):
            return declared
        if call_target(instruction) in NO_WORK:
            return 0
        # The second result of a library's matmul is its workspace.
        return _memory(instruction.arrays[:1]) + sum(map(_memory, operands))
    return _memory(instruction.arrays) + sum(map(_memory, operands))


# Custom calls of the compilers that allocate or annotate, and move nothing.
NO_WORK = (
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "ConcatBitcast",
    "PrepareAsyncCallDone",
    "PrepareAsyncCallStart",
)


def call_target(call: Instruction) -> str:
    """What a custom call runs, or ""."""
    return call.attribute("custom_call_target").strip('"')


def _memory(arrays: tuple[Array, ...]) -> int:
    return sum(array.memory_bytes for array in arrays)


def _copied(start: Instruction) -> int:
    """The bytes of main memory that an asynchronous copy, or a copy of a slice, reads and writes."""
    first, second = start.arrays[:2]
    target, source = (first, second) if start.opcode == "copy-start" else (second, first)
    return target.memory_bytes + (0 if source.space else target.padded_bytes)


def is_prefetch(instruction: Instruction) -> bool:
    """Whether it is an asynchronous copy between the main memory and the chip, while other work runs."""
    if instruction.opcode not in ("copy-start", "slice-start"):
        return False
    first, second = instruction.arrays[:2]
    return first.space != second.space


def _fusion_traffic(module: HloModule, computation: Computation, fusion: Instruction) -> int:
    called = module.called(fusion)
    if called is None:
        return 0
    read = updated = 0
    for n in range(len(fusion.operands)):
        full = _memory(computation.operand_arrays(fusion, n))
        if not full or n not in called.parameters:
            continue
        uses = list(_uses(module, called, called.parameters[n].name))
        if uses and all(use.opcode in SLICES for _, use, _ in uses):
            read += min(full, sum(_padded(use.arrays) for _, use, _ in uses))
        elif uses and all(_updates(use, name) for _, use, name in uses):
            # The fusion writes a part of the operand, in place.
            read += sum(_padded(where.operand_arrays(use, 1)) for where, use, _ in uses)
            updated += full
        else:
            read += full
    return read + max(0, _memory(fusion.arrays) - updated)


def _uses(
    module: HloModule,
    computation: Computation,
    name: str,
    outer: tuple[tuple[Computation, str], ...] = (),
) -> Iterator[tuple[Computation, Instruction, str]]:
    """The instructions of a fusion that use a value, each with its computation and the value's name there.

    Instructions that pass elements on are not uses, because a fusion computes only the elements that it needs:
    a slice of a copy reads a slice. Fusions in the fusion are looked into; `outer` has the computation and
    the name of each that encloses the value.
    """
    for user in computation.users[name]:
        called = module.called(user) if user.opcode == "fusion" else None
        if user.opcode in PASSING and not user.is_root:
            yield from _uses(module, computation, user.name, outer)
        elif user.opcode in PASSING and outer:
            (where, fusion), *rest = outer
            yield from _uses(module, where, fusion, tuple(rest))
        elif called is not None:
            for n, operand in enumerate(user.operands):
                if operand == name and n in called.parameters:
                    inside = ((computation, user.name), *outer)
                    yield from _uses(module, called, called.parameters[n].name, inside)
        else:
            yield computation, user, name


def _updates(use: Instruction, name: str) -> bool:
    """Whether an instruction only updates a part of this operand."""
    return use.opcode == "dynamic-update-slice" and use.operands[0] == name and name not in use.operands[1:]


def _padded(arrays: tuple[Array, ...]) -> int:
    return sum(array.padded_bytes for array in arrays)


# Kinds


def kind_of(module: HloModule, instruction: Instruction) -> str:
    """What an instruction does, for reports: matmul, random, copy, reduce, elementwise, …"""
    if instruction.opcode == "custom-call":
        target = call_target(instruction)
        return "matmul" if target.startswith("__cublas") else f"custom call {target}"
    if is_prefetch(instruction):
        return "prefetch"
    inner = {one.opcode for _, one in module.fused(instruction)} or {instruction.opcode}
    for kind, opcodes in KINDS.items():
        if inner & opcodes:
            return kind
    if inner <= COPIES:
        return "copy"
    # Threefry is a long chain of additions, shifts and xors.
    if {"xor", "shift-right-logical", "add"} <= inner or "rng-bit-generator" in inner:
        return "random"
    if "dynamic-update-slice" in inner and "reduce" not in inner:
        return "update"
    return "reduce" if inner & {"reduce", "reduce-window"} else "elementwise"


KINDS = {
    "matmul": {"dot", "convolution"},
    "sort": {"sort", "topk"},
    "scatter": {"scatter"},
    "gather": {"gather"},
    "factorization": {"cholesky", "triangular-solve"},
    "fft": {"fft"},
}
COPIES = {"copy", "copy-start", "slice-start", "transpose", "parameter", "get-tuple-element", "tuple", *VIEWS}
