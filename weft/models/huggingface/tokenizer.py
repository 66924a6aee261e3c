"""The tokenizer in a Hugging Face folder, as the rest of Weft uses one.

    speaker = Speaker(huggingface.load(folder), huggingface.tokenizer(folder))

`tokenizer.json` says how text becomes ids; the package `tokenizers` reads it. Which of the ids ends a text,
and which fills rows up, is in the files beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from weft.core.errors import ModelError

from .files import CONFIG, read_json

TOKENIZER_FILE = "tokenizer.json"
SPECIAL_TOKEN_FILES = (
    "tokenizer_config.json",
    "generation_config.json",
    CONFIG,
)  # what says which tokens are special


@dataclass(frozen=True)
class FolderTokenizer:
    """The tokenizer of a folder; `tokenizer` makes one.

    Attributes:
      path: of the file that it is from.
      vocab: one more than the largest id.
      pad, end: the ids that fill rows up, and that end a text.
      start: the id that a decoder reads before a text.
      inner: how text becomes ids, of the package `tokenizers`.
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
        found = self.inner.encode_batch(list(texts), add_special_tokens=False)
        lists = ([*one.ids, self.end] for one in found)
        return np.fromiter(itertools.chain.from_iterable(lists), np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return self.inner.decode(list(itertools.takewhile(self.end.__ne__, map(int, ids))))


def tokenizer(folder: Any) -> FolderTokenizer:
    """The tokenizer in a folder. It needs the package `tokenizers`.

    A decoder reads `start` before each text: what the folder's own rule puts there (Llama's begin of text),
    or the token that ends texts if the rule puts nothing there (GPT-2).

    Args:
      folder: holds tokenizer.json, and says in tokenizer_config.json or config.json which token ends a text.
    """
    try:
        folder, path = Path(folder), Path(folder) / TOKENIZER_FILE
        inner = _opened(path)
        end, pad = (_special(folder, inner, name) for name in ("eos", "pad"))
        if end is None:
            raise ModelError(
                f"{folder} does not say which token ends a text",
                f"there is an eos_token in none of {', '.join(SPECIAL_TOKEN_FILES)}",
                rule="a model says that a text is over with that token",
                hint=f'write it into {SPECIAL_TOKEN_FILES[0]}: {{"eos_token": "</s>"}}',
            )
    except ModelError as error:
        raise error.located(f"huggingface.tokenizer({str(folder)!r})") from None
    first = inner.encode("").ids[:1]
    vocab = 1 + max(inner.get_vocab().values())
    # What is at padding never counts: any id will do where none is named.
    return FolderTokenizer(str(path), vocab, pad or 0, end, first[0] if first else end, inner)


def _special(folder: Path, inner: Any, name: str) -> int | None:
    """The id of the token with a name, which files give as a text or as a number; of several the first."""
    for path in (folder / beside for beside in SPECIAL_TOKEN_FILES):
        settings = read_json(path) if path.is_file() else {}
        token, number = settings.get(f"{name}_token"), settings.get(f"{name}_token_id")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and (id := inner.token_to_id(text)) is not None:
            return id
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int):
            return number
    return None


def _opened(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ModelError(
            f"the package tokenizers, which reads {path}, is not installed",
            rule="only the tokenizers of Hugging Face folders need it",
            hint="pip install tokenizers",
        ) from None
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
    except Exception as error:  # the package raises nothing more exact
        raise ModelError(
            f"{path} is no tokenizer",
            f"tokenizers says: {str(error).splitlines()[0]}",
            rule="it is a file that the package tokenizers has stored",
            hint="it was cut short or damaged: copy or download it again",
        ) from None
