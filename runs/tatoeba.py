"""Tatoeba's English-French pairs: the training files, and the score of a trained model on the test set.

python runs/tatoeba.py prepare DATA FOLDER
python runs/tatoeba.py score DATA FOLDER

A pair belongs to the test or the validation set by a hash of its English side, so that no English sentence is
in two sets. The English sentences of the test set are translated once each, and scored against all their
French ones.
"""

from __future__ import annotations

import gzip
import hashlib
import sys
import zipfile
from collections import defaultdict
from pathlib import Path

SPACES = str.maketrans({"\u202f": " ", "\u00a0": " "})


def prepare(data: Path, folder: Path) -> None:
    """Write train.tsv and valid.tsv."""
    with zipfile.ZipFile(data / "fra-eng.zip") as packed, packed.open("fra-eng/fra.txt") as lines:
        pairs = [line.decode().translate(SPACES).rstrip("\r\n").split("\t")[:2] for line in lines]
    held = [hashlib.md5(english.encode()).digest()[0] for english, _ in pairs]
    train = [pair for pair, b in zip(pairs, held, strict=True) if b >= 8]
    write(folder / "train.tsv", train)
    write(folder / "valid.tsv", read(data, "valid"))
    print(f"{len(train):,} pairs to train on", file=sys.stderr)


def read(data: Path, name: str) -> list[list[str]]:
    """The pairs of a set."""
    sides = []
    for language in ("en", "fr"):
        with gzip.open(data / "split" / f"{name}.{language}.gz", "rt", encoding="utf-8") as lines:
            sides.append([line.rstrip("\n").translate(SPACES) for line in lines])
    return [list(pair) for pair in zip(*sides, strict=True)]


def write(path: Path, pairs: list[list[str]]) -> None:
    path.write_text("".join(f"{english}\t{french}\n" for english, french in pairs), encoding="utf-8")


def score(data: Path, folder: Path) -> None:
    """Translate the test set and print the scores."""
    from weft import decode
    from weft.train import stored

    references = defaultdict(list)
    for english, french in read(data, "test"):
        references[english].append(french)
    run, step, model = stored.restored(stored.settings(folder))
    speaker = decode.Speaker(model, run.tokenizer, run.mesh, run.layout, rows=64)
    sentences = sorted(references, key=len)
    said = [one.text for one in speaker.say(sentences, decode.Ask(beams=decode.Beams(4)))]
    found = decode.quality(said, [references[sentence] for sentence in sentences])
    for sentence, text in list(zip(sentences, said, strict=True))[:: len(said) // 8]:
        print(f"{sentence}\n  → {text}")
    print(f"step {step}, {len(sentences):,} sentences: {found}")
    print("\n".join(found.signatures))


if __name__ == "__main__":
    {"prepare": prepare, "score": score}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
