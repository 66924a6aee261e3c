"""Any optax transformation, right under any layout.

Inside a program leaves are slices, and a raw optax transformation there would be silently wrong: its global
norm would be that of one slice. `wf.optimizer(tx)` runs it after the program's SPMD part, in the same `jit`,
on whole arrays in their true sizes, and lays the results out again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..core import context
from ..core.deferred import ResultSpec, defer, global_arrays, global_shape
from ..core.describe import describe, reports_call
from ..core.errors import DimError, ProgramError
from ..core.operands import as_slice
from ..core.placement import place
from ..core.reshard import materialize
from ..core.tensor import Tensor, is_tensor
from .shape import transpose

if TYPE_CHECKING:  # the functions below import it when they are called: it takes a fifth of the time of JAX
    import optax


class OptaxOptimizer:
    """An optax transformation over named tensors; made by `wf.optimizer`."""

    def __init__(self, tx: optax.GradientTransformation):
        self._tx = tx
        self._steps = {end: self._step(end, {}) for end in (_updated, _updates)}  # JAX compiles each once

    @property
    def tx(self) -> optax.GradientTransformation:
        """The transformation."""
        return self._tx

    def __repr__(self) -> str:
        return "optimizer(tx)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OptaxOptimizer) and self.tx == other.tx

    def __hash__(self) -> int:
        return hash(self.tx)

    @reports_call
    def init(self, params: Any) -> Any:
        """The state to begin with: what is shaped like a parameter has its dims."""
        arrays = _shapes(params)
        return _run(self.tx.init, (params,), self._state_results(arrays, params), params)

    @reports_call
    def update(self, grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        """The updates to add to the parameters, and the new state, as `tx.update`.

        Some transformations ask for more, by name: `value=loss`. Functions among it are given whole arrays.
        """
        return self._update(_updates, grads, state, params, extra)

    @reports_call
    def apply(self, grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        """The new parameters and the new state; what else there is to give is that of `update`."""
        return self._update(_updated, grads, state, params, extra)

    def _update(self, end: Callable[..., Any], grads: Any, state: Any, params: Any, extra: Any) -> Any:
        self._check_extra(extra)
        functions = {name: given for name, given in extra.items() if callable(given)}
        extra = {name: _as_given(given, params) for name, given in extra.items() if name not in functions}
        grads, arrays = _aligned(grads, params), _shapes(params)
        as_params = jax.tree.map(_like_param, params, is_leaf=is_tensor)
        results = (as_params, self._state_results(arrays, params))
        if context.current() is not None:
            # Gradients meet the state where it is stored: a pending sum is scattered, not reduced.
            grads = jax.tree.map(_in_state_layout, grads, is_leaf=is_tensor)
        step = self._step(end, functions) if functions else self._steps[end]
        return _run(step, (grads, state, params, extra), results, params)

    def _step(self, end: Callable[..., Any], functions: dict[str, Any]) -> Callable[..., Any]:
        """The transformation's `update`, and what is made of the parameters and the updates."""

        def new(grads: Any, state: Any, params: Any, extra: Any) -> tuple[Any, Any]:
            updates, state = self.tx.update(grads, state, params, **extra, **functions)
            return end(params, updates), state

        return new

    def _check_extra(self, extra: Any) -> None:
        import optax

        plain = isinstance(self.tx, optax.GradientTransformation)
        if extra and plain and not isinstance(self.tx, optax.GradientTransformationExtraArgs):
            raise ProgramError(
                f"the optimizer was given {', '.join(extra)}, which its transformation does not take",
                rule="beside gradients, state and parameters, a transformation is given what it asks for",
                hint="leave it out; or optax.with_extra_args_support(tx), which takes and ignores it",
            )

    def _state_results(self, arrays: Any, params: Any) -> Any:
        """For each leaf of the state: the dims of the parameter that it is shaped like, or none."""
        import optax

        state = jax.eval_shape(self.tx.init, arrays)
        boxes = jax.tree.map(_Box, params, is_leaf=is_tensor)

        def is_masked(leaf: Any) -> bool:
            return isinstance(leaf, optax.MaskedNode)

        def named(leaf: Any, box: _Box) -> Any:
            if is_masked(leaf):  # the state of a parameter that is left out
                return leaf
            t = box.content
            if isinstance(t, Tensor) and leaf.shape == tuple(d.size for d in t.dims):
                return ResultSpec(t.dims, "optimizer")
            return unnamed(leaf)

        def unnamed(leaf: Any) -> ResultSpec:
            return ResultSpec(None)

        try:
            return optax.tree_map_params(
                self.tx, named, state, boxes, transform_non_params=unnamed, is_leaf=is_masked
            )
        except Exception:
            # Which leaves belong to which parameter optax finds out by a state of placeholders. Some can't be
            # made of them (lbfgs's), and some are nested otherwise than the parameters (sm3's).
            return jax.tree.map(unnamed, state)


