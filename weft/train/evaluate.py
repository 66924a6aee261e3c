"""How well a model says texts that it has not learned from: loss, perplexity, accuracy.

Sums over all targets are made on the devices, batch by batch; nothing depends on how rows are batched or laid
out. The loss is the plain cross-entropy, without smoothing and further losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

import weft as wf
from weft import nn
from weft.distributed import processes
from weft.models import Batch


@dataclass(frozen=True)
class EvalResult:
    """What was found.

    Attributes:
      loss: the mean cross-entropy of a target, in nats.
      accuracy: how often the likeliest token is the target.
      tokens: how many targets there were.
      words: how many words they are, where that is known.
    """

    loss: float
    accuracy: float
    tokens: int
    words: int | None = None

    @property
    def perplexity(self) -> float:
        """Of a token."""
        return _exp(self.loss)

    @property
    def word_perplexity(self) -> float | None:
        """Of a word: that of all its tokens together."""
        return None if not self.words else _exp(self.loss * self.tokens / self.words)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def eval_step(model: Any, batch: Batch) -> dict[str, Any]:
    """Over a batch's targets: their cross-entropy, how many were the likeliest token, how many there are."""
    assert batch.targets is not None
    logits, vocab = model.logits(batch), model.embedding.vocab
    losses = nn.cross_entropy(logits, batch.targets, vocab)
    right = (wf.argmax(logits, vocab) == batch.targets).astype(jnp.float32)
    weights = wf.ones(losses.dims) if batch.weights is None else batch.weights
    parts = {"loss": losses, "right": right, "tokens": wf.ones(losses.dims)}
    return {name: wf.sum(x * weights) for name, x in parts.items()}


def evaluate(
    program: wf.Program, model: Any, batches: Iterable[Batch], words: int | None = None
) -> EvalResult:
    """Score a model on batches.

    Args:
      program: `sums`, staged for a mesh and a layout.
      model: whose.
      batches: with targets.
      words: how many words all targets are.
    """
    totals = {"loss": 0.0, "right": 0.0, "tokens": 0.0}  # Python's: 64 bits
    for batch in batches:
        with processes.watchdog("a batch of the evaluation"):
            found = program(model, batch)
            totals = {name: total + float(found[name].array) for name, total in totals.items()}
    tokens = max(totals["tokens"], 1.0)
    return EvalResult(totals["loss"] / tokens, totals["right"] / tokens, int(totals["tokens"]), words)
