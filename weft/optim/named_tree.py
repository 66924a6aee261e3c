"""Pytrees of tensors by name: match gradients, optimizer state and name patterns with the parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase

import jax
import jax.numpy as jnp

import weft as wf
from weft.core.describe import describe
from weft.core.errors import DimError, ProgramError, TensorTypeError, WeftError, nearest
from weft.core.layers import path_name
from weft.core.placement import is_spec
from weft.core.tensor import Tensor, is_tensor
from weft.core.types import PyTree
from weft.nn.module import check_initialized


@contextmanager
def error_context(call: str) -> Iterator[None]:
    """Add the failing call and the user's line to errors. `call` is text: printed pytrees are unreadable."""
    try:
        yield
    except WeftError as error:
        error.located(call)
        raise


def named_tensors(tree: PyTree) -> dict[str, Tensor]:
    """The tensors of a pytree by name, such as `decoder.attention.query`, in the tree's order."""
    tensors: dict[str, Tensor] = {}
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_tensor)
    check_initialized(
        {path_name(path): leaf for path, leaf in leaves},
        rule="an optimizer works on tensors, or on specs for a plan",
        alternative=", or plan with nn.specs(module)",
    )
    for path, leaf in leaves:
        name = path_name(path)
        if hasattr(leaf, "shape") and not isinstance(leaf, Tensor):
            raise TensorTypeError(
                f"{name or 'the parameter'} is an array of shape {tuple(leaf.shape)}",
                rule="parameters and gradients are tensors; a raw array has no named dims to factor or split",
                hint="name its dims with wf.tensor(array, dims), or make it a static field of its module",
            )
        if isinstance(leaf, Tensor):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TensorTypeError(
                    f"{name or 'the parameter'} is {describe(leaf)}",
                    rule="trainable parameters are real floating-point tensors",
                    hint="keep it outside the parameters, or convert it with x.astype(jnp.float32)",
                )
            tensors[name] = leaf
    counts = Counter(path_name(path) for path, leaf in leaves if is_tensor(leaf))
    duplicates = [name for name, count in counts.items() if count > 1]
    if duplicates:
        raise ProgramError(
            f"several parameters are called {', '.join(duplicates)}",
            rule="optimizer state is stored by name, so each parameter needs a unique name",
            hint="use no dots in the keys of dicts",
        )
    return tensors


def replace_tensors(tree: PyTree, new: Mapping[str, Tensor]) -> PyTree:
    """The tree with its tensors replaced, by the names of `named_tensors`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: new[path_name(path)] if isinstance(leaf, Tensor) else leaf, tree, is_leaf=is_tensor
    )


def any_specs(params: Mapping[str, Tensor]) -> bool:
    """Whether some tensors are specs (without values); their optimizer state then consists of specs too."""
    return any(is_spec(p) for p in params.values())


def match_grads(grads: dict[str, Tensor], params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients transposed to the dims of their parameters; an error if names or dims don't match."""
    hint = "pass the result of wf.grad for these parameters"
    missing = [n for n in params if n not in grads]
    extra = [n for n in grads if n not in params]
    if missing or extra:
        parts = [f"no gradient for {', '.join(missing)}"] if missing else []
        parts += [f"no parameter for the gradient {', '.join(extra)}"] if extra else []
        raise ProgramError(
            f"there is {'; '.join(parts)}", rule="each parameter needs exactly one gradient", hint=hint
        )
    wrong = [n for n, p in params.items() if set(grads[n].dims) != set(p.dims)]
    if wrong:
        shown = [f"{n}: {describe(grads[n])} for the parameter {describe(params[n])}" for n in wrong]
        raise DimError(
            f"the dims of {len(wrong)} gradients differ from their parameters'"
            if len(wrong) > 1
            else "the dims of a gradient differ from its parameter's",
            *shown,
            rule="a gradient has the same dims as its parameter",
            hint=hint,
        )
    return {n: g if g.dims == params[n].dims else wf.transpose(g, params[n].dims) for n, g in grads.items()}


def check_state(state: PyTree, expected: dict[str, PyTree]) -> None:
    """Raise an error if `state` does not belong to this optimizer and these parameters."""
    actual, wanted = _shapes(state), _shapes(expected)
    wrong = [
        f"{key}: {_mismatch(actual.get(key), wanted.get(key))}"
        for key in dict.fromkeys([*wanted, *actual])
        if actual.get(key) != wanted.get(key)
    ]
    if wrong:
        more = [f"and {len(wrong) - 4} more"] if len(wrong) > 4 else []
        raise ProgramError(
            "the state does not belong to this optimizer and these parameters",
            *wrong[:4],
            *more,
            rule="a state is the result of init or of the last update for the same parameters",
            hint="state = optimizer.init(params)",
        )


def _mismatch(actual: str | None, wanted: str | None) -> str:
    if actual is None:
        return f"missing, expected {wanted}"
    return f"unexpected, {actual}" if wanted is None else f"{actual}, expected {wanted}"


def _shapes(state: PyTree) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_tensor)
    return {
        path_name(path): f"[{', '.join(map(repr, t.dims))}]" if isinstance(t, Tensor) else type(t).__name__
        for path, t in leaves
    }


def check_patterns(patterns: tuple[str, ...] | None, params: dict[str, Tensor]) -> None:
    """Raise an error if a pattern of `decayed=` matches no parameter."""
    unused = [p for p in patterns or () if not any(fnmatchcase(name, p) for name in params)]
    if unused:
        shown = ", ".join(f"{p}{nearest(p, params)}" for p in unused)
        raise ProgramError(
            f"no parameter matches {shown}",
            rule="decayed= lists the names of the parameters with weight decay; * matches any characters",
            hint=f"the parameters are {', '.join(list(params)[:8])}{', …' if len(params) > 8 else ''}",
        )
