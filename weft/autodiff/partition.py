"""Trees in two lists, what has gradients and what has none: for derivatives that are written out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..core.errors import TensorTypeError
from ..core.placement import with_role
from ..core.tensor import Tensor, is_tensor
from ..ops.creation import zeros


class Partition:
    """A tree in two lists: what has gradients, and the other arrays (whole numbers, truth values, keys)."""

    def __init__(self, tree: Any):
        self.leaves, self.shape = jax.tree.flatten(tree, is_leaf=is_tensor)
        for leaf in self.leaves:
            if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex | str):
                raise TensorTypeError(
                    f"a {type(leaf).__name__} is among what the layers are made of",
                    rule="tensors are found in trees; in an object that is none they would have no gradients",
                    hint="register its class, for example with @jax.tree_util.register_dataclass",
                ).located()
        arrays = {n: x for n, x in enumerate(self.leaves) if hasattr(x, "dtype")}
        self.of_floats = [n for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.inexact)]
        self.of_fixed = [n for n in arrays if n not in self.of_floats]

    @property
    def floats(self) -> list[Any]:
        return [self.leaves[n] for n in self.of_floats]

    @property
    def fixed(self) -> list[Any]:
        return [self.leaves[n] for n in self.of_fixed]

    def whole(self, floats: list[Any], fixed: list[Any]) -> Any:
        """The tree with these leaves in place of its own."""
        leaves = list(self.leaves)
        for n, leaf in zip(self.of_floats + self.of_fixed, [*floats, *fixed], strict=True):
            leaves[n] = leaf
        return jax.tree.unflatten(self.shape, leaves)


def add_gradients(grads: list[Any], more: list[Any]) -> list[Any]:
    """Gradients added up; None counts for nothing, so that what is pending meets only what is too."""
    return [x if y is None else y if x is None else x + y for x, y in zip(grads, more, strict=True)]


def zero_gradient(t: Any) -> Any:
    return with_role(zeros(t.dims, t.dtype), t.role) if isinstance(t, Tensor) else jnp.zeros_like(t)
