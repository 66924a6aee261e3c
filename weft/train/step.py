"""One step of training: from a batch to new parameters.

step = train.train_step(optim.AdamW(3e-4), clip=1.0, micro=4)
state = step.init(model)
program = wf.spmd(step, mesh, layout, donate=(0, 1))
metrics, model, state = program(model, state, batch, key)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

import weft as wf
from weft.core.deferred import Deferred, ResultSpec, defer
from weft.core.errors import ProgramError
from weft.core.tensor import Tensor, is_tensor
from weft.ops.optax import OptaxOptimizer as OverOptax
from weft.random import keys

from ..core.fields import check_fields
from ..optim.clipping import clip_by_global_norm, global_norm
from ..optim.ema import init_ema, update_ema
from ..optim.named_tree import error_context
from ..optim.update_layout import call_in_program, to_stored_layout, update_scope
from .grad_accum import accumulate_gradients
from .loss_weight import WeightFunction


@dataclass(frozen=True)
class TrainStep:
    """A function `(model, state, batch, key) -> (metrics, model, state)`; made by `train_step`.

    The model has a method `loss(batch, key)`; the key is for dropout, None: without. With micro-batches it
    also has a method `loss_weight(batch)`, or the step a `weight`.
    """

    optimizer: Any
    clip: float | None = None
    micro: int = 1
    average: float | None = None
    skip_nonfinite: bool = False
    norm: bool = False
    weight: WeightFunction | None = None

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, optax.GradientTransformation):
            object.__setattr__(self, "optimizer", wf.optimizer(self.optimizer))
        if not hasattr(self.optimizer, "init") or not hasattr(self.optimizer, "update"):
            raise ProgramError(
                f"{self.optimizer!r} is not an optimizer",
                rule="a step has one of weft.train's optimizers, or an optax transformation",
                hint="train_step(AdamW(1e-3))",
            ).located(f"train_step({self.optimizer!r})")
        optional = {"clip": "positive", "average": "share"}
        given = {name: rule for name, rule in optional.items() if getattr(self, name) is not None}
        check_fields(
            self, {"micro": "count"} | given, "train_step(optimizer, clip=1.0, micro=4, average=0.999)"
        )
        if self.weight is not None and not callable(self.weight):
            raise ProgramError(
                f"train_step was given weight={self.weight!r}",
                rule="weight= is a function from a batch to the number that its loss divides by",
                hint='weight=lambda batch: wf.sum(batch["weights"])',
            ).located("train_step(optimizer, weight=…)")

    @property
    def __name__(self) -> str:
        """What a staged step is called in plans."""
        return "step"

    def init(self, model: Any) -> Any:
        """The state to begin with: the optimizer's own, or that and the average. That of specs are specs."""
        state = self.optimizer.init(model)
        return state if self.average is None else {"optimizer": state, "average": init_ema(model)}

    def __call__(self, model: Any, state: Any, batch: Any, key: Any) -> tuple[dict[str, Tensor], Any, Any]:
        with error_context("train_step(model, state, batch, key)"):
            if key is not None:
                keys.check_key(key)
            loss, grads, weight = accumulate_gradients(model, batch, key, self.micro, self.weight)
            metrics = {"loss": loss} | ({} if weight is None else {"tokens": weight})
            if self.clip is not None or self.skip_nonfinite or self.norm:
                metrics["grad_norm"] = global_norm(grads)
            if self.clip is not None:
                grads = clip_by_global_norm(grads, self.clip, metrics["grad_norm"])
            new = self._updated(grads, state, model)
            if self.skip_nonfinite:
                metrics["finite"] = wf.isfinite(loss) & wf.isfinite(metrics["grad_norm"])
                new = call_in_program(_chosen, metrics["finite"], new, (model, state))
            return metrics, *new

    def _updated(self, grads: Any, state: Any, model: Any) -> tuple[Any, Any]:
        # Optax's `update` gives what is to be added, `apply` the new parameters.
        optax_like = isinstance(self.optimizer, OverOptax)
        update = self.optimizer.apply if optax_like else self.optimizer.update
        if self.average is None:
            return update(grads, state, model)
        if not isinstance(state, dict) or set(state) != {"optimizer", "average"}:
            raise ProgramError(
                "the state has no average",
                rule="a step with average= keeps the optimizer's state and the average",
                hint="state = step.init(model)",
            )
        model, kept = update(grads, state["optimizer"], model)
        average = update_ema(state["average"], model, self.average)
        return model, {"optimizer": kept, "average": average}


def train_step(
    optimizer: Any,
    *,
    clip: float | None = None,
    micro: int = 1,
    average: float | None = None,
    skip_nonfinite: bool = False,
    norm: bool = False,
    weight: WeightFunction | None = None,
) -> TrainStep:
    """A step of training, to be staged with `donate=(0, 1)`.

    Args:
      optimizer: one of this package's, `wf.optimizer(tx)`, or an optax transformation.
      clip: the largest global norm of the gradients.
      micro: in how many parts the batch is computed, one after the other; it divides the number of rows. The
        result is that of the full batch.
      average: how much of an average of the parameters stays at each step, such as 0.999; `averaged` puts it
        into a model.
      skip_nonfinite: whether a step with a loss or a gradient that is not finite changes nothing.
      norm: whether the gradients' global norm is measured in any case.
      weight: a function from a batch to the number that its loss divides by, such as
        `lambda batch: wf.sum(batch["weights"])`, or `train.count_rows` for a mean over equal rows. By default
        the model's method `loss_weight(batch)`, which Transformers have. Micro-batches need one of the two.

    Returns:
      A function `(model, state, batch, key) -> (metrics, model, state)`, with `init(model)` for the first
      state. The metrics are tensors without dims: `loss`; `tokens`, the weight of the batch if it is
      known (for a Transformer the number of targets); with `clip`, `skip_nonfinite` or `norm` also
      `grad_norm`, before clipping; with `skip_nonfinite` also `finite`.
    """
    return TrainStep(optimizer, clip, micro, average, skip_nonfinite, norm, weight)


def _chosen(good: Tensor, new: Any, old: Any) -> Any:
    """All that is new, or all that is old, as a truth value says; both have the same trees."""
    leaves, tree = jax.tree.flatten(new, is_leaf=_is_leaf)
    before = jax.tree.leaves(old, is_leaf=_is_leaf)
    if any(isinstance(getattr(t, "_data", t), Deferred) for t in leaves):
        kinds = [ResultSpec(t.dims, t.role) if isinstance(t, Tensor) else ResultSpec(None) for t in leaves]
        choose = lambda good, new, old: [jnp.where(good, n, o) for n, o in zip(new, old, strict=True)]  # noqa: E731
        return jax.tree.unflatten(tree, defer(choose, (good, leaves, before), kinds))
    with update_scope("finite"):
        both = zip(leaves, before, strict=True)
        kept = [to_stored_layout(wf.where(good, n, o), n.role) if is_tensor(n) else n for n, o in both]
    return jax.tree.unflatten(tree, kept)


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Tensor | Deferred)
