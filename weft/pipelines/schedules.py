"""Pipeline schedules: the order in which micro-batches pass forward and backward through the stages.

A schedule is a function from the micro-batches, a stage's layers and the shared arguments to the outputs.
"""

from __future__ import annotations

import jax.numpy as jnp

from ..autodiff.custom import custom_vjp
from ..autodiff.grad import vjp
from ..autodiff.partition import Partition, add_gradients, zero_gradient
from ..core.context import active
from ..core.dims import Dim
from ..core.errors import TensorTypeError
from ..core.operands import slice_tensor
from ..core.reshard import materialize
from ..core.tensor import Tensor
from ..core.types import PyTree
from ..ops.elementwise import where
from ..ops.scan import scan
from .stages import TICK, Leaf, StageRunner, index_leading, update_leading, with_leading_dim

SLOT = "_slot"  # the dim of saved stage inputs; no layout rule can name it


def gpipe(runner: StageRunner, streams: list[Tensor], own: list[Leaf], shared: PyTree) -> list[Tensor]:
    """All micro-batches forward, then all backward, by JAX's own derivative of the loop."""
    return runner.forward(streams, own, shared, runner.spec.remat)


def one_forward_one_backward(
    runner: StageRunner, streams: list[Tensor], own: list[Leaf], shared: PyTree
) -> list[Tensor]:
    """The backward pass recomputes the forward pass, each micro-batch just before its backward step.

    At tick t, stage k of K runs micro-batch t - k forward and micro-batch t - 2(K - 1) + k backward; at the
    last stage these are the same. In between, for 2(K - 1 - k) ticks, the stage holds its input.

    The loss comes after the pipeline, so no micro-batch can start backward before the last one has left the
    forward pass. True 1F1B would need the loss inside. Recomputing bounds the memory all the same.
    """
    spec, layers, common = runner.spec, Partition(own), Partition(shared)
    last = spec.stages - 1
    # Stored parameters are gathered here, once for both passes. The gradients of the gathered ones are
    # returned as those of the stored ones, and so are reduce-scattered into the stored layout.
    gathered = [materialize(t, "value") if isinstance(t, Tensor) else t for t in layers.floats]

    op_label = active.context.op
    assert op_label is not None  # plans attribute both passes to the pipeline by this label

    def combine(own: list[Leaf], shared: list[Leaf], others: PyTree) -> tuple[PyTree, PyTree]:
        return layers.combine(own, others[0]), common.combine(shared, others[1])

    def forward(
        streams: list[Tensor], stored: list[Leaf], shared: list[Leaf], own: list[Leaf], others: PyTree
    ) -> list[Tensor]:
        with active.context.lowering(op_label):
            return runner.forward(streams, *combine(own, shared, others), None)

    def backward(residuals: PyTree, cotangents: list[Tensor]) -> tuple[PyTree, ...]:
        with active.context.lowering(op_label):
            return run_backward(residuals, cotangents)

    def run_backward(residuals: PyTree, cotangents: list[Tensor]) -> tuple[PyTree, ...]:
        streams, shared, own, others = residuals
        _check_floats(streams)
        stage, slots = runner.index, Dim(SLOT, 2 * last + 1)
        ticks = Dim(TICK, spec.parts.size + 2 * last)
        # One buffer serves three purposes. The first stage reads the inputs from it and, once an input is
        # consumed, overwrites it with that input's gradient; the last stage reads the cotangents from it.
        is_first = slice_tensor(stage == 0, ())
        ends = [where(is_first, x, g) for x, g in zip(streams, cotangents, strict=True)]

        def tick(carry: PyTree, now: PyTree) -> tuple[PyTree, None]:
            h, g, saved, ends, (own_grads, shared_grads) = carry
            h = runner.hand_on(h, [index_leading(t, runner.clip(now)) for t in ends], 0)
            saved = [update_leading(to, t, now % slots.size) for to, t in zip(saved, h, strict=True)]
            made = runner.stage(h, *combine(own, shared, others), runner.clip(now - stage))

            number = now - 2 * last + stage  # the micro-batch of this stage's backward step
            is_valid = slice_tensor((number >= 0) & (number < spec.parts.size), ())
            returning = [index_leading(t, runner.clip(now - last)) for t in ends]
            g = [where(is_valid, t, 0.0) for t in runner.hand_on(g, returning, last)]
            inputs = [index_leading(t, (now - 2 * (last - stage)) % slots.size) for t in saved]

            def recompute(h: list[Tensor], own: list[Leaf], shared: list[Leaf]) -> list[Tensor]:
                return runner.stage(h, *combine(own, shared, others), runner.clip(number))

            _, pull_back = vjp(recompute, inputs, own, shared, zeros=False)
            h_grads, new_own, new_shared = pull_back(g)
            g = [zero_gradient(t) if x is None else x for x, t in zip(h_grads, inputs, strict=True)]
            leaves, out = slice_tensor((stage == 0) & (number >= 0), ()), runner.clip(number)
            ends = [
                update_leading(t, where(leaves, x, index_leading(t, out)), out)
                for t, x in zip(ends, g, strict=True)
            ]
            grads = add_gradients(own_grads, new_own), add_gradients(shared_grads, new_shared)
            return (made, g, saved, ends, grads), None

        dummy = runner.dummy_inputs(streams)
        saved = [
            with_leading_dim(slots, s, jnp.stack([t._read()] * slots.size))
            for s, t in zip(runner.specs, dummy, strict=True)
        ]
        no_grads = [zero_gradient(t) for t in own], [zero_gradient(t) for t in shared]
        carry = dummy, [zero_gradient(t) for t in dummy], saved, ends, no_grads
        (_, _, _, ends, grads), _ = scan(tick, carry, jnp.arange(ticks.size), ticks)
        return ends, *grads, None, None

    run = custom_vjp(forward)
    run.defvjp(lambda x, stored, *rest: (forward(x, stored, *rest), (x, *rest)), backward)
    return run(streams, layers.floats, common.floats, gathered, (layers.others, common.others))


def _check_floats(streams: list[Tensor]) -> None:
    others = [t for t in streams if not jnp.issubdtype(t.dtype, jnp.inexact)]
    if others:
        raise TensorTypeError(
            f'x has tensors of type {", ".join(sorted({str(t.dtype) for t in others}))}, and schedule="1f1b" '
            "is being differentiated",
            rule="1f1b sends a gradient back for every tensor of x, so all of them are floating-point",
            hint='pass tensors without gradients as shared=(…,); or use schedule="gpipe"',
        )


SCHEDULES = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
