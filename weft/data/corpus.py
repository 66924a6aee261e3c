"""From texts to one long array of tokens: each text is followed by the end-of-text token.

The array takes two bytes per token (four if the vocabulary is larger than 65,536). If tokenizing takes long,
store it in a file:

    np.save("train.npy", tokenize(PlainText("train.txt").open(), tokenizer))
    TokenWindows(np.load("train.npy", mmap_mode="r"), tokenizer, rows=16, length=128)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from weft.core.errors import DataError

from .tokenizers import Tokenizer, check_ids, encode_all

TEXTS_PER_CALL = 1 << 12  # tokenized at a time


def tokenize(texts: Iterable[str], tokenizer: Tokenizer) -> np.ndarray:
    """Encode texts into one array of tokens, with the end token after each text.

    >>> from weft.data import ByteTokenizer
    >>> tokenize(["abc", "de"], ByteTokenizer())
    array([100, 101, 102,   1, 103, 104,   1], dtype=uint16)
    """
    dtype = np.uint16 if tokenizer.vocab <= 1 << 16 else np.int32
    parts = [np.zeros(0, dtype)]
    for chunk in _chunks(iter(texts)):
        wrong = next((text for text in chunk if not isinstance(text, str)), None)
        if wrong is not None:
            raise DataError(
                f"an example is {str(wrong)[:60]!r}, a {wrong.__class__.__name__}",
                rule="a corpus consists of single texts, for models with one stack",
                hint="ExampleStream batches pairs; iter_texts(examples) yields both texts of each pair",
            )
        ids = check_ids(encode_all(chunk, tokenizer), tokenizer)
        parts.append(ids.astype(dtype, copy=False))
    return np.concatenate(parts)


def _chunks(texts: Iterator[str]) -> Iterator[list[str]]:
    while chunk := list(itertools.islice(texts, TEXTS_PER_CALL)):
        yield chunk
