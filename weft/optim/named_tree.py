"""Parameters by name: what gradients, state and patterns are checked against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp

import weft as wf
from weft.core import context
from weft.core.describe import describe
from weft.core.errors import DimError, ProgramError, TensorTypeError, WeftError, nearest
from weft.core.tensor import Tensor, is_tensor
from weft.nn.module import check_initialized, path_name


@contextmanager
def error_context(what: str) -> Iterator[None]:
    """Let errors say what was asked, and on which line; whole trees of tensors would not be read."""
    try:
        yield
    except WeftError as error:
        error.located(what)
        raise


def named_tensors(tree: Any) -> dict[str, Tensor]:
    """The tensors of a tree by name, `decoder.attention.query`, in the tree's order."""
    found: dict[str, Tensor] = {}
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
                rule="parameters and gradients are tensors; a raw array has no names to factor or split by",
                hint="name its dims with wf.tensor(array, dims), or make it a static field of its module",
            )
        if isinstance(leaf, Tensor):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TensorTypeError(
                    f"{name or 'the parameter'} is {describe(leaf)}",
                    rule="parameters that are learnt are real floating-point tensors",
                    hint="keep it apart from the parameters, or convert it with x.astype(jnp.float32)",
                )
            found[name] = leaf
    twice = [name for name, n in Counter(path_name(p) for p, t in leaves if is_tensor(t)).items() if n > 1]
    if twice:
        raise ProgramError(
            f"several parameters are called {', '.join(twice)}",
            rule="state is kept by name, so each parameter has one of its own",
            hint="leave dots out of the keys of dicts",
        )
    return found


def replace_tensors(tree: Any, new: Mapping[str, Tensor]) -> Any:
    """The tree with others in place of its tensors, by the names that `named` gives them."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: new[path_name(path)] if isinstance(leaf, Tensor) else leaf, tree, is_leaf=is_tensor
    )


def any_specs(params: Mapping[str, Tensor]) -> bool:
    """Whether there are specs among tensors, so that what is made of them are specs too."""
    # Inside a program all have values, though these are not known yet.
    specs = (isinstance(p._data, jax.ShapeDtypeStruct) for p in params.values())
    return context.current() is None and any(specs)


def match_grads(grads: dict[str, Tensor], params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients with their dims in the order of the parameters'; an error if they belong to others."""
    hint = "pass what wf.grad gives for the parameters"
    missing = [n for n in params if n not in grads]
    extra = [n for n in grads if n not in params]
    if missing or extra:
        parts = [f"no gradient for {', '.join(missing)}"] if missing else []
        parts += [f"no parameter for the gradient {', '.join(extra)}"] if extra else []
        raise ProgramError(
            f"there is {'; '.join(parts)}", rule="there is a gradient for each parameter", hint=hint
        )
    wrong = [n for n, p in params.items() if set(grads[n].dims) != set(p.dims)]
    if wrong:
        shown = [f"{n}: {describe(grads[n])} for the parameter {describe(params[n])}" for n in wrong]
        raise DimError(
            f"{len(wrong)} gradients have other dims than their parameters"
            if len(wrong) > 1
            else "a gradient has other dims than its parameter",
            *shown,
            rule="a gradient has the dims of its parameter",
            hint=hint,
        )
    return {n: g if g.dims == params[n].dims else wf.transpose(g, params[n].dims) for n, g in grads.items()}


def check_state(state: Any, expected: dict[str, Any]) -> None:
    """An error if a state is not one of this optimizer for these parameters."""
    have, want = _shapes(state), _shapes(expected)
    wrong = [
        f"{key}: {have.get(key, 'nothing')}, not {want.get(key, 'known')}"
        for key in dict.fromkeys([*want, *have])
        if have.get(key) != want.get(key)
    ]
    if wrong:
        more = [f"and {len(wrong) - 4} more"] if len(wrong) > 4 else []
        raise ProgramError(
            "the state is not of this optimizer and these parameters",
            *wrong[:4],
            *more,
            rule="a state is what init, or the last update, gave for these parameters",
            hint="state = optimizer.init(params)",
        )


def _shapes(state: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_tensor)
    return {
        path_name(path): f"[{', '.join(map(repr, t.dims))}]" if isinstance(t, Tensor) else type(t).__name__
        for path, t in leaves
    }


def check_patterns(patterns: tuple[str, ...] | None, params: dict[str, Tensor]) -> None:
    idle = [p for p in patterns or () if not any(fnmatchcase(name, p) for name in params)]
    if idle:
        shown = ", ".join(f"{p}{nearest(p, params)}" for p in idle)
        raise ProgramError(
            f"no parameter is called {shown}",
            rule="decayed= names the parameters that decay, with * for any letters",
            hint=f"the parameters are {', '.join(list(params)[:8])}{', …' if len(params) > 8 else ''}",
        )
