"""Which places may attend to which: truth values over `length` and `memory_length`.

Each function gives a tensor to hand to `Attention`; `&` combines them. Only the dims that matter are in it:
a causal mask has no batch.
"""

from __future__ import annotations

import weft as wf
from weft.core.tensor import Tensor


def causal(length: wf.Dim, memory: wf.Dim) -> Tensor:
    """Each place sees itself and those before it."""
    return wf.arange(length) >= wf.arange(memory)


def prefix(memory: wf.Dim, size: Tensor) -> Tensor:
    """The first `size` places (of each batch row, say) are seen by all; with `causal(...) |`, a prefix LM."""
    return wf.arange(memory) < size


def segments(own: Tensor, others: Tensor) -> Tensor:
    """Places of several examples that were packed into one row see only their own example.

    Args:
      own: the number of each place's example, over `length`.
      others: the same over `memory_length`.
    """
    return own == others


def window(length: wf.Dim, memory: wf.Dim, size: int) -> Tensor:
    """Each place sees those at most `size - 1` before or behind it; with `causal`, only those before."""
    return abs(wf.arange(length) - wf.arange(memory)) < size
