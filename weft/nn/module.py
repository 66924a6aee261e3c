"""Modules: from declared parameters to tensors.

A module is an Equinox pytree whose parameters are first *declared*, by dims and an initializer:

    class Scale(nn.Module):
        weight: Tensor

        def __init__(self, dim):
            self.weight = nn.declare([dim], nn.ones)

        def __call__(self, x):
            return x * self.weight

    module = Scale(wf.Dim("d_model", 512))       # a description: shapes, no values
    module = nn.init(module, key)                # the same tree, with tensors
    module = nn.init(module, key, mesh, layout)  # each device draws only its slices

A description costs nothing, so a model of any size can be planned (`nn.specs`), counted (`nn.count`) or
loaded from a file. A parameter's initial values depend on the key and on its own name alone, not on the order
of creation or the layout. `nn.stack(module, dim)` adds a dim to every parameter, for a `wf.scan` over layers.

Plans attribute each op to the module whose method calls it, by the path that its parameters have as well:
`decoder.blocks.attention`.
"""

from __future__ import annotations

import functools
import math
import re
import types
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import weft as wf
from weft.core.dims import DimLike, DimsLike, as_dim, as_dims, format_dims
from weft.core.errors import ProgramError, TensorTypeError, WeftError
from weft.core.layers import entered, original, path_name, running
from weft.core.tensor import Tensor, is_tensor
from weft.core.types import PyTree
from weft.random import keys

from ..core.call_errors import checks_arguments, raise_call_error, reports_construction

M = TypeVar("M")


class Module(eqx.Module):
    """An Equinox module whose methods are plain bound methods.

    Equinox turns bound methods into pytrees, which flattens the module at each call. Inside a program that
    would resolve every pending sum and gather every stored parameter in it, used or not.
    """

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            reports_construction(cls)
        for name, member in list(vars(cls).items()):
            if isinstance(member, types.FunctionType) and (name == "__call__" or not name.startswith("_")):
                setattr(cls, name, _as_layer(member))


