"""custom_vjp: a function and its backward rule in, a function with that derivative out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Generic

import jax

from ..core import context, layers
from ..core.boundary import LeafSpec, leaf_array, rebuild_leaf
from ..core.call_errors import check_function
from ..core.context import Context, active
from ..core.describe import format_call
from ..core.errors import ProgramError
from ..core.tensor import is_tensor
from ..core.types import PyTree, Result
from .grad import enter_leaf, label_gradient, match_primals, materialize_leaf


class custom_vjp(Generic[Result]):
    """A function with a derivative of its own, as `jax.custom_vjp`.

    >>> import weft as wf
    >>> @wf.custom_vjp
    ... def clipped(x):
    ...     return x
    >>> clipped.defvjp(lambda x: (x, None), lambda _, g: (wf.clip(g, -1.0, 1.0),))
    >>> wf.grad(lambda x: wf.sum(clipped(x) * 5.0))(wf.ones("a=2"))
    f32[a=2] [1., 1.]
    """

    def __init__(self, f: Callable[..., Result]):
        check_function(f, "custom_vjp")
        self.f = f
        self.forward: Callable[..., tuple[PyTree, PyTree]] | None = None
        self.backward: Callable[[PyTree, PyTree], PyTree] | None = None
        functools.update_wrapper(self, f)

    def defvjp(
        self, forward: Callable[..., tuple[PyTree, PyTree]], backward: Callable[[PyTree, PyTree], PyTree]
    ) -> None:
        """Define the derivative.

        Args:
          forward: `forward(*args)` returns the value and the residuals.
          backward: `backward(residuals, cotangent)` returns the cotangents of all arguments, None for one
            that has none.
        """
        self.forward, self.backward = forward, backward

    def __call__(self, *args: PyTree) -> Result:
        forward_rule = self.forward
        if forward_rule is None:
            name = getattr(self.f, "__name__", "f")
            raise ProgramError(
                f"{name} has no derivative rule yet",
                rule="a custom_vjp is called after defvjp(forward, backward) has defined its derivative",
                hint=f"{name}.defvjp(lambda x: (value, residuals), lambda residuals, g: (cotangent of x,)); "
                "to use the derivative of JAX, remove wf.custom_vjp",
            ).located(format_call(name, args, {}))
        ctx = active.context
        if ctx is None:
            # One custom_vjp per call: JAX passes a backward rule the residuals only, and matching cotangents
            # to their primals needs the arguments.
            call = jax.custom_vjp(self.f)
            call.defvjp(
                forward_rule, lambda residuals, cotangent: self._cotangents(args, residuals, cotangent)
            )
            return call(*args)
        # JAX requires each cotangent to have the type of its argument. Materialized arguments have one type
        # per layout, which `match_primals` can give the cotangents; a pending argument would be a varying
        # array.
        args = tuple(jax.tree.map(enter_leaf, a, is_leaf=is_tensor) for a in args)
        trees = _FlatTrees(ctx)

        def value(*arrays: jax.Array) -> list[jax.Array]:
            with trees.inside():
                return trees.flatten("value", self.f(*trees.unflatten("args", arrays)))

        def forward(*arrays: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
            with trees.inside():
                out, residuals = forward_rule(*trees.unflatten("args", arrays))
                return trees.flatten("value", out), trees.flatten("residuals", residuals)

        def backward(
            residuals: Sequence[jax.Array], cotangent: Sequence[jax.Array]
        ) -> tuple[jax.Array | None, ...]:
            with trees.inside():
                given = trees.unflatten("residuals", residuals), trees.unflatten("value", cotangent)
                found: list[jax.Array | None] = []
                # A rule returns one tree, or None, per argument. For JAX each array is an argument of its
                # own, so a None stands for all arrays of its tree.
                for g, a in zip(self._cotangents(args, *given), args, strict=True):
                    tree: PyTree = jax.tree.structure(a, is_leaf=is_tensor)
                    for part in [None] * tree.num_leaves if g is None else tree.flatten_up_to(g):
                        found += [None] if part is None else trees.flatten("cotangent", part)
                return tuple(found)

        call = jax.custom_vjp(value)
        call.defvjp(forward, backward)
        return trees.unflatten("value", call(*trees.flatten("args", args)))

    def _cotangents(
        self, args: tuple[PyTree, ...], residuals: PyTree, cotangent: PyTree
    ) -> tuple[PyTree, ...]:
        assert self.backward is not None
        given = jax.tree.map(label_gradient, self.backward(residuals, cotangent), is_leaf=is_tensor)
        if not isinstance(given, tuple | list) or len(given) != len(args):
            found = (
                f"{len(given)} cotangents" if isinstance(given, tuple | list) else f"a {type(given).__name__}"
            )
            raise ProgramError(
                f"the backward rule returned {found} for {len(args)} argument{'s' * (len(args) != 1)}",
                rule="a backward rule returns one cotangent per argument, None for an argument without one",
                hint="return (dx, None), or (dx,) if there is one argument",
            )
        return tuple(None if g is None else match_primals(g, a) for g, a in zip(given, args, strict=True))


class _FlatTrees:
    """Trees of tensors, flattened to the arrays that cross `jax.custom_vjp`, and rebuilt on the other side.

    JAX may call a rule after the code that traced it has returned, and flattens the rule's result later
    still. A Tensor can't be flattened then: that resolves its pending sum, which needs a program. So only
    arrays cross, and each rule re-enters the program, the vmaps and the layer in which the function was
    called.
    """

    def __init__(self, ctx: Context):
        self.ctx, self.vmap, self.layer = ctx, ctx.vmap, layers.running.layer
        self.specs: dict[str, tuple[PyTree, list[LeafSpec | None]]] = {}

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Enter the program, inside the vmaps and the layer that the function was called in."""
        vmap = dataclasses.replace(self.ctx.vmap, axes=self.vmap.axes, depth=self.vmap.depth)
        with (
            context.entered(self.ctx),
            layers.entered(self.layer),
            self.ctx.inside(vmap=vmap),
            self.ctx.frame(),
        ):
            yield

    def flatten(self, name: str, tree: PyTree) -> list[jax.Array]:
        """A tree's arrays, materialized. The structure is stored under the name."""
        leaves, structure = jax.tree.flatten(tree, is_leaf=is_tensor)
        leaves = list(map(materialize_leaf, leaves))
        self.specs[name] = structure, [LeafSpec.of(leaf) for leaf in leaves]
        return list(map(leaf_array, leaves))

    def unflatten(self, name: str, arrays: Sequence[jax.Array]) -> PyTree:
        """The tree of that name, with these arrays as its leaves."""
        structure, specs = self.specs[name]
        return jax.tree.unflatten(structure, list(map(rebuild_leaf, specs, arrays)))
