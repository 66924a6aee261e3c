"""Evaluation on held-out data: loss, perplexity and accuracy.

The devices sum over all targets, batch by batch, so the result does not depend on batching or layout.
The loss is the plain cross-entropy, without label smoothing and auxiliary losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import jax.numpy as jnp

import weft as wf
from weft import nn
from weft.core.tensor import Tensor
from weft.core.types import PyTree
from weft.distributed import processes
from weft.models import Batch


@dataclass(frozen=True)
class EvalResult:
    """The result of an evaluation.

    Attributes:
      loss: the mean cross-entropy per target, in nats.
      accuracy: the fraction of targets that are the most likely token.
      tokens: the number of targets.
      words: the number of words in the targets, if it is known.
    """

    loss: float
    accuracy: float
    tokens: int
    words: int | None = None

    @property
    def perplexity(self) -> float:
        """The perplexity per token."""
        return _exp(self.loss)

    @property
    def word_perplexity(self) -> float | None:
        """The perplexity per word, from the loss of all its tokens."""
        return None if not self.words else _exp(self.loss * self.tokens / self.words)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def eval_step(model: PyTree, batch: Batch) -> dict[str, Tensor]:
    """Sums over a batch's targets: cross-entropy, the number predicted correctly, and their number."""
    assert batch.targets is not None
    logits, vocab = model.logits(batch), model.embedding.vocab
    losses = nn.cross_entropy(logits, batch.targets, vocab)
    right = (wf.argmax(logits, vocab) == batch.targets).astype(jnp.float32)
    weights = wf.ones(losses.dims) if batch.weights is None else batch.weights
    parts = {"loss": losses, "right": right, "tokens": wf.ones(losses.dims)}
    return {name: wf.sum(x * weights) for name, x in parts.items()}


def evaluate(
    program: wf.Program, model: PyTree, batches: Iterable[Batch], words: int | None = None
) -> EvalResult:
    """Evaluate a model on batches.

    Args:
      program: `eval_step`, staged for a mesh and a layout.
      model: the model to evaluate.
      batches: batches with targets.
      words: the number of words in all targets.
    """
    totals = {"loss": 0.0, "right": 0.0, "tokens": 0.0}  # Python floats: 64 bits
    for batch in batches:
        with processes.watchdog("a batch of the evaluation"):
            sums = program(model, batch)
            totals = {name: total + float(sums[name].array) for name, total in totals.items()}
    tokens = max(totals["tokens"], 1.0)
    return EvalResult(totals["loss"] / tokens, totals["right"] / tokens, int(totals["tokens"]), words)
