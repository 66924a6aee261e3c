"""Element-wise functions, broadcasting by name: local work, no collectives.

One row for each function: the JAX function, whether f(0) = 0 (else padding is set back to zero), and
whether it, or its derivative, is infinite or undefined at 0 (then padding is fed with ones, so that no
0 · ∞ reaches a gradient).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import collectives, context
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


def elementwise(
    fn: Callable[..., Any],
    operands: Sequence[Any],
    *,
    keeps_zero: bool = True,
    undefined_at_zero: bool = False,
) -> Tensor:
    """`fn` on the slices of all operands, aligned by name; padding is zero before and after.

    Args:
      fn: a function of arrays.
      operands: tensors and numbers.
      keeps_zero: whether it maps zeros to zero.
      undefined_at_zero: whether it, or its derivative, is infinite or undefined there; it then sees ones.
    """
    tensors = [x if isinstance(x, NUMBER_TYPES) else as_slice(x) for x in operands]
    named = [t for t in tensors if isinstance(t, Tensor)]
    dims = union_dims(t.dims for t in named)
    splits, arrays = align_operands(named, dims)
    if undefined_at_zero:
        arrays = [fill_padding(a, dims, splits, 1, only=t.dims) for a, t in zip(arrays, named, strict=True)]
    rest = iter(arrays)
    try:
        result = fn(*[next(rest) if isinstance(t, Tensor) else t for t in tensors])
    except TypeError as error:
        raise _wrong_types(tensors, error) from None
    alike = all(set(t.dims) == set(dims) for t in named) and len(named) == len(tensors)
    if undefined_at_zero or not keeps_zero or not alike:
        result = fill_padding(result, dims, splits)
    return slice_tensor(result, dims, splits)


def _wrong_types(operands: Sequence[Any], error: TypeError) -> TensorTypeError:
    shown = [describe(t) if isinstance(t, Tensor) else repr(t) for t in operands]
    return TensorTypeError(
        f"the function is not defined for {' and '.join(shown)}",
        f"JAX says: {str(error).splitlines()[0]}",
        rule="element-wise functions take the dtypes that jax.numpy's take",
        hint="convert first: x.astype(jnp.float32), x.astype(jnp.int32), or compare: x > 0",
    )


def align_operands(tensors: Sequence[Tensor], dims: Sequence[Dim]) -> tuple[Splits, list[Any]]:
    """The slices of tensors, split alike, with their dimensions in the order of `dims`."""
    by_name = _held_in_common(tensors, dims)
    wanted = [tuple(by_name[d.name] for d in t.dims) for t in tensors]
    arrays = reshard_together(tensors, wanted)
    splits = tuple(by_name[d.name] for d in dims)
    return splits, [align(a, t.dims, dims) for a, t in zip(arrays, tensors, strict=True)]


def _held_in_common(tensors: Sequence[Tensor], dims: Sequence[Dim]) -> dict[str, Any]:
    """The split of each dim: the layout's, or the operands' own if they all hold back the same gather.

    An element-wise function commutes with a gather, so it can stay held back; a pending sum over the
    held axes meets it by a reduce-scatter. (So the update of optimizer state stays where it is stored.)
    """
    names = tuple(d.name for d in dims)
    home = dict(zip(names, context.require().splits(tuple(dims)), strict=True))
    full = [t for t in tensors if t.dims]
    settled = [t for t in full if not t.pending]
    if not settled or any(len(t.dims) != len(dims) for t in full):
        return home
    forms = [dict(zip((d.name for d in t.dims), t.splits or (), strict=True)) for t in settled]
    form = forms[0]
    if form == home or any(f != form for f in forms):
        return home
    if any(home[n] and form[n] != home[n] for n in names):
        return home
    held = {axis for n in names if form[n] != home[n] for axis in form[n]}
    if any(t.pending and not t.pending <= held for t in full):
        return home
    return form


def align(array: Any, have: Sequence[Dim], want: Sequence[Dim]) -> Any:
    """The array with its dimensions in the order of `want`, size 1 where it has none."""
    if tuple(have) == tuple(want) or not have:
        return array
    order = [d for d in want if d in have]
    if list(have) != order:
        array = array.transpose([list(have).index(d) for d in order])
    if order == list(want[len(want) - len(order) :]):
        return array  # leading dimensions broadcast by themselves
    sizes = iter(array.shape)
    return array.reshape([next(sizes) if d in have else 1 for d in want])


def _all_pending(operands: Sequence[Tensor]) -> bool:
    """Whether all operands are pending sums over the same axes, in the same form."""
    forms = [(t.pending, set(zip(t.dims, t.splits or (), strict=False))) for t in operands]
    if not operands[0].pending or any(form != forms[0] for form in forms):
        return False
    return all(stays_pending(t, _joint(*operands)) for t in operands)


def _joint(*operands: Any) -> Any:
    """The type of a sum or product of tensors and numbers."""
    return jnp.result_type(*(x._data if isinstance(x, Tensor) else x for x in operands))


def stays_pending(x: Tensor, dtype: Any) -> bool:
    """Whether a pending sum may become another type before it is added up.

    Parts of a sum of whole numbers may wrap around where the sum does not. Parts of a sum of floats may be
    too large for a narrow type; from float32's range on, that is not worth a larger collective.
    """
    if dtype == x.dtype:
        return True
    if not jnp.issubdtype(x.dtype, jnp.inexact) or not jnp.issubdtype(dtype, jnp.inexact):
        return False
    return jnp.finfo(dtype).maxexp >= min(jnp.finfo(x.dtype).maxexp, jnp.finfo(jnp.float32).maxexp)


def _linear(fn: Callable[..., Any], operands: Sequence[Tensor], *numbers: Any) -> Tensor:
    """A linear function of pending sums: still pending."""
    first = operands[0]
    axes = frozenset().union(*(collectives.varying_axes(t._data) for t in operands))
    arrays = [align(collectives.pvary(t._array, axes), t.dims, first.dims) for t in operands]
    made = linear_result(first, fn(*arrays, *numbers), first.dims, first.splits)
    made.origin = next((t.origin for t in operands if t.origin), "")  # a carry that begins at zero has none
    return made


def with_saved_derivative(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one array that has its derivative computed along with it.

    The backward pass then reads one array. Else it reads all that a function is made of: five, of a gelu.
    """

    @functools.cache
    def sloped(**options: Any) -> Callable[[Any], Any]:
        plain = functools.partial(f, **options)
        made = jax.custom_jvp(plain)

        @made.defjvp
        def both(given: Any, along: Any) -> tuple[Any, Any]:
            y, slope = jax.jvp(plain, given, (jnp.ones_like(given[0]),))
            return y, slope * along[0]

        return made

    @functools.wraps(f)
    def call(x: Any, **options: Any) -> Any:
        return sloped(**options)(x)

    return call


