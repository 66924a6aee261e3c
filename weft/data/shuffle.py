"""Shuffling: the order of an epoch's examples is a permutation computed from the seed and the epoch's number.

No permutation is stored, and no epoch depends on another: each index is computed on demand, so a stream can
resume anywhere at no cost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from weft.core.extras import from_extra


@dataclass(frozen=True)
class ExampleOrder:
    """The order of the examples of all epochs: example number n belongs to epoch `n // size`.

    Attributes:
      size: the number of examples in an epoch.
      seed: the seed of the permutations.
      shuffle: whether to permute; if False, each epoch runs from the first example to the last.

    >>> order = ExampleOrder(4, seed=1)
    >>> sorted(order.index(n) for n in range(4)), sorted(order.index(n) for n in range(4, 8))
    ([0, 1, 2, 3], [0, 1, 2, 3])
    """

    size: int
    seed: int
    shuffle: bool = True

    def index(self, number: int) -> int:
        """The index of the n-th example."""
        epoch, position = divmod(number, self.size)
        if not self.shuffle or self.size == 1:
            return position
        return _permuted(position, self.size, self.seed, epoch)

    def random_offset(self, epoch: int, below: int) -> int:
        """A random integer in [0, below) for an epoch; 0 without shuffling."""
        return _random_offset(self.seed, epoch, below) if self.shuffle else 0


@functools.cache
def _index_shuffle() -> Callable[..., int]:
    with from_extra("train"):
        from grain.experimental import index_shuffle  # slow to import

    return index_shuffle


# A batch's indices are requested when it is planned and again when its rows are built.
@functools.lru_cache(maxsize=1 << 16)
def _permuted(position: int, size: int, seed: int, epoch: int) -> int:
    return _index_shuffle()(position, max_index=size - 1, seed=_epoch_seed(seed, epoch), rounds=4)


@functools.lru_cache(maxsize=64)
def _random_offset(seed: int, epoch: int, below: int) -> int:
    return int(np.random.default_rng([seed, epoch]).integers(below))


@functools.lru_cache(maxsize=64)
def _epoch_seed(seed: int, epoch: int) -> int:
    """A seed for one epoch. With `seed + epoch`, epoch 1 of seed 0 would repeat epoch 0 of seed 1."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])
