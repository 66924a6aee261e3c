"""The layer whose code is running: plans attribute each op to the layer that calls it.

A layer is a module (`nn.Module`) and its path, `decoder.blocks.attention`. The module's methods enter it, and
each op reads it into its label.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeVar

import jax

from .tensor import is_tensor
from .types import PyTree

T = TypeVar("T")


@dataclass(frozen=True)
class Layer:
    """A module and its path; outside of all modules None and ""."""

    module: object = None
    path: str = ""

    def inner(self, module: object, name: str) -> Layer:
        """A module inside this one, under this name."""
        return Layer(module, ".".join(filter(None, (self.path, name))))


class _Running(threading.local):
    """Per thread, as JAX's own trace state is.

    Attributes:
      layer: the layer whose code is running.
      rebuilt: (new, original) modules: a scan rebuilds a module from one slice of each parameter.
    """

    layer = Layer()
    rebuilt: tuple[tuple[object, object], ...] = ()


running = _Running()


@contextlib.contextmanager
def entered(layer: Layer) -> Iterator[None]:
    """Attribute the ops that are called inside to a layer."""
    before, running.layer = running.layer, layer
    try:
        yield
    finally:
        running.layer = before


@contextlib.contextmanager
def rebuilt(new: PyTree, from_tree: PyTree) -> Iterator[None]:
    """Give the modules of a tree the layers of those in the tree that it was rebuilt from."""
    before = running.rebuilt
    running.rebuilt = (*before, *zip(_modules(new), _modules(from_tree), strict=True))
    try:
        yield
    finally:
        running.rebuilt = before


def original(module: T) -> T:
    """The module that a module was rebuilt from, or the module itself."""
    found: Any = next((old for new, old in running.rebuilt if new is module), module)
    return found


def _modules(tree: PyTree) -> list[object]:
    """The outermost modules in a tree; Equinox's are dataclasses."""
    # Tensors are leaves: flattening one would materialize it.
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: is_dataclass(x) or is_tensor(x))
    return [leaf for leaf in leaves if is_dataclass(leaf)]


def path_name(path: tuple[Any, ...]) -> str:
    """A tree path as a dotted name: `decoder.attention.query`."""
    return ".".join(str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path)
