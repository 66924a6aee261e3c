"""Generation settings, and the completions that they produce."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from weft.core.errors import ModelError
from weft.core.field_types import NonNegative, NonNegativeInt, PositiveInt, Range
from weft.core.fields import Offender, documented, validate

MAX_END_TOKENS = 4  # per row, with the tokenizer's own


@documented
@dataclass(frozen=True)
class Beams:
    """Settings of a beam search."""

    size: PositiveInt = 4
    """The number of beams."""
    alpha: float = 0.6
    """The exponent of the length penalty: higher values prefer longer texts, 0 disables it. The paper of the
    Transformer has 0.6."""
    penalty: Literal["transformer", "plain"] = "transformer"
    """The divisor of scores: "transformer", ((5 + count) / 6)^alpha as in the Transformer's paper (Wu et al.
    2016), or "plain", count^alpha."""
    stop: Literal["certain", "likely", "first"] = "certain"
    """When a row is done. "certain": when no beam can still beat the finished sequences; "likely": when no
    beam would beat them if it ended now; "first": as soon as enough sequences have finished."""
    window: Annotated[int, Range(at_least=1, at_most=2)] = 2
    """An end counts if it is among the best `window * size` candidates of a step: 2 as in Mesh-TensorFlow,
    1 as in transformers."""

    def __post_init__(self) -> None:
        validate(self, ModelError, "help(weft.generate.Beams) describes each field")


@documented
@dataclass(frozen=True)
class GenerationConfig:
    """How to generate a completion."""

    limit: Annotated[int, Range(at_least=1, below=2**31)] | None = None
    """The maximum number of tokens to generate. The default for translations is 1.5 times the input's length
    plus 10, at most 256; for prompts 128, at most half of the context length."""
    temperature: NonNegative = 0.0
    """The sampling temperature, which divides the logits; 0 always takes the most likely token."""
    top_k: NonNegativeInt = 0
    """Sample from the K most likely tokens only; 0: from all tokens."""
    top_p: Annotated[float, Range(above=0, at_most=1)] = 1.0
    """Nucleus sampling: sample from the most likely tokens with total probability P; 1: from all tokens."""
    # A stronger penalty pushes logits out of float32.
    penalty: Annotated[float, Range(at_least=1e-3, at_most=1e3)] = 1.0
    """The repetition penalty: values above 1, such as 1.2, make tokens already in the text less likely."""
    beams: Beams | None = None
    """Run this beam search instead of sampling."""
    # NumPy's Philox takes these seeds exactly.
    seed: Annotated[int, Range(at_least=0, below=2**63)] = 0
    """The random seed. Samples depend on it and on the number of the text."""
    ends: tuple[int, ...] = ()
    """Tokens that end the completion, in addition to the tokenizer's own."""

    def __post_init__(self) -> None:
        hint = "omit a setting to use its default: GenerationConfig() takes the most likely tokens"
        validate(self, ModelError, hint, more=self._contradictions())

    def _contradictions(self) -> Iterator[Offender]:
        if len(self.ends) >= MAX_END_TOKENS:
            yield Offender(("ends",), self.ends, f"a tuple of at most {MAX_END_TOKENS - 1} tokens")


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
