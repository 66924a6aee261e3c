"""Beam search: find likely sequences by keeping the best candidates of each step.

    result = beam_search(models, prefill(models, batch, settings, max_length), Beams(4))

At each step every beam is extended by every token. With K beams, the K best unfinished candidates are the
next beams. Candidates that finish count if they are among the 2K best, as in Mesh-TensorFlow (`window`); the
K of them with the best length-penalized scores are kept. All beams of a row share its cache: see `cache`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

import weft as wf
from weft.core.tensor import Tensor
from weft.models import Transformer

from .cache import KVCache, unstack_layers
from .config import Beams
from .decode_loop import DecodeState, ensemble_logits

IMPOSSIBLE = -1e9  # the score of an unused slot; finite, so that differences are not NaN

# The divisor of a sequence's log-probability, from its number of tokens and alpha.
LENGTH_PENALTIES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "transformer": lambda count, alpha: ((5.0 + count) / 6.0) ** alpha,
    "plain": lambda count, alpha: count**alpha,
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BeamResult:
    """Sequences, best first, over `batch` and `beam`.

    Attributes:
      generated: the tokens, also over `generated`, with the end token.
      count: the number of tokens; 0 where fewer sequences were found than there are beams.
      score: the log-probability divided by the length penalty; sequences are sorted by it.
      logprob: the log-probability.
    """

    generated: Tensor
    count: Tensor
    score: Tensor
    logprob: Tensor


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _SearchState:
    """The unfinished beams, and the finished sequences."""

    step: Tensor
    caches: tuple[KVCache, ...]
    token: Tensor
    generated: Tensor
    logprob: Tensor
    finished: BeamResult
    done: Tensor


def beam_search(models: Sequence[Transformer], state: DecodeState, beams: Beams) -> BeamResult:
    """The best sequences of each row.

    Args:
      models: the models given to `prefill`.
      state: the state after `prefill`; its sampling settings are ignored.
      beams: the settings of the search.
    """
    models = [unstack_layers(model) for model in models]
    settings, vocab = state.settings, models[0].embedding.vocab
    (batch,) = state.token.dims
    (generated_dim,) = (d for d in state.generated.dims if d.name == "generated")
    (ends_dim,) = (d for d in settings.ends.dims if d.name == "ends")
    beam = wf.Dim("beam", beams.size)
    limit = settings.limit

    def penalty(count: Tensor) -> Tensor:
        return LENGTH_PENALTIES[beams.penalty](count.astype(jnp.float32), beams.alpha)

    def unfinished(s: _SearchState) -> Tensor:
        return ~wf.all(s.done)

    def step(s: _SearchState) -> _SearchState:
        logits, normalizer, caches = ensemble_logits(models, s.caches, s.token, state.position + s.step)
        best = _best_candidates(logits, normalizer, s.logprob, beam, vocab, ends_dim.size)
        (candidate,) = (d for d in best.logprob.dims if d != batch)
        count = s.step + 1
        generated = wf.where(
            wf.arange(generated_dim) == s.step, best.token, wf.take(s.generated, best.beam, beam)
        )
        ends = wf.any(best.token == settings.ends, "ends") | (count >= limit)

        # The next beams: the K best candidates that don't end.
        logprob, chosen = wf.top_k(
            wf.where(ends, IMPOSSIBLE, best.logprob), candidate, wf.Dim("next", beams.size)
        )

        def select(t: Tensor) -> Tensor:
            return wf.take(t, chosen, candidate).rename(next="beam")

        parent = select(best.beam).rename(beam="next")
        caches = tuple(cache.select_beams(parent) for cache in caches)

        # The finished sequences, old and new. Of 2K candidates, K may finish while K go on, so a likely end
        # is not lost to K more likely continuations.
        in_window = wf.arange(candidate) < beams.window * beams.size
        counted = ends & in_window & (best.logprob > IMPOSSIBLE / 2) & ~s.done
        ended = BeamResult(
            generated,
            wf.where(counted, count, 0),
            wf.where(counted, best.logprob / penalty(count), IMPOSSIBLE),
            best.logprob,
        )
        finished = _merge(s.finished, ended, beam)

        # The best score that an unfinished beam can still reach. Log-probabilities only fall, so with a
        # positive alpha the bound is the present one at the largest length.
        longest = limit if beams.stop == "certain" and beams.alpha > 0 else count
        bound = logprob["next", 0] / penalty(wf.maximum(longest, 1))
        full = wf.all(finished.count > 0, beam)
        over = full & (bound <= wf.min(finished.score, beam)) if beams.stop != "first" else full
        return _SearchState(
            count,
            caches,
            select(best.token),
            select(generated),
            logprob.rename(next="beam"),
            finished,
            s.done | over | (count >= limit),
        )

    zeros = wf.zeros([batch, beam], jnp.int32)
    no_tokens = wf.zeros([batch, beam, generated_dim], jnp.int32)
    # All beams start equal. Only the first is possible, or the first step would find its candidates K times.
    first = wf.where(wf.arange(beam) == 0, 0.0, IMPOSSIBLE)
    start = _SearchState(
        wf.zeros((), jnp.int32),
        tuple(cache.expand_to_beams(beam) for cache in state.caches),
        wf.broadcast_to(state.token, [batch, beam]),
        no_tokens,
        wf.broadcast_to(first, [batch, beam]),
        BeamResult(no_tokens, zeros, zeros + IMPOSSIBLE, zeros + IMPOSSIBLE),
        state.done,
    )
    return wf.while_loop(unfinished, step, start).finished


@dataclass(frozen=True)
class _Candidates:
    """The best continuations of a row, over `batch` and `candidate`: beam, token and log-probability."""

    beam: Tensor
    token: Tensor
    logprob: Tensor


def _best_candidates(
    logits: Tensor, normalizer: Tensor, logprob: Tensor, beam: wf.Dim, vocab: wf.Dim, ends: int
) -> _Candidates:
    """The best continuations of all K beams, enough for the 2K that may finish and the K that go on.

    Each beam contributes up to 2K, since the best 2K may all continue the same beam (in the first step they
    do). Enough are kept that K go on even if every beam has each of its ends among the best.

    Args:
      logits, normalizer: those of all tokens, see `ensemble_logits`.
      logprob: the log-probability of each beam so far.
      beam, vocab: the dims.
      ends: the number of end tokens of a row.
    """
    per_beam = wf.Dim("per_beam", min(beam.size + max(beam.size, ends), vocab.size))
    # First within each beam, so that a split vocabulary exchanges only these candidates.
    values, token = wf.top_k(logits, vocab, per_beam)
    values = logprob + (values - normalizer)
    every = wf.Dim("every", beam.size * per_beam.size)
    candidate = wf.Dim("candidate", min(beam.size * (1 + max(1, ends)), every.size))
    best, index = wf.top_k(wf.merge(values, [beam, per_beam], every), every, candidate)
    tokens = wf.take(wf.merge(token, [beam, per_beam], every), index, every)
    return _Candidates(index // per_beam.size, tokens, best)


def _merge(old: BeamResult, new: BeamResult, beam: wf.Dim) -> BeamResult:
    """The best sequences of both."""

    def both(a: Tensor, b: Tensor) -> Tensor:
        return wf.concat([a.rename(beam="every"), b.rename(candidate="every")], "every")

    every = jax.tree.map(both, old, new, is_leaf=wf.is_tensor)
    _, chosen = wf.top_k(every.score, "every", wf.Dim("next", beam.size))
    return jax.tree.map(
        lambda t: wf.take(t, chosen, "every").rename(next="beam"), every, is_leaf=wf.is_tensor
    )
