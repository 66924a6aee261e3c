"""`weft score`: how likely given texts are, line by line."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from . import resumable_output
from .generation import ModelFlags, load_generator, process_lines
from .input_lines import STDIN, InputLines, read_aligned, read_lines, split_columns
from .targets import UsageError


@dataclass
class ScoreCommand:
    """How likely given texts are to a trained model: the logarithm of the probability of each line.

    For a translation model these are translations, in a file of their own or in the second column of one:

        weft score runs/fr news.en news.fr
        weft score runs/fr pairs.tsv --json

    For a language model they are texts, or what comes after prompts:

        weft score runs/lm texts.txt
        weft score runs/lm prompts.txt texts.txt

    The end of a text is scored too. The perplexity of a token, over the lines of this call, is told on
    stderr."""

    folder: Annotated[Positional[str], arg(metavar="FOLDER")]
    """The folder of a run, or one of Hugging Face."""
    files: Annotated[Positional[tuple[str, ...]], arg(metavar="[FILE ...]", help_behavior_hint="")] = ()
    """SOURCES and TARGETS, or a file with both columns; of a language model TEXTS, or PROMPTS and TEXTS. -
    is stdin, which is read as well if there is no file."""
    out: Annotated[Path | None, arg(metavar="OUT", aliases=["-o"], help_behavior_hint="")] = None
    """Write to this file instead of stdout; run the same command again to resume."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """An object to a line: score, tokens, and the logarithm of each token's probability, as `logs`."""
    models: Annotated[ModelFlags, arg(name="")] = field(default_factory=ModelFlags)

    def run(self) -> None:
        """Score."""
        from ..train import load
        from ..train.plain_json import plain_json

        files = self.files or (STDIN,)
        if len(files) > 2 or files.count(STDIN) > 1:
            raise UsageError(
                f"weft score was given {len(files)} files: {' '.join(files)}",
                rule="texts are in one file, or in two of as many lines; one of them may be -, stdin",
                hint="weft score FOLDER SOURCES TARGETS",
            )
        resumable_output.check_resumable(self.out, files)
        translates = load.load_model_config(self.folder).kind == "encoder_decoder"
        lines = _pairs(files, translates, as_they_come=self.out is None)
        found = load_generator(self.folder, self.models, "encoder_decoder", "decoder")
        speaker, total, tokens, since = found.speaker, 0.0, 0, 0

        def said(texts: Iterable[Any], first: int) -> Iterator[str]:
            nonlocal total, tokens, since
            since = first
            given: list[str] = []

            def noted() -> Iterator[tuple[str, str]]:
                for pair in texts:
                    given.append(pair[1])
                    yield pair

            for logs in speaker.score(noted(), first):
                score, target = sum(logs), given.pop(0)
                total, tokens = total + score, tokens + len(logs)
                ids = [*speaker.tokenizer.encode(target), speaker.tokenizer.end]
                one = {"score": score, "tokens": ids, "logs": logs}
                yield plain_json(one) if self.json else f"{score:.6f}"

        made_of = {"command": "weft score", **found.made_of, "json": self.json, "files": len(files)}
        process_lines(lines, said, self.out, made_of)
        if tokens:
            behind = f" behind line {since:,}" if since else ""
            print(
                f"{tokens:,} tokens{behind}; perplexity per token {math.exp(min(-total / tokens, 700)):.4f}",
                file=sys.stderr,
            )


def _pairs(files: tuple[str, ...], translates: bool, as_they_come: bool) -> InputLines:
    """Pairs of texts: what is read, and what is scored."""
    if len(files) == 1:
        one = read_lines(files[0], as_they_come=as_they_come)
        if translates:
            return split_columns(one)
        return InputLines(one.name, _after_nothing(one.texts, one.count), one.count, one.sum)
    both = read_aligned(files)
    texts = list(zip(*(one.texts for one in both), strict=True))
    return InputLines(" ".join(files), texts, both[0].count, " ".join(one.sum or "" for one in both))


def _after_nothing(texts: Iterable[str], count: int | None) -> Iterable[tuple[str, str]]:
    made = (("", text) for text in texts)
    return made if count is None else list(made)
