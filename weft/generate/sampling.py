"""Which token comes next: the likeliest, or one drawn by its probability.

Every row has settings of its own, so requests of all kinds share one program, and one number between 0 and 1
for each token that is drawn: the token is where the running sum of probabilities passes it. A row's tokens
thus depend on its own numbers alone, not on the layout or on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import weft as wf
from weft.core.tensor import Tensor

BISECTION_STEPS = 40  # after as many, scores that a threshold can't tell apart are equally likely
EXP_UNDERFLOW = -104.0  # in float32 the exponential of anything less is 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, each over `batch`.

    Attributes:
      temperature: by which logits are divided before a token is drawn; 0: the likeliest is taken.
      top_k: draw from as many of the likeliest alone; 0: from all.
      top_p: draw from the fewest likeliest ones that have this probability together; 1: from all.
      penalty: how much less likely tokens become that stand in the row already: logits above 0 are divided by
        it, those below multiplied (Keskar et al. 2019); 1: no less.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    penalty: Tensor


def sample(logits: Tensor, how: SamplingParams, number: Tensor, vocab: wf.Dim) -> Tensor:
    """The next token of each row.

    Args:
      logits: over `batch` and the vocabulary, or any that differ from them by a number in each row.
      how: each row's settings.
      number: above 0 and up to 1, over `batch`.
      vocab: the vocabulary's dim.
    """

    def likeliest(logits: Tensor) -> Tensor:
        return wf.argmax(logits, vocab).astype(jnp.int32)

    def drawn(logits: Tensor) -> Tensor:
        some = how.temperature > 0
        # The greatest is 0, whatever it is divided by: none overflows but towards a probability of 0.
        scores = (logits - wf.max(logits, vocab)) / wf.where(some, how.temperature, 1.0)
        scores = wf.cond(wf.any((how.top_k > 0) & some), _top_k(how.top_k, vocab), lambda s: s, scores)
        scores = wf.cond(wf.any((how.top_p < 1) & some), _top_p(how.top_p, vocab), lambda s: s, scores)
        weights = wf.exp(scores)
        # Sums in another order may fall a little where nothing is added: what was left out must not pass.
        passed = wf.where(weights > 0, wf.cumsum(weights, vocab), 0.0)
        enough = passed >= number * wf.max(passed, vocab)
        token = wf.argmax(enough.astype(jnp.int32), vocab).astype(jnp.int32)
        return wf.where(some, token, likeliest(logits))

    return wf.cond(wf.any(how.temperature > 0), drawn, likeliest, logits)


def apply_repetition_penalty(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Logits with those of tokens that were seen lowered; see `SamplingParams.penalty`."""
    lower = wf.where(logits > 0, logits / penalty, logits * penalty)
    return wf.where(seen, lower, logits)


def _top_k(count: Tensor, vocab: wf.Dim) -> Callable[[Tensor], Tensor]:
    def cut(scores: Tensor) -> Tensor:
        wanted = wf.where(count > 0, count, vocab.size)
        return _above(scores, vocab, lambda kept: wf.sum(kept.astype(jnp.int32), vocab) >= wanted)

    return cut


def _top_p(share: Tensor, vocab: wf.Dim) -> Callable[[Tensor], Tensor]:
    def cut(scores: Tensor) -> Tensor:
        shares = wf.softmax(scores, vocab)
        few = _above(scores, vocab, lambda kept: wf.sum(wf.where(kept, shares, 0.0), vocab) >= share)
        return wf.where(share < 1, few, scores)

    return cut


def _above(scores: Tensor, vocab: wf.Dim, enough: Callable[[Tensor], Any]) -> Tensor:
    """The scores, -inf below the greatest threshold that leaves enough; without sorting, split or not."""

    def halve(_: Tensor, bounds: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        low, high = bounds
        middle = low + (high - low) / 2
        fits = enough(scores >= middle)
        return wf.where(fits, middle, low), wf.where(fits, high, middle)

    # The greatest is 0. What has a probability of 0 needs no threshold, and would make the bounds too wide.
    least = wf.min(wf.where(scores > EXP_UNDERFLOW, scores, 0.0), vocab)
    low, _ = wf.fori_loop(0, BISECTION_STEPS, halve, (least, -least))
    return wf.where(scores >= low, scores, -jnp.inf)
