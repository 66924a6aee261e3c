"""Losses over a vocabulary that may be split: the logits are never gathered."""

from __future__ import annotations

import jax.numpy as jnp

import weft as wf
from weft.core.dims import DimLike
from weft.core.tensor import Tensor

from ..core.call_errors import checks_arguments


@checks_arguments
def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    vocab: DimLike,
    *,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The negative log-probability of each target, in float32.

    Args:
      logits: over the vocabulary.
      targets: the correct tokens.
      vocab: the vocabulary's dim.
      smoothing: label smoothing: the share of the target's probability that is spread over all tokens.
      z_loss: the factor of the squared log-normalizer of the softmax, which keeps logits from drifting.
    """
    logits = logits.astype(jnp.float32)
    total = wf.logsumexp(logits, vocab)
    loss = total - wf.take(logits, targets, vocab)
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * (total - wf.mean(logits, vocab))
    return loss + z_loss * wf.square(total) if z_loss else loss
