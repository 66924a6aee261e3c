"""JAX primitives: one table of what each costs and of how XLA treats it.

    PRIMITIVES["dot_general"].flops(eqn)
    PRIMITIVES["exp"].fusion                # Fusion.EXPENSIVE

Matmuls, convolutions, factorizations and Fourier transforms count as FLOPs, two for each multiply-add, as is
usual. Other work is limited by memory bandwidth and counts as bytes. A primitive without a row counts as an
op of its own that reads its operands from memory and writes its results there, and the plan's advice names
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import cast

from ..core.jax_compat import AbstractValue, JaxprEqn, Literal, ShapedArray, Var

Atom = Var | Literal


def aval_of(atom: Atom) -> ShapedArray:
    """The shape and dtype of a value. JAX declares every `aval` as its base class, which has neither."""
    return cast(ShapedArray, atom.aval)


def aval_bytes(aval: AbstractValue) -> int:
    """Bytes of an array on one device; 0 for tokens and other values without a shape."""
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    return math.prod(shape) * dtype.itemsize if shape is not None and dtype is not None else 0


class Fusion(Enum):
    """What XLA does with a primitive."""

    ALIAS = auto()  # the result is the operand's memory under another name: no memory, no time
    INDEX = auto()  # depends on no data: each consumer computes it where it needs it
    BROADCAST = auto()  # fused; an element of the operand becomes many
    ELEMENTWISE = auto()  # fused into every consumer, and computed again in each
    EXPENSIVE = auto()  # elementwise, but computed only once: several consumers read a buffer
    PERMUTE = auto()  # fused, but an element of the result is not where it is in the operand
    SLICE = auto()  # the same on CPUs; plans count its traffic apart from chains
    REDUCE = auto()  # computes its fused operands in its own loop; its result starts a new chain
    UPDATE = auto()  # writes a few elements of its first operand in place
    LOOP = auto()  # other work of its own: reads its operands from memory, writes its results there
    CALL = auto()  # XLA inlines the called computation, so that chains are fused across the border
    CONTROL = auto()  # has bodies that XLA compiles as computations of their own


@dataclass(frozen=True)
class Primitive:
    """A row of the table.

    Attributes:
      fusion: what XLA does with it.
      flops: its FLOPs, or None if it has none that count.
      kind: matmul, conv, factorization, fft or other.
      collective: the kind of collective, or "".
      window: where to find the array whose size gives how much of the first operand is accessed, as a
        position among the operands and results; None if all of it is.
    """

    fusion: Fusion
    flops: Callable[[JaxprEqn], int] | None = None
    kind: str = "other"
    collective: str = ""
    window: int | None = None


def matmul_flops(eqn: JaxprEqn) -> int:
    """FLOPs of a dot_general: 2 · batch · rows · columns · contracted."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left, out = aval_of(eqn.invars[0]), aval_of(eqn.outvars[0])
    return 2 * math.prod(out.shape) * math.prod(left.shape[n] for n in contracted)


def symmetric_product_flops(eqn: JaxprEqn) -> int:
    """FLOPs of a · aᵀ, as of any other matmul: XLA does not make use of the symmetry."""
    left, out = aval_of(eqn.invars[0]), aval_of(eqn.outvars[0])
    return 2 * math.prod(out.shape) * left.shape[-1]


def conv_flops(eqn: JaxprEqn) -> int:
    """FLOPs of a convolution: along each dim every output position meets every tap of the kernel once.

    If the input or the kernel is dilated (a transposed convolution, or the gradients of a strided one), there
    are zeros between their elements, which XLA does not multiply. Along each dim a product belongs to two of
    three: an element of the input, one of the kernel and one of the output. The smallest number of pairs
    counts.
    """
    left, kernel = aval_of(eqn.invars[0]).shape, aval_of(eqn.invars[1]).shape
    out = aval_of(eqn.outvars[0]).shape
    numbers = eqn.params["dimension_numbers"]
    (_, _, *spatial), (_, features, *window) = numbers.lhs_spec, numbers.rhs_spec
    batch, channels, *out_spatial = numbers.out_spec
    sizes = ((left[i], kernel[k], out[o]) for i, k, o in zip(spatial, window, out_spatial, strict=True))
    taps = math.prod(min(a * k, k * o, a * o) for a, k, o in sizes)
    return 2 * out[batch] * out[channels] * kernel[features] * taps


def _factorization(count: Callable[[int, int], float]) -> Primitive:
    """The row of a factorization; `count` takes the larger and the smaller size of a matrix."""

    def flops(eqn: JaxprEqn) -> int:
        *batch, rows, columns = aval_of(eqn.invars[0]).shape
        return round(math.prod(batch) * count(max(rows, columns), min(rows, columns)))

    return Primitive(Fusion.LOOP, flops, "factorization")


def triangular_solve_flops(eqn: JaxprEqn) -> int:
    """FLOPs of a triangular_solve: each element of the solution needs half a row of the matrix."""
    matrix, right = (aval_of(v).shape for v in eqn.invars)
    return math.prod(right) * matrix[-1]


def fft_flops(eqn: JaxprEqn) -> int:
    """FLOPs of a transform of length n: 5 n log₂ n, or half of it if one side is real."""
    lengths = eqn.params["fft_lengths"]
    batch = math.prod(aval_of(eqn.invars[0]).shape[: -len(lengths)])
    length = math.prod(lengths)
    is_real = any(aval_of(v).dtype.kind == "f" for v in (*eqn.invars, *eqn.outvars))
    return round(batch * 5 * length * math.log2(length) / (2 if is_real else 1))


def _rows(fusion: Fusion, names: str) -> dict[str, Primitive]:
    return dict.fromkeys(names.split(), Primitive(fusion))


