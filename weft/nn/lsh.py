"""LSH attention, the Reformer's: each place attends to those that a hash puts near it.

    places → a hash gives each a bucket → sorted by bucket → cut into chunks → chunk attends to chunk

Queries and keys are the same map of x, keys with their length taken away. A hash multiplies queries by random
directions; the direction, or its opposite, that fits best is the bucket. Sorted, the places of a bucket are
neighbours, so each looks at its own chunk and at the one before, and nothing of size length² is ever made.
What one hash parts another may bring together: several rounds are computed, and weighted by their sums.

The set that a place sees is thus the union over rounds of "same bucket, same or previous chunk", and the
result is the softmax over this set. A key that N rounds show is in N of the sums: each takes log N off its
score.

Reformer: The Efficient Transformer (Kitaev, Kaiser, Levskaya 2020), section 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import weft as wf
from weft.core.errors import ShapeError
from weft.core.tensor import Tensor

from .attention import MASK_VALUE
from .linear import Linear, check_features
from .module import Module, fan_in

SELF_PENALTY = 1e5  # what a place's own score is lowered by: seen only if all others are hidden, see HIDDEN


class LSHAttention(Module):
    """Self-attention among places that a hash puts together, with maps in and out.

    Work and memory grow as length · chunk · rounds. Scores are not divided by `sqrt(d_kv)`: keys are of
    length 1. If it is causal, no place attends to a later one, but which earlier ones share its chunk depends
    on all places that are sorted with it, later ones too.

    Heads and batch may be split as in `Attention`. The sort is over the whole sequence, so queries and values
    are gathered if `length` is split, and what follows is done on each device alike; a layout that splits
    `chunks` or `rounds` too (`length:seq chunks:seq`) shares it out. The hash compares sums: a layout that
    adds them up in another order may put a place for which two directions fit all but equally into the other
    bucket.

    Args:
      d_model: the dim of the places' features.
      heads: the dim of the heads; each hashes by itself.
      d_kv: the dim inside a head.
      chunk: how many places a chunk has. Sequences that it does not divide are padded, which no place sees.
      rounds: how many hashes there are.
      buckets: how many buckets a hash has, an even number, or 1: all places are in it. Several even numbers
        are the factors of as many hashes in one, which cost their sum instead of their product. By default
        about two for each chunk, in factors of at most four chunks; and 1 if the sequence is one chunk.
      bias: whether the maps have one.
    """

    query: Linear
    value: Linear
    out: Linear
    heads: wf.Dim = eqx.field(static=True)
    d_kv: wf.Dim = eqx.field(static=True)
    chunk: int = eqx.field(static=True)
    rounds: wf.Dim = eqx.field(static=True)
    buckets: tuple[int, ...] | None = eqx.field(static=True)

    def __init__(
        self,
        d_model: wf.Dim,
        heads: wf.Dim,
        d_kv: wf.Dim,
        *,
        chunk: int = 64,
        rounds: int = 2,
        buckets: int | tuple[int, ...] | None = None,
        bias: bool = False,
    ):
        factors = (buckets,) if isinstance(buckets, int) else buckets
        _check(chunk, rounds, factors)
        self.heads, self.d_kv = heads, d_kv
        self.chunk, self.rounds, self.buckets = chunk, wf.Dim("rounds", rounds), factors
        self.query = Linear([d_model], [heads, d_kv], bias=bias)
        self.value = Linear([d_model], [heads, d_kv], bias=bias)
        self.out = Linear([heads, d_kv], [d_model], bias=bias, draw=fan_in([heads, d_kv]))

    def __call__(
        self,
        x: Tensor,
        places: Tensor,
        segments: Tensor | None = None,
        *,
        causal: bool = True,
        key: Any = None,
        drop: Callable[[Tensor], Tensor] = lambda weights: weights,
    ) -> Tensor:
        """What each place of x takes from the others, and from itself if it sees no other.

        Args:
          x: over `length`.
          places: the number of each place, whose last dim is `length`; other dims of x where rows differ.
          segments: which example of a packed row each place is of; it sees only its own.
          causal: whether a place sees only those whose number is not greater than its own.
          key: which directions are drawn; None: always the same ones.
          drop: applied to the weights of each round, as dropout.
        """
        check_features(x, self.query.inputs, "LSHAttention")
        length, rounds = places.dims[-1], self.rounds
        size = min(self.chunk, length.size)
        chunks = wf.Dim("chunks", -(-length.size // size))
        batch = [d for d in x.dims if d not in (length, *self.query.inputs)]

        def padded(t: Tensor) -> Tensor:
            t = t.rename(**{length.name: "sequence"})
            return wf.pad(t, "sequence", 0, chunks.size * size - length.size)

        by_place = [*batch, self.heads, length, self.d_kv]
        q, v = padded(self.query(x, out=by_place)), padded(self.value(x, out=by_place))
        bucket = self.hash(q, length.size, key)
        order = wf.argsort(bucket, "sequence")  # by bucket, then by place
        rank = wf.argsort(order, "sequence")
        cut = _Cut(order, chunks, wf.Dim("chunk", size))

        visible = cut.pairs(wf.equal, bucket)
        if causal:
            visible = visible & cut.pairs(wf.greater_equal, padded(places))
        if segments is not None:
            visible = visible & cut.pairs(wf.equal, padded(segments))

        q, v = cut(q), cut.near(cut(v))
        k = cut.near(_direction(q, self.d_kv))
        exact = jnp.promote_types(q.dtype, jnp.float32)
        by_rank = [*batch, self.heads, rounds, chunks, cut.chunk]
        scores = wf.einsum(q, k, out=[*by_rank, k.dims[-2]]).astype(exact)
        scores = wf.where(visible, scores, MASK_VALUE) - wf.where(cut.itself(), SELF_PENALTY, 0.0).astype(
            exact
        )
        if rounds.size > 1:
            scores = scores - wf.log(wf.maximum(_meetings(cut, bucket, rank // size), 1).astype(exact))
        total = wf.logsumexp(scores, "near")
        weights = drop(wf.exp(scores - total).astype(v.dtype))
        mixed = wf.einsum(weights, v, out=[*by_rank, self.d_kv])

        # `length` comes back last: no tensor has it beside `rounds`, so both may be on one axis.
        back = rank["sequence", : length.size]
        shares = wf.softmax(cut.undo(total, back), rounds).astype(v.dtype)
        out = [*batch, self.heads, back.dims[-1], self.d_kv]
        mixed = wf.einsum(cut.undo(mixed, back), shares, out=out)
        return self.out(mixed.rename(sequence=length.name))

    def project(self, x: Tensor, memory: Tensor, rotate: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, as `Attention.project` gives them, for attention without a hash."""

        def order(x: Tensor) -> list[wf.Dim]:
            batch = [d for d in x.dims if d not in self.query.inputs]
            return [*batch[:-1], self.heads, *batch[-1:], self.d_kv]

        k = _direction(self.query(memory, out=order(memory)), self.d_kv)
        return self.query(x, out=order(x)), k, self.value(memory, out=order(memory))

    def hash(self, q: Tensor, length: int, key: Any = None) -> Tensor:
        """The bucket of each query in each round; those beyond the length share one of their own.

        Args:
          q: queries over `sequence`.
          length: how many of them are not padding.
          key: which directions are drawn; None: always the same ones.
        """
        key = jax.random.key(0) if key is None else key
        q = q.astype(jnp.promote_types(q.dtype, jnp.float32))
        whole = next(d for d in q.dims if d.name == "sequence")
        dims = [*(d for d in q.dims if d not in (whole, self.d_kv)), self.rounds, whole]
        bucket, count = wf.zeros(dims, jnp.int32), 1
        for n, factor in enumerate(self.buckets or default_buckets(length, self.chunk)):
            if factor > 1:
                half = wf.Dim("directions", factor // 2)
                drawn = wf.random.normal(
                    jax.random.fold_in(key, n), [self.rounds, self.heads, self.d_kv, half]
                )
                fit = wf.einsum(q, drawn.astype(q.dtype), out=[*dims, half])
                bucket = bucket + wf.argmax(wf.concat([fit, -fit], half.name), half.name) * count
                count *= factor
        return bucket if whole.size == length else wf.where(wf.arange(whole) < length, bucket, count)


@dataclass(frozen=True)
class _Cut:
    """The places of `sequence` in the order of each round, chunk by chunk."""

    order: Tensor
    chunks: wf.Dim
    chunk: wf.Dim

    @functools.cached_property
    def ids(self) -> Tensor:
        return wf.split(self.order, "sequence", [self.chunks, self.chunk])

    def __call__(self, t: Tensor) -> Tensor:
        return wf.take(t, self.ids, "sequence")

    def near(self, t: Tensor) -> Tensor:
        """What each chunk looks at: itself and the one before, which for the first is the last."""
        t = t.rename(chunk="near")
        return t if self.chunks.size == 1 else wf.concat([t, wf.roll(t, self.chunks, 1)], "near")

    def pairs(self, fits: Callable[[Tensor, Tensor], Tensor], t: Tensor) -> Tensor:
        """Whether each place and each one that it looks at fit."""
        t = self(t)
        return fits(t, self.near(t))

    def itself(self) -> Tensor:
        return self.ids == self.near(self.ids)

    def undo(self, t: Tensor, rank: Tensor) -> Tensor:
        """Back in the places' own order."""
        return wf.take(wf.merge(t, [self.chunks, self.chunk], "sorted"), rank, "sorted")


def _meetings(cut: _Cut, bucket: Tensor, part: Tensor) -> Tensor:
    """In how many rounds the pairs of each round meet: in one bucket, and in one chunk or the one before.

    Args:
      bucket, part: the number of each place's bucket and chunk in each round.
    """
    bucket, part = bucket.rename(rounds="others"), cut(part.rename(rounds="others"))
    before, near = (part + cut.chunks.size - 1) % cut.chunks.size, cut.near(part)
    meet = cut.pairs(wf.equal, bucket) & ((part == near) | (before == near))
    return wf.sum(meet.astype(jnp.int32), "others")


def default_buckets(length: int, chunk: int) -> tuple[int, ...]:
    """About two buckets for each chunk, as even factors of at most four chunks each.

    Beyond that multiplying by the directions would cost more than what it saves; the factors' sum grows with
    a root of their product.

    >>> default_buckets(64, 64), default_buckets(1000, 64), default_buckets(65536, 64)
    ((1,), (32,), (46, 46))
    """
    if length <= chunk:
        return (1,)
    wanted, factors = 2 * length / chunk, 1
    while (even := 2 * max(round(wanted ** (1 / factors) / 2), 1)) > 4 * chunk:
        factors += 1
    return (even,) * factors


def _direction(q: Tensor, d_kv: wf.Dim) -> Tensor:
    """Vectors of length 1; zero stays zero."""
    exact = q.astype(jnp.promote_types(q.dtype, jnp.float32))
    square = wf.sum(exact * exact, d_kv)
    return (exact * wf.rsqrt(wf.where(square > 0, square, 1.0))).astype(q.dtype)


def _check(chunk: int, rounds: int, buckets: tuple[int, ...] | None) -> None:
    odd = [n for n in buckets or () if n < 1 or (n > 1 and n % 2)]
    wrong = {
        f"a chunk has {chunk} places": chunk < 1,
        f"there are {rounds} rounds": rounds < 1,
        f"a hash has {', '.join(map(str, odd))} buckets": bool(odd),
        "a hash has no factors": buckets == (),
    }
    facts = [fact for fact, is_wrong in wrong.items() if is_wrong]
    if facts:
        raise ShapeError(
            ", and ".join(facts),
            rule="both are at least 1; buckets are pairs, a direction and its opposite, or 1 for all places",
            hint="LSHAttention(…, chunk=64, rounds=2, buckets=32); buckets=None is about two for each chunk",
        ).located(f"LSHAttention(chunk={chunk}, rounds={rounds}, buckets={buckets})")