# The tables

UNARY: dict[str, tuple[Callable[..., Any], bool, bool]] = {
    # name: (function, f(0) = 0, infinite or undefined at 0)
    "abs": (jnp.abs, True, False),
    "arccos": (jnp.arccos, False, False),
    "arccosh": (jnp.arccosh, False, True),
    "arcsin": (jnp.arcsin, True, False),
    "arcsinh": (jnp.arcsinh, True, False),
    "arctan": (jnp.arctan, True, False),
    "arctanh": (jnp.arctanh, True, False),
    "bitwise_not": (jnp.bitwise_not, False, False),
    "cbrt": (jnp.cbrt, True, True),
    "ceil": (jnp.ceil, True, False),
    "cos": (jnp.cos, False, False),
    "cosh": (jnp.cosh, False, False),
    "elu": (jax.nn.elu, True, False),
    "erf": (jax.scipy.special.erf, True, False),
    "erfc": (jax.scipy.special.erfc, False, False),
    "erfinv": (jax.scipy.special.erfinv, True, False),
    "exp": (jnp.exp, False, False),
    "exp2": (jnp.exp2, False, False),
    "expm1": (jnp.expm1, True, False),
    "floor": (jnp.floor, True, False),
    "gelu": (with_saved_derivative(jax.nn.gelu), True, False),
    "isfinite": (jnp.isfinite, False, False),
    "isinf": (jnp.isinf, True, False),
    "isnan": (jnp.isnan, True, False),
    "leaky_relu": (jax.nn.leaky_relu, True, False),
    "lgamma": (jax.scipy.special.gammaln, False, True),
    "log": (jnp.log, False, True),
    "log10": (jnp.log10, False, True),
    "log1p": (jnp.log1p, True, False),
    "log2": (jnp.log2, False, True),
    "log_sigmoid": (jax.nn.log_sigmoid, False, False),
    "logical_not": (jnp.logical_not, False, False),
    "reciprocal": (jnp.reciprocal, False, True),
    "relu": (jax.nn.relu, True, False),
    "relu6": (jax.nn.relu6, True, False),
    "rsqrt": (jax.lax.rsqrt, False, True),
    "selu": (jax.nn.selu, True, False),
    "sigmoid": (jax.nn.sigmoid, False, False),
    "sign": (jnp.sign, True, False),
    "silu": (with_saved_derivative(jax.nn.silu), True, False),
    "sin": (jnp.sin, True, False),
    "sinh": (jnp.sinh, True, False),
    "softplus": (jax.nn.softplus, False, False),
    "softsign": (jax.nn.soft_sign, True, False),
    "sqrt": (jnp.sqrt, True, True),
    "square": (jnp.square, True, False),
    "tan": (jnp.tan, True, False),
    "tanh": (jnp.tanh, True, False),
}

