"""Beam search: the likeliest whole sequences that can be found with so many beginnings kept at each step.

    found = search(models, begin(models, batch, rows, room), Beams(4))

At each step every beam is extended by every token. With K beams, the K best unfinished candidates are the
next beams. Candidates that finish count if they are among the 2K best, as in Mesh-TensorFlow (`window`); the
K of them with the best penalised scores are kept. All beams of a row share its cache: see `cache`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import weft as wf
from weft.core.errors import ShapeError, nearest
from weft.core.tensor import Tensor

from .cache import KVCache, unstack_layers
from .decode_loop import DecodeState, ensemble_logits

IMPOSSIBLE = -1e9  # the score of what is not there

# By what the logarithm of a sequence's probability is divided, from how many tokens it has and alpha.
LENGTH_PENALTIES: dict[str, Callable[[Any, float], Any]] = {
    "transformer": lambda count, alpha: ((5.0 + count) / 6.0) ** alpha,
    "plain": lambda count, alpha: count**alpha,
}
STOPS = ("certain", "likely", "first")


@dataclass(frozen=True)
class Beams:
    """How a search is done.

    Attributes:
      size: how many beams there are.
      alpha: how much longer sequences are preferred; 0: not at all.
      penalty: what scores are divided by: "transformer", ((5 + count) / 6)^alpha as in the Transformer's
        paper (Wu et al. 2016), or "plain", count^alpha.
      stop: when a row is done. "certain": when no beam can still become better than those that ended;
        "likely": the same, as if they ended at once; "first": as soon as there are enough that ended.
      window: an end counts if it is among the best `window * size` candidates of a step: 2 as in
        Mesh-TensorFlow, 1 as in transformers.
    """

    size: int = 4
    alpha: float = 0.6
    penalty: str = "transformer"
    stop: str = "certain"
    window: int = 2

    def __post_init__(self) -> None:
        asked = f"Beams(size={self.size}, alpha={self.alpha}, penalty={self.penalty!r}, stop={self.stop!r})"
        if self.size < 1:
            raise ShapeError(
                f"a search with {self.size} beams", rule="it keeps at least one", hint="4 is usual"
            ).located(asked)
        if self.window not in (1, 2):
            raise ShapeError(
                f"a search whose ends are among the best {self.window} * {self.size} candidates",
                rule="window is 1 or 2",
                hint="2 is as in Mesh-TensorFlow, 1 as in transformers",
            ).located(asked)
        if not math.isfinite(self.alpha):
            raise ShapeError(
                f"a search whose scores are divided by a length to the power of {self.alpha}",
                rule="alpha is a number",
                hint="0.6 is as in the Transformer's paper; 0 leaves the length out",
            ).located(asked)
        for name, known in ((self.penalty, tuple(LENGTH_PENALTIES)), (self.stop, STOPS)):
            if name not in known:
                raise ShapeError(
                    f"no such way of beam search: {name}{nearest(name, known)}",
                    rule=f"it is one of {', '.join(known)}",
                    hint=f"{known[0]} is as in the Transformer's paper",
                ).located(asked)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BeamResult:
    """Sequences, best first, over `batch` and `beam`.

    Attributes:
      said: the tokens, over `said` too, with the one that ended them.
      count: how many there are; 0 where fewer sequences were found than there are beams.
      score: by what they are sorted.
      log: the logarithm of the probability.
    """

    said: Tensor
    count: Tensor
    score: Tensor
    log: Tensor


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Search:
    """A search on its way: the beams that go on, and what was found."""

    step: Tensor
    kept: tuple[KVCache, ...]
    token: Tensor
    said: Tensor
    log: Tensor
    found: BeamResult
    done: Tensor


def beam_search(models: Sequence[Any], state: DecodeState, how: Beams) -> BeamResult:
    """The best sequences of each row.

    Args:
      models: those of `begin`.
      state: the prompts, from `begin`; how its rows choose tokens does not matter.
      how: the search.
    """
    models = [unstack_layers(model) for model in models]
    rows, vocab = state.rows, models[0].embedding.vocab
    (batch,) = state.token.dims
    (said,) = (d for d in state.said.dims if d.name == "said")
    (ends_dim,) = (d for d in rows.ends.dims if d.name == "ends")
    beam = wf.Dim("beam", how.size)
    limit = rows.limit

    def penalty(count: Any) -> Any:
        return LENGTH_PENALTIES[how.penalty](count, how.alpha)

    def going(s: _Search) -> Tensor:
        return ~wf.all(s.done)

    def one(s: _Search) -> _Search:
        logits, level, kept = ensemble_logits(models, s.kept, s.token, state.place + s.step)
        best = _best(logits, level, s.log, beam, vocab, ends_dim.size)
        (pick,) = (d for d in best.log.dims if d != batch)
        now = s.step + 1
        said_now = wf.where(wf.arange(said) == s.step, best.token, wf.take(s.said, best.beam, beam))
        ends = wf.any(best.token == rows.ends, "ends") | (now >= limit)

        # Those that go on.
        log, chosen = wf.top_k(wf.where(ends, IMPOSSIBLE, best.log), pick, wf.Dim("next", how.size))

        def follow(t: Tensor) -> Tensor:
            return wf.take(t, chosen, pick).rename(next="beam")

        parent = follow(best.beam).rename(beam="next")
        kept = tuple(own.follow(parent) for own in kept)

        # Those that have ended, with those that had before. Of 2K candidates, K may finish while K go on, so
        # a likely end is not lost to K likelier continuations.
        counted = ends & (wf.arange(pick) < how.window * how.size) & (best.log > IMPOSSIBLE / 2) & ~s.done
        ended = BeamResult(
            said_now,
            wf.where(counted, now, 0),
            wf.where(counted, best.log / penalty(now.astype(jnp.float32)), IMPOSSIBLE),
            best.log,
        )
        found = _merge(s.found, ended, beam)

        # Whether one that goes on could still be among the best.
        longest = limit if how.stop == "certain" and how.alpha > 0 else now
        hope = log["next", 0] / penalty(wf.maximum(longest, 1).astype(jnp.float32))
        full = wf.all(found.count > 0, beam)
        over = full & (hope <= wf.min(found.score, beam)) if how.stop != "first" else full
        return _Search(
            now,
            kept,
            follow(best.token),
            follow(said_now),
            log.rename(next="beam"),
            found,
            s.done | over | (now >= limit),
        )

    none = wf.zeros([batch, beam], jnp.int32)
    start = _Search(
        wf.zeros((), jnp.int32),
        tuple(own.spread(beam) for own in state.kept),
        wf.broadcast_to(state.token, [batch, beam]),
        wf.zeros([batch, beam, said], jnp.int32),
        wf.broadcast_to(wf.where(wf.arange(beam) == 0, 0.0, IMPOSSIBLE), [batch, beam]),
        BeamResult(wf.zeros([batch, beam, said], jnp.int32), none, none + IMPOSSIBLE, none + IMPOSSIBLE),
        state.done,
    )
    return wf.while_loop(going, one, start).found


@dataclass(frozen=True)
class _Best:
    """The best continuations of a row's beams, over `batch` and `pick`: which beam, token, how likely."""

    beam: Tensor
    token: Tensor
    log: Tensor


