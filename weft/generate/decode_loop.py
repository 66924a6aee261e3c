"""Generating one token after the other, in rows that begin, go on and end each in its own time.

    state = begin(models, batch, rows, room)     # one program: the prompts, all at once
    state = speak(models, state, steps)          # another: so many tokens, or until all rows are done

Several models generate together, by the mean of their probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import weft as wf
from weft.core.tensor import Tensor
from weft.models import Batch

from .cache import KVCache, decode_step, prefill_cache, unstack_layers
from .requirements import check_decodable
from .sampling import SamplingParams, apply_repetition_penalty, sample


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowSettings:
    """What is asked of each row, over `batch`.

    Attributes:
      length: how many tokens of the prompt are its own.
      limit: how many tokens are generated at most.
      ends: tokens that end it, over `ends` too; -1 is none. The one that ends a row is generated too.
      how: how tokens are chosen.
      numbers: above 0 and up to 1, one for each token that may be generated, over `said` too.
    """

    length: Tensor
    limit: Tensor
    ends: Tensor
    how: SamplingParams
    numbers: Tensor


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """Rows that are being generated.

    Attributes:
      rows: what was asked.
      kept: each model's cache.
      token, place: the last token, and its position in the row.
      said, scores: the generated tokens, and the logarithms of their probabilities, over `batch` and `said`.
      count: how many there are.
      done: whether the row has ended.
      row: the tokens of the prompt and the generated ones, over `batch` and `places`; -1 is none.
    """

    rows: RowSettings
    kept: tuple[KVCache, ...]
    token: Tensor
    place: Tensor
    said: Tensor
    scores: Tensor
    count: Tensor
    done: Tensor
    row: Tensor


def prefill(models: Sequence[Any], batch: Batch, rows: RowSettings, room: int) -> DecodeState:
    """Read the prompts.

    Args:
      models: decoders, or encoder-decoders, with one vocabulary.
      batch: the prompts, at least one token each, and an encoder's inputs.
      rows: what is asked.
      room: how many positions a row may have: those of the prompt and of all generated tokens but the last.
    """
    for model in models:
        check_decodable(model)
    batch_dim, length = batch.tokens.dims
    last = rows.length - 1
    own = wf.where(wf.arange(length) < rows.length, batch.tokens, -1).rename(length="places")
    none = wf.zeros([batch_dim], jnp.int32)
    return DecodeState(
        rows,
        tuple(prefill_cache(model, batch, room) for model in models),
        wf.take(batch.tokens, last, length),
        last,
        wf.zeros(rows.numbers.dims, jnp.int32),
        wf.zeros(rows.numbers.dims),
        none,
        rows.limit <= 0,
        wf.pad(own, "places", 0, room + 1 - length.size, value=-1),
    )


def decode(models: Sequence[Any], state: DecodeState, steps: Any) -> DecodeState:
    """Generate some more tokens.

    Args:
      models: those of `begin`.
      state: what was generated so far.
      steps: how many tokens are generated at most, in each row.
    """
    models = [unstack_layers(model) for model in models]
    rows, vocab = state.rows, models[0].embedding.vocab
    (said_dim,) = (d for d in rows.numbers.dims if d.name == "said")
    (places,) = (d for d in state.row.dims if d.name == "places")

    def going(carry: tuple[Tensor, DecodeState]) -> Tensor:
        return (carry[0] < steps) & ~wf.all(carry[1].done)

    def penalise(logits: Tensor, row: Tensor) -> Tensor:
        count = wf.scatter_add(wf.zeros(logits.dims, jnp.int32), row, wf.ones(row.dims, jnp.int32), vocab)
        return apply_repetition_penalty(logits, count > 0, rows.how.penalty)

    def one(carry: tuple[Tensor, DecodeState]) -> tuple[Tensor, DecodeState]:
        n, s = carry
        logits, level, kept = ensemble_logits(models, s.kept, s.token, s.place)
        now = wf.one_hot(s.count, said_dim, jnp.bool_) & ~s.done
        number = wf.sum(wf.where(now, rows.numbers, 0.0), said_dim)
        judged = wf.cond(wf.any(rows.how.penalty != 1), penalise, lambda logits, row: logits, logits, s.row)
        token = sample(judged, rows.how, number, vocab)
        token = wf.where(s.done, s.token, token)
        score = wf.take(logits, token, vocab) - level
        count, place = (n + (~s.done).astype(jnp.int32) for n in (s.count, s.place))
        return n + 1, DecodeState(
            rows,
            kept,
            token,
            place,
            wf.where(now, token, s.said),
            wf.where(now, score, s.scores),
            count,
            s.done | wf.any(token == rows.ends, "ends") | (count >= rows.limit),
            wf.where(wf.one_hot(place, places, jnp.bool_), token, s.row),
        )

    return wf.while_loop(going, one, (wf.zeros((), jnp.int32), state))[1]


def ensemble_logits(
    models: Sequence[Any], kept: Sequence[KVCache], token: Tensor, place: Tensor
) -> tuple[Tensor, Tensor, tuple[KVCache, ...]]:
    """The logits of what the models together think of all tokens, their level, and the models' caches.

    Without the level they are the logarithms of probabilities: of several models, of the mean of theirs.
    """
    steps = [decode_step(model, own, token, place) for model, own in zip(models, kept, strict=True)]
    vocab = models[0].embedding.vocab
    levels = [wf.logsumexp(logits, vocab) for logits, _ in steps]
    caches = tuple(own for _, own in steps)
    if len(steps) == 1:
        return steps[0][0], levels[0], caches
    several = wf.Dim("models", len(steps))
    logs = [logits - level for (logits, _), level in zip(steps, levels, strict=True)]
    mean = wf.logsumexp(wf.stack(logs, several), "models") - math.log(len(logs))
    level = wf.mean(wf.stack(levels, several), "models")
    return mean + level, level, caches


def insert(state: DecodeState, new: DecodeState, row: Any) -> DecodeState:
    """The state with new rows instead of old ones.

    Args:
      state: rows, all or some of them done.
      new: fewer, with as much room.
      row: where the first of them is put.
    """

    def put(old: Tensor, new: Tensor) -> Tensor:
        return wf.update(old, "batch", row, new)

    return jax.tree.map(put, state, new, is_leaf=wf.is_tensor)
