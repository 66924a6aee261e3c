"""From the name of a preset to the function to plan or verify, and its arguments."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core.errors import nearest
from .targets import UsageError, load_target

if TYPE_CHECKING:
    from ..core.tensor import Tensor
    from ..models import Batch, Transformer
    from ..optim import Optimizer

LEARNING_RATE = 0.01  # plans do not depend on it


def is_preset(target: str) -> bool:
    """Whether a target is the name of a model rather than FILE.py:FN."""
    return ":" not in target and os.sep not in target and not target.endswith(".py")


def load_plan_target(
    target: str, train: str | None, batch: int | None, length: int | None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function to plan and its arguments: a preset's logits or train step, or those of FILE.py:FN."""
    if not is_preset(target):
        flags = {"--train": train, "--batch": batch, "--length": length}
        given = [flag for flag, value in flags.items() if value is not None]
        if given:
            raise UsageError(
                f"{', '.join(given)} with {target}",
                rule="these flags are for presets; FN in a file returns the function to plan itself",
                hint="omit them, or use a preset (see weft models)",
            )
        return load_target(target)
    import jax

    from .. import nn
    from ..core.program import spmd
    from ..models import preset
    from ..train import train_step

    chosen = preset(target)
    model, rows = nn.specs(chosen.model()), chosen.batch_specs(batch, length)
    if train is None:

        def logits(model: Transformer, batch: Batch) -> Tensor:
            return model.logits(batch)

        return logits, (model, rows)
    optimizer = optimizer_by_name(train)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return spmd(train_step(optimizer), donate=(0, 1)), (model, optimizer.init(model), rows, key)


def load_verify_target(target: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function to verify and its arguments: a preset's loss and gradients, or those of FILE.py:FN."""
    if not is_preset(target):
        return load_target(target)
    from .. import nn
    from ..autodiff.grad import value_and_grad
    from ..models import preset

    chosen = preset(target)

    def loss(model: Transformer, batch: Batch) -> Tensor:
        return model.loss(batch)

    return value_and_grad(loss), (nn.specs(chosen.model()), chosen.batch_specs())


def optimizer_by_name(name: str) -> Optimizer:
    """An optimizer with default settings; `sgd` is Momentum without momentum."""
    from ..optim import Momentum
    from ..train.config import OptimizerConfig
    from ..train.optimizer_setup import OPTIMIZERS

    kinds = {**OPTIMIZERS, "sgd": lambda rate, _: Momentum(rate)}
    if name not in kinds:
        known = ", ".join(kinds)
        raise UsageError(
            f"unknown optimizer {name!r}{nearest(name, kinds)}", rule=f"known: {known}", hint="--train adamw"
        )
    return kinds[name](LEARNING_RATE, OptimizerConfig(weight_decay=0.0))
