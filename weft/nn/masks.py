"""Attention masks: boolean tensors over `length` and `memory_length`, True where attention is allowed.

`&` and `|` combine them for `Attention`. A mask has only the dims that it depends on: a causal one has no
batch.
"""

from __future__ import annotations

import weft as wf
from weft.core.dims import DimLike
from weft.core.tensor import Tensor

from ..core.call_errors import checks_arguments


@checks_arguments
def causal(length: DimLike, memory: DimLike) -> Tensor:
    """Each position attends to itself and to earlier ones."""
    return wf.arange(length) >= wf.arange(memory)


@checks_arguments
def prefix(memory: DimLike, size: Tensor) -> Tensor:
    """All attend to the first `size` positions (of each batch row); with `causal(...) |`, a prefix LM."""
    return wf.arange(memory) < size


@checks_arguments
def segments(own: Tensor, others: Tensor) -> Tensor:
    """Positions attend only within their own example, where a row packs several.

    Args:
      own: the segment id of each position, over `length`.
      others: the same over `memory_length`.
    """
    return own == others


@checks_arguments
def window(length: DimLike, memory: DimLike, size: int) -> Tensor:
    """Each position attends to those fewer than `size` before or after it; with `causal`, only before."""
    return abs(wf.arange(length) - wf.arange(memory)) < size
