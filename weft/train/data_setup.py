"""From settings to what a run reads: a tokenizer, a stream to train on, and one to evaluate on."""

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

TRAIN_PHRASES = 200_000  # generated phrases to train on
VALID_PHRASES = 1_000  # and of those that are held out
RUN_TOKENIZER_FILE = "tokenizer.model"  # in the folder of a run


def load_examples(d: DataConfig, held_out: bool) -> Sequence[Any] | None:
    """The texts, or pairs of texts, to train on, or those to evaluate on; None: none are named."""
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
                hint="--data.kind text, parallel, tsv or jsonl says what the files hold",
            )
        return own[d.kind]()
    if not files:
        if held_out:
            return None
        raise DataError(
            f"the kind of data is {d.kind!r}, and no files are named",
            rule="--data.train names files to train on",
            hint='for example --data.train "books/*.txt"; or --data.kind python-docs, which needs none',
        )
    if bool(targets) != (d.kind == "parallel"):
        word = "valid" if held_out else "train"
        raise DataError(
            f"the kind of data is {d.kind!r}, and --data.{word}-targets is {' '.join(targets) or 'missing'}",
            rule="parallel text has two sides, each in files of its own; other kinds have all in one file",
            hint=f"--data.kind parallel --data.{word} train.en --data.{word}-targets train.fr",
        )
    try:
        return SOURCES[d.kind](d, files, targets).open()
    except DataError as error:  # the setting's name, where the source has an argument's
        error.hint = error.hint.replace("malformed=", "--data.malformed")
        raise


def _jsonl(d: DataConfig, files: tuple[str, ...], _: tuple[str, ...]) -> data.Jsonl:
    if len(d.fields) == 1:
        return data.Jsonl(files, text=d.fields[0], malformed=d.malformed)
    if len(d.fields) == 2:
        return data.Jsonl(files, source=d.fields[0], target=d.fields[1], malformed=d.malformed)
    raise DataError(
        f"--data.fields names {len(d.fields)} fields",
        rule="one is the text of a language model, two are source and target",
        hint="--data.fields text; --data.fields en fr",
    )


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
    """The tokenizer that the settings name; one that is to be trained is, once, and kept with the run."""
    path = folder / RUN_TOKENIZER_FILE
    if d.tokenizer == "bytes":
        return data.ByteTokenizer()
    if d.tokenizer in ("unigram", "bpe"):

        def trained() -> str:
            if path.exists():
                _check_kept(data.SentencePiece(str(path)), d)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                some = data.iter_texts(texts[: d.tokenizer_examples])
                try:
                    data.SentencePiece.train(some, path, d.vocab, kind=d.tokenizer, split_digits=True)
                except DataError as error:
                    with contextlib.suppress(OSError):  # there is something in it
                        folder.rmdir()
                    error.hint = error.hint.replace("vocab", "--data.vocab", 1)
                    raise
            return str(path)

        return data.SentencePiece(processes.run_on_first(processes.unique_key("tokenizer"), trained))
    if not Path(d.tokenizer).is_file():
        if path.is_file():  # the run's own copy is all that it needs
            warnings.warn(f"there is no {d.tokenizer}: {path} is used, as before", stacklevel=2)
            return data.SentencePiece(str(path))
        raise DataError(
            f"there is no tokenizer {d.tokenizer!r}{nearest(d.tokenizer, ('bytes', 'unigram', 'bpe'))}",
            rule="it is bytes; unigram or bpe, which are trained; or the path of a SentencePiece model",
            hint="--data.tokenizer bytes needs no training",
        )
    if path.is_file() and path.read_bytes() != Path(d.tokenizer).read_bytes():
        raise _another(path, f"is the run's tokenizer, and {d.tokenizer} is another")
    return data.SentencePiece(d.tokenizer)


def _check_kept(kept: data.SentencePiece, d: DataConfig) -> None:
    """An error if the tokenizer that is in a run's folder is not the one that is asked for."""
    if kept.vocab != d.vocab:
        raise _another(
            kept.path, f"has {kept.vocab} ids, and --data.vocab is {d.vocab}", f"--data.vocab {kept.vocab}"
        )
    if kept.kind != d.tokenizer:
        wants = f"is of the kind {kept.kind}, and --data.tokenizer is {d.tokenizer}"
        known = kept.kind if kept.kind in ("unigram", "bpe") else kept.path
        raise _another(kept.path, wants, f"--data.tokenizer {known}")


def _another(kept: str | Path, how: str, same: str = "the --data.tokenizer of before") -> DataError:
    """The error for a run's tokenizer that is not the one that is asked for."""
    return DataError(
        f"{kept} {how}",
        rule="a tokenizer is trained once, and a run that goes on has the one in its folder",
        hint=f"{same}; a new run has another --folder; or remove {kept}",
    )


def copy_tokenizer(words: data.Tokenizer, folder: Path) -> None:
    """Keep a copy of a tokenizer that lies elsewhere with the run, which is then all that it needs."""
    path = folder / RUN_TOKENIZER_FILE
    if isinstance(words, data.SentencePiece) and Path(words.path).resolve() != path.resolve():
        with atomic_write(path) as draft:
            shutil.copyfile(words.path, draft)


def check_vocab(words: data.Tokenizer, vocab: int) -> None:
    """An error if a model has no row for some of the tokenizer's ids."""
    try:
        data.check_vocab(words, vocab)
    except ModelError as error:
        error.hint = f"--model.vocab {words.vocab}, or leave it out; or another --data.tokenizer"
        raise


def build_batches(
    d: DataConfig, texts: Sequence[Any], words: data.Tokenizer, **more: Any
) -> data.BatchStream:
    """Batches of examples: texts as windows of one long text, pairs in rows of their own.

    Args:
      d: the settings.
      texts: what `examples` gave.
      words: the tokenizer.
      more: for `BatchStream`: seed, epochs, mesh and layout.
    """
    if not is_pairs(texts):
        return data.TokenWindows(texts, words, d.rows, d.length, **more)
    return data.ExampleStream(
        texts,
        words,
        d.rows,
        d.length,
        input_length=d.input_length,
        packed=d.packed,
        buckets=d.buckets,
        **more,
    )


def count_words(d: DataConfig, texts: Sequence[Any], words: data.Tokenizer) -> int:
    """How many words the targets are that batches of these examples have."""
    if not is_pairs(texts):
        return sum(len(text.split()) for text in texts)
    cut = (words.encode(target)[: d.length] for _, target in texts)
    return sum(len(words.decode(ids).split()) for ids in cut)
