"""Scoring: the log-probabilities of given tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import weft as wf
from weft.core.tensor import Tensor
from weft.models import Batch, Transformer

from .cache import all_logits
from .requirements import check_decodable


def score(models: Sequence[Transformer], batch: Batch) -> Tensor:
    """The log-probability of each target, over `batch` and `length`; several models are averaged.

    Args:
      models: decoders or encoder-decoders with the same vocabulary; the probability is the mean of theirs.
      batch: tokens with targets.
    """
    for model in models:
        check_decodable(model)
    vocab = models[0].embedding.vocab
    assert batch.targets is not None
    logprobs = []
    for model in models:
        logits = all_logits(model, batch)
        logprobs.append(wf.take(logits, batch.targets, vocab) - wf.logsumexp(logits, vocab))
    if len(logprobs) == 1:
        return logprobs[0]
    several = wf.Dim("models", len(logprobs))
    return wf.logsumexp(wf.stack(logprobs, several), "models") - math.log(len(logprobs))
