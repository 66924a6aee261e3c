"""From text to token ids and back.

A tokenizer has `encode(text)` and `decode(ids)`, and the integers `vocab` (the number of ids), `pad` and
`end`. `encode` returns the ids of the text alone; the code that builds rows appends `end`, and `decode` stops
there. A tokenizer may also have `encode_all(texts)`, which encodes many texts into one array with `end` after
each. A decoder reads id 0 before a text, or the tokenizer's `start` if it has one, as tokenizers of imported
models do.

A model never receives an id for which its embedding has no row: `check_vocab` compares a tokenizer with a
model once, and `check_ids` compares the ids of every batch with their tokenizer.
"""

from __future__ import annotations

import functools
import io
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from weft.core.atomic_file import atomic_write
from weft.core.errors import DataError, ModelError
from weft.core.extras import from_extra
from weft.models.batch import START_TOKEN

MODEL_TYPES = ("unigram", "bpe", "char", "word")


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    @property
    def vocab(self) -> int: ...
    @property
    def pad(self) -> int: ...
    @property
    def end(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> str: ...


@dataclass(frozen=True)
class ByteTokenizer:
    """Each UTF-8 byte is a token; there is no training. The ids: 0 padding, 1 end, 2 unknown, then the
    bytes.

    >>> ByteTokenizer().encode("né")
    [113, 198, 172]
    >>> ByteTokenizer().decode([113, 198, 172, 1, 0, 0])
    'né'
    """

    pad = 0
    end = 1
    unknown = 2
    vocab = 3 + 256

    def encode(self, text: str) -> list[int]:
        return [byte + 3 for byte in text.encode()]

    def encode_all(self, texts: Sequence[str]) -> np.ndarray:
        # The byte 0xff never occurs in UTF-8: it marks the ends until they get their id.
        bytes = np.frombuffer(b"".join([text.encode() + b"\xff" for text in texts]), np.uint8)
        return np.where(bytes == 0xFF, self.end, bytes + np.uint16(3)).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        # The byte 0xff never occurs in UTF-8: an unknown token becomes a replacement character.
        text = _until_end(ids, self.end, self.pad)
        return bytes(id - 3 if 3 <= id < self.vocab else 0xFF for id in text).decode(errors="replace")


def _until_end(ids: Iterable[int], end: int, pad: int) -> list[int]:
    """The ids before the end token, without padding."""
    before: list[int] = []
    for id in map(int, ids):
        if id == end:
            break
        before += [id] if id != pad else []
    return before


@dataclass(frozen=True)
class SentencePiece:
    """A trained SentencePiece model, loaded from its file on first use."""

    path: str

    @staticmethod
    def train(
        texts: Iterable[str],
        path: str | os.PathLike[str],
        vocab: int,
        *,
        kind: str = "unigram",
        byte_fallback: bool = True,
        normalization: str = "nmt_nfkc",
        **options: str | int | float | bool,
    ) -> SentencePiece:
        """Train a model and save it. The ids are 0 padding, 1 end, 2 unknown, then the pieces.

        Args:
          texts: the training texts.
          path: where to save the model.
          vocab: the number of ids.
          kind: "unigram", "bpe", "char" or "word".
          byte_fallback: encode a character without a piece as its bytes instead of as unknown.
          normalization: "nmt_nfkc", "nfkc" or "identity"; "identity" makes decoding lossless.
          options: further options for SentencePiece's trainer.
        """
        with from_extra("train"):
            import sentencepiece

        call = f"SentencePiece.train(vocab={vocab}, kind={kind!r}, byte_fallback={byte_fallback})"
        if kind not in MODEL_TYPES:
            raise DataError(
                f"unknown kind of SentencePiece model: {kind!r}",
                rule=f"the kinds are {', '.join(MODEL_TYPES)}",
                hint='kind="unigram" is the usual choice',
            ).located(call)
        model = io.BytesIO()
        settings: dict[str, Any] = {
            "vocab_size": vocab,
            "model_type": kind,
            "byte_fallback": byte_fallback,
            "normalization_rule_name": normalization,
            "character_coverage": 0.9999 if byte_fallback else 1.0,
            "pad_id": 0,
            "eos_id": 1,
            "unk_id": 2,
            "bos_id": -1,
            "num_threads": 1,  # with more, sums are reordered and the model is not reproducible
            "minloglevel": 2,
            "max_sentence_length": 1 << 30,  # the default, 4192 bytes, silently drops longer texts
        }
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts), model_writer=model, **(settings | options)
            )
        except (RuntimeError, OSError, ValueError) as error:
            raise _training_failed(str(error)).located(call) from None
        with atomic_write(Path(path)) as draft:
            draft.write_bytes(model.getvalue())
        return SentencePiece(os.fspath(path))

    @functools.cached_property
    def _model(self) -> Any:
        with from_extra("train"):
            import sentencepiece

        if not os.path.isfile(self.path):
            raise DataError(
                f"no such file: {self.path}",
                rule="a SentencePiece model is loaded from its file",
                hint="train one with SentencePiece.train(texts, path, vocab=...)",
            ).located(repr(self))
        try:
            model = sentencepiece.SentencePieceProcessor(model_file=self.path)
        except (RuntimeError, OSError) as error:
            raise DataError(
                f"{self.path} is not a SentencePiece model",
                str(error).splitlines()[0],
                rule="the file must be a model saved by SentencePiece",
                hint="the model is the .model file, not the .vocab file",
            ).located(repr(self)) from None
        if model.eos_id() < 0:
            raise DataError(
                f"{self.path} has no end-of-text token",
                rule="a model learns from that token where a text ends",
                hint="train it with an eos_id, as SentencePiece.train does",
            ).located(repr(self))
        return model

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    @property
    def kind(self) -> str:
        """The kind of model, one of `MODEL_TYPES`, as recorded in the model."""
        with from_extra("train"):
            from sentencepiece import sentencepiece_model_pb2

        proto: Any = sentencepiece_model_pb2  # its classes are created at import time
        spec = proto.ModelProto.FromString(self._model.serialized_model_proto()).trainer_spec
        return proto.TrainerSpec.ModelType.Name(spec.model_type).lower()

    @property
    def vocab(self) -> int:
        return self._model.get_piece_size()

    @property
    def pad(self) -> int:
        """The padding token; 0 in a model without one, which is safe because padding never counts."""
        return max(self._model.pad_id(), 0)

    @property
    def end(self) -> int:
        return self._model.eos_id()

    @property
    def unknown(self) -> int:
        return self._model.unk_id()

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def encode_all(self, texts: Sequence[str]) -> np.ndarray:
        lists = self._model.encode(list(texts), add_eos=True)
        return np.fromiter(itertools.chain.from_iterable(lists), np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        text = _until_end(ids, self.end, self._model.pad_id())
        # The model's embedding may have more rows than the tokenizer has pieces.
        return self._model.decode([id if id < self.vocab else self.unknown for id in text])


def _training_failed(message: str) -> DataError:
    most = re.search(r"<= (\d+)", message)
    small = "Vocabulary size is smaller" in message or "smaller than required_chars" in message
    hint = "provide more text, or change vocab"
    if most and "too high" in message:
        hint = f"vocab={most[1]} is the maximum for this text; or provide more text"
    elif small:
        hint = "increase vocab; byte_fallback takes 256 of it"
    return DataError(
        "SentencePiece training failed",
        f"SentencePiece: {message.strip().splitlines()[-1] if message.strip() else 'no message'}",
        rule="the text needs at least vocab different pieces, and vocab needs room for its characters",
        hint=hint,
    )


def encode_all(texts: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    """Encode texts into one array, with the end token after each text.

    >>> encode_all(["ab", "c"], ByteTokenizer())
    array([100, 101,   1, 102,   1], dtype=uint16)
    """
    method = getattr(tokenizer, "encode_all", None)
    if method is not None:
        return method(texts)
    lists = ([*tokenizer.encode(text), tokenizer.end] for text in texts)
    return np.fromiter(itertools.chain.from_iterable(lists), np.int64)


def start_id(tokenizer: Tokenizer) -> int:
    """The token that a decoder reads before a text.

    >>> start_id(ByteTokenizer())
    0
    """
    return getattr(tokenizer, "start", START_TOKEN)


def decode_continuation(before: Sequence[int], ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Decode ids as the continuation of others: SentencePiece drops the space at the start of a text.

    >>> decode_continuation(ByteTokenizer().encode("the"), ByteTokenizer().encode(" class"), ByteTokenizer())
    ' class'
    """
    before = [id for id in before if id != tokenizer.end]  # decode stops at the end token
    return tokenizer.decode([*before, *ids])[len(tokenizer.decode(before)) :]


def check_ids(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return the ids unchanged, or raise an error if one is outside the tokenizer's vocabulary."""
    if ids.size and (ids.min() < 0 or ids.max() >= tokenizer.vocab):
        wrong = np.unique(ids[(ids < 0) | (ids >= tokenizer.vocab)])
        raise DataError(
            f"token ids outside the tokenizer's vocabulary: {', '.join(map(str, wrong[:5]))}",
            f"{tokenizer!r} has vocab={tokenizer.vocab}: its ids run from 0 to {tokenizer.vocab - 1}",
            rule="every id must be below the vocab of its tokenizer and of its model",
            hint="use the tokenizer that produced the array; its vocab must count all ids",
        )
    return ids


def check_vocab(tokenizer: Tokenizer, vocab: int) -> None:
    """Raise an error if a model's vocabulary is too small for a tokenizer.

    >>> check_vocab(ByteTokenizer(), 259)
    """
    call = f"check_vocab({tokenizer!r}, {vocab})"
    try:
        check_ids(np.array([tokenizer.pad, tokenizer.end, start_id(tokenizer)]), tokenizer)
    except DataError as error:
        raise error.located(call) from None
    if tokenizer.vocab > vocab:
        raise ModelError(
            f"the tokenizer has {tokenizer.vocab} ids, but the model has {vocab}",
            f"ids {vocab} to {tokenizer.vocab - 1} of {tokenizer!r} have no row in the embedding",
            rule="a model's vocab must be at least its tokenizer's; it may be larger",
            hint=f"Config(vocab={tokenizer.vocab}), or use the tokenizer that the model was trained with",
        ).located(call)
