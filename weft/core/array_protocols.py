"""How NumPy, JAX and Python see a tensor, and what a tensor lacks that arrays have.

Arrays match by position, tensors by name. Where the two meet, either the meaning is the same or an error
names the function to use:

    np.sin(x), np.float32(2) * x    Weft's op of the same name; a raw array with dims has no names to match by
    np.sum(x), np.allclose(x, y)    NumPy's function of `x.numpy()`, outside programs
    jnp.sum(x), jax.grad(f)(x)      an error: `wf.sum`, `wf.grad`
    x.shape, x.T, len(x)            an error that is an AttributeError or a TypeError too, for `hasattr`
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

import jax

from .describe import describe, format_call
from .dims import format_dims
from .errors import ProgramError, TensorAttributeError, TensorTypeError
from .jax_compat import TRANSFORMATIONS, called_jax_function
from .operators import matmul_error, public_ops

if TYPE_CHECKING:
    from .tensor import Tensor

# NumPy's names for ops that Weft calls differently.
UFUNC_NAMES = {"absolute": "abs", "conjugate": "conj", "invert": "bitwise_not"}

# Attributes of arrays that tensors don't have: the names, the rule, and what to write instead. `{first}` is
# the name of the tensor's first dim, `{names}` and `{reverse}` are the names of all of them.
_ORDER = "dims are matched by name, so their order has no meaning in Weft's ops"
_SIZES = "a tensor's dims have names and sizes"
_BY_NAME = "tensors are multiplied by name: einsum sums the dims that are not in out="
_PLACED = "a mesh and a layout determine where a tensor is"
_IMMUTABLE = "tensors are immutable"
_FUNCTIONS = """
    sin cos tan floor ceil exp2 expm1 log1p log2 erf rsqrt reciprocal sign where isnan isinf isfinite isclose
    allclose add subtract multiply divide pow power maximum minimum logical_and logical_or logical_not gelu
    silu softplus real imag conj median quantile diff roll flip concat stack unstack tril triu scatter_add
    update shift pad einsum index one_hot"""
MISSING = (
    ("shape", _SIZES, "x.dims is ({dims}); x.array.shape is the shape of the array"),
    ("T mT H permute swapaxes moveaxis", _ORDER, "omit it; for an array in this order, x.numpy({reverse})"),
    ("dot matmul mm bmm", _BY_NAME, "wf.einsum(x, w, out=[…])"),
    ("ravel", "several dims become one by name", 'x.flatten([{names}], "new")'),
    ("view", "dims change by name", "wf.reshape(x, dims), wf.split(x, dim, dims) or wf.merge(x, dims, dim)"),
    ("unsqueeze expand", "a missing dim is broadcast by name", "omit it, or wf.broadcast_to(x, dims)"),
    (
        "repeat tile",
        "a missing dim is broadcast by name",
        "wf.broadcast_to(x, dims), or wf.concat([x, x], dim)",
    ),
    ("squeeze", "a dim of size 1 is removed by its name", 'x["{first}", 0]'),
    ("at", _IMMUTABLE, 'wf.update(x, "{first}", start, value), wf.scatter_add(…) or wf.where(…)'),
    ("copy clone", _IMMUTABLE, "use x itself; before it is donated, copy.deepcopy(x)"),
    ("tolist", "values are read as a NumPy array", "x.numpy().tolist()"),
    ("nbytes", _SIZES, "x.size * x.dtype.itemsize"),
    ("itemsize", _SIZES, "x.dtype.itemsize"),
    ("device devices sharding", _PLACED, "x.mesh and x.layout; of the array: x.storage.sharding"),
    ("to cpu cuda", _PLACED, "wf.place(x, mesh, layout); for the host, x.numpy()"),
    ("float double half bfloat16 long int", "astype changes the dtype", "x.astype(jnp.float32)"),
    ("detach", "a function stops the gradient", "wf.stop_gradient(x)"),
    ("numel", _SIZES, "x.size"),
    ("t", _ORDER, "omit it; for an array in this order, x.numpy({reverse})"),
    (
        "grad backward requires_grad requires_grad_",
        "functions are differentiated, not tensors",
        "wf.grad(loss)(x)",
    ),
    (_FUNCTIONS, "this op is a function, not a method", "call wf.{name}(x, …)"),
)


class _Missing:
    """A descriptor for an attribute of arrays that tensors don't have.

    Not `__getattr__`: with it, Python looks up every attribute of a tensor more slowly.
    """

    __slots__ = ("hint", "name", "rule")

    def __init__(self, name: str, rule: str, hint: str):
        self.name, self.rule, self.hint = name, rule, hint

    def __get__(self, t: Tensor | None, _: type) -> NoReturn:
        if t is None:
            raise AttributeError(self.name)
        raise self._error(t, f"{describe(t)}.{self.name}")

    def __set__(self, t: Tensor, _: object) -> NoReturn:
        raise self._error(t, f"{describe(t)}.{self.name} = …")

    def _error(self, t: Tensor, call: str) -> TensorAttributeError:
        names = [f'"{dim.name}"' for dim in t.dims]
        return TensorAttributeError(
            f"a tensor has no attribute {self.name}",
            rule=self.rule,
            hint=self.hint.format(
                name=self.name,
                first=_first_name(t),
                names=", ".join(names),
                reverse=", ".join(reversed(names)),
                dims=format_dims(t.dims),
            ),
        ).located(call)


class ArrayProtocols:
    """The protocols of NumPy, JAX and Python that treat an object as an array."""

    __slots__ = ()

    _missing: ClassVar[frozenset[str]]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """NumPy's element-wise functions and operators: Weft's op of the same name."""
        weft, name = public_ops(), UFUNC_NAMES.get(ufunc.__name__, ufunc.__name__)
        if name == "matmul":
            raise matmul_error(*inputs)
        if method == "__call__" and not options and name in weft.NAMES["ops.elementwise"].split():
            return getattr(weft, name)(*inputs)
        called = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        raise TensorTypeError(
            f"np.{called}{''.join(f' with {option}=' for option in options)} has no equivalent for tensors",
            rule="NumPy's element-wise functions of a tensor are Weft's ops of the same name",
            hint=f"use Weft's ops; or NumPy's function of the values: np.{called}(x.numpy())",
        ).located(format_call(f"np.{called}", inputs, {}))

    def __array_function__(self, function: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        """NumPy's other functions: of the values, as arrays on the host."""

        def values(leaf: object) -> object:
            return cast("Tensor", leaf).numpy() if isinstance(leaf, ArrayProtocols) else leaf

        args, kwargs = jax.tree.map(values, (args, kwargs), is_leaf=lambda x: isinstance(x, ArrayProtocols))
        return function(*args, **kwargs)

    @property
    def __jax_array__(self) -> Any:
        """Read by JAX's functions when they are called on a tensor: an error that names Weft's function.

        JAX's operators and `jnp.asarray` read it too. For them there is no such attribute: the former leave
        the work to the tensor's own operators, the latter uses `__array__`.
        """
        called = called_jax_function(sys._getframe(1))
        if called is None:
            raise AttributeError("__jax_array__")
        shown, (*_, group, name) = describe(cast("Tensor", self)), called.split(".")
        # Not TypeErrors: JAX catches those.
        if called in TRANSFORMATIONS.values():
            raise ProgramError(
                f"{called} differentiates a function whose result is a tensor, {shown}",
                rule="JAX needs an array as the result; Weft differentiates functions of tensors itself",
                hint=f"wf.{name}(loss)(x); or return the array: {called}(lambda x: loss(x).array)",
            ).located(called)
        weft = public_ops()
        grouped = group in ("linalg", "fft", "random") and hasattr(getattr(weft, group), name)
        here = f"{group}.{name}" if grouped else name if name in dir(weft) else weft.ELSEWHERE.get(name)
        raise ProgramError(
            f"{called} was called on a tensor",
            rule="JAX's functions work by position, and inside a program they would see one slice only",
            hint=(f"use wf.{here}; or " if here else "")
            + f"{called}(x.array) of the global array; inside a program, wf.local({called}, x, …)",
        ).located(f"{called}({shown})")

    def __len__(self) -> int:
        raise self._protocol_error(
            "len({})", "a tensor has no length", "x.size, or the size of one of x.dims"
        )

    def __iter__(self) -> NoReturn:
        hint = 'loop over a dim by name: for row in wf.unstack(x, "{first}")'
        raise self._protocol_error("iter({})", "a tensor has no first dim to loop over", hint)

    def __contains__(self, value: object) -> bool:
        raise self._protocol_error(
            "value in {}", "a tensor can't be searched by `in`", "bool(wf.any(x == value))"
        )

    def __setitem__(self, where: object, value: object) -> None:
        hint = 'x = wf.update(x, "{first}", start, value), or wf.where(condition, value, x)'
        raise self._protocol_error("{}[…] = value", "a tensor can't be changed", hint)

    def __delitem__(self, where: object) -> None:
        hint = 'keep a range instead: x["{first}", :4]'
        raise self._protocol_error("del {}[…]", "a tensor's elements can't be deleted", hint)

    def _protocol_error(self, call: str, fact: str, hint: str) -> TensorTypeError:
        t = cast("Tensor", self)
        rule = "a tensor is immutable, and its dims have names instead of positions"
        hint = hint.replace("{first}", _first_name(t))
        return TensorTypeError(fact, rule=rule, hint=hint).located(call.format(describe(t)))

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in self._missing]


def _first_name(t: Tensor) -> str:
    return t.dims[0].name if t.dims else "dim"


for _names, _rule, _hint in MISSING:
    for _name in _names.split():
        setattr(ArrayProtocols, _name, _Missing(_name, _rule, _hint))
ArrayProtocols._missing = frozenset(name for names, _, _ in MISSING for name in names.split())
