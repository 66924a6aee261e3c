"""How likely given texts are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import weft as wf
from weft.core.tensor import Tensor
from weft.models import Batch

from .cache import all_logits
from .requirements import check_decodable


def score(models: Sequence[Any], batch: Batch) -> Tensor:
    """The logarithm of each target's probability, over `batch` and `length`; several models by their mean.

    Args:
      models: decoders, or encoder-decoders, with one vocabulary.
      batch: with targets.
    """
    for model in models:
        check_decodable(model)
    vocab = models[0].embedding.vocab
    assert batch.targets is not None
    logs = []
    for model in models:
        logits = all_logits(model, batch)
        logs.append(wf.take(logits, batch.targets, vocab) - wf.logsumexp(logits, vocab))
    if len(logs) == 1:
        return logs[0]
    return wf.logsumexp(wf.stack(logs, wf.Dim("models", len(logs))), "models") - math.log(len(logs))
