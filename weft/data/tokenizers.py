"""From text to token ids and back.

A tokenizer has `encode(text)`, `decode(ids)`, and the numbers `vocab` (how many ids there are), `pad` and
`end`. `encode` gives the ids of the text alone; whoever makes rows of them adds `end`. `decode` stops there.
One that has `encode_all(texts)` too, an array of all ids in which each text has its end, does so in one go.
What a decoder reads before a text is the id 0, or the tokenizer's `start` if it has one, as those of models
from elsewhere do.

No model gets an id that it has no row for: `check_vocab` compares a tokenizer with a model, once, and all ids
that become batches are compared with their tokenizer (`check_ids`).
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
from weft.models.batch import START_TOKEN

MODEL_TYPES = ("unigram", "bpe", "char", "word")


class Tokenizer(Protocol):
    """What both kinds can do."""

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
    """Each byte of UTF-8 is a token; there is nothing to train. The ids: 0 padding, 1 end, 2 unknown, bytes.

    >>> Bytes().encode("né")
    [113, 198, 172]
    >>> Bytes().decode([113, 198, 172, 1, 0, 0])
    'né'
    """

    pad = 0
    end = 1
    unknown = 2
    vocab = 3 + 256

    def encode(self, text: str) -> list[int]:
        return [byte + 3 for byte in text.encode()]

    def encode_all(self, texts: Sequence[str]) -> np.ndarray:
        # No UTF-8 has the byte 0xff: it marks the ends until they get their id.
        bytes = np.frombuffer(b"".join([text.encode() + b"\xff" for text in texts]), np.uint8)
        return np.where(bytes == 0xFF, self.end, bytes + np.uint16(3)).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        # No UTF-8 has the byte 0xff: an unknown token becomes a replacement character.
        kept = _until_end(ids, self.end, self.pad)
        return bytes(id - 3 if 3 <= id < self.vocab else 0xFF for id in kept).decode(errors="replace")


def _until_end(ids: Iterable[int], end: int, pad: int) -> list[int]:
    kept: list[int] = []
    for id in map(int, ids):
        if id == end:
            break
        kept += [id] if id != pad else []
    return kept


@dataclass(frozen=True)
class SentencePiece:
    """A trained SentencePiece model, loaded from its file when it is first used."""

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
        **options: Any,
    ) -> SentencePiece:
        """Train a model and store it. The ids: 0 padding, 1 end, 2 unknown, pieces.

        Args:
          texts: what it learns from.
          path: where it is stored.
          vocab: how many ids it has.
          kind: "unigram", "bpe", "char" or "word".
          byte_fallback: a character without a piece becomes its bytes; otherwise it is unknown.
          normalization: "nmt_nfkc", "nfkc" or "identity": with the last, every text comes back as it was.
          options: more for SentencePiece's own trainer.
        """
        import sentencepiece

        asked = f"SentencePiece.train(vocab={vocab}, kind={kind!r}, byte_fallback={byte_fallback})"
        if kind not in MODEL_TYPES:
            raise DataError(
                f"there is no SentencePiece model of the kind {kind!r}",
                rule=f"the kinds are {', '.join(MODEL_TYPES)}",
                hint='kind="unigram" is the usual one',
            ).located(asked)
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
            "num_threads": 1,  # with more, sums are in another order: another model
            "minloglevel": 2,
            "max_sentence_length": 1 << 30,  # its own, 4192 bytes, silently leaves longer texts out
        }
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts), model_writer=model, **(settings | options)
            )
        except (RuntimeError, OSError, ValueError) as error:
            raise _training_failed(str(error)).located(asked) from None
        with atomic_write(Path(path)) as draft:
            draft.write_bytes(model.getvalue())
        return SentencePiece(os.fspath(path))

    @functools.cached_property
    def _model(self) -> Any:
        import sentencepiece

        if not os.path.isfile(self.path):
            raise DataError(
                f"no file {self.path}",
                rule="a SentencePiece model is loaded from its file",
                hint="train one with SentencePiece.train(texts, path, vocab=...)",
            ).located(repr(self))
        try:
            model = sentencepiece.SentencePieceProcessor(model_file=self.path)
        except (RuntimeError, OSError) as error:
            raise DataError(
                f"{self.path} is no SentencePiece model",
                str(error).splitlines()[0],
                rule="the file is one that SentencePiece has stored",
                hint="the model is the file that ends in .model, not the one in .vocab",
            ).located(repr(self)) from None
        if model.eos_id() < 0:
            raise DataError(
                f"{self.path} has no token for the end of a text",
                rule="a model learns where a text ends from that token",
                hint="train it with an eos_id; SentencePiece.train does",
            ).located(repr(self))
        return model

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    @property
    def kind(self) -> str:
        """One of `KINDS`, as the model itself says."""
        from sentencepiece import sentencepiece_model_pb2

        proto: Any = sentencepiece_model_pb2  # its classes are made when it is imported
        stored = proto.ModelProto.FromString(self._model.serialized_model_proto()).trainer_spec
        return proto.TrainerSpec.ModelType.Name(stored.model_type).lower()

    @property
    def vocab(self) -> int:
        return self._model.get_piece_size()

    @property
    def pad(self) -> int:
        """0 in a model without padding: what is at padding never counts."""
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
        kept = _until_end(ids, self.end, self._model.pad_id())
        # A model may have more rows than there are pieces.
        return self._model.decode([id if id < self.vocab else self.unknown for id in kept])


def _training_failed(said: str) -> DataError:
    most = re.search(r"<= (\d+)", said)
    small = "Vocabulary size is smaller" in said or "smaller than required_chars" in said
    hint = "give more text, or another vocab"
    if most and "too high" in said:
        hint = f"vocab={most[1]} is the most that this text gives; or give more text"
    elif small:
        hint = "a larger vocab; byte_fallback takes 256 of it"
    return DataError(
        "SentencePiece could not be trained",
        f"it says: {said.strip().splitlines()[-1] if said.strip() else 'nothing'}",
        rule="the text has as many different pieces as vocab asks for, and vocab has room for its characters",
        hint=hint,
    )


def encode_all(texts: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    """The ids of all texts in one array, each text with its end.

    >>> encode_all(["ab", "c"], Bytes())
    array([100, 101,   1, 102,   1], dtype=uint16)
    """
    own = getattr(tokenizer, "encode_all", None)
    if own is not None:
        return own(texts)
    lists = ([*tokenizer.encode(text), tokenizer.end] for text in texts)
    return np.fromiter(itertools.chain.from_iterable(lists), np.int64)


def start_id(tokenizer: Tokenizer) -> int:
    """The id that a decoder reads before a text.

    >>> start(Bytes())
    0
    """
    return getattr(tokenizer, "start", START_TOKEN)


def decode_continuation(before: Sequence[int], ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of ids as it follows that of others: SentencePiece drops the space that a text begins with.

    >>> text_after(Bytes().encode("the"), Bytes().encode(" class"), Bytes())
    ' class'
    """
    before = [id for id in before if id != tokenizer.end]  # decode stops at one
    return tokenizer.decode([*before, *ids])[len(tokenizer.decode(before)) :]