def _best(logits: Tensor, level: Tensor, log: Tensor, beam: wf.Dim, vocab: wf.Dim, ends: int) -> _Best:
    """The best continuations of all K beams, enough for the 2K that may finish and the K that go on.

    Each beam contributes up to 2K, since the best 2K may all continue the same beam (in the first step they
    do). K go on even if all beams have each of their ends among the best.

    Args:
      logits, level: what the models think of all tokens, see `together`.
      log: how likely each beam is so far.
      beam, vocab: the dims.
      ends: how many tokens may end a row.
    """
    few = wf.Dim("few", min(beam.size + max(beam.size, ends), vocab.size))
    some, token = wf.top_k(logits, vocab, few)  # of each beam by itself: what is split stays where it is
    some = log + (some - level)
    every = wf.Dim("every", beam.size * few.size)
    pick = wf.Dim("pick", min(beam.size * (1 + max(1, ends)), every.size))
    best, place = wf.top_k(wf.merge(some, [beam, few], every), every, pick)
    return _Best(place // few.size, wf.take(wf.merge(token, [beam, few], every), place, every), best)


def _merge(old: BeamResult, new: BeamResult, beam: wf.Dim) -> BeamResult:
    """The best of both."""

    def both(a: Tensor, b: Tensor) -> Tensor:
        return wf.concat([a.rename(beam="every"), b.rename(pick="every")], "every")

    every = jax.tree.map(both, old, new, is_leaf=wf.is_tensor)
    _, chosen = wf.top_k(every.score, "every", wf.Dim("next", beam.size))
    return jax.tree.map(
        lambda t: wf.take(t, chosen, "every").rename(next="beam"), every, is_leaf=wf.is_tensor
    )
