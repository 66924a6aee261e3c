"""Python's own documentation: some hundred thousand characters of English that need no download.

They are the topics of `help()`, which come with every Python, in alphabetical order. Another version of
Python has slightly other texts.

    PythonDocs()                    to train on
    PythonDocs(split="valid")       to evaluate with
"""

from __future__ import annotations

import collections
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from weft.core.errors import DataError, nearest

SPLITS = ("train", "valid")
VALID_ONE_IN = 6  # of the topics that may be held out, one in so many is


@dataclass(frozen=True)
class PythonDocs(Sequence[str]):
    """The topics of one split, by number.

    Some topics are parts of others. Only a topic that shares no paragraph with any other may be held out, so
    nothing that is evaluated was ever trained on. Which of those are is told by a hash of their names.

    Attributes:
      split: "train" or "valid".

    >>> PythonDocs()[0].splitlines()[0]
    'The "assert" statement'
    """

    split: str = "train"

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise DataError(
                f"there is no split {self.split!r}{nearest(self.split, SPLITS)}",
                rule=f"the splits are {' and '.join(SPLITS)}",
                hint='PythonDocs() to train on, PythonDocs(split="valid") to evaluate with',
            ).located(repr(self))

    def __len__(self) -> int:
        return len(_documents()[self.split])

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        return _documents()[self.split][number]


@functools.cache
def _documents() -> dict[str, list[str]]:
    from pydoc_data.topics import topics

    count = collections.Counter(part for text in topics.values() for part in paragraphs(text))
    found: dict[str, list[str]] = {split: [] for split in SPLITS}
    for name, text in sorted(topics.items()):
        digest = hashlib.sha256(name.encode()).digest()
        own = all(count[part] == 1 for part in paragraphs(text))
        held_out = own and int.from_bytes(digest[:8], "big") % VALID_ONE_IN == 0
        found["valid" if held_out else "train"].append(text)
    return found


def paragraphs(text: str) -> set[str]:
    """The paragraphs of a text; single short lines are none."""
    return {part.strip() for part in text.split("\n\n") if len(part.strip()) > 40}