BINARY: dict[str, tuple[Callable[..., Any], bool, bool]] = {
    "arctan2": (jnp.arctan2, True, True),
    "bitwise_and": (jnp.bitwise_and, True, False),
    "bitwise_or": (jnp.bitwise_or, True, False),
    "bitwise_xor": (jnp.bitwise_xor, True, False),
    "equal": (jnp.equal, False, False),
    "floor_divide": (jnp.floor_divide, False, True),
    "greater": (jnp.greater, True, False),
    "greater_equal": (jnp.greater_equal, False, False),
    "hypot": (jnp.hypot, True, True),
    "left_shift": (jnp.left_shift, True, False),
    "less": (jnp.less, True, False),
    "less_equal": (jnp.less_equal, False, False),
    "logaddexp": (jnp.logaddexp, False, False),
    "logical_and": (jnp.logical_and, True, False),
    "logical_or": (jnp.logical_or, True, False),
    "logical_xor": (jnp.logical_xor, True, False),
    "maximum": (jnp.maximum, True, False),
    "minimum": (jnp.minimum, True, False),
    "not_equal": (jnp.not_equal, True, False),
    "remainder": (jnp.remainder, False, True),
    "right_shift": (jnp.right_shift, True, False),
}


def _unary(name: str) -> Any:
    fn, zero, undefined = UNARY[name]

    def lowering(x: Any, **options: Any) -> Tensor:
        chosen = (lambda a: fn(a, **options)) if options else fn
        return elementwise(chosen, [x], keeps_zero=zero, undefined_at_zero=undefined)

    lowering.__name__ = lowering.__qualname__ = name
    lowering.__doc__ = f"`{name}` of every element, as `{_origin(fn)}`."
    return op(lowering, numbers="dynamic")


def _binary(name: str) -> Any:
    fn, zero, undefined = BINARY[name]

    def lowering(x: Any, y: Any) -> Tensor:
        return elementwise(fn, [x, y], keeps_zero=zero, undefined_at_zero=undefined)

    lowering.__name__ = lowering.__qualname__ = name
    lowering.__doc__ = f"`{name}` element by element, broadcasting by name, as `jax.numpy.{name}`."
    return op(lowering, numbers="dynamic")


