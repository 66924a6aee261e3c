"""Greedy decoding with a cache, written by hand in plain JAX: the peer of `weft.generate`.

The model is that of `handwritten.py`, on one device. Keys and values are kept in one array for all layers, to
which each step adds one place of each row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.handwritten import MASKED, norm, split_layers


def read(room: int) -> Callable:
    """`(params, tokens) -> (keys, values)` of a prompt that all rows fill, with room for more."""

    def run(params, tokens):
        def block(x, layer):
            h = norm(x, layer["attention_scale"])
            q, k, v = (jnp.einsum("bld,dhe->bhle", h, layer[w]) for w in ("wq", "wk", "wv"))
            scores = jnp.einsum("bhqe,bhke->bhqk", q * q.shape[-1] ** -0.5, k)
            causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
            weights = jax.nn.softmax(jnp.where(causal, scores, MASKED), axis=-1)
            x = x + jnp.einsum("bhqk,bhke,hed->bqd", weights, v, layer["wo"])
            x = x + _feed(x, layer)
            more = ((0, 0), (0, 0), (0, room - k.shape[2]), (0, 0))
            return x, (jnp.pad(k, more), jnp.pad(v, more))

        x = params["embedding"][tokens] + params["positions"][: tokens.shape[1]]
        return lax.scan(block, x, split_layers(params))[1]

    return jax.jit(run)


def speak(steps: int) -> Callable:
    """`(params, cache, token, place) -> (cache, tokens)`: a number of tokens, each the likeliest."""

    def run(params, cache, token, place):
        rows = jnp.arange(token.shape[0])

        def one(carry, _):
            (keys, values), token, place = carry

            def block(x, given):
                layer, keys, values = given
                h = norm(x, layer["attention_scale"])
                q, k, v = (jnp.einsum("bd,dhe->bhe", h, layer[w]) for w in ("wq", "wk", "wv"))
                q = q * q.shape[-1] ** -0.5
                before = jnp.arange(keys.shape[2]) < place[:, None, None]
                old = jnp.where(before, jnp.einsum("bhe,bhke->bhk", q, keys), MASKED)
                new = jnp.einsum("bhe,bhe->bh", q, k)[..., None]
                weights = jax.nn.softmax(jnp.concatenate([old, new], -1), axis=-1)
                mixed = jnp.einsum("bhk,bhke->bhe", weights[..., :-1], values) + weights[..., -1:] * v
                x = x + jnp.einsum("bhe,hed->bd", mixed, layer["wo"])
                return x + _feed(x, layer), (k, v)

            x = params["embedding"][token] + params["positions"][place]
            x, (k, v) = lax.scan(block, x, (split_layers(params), keys, values))
            keys = keys.at[:, rows, :, place].set(k.transpose(1, 0, 2, 3))
            values = values.at[:, rows, :, place].set(v.transpose(1, 0, 2, 3))
            logits = norm(x, params["final_scale"]) @ params["projection"]
            token = jnp.argmax(logits, -1).astype(jnp.int32)
            return ((keys, values), token, place + 1), token

        (cache, _, _), said = lax.scan(one, (cache, token, place), None, steps)
        return cache, said.T

    return jax.jit(run, donate_argnums=1)


def _feed(x: Any, layer: Any) -> Any:
    h = norm(x, layer["feed_scale"])
    return jax.nn.relu(h @ layer["w1"]) @ layer["w2"]
