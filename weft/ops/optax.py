"""Any optax transformation, correct under any layout.

Inside a program leaves are slices, and a raw optax transformation would be silently wrong: its global norm
would be the norm of one slice. `wf.optimizer(tx)` runs the transformation after the program's SPMD part, in
the same `jit`, on global arrays without padding, and reshards the results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ..core.context import active
from ..core.deferred import ResultSpec, defer, global_arrays, global_shape
from ..core.describe import describe, reports_call
from ..core.errors import DimError, ProgramError
from ..core.extras import from_extra
from ..core.operands import as_slice
from ..core.placement import place
from ..core.reshard import materialize
from ..core.tensor import Tensor, is_tensor
from ..core.types import PyTree
from .shape import transpose

if TYPE_CHECKING:  # imported by the functions that use it: the import takes a fifth of the time of JAX's
    import optax


Leaf = Tensor | jax.Array
Finish = Callable[[PyTree, PyTree], PyTree]  # from parameters and updates to the first result


class OptaxOptimizer:
    """An optax transformation over named tensors, created by `wf.optimizer`."""

    def __init__(self, tx: optax.GradientTransformation):
        self._tx = tx
        # Created once, so that JAX's jit cache recognizes them.
        finishes: tuple[Finish, ...] = (_apply_updates, _return_updates)
        self._steps = {finish: self._step(finish, {}) for finish in finishes}

    @property
    def tx(self) -> optax.GradientTransformation:
        """The optax transformation."""
        return self._tx

    def __repr__(self) -> str:
        return "optimizer(tx)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OptaxOptimizer) and self.tx == other.tx

    def __hash__(self) -> int:
        return hash(self.tx)

    @reports_call
    def init(self, params: PyTree) -> PyTree:
        """The initial state. Leaves with the shape of a parameter have its dims."""
        arrays = _shapes(params)
        return _run(self.tx.init, (params,), self._state_results(arrays, params), params)

    @reports_call
    def update(self, grads: PyTree, state: PyTree, params: PyTree, **extra: PyTree) -> tuple[PyTree, PyTree]:
        """The updates to add to the parameters, and the new state, like `tx.update`.

        Some transformations take extra arguments: `value=loss`. Functions among them receive global arrays.
        """
        return self._update(_return_updates, grads, state, params, extra)

    @reports_call
    def apply(self, grads: PyTree, state: PyTree, params: PyTree, **extra: PyTree) -> tuple[PyTree, PyTree]:
        """The new parameters and the new state. Extra arguments are those of `update`."""
        return self._update(_apply_updates, grads, state, params, extra)

    def _update(
        self, finish: Finish, grads: PyTree, state: PyTree, params: PyTree, extra: dict[str, PyTree]
    ) -> tuple[PyTree, PyTree]:
        self._check_extra(extra)
        functions = {name: value for name, value in extra.items() if callable(value)}
        extra = {name: _align_extra(value, params) for name, value in extra.items() if name not in functions}
        grads, arrays = _align_grads(grads, params), _shapes(params)
        as_params = jax.tree.map(_like_param, params, is_leaf=is_tensor)
        results = (as_params, self._state_results(arrays, params))
        if active.context is not None:
            # The update runs in the state's layout: a pending sum needs a reduce-scatter, not an all-reduce.
            grads = jax.tree.map(_in_state_layout, grads, is_leaf=is_tensor)
        step = self._step(finish, functions) if functions else self._steps[finish]
        return _run(step, (grads, state, params, extra), results, params)

    def _step(
        self, finish: Finish, functions: dict[str, Callable[..., PyTree]]
    ) -> Callable[..., tuple[PyTree, PyTree]]:
        """The transformation's `update`, followed by `finish(params, updates)`."""

        def step(
            grads: PyTree, state: PyTree, params: PyTree, extra: dict[str, PyTree]
        ) -> tuple[PyTree, PyTree]:
            updates, state = self.tx.update(grads, state, params, **extra, **functions)
            return finish(params, updates), state

        return step

    def _check_extra(self, extra: dict[str, PyTree]) -> None:
        with from_extra("train"):
            import optax

        plain = isinstance(self.tx, optax.GradientTransformation)
        if extra and plain and not isinstance(self.tx, optax.GradientTransformationExtraArgs):
            raise ProgramError(
                f"the optimizer was given {', '.join(extra)}, which its transformation does not take",
                rule="only a GradientTransformationExtraArgs takes extra arguments",
                hint="omit it; or use optax.with_extra_args_support(tx), which ignores it",
            )

    def _state_results(self, arrays: PyTree, params: PyTree) -> PyTree:
        """The spec of each leaf of the state: the dims of its parameter if it has the same shape, or none."""
        with from_extra("train"):
            import optax

        state = jax.eval_shape(self.tx.init, arrays)
        boxes = jax.tree.map(_Box, params, is_leaf=is_tensor)

        def is_masked(leaf: object) -> bool:
            return isinstance(leaf, optax.MaskedNode)

        def named(leaf: jax.ShapeDtypeStruct | optax.MaskedNode, box: _Box) -> ResultSpec | optax.MaskedNode:
            if isinstance(leaf, optax.MaskedNode):  # optax.masked excludes this parameter
                return leaf
            t = box.content
            if isinstance(t, Tensor) and leaf.shape == tuple(d.size for d in t.dims):
                return ResultSpec(t.dims, "optimizer")
            return unnamed(leaf)

        def unnamed(leaf: object) -> ResultSpec:
            return ResultSpec(None)

        try:
            return optax.tree_map_params(
                self.tx, named, state, boxes, transform_non_params=unnamed, is_leaf=is_masked
            )
        except Exception:
            # optax finds the parameter of each leaf by initializing the state with placeholders. This fails
            # for some transformations (lbfgs), and some states have another tree structure (sm3).
            return jax.tree.map(unnamed, state)