def _origin(fn: Any) -> str:
    """The public name that JAX has for a function."""
    places = (jnp, jax.nn, jax.scipy.special, jax.lax)
    return next(f"{place.__name__}.{fn.__name__}" for place in places if hasattr(place, fn.__name__))


for _name in UNARY:
    globals()[_name] = _unary(_name)
for _name in BINARY:
    globals()[_name] = _binary(_name)


@op(numbers="dynamic")
def add(x: Any, y: Any) -> Tensor:
    """`x + y`, broadcasting by name; the sum of two pending sums is one pending sum."""
    return _add(jnp.add, x, y)


@op(numbers="dynamic")
def subtract(x: Any, y: Any) -> Tensor:
    """`x - y`, broadcasting by name; the difference of two pending sums is one pending sum."""
    return _add(jnp.subtract, x, y)


def _add(fn: Any, x: Any, y: Any) -> Tensor:
    if not isinstance(x, NUMBER_TYPES) and not isinstance(y, NUMBER_TYPES):
        x, y = as_slice(x), as_slice(y)
        if _all_pending([x, y]):
            return _linear(fn, [x, y])
        for one, other in ((x, y), (y, x)):
            if one.pending and not other.pending and stays_pending(one, _joint(one, other)):
                context.require().note_pending_operand(other._data, one.pending)
        if x.pending and y.pending:
            context.require().same_sum_axes.add(frozenset([x.pending, y.pending]))
    return elementwise(fn, [x, y])


@op(numbers="dynamic")
def negative(x: Any) -> Tensor:
    """`-x`; a pending sum stays pending."""
    x = as_slice(x)
    return _linear(jnp.negative, [x]) if x.pending else elementwise(jnp.negative, [x])


@op(numbers="dynamic")
def multiply(x: Any, y: Any) -> Tensor:
    """`x * y`, broadcasting by name; a pending sum times a number stays pending."""
    for one, other in ((x, y), (y, x)):
        finite = isinstance(other, NUMBER_TYPES) and np.isfinite(other)
        if finite and isinstance(one, Tensor) and one.pending and stays_pending(one, _joint(one, other)):
            return _linear(jnp.multiply, [one], other)
    return elementwise(jnp.multiply, [x, y])


@op(numbers="dynamic")
def divide(x: Any, y: Any) -> Tensor:
    """`x / y`, broadcasting by name; a pending sum divided by a number stays pending."""
    if isinstance(y, NUMBER_TYPES) and isinstance(x, Tensor):
        linear = x.pending and y != 0 and np.isfinite(y) and jnp.issubdtype(x.dtype, jnp.inexact)
        if linear and stays_pending(x, _joint(x, y)):
            return _linear(jnp.divide, [x], y)
        return elementwise(lambda a: jnp.divide(a, y), [x], undefined_at_zero=y == 0)
    return elementwise(jnp.divide, [x, y], keeps_zero=False, undefined_at_zero=True)


@op(numbers="static integers")
def power(x: Any, y: Any) -> Tensor:
    """`x ** y`, broadcasting by name, as `jax.numpy.power`.

    An integer tensor to a negative power is an error where the exponent is a Python number. Where it is a
    tensor, the result is the true one rounded towards zero, and 0 for 0 to a negative power.

    >>> import weft as wf
    >>> wf.tensor([1, 2, 3], "a=3") ** 2
    i32[a=3] [1, 4, 9]
    """
    if isinstance(y, int | np.integer) and y < 0 and isinstance(x, Tensor) and _is_integer(x.dtype):
        raise TensorTypeError(
            f"{describe(x)} is raised to the power {y}",
            rule="an integer to a negative power is a fraction, which no integer type holds",
            hint=f"convert it first: x.astype(jnp.float32) ** {y}",
        )
    return elementwise(_power, [x, y], keeps_zero=False, undefined_at_zero=True)


def _is_integer(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_)


