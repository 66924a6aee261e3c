"""`weft eval`: how well a trained model does on texts that it has not learned from."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro
from tyro.conf import arg

from .argument_types import REGISTRY
from .generation import GenerationFlags, ModelFlags, check_beams, load_generator
from .input_lines import STDIN, read_aligned
from .progress import LineProgress
from .targets import UsageError

USAGE = """weft eval FOLDER [--step N] [--json] [--section.name VALUE ...]
       weft eval FOLDER --bleu SOURCES REFERENCES [REFERENCES ...] [--json] [flags of weft translate]"""

DESCRIPTION = """Evaluate a run of weft train: loss, perplexity and accuracy on its held-out data or others.

The settings are those that the run was started with; flags change them as those of weft train do: another
mesh and layout give the same numbers.

  weft eval runs/lm
  weft eval runs/lm --step 400 --mesh data=4 --layout batch:data
  weft eval runs/books --data.valid other.txt --json

With --bleu the lines of a file are translated, by a search with 4 beams, and compared with the references of
one file or several: exact matches, BLEU and chrF, with sacreBLEU's signatures. The data of the run are not
needed; the flags are those of weft translate (weft translate --help).

  weft eval runs/fr --bleu test.en test.fr
  weft eval runs/fr --bleu test.en test.fr test2.fr --beams 8 --average 5 --json"""


@dataclass
class EvalCommand:
    """Evaluate a trained model: loss, perplexity and accuracy on held-out data, or BLEU and chrF."""

    arguments: tyro.conf.Positional[tuple[str, ...]] = ()
    """The folder of a run, and flags."""

    def run(self) -> None:
        """Evaluate."""
        evaluate(self.arguments)


def evaluate(arguments: Sequence[str]) -> None:
    """Restore a run's model, score it, and print the score."""
    given = list(arguments)
    if {"-h", "--help"} & set(given):
        print(f"usage: {USAGE}\n\n{DESCRIPTION}")
        return
    if not given or given[0].startswith("-"):
        raise UsageError(f"weft eval was given no folder\n\nusage: {USAGE}")
    folder, *flags = given
    as_json = "--json" in flags
    if "--bleu" in flags:
        _bleu(folder, [flag for flag in flags if flag != "--json"], as_json)
        return
    from ..train import config_io, load
    from ..train.plain_json import plain_json

    step, flags = _step([flag for flag in flags if flag != "--json"])
    config = config_io.apply_flags(load.load_config(folder), flags)
    run, step, model = load.restore_run(config, step)
    found = load.evaluate_run(run, model)
    numbers = {
        "step": step,
        "loss": found.loss,
        "perplexity": found.perplexity,
        "word_perplexity": found.word_perplexity,
        "accuracy": found.accuracy,
        "tokens": found.tokens,
        "words": found.words,
    }
    if as_json:
        print(plain_json(numbers))
        return
    words = "" if found.words is None else f", {found.words:,} words"
    print(f"step {step}: {found.tokens:,} tokens{words}", file=sys.stderr)
    print(f"loss                 {found.loss:.4f}")
    print(f"perplexity per token {found.perplexity:.4f}")
    if found.word_perplexity is not None:
        print(f"perplexity per word  {found.word_perplexity:.4f}")
    print(f"accuracy             {found.accuracy:.4f}")


@dataclass
class _Translated:
    """How a file is translated to be compared with references."""

    models: Annotated[ModelFlags, arg(name="")] = field(default_factory=ModelFlags)
    how: Annotated[GenerationFlags, arg(name="")] = field(default_factory=GenerationFlags)


def _bleu(folder: str, flags: list[str], as_json: bool) -> None:
    """Translate a file, compare it with references, and print the scores."""
    at = flags.index("--bleu") + 1
    files = list(itertools.takewhile(lambda word: word == STDIN or not word.startswith("-"), flags[at:]))
    if len(files) < 2:
        raise UsageError(
            f"--bleu {' '.join(files) or 'without files'}",
            rule="a file is translated, and compared with others",
            hint="weft eval FOLDER --bleu SOURCES REFERENCES",
        )
    asked = tyro.cli(
        _Translated,
        prog="weft eval FOLDER --bleu",
        args=flags[: at - 1] + flags[at + len(files) :],
        registry=REGISTRY,
    )
    how = asked.how.ask(translates=True)
    sources, *references = read_aligned(files)
    if not sources.count:
        raise UsageError(f"{sources.name} has no lines", hint="texts are in a file, one to a line")
    check_beams(folder, how)
    found = load_generator(folder, asked.models, "encoder_decoder")
    from ..generate import corpus_scores
    from ..train.plain_json import plain_json

    with LineProgress(sources.count) as progress:
        said = []
        for one in found.speaker.generate(sources.texts, how):
            said.append(one.text)
            progress.step()
    right = [list(each) for each in zip(*(one.texts for one in references), strict=True)]
    scores = corpus_scores(said, right)
    bleu, chrf = scores.signatures
    if as_json:
        numbers = {"lines": len(said), "exact": scores.exact, "bleu": scores.bleu, "chrf": scores.chrf}
        signatures = {"bleu": bleu, "chrf": chrf}
        print(plain_json({"steps": found.made_of["steps"], **numbers, "signatures": signatures}))
        return
    print(f"exact {scores.exact:.4f}")
    print(f"BLEU  {scores.bleu:.2f}  {bleu}")
    print(f"chrF  {scores.chrf:.2f}  {chrf}")


def _step(flags: list[str]) -> tuple[int | None, list[str]]:
    flags = [part for one in flags for part in (one.split("=", 1) if one.startswith("--step=") else [one])]
    if "--step" not in flags:
        return None, flags
    at = flags.index("--step")
    value = flags[at + 1] if at + 1 < len(flags) else ""
    if not (value.isascii() and value.isdigit()):
        raise UsageError(
            f"--step {value or 'without a number'}",
            rule="it is the number of a step that was saved",
            hint="weft checkpoint list FOLDER/checkpoints shows them",
        )
    return int(value), flags[:at] + flags[at + 2 :]
