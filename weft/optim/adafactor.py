"""Adafactor, factored by named dims."""

from __future__ import annotations

from dataclasses import dataclass

import weft as wf
from weft.core.dims import Dim
from weft.core.tensor import Tensor

from .optimizers import Dims, Optimizer, ParamState, StepInfo, moving_average


@dataclass(frozen=True, kw_only=True)
class Adafactor(Optimizer):
    """Adam's second moment in the memory of its margins (Shazeer and Stern, 2018).

    The mean square of past gradients of a matrix is taken to be rows · columns / mean: two vectors are kept
    in its place. Of a tensor the two largest dims, stacking dims not counted, make the matrix; each of the
    others has vectors of its own. Steps are limited in size, and are relative to the size of the parameter.

    Attributes:
      decay_power: update t keeps 1 - t^-decay_power of the mean squares.
      limit: the greatest root mean square of a step before the rate; None: any.
      scale_by_parameter: whether a step is multiplied by the root mean square of the parameter.
      beta1: how much of past steps stays; 0 keeps none.
      epsilon1: added to the squares of gradients.
      epsilon2: the least root mean square of a parameter that counts.
      least: dims smaller than this are not factored.
    """

    decay_power: float = 0.8
    limit: float | None = 1.0
    scale_by_parameter: bool = True
    beta1: float = 0.0
    epsilon1: float = 1e-30
    epsilon2: float = 1e-3
    least: int = 128

    def rules(self) -> dict[str, str]:
        limit = {} if self.limit is None else {"limit": "positive"}
        rest = {"epsilon1": "positive", "epsilon2": "not negative", "least": "at least one"}
        return {"decay_power": "positive", "beta1": "share"} | limit | rest

    def example(self) -> str:
        return "Adafactor(0.01, beta1=0.9)"

    def counts(self) -> bool:
        return True

    def factored(self, dims: Dims) -> tuple[Dim, Dim] | None:
        """The largest dim and the next, if a tensor with these dims is factored."""
        largest = sorted(self.own(dims), key=lambda d: -d.size)[:2]
        return (largest[0], largest[1]) if len(largest) == 2 and largest[1].size >= self.least else None

    def keeps(self, dims: Dims) -> dict[str, Dims]:
        pair = self.factored(dims)
        mean = {"mean": dims} if self.beta1 else {}
        if pair is None:
            return {"variance": dims} | mean
        return {"rows": _without(dims, pair[0]), "columns": _without(dims, pair[1])} | mean

    def change(
        self, grad: Tensor, kept: ParamState, param: Tensor, now: StepInfo
    ) -> tuple[Tensor, ParamState]:
        keep = 1.0 - now.count ** (-self.decay_power)
        square = wf.square(grad) + self.epsilon1
        pair = self.factored(param.dims)
        if pair is None:
            variance = moving_average(kept["variance"], square, keep)
            step, new = grad * wf.rsqrt(variance), {"variance": variance}
        else:
            rows = moving_average(kept["rows"], wf.mean(square, pair[0]), keep)
            columns = moving_average(kept["columns"], wf.mean(square, pair[1]), keep)
            step = grad * wf.rsqrt(rows / wf.mean(rows, pair[1])) * wf.rsqrt(columns)
            new = {"rows": rows, "columns": columns}
        if self.limit is not None:
            step = step / wf.maximum(self.size(step) / self.limit, 1.0)
        step = step * now.rate
        if self.scale_by_parameter:
            step = step * wf.maximum(self.size(param), self.epsilon2)
        if self.beta1:
            step = new["mean"] = moving_average(kept["mean"], step, self.beta1)
        return step, new

    def size(self, t: Tensor) -> Tensor:
        """The root mean square of a tensor, of each one of a stack."""
        return wf.sqrt(wf.mean(wf.square(t), self.own(t.dims)))


def _without(dims: Dims, gone: Dim) -> Dims:
    return tuple(d for d in dims if d != gone)
