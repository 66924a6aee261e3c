"""Trees partitioned into differentiable and other arrays, for backward passes that are written by hand.

As in Equinox, a tree is *partitioned* into the leaves that have gradients and those that have none, and
*combined* again. `jax.vjp` takes the first list as primals; the second is passed through.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..core.errors import TensorTypeError
from ..core.placement import with_role
from ..core.tensor import Tensor, is_tensor
from ..core.types import PyTree
from ..ops.creation import zeros

Leaf = Tensor | jax.Array


class Partition:
    """A tree as two lists: floating-point leaves, and the other arrays (integers, booleans, keys)."""

    def __init__(self, tree: PyTree):
        self.leaves, self.structure = jax.tree.flatten(tree, is_leaf=is_tensor)
        for leaf in self.leaves:
            if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex | str):
                raise TensorTypeError(
                    f"the layers contain a {type(leaf).__name__}",
                    rule="parameters are found in pytrees; inside an object that is not a pytree they would "
                    "get no gradients",
                    hint="register its class, for example with @jax.tree_util.register_dataclass",
                ).located()
        # Python numbers and strings are in neither list: they stay in the tree, so that `f` can branch on
        # them.
        arrays = {n: x for n, x in enumerate(self.leaves) if hasattr(x, "dtype")}
        self.float_indices = [n for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.inexact)]
        self.other_indices = [n for n in arrays if n not in self.float_indices]

    @property
    def floats(self) -> list[Leaf]:
        return [self.leaves[n] for n in self.float_indices]

    @property
    def others(self) -> list[Leaf]:
        return [self.leaves[n] for n in self.other_indices]

    def combine(self, floats: list[Leaf], others: list[Leaf]) -> PyTree:
        """The tree with its leaves replaced by these."""
        leaves = list(self.leaves)
        for n, leaf in zip(self.float_indices + self.other_indices, [*floats, *others], strict=True):
            leaves[n] = leaf
        return jax.tree.unflatten(self.structure, leaves)


def add_gradients(grads: list[Leaf | None], more: list[Leaf | None]) -> list[Leaf | None]:
    """The sums of two lists of gradients, where None is zero.

    None instead of zeros: zeros are not pending, so adding them would resolve a pending sum.
    """
    return [x if y is None else y if x is None else x + y for x, y in zip(grads, more, strict=True)]


def zero_gradient(t: Leaf) -> Leaf:
    """A gradient of zeros, with the dims, the dtype and the role of its primal."""
    return with_role(zeros(t.dims, t.dtype), t.role) if isinstance(t, Tensor) else jnp.zeros_like(t)
