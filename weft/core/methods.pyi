"""The methods of tensors that are ops, for type checkers and editors; see `methods.py`."""
# ruff: noqa: E501

from jax.typing import DTypeLike

from ..ops.typing import Number, Operand
from .dims import DimLike, DimsLike
from .tensor import Tensor

METHODS: str

class Methods:
    def sum(self, dims: DimsLike | None = None) -> Tensor:
        """The sum over dims, by default all of them."""

    def mean(self, dims: DimsLike | None = None) -> Tensor:
        """The mean over dims, by default all of them."""

    def max(self, dims: DimsLike | None = None) -> Tensor:
        """The maximum over dims. Ties share the gradient, as in `jax.numpy`."""

    def min(self, dims: DimsLike | None = None) -> Tensor:
        """The minimum over dims. Ties share the gradient, as in `jax.numpy`."""

    def prod(self, dims: DimsLike | None = None) -> Tensor:
        """The product over dims. Devices gather each other's partial products."""

    def any(self, dims: DimsLike | None = None) -> Tensor:
        """Whether any element along the dims is true."""

    def all(self, dims: DimsLike | None = None) -> Tensor:
        """Whether all elements along the dims are true."""

    def var(self, dims: DimsLike | None = None) -> Tensor:
        """The (population) variance over dims, by default all of them."""

    def std(self, dims: DimsLike | None = None) -> Tensor:
        """The (population) standard deviation over dims, by default all of them."""

    def logsumexp(self, dims: DimsLike | None = None) -> Tensor:
        """`log(sum(exp(x)))` over dims, without overflow."""

    def softmax(self, dims: DimsLike) -> Tensor:
        """`exp(x) / sum(exp(x))` along a dim, or along several together."""

    def log_softmax(self, dims: DimsLike) -> Tensor:
        """`x - logsumexp(x)` along a dim, or along several together."""

    def argmax(self, dim: DimLike) -> Tensor:
        """The index of the maximum along a dim. The first one wins ties; NaN counts as the maximum."""

    def argmin(self, dim: DimLike) -> Tensor:
        """The index of the minimum along a dim. The first one wins ties; NaN counts as the minimum."""

    def sort(self, dim: DimLike, descending: bool = False) -> Tensor:
        """Sort the elements along a dim. A split dim is gathered."""

    def argsort(self, dim: DimLike, descending: bool = False) -> Tensor:
        """The indices that sort a dim; the sort is stable. A split dim is gathered."""

    def top_k(self, dim: DimLike, k_dim: DimLike) -> tuple[Tensor, Tensor]:
        """The k largest elements along a dim, in descending order, and their indices, like `jax.lax.top_k`."""

    def cumsum(self, dim: DimLike, exclusive: bool = False, reverse: bool = False) -> Tensor:
        """The cumulative sum along a dim. If the dim is split, devices exchange the sums of their blocks only."""

    def cumprod(self, dim: DimLike, exclusive: bool = False, reverse: bool = False) -> Tensor:
        """The cumulative product along a dim; arguments as for `cumsum`."""

    def take(self, ids: Operand, dim: DimLike, fill: Number | None = None) -> Tensor:
        """The elements of a table at the given indices along a dim."""

    def transpose(self, dims: DimsLike) -> Tensor:
        """Reorder the dims of a tensor."""

    def reshape(self, dims: DimsLike) -> Tensor:
        """Reshape to other dims of the same total size, in row-major order. A name alone keeps its size."""

    def broadcast_to(self, dims: DimsLike) -> Tensor:
        """Repeat a tensor along the dims that it lacks. `dims` are all dims of the result; new ones have sizes."""

    def merge(self, dims: DimsLike, into: DimLike) -> Tensor:
        """Merge several dims into one, in row-major order: `merge(x, [a, b], ab)`. It replaces the first one."""

    def split(self, dim: DimLike, into: DimsLike) -> Tensor:
        """Split one dim into several, in row-major order: `split(x, "length", [blocks, block])`."""

    def flatten(self, dims: DimsLike, into: DimLike) -> Tensor:
        """Merge several dims into one, in row-major order: `merge(x, [a, b], ab)`. It replaces the first one."""

    def unflatten(self, dim: DimLike, into: DimsLike) -> Tensor:
        """Split one dim into several, in row-major order: `split(x, "length", [blocks, block])`."""

    def astype(self, dtype: DTypeLike) -> Tensor:
        """Cast to a dtype. Between floating-point dtypes a pending sum stays pending."""

    def clip(
        self,
        low: Operand | None = None,
        high: Operand | None = None,
        *,
        min: Operand | None = None,
        max: Operand | None = None,
    ) -> Tensor:
        """Limit `x` to [low, high]. Either bound may be omitted; `min` and `max` are the names in jax.numpy."""

    def round(self, decimals: int = 0) -> Tensor:
        """Round to a number of decimals, halves to even, like `jax.numpy.round`."""

    def abs(self, **options: bool | float) -> Tensor:
        """Element-wise `abs`, like `jax.numpy.abs`."""

    def square(self, **options: bool | float) -> Tensor:
        """Element-wise `square`, like `jax.numpy.square`."""

    def sqrt(self, **options: bool | float) -> Tensor:
        """Element-wise `sqrt`, like `jax.numpy.sqrt`."""

    def exp(self, **options: bool | float) -> Tensor:
        """Element-wise `exp`, like `jax.numpy.exp`."""

    def log(self, **options: bool | float) -> Tensor:
        """Element-wise `log`, like `jax.numpy.log`."""

    def tanh(self, **options: bool | float) -> Tensor:
        """Element-wise `tanh`, like `jax.numpy.tanh`."""

    def sigmoid(self, **options: bool | float) -> Tensor:
        """Element-wise `sigmoid`, like `jax.nn.sigmoid`."""

    def relu(self, **options: bool | float) -> Tensor:
        """Element-wise `relu`, like `jax.nn.relu`."""
