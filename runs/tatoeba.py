"""Tatoeba's English-French pairs: train, validation and test files, and the score of a trained model.

python runs/tatoeba.py prepare DATA FOLDER
python runs/tatoeba.py score FOLDER

DATA has fra-eng.zip, from manythings.org/anki. The set of a pair is chosen by a hash of its English side, so
that no English sentence is in two sets. The English sentences of the test set are translated once each, and
scored against all of their French ones.
"""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections import defaultdict
from pathlib import Path

SPACES = str.maketrans({"\u202f": " ", "\u00a0": " "})


def prepare(data: Path, folder: Path) -> None:
    """Write train.tsv, valid.tsv and test.tsv."""
    with zipfile.ZipFile(data / "fra-eng.zip") as packed:
        name = next(one for one in packed.namelist() if one.endswith("fra.txt"))
        lines = packed.read(name).decode().splitlines()
    sets: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for line in lines:
        english, french = line.split("\t")[:2]  # newer files have a third column, the attribution
        sets[which(english)].append(f"{english}\t{french}\n".translate(SPACES))
    for name, pairs in sets.items():
        (folder / f"{name}.tsv").write_text("".join(pairs), encoding="utf-8")
        print(f"{name}: {len(pairs):,} pairs", file=sys.stderr)


def which(english: str) -> str:
    """The set that an English sentence belongs to."""
    first = hashlib.md5(english.encode()).digest()[0]
    return "test" if first < 4 else "valid" if first < 8 else "train"


def score(folder: Path) -> None:
    """Translate the test set and print the scores."""
    from weft import generate
    from weft.train import load

    references = defaultdict(list)
    for line in (folder / "test.tsv").read_text(encoding="utf-8").splitlines():
        english, french = line.split("\t")
        references[english].append(french)
    run, step, model = load.restore_run(load.load_config(folder))
    speaker = generate.TextGenerator(model, run.tokenizer, run.mesh, run.layout, rows=64)
    sentences = sorted(references, key=len)
    said = [
        one.text for one in speaker.generate(sentences, generate.GenerationConfig(beams=generate.Beams(4)))
    ]
    found = generate.corpus_scores(said, [references[sentence] for sentence in sentences])
    for sentence, text in list(zip(sentences, said, strict=True))[:: len(said) // 8]:
        print(f"{sentence}\n  → {text}")
    print(f"step {step}, {len(sentences):,} sentences: {found}")
    print("\n".join(found.signatures))


if __name__ == "__main__":
    {"prepare": prepare, "score": score}[sys.argv[1]](*map(Path, sys.argv[2:]))
