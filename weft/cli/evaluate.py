"""`weft eval`: evaluate a trained model on held-out text."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro
from tyro.conf import arg

from ..core.extras import from_extra
from .argument_types import REGISTRY
from .generation import GenerationFlags, ModelFlags, check_beams, load_generator
from .input_lines import STDIN, read_aligned
from .progress import LineProgress
from .targets import UsageError

USAGE = """weft eval FOLDER [--step N] [--json] [--section.name VALUE ...]
       weft eval FOLDER --bleu SOURCES REFERENCES [REFERENCES ...] [--json] [flags of weft translate]"""

DESCRIPTION = """Evaluate a run of weft train: loss, perplexity and accuracy on its held-out data or other
data.

The settings are those of the run. Flags change them, as in weft train; the mesh and the layout do not change
the results.

  weft eval runs/lm
  weft eval runs/lm --step 400 --mesh data=4 --layout batch:data
  weft eval runs/books --data.valid other.txt --json

With --bleu, translate the lines of a file by beam search with 4 beams and compare the translations with one
or more reference files: exact matches, BLEU and chrF, with sacreBLEU's signatures. The data of the run are
not needed; the flags are those of weft translate (see weft translate --help).

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
    """Restore the model of a run, evaluate it, and print the metrics."""
    given = list(arguments)
    if {"-h", "--help"} & set(given):
        print(f"usage: {USAGE}\n\n{DESCRIPTION}")
        return
    if not given or given[0].startswith("-"):
        raise UsageError(f"weft eval: missing FOLDER\n\nusage: {USAGE}")
    folder, *flags = given
    as_json = "--json" in flags
    if "--bleu" in flags:
        _evaluate_bleu(folder, [flag for flag in flags if flag != "--json"], as_json)
        return
    from ..train import config_io, load
    from ..train.plain_json import plain_json

    step, flags = _pop_step([flag for flag in flags if flag != "--json"])
    config = config_io.apply_flags(load.load_config(folder), flags)
    run, step, model = load.restore_run(config, step)
    result = load.evaluate_run(run, model)
    numbers = {
        "step": step,
        "loss": result.loss,
        "perplexity": result.perplexity,
        "word_perplexity": result.word_perplexity,
        "accuracy": result.accuracy,
        "tokens": result.tokens,
        "words": result.words,
    }
    if as_json:
        print(plain_json(numbers))
        return
    words = "" if result.words is None else f", {result.words:,} words"
    print(f"step {step}: {result.tokens:,} tokens{words}", file=sys.stderr)
    print(f"loss                 {result.loss:.4f}")
    print(f"perplexity per token {result.perplexity:.4f}")
    if result.word_perplexity is not None:
        print(f"perplexity per word  {result.word_perplexity:.4f}")
    print(f"accuracy             {result.accuracy:.4f}")


@dataclass
class _TranslationFlags:
    """The flags of weft translate that weft eval --bleu accepts."""

    models: Annotated[ModelFlags, arg(name="")] = field(default_factory=ModelFlags)
    generation: Annotated[GenerationFlags, arg(name="")] = field(default_factory=GenerationFlags)


def _evaluate_bleu(folder: str, flags: list[str], as_json: bool) -> None:
    """Translate a file, compare the translations with references, and print the scores."""
    at = flags.index("--bleu") + 1
    files = list(itertools.takewhile(lambda word: word == STDIN or not word.startswith("-"), flags[at:]))
    if len(files) < 2:
        raise UsageError(
            f"--bleu {' '.join(files) or 'without files'}",
            rule="--bleu needs a file to translate and at least one file of references",
            hint="weft eval FOLDER --bleu SOURCES REFERENCES",
        )
    options = tyro.cli(
        _TranslationFlags,
        prog="weft eval FOLDER --bleu",
        args=flags[: at - 1] + flags[at + len(files) :],
        registry=REGISTRY,
    )
    with from_extra("train"):  # now, and not after a long translation
        import sacrebleu  # noqa: F401
    config = options.generation.to_config(translates=True)
    sources, *references = read_aligned(files)
    if not sources.count:
        raise UsageError(f"{sources.name} is empty", hint="give a file with one text per line")
    check_beams(folder, config)
    loaded = load_generator(folder, options.models, "encoder_decoder")
    from ..generate import corpus_scores
    from ..train.plain_json import plain_json

    with LineProgress(sources.count) as progress:
        translations = []
        for completion in loaded.generator.generate(sources.texts, config):
            translations.append(completion.text)
            progress.step()
    expected = [list(each) for each in zip(*(one.texts for one in references), strict=True)]
    scores = corpus_scores(translations, expected)
    bleu, chrf = scores.signatures
    if as_json:
        numbers = {
            "lines": len(translations),
            "exact": scores.exact,
            "bleu": scores.bleu,
            "chrf": scores.chrf,
        }
        signatures = {"bleu": bleu, "chrf": chrf}
        print(plain_json({"steps": loaded.provenance["steps"], **numbers, "signatures": signatures}))
        return
    print(f"exact {scores.exact:.4f}")
    print(f"BLEU  {scores.bleu:.2f}  {bleu}")
    print(f"chrF  {scores.chrf:.2f}  {chrf}")


def _pop_step(flags: list[str]) -> tuple[int | None, list[str]]:
    """The value of --step, and the other flags."""
    flags = [part for one in flags for part in (one.split("=", 1) if one.startswith("--step=") else [one])]
    if "--step" not in flags:
        return None, flags
    at = flags.index("--step")
    value = flags[at + 1] if at + 1 < len(flags) else ""
    if not (value.isascii() and value.isdigit()):
        raise UsageError(
            f"--step {value or 'without a number'}",
            rule="--step is the step of a saved checkpoint",
            hint="weft checkpoint list FOLDER/checkpoints lists them",
        )
    return int(value), flags[:at] + flags[at + 2 :]
