"""What a compiled instruction costs: its FLOPs, its memory traffic, and for reports its kind."""

from __future__ import annotations

from .flops import LIBRARY_CONVOLUTIONS, call_target, flops, product_dtype
from .hlo import HloModule, Instruction
from .traffic import VIEWS, is_prefetch, traffic

__all__ = ["flops", "kind_of", "product_dtype", "traffic"]


def kind_of(module: HloModule, instruction: Instruction) -> str:
    """What an instruction does, for reports: matmul, random, copy, reduce, elementwise, …"""
    parts = [one for _, one in module.fused(instruction)] or [instruction]
    targets = [call_target(one) for one in parts if one.opcode == "custom-call"]
    if any(target.startswith("__cublas") or target in LIBRARY_CONVOLUTIONS for target in targets):
        return "matmul"
    if instruction.opcode == "custom-call":
        return f"custom call {targets[0]}"
    if is_prefetch(instruction):
        return "prefetch"
    inner = {one.opcode for one in parts}
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
