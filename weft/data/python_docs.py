"""Python's own documentation: several hundred thousand characters of English that need no download.

These are the topics of `help()`, which every Python includes, in alphabetical order. The texts differ
slightly between Python versions.

    PythonDocs()                    for training
    PythonDocs(split="valid")       for evaluation
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
VALID_ONE_IN = 6  # one in this many of the topics that may be held out


@dataclass(frozen=True)
class PythonDocs(Sequence[str]):
    """The topics of one split.

    Some topics are contained in others. Only a topic that shares no paragraph with any other may be held out,
    so the validation split has no text in common with the training split. A hash of the topic's name decides.

    Attributes:
      split: "train" or "valid".

    >>> PythonDocs()[0].splitlines()[0]
    'The "assert" statement'
    """

    split: str = "train"

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise DataError(
                f"unknown split {self.split!r}{nearest(self.split, SPLITS)}",
                rule=f"the splits are {' and '.join(SPLITS)}",
                hint='PythonDocs() for training, PythonDocs(split="valid") for evaluation',
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
    documents: dict[str, list[str]] = {split: [] for split in SPLITS}
    for name, text in sorted(topics.items()):
        digest = hashlib.sha256(name.encode()).digest()
        unshared = all(count[part] == 1 for part in paragraphs(text))
        held_out = unshared and int.from_bytes(digest[:8], "big") % VALID_ONE_IN == 0
        documents["valid" if held_out else "train"].append(text)
    return documents


def paragraphs(text: str) -> set[str]:
    """The paragraphs of a text, without those of 40 characters or fewer."""
    return {part.strip() for part in text.split("\n\n") if len(part.strip()) > 40}
