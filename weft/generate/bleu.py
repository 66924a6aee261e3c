"""Corpus scores of translations: exact matches, and sacreBLEU's BLEU and chrF with their signatures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.core.errors import DataError
from weft.core.extras import from_extra


@dataclass(frozen=True)
class CorpusScores:
    """Scores of a set of translations.

    Attributes:
      exact: the fraction of translations that equal one of their references.
      bleu, chrf: corpus scores, from 0 to 100.
      signatures: sacreBLEU's signatures of BLEU and chrF.
    """

    exact: float
    bleu: float
    chrf: float
    signatures: tuple[str, str]

    def __str__(self) -> str:
        return f"exact {self.exact:.1%}, BLEU {self.bleu:.2f}, chrF {self.chrf:.2f}"


def corpus_scores(translations: Sequence[str], references: Sequence[Sequence[str]]) -> CorpusScores:
    """Score translations.

    Args:
      translations: the translations.
      references: for each, one or more correct translations.

    >>> corpus_scores(["le chat dort ici"], [["le chat dort ici", "le chat dort là"]]).bleu
    100.0
    """
    lists = [each for each in references if each and not isinstance(each, str)]
    if not translations or not len(translations) == len(references) == len(lists):
        raise DataError(
            f"{len(translations)} translations are compared with {len(lists)} lists of references"
            + (f" and {n} other values" if (n := len(references) - len(lists)) else ""),
            rule="there is at least one translation, and each has a list of one or more references",
            hint="corpus_scores([text], [[reference, other reference]])",
        ).located("corpus_scores")
    with from_extra("train"):
        from sacrebleu.metrics import BLEU, CHRF

    most = max(map(len, references))
    # sacreBLEU takes one list per reference number, with None where a translation has fewer. Its annotation
    # allows no None.
    streams: Any = [[each[n] if n < len(each) else None for each in references] for n in range(most)]
    bleu, chrf = BLEU(), CHRF()
    scores = [metric.corpus_score(list(translations), streams) for metric in (bleu, chrf)]
    matches = (text in each for text, each in zip(translations, references, strict=True))
    exact = sum(matches) / len(translations)
    return CorpusScores(
        exact,
        round(scores[0].score, 4),
        round(scores[1].score, 4),
        (str(bleu.get_signature()), str(chrf.get_signature())),
    )
