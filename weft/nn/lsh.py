"""LSH attention (the Reformer): each position attends to those that a hash puts into the same bucket.

    positions → hash to buckets → sort by bucket → split into chunks → attend chunk to chunk

Queries and keys are one projection of x; keys are normalized to unit length. A hash multiplies queries by
random directions; the direction, or its opposite, with the largest product is the bucket. After sorting, the
positions of a bucket are adjacent. Each attends to its own chunk and to the previous one, so nothing of size
length² is ever computed. One hash may separate similar positions, so there are several rounds, weighted by
their softmax sums.

A position thus attends to the union over rounds of "same bucket, same or previous chunk", and the result is
the softmax over this set. A key found in N rounds is in N of the sums, so log N is subtracted from its score
in each.

Reformer: The Efficient Transformer (Kitaev, Kaiser, Levskaya 2020), section 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp

import weft as wf
from weft.core.dims import DimLike, as_dim
from weft.core.errors import ShapeError
from weft.core.tensor import Tensor

from .attention import MASK_VALUE, Rotation
from .linear import Linear, check_features
from .module import Module, fan_in

# Subtracted from a position's own score: it attends to itself only if all others are masked. Smaller than
# -MASK_VALUE, so that masked positions rank below it.
SELF_PENALTY = 1e5


class LSHAttention(Module):
    """Self-attention within hash buckets, with input and output projections.

    Work and memory grow as length · chunk · rounds. Scores are not divided by `sqrt(d_kv)`: keys have unit
    length. If it is causal, no position attends to a later one, but which earlier ones share its chunk
    depends on all positions that are sorted with it, later ones included.

    Heads and batch may be split as in `Attention`. The sort is over the full sequence: if `length` is split,
    queries and values are gathered, and the rest is computed on each device redundantly. A layout that also
    splits `chunks` or `rounds` (`length:seq chunks:seq`) splits that work. The hash compares sums of floats:
    a layout that adds them in another order may move a position between two buckets that fit almost equally.

    Args:
      d_model: the dim of the hidden states.
      heads: the dim of the heads; each has its own hash.
      d_kv: the dim of each head's features.
      chunk: the positions per chunk. Other sequence lengths are padded, and the padding is masked.
      rounds: the number of hashes.
      buckets: the buckets per hash, an even number, or 1 for all positions in one. Several even numbers are
        the factors of one hash, which costs their sum instead of their product. By default about two per
        chunk, in factors of at most four chunks; and 1 if the sequence is one chunk.
      bias: whether the projections have biases.
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
        d_model: DimLike,
        heads: DimLike,
        d_kv: DimLike,
        *,
        chunk: int = 64,
        rounds: int = 2,
        buckets: int | tuple[int, ...] | None = None,
        bias: bool = False,
    ):
        factors = (buckets,) if isinstance(buckets, int) else buckets
        _check(chunk, rounds, factors)
        self.heads, self.d_kv = heads, d_kv = as_dim(heads), as_dim(d_kv)
        self.chunk, self.rounds, self.buckets = chunk, wf.Dim("rounds", rounds), factors
        self.query = Linear([d_model], [heads, d_kv], bias=bias)
        self.value = Linear([d_model], [heads, d_kv], bias=bias)
        self.out = Linear([heads, d_kv], [d_model], bias=bias, initializer=fan_in([heads, d_kv]))

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        segments: Tensor | None = None,
        *,
        causal: bool = True,
        key: jax.Array | None = None,
        dropout: Callable[[Tensor], Tensor] = lambda weights: weights,
    ) -> Tensor:
        """The attention of each position to the others in its buckets, and to itself if there are none.

        Args:
          x: hidden states over `length`.
          positions: position ids; the last dim is `length`, and other dims of x come first if rows differ.
          segments: segment ids of packed rows; a position attends only to its own segment.
          causal: whether a position attends only to those whose id is not greater than its own.
          key: the random key of the directions; None: a constant one.
          dropout: applied to the attention weights of each round.
        """
        check_features(x, self.query.inputs, "LSHAttention")
        length, rounds = positions.dims[-1], self.rounds
        size = min(self.chunk, length.size)
        chunks = wf.Dim("chunks", -(-length.size // size))
        batch = [d for d in x.dims if d not in (length, *self.query.inputs)]

        def padded(t: Tensor) -> Tensor:
            t = t.rename(**{length.name: "sequence"})
            return wf.pad(t, "sequence", 0, chunks.size * size - length.size)

        by_position = [*batch, self.heads, length, self.d_kv]
        q, v = padded(self.query(x, out=by_position)), padded(self.value(x, out=by_position))
        bucket = self.hash(q, length.size, key)
        order = wf.argsort(bucket, "sequence")  # by bucket, then by position
        rank = wf.argsort(order, "sequence")
        chunked = _Chunks(order, chunks, wf.Dim("chunk", size))

        mask = chunked.compare(wf.equal, bucket)
        if causal:
            mask = mask & chunked.compare(wf.greater_equal, padded(positions))
        if segments is not None:
            mask = mask & chunked.compare(wf.equal, padded(segments))

        q, v = chunked(q), chunked.near(chunked(v))
        k = chunked.near(_normalized(q, self.d_kv))
        wide = jnp.promote_types(q.dtype, jnp.float32)
        by_rank = [*batch, self.heads, rounds, chunks, chunked.chunk]
        scores = wf.einsum(q, k, out=[*by_rank, k.dims[-2]]).astype(wide)
        masked = wf.where(mask, scores, MASK_VALUE)
        scores = masked - wf.where(chunked.is_self(), SELF_PENALTY, 0.0).astype(wide)
        if rounds.size > 1:
            found = wf.maximum(_common_rounds(chunked, bucket, rank // size), 1)
            scores = scores - wf.log(found.astype(wide))
        total = wf.logsumexp(scores, "near")
        weights = dropout(wf.exp(scores - total).astype(v.dtype))
        attended = wf.einsum(weights, v, out=[*by_rank, self.d_kv])

        # `length` is restored last: no tensor has both it and `rounds`, so both may be on one axis.
        back = rank["sequence", : length.size]
        shares = wf.softmax(chunked.undo(total, back), rounds).astype(v.dtype)
        out = [*batch, self.heads, back.dims[-1], self.d_kv]
        attended = wf.einsum(chunked.undo(attended, back), shares, out=out)
        return self.out(attended.rename(sequence=length.name))

    def project(
        self, x: Tensor, memory: Tensor, rotate: Rotation | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, as `Attention.project` returns them, for attention without a hash."""

        def order(x: Tensor) -> list[wf.Dim]:
            batch = [d for d in x.dims if d not in self.query.inputs]
            return [*batch[:-1], self.heads, *batch[-1:], self.d_kv]

        k = _normalized(self.query(memory, out=order(memory)), self.d_kv)
        return self.query(x, out=order(x)), k, self.value(memory, out=order(memory))

    def hash(self, q: Tensor, length: int, key: jax.Array | None = None) -> Tensor:
        """The bucket of each query in each round; padding has a bucket of its own.

        Args:
          q: queries over `sequence`.
          length: how many of them are not padding.
          key: the random key of the directions; None: a constant one.
        """
        key = jax.random.key(0) if key is None else key
        q = q.astype(jnp.promote_types(q.dtype, jnp.float32))
        sequence = next(d for d in q.dims if d.name == "sequence")
        dims = [*(d for d in q.dims if d not in (sequence, self.d_kv)), self.rounds, sequence]
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
        return bucket if sequence.size == length else wf.where(wf.arange(sequence) < length, bucket, count)


@dataclass(frozen=True)
class _Chunks:
    """The positions of `sequence`, sorted by bucket in each round and split into chunks."""

    order: Tensor
    chunks: wf.Dim
    chunk: wf.Dim

    @functools.cached_property
    def ids(self) -> Tensor:
        return wf.split(self.order, "sequence", [self.chunks, self.chunk])

    def __call__(self, t: Tensor) -> Tensor:
        return wf.take(t, self.ids, "sequence")

    def near(self, t: Tensor) -> Tensor:
        """The positions that each chunk attends to: its own and the previous chunk's, cyclically."""
        t = t.rename(chunk="near")
        return t if self.chunks.size == 1 else wf.concat([t, wf.roll(t, self.chunks, 1)], "near")

    def compare(self, comparison: Callable[[Tensor, Tensor], Tensor], t: Tensor) -> Tensor:
        """A comparison of each position with those near it."""
        t = self(t)
        return comparison(t, self.near(t))

    def is_self(self) -> Tensor:
        return self.ids == self.near(self.ids)

    def undo(self, t: Tensor, rank: Tensor) -> Tensor:
        """Restore the original order of positions."""
        return wf.take(wf.merge(t, [self.chunks, self.chunk], "sorted"), rank, "sorted")


def _common_rounds(chunked: _Chunks, bucket: Tensor, part: Tensor) -> Tensor:
    """In how many rounds each pair shares a bucket, in the same chunk or adjacent ones.

    Args:
      bucket, part: the bucket and the chunk of each position in each round.
    """
    bucket, part = bucket.rename(rounds="others"), chunked(part.rename(rounds="others"))
    before, near = (part + chunked.chunks.size - 1) % chunked.chunks.size, chunked.near(part)
    meet = chunked.compare(wf.equal, bucket) & ((part == near) | (before == near))
    return wf.sum(meet.astype(jnp.int32), "others")


def default_buckets(length: int, chunk: int) -> tuple[int, ...]:
    """About two buckets per chunk, as even factors of at most four chunks each.

    With larger factors, multiplying by the directions would cost more than it saves. The sum of the factors
    grows only as a root of their product.

    >>> default_buckets(64, 64), default_buckets(1000, 64), default_buckets(65536, 64)
    ((1,), (32,), (46, 46))
    """
    if length <= chunk:
        return (1,)
    wanted, factors = 2 * length / chunk, 1
    while (even := 2 * max(round(wanted ** (1 / factors) / 2), 1)) > 4 * chunk:
        factors += 1
    return (even,) * factors


def _normalized(q: Tensor, d_kv: wf.Dim) -> Tensor:
    """Vectors normalized to unit length; zero stays zero."""
    wide = q.astype(jnp.promote_types(q.dtype, jnp.float32))
    square = wf.sum(wide * wide, d_kv)
    return (wide * wf.rsqrt(wf.where(square > 0, square, 1.0))).astype(q.dtype)


def _check(chunk: int, rounds: int, buckets: tuple[int, ...] | None) -> None:
    odd = [n for n in buckets or () if n < 1 or (n > 1 and n % 2)]
    wrong = {
        f"a chunk has {chunk} positions": chunk < 1,
        f"there are {rounds} rounds": rounds < 1,
        f"a hash has {', '.join(map(str, odd))} buckets": bool(odd),
        "a hash has no factors": buckets == (),
    }
    facts = [fact for fact, is_wrong in wrong.items() if is_wrong]
    if facts:
        raise ShapeError(
            ", and ".join(facts),
            rule="both are at least 1; buckets come in pairs, a direction and its opposite, or there is 1",
            hint="LSHAttention(…, chunk=64, rounds=2, buckets=32); buckets=None means about two per chunk",
        ).located(f"LSHAttention(chunk={chunk}, rounds={rounds}, buckets={buckets})")
