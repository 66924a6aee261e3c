"""From texts to one long array of tokens: each text, its end, the next text, its end.

It is made once, and needs two bytes a token (four if the vocabulary is larger than 65,536). What takes long
to tokenize may be kept in a file:

    np.save("train.npy", tokenize(PlainText("train.txt").open(), tokenizer))
    Windows(np.load("train.npy", mmap_mode="r"), tokenizer, rows=16, length=128)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from weft.core.errors import DataError

from .tokenizers import Tokenizer, check_ids, encode_all

TEXTS_PER_CALL = 1 << 12  # so many are tokenized at once


def tokenize(texts: Iterable[str], tokenizer: Tokenizer) -> np.ndarray:
    """All texts as one array of tokens, each with its end.

    >>> from weft.data import Bytes
    >>> tokenize(["abc", "de"], Bytes())
    array([100, 101, 102,   1, 103, 104,   1], dtype=uint16)
    """
    type = np.uint16 if tokenizer.vocab <= 1 << 16 else np.int32
    parts = [np.zeros(0, type)]
    for some in _some(iter(texts)):
        wrong = next((text for text in some if not isinstance(text, str)), None)
        if wrong is not None:
            raise DataError(
                f"an example is {str(wrong)[:60]!r}, a {wrong.__class__.__name__}",
                rule="a corpus is one of texts, for models with one stack",
                hint="Stream makes batches of pairs; texts(examples) gives both texts of each pair",
            )
        ids = check_ids(encode_all(some, tokenizer), tokenizer)
        parts.append(ids.astype(type, copy=False))
    return np.concatenate(parts)


def _some(texts: Iterator[str]) -> Iterator[list[str]]:
    while some := list(itertools.islice(texts, TEXTS_PER_CALL)):
        yield some
