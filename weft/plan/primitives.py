"""JAX primitives: the FLOPs and bytes of one equation of a jaxpr, and how XLA treats each primitive.

Only matmuls and convolutions count as FLOPs, two for each multiply-add, as is usual. Elementwise work is
limited by memory bandwidth and counts as bytes.

The tables list primitives by name. A primitive that is in none of them counts as an op of its own that reads
its operands from memory and writes its results there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

from jax.core import AbstractValue, ShapedArray
from jax.extend.core import JaxprEqn, Literal, Var

Atom = Var | Literal


def aval_of(atom: Atom) -> ShapedArray:
    """The shape and dtype of a value. JAX declares every `aval` as its base class, which has neither."""
    return cast(ShapedArray, atom.aval)


def matmul_flops(eqn: JaxprEqn) -> int:
    """FLOPs of a dot_general: 2 · batch · rows · columns · contracted."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left, out = aval_of(eqn.invars[0]), aval_of(eqn.outvars[0])
    return 2 * math.prod(out.shape) * math.prod(left.shape[n] for n in contracted)


def conv_flops(eqn: JaxprEqn) -> int:
    """FLOPs of a convolution: along each dim every output position meets every tap of the kernel once.

    If the input is smaller than the output (a transposed convolution, or the gradient of a strided one),
    input positions are counted instead: XLA does not multiply the zeros between them.
    """
    left, kernel = aval_of(eqn.invars[0]).shape, aval_of(eqn.invars[1]).shape
    out = aval_of(eqn.outvars[0]).shape
    numbers = eqn.params["dimension_numbers"]
    (_, _, *spatial), (_, features, *window) = numbers.lhs_spec, numbers.rhs_spec
    batch, channels, *out_spatial = numbers.out_spec
    taps = math.prod(
        min(left[i], out[o]) * kernel[k] for i, o, k in zip(spatial, out_spatial, window, strict=True)
    )
    return 2 * out[batch] * out[channels] * kernel[features] * taps


FLOPS: dict[str, Callable[[JaxprEqn], int]] = {
    "dot_general": matmul_flops,
    "conv_general_dilated": conv_flops,
}


def flops(eqn: JaxprEqn) -> int:
    """FLOPs of an equation; 0 unless it is a matmul or a convolution."""
    count = FLOPS.get(eqn.primitive.name)
    return count(eqn) if count else 0


def aval_bytes(aval: AbstractValue) -> int:
    """Bytes of an array on one device; 0 for tokens and other values without a shape."""
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    return math.prod(shape) * dtype.itemsize if shape is not None and dtype is not None else 0


# XLA fuses these into their consumers, so that most of their results need no memory.
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

# Reductions compute fused operands inside their own loop, but their result starts a new chain.
REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod argmax argmin".split()
)

# The result is the operand's memory under another name, so it costs neither memory nor time.
ALIASES = frozenset("reshape squeeze expand_dims pvary name optimization_barrier copy stop_gradient".split())
# Also values that depend on no data: each consumer computes them where it needs them.
FREE = ALIASES | {"iota", "axis_index"}

# XLA inlines the called computation, so that chains are fused across the border of a call.
CALLS = frozenset(
    """
    jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr linear_call
    """.split()
)
