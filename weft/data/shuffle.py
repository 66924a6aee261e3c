"""In which order an epoch's examples come: a permutation that is a function of a seed and the epoch's number.

No epoch's order is stored, or depends on another's: any place of it is computed when it is asked for.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ExampleOrder:
    """The examples of all epochs, by their numbers: number n is in epoch `n // size`.

    Attributes:
      size: how many an epoch has.
      seed: of the permutations.
      shuffle: whether there are any; otherwise each epoch goes from the first to the last.

    >>> order = Order(4, seed=1)
    >>> sorted(order.index(n) for n in range(4)), sorted(order.index(n) for n in range(4, 8))
    ([0, 1, 2, 3], [0, 1, 2, 3])
    """

    size: int
    seed: int
    shuffle: bool = True

    def index(self, number: int) -> int:
        """Which example comes at a place."""
        epoch, place = divmod(number, self.size)
        return _permuted(place, self.size, self.seed, epoch) if self.shuffle and self.size > 1 else place

    def drawn(self, epoch: int, below: int) -> int:
        """A number from 0 on, below another, for an epoch; 0 if nothing is shuffled."""
        return _drawn(self.seed, epoch, below) if self.shuffle else 0


@functools.cache
def _shuffled() -> Any:
    from grain.experimental import index_shuffle  # a library that takes long to import

    return index_shuffle


@functools.lru_cache(
    maxsize=1 << 16
)  # a batch's numbers are asked for when it is planned, made, and once more
def _permuted(place: int, size: int, seed: int, epoch: int) -> int:
    return _shuffled()(place, max_index=size - 1, seed=_seed(seed, epoch), rounds=4)


@functools.lru_cache(maxsize=64)
def _drawn(seed: int, epoch: int, below: int) -> int:
    return int(np.random.default_rng([seed, epoch]).integers(below))


@functools.lru_cache(maxsize=64)
def _seed(seed: int, epoch: int) -> int:
    """An epoch's own seed: with a sum, the next epoch would be the next seed's first."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])
