"""Generation settings, and the completions that they produce."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.errors import ModelError

from .beam import Beams

MAX_END_TOKENS = 4  # per row, with the tokenizer's own
PENALTY_RANGE = (1e-3, 1e3)  # a stronger repetition penalty pushes logits out of float32
SEED_LIMIT = 2**63  # NumPy's Philox takes smaller seeds exactly


@dataclass(frozen=True)
class GenerationConfig:
    """How to generate a completion.

    Attributes:
      limit: the maximum number of tokens. None: 128 after a prompt, and at most half of the model's length;
        for a translation 1.5 times the tokens of the text plus 10, and at most 256.
      temperature, top_k, top_p, penalty: see `SamplingParams`.
      beams: run this beam search instead of sampling.
      seed: for sampling; the tokens drawn for a text depend on the seed and on the number of the text.
      ends: tokens that end the completion, in addition to the tokenizer's own.
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
        low, high = PENALTY_RANGE
        checks = {
            f"limit={self.limit}": (self.limit is None or self.limit >= 1, "limit is at least 1"),
            f"temperature={self.temperature}": (
                0 <= self.temperature < float("inf"),
                "temperature is at least 0 and finite; 0 takes the most likely token",
            ),
            f"top_k={self.top_k}": (self.top_k >= 0, "top_k is at least 0; 0 samples from all tokens"),
            f"top_p={self.top_p}": (
                0 < self.top_p <= 1,
                "top_p is above 0 and at most 1; 1 samples from all tokens",
            ),
            f"penalty={self.penalty}": (
                low <= self.penalty <= high,
                f"penalty is from {low:g} to {high:g}; 1 is no penalty",
            ),
            f"seed={self.seed}": (0 <= self.seed < SEED_LIMIT, "seed is from 0 to 2^63 - 1"),
            f"{len(self.ends)} ends": (
                len(self.ends) < MAX_END_TOKENS,
                f"there are at most {MAX_END_TOKENS - 1} ends",
            ),
            f"beams={self.beams}": (
                isinstance(self.beams, Beams | None),
                "beams is a Beams, such as Beams(4)",
            ),
        }
        wrong = {fact: rule for fact, (fits, rule) in checks.items() if not fits}
        if wrong:
            raise ModelError(
                f"invalid generation settings: {' and '.join(wrong)}",
                rule="\n  ".join(wrong.values()),
                hint="omit a setting to use its default: GenerationConfig() takes the most likely tokens",
            ).located("GenerationConfig")


@dataclass(frozen=True)
class Completion:
    """The text generated for one prompt, or the translation of one text.

    Attributes:
      text: the decoded tokens, without the end token.
      tokens: the token ids, with the end token if it was generated.
      score: the log-probability of the tokens; for a beam search, divided by its length penalty.
      logprobs: the log-probability of each token; for a beam search, only their sum.
      ended: True if an end token was generated, False if the limit was reached.
      cut: True if the input was longer than the model can read and was truncated: a text at its end, a prompt
        at its beginning.
      others: further results of a beam search, best first.
    """

    text: str
    tokens: tuple[int, ...]
    score: float
    logprobs: tuple[float, ...]
    ended: bool
    cut: bool = False
    others: tuple[Completion, ...] = ()


EMPTY_COMPLETION = Completion("", (), 0.0, (), True)
