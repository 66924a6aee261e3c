"""How good translations are: exact matches, BLEU and chrF, by sacreBLEU, with its signatures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.core.errors import DataError


@dataclass(frozen=True)
class CorpusScores:
    """What was found.

    Attributes:
      exact: the share of translations that are one of their references, letter for letter.
      bleu, chrf: corpus scores, from 0 to 100.
      signatures: what sacreBLEU calls the two ways of scoring.
    """

    exact: float
    bleu: float
    chrf: float
    signatures: tuple[str, str]

    def __str__(self) -> str:
        return f"exact {self.exact:.1%}, BLEU {self.bleu:.2f}, chrF {self.chrf:.2f}"


def corpus_scores(said: Sequence[str], references: Sequence[Sequence[str]]) -> CorpusScores:
    """Score translations.

    Args:
      said: the translations.
      references: for each, one right translation or more.

    >>> quality(["le chat dort ici"], [["le chat dort ici", "le chat dort là"]]).bleu
    100.0
    """
    lists = [one for one in references if one and not isinstance(one, str)]
    if not said or not len(said) == len(references) == len(lists):
        raise DataError(
            f"{len(said)} translations are compared with {len(lists)} lists of references"
            + (f", and {n} that are none" if (n := len(references) - len(lists)) else ""),
            rule="there is at least one translation, and for each a list of one reference or more",
            hint="quality([text], [[reference, other reference]])",
        ).located("quality")
    from sacrebleu.metrics import BLEU, CHRF

    most = max(map(len, references))
    # sacreBLEU wants as many lists as there are references; None stands for one that is not there.
    streams: Any = [[one[n] if n < len(one) else None for one in references] for n in range(most)]
    bleu, chrf = BLEU(), CHRF()
    scores = [metric.corpus_score(list(said), streams) for metric in (bleu, chrf)]
    exact = sum(text in right for text, right in zip(said, references, strict=True)) / len(said)
    return CorpusScores(
        exact,
        round(scores[0].score, 4),
        round(scores[1].score, 4),
        (str(bleu.get_signature()), str(chrf.get_signature())),
    )
