"""The layer whose code is running: plans attribute each op to the layer that calls it.

A layer is a module (`nn.Module`) and its path, `decoder.blocks.attention`. The module's methods enter it, and
each op reads it into its label.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """A module and its path; outside of all modules None and ""."""

    module: object = None
    path: str = ""

    def inner(self, module: object, name: str) -> Layer:
        """A module inside this one, under this name."""
        return Layer(module, ".".join(filter(None, (self.path, name))))


class _Running(threading.local):
    """Per thread, as JAX's own trace state is."""

    layer = Layer()


running = _Running()


@contextlib.contextmanager
def entered(layer: Layer) -> Iterator[None]:
    """Attribute the ops that are called inside to a layer."""
    before, running.layer = running.layer, layer
    try:
        yield
    finally:
        running.layer = before
