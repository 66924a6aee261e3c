"""Any optax transformation, right under any layout.

Inside a program leaves are slices, and a raw optax transformation there would be silently wrong: its global
norm would be that of one slice. `wf.optimizer(tx)` runs it after the program's SPMD part, in the same `jit`,
on whole arrays in their true sizes, and lays the results out again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from . import context
from .errors import DimError, ProgramError
from .forms import as_slice, settle
from .later import Result, later, true_shape, whole_arrays
from .ops.shape import transpose
from .placing import place
from .tensor import Tensor, describe, entry, is_tensor

if TYPE_CHECKING:  # the functions below import it when they are called: it takes a fifth of the time of JAX
    import optax


class Optimizer:
    """An optax transformation over named tensors; made by `wf.optimizer`."""

    def __init__(self, tx: optax.GradientTransformation):
        self.tx = tx

    def __repr__(self) -> str:
        return "optimizer(tx)"

    @entry
    def init(self, params: Any) -> Any:
        """The state to begin with: what is shaped like a parameter has its dims."""
        arrays = _shapes(params)
        return _run(self.tx.init, (params,), self._state_results(arrays, params), params)

    @entry
    def update(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """The updates to add to the parameters, and the new state, as `tx.update`."""
        return self._update(self.tx.update, grads, state, params)

    @entry
    def apply(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """The new parameters and the new state."""
        import optax

        def new(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
            updates, state = self.tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return self._update(new, grads, state, params)

    def _update(self, fn: Callable[..., Any], grads: Any, state: Any, params: Any) -> Any:
        grads, arrays = _aligned(grads, params), _shapes(params)
        as_params = jax.tree.map(_like_param, params, is_leaf=is_tensor)
        results = (as_params, self._state_results(arrays, params))
        if context.current() is not None:
            # Gradients meet the state where it is stored: a pending sum is scattered, not reduced.
            grads = jax.tree.map(_in_state_layout, grads, is_leaf=is_tensor)
        return _run(fn, (grads, state, params), results, params)

    def _state_results(self, arrays: Any, params: Any) -> Any:
        """For each leaf of the state: the dims of the parameter that it is shaped like, or none."""
        import optax

        state = jax.eval_shape(self.tx.init, arrays)
        boxes = jax.tree.map(_Box, params, is_leaf=is_tensor)

        def named(leaf: Any, box: _Box) -> Result:
            t = box.content
            if isinstance(t, Tensor) and leaf.shape == tuple(d.size for d in t.dims):
                return Result(t.dims, "optimizer")
            return Result(None)

        return optax.tree_map_params(
            self.tx, named, state, boxes, transform_non_params=lambda _: Result(None)
        )


class _Box:
    """A leaf for JAX, whatever is in it."""

    def __init__(self, content: Any):
        self.content = content


def optimizer(tx: optax.GradientTransformation) -> Optimizer:
    """An optax transformation that is right on any mesh and layout.

    >>> import optax, weft as wf
    >>> w = wf.parameter(wf.ones("a=2"))
    >>> sgd = wf.optimizer(optax.sgd(0.5))
    >>> state = sgd.init(w)
    >>> w, state = sgd.apply(wf.ones("a=2"), state, w)
    >>> w
    f32[a=2] [0.5, 0.5]
    """
    return Optimizer(tx)


def _shapes(params: Any) -> Any:
    return jax.tree.map(true_shape, params, is_leaf=is_tensor)


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


def _like_param(t: Any) -> Result:
    return Result(t.dims, t.role) if isinstance(t, Tensor) else Result(None)


def _in_state_layout(t: Any) -> Any:
    return settle(as_slice(t), "optimizer") if isinstance(t, Tensor) else t


def _run(fn: Callable[..., Any], args: tuple[Any, ...], results: Any, params: Any) -> Any:
    if context.current() is not None:
        return later(fn, args, results)
    placed = [t for t in jax.tree.leaves(params, is_leaf=is_tensor) if isinstance(t, Tensor)]
    mesh, layout = (placed[0].mesh, placed[0].layout) if placed else (None, None)
    if any(isinstance(t._held, jax.ShapeDtypeStruct) for t in placed):  # that of specs are specs
        mesh, layout, out = None, None, jax.eval_shape(fn, *jax.tree.map(true_shape, args, is_leaf=is_tensor))
    else:
        out = jax.jit(fn)(*whole_arrays(args))

    def wrap(result: Result, array: Any) -> Any:
        if result.dims is None:
            return array
        return place(Tensor(array, result.dims, role=result.role), mesh, layout)

    return jax.tree.map(wrap, results, out, is_leaf=lambda x: isinstance(x, Result))
