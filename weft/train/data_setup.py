"""Data of a run from its settings: a tokenizer, a stream to train on, and one to evaluate on."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft import data
from weft.core.atomic_file import atomic_write
from weft.core.errors import DataError, ModelError, nearest
from weft.distributed import processes

from .config import DataConfig

TRAIN_PHRASES = 200_000  # number of generated phrases to train on
VALID_PHRASES = 1_000  # and to evaluate on
RUN_TOKENIZER_FILE = "tokenizer.model"  # in the run folder


def load_examples(d: DataConfig, held_out: bool) -> Sequence[Any] | None:
    """The texts, or pairs of texts, to train or to evaluate on; None if there are none to evaluate on."""
    files, targets = (d.valid, d.valid_targets) if held_out else (d.train, d.train_targets)
    own = {
        "python-docs": lambda: data.PythonDocs(split="valid" if held_out else "train"),
        "phrases": lambda: data.Phrases(
            VALID_PHRASES if held_out else TRAIN_PHRASES, seed=int(held_out), held_out=held_out
        ),
    }
    if d.kind in own:
        if files or targets:
            raise DataError(
                f"files are given ({', '.join((*files, *targets)[:3])}), and the kind of data is {d.kind!r}",
                rule=f"{d.kind} needs no files",
                hint="set the kind of the files: --data.kind text, parallel, tsv or jsonl",
            )
        return own[d.kind]()
    if not files:
        if held_out:
            return None
        raise DataError(
            f"the kind of data is {d.kind!r}, and no files are given",
            rule="--data.train names files to train on",
            hint='for example --data.train "books/*.txt"; or --data.kind python-docs, which needs none',
        )
    if bool(targets) != (d.kind == "parallel"):
        word = "valid" if held_out else "train"
        raise DataError(
            f"the kind of data is {d.kind!r}, and --data.{word}-targets is {' '.join(targets) or 'missing'}",
            rule="parallel text has two sides in separate files; other kinds have both in one file",
            hint=f"--data.kind parallel --data.{word} train.en --data.{word}-targets train.fr",
        )
    try:
        return SOURCES[d.kind](d, files, targets).open()
    except DataError as error:  # the hint names an argument of the source; the user knows the setting
        error.hint = error.hint.replace("malformed=", "--data.malformed")
        raise


def _jsonl(d: DataConfig, files: tuple[str, ...], _: tuple[str, ...]) -> data.Jsonl:
    if len(d.fields) == 1:
        return data.Jsonl(files, text=d.fields[0], malformed=d.malformed)
    source, target = d.fields
    return data.Jsonl(files, source=source, target=target, malformed=d.malformed)


SOURCES: dict[str, Any] = {
    "text": lambda d, files, _: data.Documents(files, malformed=d.malformed),
    "lines": lambda d, files, _: data.PlainText(files, malformed=d.malformed),
    "parallel": lambda d, files, targets: data.ParallelText(files, targets, malformed=d.malformed),
    "tsv": lambda d, files, _: data.Tsv(files, malformed=d.malformed),
    "jsonl": _jsonl,
}


def is_pairs(texts: Sequence[Any]) -> bool:
    """Whether examples are pairs of texts."""
    return not isinstance(texts[0], str)


def build_tokenizer(d: DataConfig, texts: Sequence[Any], folder: Path) -> data.Tokenizer:
    """The tokenizer of the settings. A trained one is trained once, and stored in the run folder."""
    path = folder / RUN_TOKENIZER_FILE
    if d.tokenizer == "bytes":
        return data.ByteTokenizer()
    if d.tokenizer in ("unigram", "bpe"):

        def train_once() -> str:
            if path.exists():
                _check_existing(data.SentencePiece(str(path)), d)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                some = data.iter_texts(texts[: d.tokenizer_examples])
                try:
                    data.SentencePiece.train(some, path, d.vocab, kind=d.tokenizer, split_digits=True)
                except DataError as error:
                    with contextlib.suppress(OSError):  # it is not empty
                        folder.rmdir()
                    error.hint = error.hint.replace("vocab", "--data.vocab", 1)
                    raise
            return str(path)

        return data.SentencePiece(processes.run_on_first(processes.unique_key("tokenizer"), train_once))
    if not Path(d.tokenizer).is_file():
        if path.is_file():  # the run's own copy suffices
            warnings.warn(f"there is no {d.tokenizer}: using the run's copy {path}", stacklevel=2)
            return data.SentencePiece(str(path))
        raise DataError(
            f"there is no tokenizer {d.tokenizer!r}{nearest(d.tokenizer, ('bytes', 'unigram', 'bpe'))}",
            rule="it is bytes; unigram or bpe, which are trained; or the path of a SentencePiece model",
            hint="--data.tokenizer bytes needs no training",
        )
    if path.is_file() and path.read_bytes() != Path(d.tokenizer).read_bytes():
        raise _mismatch(path, f"is the run's tokenizer, and {d.tokenizer} is a different one")
    return data.SentencePiece(d.tokenizer)


def _check_existing(existing: data.SentencePiece, d: DataConfig) -> None:
    """Raise an error if the tokenizer in the run folder differs from the settings."""
    if existing.vocab != d.vocab:
        fact = f"has {existing.vocab} ids, and --data.vocab is {d.vocab}"
        raise _mismatch(existing.path, fact, f"use --data.vocab {existing.vocab}")
    if existing.kind != d.tokenizer:
        fact = f"is of kind {existing.kind}, and --data.tokenizer is {d.tokenizer}"
        same = existing.kind if existing.kind in ("unigram", "bpe") else existing.path
        raise _mismatch(existing.path, fact, f"use --data.tokenizer {same}")


def _mismatch(path: str | Path, fact: str, fix: str = "use the previous --data.tokenizer") -> DataError:
    """The error for a tokenizer in the run folder that differs from the settings."""
    return DataError(
        f"{path} {fact}",
        rule="a tokenizer is trained once, and a resumed run uses the one in its folder",
        hint=f"{fix}; or use another --folder for a new run; or remove {path}",
    )


def copy_tokenizer(tokenizer: data.Tokenizer, folder: Path) -> None:
    """Copy a tokenizer from elsewhere into the run folder, so that the folder is self-contained."""
    path = folder / RUN_TOKENIZER_FILE
    if isinstance(tokenizer, data.SentencePiece) and Path(tokenizer.path).resolve() != path.resolve():
        with atomic_write(path) as draft:
            shutil.copyfile(tokenizer.path, draft)


def check_vocab(tokenizer: data.Tokenizer, vocab: int) -> None:
    """Raise an error if the model's vocabulary is smaller than the tokenizer's."""
    try:
        data.check_vocab(tokenizer, vocab)
    except ModelError as error:
        error.hint = f"--model.vocab {tokenizer.vocab}, or omit it; or another --data.tokenizer"
        raise


def build_batches(
    d: DataConfig, texts: Sequence[Any], tokenizer: data.Tokenizer, **more: Any
) -> data.BatchStream:
    """Batches of examples: windows of concatenated texts, or packed pairs.

    Args:
      d: the settings.
      texts: the result of `load_examples`.
      tokenizer: the tokenizer.
      more: arguments of `BatchStream`: seed, epochs, mesh and layout.
    """
    if not is_pairs(texts):
        return data.TokenWindows(texts, tokenizer, d.rows, d.length, **more)
    return data.ExampleStream(
        texts,
        tokenizer,
        d.rows,
        d.length,
        input_length=d.input_length,
        packed=d.packed,
        buckets=d.buckets,
        **more,
    )


def count_words(d: DataConfig, texts: Sequence[Any], tokenizer: data.Tokenizer) -> int:
    """The number of words in the targets of the batches of these examples."""
    if not is_pairs(texts):
        return sum(len(text.split()) for text in texts)
    cut = (tokenizer.encode(target)[: d.length] for _, target in texts)
    return sum(len(tokenizer.decode(ids).split()) for ids in cut)
