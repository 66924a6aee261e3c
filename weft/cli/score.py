"""`weft score`: the log-probabilities of given texts, line by line."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from . import resumable_output
from .generation import ModelFlags, load_generator, process_lines
from .input_lines import STDIN, InputLines, read_aligned, read_lines, split_columns
from .targets import UsageError


@dataclass
class ScoreCommand:
    """Compute the log-probability of each line under a trained model.

    For a translation model the texts are translations, in a separate file or in a second column:

        weft score runs/fr news.en news.fr
        weft score runs/fr pairs.tsv --json

    For a language model they are complete texts, or completions of prompts:

        weft score runs/lm texts.txt
        weft score runs/lm prompts.txt texts.txt

    The score includes the end of the text. The perplexity per token, over the lines of this call, is printed
    to stderr."""

    folder: Annotated[Positional[str], arg(metavar="FOLDER")]
    """The folder of a run, or a Hugging Face folder."""
    files: Annotated[Positional[tuple[str, ...]], arg(metavar="[FILE ...]", help_behavior_hint="")] = ()
    """SOURCES and TARGETS, or a file with two columns; for a language model TEXTS, or PROMPTS and TEXTS.
    - is stdin, which is also the default."""
    out: Annotated[Path | None, arg(metavar="OUT", aliases=["-o"], help_behavior_hint="")] = None
    """Write to this file instead of stdout; run the same command again to resume."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print one JSON object per line: score, tokens, and the log-probability of each token as `logs`."""
    models: Annotated[ModelFlags, arg(name="")] = field(default_factory=ModelFlags)

    def run(self) -> None:
        """Score each line."""
        from ..train import load
        from ..train.plain_json import plain_json

        files = self.files or (STDIN,)
        if len(files) > 2 or files.count(STDIN) > 1:
            raise UsageError(
                f"weft score got {len(files)} files: {' '.join(files)}",
                rule="give one file, or two with the same number of lines; only one may be - (stdin)",
                hint="weft score FOLDER SOURCES TARGETS",
            )
        resumable_output.check_resumable(self.out, files)
        translates = load.load_model_config(self.folder).kind == "encoder_decoder"
        lines = _read_pairs(files, translates, streamed=self.out is None)
        loaded = load_generator(self.folder, self.models, "encoder_decoder", "decoder")
        generator, total, tokens, skipped = loaded.generator, 0.0, 0, 0

        def score_lines(pairs: Iterable[tuple[str, str]], first: int) -> Iterator[str]:
            nonlocal total, tokens, skipped
            skipped = first
            targets: list[str] = []  # read ahead by the generator, and not scored yet

            def record_targets() -> Iterator[tuple[str, str]]:
                for pair in pairs:
                    targets.append(pair[1])
                    yield pair

            for logs in generator.score(record_targets(), first):
                score, target = sum(logs), targets.pop(0)
                total, tokens = total + score, tokens + len(logs)
                ids = [*generator.tokenizer.encode(target), generator.tokenizer.end]
                data = {"score": score, "tokens": ids, "logs": logs}
                yield plain_json(data) if self.json else f"{score:.6f}"

        provenance = {
            "command": "weft score",
            **loaded.provenance,
            "json": self.json,
            "files": len(files),
        }
        process_lines(lines, score_lines, self.out, provenance)
        if tokens:
            after = f" after line {skipped:,}" if skipped else ""
            print(
                f"{tokens:,} tokens{after}; perplexity per token {math.exp(min(-total / tokens, 700)):.4f}",
                file=sys.stderr,
            )


def _read_pairs(files: tuple[str, ...], translates: bool, streamed: bool) -> InputLines:
    """Read pairs of texts: the input, and the text to score."""
    if len(files) == 1:
        one = read_lines(files[0], streamed=streamed)
        if translates:
            return split_columns(one)
        return InputLines(one.name, _with_empty_prompt(one.texts, one.count), one.count, one.sum)
    both = read_aligned(files)
    texts = list(zip(*(one.texts for one in both), strict=True))
    return InputLines(" ".join(files), texts, both[0].count, " ".join(one.sum or "" for one in both))


def _with_empty_prompt(texts: Iterable[str], count: int | None) -> Iterable[tuple[str, str]]:
    pairs = (("", text) for text in texts)
    return pairs if count is None else list(pairs)
