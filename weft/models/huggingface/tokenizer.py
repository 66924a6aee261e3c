"""The tokenizer in a Hugging Face folder, with the interface of Weft's tokenizers.

    generator = TextGenerator(huggingface.load(folder), huggingface.tokenizer(folder))

`tokenizer.json` defines the mapping from text to ids; the package `tokenizers` reads it. The ids of the
special tokens, end of text and padding, are in the files next to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from weft.core.errors import ModelError, WeftError
from weft.core.extras import from_extra

from .files import CONFIG, read_json

TOKENIZER_FILE = "tokenizer.json"
SPECIAL_TOKEN_FILES = (
    "tokenizer_config.json",
    "generation_config.json",
    CONFIG,
)  # they define the special tokens


@dataclass(frozen=True)
class FolderTokenizer:
    """The tokenizer of a folder, as `tokenizer` returns it.

    Attributes:
      path: the path of its file.
      vocab: one more than the largest id.
      pad, end: the ids of padding and of the end of a text.
      start: the id that a decoder reads before a text.
      inner: the tokenizer of the package `tokenizers`.
    """

    path: str
    vocab: int
    pad: int
    end: int
    start: int
    inner: Any = field(repr=False, compare=False)

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids

    def encode_all(self, texts: Sequence[str]) -> np.ndarray:
        encodings = self.inner.encode_batch(list(texts), add_special_tokens=False)
        lists = ([*encoding.ids, self.end] for encoding in encodings)
        return np.fromiter(itertools.chain.from_iterable(lists), np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return self.inner.decode(list(itertools.takewhile(self.end.__ne__, map(int, ids))))


def tokenizer(folder: str | Path) -> FolderTokenizer:
    """Load the tokenizer in a folder. This needs the package `tokenizers`.

    A decoder reads `start` before each text: the token that the tokenizer itself prepends (Llama's begin of
    text), or the end-of-text token if it prepends none (GPT-2).

    Args:
      folder: contains tokenizer.json, and tokenizer_config.json or config.json with the end-of-text token.
    """
    try:
        folder, path = Path(folder), Path(folder) / TOKENIZER_FILE
        inner = _open_tokenizer(path)
        end, pad = (_special(folder, inner, name) for name in ("eos", "pad"))
        if end is None:
            raise ModelError(
                f"{folder} does not define the token that ends a text",
                f"none of {', '.join(SPECIAL_TOKEN_FILES)} has an eos_token",
                rule="a model ends a text with that token",
                hint=f'add it to {SPECIAL_TOKEN_FILES[0]}: {{"eos_token": "</s>"}}',
            )
    except WeftError as error:
        raise error.located(f"huggingface.tokenizer({str(folder)!r})") from None
    first = inner.encode("").ids[:1]
    vocab = 1 + max(inner.get_vocab().values())
    # Padding is always masked, so any id will do if none is defined.
    return FolderTokenizer(str(path), vocab, pad or 0, end, first[0] if first else end, inner)


def _special(folder: Path, inner: Any, name: str) -> int | None:
    """The id of a special token, which files give as text or as a number; the first one of several."""
    for path in (folder / file for file in SPECIAL_TOKEN_FILES):
        settings = read_json(path) if path.is_file() else {}
        token, number = settings.get(f"{name}_token"), settings.get(f"{name}_token_id")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and (id := inner.token_to_id(text)) is not None:
            return id
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int):
            return number
    return None


def _open_tokenizer(path: Path) -> Any:
    with from_extra("huggingface"):
        from tokenizers import Tokenizer
    if not path.is_file():
        own = path.with_name("tokenizer.model")
        raise ModelError(
            f"there is no file {path}",
            rule=f"a folder's tokenizer is its {TOKENIZER_FILE}",
            hint=f'it has a SentencePiece model: weft.data.SentencePiece("{own}")'
            if own.is_file()
            else "download it with the model's other files",
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises no more specific type
        raise ModelError(
            f"{path} is not a tokenizer file",
            f"tokenizers reports: {str(error).splitlines()[0]}",
            rule="it is a file written by the package tokenizers",
            hint="it was cut short or damaged: copy or download it again",
        ) from None