class _Box:
    """Makes its content a single pytree leaf."""

    def __init__(self, content: Leaf):
        self.content = content


@reports_call
def optimizer(tx: optax.GradientTransformation) -> OptaxOptimizer:
    """Wrap an optax transformation so that it is correct on any mesh and layout.

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
            rule="optimizer() takes an optax transformation, such as optax.adam(1e-3) or optax.chain(…)",
            hint="wf.optimizer(optax.adam(1e-3))",
        )
    return OptaxOptimizer(tx)


def is_transformation(value: object) -> bool:
    """Whether a value is an optax transformation, decided without optax: it may not be installed."""
    return isinstance(value, tuple) and getattr(value, "_fields", None) == ("init", "update")


def _return_updates(params: PyTree, updates: PyTree) -> PyTree:
    return updates


def _apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    with from_extra("train"):
        import optax

    return optax.apply_updates(params, updates)


def _shapes(params: PyTree) -> PyTree:
    return jax.tree.map(global_shape, params, is_leaf=is_tensor)


def _align_grads(grads: PyTree, params: PyTree) -> PyTree:
    """Transpose gradients to the dim order of their parameters, because optax matches dims by position."""
    tree: object
    leaves, tree = jax.tree.flatten(grads, is_leaf=is_tensor)
    param_leaves, param_tree = jax.tree.flatten(params, is_leaf=is_tensor)
    rule = "each parameter has a gradient with the same dims"
    if tree != param_tree:
        raise ProgramError(
            f"there are {len(leaves)} gradients for {len(param_leaves)} parameters, or their trees differ",
            rule=rule,
            hint="pass the gradients that wf.grad returns for the parameters",
        )
    for n, (g, p) in enumerate(zip(leaves, param_leaves, strict=True)):
        if isinstance(g, Tensor) and isinstance(p, Tensor) and g.dims != p.dims:
            if set(g.dims) != set(p.dims):
                raise DimError(
                    f"the gradient {describe(g)} belongs to the parameter {describe(p)}",
                    rule=rule,
                    hint="pass the gradients that wf.grad returns for the parameters",
                )
            leaves[n] = transpose(g, p.dims)
    return jax.tree.unflatten(tree, leaves)


def _align_extra(extra: PyTree, params: PyTree) -> PyTree:
    """An extra argument, transposed to the dim order of the parameters if it has their tree structure."""

    def align(t: Leaf, p: Leaf) -> Leaf:
        if isinstance(t, Tensor) and isinstance(p, Tensor) and set(t.dims) == set(p.dims):
            return transpose(t, p.dims)
        return t

    extra = jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), extra, is_leaf=is_tensor)
    tree: object = jax.tree.structure(extra, is_leaf=is_tensor)
    same = tree == jax.tree.structure(params, is_leaf=is_tensor)
    return jax.tree.map(align, extra, params, is_leaf=is_tensor) if same else extra


def _like_param(t: Leaf) -> ResultSpec:
    return ResultSpec(t.dims, t.role) if isinstance(t, Tensor) else ResultSpec(None)


def _in_state_layout(t: Leaf) -> Leaf:
    return materialize(as_slice(t), "optimizer") if isinstance(t, Tensor) else t


def _run(fn: Callable[..., PyTree], args: tuple[PyTree, ...], results: PyTree, params: PyTree) -> PyTree:
    """Call `fn` on the global arrays of `args`, and place its results like the parameters."""
    if active.context is not None:
        return defer(fn, args, results)
    placed = [t for t in jax.tree.leaves(params, is_leaf=is_tensor) if isinstance(t, Tensor)]
    mesh, layout = (placed[0].mesh, placed[0].layout) if placed else (None, None)
    if any(isinstance(t._data, jax.ShapeDtypeStruct) for t in placed):  # specs in, specs out
        mesh, layout, out = (
            None,
            None,
            jax.eval_shape(fn, *jax.tree.map(global_shape, args, is_leaf=is_tensor)),
        )
    else:
        out = jax.jit(fn)(*global_arrays(args))

    def wrap(result: ResultSpec, array: jax.Array) -> Leaf:
        if result.dims is None:
            return array
        return place(Tensor(array, result.dims, role=result.role), mesh, layout)

    return jax.tree.map(wrap, results, out, is_leaf=lambda x: isinstance(x, ResultSpec))
