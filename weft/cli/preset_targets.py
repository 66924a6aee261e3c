"""From a preset's name to the function to plan, or to verify, and its arguments."""

from __future__ import annotations

import os
from typing import Any

from ..core.errors import nearest
from .targets import UsageError, load_target

LEARNING_RATE = 0.01  # does not change a plan


def is_preset(target: str) -> bool:
    """Whether a target is a known model's name, and not FILE.py:FN."""
    return ":" not in target and os.sep not in target and not target.endswith(".py")


def load_plan_target(
    target: str, train: str | None, batch: int | None, length: int | None
) -> tuple[Any, Any]:
    """What `weft plan` plans: a preset's logits or train step, or what a file says."""
    if not is_preset(target):
        asked = {"--train": train, "--batch": batch, "--length": length}
        given = [flag for flag, value in asked.items() if value is not None]
        if given:
            raise UsageError(
                f"{', '.join(given)} with {target}",
                rule="these are for presets; a file's FN says itself what is planned",
                hint="leave them out, or name a preset (weft models)",
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

        def logits(model: Any, batch: Any) -> Any:
            return model.logits(batch)

        return logits, (model, rows)
    optimizer = optimizer_by_name(train)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return spmd(train_step(optimizer), donate=(0, 1)), (model, optimizer.init(model), rows, key)


def load_verify_target(target: str) -> tuple[Any, Any]:
    """What `weft verify` runs: a preset's loss with its gradients, or what a file says."""
    if not is_preset(target):
        return load_target(target)
    from .. import nn
    from ..autodiff.grad import value_and_grad
    from ..models import preset

    chosen = preset(target)

    def loss(model: Any, batch: Any) -> Any:
        return model.loss(batch)

    return value_and_grad(loss), (nn.specs(chosen.model()), chosen.batch_specs())


def optimizer_by_name(name: str) -> Any:
    """An optimizer with its usual settings; `sgd` is momentum without momentum."""
    from ..optim import Momentum
    from ..train.config import OPTIMIZERS, OptimizerConfig

    kinds = {**OPTIMIZERS, "sgd": lambda rate, _: Momentum(rate)}
    if name not in kinds:
        known = ", ".join(kinds)
        raise UsageError(
            f"there is no optimizer {name!r}{nearest(name, kinds)}", f"known: {known}", hint="--train adamw"
        )
    return kinds[name](LEARNING_RATE, OptimizerConfig(weight_decay=0.0))
