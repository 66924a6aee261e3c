"""How a text is to be generated, and what was generated."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.errors import ModelError

from .beam import Beams

MAX_END_TOKENS = 4  # how many tokens may end a row
PENALTY_RANGE = (1e-3, 1e3)  # the least and the greatest: beyond them logits leave float32
SEED_LIMIT = 2**63  # as many as NumPy's Philox takes without loss


@dataclass(frozen=True)
class GenerationConfig:
    """How a text is to be generated.

    Attributes:
      limit: how many tokens at most; None: 128 after a prompt, and no more than half of what is read; for a
        translation 10 more than one and a half times those of the text, and no more than 256.
      temperature, top_k, top_p, penalty: see `SamplingParams`.
      beams: a beam search, instead of all these.
      seed: what is drawn depends on it, and on the number of the text.
      ends: tokens that end it, beside the tokenizer's own.
    """

    limit: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    penalty: float = 1.0
    beams: Beams | None = None
    seed: int = 0
    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        least, most = PENALTY_RANGE
        checks = {
            f"limit={self.limit}": (self.limit is None or self.limit >= 1, "at least one token is said"),
            f"temperature={self.temperature}": (
                0 <= self.temperature < float("inf"),
                "a temperature is from 0 on; 0 takes the likeliest token",
            ),
            f"top_k={self.top_k}": (self.top_k >= 0, "top_k is from 0 on; 0 draws from all tokens"),
            f"top_p={self.top_p}": (
                0 < self.top_p <= 1,
                "top_p is above 0 and up to 1, which draws from all",
            ),
            f"penalty={self.penalty}": (
                least <= self.penalty <= most,
                f"a penalty is from {least:g} to {most:g}; 1 is none",
            ),
            f"seed={self.seed}": (0 <= self.seed < SEED_LIMIT, "a seed is from 0 to 2^63 - 1"),
            f"{len(self.ends)} ends": (
                len(self.ends) < MAX_END_TOKENS,
                f"there are at most {MAX_END_TOKENS - 1} ends",
            ),
            f"beams={self.beams}": (
                isinstance(self.beams, Beams | None),
                "beams are Beams, such as Beams(4)",
            ),
        }
        wrong = {fact: rule for fact, (fits, rule) in checks.items() if not fits}
        if wrong:
            raise ModelError(
                f"texts are to be said with {' and '.join(wrong)}",
                rule="\n  ".join(wrong.values()),
                hint="what is left out is as usual: Ask() takes the likeliest tokens",
            ).located("Ask")


@dataclass(frozen=True)
class Completion:
    """What was generated.

    Attributes:
      text: as the tokenizer reads the tokens, without the end.
      tokens: with the end, if it was generated.
      score: the logarithm of their probability; for a beam search, divided by its penalty.
      logs: the logarithm of each token's probability; a search gives their sum alone.
      ended: whether it ended by itself, and not because it was long enough.
      cut: whether the text was longer than the model can read: its end (of a prompt, its beginning) was lost.
      others: further results of a beam search, best first.
    """

    text: str
    tokens: tuple[int, ...]
    score: float
    logs: tuple[float, ...]
    ended: bool
    cut: bool = False
    others: tuple[Completion, ...] = ()


EMPTY_COMPLETION = Completion("", (), 0.0, (), True)