def _as_layer(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a module; the ops that it calls are attributed to the module as their layer."""

    @functools.wraps(method)
    def call(self: Module, *args: Any, **kwargs: Any) -> Any:
        outer = running.layer
        if self is outer.module:
            return method(self, *args, **kwargs)
        # The outermost module is the model, which has no name in the names of its parameters either.
        name = "" if outer.module is None else _name_in(outer.module, self)
        with entered(outer.inner(self, name)):
            try:
                return method(self, *args, **kwargs)
            except TypeError as error:
                owner = type(self).__name__
                raise_call_error(functools.partial(method, self), owner, args, kwargs, error)

    return call


def _name_in(outer: object, module: Module) -> str:
    """The name under which one module holds another."""
    names: dict[str, object] = {}
    for name, value in vars(outer).items():
        if isinstance(value, list | tuple):
            names |= {f"{name}.{index}": one for index, one in enumerate(value)}
        elif isinstance(value, dict):
            names |= {f"{name}.{key}": one for key, one in value.items()}
        else:
            names[name] = value
    module = original(module)
    # A module that was cast, or that a transformation rebuilt, is another object than the one that is held.
    same_class = [name for name, one in names.items() if type(one) is type(module)]
    class_name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(module).__name__).lower()
    unknown = same_class[0] if len(same_class) == 1 else class_name
    return next((name for name, one in names.items() if one is module), unknown)


# From a key, dims and a dtype to the initial values of a parameter.
Initializer = Callable[[jax.Array, tuple[wf.Dim, ...], DTypeLike], Tensor]


def zeros(key: jax.Array, dims: tuple[wf.Dim, ...], dtype: DTypeLike) -> Tensor:
    """Zeros, as an initializer."""
    return wf.zeros(dims, dtype)


def ones(key: jax.Array, dims: tuple[wf.Dim, ...], dtype: DTypeLike) -> Tensor:
    """Ones, as an initializer."""
    return wf.ones(dims, dtype)


@dataclass(frozen=True)
class Normal:
    """An initializer: normal with mean zero and this standard deviation."""

    stddev: float

    def __call__(self, key: jax.Array, dims: tuple[wf.Dim, ...], dtype: DTypeLike) -> Tensor:
        return wf.random.normal(key, dims, dtype) * self.stddev


def fan_in(dims: DimsLike) -> Normal:
    """Normal, scaled so that contracting these dims preserves the variance of the input."""
    return Normal(math.prod(d.size for d in as_dims(dims)) ** -0.5)


@dataclass(frozen=True)
class Declared:
    """A parameter without values yet: its dims, initializer and dtype."""

    dims: tuple[wf.Dim, ...]
    initializer: Initializer
    dtype: DTypeLike = jnp.float32

    @property
    def size(self) -> int:
        return math.prod(d.size for d in self.dims)

    def __repr__(self) -> str:
        return f"{jnp.dtype(self.dtype).name}[{format_dims(self.dims)}] declared"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ProgramError(
            f"a declared parameter [{format_dims(self.dims)}] has no {name}",
            rule="a module is a description until its parameters are initialized or loaded",
            hint="initialize it: module = nn.init(module, jax.random.key(0)), or plan with nn.specs(module)",
        )


@checks_arguments
def declare(dims: DimsLike, initializer: Initializer, dtype: DTypeLike = jnp.float32) -> Tensor:
    """Declare a parameter of a module; `init` replaces it by a tensor.

    Args:
      dims: its dims.
      initializer: `zeros`, `ones`, `Normal(stddev)`, `fan_in(dims)`, or a function of key, dims and dtype.
      dtype: the dtype of its elements.
    """
    if not callable(initializer):
        raise TensorTypeError(
            "the initializer is not a function",
            rule="nn.init calls the initializer with a key, dims and a dtype",
            hint="nn.declare(dims, nn.zeros): pass the function without calling it",
        )
    return Declared(as_dims(dims), initializer, dtype)  # type: ignore[return-value]


def check_initialized(parameters: Mapping[str, Tensor], rule: str, alternative: str = "") -> None:
    """Raise an error if some parameters are only declared, without values.

    Args:
      parameters: by name.
      rule: why they need values.
      alternative: what to do instead of initializing them, appended to the hint.
    """
    declared = [name for name, one in parameters.items() if isinstance(one, Declared)]
    if declared:
        first, more = ", ".join(declared[:3]), len(declared) - 3
        raise ProgramError(
            f"{first}{f' and {more} more' if more > 0 else ''} {'is' if len(declared) == 1 else 'are'} "
            "declared but not initialized",
            rule=rule,
            hint=f"initialize them: module = nn.init(module, jax.random.key(0)){alternative}",
        )


def check_module(module: object) -> None:
    """Raise an error for a class: an object of it is the module."""
    if isinstance(module, type):
        raise ProgramError(
            f"{module.__name__} is a class, and has no parameters",
            rule="a module is an object of the class",
            hint=f"create one: {module.__name__}(…)",
        )


def is_parameter(leaf: PyTree) -> bool:
    """Whether a leaf is a tensor or a declared parameter."""
    return isinstance(leaf, Declared) or is_tensor(leaf)


def map_parameters(fn: Callable[..., PyTree], module: M, *others: PyTree) -> M:
    """The module with `fn` applied to each parameter (and to the corresponding ones of other modules)."""
    return jax.tree.map(
        lambda p, *rest: fn(p, *rest) if is_parameter(p) else p, module, *others, is_leaf=is_parameter
    )


@checks_arguments
def parameters(module: PyTree) -> dict[str, Tensor]:
    """The parameters by name: `decoder.attention.query`."""
    check_module(module)
    leaves = jax.tree_util.tree_leaves_with_path(module, is_leaf=is_parameter)
    return {path_name(path): leaf for path, leaf in leaves if is_parameter(leaf)}


@checks_arguments
def count(module: PyTree) -> int:
    """The total size of the parameters."""
    check_module(module)
    return sum(p.size for p in parameters(module).values())


@checks_arguments
def stack(module: M, dim: DimLike) -> M:
    """The declared module with a new first dim on every parameter: one copy per element of the dim.

    `wf.scan(f, x, stacked, dim)` passes them to `f` one after the other.
    """
    check_module(module)
    new = as_dim(dim)
    return map_parameters(lambda p: Declared((new, *p.dims), p.initializer, p.dtype), module)


@checks_arguments
def specs(module: M) -> M:
    """The module with specs as parameters, for planning."""
    return map_parameters(lambda p: wf.spec(p.dims, p.dtype, role="param"), module)


@checks_arguments
def init(
    module: M, key: jax.Array, mesh: wf.Mesh | str | None = None, layout: wf.Layout | str | None = None
) -> M:
    """Initialize the declared parameters of a module.

    Args:
      module: a description; tensors already in it are kept.
      key: a JAX key. The same key gives the same values on every mesh, bit for bit.
      mesh: where to place the parameters; by default they are unplaced, on one device.
      layout: how they are stored (its `params=` rules included).
    """
    leaves, tree = jax.tree.flatten(module, is_leaf=is_parameter)
    try:
        keys.check_key(key)
        wf.Layout.of(layout).check(wf.Mesh.of(mesh))
        if leaves and leaves[0] is module and not is_parameter(module):
            raise ProgramError(
                f"a {type(module).__name__} is not a module, and has no parameters",
                rule="nn.init initializes the declared parameters of a module, or of a tree of modules",
                hint="nn.init(Transformer(config), key); see Write a module in the docs",
            )
    except WeftError as error:
        raise error.located(f"nn.init({type(module).__name__}(…), key)") from None
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(module, is_leaf=is_parameter)]
    declared = {name: leaf for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, Declared)}

    def draw(key: jax.Array) -> dict[str, Tensor]:
        drawn = {}
        for name, one in declared.items():
            try:
                own = jax.random.fold_in(key, zlib.crc32(name.encode()))
                drawn[name] = wf.parameter(one.initializer(own, one.dims, one.dtype))
            except WeftError as error:
                raise error.located(f"nn.init: {name}") from None
        return drawn

    if mesh is None:
        drawn = jax.jit(draw)(key)
    else:
        with warnings.catch_warnings():  # of rules for dims that parameters don't have, such as batch
            warnings.simplefilter("ignore", wf.LayoutWarning)
            drawn = wf.spmd(draw, mesh, layout)(key)
    return jax.tree.unflatten(tree, [drawn.get(n, leaf) for n, leaf in zip(names, leaves, strict=True)])


@checks_arguments
def cast(module: M, dtype: DTypeLike) -> M:
    """The module with its floating-point parameters cast to the dtype to compute in."""
    return map_parameters(
        lambda p: p.astype(dtype) if jnp.issubdtype(p.dtype, jnp.floating) and p.dtype != dtype else p, module
    )
