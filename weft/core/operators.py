"""Python's operators on tensors: one row for each, with the name of the op in `weft`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from jax.typing import ArrayLike

from .describe import format_call
from .errors import TensorTypeError

if TYPE_CHECKING:
    from .tensor import Tensor

Operator = Callable[[Any, Any], "Tensor"]


def public_ops() -> Any:
    """The package `weft`. Ops import the Tensor class, so it can't import them when it is loaded."""
    import weft

    return weft


def _unary(name: str) -> Callable[[Any], Tensor]:
    return lambda self: getattr(public_ops(), name)(self)


def _comparison(name: str) -> Operator:
    return lambda self, other: getattr(public_ops(), name)(self, other)


def _binary(name: str) -> tuple[Operator, Operator]:
    """The methods for `self ∘ other` and `other ∘ self`."""
    return _comparison(name), lambda self, other: getattr(public_ops(), name)(other, self)


class Operators:
    """Arithmetic and comparisons on tensors, broadcasting by dim name."""

    __slots__ = ()

    __add__, __radd__ = _binary("add")
    __sub__, __rsub__ = _binary("subtract")
    __mul__, __rmul__ = _binary("multiply")
    __truediv__, __rtruediv__ = _binary("divide")
    __floordiv__, __rfloordiv__ = _binary("floor_divide")
    __mod__, __rmod__ = _binary("remainder")

    def __divmod__(self, other: Any) -> tuple[Tensor, Tensor]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Tensor, Tensor]:
        return other // self, other % self

    __pow__, __rpow__ = _binary("power")
    __and__, __rand__ = _binary("bitwise_and")
    __or__, __ror__ = _binary("bitwise_or")
    __xor__, __rxor__ = _binary("bitwise_xor")
    __lshift__, __rlshift__ = _binary("left_shift")
    __rshift__, __rrshift__ = _binary("right_shift")

    __neg__ = _unary("negative")
    __abs__ = _unary("abs")
    __invert__ = _unary("bitwise_not")

    __lt__ = _comparison("less")
    __le__ = _comparison("less_equal")
    __gt__ = _comparison("greater")
    __ge__ = _comparison("greater_equal")
    if TYPE_CHECKING:  # `object` declares that `==` returns a bool, and here it returns a Tensor

        def __eq__(self, other: object) -> Tensor: ...  # type: ignore[override]
        def __ne__(self, other: object) -> Tensor: ...  # type: ignore[override]
    else:
        __eq__ = _comparison("equal")
        __ne__ = _comparison("not_equal")

    def __round__(self, decimals: int = 0) -> Tensor:
        return public_ops().round(self, decimals)

    def __pos__(self) -> Any:
        return self

    def __matmul__(self, other: Tensor | ArrayLike) -> NoReturn:
        raise matmul_error(self, other)

    def __rmatmul__(self, other: ArrayLike) -> NoReturn:
        raise matmul_error(other, self)


def matmul_error(x: object, y: object) -> TensorTypeError:
    """The error for `x @ y`."""
    return TensorTypeError(
        "@ does not say which dims to sum",
        rule="tensors are multiplied by name: einsum sums the dims that are not in out=",
        hint="wf.einsum(x, w, out=[...]), or wf.einsum(x, w, reduce=[...])",
    ).located(format_call("matmul", (x, y), {}))