def _power(x: Any, y: Any) -> Any:
    """jnp.power, but integers to negative powers, which jnp leaves undefined, are rounded towards zero."""
    is_exact = isinstance(y, NUMBER_TYPES) or not jnp.issubdtype(y.dtype, jnp.signedinteger)
    if is_exact or not _is_integer(jnp.result_type(x)):
        return jnp.power(x, y)
    result = jnp.power(x, jnp.maximum(y, 0))
    base = jnp.asarray(x, result.dtype)
    # Only 1 and -1 have a reciprocal of at least 1.
    sign = jnp.where(y % 2 == 0, 1, base)
    return jnp.where(y < 0, jnp.where(jnp.abs(base) == 1, sign, 0).astype(result.dtype), result)


@op
def astype(x: Tensor, dtype: Any) -> Tensor:
    """The same values as another dtype; between floating types a pending sum stays pending.

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
        # What is made varying is x itself (`reshard.reshard`), and x is used only if the result is.
        made = slice_tensor(x._data.astype(dtype), x.dims, x.splits)
        made._on_read, made._cast_of = x._on_read, x
        return made
    return elementwise(lambda a: a.astype(dtype), [x])


@op(numbers="dynamic")
def where(condition: Any, x: Any, y: Any) -> Tensor:
    """`x` where the condition holds and `y` elsewhere, broadcasting by name; in the values' order.

    >>> import weft as wf
    >>> wf.where(wf.tensor([True, False], "b=2"), wf.ones("a=2 b=2"), 0.0)
    f32[a=2, b=2]
    [[1., 0.],
     [1., 0.]]
    """
    if isinstance(condition, Tensor) and condition.dtype != jnp.bool_:
        raise TensorTypeError(
            f"the condition is {describe(condition)}",
            rule="where() chooses by truth values",
            hint="compare first, for example wf.where(x > 0, x, 0)",
        )
    # A mask seldom has all dims: the values' order saves transposing them.
    return elementwise(lambda x, y, c: jnp.where(c, x, y), [x, y, condition])


@op(numbers="dynamic")
def clip(x: Any, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None) -> Tensor:
    """`x` held between two bounds, either of which may be left out; `min` and `max` name them as jnp does.

    >>> import weft as wf
    >>> wf.clip(wf.tensor([-2, 1, 5], "a=3"), 0, 3)
    i32[a=3] [0, 1, 3]
    """
    if (low is not None and min is not None) or (high is not None and max is not None):
        raise TensorTypeError(
            "clip was given a bound twice",
            rule="low and min are two names of one bound, high and max of the other",
            hint="clip(x, 0.0, 1.0), or clip(x, min=0.0, max=1.0)",
        )
    low, high = min if low is None else low, max if high is None else high
    if low is not None:
        x = elementwise(jnp.maximum, [x, low])
    if high is not None:
        x = elementwise(jnp.minimum, [x, high])
    return as_slice(x)


@op
def round(x: Tensor, decimals: int = 0) -> Tensor:
    """`x` rounded to so many decimals, halves to the even neighbour, as `jax.numpy.round`."""
    return elementwise(lambda a: jnp.round(a, decimals), [x])


@op(numbers="dynamic")
def stop_gradient(x: Any) -> Any:
    """The same values, constant for derivatives; takes a tensor or a tree of them.

    >>> import weft as wf
    >>> wf.grad(lambda x: wf.sum(x * wf.stop_gradient(x)))(wf.arange(wf.Dim("a", 3), float))
    f32[a=3] [0., 1., 2.]
    """

    def stop(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return jax.lax.stop_gradient(t)
        t = as_slice(t)
        held = linear_result(t, jax.lax.stop_gradient(t._array), t.dims, t.splits)
        held.role = t.role
        return held

    return jax.tree.map(stop, x, is_leaf=is_tensor)


# Other names that jax.numpy and jax.nn have for the same functions.
ALIASES = {"mod": "remainder", "pow": "power", "swish": "silu"}
for _name, _same in ALIASES.items():
    globals()[_name] = globals()[_same]


__all__ = [
    "add", "astype", "clip", "divide", "multiply", "negative", "power", "round", "stop_gradient", "subtract",
    "where", *UNARY, *BINARY, *ALIASES,
]  # fmt: skip
