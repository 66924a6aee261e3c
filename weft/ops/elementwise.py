"""Element-wise functions, broadcasting by name: local work, no collectives.

`UNARY` and `BINARY` have one row per function, grouped as on the reference page: the JAX function; whether
f(0) = 0 (if not, the padding of the result is reset to zero); whether f or its derivative is infinite or
undefined at 0 (if so, f sees ones in the padding, so that no 0 · ∞ reaches a gradient); and the operands of
its example (`core/registry.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..core import collectives, jax_compat
from ..core.collectives import Axes
from ..core.context import active
from ..core.describe import describe
from ..core.dims import Dim, union_dims
from ..core.errors import TensorTypeError
from ..core.layout import Splits
from ..core.op import op
from ..core.operands import as_slice, linear_result, slice_tensor
from ..core.padding import fill_padding
from ..core.placement import canonical_dtype
from ..core.reshard import reshard_together
from ..core.signature import NUMBER_TYPES
from ..core.tensor import Tensor, is_tensor
from ..core.types import Tree
from .typing import ArrayFn, Number, Operand


def elementwise(
    fn: ArrayFn,
    operands: Sequence[Operand],
    *,
    keeps_zero: bool = True,
    undefined_at_zero: bool = False,
) -> Tensor:
    """Apply `fn` to the slices of all operands, aligned by name. Padding is zero before and after.

    Args:
      fn: a function of arrays.
      operands: tensors and numbers.
      keeps_zero: whether `fn` maps zeros to zero.
      undefined_at_zero: whether `fn` or its derivative is infinite or undefined at zero. If so, `fn` sees
        ones in the padding.
    """
    tensors = [x if isinstance(x, NUMBER_TYPES) else as_slice(x) for x in operands]
    named = [t for t in tensors if isinstance(t, Tensor)]
    dims = union_dims(t.dims for t in named)
    splits, arrays = align_operands(named, dims)
    if undefined_at_zero:
        arrays = [fill_padding(a, dims, splits, 1, only=t.dims) for a, t in zip(arrays, named, strict=True)]
    remaining = iter(arrays)
    try:
        result = fn(*[next(remaining) if isinstance(t, Tensor) else t for t in tensors])
    except (TypeError, ValueError) as error:
        raise _dtype_error(tensors, error) from None
    # f(0, …, 0) = 0 says nothing about padding where a number or a broadcast operand is not zero.
    all_zero = all(set(t.dims) == set(dims) for t in named) and len(named) == len(tensors)
    if undefined_at_zero or not keeps_zero or not all_zero:
        result = fill_padding(result, dims, splits)
    return slice_tensor(result, dims, splits)


def _dtype_error(operands: Sequence[Operand], error: Exception) -> TensorTypeError:
    described = [describe(t) if isinstance(t, Tensor) else repr(t) for t in operands]
    return TensorTypeError(
        f"the function is not defined for {' and '.join(described)}",
        f"JAX's error: {str(error).splitlines()[0]}",
        rule="element-wise functions accept the same dtypes as in jax.numpy",
        hint="convert first: x.astype(jnp.float32), x.astype(jnp.int32), or compare: x > 0",
    )


def align_operands(tensors: Sequence[Tensor], dims: Sequence[Dim]) -> tuple[Splits, list[jax.Array]]:
    """Reshard tensors to the same splits, and return the splits and the slices in the order of `dims`."""
    by_name = _common_splits(tensors, dims)
    arrays = reshard_together(tensors, [tuple(by_name[d.name] for d in t.dims) for t in tensors])
    splits = tuple(by_name[d.name] for d in dims)
    return splits, [align(a, t.dims, dims) for a, t in zip(arrays, tensors, strict=True)]


def _common_splits(tensors: Sequence[Tensor], dims: Sequence[Dim]) -> dict[str, Axes]:
    """The axes of each dim: the layout's, or the operands' own if all of them delay the same all-gather.

    An element-wise function commutes with an all-gather, so the gather can be delayed further. A pending sum
    over the ungathered axes then needs a reduce-scatter only. This keeps optimizer updates in the layout in
    which the state is stored.
    """
    names = tuple(d.name for d in dims)
    by_layout = dict(zip(names, active.context.splits(tuple(dims)), strict=True))
    nonscalar = [t for t in tensors if t.dims]
    resolved = [t for t in nonscalar if not t.pending]
    if not resolved or any(len(t.dims) != len(dims) for t in nonscalar):
        return by_layout
    splits = [dict(zip((d.name for d in t.dims), t.splits or (), strict=True)) for t in resolved]
    common = splits[0]
    if common == by_layout or any(other != common for other in splits):
        return by_layout
    if any(by_layout[n] and common[n] != by_layout[n] for n in names):
        return by_layout
    ungathered = {axis for n in names if common[n] != by_layout[n] for axis in common[n]}
    if any(t.pending and not t.pending <= ungathered for t in nonscalar):
        return by_layout
    return common


def align(array: jax.Array, have: Sequence[Dim], want: Sequence[Dim]) -> jax.Array:
    """Transpose the array from the dims `have` to the order of `want`, with size 1 for missing dims."""
    if tuple(have) == tuple(want) or not have:
        return array
    order = [d for d in want if d in have]
    if list(have) != order:
        array = array.transpose([list(have).index(d) for d in order])
    if order == list(want[len(want) - len(order) :]):
        return array  # missing leading dimensions broadcast implicitly
    sizes = iter(array.shape)
    return array.reshape([next(sizes) if d in have else 1 for d in want])


def _all_pending(operands: Sequence[Tensor]) -> bool:
    """Whether all operands are pending sums over the same axes, with the same splits."""
    states = [(t.pending, set(zip(t.dims, t.splits or (), strict=False))) for t in operands]
    if not operands[0].pending or any(state != states[0] for state in states):
        return False
    return all(stays_pending(t, _result_dtype(*operands)) for t in operands)


def _result_dtype(*operands: Operand) -> np.dtype:
    """The dtype of a sum or product of tensors and numbers."""
    return jnp.result_type(*(x._data if isinstance(x, Tensor) else x for x in operands))


def stays_pending(x: Tensor, dtype: DTypeLike) -> bool:
    """Whether a pending sum may be cast to another dtype before it is resolved.

    Partial sums of integers may wrap around where the total does not. Partial sums of floats may overflow a
    narrow dtype. For dtypes with at least the range of float32 the risk does not justify a larger collective.
    """
    if dtype == x.dtype:
        return True
    if not jnp.issubdtype(x.dtype, jnp.inexact) or not jnp.issubdtype(dtype, jnp.inexact):
        return False
    return jnp.finfo(dtype).maxexp >= min(jnp.finfo(x.dtype).maxexp, jnp.finfo(jnp.float32).maxexp)


def _linear(fn: ArrayFn, operands: Sequence[Tensor], *numbers: Number) -> Tensor:
    """Apply a linear function to pending sums; the result is still pending."""
    first = operands[0]
    # JAX's types don't promote: operands of one op must vary over the same axes.
    axes = frozenset().union(*(collectives.varying_axes(t._data) for t in operands))
    arrays = [align(collectives.pvary(t._read(), axes), t.dims, first.dims) for t in operands]
    result = linear_result(first, fn(*arrays, *numbers), first.dims, first.splits)
    # A carry that is initialized to zero has no origin.
    result.origin = next((t.origin for t in operands if t.origin), None)
    return result


def with_saved_derivative(f: ArrayFn) -> ArrayFn:
    """Compute the derivative of a function of one array together with its value.

    The backward pass then reads one array. Without this it reads every intermediate: five for gelu.
    """

    @functools.cache
    def differentiable(**options: bool | float) -> jax.custom_jvp[jax.Array]:
        plain = functools.partial(f, **options)
        wrapped = jax.custom_jvp(plain)

        @wrapped.defjvp
        def jvp(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
            y, derivative = jax.jvp(plain, primals, (jnp.ones_like(primals[0]),))
            return y, derivative * tangents[0]

        return wrapped

    @functools.wraps(f)
    def call(x: jax.Array, **options: bool | float) -> jax.Array:
        return differentiable(**options)(x)

    return call


# JAX's derivative asks which operand equals the larger one. XLA may compute an operand again for this
# comparison, round it differently, and find that neither does: the derivative would be wrong.
@jax.custom_jvp
def _hypot(x: Any, y: Any) -> jax.Array:
    return jnp.hypot(x, y)


@_hypot.defjvp
def _hypot_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    """The derivatives x/h and y/h; 0.5 where both are zero, as in JAX."""
    found = _hypot(*primals)
    is_zero = found == 0
    tangent = jnp.zeros_like(found)
    for operand, d in zip(primals, tangents, strict=True):
        if d.dtype != jax.dtypes.float0:  # that of integers
            tangent += d * jnp.where(is_zero, 0.5, operand / jnp.where(is_zero, 1, found)).astype(found.dtype)
    return found, tangent.astype(found.dtype)


Rows = dict[str, dict[str, tuple[ArrayFn, bool, bool, str]]]

UNARY: Rows = {
    # kind: {name: (function, f(0) = 0, infinite or undefined at 0, the operand of its example)}
    "powers and roots": {
        "square": (jnp.square, True, False, "x"),
        "sqrt": (jnp.sqrt, True, True, "p"),
        "rsqrt": (jax.lax.rsqrt, False, True, "p"),
        "cbrt": (jnp.cbrt, True, True, "p"),
        "reciprocal": (jnp.reciprocal, False, True, "x"),
    },
    "exponentials": {
        "exp": (jnp.exp, False, False, "x"),
        "exp2": (jnp.exp2, False, False, "x"),
        "expm1": (jnp.expm1, True, False, "x"),
        "log": (jnp.log, False, True, "p"),
        "log2": (jnp.log2, False, True, "p"),
        "log10": (jnp.log10, False, True, "p"),
        "log1p": (jnp.log1p, True, False, "p"),
        "lgamma": (jax.scipy.special.gammaln, False, True, "p"),
    },
    "trigonometric": {
        "sin": (jnp.sin, True, False, "x"),
        "cos": (jnp.cos, False, False, "x"),
        "tan": (jnp.tan, True, False, "x"),
        "arcsin": (jnp.arcsin, True, False, "u"),
        "arccos": (jnp.arccos, False, False, "u"),
        "arctan": (jnp.arctan, True, False, "x"),
    },
    "hyperbolic": {
        "sinh": (jnp.sinh, True, False, "x"),
        "cosh": (jnp.cosh, False, False, "x"),
        "tanh": (jnp.tanh, True, False, "x"),
        "arcsinh": (jnp.arcsinh, True, False, "x"),
        "arccosh": (jnp.arccosh, False, True, "g"),
        "arctanh": (jnp.arctanh, True, False, "u"),
    },
    "error functions": {
        "erf": (jax_compat.erf, True, False, "x"),
        "erfc": (jax_compat.erfc, False, False, "x"),
        "erfinv": (jax.scipy.special.erfinv, True, False, "u"),
    },
    "rounding and sign": {
        "abs": (jnp.abs, True, False, "x"),
        "sign": (jnp.sign, True, False, "x"),
        "ceil": (jnp.ceil, True, False, "x"),
        "floor": (jnp.floor, True, False, "x"),
    },
    "activations": {
        "relu": (jax.nn.relu, True, False, "x"),
        "relu6": (jax.nn.relu6, True, False, "x"),
        "leaky_relu": (jax.nn.leaky_relu, True, False, "x"),
        "elu": (jax.nn.elu, True, False, "x"),
        "selu": (jax.nn.selu, True, False, "x"),
        "gelu": (with_saved_derivative(jax_compat.gelu), True, False, "x"),
        "silu": (with_saved_derivative(jax.nn.silu), True, False, "x"),
        "sigmoid": (jax.nn.sigmoid, False, False, "x"),
        "log_sigmoid": (jax.nn.log_sigmoid, False, False, "x"),
        "softplus": (jax.nn.softplus, False, False, "x"),
        "softsign": (jax.nn.soft_sign, True, False, "x"),
    },
    "tests": {
        "isfinite": (jnp.isfinite, False, False, "x"),
        "isinf": (jnp.isinf, True, False, "x"),
        "isnan": (jnp.isnan, True, False, "x"),
    },
    "bits and logic": {
        "bitwise_not": (jnp.bitwise_not, False, False, "i"),
        "logical_not": (jnp.logical_not, False, False, "x"),
    },
}

BINARY: Rows = {
    "arithmetic": {
        "remainder": (jnp.remainder, False, True, "x y"),
        "floor_divide": (jnp.floor_divide, False, True, "x y"),
        "maximum": (jnp.maximum, True, False, "x y"),
        "minimum": (jnp.minimum, True, False, "x y"),
    },
    "comparison": {
        "equal": (jnp.equal, False, False, "x y"),
        "not_equal": (jnp.not_equal, True, False, "x y"),
        "less": (jnp.less, True, False, "x y"),
        "less_equal": (jnp.less_equal, False, False, "x y"),
        "greater": (jnp.greater, True, False, "x y"),
        "greater_equal": (jnp.greater_equal, False, False, "x y"),
    },
    "logic": {
        "logical_and": (jnp.logical_and, True, False, "c d"),
        "logical_or": (jnp.logical_or, True, False, "c d"),
        "logical_xor": (jnp.logical_xor, True, False, "c d"),
    },
    "bits": {
        "bitwise_and": (jnp.bitwise_and, True, False, "i j"),
        "bitwise_or": (jnp.bitwise_or, True, False, "i j"),
        "bitwise_xor": (jnp.bitwise_xor, True, False, "i j"),
        "left_shift": (jnp.left_shift, True, False, "i j"),
        "right_shift": (jnp.right_shift, True, False, "i j"),
    },
    "others": {
        "arctan2": (jnp.arctan2, True, True, "x y"),
        "hypot": (_hypot, True, True, "x y"),
        "logaddexp": (jnp.logaddexp, False, False, "x y"),
    },
}


def _unary(name: str, fn: ArrayFn, keeps_zero: bool, undefined: bool, operand: str) -> Callable[..., Tensor]:
    def lowering(x: Operand, **options: bool | float) -> Tensor:
        with_options = (lambda a: fn(a, **options)) if options else fn
        return elementwise(with_options, [x], keeps_zero=keeps_zero, undefined_at_zero=undefined)

    lowering.__name__ = lowering.__qualname__ = name
    lowering.__doc__ = f"Element-wise `{name}`, like `{_jax_name(fn)}`."
    return op(example=operand, split_invariant=True, numbers="dynamic")(lowering)


def _binary(
    name: str, fn: ArrayFn, keeps_zero: bool, undefined: bool, operands: str
) -> Callable[..., Tensor]:
    def lowering(x: Operand, y: Operand) -> Tensor:
        return elementwise(fn, [x, y], keeps_zero=keeps_zero, undefined_at_zero=undefined)

    lowering.__name__ = lowering.__qualname__ = name
    lowering.__doc__ = f"Element-wise `{name}`, broadcasting by name, like `jax.numpy.{name}`."
    return op(example=operands, split_invariant=True, numbers="dynamic")(lowering)


def _jax_name(fn: ArrayFn) -> str:
    """The public name of a JAX function."""
    modules = (jnp, jax.nn, jax.scipy.special, jax.lax)
    return next(f"{module.__name__}.{fn.__name__}" for module in modules if hasattr(module, fn.__name__))


for _build, _table in ((_unary, UNARY), (_binary, BINARY)):
    for _rows in _table.values():
        for _name, _row in _rows.items():
            globals()[_name] = _build(_name, *_row)


@op(example="x y", split_invariant=True, numbers="dynamic")
def add(x: Operand, y: Operand) -> Tensor:
    """`x + y`, broadcasting by name. The sum of two pending sums is one pending sum."""
    return _add(jnp.add, x, y)


@op(example="x y", split_invariant=True, numbers="dynamic")
def subtract(x: Operand, y: Operand) -> Tensor:
    """`x - y`, broadcasting by name. The difference of two pending sums is one pending sum."""
    return _add(jnp.subtract, x, y)


def _add(fn: ArrayFn, x: Operand, y: Operand) -> Tensor:
    if not isinstance(x, NUMBER_TYPES) and not isinstance(y, NUMBER_TYPES):
        x, y = as_slice(x), as_slice(y)
        if _all_pending([x, y]):
            return _linear(fn, [x, y])
        # A loop's carry that only accumulates pending sums can be pending too: one all-reduce after the loop
        # then replaces one in each step.
        for one, other in ((x, y), (y, x)):
            if one.pending and not other.pending and stays_pending(one, _result_dtype(one, other)):
                active.context.note_pending_operand(other._data, one.pending)
        if x.pending and y.pending:  # one all-reduce under layouts that give both the same axes
            active.context.observations.same_sum_axes.add(frozenset([x.pending, y.pending]))
    return elementwise(fn, [x, y])


@op(example="x", split_invariant=True, numbers="dynamic")
def negative(x: Operand) -> Tensor:
    """`-x`. A pending sum stays pending."""
    return _additive(jnp.negative, x)


@op(example="x", split_invariant=True, numbers="dynamic")
def real(x: Operand) -> Tensor:
    """The real part of complex numbers. A pending sum stays pending.

    >>> import weft as wf
    >>> wf.real(wf.tensor([1 + 2j, 3 - 4j], "a=2"))
    f32[a=2] [1., 3.]
    """
    return _additive(jnp.real, x)


@op(example="x", split_invariant=True, numbers="dynamic")
def imag(x: Operand) -> Tensor:
    """The imaginary part of complex numbers, which is zero for others. A pending sum stays pending.

    >>> import weft as wf
    >>> wf.imag(wf.tensor([1 + 2j, 3 - 4j], "a=2"))
    f32[a=2] [ 2., -4.]
    """
    return _additive(jnp.imag, x)


@op(example="x", split_invariant=True, numbers="dynamic")
def conj(x: Operand) -> Tensor:
    """The complex conjugate. A pending sum stays pending.

    >>> import weft as wf
    >>> wf.conj(wf.tensor([1 + 2j, 3 - 4j], "a=2"))
    c64[a=2] [1.-2.j, 3.+4.j]
    """
    return _additive(jnp.conj, x)


def _additive(fn: ArrayFn, x: Operand) -> Tensor:
    """Apply a function with f(x + y) = f(x) + f(y) to a tensor, or to each part of a pending sum."""
    x = as_slice(x)
    return _linear(fn, [x]) if x.pending else elementwise(fn, [x])


@op(example="x y", split_invariant=True, numbers="dynamic")
def multiply(x: Operand, y: Operand) -> Tensor:
    """`x * y`, broadcasting by name. A pending sum times a number stays pending."""
    for one, other in ((x, y), (y, x)):
        # 0 · ∞ is NaN in a partial sum where the total times ∞ is not.
        if not isinstance(one, Tensor) or not isinstance(other, NUMBER_TYPES) or not np.isfinite(other):
            continue
        one = as_slice(one)
        if one.pending and stays_pending(one, _result_dtype(one, other)):
            return _linear(jnp.multiply, [one], other)
    return elementwise(jnp.multiply, [x, y])


@op(example="x y", split_invariant=True, numbers="dynamic")
def divide(x: Operand, y: Operand) -> Tensor:
    """`x / y`, broadcasting by name. A pending sum divided by a number stays pending."""
    if isinstance(y, NUMBER_TYPES) and isinstance(x, Tensor):
        x = as_slice(x)
        linear = x.pending and y != 0 and np.isfinite(y) and jnp.issubdtype(x.dtype, jnp.inexact)
        if linear and stays_pending(x, _result_dtype(x, y)):
            return _linear(jnp.divide, [x], y)
        # 0 / y is zero, so padding needs no mask, unless y is zero too.
        return elementwise(lambda a: jnp.divide(a, y), [x], undefined_at_zero=y == 0)
    return elementwise(jnp.divide, [x, y], keeps_zero=False, undefined_at_zero=True)


@op(example="p x", split_invariant=True, numbers="static integers")
def power(x: Operand, y: Operand) -> Tensor:
    """`x ** y`, broadcasting by name, like `jax.numpy.power`.

    An integer tensor to a negative Python number is an error. If the exponent is a tensor, the result is
    rounded towards zero, and 0 to a negative power is 0.

    >>> import weft as wf
    >>> wf.tensor([1, 2, 3], "a=3") ** 2
    i32[a=3] [1, 4, 9]
    """
    if isinstance(y, int | np.integer) and y < 0 and isinstance(x, Tensor) and _is_integer(x.dtype):
        raise TensorTypeError(
            f"{describe(x)} is raised to the power {y}",
            rule="an integer to a negative power is a fraction, which integer dtypes cannot represent",
            hint=f"convert it first: x.astype(jnp.float32) ** {y}",
        )
    return elementwise(_power, [x, y], keeps_zero=False, undefined_at_zero=True)


def _is_integer(dtype: DTypeLike) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_)


def _power(x: jax.Array, y: jax.Array | Number) -> jax.Array:
    """jnp.power with integers to negative powers, which jnp leaves undefined, rounded towards zero."""
    if isinstance(y, NUMBER_TYPES) or not jnp.issubdtype(y.dtype, jnp.signedinteger):
        return jnp.power(x, y)
    if not _is_integer(jnp.result_type(x)):
        return jnp.power(x, y)
    result = jnp.power(x, jnp.maximum(y, 0))
    base = jnp.asarray(x, result.dtype)
    # Only the reciprocals of 1 and -1 don't round to 0.
    sign = jnp.where(y % 2 == 0, 1, base)
    return jnp.where(y < 0, jnp.where(jnp.abs(base) == 1, sign, 0).astype(result.dtype), result)


@op(example=lambda op, x: op(x, jnp.bfloat16), split_invariant=True)
def astype(x: Tensor, dtype: DTypeLike) -> Tensor:
    """Cast to a dtype. Between floating-point dtypes a pending sum stays pending.

    >>> import weft as wf
    >>> wf.astype(wf.tensor([1.5, 2.5], "a=2"), int)
    i32[a=2] [1, 2]
    """
    x = as_slice(x)
    canonical_dtype(dtype)
    both_float = jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.floating)
    if x.pending and both_float and stays_pending(x, dtype):
        return _linear(lambda a: a.astype(dtype), [x])
    if x.role == "param" and not x.pending and both_float and jnp.dtype(dtype).itemsize < x.dtype.itemsize:
        # `reshard` makes x varying, not the cast: the gradient is then summed in the parameter's own dtype.
        # Reading `_data` does not count as a use of x; reading the result does.
        cast = slice_tensor(x._data.astype(dtype), x.dims, x.splits)
        cast._watch, cast._cast_of = x._watch, x
        return cast
    return elementwise(lambda a: a.astype(dtype), [x])


@op(example="c x y", split_invariant=True, numbers="dynamic")
def where(condition: Operand, x: Operand, y: Operand) -> Tensor:
    """`x` where the condition is true and `y` elsewhere, broadcasting by name in the dim order of the values.

    >>> import weft as wf
    >>> wf.where(wf.tensor([True, False], "b=2"), wf.ones("a=2 b=2"), 0.0)
    f32[a=2, b=2]
    [[1., 0.],
     [1., 0.]]
    """
    if isinstance(condition, Tensor) and condition.dtype != jnp.bool_:
        raise TensorTypeError(
            f"the condition is {describe(condition)}",
            rule="the condition of where() is a boolean tensor",
            hint="compare first, for example wf.where(x > 0, x, 0)",
        )
    # A mask rarely has all dims. The values' order avoids transposing the larger operands.
    return elementwise(lambda x, y, c: jnp.where(c, x, y), [x, y, condition])


@op(example="x y", split_invariant=True, numbers="dynamic")
def isclose(
    x: Operand, y: Operand, rtol: Operand = 1e-5, atol: Operand = 1e-8, equal_nan: bool = False
) -> Tensor:
    """Whether `|x - y| <= atol + rtol * |y|`, broadcasting by name, like `jax.numpy.isclose`.

    Args:
      x: a tensor or a number.
      y: the tensor or number to compare it with.
      rtol: the tolerance relative to `y`.
      atol: the absolute tolerance.
      equal_nan: whether two NaNs are close.

    >>> import weft as wf
    >>> wf.isclose(wf.tensor([1.0, 2.0], "a=2"), 1.000001)
    bool[a=2] [ True, False]
    """

    def close(x: jax.Array, y: jax.Array, rtol: jax.Array, atol: jax.Array) -> jax.Array:
        return jnp.isclose(x, y, rtol, atol, equal_nan)

    return elementwise(close, [x, y, rtol, atol], keeps_zero=False)


@op(example="x u p", split_invariant=True, numbers="dynamic")
def clip(
    x: Operand,
    low: Operand | None = None,
    high: Operand | None = None,
    *,
    min: Operand | None = None,
    max: Operand | None = None,
) -> Tensor:
    """Limit `x` to [low, high]. Either bound may be omitted; `min` and `max` are the names in jax.numpy.

    >>> import weft as wf
    >>> wf.clip(wf.tensor([-2, 1, 5], "a=3"), 0, 3)
    i32[a=3] [0, 1, 3]
    """
    if (low is not None and min is not None) or (high is not None and max is not None):
        raise TensorTypeError(
            "clip was given a bound twice",
            rule="low and min are the same bound, and so are high and max",
            hint="clip(x, 0.0, 1.0), or clip(x, min=0.0, max=1.0)",
        )
    low, high = min if low is None else low, max if high is None else high
    if low is not None:
        x = elementwise(jnp.maximum, [x, low])
    if high is not None:
        x = elementwise(jnp.minimum, [x, high])
    return as_slice(x)


@op(example="x", split_invariant=True)
def round(x: Tensor, decimals: int = 0) -> Tensor:
    """Round to a number of decimals, halves to even, like `jax.numpy.round`."""
    return elementwise(lambda a: jnp.round(a, decimals), [x])


@op(example="x", split_invariant=True, numbers="dynamic")
def stop_gradient(x: Tree) -> Tree:
    """Treat a tensor, or a pytree of tensors, as constant for differentiation.

    >>> import weft as wf
    >>> wf.grad(lambda x: wf.sum(x * wf.stop_gradient(x)))(wf.arange(wf.Dim("a", 3), float))
    f32[a=3] [0., 1., 2.]
    """

    def stop(leaf: Tensor | jax.Array) -> Tensor | jax.Array:
        if not isinstance(leaf, Tensor):
            return jax.lax.stop_gradient(
                as_slice(leaf) if callable(leaf) else leaf
            )  # an error for a function
        t = as_slice(leaf)
        result = linear_result(t, jax.lax.stop_gradient(t._read()), t.dims, t.splits)
        result.role = t.role
        return result

    return jax.tree.map(stop, x, is_leaf=is_tensor)


# Second names of the same functions in jax.numpy and jax.nn.
ALIASES = {"mod": "remainder", "pow": "power", "swish": "silu"}
for _name, _original in ALIASES.items():
    globals()[_name] = globals()[_original]
