"""One step of training: from a batch to new parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import weft as wf

from .optimizers import Optimizer


def train_step(optimizer: Optimizer) -> Callable[..., Any]:
    """A function `(model, state, batch, key) -> (loss, model, state)`, to be staged with `donate=(0, 1)`.

    The key is for dropout; None: without.
    """

    def step(model: Any, state: Any, batch: Any, key: Any) -> tuple[Any, Any, Any]:
        loss, grads = wf.value_and_grad(lambda model: model.loss(batch, key))(model)
        model, state = optimizer.update(grads, state, model)
        return loss, model, state

    return step
