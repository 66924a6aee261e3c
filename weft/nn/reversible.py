"""Reversible residual layers: from two streams to two streams, of which the inputs can be had back.

A layer adds branches to its input, one after the other. With two streams each branch f does

    (a, b) -> (b, a + f(b))         and back:  (c, d) -> (d - f(c), c)

so the backward pass needs no activations of the layers before: it starts from the last streams, and has those
before each branch from those after it (RevNet, Gomez et al. 2017; the Reformer, Kitaev et al. 2020). What is
held does not grow with the depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import weft as wf
from weft.autodiff.partition import Partition, add_gradients, zero_gradient
from weft.core.tensor import Tensor

StreamPair = tuple[Tensor, Tensor]
Branch = Callable[[Tensor], Tensor]


def reversible(
    branches: Callable[[Any, Any], Sequence[Branch]],
    a: Tensor,
    b: Tensor,
    stacked: Any,
    dim: Any,
    shared: Any = None,
) -> StreamPair:
    """The streams after all layers, with a backward pass that keeps nothing between them.

    Each branch is computed twice, as under `wf.remat`, and with it its collectives: the sum over the devices
    that a model-parallel branch ends with is needed to go back, so there are three such sums for a branch and
    step (forward, again, and that of the gradient) where plain layers have two. Gradients of `stacked` stay
    pending through the backward loop, and are summed once after it.

    Streams that are had back differ from the true ones by rounding, so keep them in float32 for deep stacks.

    Args:
      branches: takes one layer and `shared`; returns its branches, functions of x with the dims of x. All
        tensors that should have gradients come to it in these two; others it must not hold.
      a, b: the streams at first.
      stacked: a tree of tensors with the dim, and of raw arrays with it in front (keys for dropout).
      dim: the dim of the layers.
      shared: a tree of tensors that all layers use.

    Returns:
      The streams at last.

    >>> import weft as wf
    >>> w = wf.tensor([1.0, 2.0], "layers=2")
    >>> one = wf.ones("x=1")
    >>> nn_branches = lambda w, _: [lambda x: x * w]
    >>> reversible(nn_branches, one, one, w, "layers")
    (f32[x=1] [2.], f32[x=1] [5.])
    """
    layers, around = Partition(stacked), Partition(shared)

    def forward(a: Tensor, b: Tensor, params: Any, common: Any, fixed: Any) -> StreamPair:
        def layer(streams: StreamPair, given: Any) -> tuple[StreamPair, None]:
            a, b = streams
            for f in branches(layers.combine(*given), around.combine(common, fixed[1])):
                a, b = b, a + f(b)
            return (a, b), None

        return wf.scan(layer, (a, b), (params, fixed[0]), dim)[0]

    def keep(*args: Any) -> tuple[StreamPair, Any]:
        last = forward(*args)
        return last, (last, args[2:])

    def backward(kept: Any, cotangents: StreamPair) -> tuple[Any, ...]:
        last, (params, common, fixed) = kept

        def layer(carry: Any, given: Any) -> tuple[Any, list[Any]]:
            (c, d), (c_grad, d_grad), common_grads = carry
            params, constants = given
            params_grads: list[Any] = [None] * len(params)
            used: list[Any] = [None] * len(common)

            def branch(n: int, x: Tensor, params: Any, common: Any) -> Tensor:
                return branches(layers.combine(params, constants), around.combine(common, fixed[1]))[n](x)

            count = len(branches(layers.combine(params, constants), around.combine(common, fixed[1])))
            for n in reversed(range(count)):

                def f(x: Tensor, params: Any, common: Any, n: int = n) -> Tensor:
                    return branch(n, x, params, common)

                out, pull = wf.vjp(f, c, params, common, zeros=False)
                x_grad, of_params, of_common = pull(d_grad)
                c, d = d - out, c
                c_grad, d_grad = d_grad, c_grad if x_grad is None else c_grad + x_grad
                params_grads, used = add_gradients(params_grads, of_params), add_gradients(used, of_common)
            ys = [zero_gradient(p) if g is None else g for g, p in zip(params_grads, params, strict=True)]
            return ((c, d), (c_grad, d_grad), add_gradients(common_grads, used)), ys

        begin = (last, cotangents, [zero_gradient(t) for t in common])
        (_, grads, of_common), of_params = wf.scan(layer, begin, (params, fixed[0]), dim, reverse=True)
        return (*grads, of_params, of_common, None)

    run = wf.custom_vjp(forward)
    run.defvjp(keep, backward)
    return run(a, b, layers.floats, around.floats, (layers.others, around.others))
