"""English phrases with numbers, dates, times and prices, and their French translations.

A small translation task that needs no download. Phrase number n is a function of the seed and n. Some values
are held out, chosen by a hash of the value, so a held-out value never appears in the training phrases, for
any seed and any number of phrases.

    Phrases(100_000, seed=1)                        for training
    Phrases(1_000, seed=2, held_out=True)           for testing
"""

from __future__ import annotations

import datetime
import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np

from weft.core.errors import DataError
from weft.core.extras import from_extra

from .sources import Pair

HELD_OUT_PERCENT = 10  # of the values of each kind


class PhraseKind(NamedTuple):
    """How to draw a value, how to write it in English and French, and the sentence templates around it."""

    draw: Callable[[np.random.Generator], Any]
    write: Callable[[Any], tuple[str, str]]
    templates: tuple[tuple[str, str], ...]


def _draw_number(rng: np.random.Generator) -> int:
    return int(rng.integers(10 ** int(rng.integers(1, 7))))


def _draw_date(rng: np.random.Generator) -> datetime.date:
    return datetime.date(1900, 1, 1) + datetime.timedelta(int(rng.integers(73_000)))


def _draw_time(rng: np.random.Generator) -> datetime.time:
    return datetime.time(int(rng.integers(24)), int(rng.integers(60)))


def _draw_price(rng: np.random.Generator) -> tuple[str, int]:
    """A currency, and an amount in hundredths of it."""
    currency = str(rng.choice(["EUR", "USD", "GBP"]))
    return currency, int(rng.integers(1, 100 * 10 ** int(rng.integers(1, 5))))


def _write_number(number: int) -> tuple[str, str]:
    with from_extra("train"):
        from num2words import num2words

    return num2words(number, lang="en"), num2words(number, lang="fr")


def _write_date(date: datetime.date) -> tuple[str, str]:
    with from_extra("train"):
        from babel.dates import format_date

    english, french = (format_date(date, "full", locale=locale) for locale in ("en_US", "fr_FR"))
    return english, french.replace(" 1 ", " 1er ")


def _write_time(time: datetime.time) -> tuple[str, str]:
    with from_extra("train"):
        from babel.dates import format_time

    english = format_time(time, "h:mm a", locale="en_US")
    return english, format_time(time, "H 'h' mm", locale="fr_FR")


def _write_price(price: tuple[str, int]) -> tuple[str, str]:
    from decimal import Decimal

    with from_extra("train"):
        from babel.numbers import format_currency

    currency, hundredths = price
    amount = Decimal(hundredths) / 100
    english, french = (format_currency(amount, currency, locale=locale) for locale in ("en_US", "fr_FR"))
    return english, french


PHRASE_KINDS = {
    "number": PhraseKind(
        _draw_number,
        _write_number,
        (
            ("{}", "{}"),
            ("the number {}", "le nombre {}"),
            ("Count to {}.", "Comptez jusqu'à {}."),
            ("The answer is {}.", "La réponse est {}."),
        ),
    ),
    "date": PhraseKind(
        _draw_date,
        _write_date,
        (
            ("{}", "{}"),
            ("We met on {}.", "Nous nous sommes rencontrés le {}."),
            ("The letter is dated {}.", "La lettre est datée du {}."),
        ),
    ),
    "time": PhraseKind(
        _draw_time,
        _write_time,
        (
            ("at {}", "à {}"),
            ("The train leaves at {}.", "Le train part à {}."),
            ("It is {}.", "Il est {}."),
        ),
    ),
    "price": PhraseKind(
        _draw_price,
        _write_price,
        (
            ("It costs {}.", "Cela coûte {}."),
            ("The ticket is {}.", "Le billet est à {}."),
            ("We paid {} for it.", "Nous l'avons payé {}."),
        ),
    ),
}


class Phrase(NamedTuple):
    """A kind, a value of that kind, and the index of the template around it."""

    kind: str
    value: Any
    template: int

    @property
    def held_out(self) -> bool:
        """Whether the value is excluded from the training phrases."""
        digest = hashlib.sha256(f"{self.kind} {self.value}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT

    def pair(self) -> Pair:
        """The phrase in both languages, with ordinary spaces."""
        kind = PHRASE_KINDS[self.kind]
        both = zip(kind.templates[self.template], kind.write(self.value), strict=True)
        english, french = (template.format(_plain_spaces(text)) for template, text in both)
        return Pair(english, french)


def _plain_spaces(text: str) -> str:
    return text.replace("\u202f", " ").replace("\u00a0", " ")


@dataclass(frozen=True)
class Phrases(Sequence[Pair]):
    """A sequence of English phrases with their French translations.

    Attributes:
      size: the number of phrases.
      seed: the random seed.
      held_out: use only held-out values; by default, only the other values.
      kinds: any of "number", "date", "time" and "price".

    >>> Phrases(3, kinds=("number",))[0] == Phrases(5, kinds=("number",))[0]
    True
    """

    size: int
    seed: int = 0
    held_out: bool = False
    kinds: tuple[str, ...] = tuple(PHRASE_KINDS)

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in PHRASE_KINDS]
        if unknown or not self.kinds or self.size < 1:
            raise DataError(
                f"{self.size} phrases of kinds {self.kinds}",
                rule=f"at least one phrase, of the kinds {', '.join(PHRASE_KINDS)}",
                hint='for example Phrases(1_000, kinds=("number", "date"))',
            ).located(repr(self))

    def __len__(self) -> int:
        return self.size

    def phrase(self, number: int) -> Phrase:
        """The kind, value and template of phrase number n."""
        rng = np.random.default_rng([self.seed, number])
        while True:  # rejection sampling: redraw until the value belongs to this split
            name = self.kinds[int(rng.integers(len(self.kinds)))]
            kind = PHRASE_KINDS[name]
            phrase = Phrase(name, kind.draw(rng), int(rng.integers(len(kind.templates))))
            if phrase.held_out == self.held_out:
                return phrase

    @overload
    def __getitem__(self, number: int) -> Pair: ...
    @overload
    def __getitem__(self, number: slice) -> list[Pair]: ...
    def __getitem__(self, number: int | slice) -> Pair | list[Pair]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        return _cached_pair(self.phrase(number % len(self)))


@functools.lru_cache(maxsize=1 << 16)
def _cached_pair(phrase: Phrase) -> Pair:
    return phrase.pair()
