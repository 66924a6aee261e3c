"""The optimizer of a run, and its learning-rate schedule, from the settings."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..optim.adafactor import Adafactor
from ..optim.optimizers import AdamW, Lion, Momentum, Optimizer
from ..optim.schedules import Constant, Cosine, LinearDecay, LinearWarmup, RsqrtDecay, Schedule
from .config import OptimizerConfig, TrainConfig


def build_schedule(config: TrainConfig) -> Schedule:
    """The learning-rate schedule of a run."""
    o = config.optimizer
    warmup = LinearWarmup(o.warmup) if o.warmup else Constant(1.0)
    left = max(config.steps - o.warmup, 1)
    decays: dict[str, Callable[[], Schedule]] = {
        "constant": lambda: Constant(1.0),
        "cosine": lambda: Cosine(left, floor=o.last, after=o.warmup),
        "linear": lambda: LinearDecay(config.steps, left),
        "rsqrt": lambda: math.sqrt(max(o.warmup, 1)) * RsqrtDecay(max(o.warmup, 1)),
    }
    return o.rate * warmup * decays[o.schedule]()


# By the names in settings and in `--train`.
OPTIMIZERS: dict[str, Callable[[float | Schedule, OptimizerConfig], Optimizer]] = {
    "adafactor": lambda rate, o: Adafactor(rate, weight_decay=o.weight_decay),
    "adamw": lambda rate, o: AdamW(rate, beta1=o.beta1, beta2=o.beta2, weight_decay=o.weight_decay),
    "lion": lambda rate, o: Lion(rate, beta1=o.beta1, beta2=o.beta2, weight_decay=o.weight_decay),
    "momentum": lambda rate, o: Momentum(rate, momentum=o.beta1, weight_decay=o.weight_decay),
}


def build_optimizer(config: TrainConfig) -> Optimizer:
    """The optimizer of a run, with its schedule."""
    return OPTIMIZERS[config.optimizer.kind](build_schedule(config), config.optimizer)
