"""Sampling: from logits to the next token of each row.

Every row has its own settings, so one program serves requests of all kinds. Every row also has one uniform
number per token: the sampled token is the first where the cumulative probability reaches that number. A row's
tokens therefore depend on its own numbers only, not on the layout or on other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

import weft as wf
from weft.core.tensor import Tensor

BISECTION_STEPS = 40  # scores that a threshold can't separate after these are equally likely
EXP_UNDERFLOW = -104.0  # exp of anything below is 0 in float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of each row, tensors over `batch`.

    Attributes:
      temperature: divides the logits before sampling; 0 takes the most likely token.
      top_k: sample from the k most likely tokens; 0: from all.
      top_p: sample from the smallest set of most likely tokens whose probability is at least this; 1: from
        all.
      penalty: the repetition penalty (Keskar et al. 2019): for tokens that are in the row already, positive
        logits are divided by it and negative ones multiplied; 1: none.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    penalty: Tensor


def sample(logits: Tensor, params: SamplingParams, uniform: Tensor, vocab: wf.Dim) -> Tensor:
    """The next token of each row.

    Args:
      logits: over `batch` and the vocabulary; a constant added to a row changes nothing.
      params: the settings of each row.
      uniform: a number above 0 and at most 1 for each row, over `batch`.
      vocab: the dim of the vocabulary.
    """

    def greedy(logits: Tensor) -> Tensor:
        return wf.argmax(logits, vocab).astype(jnp.int32)

    def sampled(logits: Tensor) -> Tensor:
        samples = params.temperature > 0
        # Subtracting the maximum first means that dividing by a tiny temperature can only overflow to -inf,
        # that is to a probability of 0.
        scores = (logits - wf.max(logits, vocab)) / wf.where(samples, params.temperature, 1.0)
        scores = wf.cond(
            wf.any((params.top_k > 0) & samples), _top_k(params.top_k, vocab), lambda s: s, scores
        )
        scores = wf.cond(
            wf.any((params.top_p < 1) & samples), _top_p(params.top_p, vocab), lambda s: s, scores
        )
        weights = wf.exp(scores)
        # On a split vocabulary the partial sums are added in another order, so the cumulative sum can change
        # by a rounding error at a token of weight 0. Masking makes sure that such a token is never selected.
        cumulative = wf.where(weights > 0, wf.cumsum(weights, vocab), 0.0)
        reached = cumulative >= uniform * wf.max(cumulative, vocab)
        token = wf.argmax(reached.astype(jnp.int32), vocab).astype(jnp.int32)
        return wf.where(samples, token, greedy(logits))

    return wf.cond(wf.any(params.temperature > 0), sampled, greedy, logits)


def apply_repetition_penalty(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Lower the logits of tokens that were seen; see `SamplingParams.penalty`."""
    lower = wf.where(logits > 0, logits / penalty, logits * penalty)
    return wf.where(seen, lower, logits)


def _top_k(count: Tensor, vocab: wf.Dim) -> Callable[[Tensor], Tensor]:
    def truncate(scores: Tensor) -> Tensor:
        k = wf.where(count > 0, count, vocab.size)
        return _truncate(scores, vocab, lambda kept: wf.sum(kept.astype(jnp.int32), vocab) >= k)

    return truncate


def _top_p(p: Tensor, vocab: wf.Dim) -> Callable[[Tensor], Tensor]:
    def truncate(scores: Tensor) -> Tensor:
        probs = wf.softmax(scores, vocab)
        kept = _truncate(scores, vocab, lambda kept: wf.sum(wf.where(kept, probs, 0.0), vocab) >= p)
        return wf.where(p < 1, kept, scores)

    return truncate


def _truncate(scores: Tensor, vocab: wf.Dim, enough: Callable[[Tensor], Tensor]) -> Tensor:
    """Set scores to -inf below the largest threshold that still keeps enough of them.

    The threshold is found by bisection: sorting would gather a split vocabulary, counting only sums over it.
    """

    def bisect(_: Tensor, bounds: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        low, high = bounds
        middle = low + (high - low) / 2
        fits = enough(scores >= middle)
        return wf.where(fits, middle, low), wf.where(fits, high, middle)

    # The largest score is 0. Scores that underflow are excluded from the bounds: they have probability 0, and
    # would make the interval so wide that the bisection can't separate the others.
    lowest = wf.min(wf.where(scores > EXP_UNDERFLOW, scores, 0.0), vocab)
    threshold, _ = wf.fori_loop(0, BISECTION_STEPS, bisect, (lowest, -lowest))
    return wf.where(scores >= threshold, scores, -jnp.inf)
