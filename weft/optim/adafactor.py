"""Adafactor, factored by named dims."""

from __future__ import annotations

from dataclasses import dataclass

import weft as wf
from weft.core.dims import Dim
from weft.core.field_types import NonNegative, Positive, PositiveInt, Share
from weft.core.fields import documented
from weft.core.tensor import Tensor

from .optimizers import Dims, Optimizer, ParamState, StepInfo, moving_average


@documented
@dataclass(frozen=True, kw_only=True)
class Adafactor(Optimizer):
    """Adam with a factored second moment, in sublinear memory (Shazeer and Stern, 2018).

    The second moment of a matrix is approximated by rows · columns / mean, so only two vectors are stored.
    The two largest dims of a tensor, not counting stacked dims, form the matrix; there is one pair of vectors
    for each index of the other dims. Updates are clipped, and scaled by the size of the parameter.
    """

    decay_power: Positive = 0.8
    """The second moment decays by 1 - t^-decay_power at update t."""
    clipping_threshold: Positive | None = 1.0
    """The maximum root mean square of an update before the learning rate; None: no limit."""
    scale_by_parameter: bool = True
    """Whether an update is multiplied by the root mean square of the parameter."""
    beta1: Share = 0.0
    """The decay of the first moment; 0 disables it."""
    epsilon1: Positive = 1e-30
    """Added to the squared gradients."""
    epsilon2: NonNegative = 1e-3
    """The minimum root mean square of a parameter, for `scale_by_parameter`."""
    min_dim_size_to_factor: PositiveInt = 128
    """A tensor is factored if its two largest dims have at least this size."""

    def example_call(self) -> str:
        return "Adafactor(0.01, beta1=0.9)"

    def uses_step_count(self) -> bool:
        return True

    def factored(self, dims: Dims) -> tuple[Dim, Dim] | None:
        """The two largest dims, largest first; None if a tensor with these dims is not factored."""
        largest = sorted(self.unstacked(dims), key=lambda d: -d.size)[:2]
        return (
            (largest[0], largest[1])
            if len(largest) == 2 and largest[1].size >= self.min_dim_size_to_factor
            else None
        )

    def state_dims(self, dims: Dims) -> dict[str, Dims]:
        pair = self.factored(dims)
        mean = {"mean": dims} if self.beta1 else {}
        if pair is None:
            return {"variance": dims} | mean
        return {"rows": _without(dims, pair[0]), "columns": _without(dims, pair[1])} | mean

    def compute_update(
        self, grad: Tensor, state: ParamState, param: Tensor, info: StepInfo
    ) -> tuple[Tensor, ParamState]:
        decay = 1.0 - info.count ** (-self.decay_power)
        square = wf.square(grad) + self.epsilon1
        pair = self.factored(param.dims)
        if pair is None:
            variance = moving_average(state["variance"], square, decay)
            step, new = grad * wf.rsqrt(variance), {"variance": variance}
        else:
            rows = moving_average(state["rows"], wf.mean(square, pair[0]), decay)
            columns = moving_average(state["columns"], wf.mean(square, pair[1]), decay)
            step = grad * wf.rsqrt(rows / wf.mean(rows, pair[1])) * wf.rsqrt(columns)
            new = {"rows": rows, "columns": columns}
        if self.clipping_threshold is not None:
            step = step / wf.maximum(self.root_mean_square(step) / self.clipping_threshold, 1.0)
        step = step * info.rate
        if self.scale_by_parameter:
            step = step * wf.maximum(self.root_mean_square(param), self.epsilon2)
        if self.beta1:
            step = new["mean"] = moving_average(state["mean"], step, self.beta1)
        return step, new

    def root_mean_square(self, t: Tensor) -> Tensor:
        """The root mean square of a tensor, separately for each index of the stacked dims."""
        return wf.sqrt(wf.mean(wf.square(t), self.unstacked(t.dims)))


def _without(dims: Dims, removed: Dim) -> Dims:
    return tuple(d for d in dims if d != removed)
