"""How a text is to be said, and what was said."""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import ModelError

from .beam import Beams

ENDS = 4  # how many tokens may end a row


@dataclass(frozen=True)
class Ask:
    """How a text is to be said.

    Attributes:
      limit: how many tokens at most; None: 128 after a prompt; for a translation 10 more than one and a half
        times those of the text, and no more than 256.
      temperature, top_k, top_p, penalty: see `Choice`.
      beams: a beam search, in place of all these.
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
        wrong = {
            f"limit={self.limit}": self.limit is not None and self.limit < 1,
            f"temperature={self.temperature}": not 0 <= self.temperature < float("inf"),
            f"top_k={self.top_k}": self.top_k < 0,
            f"top_p={self.top_p}": not 0 < self.top_p <= 1,
            f"penalty={self.penalty}": not 0 < self.penalty < float("inf"),
            f"{len(self.ends)} ends": len(self.ends) >= ENDS,
        }
        facts = [fact for fact, is_wrong in wrong.items() if is_wrong]
        if facts:
            raise ModelError(
                f"texts are to be said with {' and '.join(facts)}",
                rule=f"at least one token; a temperature and top_k from 0 on; top_p above 0 and up to 1; a "
                f"penalty above 0; at most {ENDS - 1} ends",
                hint="temperature=0 takes the likeliest token; top_k=0, top_p=1 and penalty=1 change nothing",
            ).located("Ask")


@dataclass(frozen=True)
class Said:
    """What was said.

    Attributes:
      text: as the tokenizer reads the tokens, without the end.
      tokens: with the end, if it was said.
      score: the logarithm of their probability; of a beam search, divided by its penalty.
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
    others: tuple[Said, ...] = ()


NOTHING = Said("", (), 0.0, (), True)
