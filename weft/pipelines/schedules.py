"""Schedules of a pipeline: in which order micro-batches go forward and backward through its stages.

Each is a function from the micro-batches, a stage's layers and what is shared to what comes out.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..autodiff.grad import custom_vjp, vjp
from ..autodiff.partition import Partition, add_gradients, zero_gradient
from ..core import context
from ..core.dims import Dim
from ..core.errors import TensorTypeError
from ..core.operands import slice_tensor
from ..core.reshard import materialize
from ..core.tensor import Tensor
from ..ops.elementwise import where
from ..ops.scan import scan
from .stages import TICK, StageRunner, index_leading, update_leading, with_leading_dim

SLOT = "_slot"  # of which no rule speaks


def gpipe(stages: StageRunner, streams: list[Tensor], own: list[Any], shared: Any) -> list[Tensor]:
    """All forward, then all backward, by JAX's own derivative of the loop."""
    return stages.forward(streams, own, shared, stages.line.remat)


def one_forward_one_backward(
    stages: StageRunner, streams: list[Tensor], own: list[Any], shared: Any
) -> list[Tensor]:
    """The backward pass runs forward again, just ahead of itself.

    At tick t stage k of K runs micro-batch t - k forward, and t - 2(K - 1) + k backward: at the last stage
    the same one. Between the two it keeps what it was given, for 2(K - 1 - k) ticks.
    """
    line, mine, common = stages.line, Partition(own), Partition(shared)
    idle = line.stages - 1
    # Of parameters that are stored in pieces both passes use what is gathered here, and of the gradients each
    # device keeps its piece of the sum.
    gathered = [materialize(t, "value") if isinstance(t, Tensor) else t for t in mine.floats]

    named = context.require().op  # by which plans know what belongs to the pipeline

    def whole(own: Any, shared: Any, fixed: Any) -> tuple[Any, Any]:
        return mine.whole(own, fixed[0]), common.whole(shared, fixed[1])

    def forward(streams: Any, pieces: Any, shared: Any, own: Any, fixed: Any) -> Any:
        with context.require().lowering(named):
            return stages.forward(streams, *whole(own, shared, fixed), None)

    def backward(kept: Any, cotangents: list[Tensor]) -> tuple[Any, ...]:
        with context.require().lowering(named):
            return back(kept, cotangents)

    def back(kept: Any, cotangents: list[Tensor]) -> tuple[Any, ...]:
        streams, shared, own, fixed = kept
        _check_floats(streams)
        stage, slots = stages.number, Dim(SLOT, 2 * idle + 1)
        ticks = Dim(TICK, line.parts.size + 2 * idle)
        # What goes in is needed at the first stage, and where it was, that of which it is the gradient comes
        # out; the gradients that go in are needed at the last: all are in one place.
        first = slice_tensor(stage == 0, ())
        ends = [where(first, x, g) for x, g in zip(streams, cotangents, strict=True)]

        def tick(carry: Any, now: Any) -> tuple[Any, None]:
            h, g, held, ends, (own_grads, shared_grads) = carry
            h = stages.handed_on(h, [index_leading(t, stages.part(now)) for t in ends], 0)
            held = [update_leading(to, t, now % slots.size) for to, t in zip(held, h, strict=True)]
            made = stages.stage(h, *whole(own, shared, fixed), stages.part(now - stage))

            number = now - 2 * idle + stage
            there = slice_tensor((number >= 0) & (number < line.parts.size), ())
            returning = [index_leading(t, stages.part(now - idle)) for t in ends]
            g = [where(there, t, 0.0) for t in stages.handed_on(g, returning, idle)]
            before = [index_leading(t, (now - 2 * (idle - stage)) % slots.size) for t in held]

            def again(h: Any, own: Any, shared: Any) -> Any:
                return stages.stage(h, *whole(own, shared, fixed), stages.part(number))

            _, pull = vjp(again, before, own, shared, zeros=False)
            h_grads, of_own, of_shared = pull(g)
            g = [zero_gradient(t) if x is None else x for x, t in zip(h_grads, before, strict=True)]
            leaves, out = slice_tensor((stage == 0) & (number >= 0), ()), stages.part(number)
            ends = [
                update_leading(t, where(leaves, x, index_leading(t, out)), out)
                for t, x in zip(ends, g, strict=True)
            ]
            grads = add_gradients(own_grads, of_own), add_gradients(shared_grads, of_shared)
            return (made, g, held, ends, grads), None

        begin = stages.begin(streams)
        held = [
            with_leading_dim(slots, f, jnp.stack([t._array] * slots.size))
            for f, t in zip(stages.forms, begin, strict=True)
        ]
        none = [zero_gradient(t) for t in own], [zero_gradient(t) for t in shared]
        carry = begin, [zero_gradient(t) for t in begin], held, ends, none
        (_, _, _, ends, grads), _ = scan(tick, carry, jnp.arange(ticks.size), ticks)
        return ends, *grads, None, None

    run = custom_vjp(forward)
    run.defvjp(lambda x, pieces, *rest: (forward(x, pieces, *rest), (x, *rest)), backward)
    return run(streams, mine.floats, common.floats, gathered, (mine.fixed, common.fixed))


def _check_floats(streams: list[Tensor]) -> None:
    whole = [t for t in streams if not jnp.issubdtype(t.dtype, jnp.inexact)]
    if whole:
        raise TensorTypeError(
            f"numbers of type {', '.join(sorted({str(t.dtype) for t in whole}))} stream through a pipeline "
            'that is differentiated by the schedule "1f1b"',
            rule="this one sends back a gradient of all that streams, so these are floats",
            hint='give what has no gradient as shared=(…,); or schedule="gpipe"',
        )


SCHEDULES = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