class _Box:
    """A leaf for JAX, whatever is in it."""

    def __init__(self, content: Any):
        self.content = content


@reports_call
def optimizer(tx: optax.GradientTransformation) -> OptaxOptimizer:
    """An optax transformation that is right on any mesh and layout.

    >>> import optax, weft as wf
    >>> w = wf.parameter(wf.ones("a=2"))
    >>> sgd = wf.optimizer(optax.sgd(0.5))
    >>> state = sgd.init(w)
    >>> w, state = sgd.apply(wf.ones("a=2"), state, w)
    >>> w
    f32[a=2] [0.5, 0.5]
    """
    if not hasattr(tx, "init") or not hasattr(tx, "update"):
        raise ProgramError(
            f"{tx!r} is not an optax transformation",
            rule="an optimizer is made of one: of what optax.adam(1e-3) or optax.chain(…) returns",
            hint="wf.optimizer(optax.adam(1e-3))",
        )
    return OptaxOptimizer(tx)


def _updates(params: Any, updates: Any) -> Any:
    return updates


def _updated(params: Any, updates: Any) -> Any:
    import optax

    return optax.apply_updates(params, updates)


def _shapes(params: Any) -> Any:
    return jax.tree.map(global_shape, params, is_leaf=is_tensor)


def _aligned(grads: Any, params: Any) -> Any:
    """Gradients with their dims in the order of the parameters': optax goes by position."""
    tree: Any
    leaves, tree = jax.tree.flatten(grads, is_leaf=is_tensor)
    wanted, wanted_tree = jax.tree.flatten(params, is_leaf=is_tensor)
    rule = "there is a gradient for each parameter, with the same dims"
    if tree != wanted_tree:
        raise ProgramError(
            f"there are {len(leaves)} gradients for {len(wanted)} parameters, or otherwise nested",
            rule=rule,
            hint="pass what wf.grad gives for the parameters",
        )
    for n, (g, p) in enumerate(zip(leaves, wanted, strict=True)):
        if isinstance(g, Tensor) and isinstance(p, Tensor) and g.dims != p.dims:
            if set(g.dims) != set(p.dims):
                raise DimError(
                    f"the gradient {describe(g)} belongs to the parameter {describe(p)}",
                    rule=rule,
                    hint="pass what wf.grad gives for the parameters",
                )
            leaves[n] = transpose(g, p.dims)
    return jax.tree.unflatten(tree, leaves)


def _as_given(given: Any, params: Any) -> Any:
    """What else a transformation is given; what is nested like the parameters has their order of dims."""

    def turned(t: Any, p: Any) -> Any:
        both = isinstance(t, Tensor) and isinstance(p, Tensor)
        return transpose(t, p.dims) if both and set(t.dims) == set(p.dims) else t

    given = jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), given, is_leaf=is_tensor)
    tree: Any = jax.tree.structure(given, is_leaf=is_tensor)
    wanted = jax.tree.structure(params, is_leaf=is_tensor)
    return jax.tree.map(turned, given, params, is_leaf=is_tensor) if tree == wanted else given


def _like_param(t: Any) -> ResultSpec:
    return ResultSpec(t.dims, t.role) if isinstance(t, Tensor) else ResultSpec(None)


def _in_state_layout(t: Any) -> Any:
    return materialize(as_slice(t), "optimizer") if isinstance(t, Tensor) else t


def _run(fn: Callable[..., Any], args: tuple[Any, ...], results: Any, params: Any) -> Any:
    if context.current() is not None:
        return defer(fn, args, results)
    placed = [t for t in jax.tree.leaves(params, is_leaf=is_tensor) if isinstance(t, Tensor)]
    mesh, layout = (placed[0].mesh, placed[0].layout) if placed else (None, None)
    if any(isinstance(t._data, jax.ShapeDtypeStruct) for t in placed):  # that of specs are specs
        mesh, layout, out = (
            None,
            None,
            jax.eval_shape(fn, *jax.tree.map(global_shape, args, is_leaf=is_tensor)),
        )
    else:
        out = jax.jit(fn)(*global_arrays(args))

    def wrap(result: ResultSpec, array: Any) -> Any:
        if result.dims is None:
            return array
        return place(Tensor(array, result.dims, role=result.role), mesh, layout)

    return jax.tree.map(wrap, results, out, is_leaf=lambda x: isinstance(x, ResultSpec))
