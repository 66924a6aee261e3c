"""The train step of `handwritten.py` in Weft: the same mathematics, written once.

`step(size, mesh, layout)` is a program; nothing in the model speaks of meshes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import weft as wf
from benchmarks import handwritten
from benchmarks.handwritten import EPSILON, LEARNING_RATE, MASKED, STACKED, STANDARD, Size

LAYOUT = "batch:data d_ff:model heads:model vocab:model"


class Dims:
    """The dims of a size."""

    def __init__(self, size: Size):
        self.batch, self.length = wf.Dim("batch", size.batch), wf.Dim("length", size.length)
        self.memory = wf.Dim("memory", size.length)
        self.layers, self.vocab = wf.Dim("layers", size.layers), wf.Dim("vocab", size.vocab)
        self.d_model, self.d_ff = wf.Dim("d_model", size.d_model), wf.Dim("d_ff", size.d_ff)
        self.heads, self.d_kv = wf.Dim("heads", size.heads), wf.Dim("d_kv", size.d_kv)

    @property
    def parameters(self) -> dict[str, list[wf.Dim]]:
        d, project = self, [self.layers, self.d_model, self.heads, self.d_kv]
        return {
            "embedding": [d.vocab, d.d_model],
            "positions": [d.length, d.d_model],
            "attention_scale": [d.layers, d.d_model],
            "wq": project,
            "wk": project,
            "wv": project,
            "wo": [d.layers, d.heads, d.d_kv, d.d_model],
            "feed_scale": [d.layers, d.d_model],
            "w1": [d.layers, d.d_model, d.d_ff],
            "w2": [d.layers, d.d_ff, d.d_model],
            "final_scale": [d.d_model],
            "projection": [d.d_model, d.vocab],
        }


def loss_of(size: Size, remat: str | None = None) -> Any:
    """The mean cross-entropy of the model of this size, as a function of named tensors.

    `remat` is a policy of `wf.remat`, for its blocks.
    """
    d = Dims(size)

    def norm(x, scale):
        return x * wf.rsqrt(wf.mean(wf.square(x), d.d_model) + EPSILON) * scale

    def attention(h, layer):
        keys = h.rename(length="memory")
        q = wf.einsum(h, layer["wq"], out=[d.batch, d.heads, d.length, d.d_kv])
        k = wf.einsum(keys, layer["wk"], out=[d.batch, d.heads, d.memory, d.d_kv])
        v = wf.einsum(keys, layer["wv"], out=[d.batch, d.heads, d.memory, d.d_kv])
        scores = wf.einsum(q * size.d_kv**-0.5, k, out=[d.batch, d.heads, d.length, d.memory])
        causal = wf.arange(d.length) >= wf.arange(d.memory)
        weights = wf.softmax(wf.where(causal, scores, MASKED), d.memory)
        mixed = wf.einsum(weights, v, out=[d.batch, d.heads, d.length, d.d_kv])
        return wf.einsum(mixed, layer["wo"], out=[d.batch, d.length, d.d_model])

    def feed_forward(h, layer):
        hidden = wf.relu(wf.einsum(h, layer["w1"], out=[d.batch, d.length, d.d_ff]))
        return wf.einsum(hidden, layer["w2"], out=[d.batch, d.length, d.d_model])

    def block(x, layer):
        x = x + attention(norm(x, layer["attention_scale"]), layer)
        x = x + feed_forward(norm(x, layer["feed_scale"]), layer)
        return x, None

    def loss(params, tokens, targets):
        x = wf.take(params["embedding"], tokens, d.vocab) + params["positions"]
        layer = block if remat is None else wf.remat(block, remat)
        x, _ = wf.scan(layer, x, {name: params[name] for name in STACKED}, d.layers)
        h = norm(x, params["final_scale"])
        logits = wf.einsum(h, params["projection"], out=[d.batch, d.length, d.vocab])
        return wf.mean(wf.logsumexp(logits, d.vocab) - wf.take(logits, targets, d.vocab))

    return loss


def step(
    size: Size = STANDARD, mesh: Any = "data=4 model=2", layout: Any = LAYOUT, remat: str | None = None
) -> wf.Program:
    """A program `(params, tokens, targets) -> (loss, new params)` that donates its parameters."""
    loss = loss_of(size, remat)

    def step(params, tokens, targets):
        value, grads = wf.value_and_grad(loss)(params, tokens, targets)
        new = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)
        return value, new

    return wf.spmd(step, mesh, layout, donate=(0,))


def case(program: wf.Program, size: Size = STANDARD, given: Any = None) -> Callable[[], Any]:
    """Each call is the next train step of `step`, and returns its loss.

    Args:
      program: what `step` gave.
      size: of the model.
      given: its parameters, tokens and targets as arrays; by default those of the hand-written cases.
    """
    params, *batch = given or (handwritten.init(0, size), *handwritten.batch(0, size))
    params, batch = wf.place((named(params, size), rows(*batch, size)), program.mesh, program.layout)

    def run() -> Any:
        nonlocal params
        value, params = program(params, *batch)
        jax.block_until_ready([t.storage for t in params.values()])
        return value.storage

    return run


def named(params: dict[str, np.ndarray], size: Size = STANDARD) -> dict[str, wf.Tensor]:
    """The parameters of `handwritten.init` with their dims."""
    dims = Dims(size).parameters
    return {name: wf.tensor(array, dims[name]) for name, array in params.items()}


def rows(tokens: Any, targets: Any, size: Size = STANDARD) -> tuple[wf.Tensor, wf.Tensor]:
    """A batch with its dims."""
    d = Dims(size)
    return tuple(wf.tensor(a, [d.batch, d.length]) for a in (tokens, targets))


def specs(size: Size = STANDARD) -> tuple[dict[str, wf.Tensor], wf.Tensor, wf.Tensor]:
    """The arguments of `step` without values."""
    d = Dims(size)
    params = {name: wf.spec(dims) for name, dims in d.parameters.items()}
    row = wf.spec([d.batch, d.length], jnp.int32)
    return params, row, row
