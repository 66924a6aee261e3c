"""What one equation of a jaxpr costs on one device: multiplications and memory traffic.

FLOPs are those of matrix products and convolutions, two for each multiply-add, as everyone counts them;
element-wise work is bounded by memory and counted as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def matmul_flops(eqn: Any) -> int:
    """Of a dot_general: batch · rows · columns · contracted, times two."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left, out = eqn.invars[0].aval, eqn.outvars[0].aval
    return 2 * math.prod(out.shape) * math.prod(left.shape[n] for n in contracted)


def conv_flops(eqn: Any) -> int:
    """Of a convolution: along each dim every place of the output meets every tap of the kernel once.

    If the input has fewer places than the output (a transposed convolution, or the gradient of a strided
    one), it is those that meet every tap: XLA does not multiply by the zeros between them.
    """
    given, kernel, out = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    numbers = eqn.params["dimension_numbers"]
    (_, _, *places), (_, features, *window) = numbers.lhs_spec, numbers.rhs_spec
    rows, channels, *results = numbers.out_spec
    met = math.prod(
        min(given[i], out[o]) * kernel[k] for i, o, k in zip(places, results, window, strict=True)
    )
    return 2 * out[rows] * out[channels] * kernel[features] * met


FLOPS: dict[str, Callable[[Any], int]] = {
    "dot_general": matmul_flops,
    "conv_general_dilated": conv_flops,
}


def flops(eqn: Any) -> int:
    """The multiplications of an equation; 0 for all that is not a matrix product or convolution."""
    count = FLOPS.get(eqn.primitive.name)
    return count(eqn) if count else 0


def aval_bytes(aval: Any) -> int:
    """The bytes of an array on one device."""
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    return math.prod(shape) * dtype.itemsize if shape is not None and dtype is not None else 0


# Fused by XLA into what uses them: they need no memory of their own.
FUSED_PRIMITIVES = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type
    broadcast_in_dim cbrt ceil clamp clz complex conj convert_element_type copy cos cosh digamma
    div eq erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt imag integer_pow iota is_finite
    le lgamma log log1p logistic lt max min mul name ne neg nextafter not or population_count pow
    pvary random_unwrap random_wrap real reduce_precision rem reshape round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square squeeze
    stop_gradient sub tan tanh transpose xor
    """.split()
)

# They compute element-wise operands themselves.
REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod argmax argmin".split()
)

# Other names for the same memory.
ALIASES = frozenset("reshape squeeze expand_dims pvary name optimization_barrier copy stop_gradient".split())
# The same, or values that are made up on the spot.
FREE = ALIASES | {"iota", "axis_index"}

# What XLA inlines.
CALLS = frozenset(
    """
    jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr linear_call
    """.split()
)
