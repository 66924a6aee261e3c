"""The decode loop: generate tokens one by one, in rows that start and end independently.

    state = prefill(models, batch, settings, max_length)    # one program: all prompts at once
    state = decode(models, state, steps)                    # another: up to `steps` tokens per row

Several models form an ensemble: each token's probability is the mean of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

import weft as wf
from weft.core.tensor import Tensor
from weft.models import Batch, Transformer

from .cache import KVCache, decode_step, prefill_cache, unstack_layers
from .requirements import check_decodable
from .sampling import SamplingParams, apply_repetition_penalty, sample


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowSettings:
    """The generation settings of each row, tensors over `batch`.

    Attributes:
      prompt_length: the number of tokens of the prompt, without padding.
      limit: the maximum number of generated tokens.
      ends: tokens that end the row, also over `ends`; -1 is unused. The end token is part of the output.
      sampling: the sampling settings.
      uniforms: one number above 0 and at most 1 for each token, also over `generated`.
    """

    prompt_length: Tensor
    limit: Tensor
    ends: Tensor
    sampling: SamplingParams
    uniforms: Tensor


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """The state of all rows during generation.

    Attributes:
      settings: the settings of each row.
      caches: the KV cache of each model.
      token, position: the last token of each row, and its position.
      generated, logprobs: the generated tokens and their log-probabilities, over `batch` and `generated`.
      count: the number of generated tokens.
      done: True for rows that have ended.
      history: the prompt and the generated tokens, over `batch` and `positions`; -1 is unused.
    """

    settings: RowSettings
    caches: tuple[KVCache, ...]
    token: Tensor
    position: Tensor
    generated: Tensor
    logprobs: Tensor
    count: Tensor
    done: Tensor
    history: Tensor


def prefill(
    models: Sequence[Transformer], batch: Batch, settings: RowSettings, max_length: int
) -> DecodeState:
    """Process the prompts.

    Args:
      models: decoders or encoder-decoders with the same vocabulary.
      batch: the prompts, at least one token each, and the inputs of an encoder.
      settings: the settings of each row.
      max_length: the capacity of a row: its prompt and all generated tokens except the last.
    """
    for model in models:
        check_decodable(model)
    batch_dim, length = batch.tokens.dims
    last = settings.prompt_length - 1
    prompt = wf.where(wf.arange(length) < settings.prompt_length, batch.tokens, -1)
    return DecodeState(
        settings=settings,
        caches=tuple(prefill_cache(model, batch, max_length) for model in models),
        token=wf.take(batch.tokens, last, length),
        position=last,
        generated=wf.zeros(settings.uniforms.dims, jnp.int32),
        logprobs=wf.zeros(settings.uniforms.dims),
        count=wf.zeros([batch_dim], jnp.int32),
        done=settings.limit <= 0,
        history=wf.pad(
            prompt.rename(length="positions"), "positions", 0, max_length + 1 - length.size, value=-1
        ),
    )


def decode(models: Sequence[Transformer], state: DecodeState, steps: int | Tensor) -> DecodeState:
    """Generate more tokens, until all rows are done or `steps` were generated.

    Args:
      models: the models given to `prefill`.
      state: the state so far.
      steps: the maximum number of tokens for each row.
    """
    models = [unstack_layers(model) for model in models]
    settings, vocab = state.settings, models[0].embedding.vocab
    (generated_dim,) = (d for d in settings.uniforms.dims if d.name == "generated")
    (positions,) = (d for d in state.history.dims if d.name == "positions")

    def unfinished(carry: tuple[Tensor, DecodeState]) -> Tensor:
        return (carry[0] < steps) & ~wf.all(carry[1].done)

    def penalize(logits: Tensor, history: Tensor) -> Tensor:
        ones = wf.ones(history.dims, jnp.int32)
        count = wf.scatter_add(wf.zeros(logits.dims, jnp.int32), history, ones, vocab)
        return apply_repetition_penalty(logits, count > 0, settings.sampling.penalty)

    def step(carry: tuple[Tensor, DecodeState]) -> tuple[Tensor, DecodeState]:
        n, s = carry
        logits, normalizer, caches = ensemble_logits(models, s.caches, s.token, s.position)
        # True at the index of the new token. A row that is done writes nothing.
        current = wf.one_hot(s.count, generated_dim, jnp.bool_) & ~s.done
        uniform = wf.sum(wf.where(current, settings.uniforms, 0.0), generated_dim)
        penalized = wf.cond(
            wf.any(settings.sampling.penalty != 1), penalize, lambda logits, _: logits, logits, s.history
        )
        token = sample(penalized, settings.sampling, uniform, vocab)
        token = wf.where(s.done, s.token, token)
        # The model's own log-probability, before penalty and truncation.
        logprob = wf.take(logits, token, vocab) - normalizer
        count, position = (x + (~s.done).astype(jnp.int32) for x in (s.count, s.position))
        return n + 1, DecodeState(
            settings=settings,
            caches=caches,
            token=token,
            position=position,
            generated=wf.where(current, token, s.generated),
            logprobs=wf.where(current, logprob, s.logprobs),
            count=count,
            done=s.done | wf.any(token == settings.ends, "ends") | (count >= settings.limit),
            history=wf.where(wf.one_hot(position, positions, jnp.bool_), token, s.history),
        )

    return wf.while_loop(unfinished, step, (wf.zeros((), jnp.int32), state))[1]


def ensemble_logits(
    models: Sequence[Transformer], caches: Sequence[KVCache], token: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, tuple[KVCache, ...]]:
    """Run one decode step of all models.

    Returns:
      The logits, their normalizer and the new caches. `logits - normalizer` are log-probabilities; for
      several models, of the mean of their probabilities.
    """
    steps = [decode_step(model, cache, token, position) for model, cache in zip(models, caches, strict=True)]
    vocab = models[0].embedding.vocab
    normalizers = [wf.logsumexp(logits, vocab) for logits, _ in steps]
    new_caches = tuple(cache for _, cache in steps)
    if len(steps) == 1:
        return steps[0][0], normalizers[0], new_caches
    several = wf.Dim("models", len(steps))
    logprobs = [logits - normalizer for (logits, _), normalizer in zip(steps, normalizers, strict=True)]
    mean = wf.logsumexp(wf.stack(logprobs, several), "models") - math.log(len(logprobs))
    # The repetition penalty depends on the sign of a logit. Adding the mean normalizer keeps the ensemble's
    # logits on the scale of its members': identical models give the logits of one.
    normalizer = wf.mean(wf.stack(normalizers, several), "models")
    return mean + normalizer, normalizer, new_caches


def insert(state: DecodeState, new: DecodeState, row: int | Tensor) -> DecodeState:
    """Replace rows of a state.

    Args:
      state: the state; the rows to replace are done.
      new: the new rows, fewer than those of `state`, with the same `max_length`.
      row: the index of the first row to replace.
    """

    def replace(old: Tensor, new: Tensor) -> Tensor:
        return wf.update(old, "batch", row, new)

    return jax.tree.map(replace, state, new, is_leaf=wf.is_tensor)
