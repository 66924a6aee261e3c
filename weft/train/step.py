"""The train step: computes new parameters from a batch.

step = train.train_step(optim.AdamW(3e-4), clip=1.0, micro=4)
state = step.init(model)
program = wf.spmd(step, mesh, layout, donate=(0, 1))
metrics, model, state = program(model, state, batch, key)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import weft as wf
from weft.core.deferred import Deferred, ResultSpec, defer, is_deferred
from weft.core.errors import ProgramError
from weft.core.op import call_in_program
from weft.core.tensor import Tensor, is_tensor
from weft.core.types import PyTree
from weft.ops.optax import OptaxOptimizer, is_transformation
from weft.random import keys

from ..core.call_errors import checks_arguments
from ..core.field_types import Positive, PositiveInt, Share
from ..core.fields import validate
from ..optim.clipping import clip_by_global_norm, global_norm
from ..optim.ema import init_ema, update_ema
from ..optim.named_tree import error_context
from ..optim.optimizers import Optimizer
from .grad_accum import accumulate_gradients
from .loss_weight import WeightFunction

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True)
class TrainStep:
    """A function `(model, state, batch, key) -> (metrics, model, state)`, created by `train_step`.

    The model needs a method `loss(batch, key)`; the key is for dropout, and None disables it. Micro-batches
    also need a method `loss_weight(batch)` of the model, or a `weight` of the step.
    """

    optimizer: Any
    clip: Positive | None = None
    micro: PositiveInt = 1
    average: Share | None = None
    skip_nonfinite: bool = False
    norm: bool = False
    weight: WeightFunction | None = None

    def __post_init__(self) -> None:
        if is_transformation(self.optimizer):
            object.__setattr__(self, "optimizer", wf.optimizer(self.optimizer))
        if (
            isinstance(self.optimizer, type)
            or not hasattr(self.optimizer, "init")
            or not hasattr(self.optimizer, "update")
        ):
            raise ProgramError(
                f"{self.optimizer!r} is not an optimizer",
                rule="the optimizer is one of weft.optim's, or an optax transformation",
                hint="train_step(AdamW(1e-3))",
            ).located(f"train_step({self.optimizer!r})")
        validate(self, hint="for example train_step(optimizer, clip=1.0, micro=4, weight=train.count_rows)")

    @property
    def __name__(self) -> str:
        """The name of a staged step in plans."""
        return "step"

    def init(self, model: PyTree) -> PyTree:
        """The initial state: the optimizer's state, and the EMA if there is one. Specs give specs."""
        state = self.optimizer.init(model)
        return state if self.average is None else {"optimizer": state, "average": init_ema(model)}

    @checks_arguments
    def __call__(
        self, model: PyTree, state: PyTree, batch: PyTree, key: jax.Array | None
    ) -> tuple[dict[str, Tensor], PyTree, PyTree]:
        with error_context("train_step(model, state, batch, key)"):
            if not callable(getattr(model, "loss", None)):
                raise ProgramError(
                    f"a {type(model).__name__} has no method loss",
                    rule="a train step minimizes model.loss(batch, key), a scalar",
                    hint="define loss in the class of the model; or write a step with wf.value_and_grad",
                )
            if key is not None:
                keys.check_key(key)
            loss, grads, weight = accumulate_gradients(model, batch, key, self.micro, self.weight)
            metrics = {"loss": loss} | ({} if weight is None else {"tokens": weight})
            if self.clip is not None or self.skip_nonfinite or self.norm:
                metrics["grad_norm"] = global_norm(grads)
            if self.clip is not None:
                grads = clip_by_global_norm(grads, self.clip, metrics["grad_norm"])
            new = self._update(grads, state, model)
            if self.skip_nonfinite:
                metrics["finite"] = wf.isfinite(loss) & wf.isfinite(metrics["grad_norm"])
                new = call_in_program(_select, metrics["finite"], new, (model, state))
            return metrics, *new

    def _update(self, grads: PyTree, state: PyTree, model: PyTree) -> tuple[PyTree, PyTree]:
        # Of an optax transformation, `update` returns the change, and `apply` the new parameters.
        is_optax = isinstance(self.optimizer, OptaxOptimizer)
        update = self.optimizer.apply if is_optax else self.optimizer.update
        if self.average is None:
            return update(grads, state, model)
        if not isinstance(state, dict) or set(state) != {"optimizer", "average"}:
            raise ProgramError(
                "the state has no EMA",
                rule="the state of a step with average= has the keys optimizer and average",
                hint="state = step.init(model)",
            )
        model, optimizer_state = update(grads, state["optimizer"], model)
        ema = update_ema(state["average"], model, self.average)
        return model, {"optimizer": optimizer_state, "average": ema}


@checks_arguments
def train_step(
    optimizer: Optimizer | OptaxOptimizer | optax.GradientTransformation,
    *,
    clip: float | None = None,
    micro: int = 1,
    average: float | None = None,
    skip_nonfinite: bool = False,
    norm: bool = False,
    weight: WeightFunction | None = None,
) -> TrainStep:
    """Create a train step, to be staged with `donate=(0, 1)`.

    Args:
      optimizer: an optimizer of `weft.optim`, `wf.optimizer(tx)`, or an optax transformation.
      clip: the maximum global norm of the gradients.
      micro: the number of micro-batches over which gradients are accumulated; it divides the number of rows.
        The result equals that of the full batch.
      average: the decay of an EMA of the parameters, such as 0.999; `optim.with_ema_params` puts it into a
        model.
      skip_nonfinite: whether a step with a non-finite loss or gradient changes nothing.
      norm: whether to compute the gradients' global norm even if nothing needs it.
      weight: a function from a batch to the divisor of its loss, such as
        `lambda batch: wf.sum(batch["weights"])`, or `train.count_rows` for a mean over equal rows. The
        default is the model's method `loss_weight(batch)`, which Transformers have. Micro-batches need one
        of the two.

    Returns:
      A function `(model, state, batch, key) -> (metrics, model, state)`, with `init(model)` for the initial
      state. The metrics are scalar tensors: `loss`; `tokens`, the weight of the batch if it is known (for a
      Transformer the number of targets); with `clip`, `skip_nonfinite` or `norm` also `grad_norm`, before
      clipping; with `skip_nonfinite` also `finite`.
    """
    return TrainStep(optimizer, clip, micro, average, skip_nonfinite, norm, weight)


def _select(finite: Tensor, new: PyTree, old: PyTree) -> PyTree:
    """`new` if `finite`, otherwise `old`; both trees have the same structure."""
    leaves, tree = jax.tree.flatten(new, is_leaf=_is_leaf)
    old_leaves = jax.tree.leaves(old, is_leaf=_is_leaf)
    if any(map(is_deferred, leaves)):
        # optax computes the new values after the SPMD part, so the selection follows there.
        kinds = [ResultSpec(t.dims, t.role) if isinstance(t, Tensor) else ResultSpec(None) for t in leaves]
        select = lambda finite, new, old: [jnp.where(finite, n, o) for n, o in zip(new, old, strict=True)]  # noqa: E731
        return jax.tree.unflatten(tree, defer(select, (finite, leaves, old_leaves), kinds))
    with wf.under_layout("value", "finite"):
        pairs = zip(leaves, old_leaves, strict=True)
        selected = [wf.store(wf.where(finite, n, o), n.role) if is_tensor(n) else n for n, o in pairs]
    return jax.tree.unflatten(tree, selected)


def _is_leaf(x: object) -> bool:
    return isinstance(x, Tensor | Deferred)