def check_ids(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """The same ids, or an error if one is none of the tokenizer's."""
    if ids.size and (ids.min() < 0 or ids.max() >= tokenizer.vocab):
        wrong = np.unique(ids[(ids < 0) | (ids >= tokenizer.vocab)])
        raise DataError(
            f"{', '.join(map(str, wrong[:5]))}: not among the tokenizer's ids",
            f"{tokenizer!r} has vocab={tokenizer.vocab}: its ids are from 0 to {tokenizer.vocab - 1}",
            rule="every id is below the vocab of its tokenizer, and of its model",
            hint="take the tokenizer that an array was made with; its vocab counts all ids",
        )
    return ids


def check_vocab(tokenizer: Tokenizer, vocab: int) -> None:
    """Refuse a model whose vocabulary is too small for a tokenizer.

    >>> check_vocab(Bytes(), 259)
    """
    asked = f"check_vocab({tokenizer!r}, {vocab})"
    try:
        check_ids(np.array([tokenizer.pad, tokenizer.end, start_id(tokenizer)]), tokenizer)
    except DataError as error:
        raise error.located(asked) from None
    if tokenizer.vocab > vocab:
        raise ModelError(
            f"the tokenizer has {tokenizer.vocab} ids, the model {vocab}",
            f"ids from {vocab} to {tokenizer.vocab - 1} of {tokenizer!r} have no row in the embedding",
            rule="a model's vocab is at least its tokenizer's; more is allowed",
            hint=f"Config(vocab={tokenizer.vocab}), or the tokenizer that the model was trained with",
        ).located(asked)
