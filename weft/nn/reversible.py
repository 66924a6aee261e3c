"""Reversible residual layers: two streams in, two streams out; the inputs can be recomputed from the outputs.

A layer adds residual branches to its input, one after the other. With two streams each branch f computes

    (a, b) -> (b, a + f(b))         and its inverse is  (c, d) -> (d - f(c), c)

so the backward pass needs no saved activations: it starts from the last streams, and recovers the streams
before each branch from those after it (RevNet, Gomez et al. 2017; the Reformer, Kitaev et al. 2020). The
memory does not grow with depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import weft as wf
from weft.autodiff.partition import Leaf, Partition, add_gradients, zero_gradient
from weft.core.dims import DimLike
from weft.core.tensor import Tensor
from weft.core.types import PyTree

StreamPair = tuple[Tensor, Tensor]
Branch = Callable[[Tensor], Tensor]


def reversible(
    branches: Callable[[PyTree, PyTree], Sequence[Branch]],
    a: Tensor,
    b: Tensor,
    stacked: PyTree,
    dim: DimLike,
    shared: PyTree = None,
) -> StreamPair:
    """The streams after all layers, with a backward pass that saves nothing between layers.

    Each branch is computed twice, as under `wf.remat`, including its collectives. Inverting a model-parallel
    branch needs the all-reduce that ends it, so there are three all-reduces per branch and step (forward,
    recomputed, and that of the gradient) where plain layers have two. Gradients of `stacked` stay pending
    through the backward loop, and are summed once after it.

    Recovered streams differ from the original ones by rounding: keep them in float32 for deep stacks.

    Args:
      branches: takes one layer and `shared`; returns its branches, functions of x with the dims of x. All
        tensors that need gradients are passed in these two; it must not capture others.
      a, b: the input streams.
      stacked: a tree of tensors with the dim, and of raw arrays with it as the first dimension (keys for
        dropout).
      dim: the dim of the layers.
      shared: a tree of tensors that all layers use.

    Returns:
      The output streams.

    >>> import weft as wf
    >>> w = wf.tensor([1.0, 2.0], "layers=2")
    >>> one = wf.ones("x=1")
    >>> nn_branches = lambda w, _: [lambda x: x * w]
    >>> reversible(nn_branches, one, one, w, "layers")
    (f32[x=1] [2.], f32[x=1] [5.])
    """
    layers, common = Partition(stacked), Partition(shared)

    def forward(a: Tensor, b: Tensor, params: list[Leaf], shared: list[Leaf], others: PyTree) -> StreamPair:
        def layer(streams: StreamPair, given: tuple[list[Leaf], list[Leaf]]) -> tuple[StreamPair, None]:
            a, b = streams
            for f in branches(layers.combine(*given), common.combine(shared, others[1])):
                a, b = b, a + f(b)
            return (a, b), None

        return wf.scan(layer, (a, b), (params, others[0]), dim)[0]

    def forward_with_residuals(*args: PyTree) -> tuple[StreamPair, PyTree]:
        last = forward(*args)
        return last, (last, args[2:])

    def backward(residuals: PyTree, cotangents: StreamPair) -> tuple[PyTree, ...]:
        last, (params, shared, others) = residuals

        def layer(carry: PyTree, given: tuple[list[Leaf], list[Leaf]]) -> tuple[PyTree, list[Leaf]]:
            (c, d), (c_grad, d_grad), shared_grads = carry
            params, constants = given
            params_grads: list[Leaf | None] = [None] * len(params)
            layer_grads: list[Leaf | None] = [None] * len(shared)

            def branch(n: int, x: Tensor, params: list[Leaf], shared: list[Leaf]) -> Tensor:
                return branches(layers.combine(params, constants), common.combine(shared, others[1]))[n](x)

            count = len(branches(layers.combine(params, constants), common.combine(shared, others[1])))
            for n in reversed(range(count)):

                def f(x: Tensor, params: list[Leaf], shared: list[Leaf], n: int = n) -> Tensor:
                    return branch(n, x, params, shared)

                # One evaluation of f serves both: its value inverts the step, its pullback differentiates it.
                out, pull_back = wf.vjp(f, c, params, shared, zeros=False)
                x_grad, new_params, new_shared = pull_back(d_grad)
                c, d = d - out, c
                c_grad, d_grad = d_grad, c_grad if x_grad is None else c_grad + x_grad
                params_grads = add_gradients(params_grads, new_params)
                layer_grads = add_gradients(layer_grads, new_shared)
            ys = [zero_gradient(p) if g is None else g for g, p in zip(params_grads, params, strict=True)]
            return ((c, d), (c_grad, d_grad), add_gradients(shared_grads, layer_grads)), ys

        begin = (last, cotangents, [zero_gradient(t) for t in shared])
        (_, grads, of_shared), of_params = wf.scan(layer, begin, (params, others[0]), dim, reverse=True)
        return (*grads, of_params, of_shared, None)

    run = wf.custom_vjp(forward)
    run.defvjp(forward_with_residuals, backward)
    return run(a, b, layers.floats, common.floats, (layers.others, common.others))