def _collectives(kind: str, names: str) -> dict[str, Primitive]:
    return dict.fromkeys(names.split(), Primitive(Fusion.LOOP, collective=kind))


SCATTERS = "scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub scatter_sub".split()

PRIMITIVES: dict[str, Primitive] = {
    "dot_general": Primitive(Fusion.LOOP, matmul_flops, "matmul"),
    "symmetric_product": Primitive(Fusion.LOOP, symmetric_product_flops, "matmul"),
    "conv_general_dilated": Primitive(Fusion.LOOP, conv_flops, "conv"),
    # The leading terms, as in Golub and Van Loan's "Matrix Computations", of m × n matrices with m ≥ n.
    "cholesky": _factorization(lambda m, n: n**3 / 3),
    "lu": _factorization(lambda m, n: m * n**2 - n**3 / 3),
    "geqrf": _factorization(lambda m, n: 2 * m * n**2 - 2 * n**3 / 3),
    "householder_product": _factorization(lambda m, n: 2 * m * n**2 - 2 * n**3 / 3),
    "qr": _factorization(lambda m, n: 4 * m * n**2 - 4 * n**3 / 3),
    "eigh": _factorization(lambda m, n: 9 * n**3),
    "svd": _factorization(lambda m, n: 6 * m * n**2 + 20 * n**3),
    "triangular_solve": Primitive(Fusion.LOOP, triangular_solve_flops, "factorization"),
    "fft": Primitive(Fusion.LOOP, fft_flops, "fft"),
    # The `_invariant` primitives differ only in the type of their result, which no longer varies over the
    # axes.
    **_collectives("all-reduce", "psum psum_invariant pmax pmin"),
    **_collectives("all-gather", "all_gather all_gather_invariant"),
    **_collectives("reduce-scatter", "reduce_scatter"),
    **_collectives("all-to-all", "all_to_all ragged_all_to_all"),
    **_collectives("permute", "ppermute"),
    **_rows(
        Fusion.ALIAS,
        """
        assume_replicated copy device_put expand_dims layout_constraint name optimization_barrier pvary
        random_clone random_unwrap random_wrap reshape reshard sharding_constraint squeeze stop_gradient
        """,
    ),
    **_rows(Fusion.INDEX, "axis_index empty empty2 iota platform_index"),
    **_rows(Fusion.BROADCAST, "broadcast_in_dim broadcast_to tile"),
    **_rows(
        Fusion.ELEMENTWISE,
        """
        abs add add_any and bitcast_convert_type ceil clamp clz complex conj convert_element_type cos eq eq_to
        floor ge gt imag integer_pow is_finite le le_to lt lt_to max min mul mulhi ne neg nextafter not
        one_minus_square or population_count real reduce_precision round select_n shift_left
        shift_right_arithmetic shift_right_logical sign sin square sub tan xor
        """,
    ),
    **_rows(
        Fusion.EXPENSIVE,
        """
        acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cosh digamma div erf erf_inv erfc
        exp exp2 expm1 igamma igamma_grad_a igammac lgamma log log1p log2 logistic polygamma polynomial pow
        regularized_incomplete_beta rem rsqrt sinh sqrt tanh zeta
        """,
    ),
    **_rows(Fusion.PERMUTE, "transpose"),
    **_rows(Fusion.SLICE, "concatenate pad rev split stack unstack"),
    **dict.fromkeys(["dynamic_slice", "gather", "slice"], Primitive(Fusion.SLICE, window=-1)),
    **_rows(
        Fusion.REDUCE,
        """
        argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
        """,
    ),
    "dynamic_update_slice": Primitive(Fusion.UPDATE, window=1),
    **dict.fromkeys(SCATTERS, Primitive(Fusion.UPDATE, window=2)),
    **_rows(
        Fusion.LOOP,
        """
        approx_top_k cholesky_update cumlogsumexp cummax cummin cumprod cumsum eig geqp3
        hessenberg lu_pivots_to_permutation ormqr pure_callback io_callback
        debug_callback debug_print ordered_effect random_bits random_fold_in random_gamma random_seed
        random_split reduce reduce_window reduce_window_max reduce_window_min reduce_window_sum
        rng_bit_generator rng_uniform schur select_and_gather_add select_and_scatter select_and_scatter_add
        sort threefry2x32 top_k tridiagonal tridiagonal_solve
        """,
    ),
    **_rows(
        Fusion.CALL,
        """
        call checkpoint closed_call composite core_call custom_jvp_call custom_lin custom_linear_solve
        custom_vjp_call custom_vjp_call_jaxpr jit linear_call pjit remat2 shard_map
        """,
    ),
    **_rows(Fusion.CONTROL, "cond scan while"),
}
_UNKNOWN = Primitive(Fusion.LOOP)

ELEMENTWISE = frozenset([Fusion.ELEMENTWISE, Fusion.EXPENSIVE])
# XLA's CPU backend can compute these inside their consumers.
FUSIBLE = ELEMENTWISE | {Fusion.BROADCAST, Fusion.INDEX, Fusion.PERMUTE, Fusion.SLICE}
# Elementwise chains, as plans count memory traffic: links read and write registers, not memory.
CHAIN = frozenset(
    [Fusion.ALIAS, Fusion.INDEX, Fusion.BROADCAST, Fusion.ELEMENTWISE, Fusion.EXPENSIVE, Fusion.PERMUTE]
)
FREE = frozenset([Fusion.ALIAS, Fusion.INDEX])  # cost neither memory nor time


def primitive(name: str) -> Primitive:
    """The row of a primitive."""
    return PRIMITIVES.get(name, _UNKNOWN)


def flops(eqn: JaxprEqn) -> int:
    """FLOPs of an equation; 0 if its row counts none."""
    count = primitive(eqn.primitive.name).flops
    return count(eqn) if count else 0
