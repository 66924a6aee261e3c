"""Modules: from declared parameters to tensors.

A module is an Equinox pytree whose parameters are first *declared*, by dims and a way to draw them:

    class Scale(nn.Module):
        weight: Tensor

        def __init__(self, dim):
            self.weight = nn.declare([dim], nn.ones)

        def __call__(self, x):
            return x * self.weight

    module = Scale(wf.Dim("d_model", 512))       # a description: shapes, nothing drawn
    module = nn.init(module, key)                # the same tree, with tensors
    module = nn.init(module, key, mesh, layout)  # each device draws its slices, and no more

Because a description costs nothing, a model of any size can be planned (`nn.specs`), counted (`nn.count`) or
filled from a file. Each parameter's draw depends on the key and on its own name alone, not on the order of
creation or the layout. `nn.stack(module, dim)` gives every parameter one more dim, for a `wf.scan` over
layers.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

import weft as wf
from weft.core.dims import as_dims, format_dims
from weft.core.errors import ProgramError, WeftError
from weft.core.tensor import Tensor, is_tensor
from weft.random import keys

M = TypeVar("M")


class Module(eqx.Module):
    """An Equinox module whose methods are plain methods.

    Equinox makes trees of them, and to do so takes the module apart at each call: inside a program that would
    resolve every pending sum and gather every stored parameter that it holds, used or not.
    """

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


# A way to draw a parameter: from a key, dims and a dtype to a tensor.
Initializer = Callable[[Any, tuple[wf.Dim, ...], Any], Tensor]


def zeros(key: Any, dims: tuple[wf.Dim, ...], dtype: Any) -> Tensor:
    """All zero."""
    return wf.zeros(dims, dtype)


def ones(key: Any, dims: tuple[wf.Dim, ...], dtype: Any) -> Tensor:
    """All one."""
    return wf.ones(dims, dtype)


@dataclass(frozen=True)
class Normal:
    """Normally distributed about zero, with this standard deviation."""

    deviation: float

    def __call__(self, key: Any, dims: tuple[wf.Dim, ...], dtype: Any) -> Tensor:
        return wf.random.normal(key, dims, dtype) * self.deviation


def fan_in(dims: Any) -> Normal:
    """Normal, such that a sum over these dims keeps its operand's variance."""
    return Normal(math.prod(d.size for d in as_dims(dims)) ** -0.5)


@dataclass(frozen=True)
class Declared:
    """A parameter that is not there yet."""

    dims: tuple[wf.Dim, ...]
    draw: Initializer
    dtype: Any = jnp.float32

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
            rule="a module is a description until its parameters are drawn or loaded",
            hint="draw them: module = nn.init(module, jax.random.key(0)), or plan with nn.specs(module)",
        )


def declare(dims: Any, draw: Initializer, dtype: Any = jnp.float32) -> Tensor:
    """A parameter's place in a module; `init` puts the tensor there.

    Args:
      dims: its dims.
      draw: `zeros`, `ones`, `Normal(deviation)`, `fan_in(dims)`, or a function of key, dims and dtype.
      dtype: the type of its elements.
    """
    return Declared(as_dims(dims), draw, dtype)  # type: ignore[return-value]


def check_initialized(parameters: Mapping[str, Any], rule: str, otherwise: str = "") -> None:
    """An error if some parameters are declared, and have no values.

    Args:
      parameters: by name.
      rule: why there must be values.
      otherwise: another way out than to draw them.
    """
    declared = [name for name, one in parameters.items() if isinstance(one, Declared)]
    if declared:
        first, more = ", ".join(declared[:3]), len(declared) - 3
        raise ProgramError(
            f"{first}{f' and {more} more' if more > 0 else ''} {'is' if len(declared) == 1 else 'are'} "
            "declared, and not there yet",
            rule=rule,
            hint=f"draw them: module = nn.init(module, jax.random.key(0)){otherwise}",
        )


def is_parameter(leaf: Any) -> bool:
    """Whether this is a tensor, or a declared one."""
    return isinstance(leaf, Declared) or is_tensor(leaf)


def map_parameters(fn: Callable[..., Any], module: M, *others: Any) -> M:
    """The module with `fn` of each of its parameters (and of the same ones of others)."""
    return jax.tree.map(
        lambda p, *rest: fn(p, *rest) if is_parameter(p) else p, module, *others, is_leaf=is_parameter
    )


def parameters(module: Any) -> dict[str, Tensor]:
    """The parameters by name: `decoder.attention.query`."""
    leaves = jax.tree_util.tree_leaves_with_path(module, is_leaf=is_parameter)
    return {path_name(path): leaf for path, leaf in leaves if is_parameter(leaf)}


def path_name(path: tuple[Any, ...]) -> str:
    """A tree path as a name with dots."""
    return ".".join(str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path)


def count(module: Any) -> int:
    """How many numbers the parameters hold."""
    return sum(p.size for p in parameters(module).values())


def stack(module: M, dim: wf.Dim) -> M:
    """The declared module with one more dim, the first, on every parameter: one copy for each element.

    `wf.scan(f, x, stacked, dim)` gives them to `f` one after the other.
    """
    return map_parameters(lambda p: Declared((dim, *p.dims), p.draw, p.dtype), module)


def specs(module: M) -> M:
    """The module with parameters that have no values, for planning."""
    return map_parameters(lambda p: wf.spec(p.dims, p.dtype, role="param"), module)


def init(module: M, key: Any, mesh: Any = None, layout: Any = None) -> M:
    """The module with its declared parameters drawn.

    Args:
      module: a description; tensors that it has already stay.
      key: a JAX key. The same key gives the same numbers on every mesh, bit for bit.
      mesh: where the parameters are to be; by default nowhere, one device.
      layout: how they are stored (its `params=` rules included).
    """
    leaves, tree = jax.tree.flatten(module, is_leaf=is_parameter)
    try:
        keys.check_key(key)
        wf.Layout.of(layout).check(wf.Mesh.of(mesh))
        if leaves and leaves[0] is module and not is_parameter(module):
            raise ProgramError(
                f"a {type(module).__name__} is no module, and has no parameters",
                rule="what is drawn are the declared parameters of a module, or of a tree of modules",
                hint="nn.init(Transformer(config), key); see Write a module in the docs",
            )
    except WeftError as error:
        raise error.located(f"nn.init({type(module).__name__}(…), key)") from None
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(module, is_leaf=is_parameter)]
    declared = {name: leaf for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, Declared)}

    def draw(key: Any) -> dict[str, Tensor]:
        drawn = {}
        for name, one in declared.items():
            try:
                own = jax.random.fold_in(key, zlib.crc32(name.encode()))
                drawn[name] = wf.parameter(one.draw(own, one.dims, one.dtype))
            except WeftError as error:
                raise error.located(f"nn.init: {name}") from None
        return drawn

    if mesh is None:
        drawn = jax.jit(draw)(key)
    else:
        with warnings.catch_warnings():  # rules for dims that parameters don't have, such as batch
            warnings.simplefilter("ignore", wf.LayoutWarning)
            drawn = wf.spmd(draw, mesh, layout)(key)
    return jax.tree.unflatten(tree, [drawn.get(n, leaf) for n, leaf in zip(names, leaves, strict=True)])


def cast(module: M, dtype: Any) -> M:
    """The module with its floating-point parameters in another type, to compute in."""
    return map_parameters(
        lambda p: p.astype(dtype) if jnp.issubdtype(p.dtype, jnp.floating) and p.dtype != dtype else p, module
    )
